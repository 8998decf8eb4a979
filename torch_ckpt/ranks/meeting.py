"""Exchanges between the ranks of a save, a load or a call of torch_ckpt.multihost.

Exchanges use the store of the process group and never its collectives. Only the modules that send
tensors, loading/shared_reads.py and multihost/moving.py, use collectives.

Each step runs on every rank. All ranks exchange their outcomes, including errors, before any rank
continues. So a failure raises the same ``CheckpointFailed`` on all ranks, and no rank waits for a
rank that has failed. A rank that was interrupted raises the interruption instead.
ranks/transport.py describes the protocol.
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

#: Default number of seconds after which a rank without a heartbeat is declared dead.
TIMEOUT_SECONDS = 300.0

# Kinds of calls that an aborted queue may leave unfinished: see start_over().
_KINDS_OF_CALLS = ("plan", "call", "lockstep", "call_idx")


class Ranks:
    """The ranks that participate in a save or load. :class:`Meeting` creates it.

    Args:
        over: the transport; None if this process is the only rank.
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
        """Runs ``local`` on all ranks, and ``combine`` on the coordinator with their results.
        Returns one element of the result of ``combine`` to each rank."""
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
        """Runs ``local`` on all ranks, and ``combine`` on the coordinator with their results.
        Returns the result of ``combine`` to all ranks.

        Args:
            undo: called if ``local`` succeeded on this rank but failed on another. It is not called
                if ``combine`` has started, or if this rank cannot know whether it has. None means
                that ``combine`` commits nothing, so that errors need not mention a possible commit.
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
        """Runs ``local`` on all ranks. If it fails on any rank, all ranks raise."""
        outcome = attempt(local)
        gathered = self._over.gather(step, outcome if failed(outcome) else None)
        received = self._over.broadcast(self._combined(gathered, lambda _: None))
        if isinstance(received, RankFailures):
            raise_on(self.rank, step, received.by_rank)
        return cast(T, outcome)

    def alive(self, counter: Callable[[], int]) -> AbstractContextManager[None]:
        """Block in which this rank is not declared dead as long as ``counter`` changes.

        Use it for work in ``local`` or ``combine`` that may exceed the timeout. A separate thread
        calls ``counter`` every few seconds; it may return the number of bytes written, for example.
        """
        return self._over.alive(counter)

    def share(self, data: bytes) -> bytes | str:
        """Returns a token for data that several ranks share, so that the data is sent only once.
        ``local`` returns the token, and ``combine`` passes it to :meth:`shared`."""
        return self._over.share(data)

    def shared(self, token: bytes | str) -> bytes:
        """Returns the data for a token that :meth:`share` returned."""
        return self._over.shared(token)

    @property
    def sent(self) -> tuple[int, int]:
        """Number of messages that this rank has sent to other ranks so far, and their total size in
        bytes."""
        return self._over.sent

    def cancel(self, failure: WRAPPED_EXCEPTION) -> None:
        """Ends this rank's wait, and fails the step on it. May be called from any thread.

        On the coordinator, the failure is also sent to the ranks that have arrived.
        """
        self._over.cancel(failure)

    def wake(self) -> None:
        """Makes this rank poll again at once, without finishing its current pause. May be called
        from any thread."""
        self._over.wake()

    def close(self, timeout: float = 60.0) -> None:
        """Ends this rank's part after the last step, whether or not the step succeeded.

        Every rank must call it. The coordinator waits until the other ranks have read the last
        answer, so that the process that hosts the store may exit, and then deletes the keys. Never
        raises, because the outcome is already known.

        Args:
            timeout: seconds that the coordinator waits. After that, it leaves the keys in the
                store.
        """
        self._over.close(timeout)

    # --- private ---------------------------------------------------------------------------------

    def _combined(self, gathered: list[Any] | None, combine: Callable[[list[Any]], Any]) -> Any:
        """Returns, on the coordinator, the result of ``combine`` or the failures of ranks. Returns
        None on other ranks."""
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
    """Rendezvous of the ranks of a process group. It does not use the group's collectives.

    Args:
        store: the store that the ranks share; None for a single process.
        rank: rank of this process in the group.
        size: size of the group.
        name: prefix of the keys, unique among the groups that use the store.
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
        # The server runs until the store that started it is freed, even after
        # destroy_process_group().
        self._store = store
        self._connections: list[Store] = []  # at most one, created on first use
        # A lock of its own: connecting may take long, and a stopped store never answers.
        self._connecting = threading.Lock()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._starts = 0
        self._apart: dict[str, Meeting] = {}
        #: Thread that runs the requests of all users of the connection.
        self.asker = StoreThread()

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, no_dist: bool) -> Meeting:
        """Returns the rendezvous of a process group; None means the default group. Created on first
        use.

        Every rank of the group must call it, but does not wait for other ranks.

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
                "the call only on members of the group"
            )
        with cls._making:
            # Weak keys, so that the server of a destroyed group ends: the next group on the same
            # port needs a new one.
            meeting = cls._made.get(group)
            if meeting is None:
                members = dist.get_process_group_ranks(group)
                name = f"{group.group_name}-{zlib.crc32(repr(members).encode()):08x}"
                # A new group may have the same name and store as a destroyed one.
                cls._names[name] += 1
                name = f"{name}-{cls._names[name]}"
                meeting = cls(c10d._get_default_store(), dist.get_rank(group), len(members), name)
                cls._made[group] = meeting
            return meeting

    def apart(self, use: str, members: Sequence[int] | None = None) -> Meeting:
        """Returns a rendezvous for another purpose, over the same connection. Created on first use.

        Its exchanges are counted separately, so their order relative to saves does not matter.

        Args:
            use: name of the purpose, the same on all ranks.
            members: the ranks that participate, in their new order; None for all.
        """
        name = use if members is None else f"{use}-{zlib.crc32(repr(list(members)).encode()):08x}"
        with self._lock:
            if name not in self._apart:
                rank = self.rank if members is None else members.index(self.rank)
                size = self.size if members is None else len(members)
                other = Meeting(self._store, rank, size, f"{self._name}/{name}")
                # Do not store a reference to this object: the cycle would keep the server alive
                # after the group is destroyed.
                other._connections, other._connecting = self._connections, self._connecting
                other.asker = self.asker
                self._apart[name] = other
            return self._apart[name]

    def keys(self, below: str) -> Store:
        """Returns a store with separate keys, for values that are not exchanged in a step."""
        return PrefixStore(f"torch_ckpt/{self._name}/{below}", self.connection())

    def ranks(
        self, timeout: float = TIMEOUT_SECONDS, kind: str = "save", prefix: str | None = None
    ) -> Ranks:
        """Returns the ranks of one save or load. Only one thread may use the result.

        Every rank must call it, in the same order.

        Args:
            timeout: seconds without a heartbeat after which a rank that others wait for is declared
                dead. The step then raises ``CheckpointException`` on all ranks, with a
                ``TimeoutError`` for the dead rank. If the store does not answer, the step raises
                ``CheckpointException`` with a ``ConnectionError`` for this rank, and nothing is
                undone.
            kind: only calls of the same kind must have the same order on every rank.
            prefix: prefix of the keys, if all ranks know one. Then the order does not matter.
        """
        if not self.distributed:
            return Ranks()
        if prefix is None:
            prefix = self.next_prefix(kind)
        # The bound method keeps this object and the server alive.
        over = OverStore(self.rank, self.size, self.connection, self.asker, prefix, timeout)
        return Ranks(over)

    def next_prefix(self, kind: str) -> str:
        """Returns a unique prefix for keys. Calls in the same order return the same prefixes on
        every rank."""
        with self._lock:
            number = self._counts[kind]
            self._counts[kind] += 1
            below = f"{kind}-{self._starts}" if kind in _KINDS_OF_CALLS else kind
        return f"torch_ckpt/{self._name}/{below}/{number}"

    def start_over(self) -> None:
        """Restarts the numbering of asynchronous calls at 0, under a new prefix.

        Needed after an abort, which leaves the ranks at different numbers. All ranks must call it
        equally often.
        """
        with self._lock:
            self._starts += 1
            for kind in _KINDS_OF_CALLS:
                self._counts[kind] = 0

    def connection(self) -> Store:
        """Returns the store, over a separate connection that is created on first use.

        Separate, because training may block its own connection for minutes. Connecting may take
        seconds if name resolution is slow.
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
    """Returns True if the operation involves a process group."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """Returns the global rank of this process, or 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0
