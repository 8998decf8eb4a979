"""Background saves: the handle to one, and the one that this process is running.

1. The call takes a snapshot of the state dict (saving/save_state.py): aliases and versions of its
   tensors, whose contents it does not read, and copies of its objects.
2. A thread of this process runs the save (saving/run.py). It communicates with the other ranks
   through a store and never through the process group of the training.
3. The engine copies all contents into its chunks. Then the versions are compared: if a tensor was
   written to in the meantime, the save fails and names it. Otherwise the save is *staged*, and all
   sources are released.
4. The engine's low-priority threads write, and the coordinator commits: the save is *committed*.

A process runs one save at a time. Its error is reported once: by ``result()`` or the futures, else
by the next call, else by ``check_for_errors()``, and at the latest in the log when the interpreter
exits.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, ClassVar, TypeVar

import torch

from torch_ckpt import _core
from torch_ckpt._base import exit_threads
from torch_ckpt._base.checks import require_choice
from torch_ckpt._base.cycle_collector import no_gc
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.progress import Progress
from torch_ckpt.checkpoint.metrics import SaveMetrics
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.errors import CheckpointError, OnCommitFailed
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import CheckpointFailed, drop_frames
from torch_ckpt.ranks.group import TIMEOUT_SECONDS, RankGroup
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.replica_check import MODES as REPLICA_CHECKS
from torch_ckpt.saving.run import SaveRun
from torch_ckpt.saving.save_state import SaveState, StateDict
from torch_ckpt.saving.target import Target
from torch_ckpt.saving.unchanged import UnchangedDetector
from torch_ckpt.saving.write import Written
from torch_ckpt.state.optimizers import unwrapped
from torch_ckpt.state.states import States

T = TypeVar("T")

#: The error of the engine, in csrc/engine/save_session.cpp.
_INHERITED = "the save belongs to the process that forked this one; wait for it in that process"


class _Reporting(Future[T]):
    """A future that marks the save's error as reported when a caller reads it."""

    def __init__(self, save: BackgroundSave) -> None:
        super().__init__()
        self._save = weakref.ref(save)
        # A running future cannot be cancelled.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        self._note(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._note(timeout)
        return super().exception(timeout)

    def _note(self, timeout: float | None) -> None:
        save = self._save()
        if super().exception(timeout) is not None and save is not None:
            save.is_reported = True


