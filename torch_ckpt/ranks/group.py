"""The ranks of a process group, their connection to the group's store, and the numbers of their
exchanges."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from torch_ckpt.ranks.store import Clock, StoreThread

#: Default number of seconds after which a rank without a heartbeat is declared dead.
TIMEOUT_SECONDS = 300.0

# Kinds of exchanges that an aborted queue may leave unfinished: see restart_numbering().
_KINDS_OF_CALLS = ("plan", "call", "event", "call_idx")


class RankGroup:
    """The ranks of a process group. They communicate through the group's store, and never through
    its collectives.

    Args:
        store: the store that the ranks share; None for a single process.
        rank: rank of this process in the group.
        size: size of the group.
        name: prefix of the keys, unique among the groups that use the store.
        store_thread: the thread that runs the requests to the store.
        clock: the time and threads of the exchanges.

    Attributes:
        connections: has the connection to the store, once it has been created.
    """

    _by_group: ClassVar[WeakKeyDictionary[dist.ProcessGroup, RankGroup]] = WeakKeyDictionary()
    _names: ClassVar[Counter[str]] = Counter()
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        name: str,
        store_thread: StoreThread | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.distributed = store is not None
        self.rank = rank
        self.size = size
        self.store_thread = store_thread or StoreThread()
        self.clock = clock or Clock()
        self._name = name
        # The server runs until the store that started it is freed, even after
        # destroy_process_group().
        self._store = store
        self.connections: list[Any] = []
        # A lock of its own: connecting may take long, and a stopped store never answers.
        self._connecting = threading.Lock()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._restarts = 0
        self._subgroups: dict[str, RankGroup] = {}

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None, no_dist: bool = False) -> RankGroup:
        """Returns the ranks of a process group; None means the default group. Created on first use.

        Every rank of the group must call it, but does not wait for other ranks.

        Raises:
            ValueError: this process is not in the group.
        """
        if not is_distributed(no_dist):
            return SINGLE_RANK
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
            made = cls._by_group.get(group)
            if made is None:
                members = dist.get_process_group_ranks(group)
                name = f"{group.group_name}-{zlib.crc32(repr(members).encode()):08x}"
                # A new group may have the same name and store as a destroyed one.
                cls._names[name] += 1
                name = f"{name}-{cls._names[name]}"
                made = cls(c10d._get_default_store(), dist.get_rank(group), len(members), name)
                cls._by_group[group] = made
            return made

    def subgroup(self, use: str, members: Sequence[int] | None = None) -> RankGroup:
        """Returns the ranks for another purpose, over the same connection. Created on first use.

        Their exchanges are counted separately, so their order relative to saves does not matter.

        Args:
            use: name of the purpose, the same on all ranks.
            members: the ranks that participate, in their new order; None for all.
        """
        name = use if members is None else f"{use}-{zlib.crc32(repr(list(members)).encode()):08x}"
        with self._lock:
            if name not in self._subgroups:
                rank = self.rank if members is None else members.index(self.rank)
                size = self.size if members is None else len(members)
                name_in_store = f"{self._name}/{name}"
                other = RankGroup(
                    self._store, rank, size, name_in_store, self.store_thread, self.clock
                )
                # Do not store a reference to this object: the cycle would keep the server alive
                # after the group is destroyed.
                other.connections, other._connecting = self.connections, self._connecting
                self._subgroups[name] = other
            return self._subgroups[name]

    def keys(self, below: str) -> Store:
        """Returns a store with separate keys, for values that are not exchanged in a step."""
        return PrefixStore(f"torch_ckpt/{self._name}/{below}", self.connection())

    def next_prefix(self, kind: str) -> str:
        """Returns a unique prefix for keys. Calls in the same order return the same prefixes on
        every rank."""
        with self._lock:
            number = self._counts[kind]
            self._counts[kind] += 1
            below = f"{kind}-{self._restarts}" if kind in _KINDS_OF_CALLS else kind
        return f"torch_ckpt/{self._name}/{below}/{number}"

    def restart_numbering(self) -> None:
        """Restarts the numbering of asynchronous calls at 0, under a new prefix.

        Needed after an abort, which leaves the ranks at different numbers. All ranks must call it
        equally often.
        """
        with self._lock:
            self._restarts += 1
            for kind in _KINDS_OF_CALLS:
                self._counts[kind] = 0

    def connection(self) -> Any:
        """Returns the store, over a separate connection that is created on first use.

        Separate, because training may block its own connection for minutes. Connecting may take
        seconds if name resolution is slow. Any, because stores also accept bytes, unlike their type
        stubs.
        """
        with self._connecting:
            assert self._store is not None
            if not self.connections:
                try:
                    self.connections.append(self._store.clone())
                except (AttributeError, RuntimeError):
                    self.connections.append(self._store)
            return self.connections[0]


#: A process that saves or loads without other ranks.
SINGLE_RANK = RankGroup(None, 0, 1, "")


def is_distributed(no_dist: bool = False) -> bool:
    """Returns True if the operation involves a process group."""
    return not no_dist and dist.is_available() and dist.is_initialized()


def own_rank() -> int:
    """Returns the global rank of this process, or 0 without a process group."""
    return dist.get_rank() if is_distributed() else 0


def group_for(
    process_group: dist.ProcessGroup | None, use: str, members: Sequence[int] | None = None
) -> RankGroup:
    """Returns the ranks of a process group for one purpose.

    Raises:
        ValueError: this process is not a member of the group or of ``members``.
    """
    if is_distributed():
        rank = dist.get_rank(process_group)
        if rank < 0 or (members is not None and rank not in members):
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group or mesh of this call: make "
                "the call only on its members, or pass a different process_group"
            )
    return RankGroup.of(process_group).subgroup(use, members)


def current_group(
    process_group: dist.ProcessGroup | None,
) -> weakref.ReferenceType[dist.ProcessGroup] | None:
    """Returns a weak reference to the process group that a call would use now, or None if there is
    none."""
    if not is_distributed():
        return None
    group = dist.group.WORLD if process_group is None else process_group
    # A strong reference would keep the group's store alive.
    return None if group is None else weakref.ref(group)
