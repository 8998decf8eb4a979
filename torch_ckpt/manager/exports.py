"""Decides at which steps a checkpoint manager exports its model.

1. An export is due at every step that is a multiple of :attr:`Export.every`.
2. If no save starts at that step, the export starts at the first step at which rank 0 runs no
   save, so that training does not wait for a save. Rank 0 decides for all ranks, as schedule.py
   describes.
3. If a save starts at that step, the export waits for a later step. At the next step at which a
   save starts, the export starts first, and the save waits for it.
4. Versions of later steps than the restored one are stale. The next export replaces them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch_ckpt.manager.schedule import StepDecisions
from torch_ckpt.publication.export import Export
from torch_ckpt.ranks.group import RankGroup


class Exports:
    """The exports of a manager. All ranks come to the same decisions.

    Args:
        export: the model to export; None disables exports.
        group: the ranks; used by this object only.
        timeout: seconds to wait for rank 0's decision.

    Attributes:
        decisions: the decisions of rank 0.
        due_step: the step of a due export that has not started; None if there is none.
        newest_valid: versions of later steps are stale; None if training was not rewound.
        last_step: the step of the last export that succeeded.
    """

    def __init__(self, export: Export | None, group: RankGroup, timeout: float) -> None:
        self.export = export
        self.decisions = StepDecisions(group, timeout, time.monotonic)
        self.due_step: int | None = None
        self.newest_valid: int | None = None
        self.last_step: int | None = None

    def rewound(self, step: int) -> None:
        """Records that training continues from a step."""
        self.newest_valid, self.due_step, self.last_step = step, None, None

    def should_export(self, step: int, starts_save: bool, is_busy: Callable[[], bool]) -> bool:
        """True if an export starts at this step. All ranks must call this method once per step.

        Args:
            starts_save: a save starts at this step.

        Raises:
            CheckpointError, CheckpointException: see :meth:`Schedule.should_save`.
        """
        if self.export is None or self.export.every is None:
            return False
        was_due = self.due_step is not None
        if not was_due and step % self.export.every == 0:
            self.due_step = step
        if self.due_step is None:
            return False
        if starts_save:
            starts = was_due
        else:
            starts = self.decisions.next(step, lambda: not is_busy(), blocks=True)
        if starts:
            self.due_step = None
        return starts
