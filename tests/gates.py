"""Synchronization of threads in tests, with a time limit on each wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

#: Time limit of each wait, in seconds.
LIMIT = 60.0


class Gate:
    """Blocks threads that call it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._opened.wait(LIMIT), "the gate was not opened"

    def wait(self) -> None:
        """Waits until a thread is blocked at the gate."""
        assert self.reached.wait(LIMIT), "no thread has reached the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def eventually(condition: Callable[[], bool]) -> None:
    """Waits for a condition that other threads make true without a notification."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "the condition has not become true"
        os.sched_yield()


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Runs ``work`` in a thread during the block, and raises its exception."""
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
    assert not thread.is_alive(), "the thread does not end"
    if raised:
        raise raised[0]
