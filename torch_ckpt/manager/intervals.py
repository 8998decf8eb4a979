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

import math
import operator
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Literal, SupportsIndex, TypeVar

from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.failures import failed_on
from torch_ckpt.ranks.meeting import Meeting
from torch_ckpt.ranks.outcomes import heartbeat_failures
from torch_ckpt.ranks.store_thread import peek

#: Number of steps between saves; time between saves; "auto"; or a function of the step, which must
#: return the same result on all ranks.
Interval = int | timedelta | Literal["auto"] | Callable[[int], bool]

T = TypeVar("T")

_BLOCK_SECONDS = 0.5
_EXCHANGE = "save decision"


class AutoInterval:
    """Computes, from measured costs, the time between saves that loses the least training time.

    The interval is ``sqrt(2 C M)`` for a save's cost C and a mean time between failures M (J. W.
    Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", 2006). It is never
    shorter than ``max_overhead`` allows, and never shorter than the duration of a background save.

    C is the training time that a save costs: the time that it blocks training, plus the slowdown of
    the steps during the save. The interval uses the median of the last six saves. The first save
    also allocates memory, so it counts only until the second save has ended.

    Args:
        max_overhead: upper limit of the cost of saves, as a fraction of the training time.
        mtbf_seconds: mean time between failures that end the run, in seconds.

    Raises:
        ValueError: ``max_overhead`` is not between 0 and 1, or ``mtbf_seconds`` is not positive.

    Example::

        interval = AutoInterval(max_overhead=0.01, mtbf_seconds=24 * 3600)
        interval.saved(blocked_seconds=0.5, background_seconds=30)
        print(interval.seconds)  # until the next save
    """

    def __init__(self, max_overhead: float, mtbf_seconds: float) -> None:
        if not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead must be between 0 and 1, got {max_overhead}")
        if not mtbf_seconds > 0:
            raise ValueError(
                "the mean time between failures (mtbf_hours, mtbf_seconds) must be positive, got "
                f"{mtbf_seconds:g} s"
            )
        self._max_overhead = max_overhead
        self._mtbf = mtbf_seconds
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


class Schedule:
    """Decides at which steps to save. All ranks come to the same decisions.

    Args:
        interval: see :data:`Interval`.
        steps: steps that are always saved.
        max_overhead, mtbf_seconds: see :class:`AutoInterval`.
        skip_if_busy: do not save while a save is running.
        meeting: connects the ranks; used by this schedule only.
        timeout: seconds to wait for rank 0's decision.
        clock: returns seconds, like :func:`time.monotonic`.

    Attributes:
        auto: computes the interval if ``interval`` is "auto"; otherwise None.
    """

    def __init__(
        self,
        interval: Interval,
        steps: Collection[int],
        *,
        max_overhead: float,
        mtbf_seconds: float,
        skip_if_busy: bool,
        meeting: Meeting,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.auto: AutoInterval | None = None
        self._min_seconds: Callable[[], float] | None = None
        self._accepts_step: Callable[[int], bool] = lambda _step: True
        if callable(interval):
            self._accepts_step = interval
        elif isinstance(interval, timedelta):
            seconds = interval.total_seconds()
            if seconds <= 0:
                raise ValueError(f"interval must be positive, got {interval}")
            self._min_seconds = lambda: seconds
        elif interval == "auto":
            auto = self.auto = AutoInterval(max_overhead, mtbf_seconds)
            self._min_seconds = lambda: auto.seconds
        elif isinstance(interval, SupportsIndex) and not isinstance(interval, bool):
            every = operator.index(interval)
            if every < 1:
                raise ValueError(f"interval must be positive, got {every}")
            self._accepts_step = lambda step: step % every == 0
        else:
            raise ValueError(
                "interval must be a positive number of steps, a timedelta, 'auto' or a function "
                f"of the step, got {interval!r}"
            )
        self._steps = frozenset(steps)
        self._skip_if_busy = skip_if_busy
        self._clock = clock
        self._decisions = _Decisions(meeting, timeout, clock)
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
            due = self._decisions.next(step, lambda: not is_busy(), blocks=False)
        else:
            due = self._decisions.next(step, lambda: self._is_due(is_busy), blocks=True)
        return due or step in self._steps

    def save_started(self) -> None:
        """Records that a save starts now."""
        self._last_start = self._clock()

    @property
    def decision_count(self) -> int:
        """Number of decisions so far."""
        return self._decisions.count

    def delete_decisions(self, count: int) -> None:
        """Deletes the first ``count`` decisions from the store. Call it on rank 0, after all ranks
        have read them."""
        self._decisions.delete(count)

    def _is_due(self, is_busy: Callable[[], bool]) -> bool:
        assert self._min_seconds is not None
        # While the first save is running, the cost of a save is not known yet.
        if (self._skip_if_busy or self.auto is not None) and is_busy():
            return False
        return self._clock() - self._last_start >= self._min_seconds()


class _Decisions:
    """Rank 0's decisions, in the order in which every rank reads them."""

    def __init__(self, meeting: Meeting, timeout: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.count = 0
        self._meeting = meeting
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
        if self._meeting.rank == 0:
            saves = decide()
            length = self._block_length(step) if blocks else 1
            if self._meeting.distributed:
                self._call_store(
                    lambda: self._meeting.keys("").set(
                        str(self.count), f"{step}:{length}:{int(saves)}"
                    )
                )
        else:
            step_of_rank_0, length, flag = map(int, self._read().split(b":"))
            saves = bool(flag)
            if step_of_rank_0 != step:
                raise CheckpointError(
                    f"rank {self._meeting.rank} is at step {step}, but rank 0 is at step "
                    f"{step_of_rank_0}: all ranks must call save() with the same steps"
                )
        self.count += 1
        self._block = range(step, step + length)
        return saves

    def delete(self, count: int) -> None:
        if not self._meeting.distributed:
            return
        store = self._meeting.keys("")
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
        store = self._meeting.keys("")
        started = time.monotonic()
        # Poll: a blocking wait would occupy the connection, which the running save needs, too.
        while (data := self._call_store(lambda: peek(store, key))) is None:
            waited = time.monotonic() - started
            if waited >= self._timeout:
                raise failed_on(_EXCHANGE, heartbeat_failures(_EXCHANGE, [0], self._timeout))
            time.sleep(min(0.01, max(0.0002, waited / 10)))
        return data

    def _call_store(self, function: Callable[[], T]) -> T:
        return self._meeting.asker.ask(_EXCHANGE, self._meeting.rank, self._timeout, function)
