"""A manager's save that is under way: who may wait for it, and what is done once at its end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt import _core
from torch_ckpt.saving.async_save import AsyncSave

T = TypeVar("T")


class OnCommit:
    """A manager's callback for the commit of one step.

    Attributes:
        thread: that runs it now.
    """

    def __init__(self, function: Callable[[int], None], step: int) -> None:
        self.thread: int | None = None
        self._function = function
        self._step = step

    def __call__(self, _metadata: Metadata) -> None:
        self.thread = threading.get_ident()
        try:
            self._function(self._step)
        finally:
            self.thread = None


class Pending:
    """The last save that was begun.

    Made and waited for by the training thread, ended by the save's. A forked child has a copy,
    which never ends, and for which nothing waits.

    Attributes:
        step: that is saved.
        handle: of the save.
        decided: see :class:`torch_ckpt.manager.intervals.Schedule`, when it began.
        ended: later than the handle's future: what there is to do at the end has been done.
        thread: that tells of it now, which does not wait for it.
    """

    def __init__(
        self, step: int, handle: AsyncSave, decided: int, on_commit: OnCommit | None = None
    ) -> None:
        self.step = step
        self.handle = handle
        self.decided = decided
        self._on_commit = on_commit
        self.ended = threading.Event()
        self.thread: int | None = None
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether it is this process's save, and this is not the thread that tells of it."""
        me = threading.get_ident()
        calls_back = self._on_commit is not None and self._on_commit.thread == me
        return os.getpid() == self._pid and me != self.thread and not calls_back

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended; waits for that where it can."""
        if not self.is_here:
            return True
        _core.fault_point("wait for a save")
        return self.ended.wait(timeout)


class Once(Generic[T]):
    """A callback of a future that is let go of when it is called.

    Futures keep their callbacks, and so, for as long as they had this one's, what it belongs to.
    """

    def __init__(self, work: Callable[[Future[T]], None]) -> None:
        self._work: Callable[[Future[T]], None] | None = work

    def __call__(self, future: Future[T]) -> None:
        work, self._work = self._work, None
        if work is not None:
            work(future)
