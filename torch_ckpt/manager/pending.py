"""The running save of a manager, and which threads may wait for it."""

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
        thread: id of the thread that is running the callback; None if no thread is.
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

    The training thread creates this object and waits for the save. The save's thread sets
    ``ended``. In a forked child, ``ended`` is never set.

    Attributes:
        step: step that is being saved.
        handle: handle of the save.
        decision_count: number of the schedule's decisions when the save started.
        ended: set after the handle's future is resolved and the manager has handled the result.
        thread: id of the thread that is reporting an event of this save; None if no thread is.
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
        """True if the calling thread may wait for the save. False in a forked child, and in a
        callback of the save, which would wait for itself."""
        me = threading.get_ident()
        calls_back = self._on_commit is not None and self._on_commit.thread == me
        return os.getpid() == self._pid and me != self.thread and not calls_back

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the save has ended. Returns immediately if :attr:`can_wait` is False.

        Returns:
            False if the save has not ended within ``timeout`` seconds.
        """
        if not self.can_wait:
            return True
        _core.fault_point("wait for a save")
        return self.ended.wait(timeout)


class OneShotCallback(Generic[T]):
    """A future's callback that drops its reference to the function when called.

    Futures keep their callbacks, which would otherwise keep everything alive that the function
    refers to.
    """

    def __init__(self, function: Callable[[Future[T]], None]) -> None:
        self._function: Callable[[Future[T]], None] | None = function

    def __call__(self, future: Future[T]) -> None:
        function, self._function = self._function, None
        if function is not None:
            function(future)
