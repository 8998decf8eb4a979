"""What passes between a reader and the planner of a load."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from torch_ckpt._base.planner_hooks import keeps_methods
from torch_ckpt.checkpoint.chunks import require_cover
from torch_ckpt.checkpoint.objects import decode
from torch_ckpt.errors import Corrupt

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class SafePlanner:
    """A planner that gets objects without running code of the checkpoint's.

    torch's own load_bytes unpickles whatever it gets, so what that would do is done here; one of
    the user's own gets the bytes once they have turned out to be harmless.

    Args:
        storage: of the metadata: where items are stored.
    """

    def __init__(self, planner: LoadPlanner, storage: Mapping[MetadataIndex, _StorageInfo]) -> None:
        self._planner = planner
        self._storage = storage
        self.resolve_tensor = planner.resolve_tensor
        self.commit_tensor = planner.commit_tensor

    def load_bytes(self, item: ReadItem, stored: io.BytesIO) -> None:
        """Gives an object to the planner."""
        planner = self._planner
        file = place_of(item, self._storage).relative_path
        value = decode(stored.getbuffer(), item.storage_index.fqn, file)
        if not keeps_methods(planner, DefaultLoadPlanner, ("load_bytes",)):
            planner.load_bytes(item, stored)
            return
        assert isinstance(planner, DefaultLoadPlanner)
        target = item.dest_index.fqn
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[target], value)
        else:
            planner.state_dict[target] = value


def place_of(item: ReadItem, storage: Mapping[MetadataIndex, _StorageInfo]) -> _StorageInfo:
    """Where an item is stored.

    Raises:
        Corrupt: the metadata does not say it.
    """
    index = item.storage_index
    info = storage.get(index)
    if info is None:
        raise Corrupt(
            f"{index.fqn}: the metadata does not say where the shard at offset "
            f"{tuple(index.offset) if index.offset else 0} is stored; "
            "the save that wrote it was incomplete"
        )
    return info


def keeps_default_hooks(planner: LoadPlanner) -> bool:
    """Whether nobody but torch sees the tensors; its own commit_tensor does nothing."""
    hooks = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    return keeps_methods(planner, DefaultLoadPlanner, hooks)


def target_of(planner: LoadPlanner, item: ReadItem, direct: bool) -> torch.Tensor:
    """Where a tensor goes.

    Args:
        direct: see :func:`keeps_default_hooks`: of a whole plain tensor what resolve_tensor returns
            is then known, at a tenth of its time.
    """
    if direct:
        value = planner.state_dict.get(item.dest_index.fqn)  # type: ignore[attr-defined]
        if type(value) in _PLAIN and value.shape == item.lengths:
            return cast(torch.Tensor, value.detach())
    return planner.resolve_tensor(item).detach()


def require_whole(planner: LoadPlanner, items: Sequence[ReadItem], metadata: Metadata) -> None:
    """Raises Corrupt where torch's own planner has found less than the whole of a tensor."""
    hooks = ("create_local_plan", "create_global_plan", "finish_plan")
    if not keeps_methods(planner, DefaultLoadPlanner, hooks):
        return  # which may want a part
    assert isinstance(planner, DefaultLoadPlanner)
    known = metadata.state_dict_metadata
    targets = planner.state_dict
    whole = set()
    for item in items:
        name = item.dest_index.fqn
        value: Any = targets.get(name)
        is_whole = type(value) in _PLAIN and value.shape == item.lengths
        if is_whole or item.type == LoadItemType.BYTE_IO:
            whole.add(name)
    rest = {name: value for name, value in targets.items() if name not in whole and name in known}
    if rest:
        require_cover(metadata, rest, (i for i in items if i.dest_index.fqn in rest))
