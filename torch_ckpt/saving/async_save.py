"""The life of a save in the background, and the handle to it.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _C
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.progress import Progress
from torch_ckpt.errors import CheckpointError, OnCommitFailed
from torch_ckpt.ranks.failures import CheckpointFailed
from torch_ckpt.ranks.meeting import Ranks
from torch_ckpt.ranks.outcomes import drop_frames
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.metrics import SaveMetrics, Span, write_trace
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.sources import Sources
from torch_ckpt.saving.unchanged import Fingerprint, UnchangedDetector

T = TypeVar("T")

#: How long leaving the interpreter waits for the save that is under way, in seconds.
EXIT_LIMIT_SECONDS = 3600.0


class AsyncSave:
    """A save under way, made by :func:`torch_ckpt.async_save`."""

    def __init__(self, job: Job) -> None:
        self._job = job

    # Not kept: a forked child has others.
    @property
    def staged(self) -> Future[None]:
        """Done when the sources may change; fails where the save did so before."""
        return self._job.staged

    @property
    def committed(self) -> Future[Metadata]:
        """Done, with the metadata, when the checkpoint is durable and visible on all ranks."""
        return self._job.committed

    def wait_staged(self, timeout: float | None = None) -> None:
        """Waits until the sources may change.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the save goes on.
            CheckpointException: the save has failed before.
        """
        with self._job.blocking():
            _wait(self.staged, timeout, "staged", self._job)

    def result(self, timeout: float | None = None) -> Metadata:
        """Waits until the checkpoint is durable and visible; its metadata.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the save goes on.
            CheckpointException: the save failed, with the cause of each rank that did.
            OnCommitFailed: ``on_commit`` failed, on the coordinator; raised on all ranks. The
                checkpoint is committed.
            CheckpointError: this process is a forked child of the one that saves.
        """
        return _wait(self.committed, timeout, "committed", self._job)

    def done(self) -> bool:
        """Whether the save has ended, well or badly."""
        return self.committed.done()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the optimizer's next step wait until it may change the sources.

        CPU tensors have then been copied. For CUDA tensors the current stream waits, on the device,
        for the copies; the CPU waits only until they have been submitted. A failed save holds
        nothing back.

        A step that is replayed as a CUDA graph asks nobody. So for an optimizer that is
        ``capturable`` this call itself waits until CUDA tensors have been copied.
        """
        if self._job.has_devices and any(
            group.get("capturable") for group in optimizer.param_groups
        ):
            self.wait_staged_quietly()
            return
        _Guard.of(optimizer).job = self._job

    def progress(self) -> Progress:
        """Bytes of this rank so far."""
        return self._job.write.progress()

    def wait_staged_quietly(self) -> None:
        """Waits until the sources may change, be it that the save has failed."""
        with self._job.blocking():
            self._job.wait_until_staged()

    def metrics(self) -> SaveMetrics:
        """What the save took on this rank; complete once it is done."""
        return self._job.metrics

    def __del__(self) -> None:
        job = getattr(self, "_job", None)
        if job is not None and not job.committed.done() and not job.inherited:
            warnings.warn(
                f"the handle of the save to {job.metrics.path} was dropped before the save ended; "
                "it goes on, and an error is raised by the next one or by check_for_errors()",
                stacklevel=2,
            )


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
        self.has_devices = bool(sources.devices)
        self.write = RankWrite(
            sources,
            background=background,
            quiet_stagers=not blocking,
            ranks=ranks.size,
            advice="Call guard(optimizer) or wait_staged() before the next step, or save with "
            'staging="blocking"',
            trace=trace is not None,
            on_staged=lambda: self.staged.set_result(None),
        )
        #: Somebody else tells how it ends.
        self.reported = False
        self.inherited = False
        #: Values that have been found; counts as a sign of life.
        self.resolved = 0
        self.staged: Future[None] = _Reporting(self)
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
        self._sources = sources
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
            _C.fault_point("background save begins", self.metrics.path)
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
                if not self.staged.done():
                    self.staged.set_exception(failure)
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
        return self._sources.values

    def planned(self) -> None:
        """This rank knows what to write."""
        self.metrics.planning_s = self._now()
        self._spans.append(("python", "plan", 0.0, self.metrics.planning_s))

    def forget_with(self, forget: Callable[[], None]) -> None:
        """Also calls ``forget`` when the sources are let go of."""
        self._sources.forget_with(forget)

    def bytes_moved(self) -> int:
        """Grows for as long as anything moves."""
        of_callback = time.monotonic_ns() if self._is_calling_back else 0
        return self.resolved + self.write.moved() + of_callback

    def written(self) -> None:
        """This rank's files are durable."""
        self.metrics.written_s = self._now()
        if self.write_done is not None:
            self.write_done()

    def committed_items(
        self, items: Mapping[str, Fingerprint], paths: Mapping[str, Sequence[Any]]
    ) -> None:
        """On the coordinator: what has been committed."""
        self._warning = _runtime.unchanged.check(items, paths, self.metrics.path)

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

    def wait_until_staged(self) -> None:
        """Returns when the sources may change, be it that the save has failed."""
        _wait_quietly(self.staged)

    # --- by the handle ---------------------------------------------------------------------------

    def hold_back(self) -> None:
        """What a guarded step does first."""
        if self.staged.done() or self.inherited:
            return
        _C.fault_point("wait until staged", self.metrics.path)
        with self.blocking():
            if not self.write.hold_back(self.committed.done):
                _wait_quietly(self.staged)

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
        for name in ("staged", "committed"):
            future: Future[Any] = Future()
            future.set_exception(error)
            setattr(self, name, future)

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
        write.end()
        metrics = self.metrics
        metrics.total_s = self._now()
        metrics.python_s = time.thread_time()
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


