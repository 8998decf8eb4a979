"""Where the ranks of one save or load meet, and those of one call of torch_ckpt.multihost.

They meet in the store of the process group, never by its collectives: only the modules that send
tensors, loading/shared_reads.py and multihost/moving.py, use these.

Each step runs on every rank; its outcomes, errors included, are exchanged before anybody goes on,
so that a failure anywhere raises the same ``CheckpointFailed`` everywhere and no rank waits for one
that has given up. Who was interrupted raises that instead. Values move as keys of the store, which
also tell who has died:

1. Every rank posts its value as ``{step}/from/{rank}``; the coordinator waits for all of them.
2. It sets ``{step}/verdict`` where there is none yet. Only then may it combine, which may commit.
3. It posts its answer as ``{step}/to/{rank}`` or ``{step}/to/all``; the others wait for it.
4. Who is waited for and gives no sign of life is given up, and the step fails. A silent coordinator
   is given up by who has waited longest, who sets the verdict and answers in its place. Should the
   coordinator come back, it finds the verdict and does not commit.
5. ``alive/{rank}`` is a sign of life when its value is another than at the last look.
6. Who reads a key removes it. What several read is removed by the coordinator once ``bye/{rank}``
   says of each that it has read all it will.
"""

from __future__ import annotations

import pickle
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException

from torch_ckpt import _C
from torch_ckpt.ranks.failures import failed_on, raise_on
from torch_ckpt.ranks.outcomes import (
    RankFailures,
    attempt,
    failed,
    failures_of,
    no_sign_of_life,
)
from torch_ckpt.ranks.store_thread import StoreThread

T = TypeVar("T")
R = TypeVar("R")

#: A rank that is silent for longer is given up.
TIMEOUT_SECONDS = 300.0

# By this factor the others wait longer for the coordinator than it waits for them; or they would
# give it up while it gives up somebody else.
_LONGER = 1.25

# Signs of life are given and looked for this often, or ten times in a short timeout.
_PULSE_SECONDS = 5.0

# TCPStore closes the connection over a value of more than 8 MiB.
_PIECE_BYTES = 4 << 20

_DECIDED = b"the coordinator goes on"

# What an aborted queue leaves behind: see Meeting.start_over().
_KINDS_OF_CALLS = ("plan", "call", "lockstep", "call_idx")


class Ranks:
    """The ranks that take part; a single one where nothing is distributed.

    Args:
        over: what moves the values; None: this process is alone. See :class:`Meeting`.
    """

    def __init__(self, over: _Alone | None = None) -> None:
        over = over or _Alone()
        self._over = over
        self.distributed = over.distributed
        self.rank = over.rank
        self.size = over.size
        self.is_coordinator = self.rank == 0

    def reduce_scatter(
        self, step: str, local: Callable[[], T], combine: Callable[[list[T]], list[R]]
    ) -> R:
        """Runs ``local`` everywhere, ``combine`` on the coordinator; each rank gets its part."""
        outcome = attempt(local)
        combined = self._combined(self._over.gather(step, outcome), combine)
        parts = [combined] * self.size if isinstance(combined, RankFailures) else combined
        received = self._over.scatter(parts)
        if isinstance(received, RankFailures):
            raise_on(self.rank, step, received.by_rank)
        return cast(R, received)

    def all_reduce(
        self,
        step: str,
        local: Callable[[], T],
        combine: Callable[[list[T]], R],
        undo: Callable[[T], None],
    ) -> R:
        """Runs ``local`` everywhere, ``combine`` on the coordinator; each rank gets the result.

        Where ``local`` failed on a rank, ``undo`` is run on those where it did not; never after
        ``combine`` has begun, nor where this rank cannot know whether it has.
        """
        outcome = attempt(local)
        received = self._over.broadcast(self._combined(self._over.gather(step, outcome), combine))
        if isinstance(received, RankFailures):
            if not received.combining and not failed(outcome):
                undo(outcome)
            raise_on(self.rank, step, received.by_rank)
        return cast(R, received)

    def all_succeed(self, step: str, local: Callable[[], T]) -> T:
        """Runs ``local`` everywhere; raises everywhere where it failed anywhere."""
        outcome = attempt(local)
        gathered = self._over.gather(step, outcome if failed(outcome) else None)
        received = self._over.broadcast(self._combined(gathered, lambda _: None))
        if isinstance(received, RankFailures):
            raise_on(self.rank, step, received.by_rank)
        return cast(T, outcome)

    def alive(self, counter: Callable[[], int]) -> AbstractContextManager[None]:
        """While it is open the others wait for this rank for as long as ``counter`` changes.

        For what may take longer than the timeout, in ``local`` and in ``combine``. ``counter`` is
        called every few seconds, by another thread: the number of bytes written, for example.
        """
        return self._over.alive(counter)

    def cancel(self, failure: WRAPPED_EXCEPTION) -> None:
        """Ends the waiting of this rank, which fails; from any thread.

        On the coordinator it is also the answer to those that have come.
        """
        self._over.cancel(failure)

    def hurry(self) -> None:
        """Somebody waits for this step now: looks again at once, however long it has been waiting
        already; from any thread.
        """
        self._over.hurry()

    def close(self, timeout: float = 60.0) -> None:
        """Ends the use of the store, after the last step, whether that succeeded or not.

        Every rank calls it. The coordinator waits until the others have read the last answer, so
        that the process that hosts the store may end, and removes the keys. Raises nothing: the
        outcome is known by then.

        Args:
            timeout: seconds that the coordinator waits; where it is too short, keys stay.
        """
        self._over.close(timeout)

    # --- private ---------------------------------------------------------------------------------

    def _combined(self, gathered: list[Any] | None, combine: Callable[[list[Any]], Any]) -> Any:
        """On the coordinator what ``combine`` makes of the ranks' values, or who failed."""
        if gathered is None:
            return None
        failures = failures_of(gathered)
        if failures:
            return RankFailures(failures, combining=False)
        combined = attempt(lambda: combine(gathered))
        if failed(combined):
            return RankFailures({0: combined}, combining=True)
        return combined


