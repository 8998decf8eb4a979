"""Pairs an optimizer's parameter groups with the groups in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_ckpt._base.formatting import some_of
from torch_ckpt.errors import CheckpointError

Group = dict[str, Any]

# Maximum numbers of groups, and of names in a group, that an error lists.
_MAX_GROUPS = 6
_MAX_NAMES = 3


def pair_groups(stored: Sequence[Group], current: Sequence[Group], *, exact: bool) -> list[int]:
    """Returns the number of the stored group for each current group.

    Groups may be in another order. Their parameters identify them. :func:`_pair_empty` pairs the
    groups without parameters.

    Args:
        stored, current: groups, whose ``params`` are the names of the parameters.
        exact: False if the checkpoint may have more parameters than the optimizer. True if the
            parameters are identified by number, so that a removed parameter changes the others.

    Raises:
        CheckpointError: the parameters are grouped differently, so the options of a group are
            unknown. The message lists both groupings.
    """
    stored_names = [name for group in stored for name in group["params"]]
    group_of = {name: number for number, group in enumerate(stored) for name in group["params"]}
    pairs: dict[int, int | None] = {}
    for number, group in enumerate(current):
        if group["params"]:
            found = {group_of.get(name) for name in group["params"]}
            pairs[number] = found.pop() if len(found) == 1 else None
    known = {pair for pair in pairs.values() if pair is not None}
    is_same = len(known) == len(pairs) and len(group_of) == len(stored_names)
    if is_same and exact:
        is_same = len(stored_names) == sum(len(group["params"]) for group in current)
    empty = _pair_empty(stored, current, pairs) if is_same else None
    if empty is None:
        raise CheckpointError(
            f"the parameters are grouped differently than in the checkpoint, so the options of the "
            f"groups are unknown. In the checkpoint, {_listed(stored)}. Now, {_listed(current)}"
        )
    pairs |= empty
    return [pair for number in range(len(current)) if (pair := pairs[number]) is not None]


def _pair_empty(
    stored: Sequence[Group], current: Sequence[Group], pairs: dict[int, int | None]
) -> dict[int, int] | None:
    """Returns the stored group for each current group without parameters; None if this is
    ambiguous.

    The groups are paired by position if no group has moved, else by their option ``name``, else if
    each side has only one.
    """
    empty = [number for number, group in enumerate(current) if not group["params"]]
    stored_empty = [number for number, group in enumerate(stored) if not group["params"]]
    if not empty:
        return None if stored_empty else {}
    names = [_name(current[number]) for number in empty]
    stored_names = [_name(stored[number]) for number in stored_empty]
    has_moved = any(number != pair for number, pair in pairs.items())
    if empty == stored_empty and not has_moved and names == stored_names:
        return dict(zip(empty, empty, strict=True))
    unpaired = [number for number in range(len(stored)) if number not in pairs.values()]
    by_name = {_name(stored[number]): number for number in unpaired}
    if None not in names and len(set(names)) == len(names) and len(by_name) == len(unpaired):
        found = {number: by_name.get(_name(current[number])) for number in empty}
        if set(stored_empty) <= set(found.values()) and None not in found.values():
            return {number: pair for number, pair in found.items() if pair is not None}
    if len(empty) == len(stored_empty) == 1 and None in (names[0], stored_names[0]):
        return {empty[0]: stored_empty[0]}
    return None


def _name(group: Group) -> str | None:
    name = group.get("name")
    return name if isinstance(name, str) else None


def _listed(groups: Sequence[Group]) -> str:
    """Lists groups with their parameters."""

    def listed(number: int, group: Group) -> str:
        name = _name(group)
        title = f"group {number}" if name is None else f"group {number} ({name!r})"
        members = some_of([str(member) for member in group["params"]], _MAX_NAMES)
        return f"{title} has {members}" if members else f"{title} is empty"

    parts = [listed(number, group) for number, group in enumerate(groups)]
    if len(parts) > _MAX_GROUPS:
        parts[_MAX_GROUPS:] = [f"and {len(parts) - _MAX_GROUPS} more groups"]
    return "; ".join(parts)
