"""Flattens ShardedTensors in flattened state dicts (csrc/torch/flat_state.h), as torch does."""

from __future__ import annotations

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors

from torch_ckpt import _C


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
