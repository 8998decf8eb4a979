"""The checkpoints of a training run: when they are saved, which are kept, which one is restored.

1. ``save(step, state)`` is called in every step, on every rank. Whether it saves, all ranks know
   alike: by the step, by rank 0's decision (intervals.py), or because a rank was told to stop
   (ranks/preemption.py).
2. The save before has ended by then, on all ranks, and its error is raised or counted on all.
3. The state is copied, and a save in the background writes the step's directory (saver.py,
   attempts.py, steps/local.py). The step is complete when it has its name.
4. A thread of rank 0 then deletes the steps that no rule keeps (deletions.py, retention.py).
5. ``restore(state)`` loads the newest complete step that rank 0 sees. Where it is damaged, all
   ranks go on to the one before (restoring.py).
"""

from __future__ import annotations

import errno
import os
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, MutableMapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.hooks import RemovableHandle

from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.options import given_options, refuse_unknown, require_choice
from torch_ckpt._base.progress import wants_bar
from torch_ckpt.api import LOAD_OPTIONS
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.verify import VerifyReport
from torch_ckpt.loading.renaming import Rename
from torch_ckpt.loading.report import LoadReport, Names
from torch_ckpt.manager.attempts import Attempt, agree_on_name, new_name
from torch_ckpt.manager.course import Course
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.intervals import Interval, Schedule
from torch_ckpt.manager.restoring import Restorer
from torch_ckpt.manager.retention import Retention
from torch_ckpt.manager.run import Run
from torch_ckpt.manager.saver import Saver
from torch_ckpt.manager.stop_notice import StopNotice
from torch_ckpt.ranks.calls import meeting_of
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS
from torch_ckpt.ranks.preemption import signal_numbers
from torch_ckpt.saving.events import Event, Reporters
from torch_ckpt.saving.replica_check import ReplicaCheck
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.state.app_state import BeforeSave
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
        check_replicas: what to do if a plain tensor, a number or another object that several ranks
            have, and one of them saves, differs between ranks: "off", "warn", or "error", which
            fails the save. See :func:`torch_ckpt.save`. A value that each rank has for itself
            belongs in :class:`torch_ckpt.PerRank`.
        check_replicas_every: compare at every save of so many; the first is one of them.
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
        TypeError: an option, or a key of ``load_options``, is unknown (the error names the
            nearest); or an option has a wrong type.
        ValueError: an option is wrong, or signals are to be watched outside the main thread.
        OSError: the root is a file, or cannot be written; on ranks other than rank 0 a RuntimeError
            if only rank 0 cannot write it.
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
        check_replicas: str = "warn",
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
        self._retention = Retention(
            keep_last, keep_every, keep_every_hours, keep_best, best_metric, best_mode, should_keep
        )
        replicas = ReplicaCheck(check_replicas, check_replicas_every)
        load_options = given_options("load_options", load_options, LOAD_OPTIONS)
        if preemption_signals is not None:
            preemption_signals = signal_numbers(preemption_signals, "preemption_signals")
        self._store = open_steps(root, staging_dir=staging_dir)
        self._deadline = preemption_deadline
        self._read_only = read_only
        writer_options = {"progress": wants_bar(), **writer_options}
        # Where one of them is wrong this raises, and not the first save.
        self._store.writer(
            0, attempt="", overwrite=False, marker=dict, expected_bytes=0, **writer_options
        )
        self._before_save = BeforeSave()
        meeting = meeting_of(process_group, "manager")
        self._rank = meeting.rank
        self._closed = False
        self._pid = os.getpid()
        self._returned_at: float | None = None
        self._was_saving = False

        # Of a run rank 0 writes what all ranks have agreed on, and deletes.
        writes = not read_only and self._rank == 0
        self._lease = Lease(self._store.lease_root if writes else None, takeover=takeover)

        def begin() -> None:
            self._report = Reporters(self._rank, on_event, tensorboard)
            _refuse_file(self._store.lease_root)
            self._lease.take()

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
            run = self._run = Run(
                self._store, meeting.rank, meeting.size, process_group, timeout, self._report
            )
            self._deletions = Deletions(self._store, self._retention, self._report)
            self._restorer = Restorer(run, self._deletions, load_options)
            self._schedule = Schedule(
                interval,
                save_on_steps,
                max_overhead=max_overhead,
                mtbf_seconds=mtbf_hours * 3600,
                skip_if_busy=if_busy == "skip",
                meeting=meeting.apart(name),
                timeout=timeout,
            )
            attempt = Attempt(name, run, self._lease, self._deletions, writer_options)
            self._course = Course(run, self._deletions, attempt.newest_step)
            self._saver = Saver(
                run,
                weakref.ref(self),
                self._course,
                attempt,
                self._schedule,
                self._deletions,
                replicas,
                self._retention,
                self._before_save,
                on_commit=on_commit,
                raises=on_save_error == "raise",
                deadline=preemption_deadline,
                async_saves=async_saves,
                staging=staging,
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
            CheckpointError: replicas differ, with ``check_replicas="error"`` and
                ``on_save_error="raise"``; with ``staging="overlapped"`` the next call raises it.
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
        saver, notice = self._saver, self._notice
        try:
            self._course.come_to(step, overwrite, saver.wait)
        except (FileExistsError, ValueError):
            raise
        except Exception as error:
            return saver.not_begun(step, error, begun)
        notice.look_whether_ignored(self._rank, saver.wait)
        if self._schedule.auto is not None and self._returned_at is not None:
            is_slow = self._was_saving or self.is_saving
            self._schedule.auto.stepped(begun - self._returned_at, is_slow)
        try:
            stops = notice.reached(step)
            wanted = self._schedule.wants(step, lambda: self.is_saving)
            if step == self._course.last_step:
                # Whether it has failed all ranks know only at its end.
                saver.wait()
            is_new = step != self._course.last_step
            saves = force or (is_new and (wanted or stops))
            try:
                return saves and saver.save(step, state, metrics or {}, notes or {}, stops)
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
        self._notice.is_asked = True
        return self._notice.stops

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        pending = self._saver.pending
        return pending is not None and not pending.handle.done()

    @property
    def last_step(self) -> int | None:
        """The last step that this manager has saved or restored; None before.

        A step counts when its save has ended well, which ranks see at different moments: after
        :meth:`wait_until_finished` they see the same.
        """
        return self._course.last_complete

    @property
    def save_errors(self) -> int:
        """Saves, or their ``on_commit``, that have failed, where training goes on after that."""
        return self._saver.errors

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
        self._saver.guard(optimizer)

    def wait_until_staged(self) -> None:
        """With ``staging="overlapped"``, waits until the state may change.

        Raises:
            CheckpointException: the save has failed before, and ``on_save_error`` is "raise".
        """
        pending = self._saver.pending
        if pending is not None and pending.is_here:
            pending.handle.wait_staged_quietly()
            if pending.handle.done():
                self.wait_until_finished()

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Waits for the save under way, and raises its error.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the save goes on.
            CheckpointException: the save has failed, and ``on_save_error`` is "raise".
        """
        pending = self._saver.pending
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
        self._saver.check_for_errors()

    def close(self) -> None:
        """Waits for the save and the deletions under way; then nothing can be saved any more.

        Saves nothing itself. If the last step that :meth:`save` was called with was not saved, as
        that of a run that is no multiple of ``interval``, rank 0 logs a warning that names it.

        Raises:
            CheckpointException: a save has failed, and ``on_save_error`` is "raise".
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._saver.wait()
        self._warn_of_unsaved_step()
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
        self._run.require_group("restore")
        self._saver.wait()
        restored = self._restorer.restore(state, step, names=names, strict=strict, rename=rename)
        self._course.restored(restored, is_chosen=step is not None)
        if restored is None:
            return 0
        self._returned_at = None
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

    # --- private ---------------------------------------------------------------------------------

    def _stop(self, step: int) -> None:
        self._notice.stops = True
        message = f"all ranks stop at step {step}, by {self._notice.reason}"
        self._report(Event("preempted", step, self._rank, message=message))
        if self._deadline is not None:
            self.wait_until_finished()

    def _warn_of_unsaved_step(self) -> None:
        step, saved = self._course.unsaved_step, self._course.last_complete
        if step is None or self._rank != 0:
            return
        LOGGER.warning(
            "%s: step %d, the last one that save() was called with, was not saved; %s. To save the "
            "last step, call save(step, state, force=True) before the manager is closed",
            self._store.root,
            step,
            "this run has saved no step"
            if saved is None
            else f"a restart goes on from step {saved}",
        )

    def _refuse(self, what: str) -> None:
        if self._closed:
            raise ValueError(f"the manager is closed: it cannot {what}")
        if self._read_only:
            raise ValueError(f"the manager is read_only: it cannot {what}")
        self._run.require_group(what)

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


def _refuse_file(root: str | None) -> None:
    """Raises NotADirectoryError if a local root is there and is not a directory."""
    if root is not None and os.path.lexists(root) and not os.path.isdir(root):
        raise NotADirectoryError(
            errno.ENOTDIR,
            "the root is not a directory: pass the directory that holds the steps",
            root,
        )
