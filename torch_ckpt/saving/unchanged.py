"""Notices saves that keep storing the same weights although training goes on.

A save of a stale copy is complete, verifies, and is worthless; it has gone unseen for months where
only losses after a restart would have told. The checksums of what is written are there anyway.
"""

from __future__ import annotations

import os

from torch_ckpt.saving.items import Written
from torch_ckpt.saving.plan import GlobalPlan

#: A number that moves at each save, trained or not.
SAVE_COUNTER = "save_counter"


class UnchangedDetector:
    """Compares each save with the one before it.

    Tensors belong to the group of their path's first component (``model``, ``optim``). A group is
    suspicious when none of its tensors has changed since the last save although a number somewhere
    in the state has, such as a step counter. A group is named once.
    """

    def __init__(self) -> None:
        self._last: tuple[GlobalPlan, list[Written]] | None = None
        self._named: set[str] = set()

    def check(self, plan: GlobalPlan, written: list[Written], where: str) -> str | None:
        """What to warn of, if anything.

        Args:
            written: by rank.
            where: the checkpoint's directory.
        """
        last, self._last = self._last, (plan, written)
        if last is None or not last[0].has_names_of(plan):
            return None
        moved, groups = plan.changes(last[1], written, SAVE_COUNTER)
        stale = [group for group in groups if group not in self._named]
        if not stale:
            return None
        self._named.update(stale)
        names = [name for group in stale for name in groups[group]]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return (
            f"{os.fspath(where)}: {shown} are bit for bit what the last checkpoint has, although "
            f"{moved} has changed since. If they are not frozen, the state that is saved is not "
            "the one that is trained. (warn_unchanged=False silences this.)"
        )
