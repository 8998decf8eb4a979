"""How ranks that poll in step see the same event at the same poll, without waiting for each other.

Ranks ask once a training step whether something has happened that only all of them together may
act on. A collective would tell, and cost every step a wait for the slowest rank, and for its
device. Instead:

1. Every rank counts its polls. All ranks poll as often, be it some time apart.
2. Until its part of the event a rank answers its polls with no, by itself. With its part it posts,
   by another thread, the number of these polls, if nobody has posted a greater one, and after
   that it adds one to the parts.
3. From then on each poll is settled for all ranks by the first that comes to it: with yes where all
   parts are there, with no otherwise. ``answer`` is the greatest poll that was answered with no,
   or the one with yes, after which it does not change.
4. The yes is later than any poll that was answered with no, because all parts are there only after
   all those numbers are. So every rank settles it, none by itself, and all act at that poll. Who
   knows that a rank is lost, and its part with it, says yes, too: those that look act as one.
5. No rank gets far ahead, which the others would have to make up for: at every eighth poll it says
   that it has come there, and waits until all have come to the eighth before. Ranks in step have,
   long ago. What is known to have happened, or to fail, ends the wait.

So the event is acted on at the first poll that no rank has come to when the last part is there. A
poll before this rank's part does not ask the store, except for each eighth one.
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

# Ranks look for each other at each so many polls; nobody gets twice as many ahead.
_NEAR = 8

# In turn: who comes to the one after next has seen that all have come to the next.
_REACHED = ("reached/even", "reached/odd")


class Lockstep:
    """One event. Each rank makes one, in the same order, and polls it from one thread.

    Args:
        meeting: of the ranks, of which there are several.
        timeout: in seconds, for a store that does not answer.
        pause: waits so many seconds, between looks for ranks that are behind.
    """

    def __init__(
        self, meeting: Meeting, timeout: float, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._rank = meeting.rank
        self._size = meeting.size
        self._asker = meeting.asker
        # Or it would keep the process group's store after its end.
        self._meeting = weakref.ref(meeting)
        self._timeout = timeout
        self._pause = pause
        self._prefix = meeting.next_prefix("lockstep")
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._polls = 0
        self._looks = False
        self._is_over = False
        self._answer = ""  # as last seen

    def part(self) -> None:
        """This rank's part has happened: from now on polls look. From any thread, once.

        Raises:
            CheckpointException: with a ConnectionError, the store is lost.
        """
        with self._lock:
            self._looks = True
            polls = self._polls
        self._ask(self._post, polls, self._connected())
        _core.fault_point("part is posted")

    def over(self) -> None:
        """All that will happen has, or somebody is lost: no poll waits. From any thread."""
        self._is_over = True

    def poll(self, is_alone: Callable[[], bool]) -> bool:
        """Whether to act now; the same on all ranks.

        Args:
            is_alone: act now, whatever the others do.

        Raises:
            CheckpointException: with a ConnectionError, the store is lost.
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
        """After this rank has acted: lets go of the store."""
        self._store = None

    def end(self) -> None:
        """After all ranks have acted: the keys go. Does nothing without the process group."""
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
            count: of the polls at which ranks look for each other.
        """
        begun = time.monotonic()
        while not self._ask(self._reach, count, self._connected()):
            if self._is_over or is_alone():
                return
            self._pause(min(0.01, max(0.0002, (time.monotonic() - begun) / 10)))

    def _reach(self, count: int, store: Store) -> bool:
        """Comes there, unless somebody has not come to the one before."""
        # Each key counts every second of them.
        if count > 1 and store.add(_REACHED[(count - 1) % 2], 0) < self._size * (count // 2):
            return False
        store.add(_REACHED[count % 2], 1)
        return True

    def _connected(self) -> Store:
        if self._store is None:
            meeting = self._meeting()
            assert meeting is not None  # the call has it
            connection = self._ask(meeting.connection)
            self._store = PrefixStore(self._prefix, connection)
        return self._store

    def _ask(self, work: Callable[..., T], *args: Any) -> T:
        return self._asker.ask(_STEP, self._rank, self._timeout, work, *args)


def _number(answer: str) -> int:
    return int(answer.partition(":")[2] or 0)


def _replaced(store: Store, seen: str, new: str) -> str:
    """The answer, which is the new one where it was as seen."""
    return store.compare_set(_ANSWER, seen, new).decode()
