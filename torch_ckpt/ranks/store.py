"""The store of a process group, which may never answer, and the clock of exchanges."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch_ckpt._base.formatting import first_line
from torch_ckpt.ranks.failures import (
    CheckpointFailed,
    Failure,
    capture_exceptions,
    failed_on,
    failure_of,
)

T = TypeVar("T")

# Not empty, because a store creates an absent key if the expected value is empty.
_ABSENT = "torch_ckpt: this key is absent"


def peek(store: Any, key: str) -> bytes | None:
    """Returns the value of a key, or None if the key is absent. Never waits for the key.

    ``get`` would wait for an absent key until the store's timeout (30 minutes by default) and block
    the connection for all other threads. A preceding ``check`` does not prevent that, because
    another rank may delete the key in between. This call of ``compare_set`` changes nothing, and
    returns the expected value if the key is absent.
    """
    value: bytes = store.compare_set(key, _ABSENT, _ABSENT)
    return None if value == _ABSENT.encode() else value


class Clock:
    """The time and the threads of exchanges. Tests simulate them."""

    monotonic = staticmethod(time.monotonic)
    Event = threading.Event

    def repeat(
        self, seconds: float, function: Callable[[], None]
    ) -> tuple[threading.Event, threading.Thread | None]:
        """Calls a function every few seconds, until the returned event is set. The thread that
        calls it is None if the interpreter is exiting, which allows no new threads."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(seconds):
                function()

        thread = threading.Thread(target=run, name="torch_ckpt alive", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return ended, None
        return ended, thread


class StoreThread:
    """Runs requests to a store on a separate thread, because TCPStore blocks forever if its server
    has stopped.

    The first request starts the thread. If a request is not answered in time, the thread is
    abandoned, and the next request starts a new one. Keeps no references to the objects of past
    requests: a reference to a store would keep the store and its server alive.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[Any] | None = None
        self._pid = 0

    def request(
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
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            # A forked child does not have the parent's thread.
            if self._requests is None or self._pid != os.getpid():
                self._requests, self._pid = self._started(), os.getpid()
            requests = self._requests
        if requests is None:
            answer.put(capture_exceptions(work, *args))
        else:
            requests.put((answer, work, args))
        try:
            outcome = answer.get(timeout=limit)
        except queue.Empty:
            with self._lock:
                if requests is not None and self._requests is requests:
                    self._requests = None
                    # End the thread in case the store ever answers.
                    requests.put(None)
            outcome = failure_of(TimeoutError(f"no answer for {limit:g} s"))
        if isinstance(outcome, Failure):
            raise lost_store(step, rank, outcome, advice)
        return cast(T, outcome)

    def _started(self) -> queue.SimpleQueue[Any] | None:
        """Returns the queue of a new thread, or None if the interpreter is exiting (Python 3.12),
        which allows no new threads."""
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_serve, args=(requests,), name="torch_ckpt store", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            return None
        weakref.finalize(self, requests.put, None).atexit = False
        return requests


def lost_store(step: str, rank: int, failure: Failure, advice: str = "") -> CheckpointFailed:
    """Returns the error of a rank whose request to the store has failed.

    Args:
        advice: what else the user should check; appended to the error.
    """
    error = ConnectionError(
        f"rank {rank} lost the connection to the process group's store during '{step}' "
        f"({first_line(failure.error)}): check that the process that hosts the store (rank 0 or "
        f"torchrun's agent) is still running{advice}"
    )
    return failed_on(step, {rank: Failure(error, failure.stack)})


def _serve(requests: queue.SimpleQueue[Any]) -> None:
    while (request := requests.get()) is not None:
        answer, work, args = request
        answer.put(capture_exceptions(work, *args))
        # Keep no reference to the request while waiting for the next one.
        del request, answer, work, args