class BackgroundSave(SaveRun):
    """A save in flight, which runs in a thread of its own.

    Args:
        state: the snapshot to save.
        target, ranks, plan, check_replicas, begun: see :class:`SaveRun`.
        is_blocking: the caller waits until the save is staged.
        on_commit, warn_unchanged: see :func:`torch_ckpt.async_save`.
        is_reported: the code that starts the save reports its error.

    Attributes:
        staged, committed: see :class:`AsyncSave`.
        is_reported: True if the error has been reported, or other code reports it.
        is_inherited: True in a forked child, whose parent runs the save.
        unchanged: compares each save of this process with the previous one; set when the save
            starts.
    """

    def __init__(
        self,
        state: SaveState,
        target: Target,
        ranks: Exchange,
        plan: AgreedPlan,
        check_replicas: str,
        begun: float,
        *,
        is_blocking: bool,
        on_commit: Callable[[Checkpoint], None] | None,
        warn_unchanged: bool,
        is_reported: bool,
    ) -> None:
        super().__init__(
            target,
            ranks,
            plan,
            check_replicas,
            begun,
            snapshot=state,
            is_blocking=is_blocking,
        )
        self.staged: Future[None] = _Reporting(self)
        self.committed: Future[Checkpoint] = _Reporting(self)
        self.is_reported = is_reported
        self.is_inherited = False
        self.unchanged: UnchangedDetector | None = None
        self.metrics.state_bytes = state.tensor_bytes
        self.has_devices = bool(self._ready)
        self._on_commit = on_commit
        self._warns_of_unchanged = warn_unchanged
        self._warning: str | None = None
        self._is_calling_back = False
        self._claim_lock = threading.Lock()
        self._is_claimed = False
        self._may_begin = threading.Event()

    # --- by the caller ---------------------------------------------------------------------------

    def claim(self) -> bool:
        """Claims the save. Returns True for the first caller only: its thread, or the code that
        failed to start one."""
        with self._claim_lock:
            is_claimed, self._is_claimed = self._is_claimed, True
        return not is_claimed

    def begin(self) -> None:
        """Lets the thread begin."""
        self._may_begin.set()

    def fail(self, error: BaseException) -> None:
        """Makes the save fail with the error that the call raises."""
        self.caller_error = error
        self.is_reported = True
        self.begin()

    # --- by the thread ---------------------------------------------------------------------------

    def work(self) -> None:
        """Runs the save and completes the futures. Never raises."""
        if not self.claim():
            return
        self._may_begin.wait()
        failure: BaseException | None = None
        checkpoint: Checkpoint | None = None
        metrics = self.metrics
        try:
            _core.fault_point("background save begins", metrics.path)
            checkpoint = self.run(
                on_staged=lambda: self.staged.set_result(None), on_committed=self._after_commit
            )
            if self._warning is not None and self._warns_of_unchanged:
                self._warn_of_unchanged(self._warning)
        except BaseException as error:
            failure = error
            drop_frames(error)
        # CPU time of this thread, which runs only this save.
        metrics.python_s = time.thread_time() - _core.seconds_without_gil()
        if failure is None and not self.is_reported:
            metrics.log()
        if failure is not None and not self.staged.done():
            self.staged.set_exception(failure)
        if failure is None:
            assert checkpoint is not None
            self.committed.set_result(checkpoint)
        else:
            self.committed.set_exception(failure)
        try:
            self._ranks.close()
        except Exception as error:
            LOGGER.warning("could not notify the other ranks that the save has ended: %s", error)

    def _after_commit(self, seal: bytes, written: list[Written]) -> None:
        if self.unchanged is not None and self._target.finds_unchanged:
            self._warning = self.unchanged.check(self._plan, written, self.metrics.path)
        if self._on_commit is None:
            return
        self._is_calling_back = True
        try:
            path, options = self.metrics.path, self._target.read_options
            self._on_commit(Checkpoint(path, self.metrics, seal, options))
        except BaseException as error:  # torch's CheckpointException is not an Exception
            raise OnCommitFailed(
                f"on_commit failed ({error}); the checkpoint in {self.metrics.path} is committed"
            ) from error
        finally:
            self._is_calling_back = False

    def moved(self) -> int:
        return super().moved() + (time.monotonic_ns() if self._is_calling_back else 0)

    def _warn_of_unchanged(self, text: str) -> None:
        # A manager, which reports its saves itself, does not have this option.
        hint = "" if self.is_reported else ". Pass warn_unchanged=False to omit this warning"
        try:
            # A filter may turn the warning into an exception.
            warnings.warn(f"{text}{hint}", stacklevel=2)
        except Warning as error:
            raise CheckpointError(
                f"a filter turned the warning of unchanged tensors into an error ({error}); the "
                f"checkpoint in {self.metrics.path} is committed"
            ) from error

    # --- by the handle ---------------------------------------------------------------------------

    def wait_for(self, future: Future[T], timeout: float | None, what: str) -> T:
        """Waits for one of the futures. Raises TimeoutError, with the path, at the timeout."""
        if self.is_inherited:
            raise CheckpointError(_INHERITED)
        try:
            return future.result(timeout)
        except CheckpointFailed as error:
            raise error.with_traceback(None) from error.__cause__
        except FutureTimeout:
            if future.done():
                raise
            raise TimeoutError(
                f"the save to {self.metrics.path} was not {what} within {timeout} s; it continues"
            ) from None

    def block_until_staged(self) -> None:
        """Blocks a guarded optimizer step until the sources may change."""
        if self.staged.done() or self.is_inherited:
            return
        _core.fault_point("wait until staged", self.metrics.path)
        with self.blocking():
            if not self._make_streams_wait():
                wait_until_done(self.staged)

    def _make_streams_wait(self) -> bool:
        """Makes the current streams of the sources' devices wait for the copies. Returns False if
        the caller must wait: there are no devices, or the streams cannot wait, for example while
        one captures a CUDA graph."""
        if not self._ready:
            return False
        streams = [(d.index, torch.cuda.current_stream(d).cuda_stream) for _event, d in self._ready]
        # The save itself reports its errors.
        with contextlib.suppress(Exception):
            while self._write.make_streams_wait(streams, 1.0) is None:
                if self.committed.done():
                    break
            return True
        return False

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Counts the time in the block as time during which the caller was blocked."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.metrics.blocked_s += time.perf_counter() - begun

    def fail_in_child(self) -> None:
        """Completes the futures in a forked child, whose parent runs the save."""
        self.is_inherited = True
        error = CheckpointError(_INHERITED)
        # New futures: the locks of the old ones may have been held during the fork.
        self.staged, self.committed = Future(), Future()
        self.staged.set_exception(error)
        self.committed.set_exception(error)


