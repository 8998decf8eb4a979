"""When a checkpoint manager saves.

What depends on the step alone, each rank knows by itself. What depends on time, or on whether a
save is under way, rank 0 decides for all:

1. The steps go in blocks, of half a second or so. A block is decided on at its first step, and only
   there is a save begun.
2. At the first step of a block rank 0 decides, and puts that step, the length of the block and
   whether to save into the process group's store.
3. Other ranks, when they come to the first step of the block, take that from the store; a rank that
   is ahead of rank 0 waits. Within a block nobody asks.
4. A rank that comes to another step than rank 0 did raises: it would save alone.
5. When a save is committed all ranks have taken the blocks up to its own, and rank 0 removes them.
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
from torch_ckpt.ranks.outcomes import no_sign_of_life
from torch_ckpt.ranks.store_thread import peek

#: Every so many steps; at least so much time apart; chosen; or a function of the step, which must
#: say the same on all ranks.
Interval = int | timedelta | Literal["auto"] | Callable[[int], bool]

T = TypeVar("T")

_BLOCK_SECONDS = 0.5
_STEP = "the decision whether to save"


class AutoInterval:
    """The time between saves that loses least, from what saves cost here.

    The interval is ``sqrt(2 C M)`` for a save's cost C and a mean time between failures M (J. W.
    Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A
    higher order estimate of the optimum checkpoint interval for restart dumps", 2006), but no less
    than the bound on overhead allows, and no less than a save takes in the background. C is the
    time that training lost: what it was blocked for, and by how much steps took longer than usual
    while the save was under way. It is the median of the last saves, without the first, which also
    makes memory.

    Args:
        max_overhead: of saves, as a fraction of the training time.
        mtbf_seconds: between failures that end the run.
    """

    def __init__(self, max_overhead: float, mtbf_seconds: float) -> None:
        if not 0 < max_overhead < 1:
            raise ValueError(f"max_overhead must be between 0 and 1, got {max_overhead}")
        if not mtbf_seconds > 0:
            raise ValueError(f"mtbf_hours must be positive, got {mtbf_seconds / 3600:g}")
        self._max_overhead = max_overhead
        self._mtbf = mtbf_seconds
        self._usual: deque[float] = deque(maxlen=100)
        self._slow: list[float] = []
        self._costs: deque[float] = deque(maxlen=6)
        self._first_cost: float | None = None
        self._background = 0.0
        self._patience = 0.0

    @property
    def seconds(self) -> float:
        """Between the beginnings of two saves; 0 before the first one, which measures."""
        costs = self._costs or ([self._first_cost] if self._first_cost is not None else [])
        if not costs:
            return self._patience
        cost = statistics.median(costs)
        young = math.sqrt(2 * cost * self._mtbf)
        return max(young, cost / self._max_overhead, self._background, self._patience)

    def stepped(self, seconds: float, is_saving: bool) -> None:
        """A step of training has taken so long, with or without a save under way."""
        (self._slow if is_saving else self._usual).append(seconds)

    def failed(self) -> None:
        """A save has failed: of its cost nothing is known, and the next one may fail as well."""
        self._slow.clear()
        self._patience = min(600.0, max(10.0, 2 * self._patience))

    def saved(self, blocked_seconds: float, background_seconds: float) -> None:
        """A save has ended."""
        slower = 0.0
        if self._usual:
            usual = statistics.median(self._usual)
            # The median's, or an evaluation meanwhile would be the save's.
            slow = statistics.median(self._slow) if self._slow else 0.0
            slower = max(0.0, slow - usual) * len(self._slow)
        self._slow.clear()
        self._patience = 0.0
        cost = blocked_seconds + slower
        self._background = background_seconds
        if self._first_cost is None:
            self._first_cost = cost
        else:
            self._costs.append(cost)


class Schedule:
    """Says at which steps to save; the same on all ranks.

    Args:
        interval: see :data:`Interval`.
        steps: at which to save in any case.
        skip_if_busy: not while a save is under way.
        meeting: of the ranks, for this schedule alone.
        timeout: seconds to wait for rank 0's decision.
        clock: tells the seconds since some moment.
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
        self._least: Callable[[], float] | None = None
        self._wants: Callable[[int], bool] = lambda _step: True
        if callable(interval):
            self._wants = interval
        elif isinstance(interval, timedelta):
            least = interval.total_seconds()
            if least <= 0:
                raise ValueError(f"interval must be positive, got {interval}")
            self._least = lambda: least
        elif interval == "auto":
            auto = self.auto = AutoInterval(max_overhead, mtbf_seconds)
            self._least = lambda: auto.seconds
        elif isinstance(interval, SupportsIndex) and not isinstance(interval, bool):
            every = operator.index(interval)
            if every < 1:
                raise ValueError(f"interval must be positive, got {every}")
            self._wants = lambda step: step % every == 0
        else:
            raise ValueError(
                "interval must be a positive number of steps, a timedelta, 'auto' or a function "
                f"of the step, got {interval!r}"
            )
        self._steps = frozenset(steps)
        self._skip_if_busy = skip_if_busy
        self._clock = clock
        self._decisions = _Decisions(meeting, timeout, clock)
        self._begun = clock()

    def wants(self, step: int, is_busy: Callable[[], bool]) -> bool:
        """Whether to save at this step. Called on all ranks, for the same steps, once for each.

        Raises:
            CheckpointError: rank 0 came to another step.
            CheckpointException: the store is lost, or rank 0 does not come within the timeout.
        """
        if self._least is None and not self._skip_if_busy:
            return self._wants(step) or step in self._steps
        if self._least is None:
            # What the step alone says all ranks know; only of those steps one is decided on.
            if not self._wants(step):
                return step in self._steps
            due = self._decisions.take(step, lambda: not is_busy(), blocks=False)
        else:
            due = self._decisions.take(step, lambda: self._is_due(is_busy), blocks=True)
        return due or step in self._steps

    def begun(self) -> None:
        """A save begins now."""
        self._begun = self._clock()

    @property
    def decided(self) -> int:
        """How many decisions have been taken."""
        return self._decisions.number

    def forget(self, decided: int) -> None:
        """On rank 0: all ranks have taken so many decisions."""
        self._decisions.forget(decided)

    def _is_due(self, is_busy: Callable[[], bool]) -> bool:
        assert self._least is not None
        # A first save that is under way says nothing yet of what the next one costs.
        if (self._skip_if_busy or self.auto is not None) and is_busy():
            return False
        return self._clock() - self._begun >= self._least()


