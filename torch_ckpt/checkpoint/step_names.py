"""Names in the root directory of a run: the steps' directories and the marker files in them."""

from __future__ import annotations

import operator
import re

LARGEST_STEP = 10**10 - 1

#: Name of a step's directory.
STEP_NAME = re.compile(r"^(\d{10})$", re.ASCII)

#: A step is complete if this file is in it.
MARKER_NAME = "write_completed"

#: Retention keeps a step that has this file.
PINNED_NAME = "pinned"


def step_name(step: int) -> str:
    """Returns the name of a step's directory: its number with ten digits.

    Raises:
        TypeError: ``step`` is not an integer.
        ValueError: it is negative or has more than ten digits.
    """
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"a step must be an int, got {step!r}") from None
    if not 0 <= number <= LARGEST_STEP:
        raise ValueError(f"a step must be from 0 to {LARGEST_STEP}, got {number}")
    return f"{number:010d}"
