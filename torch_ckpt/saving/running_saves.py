"""The saves of this process, their threads, and the end of both."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
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


class _RunningSaves:
    """The saves of this process."""

    def __init__(self) -> None:
        # Held by the one thread that starts a save.
        self._lock = threading.RLock()
        # For moments, of the fields below.
        self._fields = threading.Lock()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._failed: list[Job] = []
        self._unchanged = UnchangedDetector()
        self._last_call: float | None = None

    @contextlib.contextmanager
    def alone(self, if_busy: str = "wait", *, ranks: Ranks) -> Iterator[None]:
        """A block in which this process starts or makes one save; one thread at a time is in it.

        Waits for the save under way, or refuses where ``if_busy`` is "raise".

        Args:
            ranks: of the save that is to come.

        Raises:
            CheckpointError: a save is under way, and was not to be waited for, or calls this
                itself.
        """
        if threading.current_thread() is self._thread and self._under_way() is not None:
            raise CheckpointError("write_done and on_commit cannot save: their save is under way")
        with self._lock:
            job = self._under_way()
            if job is not None:
                if if_busy == "raise":
                    raise CheckpointError(f"the save to {job.metrics.path} has not ended yet")
                _core.fault_point("wait for the save before", job.metrics.path)
                # Other ranks may have begun the next one already.
                with ranks.alive(job.bytes_moved):
                    wait_quietly(job.committed)
            yield

    def start(self, job: Job, save: Callable[[Job], Metadata]) -> AsyncSave:
        """Runs ``save`` in a thread of its own."""
        self.collect()
        job.unchanged = self._unchanged
        if self._last_call is not None:
            job.metrics.interval_s = time.perf_counter() - self._last_call
        self._last_call = time.perf_counter()
        thread = self.spawn(lambda: job.run(save))
        # Not before there is a thread that ends it.
        with self._fields:
            self._job, self._thread = job, thread
        return AsyncSave(job)

    def spawn(self, function: Callable[[], None]) -> threading.Thread:
        """Runs ``function`` in a thread that the interpreter's end waits for."""
        thread = threading.Thread(target=function, name="torch_ckpt save", daemon=True)
        thread.start()
        with self._fields:
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        return thread

    def let_go(self, thread: threading.Thread) -> None:
        """The interpreter's end does not wait any more for a thread that :meth:`spawn` has made."""
        with self._fields:
            self._threads = [t for t in self._threads if t is not thread]

    def next_failed(self) -> Job | None:
        """One that has failed, each once."""
        self.collect()
        return self._failed.pop(0) if self._failed else None

    def join(self) -> bool:
        """Waits for the saves under way, with a limit; whether they have ended.

        At the interpreter's end before other threads are shut down, where a save needs them.
        """
        deadline = time.monotonic() + EXIT_LIMIT_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def leave(self) -> None:
        """Waits for the save under way, then for the engine's threads; for the interpreter's
        end."""
        host_memory.leave()
        if not self.join():
            path = self._job.metrics.path if self._job is not None else "a directory"
            LOGGER.error(
                "the save to %s has not ended within %.0f s and is given up",
                path,
                EXIT_LIMIT_SECONDS,
            )
            return
        self.collect()
        for job in self._failed:
            if not job.reported:
                LOGGER.error(
                    "the save to %s failed: %s", job.metrics.path, job.committed.exception()
                )
        _core.join_executor()

    def collect(self) -> None:
        """Puts a save that has ended aside; before a fork, too, since it is then the child's."""
        with self._fields:
            job = self._job
            if job is not None and job.committed.done():
                self._job = None
                if Future.exception(job.committed) is not None:
                    self._failed.append(job)

    def forget_in_child(self) -> None:
        """A forked child has no save."""
        if self._job is not None:
            self._job.disown()
        self.__init__()  # type: ignore[misc]

    def _under_way(self) -> Job | None:
        job = self._job
        return None if job is None or job.committed.done() else job


_saves = _RunningSaves()
alone = _saves.alone
start = _saves.start
spawn = _saves.spawn
let_go = _saves.let_go
join_saves = _saves.join


def check_for_errors() -> None:
    """Raises the error of a background save that has ended and whose error nobody has seen yet.

    Each is raised once. Does not wait.

    Raises:
        CheckpointException, CheckpointError: see :meth:`AsyncSave.result`.
    """
    while (job := _saves.next_failed()) is not None:
        if not job.reported:
            wait_for(job.committed, None, "committed", job)


register(
    Part.SAVES,
    at_exit=_saves.leave,
    before_fork=_saves.collect,
    in_child=_saves.forget_in_child,
)
