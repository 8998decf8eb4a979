"""The objects of a kind that somebody still has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class LiveObjects(Generic[T]):
    """A set that keeps nobody alive, compares by identity, and may be changed while it is read.

    A ``WeakSet`` fails where another thread adds to it meanwhile. A lock would be in the way of
    signal handlers and forks.
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
