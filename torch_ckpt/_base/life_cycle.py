"""Hooks that the package's parts register for forks and for interpreter exit.

1. Before a fork, the parts prepare for the child.
2. In a forked child, the parts drop the state that belongs to the parent.
3. At interpreter exit, Python first shuts down the thread pools of ``concurrent.futures``. Parts
   that need these pools are called before that (:func:`before_thread_pools_end`). Then the exit
   hooks of all parts run. ``atexit`` callbacks run before these hooks if they were registered after
   the import of torch_ckpt, and otherwise after them.

The hooks run in the order of :class:`Part`. The engine, which outlives all parts, has its own rules
in csrc/os/fork_guard.h. Only multihost/preemption.py handles signals.
"""

from __future__ import annotations

import atexit
import contextlib
import logging  # noqa: F401
import multiprocessing.util  # noqa: F401
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")


class Part(IntEnum):
    """The parts, in the order in which their hooks run."""

    #: The cycle collector. A child enables it again.
    COLLECTOR = auto()
    #: Calls of Megatron's queues. At exit, the other ranks are notified that this rank ends.
    CALLS = auto()
    #: Cached plans of saves. A child drops them, because a thread of the parent may be using them.
    PLANS = auto()
    #: Running saves. At exit they are ended, together with the engine's threads.
    SAVES = auto()
    #: Threads that end saves and exchanges. At exit they are joined.
    THREADS = auto()
    #: Memory reserved for saves, which belongs to the parent.
    MEMORY = auto()
    #: Queues through which children send results.
    RESULTS = auto()
    #: Watches for preemption notices. Their threads poll the store.
    NOTICES = auto()
    #: Copies of steps from a local tier to the root. At exit they are given some time.
    COPIES = auto()
    #: Leases on roots. At exit they are released last, when no save is running any more.
    LEASES = auto()


@dataclass(frozen=True)
class _Hooks:
    at_exit: Callable[[], object] | None
    before_fork: Callable[[], object] | None
    in_child: Callable[[], object] | None


_hooks: dict[Part, _Hooks] = {}


def register(
    part: Part,
    *,
    at_exit: Callable[[], object] | None = None,
    before_fork: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Registers the hooks of a part. Each part does this once, when its module is imported."""
    assert part not in _hooks
    _hooks[part] = _Hooks(at_exit, before_fork, in_child)


def before_thread_pools_end(function: Callable[[], object]) -> None:
    """Registers a function to call at exit, before ``concurrent.futures`` shuts down."""
    # Exit functions run in reverse order of registration. This import registers the shutdown of the
    # thread pools, so it must come first.
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(function)  # type: ignore[attr-defined]


def _call(hook: str) -> None:
    """Calls one of the hooks for all parts, in order. If a hook raises, the others still run."""
    with contextlib.ExitStack() as calls:
        for part in sorted(_hooks, reverse=True):
            function = getattr(_hooks[part], hook)
            if function is not None:
                calls.callback(function)


def watch_exit() -> None:
    """Registers the exit hooks of the parts with ``atexit``.

    ``atexit`` calls functions in the reverse order of registration. The functions of logging,
    multiprocessing and weakref must run after the parts' hooks, because saves log, wait for child
    processes and hold finalizers. So they must be registered first. logging and multiprocessing do
    that when they are imported, and weakref does it when the first finalizer is created.
    """
    weakref.finalize(watch_exit, int).detach()
    atexit.register(_call, "at_exit")


os.register_at_fork(before=lambda: _call("before_fork"), after_in_child=lambda: _call("in_child"))


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
