"""Whether a file system has room for what is about to be written."""

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
    """Refuses what takes more bytes than this user may write to a directory.

    Args:
        wanted: bytes.
        need: what takes them, and how many: the begin of the message.
        remedy: what to do: the end of the message.
        make_room: called where there is too little, before it is refused.

    Raises:
        OSError: ``ENOSPC``, with what is free; or the file system cannot be asked.
    """
    free = free_bytes(directory)
    if free is not None and free < wanted and make_room is not None:
        make_room()
        free = free_bytes(directory)
    if free is not None and free < wanted:
        raise OSError(ENOSPC, f"{need}, and {size(free)} are free: {remedy}", directory)


def free_bytes(directory: str) -> int | None:
    """What this user may write there; None where the file system does not say.

    Some in user space do not: then the writing tells.

    Raises:
        OSError: the file system cannot be asked.
    """
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None
