"""Python's cycle collector during planning.

Plans and metadata are some ten objects for each tensor. Making 20,000 tensors' worth of them runs
the collector over and over: it takes half of the time of ``dcp.save``'s planning, and finds
nothing, since none of these objects is in a cycle.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

# New objects between two runs of the collector: enough for a plan of many thousand tensors, few
# enough that a program's own garbage is still collected.
_RELAXED_THRESHOLD = 500_000


# Whether no_gc has switched the collector off, for a child that is forked meanwhile: nobody would
# switch it on again there.
_is_paused = False


@contextmanager
def no_gc() -> Iterator[None]:
    """Keeps the collector out for a block of our own that makes many objects and waits for nothing.

    Not for blocks in which data moves: another thread's garbage would pile up.
    """
    global _is_paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _is_paused = True
    try:
        yield
    finally:
        _is_paused = False
        gc.enable()


def _resume_in_child() -> None:
    if _is_paused:
        gc.enable()


os.register_at_fork(after_in_child=_resume_in_child)


class RelaxedGc:
    """Makes the collector rare between two calls of an owner, with other people's code in between.

    The collector is never switched off: that code may fail, and then ``end`` is not called. What
    remains then is a collector that runs less often, until the owner's next call or its end.
    """

    def __init__(self, owner: object) -> None:
        self._before: list[tuple[int, int, int]] = []
        weakref.finalize(owner, _restore, self._before)

    def begin(self) -> None:
        """Relaxes the collector; does nothing where it is off or relaxed already."""
        threshold = gc.get_threshold()
        if not self._before and 0 < threshold[0] < _RELAXED_THRESHOLD:
            self._before.append(threshold)
            gc.set_threshold(_RELAXED_THRESHOLD, *threshold[1:])

    def end(self) -> None:
        """Restores what ``begin`` changed."""
        _restore(self._before)


def _restore(before: list[tuple[int, int, int]]) -> None:
    if before and gc.get_threshold()[0] == _RELAXED_THRESHOLD:
        gc.set_threshold(*before[0])
    before.clear()
