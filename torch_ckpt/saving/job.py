"""The life of a save in the background.

1. The call copies the state dict's containers and takes aliases and versions of its tensors
   (saving/sources.py); contents are not read.
2. A thread of this process plans with the other ranks, over a store and never over the training's
   process group, and starts the engine.
3. The engine copies all contents into its chunks. Then the versions are compared: a tensor that
   was written to meanwhile fails the save by its name. Else the save is *staged*, and every source
   is let go of.
4. The engine's quiet threads write, the coordinator commits: the save is *committed*.

One save at a time and process. Its error is told once: by ``result()`` or the futures, else by the
next call, else by ``check_for_errors()``, at the latest by the log when the interpreter ends.
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
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.errors import CheckpointError, OnCommitFailed
from torch_ckpt.ranks.failures import CheckpointFailed
from torch_ckpt.ranks.meeting import Ranks
from torch_ckpt.ranks.outcomes import drop_frames
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.metrics import SaveMetrics, Span, write_trace
from torch_ckpt.saving.plan import GlobalPlan
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.sources import Sources
from torch_ckpt.saving.unchanged import UnchangedDetector

T = TypeVar("T")


class _Reporting(Future[T]):
    """A future of ours alone, which notices that its error has been seen."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = weakref.ref(job)
        # Nobody can cancel what is running.
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