class _Guard:
    """The one hook of ours on an optimizer; optimizers cannot lose hooks amid a step."""

    _of: ClassVar[weakref.WeakKeyDictionary[torch.optim.Optimizer, _Guard]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self) -> None:
        self.job: Job | None = None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> _Guard:
        guard = cls._of.get(optimizer)
        if guard is None:
            guard = cls._of[optimizer] = cls()
            optimizer.register_step_pre_hook(guard)
        return guard

    def __call__(self, *_: object) -> None:
        job, self.job = self.job, None
        if job is not None:
            job.hold_back()


class _Runtime:
    """The saves of this process."""

    def __init__(self) -> None:
        # Held by the one thread that starts a save.
        self.lock = threading.RLock()
        # For moments, of the fields below.
        self._fields = threading.Lock()
        self.job: Job | None = None
        self.thread: threading.Thread | None = None
        self.threads: list[threading.Thread] = []
        self.failed: list[Job] = []
        self.unchanged = UnchangedDetector()
        self.last_call: float | None = None

    def make_room(self, if_busy: str, ranks: Ranks) -> None:
        """Waits for the save under way, or refuses."""
        job = self.job
        if job is not None and not job.committed.done():
            if if_busy == "raise":
                raise CheckpointError(f"the save to {job.metrics.path} has not ended yet")
            _C.fault_point("wait for the save before", job.metrics.path)
            # Other ranks may have begun the next one already.
            with ranks.alive(job.bytes_moved):
                _wait_quietly(job.committed)

    def is_calling(self) -> bool:
        """Whether the save under way calls from its own thread, which cannot wait for it."""
        job = self.job
        mine = threading.current_thread() is self.thread
        return mine and job is not None and not job.committed.done()

    def check(self) -> None:
        """Raises an error that nobody has seen, once."""
        self.collect()
        while self.failed:
            job = self.failed.pop(0)
            if not job.reported:
                _wait(job.committed, None, "committed", job)

    def start(self, job: Job, save: Callable[[Job], Metadata]) -> None:
        self.collect()
        if self.last_call is not None:
            job.metrics.interval_s = time.perf_counter() - self.last_call
        self.last_call = time.perf_counter()
        thread = self.spawn(lambda: job.run(save))
        # Not before there is a thread that ends it.
        with self._fields:
            self.job, self.thread = job, thread

    def spawn(self, function: Callable[[], None]) -> threading.Thread:
        """Runs ``function`` in a thread that the interpreter's end waits for."""
        thread = threading.Thread(target=function, name="torch_ckpt save", daemon=True)
        thread.start()
        with self._fields:
            self.threads = [t for t in self.threads if t.is_alive()] + [thread]
        return thread

    def let_go(self, thread: threading.Thread) -> None:
        with self._fields:
            self.threads = [t for t in self.threads if t is not thread]

    def join(self) -> bool:
        """Waits for all threads, with a limit; whether they have ended."""
        deadline = time.monotonic() + EXIT_LIMIT_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def leave(self) -> bool:
        """At the interpreter's end; whether everything has ended."""
        if not self.join():
            path = self.job.metrics.path if self.job is not None else "a directory"
            LOGGER.error(
                "the save to %s has not ended within %.0f s and is given up",
                path,
                EXIT_LIMIT_SECONDS,
            )
            return False
        self.collect()
        for job in self.failed:
            if not job.reported:
                LOGGER.error(
                    "the save to %s failed: %s", job.metrics.path, job.committed.exception()
                )
        return True

    def collect(self) -> None:
        """Puts a save that has ended aside; before a fork, too, since it is then the child's."""
        with self._fields:
            job = self.job
            if job is not None and job.committed.done():
                self.job = None
                if Future.exception(job.committed) is not None:
                    self.failed.append(job)

    def forget_in_child(self) -> None:
        if self.job is not None:
            self.job.disown()
        self.__init__()  # type: ignore[misc]


