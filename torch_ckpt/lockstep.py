"""How ranks that poll in step see the same event at the same poll, without waiting for each other.

Ranks ask once a training step whether something has happened that only all of them together may
act on. A collective would tell, and cost every step a wait for the slowest rank, and for its
device. Instead:

1. Every rank counts its polls. All ranks poll as often, be it some time apart.
2. A rank that has its part of the event tells, by other means, how many polls it had made until
   then. Those it has answered with no, without looking; from then on it looks.
3. The coordinator, when it knows of the event at its poll n, decides on a poll that is after n and
   after all those. At each poll it publishes its number and what it has decided.
4. Another rank that looks at its poll n needs to know what the coordinator published at poll n-1,
   which it did a step ago. Only a rank that is more than a step ahead waits for it.

So the event is acted on one poll late, and a poll is one exchange with the store at most.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.coordination import Meeting, ask_store, no_sign_of_life

T = TypeVar("T")

_STEP = "finalize"
_KEY = "decided"


class Lockstep:
    """One event. Each rank makes one, in the same order, and polls it from one thread.

    Args:
        meeting: of the ranks.
        timeout: in seconds, for a coordinator that does not poll any more.
    """

    def __init__(self, meeting: Meeting, timeout: float) -> None:
        self._rank = meeting.rank
        self._size = meeting.size
        # Or it would keep the process group's store after its end.
        self._meeting = weakref.ref(meeting)
        self._timeout = timeout
        self._prefix = meeting.next_prefix("lockstep")
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._polls = 0
        self._looks = False
        self._after: int | None = None  # the coordinator's; None: it does not know of the event
        self._decided = 0  # the poll at which all ranks act; 0: not yet

    def look(self) -> int:
        """From now on polls look; returns how many there were before. From any thread."""
        with self._lock:
            self._looks = True
            return self._polls

    def happened(self, after: int) -> None:
        """The event has happened; on the coordinator, from any thread.

        Args:
            after: the greatest number that any rank's :meth:`look` has returned.
        """
        self._after = after

    def poll(self, is_alone: Callable[[], bool]) -> bool:
        """Whether to act now; the same on all ranks.

        Args:
            is_alone: ends a wait for the coordinator, which has died or is out of reach.

        Raises:
            CheckpointException: with a TimeoutError, the coordinator has not polled for too long;
                with a ConnectionError, the store is lost.
        """
        if self._size == 1:
            return self._after is not None
        with self._lock:
            self._polls += 1
            looks = self._looks
        if self._rank == 0:
            return self._poll_of_coordinator()
        if not looks:
            return False
        begun = time.monotonic()
        while not self._is_known():
            if is_alone():
                return True
            waited = time.monotonic() - begun
            if waited >= self._timeout:
                raise CheckpointException(_STEP, no_sign_of_life(_STEP, [0], self._timeout))
            time.sleep(min(0.01, max(0.0002, waited / 10)))
        return 0 < self._decided <= self._polls

    def rest(self) -> None:
        """After this rank has acted: lets go of the store."""
        self._store = None

    def end(self) -> None:
        """After all ranks have acted: the key goes. Does nothing without the process group."""
        if self._rank == 0 and self._meeting() is not None:
            self._ask(self._connected().delete_key, _KEY)
            self._store = None

    # --- private ---------------------------------------------------------------------------------

    def _poll_of_coordinator(self) -> bool:
        if 0 < self._decided <= self._polls:
            return True
        if self._after is not None and self._decided == 0:
            self._decided = max(self._polls, self._after) + 1
        self._ask(self._connected().set, _KEY, f"{self._polls}:{self._decided}")
        return False

    def _is_known(self) -> bool:
        """Whether the coordinator has decided on this poll."""
        if self._decided > 0 or self._polls == 1:
            return True
        published = self._ask(self._read, self._connected())
        polls, self._decided = map(int, published.split(b":")) if published else (0, 0)
        return self._decided > 0 or polls >= self._polls - 1

    def _read(self, store: Store) -> bytes:
        return store.get(_KEY) if store.check([_KEY]) else b""

    def _connected(self) -> Store:
        if self._store is None:
            meeting = self._meeting()
            assert meeting is not None  # the call has it
            connection = self._ask(meeting.connection)
            self._store = PrefixStore(self._prefix, connection)
        return self._store

    def _ask(self, work: Callable[..., T], *args: Any) -> T:
        return ask_store(_STEP, self._rank, self._timeout, work, *args)
