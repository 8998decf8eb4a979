"""Decides at which steps a checkpoint manager saves. All ranks come to the same decisions.

If a decision depends only on the step, each rank makes it independently. If it depends on time or
on whether a save is running, rank 0 makes it for all ranks (ranks/step_agreement.py).
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, SupportsIndex

from torch_ckpt.intervals import AutoInterval, MeasuredInterval
from torch_ckpt.manager.policies import Interval, SaveOptions
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.step_agreement import StepAgreement

# Letters of rank 0's decisions.
_DUE, _IDLE = "d", "i"


class Decision(NamedTuple):
    """The decision for a step.

    Attributes:
        saves: a save is due.
        is_idle: rank 0 runs no save; False if the caller did not ask, if a save starts at this step
            anyway, or if nothing starts at this step.
    """

    saves: bool
    is_idle: bool = False


class Schedule:
    """Decides at which steps to save. All ranks come to the same decisions.

    Args:
        interval: see :class:`torch_ckpt.CheckpointManager`.
        saves: the steps to save regardless of the interval, and what to do during another save.
        group: the ranks; used by this schedule only.
        timeout: seconds to wait for rank 0's decision.
        clock: returns seconds; None means :func:`time.monotonic`.

    Attributes:
        auto: computes the interval if it depends on the cost of saves; otherwise None.
        agreement: the decisions of rank 0.
    """

    def __init__(
        self,
        interval: Interval,
        saves: SaveOptions,
        group: RankGroup,
        timeout: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.auto: MeasuredInterval | None = None
        self._min_seconds: Callable[[], float] | None = None
        self._accepts_step: Callable[[int], bool] = lambda _step: True
        if interval == "auto":
            interval = AutoInterval()
        if isinstance(interval, AutoInterval):
            auto = self.auto = MeasuredInterval(interval)
            self._min_seconds = lambda: auto.seconds
        elif callable(interval) and not isinstance(interval, type):
            self._accepts_step = interval
        elif isinstance(interval, timedelta):
            seconds = interval.total_seconds()
            if seconds <= 0:
                raise ValueError(f"interval must be positive, got {interval}")
            self._min_seconds = lambda: seconds
        elif isinstance(interval, SupportsIndex) and not isinstance(interval, bool):
            every = operator.index(interval)
            if every < 1:
                raise ValueError(f"interval must be positive, got {every}")
            self._accepts_step = lambda step: step % every == 0
        else:
            raise ValueError(
                "interval must be a positive number of steps, a timedelta, 'auto', an AutoInterval "
                f"or a function of the step, got {interval!r}"
            )
        self._steps = saves.save_on_steps
        self._skip_if_busy = saves.if_busy == "skip"
        self._clock = clock = clock or time.monotonic
        self.agreement = StepAgreement("save decision", group, timeout, clock)
        self._last_start = clock()

    def decide(self, step: int, is_busy: Callable[[], bool], asks_idle: bool = False) -> Decision:
        """Decides for a step. All ranks must call this method once per step.

        Args:
            is_busy: returns True while a save is running.
            asks_idle: find out whether rank 0 runs no save; the same on all ranks.

        Raises:
            CheckpointError: rank 0 is at a different step.
            CheckpointException: the store is unreachable, or rank 0 did not decide within the
                timeout.
        """
        accepts = self._accepts_step(step)
        is_timed = self._min_seconds is not None
        # All ranks accept the same steps, but only rank 0's is_busy() counts.
        skips = not is_timed and self._skip_if_busy and accepts
        # If a save starts anyway, do not ask: the decision would begin a block, within which no
        # export starts.
        asks_idle = asks_idle and not ((accepts and not is_timed) or step in self._steps)
        if not (is_timed or skips or asks_idle):
            return Decision(accepts or step in self._steps)

        def decide() -> str:
            due = self._is_due(is_busy) if is_timed else not is_busy()
            return _DUE * due + _IDLE * (asks_idle and not is_busy())

        decided = self.agreement.next(step, decide, ends_block=skips)
        is_due = _DUE in decided if is_timed or skips else accepts
        return Decision(is_due or step in self._steps, _IDLE in decided)

    def save_started(self) -> None:
        """Records that a save starts now."""
        self._last_start = self._clock()

    def _is_due(self, is_busy: Callable[[], bool]) -> bool:
        assert self._min_seconds is not None
        # While the first save is running, the cost of a save is not known yet.
        if (self._skip_if_busy or self.auto is not None) and is_busy():
            return False
        return self._clock() - self._last_start >= self._min_seconds()
