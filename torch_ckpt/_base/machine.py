"""Identifies the machine."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """Returns the kernel's identifier of this boot, which all containers of a machine share; "" if
    it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
