"""Time limits of requests to a store, and calls that are abandoned at a limit."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_ckpt._base import exit_threads
from torch_ckpt._base.life_cycle import before_thread_pools_end

T = TypeVar("T")

_EMPTY = memoryview(b"")
# Seconds between two checks of the limits.
_SLICE = 0.5


@dataclass(frozen=True)
class Limits:
    """Time limits, in seconds.

    Attributes:
        connect: for a connection.
        progress: for an answer, and between two pieces of one.
        retry: how long a failed request, or part of an upload, is repeated.
        total: for one call of a store; None for no limit.
    """

    connect: float = 10.0
    progress: float = 60.0
    retry: float = 300.0
    total: float | None = None

    def __post_init__(self) -> None:
        for name in ("connect", "progress", "retry", "total"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and 0 < value < 1e6
            if value is not None and not is_number:
                raise ValueError(f"Limits: {name}={value!r} is not a number of seconds above 0")

    @property
    def stalled(self) -> float:
        """Seconds without progress after which a call is abandoned.

        A library that keeps to the limits ends a call earlier, with a better message.
        """
        return self.connect + self.progress + self.retry + min(5.0, self.progress)

    def within(self, seconds: float) -> Limits:
        """Returns limits with which a library reports a failure before ``seconds`` have passed."""
        most = seconds / 3
        total = min(seconds, self.total or seconds)
        return Limits(
            min(self.connect, most), min(self.progress, most), min(self.retry, most), total
        )


class Abandoned(Exception):
    """Ends the thread of a call for which the caller no longer waits."""


class Feed(Iterator[memoryview]):
    """The views of an upload, on their way from the caller to the library.

    Counts the bytes, and splits views that are larger than a part. Records the time for which the
    library waits for the caller, which is no stall of the server.
    """

    def __init__(self, views: Iterable[memoryview], bytes: int, part: int) -> None:
        self._views = iter(views)
        self._rest = _EMPTY
        self._bytes = self._missing = bytes
        self._part = part
        self.waits_for_caller = False
        self.progressed = time.monotonic()
        self.is_abandoned = False
        #: The error of the caller's iterator, or a wrong number of bytes.
        self.error: BaseException | None = None

    def __next__(self) -> memoryview:
        if self.is_abandoned:
            raise Abandoned
        self.waits_for_caller = True
        try:
            while not self._rest:
                self._rest = self._next()
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.progressed = time.monotonic()
            self.waits_for_caller = False
        view, rest = self._rest, _EMPTY
        if len(view) > self._part:
            view, rest = view[: self._part], view[self._part :]
        # No reference to a view remains, not even an empty slice of it.
        self._rest = rest
        return view

    def _next(self) -> memoryview:
        view = next(self._views, None)
        self._missing -= 0 if view is None else view.nbytes
        if self._missing < 0 or (view is None and self._missing):
            more = "more" if self._missing < 0 else "fewer"
            raise ValueError(f"the parts of the upload have {more} than {self._bytes} bytes")
        if view is None:
            raise StopIteration
        return view.cast("B") if view.nbytes else _EMPTY


def call(function: Callable[[], T], limits: Limits, feed: Feed | None = None) -> T:
    """Calls ``function`` in a daemon thread, and waits for it up to the limits.

    Signal handlers of the main thread run during the wait; an exception of one ends it.

    Raises:
        TimeoutError: a limit has passed. The thread may still be in the call, and may still read
            the views of ``feed``.
    """
    done = threading.Event()
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, function()))
        except BaseException as error:
            # A panic of a library in Rust is no Exception.
            panic = type(error).__module__ == "pyo3_runtime"
            outcome.append((False, OSError(errno.EIO, f"panic: {error}") if panic else error))
        done.set()

    begun = time.monotonic()
    threading.Thread(target=run, name="torch_ckpt store", daemon=True).start()
    try:
        while not done.wait(_SLICE if limits.stalled > 4 * _SLICE else 0.05):
            _check(limits, begun, feed)
    except BaseException:
        if feed is not None:
            feed.is_abandoned = True
        raise
    succeeded, value = outcome.pop()
    if not succeeded:
        raise value
    return value  # type: ignore[no-any-return]


@functools.cache
def end_saves_before_pools() -> None:
    """Makes the interpreter's exit wait for saves before it ends thread pools.

    Calls start threads, which Python 3.12 refuses later during the exit, and fsspec resolves the
    names of hosts in a thread pool.
    """
    with suppress(RuntimeError):  # The exit has begun.
        before_thread_pools_end(exit_threads.join)


def _check(limits: Limits, begun: float, feed: Feed | None) -> None:
    now = time.monotonic()
    if limits.total is not None and now - begun > limits.total:
        raise _timed_out(f"it took longer than the limit of {limits.total:g} s")
    if feed is not None and feed.waits_for_caller:
        return
    last = begun if feed is None else feed.progressed
    if now - last > limits.stalled:
        raise _timed_out(f"the server made no progress for {now - last:.0f} s")


def _timed_out(message: str) -> OSError:
    return OSError(errno.ETIMEDOUT, message)


def pauses(seconds: float) -> Iterator[None]:
    """Yields for each attempt at a request within ``seconds``, with pauses that double."""
    deadline = time.monotonic() + seconds
    pause = 0.1
    while True:
        yield
        # Several ranks would otherwise repeat at the same time.
        pause = min(pause * 2, 15.0) * (0.75 + os.urandom(1)[0] / 512)
        if time.monotonic() + pause > deadline:
            return
        time.sleep(pause)
