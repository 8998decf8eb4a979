"""Requests to a process group's store, which may never answer."""

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

# Not empty, because a store creates an absent key if the expected value is empty.
_ABSENT = "torch_ckpt: this key is absent"


def peek(store: Store, key: str) -> bytes | None:
    """Returns the value of a key, or None if it is absent. Never waits for it.

    ``get`` waits for an absent key until the timeout of the store, 30 minutes by default, and
    blocks the connection for all other threads: even after a ``check``, if another rank deletes the
    key in between. ``compare_set`` changes nothing here, and returns the expected value if the key
    is absent.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


class StoreThread:
    """A thread that makes requests to a store, because TCPStore waits forever for a stopped server.

    The first request starts it. If a request is not answered in time, the thread is abandoned, and
    the next request starts another one. No reference to objects of a request is kept: a store and
    its server live as long as there is a reference to the store.
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
        """Returns the result of ``work``, which uses the store. May be called by any thread;
        requests are processed in order.

        Args:
            step: the step of the save or load, for the error.
            rank: rank of this process.
            limit: seconds to wait.
            advice: text to add to the error: what else to check.

        Raises:
            CheckpointException: the store is lost or does not answer; the cause is a
                ConnectionError.
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
        """Returns the queue of a running thread; None if Python starts no threads any more, as 3.12
        does while the interpreter exits."""
        with self._lock:
            # A forked child has no threads of its parent.
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
                # The thread then ends, if the store ever answers.
                requests.put(None)


def _serve(requests: _Requests) -> None:
    while _answer_next(requests):
        pass


def _answer_next(requests: _Requests) -> bool:
    """Answers a request and keeps no reference to it. Returns False at the end."""
    request = requests.get()
    if request is None:
        return False
    answer, work, args = request
    answer.put(attempt(work, *args))
    return True
