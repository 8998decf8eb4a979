"""Local paths and URLs."""

from __future__ import annotations

import os
import re
from pathlib import Path

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")


def is_url(path: object) -> bool:
    """Returns True for a string that begins with ``scheme://``. Path objects are always local."""
    return isinstance(path, str) and _URL.match(path) is not None


def local_path(path: str | os.PathLike[str]) -> str | None:
    """Returns a local path, also for a URL that begins with ``file://`` or ``local://``. Returns
    None for any other URL."""
    text = os.fspath(path)
    scheme, separator, rest = text.partition("://")
    if separator and scheme in ("file", "local"):
        return rest
    return None if is_url(text) else text


def refuse_url(path: object) -> None:
    """Raises ValueError if ``path`` is a URL, which pathlib would treat as a relative path."""
    if is_url(path):
        raise ValueError(
            f"{path} is a URL, and a local path is needed here. CheckpointManager and "
            "torch_ckpt.save, async_save and load accept URLs (see docs/remote.md)."
        )


def absolute(path: str | os.PathLike[str]) -> Path:
    """Makes a path absolute. Keeps symbolic links and ``..`` for the kernel to resolve."""
    return Path(path).absolute()
