"""The stages of a background save.

1. The call takes a snapshot of the state dict (saving/save_state.py): aliases and versions of its
   tensors, whose contents it does not read, and copies of its objects.
2. A thread of this process plans with the other ranks, through a store and never through the
   process group of the training, and starts the engine.
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
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.errors import CheckpointError, OnCommitFailed
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import CheckpointFailed, drop_frames
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.metrics import SaveMetrics, Span, write_trace
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.unchanged import UnchangedDetector

T = TypeVar("T")

#: The error of the engine, in csrc/engine/save_session.cpp.
_INHERITED = "the save belongs to the process that forked this one; wait for it in that process"


class _Reporting(Future[T]):
    """A future that marks the save's error as reported when a caller reads it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = weakref.ref(job)
        # A running future cannot be cancelled.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> T:
        self._note(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._note(timeout)
        return super().exception(timeout)

    def _note(self, timeout: float | None) -> None:
        job = self._job()
        if super().exception(timeout) is not None and job is not None:
            job.reported = True


# What to do about SourceChanged.
_ADVICE = (
    "Before the next step, call guard(optimizer) or wait until the save is staged (wait_staged() "
    'of its handle, or wait_until_staged() of a manager); or save with staging="blocking". '
    "Buffers, such as the statistics of BatchNorm, change in the forward pass, which guard() does "
    "not delay: wait before the forward pass"
)


class Job:
    """The state of one background save, shared by its thread and its handle."""

    def __init__(
        self,
        state: SaveState,
        ranks: Exchange,
        path: str,
        *,
        background: Background,
        blocking: bool,
        begun: float,
        trace: str | os.PathLike[str] | None = None,
        write_done: Callable[[], None] | None = None,
        on_commit: Callable[[Metadata], None] | None = None,
        warn_unchanged: bool = True,
    ) -> None:
        self.ranks = ranks
        self.state = state
        self.write = RankWrite(
            state,
            background=background,
            quiet_stagers=not blocking,
            ranks=ranks.size,
            advice=_ADVICE,
            trace=trace is not None,
            staged=_Reporting(self),
        )
        #: True if the error has been reported, or other code reports it.
        self.reported = False
        #: Compares each save of this process with the previous one; set by start().
        self.unchanged: UnchangedDetector | None = None
        self.inherited = False
        #: Description of the values that differ between ranks; empty if none differs.
        self.differing = ""
        self.committed: Future[Metadata] = _Reporting(self)
        self.metrics = SaveMetrics(path=path, rank=ranks.rank)
        self.write_done = write_done
        self.begun = begun
        self._trace = trace
        self.on_commit = on_commit
        #: See :meth:`FileSystemWriter.bytes_moved`.
        self.moved_by_writer: Callable[[], int] = lambda: 0
        self._is_calling_back = False
        #: True if unchanged tensors cause a warning.
        self.warns_of_unchanged = warn_unchanged
        #: The text of the warning, if there are unchanged tensors.
        self.warning: str | None = None
        self._lock = threading.Lock()
        self._taken = False
        #: The error that ended the call, if the job's thread must raise it.
        self.abandoned: BaseException | None = None
        self._go = threading.Event()

    def take(self) -> bool:
        """Claims the job. Returns True for the first caller only: its thread, or the code that
        failed to start one."""
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken

    # --- by the thread ---------------------------------------------------------------------------

    def run(self, save: Callable[[], Metadata]) -> None:
        """Runs ``save`` and completes the futures. Never raises."""
        if not self.take():
            return
        self._go.wait()
        failure: BaseException | None = None
        metadata: Metadata | None = None
        try:
            _core.fault_point("background save begins", self.metrics.path)
            metadata = save()
            now = time.perf_counter() - self.begun
            self.metrics.commit_s = now - self.metrics.written_s
            if self.warning is not None and self.warns_of_unchanged:
                # A manager, which reports its saves itself, does not have this option.
                hint = "" if self.reported else ". Pass warn_unchanged=False to omit this warning"
                self._warn(f"{self.warning}{hint}")
        except BaseException as error:
            failure = error
            drop_frames(error)
        try:
            self._end(failure)
        finally:
            if failure is None:
                assert metadata is not None
                self.committed.set_result(metadata)
            else:
                self.committed.set_exception(failure)
        try:
            self.ranks.close()
        except Exception as error:
            LOGGER.warning("could not notify the other ranks that the save has ended: %s", error)

    def bytes_moved(self) -> int:
        """Returns a number that grows while the save makes progress."""
        of_callback = time.monotonic_ns() if self._is_calling_back else 0
        return self.state.resolved + self.write.moved() + self.moved_by_writer() + of_callback

    def call_on_commit(self, metadata: Metadata) -> None:
        """Calls ``on_commit`` on the coordinator, after the commit; the other ranks wait for it.

        Raises:
            OnCommitFailed: ``on_commit`` failed.
        """
        assert self.on_commit is not None
        self._is_calling_back = True
        try:
            self.on_commit(metadata)
        except BaseException as error:  # torch's CheckpointException is not an Exception
            raise OnCommitFailed(
                f"on_commit failed ({error}); the checkpoint in {self.metrics.path} is committed"
            ) from error
        finally:
            self._is_calling_back = False

    # --- by the caller ---------------------------------------------------------------------------

    def go(self) -> None:
        """Lets the job's thread begin."""
        self._go.set()

    def abandon(self, error: BaseException) -> None:
        """Makes the job fail with the error that the call raises."""
        self.abandoned = error
        self.reported = True
        self.go()

    # --- by the handle ---------------------------------------------------------------------------

    def hold_back(self) -> None:
        """Blocks a guarded optimizer step until the sources may change."""
        if self.write.staged.done() or self.inherited:
            return
        _core.fault_point("wait until staged", self.metrics.path)
        with self.blocking():
            if not self.write.hold_back(self.committed.done):
                self.write.wait_staged()

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Counts the time in the block as time during which the caller was blocked."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.metrics.blocked_s += time.perf_counter() - begun

    def disown(self) -> None:
        """Completes the futures in a forked child, whose parent runs the save."""
        self.inherited = True
        error = CheckpointError(_INHERITED)
        # New futures: the locks of the old ones may have been held during the fork.
        self.write.staged, self.committed = Future(), Future()
        self.write.staged.set_exception(error)
        self.committed.set_exception(error)

    # --- private ---------------------------------------------------------------------------------

    def _warn(self, text: str) -> None:
        try:
            # A filter may turn the warning into an exception.
            warnings.warn(text, stacklevel=2)
        except Warning as error:
            raise CheckpointError(
                f"a filter turned the warning of unchanged tensors into an error ({error}); the "
                f"checkpoint in {self.metrics.path} is committed"
            ) from error

    def _end(self, failure: BaseException | None) -> None:
        write = self.write
        write.end(failure)
        metrics = self.metrics
        metrics.total_s = time.perf_counter() - self.begun
        # CPU time of this thread, which runs only this save.
        metrics.python_s = time.thread_time() - _core.seconds_without_gil()
        metrics.messages, metrics.message_bytes = self.ranks.sent
        if write.timing is not None:
            metrics.bytes = write.progress().bytes_planned
            staged, _ended, _stage, checksum, written, fsync = write.timing
            metrics.staging_s, metrics.checksum_s = staged, checksum
            metrics.write_s, metrics.fsync_s = written, fsync
        if failure is None and not self.reported:
            metrics.log()
        if self._trace is not None:
            try:
                self._write_trace(Path(self._trace))
            except Exception as error:
                LOGGER.warning("could not write the trace to %s: %s", self._trace, error)

    def _write_trace(self, path: Path) -> None:
        metrics = self.metrics
        spans: list[Span] = []
        if metrics.planning_s:
            spans.append(("python", "plan", 0.0, metrics.planning_s))
        for name, file, begin, end in self.write.stretches:
            assert self.write.begun is not None
            lane = "sources" if name == "stage" else "disk"
            begun = self.write.begun - self.begun
            spans.append((f"{lane} {file}", name, begun + begin, begun + end))
        spans.append(("python", "commit", metrics.written_s, metrics.total_s))
        spans.append(("caller", "blocked", 0.0, metrics.blocked_s))
        if self.ranks.size > 1:
            path = path.with_name(f"{path.stem}-rank{self.ranks.rank}{path.suffix}")
        write_trace(path, self.ranks.rank, spans)


def wait_for(future: Future[T], timeout: float | None, what: str, job: Job) -> T:
    """Waits for a future of a job. Raises TimeoutError, with the job's path, at the timeout."""
    if job.inherited:
        raise CheckpointError(_INHERITED)
    try:
        return future.result(timeout)
    except CheckpointFailed as error:
        raise error.with_traceback(None) from error.__cause__
    except FutureTimeout:
        if future.done():
            raise
        raise TimeoutError(
            f"the save to {job.metrics.path} was not {what} within {timeout} s; it continues"
        ) from None
