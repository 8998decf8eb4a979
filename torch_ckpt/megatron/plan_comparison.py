"""Compares plans, so that a save can reuse the plans of an earlier save."""

from __future__ import annotations

import dataclasses

from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from torch_ckpt.checkpoint.metadata import stored_properties
from torch_ckpt.errors import CheckpointError


def with_file_prefix(plan: SavePlan, rank: int) -> SavePlan:
    return dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))


def same_plans(plan: SavePlan, loaded: SavePlan) -> bool:
    """Returns True if the plans differ at most in file names and in fields that metadata does not
    store."""
    fields = {field.name for field in dataclasses.fields(plan)} - {"storage_data", "items"}
    return (
        all(getattr(plan, name) == getattr(loaded, name, None) for name in fields)
        and len(plan.items) == len(loaded.items)
        and all(map(_same_item, plan.items, loaded.items))
    )


def require_same(plan: SavePlan, cached: SavePlan) -> None:
    if same_plans(plan, cached):
        return
    before = {item.index for item in cached.items}
    now = {item.index for item in plan.items}
    changed = sorted({index.fqn for index in before ^ now})
    what = ", ".join(changed[:5]) or "shapes, dtypes, offsets or nesting of the same names"
    raise CheckpointError(
        f"the state dict has changed since the cached plan was made ({what}); when it changes, "
        "plan without cached_ckpt_structure (enable_cache=False)"
    )


def _same_item(item: WriteItem, loaded: WriteItem) -> bool:
    ours, theirs = item.tensor_data, loaded.tensor_data
    if ours is None or theirs is None:
        return item == loaded
    return (
        (item.index, item.type, item.bytes_io_data)
        == (loaded.index, loaded.type, loaded.bytes_io_data)
        and (ours.chunk, ours.size) == (theirs.chunk, theirs.size)
        and stored_properties(ours.properties) == stored_properties(theirs.properties)
    )
