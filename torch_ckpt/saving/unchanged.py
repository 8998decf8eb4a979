"""Notices saves that keep storing the same weights although training goes on.

A save of a stale copy is complete, verifies, and is worthless; it has gone unseen for months where
only losses after a restart would have told. The checksums of what is written are there anyway.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

#: (is it a number or a tensor with one element, which is what counts steps; its CRC-32 or those of
#: its parts).
Fingerprint = tuple[bool, Any]

#: A number that moves at each save, trained or not.
SAVE_COUNTER = "save_counter"


class UnchangedDetector:
    """Compares each save with the one before it.

    Tensors belong to the group of their path's first component (``model``, ``optim``). A group is
    suspicious when none of its tensors has changed since the last save although a number somewhere
    in the state has, such as a step counter. A group is named once.
    """

    def __init__(self) -> None:
        self._last: Mapping[str, Fingerprint] = {}
        self._named: set[str] = set()

    def check(
        self, items: Mapping[str, Fingerprint], paths: Mapping[str, Sequence[Any]], where: str
    ) -> str | None:
        """What to warn of, if anything.

        Args:
            items: by fully qualified name.
            paths: the way to each in the nested state dict.
            where: the checkpoint's directory.
        """
        last, self._last = self._last, items
        if last.keys() != items.keys():
            return None
        moved = [
            name
            for name, item in items.items()
            if item[0] and item != last[name] and name != SAVE_COUNTER
        ]
        if not moved:
            return None
        groups: dict[str, list[str]] = {}
        changed: set[str] = set()
        for name, item in items.items():
            if item[0]:
                continue
            path = paths.get(name, (name,))
            group = str(path[0]) if len(path) > 1 else ""
            groups.setdefault(group, []).append(name)
            if item != last[name]:
                changed.add(group)
        stale = [group for group in groups if group not in changed and group not in self._named]
        if not stale:
            return None
        self._named.update(stale)
        names = [name for group in stale for name in groups[group]]
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return (
            f"{os.fspath(where)}: {shown} are bit for bit what the last checkpoint has, although "
            f"{moved[0]} has changed since. If they are not frozen, the state that is saved is not "
            "the one that is trained. (warn_unchanged=False silences this.)"
        )
