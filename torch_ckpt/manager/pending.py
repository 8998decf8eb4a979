"""A manager's running save: which threads may wait for it, and the work at its end."""

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
        thread: id of the thread that is running the callback; None if none is.
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
    """The last save that has started.

    The training thread makes it and waits for it, the save's thread ends it. A forked child has a
    copy that never ends; the child does not wait for it.

    Attributes:
        step: step that is being saved.
        handle: handle of the save.
        decision_count: :attr:`torch_ckpt.manager.intervals.Schedule.decision_count` at the start.
        ended: set when the work at the save's end has been done, after the handle's future.
        thread: id of the thread that is reporting an event of this save, and must not wait for it.
    """

    def __init__(
        self, step: int, handle: AsyncSave, decision_count: int, on_commit: OnCommit | None = None
    ) -> None:
        self.step = step
        self.handle = handle
        self.decision_count = decision_count
        self._on_commit = on_commit
        self.ended = threading.Event()
        self.thread: int | None = None
        self._pid = os.getpid()

    @property
    def can_wait(self) -> bool:
        """True if the calling thread can wait for the save: the save belongs to this process, and
        the thread is not running a callback of the save, which would wait for itself."""
        me = threading.get_ident()
        calls_back = self._on_commit is not None and self._on_commit.thread == me
        return os.getpid() == self._pid and me != self.thread and not calls_back

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the end of the save, unless the calling thread cannot (:attr:`can_wait`).

        Returns:
            False if ``timeout`` seconds have passed first.
        """
        if not self.can_wait:
            return True
        _core.fault_point("wait for a save")
        return self.ended.wait(timeout)


class OneShotCallback(Generic[T]):
    """A callback for a future that drops its function when it is called.

    Futures keep their callbacks, and would otherwise keep all that the function refers to alive.
    """

    def __init__(self, function: Callable[[Future[T]], None]) -> None:
        self._function: Callable[[Future[T]], None] | None = function

    def __call__(self, future: Future[T]) -> None:
        function, self._function = self._function, None
        if function is not None:
            function(future)
