"""The steps of a run beneath one root: a local directory, or a URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch_ckpt._base.system import local_path
from torch_ckpt.checkpoint.marker import (
    LARGEST_STEP,
    MARKER_NAME,
    encoded_marker,
    parsed_marker,
    step_name,
)
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.step_store import StepInfo, StepStore

__all__ = [
    "LARGEST_STEP",
    "MARKER_NAME",
    "LocalSteps",
    "StepInfo",
    "StepStore",
    "encoded_marker",
    "open_steps",
    "parsed_marker",
    "step_name",
]


def open_steps(
    root: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> StepStore:
    """Opens the steps beneath a root, without a request.

    Args:
        root: a local directory or a URL (docs/remote.md).
        storage_options: see :class:`torch_ckpt.WriteOptions`. Ignored for a local directory.

    Raises:
        ImportError: the protocol of the URL needs a package that is not installed; the message
            names the package.
        ValueError: the URL, its protocol or a storage option is not allowed.

    Example::

        steps = open_steps("s3://bucket/run")
        print([info.step for info in steps.entries(leftovers=False)])
    """
    directory = local_path(root)
    if directory is not None:
        return LocalSteps(directory)
    from torch_ckpt.steps.object_steps import ObjectSteps

    return ObjectSteps(os.fspath(root), storage_options)
