"""A registry of the live objects of a class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """A set of weak references, compared by identity. It may change during iteration.

    A ``WeakSet`` does not allow that: iterating it fails if another thread adds an object. A lock
    could deadlock in signal handlers and forked children.
    """

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, item: T) -> None:
        self._by_id[id(item)] = item

    def discard(self, item: T) -> None:
        self._by_id.pop(id(item), None)

    def __iter__(self) -> Iterator[T]:
        for reference in self._by_id.valuerefs():
            if (item := reference()) is not None:
                yield item
