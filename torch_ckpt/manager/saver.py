"""Runs the saves of a manager, one at a time.

1. All ranks wait until the previous save has ended. If it failed, its error is raised after the
   next save has started.
2. In the first save, rank 0 lists the root. It sends all ranks whether any step has the metric that
   retention compares.
3. A background save starts (saving/handle.py): every rank creates a target for the step, and reads
   its state after the hooks. If this fails on a rank, all ranks are notified.
4. Some saves compare the replicas first.
5. The save's thread handles the result. If the save succeeded, the step counts as saved, and rank 0
   deletes old steps. If the save failed, the error is kept for the next call.
6. If a save failed because ranks were declared dead, later saves would wait for them again. So no
   save starts until these ranks have resumed, for which each due save waits a tenth of the timeout.

An export (exports.py) takes the place of a save: 1, 4 and 5 apply to it.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import _core
from torch_ckpt._base.formatting import size
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.version import __version__
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.errors import CheckpointError, OnCommitFailed, RootInUse
from torch_ckpt.events import Event
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.exports import Exports
from torch_ckpt.manager.local_tier import Tier
from torch_ckpt.manager.policies import SaveOptions
from torch_ckpt.manager.run_context import RunContext
from torch_ckpt.manager.schedule import Schedule
from torch_ckpt.manager.timeline import Timeline
from torch_ckpt.options import WriteOptions
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import causes, dead_ranks
from torch_ckpt.ranks.group import RankGroup, group_for
from torch_ckpt.saving.handle import AsyncSave, start
from torch_ckpt.saving.save_state import StateDict
from torch_ckpt.saving.target import Target
from torch_ckpt.state.states import BeforeSave, States
from torch_ckpt.steps import encoded_marker, parsed_marker
from torch_ckpt.steps.retention import Retention

#: Seconds for which a due save waits at most for ranks that were declared dead.
_REJOIN_SECONDS = 10.0


class CallbackThreads(set[int]):
    """Ids of the threads that are running a callback of a save."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Block that runs a callback in the calling thread."""
        thread = threading.get_ident()
        self.add(thread)
        try:
            yield
        finally:
            self.discard(thread)


