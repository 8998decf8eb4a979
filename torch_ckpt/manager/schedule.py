"""Decides at which steps a checkpoint manager saves. All ranks come to the same decisions.

If a decision depends only on the step, each rank makes it independently. If it depends on time or
on whether a save is running, rank 0 makes it for all ranks:

1. Steps are grouped into blocks of about half a second. There is one decision per block, and a save
   may start only at the first step of a block.
2. At the first step of a block, rank 0 decides. It writes that step, the length of the block and
   the decision to the process group's store.
3. The other ranks read the decision from the store at the first step of the block. A rank that is
   ahead of rank 0 waits for the decision. Within a block, no rank accesses the store.
4. If a rank's step differs from the step in the decision, the rank raises an error, because the
   ranks would save different steps.
5. Once a save is committed, all ranks have read its decision and all earlier ones. Rank 0 then
   deletes these decisions from the store.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from datetime import timedelta
from typing import SupportsIndex, TypeVar

from torch_ckpt.errors import CheckpointError
from torch_ckpt.intervals import AutoInterval, MeasuredInterval
from torch_ckpt.manager.policies import Interval, SaveOptions
from torch_ckpt.ranks.failures import failed_on, heartbeat_failures
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.store import peek

T = TypeVar("T")

_BLOCK_SECONDS = 0.5
_EXCHANGE = "save decision"


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
        decisions: the decisions of rank 0.
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
        self.decisions = StepDecisions(group, timeout, clock)
        self._last_start = clock()

    def should_save(self, step: int, is_busy: Callable[[], bool]) -> bool:
        """True if this step is to be saved. All ranks must call this method once per step.

        Raises:
            CheckpointError: rank 0 is at a different step.
            CheckpointException: the store is unreachable, or rank 0 did not decide within the
                timeout.
        """
        if self._min_seconds is None and not self._skip_if_busy:
            return self._accepts_step(step) or step in self._steps
        if self._min_seconds is None:
            # All ranks accept the same steps, but only rank 0's is_busy() counts.
            if not self._accepts_step(step):
                return step in self._steps
            due = self.decisions.next(step, lambda: not is_busy(), blocks=False)
        else:
            due = self.decisions.next(step, lambda: self._is_due(is_busy), blocks=True)
        return due or step in self._steps

    def save_started(self) -> None:
        """Records that a save starts now."""
        self._last_start = self._clock()

    def _is_due(self, is_busy: Callable[[], bool]) -> bool:
        assert self._min_seconds is not None
        # While the first save is running, the cost of a save is not known yet.
        if (self._skip_if_busy or self.auto is not None) and is_busy():
            return False
        return self._clock() - self._last_start >= self._min_seconds()


class StepDecisions:
    """Rank 0's decisions, in the order in which every rank reads them.

    Attributes:
        count: number of decisions so far.
    """

    def __init__(self, group: RankGroup, timeout: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.count = 0
        self._group = group
        self._timeout = timeout
        self._block = range(0)
        self._deleted_count = 0
        self._last: tuple[int, float] | None = None

    def next(self, step: int, decide: Callable[[], bool], *, blocks: bool) -> bool:
        """Returns the decision for a step. It is False for every step of a block except the first.

        Args:
            decide: called on rank 0 only.
            blocks: True if a decision covers a block of steps, False if it covers this step only.
        """
        # If training was rewound, the step is before the block and starts a new one.
        if blocks and step in self._block:
            return False
        if self._group.rank == 0:
            saves = decide()
            length = self._block_length(step) if blocks else 1
            if self._group.distributed:
                self._call_store(
                    lambda: self._group.keys("").set(
                        str(self.count), f"{step}:{length}:{int(saves)}"
                    )
                )
        else:
            step_of_rank_0, length, flag = map(int, self._read().split(b":"))
            saves = bool(flag)
            if step_of_rank_0 != step:
                raise CheckpointError(
                    f"rank {self._group.rank} is at step {step}, but rank 0 is at step "
                    f"{step_of_rank_0}: all ranks must call save() with the same steps"
                )
        self.count += 1
        self._block = range(step, step + length)
        return saves

    def delete(self, count: int) -> None:
        """Deletes the first ``count`` decisions from the store. Call it on rank 0, after all ranks
        have read them."""
        if not self._group.distributed:
            return
        store = self._group.keys("")
        for number in range(self._deleted_count, count):
            self._call_store(lambda key=str(number): store.delete_key(key))  # type: ignore[misc]
        self._deleted_count = max(self._deleted_count, count)

    def _block_length(self, step: int) -> int:
        now = self._clock()
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            return 1
        per_step = max(1e-9, (now - last[1]) / (step - last[0]))
        # Cap the block at twice the number of steps since the last decision, because those steps
        # may have been unusually fast.
        return max(1, min(int(_BLOCK_SECONDS / per_step), 2 * (step - last[0])))

    def _read(self) -> bytes:
        key = str(self.count)
        store = self._group.keys("")
        started = time.monotonic()
        # Poll: a blocking wait would occupy the connection, which the running save needs, too.
        while (data := self._call_store(lambda: peek(store, key))) is None:
            waited = time.monotonic() - started
            if waited >= self._timeout:
                raise failed_on(_EXCHANGE, heartbeat_failures(_EXCHANGE, [0], self._timeout))
            time.sleep(min(0.01, max(0.0002, waited / 10)))
        return data

    def _call_store(self, function: Callable[[], T]) -> T:
        return self._group.store_thread.request(
            _EXCHANGE, self._group.rank, self._timeout, function
        )
