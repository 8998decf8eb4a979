"""Runs requests to a process group's store, which may never answer."""

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
    """Returns the value of a key, or None if the key is absent. Never waits for the key.

    ``get`` would wait for an absent key until the store's timeout (30 minutes by default) and block
    the connection for all other threads. A preceding ``check`` does not prevent that, because
    another rank may delete the key in between. This call of ``compare_set`` changes nothing, and
    returns the expected value if the key is absent.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


class StoreThread:
    """Runs requests to a store on a separate thread, because TCPStore blocks forever if its server
    has stopped.

    The first request starts the thread. If a request is not answered in time, the thread is
    abandoned, and the next request starts a new one. Keeps no references to the objects of past
    requests: a reference to a store would keep the store and its server alive.
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
        """Runs ``work``, which uses the store, and returns its result. May be called from any
        thread. Requests are processed in order.

        Args:
            step: the step of the save or load, for the error.
            rank: rank of this process.
            limit: seconds to wait for the result.
            advice: what else the user should check; appended to the error.

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
            f"rank {rank} lost the connection to the process group's store during '{step}' "
            f"({first_line(cause)}): check that the process that hosts the store (rank 0 or "
            f"torchrun's agent) is still running{advice}"
        )
        raise failed_on(step, {rank: (error, stack)})

    # --- private ---------------------------------------------------------------------------------

    def _started(self) -> _Requests | None:
        """Returns the request queue of a running thread. Returns None if no thread can be started,
        because the interpreter is exiting (Python 3.12)."""
        with self._lock:
            # A forked child does not have the parent's thread.
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
                # End the thread in case the store ever answers.
                requests.put(None)


def _serve(requests: _Requests) -> None:
    while _answer_next(requests):
        pass


def _answer_next(requests: _Requests) -> bool:
    """Runs the next request and keeps no reference to it. Returns False if there are no more."""
    request = requests.get()
    if request is None:
        return False
    answer, work, args = request
    answer.put(attempt(work, *args))
    return True
