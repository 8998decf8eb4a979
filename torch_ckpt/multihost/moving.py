"""Broadcasts a tree from one rank to all ranks, and gathers the trees of all ranks.

1. Ranks agree on the types of leaves through the store, which also carries objects as pickles.
2. Every rank allocates the tensors that it will receive, and reports success or failure. Otherwise,
   ranks would wait in a collective for a rank that has failed.
3. Tensors and NumPy arrays are sent as bytes by collectives of the process group, with the group's
   timeout. In addition to the trees, this needs memory for one batch of ``BATCH_BYTES``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import first_line, ranks_text
from torch_ckpt.checkpoint.reading import in_waves
from torch_ckpt.checkpoint.tensor_bytes import as_bytes, empty_tensor
from torch_ckpt.loading.shared_reads import _batches, _current_index, _device_of
from torch_ckpt.multihost.trees import (
    Tree,
    array_bytes,
    differences,
    digest,
    is_array,
    is_strided,
    kind,
)
from torch_ckpt.ranks.collective_call import CollectiveCall, Disagreement
from torch_ckpt.ranks.group import TIMEOUT_SECONDS

#: Maximum number of bytes that a collective sends.
BATCH_BYTES = 64 << 20

_TREES_DIFFER = "the trees differ; all ranks must pass the same containers and leaf types:"


def broadcast_one_to_all(
    tree: Any,
    is_source: bool | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """Broadcasts one rank's tree: returns the same tree on all ranks.

    Every rank of the group must call this function. The result shares no memory with ``tree``, not
    even on the source rank. The tensors in the result are contiguous, and require gradients if the
    source rank's tensors do. Each tensor is on the device of the leaf that it replaces.

    Args:
        tree: on the source rank, the tree to send; on other ranks, a tree whose tensors and arrays
            have the same dtypes and shapes, with any values. A rank without such a tree can pass
            None. In that case, the rank receives tensors on the same type of device as on the
            source rank, or on the CPU if the rank has no device of that type. DTensors must be
            replicated. Leaves that are not tensors or arrays are pickled.
        is_source: True on exactly one rank, or None on all ranks to select the first rank of the
            group.
        process_group: the ranks that take part; None means the default group.
        timeout: seconds to wait for ranks that have not arrived. Sending tensors is subject to the
            process group's own timeout.

    Raises:
        RanksDisagree: the trees differ, there is not exactly one source, or ranks made different
            calls.
        TimeoutError: a rank did not arrive; the message names the rank.
        ConnectionError: the connection to the store or the process group is lost.
        ValueError: a DTensor is sharded, or this process is not in the group.

    Example::

        config = multihost.broadcast_one_to_all(config if dist.get_rank() == 0 else None)
    """
    with CollectiveCall("broadcast_one_to_all()", process_group, timeout) as call:
        sends = call.rank == 0 if is_source is None else is_source
        own = Tree(tree)

        def describe() -> dict[str, str]:
            for name, leaf in zip(own.names, own.leaves, strict=True):
                _refuse_sharded(name, leaf)
            return own.described(map(kind, own.leaves))

        def offer() -> tuple[bool, bytes | None, bytes | None]:
            described = describe()
            placeholder = tree is None and not sends
            return (
                sends,
                None if placeholder else digest(described),
                _pack(own, process_group if call.distributed else None, call) if sends else None,
            )

        def choose(offers: list[Any]) -> Any:
            sources = [rank for rank, offered in enumerate(offers) if offered[0]]
            if len(sources) != 1:
                found = ranks_text(sources) if sources else "no rank"
                return Disagreement(
                    f"is_source must be True on exactly one rank, but it is True on {found}"
                )
            [source] = sources
            digests = {offered[1] for offered in offers} - {None}
            return source, offers[source][2] if len(digests) == 1 else None

        source, packed = call.agree(offer, choose)
        if packed is None:
            _raise_differences(call, lambda: None if tree is None and not sends else describe())
        skeleton, objects, sent = pickle.loads(packed)
        indices, spec = pytree.tree_flatten(skeleton)
        like = dict(zip(own.names, own.leaves, strict=True))
        results: dict[int, Any] = dict(objects)
        buffers: list[tuple[torch.Tensor, str]] = []

        def allocate() -> None:
            for index, (name, leaf) in sent.items():
                results[index], data = leaf.allocate(like.get(name))
                if sends:
                    data.copy_(_view_bytes(like[name]))
                buffers.append((data, leaf.wire))

        if sent:
            call.run_on_all(allocate)
        if call.distributed:
            for wire in sorted({wire for _data, wire in buffers}):
                parts = [data for data, by in buffers if by == wire]
                for batch in _batches(parts, BATCH_BYTES):
                    _broadcast(batch, wire, source, call, process_group)
        return pytree.tree_unflatten([results[index] for index in indices], spec)


def process_allgather(
    tree: Any,
    tiled: bool = False,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """Combines the trees of all ranks into one tree, and returns it on all ranks.

    Every rank of the group must call this function. The result shares no memory with ``tree`` and
    does not require gradients. Each tensor in the result is on the device of the corresponding leaf
    on this rank. How a leaf is combined depends on its type:

    - tensors, NumPy arrays and NumPy numbers are stacked along a new first dimension;
    - DTensors become full tensors, gathered over their own meshes, regardless of ``tiled``;
    - other leaves are pickled and become a list of the leaves of all ranks.

    Args:
        tree: a tree with the same containers, dtypes and shapes on all ranks.
        tiled: concatenate along the first dimension instead of stacking. The size of the first
            dimension can differ between ranks. Zero-dimensional leaves are treated as having one
            element.
        process_group: the ranks that take part; None means the default group.
        timeout: seconds to wait for ranks that have not arrived. Sending tensors is subject to the
            process group's own timeout.

    Raises:
        RanksDisagree: the trees differ, or ranks made different calls.
        TimeoutError: a rank did not arrive; the message names the rank.
        ConnectionError: the connection to the store or the process group is lost.
        ValueError: this process is not in the mesh of a DTensor, or not in the group.

    Example::

        losses = multihost.process_allgather(loss)  # shape (ranks,)
    """
    with CollectiveCall(f"process_allgather(tiled={tiled})", process_group, timeout) as call:
        own = Tree(tree)
        leaves = [_as_array(leaf) for leaf in own.leaves]

        def describe() -> dict[str, str]:
            for name, leaf in zip(own.names, leaves, strict=True):
                if isinstance(leaf, DTensor) and leaf.device_mesh.get_coordinate() is None:
                    raise ValueError(
                        f"{name or 'the tree'}: this rank is not in the DTensor's mesh"
                    )
            return own.described(_kind_tiled(leaf) if tiled else kind(leaf) for leaf in leaves)

        def offer() -> tuple[bytes, list[int], list[str], bytes]:
            rows = [_row_count(leaf) for leaf in leaves if _is_bytes(leaf)]
            wires = [_wire(leaf, process_group, call) for leaf in leaves if _is_bytes(leaf)]
            objects = [leaf for leaf in leaves if not _is_bytes(leaf) and not _is_global(leaf)]
            return digest(describe()), rows, wires, pickle.dumps(objects)

        def merge(offers: list[Any]) -> Any:
            if len({offered[0] for offered in offers}) > 1:
                return None
            # All ranks must send a leaf from the same type of device. Use the type on rank 0.
            return [offered[1] for offered in offers], offers[0][2], [o[3] for o in offers]

        merged = call.agree(offer, merge)
        if merged is None:
            _raise_differences(call, describe)
        rows, wires, pickles = merged
        objects = iter(zip(*map(pickle.loads, pickles), strict=True))
        gathers: list[_Gather] = []

        def allocate() -> None:
            for leaf in filter(_is_bytes, leaves):
                number = len(gathers)
                counts = [of_rank[number] for of_rank in rows]
                gathers.append(_Gather(leaf, counts, tiled, wires[number]))

        if wires:
            call.run_on_all(allocate)
        for wire in sorted(set(wires)):
            _gather_all([g for g in gathers if g.wire == wire], wire, call, process_group)
        results = iter(gathers)
        return own.with_leaves(
            _full_tensor(leaf)
            if _is_global(leaf)
            else next(results).result
            if _is_bytes(leaf)
            else list(next(objects))
            for leaf in leaves
        )


# --- leaves that are sent as bytes ---------------------------------------------------------------


class _SentLeaf:
    """Describes a leaf that is sent as bytes. Pickled together with the tree's structure.

    Attributes:
        wire: the type of device that sends and receives the leaf.
    """

    def __init__(self, leaf: Any, wire: str) -> None:
        self.wire = wire
        self._dtype = leaf.dtype
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        self._shape = tuple(local.shape)
        self._is_array = is_array(leaf)
        self._device = "cpu" if self._is_array else local.device.type
        self._requires_grad = not self._is_array and leaf.requires_grad

    def allocate(self, like: Any) -> tuple[Any, torch.Tensor]:
        """Allocates the leaf's result; returns the result and a view of its bytes.

        The result is on the device of ``like`` or, if that is None, on the source's type of device.
        """
        if self._is_array:
            import numpy

            array = numpy.empty(self._shape, self._dtype)
            return array, array_bytes(array)
        local = like.to_local() if isinstance(like, DTensor) else like
        device = _device(self._device) if local is None else local.device
        tensor = empty_tensor(self._shape, self._dtype, device)
        data = as_bytes(tensor)
        if isinstance(like, DTensor):
            tensor = DTensor.from_local(tensor, like.device_mesh, like.placements, run_check=False)
        return tensor.requires_grad_(self._requires_grad), data


class _Gather:
    """Gathers a leaf whose bytes all ranks send.

    Attributes:
        wire: the type of device that sends and receives the leaf.
        own: this rank's bytes.
        lengths: number of bytes of each rank.
        parts: views of the result for the bytes of each rank.
        result: the gathered tensor or array.
    """

    def __init__(self, leaf: Any, rows: list[int], tiled: bool, wire: str) -> None:
        self.wire = wire
        self.own = _view_bytes(leaf)
        shape = (sum(rows), *leaf.shape[1:]) if tiled else (len(rows), *leaf.shape)
        row_bytes = torch.Size(shape[1:]).numel() * leaf.dtype.itemsize
        self.lengths = [row_bytes * count for count in (rows if tiled else [1] * len(rows))]
        self.result: Any
        if is_array(leaf):
            import numpy

            self.result = numpy.empty(shape, leaf.dtype)
            data = array_bytes(self.result)
        else:
            self.result = empty_tensor(shape, leaf.dtype, leaf.device)
            data = as_bytes(self.result)
        self.parts = torch.split(data, self.lengths)


def _pack(own: Tree, group: dist.ProcessGroup | None, call: CollectiveCall) -> bytes:
    """Pickles the source's containers, its objects, and descriptions of its other leaves."""
    objects: dict[int, Any] = {}
    sent: dict[int, tuple[str, _SentLeaf]] = {}
    for index, (name, leaf) in enumerate(zip(own.names, own.leaves, strict=True)):
        if _is_bytes(leaf) or _is_global(leaf):
            sent[index] = name, _SentLeaf(leaf, _wire(leaf, group, call))
        else:
            objects[index] = leaf
    return pickle.dumps((own.with_leaves(range(len(own.leaves))), objects, sent))


