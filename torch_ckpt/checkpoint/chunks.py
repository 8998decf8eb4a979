"""The chunks of a tensor that this rank has, and the check that a load fills them.

For a single shard, it is enough to count elements. Several shards may have enough elements in total
but overlap and leave a gap, so their positions are checked.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torch_ckpt import _core
from torch_ckpt.errors import CheckpointError, Corrupt

#: Offsets and sizes, one per dimension.
OffsetsAndSizes = tuple[Sequence[int], Sequence[int]]


def require_cover(
    metadata: Metadata, targets: Mapping[str, Any], items: Iterable[ReadItem]
) -> None:
    """Raises Corrupt if a plan leaves part of a target unread that the stored tensor covers.

    Args:
        targets: tensors and other values by fully qualified name. The metadata must have all of
            these names.
        items: the items of the plan.
    """
    planned: dict[tuple[str, Any], list[OffsetsAndSizes]] = defaultdict(list)
    for item in items:
        index = item.dest_index
        planned[index.fqn, index.offset].append((item.dest_offsets, item.lengths))
    for name, target in targets.items():
        stored = metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            continue
        require_consecutive(name, target)
        for chunk in local_chunks(target):
            places = zip(chunk.offsets, chunk.sizes, tuple(stored.size), strict=True)
            wanted = tuple(
                max(min(begin + length, end) - begin, 0) for begin, length, end in places
            )
            _require_all(name, wanted, planned[name, chunk.offsets], chunk.offsets)


def _require_all(
    name: str, wanted: Sequence[int], boxes: Sequence[OffsetsAndSizes], offsets: Sequence[int]
) -> None:
    """Raises Corrupt if boxes, relative to ``offsets``, do not cover the wanted part."""
    count = math.prod(wanted)
    planned = sum(math.prod(sizes) for _, sizes in boxes)
    if planned < count:
        raise Corrupt(
            f"{name}: the shards in the metadata contain only {planned} of the {count} wanted "
            "elements; the save that wrote them was incomplete"
        )
    gap = _core.describe_gap(wanted, boxes, offsets) if len(boxes) > 1 else None
    if gap is not None:
        raise Corrupt(
            f"{name}: shards in the metadata overlap, and {gap}; "
            "the save that wrote them was incomplete"
        )


def local_chunks(value: Any) -> list[ChunkStorageMetadata]:
    """Returns the chunks of a tensor that this rank has.

    Raises:
        ValueError: ``value`` is not a tensor.
    """
    # For a rank outside the mesh, torch would return a chunk with one element.
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return []
    # torch computes the chunks with tensors on the default device, which may be "meta".
    with torch.device("cpu"):
        chunks = _create_chunk_list(value)
    if not _is_strided(value) or 0 in chunks[0].sizes:
        return chunks
    # torch assumes that a rank's elements are consecutive, so compute the chunks here.
    runs = [_local_runs(value, dim) for dim in range(value.dim())]
    return [
        ChunkStorageMetadata(
            offsets=torch.Size(begin for begin, _length in box),
            sizes=torch.Size(length for _begin, length in box),
        )
        for box in product(*runs)
    ]


def hash_layout(mesh: Any, placements: Any) -> int:
    """Returns 64 bits that are the same on all ranks of a mesh and differ for other layouts."""
    with torch.device("cpu"):
        ranks = mesh.mesh
    text = f"{tuple(ranks.shape)} {ranks.flatten().tolist()} {placements}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def require_consecutive(name: str, value: Any) -> None:
    """Raises CheckpointError if this rank's part of a DTensor is a partial sum or several blocks.

    torch's planners would read and write the wrong elements.
    """
    if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements):
        raise CheckpointError(
            f"{name}: the DTensor has the placements {tuple(value.placements)}, so each rank holds "
            "a partial sum, not a shard. Redistribute the DTensor to Shard and Replicate "
            "placements first"
        )
    if _is_strided(value) and len(local_chunks(value)) > 1:
        raise CheckpointError(
            f"{name}: this rank's part of the DTensor is not a single block, because its "
            f"placements are {tuple(value.placements)} and its shape is {list(value.shape)}. A "
            "checkpoint can describe only blocks, by an offset and a size per dimension. "
            "Redistribute the DTensor to Shard and Replicate placements first"
        )


def _is_strided(value: Any) -> bool:
    return isinstance(value, DTensor) and any(
        isinstance(placement, _StridedShard) for placement in value.placements
    )


def _local_runs(tensor: DTensor, dim: int) -> list[tuple[int, int]]:
    """Returns the start and length of each run of consecutive indices that this rank has in a
    dimension."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # Split the indices in the same way as distribute_tensor splits the tensor.
    here = torch.arange(tensor.size(dim), device="cpu").view(*[1] * dim, -1)
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            parts, _padding = placement._split_tensor(
                here, mesh.size(mesh_dim), with_padding=False, contiguous=False
            )
            here = parts[coordinate[mesh_dim]]
    indices = here.flatten()
    gaps = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    edges = [0, *gaps, indices.numel()]
    return [(int(indices[begin]), end - begin) for begin, end in pairwise(edges)]
