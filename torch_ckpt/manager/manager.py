"""The checkpoint manager of a training run.

1. Every rank calls ``save(step, state)`` after every step. All ranks save the same steps: those
   that are due (schedule.py), and the step at which they stop after a preemption notice to any
   rank (multihost/preemption.py).
2. A save first waits until the previous save has ended on all ranks. If the previous save failed,
   its error is raised or counted on all ranks.
3. The state is copied, and a background save writes the step's directory (saver.py,
   csrc/directory/step.h). The step is complete once the directory has its final name.
4. A thread on rank 0 then deletes the steps that no rule keeps (deletions.py, steps/retention.py).
5. ``restore(state)`` loads the newest complete step (checkpoint/lineage.py) that rank 0 sees. If
   that step is damaged, all ranks fall back to the step before it (restoring.py).
"""

from __future__ import annotations

import copy
import os
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.utils.hooks import RemovableHandle

from torch_ckpt._base.checks import refuse_keyword, require_choice, require_instance
from torch_ckpt._base.formatting import plural
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.progress import stderr_is_terminal
from torch_ckpt._base.system import local_path
from torch_ckpt.checkpoint.lineage import by_lineage, newest_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.events import Event, Reporters
from torch_ckpt.inspection.verify import VerifyReport
from torch_ckpt.loading.load import LoadArguments
from torch_ckpt.loading.renaming import Rename
from torch_ckpt.loading.report import LoadReport, Names
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.exports import Export, Exports
from torch_ckpt.manager.live_tensors import live_tensors
from torch_ckpt.manager.local_tier import CLOSE_SECONDS, Tier
from torch_ckpt.manager.policies import (
    DEFAULT_PREEMPTION,
    DEFAULT_SAVES,
    MOVED,
    Interval,
    Preemption,
    SaveOptions,
    require_policies,
)
from torch_ckpt.manager.preemption_notice import PreemptionNotice
from torch_ckpt.manager.restoring import Restorer
from torch_ckpt.manager.run_context import RunContext, agree_on_attempt, new_attempt
from torch_ckpt.manager.saver import Saver
from torch_ckpt.manager.schedule import Schedule
from torch_ckpt.manager.timeline import Timeline
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions, WriteOptions
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, group_for
from torch_ckpt.saving import host_memory
from torch_ckpt.state.states import BeforeSave, require_state
from torch_ckpt.steps import StepInfo, StepStore, open_steps, step_name
from torch_ckpt.steps.retention import Retention
from torch_ckpt.steps.root_lease import RootLease
from torch_ckpt.steps.tier import LocalTier, TieredSteps

if TYPE_CHECKING:
    from typing_extensions import Never, Unpack  # in typing since Python 3.11

State = dict[str, Any]


