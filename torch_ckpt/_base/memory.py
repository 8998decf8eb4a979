"""Memory for reads and writes of files."""

from __future__ import annotations

import mmap


def memory_for_io(count: int) -> memoryview:
    """Returns ``count`` bytes, which are zero, at the beginning of a page. Direct I/O needs memory
    that begins there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return memoryview(mmap.mmap(-1, max(count, 1), flags=flags))[:count]
