"""Files beneath a checkpoint's directory, by names from its metadata, and so from anybody.

csrc/os/beneath.h has the rules.
"""

from __future__ import annotations

from torch_ckpt import _core
from torch_ckpt.errors import Unsafe

#: Linux's own limit for paths.
MOST_PATH_BYTES = 4096


def lies_beneath(file: object) -> bool:
    """Whether it names a file in the checkpoint's directory, and none other that we may open."""
    try:
        return (
            isinstance(file, str)
            and len(file.encode()) <= MOST_PATH_BYTES
            and _core.names_file_beneath(file)
        )
    except UnicodeEncodeError:
        return False


def outside(name: str, file: object) -> Unsafe:
    """The error for data that does not lie beneath the directory."""
    shown = repr(file)
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    return Unsafe(
        f"{name}: the metadata places its data in {shown}, which is not a file in the "
        "checkpoint's directory"
    )
