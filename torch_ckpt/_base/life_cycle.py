"""Hooks of the package's parts for forks and for the exit of the interpreter.

1. Before a fork, parts prepare for the child.
2. In a forked child, parts drop the state that belongs to the parent.
3. When the interpreter exits, thread pools of ``concurrent.futures`` are shut down first; parts
   that need these are called before (:func:`before_thread_pools_end`). Then each part ends.
   ``atexit`` callbacks registered after the import of torch_ckpt run before the parts, earlier ones
   after them.

The parts are called in the order of :class:`Part`. The engine, which outlives all of them, has
rules of its own in csrc/os/fork_guard.h. Signals are handled in ranks/preemption.py only.
"""

from __future__ import annotations

import atexit
import contextlib
import logging  # noqa: F401
import multiprocessing.util  # noqa: F401
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto


class Part(IntEnum):
    """The parts, in the order in which their hooks are called."""

    #: The cycle collector, which a child enables again.
    COLLECTOR = auto()
    #: Calls of Megatron's queues: at exit, the other ranks are notified that this rank ends.
    CALLS = auto()
    #: Cached plans of saves, which a thread of the parent may be using: a child drops them.
    PLANS = auto()
    #: Running saves. At exit they end, and the engine's threads with them.
    SAVES = auto()
    #: Memory reserved for saves, which belongs to the parent.
    MEMORY = auto()
    #: Queues through which children send results.
    RESULTS = auto()
    #: Watches for preemption notices, whose threads poll the store.
    NOTICES = auto()
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
    """Registers the hooks of a part. Called once, when the part's module is imported."""
    assert part not in _hooks
    _hooks[part] = _Hooks(at_exit, before_fork, in_child)


def before_thread_pools_end(function: Callable[[], object]) -> None:
    """Registers a function to call at exit, before ``concurrent.futures`` shuts down."""
    # concurrent.futures registers its own shutdown when it is imported.
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(function)  # type: ignore[attr-defined]


def _call(hook: str) -> None:
    """Calls a hook of all parts, in their order. If one raises, the others are still called."""
    with contextlib.ExitStack() as calls:
        for part in sorted(_hooks, reverse=True):
            function = getattr(_hooks[part], hook)
            if function is not None:
                calls.callback(function)


def watch_exit() -> None:
    """Registers the exit hooks of the parts with ``atexit``.

    ``atexit`` calls functions in the reverse order of their registration. Those of logging,
    multiprocessing and weakref must come after the parts, because saves log, wait for child
    processes and hold finalizers. Importing the first two registers them; the first finalizer
    registers that of weakref.
    """
    weakref.finalize(watch_exit, int).detach()
    atexit.register(_call, "at_exit")


os.register_at_fork(before=lambda: _call("before_fork"), after_in_child=lambda: _call("in_child"))
