"""Whether what is stored of a tensor is all of it: a save that lost a shard is not loaded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from torch_ckpt.errors import Corrupt
from torch_ckpt.growth import chunks_here


def require_cover(
    metadata: Metadata, targets: Mapping[str, Any], items: Iterable[ReadItem]
) -> None:
    """Raises Corrupt where a plan does not read all that a target has room for.

    Args:
        targets: tensors and other values by fully qualified name; all are in the metadata.
        items: the plan.
    """
    planned: dict[tuple[str, Any], int] = defaultdict(int)
    for item in items:
        index = item.dest_index
        planned[index.fqn, index.offset] += math.prod(item.lengths)
    for name, target in targets.items():
        stored = metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            continue
        wanted: dict[Any, int] = defaultdict(int)
        for chunk in chunks_here(target):
            places = zip(chunk.offsets, chunk.sizes, tuple(stored.size), strict=True)
            wanted[chunk.offsets] += math.prod(
                max(min(begin + length, end) - begin, 0) for begin, length, end in places
            )
        for offsets, count in wanted.items():
            require_all(name, planned[name, offsets], count)


def require_all(name: str, planned: int, wanted: int) -> None:
    """Raises Corrupt where fewer elements of a tensor are stored than are wanted."""
    if planned < wanted:
        raise Corrupt(
            f"{name}: the metadata has shards with {planned} of the {wanted} elements that are "
            "wanted; the save that wrote it was incomplete"
        )