class Pending:
    """The last save that has started.

    The training thread creates this object and waits for the save. The save's thread sets
    ``ended``. In a forked child, ``ended`` is never set.

    Attributes:
        step: step that is being saved.
        handle: handle of the save, set when the save has started.
        blocked: seconds for which training waited for the start.
        ended: set after the handle's future is resolved and the manager has handled the result.
        callbacks: the threads that must not wait for the save, because the save waits for them.
    """

    handle: AsyncSave

    def __init__(self, step: int) -> None:
        self.step = step
        self.blocked = 0.0
        self.ended = threading.Event()
        self.callbacks = CallbackThreads()
        self._pid = os.getpid()

    @property
    def can_wait(self) -> bool:
        """True if the calling thread may wait for the save. False in a forked child, and in a
        callback of the save, which would wait for itself."""
        return os.getpid() == self._pid and threading.get_ident() not in self.callbacks

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save has ended. Returns immediately if :attr:`can_wait` is False.

        Returns:
            False if the save has not ended within ``timeout`` seconds.
        """
        if not self.can_wait:
            return True
        _core.fault_point("wait for a save")
        return self.ended.wait(timeout)


@dataclass(eq=False)
class Saver:
    """Starts saves and reports their results. All ranks make the same calls in the same order.

    Attributes:
        owner: the manager, which a running save keeps alive: the save needs the manager's lease.
        write: the options of the files.
        deadline: seconds between a preemption notice and the end of the process, if known.
        on_error: see ``on_save_error`` of the manager.
        deletions: the manager's deletions, which also make room if the disk is full.
        retention: the retention rules, which may require a metric.
        tier: the tier on the hosts' own disks, if there is one.
        exports: the model that is exported, if any.
        pending: the last save or export that has started.
        errors: number of failed saves and exports and of failed ``on_commit`` callbacks.
        is_closed: True once the manager is closed, for example by a callback of the running save.
    """

    run: RunContext
    owner: weakref.ref[Any]
    options: SaveOptions
    write: WriteOptions
    deadline: float | None
    on_error: str
    timeline: Timeline
    schedule: Schedule
    deletions: Deletions
    retention: Retention
    before_save: BeforeSave
    exports: Exports
    tier: Tier | None = None
    pending: Pending | None = None
    errors: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self._has_metric = self.retention.keep_best is None
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._save_count = 0
        self._last_seconds = 0.0
        self._lock = threading.Lock()  # guards _failure and errors, which the save's thread sets
        self._failure: BaseException | None = None
        self._has_dead_ranks = False

    def save(
        self,
        step: int,
        state: StateDict,
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
        return self._after_previous(
            step, lambda ready: self._start(step, state, metrics, notes, ready, is_last)
        )

    def export(self, step: int, state: StateDict) -> bool:
        """Starts an export, then raises the error of the previous save if it failed.

        Args and raises: see :meth:`torch_ckpt.CheckpointManager.export`.

        Returns:
            True if the export was started.
        """
        return self._after_previous(step, lambda ready: self._start_export(step, state, ready))

    def _after_previous(self, step: int, start: Callable[[float], bool]) -> bool:
        """Waits for the previous save, and calls ``start`` with the current time."""
        self.wait()
        if self.is_closed:
            raise ValueError("cannot save: the manager was closed during the wait for another save")
        self.pending = None
        earlier = self._take_failure()
        # The wait for the previous save is not part of this save's cost.
        ready = time.perf_counter()
        if self._has_dead_ranks:
            # All ranks know it, also those that were declared dead and have resumed.
            if earlier is not None:
                raise earlier
            try:
                self._rejoin(step)
            except CheckpointException as error:
                return self.fail_to_start(step, error, ready)
        try:
            has_started = start(ready)
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

    def _rejoin(self, step: int) -> None:
        """Checks that no rank is dead any more.

        Raises:
            CheckpointException: some ranks sent no heartbeat.
        """
        run = self.run
        # Do not count these exchanges: a rank whose failure was raised by another method makes one
        # more.
        group, kind = group_for(run.process_group, "manager"), f"{run.attempt}-rejoin-{step}"
        with Exchange.open(group, kind, min(run.timeout / 10, _REJOIN_SECONDS)) as exchange:
            exchange.exchange("rejoin", lambda: (None, None), lambda _values: None)
        self._has_dead_ranks = False

    def _start(
        self,
        step: int,
        state: StateDict,
        metrics: dict[str, float],
        notes: dict[str, Any],
        started: float,
        is_last: bool,
    ) -> bool:
        run, options = self.run, self.options
        self.schedule.save_started()
        is_checked = self._save_count % options.check_replicas_every == 0
        check_replicas = options.check_replicas if is_checked else "off"
        self._save_count += 1
        pending = Pending(step)
        if is_last:
            self._log_expected_time(step)

        # Do not refer to `pending`: it refers to the save, which keeps the function.
        callbacks = pending.callbacks

        on_commit = options.on_commit if self.tier is None else options.on_local_commit

        def call_on_commit(_checkpoint: Checkpoint) -> None:
            assert on_commit is not None
            with callbacks.running():
                on_commit(step)

        with self._following(pending, self._ended) as has_begun:
            try:
                self._require_metric(metrics, is_last)
                handle = start(
                    lambda: self.before_save.read(state),
                    lambda: self._target(step, metrics, notes),
                    RankGroup.of(run.process_group),
                    staging=options.staging,
                    timeout=run.timeout,
                    on_commit=None if on_commit is None else call_on_commit,
                    check_replicas=check_replicas,
                    is_reported=True,
                    has_begun=has_begun,
                )
            except Exception as error:
                if self.pending is pending or _is_misuse(error):
                    raise
                return self.fail_to_start(step, error, started)
            finally:
                if self.pending is pending:
                    self.timeline.last_step = step
            for optimizer in self._guarded:
                handle.guard(optimizer)
            pending.blocked = time.perf_counter() - started
            total = handle.metrics().state_bytes
            message = f"step {step}: {size(total)}, training waited {pending.blocked * 1e3:.0f} ms"
            # on_event must not wait for the save: the callback that ends it is not attached yet.
            with callbacks.running():
                run.report(Event("saving", step, run.rank, pending.blocked, total, message))
        # If the save has failed before its sources were staged, all ranks know it.
        has_failed = handle.staged.done() and handle.staged.exception() is not None
        if not options.async_saves or (check_replicas == "error" and has_failed):
            self.wait()
            self.check_for_errors()
        return True

    def _start_export(self, step: int, state: StateDict, started: float) -> bool:
        run, exports = self.run, self.exports
        export = exports.export
        assert export is not None
        if step == exports.last_step:
            return False
        pending = Pending(step)
        with self._following(pending, self._export_ended) as has_begun:
            try:
                handle = start(
                    # If this fails, all ranks are notified.
                    lambda: self._exported(export.entry, state),
                    lambda: export.target(step, exports.newest_valid),
                    RankGroup.of(run.process_group),
                    staging=self.options.staging,
                    timeout=run.timeout,
                    check_replicas="off",
                    # The model may be the same as in the checkpoint of this step.
                    warn_unchanged=False,
                    is_reported=True,
                    has_begun=has_begun,
                )
            except Exception as error:
                if self.pending is pending or _is_misuse(error):
                    raise
                self._export_failed(step, error, time.perf_counter() - started)
                self.check_for_errors()
                return False
            for optimizer in self._guarded:
                handle.guard(optimizer)
        return True

    @contextmanager
    def _following(
        self, pending: Pending, ended: Callable[[object, Pending, Future[Checkpoint]], None]
    ) -> Iterator[Callable[[AsyncSave], None]]:
        """Block that starts a save, and yields the function to call with its handle.

        If the function was called, the save's thread calls ``ended`` after the save and after the
        block, also if the block raises an exception.
        """

        def has_begun(handle: AsyncSave) -> None:
            pending.handle = handle
            self.pending = pending

        try:
            yield has_begun
        finally:
            if self.pending is pending:
                # Futures keep their callbacks, so the callback drops its reference to the manager.
                calls = [functools.partial(ended, self.owner(), pending)]
                pending.handle.committed.add_done_callback(lambda future: calls.pop()(future))

    def _exported(self, entry: str, state: StateDict) -> StateDict:
        """Returns the state of the exported entry."""
        model = self.before_save.read(state)[entry]
        exported: StateDict = States({entry: model}).saved()[entry]
        return exported

    def _export_ended(self, _owner: object, pending: Pending, future: Future[Checkpoint]) -> None:
        """Handles the result of an export, in the export's thread."""
        error, metrics = future.exception(), pending.handle.metrics()
        with pending.callbacks.running():
            try:
                if error is not None:
                    self._export_failed(pending.step, error, metrics.total_s)
                    return
                message = (
                    f"the model of step {pending.step} is exported to {metrics.path} in "
                    f"{metrics.total_s:.2f} s; training was blocked for "
                    f"{metrics.blocked_s * 1000:.0f} ms"
                )
                rank, step = self.run.rank, pending.step
                self.exports.succeeded(step)
                self.run.report(
                    Event("exported", step, rank, metrics.total_s, metrics.bytes, message, metrics)
                )
            finally:
                pending.ended.set()

    def _export_failed(self, step: int, error: BaseException, seconds: float) -> None:
        self._count(error)
        self._has_dead_ranks = self._has_dead_ranks or bool(dead_ranks(error))
        message = f"the model of step {step} could not be exported: {causes(error)}"
        self.run.report(Event("export_failed", step, self.run.rank, seconds, message=message))

    def _require_metric(self, metrics: dict[str, float], is_last: bool) -> None:
        """Refuses a save without the metric of ``keep_best`` as long as no step has it, so that the
        first save of a run detects a misspelled name. Checks the metrics of rank 0."""
        if self._has_metric:
            return

        def lacks_metric() -> str | None:
            others = (info.metrics for info in self.run.store.entries(leftovers=False))
            return self.retention.lacks_metric(_numbers(metrics), others)

        problem = self.run.ask_rank_0("CheckpointManager.save metrics", lacks_metric)
        self._has_metric = problem is None
        if problem and is_last:
            # Saving before the process ends matters more than the rule.
            LOGGER.error("%s", problem)
        elif problem:
            raise ValueError(
                f"{problem}. Pass the metric to save(metrics=...); use math.nan if the step has no "
                "value yet."
            )

    def _target(self, step: int, metrics: dict[str, float], notes: dict[str, Any]) -> Target:
        """Creates the target of a step."""
        run = self.run
        run.lease.require()
        # Make a copy, because the caller may change the dicts.
        marker = parsed_marker(
            encoded_marker(
                {
                    "metrics": _numbers(metrics),
                    "notes": _require_json(notes),
                    "ranks": run.ranks,
                    "torch_ckpt": __version__,
                }
            )
        )

        def marker_if_leased() -> dict[str, Any]:
            # Called right before the rename that completes the step.
            run.lease.require()
            return {**marker, **run.store.run_marker()}

        return run.store.target(
            step,
            self.write,
            attempt=run.attempt,
            may_replace=self.timeline.may_replace(step),
            marker=marker_if_leased,
            # Stop waiting before the other ranks time out, because they need this rank's plan.
            make_room=functools.partial(self.deletions.make_room, run.timeout / 2),
        )

    def _log_expected_time(self, step: int) -> None:
        deadline = self.deadline
        if deadline is None or self.run.rank != 0:
            return
        expected = (
            f"the previous save took {self._last_seconds:.1f} s"
            if self._last_seconds
            else "this is the first save, so its duration is unknown"
        )
        LOGGER.log(
            logging.WARNING if self._last_seconds > deadline else logging.INFO,
            "saving step %d before preemption (deadline: %.0f s); %s",
            step,
            deadline,
            expected,
        )

    def _ended(self, _owner: object, pending: Pending, future: Future[Checkpoint]) -> None:
        """Handles the result of a save, in the save's thread."""
        error = future.exception()
        seconds = pending.handle.metrics().total_s
        auto = self.schedule.auto
        with pending.callbacks.running():
            try:
                if error is None or isinstance(error, OnCommitFailed):
                    if auto is not None:
                        auto.saved(pending.blocked, seconds)
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
        message = (
            f"step {step} is saved: this rank wrote {size(metrics.bytes)} in {metrics.total_s:.2f} "
            f"s; training was blocked for {metrics.blocked_s * 1000:.0f} ms"
        )
        run.report(Event("saved", step, run.rank, metrics.total_s, metrics.bytes, message, metrics))
        if self.tier is not None:
            self.tier.saved(step)
        if run.rank == 0:
            self.deletions.after_commit(step)

    def _failed(self, step: int, error: BaseException, seconds: float) -> None:
        error = self._lost_lease(error) or error
        self._count(error)
        self._has_dead_ranks = self._has_dead_ranks or bool(dead_ranks(error))
        self.timeline.failed(step)
        message = f"step {step} could not be saved: {causes(error)}"
        self.run.report(Event("save_failed", step, self.run.rank, seconds, message=message))

    def _lost_lease(self, error: BaseException) -> RootInUse | None:
        """Returns the error of a lost lease, on rank 0: the run that has taken the root may have
        removed the files of the save, so the save's own error does not name the cause."""
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        is_known = any(isinstance(cause, RootInUse) for cause, _stack in failures)
        if self.run.rank != 0 or self.is_closed or is_known or isinstance(error, RootInUse):
            return None
        try:
            self.run.lease.require()
        except RootInUse as lost:
            lost.__cause__ = error
            return lost
        except OSError:
            pass
        return None

    def _count(self, error: BaseException) -> None:
        with self._lock:
            self.errors += 1
            self._failure = error if self.on_error == "raise" else None

    def _take_failure(self) -> BaseException | None:
        with self._lock:
            failure, self._failure = self._failure, None
        return failure


