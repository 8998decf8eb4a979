"""Checks that a file system has enough free space for files to be written."""

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
    """Checks that this user may write so many bytes to a directory.

    Args:
        wanted: number of bytes.
        need: start of the message: what needs how many bytes.
        remedy: end of the message: what to do.
        make_room: called if there is too little space; then the space is checked again.

    Raises:
        OSError: ``ENOSPC``, with the free bytes; or the free space cannot be queried.
    """
    free = free_bytes(directory)
    if free is not None and free < wanted and make_room is not None:
        make_room()
        free = free_bytes(directory)
    if free is not None and free < wanted:
        raise OSError(ENOSPC, f"{need}, but only {size(free)} are free: {remedy}", directory)


def free_bytes(directory: str) -> int | None:
    """Returns the bytes that this user may write; None if the file system does not report them.

    Some FUSE file systems do not. Then a full disk is noticed only by writing.

    Raises:
        OSError: the free space cannot be queried.
    """
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None
