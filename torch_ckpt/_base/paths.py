"""Local paths and URLs. Only the roots of runs may be URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")


def is_url(path: object) -> bool:
    """True for a string that begins with ``scheme://``. Path objects are local."""
    return isinstance(path, str) and _URL.match(path) is not None


def refuse_url(path: object) -> None:
    """Refuses URLs, which pathlib would treat as relative paths.

    Raises:
        ValueError: ``path`` is a URL.
    """
    if is_url(path):
        raise ValueError(
            f"{path} is a URL, but a checkpoint's directory must be a local path. Pass URLs to "
            "CheckpointManager or torch_ckpt.training, as the root of a run (docs/remote.md)."
        )


def absolute(path: str | os.PathLike[str]) -> Path:
    """Makes a path absolute. Keeps symbolic links and ``..``, which the kernel resolves."""
    return Path(path).absolute()