class _Decisions:
    """Rank 0's, as all ranks take them."""

    def __init__(self, meeting: Meeting, timeout: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.number = 0
        self._meeting = meeting
        self._timeout = timeout
        self._block = range(0)
        self._forgotten = 0
        self._last: tuple[int, float] | None = None

    def take(self, step: int, decide: Callable[[], bool], *, blocks: bool) -> bool:
        """The decision for a step; False within a block that begins before it."""
        # Not also before it: training may have gone back.
        if blocks and step in self._block:
            return False
        if self._meeting.rank == 0:
            wanted = decide()
            length = self._length(step) if blocks else 1
            if self._meeting.distributed:
                self._ask(
                    lambda: self._meeting.keys("").set(
                        str(self.number), f"{step}:{length}:{int(wanted)}"
                    )
                )
        else:
            led, length, saves = map(int, self._read().split(b":"))
            wanted = bool(saves)
            if led != step:
                raise CheckpointError(
                    f"rank {self._meeting.rank} came to step {step} where rank 0 came to {led}: "
                    "every rank must call save() for the same steps"
                )
        self.number += 1
        self._block = range(step, step + length)
        return wanted

    def forget(self, decided: int) -> None:
        if not self._meeting.distributed:
            return
        store = self._meeting.keys("")
        for number in range(self._forgotten, decided):
            self._ask(lambda key=str(number): store.delete_key(key))  # type: ignore[misc]
        self._forgotten = max(self._forgotten, decided)

    def _length(self, step: int) -> int:
        now = self._clock()
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            return 1
        per_step = max(1e-9, (now - last[1]) / (step - last[0]))
        # Not far beyond what was seen: the first steps may have been fast.
        return max(1, min(int(_BLOCK_SECONDS / per_step), 2 * (step - last[0])))

    def _read(self) -> bytes:
        key = str(self.number)
        store = self._meeting.keys("")
        begun = time.monotonic()
        # Not by the store's own waiting, which keeps the save under way off the connection.
        while (data := self._ask(lambda: peek(store, key))) is None:
            waited = time.monotonic() - begun
            if waited >= self._timeout:
                raise failed_on(_STEP, no_sign_of_life(_STEP, [0], self._timeout))
            time.sleep(min(0.01, max(0.0002, waited / 10)))
        return data

    def _ask(self, work: Callable[[], T]) -> T:
        return self._meeting.asker.ask(_STEP, self._meeting.rank, self._timeout, work)