class CheckpointManager:
    """Saves, keeps and restores the checkpoints of a training run.

    Every rank must create a manager and make the same calls in the same order. Use the manager as a
    context manager: leaving the block waits for running saves and deletions.

    Example::

        with torch_ckpt.CheckpointManager("checkpoints", interval=100, keep=3) as manager:
            state = {"model": model, "optimizer": optimizer}
            for step in range(manager.restore(state), steps):
                train(step)
                manager.save(step + 1, state)  # the number of finished steps
                if manager.should_stop:
                    break

    Args:
        root: directory for the steps, visible to all ranks; or a URL (docs/remote.md), with the
            ``storage_options`` of ``write`` or ``read``; or the result of
            :func:`torch_ckpt.steps.open_steps`.
        interval: when to save. An int N saves every N steps. A ``timedelta`` saves whenever that
            much time has passed. An :class:`torch_ckpt.manager.AutoInterval` measures how much
            training time a save costs and chooses the interval that loses the least training time
            in total; "auto" does so with the defaults. A function receives the step number and
            returns True if a save is due; the result must be the same on all ranks.
        keep: which steps to keep: a number of newest steps, or a :class:`torch_ckpt.Retention` with
            rules. None keeps all steps.
        preemption: the preemption notices to watch for; None watches for no notice. By default,
            SIGTERM is a notice if the manager is created in the main thread.
        saves: how each save runs, and what it compares.
        write: the options of the files. By default, rank 0 shows a progress bar if standard error
            is a terminal.
        read: the options of the loads.
        local: a directory on each host's own disk, to which saves go first; see
            :class:`torch_ckpt.manager.LocalTier`.
        export: publishes the model as safetensors files; see :class:`torch_ckpt.Export`.
        on_save_error: what to do if a background save fails. "raise" raises the error from the next
            call of :meth:`save`, :meth:`wait_until_finished`, :meth:`check_for_errors` or
            :meth:`close`. "warn_and_continue" logs the error and counts it in ``save_errors``.
        on_event: called with each :class:`torch_ckpt.events.Event`, in the thread that causes the
            event. Inside the callback, methods that normally wait for the event's save return
            immediately. See also :class:`torch_ckpt.events.TensorBoard`.
        read_only: only list, load and verify steps; never save or delete steps, or remove leftovers
            of interrupted saves.
        takeover: take the lease on the root even if another running job holds it. The other
            job's saves then fail.
        process_group: process group of the ranks; None uses the default group.
        timeout: seconds without a heartbeat after which a rank is declared dead. The other ranks
            then raise an error that names the rank.
        removed: no keyword; the error for a former one names what replaces it.

    Attributes:
        save_errors: number of failed saves, exports and ``on_commit`` callbacks.

    Raises:
        TypeError: an option is unknown or has the wrong type. The message names the object that has
            the option, or suggests the closest known name.
        ValueError: an option has an invalid value, or ``preemption`` has signals and the manager is
            created outside the main thread.
        OSError: the root is a file or is not writable. If only rank 0 fails, the other ranks raise
            a RuntimeError.
        CheckpointError: the root is a single checkpoint.
        TimeoutError: some ranks did not create a manager within the timeout; the message names
            these ranks.
        RanksDisagree: the ranks passed different roots.
        RootInUse: another running job is writing to the root; the message names that job's process.
            Raised on rank 0; the other ranks raise a RuntimeError that quotes the message.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | StepStore,
        *,
        interval: Interval = 1,
        keep: SupportsIndex | Retention | None = None,
        preemption: Preemption | None = DEFAULT_PREEMPTION,
        saves: SaveOptions = DEFAULT_SAVES,
        write: WriteOptions | None = None,
        read: ReadOptions = DEFAULT_READ_OPTIONS,
        local: LocalTier | None = None,
        export: Export | None = None,
        on_save_error: str = "raise",
        on_event: Callable[[Event], None] | None = None,
        read_only: bool = False,
        takeover: bool = False,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT_SECONDS,
        **removed: Never,
    ) -> None:
        if removed:
            refuse_keyword(CheckpointManager, removed, MOVED)
        if write is None:
            write = WriteOptions(progress=stderr_is_terminal())
        require_policies(preemption, saves, write, read)
        require_choice("on_save_error", on_save_error, ("raise", "warn_and_continue"))
        self._retention = Retention.of(keep)
        if isinstance(root, StepStore):
            # The caller's object keeps its own lease.
            root = copy.copy(root)
        else:
            settings = write.storage_options or read.storage_options
            root = open_steps(root, storage_options=settings)
        if local is not None:
            require_instance("local", local, LocalTier)
            root = TieredSteps(root, local)
        self._store = root
        if export is not None and _is_same_root(export.root, self._store.root):
            raise ValueError(f"{export.root}: exports need another directory than the steps")
        self._before_save = BeforeSave()
        group = group_for(process_group, "manager")
        self._rank = group.rank
        self._pid = os.getpid()
        self._returned_at: float | None = None
        self._was_saving = False
        self._has_reserved = False

        # Only rank 0 needs the lease: it commits steps for all ranks, and deletes them.
        writes = not read_only and self._rank == 0
        self._lease = RootLease(self._store.lease_store() if writes else None, takeover=takeover)
        self._store.lease = self._lease

        def begin() -> None:
            self._report = Reporters(self._rank, on_event)
            if read_only or self._rank == 0:
                self._store.require_root(read_only=read_only)
            if isinstance(self._store, TieredSteps) and not read_only:
                self._store.prepare_disk()
            self._lease.take()

        with ExitStack() as undo:
            undo.callback(self._lease.release)
            if read_only:
                # Nothing is written, so the ranks need not agree.
                begin()
                attempt = new_attempt()
            else:
                attempt = agree_on_attempt(
                    self._store.root, begin, process_group=process_group, timeout=timeout
                )
            run = self._run = RunContext(
                self._store,
                self._lease,
                attempt,
                group.rank,
                group.size,
                process_group,
                timeout,
                self._report,
                read_only,
            )
            self._deletions = Deletions(self._store, self._retention, self._report)
            self._tier: Tier | None = None
            if isinstance(root, TieredSteps) and not read_only:
                of_tier = group.subgroup(f"{attempt}-tier")
                self._tier = Tier(root, run, of_tier, write, self._deletions, saves.on_commit)
            self._restorer = Restorer(run, self._deletions, read, self._tier)
            self._schedule = Schedule(interval, saves, group.subgroup(attempt), timeout)
            self._timeline = Timeline(run, self._deletions)
            self._saver = Saver(
                run,
                weakref.ref(self),
                saves,
                write,
                None if preemption is None else preemption.deadline,
                on_save_error,
                self._timeline,
                self._schedule,
                self._deletions,
                self._retention,
                self._before_save,
                Exports(export),
                self._tier,
            )
            watched = None if read_only else preemption
            self._notice = PreemptionNotice(watched, process_group, timeout)
            # From here on close() releases the lease.
            undo.pop_all()
        if writes:
            # Sweep in the background, because it may take long. It only has to end before a step is
            # chosen or deleted.
            self._deletions.submit_sweep(attempt)

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
        """Saves the state if a save is due. Call this method after each step, on every rank.

        You can modify the state as soon as this method returns. Exception: with
        ``staging="overlapped"``, first call :meth:`wait_until_staged`, or pass the optimizer to
        :meth:`guard`, which makes the optimizer's next step wait. Without ``force``, a step that
        this manager has just saved or restored is not saved again. Steps newer than the restored
        step are stale; saving the same step again replaces a stale step.

        Args:
            step: number of finished steps; must not be smaller than in the previous call.
            state: dict of the training state: modules, optimizers, LR schedulers, other objects
                with ``state_dict()`` and ``load_state_dict()``, tensors and plain values; see
                docs/state.md.
            metrics: numbers by name, for ``keep_best`` and :meth:`metrics`. Only rank 0's metrics
                are used.
            notes: JSON values by name, for :class:`torch_ckpt.steps.StepInfo`. Only rank 0's notes
                are used.
            force: save even if no save is due.
            overwrite: pass True if training was rewound to this step without :meth:`restore`. Newer
                steps then become stale, as after ``restore(step=...)``, and a warning names them.
                Each stale step is kept until training replaces or passes it.

        Returns:
            True if a save of this step was started.

        Raises:
            CheckpointException: the previous save failed, or this save could not start.
            CheckpointError: replicas differ between ranks. Raised only if ``check_replicas`` is
                "error" and ``on_save_error`` is "raise". Exception: with ``staging="overlapped"``,
                the error is raised by the next call instead.
            FileExistsError: this is the first call, :meth:`restore` was not called, and the root
                already has this step or a newer one.
            ValueError: the step is smaller than the previous one, or ``best_metric`` is neither in
                ``metrics`` nor in the metrics of any existing step (probably a misspelt name).
            ValueError, TypeError: the step, state, metrics or notes cannot be saved.
            TimeoutError: some ranks did not make the first call in time; the message names these
                ranks.
            RuntimeError: see :meth:`restore`.

        Example::

            manager.save(step + 1, {"model": model}, metrics={"loss": loss.item()})
        """
        started = time.perf_counter()
        self._require_writable("save")
        # Convert integers of other types, such as NumPy's.
        step = int(step_name(step))
        saver, notice = self._saver, self._notice
        try:
            if self._timeline.advance(step, overwrite, saver.wait):
                saver.exports.rewound(step - 1)
        except (FileExistsError, ValueError):
            raise
        except Exception as error:
            return saver.fail_to_start(step, error, started)
        notice.restore_signals_if_ignored(self._rank, saver.wait)
        if self._schedule.auto is not None and self._returned_at is not None:
            is_slow = self._was_saving or self.is_saving
            self._schedule.auto.stepped(started - self._returned_at, is_slow)
        try:
            stops = notice.reached(step)
            is_export_due = not stops and saver.exports.is_due(step)
            decision = self._schedule.decide(step, lambda: self.is_saving, is_export_due)
            if step == self._timeline.last_step:
                # Only after the save has ended do all ranks know whether it failed.
                saver.wait()
            is_new = step != self._timeline.last_step
            saves = force or (is_new and (decision.saves or stops))
            if not saves:
                # Otherwise, only the first save that is due would detect a wrong state.
                require_state(state)
            if not self._has_reserved:
                # After the first step, optimizers have their state. The first save that is due then
                # finds its memory allocated.
                self._has_reserved = True
                if not saves:
                    self._reserve_memory(state)
            exports = is_export_due and saver.exports.starts(step, saves, decision.is_idle)
            try:
                try:
                    if exports:
                        saver.export(step, state)
                finally:
                    # If the export fails to start on one rank, all ranks still start the save.
                    has_started = saves and saver.save(
                        step, state, metrics or {}, notes or {}, stops
                    )
                return has_started
            finally:
                # Stop even if the save has failed: the notice will not be repeated.
                if stops:
                    self._stop(step)
        finally:
            self._returned_at, self._was_saving = time.perf_counter(), self.is_saving

    def export(self, step: int, state: State) -> bool:
        """Publishes the model now, for example at the end of training. All ranks must call this
        method.

        Waits for a running save. The export then runs in the background like a save; you can modify
        the state as soon as this method returns, with the exception described in :meth:`save`.

        Args:
            step: number of finished steps, which becomes the number of the version.
            state: the same as for :meth:`save`; only the entry that ``export`` names is used.

        Returns:
            True if the export was started. False if the last export was that of the same step.

        Raises:
            ValueError: the manager was created without ``export``, or is closed or read-only.
            CheckpointException: the previous save failed, or the export could not start.

        Example::

            manager.export(steps, {"model": model})
        """
        self._require_writable("export")
        if self._saver.exports.export is None:
            raise ValueError("export() needs a directory. Pass export=torch_ckpt.Export(ROOT).")
        self._saver.exports.due_step = None
        return self._saver.export(int(step_name(step)), state)

    @property
    def should_stop(self) -> bool:
        """True as soon as training has reached the step at which the ranks agreed to stop after a
        preemption notice. At that point, :meth:`save` has saved the step or started to save it.

        If the training loop continues without reading this property, the next :meth:`save` stops
        watching for SIGTERM. SIGTERM then ends the process, as it would without a manager.
        """
        self._notice.is_polled = True
        return self._notice.stops

    @property
    def is_saving(self) -> bool:
        """True while a save is running."""
        pending = self._saver.pending
        return pending is not None and not pending.handle.done()

    @property
    def last_step(self) -> int | None:
        """The step that this manager saved or restored most recently; None if there is none.

        A step counts as saved as soon as its save has succeeded. Ranks can detect the success at
        different times, but after :meth:`wait_until_finished` the step is the same on all ranks.
        """
        return self._timeline.last_complete

    @property
    def save_errors(self) -> int:
        """Number of failed saves, exports and ``on_commit`` callbacks."""
        return self._saver.errors

    def before_save(self, hook: Callable[[], None]) -> RemovableHandle:
        """Adds a hook that is called before the state is read for a save, for example to copy
        embeddings from a parameter server into the state.

        Returns:
            A handle whose ``remove()`` removes the hook.
        """
        return self._before_save.add(hook)

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """After each save, makes the optimizer's next step wait until the state can safely be
        modified.

        Needed only if ``staging`` is "overlapped". One call per optimizer is enough. See
        :meth:`torch_ckpt.AsyncSave.guard`.
        """
        self._saver.guard(optimizer)

    def wait_until_staged(self) -> None:
        """After a save with ``staging="overlapped"``, waits until the state can safely be modified.

        Raises:
            CheckpointException: the save has already failed, and ``on_save_error`` is "raise".
        """
        pending = self._saver.pending
        if pending is not None and pending.can_wait:
            pending.handle.wait_staged_quietly()
            if pending.handle.done():
                self.wait_until_finished()

    def wait_until_finished(self, timeout: float | None = None, *, published: bool = False) -> None:
        """Waits for the running save, and raises the save's error if the save failed.

        Args:
            timeout: seconds to wait; None waits indefinitely.
            published: with a local tier, also wait until all saved steps are complete beneath the
                root.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the save continues.
            CheckpointException: the save has failed, and ``on_save_error`` is "raise".
            CheckpointError: a step could not be copied to the root. The copy is tried again later.
        """
        until = None if timeout is None else time.monotonic() + timeout
        pending = self._saver.pending
        if pending is not None and not pending.wait(timeout):
            raise TimeoutError(
                f"the save of step {pending.step} did not end within {timeout} s; it continues in "
                "the background"
            )
        self.check_for_errors()
        left = None if until is None else max(0.0, until - time.monotonic())
        if not published or self._tier is None or self._tier.wait(left):
            return
        if until is not None and time.monotonic() >= until:
            raise TimeoutError(
                f"not all steps were complete beneath {self._store.root} within {timeout} s; the "
                "copies continue in the background"
            )
        raise CheckpointError(
            f"steps {self._tier.unpublished()} could not be copied to {self._store.root}, and are "
            "on the hosts' own disks; the log has the reason"
        )

    def check_for_errors(self) -> None:
        """Raises the error if a save has failed. Raises each error only once. Does not wait.

        Ranks can detect a failure at different steps. To handle errors and continue training,
        instead catch the errors that :meth:`save` and :meth:`wait_until_finished` raise.

        Raises:
            CheckpointException: the save failed. The exception contains the cause from each failed
                rank.
        """
        self._saver.check_for_errors()

    def close(self) -> None:
        """Waits for the running save and deletions, then closes the manager.

        Does not start a save. If the final call to :meth:`save` did not save its step, for example
        because the step is not a multiple of ``interval``, rank 0 logs a warning that names the
        step.

        Raises:
            CheckpointException: a save has failed, and ``on_save_error`` is "raise".
        """
        if self._saver.is_closed or os.getpid() != self._pid:
            return
        self._saver.wait()
        self._warn_of_unsaved_step()
        self._warn_of_due_export()
        self._saver.is_closed = True
        self._notice.close()
        try:
            if self._tier is not None:
                is_urgent = self._notice.stops and self._saver.deadline is not None
                self._tier.close(0.0 if is_urgent else CLOSE_SECONDS)
        finally:
            # Also if an interrupt ends the wait for the copies.
            self._deletions.close()
            pending = self._saver.pending
            if pending is None:
                self._lease.release()
            else:
                # In a callback of the running save, which needs the lease until it is committed.
                # Otherwise, the save has ended, and this releases the lease now.
                pending.handle.committed.add_done_callback(lambda _save: self._lease.release())
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
            # An exception raised in the block takes precedence.
            LOGGER.error("%s", failure)

    def __del__(self) -> None:
        # The attribute is missing if the constructor has raised.
        notice = getattr(self, "_notice", None)
        if (
            notice is None
            or self._saver.is_closed
            or self._run.read_only
            or os.getpid() != self._pid
        ):
            return
        notice.close()
        if self._tier is not None:
            self._tier.abandon()
        self._lease.release()
        warnings.warn(
            f"the checkpoint manager of {self._store.root} was deleted without close(): a running "
            "save continues, but its error will only be logged. Use the manager in a with "
            "statement.",
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
        """Restores the state from a step, in place. All ranks must call this method.

        Waits for a running save first. A step that is damaged or lacks files is skipped with a
        warning, unless you request the step by number.

        Args:
            state: as for :meth:`save`; plain values in the dict are replaced.
            step: step number; None restores the newest complete step, which :meth:`latest_step`
                returns.
            names, strict, rename: see :func:`torch_ckpt.load`. :attr:`restore_report` lists the
                names that ``strict=False`` left unchanged.

        Returns:
            The restored step, or 0 if no step has been saved. In that case, the state is unchanged.

        Raises:
            FileNotFoundError: ``step`` does not exist; the message lists the existing steps.
            CheckpointException: the step cannot be loaded. The cause is, for example,
                ``LoadMismatch`` or ``Unsafe``.
            CheckpointError: all existing steps are damaged.
            TypeError: the state is not a dict, or the step is not an integer.
            RuntimeError: the process group of the manager was destroyed, or was initialized after
                the manager was created.

        Example::

            first_step = manager.restore({"model": model, "optimizer": optimizer})
        """
        restored = self._restore(state, step, names=names, strict=strict, rename=rename)
        self._reserve_memory(state)
        return restored or 0

    def _restore(
        self,
        state: State,
        step: int | None,
        *,
        state_of: Callable[[int], State] | None = None,
        **arguments: Unpack[LoadArguments],
    ) -> int | None:
        """Restores a step.

        Args: see :meth:`Restorer.restore`.

        Returns:
            The restored step; None if no step has been saved.
        """
        started = time.perf_counter()
        self._run.require_group("restore")
        if step is not None:
            step = int(step_name(step))
        self._saver.wait()
        restored = self._restorer.restore(state, step, state_of=state_of, **arguments)
        self._timeline.restored(restored, is_chosen=step is not None)
        if restored is None:
            return None
        self._saver.exports.rewound(restored)
        self._returned_at = None
        seconds = time.perf_counter() - started
        skipped = self._restorer.skipped
        damaged = f", after skipping {plural(skipped, 'damaged step')}" if skipped else ""
        message = f"restored step {restored} from {self._store.root} in {seconds:.2f} s{damaged}"
        self._report(Event("restored", restored, self._rank, seconds, message=message))
        return restored

    @property
    def restore_report(self) -> LoadReport | None:
        """Comparison of this rank's state with the most recently restored step: the names that were
        loaded and the names that ``strict=False`` left unchanged. None if no step was restored."""
        return self._restorer.report

    # --- listing ---------------------------------------------------------------------------------

    def steps(self) -> list[StepInfo]:
        """Lists the steps and leftovers beneath the root, sorted by step. Does not contact other
        ranks."""
        return self._store.entries()

    def all_steps(self) -> list[int]:
        """Returns the complete steps, in ascending order. Does not contact other ranks."""
        return [info.step for info in self._store.entries(leftovers=False)]

    def latest_step(self) -> int | None:
        """Returns the newest complete step, with which :meth:`restore` begins; None if there is
        none. If the steps of several runs are mixed, it is the newest step of the highest epoch.
        Does not contact other ranks."""
        newest = newest_of(self._store.entries(leftovers=False))
        return None if newest is None else newest.step

    @property
    def best_metric(self) -> str | Callable[[dict[str, float]], float] | None:
        """The metric, or the function of the metrics, by which steps are compared."""
        return self._retention.best_metric

    def best_step(self) -> int | None:
        """Returns the best complete step by ``best_metric``; None if no step has that metric.

        Raises:
            ValueError: the retention rules have no ``best_metric``.
        """
        if self._retention.best_metric is None:
            raise ValueError(
                "best_step() needs a metric to compare. Pass keep=Retention(best_metric=...) to "
                "CheckpointManager."
            )
        best = self._retention.best_first(self._store.entries(leftovers=False))
        return best[0].step if best else None

    def metrics(self, step: int) -> dict[str, float]:
        """Returns the metrics that were saved with a complete step.

        Raises:
            FileNotFoundError: there is no such step.
        """
        return self._info(step).metrics

    def metadata(self, step: int) -> Metadata:
        """Returns the names, shapes and dtypes of a step's values, without reading the values.

        Raises:
            FileNotFoundError, Corrupt, Unsafe: the step does not exist or cannot be read.
        """
        return self._store.metadata(step)

    def wait_for_new_step(
        self, after: int | None = None, *, timeout: float | None = None, poll_seconds: float = 1.0
    ) -> int | None:
        """Waits for a new complete step, for example to evaluate it in another process.

        Args:
            after: wait for a step newer than this one; None waits for any step. If a later run has
                rewound training and saved a step with a smaller number, that step is newer.
            timeout: seconds to wait; None waits indefinitely.
            poll_seconds: seconds between successive listings of the root.

        Returns:
            The newest complete step; None if the timeout expires first.

        Example::

            with torch_ckpt.CheckpointManager("checkpoints", read_only=True) as manager:
                step = None
                while (step := manager.wait_for_new_step(after=step)) is not None:
                    manager.restore(state, step)
                    evaluate(state)
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            current, abandoned = by_lineage(self._store.entries(leftovers=False))
            if current:
                newest = current[0].step
                is_abandoned = any(info.step == after for info in abandoned)
                if after is None or newest > after or is_abandoned:
                    return newest
            left = poll_seconds if until is None else min(poll_seconds, until - time.monotonic())
            if left <= 0:
                return None
            time.sleep(left)

    def verify(self, step: int) -> VerifyReport:
        """Reads and checks all files of a step. Retention keeps the step that most recently passed
        this check. Does not contact other ranks.

        Raises:
            FileNotFoundError: there is no such step.
        """
        self._info(step)
        with self._deletions.reading(step):
            report = self._store.verify(step)
        if report.ok:
            self._deletions.verified(step)
        return report

    # --- pins and deletions: every rank may call these, but only rank 0 acts ----------------------

    def pin(self, step: int) -> None:
        """Pins a step: retention keeps the step until :meth:`unpin` is called, even in later runs.

        Raises:
            FileNotFoundError: the step does not exist or is incomplete.
        """
        self._set_pinned(step, True)

    def unpin(self, step: int) -> None:
        """Unpins a step. The retention rules then apply to the step again."""
        self._set_pinned(step, False)

    def delete(self, step: int) -> None:
        """Deletes a step now, regardless of the retention rules.

        Raises:
            CheckpointError: a process is saving or loading the step.
            OSError: the step cannot be deleted.
        """
        self._require_writable("delete")
        self._lease.require()
        if self._rank != 0:
            return
        if isinstance(self._store, TieredSteps):
            self._store.forget(step)
        if not self._deletions.run_in_order(lambda: self._store.delete(step)):
            raise CheckpointError(
                f"step {step} of {self._store.root} is being saved or loaded, or another process "
                "holds the lock on the root. Try again later."
            )

    # --- private ---------------------------------------------------------------------------------

    def _reserve_memory(self, state: State) -> None:
        """Reserves memory for the first save in the background."""
        if not self._run.read_only:
            host_memory.reserve.make_for_state(
                live_tensors(state),
                ranks=self._run.ranks,
                files=self._saver.write.files,
                max_host_bytes=self._saver.write.max_host_bytes,
            )

    def _stop(self, step: int) -> None:
        self._notice.stops = True
        message = f"all ranks stop at step {step}: {self._notice.reason}"
        self._report(Event("preempted", step, self._rank, message=message))
        if self._saver.deadline is not None:
            self.wait_until_finished()

    def _warn_of_unsaved_step(self) -> None:
        step, saved = self._timeline.unsaved_step, self._timeline.last_complete
        if step is None or self._rank != 0:
            return
        LOGGER.warning(
            "%s: the last step, %d, was not saved; %s. To save the last step, call save(step, "
            "state, force=True) before closing the manager.",
            self._store.root,
            step,
            "this run has saved no step"
            if saved is None
            else f"a restart would continue from step {saved}",
        )

    def _warn_of_due_export(self) -> None:
        due = self._saver.exports.due_step
        if due is not None and self._rank == 0:
            LOGGER.warning(
                "the export that was due at step %d has not started. To export the model at the "
                "end of training, call export(step, state) before closing the manager.",
                due,
            )

    def _require_writable(self, action: str) -> None:
        if self._saver.is_closed:
            raise ValueError(f"cannot {action}: the manager is closed")
        if self._run.read_only:
            raise ValueError(f"cannot {action}: the manager is read-only")
        self._run.require_group(action)

    def _info(self, step: int) -> StepInfo:
        for info in self._store.entries(leftovers=False):
            if info.step == step:
                return info
        raise FileNotFoundError(2, f"there is no complete step {step}", self._store.root)

    def _set_pinned(self, step: int, pinned: bool) -> None:
        self._require_writable("pin" if pinned else "unpin")
        self._lease.require()
        if self._rank == 0:
            # Wait for a running deletion, which may already have chosen the unpinned step.
            self._deletions.run_in_order(lambda: self._store.set_pinned(step, pinned))


def _is_same_root(one: str | os.PathLike[str], other: str) -> bool:
    """True if two paths or URLs lead to the same directory."""
    paths = [local_path(one), local_path(other)]
    if None in paths:
        return os.fspath(one).rstrip("/") == other.rstrip("/")
    return os.path.realpath(str(paths[0])) == os.path.realpath(str(paths[1]))
