"""Deletion of steps by rank 0, in the background.

1. At the start a sweep removes or completes what crashes have left (steps/local.py).
2. After each save, delete from the steps up to it the stale ones and those that no rule keeps
   (retention.py). A step that a process is loading stays until after a later save.
3. The rules never delete a step that this process reads, nor the step that was verified last.
4. Explicit deletions, pins and the choice of a step to restore are queued after these deletions.

A step is stale if training was rewound behind it: it belongs to a training timeline that was left.
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
    """Deletes steps on a thread of its own, one after another.

    The training thread protects the steps that it reads, and waits for the deleting thread. A
    save's thread makes room before the save, and submits deletions after the commit. The deleting
    thread deletes and reports events. A callback for such an event may call all methods; they do
    not wait there. A step that cannot be deleted is logged and tried again after a later save.

    Every rank has an object of this class, but only rank 0 submits deletions.

    Args:
        store: the steps.
        retention: rules for the steps to keep.
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
        self._lock = threading.Lock()  # guards the next three
        self._reading: set[int] = set()
        self._verified: int | None = None
        self._stale: set[int] = set()
        self._newest: int | None = None  # the step that was saved or restored last
        self._has_warned_of_missing_metric = False

    # --- protected steps -------------------------------------------------------------------------

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Protects a step from the rules while the context is open."""
        with self._lock:
            self._reading.add(step)
        try:
            yield
        finally:
            with self._lock:
                self._reading.discard(step)

    def verified(self, step: int) -> None:
        """Protects a step that was found intact, until another one is."""
        with self._lock:
            self._verified = step

    def restored(self, step: int) -> None:
        """Records that training continues from a step that was loaded, and is thus intact.

        Raises:
            OSError: the root cannot be listed.
        """
        self.verified(step)
        self.rewound(step)
        self._newest = step

    def rewound(self, step: int) -> None:
        """Records that training continues from a step: the steps after it are stale.

        Raises:
            OSError: the root cannot be listed.
        """
        later = {info.step for info in self._store.entries(leftovers=False) if info.step > step}
        with self._lock:
            self._stale = later

    def saved(self, step: int) -> None:
        """Records that a step is not stale, or no longer."""
        with self._lock:
            self._stale.discard(step)

    # --- deletions -------------------------------------------------------------------------------

    def submit_sweep(self, attempt: str) -> None:
        """Submits the removal of what crashes have left. Spares the files of this run's attempt."""
        self._thread.submit(self._sweep, attempt)

    def after_commit(self, step: int, clean_up: Callable[[], None]) -> None:
        """Submits the deletion of the steps that no rule keeps now.

        Args:
            step: step that was saved; later steps stay.
            clean_up: called first, on the deleting thread: removes the keys of the save's decision
                from the ranks' store.
        """
        self._newest = step
        # Raised when the interpreter exits. Then the next run deletes the steps.
        with suppress(RuntimeError):
            self._thread.submit(self._after_commit, step, clean_up)

    # --- waiting for the deleting thread ---------------------------------------------------------

    def run_in_order(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Calls a function on the deleting thread, after the work submitted so far.

        Returns:
            The result of the function.

        Raises:
            concurrent.futures.TimeoutError: it has not ended within ``timeout`` seconds.
            RuntimeError: the interpreter is exiting, or this object is closed.
        """
        if self._is_deleting():
            return function()
        return self._thread.submit(function).result(timeout)

    def wait_until_idle(self, timeout: float | None = None) -> None:
        """Waits for the work submitted so far, for at most ``timeout`` seconds."""
        _core.fault_point("wait for deletions", self._store.root)
        with suppress(RuntimeError, FutureTimeout):
            self.run_in_order(lambda: None, timeout)

    def make_room(self, timeout: float) -> None:
        """Deletes the steps that no rule keeps, as after a commit, and waits for the deletions.

        Without this, a run that starts on a full disk could not commit its first step.
        """
        if self._newest is not None:
            with suppress(RuntimeError):
                self._thread.submit(self._delete_unkept_or_log, self._newest)
        self.wait_until_idle(timeout)

    def close(self) -> None:
        """Waits for the work submitted so far. Later submissions are refused."""
        # A callback for an event of a deletion must not wait for its own thread.
        self._thread.shutdown(wait=not self._is_deleting())

    # --- private, on the deleting thread ---------------------------------------------------------

    def _sweep(self, attempt: str) -> None:
        started = time.perf_counter()
        try:
            names = self._store.sweep(attempt=attempt)
        except Exception as error:
            # No save depends on the sweep, so neither this rank nor others fail.
            LOGGER.warning("leftovers of interrupted saves could not be removed: %s", error)
            return
        if names:
            seconds = time.perf_counter() - started
            message = (
                f"{self._store.root}: removed leftovers of interrupted saves and deletions: "
                f"{', '.join(names)}"
            )
            self._report(Event("leftovers", -1, 0, seconds, message=message))

    def _after_commit(self, step: int, clean_up: Callable[[], None]) -> None:
        try:
            clean_up()
        except Exception as error:
            LOGGER.warning(
                "keys could not be removed from the process group's store: %s", causes(error)
            )
        self._delete_unkept_or_log(step)

    def _delete_unkept_or_log(self, newest: int) -> None:
        try:
            self._delete_unkept(newest)
        except Exception as error:
            LOGGER.warning("steps could not be deleted; the next save tries again: %s", error)

    def _delete_unkept(self, newest: int) -> None:
        # Finish deletions that waited for a reader.
        self._store.sweep(deleted_only=True)
        if self._retention.keeps_all:
            return
        with self._lock:
            stale = frozenset(self._stale)
        # Do not count stale steps among the newest: they would displace the step just saved. Delete
        # the stale steps that training has passed, or a restart would fall back to one of them if a
        # newer step is damaged.
        steps = [info for info in self._store.entries(leftovers=False) if info.step <= newest]
        passed = [info.step for info in steps if info.step in stale and not info.pinned]
        counted = [info for info in steps if info.step not in stale]
        self._warn_of_missing_metric(counted)
        unwanted = self._retention.to_delete(counted)
        for step in passed:
            self._delete(step, "it is stale: training was rewound to an earlier step")
        for step in unwanted:
            self._delete(step, "no rule keeps it")

    def _warn_of_missing_metric(self, steps: list[StepInfo]) -> None:
        why = self._retention.waits_for(steps)
        if why and not self._has_warned_of_missing_metric:
            self._has_warned_of_missing_metric = True
            LOGGER.warning("%s: %s", self._store.root, why)

    def _delete(self, step: int, why: str) -> None:
        started = time.perf_counter()
        with self._lock:
            is_protected = step in self._reading or step == self._verified
        try:
            is_deleted = not is_protected and self._store.delete(step)
        except OSError as error:
            LOGGER.warning(
                "step %d could not be deleted; the next save tries again: %s", step, error
            )
            return
        if is_deleted:
            self.saved(step)
            seconds = time.perf_counter() - started
            message = f"step {step} was deleted: {why}"
            self._report(Event("deleted", step, 0, seconds, message=message))

    def _is_deleting(self) -> bool:
        return threading.current_thread().name.startswith(f"{self._name}_")
