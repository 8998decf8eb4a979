"""Decides at which steps a checkpoint manager exports its model.

1. An export is due at every step that is a multiple of :attr:`Export.every`.
2. If no save starts at that step, the export starts at the first step at which rank 0 runs no
   save, so that training does not wait for a save. Rank 0 decides for all ranks
   (ranks/step_agreement.py).
3. If a save starts at that step, the export waits for a later step. At the next step at which a
   save starts, the export starts first, and the save waits for it.
4. Versions of later steps than the restored one are stale. The next export replaces them.
"""

from __future__ import annotations

from torch_ckpt.publication.export import Export


class Exports:
    """The exports of a manager. All ranks come to the same decisions.

    Args:
        export: the model to export; None disables exports.

    Attributes:
        due_step: the step of a due export that has not started; None if there is none.
        newest_valid: versions of later steps are stale; None if training was not rewound.
        last_step: the step of the last export that succeeded.
    """

    def __init__(self, export: Export | None) -> None:
        self.export = export
        self.due_step: int | None = None
        self.newest_valid: int | None = None
        self.last_step: int | None = None

    def rewound(self, step: int) -> None:
        """Records that training continues from a step."""
        self.newest_valid, self.due_step, self.last_step = step, None, None

    def is_due(self, step: int) -> bool:
        """True if an export is due at this step or was due before. All ranks must call this method
        once per step."""
        every = None if self.export is None else self.export.every
        if every is not None and self.due_step is None and step % every == 0:
            self.due_step = step
        return self.due_step is not None

    def starts(self, step: int, starts_save: bool, is_idle: bool) -> bool:
        """True if the export that is due starts at this step.

        Args:
            starts_save: a save starts at this step.
            is_idle: rank 0 runs no save.
        """
        assert self.due_step is not None
        starts = self.due_step < step if starts_save else is_idle
        if starts:
            self.due_step = None
        return starts