class AsyncSave:
    """Handle to a background save, returned by :func:`torch_ckpt.async_save`.

    The save is *staged* as soon as this rank's tensors have been copied and can safely be modified.
    The save is *committed* as soon as the checkpoint is durable and visible. Any thread can call
    the methods. If the handle is dropped, the save continues.

    Examples:
        ```python
        handle = torch_ckpt.async_save({"model": model}, "checkpoints/100")
        handle.guard(optimizer)  # optimizer.step() waits until the model has been copied
        train_one_step()
        checkpoint = handle.result()  # waits for the commit
        ```
    """

    def __init__(self, save: BackgroundSave) -> None:
        self._save = save

    # A property, because a forked child replaces the futures.
    @property
    def staged(self) -> Future[None]:
        """Future that is done as soon as the tensors being saved can safely be modified. If the
        save fails before that, the future raises the save's error."""
        return self._save.staged

    @property
    def committed(self) -> Future[Checkpoint]:
        """Future that is done as soon as the checkpoint is durable and visible to all ranks.

        The result is the checkpoint. If the save fails, the future raises the same error as
        :meth:`result`.
        """
        return self._save.committed

    def wait_staged(self, timeout: float | None = None) -> None:
        """Blocks until the tensors being saved can safely be modified.

        Args:
            timeout: seconds to wait; None waits indefinitely.

        Raises:
            TimeoutError: the save was not staged in time. The save continues.
            CheckpointException: the save failed before it was staged.
            CheckpointError: this process was forked from the process that started the save.
        """
        with self._save.blocking():
            self._save.wait_for(self.staged, timeout, "staged")

    def result(self, timeout: float | None = None) -> Checkpoint:
        """Blocks until the checkpoint is durable and visible.

        Args:
            timeout: seconds to wait; None waits indefinitely.

        Returns:
            The checkpoint.

        Raises:
            TimeoutError: the save did not end in time. The save continues.
            CheckpointException: the save failed. The exception contains the cause from each failed
                rank.
            OnCommitFailed: the checkpoint is committed, but ``on_commit`` failed on the
                coordinator. Raised on all ranks.
            CheckpointError: this process was forked from the process that started the save.
        """
        return self._save.wait_for(self.committed, timeout, "committed")

    def done(self) -> bool:
        """Returns True if the save has ended, successfully or not."""
        return self.committed.done()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's next step wait until the tensors being saved can safely be
        modified.

        The step blocks until all CPU tensors have been copied. For CUDA tensors, the step blocks
        only until the copies have been submitted, and the current stream waits for the copies. If
        the save fails, the step does not wait.

        A CUDA graph runs no hooks when it is replayed. Therefore, if the optimizer is
        ``capturable`` and the state contains CUDA tensors, this call itself blocks until the CUDA
        tensors have been copied.

        Args:
            optimizer: a torch optimizer, or a wrapper around one.
        """
        groups = optimizer.param_groups
        if self._save.has_devices and any(group.get("capturable") for group in groups):
            self.wait_staged_quietly()
            return
        _Guard.of(unwrapped(optimizer)).save = self._save

    def wait_staged_quietly(self) -> None:
        """Blocks until the tensors being saved can safely be modified, or the save has failed. Does
        not raise the save's error."""
        with self._save.blocking():
            wait_until_done(self.staged)

    def progress(self) -> Progress:
        """Returns the progress of this rank's write, in bytes."""
        return self._save.progress()

    @property
    def differing(self) -> str:
        """Describes the values that ``check_replicas="warn"`` found to differ between ranks. Empty
        if there are none. The text is complete as soon as the save is staged.
        """
        return self._save.differing

    def metrics(self) -> SaveMetrics:
        """Returns the durations and sizes of the save on this rank. All values are final when the
        save has ended."""
        return self._save.metrics

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if _is_finalizing():
            return  # exit_threads has waited for the save; by now, modules may be empty
        save = getattr(self, "_save", None)
        if save is not None and not save.committed.done() and not save.is_inherited:
            warnings.warn(
                f"the handle of the save to {save.metrics.path} was dropped before the save ended. "
                "The save continues. If it fails, the next save or check_for_errors() raises the "
                "error",
                stacklevel=2,
            )


