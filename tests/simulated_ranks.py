"""Ranks that run the real exchanges in one process, over a simulated store and a simulated clock.

Each rank runs in a thread, but only one thread runs at a time. Before each request to the store, a
random number decides which rank runs next. Time passes when no rank can run. So a schedule depends
only on its seed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch_ckpt.ranks.failures import Failure, capture_exceptions
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.store import lost_store

T = TypeVar("T")

#: Simulated duration of a request, in seconds.
REQUEST_SECONDS = 1e-4

#: Requests of a schedule after which it counts as a hang.
MOST_REQUESTS = 20_000


class Death(BaseException):
    """Ends the thread of a rank that has died. Raised by every request of the rank."""


class Violation(AssertionError):
    """A schedule that breaks a promise."""


class Process:
    """A simulated process that runs one rank.

    Attributes:
        faults: the faults of this process: the number of the request before which it dies or stops,
            and the seconds for which it stops; infinity if it dies.
        result: the result or exception of its work; None if it has died.
        has_died: True if it has died.
    """

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.faults: list[tuple[int, float]] = []
        self.result: Any = None
        self.has_died = False
        self.has_ended = False
        self.requests = 0
        self.wakes_at = 0.0
        self.stopped_until = 0.0
        #: The begin and end of each stop.
        self.stops: list[tuple[float, float]] = []
        self.deadline = 0.0
        self.world = world
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self, work: Callable[[Process], Any]) -> None:
        """Runs the work from the first turn of this process to its end."""
        self.turn.acquire()
        try:
            self.result = work(self)
        except Exception as error:
            self.result = error
        except BaseException as error:  # torch's CheckpointException is not an Exception
            self.result = None if isinstance(error, Death) else error
        self.has_ended = True
        self.world.pass_on(self)

    def sleep(self, seconds: float) -> None:
        """Waits without running."""
        self.wakes_at = self.world.now + seconds
        self.world.pass_on(self)
        if self.has_died:
            raise Death

    def step(self) -> None:
        """Lets other processes run, and carries out a fault that is due."""
        world = self.world
        if self.has_died:
            raise Death
        world.requests += 1
        world.now += REQUEST_SECONDS
        self.requests += 1
        for request, seconds in self.faults:
            if request == self.requests:
                self.stopped_until = world.now + seconds
                self.stops.append((world.now, self.stopped_until))
                self.has_died = seconds == float("inf")
                if self.has_died:
                    raise Death
                world.pass_on(self)
        if world.random.random() < 0.4:
            world.pass_on(self)


class World:
    """The store, the clock and the processes of one schedule.

    Args:
        seed: decides the order of the processes.
        size: number of processes.
        is_hosted: True if the process of rank 0 hosts the store, False if another process does.
    """

    def __init__(self, seed: object, size: int, *, is_hosted: bool = False) -> None:
        self.random = random.Random(str(seed))
        self.now = 0.0
        self.requests = 0
        self.keys: dict[str, bytes] = {}
        #: How often each key was set.
        self.sets: Counter[str] = Counter()
        self.is_hosted = is_hosted
        self.processes = [Process(self, rank) for rank in range(size)]
        self.groups = [
            RankGroup(
                SimulatedStore(self, process),  # type: ignore[arg-type]
                process.rank,
                size,
                "",
                SimulatedStoreThread(process),  # type: ignore[arg-type]
                SimulatedClock(process),  # type: ignore[arg-type]
            )
            for process in self.processes
        ]
        #: When rank 0 began to create each key.
        self.created_at: dict[str, float] = {}
        self.violation = ""
        self.is_beating = False
        #: Heartbeats: the next time, the period, the process, the function, and when to end.
        self.beats: list[list[Any]] = []
        #: Requests that the stopped store receives later.
        self.late: list[Callable[[], object]] = []
        self._ended = threading.Lock()
        self._ended.acquire()

    def run(self, work: Callable[[Process], Any]) -> None:
        """Runs the work of all processes to its end.

        Raises:
            Violation: the processes do not end.
        """
        for process in self.processes:
            _threads.submit(process.run, work)
        self._next().turn.release()  # type: ignore[union-attr]
        self._ended.acquire()
        if self.violation:
            raise Violation(self.violation)

    def pass_on(self, process: Process) -> None:
        """Lets the next process run. Returns when it is this process's turn."""
        chosen = self._next()
        if chosen is process:
            return
        if chosen is None:
            self._ended.release()
        else:
            chosen.turn.release()
        if not process.has_ended:
            process.turn.acquire()

    def _next(self) -> Process | None:
        while True:
            running = [one for one in self.processes if not one.has_ended]
            if not running:
                return None
            if self.requests > MOST_REQUESTS:
                self.violation = "the ranks do not end"
                for one in running:
                    one.has_died = True
                return running[0]
            ready = [
                one
                for one in running
                if (one.wakes_at <= self.now and one.stopped_until <= self.now) or one.has_died
            ]
            if ready:
                self._pass_time(self.now)
                return ready[0] if len(ready) == 1 else self.random.choice(ready)
            self._pass_time(min(max(one.wakes_at, one.stopped_until) for one in running))

    def _pass_time(self, until: float) -> None:
        """Advances the clock, and sends the heartbeats that are due."""
        while self.beats:
            beat = min(self.beats, key=lambda beat: beat[0])
            at, period, process, function, ended = beat
            if at > until:
                break
            if ended.is_set() or process.has_died:
                self.beats.remove(beat)
            elif process.stopped_until > at:
                # The thread may run before or after the other threads of the process.
                beat[0] = process.stopped_until + self.random.choice((0.0, 0.01))
            else:
                self.now, beat[0] = max(self.now, at), at + period
                self.is_beating = True
                function()
                self.is_beating = False
        self.now = max(self.now, until)
        if self.late and self.processes[0].stopped_until <= self.now:
            for request in self.late:
                request()
            self.late.clear()


