"""Background threads for which the interpreter waits when it exits.

saving/running_saves.py calls :func:`join` at exit, and :func:`forget` in forked children.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_threads: list[threading.Thread] = []
_lock = threading.Lock()


def spawn(function: Callable[[], None]) -> threading.Thread:
    """Runs ``function`` in a new thread. The interpreter waits for the thread when it exits."""
    thread = threading.Thread(target=function, name="torch_ckpt save", daemon=True)
    thread.start()
    with _lock:
        _threads[:] = [one for one in _threads if one.is_alive()] + [thread]
    return thread


def let_go(thread: threading.Thread) -> None:
    """Lets the interpreter exit without waiting for a thread that :func:`spawn` started."""
    with _lock:
        _threads[:] = [one for one in _threads if one is not thread]


def join(limit: float) -> bool:
    """Waits for the threads, up to a limit in seconds. Returns True if all of them have ended."""
    deadline = time.monotonic() + limit
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in _threads)


def forget() -> None:
    """Forgets the threads in a forked child, which does not have them."""
    global _lock
    _lock = threading.Lock()
    _threads.clear()
