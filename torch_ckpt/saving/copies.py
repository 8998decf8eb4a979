"""Sharded tensors that several ranks save under one name.

A DTensor belongs to a mesh. DTensors of one name may have several meshes: tied weights of two
pipeline stages, or a mesh for each tensor-parallel group. Only one of them is saved, so they must
be copies of one tensor. A group of ranks that saves experts of its own under the same names as
another group would lose them. So:

1. Every rank sends a hash of the layout, a mesh and placements, of its DTensors.
2. The coordinator refuses a name whose layouts do not all have all shards of the tensor. It
   requests checksums of the shards that several layouts have. Other names cost nothing.
3. The ranks send these checksums with the results of their writes.
4. The coordinator compares the checksums before it commits
   (:meth:`GlobalPlan.require_equal_copies`).

csrc/planning/global_plan.h does this for the values that the engine plans. This module does it for
the items of torch's planner, such as the shards of ShardedTensors, which have no mesh: all shards
that several ranks have are compared.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from torch_ckpt import _C, _core
from torch_ckpt._base.formatting import ranks_text
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.replica_check import differ_text, versions_text

#: Name, the groups of ranks that have the same version, and the ranks of each mesh, if known.
DifferingCopy = tuple[str, list[list[int]], list[list[int]]]

_Chunk = tuple[tuple[int, ...], tuple[int, ...]]


def hash_layout(mesh: Any, placements: Any) -> int:
    """Returns 64 bits that are the same on all ranks of a mesh and differ for other layouts."""
    with torch.device("cpu"):
        ranks = mesh.mesh
    text = f"{tuple(ranks.shape)} {ranks.flatten().tolist()} {placements}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def layouts_of(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns a hash of the layout of each DTensor of which this rank has a part, by name."""
    return {
        name: hash_layout(value.device_mesh, value.placements)
        for name, value in values.items()
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is not None
    }


def checksum_of(value: Any) -> int:
    """Returns a CRC-32 of a value as the engine writes it: a plain tensor, or bytes."""
    return _C.fingerprint(value) if isinstance(value, torch.Tensor) else zlib.crc32(value)


def find_copies(
    plans: Sequence[SavePlan], layouts: Sequence[Mapping[str, int] | None]
) -> list[list[WriteItem]]:
    """Returns the items of torch's planner whose checksums the ranks must send, by rank.

    Args:
        plans: the ranks' own plans.
        layouts: the ranks' layouts; see :func:`layouts_of`.

    Raises:
        CheckpointError: ranks have different values under one name. The error gives the ranks.
    """
    by_name: dict[str, list[tuple[int, WriteItem]]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            by_name[item.index.fqn].append((rank, item))
    copies: list[list[WriteItem]] = [[] for _ in plans]
    for name, items in by_name.items():
        if items[0][0] == items[-1][0]:
            continue
        _require_same_tensor(name, items)
        if items[0][1].type != WriteItemType.SHARD:
            continue
        holders: dict[_Chunk, list[tuple[int, WriteItem]]] = defaultdict(list)
        chunks_of: dict[int | None, set[_Chunk]] = defaultdict(set)
        ranks_of: dict[int | None, list[int]] = defaultdict(list)
        for rank, item in items:
            chunk = _chunk_of(item)
            layout = (layouts[rank] or {}).get(name)
            ranks_of[layout].append(rank)
            if math.prod(chunk[1]):
                holders[chunk].append((rank, item))
                chunks_of[layout].add(chunk)
        _require_cover(name, items[0][1], holders)
        if len(chunks_of) == 1 and None not in chunks_of:
            continue
        if None not in chunks_of and any(found != holders.keys() for found in chunks_of.values()):
            meshes = " and ".join(f"the mesh of {ranks_text(r)}" for r in ranks_of.values())
            raise CheckpointError(
                f"{name}: DTensors with this name have several layouts and are not copies of one "
                f"tensor: their shards differ between {meshes}. If each mesh has a tensor of its "
                "own, use different names. If they are copies, divide them in the same way."
            )
        for rank, item in (one for held in holders.values() if len(held) > 1 for one in held):
            copies[rank].append(item)
    return copies


def differing_copies(
    copies: Sequence[Sequence[WriteItem]], checksums: Sequence[Sequence[int]]
) -> Iterator[DifferingCopy]:
    """Yields the copies that differ among the items of torch's planner.

    Args:
        copies: the result of :func:`find_copies`.
        checksums: the checksum of each of these items.
    """
    versions: dict[str, dict[_Chunk, dict[int, list[int]]]] = {}
    for rank, (items, found) in enumerate(zip(copies, checksums, strict=True)):
        for item, checksum in zip(items, found, strict=True):
            chunks = versions.setdefault(item.index.fqn, {})
            chunks.setdefault(_chunk_of(item), {}).setdefault(checksum, []).append(rank)
    for name, chunks in versions.items():
        differing = next((one for one in chunks.values() if len(one) > 1), None)
        if differing is not None:
            yield name, [*differing.values()], []


def text_of_copies(differing: Sequence[DifferingCopy]) -> str:
    """Returns the text of the error about copies that differ."""
    lines = []
    for name, groups, meshes in differing:
        lines.append(f"{name}: {versions_text(groups[:5])}")
        if meshes:
            shown = [f"({ranks_text(ranks)})" for ranks in meshes[:5]]
            shown += [f"{len(meshes) - 5} more"] if len(meshes) > 5 else []
            lines[-1] += f", on the meshes {', '.join(shown)}"
    loss = " that have the same shards, but only one rank's values would be saved"
    return (
        f"{differ_text('sharded tensor', lines, loss)}. If each group of ranks has a tensor of its "
        "own (experts, for example), use a different name in each group, or a DTensor on one mesh "
        "of all groups. If the tensors are copies, find out why they diverged."
    )


def _require_same_tensor(name: str, items: Sequence[tuple[int, WriteItem]]) -> None:
    first_rank, first = items[0]
    expected = _describe(first)
    for rank, item in items:
        found = _describe(item)
        if found != expected:
            raise CheckpointError(
                f"{name}: rank {first_rank} has {expected}, rank {rank} has {found}. Use a "
                "different name for each value."
            )


def _describe(item: WriteItem) -> str:
    data = item.tensor_data
    if data is None:
        return "an object"
    kind = "shards of " if item.type == WriteItemType.SHARD else ""
    return f"{kind}{data.properties.dtype} {list(data.size)}"


def _require_cover(name: str, item: WriteItem, chunks: Mapping[_Chunk, Any]) -> None:
    """Raises CheckpointError unless the chunks cover each element of the tensor exactly once."""
    assert item.tensor_data is not None
    size = list(item.tensor_data.size)
    count = sum(math.prod(sizes) for _, sizes in chunks)
    origin = [0] * len(size)
    if count != math.prod(size) or (count and _core.describe_gap(size, [*chunks], origin)):
        raise CheckpointError(
            f"{name}: the shards of all ranks have {count} elements in total and do not cover each "
            f"of the {math.prod(size)} elements of the tensor of {size} exactly once"
        )


def _chunk_of(item: WriteItem) -> _Chunk:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)
