"""Asking a process group's store, which may never answer."""

from __future__ import annotations

import os
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import Store

from torch_ckpt.ranks.failures import failed_on
from torch_ckpt.ranks.outcomes import attempt, failed, first_line

T = TypeVar("T")

_Requests = queue.SimpleQueue[Any]

# Not empty: a store creates an absent key whose expected value is empty.
_ABSENT = "torch_ckpt: this key is absent"


def peek(store: Store, key: str) -> bytes | None:
    """Returns the value of a key, or None if it is absent. Never waits for it.

    ``get`` waits for an absent key until the store's time-out, which is 30 minutes by default, and
    keeps all other threads off the connection: also after a ``check``, if another rank deletes the
    key in between. ``compare_set`` changes nothing here, and returns what it expects if the key is
    absent.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


class StoreThread:
    """A thread that asks a store, because TCPStore waits for ever for a server that is stopped.

    It is started by the first request. One that is not answered in time is left to it, and the next
    request gets another thread. Nothing that a request refers to is kept: a store lives as long as
    somebody refers to it, and its server with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: _Requests | None = None
        self._pid = 0

    def ask(
        self,
        step: str,
        rank: int,
        limit: float,
        work: Callable[..., T],
        *args: Any,
        advice: str = "",
    ) -> T:
        """What ``work`` gets from the store. From any thread; requests are worked off in turn.

        Args:
            step: what it is for, for the error.
            rank: of this process.
            limit: in seconds.
            advice: what else to check after an error, at the end of its text.

        Raises:
            CheckpointException: with a ConnectionError; the store is lost, or does not answer.
        """
        answer: _Requests = queue.SimpleQueue()
        requests = self._started()
        if requests is None:
            answer.put(attempt(work, *args))
        else:
            requests.put((answer, work, args))
        try:
            outcome = answer.get(timeout=limit)
        except queue.Empty:
            self._leave(requests)
            outcome = TimeoutError(f"no answer for {limit:g} s"), traceback.StackSummary()
        if not failed(outcome):
            return cast(T, outcome)
        cause, stack = outcome
        error = ConnectionError(
            f"rank {rank} lost the process group's store in '{step}' "
            f"({first_line(cause)}): check that the process that hosts it, rank 0 or "
            f"torchrun's agent, is still running{advice}"
        )
        raise failed_on(step, {rank: (error, stack)})

    # --- private ---------------------------------------------------------------------------------

    def _started(self) -> _Requests | None:
        """The requests of a thread that runs; None where Python starts none any more, as 3.12 while
        the interpreter ends."""
        with self._lock:
            # A forked child has none of its parent's threads.
            if self._requests is None or self._pid != os.getpid():
                requests: _Requests = queue.SimpleQueue()
                thread = threading.Thread(
                    target=_serve, args=(requests,), name="torch_ckpt store", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError:
                    return None
                self._requests, self._pid = requests, os.getpid()
                weakref.finalize(self, requests.put, None).atexit = False
            return self._requests

    def _leave(self, requests: _Requests | None) -> None:
        with self._lock:
            if requests is not None and self._requests is requests:
                self._requests = None
                # Should the store ever answer, the thread ends.
                requests.put(None)


def _serve(requests: _Requests) -> None:
    while _answer_next(requests):
        pass


def _answer_next(requests: _Requests) -> bool:
    """Answers a request; False where no more will come. Returns without a reference to it."""
    request = requests.get()
    if request is None:
        return False
    answer, work, args = request
    answer.put(attempt(work, *args))
    return True