_runtime = _Runtime()


@contextlib.contextmanager
def alone(if_busy: str = "wait", *, ranks: Ranks) -> Iterator[None]:
    """A block in which this process starts or makes one save; one thread at a time is in it.

    Waits for the save under way, or refuses where ``if_busy`` is "raise".

    Args:
        ranks: of the save that is to come.

    Raises:
        CheckpointError: a save is under way, and was not to be waited for, or calls this itself.
    """
    if _runtime.is_calling():
        raise CheckpointError("write_done and on_commit cannot save: their save is under way")
    with _runtime.lock:
        _runtime.make_room(if_busy, ranks)
        yield


def start(job: Job, save: Callable[[Job], Metadata]) -> AsyncSave:
    """Runs ``save`` in a thread of its own."""
    _runtime.start(job, save)
    return AsyncSave(job)


def spawn(function: Callable[[], None]) -> threading.Thread:
    """Runs ``function`` in a thread that the interpreter's end waits for."""
    return _runtime.spawn(function)


def let_go(thread: threading.Thread) -> None:
    """The interpreter's end does not wait for a thread any more; it was made by :func:`spawn`."""
    _runtime.let_go(thread)


def check_for_errors() -> None:
    """Raises the error of a background save that has ended and whose error nobody has seen yet.

    Each is raised once. Does not wait.

    Raises:
        CheckpointException, CheckpointError: see :meth:`AsyncSave.result`.
    """
    _runtime.check()


def join_saves() -> None:
    """Waits for the saves under way; at the interpreter's end before other threads are shut down,
    where a save needs them."""
    _runtime.join()


def leave_at_exit() -> None:
    """Waits for the save under way, then for the engine's threads; for the interpreter's end."""
    host_memory.leave()
    if _runtime.leave():
        _C.join_executor()


def _wait(future: Future[T], timeout: float | None, what: str, job: Job) -> T:
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


def _wait_quietly(future: Future[Any]) -> None:
    """Waits for the end, whatever it is, and leaves an error unseen."""
    Future.exception(future)


register(
    Part.SAVES,
    at_exit=leave_at_exit,
    before_fork=_runtime.collect,
    in_child=_runtime.forget_in_child,
)
