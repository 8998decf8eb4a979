"""Computes the time between the saves of a run from the measured cost of the saves."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AutoInterval:
    """The interval between saves that loses the least training time; see
    :class:`MeasuredInterval`.

    Args:
        max_overhead: upper limit of the cost of saves, as a fraction of the training time.
        mtbf_hours: mean time between failures that end the run, in hours.

    Raises:
        ValueError: ``max_overhead`` is not between 0 and 1, or ``mtbf_hours`` is not positive.

    Example::

        interval = torch_ckpt.manager.AutoInterval(max_overhead=0.02, mtbf_hours=6)
        manager = torch_ckpt.CheckpointManager("checkpoints", interval=interval)
    """

    max_overhead: float = 0.01
    mtbf_hours: float = 24.0

    def __post_init__(self) -> None:
        if not 0 < self.max_overhead < 1:
            raise ValueError(f"max_overhead must be between 0 and 1, got {self.max_overhead}")
        if not self.mtbf_hours > 0:
            raise ValueError(
                "mtbf_hours, the mean time between failures, must be positive, got "
                f"{self.mtbf_hours:g}"
            )


class MeasuredInterval:
    """Computes, from measured costs, the time between saves that loses the least training time.

    The interval is ``sqrt(2 C M)`` for a save's cost C and a mean time between failures M (J. W.
    Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", 2006). It is never
    shorter than ``max_overhead`` allows, and never shorter than the duration of a background save.

    C is the training time that a save costs: the time that it blocks training, plus the slowdown of
    the steps during the save. The interval uses the median of the last six saves. The first save
    also allocates memory, so it counts only until the second save has ended.

    Args:
        options: the limit of the cost, and the mean time between failures.

    Example::

        interval = MeasuredInterval(AutoInterval(max_overhead=0.01, mtbf_hours=24))
        interval.saved(blocked_seconds=0.5, background_seconds=30)
        print(interval.seconds)  # until the next save
    """

    def __init__(self, options: AutoInterval) -> None:
        self._max_overhead = options.max_overhead
        self._mtbf = options.mtbf_hours * 3600
        self._usual: deque[float] = deque(maxlen=100)
        self._slow: list[float] = []
        self._costs: deque[float] = deque(maxlen=6)
        self._first_cost: float | None = None
        self._background = 0.0
        self._retry_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time in seconds between the starts of two saves. It is 0 before the first save, which
        measures the cost."""
        costs = self._costs or ([self._first_cost] if self._first_cost is not None else [])
        if not costs:
            return self._retry_seconds
        cost = statistics.median(costs)
        young = math.sqrt(2 * cost * self._mtbf)
        return max(young, cost / self._max_overhead, self._background, self._retry_seconds)

    def stepped(self, seconds: float, is_saving: bool) -> None:
        """Records the duration of a training step.

        Args:
            seconds: duration of the step.
            is_saving: True if a save was running during the step.
        """
        (self._slow if is_saving else self._usual).append(seconds)

    def failed(self) -> None:
        """Records that a save has failed. The cost of the save is unknown, so the interval becomes
        at least 10 s. This minimum doubles with each further failure, up to 600 s."""
        self._slow.clear()
        self._retry_seconds = min(600.0, max(10.0, 2 * self._retry_seconds))

    def saved(self, blocked_seconds: float, background_seconds: float) -> None:
        """Records that a save has succeeded.

        Args:
            blocked_seconds: time that the save blocked training.
            background_seconds: time from the start of the save until the step was complete.
        """
        slower = 0.0
        if self._usual:
            usual = statistics.median(self._usual)
            # Use the median: one slow step, such as an evaluation, is not a cost of the save.
            slow = statistics.median(self._slow) if self._slow else 0.0
            slower = max(0.0, slow - usual) * len(self._slow)
        self._slow.clear()
        self._retry_seconds = 0.0
        cost = blocked_seconds + slower
        self._background = background_seconds
        if self._first_cost is None:
            self._first_cost = cost
        else:
            self._costs.append(cost)
