"""Names of step directories, and the size of their files."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

from torch_ckpt.checkpoint.directory import OpenDirectory


def name_for_deletion(name: str) -> str:
    """Returns a new name for the directory of a step that is being deleted or was replaced."""
    return f"{name[:10]}.deleted-{uuid.uuid4().hex[:8]}"


def is_named(opened: OpenDirectory, root: OpenDirectory, name: str) -> bool:
    """True if an open directory has this name beneath a root."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=root.fd), os.fstat(opened.fd))
    except FileNotFoundError:
        return False


def bytes_in(directory: str | int) -> int:
    """Returns the total size of the files in a checkpoint's directory.

    Args:
        directory: path or descriptor of the directory.
    """
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
