"""What is a checkpoint's directory, and what is a URL, beneath which only steps of a run may be."""

from __future__ import annotations

import re

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
