"""The background saves of this process and their threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt._base import exit_threads
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.saving import host_memory
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.job import Job, wait_for
from torch_ckpt.saving.rank_write import wait_quietly
from torch_ckpt.saving.unchanged import UnchangedDetector


class _RunningSaves:
    """The background saves of this process. Only one save runs at a time."""

    def __init__(self) -> None:
        # A thread that starts a save holds this lock until the save has started.
        self._lock = threading.RLock()
        # Guards all following fields.
        self._fields = threading.Lock()
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._failed: list[Job] = []
        self._unchanged = UnchangedDetector()
        self._last_call: float | None = None

    @contextlib.contextmanager
    def alone(self, if_busy: str = "wait", *, ranks: Exchange) -> Iterator[None]:
        """Block in which a thread starts or performs a save. Only one thread at a time can enter
        it.

        Waits for the running save, or raises if ``if_busy`` is "raise".

        Args:
            ranks: the ranks of the next save.

        Raises:
            CheckpointError: a save is running, and either ``if_busy`` is "raise" or the call comes
                from that save's own callback.
        """
        if threading.current_thread() is self._thread and self._under_way() is not None:
            raise CheckpointError(
                "write_done and on_commit must not start a save: the save that calls them is still "
                "running"
            )
        with self._lock:
            job = self._under_way()
            if job is not None:
                if if_busy == "raise":
                    raise CheckpointError(
                        f"the save to {job.metrics.path} is still running; wait for it, or pass "
                        "if_busy='wait'"
                    )
                _core.fault_point("wait for the save before", job.metrics.path)
                # Other ranks may already wait for this rank in the next save.
                with ranks.alive(job.bytes_moved):
                    wait_quietly(job.committed)
            yield

    def start(self, job: Job, save: Callable[[], Metadata]) -> AsyncSave:
        """Runs ``save`` in a new thread."""
        self.collect()
        job.unchanged = self._unchanged
        if self._last_call is not None:
            job.metrics.interval_s = time.perf_counter() - self._last_call
        self._last_call = time.perf_counter()
        thread = exit_threads.spawn(lambda: job.run(save))
        # Set these only after the thread has started: if starting it failed, later saves would wait
        # forever for a job that nothing runs.
        with self._fields:
            self._job, self._thread = job, thread
        return AsyncSave(job)

    def next_failed(self) -> Job | None:
        """Returns the next failed save that it has not returned before, or None."""
        self.collect()
        return self._failed.pop(0) if self._failed else None

    def leave(self) -> None:
        """Waits for the running save, then for the engine's threads. Called at interpreter exit."""
        host_memory.leave()
        if not exit_threads.join():
            path = self._job.metrics.path if self._job is not None else "a directory"
            LOGGER.error(
                "the save to %s did not end within %.0f s; the interpreter exits without waiting "
                "any longer",
                path,
                exit_threads.EXIT_LIMIT_SECONDS,
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
        """Drops the save once it has ended, and moves a failed save to the failed ones. Also called
        before a fork, so that the child keeps the result of a save that has ended."""
        with self._fields:
            job = self._job
            if job is not None and job.committed.done():
                self._job = None
                if Future.exception(job.committed) is not None:
                    self._failed.append(job)

    def forget_in_child(self) -> None:
        """Forgets all saves in a forked child, because only the parent runs them."""
        if self._job is not None:
            self._job.disown()
        self.__init__()  # type: ignore[misc]

    def _under_way(self) -> Job | None:
        job = self._job
        return None if job is None or job.committed.done() else job


_saves = _RunningSaves()
alone = _saves.alone
start = _saves.start


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
    while (job := _saves.next_failed()) is not None:
        if not job.reported:
            wait_for(job.committed, None, "committed", job)


register(
    Part.SAVES,
    at_exit=_saves.leave,
    before_fork=_saves.collect,
    in_child=_saves.forget_in_child,
)
