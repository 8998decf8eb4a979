"""Detects saves that keep storing the same weights although training continues.

A save of a stale copy is complete and passes verification, but is worthless. Such saves have stayed
unnoticed for months, until a restart showed the wrong loss. The comparison costs little,
because the checksums are computed anyway.
"""

from __future__ import annotations

from torch_ckpt._base.formatting import some_of
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.write import Written

#: A number that changes in every save, even without training.
SAVE_COUNTER = "save_counter"


class UnchangedDetector:
    """Compares each save with the previous one, if both write the same items on the same ranks.

    Tensors belong to the group of the first component of their path (``model``, ``optim``). A group
    is suspicious if none of its tensors has changed since the last save, but a number in the state
    has, such as a step counter. Only groups with trained tensors count (see
    csrc/planning/changes.h). Each group is reported once.
    """

    def __init__(self) -> None:
        self._last: tuple[int, list[Written]] | None = None
        self._named: set[str] = set()

    def check(self, plan: AgreedPlan, written: list[Written], where: str) -> str | None:
        """Returns the text of a warning; None if there is nothing to warn about.

        Args:
            written: the results of the writes, by rank.
            where: the checkpoint's directory.
        """
        coordinator = plan.coordinator
        last, self._last = self._last, (coordinator.plan_hash, written)
        if last is None or last[0] != coordinator.plan_hash:
            return None
        before, now = ([one.files for one in save] for save in (last[1], written))
        moved, groups = coordinator.changes(before, now, SAVE_COUNTER)
        stale = [group for group in groups if group not in self._named]
        if not stale:
            return None
        self._named.update(stale)
        names = [name for group in stale for name in groups[group]]
        return (
            f"{where}: {some_of(names, 5)} are bit for bit the same as in the last "
            f"checkpoint, although {moved} has changed since. Unless they are frozen, the saved "
            "state is not the one being trained"
        )