class Meeting:
    """Where the ranks of a process group meet without using it.

    Args:
        store: shared by the ranks; None for a process alone.
        rank: of this process in the group.
        size: of the group.
        name: the keys are below it; no other group that uses the store may have it.
    """

    _made: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Meeting]] = WeakKeyDictionary()
    _names: ClassVar[Counter[str]] = Counter()
    _alone: ClassVar[Meeting | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, store: Store | None, rank: int, size: int, name: str) -> None:
        self.distributed = store is not None
        self.rank = rank
        self.size = size
        self._name = name
        # A server lives as long as the store that started it, destroy_process_group() or not.
        self._store = store
        self._connections: list[Store] = []  # one, once it is needed
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._starts = 0
        self._apart: dict[str, Meeting] = {}
        #: Asks the store, for all that meet over this connection.
        self.asker = StoreThread()

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, no_dist: bool) -> Meeting:
        """That of a process group, None for the default group; made when first asked for.

        Every rank of the group must ask for it, but none waits for another.

        Raises:
            ValueError: this process is not in the group.
        """
        if not is_distributed(no_dist):
            if cls._alone is None:
                cls._alone = cls(None, 0, 1, "")
            return cls._alone
        c10d = dist.distributed_c10d
        group = c10d._get_default_group() if process_group is None else process_group
        if dist.get_rank(group) < 0:
            raise ValueError("this process is not in the process group that is to save or load")
        with cls._making:
            # No longer than the group: the next group that uses the port must find a new server.
            meeting = cls._made.get(group)
            if meeting is None:
                members = dist.get_process_group_ranks(group)
                name = f"{group.group_name}-{zlib.crc32(repr(members).encode()):08x}"
                # A group that takes the place of a destroyed one may have its name and its store.
                cls._names[name] += 1
                name = f"{name}-{cls._names[name]}"
                meeting = cls(c10d._get_default_store(), dist.get_rank(group), len(members), name)
                cls._made[group] = meeting
            return meeting

    def apart(self, use: str, members: Sequence[int] | None = None) -> Meeting:
        """For another use, whose meetings are counted apart, so that they need not come in one
        order with saves; over the same connection. Made when first asked for.

        Args:
            use: the same on all ranks that meet.
            members: of the ranks here those that take part, in their new order; None for all.
        """
        name = use if members is None else f"{use}-{zlib.crc32(repr(list(members)).encode()):08x}"
        with self._lock:
            if name not in self._apart:
                rank = self.rank if members is None else members.index(self.rank)
                size = self.size if members is None else len(members)
                other = Meeting(self._store, rank, size, f"{self._name}/{name}")
                # Not this meeting itself: a cycle would keep the server for longer than the group.
                other._connections, other._lock = self._connections, self._lock
                other.asker = self.asker
                self._apart[name] = other
            return self._apart[name]

    def keys(self, below: str) -> Store:
        """Keys of this meeting's own, for values that are not exchanged in a step."""
        return PrefixStore(f"torch_ckpt/{self._name}/{below}", self.connection())

    def ranks(
        self, timeout: float = TIMEOUT_SECONDS, kind: str = "save", prefix: str | None = None
    ) -> Ranks:
        """The ranks of one save or load, for one thread. Every rank makes them, in the same order.

        Args:
            kind: those of one kind are made in the same order on every rank.
            prefix: of their keys, which the ranks know; then the order does not matter.
            timeout: in seconds; a rank that the others wait for and that gives no sign of life for
                so long is given up: the step raises ``CheckpointException`` with a
                ``TimeoutError`` for it, on all ranks. Where the store does not answer it raises
                one with a ``ConnectionError`` for the rank itself, and undoes nothing.
        """
        if not self.distributed:
            return Ranks()
        if prefix is None:
            prefix = self.next_prefix(kind)
        return Ranks(_OverStore(self, prefix, timeout))

    def next_prefix(self, kind: str) -> str:
        """A prefix of keys that nobody else has; the same on every rank, by the order of calls."""
        with self._lock:
            number = self._counts[kind]
            self._counts[kind] += 1
            below = f"{kind}-{self._starts}" if kind in _KINDS_OF_CALLS else kind
        return f"torch_ckpt/{self._name}/{below}/{number}"

    def start_over(self) -> None:
        """Counts the prefixes of asynchronous calls from 0, below a name that was not used yet.

        After an abort: that finds ranks at different points, and so with different numbers. All
        ranks call it as often.
        """
        with self._lock:
            self._starts += 1
            for kind in _KINDS_OF_CALLS:
                self._counts[kind] = 0

    def connection(self) -> Store:
        """The store, over a connection that nobody else uses; made when first asked for.

        The training may wait on its own one for minutes, and keeps others off it. To connect may
        take seconds, where names are slow to resolve.
        """
        with self._lock:
            assert self._store is not None
            if not self._connections:
                try:
                    self._connections.append(self._store.clone())
                except (AttributeError, RuntimeError):
                    self._connections.append(self._store)
            return self._connections[0]


