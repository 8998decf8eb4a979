"""What parts of the package do when the process forks, and when it ends: all of it, in one order.

1. Before a fork, parts get ready for what a child will ask of them.
2. In a forked child, they forget what is the parent's.
3. At the end of the interpreter, thread pools of other packages end first; parts that need these
   are called before (:func:`before_thread_pools_end`). Then each part ends. What is registered with
   ``atexit`` after the import of torch_ckpt comes before, what was registered earlier after it.

The order among the parts is that of :class:`Part`. The engine itself, which outlives all of them,
has rules of its own in csrc/os/fork_guard.h. Signals are watched by ranks/preemption.py alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, auto


class Part(IntEnum):
    """Who is called, in this order."""

    #: The cycle collector is on again.
    COLLECTOR = auto()
    #: Calls of Megatron-shaped queues tell the other ranks that this one ends.
    CALLS = auto()
    #: Plans of saves, on which a thread of the parent's may be at work.
    PLANS = auto()
    #: Saves under way end, and the engine's threads with them.
    SAVES = auto()
    #: Memory that is reserved for saves.
    MEMORY = auto()
    #: Queues that children put results to.
    RESULTS = auto()
    #: Watches for notices, whose threads ask the store.
    NOTICES = auto()
    #: Leases of roots: no save is under way any more.
    LEASES = auto()


@dataclass(frozen=True)
class _Hooks:
    at_exit: Callable[[], object] | None
    before_fork: Callable[[], object] | None
    in_child: Callable[[], object] | None


_of_parts: dict[Part, _Hooks] = {}


def register(
    part: Part,
    *,
    at_exit: Callable[[], object] | None = None,
    before_fork: Callable[[], object] | None = None,
    in_child: Callable[[], object] | None = None,
) -> None:
    """Says what a part does; once, when its module is imported."""
    assert part not in _of_parts
    _of_parts[part] = _Hooks(at_exit, before_fork, in_child)


def before_thread_pools_end(function: Callable[[], object]) -> None:
    """Has a function called at the interpreter's end while ``concurrent.futures`` still works."""
    threading._register_atexit(function)  # type: ignore[attr-defined]


def _call(hook: str) -> None:
    """All parts' in their order, also where one fails: then its error comes last."""
    with contextlib.ExitStack() as calls:
        for part in sorted(_of_parts, reverse=True):
            function = getattr(_of_parts[part], hook)
            if function is not None:
                calls.callback(function)


def watch_exit() -> None:
    """From here on the parts are called at the interpreter's end."""
    atexit.register(_call, "at_exit")


os.register_at_fork(before=lambda: _call("before_fork"), after_in_child=lambda: _call("in_child"))
