"""Times of actions, for the measurements of ``torch-ckpt doctor``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

_REPETITIONS = 20


def seconds_of(action: Callable[[], object]) -> float:
    """Returns the time of an action, in seconds."""
    started_at = time.perf_counter()
    action()
    return time.perf_counter() - started_at


def median_ms_of(action: Callable[[], object]) -> float:
    """Returns the median time of an action that is repeated, in milliseconds."""
    return 1000 * statistics.median(seconds_of(action) for _ in range(_REPETITIONS))