# --- what moves values ---------------------------------------------------------------------------


class _Alone:
    """Moves values between ranks; here, where there is one. Each step begins with a gather."""

    distributed = False
    rank = 0
    size = 1

    def gather(self, step: str, value: Any) -> list[Any] | None:
        """Every rank's value, or why there is none, on the coordinator; None elsewhere."""
        return [value]

    def scatter(self, parts: list[Any] | None) -> Any:
        """To each rank its part of what the coordinator has."""
        return parts[0] if parts is not None else None

    def broadcast(self, value: Any) -> Any:
        """To each rank what the coordinator has."""
        return value

    def alive(self, counter: Callable[[], int]) -> AbstractContextManager[None]:
        return nullcontext()

    def cancel(self, failure: WRAPPED_EXCEPTION) -> None:
        pass

    def hurry(self) -> None:
        pass

    def close(self, timeout: float) -> None:
        pass


class _OverStore(_Alone):
    """Through the keys of a store, as the head of this file says. For one thread.

    Whatever uses the store raises CheckpointException where it is lost.
    """

    distributed = True

    def __init__(self, meeting: Meeting, prefix: str, timeout: float) -> None:
        self.rank = meeting.rank
        self.size = meeting.size
        self._meeting = meeting  # and with it the server
        self._prefix = prefix
        self._store: Any = None  # until it is needed; typed for str values, but it takes bytes
        self._timeout = timeout
        self._limit = _LONGER * timeout
        self._pulse = min(timeout / 10, _PULSE_SECONDS)
        self._steps = 0
        self._step = ""
        self._given_up = False  # this rank, the coordinator, by another one that has answered
        self._cancelled: WRAPPED_EXCEPTION | None = None
        self._hurried = threading.Event()
        self._absent: list[int] = []  # ranks that come late, if at all
        self._verdicts: list[str] = []
        self._answers: list[str] = []

    def gather(self, step: str, value: Any) -> list[Any] | None:
        self._step = step
        self._steps += 1
        self._ask(self._connect)
        if self.rank != 0:
            data = attempt(pickle.dumps, value)
            data = pickle.dumps(data) if failed(data) else data
            self._ask(self._set, self._key("from", self.rank), data)
            return None
        keys = {rank: self._key("from", rank) for rank in range(1, self.size)}
        silent = self._await(keys, self._timeout)
        self._verdicts.append(self._key("verdict"))
        verdict = self._ask(self._store.compare_set, self._key("verdict"), "", _DECIDED)
        self._given_up = verdict != _DECIDED
        if self._given_up:
            failures = pickle.loads(verdict).by_rank
        else:
            failures = no_sign_of_life(step, silent, self._timeout)
        if self._cancelled is not None:
            value = self._cancelled
        gathered = [value] + [None] * (self.size - 1)
        for rank, data in self._ask(self._take_all, keys).items():
            gathered[rank] = attempt(pickle.loads, data)
        for rank, failure in failures.items():
            gathered[rank] = failure
        return gathered

    def scatter(self, parts: list[Any] | None) -> Any:
        if parts is None:
            return self._receive(self._key("to", self.rank))
        keys = [self._key("to", rank) for rank in range(1, self.size)]
        return self._answer(keys, parts[1:]) or parts[0]

    def broadcast(self, value: Any) -> Any:
        key = self._key("to", "all")
        if self.rank != 0:
            return self._receive(key)
        self._answers.append(key)
        return self._answer([key], [value]) or value

    @contextmanager
    def alive(self, counter: Callable[[], int]) -> Iterator[None]:
        begun, done = time.monotonic(), threading.Event()

        def beat() -> None:
            while not done.wait(self._pulse):
                sign = f"{begun}/{counter()}"
                with suppress(RuntimeError):  # that the store is lost the next step will say
                    self._connect()
                    self._store.set(f"alive/{self.rank}", sign)

        thread = threading.Thread(target=beat, name="torch_ckpt alive", daemon=True)
        with suppress(RuntimeError):  # as in _ask
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread.ident is not None:
                thread.join(self._pulse)  # and no longer: a store that is stopped does not answer

    def cancel(self, failure: WRAPPED_EXCEPTION) -> None:
        self._cancelled = failure

    def hurry(self) -> None:
        self._hurried.set()

    def close(self, timeout: float) -> None:
        self._limit = min(self._limit, timeout)
        others = [rank for rank in range(1, self.size) if rank not in self._absent]
        with suppress(CheckpointException):
            self._ask(self._connect)
            if self.rank != 0:
                self._ask(self._store.set, f"bye/{self.rank}", "bye")
            elif not self._await({rank: f"bye/{rank}" for rank in others}, timeout):
                self._ask(self._tidy, [0, *others])

    # --- private ---------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._store is None:
            self._store = PrefixStore(self._prefix, self._meeting.connection())

    def _key(self, kind: str, rank: int | str = "") -> str:
        return f"{self._steps}.{self._step}/{kind}/{rank}"

    def _await(self, keys: dict[int, str], patience: float) -> list[int]:
        """Waits for a key of each rank, unless that is cancelled; the ranks silent for too long.

        By asking now and then: the store's own wait prints two warnings when its time is up, and
        keeps other threads off the connection.
        """
        calm_since = looked = time.monotonic()
        heard = dict.fromkeys(keys, looked)
        signs = dict.fromkeys(keys, b"")
        pulse = min(self._pulse, patience / 10)
        while not self._ask(self._store.check, [keys[rank] for rank in signs]):
            if self._cancelled is not None:
                return []
            now = time.monotonic()
            if now >= looked + pulse:
                looked, before = now, signs
                signs = self._ask(self._signs, {rank: keys[rank] for rank in before})
                heard = {r: heard[r] if signs[r] == before[r] else now for r in signs}
                if any(now - then >= patience for then in heard.values()):
                    # With those that fell silent a little later.
                    return [rank for rank, then in heard.items() if now - then >= patience / 2]
            _C.fault_point("wait for ranks", self._step)
            if self._hurried.wait(min(1.0, pulse, max(0.001, (now - calm_since) / 10))):
                self._hurried.clear()
                calm_since = time.monotonic()
        return []

    def _signs(self, keys: dict[int, str]) -> dict[int, bytes]:
        """The last sign of life of each rank whose key is not there."""
        if self.rank == 0:
            # The others are to wait for it for as long as it waits for one of them.
            self._store.set("alive/0", str(time.monotonic()))
        signs = {}
        for rank, key in keys.items():
            if not self._store.check([key]):
                sign = f"alive/{rank}"
                signs[rank] = self._store.get(sign) if self._store.check([sign]) else b""
        return signs

    def _answer(self, keys: list[str], values: list[Any]) -> RankFailures | None:
        """Posts the coordinator's answers; returns what it answered instead, if it had to."""
        if self._given_up:
            return None
        data = attempt(lambda: [pickle.dumps(value) for value in values])
        if failed(data):
            failures = RankFailures({0: data}, combining=True)
            self._answer(keys, [failures] * len(keys))
            return failures
        for key, value in zip(keys, data, strict=True):
            self._ask(self._set, key, value)
        return None

    def _receive(self, key: str) -> Any:
        """The coordinator's answer under a key, or that of the rank that gave it up."""
        if self._await({0: key}, self._limit):
            return self._ask(self._give_up, key)
        if self._cancelled is not None:
            raise failed_on(self._step, {self.rank: self._cancelled})
        received = pickle.loads(self._ask(self._get, key))
        self._ask(self._clear, key, isinstance(received, RankFailures))
        return received

    def _clear(self, answer: str, failed: bool) -> None:
        if answer != self._key("to", "all"):
            self._delete(answer)
        if failed and self._store.get(self._key("verdict")) == _DECIDED:
            # What came late nobody reads.
            self._delete(self._key("from", self.rank))

    def _give_up(self, answer: str) -> RankFailures:
        """Decides instead of a silent coordinator, unless somebody has decided."""
        others = range(1, self.size)
        silent = [r for r in others if not self._store.check([self._key("from", r)])]
        failures = no_sign_of_life(self._step, [0, *silent], self._limit)
        mine = pickle.dumps(RankFailures(failures, combining=False))
        verdict = self._store.compare_set(self._key("verdict"), "", mine)
        if verdict == _DECIDED:
            error = TimeoutError(
                f"rank 0, the coordinator, decided on '{self._step}' and then gave no sign of life "
                f"for {self._limit:g} s: look whether its process still runs and, as it may have "
                "committed, whether the checkpoint is there"
            )
            return RankFailures({0: (error, traceback.StackSummary())}, combining=True)
        if verdict == mine and answer == self._key("to", "all"):
            self._set(answer, mine)
        elif verdict == mine:
            for rank in others:
                if rank != self.rank:
                    self._set(self._key("to", rank), mine)
        return cast(RankFailures, pickle.loads(verdict))

    def _set(self, key: str, data: bytes) -> None:
        starts = range(0, len(data), _PIECE_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
        # Last, because it is what is waited for.
        self._store.set(key, str(len(starts)))

    def _get(self, key: str) -> bytes:
        pieces = range(int(self._store.get(key)))
        return b"".join(self._store.get(f"{key}/{number}") for number in pieces)

    def _delete(self, key: str) -> None:
        if self._store.check([key]):
            for number in range(int(self._store.get(key))):
                self._store.delete_key(f"{key}/{number}")
            self._store.delete_key(key)

    def _take_all(self, keys: dict[int, str]) -> dict[int, bytes]:
        """What the ranks have posted, of which nothing stays."""
        taken = {r: self._get(key) for r, key in keys.items() if self._store.check([key])}
        for rank in taken:
            self._delete(keys[rank])
        self._absent = [rank for rank in keys if rank not in taken]
        return taken

    def _tidy(self, ranks: list[int]) -> None:
        if self._cancelled is not None:
            # Who has not come yet will look for the answer.
            return
        for rank in ranks:
            self._store.delete_key(f"alive/{rank}")
            self._store.delete_key(f"bye/{rank}")
        # A rank that was given up and comes after all reads there that it was.
        if not self._absent:
            for key in self._verdicts:
                self._store.delete_key(key)
            for key in self._answers:
                self._delete(key)

    def _ask(self, work: Callable[..., T], *args: Any) -> T:
        return self._meeting.asker.ask(self._step, self.rank, self._limit, work, *args)


def is_distributed(no_dist: bool = False) -> bool:
    """Whether there are other ranks, and they count."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """This process's rank among all; 0 where nothing is distributed."""
    return dist.get_rank() if is_distributed() else 0
