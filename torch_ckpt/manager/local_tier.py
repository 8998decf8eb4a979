"""The local tier of a manager: copies steps from the hosts' own disks to the root.

steps/tier.py describes the tier. All ranks make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_ckpt._base.log import LOGGER
from torch_ckpt.events import Event
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.manager.run_context import RunContext
from torch_ckpt.options import WriteOptions
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.saving.target import CheckpointTarget
from torch_ckpt.steps.tier import TieredSteps
from torch_ckpt.steps.tier_copy import Copier

#: Seconds for which the end of a manager waits until the steps are copied to the root.
CLOSE_SECONDS = 600.0


class Tier:
    """The local tier of one manager.

    Args:
        steps: the steps of the root and of the tier.
        run: the manager's run.
        group: the ranks; used by this object only.
        write: the options of the files.
        deletions: the manager's deletions, which follow each copy.
        on_commit: see :class:`SaveOptions`.
    """

    def __init__(
        self,
        steps: TieredSteps,
        run: RunContext,
        group: RankGroup,
        write: WriteOptions,
        deletions: Deletions,
        on_commit: Callable[[int], None] | None,
    ) -> None:
        self._saved: tuple[int, bytes] | None = None
        self._steps = steps
        self._run = run
        self._write = write
        self._deletions = deletions
        self._on_commit = on_commit
        self._copier = Copier(steps, group, self._target, run.timeout, self._published)
        steps.on_saved = self._save_on_disks
        try:
            # What other runs have left on the disk of this host.
            steps.disk.sweep(attempt=run.attempt)
        except OSError as error:
            # Do not raise: the other ranks have no error, and continue.
            LOGGER.warning("leftovers of interrupted saves could not be removed: %s", error)

    def saved(self, step: int) -> None:
        """A save of this process has ended. Copies it to the root if it is on the hosts' disks."""
        saved, self._saved = self._saved, None
        is_in_root = saved is None or saved[0] != step
        if is_in_root and self._run.rank == 0:
            self._published(step)
        self._copier.notify(saved)

    def restored(self) -> None:
        """Copies the steps to the root that only the hosts' own disks have."""
        self._copier.notify()

    def wait(self, timeout: float | None) -> bool:
        """Waits until the steps are copied to the root. Returns False if they are not."""
        return self._copier.wait(timeout)

    def close(self, timeout: float) -> None:
        """Waits for the copies, at most for ``timeout`` seconds."""
        self._copier.close(timeout)

    def abandon(self) -> None:
        """Ends the copies without waiting for them. The next run continues them."""
        self._copier.end()

    def unpublished(self) -> list[int]:
        """Returns the steps of this process that are not known to be published."""
        return self._copier.unpublished()

    # --- private ---------------------------------------------------------------------------------

    def _published(self, step: int) -> None:
        """A step is complete beneath the root. Called on rank 0."""
        run = self._run
        message = f"step {step} is complete beneath {self._steps.root}"
        run.report(Event("published", step, run.rank, message=message))
        self._deletions.repeat()
        if self._on_commit is not None:
            try:
                self._on_commit(step)
            except BaseException:  # also SystemExit, which would end the thread silently
                LOGGER.exception("on_commit of step %d failed; the step is complete", step)

    def _save_on_disks(self, step: int, digest: bytes) -> None:
        self._saved = step, digest

    def _target(
        self, step: int, attempt: str, marker: Callable[[], dict[str, Any]]
    ) -> CheckpointTarget:
        def marker_if_leased() -> dict[str, Any]:
            # Called right before the step is completed. Another run may have the root by now.
            self._run.lease.require()
            return marker()

        self._run.lease.require()
        target = self._steps.root_steps.target(
            step, self._write, attempt=attempt, may_replace=True, marker=marker_if_leased
        )
        assert isinstance(target, CheckpointTarget)
        return target
