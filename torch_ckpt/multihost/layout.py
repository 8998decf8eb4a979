"""Converts trees of local tensors to trees of DTensors, and back. Only shapes are exchanged."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_ckpt._base.formatting import plural
from torch_ckpt.multihost.trees import Tree, children, differences, digest, is_array
from torch_ckpt.ranks.collective_call import CollectiveCall, Disagreement
from torch_ckpt.ranks.group import TIMEOUT_SECONDS

#: The placements of a leaf, one per mesh dimension; None leaves the leaf unchanged.
Placements = Sequence[Placement] | None


class _Local(NamedTuple):
    """A leaf on one rank."""

    dtype: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    order: tuple[int, ...]  # dimensions in order of descending stride


def local_to_global(
    tree: Any, mesh: DeviceMesh, placements: Any, *, timeout: float = TIMEOUT_SECONDS
) -> Any:
    """Converts each tensor of a tree into a DTensor whose local shard on this rank is that tensor.

    Every rank of the mesh must call this function. A DTensor shares memory with its local tensor,
    and gradients flow back to the local tensor. NumPy arrays become DTensors, too. Leaves that are
    already DTensors (on any mesh), and leaves of other types, are returned unchanged. If shapes
    differ between ranks, the ranks exchange the shapes. Replicas are not compared; use
    :func:`assert_equal` for that.

    Args:
        tree: tensors of this rank.
        mesh: the device mesh; the tensors must be on a device of the mesh's device type.
        placements: a list with one Shard, Replicate or Partial per mesh dimension, which applies to
            all leaves. Alternatively, a tree in which such a list, or None, replaces each leaf or
            subtree. None leaves the leaf or subtree unchanged.
        timeout: seconds to wait for ranks that have not arrived.

    Raises:
        RanksDisagree: the ranks' trees differ, or a local shape is not the one that
            ``distribute_tensor`` would produce.
        ValueError: placements do not match the tree or the mesh, or this process is not in the
            mesh.
        TimeoutError: a rank did not arrive; the message names the rank.
        ConnectionError: the connection to the store is lost.

    Example::

        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        batch = multihost.local_to_global({"tokens": tokens}, mesh, [Shard(0)])
    """
    ranks = mesh.mesh.flatten().tolist()
    with CollectiveCall("local_to_global()", None, timeout, ranks) as call:
        own = Tree(tree)
        tensors: dict[str, torch.Tensor] = {}
        described: dict[str, _Local] = {}

        def describe() -> bytes:
            for name, leaf, by in _match_placements(own, tree, mesh, placements):
                if by is None or isinstance(leaf, DTensor):
                    continue
                if isinstance(leaf, torch.Tensor) or is_array(leaf):
                    tensor = tensors[name] = torch.as_tensor(leaf)
                    if tensor.device.type != mesh.device_type:
                        raise ValueError(
                            f"{name or 'the tree'} is on {tensor.device}, but the mesh is on "
                            f"{mesh.device_type}; move the tensor to {mesh.device_type} first"
                        )
                    normal = _normalize(name, tensor, by)
                    dtype, shape = str(tensor.dtype), tuple(tensor.shape)
                    described[name] = _Local(dtype, shape, normal, _order(tensor))
            return digest({name: repr(local) for name, local in described.items()})

        if call.agree(describe, lambda digests: len(set(digests)) == 1):
            # All ranks have the same shapes, so multiply them by the size of the mesh.
            shapes = {
                name: (_multiply(local.shape, local.placements, mesh.shape), local.order)
                for name, local in described.items()
            }
        else:
            shapes = call.agree(lambda: described, partial(_global_shapes, tuple(mesh.shape)))

        def convert(name: str, leaf: Any) -> Any:
            if name not in tensors:
                return leaf
            tensor, (shape, order), by = tensors[name], shapes[name], described[name].placements
            strides = _strides(shape, order)
            return DTensor.from_local(
                tensor, mesh, by, run_check=False, shape=torch.Size(shape), stride=strides
            )

        return own.with_leaves(map(convert, own.names, own.leaves))


def global_to_local(tree: Any, mesh: DeviceMesh, placements: Any) -> Any:
    """Converts each DTensor of a tree into its local tensor on this rank.

    This function is the inverse of :func:`local_to_global` if ``mesh`` and ``placements`` are the
    same. If a DTensor has the given placements, the local tensor shares memory with the DTensor,
    and gradients flow back to the DTensor. Otherwise, the DTensor is redistributed, and every rank
    of the mesh must call this function. Other leaves are returned unchanged.

    Args:
        tree: values with DTensors.
        mesh: the mesh of the DTensors.
        placements: placements of the leaves, as for :func:`local_to_global`.

    Raises:
        ValueError: placements do not match the tree or the mesh, or a DTensor is on a different
            mesh.

    Example::

        tokens = multihost.global_to_local(batch, mesh, [Shard(0)])["tokens"]
    """
    own = Tree(tree)
    local = []
    for name, leaf, by in _match_placements(own, tree, mesh, placements):
        if by is None or not isinstance(leaf, DTensor):
            local.append(leaf)
            continue
        if leaf.device_mesh != mesh:
            raise ValueError(
                f"{name or 'the tree'} is on {leaf.device_mesh}, not on {mesh}; pass its own mesh"
            )
        wanted = _normalize(name, leaf, by)
        if tuple(leaf.placements) != wanted:
            leaf = leaf.redistribute(placements=wanted)
        local.append(leaf.to_local())
    return own.with_leaves(local)


# --- placements ----------------------------------------------------------------------------------


def _match_placements(
    own: Tree, tree: Any, mesh: DeviceMesh, placements: Any
) -> list[tuple[str, Any, Placements]]:
    """Returns the name, value and placements of each leaf."""
    by_leaf: list[Placements] = []
    _collect_placements("", tree, placements, by_leaf)
    for name, by in zip(own.names, by_leaf, strict=True):
        if by is not None and len(by) != mesh.ndim:
            raise ValueError(
                f"{name or 'the tree'} has {plural(len(by), 'placement')}, but the mesh has "
                f"{plural(mesh.ndim, 'dimension')}; pass one placement per dimension"
            )
        for placement in by or ():
            if type(placement) not in (Shard, Replicate, Partial):
                raise ValueError(
                    f"{name or 'the tree'} has the placement {placement}, but only Shard, "
                    "Replicate and Partial are supported"
                )
    return list(zip(own.names, own.leaves, by_leaf, strict=True))


def _collect_placements(name: str, node: Any, placements: Any, found: list[Placements]) -> None:
    """Appends the placements of each leaf below a node to ``found``."""
    inside = children(node)
    is_for_all = placements is None or (
        isinstance(placements, list | tuple)
        and bool(placements)
        and all(isinstance(placement, Placement) for placement in placements)
    )
    given = None if is_for_all else children(placements)
    if is_for_all and inside is None:
        found.append(placements)
        return
    if is_for_all:
        given = [(key, placements) for key, _child in inside or ()]
    if inside is None or given is None:
        raise ValueError(
            f"{name or 'the tree'} has {placements!r} instead of placements; pass a list of "
            "placements, or None"
        )
    by_key = dict(given)
    if by_key.keys() != dict(inside).keys():
        odd = sorted(by_key.keys() ^ dict(inside).keys())
        raise ValueError(
            f"{name or 'the tree'} and its placements do not have the same keys; only one of them "
            f"has {', '.join(odd)}"
        )
    for key, child in inside:
        _collect_placements(f"{name}.{key}" if name else key, child, by_key[key], found)


def _normalize(
    name: str, tensor: torch.Tensor, placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    """Replaces negative dimensions in placements."""
    normal: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            if not -tensor.dim() <= placement.dim < tensor.dim():
                raise ValueError(
                    f"{name or 'the tree'} has {plural(tensor.dim(), 'dimension')}, so it cannot "
                    f"be sharded by {placement}"
                )
            placement = Shard(placement.dim % tensor.dim())
        normal.append(placement)
    return tuple(normal)


# --- shapes --------------------------------------------------------------------------------------


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim)))


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def _multiply(
    shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int]
) -> tuple[int, ...]:
    """Returns the global shape, assuming that all ranks have the same local shape."""
    result = list(shape)
    for placement, size in zip(placements, mesh, strict=True):
        if isinstance(placement, Shard):
            result[placement.dim] *= size
    return tuple(result)


def _global_shapes(
    mesh: tuple[int, ...], by_rank: list[dict[str, _Local]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]] | Disagreement:
    """Computes global shapes, and orders of dimensions, from the local shapes in mesh order."""
    lines = differences(
        [
            {
                name: f"a tensor of {local.dtype.removeprefix('torch.')} with {len(local.shape)} "
                f"dimensions, placements {list(local.placements)}"
                for name, local in leaves.items()
            }
            for leaves in by_rank
        ]
    )
    if lines:
        return Disagreement("the trees differ; all ranks must pass the same leaves:", lines)
    coordinates = list(itertools.product(*map(range, mesh)))
    found = {}
    for name, first in by_rank[0].items():
        shapes = [leaves[name].shape for leaves in by_rank]
        total = _sum_shapes(shapes, first.placements, coordinates)
        found[name] = total, first.order
        for index, (shape, coordinate) in enumerate(zip(shapes, coordinates, strict=True)):
            expected = _local_shape(total, first.placements, mesh, coordinate)
            if shape != expected:
                lines.append(
                    f"{name or 'the tree'}: the local tensor at mesh index {index} has shape "
                    f"{shape}, but a tensor with shape {total} and placements "
                    f"{list(first.placements)} requires shape {expected} there"
                )
    if lines:
        text = "the local shapes differ from those that distribute_tensor would produce:"
        return Disagreement(text, lines)
    return found


def _sum_shapes(
    shapes: Sequence[tuple[int, ...]],
    placements: Sequence[Placement],
    coordinates: Sequence[tuple[int, ...]],
) -> tuple[int, ...]:
    """Adds up the local shapes to get the global shape."""
    result = list(shapes[0])
    for dim in range(len(result)):
        shards = [isinstance(p, Shard) and p.dim == dim for p in placements]
        if any(shards):
            # Add up along the mesh dimensions that shard this dimension, at index 0 of all others.
            result[dim] = sum(
                shape[dim]
                for shape, coordinate in zip(shapes, coordinates, strict=True)
                if not any(
                    index for index, cuts in zip(coordinate, shards, strict=True) if not cuts
                )
            )
    return tuple(result)


def _local_shape(
    shape: Sequence[int],
    placements: Sequence[Placement],
    mesh: Sequence[int],
    coordinate: Sequence[int],
) -> tuple[int, ...]:
    """Returns the local shape at a coordinate of the mesh, chunked like torch.chunk."""
    local = list(shape)
    for placement, size, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Shard):
            length = local[placement.dim]
            each = (length + size - 1) // size
            local[placement.dim] = max(0, min(each, length - index * each))
    return tuple(local)
