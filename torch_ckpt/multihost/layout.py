"""Trees of local tensors as trees of DTensors, and back; nothing is copied or sent but shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_ckpt._base.trees import Tree, children, differences, digest, is_array
from torch_ckpt.ranks.calls import Call, Disagreement
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS

#: What a leaf's placements are: one for each dimension of the mesh; None: the leaf stays as it is.
Placements = Sequence[Placement] | None

# Of a leaf on one rank: its dtype, shape, placements, and dimensions from the longest stride on.
_Local = tuple[str, tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]


def local_to_global(
    tree: Any, mesh: DeviceMesh, placements: Any, *, timeout: float = TIMEOUT_SECONDS
) -> Any:
    """The tree with a DTensor for each tensor, of which this rank's part is that tensor.

    Every rank of the mesh calls it. A DTensor shares its memory with the local tensor, and
    gradients flow back to that. numpy's arrays become DTensors too. Other leaves stay as they are;
    so do DTensors, whatever their mesh and placements: they are global already. Shapes are
    exchanged where they are not the same on all ranks. Replicas are not compared: that is what
    ``assert_equal`` is for.

    Args:
        mesh: a tensor must be on its kind of device.
        placements: one list of Shard, Replicate or Partial, with one for each dimension of the
            mesh, for all leaves; or a tree that has such a list, or None, instead of leaves
            or of whole subtrees. None leaves the leaf as it is.
        timeout: seconds; a rank that has not come by then is given up.

    Raises:
        RanksDisagree: the ranks' trees differ, or a rank's shape is not that which
            ``distribute_tensor`` would give it.
        ValueError: placements do not fit the tree or the mesh; this process is not in the mesh.
        TimeoutError: ranks did not come; they are named.
        ConnectionError: the store is lost.
    """
    ranks = mesh.mesh.flatten().tolist()
    with Call("local_to_global()", None, timeout, ranks) as call:
        own = Tree(tree)
        tensors: dict[str, tuple[torch.Tensor, tuple[Placement, ...]]] = {}

        def describe() -> dict[str, _Local]:
            for name, leaf, by in _placed(own, tree, mesh, placements):
                if by is None or isinstance(leaf, DTensor):
                    continue
                if isinstance(leaf, torch.Tensor) or is_array(leaf):
                    tensor = torch.as_tensor(leaf)
                    _check_device(name, tensor, mesh)
                    tensors[name] = tensor, _normal(name, tensor, by)
            return {name: _local(tensor, by) for name, (tensor, by) in tensors.items()}

        def agree(digests: list[bytes]) -> bool:
            return len(set(digests)) == 1

        def offer() -> bytes:
            return digest({name: repr(local) for name, local in describe().items()})

        if call.exchange(offer, agree):
            # All are of the same size, so that the whole is that many times as large.
            shapes = {
                name: (_times(tensor.shape, by, mesh.shape), _order(tensor))
                for name, (tensor, by) in tensors.items()
            }
        else:
            described = {name: _local(tensor, by) for name, (tensor, by) in tensors.items()}
            shapes = call.exchange(lambda: described, _combine(tuple(mesh.shape)))

        def convert(name: str, leaf: Any) -> Any:
            if name not in tensors:
                return leaf
            tensor, by = tensors[name]
            shape, order = shapes[name]
            strides = _strides(shape, order)
            return DTensor.from_local(
                tensor, mesh, by, run_check=False, shape=torch.Size(shape), stride=strides
            )

        return own.with_leaves(map(convert, own.names, own.leaves))


def global_to_local(tree: Any, mesh: DeviceMesh, placements: Any) -> Any:
    """The tree with this rank's part of each DTensor, laid out by ``placements``.

    The inverse of :func:`local_to_global`, for the same arguments. A part shares its memory with
    the DTensor, and gradients flow back, where the DTensor has these placements; else it is laid
    out anew, for which every rank of the mesh must call this. Leaves that are not
    DTensors stay as they are: they are local already.

    Args:
        mesh: that of the DTensors.
        placements: as for :func:`local_to_global`.

    Raises:
        ValueError: placements do not fit the tree or the mesh; a DTensor is on another mesh.
    """
    own = Tree(tree)
    local = []
    for name, leaf, by in _placed(own, tree, mesh, placements):
        if by is None or not isinstance(leaf, DTensor):
            local.append(leaf)
            continue
        if leaf.device_mesh != mesh:
            raise ValueError(
                f"{name or 'the tree'} is on {leaf.device_mesh}, not on {mesh}: give its own mesh"
            )
        wanted = _normal(name, leaf, by)
        if tuple(leaf.placements) != wanted:
            leaf = leaf.redistribute(placements=wanted)
        local.append(leaf.to_local())
    return own.with_leaves(local)


# --- placements ----------------------------------------------------------------------------------


def _placed(
    own: Tree, tree: Any, mesh: DeviceMesh, placements: Any
) -> list[tuple[str, Any, Placements]]:
    """Names, leaves and placements of leaves."""
    by_leaf: list[Placements] = []
    _resolve("", tree, placements, by_leaf)
    for name, by in zip(own.names, by_leaf, strict=True):
        if by is not None and len(by) != mesh.ndim:
            raise ValueError(
                f"{name or 'the tree'} has {len(by)} placements for a mesh of {mesh.ndim} "
                "dimensions: give one for each"
            )
        for placement in by or ():
            if type(placement) not in (Shard, Replicate, Partial):
                raise ValueError(
                    f"{name or 'the tree'} has placement {placement}: only Shard, Replicate and "
                    "Partial can be given"
                )
    return list(zip(own.names, own.leaves, by_leaf, strict=True))


def _resolve(name: str, node: Any, placements: Any, found: list[Placements]) -> None:
    inside = children(node)
    whole = placements is None or (
        isinstance(placements, list | tuple)
        and bool(placements)
        and all(isinstance(placement, Placement) for placement in placements)
    )
    if whole and inside is None:
        found.append(placements)
        return
    if whole:
        for key, child in inside or ():
            _resolve(f"{name}.{key}" if name else key, child, placements, found)
        return
    given = children(placements)
    if inside is None or given is None:
        raise ValueError(
            f"{name or 'the tree'} has {placements!r} instead of placements: give a list of "
            "Placement, or None"
        )
    by_key = dict(given)
    if by_key.keys() != dict(inside).keys():
        odd = sorted(by_key.keys() ^ dict(inside).keys())
        raise ValueError(
            f"{name or 'the tree'} and its placements do not have the same keys: {', '.join(odd)} "
            "is in only one of them"
        )
    for key, child in inside:
        _resolve(f"{name}.{key}" if name else key, child, by_key[key], found)


def _normal(
    name: str, tensor: torch.Tensor, placements: Sequence[Placement]
) -> tuple[Placement, ...]:
    """With dimensions counted from the front."""
    normal: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard):
            if not -tensor.dim() <= placement.dim < tensor.dim():
                raise ValueError(
                    f"{name or 'the tree'} has {tensor.dim()} dimensions and cannot be sharded "
                    f"by {placement}"
                )
            placement = Shard(placement.dim % tensor.dim())
        normal.append(placement)
    return tuple(normal)


def _check_device(name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    if tensor.device.type != mesh.device_type:
        raise ValueError(
            f"{name or 'the tree'} is on {tensor.device}, and the mesh is one of "
            f"{mesh.device_type}: move it there first"
        )


# --- shapes --------------------------------------------------------------------------------------


def _local(tensor: torch.Tensor, placements: tuple[Placement, ...]) -> _Local:
    return str(tensor.dtype), tuple(tensor.shape), placements, _order(tensor)


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride()[dim], dim)))


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
    return tuple(strides)


def _times(
    shape: Sequence[int], placements: Sequence[Placement], mesh: Sequence[int]
) -> tuple[int, ...]:
    whole = list(shape)
    for placement, size in zip(placements, mesh, strict=True):
        if isinstance(placement, Shard):
            whole[placement.dim] *= size
    return tuple(whole)


def _combine(
    mesh: tuple[int, ...],
) -> Callable[[list[dict[str, _Local]]], dict[str, tuple[Any, ...]] | Disagreement]:
    """Makes of all ranks' shapes, in the order of the mesh, the whole ones."""
    places = [
        tuple(place)
        for place in torch.cartesian_prod(*map(torch.arange, mesh)).view(-1, len(mesh)).tolist()
    ]

    def combine(
        by_rank: list[dict[str, _Local]],
    ) -> dict[str, tuple[Any, ...]] | Disagreement:
        lines = differences(
            [
                {
                    name: f"a tensor of {dtype.removeprefix('torch.')} with {len(shape)} "
                    f"dimensions, placements {list(placements)}"
                    for name, (dtype, shape, placements, _order) in of.items()
                }
                for of in by_rank
            ]
        )
        if lines:
            return Disagreement("the trees differ; all ranks must come with the same leaves", lines)
        found = {}
        for name, (_dtype, _shape, placements, order) in by_rank[0].items():
            shapes = [of[name][1] for of in by_rank]
            whole = _summed(shapes, placements, places)
            found[name] = whole, order
            for rank, (shape, place) in enumerate(zip(shapes, places, strict=True)):
                due = _chunk(whole, placements, mesh, place)
                if shape != due:
                    lines.append(
                        f"{name or 'the tree'}: place {rank} of the mesh holds {shape}; of a "
                        f"tensor of {whole} by {list(placements)} it must hold {due}"
                    )
        if lines:
            text = "shapes are not those that distribute_tensor would give the ranks"
            return Disagreement(text, lines)
        return found

    return combine


def _summed(
    shapes: Sequence[tuple[int, ...]],
    placements: Sequence[Placement],
    places: Sequence[tuple[int, ...]],
) -> tuple[int, ...]:
    whole = list(shapes[0])
    for dim in range(len(whole)):
        by = [isinstance(p, Shard) and p.dim == dim for p in placements]
        if any(by):
            # Along the mesh's dimensions that cut this one, from the first rank on.
            whole[dim] = sum(
                shape[dim]
                for shape, place in zip(shapes, places, strict=True)
                if not any(at for at, cuts in zip(place, by, strict=True) if not cuts)
            )
    return tuple(whole)


def _chunk(
    whole: Sequence[int],
    placements: Sequence[Placement],
    mesh: Sequence[int],
    place: Sequence[int],
) -> tuple[int, ...]:
    """The shape at a place of the mesh, as torch.chunk cuts."""
    shape = list(whole)
    for placement, size, at in zip(placements, mesh, place, strict=True):
        if isinstance(placement, Shard):
            length = shape[placement.dim]
            each = (length + size - 1) // size
            shape[placement.dim] = max(0, min(each, length - at * each))
    return tuple(shape)
