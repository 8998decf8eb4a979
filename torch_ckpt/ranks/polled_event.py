"""Lets ranks detect an event at the same poll, without waiting for each other.

In each training step, every rank polls whether an event has happened on which all ranks must act
together. A collective would make every step wait for the slowest rank and its device. Instead:

1. Every rank counts its polls. All ranks make the same number of polls, but not at the same time.
2. The event consists of one part per rank. Until its own part happens, a rank answers its polls
   with no, without asking other ranks. When the part happens, another thread posts the rank's
   number of polls, unless a greater number is already posted, and then increments the part count.
3. From then on, the first rank to reach a poll decides the answer for all ranks: yes if all parts
   have been counted, otherwise no. The key ``answer`` has the last poll that was answered with no,
   or the poll that was answered with yes. After a yes the key does not change.
4. The poll answered with yes is later than every poll answered with no, because each rank posts its
   number before its part is counted. So every rank decides or reads the yes, and all ranks act at
   the same poll. A rank that knows that another rank and its part are lost also decides yes, so
   that the remaining ranks act together.
5. No rank gets far ahead, because the others would have to catch up. At every eighth poll, a rank
   reports that it has reached the poll, and waits until all ranks have reached the previous eighth
   poll. If ranks are in step, they reached it long before. The wait ends early if the event is
   known to have happened or to have failed.

So all ranks act at the first poll that no rank had reached when the last part was counted. Before a
rank's own part has happened, its polls make no requests to the store, except every eighth poll.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from torch_ckpt import _core
from torch_ckpt.ranks.group import RankGroup

T = TypeVar("T")

_STEP = "finalize"
_PARTS = "parts"
_ANSWER = "answer"
_YES = "yes"
_NO = "no"

# Number of polls after which ranks wait for each other. So no rank gets 16 polls ahead.
_NEAR = 8

# Each key counts the ranks that have reached an eighth poll. Two keys suffice: before a rank counts
# itself at one eighth poll, all ranks have been counted at the previous one.
_REACHED = ("reached/even", "reached/odd")


class PolledEvent:
    """An event that all ranks detect at the same poll.

    All ranks must create their events in the same order, and poll each event from one thread.

    Args:
        group: the ranks. There must be at least two.
        timeout: seconds to wait for the store.
        pause: sleeps for the given number of seconds. Called while waiting for ranks that are
            behind.
    """

    def __init__(
        self, group: RankGroup, timeout: float, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._rank = group.rank
        self._size = group.size
        self._store_thread = group.store_thread
        # A strong reference would keep the process group's store alive.
        self._group = weakref.ref(group)
        self._timeout = timeout
        self._pause = pause
        self._prefix = group.next_prefix("event")
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._polls = 0
        self._asks_store = False
        self._is_over = False
        self._answer = ""  # the last value of the key that this rank has seen

    def report_part(self) -> None:
        """Records that this rank's part has happened, so that polls ask the store. Must be called
        only once, from any thread.

        Raises:
            CheckpointException: the store is lost; the cause is a ConnectionError.
        """
        with self._lock:
            self._asks_store = True
            polls = self._polls
        self._request(self._post, polls, self._connected())
        _core.fault_point("part is posted")

    def stop_waiting(self) -> None:
        """Records that the event is over or that a rank is lost, so that polls no longer wait. May
        be called from any thread."""
        self._is_over = True

    def poll(self, must_act: Callable[[], bool]) -> bool:
        """Returns True if this rank must act now. The result is the same on all ranks.

        Args:
            must_act: returns True if this rank must act now, independently of the other ranks.

        Raises:
            CheckpointException: the store is lost; the cause is a ConnectionError.
        """
        number = self._polls + 1
        if number % _NEAR == 0:
            self._keep_near(number // _NEAR, must_act)
        with self._lock:
            self._polls = number
            asks_store = self._asks_store
        if must_act():
            return True
        return asks_store and self._request(self._settle, number, self._connected())

    def release_store(self) -> None:
        """Releases the store, after this rank has acted."""
        self._store = None

    def delete_keys(self) -> None:
        """Deletes the keys in the store, after all ranks have acted. Has no effect after the
        process group has been destroyed."""
        if self._rank == 0 and self._group() is not None:
            for key in (_PARTS, _ANSWER, *_REACHED):
                self._request(self._connected().delete_key, key)
            self._store = None

    # --- private ---------------------------------------------------------------------------------

    def _post(self, polls: int, store: Store) -> None:
        answer = ""
        while polls > _number(answer):
            answer = _replaced(store, answer, f"{_NO}:{polls}")
        store.add(_PARTS, 1)

    def _settle(self, poll: int, store: Store) -> bool:
        has_happened = self._is_over or store.add(_PARTS, 0) == self._size
        mine = f"{_YES if has_happened else _NO}:{poll}"
        while not self._answer.startswith(_YES) and _number(self._answer) < poll:
            self._answer = _replaced(store, self._answer, mine)
        return self._answer.startswith(_YES) and _number(self._answer) <= poll

    def _keep_near(self, count: int, must_act: Callable[[], bool]) -> None:
        """Waits for ranks that are behind.

        Args:
            count: the number of polls so far at which ranks wait for each other.
        """
        begun = time.monotonic()
        while not self._request(self._reach, count, self._connected()):
            if self._is_over or must_act():
                return
            self._pause(min(0.01, max(0.0002, (time.monotonic() - begun) / 10)))

    def _reach(self, count: int, store: Store) -> bool:
        """Reports that this rank has reached an eighth poll. Returns False, without a report, if a
        rank has not reached the previous eighth poll."""
        # The two keys take turns, so each counts every second eighth poll.
        if count > 1 and store.add(_REACHED[(count - 1) % 2], 0) < self._size * (count // 2):
            return False
        store.add(_REACHED[count % 2], 1)
        return True

    def _connected(self) -> Store:
        if self._store is None:
            group = self._group()
            assert group is not None  # the running call keeps it alive
            connection = self._request(group.connection)
            self._store = PrefixStore(self._prefix, connection)
        return self._store

    def _request(self, work: Callable[..., T], *args: Any) -> T:
        return self._store_thread.request(_STEP, self._rank, self._timeout, work, *args)


def _number(answer: str) -> int:
    return int(answer.partition(":")[2] or 0)


def _replaced(store: Store, seen: str, new: str) -> str:
    """Replaces the answer if it is still ``seen``. Returns the answer in the store."""
    return store.compare_set(_ANSWER, seen, new).decode()
