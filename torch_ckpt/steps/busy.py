"""Tracks the steps beneath URLs that this process is saving, loading or deleting."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch_ckpt import _core

#: A file that marks a step as deleted, so that an interrupted deletion can be completed later.
DELETED_NAME = "deleted"


class BusySteps:
    """The steps that this process is saving, loading or removing, by URL. Thread-safe.

    A removal is exclusive: saves and loads of the step wait until the removal has ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: Counter[str] = Counter()
        self._reserved: set[str] = set()

    def __contains__(self, url: str) -> bool:
        return self._users[url] > 0

    def begin(self, url: str) -> None:
        def is_free() -> bool:
            if url in self._reserved:
                _core.fault_point("wait for the removal of a step", url)
            return url not in self._reserved

        with self._changed:
            self._changed.wait_for(is_free)
            self._users[url] += 1

    def end(self, url: str) -> None:
        with self._changed:
            self._users[url] -= 1

    @contextmanager
    def reserved(self, url: str) -> Iterator[bool]:
        """Reserves a step for removal during a block. Yields False if the step is in use."""
        with self._changed:
            is_free = url not in self and url not in self._reserved
            if is_free:
                self._reserved.add(url)
        try:
            yield is_free
        finally:
            if is_free:
                with self._changed:
                    self._reserved.discard(url)
                    self._changed.notify_all()


busy = BusySteps()
