"""Threads that wait for each other, and fail where that takes too long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

#: No wait here is meant to be long, in seconds. What waits so long has failed.
LIMIT = 60.0


class Gate:
    """Stops a thread that calls it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._opened.wait(LIMIT), "nobody has opened the gate"

    def wait(self) -> None:
        """Until somebody stands before it."""
        assert self.reached.wait(LIMIT), "nobody has come to the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def eventually(condition: Callable[[], bool]) -> None:
    """For what other threads do in their own time and tell nobody."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        os.sched_yield()


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Runs ``work`` in a thread beside the block, and raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(LIMIT)
    assert not thread.is_alive(), "it does not end"
    if raised:
        raise raised[0]
