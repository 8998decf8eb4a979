"""Deletes steps on rank 0, in the background.

1. When a manager is created, a sweep removes or completes what crashes have left behind
   (csrc/directory/step.h).
2. After each save, rank 0 deletes the steps that are stale or that no rule keeps
   (steps/retention.py), up to the saved step. A step that a process is loading is not deleted until
   after a later save.
3. The rules never delete a step that this process is reading, or the step that was verified last.
4. Explicit deletions, pins and the choice of a step to restore are queued after these deletions.

A step is stale if training was rewound to an earlier step. It belongs to an abandoned timeline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import TypeVar

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.events import Event
from torch_ckpt.steps import StepInfo, StepStore
from torch_ckpt.steps.retention import Retention

T = TypeVar("T")


class Deletions:
    """Deletes steps one at a time, on a dedicated thread.

    The training thread protects the steps that it is reading, and waits for the deleting thread. A
    save's thread makes room before the save, and queues deletions after the commit. The deleting
    thread deletes steps and reports events. An event callback on this thread may call any method,
    which then does not wait. If a step cannot be deleted, the error is logged, and the deletion is
    retried after a later save.

    Every rank has an object of this class, but only rank 0 queues deletions.

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
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards _reading, _verified and _stale
        self._reading: set[int] = set()
        self._verified: int | None = None
        self._stale: set[int] = set()
        self._newest: int | None = None  # the step from which training continues, or the last save
        self._has_warned_of_missing_metric = False

    # --- protected steps -------------------------------------------------------------------------

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Protects a step from the retention rules within the context."""
        with self._lock:
            self._reading.add(step)
        try:
            yield
        finally:
            with self._lock:
                self._reading.discard(step)

    def verified(self, step: int) -> None:
        """Protects a step that was found to be intact, until another step is verified."""
        with self._lock:
            self._verified = step

    def rewound(self, step: int) -> list[int]:
        """Records that training continues from a step, which makes all later steps stale.

        Returns:
            The later steps, also those that only the hosts' disks have.

        Raises:
            OSError: the root cannot be listed.
        """
        # Training has not passed later steps, whatever was saved before.
        self._newest = step
        steps = {info.step for info in self._store.entries(leftovers=False)}
        # These are copied to the root later.
        steps.update(copy.step for copy in self._store.copies())
        stale = {other for other in steps if other > step}
        with self._lock:
            self._stale = stale
        return sorted(stale)

    def saved(self, step: int) -> None:
        """Records that a step is not stale, because it was saved again or deleted."""
        with self._lock:
            self._stale.discard(step)

    # --- deletions -------------------------------------------------------------------------------

    def submit_sweep(self, attempt: str) -> None:
        """Queues a sweep of what crashes have left behind. Spares the files of this run's
        attempt."""
        self._thread.submit(self._sweep, attempt)

    def after_commit(self, step: int) -> None:
        """Queues the deletion of stale steps and of steps that no rule keeps.

        Args:
            step: the step that was saved; later steps are kept.
        """
        self._newest = step
        self.repeat()

    def repeat(self) -> None:
        """Queues the same deletions as after the last save or restore of this run.

        A local tier calls it after each copy to the root: the copied step may be one that training
        has not reached again.
        """
        if self._newest is not None:
            # submit() raises this while the interpreter exits. The next run will delete the steps.
            with suppress(RuntimeError):
                self._thread.submit(self._delete_unkept_or_log, self._newest)

    # --- waiting for the deleting thread ---------------------------------------------------------

    def run_in_order(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Calls a function on the deleting thread, after the work that is already queued.

        Returns:
            The result of the function.

        Raises:
            concurrent.futures.TimeoutError: the function has not returned within ``timeout``
                seconds.
            RuntimeError: the interpreter is exiting, or this object is closed.
        """
        if self._is_deleting() or os.getpid() != self._pid:
            # A forked child has no such thread.
            return function()
        return self._thread.submit(function).result(timeout)

    def wait_until_idle(self, timeout: float | None = None) -> None:
        """Waits for the queued work, for at most ``timeout`` seconds."""
        _core.fault_point("wait for deletions", self._store.root)
        with suppress(RuntimeError, FutureTimeout):
            self.run_in_order(lambda: None, timeout)

    def make_room(self, timeout: float) -> None:
        """Deletes the steps that no rule keeps, as after a commit, and waits for the deletions.

        Without this, a run that starts on a full disk could not commit its first step.
        """
        self.repeat()
        self.wait_until_idle(timeout)

    def close(self) -> None:
        """Waits for the queued work, and refuses new work."""
        # An event callback on the deleting thread must not wait for its own thread.
        self._thread.shutdown(wait=not self._is_deleting())

    # --- private, on the deleting thread ---------------------------------------------------------

    def _sweep(self, attempt: str) -> None:
        started = time.perf_counter()
        try:
            names = self._store.sweep(attempt=attempt)
        except Exception as error:
            # No save depends on the sweep, so log the error instead of raising it.
            LOGGER.warning("leftovers of interrupted saves could not be removed: %s", error)
            return
        if names:
            seconds = time.perf_counter() - started
            message = (
                f"{self._store.root}: removed leftovers of interrupted saves and deletions: "
                f"{', '.join(names)}"
            )
            self._report(Event("leftovers", -1, 0, seconds, message=message))

    def _delete_unkept_or_log(self, newest: int) -> None:
        try:
            self._delete_unkept(newest)
        except Exception as error:
            LOGGER.warning("old steps could not be deleted: %s. The next save will retry", error)

    def _delete_unkept(self, newest: int) -> None:
        # Finish deletions that had to wait for a reader.
        self._store.sweep(deleted_only=True)
        if self._retention.keeps_all:
            return
        with self._lock:
            stale = frozenset(self._stale)
        # Do not count stale steps among the newest: they would displace the step just saved. Delete
        # stale steps that training has passed: otherwise, a restart would fall back to one of them
        # if a newer step is damaged.
        steps = [info for info in self._store.entries(leftovers=False) if info.step <= newest]
        passed = [info.step for info in steps if info.step in stale and not info.pinned]
        counted = [info for info in steps if info.step not in stale]
        self._warn_of_missing_metric(counted)
        unwanted = self._retention.to_delete(counted)
        for step in passed:
            self._delete(step, "it is stale, because training was rewound to an earlier step")
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
            # The step may have been pinned since it was listed.
            is_protected = is_protected or self._store.is_pinned(step)
            is_deleted = not is_protected and self._store.delete(step)
        except OSError as error:
            LOGGER.warning(
                "step %d could not be deleted: %s. The next save will retry", step, error
            )
            return
        if is_deleted:
            self.saved(step)
            seconds = time.perf_counter() - started
            message = f"step {step} was deleted: {why}"
            self._report(Event("deleted", step, 0, seconds, message=message))

    def _is_deleting(self) -> bool:
        return threading.current_thread().name.startswith(f"{self._name}_")