def _is_misuse(error: Exception) -> bool:
    """Returns True if the arguments of a save cannot be saved. Such an error is raised even if
    failed saves are only counted."""
    is_of_arguments = isinstance(error, ValueError | TypeError)
    # The failure of an earlier save may have the type of its cause, too.
    return is_of_arguments and not isinstance(error, CheckpointError)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Returns the metrics as floats. One-element tensors count as numbers."""
    if not isinstance(metrics, Mapping):
        kind = type(metrics).__name__
        raise TypeError(f'metrics must be a dict such as {{"loss": 0.5}}, got a {kind}')
    numbers = {}
    for name, metric in metrics.items():
        try:
            numbers[name] = float(metric)
        except OverflowError:
            raise ValueError(
                f"metrics[{name!r}] is an integer too large for a float. Pass math.inf instead."
            ) from None
        except (TypeError, ValueError) as error:
            raise _with_context(f"metrics[{name!r}] must be a number", error) from None
    return numbers


def _require_json(notes: dict[str, Any]) -> dict[str, Any]:
    for name, note in notes.items() if isinstance(notes, dict) else ():
        try:
            json.dumps({name: note}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise _with_context(f"notes[{name!r}] must be a JSON value", error) from None
    return notes


def _with_context(text: str, error: TypeError | ValueError) -> TypeError | ValueError:
    kind = ValueError if isinstance(error, ValueError) else TypeError
    return kind(f"{text}: {error}")
