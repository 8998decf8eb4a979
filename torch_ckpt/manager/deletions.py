"""What rank 0 deletes beside training.

1. At the start the sweep ends what crashes have interrupted (steps/local.py).
2. After each save go, of the steps up to it, those of before training went back, and those that no
   rule keeps (retention.py). One that somebody reads stays until a later save.
3. No rule deletes what this process reads, nor the step that was last seen to be well.
4. Who deletes or pins by hand, or chooses among the steps, waits for a turn after these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.manager.retention import Retention
from torch_ckpt.ranks.failures import causes
from torch_ckpt.saving.events import Event
from torch_ckpt.steps import StepInfo, StepStore

T = TypeVar("T")


class Deletions:
    """Deletes on a thread of its own, one thing after another.

    The training thread says what it reads and waits for turns; the thread of a save hands in what
    is to go after its commit, and looks for room before it. The deleting thread deletes, and
    reports it: who is told there may call all of this, and waits for nothing. What cannot be
    deleted is logged and tried again later, as no save needs it.

    Every rank has one, but only rank 0's is given something to delete.

    Args:
        store: where the steps are.
        retention: which of them stay.
        report: called with each event, on the deleting thread.
    """

    def __init__(
        self, store: StepStore, retention: Retention, report: Callable[[Event], None]
    ) -> None:
        self._store = store
        self._retention = retention
        self._report = report
        self._name = f"torch_ckpt steps {id(self)}"
        self._thread = ThreadPoolExecutor(1, self._name)
        self._lock = threading.Lock()  # for the three below
        self._reading: set[int] = set()
        self._verified: int | None = None
        self._stale: set[int] = set()  # of before training went back
        self._newest: int | None = None  # the last step that was saved or restored
        self._has_said_what_is_missing = False

    # --- what stays ------------------------------------------------------------------------------

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """While it is open no rule deletes the step."""
        with self._lock:
            self._reading.add(step)
        try:
            yield
        finally:
            with self._lock:
                self._reading.discard(step)

    def verified(self, step: int) -> None:
        """The step is well: it stays until another one is."""
        with self._lock:
            self._verified = step

    def restored(self, step: int) -> None:
        """Training goes on from a step, which is well.

        Raises:
            OSError: the root cannot be listed.
        """
        self.verified(step)
        self.went_back(step)
        self._newest = step

    def went_back(self, step: int) -> None:
        """Training goes on from a step; those after it wait to be replaced.

        Raises:
            OSError: the root cannot be listed.
        """
        later = {info.step for info in self._store.entries(leftovers=False) if info.step > step}
        with self._lock:
            self._stale = later

    def saved(self, step: int) -> None:
        """A step is not of before training went back, or is not any more."""
        with self._lock:
            self._stale.discard(step)

    # --- what goes -------------------------------------------------------------------------------

    def submit_sweep(self, attempt: str) -> None:
        """Ends what crashes have interrupted, but not what this run's attempt has begun."""
        self._thread.submit(self._sweep, attempt)

    def after_commit(self, step: int, forget: Callable[[], None]) -> None:
        """Deletes what is too much now.

        Args:
            step: that was saved; later ones stay.
            forget: called first, by the deleting thread: removes the keys that the save's decision
                has left in the ranks' store.
        """
        self._newest = step
        # Not where the interpreter ends: the next run deletes what is too much.
        with suppress(RuntimeError):
            self._thread.submit(self._after_commit, step, forget)

    # --- turns -----------------------------------------------------------------------------------

    def in_turn(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """What work returns, done after all that the deleting thread has to do by now.

        Raises:
            concurrent.futures.TimeoutError: it has not come to it within so many seconds.
            RuntimeError: the interpreter ends, or this is closed.
        """
        if self._is_deleting():
            return work()
        return self._thread.submit(work).result(timeout)

    def settle(self, timeout: float | None = None) -> None:
        """Waits for what the deleting thread has to do by now."""
        _core.fault_point("wait for deletions", self._store.root)
        with suppress(RuntimeError, FutureTimeout):
            self.in_turn(lambda: None, timeout)

    def make_room(self, timeout: float) -> None:
        """Deletes what no rule keeps by now, as after a commit, and waits for that.

        A run that begins on a full disk, perhaps with stricter rules, commits nothing otherwise.
        """
        if self._newest is not None:
            with suppress(RuntimeError):
                self._thread.submit(self._delete_quietly, self._newest)
        self.settle(timeout)

    def close(self) -> None:
        """Waits likewise; from now on nothing is deleted."""
        # Not from an event of a deletion, which would wait for itself.
        self._thread.shutdown(wait=not self._is_deleting())

    # --- private: by the deleting thread ---------------------------------------------------------

    def _sweep(self, attempt: str) -> None:
        begun = time.perf_counter()
        try:
            names = self._store.sweep(attempt=attempt)
        except Exception as error:
            # The other ranks go on, and no save needs it.
            LOGGER.warning("what is left of saves that did not end could not be removed: %s", error)
            return
        if names:
            seconds = time.perf_counter() - begun
            message = (
                f"{self._store.root}: removed what was left of saves and deletions that did not "
                f"end: {', '.join(names)}"
            )
            self._report(Event("leftovers", -1, 0, seconds, message=message))

    def _after_commit(self, step: int, forget: Callable[[], None]) -> None:
        try:
            forget()
        except Exception as error:
            LOGGER.warning("keys of the store could not be removed: %s", causes(error))
        self._delete_quietly(step)

    def _delete_quietly(self, newest: int) -> None:
        try:
            self._delete_what_no_rule_keeps(newest)
        except Exception as error:
            LOGGER.warning("steps could not be deleted (they will be, later): %s", error)

    def _delete_what_no_rule_keeps(self, newest: int) -> None:
        # What was being read when it was to go.
        self._store.sweep(deleted_only=True)
        if self._retention.keeps_all:
            return
        with self._lock:
            stale = frozenset(self._stale)
        # Those of before training went back wait to be replaced; counted among the newest they
        # would have the one go that was just saved. Where training has passed them they go
        # themselves, or a restart would find them should a newer one be damaged.
        steps = [info for info in self._store.entries(leftovers=False) if info.step <= newest]
        passed = [info.step for info in steps if info.step in stale and not info.pinned]
        counted = [info for info in steps if info.step not in stale]
        self._say_what_is_missing(counted)
        unwanted = self._retention.to_delete(counted)
        for step in passed:
            self._delete(step, "it is of before training went back")
        for step in unwanted:
            self._delete(step, "no rule keeps it")

    def _say_what_is_missing(self, steps: list[StepInfo]) -> None:
        why = self._retention.waits_for(steps)
        if why and not self._has_said_what_is_missing:
            self._has_said_what_is_missing = True
            LOGGER.warning("%s: %s", self._store.root, why)

    def _delete(self, step: int, why: str) -> None:
        begun = time.perf_counter()
        with self._lock:
            is_protected = step in self._reading or step == self._verified
        try:
            has_gone = not is_protected and self._store.delete(step)
        except OSError as error:
            LOGGER.warning("step %d could not be deleted (it will be, later): %s", step, error)
            return
        if has_gone:
            self.saved(step)
            seconds = time.perf_counter() - begun
            message = f"step {step} is deleted: {why}"
            self._report(Event("deleted", step, 0, seconds, message=message))

    def _is_deleting(self) -> bool:
        return threading.current_thread().name.startswith(f"{self._name}_")
