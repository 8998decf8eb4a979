"""Decides at which steps a checkpoint manager exports its model.

1. An export is due at every step that is a multiple of :attr:`Export.every`.
2. A due export starts at the first step at which rank 0 runs no save, so that training does not
   wait for the save. Rank 0 decides for all ranks, as schedule.py describes.
3. Saves that are due during an export wait for it, or are skipped with ``if_busy="skip"``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_ckpt.manager.schedule import Decisions
from torch_ckpt.publication.export import Export
from torch_ckpt.ranks.group import RankGroup


class Exports:
    """The exports of a manager. All ranks come to the same decisions.

    Args:
        export: what is exported; None: nothing.
        group: the ranks; used by this object only.
        timeout: seconds to wait for rank 0's decision.

    Attributes:
        decisions: the decisions of rank 0.
    """

    def __init__(self, export: Export | None, group: RankGroup, timeout: float) -> None:
        self.export = export
        self.decisions = Decisions(group, timeout, time.monotonic)
        self._is_waiting = False

    def should_export(self, step: int, is_busy: Callable[[], bool]) -> bool:
        """True if an export starts at this step. All ranks must call this method once per step.

        Raises:
            CheckpointError, CheckpointException: see :meth:`Schedule.should_save`.
        """
        if self.export is None or self.export.every is None:
            return False
        self._is_waiting |= step % self.export.every == 0
        if self._is_waiting and self.decisions.next(step, lambda: not is_busy(), blocks=True):
            self._is_waiting = False
            return True
        return False