def _refuse_sharded(name: str, leaf: Any) -> None:
    if isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements):
        raise ValueError(
            f"{name or 'the tree'} is a sharded DTensor, which cannot be broadcast. Broadcast its "
            "local tensors (global_to_local), or gather it (process_allgather)"
        )


def _raise_differences(call: CollectiveCall, describe: Callable[[], dict[str, str] | None]) -> None:
    def compare(described: list[dict[str, str] | None]) -> Disagreement:
        # A rank that passed None as a placeholder agrees with every tree.
        first = next(d for d in described if d is not None)
        return Disagreement(_TREES_DIFFER, differences([d or first for d in described]))

    call.agree(describe, compare)


def _is_bytes(leaf: Any) -> bool:
    return is_strided(leaf) or is_array(leaf)


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, DTensor)


def _view_bytes(leaf: Any) -> torch.Tensor:
    if is_array(leaf):
        return array_bytes(leaf)
    return as_bytes(leaf.to_local() if isinstance(leaf, DTensor) else leaf)


def _as_array(leaf: Any) -> Any:
    """Converts a NumPy number to a zero-dimensional array; returns other leaves unchanged."""
    if type(leaf).__module__ != "numpy":
        return leaf
    import numpy

    return numpy.asarray(leaf) if isinstance(leaf, numpy.generic) else leaf


