"""Names in the root directory of a run: step directories, and marker files in them."""

from __future__ import annotations

import operator
import re

from torch_ckpt import _core

LARGEST_STEP = 10**10 - 1

#: Name of a step directory.
STEP_NAME = re.compile(r"^(\d{10})$", re.ASCII)

#: A step is complete if its directory contains this file.
MARKER_NAME = _core.MARKER_NAME

#: Retention keeps a step if its directory contains this file.
PINNED_NAME = _core.PINNED_NAME

#: A step beneath a URL is being deleted if it has an object of this name.
DELETED_NAME = "deleted"

#: Object beneath the URL of a root that contains the name of the step that was saved last.
LAST_SAVED_NAME = ".last_saved"


def step_name(step: int) -> str:
    """Returns the name of a step's directory: the step number, padded to ten digits.

    Raises:
        TypeError: ``step`` is not an integer.
        ValueError: ``step`` is negative or has more than ten digits.
    """
    try:
        number = operator.index(step)
    except TypeError:
        # The repr of a state dict would fill pages.
        got = repr(step) if isinstance(step, (str, float, type(None))) else type(step).__name__
        raise TypeError(f"step must be an int, got {got}") from None
    if not 0 <= number <= LARGEST_STEP:
        raise ValueError(f"step must be between 0 and {LARGEST_STEP}, got {number}")
    return f"{number:010d}"