class SimulatedStore:
    """The connection of one process to the store of a world."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process

    def set(self, key: str, value: str | bytes) -> None:
        self._world.sets[key] += 1
        data = value.encode() if isinstance(value, str) else value
        self._request(lambda: self._world.keys.__setitem__(key, data))

    def compare_set(self, key: str, expected: str, desired: str | bytes) -> bytes:
        data = desired.encode() if isinstance(desired, str) else desired
        before = expected.encode()
        if self._process.rank == 0:
            self._world.created_at.setdefault(key, self._world.now)

        def act() -> bytes:
            keys = self._world.keys
            if keys.get(key, b"") == before:
                keys[key] = data
            return keys.get(key, before)

        return self._request(act)

    def check(self, keys: list[str]) -> bool:
        return self._request(lambda: all(key in self._world.keys for key in keys))

    def delete_key(self, key: str) -> bool:
        return self._request(lambda: self._world.keys.pop(key, None) is not None)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        def act() -> list[bytes]:
            absent = [key for key in keys if key not in self._world.keys]
            if absent:
                self._world.violation = f"rank {self._process.rank} waits for {absent}"
            return [self._world.keys.get(key, b"") for key in keys]

        return self._request(act)

    def _request(self, act: Callable[[], T]) -> T:
        world, process = self._world, self._process
        host = world.processes[0]
        if world.is_beating:
            if world.is_hosted and host.has_died:
                raise RuntimeError("Connection reset by peer")
            return act()
        process.step()
        if world.is_hosted and host is not process:
            while host.stopped_until > world.now and not host.has_died:
                if host.stopped_until > process.deadline:
                    process.sleep(process.deadline - world.now)
                    world.late.append(act)
                    raise TimeoutError("no answer")
                process.sleep(host.stopped_until - world.now)
            if host.has_died:
                raise RuntimeError("Connection reset by peer")
        return act()


class SimulatedStoreThread:
    """Runs the requests of a process without a thread."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def request(
        self,
        step: str,
        rank: int,
        limit: float,
        work: Callable[..., T],
        *args: Any,
        advice: str = "",
    ) -> T:
        self._process.deadline = self._process.world.now + limit
        outcome = capture_exceptions(work, *args)
        if isinstance(outcome, Failure):
            if isinstance(outcome.error, Death):
                raise Death
            raise lost_store(step, rank, outcome, advice)
        return outcome  # type: ignore[no-any-return]


class SimulatedClock:
    """The clock of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def monotonic(self) -> float:
        return self._process.world.now

    def Event(self) -> SimulatedEvent:
        return SimulatedEvent(self._process)

    def repeat(self, seconds: float, function: Callable[[], None]) -> tuple[SimulatedEvent, None]:
        world, ended = self._process.world, SimulatedEvent(self._process)
        world.beats.append([world.now + seconds, seconds, self._process, function, ended])
        return ended, None


class SimulatedEvent:
    """An event of a process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> bool:
        if not self._is_set:
            self._process.sleep(seconds)
        return self._is_set


#: The threads of all schedules. Those of the schedule before may be about to end when one begins.
_threads = ThreadPoolExecutor(100)