def _row_count(leaf: Any) -> int:
    return int(leaf.shape[0]) if leaf.ndim else 1


def _kind_tiled(leaf: Any) -> str:
    """Returns ``kind`` of a leaf without the size of its first dimension."""
    if not _is_bytes(leaf) or not leaf.ndim:
        return kind(leaf)
    return (
        f"{kind(leaf).split(', shape')[0]}, shape (any{''.join(f', {n}' for n in leaf.shape[1:])})"
    )


def _full_tensor(tensor: DTensor) -> torch.Tensor:
    """Gathers a DTensor bit for bit. Sends it as bytes, since gloo supports few dtypes."""
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.full_tensor().detach().clone()
    local, item = tensor.to_local().detach(), tensor.dtype.itemsize
    # Add the bytes as the last dimension, so that the shard bounds do not change.
    data = as_bytes(local).view(*local.shape, item)
    shape = torch.Size((*tensor.shape, item))
    strides = torch.empty(shape, device="meta").stride()
    as_dtensor = DTensor.from_local(
        data, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=strides
    )
    full = as_dtensor.full_tensor()
    is_shared = full.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return (full.clone() if is_shared else full.contiguous()).view(tensor.dtype).squeeze(-1)


# --- sending -------------------------------------------------------------------------------------


def _wire(leaf: Any, group: dist.ProcessGroup | None, call: CollectiveCall) -> str:
    device = torch.device("cpu") if is_array(leaf) else leaf.device
    return _device_of(group, device).type if call.distributed else "cpu"