class Job:
    """One save, as its thread and its handle share it."""

    def __init__(
        self,
        sources: Sources,
        ranks: Ranks,
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
        self.sources = sources
        self.write = RankWrite(
            sources,
            background=background,
            quiet_stagers=not blocking,
            ranks=ranks.size,
            advice="Call guard(optimizer) or wait_staged() before the next step, or save with "
            'staging="blocking"',
            trace=trace is not None,
            staged=_Reporting(self),
        )
        #: Somebody else tells how it ends.
        self.reported = False
        #: Of the saves of this process.
        self.unchanged: UnchangedDetector | None = None
        self.inherited = False
        #: The values that differ between ranks, described for the user.
        self.differing = ""
        #: Values that have been found; counts as a sign of life.
        self.resolved = 0
        self.committed: Future[Metadata] = _Reporting(self)
        self.metrics = SaveMetrics(path=path, rank=ranks.rank)
        self.write_done = write_done
        self._begun = begun
        self._trace = trace
        self._spans: list[Span] = []
        self._on_commit = on_commit
        self._is_calling_back = False
        self._warn_unchanged = warn_unchanged
        self._warning: str | None = None
        self._lock = threading.Lock()
        self._taken = False
        self._abandoned: BaseException | None = None
        self._go = threading.Event()

    def take(self) -> bool:
        """Whether the caller is the first to take it: its thread, or who finds that it has none."""
        with self._lock:
            taken, self._taken = self._taken, True
        return not taken

    # --- by the thread ---------------------------------------------------------------------------

    def run(self, save: Callable[[Job], Metadata]) -> None:
        """Runs ``save`` and settles the futures; never raises."""
        if not self.take():
            return
        self._go.wait()
        failure: BaseException | None = None
        metadata: Metadata | None = None
        try:
            _core.fault_point("background save begins", self.metrics.path)
            metadata = save(self)
            self.metrics.commit_s = self._now() - self.metrics.written_s
            self._warn()
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
            LOGGER.warning("other ranks may not have heard of the save's end: %s", error)

    def values(self) -> dict[str, Any]:
        """The state dict to save.

        Raises:
            BaseException: what ended the call.
        """
        if self._abandoned is not None:
            raise self._abandoned
        return self.sources.values

    def planned(self) -> None:
        """This rank knows what to write."""
        self.metrics.planning_s = self._now()
        self._spans.append(("python", "plan", 0.0, self.metrics.planning_s))

    def bytes_moved(self) -> int:
        """Grows for as long as anything moves."""
        of_callback = time.monotonic_ns() if self._is_calling_back else 0
        return self.resolved + self.write.moved() + of_callback

    def written(self) -> None:
        """This rank's files are durable."""
        self.metrics.written_s = self._now()
        if self.write_done is not None:
            self.write_done()

    def committed_items(self, plan: GlobalPlan, written: list[Written]) -> None:
        """On the coordinator: what has been committed."""
        assert self.unchanged is not None
        self._warning = self.unchanged.check(plan, written, self.metrics.path)

    def call_back(self, metadata: Metadata) -> None:
        """On the coordinator, after the commit; the other ranks wait for its end.

        Raises:
            OnCommitFailed: what was called has failed.
        """
        if self._on_commit is None:
            return
        self._is_calling_back = True
        try:
            self._on_commit(metadata)
        except BaseException as error:  # as torch's CheckpointException is
            raise OnCommitFailed(
                f"on_commit failed ({error}); the checkpoint in {self.metrics.path} is committed"
            ) from error
        finally:
            self._is_calling_back = False

    # --- by the caller ---------------------------------------------------------------------------

    def go(self) -> None:
        """Lets the thread begin."""
        self._go.set()

    def abandon(self, error: BaseException) -> None:
        """Ends it with what the call raises."""
        self._abandoned = error
        self.reported = True
        self.go()

    # --- by the handle ---------------------------------------------------------------------------

    def hold_back(self) -> None:
        """What a guarded step does first."""
        if self.write.staged.done() or self.inherited:
            return
        _core.fault_point("wait until staged", self.metrics.path)
        with self.blocking():
            if not self.write.hold_back(self.committed.done):
                self.write.wait_staged()

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Counts the time in which the caller is kept waiting."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.metrics.blocked_s += time.perf_counter() - begun

    def disown(self) -> None:
        """In a forked child: this save is the parent's."""
        self.inherited = True
        error = CheckpointError("the save is that of the process that forked this one")
        # Their locks may have been held at the fork.
        self.write.staged, self.committed = Future(), Future()
        self.write.staged.set_exception(error)
        self.committed.set_exception(error)

    # --- private ---------------------------------------------------------------------------------

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    def _warn(self) -> None:
        if self._warning is None or not self._warn_unchanged:
            return
        try:
            # Raised where a filter turns warnings into errors.
            warnings.warn(self._warning, stacklevel=2)
        except Warning as error:
            raise CheckpointError(
                f"the warning of unchanged tensors failed ({error}); the checkpoint in "
                f"{self.metrics.path} is committed"
            ) from error

    def _end(self, failure: BaseException | None) -> None:
        write = self.write
        write.end(failure)
        metrics = self.metrics
        metrics.total_s = self._now()
        # Of this thread, which the save has for itself.
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
                LOGGER.warning("the trace could not be written: %s", error)

    def _write_trace(self, path: Path) -> None:
        spans = [*self._spans]
        for name, file, begin, end in self.write.stretches:
            assert self.write.begun is not None
            lane = "sources" if name == "stage" else "disk"
            begun = self.write.begun - self._begun
            spans.append((f"{lane} {file}", name, begun + begin, begun + end))
        metrics = self.metrics
        spans.append(("python", "commit", metrics.written_s, metrics.total_s))
        spans.append(("caller", "blocked", 0.0, metrics.blocked_s))
        if self.ranks.size > 1:
            path = path.with_name(f"{path.stem}-rank{self.ranks.rank}{path.suffix}")
        write_trace(path, self.ranks.rank, spans)


def wait_for(future: Future[T], timeout: float | None, what: str, job: Job) -> T:
    if job.inherited:
        raise CheckpointError("the save is that of the process that forked this one")
    try:
        return future.result(timeout)
    except CheckpointFailed as error:
        raise error.with_traceback(None) from error.__cause__
    except FutureTimeout:
        if future.done():
            raise
        raise TimeoutError(
            f"the save to {job.metrics.path} was not {what} within {timeout} s; it goes on"
        ) from None
