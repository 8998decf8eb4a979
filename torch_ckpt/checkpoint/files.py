"""Checks file names in metadata, which are not trusted. csrc/os/beneath.h has the rules."""

from __future__ import annotations

from torch_ckpt import _core
from torch_ckpt.errors import Unsafe

#: Maximum length in bytes of a path in Linux.
MOST_PATH_BYTES = 4096


def is_inside_checkpoint(file: object) -> bool:
    """Returns True if the name stays beneath the checkpoint directory."""
    try:
        return (
            isinstance(file, str)
            and len(file.encode()) <= MOST_PATH_BYTES
            and _core.names_file_beneath(file)
        )
    except UnicodeEncodeError:
        return False


def outside_error(name: str, file: object) -> Unsafe:
    """Builds the error for data outside the checkpoint directory."""
    shown = repr(file)
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    return Unsafe(
        f"{name}: the metadata refers to {shown}, which is not a path inside the checkpoint's "
        "directory"
    )
