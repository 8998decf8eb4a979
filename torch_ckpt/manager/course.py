"""The steps that a run's training comes by, so that no save mixes two courses of it."""

from __future__ import annotations

import errno
from collections.abc import Callable

from torch_ckpt._base.log import warn
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.run import Run


class Course:
    """Where training is. All ranks make the same calls, in the same order.

    Args:
        run: whose it is.
        deletions: that learn of the steps which training has left.
        newest_step: asks rank 0 for the newest complete step.

    Attributes:
        last_step: that a save has begun of, or that was restored; None where it failed.
        last_complete: that this manager has saved or restored.
    """

    def __init__(
        self, run: Run, deletions: Deletions, newest_step: Callable[[], int | None]
    ) -> None:
        self.last_step: int | None = None
        self.last_complete: int | None = None
        self._run = run
        self._deletions = deletions
        self._newest_step = newest_step
        self._called_with: int | None = None  # save() last, or the step that was restored since
        self._restored: int | None = None
        self._committed: int | None = None

    def come_to(self, step: int, overwrite: bool, wait: Callable[[], None]) -> None:
        """Refuses a step that would mix two courses, and goes back where that is meant.

        Only the first call has to ask rank 0.

        Args:
            wait: for the save under way.

        Raises:
            FileExistsError: the root has newer steps, which nobody has restored.
            ValueError: the step is smaller than the one before.
        """
        before = self._called_with
        if before is None and self._restored is None:
            newest = self._newest_step()
            goes_back = newest is not None and step <= newest
            if goes_back and not overwrite:
                raise FileExistsError(
                    errno.EEXIST,
                    f"step {step} would be saved, and the root has steps up to {newest}: call "
                    "restore() before the first save(), or use another root; save(overwrite=True) "
                    "where training has gone back on purpose",
                    self._run.store.root,
                )
        else:
            goes_back = before is not None and step < before
            if goes_back and not overwrite:
                raise ValueError(
                    f"step {step} comes after step {before}: steps must not decrease. Where "
                    f"training has gone back, restore(state, step=...) or save({step}, state, "
                    "overwrite=True)"
                )
        if goes_back:
            # The step that is being saved is one of before, too.
            wait()
            self._restored = step
            self.last_step = None
            if self._run.rank == 0:
                self._deletions.settle()
                self._deletions.went_back(step - 1)
                self._warn_of_later_steps(f"training goes on from step {step}", step)
        self._called_with = step

    def saved(self, step: int) -> None:
        """A save has ended well."""
        self._committed = self.last_complete = step

    def failed(self, step: int) -> None:
        """A save has failed, and may be tried again."""
        if self.last_step == step:
            self.last_step = None

    def restored(self, step: int | None, is_chosen: bool) -> None:
        """The state is that of a step now.

        Args:
            step: None: there is none, and whatever comes is of this run.
            is_chosen: there may be later ones.
        """
        self._restored, self._called_with = step or 0, step
        if step is None:
            return
        self.last_step = self.last_complete = step
        if self._run.rank == 0:
            self._deletions.restored(step)
            if is_chosen:
                self._warn_of_later_steps(f"step {step} is restored", step)

    @property
    def unsaved_step(self) -> int | None:
        """The step that training has come to, if it was neither saved nor restored."""
        return None if self._called_with == self.last_step else self._called_with

    def may_replace(self, step: int) -> bool:
        """Whether a complete step of the number is this manager's, or training came back to it."""
        return step == self._committed or (self._restored is not None and step >= self._restored)

    def _warn_of_later_steps(self, why: str, step: int) -> None:
        complete = self._run.store.entries(leftovers=False)
        later = [info.step for info in complete if info.step > step]
        if later:
            # It names the line that calls the manager.
            warn(
                f"{why}, and there are later ones ({later}): they are replaced when training comes "
                "to them; until then a restart finds them, unless you delete() them",
                stacklevel=4,
            )
