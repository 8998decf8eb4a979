"""Flattens state dicts, and names the values in the same way as torch's planners."""

from __future__ import annotations

from typing import Any

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors

from torch_ckpt import _C
from torch_ckpt.checkpoint.chunks import chunks_here


def flat_state(state_dict: dict[str, Any], watch: _C.SourceWatch | None = None) -> _C.FlatState:
    """Flattens a nested state dict.

    Args:
        watch: keep aliases of the plain tensors and DTensors, and watch these; None keeps the
            values themselves.

    Raises:
        ValueError: two values have the same name.
    """
    flat = _C.FlatState(state_dict, chunks_here, watch)
    flatten_sharded_tensors(flat)
    return flat


def flatten_sharded_tensors(flat: _C.FlatState) -> None:
    """Replaces each ShardedTensor whose shards are ShardedTensors with this rank's shard, or
    removes it if this rank has none, as torch does."""
    for row in flat.unplanned():
        value = flat.value(row)
        if isinstance(value, ShardedTensor):
            name = flat.name(row)
            flattened = _flatten_sharded_tensors({name: value})
            if name not in flattened:
                flat.remove(row)
            elif flattened[name] is not value:
                flat.replace(row, flattened[name])
