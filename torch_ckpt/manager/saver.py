"""Runs the saves of a manager, one at a time.

1. All ranks wait until the previous save has ended. If it failed, its error is raised after the
   next save has started.
2. All ranks read the state and create a writer for the step (preparation.py), and a background save
   starts. Some saves compare the replicas first.
3. The save's thread handles the result. If the save succeeded, the step counts as saved, and rank 0
   deletes old steps. If the save failed, the error is kept for the next call.
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
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.intervals import Schedule
from torch_ckpt.manager.pending import OnCommit, OneShotCallback, Pending
from torch_ckpt.manager.preparation import SavePreparer
from torch_ckpt.manager.retention import Retention
from torch_ckpt.manager.run_context import RunContext
from torch_ckpt.manager.timeline import Timeline
from torch_ckpt.ranks.failures import causes
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.events import Event, saved_message
from torch_ckpt.saving.replica_check import ReplicaCheck
from torch_ckpt.state.app_state import AppState, BeforeSave


@dataclass(eq=False)
class Saver:
    """Starts saves and reports their results. All ranks make the same calls in the same order.

    Attributes:
        owner: the manager, which a running save keeps alive: the save needs the manager's lease.
        retention: the retention rules, which may require a metric.
        on_commit: called with the step on rank 0, in the save's thread.
        raises: True raises errors, False only counts them.
        deadline: seconds from a preemption notice to the end of the process, for a log message.
        async_saves: False waits until each save has ended.
        staging: see :func:`torch_ckpt.async_save`.
        pending: the last save that has started.
        errors: number of failed saves and of failed ``on_commit`` callbacks.
    """

    run: RunContext
    owner: weakref.ref[Any]
    timeline: Timeline
    preparer: SavePreparer
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
        self._has_metric = self.retention.keep_best is None
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._last_seconds = 0.0
        self._lock = threading.Lock()  # guards _failure and errors, which the save's thread sets
        self._failure: BaseException | None = None

    def save(
        self,
        step: int,
        state: MutableMapping[str, Any],
        metrics: dict[str, float],
        notes: dict[str, Any],
        is_last: bool,
    ) -> bool:
        """Starts a save, then raises the error of the previous save if it failed.

        Args and raises: see :meth:`torch_ckpt.CheckpointManager.save`. ``is_last`` is True if
        training stops after this save.

        Returns:
            True if the save was started.
        """
        self.wait()
        self.pending = None
        earlier = self._take_failure()
        # The wait for the previous save is not part of this save's cost.
        ready = time.perf_counter()
        try:
            has_started = self._start(step, state, metrics, notes, ready, is_last)
        except Exception as error:
            if earlier is None:
                raise
            LOGGER.error("the save of step %d also failed to start: %s", step, causes(error))
            raise earlier from error
        if earlier is not None:
            raise earlier
        return has_started

    def fail_to_start(self, step: int, error: BaseException, started: float) -> bool:
        """Handles the error of a save that could not start: raises it, or only counts it and
        returns False."""
        self._failed(step, error, time.perf_counter() - started)
        self.check_for_errors()
        return False

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """See :meth:`torch_ckpt.CheckpointManager.guard`."""
        self._guarded.add(optimizer)
        if self.pending is not None:
            self.pending.handle.guard(optimizer)

    def wait(self) -> None:
        """Waits for the running save. If it failed, a later call raises its error."""
        if self.pending is not None:
            self.pending.wait()

    def check_for_errors(self) -> None:
        """See :meth:`torch_ckpt.CheckpointManager.check_for_errors`."""
        failure = self._take_failure()
        if failure is not None:
            raise failure

    # --- private ---------------------------------------------------------------------------------

    def _start(
        self,
        step: int,
        state: MutableMapping[str, Any],
        metrics: dict[str, float],
        notes: dict[str, Any],
        started: float,
        is_last: bool,
    ) -> bool:
        run = self.run
        self.schedule.save_started()
        check_replicas = self.replicas.next_mode()
        read = AppState(state, before_save=self.before_save).state_dict
        try:
            self._require_metric(metrics, is_last)
            overwrite = self.timeline.may_replace(step)
            ready = self.preparer.prepare(step, read, metrics, notes, overwrite=overwrite)
        except (ValueError, TypeError):
            raise
        except Exception as error:
            return self.fail_to_start(step, error, started)
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
            return self.fail_to_start(step, error, started)
        self.timeline.last_step = step
        pending = self.pending = Pending(step, handle, self.schedule.decision_count, on_commit)
        for optimizer in self._guarded:
            handle.guard(optimizer)
        blocked = time.perf_counter() - started
        message = f"step {step}: {size(ready.bytes)}, training waited {blocked * 1000:.0f} ms"
        try:
            # on_event must not wait for the save: the callback that ends it is not attached yet.
            pending.thread = threading.get_ident()
            run.report(Event("saving", step, run.rank, blocked, ready.bytes, message))
        finally:
            pending.thread = None
            ended = functools.partial(self._ended, self.owner(), pending, blocked)
            handle.committed.add_done_callback(OneShotCallback(ended))
        if not self.async_saves or (check_replicas == "error" and _has_failed(handle)):
            self.wait()
            self.check_for_errors()
        return True

    def _require_metric(self, metrics: dict[str, float], is_last: bool) -> None:
        """Refuses a save without the metric of ``keep_best`` as long as no step has it, so that the
        first save of a run detects a misspelled name."""
        if self._has_metric:
            return
        problem = self.preparer.lacks_metric(self.retention, metrics)
        self._has_metric = problem is None
        if problem and is_last:
            # Saving before the process ends matters more than the rule.
            LOGGER.error("%s", problem)
        elif problem:
            raise ValueError(
                f"{problem}. Pass the metric to save(metrics=...); use math.nan if the step has no "
                "value yet."
            )

    def _log_expected_time(self, step: int, bytes_of_state: int) -> None:
        if self.deadline is None or self.run.rank != 0:
            return
        expected = (
            f"the previous save took {self._last_seconds:.1f} s"
            if self._last_seconds
            else f"this is the first save ({size(bytes_of_state)}), so its duration is unknown"
        )
        level = logging.WARNING if self._last_seconds > self.deadline else logging.INFO
        LOGGER.log(
            level,
            "saving step %d before preemption (preemption_deadline: %.0f s); %s",
            step,
            self.deadline,
            expected,
        )

    def _ended(
        self, _owner: object, pending: Pending, blocked: float, future: Future[Metadata]
    ) -> None:
        """Handles the result of a save, in the save's thread."""
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
        self.timeline.saved(step)
        self.deletions.saved(step)
        self._last_seconds = metrics.total_s
        message = saved_message(step, metrics)
        run.report(Event("saved", step, run.rank, metrics.total_s, metrics.bytes, message, metrics))
        if run.rank == 0:
            clean_up = functools.partial(self.schedule.delete_decisions, pending.decision_count)
            self.deletions.after_commit(step, clean_up)

    def _failed(self, step: int, error: BaseException, seconds: float) -> None:
        self._count(error)
        self.timeline.failed(step)
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
    """True if the save failed before its sources were staged. All ranks get the same answer."""
    return handle.staged.done() and handle.staged.exception() is not None
