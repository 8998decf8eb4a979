"""Which paths are local directories, and what they are from any working directory.

URLs are for the roots of runs alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")


def is_url(path: object) -> bool:
    """Whether it is a text that begins as ``scheme://``. Other kinds of paths are local."""
    return isinstance(path, str) and _URL.match(path) is not None


def refuse_url(path: object) -> None:
    """Refuses what pathlib would take for a directory beneath the current one.

    Raises:
        ValueError: it is a URL.
    """
    if is_url(path):
        raise ValueError(
            f"{path} is a URL, and a checkpoint's directory is a local path, without a protocol: "
            "URLs are for the roots of CheckpointManager and of torch_ckpt.training "
            "(docs/remote.md)"
        )


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same path for any working directory. Links and ``..`` in it stay, for the kernel."""
    return Path(path).absolute()
