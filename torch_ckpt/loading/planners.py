"""Functions that a reader uses to call torch's planners."""

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
    """Wraps a planner, so that loading objects never runs code from the checkpoint.

    torch's load_bytes unpickles any bytes, so this class replaces it. If a user's planner overrides
    load_bytes, it receives the bytes only after they have passed the safety check.

    Args:
        storage: the locations of the items, from the metadata.
    """

    def __init__(self, planner: LoadPlanner, storage: Mapping[MetadataIndex, _StorageInfo]) -> None:
        self._planner = planner
        self._storage = storage
        self.resolve_tensor = planner.resolve_tensor
        self.commit_tensor = planner.commit_tensor

    def load_bytes(self, item: ReadItem, stored: io.BytesIO) -> None:
        """Decodes an object and passes it to the planner."""
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
    """Returns the location of an item.

    Raises:
        Corrupt: the metadata does not have the location.
    """
    index = item.storage_index
    info = storage.get(index)
    if info is None:
        raise Corrupt(
            f"{index.fqn}: the metadata gives no location for the shard at offset "
            f"{tuple(index.offset) if index.offset else 0}; the save that wrote it was incomplete"
        )
    return info


def keeps_default_hooks(planner: LoadPlanner) -> bool:
    """Returns True if the planner overrides none of the hooks for tensors.

    Then commit_tensor need not be called, because torch's implementation does nothing.
    """
    hooks = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
    return keeps_methods(planner, DefaultLoadPlanner, hooks)


def target_of(planner: LoadPlanner, item: ReadItem, direct: bool) -> torch.Tensor:
    """Returns the tensor to read into.

    Args:
        direct: the result of :func:`keeps_default_hooks`. If it is True, complete plain tensors
            are looked up directly, ten times as fast as by resolve_tensor.
    """
    if direct:
        value = planner.state_dict.get(item.dest_index.fqn)  # type: ignore[attr-defined]
        if type(value) in _PLAIN and value.shape == item.lengths:
            return cast(torch.Tensor, value.detach())
    return planner.resolve_tensor(item).detach()


def require_whole(planner: LoadPlanner, items: Sequence[ReadItem], metadata: Metadata) -> None:
    """Raises Corrupt if the plan of torch's own planner leaves part of any tensor unread."""
    hooks = ("create_local_plan", "create_global_plan", "finish_plan")
    if not keeps_methods(planner, DefaultLoadPlanner, hooks):
        return  # a user's planner may leave out parts on purpose
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