class _Guard:
    """The single hook that this package registers with an optimizer. It stays registered, because
    a hook cannot be removed during a step."""

    _of: ClassVar[weakref.WeakKeyDictionary[torch.optim.Optimizer, _Guard]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self.save: BackgroundSave | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Guard:
        guard = cls._of.get(optimizer)
        if guard is None:
            guard = cls._of[optimizer] = cls()
            optimizer.register_step_pre_hook(guard)
        return guard

    def __call__(self, *_: object) -> None:
        save, self.save = self.save, None
        if save is not None:
            save.block_until_staged()


def wait_until_done(future: Future[Any]) -> None:
    """Waits until the future is done. Does not mark its error as reported."""
    Future.exception(future)


# --- the save that this process runs --------------------------------------------------------------


class _Saves:
    """The background saves of this process. Only one save runs at a time."""

    def __init__(self) -> None:
        # A thread that starts a save holds this lock until the save has started.
        self._lock = threading.RLock()
        # Guards all following fields.
        self._fields = threading.RLock()
        self._running: BackgroundSave | None = None
        self._thread: threading.Thread | None = None
        self._failed: list[BackgroundSave] = []
        self._unchanged = UnchangedDetector()
        self._last_call: float | None = None

    @contextlib.contextmanager
    def exclusive(self, ranks: Exchange, if_busy: str = "wait") -> Iterator[None]:
        """Block in which a thread starts or performs a save. Only one thread at a time can enter
        it.

        Waits for the running save, or raises if ``if_busy`` is "raise".

        Args:
            ranks: the ranks of the next save.

        Raises:
            CheckpointError: a save is running, and either ``if_busy`` is "raise" or the call comes
                from that save's own callback.
        """
        if threading.current_thread() is self._thread and self.running() is not None:
            raise CheckpointError(
                "on_commit must not start a save: the save that calls it is still running"
            )
        with self._lock:
            running = self.running()
            if running is not None:
                path = running.metrics.path
                if if_busy == "raise":
                    raise CheckpointError(
                        f"the save to {path} is still running; wait for it, or pass if_busy='wait'"
                    )
                _core.fault_point("wait for the save before", path)
                # Other ranks may already wait for this rank in the next save.
                with ranks.alive(running.moved):
                    wait_until_done(running.committed)
            yield

    def start(self, save: BackgroundSave) -> AsyncSave:
        """Starts the thread of a save."""
        self.running()
        save.unchanged = self._unchanged
        if self._last_call is not None:
            save.metrics.interval_s = time.perf_counter() - self._last_call
        self._last_call = time.perf_counter()
        thread = exit_threads.spawn(save.work)
        # Set these only after the thread has started: if starting it failed, later saves would wait
        # forever for a save that nothing runs.
        with self._fields:
            self._running, self._thread = save, thread
        return AsyncSave(save)

    def raise_failure(self) -> None:
        """Implements :func:`check_for_errors`."""
        self.running()
        while self._failed:
            save = self._failed.pop(0)
            if not save.is_reported:
                save.wait_for(save.committed, None, "committed")

    def close(self) -> None:
        """Waits for the running save, then for the engine's threads. Called at interpreter exit."""
        host_memory.reserve.close()
        if not exit_threads.join():
            path = self._running.metrics.path if self._running is not None else "a directory"
            LOGGER.error(
                "the save to %s did not end within %.0f s; the interpreter exits without waiting "
                "any longer",
                path,
                exit_threads.EXIT_LIMIT_SECONDS,
            )
            return
        self.running()
        for save in self._failed:
            if not save.is_reported:
                LOGGER.error(
                    "the save to %s failed: %s", save.metrics.path, save.committed.exception()
                )
        _core.join_executor()

    def running(self) -> BackgroundSave | None:
        """Returns the running save, if any. Drops a save that has ended, and notes its failure."""
        with self._fields:
            save = self._running
            if save is not None and save.committed.done():
                self._running = None
                if Future.exception(save.committed) is not None:
                    self._failed.append(save)
            return self._running

    def forget_in_child(self) -> None:
        """Forgets all saves in a forked child, because only the parent runs them."""
        if self._running is not None:
            self._running.fail_in_child()
        self.__init__()  # type: ignore[misc]


#: The background saves of this process.
saves = _Saves()


def save(
    state_dict: StateDict | Callable[[], StateDict],
    target: Callable[[], Target],
    group: RankGroup,
    *,
    timeout: float = TIMEOUT_SECONDS,
    check_replicas: str = "warn",
) -> Checkpoint:
    """Saves a state dict, and blocks until the save is durable and visible.

    Args:
        state_dict, timeout, check_replicas: see :func:`torch_ckpt.save`.
        target: creates the target. If it fails, the save fails on all ranks.
        group: the ranks that save together.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    begun = time.perf_counter()
    # Do this before anything can fail, so that all ranks count the same saves.
    plan = AgreedPlan.of(group)
    ranks = Exchange.open(group, "save", timeout)
    try:
        with ranks:
            require_choice("check_replicas", check_replicas, REPLICA_CHECKS)
            chosen = target()
            # Do not raise the unreported error of an earlier background save here, because other
            # ranks may already have raised it.
            with saves.exclusive(ranks):
                return SaveRun(chosen, ranks, plan, check_replicas, begun).run(state_dict)
    except CheckpointFailed as error:
        # Drop the frames, which only show the exchange between ranks. The causes keep their own.
        raise error.with_traceback(None) from error.__cause__


def start(
    state_dict: StateDict | Callable[[], StateDict],
    target: Callable[[], Target],
    group: RankGroup,
    *,
    staging: str = "blocking",
    if_busy: str = "wait",
    timeout: float = TIMEOUT_SECONDS,
    on_commit: Callable[[Checkpoint], None] | None = None,
    warn_unchanged: bool = True,
    check_replicas: str = "warn",
    is_reported: bool = False,
    has_begun: Callable[[AsyncSave], None] = lambda _handle: None,
) -> AsyncSave:
    """Starts a background save of a snapshot of a state dict.

    Args:
        state_dict: see :func:`torch_ckpt.save`.
        target: creates the target. If it fails, the save fails on all ranks.
        group: the ranks that save together.
        staging, if_busy, timeout, on_commit, warn_unchanged, check_replicas: see
            :func:`torch_ckpt.async_save`.
        is_reported: the caller reports the error of the save. The error is then neither logged nor
            raised by the next save or :func:`check_for_errors`.
        has_begun: called with the handle before this function waits for the snapshot. An interrupt
            can end this wait, but not the save.

    Raises:
        CheckpointException, CheckpointError, RuntimeError, ValueError: see
            :func:`torch_ckpt.async_save`.
    """
    begun = time.perf_counter()
    # Do this before anything can fail, so that all ranks count the same saves.
    plan = AgreedPlan.of(group)
    ranks = Exchange.open(group, "save", timeout)
    save: BackgroundSave | None = None
    try:
        require_choice("staging", staging, ("blocking", "overlapped"))
        require_choice("check_replicas", check_replicas, REPLICA_CHECKS)
        require_choice("if_busy", if_busy, ("wait", "raise"))
        chosen = target()
        with saves.exclusive(ranks, if_busy):
            saves.raise_failure()
            with no_gc():
                state = SaveState(States(state_dict, calls=True).saved(), snapshot=True)
            save = BackgroundSave(
                state,
                chosen,
                ranks,
                plan,
                check_replicas,
                begun,
                is_blocking=staging == "blocking",
                on_commit=on_commit,
                warn_unchanged=warn_unchanged,
                is_reported=is_reported,
            )
            # The memory that the save itself does not allocate.
            host_memory.reserve.make_for_state(
                state.values(),
                ranks=ranks.size,
                files=chosen.options.files,
                max_host_bytes=chosen.options.max_host_bytes,
                after=save.staged,
            )
            host_memory.reserve.has_saved = True
            handle = saves.start(save)
    except BaseException as error:
        # The other ranks wait for this rank until the save's thread, or this one, reports the
        # error.
        if save is None or save.claim():
            ranks.fail(error)
        else:
            save.fail(error)
        raise
    try:
        has_begun(handle)
        if staging == "blocking":
            save.begin()
            wait_until_done(save.staged)
        save.metrics.blocked_s = time.perf_counter() - begun
        return handle
    finally:
        # Start the save's thread last: it competes with this thread for the interpreter lock.
        save.begin()


def check_for_errors() -> None:
    """Raises the error of a failed background save, unless that error has already been reported.
    Does not wait for a save that is still running.

    Each error is raised only once. Call this function regularly if you keep no handles.

    Raises:
        CheckpointException, CheckpointError: see :meth:`AsyncSave.result`.

    Examples:
        ```python
        torch_ckpt.async_save({"model": model}, "checkpoints/100")
        train_one_step()
        torch_ckpt.check_for_errors()  # has the save failed?
        ```
    """
    saves.raise_failure()


register(
    Part.SAVES,
    at_exit=saves.close,
    # The child keeps the result of a save that has ended.
    before_fork=saves.running,
    in_child=saves.forget_in_child,
)
