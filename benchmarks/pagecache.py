"""Reads files into the page cache or evicts them, and verifies the result by mincore(2)."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_READ_BYTES = 4 << 20


class CacheStateError(RuntimeError):
    """The page cache could not be brought into the state that a measurement needs."""


def _resident_pages(path: Path) -> tuple[int, int]:
    """Returns (pages in the cache, all pages) of one file, by mincore(2)."""
    size = path.stat().st_size
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    residency = (ctypes.c_ubyte * pages)()
    # ACCESS_COPY, because ctypes refuses the address of a read-only buffer. No page is touched, so
    # none is faulted in.
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapping,
    ):
        anchor = ctypes.c_char.from_buffer(mapping)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        failed = _libc.mincore(address, ctypes.c_size_t(size), residency) != 0
        error = ctypes.get_errno()
        # The mapping cannot be closed while its buffer is in use.
        del anchor
    if failed:
        raise OSError(error, os.strerror(error), str(path))
    return sum(flags & 1 for flags in residency), pages


def resident_fraction(files: Sequence[Path]) -> float:
    """Returns the fraction of the files' pages in the page cache, 0 to 1; 1 for empty files."""
    counts = [_resident_pages(path) for path in files]
    total = sum(pages for _, pages in counts)
    return sum(resident for resident, _ in counts) / total if total else 1.0


def warm(files: Sequence[Path]) -> None:
    """Reads the files once, so that the next reads find them in memory."""
    buffer = bytearray(_READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    fraction = resident_fraction(files)
    if fraction < 0.99:
        raise CacheStateError(f"only {fraction:.0%} of the files' pages are in the page cache")


def evict(files: Sequence[Path]) -> None:
    """Evicts the files from this machine's page cache; the host of a virtual disk may keep them."""
    fraction = 1.0
    # One call does not evict a page that was just written or is in use.
    for _ in range(3):
        os.sync()
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        fraction = resident_fraction(files)
        if fraction <= 0.01:
            return
    raise CacheStateError(f"{fraction:.0%} of the files' pages remain in the page cache")
