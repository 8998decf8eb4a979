"""Lets ranks that poll in step see an event at the same poll, without waiting for each other.

Once in a training step, every rank asks whether something has happened on which only all ranks
together may act. A collective would answer, but make every step wait for the slowest rank and its
device. Instead:

1. Every rank counts its polls. All ranks make the same number of polls, though not at the same
   time.
2. Until its part of the event happens, a rank answers its polls with no, independently. When its
   part happens, another thread posts the number of polls so far, unless a greater number is posted,
   and then increments the count of parts.
3. From then on, the first rank to reach a poll decides it for all: yes if all parts have been
   counted, otherwise no. ``answer`` in the store holds the greatest poll that was answered with no,
   or the one answered with yes, after which it does not change.
4. The yes comes later than every poll that was answered with no, because all those numbers are
   posted before all parts are counted. So every rank decides or reads it, and all act at the same
   poll. A rank that knows that another rank is lost, and its part with it, also decides yes, so
   that the ranks that poll act together.
5. No rank gets far ahead, because the others would have to catch up: at every eighth poll a rank
   reports that it has reached it, and waits until all ranks have reached the previous eighth poll.
   Ranks in step have reached it long before. An event that is known to have happened, or to fail,
   ends the wait.

So all ranks act at the first poll that no rank has reached when the last part is counted. A poll
before this rank's part makes no request to the store, except for each eighth one.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from torch_ckpt import _core
from torch_ckpt.ranks.meeting import Meeting

T = TypeVar("T")

_STEP = "finalize"
_PARTS = "parts"
_ANSWER = "answer"
_YES = "yes"
_NO = "no"

# Ranks wait for each other at every eighth poll; no rank gets 16 ahead.
_NEAR = 8

# Two keys suffice: a rank that reaches one poll has seen that all ranks have reached the previous
# one.
_REACHED = ("reached/even", "reached/odd")


class Lockstep:
    """One event. Each rank creates one, in the same order, and polls it from one thread.

    Args:
        rendezvous: connects the ranks, at least two.
        timeout: seconds to wait for the store.
        pause: sleeps for a number of seconds, between checks for ranks that are behind.
    """

    def __init__(
        self, rendezvous: Meeting, timeout: float, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._rank = rendezvous.rank
        self._size = rendezvous.size
        self._asker = rendezvous.asker
        # A strong reference would keep the process group's store alive.
        self._meeting = weakref.ref(rendezvous)
        self._timeout = timeout
        self._pause = pause
        self._prefix = rendezvous.next_prefix("lockstep")
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._polls = 0
        self._looks = False
        self._is_over = False
        self._answer = ""  # the last one seen

    def part(self) -> None:
        """Records that this rank's part has happened, so that polls ask the store. Called once, by
        any thread.

        Raises:
            CheckpointException: the store is lost; the cause is a ConnectionError.
        """
        with self._lock:
            self._looks = True
            polls = self._polls
        self._ask(self._post, polls, self._connected())
        _core.fault_point("part is posted")

    def over(self) -> None:
        """Records that the event is over or that a rank is lost: polls do not wait. Called by any
        thread."""
        self._is_over = True

    def poll(self, is_alone: Callable[[], bool]) -> bool:
        """Returns True if this rank must act now. The result is the same on all ranks.

        Args:
            is_alone: returns True to act now, independently of the other ranks.

        Raises:
            CheckpointException: the store is lost; the cause is a ConnectionError.
        """
        number = self._polls + 1
        if number % _NEAR == 0:
            self._keep_near(number // _NEAR, is_alone)
        with self._lock:
            self._polls = number
            looks = self._looks
        if is_alone():
            return True
        return looks and self._ask(self._settle, number, self._connected())

    def rest(self) -> None:
        """Releases the store, after this rank has acted."""
        self._store = None

    def end(self) -> None:
        """Deletes the keys, after all ranks have acted. Does nothing after the process group has
        been destroyed."""
        if self._rank == 0 and self._meeting() is not None:
            for key in (_PARTS, _ANSWER, *_REACHED):
                self._ask(self._connected().delete_key, key)
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

    def _keep_near(self, count: int, is_alone: Callable[[], bool]) -> None:
        """Waits for ranks that are behind.

        Args:
            count: number of the poll among those at which ranks wait for each other.
        """
        begun = time.monotonic()
        while not self._ask(self._reach, count, self._connected()):
            if self._is_over or is_alone():
                return
            self._pause(min(0.01, max(0.0002, (time.monotonic() - begun) / 10)))

    def _reach(self, count: int, store: Store) -> bool:
        """Reports that this rank has reached a poll. Returns False if a rank has not reached the
        previous one."""
        # Each key counts every second one of these polls.
        if count > 1 and store.add(_REACHED[(count - 1) % 2], 0) < self._size * (count // 2):
            return False
        store.add(_REACHED[count % 2], 1)
        return True

    def _connected(self) -> Store:
        if self._store is None:
            meeting = self._meeting()
            assert meeting is not None  # the running call refers to it
            connection = self._ask(meeting.connection)
            self._store = PrefixStore(self._prefix, connection)
        return self._store

    def _ask(self, work: Callable[..., T], *args: Any) -> T:
        return self._asker.ask(_STEP, self._rank, self._timeout, work, *args)


def _number(answer: str) -> int:
    return int(answer.partition(":")[2] or 0)


def _replaced(store: Store, seen: str, new: str) -> str:
    """Replaces the answer if it is still ``seen``. Returns the answer in the store."""
    return store.compare_set(_ANSWER, seen, new).decode()
