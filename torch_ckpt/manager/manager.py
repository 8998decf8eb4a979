"""The checkpoints of a training run: when they are saved, which are kept, which one is restored.

1. ``save(step, state)`` is called in every step, on every rank. Whether it saves, all ranks know
   alike: by the step, by rank 0's decision (intervals.py), or because a rank was told to stop
   (ranks/preemption.py).
2. The save before has ended by then, on all ranks, and its error is raised or counted on all.
3. The state is copied, and a save in the background writes the step's directory (attempts.py,
   steps/local.py, saving/async_save.py). The step is complete when it has its name.
4. A thread of rank 0 then deletes the steps that no rule keeps (deletions.py, retention.py).
5. ``restore(state)`` loads the newest complete step that rank 0 sees. Where it is damaged, all
   ranks go on to the one before (restoring.py).
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, MutableMapping
from concurrent.futures import Future
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.hooks import RemovableHandle

from torch_ckpt._base.formatting import size
from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt._base.options import refuse_unknown, require_choice
from torch_ckpt._base.progress import wants_bar
from torch_ckpt.api import async_save
from torch_ckpt.errors import CheckpointError, OnCommitFailed
from torch_ckpt.inspection.verify import VerifyReport
from torch_ckpt.loading.renaming import Rename
from torch_ckpt.loading.report import LoadReport, Names
from torch_ckpt.manager.attempts import Attempt, agree_on_name, new_name
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.intervals import Interval, Schedule
from torch_ckpt.manager.pending import Once, OnCommit, Pending
from torch_ckpt.manager.restoring import Restorer
from torch_ckpt.manager.retention import Retention
from torch_ckpt.manager.stop_notice import StopNotice
from torch_ckpt.ranks.calls import group_now, meeting_of
from torch_ckpt.ranks.failures import causes
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS
from torch_ckpt.saving.events import Event, Reporters, saved_message
from torch_ckpt.saving.metrics import SaveMetrics
from torch_ckpt.saving.replica_check import ReplicaCheck
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.state.app_state import AppState, BeforeSave
from torch_ckpt.steps import StepInfo, open_steps, step_name
from torch_ckpt.steps.lease import Lease

State = MutableMapping[str, Any]


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of a training run.

    Every rank makes one, and makes the same calls in the same order. A context manager: leaving the
    block waits for what is under way.

    ::

        with torch_ckpt.CheckpointManager("checkpoints", interval=100, keep_last=3) as manager:
            state = {"model": model, "optimizer": optimizer}
            for step in range(manager.restore(state), steps):
                train(step)
                manager.save(step + 1, state)  # so many steps are done
                if manager.should_stop:
                    break

    Args:
        root: directory of the steps, one that all ranks see, or a URL that fsspec knows.
        interval: when to save. A number N: after every N steps. A ``timedelta``: so much time
            apart. "auto": as often as loses least, by what saves cost here; see
            :class:`torch_ckpt.intervals.AutoInterval`. A function of the step: where it is true,
            on all ranks alike.
        save_on_steps: steps at which to save in any case.
        max_overhead: for "auto", the most of the training time that saves may cost, as a fraction.
        mtbf_hours: for "auto", the mean time between failures that end the run.
        keep_last, keep_every, keep_every_hours, keep_best, best_metric, best_mode, should_keep:
            which steps stay: see :class:`torch_ckpt.retention.Retention`. All of them by default.
        if_busy: "wait": a save waits for the one under way. "skip": it does not take place.
        preemption_signals: that tell a rank to stop; None: SIGTERM, where this is the main thread.
            See :func:`torch_ckpt.multihost.watch_for_preemption`; a watch that is there already,
            as another manager's, is used.
        preemption_file: a file that tells so when it appears.
        preemption_deadline: seconds from the notice until the process is ended. The last save then
            is waited for, and its expected time logged.
        check_replicas: "warn" or "error" where tensors that would be saved once differ between
            ranks; "off" does not look.
        check_replicas_every: so many saves; the first is one of them.
        on_save_error: "raise": the next save, :meth:`wait_until_finished`, :meth:`check_for_errors`
            or :meth:`close` raises the error of a save in the background. "warn_and_continue": it
            is logged, and counted in ``save_errors``.
        async_saves: False has every save wait until it is complete.
        staging: see :func:`torch_ckpt.async_save`.
        read_only: for who only looks and restores; nothing is swept, saved or deleted.
        takeover: where another run that lives has the lease on a local root, take it. The other
            run's saves fail from then on.
        on_commit: called with the step on rank 0, in the save's thread, once the step is complete.
            The save ends when it has ended, on all ranks. What it raises is raised on all as the
            error of a save, though the step stays.
        on_event: called with each :class:`torch_ckpt.events.Event`, on the thread where it happens;
            there nothing waits for the save that it is about.
        tensorboard: a ``SummaryWriter`` for rank 0, or the directory for one.
        process_group: the ranks; the default group if None.
        timeout: seconds after which a rank that shows no sign of life is given up by the others,
            who name it.
        staging_dir: see :func:`torch_ckpt.steps.open_steps`.
        load_options: passed to :func:`torch_ckpt.load`, as ``allow_pickle``.
        writer_options: passed to :class:`torch_ckpt.FileSystemWriter`. ``progress`` is a bar on
            rank 0 by default where standard error is a terminal.

    Attributes:
        save_errors: saves, or their ``on_commit``, that have failed, where ``on_save_error`` lets
            training go on.

    Raises:
        TypeError: nobody has an option of that name; the nearest one is named.
        ValueError: an option is wrong, or signals are to be watched outside the main thread.
        TimeoutError: ranks did not make one within the timeout; they are named.
        RanksDisagree: ranks made them with different roots.
        RootInUse: another run writes beneath the root, and lives; names its process. On ranks other
            than rank 0 a RuntimeError that says so.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        interval: Interval = 1,
        save_on_steps: Collection[int] = (),
        max_overhead: float = 0.01,
        mtbf_hours: float = 24.0,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_every_hours: float | None = None,
        keep_best: int | None = None,
        best_metric: str | Callable[[dict[str, float]], float] | None = None,
        best_mode: str = "min",
        should_keep: Callable[[StepInfo], bool] | None = None,
        if_busy: str = "wait",
        preemption_signals: Iterable[int] | None = None,
        preemption_file: str | os.PathLike[str] | None = None,
        preemption_deadline: float | None = None,
        check_replicas: str = "off",
        check_replicas_every: int = 10,
        on_save_error: str = "raise",
        async_saves: bool = True,
        staging: str = "blocking",
        read_only: bool = False,
        takeover: bool = False,
        on_commit: Callable[[int], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        tensorboard: Any = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT_SECONDS,
        staging_dir: str | os.PathLike[str] | None = None,
        load_options: dict[str, Any] | None = None,
        **writer_options: Any,
    ) -> None:
        refuse_unknown(CheckpointManager, FileSystemWriter, writer_options)
        require_choice("if_busy", if_busy, ("wait", "skip"))
        require_choice("on_save_error", on_save_error, ("raise", "warn_and_continue"))
        require_choice("staging", staging, ("blocking", "overlapped"))
        self._replicas = ReplicaCheck(
            check_replicas, check_replicas_every, process_group=process_group, timeout=timeout
        )
        self._retention = Retention(
            keep_last, keep_every, keep_every_hours, keep_best, best_metric, best_mode, should_keep
        )
        self._store = open_steps(root, staging_dir=staging_dir)
        self._group = process_group
        self._timeout = timeout
        self._deadline = preemption_deadline
        self._raises = on_save_error == "raise"
        self._async_saves = async_saves
        self._staging = staging
        self._on_commit = on_commit
        self._read_only = read_only
        writer_options = {"progress": wants_bar(), **writer_options}
        # Where one of them is wrong this raises, and not the first save.
        self._store.writer(
            0, attempt="", overwrite=False, marker=dict, expected_bytes=0, **writer_options
        )
        self._before_save = BeforeSave()
        meeting = meeting_of(process_group, "manager")
        self._rank, self._size = meeting.rank, meeting.size
        self._made_with = group_now(process_group)

        self._stops = False
        self._asks = False  # somebody for should_stop
        self._goes_on = False
        self._closed = False
        self._called_with: int | None = None  # save() last, or the step that was restored since
        self._knows_metric = self._retention.keep_best is None
        self._last_step: int | None = None  # that a save has begun of, or that was restored
        self._committed: int | None = None  # that this manager has saved last
        self._last_complete: int | None = None  # that or what was restored since
        self._pid = os.getpid()
        self._guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._restored: int | None = None
        self._pending: Pending | None = None
        self._last_seconds = 0.0
        self._returned_at: float | None = None
        self._was_saving = False
        self._lock = threading.Lock()  # for these two, which the save's thread sets, too
        self._failure: BaseException | None = None
        self.save_errors = 0

        # Of a run rank 0 writes what all ranks have agreed on, and deletes.
        writes = not read_only and self._rank == 0
        self._lease = Lease(self._store.lease_root if writes else None, takeover=takeover)

        def begin() -> None:
            self._report = Reporters(self._rank, on_event, tensorboard)
            self._lease.try_to_take()

        with ExitStack() as undo:
            undo.callback(self._lease.release)
            if read_only:
                # Nothing is written, so nobody need be waited for.
                begin()
                name = new_name()
            else:
                name = agree_on_name(
                    self._store.root, begin, process_group=process_group, timeout=timeout
                )
            self._deletions = Deletions(self._store, self._retention, self._report)
            self._attempt = Attempt(
                name,
                self._store,
                self._lease,
                self._deletions,
                ranks=meeting.size,
                process_group=process_group,
                timeout=timeout,
                writer_options=writer_options,
            )
            self._restorer = Restorer(
                self._store,
                self._deletions,
                self._rank,
                self._report,
                process_group=process_group,
                timeout=timeout,
                load_options=load_options or {},
            )
            self._schedule = Schedule(
                interval,
                save_on_steps,
                max_overhead=max_overhead,
                mtbf_seconds=mtbf_hours * 3600,
                skip_if_busy=if_busy == "skip",
                meeting=meeting.apart(name),
                timeout=timeout,
            )
            self._notice = StopNotice(
                () if read_only else preemption_signals,
                None if read_only else preemption_file,
                process_group,
                timeout,
            )
            # Made: from here on close() releases it.
            undo.pop_all()
        if writes:
            # It may take long, and nobody needs its end before a step is chosen or deleted.
            self._deletions.submit_sweep(name)

    # --- saving ----------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: State,
        *,
        metrics: dict[str, float] | None = None,
        notes: dict[str, Any] | None = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> bool:
        """Saves if it is time to. Call it after each step, on every rank.

        The state may change when it returns; with ``staging="overlapped"`` only after
        :meth:`wait_until_staged`, or in a step of an optimizer that :meth:`guard` knows. A step
        that this manager has just saved or restored is not saved again. Steps that are there from
        before the restored one was trained on are replaced.

        Args:
            step: the number of steps that are done; not smaller than at the call before.
            state: what makes up the training: a dict of modules, optimizers, LR schedulers,
                anything with ``state_dict()`` and ``load_state_dict()``, tensors and plain values;
                see :class:`torch_ckpt.state.app_state.AppState`.
            metrics: numbers to choose the best steps by, and to look up later; rank 0's count.
            notes: anything else to look up later, as JSON knows it; rank 0's count.
            force: save in any case.
            overwrite: training has gone back to this step without :meth:`restore`. Newer steps then
                count as after ``restore(step=...)``: they stay, and a warning names them, until
                training replaces or passes them.

        Returns:
            Whether a save of this step was begun.

        Raises:
            CheckpointException: the save before failed, or this one could not begin.
            CheckpointError: replicas differ, with ``check_replicas="error"``.
            FileExistsError: this is the first call, without :meth:`restore`, and the root has this
                step or newer ones.
            ValueError, TypeError: the step is smaller than the one before; or the step, the state,
                the metrics or the notes cannot be saved; or no step has ``best_metric`` yet, and
                the metrics lack it.
            TimeoutError: ranks did not come to the first save; they are named.
            RuntimeError: as of :meth:`restore`.
        """
        begun = time.perf_counter()
        self._refuse("save")
        # From now on an int, be it numpy's.
        step = int(step_name(step))
        try:
            self._come_to(step, overwrite)
        except (FileExistsError, ValueError):
            raise
        except Exception as error:
            return self._not_begun(step, error, begun)
        if self._stops and not self._asks:
            self._go_on()
        if self._schedule.auto is not None and self._returned_at is not None:
            is_slow = self._was_saving or self.is_saving
            self._schedule.auto.stepped(begun - self._returned_at, is_slow)
        try:
            stops = self._notice.reached(step)
            wanted = self._schedule.wants(step, lambda: self.is_saving)
            if step == self._last_step:
                # Whether it has failed all ranks know only at its end.
                self._wait_quietly()
            is_new = step != self._last_step
            saves = force or (is_new and (wanted or stops))
            try:
                return saves and self._save(step, state, metrics or {}, notes or {}, stops)
            finally:
                # Be it that the save has failed: nobody is told twice.
                if stops:
                    self._stop(step)
        finally:
            self._returned_at, self._was_saving = time.perf_counter(), self.is_saving

    @property
    def should_stop(self) -> bool:
        """Whether all ranks have come to the step at which they were told to stop, and saved it.

        A loop that never asks goes on. From its next :meth:`save` on, SIGTERM is not a notice any
        more, and ends the process as it would without a manager.
        """
        self._asks = True
        return self._stops

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._pending is not None and not self._pending.handle.done()

    @property
    def last_step(self) -> int | None:
        """The last step that this manager has saved or restored; None before.

        A step counts when its save has ended well, which ranks see at different moments: after
        :meth:`wait_until_finished` they see the same.
        """
        return self._last_complete

    def before_save(self, hook: Callable[[], None]) -> RemovableHandle:
        """Has ``hook()`` called before the state is read for a save, as for embeddings that are
        kept elsewhere.

        Returns:
            A handle, whose ``remove()`` ends that.
        """
        return self._before_save.add(hook)

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """With ``staging="overlapped"``, from now on: has the optimizer's step after a save wait
        until it may change the state; see :meth:`torch_ckpt.AsyncSave.guard`."""
        self._guarded.add(optimizer)
        if self._pending is not None:
            self._pending.handle.guard(optimizer)

    def wait_until_staged(self) -> None:
        """With ``staging="overlapped"``, waits until the state may change.

        Raises:
            CheckpointException: the save has failed before, and ``on_save_error`` is "raise".
        """
        if self._pending is not None and self._pending.is_here:
            self._pending.handle.wait_staged_quietly()
            if self._pending.handle.done():
                self._wait_quietly()
                self.check_for_errors()

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Waits for the save under way, and raises its error.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the save goes on.
            CheckpointException: the save has failed, and ``on_save_error`` is "raise".
        """
        pending = self._pending
        if pending is not None and not pending.wait(timeout):
            raise TimeoutError(f"the save of step {pending.step} has not ended in {timeout} s")
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises the error of a save that has ended, once. Does not wait.

        Ranks may see the end of a save at different steps: where the error is to be handled and
        training to go on, do so around :meth:`save` and :meth:`wait_until_finished`.

        Raises:
            CheckpointException: with the cause of each rank that failed.
        """
        failure = self._take_failure()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits for the save and the deletions under way; then nothing can be saved any more.

        Raises:
            CheckpointException: a save has failed, and ``on_save_error`` is "raise".
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._wait_quietly()
        self._closed = True
        self._notice.close()
        self._deletions.close()
        self._report.close()
        self._lease.release()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except BaseException as failure:
            if error is None:
                raise
            # What ended the block is raised.
            LOGGER.error("%s", failure)

    def __del__(self) -> None:
        # There is no notice where the constructor has raised.
        notice = getattr(self, "_notice", None)
        if notice is None or self._closed or self._read_only or os.getpid() != self._pid:
            return
        notice.close()
        self._lease.release()
        warnings.warn(
            f"the checkpoint manager of {self._store.root} was dropped without close(): a save "
            "under way goes on, and its error goes to the log; use it in a with statement",
            ResourceWarning,
            stacklevel=2,
        )

    # --- restoring -------------------------------------------------------------------------------

    def restore(
        self,
        state: State,
        step: int | None = None,
        *,
        names: Names = None,
        strict: bool = True,
        rename: Rename = None,
    ) -> int:
        """Sets the state to that of a step, in place. All ranks call it.

        It waits for a save under way. A step that is damaged, or whose files are missing, is passed
        over with a warning, unless it was asked for by number.

        Args:
            state: as for :meth:`save`; plain values in it are replaced.
            step: which one; the newest complete one if None.
            names, strict, rename: see :func:`torch_ckpt.load`. What ``strict=False`` has left as it
                was is in :attr:`restore_report`.

        Returns:
            The step; 0 where nothing has been saved, and the state is as it was.

        Raises:
            FileNotFoundError: ``step`` is given and not there; those that are, are named.
            CheckpointException: it cannot be loaded, as ``LoadMismatch`` and ``Unsafe`` tell.
            CheckpointError: steps are there, and all of them damaged.
            RuntimeError: the process group that the manager was made with has been destroyed, or
                was not there yet.
        """
        begun = time.perf_counter()
        self._require_group("restore")
        self._wait_quietly()
        restored = self._restorer.restore(state, step, names=names, strict=strict, rename=rename)
        if restored is None:
            # Whatever comes is of this run.
            self._restored, self._called_with = 0, None
            return 0
        self._last_step = self._last_complete = self._restored = restored
        self._called_with = restored
        self._returned_at = None
        if self._rank == 0:
            self._deletions.restored(restored)
        if step is not None and self._rank == 0:
            self._warn_of_later_steps(f"step {restored} is restored", restored, stacklevel=3)
        seconds = time.perf_counter() - begun
        skipped = self._restorer.skipped
        damaged = f", {skipped} damaged skipped" if skipped else ""
        message = f"restored step {restored} of {self._store.root}{damaged}, in {seconds:.2f} s"
        self._report(Event("restored", restored, self._rank, seconds, message=message))
        return restored

    @property
    def restore_report(self) -> LoadReport | None:
        """How this rank's state and the step compare that were restored last: what was loaded, and
        what ``strict=False`` has left as it was. None before, and where nothing was restored."""
        return self._restorer.report

    # --- what is there ---------------------------------------------------------------------------

    def steps(self) -> list[StepInfo]:
        """What is beneath the root now, leftovers too, by step. Asks no other rank."""
        return self._store.entries()

    def all_steps(self) -> list[int]:
        """The complete steps, ascending. Asks no other rank."""
        return [info.step for info in self._store.entries(leftovers=False)]

    def latest_step(self) -> int | None:
        """The newest complete step; None where there is none. Asks no other rank."""
        return max(self.all_steps(), default=None)

    @property
    def best_metric(self) -> str | Callable[[dict[str, float]], float] | None:
        """What the best steps are chosen by."""
        return self._retention.best_metric

    def best_step(self) -> int | None:
        """The best complete step by ``best_metric``; None where none has it.

        Raises:
            ValueError: the manager has no ``best_metric``.
        """
        if self._retention.best_metric is None:
            raise ValueError("best_step() needs best_metric, the name of the metric to compare")
        best = self._retention.best_first(self._store.entries(leftovers=False))
        return best[0].step if best else None

    def metrics(self, step: int) -> dict[str, float]:
        """Those that a complete step was saved with.

        Raises:
            FileNotFoundError: there is no such step.
        """
        return self._info(step).metrics

    def metadata(self, step: int) -> Metadata:
        """Names, shapes and dtypes of what a step holds, without reading it.

        Raises:
            FileNotFoundError, Corrupt, Unsafe: there is none, or it cannot be read.
        """
        return self._store.metadata(step)

    def wait_for_new_step(
        self, after: int | None = None, *, timeout: float | None = None, poll_seconds: float = 1.0
    ) -> int | None:
        """Waits for a complete step, for evaluation beside training.

        Args:
            after: it is to be larger than this one.
            timeout: seconds to wait; None: for ever.
            poll_seconds: how often the root is listed.

        Returns:
            The newest complete step; None where the time has passed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            newest = self.latest_step()
            if newest is not None and (after is None or newest > after):
                return newest
            left = poll_seconds if until is None else min(poll_seconds, until - time.monotonic())
            if left <= 0:
                return None
            time.sleep(left)

    def verify(self, step: int) -> VerifyReport:
        """Reads and checks all of a step; where it is well, retention keeps it. Asks no other rank.

        Raises:
            FileNotFoundError: there is no such step.
        """
        self._info(step)
        with self._deletions.reading(step):
            report = self._store.verify(step)
        if report.ok:
            self._deletions.verified(step)
        return report

    # --- by hand; rank 0 acts, and others may call it, too ----------------------------------------

    def pin(self, step: int) -> None:
        """Has retention keep a step.

        Raises:
            FileNotFoundError: there is no such complete step.
        """
        self._set_pinned(step, True)

    def unpin(self, step: int) -> None:
        """Leaves a step to retention again."""
        self._set_pinned(step, False)

    def delete(self, step: int) -> None:
        """Deletes a step now, whatever the rules say.

        Raises:
            CheckpointError: somebody saves or loads there.
            OSError: it cannot be deleted.
        """
        self._refuse("delete")
        self._lease.require()
        if self._rank == 0 and not self._deletions.in_turn(lambda: self._store.delete(step)):
            raise CheckpointError(f"step {step} is being saved or loaded: try again later")

    # --- private: saving -------------------------------------------------------------------------

    def _save(
        self,
        step: int,
        state: State,
        metrics: dict[str, float],
        notes: dict[str, Any],
        stops: bool,
    ) -> bool:
        """Whether it was begun. Raises the error of the save before, but begins this one first."""
        self._wait_quietly()
        self._pending = None
        earlier = self._take_failure()
        # Waiting for the save before does not count as its cost.
        ready = time.perf_counter()
        try:
            has_begun = self._begin(step, state, metrics, notes, ready, stops)
        except Exception as error:
            if earlier is None:
                raise
            LOGGER.error("step %d was not begun, either: %s", step, causes(error))
            raise earlier from error
        if earlier is not None:
            raise earlier
        return has_begun

    def _begin(
        self,
        step: int,
        state: State,
        metrics: dict[str, float],
        notes: dict[str, Any],
        begun: float,
        stops: bool,
    ) -> bool:
        self._schedule.begun()
        read = functools.cache(AppState(state, before_save=self._before_save).state_dict)
        if self._replicas.is_due():
            try:
                differ = self._replicas.look(step, read, self._rank, self._report)
            except Exception as error:
                # All ranks know of it, and none of them begins.
                return self._not_begun(step, error, begun)
            if differ and self._replicas.raises:
                raise CheckpointError(differ)
        try:
            self._require_metric(metrics, stops)
            overwrite = self._may_replace(step)
            ready = self._attempt.prepare(step, read, metrics, notes, overwrite=overwrite)
        except (ValueError, TypeError):
            raise
        except Exception as error:
            return self._not_begun(step, error, begun)
        if stops:
            self._log_expected_time(step, ready.bytes)
        on_commit = None if self._on_commit is None else OnCommit(self._on_commit, step)
        try:
            handle = async_save(
                ready.values,
                storage_writer=ready.writer,
                staging=self._staging,
                process_group=self._group,
                timeout=self._timeout,
                on_commit=on_commit,
                # Looked at already, and as often as this manager was told.
                check_replicas="off",
            )
        except Exception as error:
            return self._not_begun(step, error, begun)
        self._last_step = step
        pending = self._pending = Pending(step, handle, self._schedule.decided, on_commit)
        for optimizer in self._guarded:
            handle.guard(optimizer)
        blocked = time.perf_counter() - begun
        message = f"step {step}: {size(ready.bytes)}, training waited {blocked * 1000:.0f} ms"
        try:
            # What is called may not wait for the save: its end is not looked for yet.
            pending.thread = threading.get_ident()
            self._report(Event("saving", step, self._rank, blocked, ready.bytes, message))
        finally:
            pending.thread = None
            handle.committed.add_done_callback(
                Once(functools.partial(self._ended, pending, blocked))
            )
        if not self._async_saves:
            self.wait_until_finished()
        return True

    def _take_failure(self) -> BaseException | None:
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def _not_begun(self, step: int, error: BaseException, begun: float) -> bool:
        self._failed(step, error, time.perf_counter() - begun)
        self.check_for_errors()
        return False

    def _ended(self, pending: Pending, blocked: float, future: Future[Metadata]) -> None:
        """By the save's thread."""
        pending.thread = threading.get_ident()
        error = future.exception()
        metrics = pending.handle.metrics()
        try:
            if error is None or isinstance(error, OnCommitFailed):
                self._saved(pending, blocked, metrics)
            else:
                if self._schedule.auto is not None:
                    self._schedule.auto.failed()
                self._failed(pending.step, error, metrics.total_s)
            if isinstance(error, OnCommitFailed):
                self._count(error)
                LOGGER.error("step %d: %s", pending.step, causes(error))
        finally:
            pending.ended.set()

    def _saved(self, pending: Pending, blocked: float, metrics: SaveMetrics) -> None:
        if self._schedule.auto is not None:
            self._schedule.auto.saved(blocked, metrics.total_s)
        self._committed = self._last_complete = pending.step
        self._deletions.saved(pending.step)
        self._last_seconds = metrics.total_s
        message = saved_message(pending.step, metrics)
        self._report(
            Event(
                "saved",
                pending.step,
                self._rank,
                metrics.total_s,
                metrics.bytes,
                message,
                metrics,
            )
        )
        if self._rank == 0:
            forget = functools.partial(self._schedule.forget, pending.decided)
            self._deletions.after_commit(pending.step, forget)

    def _count(self, error: BaseException) -> None:
        with self._lock:
            self.save_errors += 1
            self._failure = error if self._raises else None

    def _failed(self, step: int, error: BaseException, seconds: float) -> None:
        self._count(error)
        if self._last_step == step:
            # It may be tried again.
            self._last_step = None
        message = f"step {step} could not be saved: {causes(error)}"
        self._report(Event("save_failed", step, self._rank, seconds, message=message))

    def _stop(self, step: int) -> None:
        self._stops = True
        message = f"all ranks stop at step {step}, by {self._notice.reason}"
        self._report(Event("preempted", step, self._rank, message=message))
        if self._deadline is not None:
            self.wait_until_finished()

    def _go_on(self) -> None:
        """The loop has been told to stop, and does not listen."""
        if not self._goes_on:
            self._goes_on = True
            # What was saved for the stop is there before a signal may end the process.
            self._wait_quietly()
            self._notice.ignored()
            LOGGER.warning(
                "rank %d was to stop, by %s, and goes on: the loop does not ask should_stop. The "
                "next SIGTERM ends this process",
                self._rank,
                self._notice.reason,
            )

    def _log_expected_time(self, step: int, bytes_of_state: int) -> None:
        if self._deadline is None or self._rank != 0:
            return
        expected = (
            f"the last one took {self._last_seconds:.1f} s"
            if self._last_seconds
            else f"it is the first one, of {size(bytes_of_state)}"
        )
        level = logging.WARNING if self._last_seconds > self._deadline else logging.INFO
        LOGGER.log(
            level,
            "step %d is saved before the end, %.0f s from the notice: %s",
            step,
            self._deadline,
            expected,
        )

    def _come_to(self, step: int, overwrite: bool) -> None:
        """Refuses a step that would mix two courses of training, and goes back where that is meant.

        All ranks make the same calls, so only the first one has to ask rank 0.
        """
        before = self._called_with
        if before is None and self._restored is None:
            newest = self._attempt.newest_step()
            goes_back = newest is not None and step <= newest
            if goes_back and not overwrite:
                raise FileExistsError(
                    errno.EEXIST,
                    f"step {step} would be saved, and the root has steps up to {newest}: call "
                    "restore() before the first save(), or use another root; save(overwrite=True) "
                    "where training has gone back on purpose",
                    self._store.root,
                )
        else:
            goes_back = before is not None and step < before
            if goes_back and not overwrite:
                raise ValueError(
                    f"step {step} comes after step {before}: steps must not decrease. Where "
                    f"training has gone back, restore(state, step=...) or save({step}, state, "
                    "overwrite=True)"
                )
        if goes_back:
            self._go_back(step)
        self._called_with = step

    def _go_back(self, step: int) -> None:
        # The step that is being saved is one of before, too.
        self._wait_quietly()
        self._restored = step
        self._last_step = None
        if self._rank != 0:
            return
        self._deletions.settle()
        self._deletions.went_back(step - 1)
        self._warn_of_later_steps(f"training goes on from step {step}", step, stacklevel=4)

    def _require_metric(self, metrics: dict[str, float], stops: bool) -> None:
        """Refuses a save while no step has what retention compares: the first one loses nothing."""
        if self._knows_metric:
            return
        problem = self._attempt.lacks_metric(self._retention, metrics)
        self._knows_metric = problem is None
        if problem and stops:
            # The last save before the end is worth more than the rule.
            LOGGER.error("%s", problem)
        elif problem:
            raise ValueError(
                f"{problem}. Give it in save(metrics=...), and math.nan where a step has none yet"
            )

    def _may_replace(self, step: int) -> bool:
        """Whether a complete step of the number is this manager's, or training came back to it."""
        return step == self._committed or (self._restored is not None and step >= self._restored)

    def _wait_quietly(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def _refuse(self, what: str) -> None:
        if self._closed:
            raise ValueError(f"the manager is closed: it cannot {what}")
        if self._read_only:
            raise ValueError(f"the manager is read_only: it cannot {what}")
        self._require_group(what)

    def _require_group(self, what: str) -> None:
        """Where the ranks have gone, each would take itself for the only one."""
        now, made_with = group_now(self._group), self._made_with
        if self._size > 1 and (now is None or made_with is None or now() is not made_with()):
            raise RuntimeError(
                f"the process group of the {self._size} ranks that made this manager has been "
                f"destroyed: it cannot {what}. Let save(), restore() and close() come before "
                "destroy_process_group(), and make another manager after init_process_group()"
            )
        if made_with is None and now is not None and dist.get_world_size(now()) > 1:
            raise RuntimeError(
                f"this manager was made before init_process_group(), where every rank takes itself "
                f"for the only one: it cannot {what}. Make it afterwards"
            )

    # --- private: restoring ----------------------------------------------------------------------

    def _warn_of_later_steps(self, why: str, step: int, stacklevel: int) -> None:
        later = [one for one in self.all_steps() if one > step]
        if later:
            warn(
                f"{why}, and there are later ones ({later}): they are replaced when training comes "
                "to them; until then a restart finds them, unless you delete() them",
                stacklevel=stacklevel + 1,
            )

    # --- private: the rest -----------------------------------------------------------------------

    def _info(self, step: int) -> StepInfo:
        for info in self._store.entries(leftovers=False):
            if info.step == step:
                return info
        raise FileNotFoundError(2, f"there is no complete step {step}", self._store.root)

    def _set_pinned(self, step: int, pinned: bool) -> None:
        self._refuse("pin" if pinned else "unpin")
        self._lease.require()
        if self._rank == 0:
            # Between deletions: one that has begun with the step unpinned would take it.
            self._deletions.in_turn(lambda: self._store.set_pinned(step, pinned))
