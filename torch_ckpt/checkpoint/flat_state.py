"""Values of flattened state dicts (csrc/torch/flat_state.h) that only torch can describe.

These are tensors of subclasses, ShardedTensors, DTensors of such tensors, and objects that plan
themselves.
"""

from __future__ import annotations

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torch_ckpt import _C
from torch_ckpt.checkpoint.chunks import hash_layout, local_chunks, require_consecutive
from torch_ckpt.errors import CheckpointError


def flatten_sharded_tensors(flat: _C.FlatState) -> None:
    """Replaces each ShardedTensor whose shards are ShardedTensors with this rank's shard, or
    removes it if this rank has none, as torch does."""
    for row in flat.described_by_torch():
        value = flat.value(row)
        if isinstance(value, ShardedTensor):
            name = flat.name(row)
            flattened = _flatten_sharded_tensors({name: value})
            if name not in flattened:
                flat.remove(row)
            elif flattened[name] is not value:
                flat.replace(row, flattened[name])


def describe(flat: _C.FlatState, row: int) -> list[WriteItem]:
    """Describes a value as torch's planner does. Removes the value if this rank has no part of it.

    Returns:
        torch's item for each part of the tensor that this rank has.

    Raises:
        CheckpointError: the value is not stored as parts of one tensor.
    """
    name, value = flat.name(row), flat.value(row)
    has_mesh = isinstance(value, DTensor)
    is_outside = has_mesh and value.device_mesh.get_coordinate() is None
    items: list[WriteItem] = [] if is_outside else _create_write_items(name, value)
    if not items:
        flat.remove(row)
        return items
    data = items[0].tensor_data
    if data is None or any(item.index.fqn != name or item.tensor_data is None for item in items):
        raise CheckpointError(
            f"{name}: a {type(value).__name__} that plans items other than the parts of one tensor "
            "with this name can only be saved by dcp.save"
        )
    chunks = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
    boxes = [([*chunk.offsets], [*chunk.sizes]) for chunk in chunks]
    flat.describe(
        row,
        data.properties.dtype,
        data.properties.requires_grad,
        [*data.size],
        boxes if items[0].type == WriteItemType.SHARD else None,
        hash_layout(value.device_mesh, value.placements) if has_mesh else 0,
    )
    return items


def describe_target(state: _C.LoadState, row: int) -> None:
    """Describes a tensor to load, and this rank's parts of it.

    Raises:
        CheckpointError: this rank's part of a DTensor is not a single block.
        ValueError: the value is not a tensor.
    """
    name, value = state.name(row), state.value(row)
    require_consecutive(name, value)
    size = getattr(value, "global_shape", None) or value.size()
    chunks = local_chunks(value)
    boxes = [([*chunk.offsets], [*chunk.sizes]) for chunk in chunks]
    state.describe(row, value.dtype, False, [*size], boxes, 0)
    for number, chunk in enumerate(chunks):
        part = find_state_dict_object({name: value}, MetadataIndex(name, chunk.offsets, number))
        state.set_part(row, number, part.detach())
