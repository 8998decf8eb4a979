"""The saves of this process, their threads, and the end of both."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _C
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.meeting import Ranks
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.job import Job, wait_for
from torch_ckpt.saving.rank_write import wait_quietly
from torch_ckpt.saving.unchanged import UnchangedDetector

#: How long leaving the interpreter waits for the save that is under way, in seconds.
EXIT_LIMIT_SECONDS = 3600.0


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
                wait_quietly(job.committed)

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
                wait_for(job.committed, None, "committed", job)

    def start(self, job: Job, save: Callable[[Job], Metadata]) -> None:
        self.collect()
        job.unchanged = self.unchanged
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


register(
    Part.SAVES,
    at_exit=leave_at_exit,
    before_fork=_runtime.collect,
    in_child=_runtime.forget_in_child,
)
