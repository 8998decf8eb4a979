"""The steps of a run beneath one root: a local directory, or a URL."""

from __future__ import annotations

import os

from torch_ckpt.checkpoint.marker import MOST_MARKER_BYTES, encoded_marker, parsed_marker
from torch_ckpt.checkpoint.step_names import (
    LARGEST_STEP,
    MARKER_NAME,
    PINNED_NAME,
    STEP_NAME,
    step_name,
)
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.step_store import StepInfo, StepStore

__all__ = [
    "LARGEST_STEP",
    "MARKER_NAME",
    "MOST_MARKER_BYTES",
    "PINNED_NAME",
    "STEP_NAME",
    "LocalSteps",
    "StepInfo",
    "StepStore",
    "encoded_marker",
    "open_steps",
    "parsed_marker",
    "step_name",
]


def open_steps(
    root: str | os.PathLike[str], *, staging_dir: str | os.PathLike[str] | None = None
) -> StepStore:
    """Opens the steps beneath a root.

    Args:
        root: a local directory, or a URL that fsspec supports.
        staging_dir: local directory for files in transit to or from a remote root; None uses the
            system's temporary directory.

    Raises:
        ImportError: the file system of the URL needs a package that is not installed; the message
            names the package.
        ValueError: ``staging_dir`` is given for a local root, or fsspec does not support the URL's
            protocol.

    Example::

        steps = open_steps("s3://bucket/run")
        print([info.step for info in steps.entries(leftovers=False)])
    """
    path = os.fspath(root)
    scheme, separator, rest = path.partition("://")
    if separator and scheme not in ("file", "local"):
        from torch_ckpt.steps.remote import RemoteSteps

        remote: StepStore = RemoteSteps(path, staging_dir)
        return remote
    if staging_dir is not None:
        raise ValueError(f"staging_dir is for remote roots, but {path} is local. Omit staging_dir.")
    return LocalSteps(rest if separator else path)
