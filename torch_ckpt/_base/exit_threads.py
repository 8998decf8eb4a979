"""Background threads for which the interpreter waits when it exits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch_ckpt._base.life_cycle import Part, register

#: Maximum number of seconds for which the interpreter waits for the threads when it exits.
EXIT_LIMIT_SECONDS = 3600.0

_threads: list[threading.Thread] = []
_lock = threading.Lock()
_has_timed_out = False


def spawn(function: Callable[[], None]) -> threading.Thread:
    """Runs ``function`` in a new thread. The interpreter waits for the thread when it exits."""
    thread = threading.Thread(target=function, name="torch_ckpt save", daemon=True)
    thread.start()
    with _lock:
        _threads[:] = [one for one in _threads if one.is_alive()] + [thread]
    return thread


def exit_without(thread: threading.Thread) -> None:
    """Lets the interpreter exit without waiting for a thread that :func:`spawn` started."""
    with _lock:
        _threads[:] = [one for one in _threads if one is not thread]


def join() -> bool:
    """Waits for the threads, up to the limit, unless an earlier call has reached the limit.

    Several hooks call this function at exit.

    Returns:
        True if all threads have ended.
    """
    global _has_timed_out
    if not _has_timed_out:
        deadline = time.monotonic() + EXIT_LIMIT_SECONDS
        for thread in list(_threads):
            thread.join(max(0.0, deadline - time.monotonic()))
    _has_timed_out = any(thread.is_alive() for thread in _threads)
    return not _has_timed_out


def _forget_in_child() -> None:
    """Forgets the threads in a forked child, which does not have them."""
    global _lock, _has_timed_out
    _lock, _has_timed_out = threading.Lock(), False
    _threads.clear()


register(Part.THREADS, at_exit=join, in_child=_forget_in_child)
