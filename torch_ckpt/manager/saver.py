"""The saves of a manager, one after the other.

1. The save before has ended, on all ranks. Its error is raised where errors are, after the next
   save has begun.
2. All ranks read the state and make a writer of the step (attempts.py), and a save in the
   background begins. At some saves it compares the replicas.
3. Its thread tells of its end: the step counts, and rank 0 deletes; or its error is kept.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt._base.formatting import size
from torch_ckpt._base.log import LOGGER
from torch_ckpt.api import async_save
from torch_ckpt.errors import OnCommitFailed
from torch_ckpt.manager.attempts import Attempt
from torch_ckpt.manager.course import Course
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.intervals import Schedule
from torch_ckpt.manager.pending import Once, OnCommit, Pending
from torch_ckpt.manager.retention import Retention
from torch_ckpt.manager.run import Run
from torch_ckpt.ranks.failures import causes
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.events import Event, saved_message
from torch_ckpt.saving.replica_check import ReplicaCheck
from torch_ckpt.state.app_state import AppState, BeforeSave


@dataclass(eq=False)
class Saver:
    """Begins saves and tells of their ends. All ranks make the same calls, in the same order.

    Attributes:
        owner: lives until a save has ended; the save needs its lease.
        retention: needs a metric, perhaps.
        on_commit: called with the step on rank 0, in the save's thread.
        raises: whether errors are raised; else they are counted.
        deadline: seconds that the process has for a last save, for the log.
        async_saves: False: each is waited for.
        staging: see :func:`torch_ckpt.async_save`.
        pending: the last save that has begun.
        errors: how many have failed, or their ``on_commit``.
    """

    run: Run
    owner: weakref.ref[Any]
    course: Course
    attempt: Attempt
    schedule: Schedule
    deletions: Deletions
    replicas: ReplicaCheck
    retention: Retention
    before_save: BeforeSave
    on_commit: Callable[[int], None] | None
    raises: bool
    deadline: float | None
    async_saves: bool
    staging: str
    pending: Pending | None = None
    errors: int = 0

    def __post_init__(self) -> None:
        self._knows_metric = self.retention.keep_best is None
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._last_seconds = 0.0
        self._lock = threading.Lock()  # for the error and its count, which the save's thread sets
        self._failure: BaseException | None = None

    def save(
        self,
        step: int,
        state: MutableMapping[str, Any],
        metrics: dict[str, float],
        notes: dict[str, Any],
        is_last: bool,
    ) -> bool:
        """Whether it was begun. Raises the error of the save before, but begins this one first.

        Args and raises: see :meth:`torch_ckpt.CheckpointManager.save`; with ``is_last`` the run
        ends.
        """
        self.wait()
        self.pending = None
        earlier = self._take_failure()
        # Waiting for the save before does not count as its cost.
        ready = time.perf_counter()
        try:
            has_begun = self._begin(step, state, metrics, notes, ready, is_last)
        except Exception as error:
            if earlier is None:
                raise
            LOGGER.error("step %d was not begun, either: %s", step, causes(error))
            raise earlier from error
        if earlier is not None:
            raise earlier
        return has_begun

    def not_begun(self, step: int, error: BaseException, begun: float) -> bool:
        """Raises why a save could not begin, or counts it; False."""
        self._failed(step, error, time.perf_counter() - begun)
        self.check_for_errors()
        return False

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`torch_ckpt.CheckpointManager.guard`."""
        self._guarded.add(optimizer)
        if self.pending is not None:
            self.pending.handle.guard(optimizer)

    def wait(self) -> None:
        """For the save under way, whose error is left to the next call that raises it."""
        if self.pending is not None:
            self.pending.wait()

    def check_for_errors(self) -> None:
        """See :meth:`torch_ckpt.CheckpointManager.check_for_errors`."""
        failure = self._take_failure()
        if failure is not None:
            raise failure

    # --- private ---------------------------------------------------------------------------------

    def _begin(
        self,
        step: int,
        state: MutableMapping[str, Any],
        metrics: dict[str, float],
        notes: dict[str, Any],
        begun: float,
        is_last: bool,
    ) -> bool:
        run = self.run
        self.schedule.begun()
        check_replicas = self.replicas.next_mode()
        read = AppState(state, before_save=self.before_save).state_dict
        try:
            self._require_metric(metrics, is_last)
            overwrite = self.course.may_replace(step)
            ready = self.attempt.prepare(step, read, metrics, notes, overwrite=overwrite)
        except (ValueError, TypeError):
            raise
        except Exception as error:
            return self.not_begun(step, error, begun)
        if is_last:
            self._log_expected_time(step, ready.bytes)
        on_commit = None if self.on_commit is None else OnCommit(self.on_commit, step)
        try:
            handle = async_save(
                ready.values,
                storage_writer=ready.writer,
                staging=self.staging,
                process_group=run.process_group,
                timeout=run.timeout,
                on_commit=on_commit,
                check_replicas=check_replicas,
            )
        except Exception as error:
            return self.not_begun(step, error, begun)
        self.course.last_step = step
        pending = self.pending = Pending(step, handle, self.schedule.decided, on_commit)
        for optimizer in self._guarded:
            handle.guard(optimizer)
        blocked = time.perf_counter() - begun
        message = f"step {step}: {size(ready.bytes)}, training waited {blocked * 1000:.0f} ms"
        try:
            # What is called may not wait for the save: its end is not looked for yet.
            pending.thread = threading.get_ident()
            run.report(Event("saving", step, run.rank, blocked, ready.bytes, message))
        finally:
            pending.thread = None
            ended = functools.partial(self._ended, self.owner(), pending, blocked)
            handle.committed.add_done_callback(Once(ended))
        if not self.async_saves or (check_replicas == "error" and _has_failed(handle)):
            self.wait()
            self.check_for_errors()
        return True

    def _require_metric(self, metrics: dict[str, float], is_last: bool) -> None:
        """Refuses a save while no step has what retention compares: the first one loses nothing."""
        if self._knows_metric:
            return
        problem = self.attempt.lacks_metric(self.retention, metrics)
        self._knows_metric = problem is None
        if problem and is_last:
            # The last save before the end is worth more than the rule.
            LOGGER.error("%s", problem)
        elif problem:
            raise ValueError(
                f"{problem}. Give it in save(metrics=...), and math.nan where a step has none yet"
            )

    def _log_expected_time(self, step: int, bytes_of_state: int) -> None:
        if self.deadline is None or self.run.rank != 0:
            return
        expected = (
            f"the last one took {self._last_seconds:.1f} s"
            if self._last_seconds
            else f"it is the first one, of {size(bytes_of_state)}"
        )
        level = logging.WARNING if self._last_seconds > self.deadline else logging.INFO
        LOGGER.log(
            level,
            "step %d is saved before the end, %.0f s from the notice: %s",
            step,
            self.deadline,
            expected,
        )

    def _ended(
        self, _owner: object, pending: Pending, blocked: float, future: Future[Metadata]
    ) -> None:
        """By the save's thread."""
        pending.thread = threading.get_ident()
        error = future.exception()
        seconds = pending.handle.metrics().total_s
        auto = self.schedule.auto
        try:
            if error is None or isinstance(error, OnCommitFailed):
                if auto is not None:
                    auto.saved(blocked, seconds)
                self._saved(pending)
            else:
                if auto is not None:
                    auto.failed()
                self._failed(pending.step, error, seconds)
            if isinstance(error, OnCommitFailed):
                self._count(error)
                LOGGER.error("step %d: %s", pending.step, causes(error))
        finally:
            pending.ended.set()

    def _saved(self, pending: Pending) -> None:
        step, metrics, run = pending.step, pending.handle.metrics(), self.run
        differing = pending.handle.differing
        if differing:
            message = f"step {step}: {differing}"
            run.report(Event("differing_replicas", step, run.rank, message=message))
        self.course.saved(step)
        self.deletions.saved(step)
        self._last_seconds = metrics.total_s
        message = saved_message(step, metrics)
        run.report(Event("saved", step, run.rank, metrics.total_s, metrics.bytes, message, metrics))
        if run.rank == 0:
            forget = functools.partial(self.schedule.forget, pending.decided)
            self.deletions.after_commit(step, forget)

    def _failed(self, step: int, error: BaseException, seconds: float) -> None:
        self._count(error)
        self.course.failed(step)
        message = f"step {step} could not be saved: {causes(error)}"
        self.run.report(Event("save_failed", step, self.run.rank, seconds, message=message))

    def _count(self, error: BaseException) -> None:
        with self._lock:
            self.errors += 1
            self._failure = error if self.raises else None

    def _take_failure(self) -> BaseException | None:
        with self._lock:
            failure, self._failure = self._failure, None
        return failure


def _has_failed(handle: AsyncSave) -> bool:
    """True if the save failed before its sources were staged, on all ranks."""
    return handle.staged.done() and handle.staged.exception() is not None
