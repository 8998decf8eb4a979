"""Checks that a file system has enough free space."""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import ENOSPC

from torch_ckpt._base.formatting import size


def require_room(
    directory: str,
    wanted: int,
    need: str,
    remedy: str,
    make_room: Callable[[], None] | None = None,
) -> None:
    """Checks that this user may write ``wanted`` bytes to a directory.

    Args:
        wanted: number of bytes.
        need: start of the error message: what needs how many bytes.
        remedy: end of the error message: what to do.
        make_room: called if there is too little space. Then the space is checked again.

    Raises:
        OSError: there is too little space (``ENOSPC``), or the free space cannot be queried.
    """
    free = free_bytes(directory)
    if free is not None and free < wanted and make_room is not None:
        make_room()
        free = free_bytes(directory)
    if free is not None and free < wanted:
        raise OSError(ENOSPC, f"{need}, but only {size(free)} are free: {remedy}", directory)


def free_bytes(directory: str) -> int | None:
    """Returns the number of bytes that this user may write, or None if the file system does not
    report it, like some FUSE file systems. Then only a failed write reveals that the disk is full.

    Raises:
        OSError: the free space cannot be queried.
    """
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None