def _device(kind: str) -> torch.device:
    """Returns the current device of a type; the CPU if the process has no such device."""
    if kind == "cpu" or (kind == "cuda" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device(kind, _current_index(kind))


def _broadcast(
    batch: Sequence[torch.Tensor],
    wire: str,
    source: int,
    call: CollectiveCall,
    group: dist.ProcessGroup | None,
) -> None:
    device = _device(wire)
    is_in_place = len(batch) == 1 and batch[0].device == device
    size = sum(part.numel() for part in batch)
    buffer = batch[0] if is_in_place else torch.empty(size, dtype=torch.uint8, device=device)
    if call.rank == source and not is_in_place:
        torch.cat([part.to(device) for part in batch], out=buffer)
    origin = dist.get_global_rank(group, source) if group is not None else source
    _run_collective(call, lambda: dist.broadcast(buffer, src=origin, group=group))
    if call.rank != source and not is_in_place:
        for part, received in zip(
            batch, torch.split(buffer, [p.numel() for p in batch]), strict=True
        ):
            part.copy_(received)


def _gather_all(
    gathers: list[_Gather], wire: str, call: CollectiveCall, group: dist.ProcessGroup | None
) -> None:
    if not call.distributed:
        for gather in gathers:
            gather.parts[0].copy_(gather.own)
        return
    limit = max(1 << 16, BATCH_BYTES // call.size)
    # All ranks must send the same number of bytes, so shorter leaves are padded.
    pieces = [
        (gather, begin, min(begin + limit, longest))
        for gather in gathers
        for longest in [max(gather.lengths)]
        for begin in range(0, longest, limit)
    ]
    sizes = [end - begin for _gather, begin, end in pieces]
    # Reused for all batches, since allocating memory costs more than copying into it.
    batch_bytes = min(limit, sum(sizes))
    buffer = torch.empty(batch_bytes * (1 + call.size), dtype=torch.uint8, device=_device(wire))
    for batch in in_waves(zip(pieces, sizes, strict=True), limit):
        _gather_batch(batch, buffer, call, group)


def _gather_batch(
    batch: list[tuple[_Gather, int, int]],
    buffer: torch.Tensor,
    call: CollectiveCall,
    group: dist.ProcessGroup | None,
) -> None:
    size = sum(end - begin for _gather, begin, end in batch)
    own, gathered = torch.split(buffer[: size * (1 + call.size)], [size, size * call.size])
    at = 0
    for gather, begin, end in batch:
        part = gather.own[begin:end]
        own[at : at + part.numel()].copy_(part)
        at += end - begin
    _run_collective(call, lambda: dist.all_gather_into_tensor(gathered, own, group=group))
    for rank, received in enumerate(torch.split(gathered, size)):
        at = 0
        for gather, begin, end in batch:
            part = gather.parts[rank][begin:end]
            part.copy_(received[at : at + part.numel()])
            at += end - begin


def _run_collective(call: CollectiveCall, collective: Callable[[], object]) -> None:
    try:
        collective()
    except RuntimeError as cause:
        raise ConnectionError(
            f"{call.name}: rank {call.rank} lost the process group while sending tensors "
            f"({first_line(cause)}). Check whether another rank has died or is hanging"
        ) from cause
