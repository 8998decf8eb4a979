"""Checks of file names from metadata, which may come from an untrusted writer.

csrc/os/beneath.h has the rules.
"""

from __future__ import annotations

from torch_ckpt import _core
from torch_ckpt.errors import Unsafe

#: Longest path in bytes that Linux accepts.
MOST_PATH_BYTES = 4096


def lies_beneath(file: object) -> bool:
    """Returns True if a file of this name in the checkpoint's directory may be opened."""
    try:
        return (
            isinstance(file, str)
            and len(file.encode()) <= MOST_PATH_BYTES
            and _core.names_file_beneath(file)
        )
    except UnicodeEncodeError:
        return False


def outside(name: str, file: object) -> Unsafe:
    """Builds the error for data outside of the checkpoint's directory."""
    shown = repr(file)
    if len(shown) > 200:
        shown = f"{shown[:200]}..."
    return Unsafe(
        f"{name}: the metadata places its data in {shown}, which is not a file in the "
        "checkpoint's directory"
    )
