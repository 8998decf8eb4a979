"""Python's cycle collector during planning.

Plans and metadata consist of some ten objects for each tensor. Allocating them for 20,000 tensors
runs the collector many times, which takes half of the planning time of ``dcp.save``. It frees
nothing, since none of these objects is in a cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from torch_ckpt._base.life_cycle import Part, register

# New objects between two runs of the collector: enough for a plan of many thousand tensors, and few
# enough that garbage of the program is still collected.
_RELAXED_THRESHOLD = 500_000


# True while no_gc() has disabled the collector. A child forked meanwhile must enable it itself.
_is_paused = False


@contextmanager
def no_gc() -> Iterator[None]:
    """Disables the collector during a block that allocates many objects and waits for nothing.

    Do not use it for blocks that move data: garbage of other threads would accumulate.
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
    """Makes runs of the collector rarer between two calls by DCP, with other code in between.

    That code may fail, so that ``end`` is never called. Therefore the relaxation also ends with the
    first run of the collector, and with the next call of ``begin``. That call does not relax the
    collector again, so that it collects the garbage of the failed operation.
    """

    _before: ClassVar[tuple[int, int, int] | None] = None

    @classmethod
    def begin(cls) -> None:
        """Relaxes the collector, unless it is disabled, already relaxed, or runs more rarely."""
        threshold = gc.get_threshold()
        if cls._before is not None:
            cls.end()
        elif 0 < threshold[0] < _RELAXED_THRESHOLD:
            cls._before = threshold
            # Never remove it: removing it during a run would skip the next callback in the list.
            if cls._at_run not in gc.callbacks:
                gc.callbacks.append(cls._at_run)
            gc.set_threshold(_RELAXED_THRESHOLD, *threshold[1:])

    @classmethod
    def end(cls) -> None:
        """Undoes the change made by ``begin``. Any thread may call it."""
        before, cls._before = cls._before, None
        if before is not None and gc.get_threshold()[0] == _RELAXED_THRESHOLD:
            gc.set_threshold(*before)

    @classmethod
    def _at_run(cls, _phase: str, _info: dict[str, int]) -> None:
        cls.end()
