"""Tracks the steps of training, so that no checkpoint mixes two training timelines."""

from __future__ import annotations

import errno
from collections.abc import Callable

from torch_ckpt._base.log import warn
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.run_context import RunContext


class Timeline:
    """The current step of training. All ranks make the same calls in the same order.

    Args:
        run: the manager's run.
        deletions: the manager's deletions. They are notified if training is rewound.

    Attributes:
        last_step: step of the last save that has started and not failed, or of the last restore.
        last_complete: step that this manager saved or restored last.
    """

    def __init__(self, run: RunContext, deletions: Deletions) -> None:
        self.last_step: int | None = None
        self.last_complete: int | None = None
        self._run = run
        self._deletions = deletions
        self._current: int | None = None  # step of the last save() or restore()
        self._restored: int | None = None
        self._committed: int | None = None

    def advance(self, step: int, overwrite: bool, wait: Callable[[], None]) -> bool:
        """Advances training to a step, or rewinds it if ``overwrite`` is True.

        Only the first call communicates with rank 0.

        Args:
            overwrite: this step and later steps may be replaced.
            wait: waits for the running save.

        Returns:
            True if training was rewound, or may have been before the first save.

        Raises:
            FileExistsError: the root has this step or newer ones, and no step was restored.
            ValueError: the step is smaller than the previous one.
        """
        previous = self._current
        if previous is None and self._restored is None:
            largest = self._run.ask_rank_0("CheckpointManager.save", self._largest_step)
            is_rewound = largest is not None and step <= largest
            if is_rewound and not overwrite:
                raise FileExistsError(
                    errno.EEXIST,
                    f"refusing to save step {step}: the root already has steps up to {largest}. "
                    "Call restore() before the first save(), or use another root. If training was "
                    "rewound on purpose, call save(overwrite=True)",
                    self._run.store.root,
                )
        else:
            is_rewound = previous is not None and step < previous
            if is_rewound and not overwrite:
                raise ValueError(
                    f"step {step} cannot be saved after step {previous}: steps must not decrease. "
                    "If training was rewound on purpose, call restore(state, step=...) or "
                    f"save({step}, state, overwrite=True)."
                )
        if overwrite:
            self._restored = step if self._restored is None else min(step, self._restored)
        if is_rewound:
            # Wait for the running save: its step becomes stale, too.
            wait()
            self.last_step = None
            if self._run.rank == 0:
                self._deletions.wait_until_idle()
                self._rewound(step - 1, step, f"training continues from step {step}")
        self._current = step
        return is_rewound or (overwrite and previous is None)

    def saved(self, step: int) -> None:
        """Records that a save has succeeded."""
        self._committed = self.last_complete = step

    def failed(self, step: int) -> None:
        """Records that a save has failed, so that the step may be saved again."""
        if self.last_step == step:
            self.last_step = None

    def restored(self, step: int | None, is_chosen: bool) -> None:
        """Records that the state was restored from a step.

        Args:
            step: the step; None if the root has none, so that all future steps are this run's.
            is_chosen: True if the caller chose the step, so that later steps may exist.
        """
        self._restored, self._current = step or 0, step
        if step is None:
            return
        self.last_step = self.last_complete = step
        # A manager that only reads leaves stale steps to the run that writes.
        if self._run.rank == 0 and not self._run.read_only:
            self._deletions.verified(step)
            self._rewound(step, step, f"step {step} was restored" if is_chosen else "")

    @property
    def unsaved_step(self) -> int | None:
        """The current step, if it was neither saved nor restored."""
        return None if self._current == self.last_step else self._current

    def may_replace(self, step: int) -> bool:
        """True if a complete step may be replaced: it is stale, or this manager saved it last."""
        return step == self._committed or (self._restored is not None and step >= self._restored)

    def _largest_step(self) -> int | None:
        store = self._run.store
        steps = [info.step for info in store.entries(leftovers=False)]
        return max([*steps, *(copy.step for copy in store.copies())], default=None)

    def _rewound(self, newest: int, step: int, why: str) -> None:
        """Makes the steps after the step ``newest`` stale, on rank 0, and warns of the steps after
        the current step.

        Args:
            why: why there may be such steps; if it is empty, there is no warning.
        """
        try:
            stale = self._deletions.rewound(newest)
        except OSError as error:
            # Do not raise: the other ranks have no error, and continue.
            warn(
                f"the steps after step {newest} could not be listed: {error}. A restart may "
                "restore the newest of them, and they are not deleted when training passes them."
            )
            return
        later = [other for other in stale if other > step]
        if later and why:
            warn(
                f"{why}, but there are later steps ({later}). Training replaces each of them "
                "when it reaches that step. Until then, a restart may restore the newest of "
                "them. Call delete() to remove them now.",
            )
