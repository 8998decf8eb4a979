"""Python's cycle collector during planning.

Plans and metadata are some ten objects for each tensor. Making 20,000 tensors' worth of them runs
the collector over and over: it takes half of the time of ``dcp.save``'s planning, and finds
nothing, since none of these objects is in a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch_ckpt._base.life_cycle import Part, register

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


register(Part.COLLECTOR, in_child=_resume_in_child)


class RelaxedGc:
    """Makes the collector rare between two calls of DCP's, with other people's code in between.

    That code may fail, and then nobody calls ``end``. So the relaxation ends by itself: with the
    first run of the collector, or when it is to begin for the next time, which then is not
    relaxed, and in which the collector finds what the failed one has left.
    """

    _before: ClassVar[tuple[int, int, int] | None] = None

    @classmethod
    def begin(cls) -> None:
        """Relaxes the collector, unless it is off, relaxed, or rarer already."""
        threshold = gc.get_threshold()
        if cls._before is not None:
            cls.end()
        elif 0 < threshold[0] < _RELAXED_THRESHOLD:
            cls._before = threshold
            # Once and for all: to remove it at a run would hide the run from who comes after it.
            if cls._at_run not in gc.callbacks:
                gc.callbacks.append(cls._at_run)
            gc.set_threshold(_RELAXED_THRESHOLD, *threshold[1:])

    @classmethod
    def end(cls) -> None:
        """Restores what ``begin`` changed; from any thread."""
        before, cls._before = cls._before, None
        if before is not None and gc.get_threshold()[0] == _RELAXED_THRESHOLD:
            gc.set_threshold(*before)

    @classmethod
    def _at_run(cls, _phase: str, _info: dict[str, int]) -> None:
        cls.end()
