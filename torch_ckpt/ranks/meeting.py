"""Where the ranks of one save or load meet, and those of one call of torch_ckpt.multihost.

They meet in the store of the process group, never by its collectives: only the modules that send
tensors, loading/shared_reads.py and multihost/moving.py, use these.

Each step runs on every rank; its outcomes, errors included, are exchanged before anybody goes on,
so that a failure anywhere raises the same ``CheckpointFailed`` everywhere and no rank waits for one
that has given up. Who was interrupted raises that instead. ranks/transport.py has the protocol.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION

from torch_ckpt.ranks.failures import raise_on
from torch_ckpt.ranks.outcomes import (
    RankFailures,
    attempt,
    failed,
    failures_of,
)
from torch_ckpt.ranks.store_thread import StoreThread
from torch_ckpt.ranks.transport import Alone, OverStore

T = TypeVar("T")
R = TypeVar("R")

#: A rank that is silent for longer is given up.
TIMEOUT_SECONDS = 300.0

# What an aborted queue leaves behind: see Meeting.start_over().
_KINDS_OF_CALLS = ("plan", "call", "lockstep", "call_idx")


class Ranks:
    """The ranks that take part; a single one where nothing is distributed.

    Args:
        over: what moves the values; None: this process is alone. See :class:`Meeting`.
    """

    def __init__(self, over: Alone | None = None) -> None:
        over = over or Alone()
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
        undo: Callable[[T], None] | None = None,
    ) -> R:
        """Runs ``local`` everywhere, ``combine`` on the coordinator; each rank gets the result.

        Args:
            undo: run where ``local`` succeeded if it failed on another rank; never after
                ``combine`` has begun, nor where this rank cannot know whether it has. None:
                ``combine`` commits nothing, so that errors do not say that it may have.
        """
        outcome = attempt(local)
        gathered = self._over.gather(step, outcome, commits=undo is not None)
        received = self._over.broadcast(self._combined(gathered, combine))
        if isinstance(received, RankFailures):
            if undo is not None and not received.combining and not failed(outcome):
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

    def share(self, data: bytes) -> bytes | str:
        """What stands for data in a value of ``local``, where other ranks have the same: it is sent
        once. :meth:`shared` gives it back in ``combine``.
        """
        return self._over.share(data)

    def shared(self, token: bytes | str) -> bytes:
        """See :meth:`share`."""
        return self._over.shared(token)

    @property
    def sent(self) -> tuple[int, int]:
        """What this rank has told others so far: messages, and bytes in them."""
        return self._over.sent

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
        # Apart from the other lock: to connect may take long, and a store that is stopped never
        # answers.
        self._connecting = threading.Lock()
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
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group of this save or load: make "
                "the call on its members only"
            )
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
                other._connections, other._connecting = self._connections, self._connecting
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
        # By a bound method, which keeps this meeting, and with it the server.
        over = OverStore(self.rank, self.size, self.connection, self.asker, prefix, timeout)
        return Ranks(over)

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
        with self._connecting:
            assert self._store is not None
            if not self._connections:
                try:
                    self._connections.append(self._store.clone())
                except (AttributeError, RuntimeError):
                    self._connections.append(self._store)
            return self._connections[0]


def is_distributed(no_dist: bool = False) -> bool:
    """Whether there are other ranks, and they count."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """This process's rank among all; 0 where nothing is distributed."""
    return dist.get_rank() if is_distributed() else 0
