"""Trees from one rank to all, and from all to all.

What the leaves are is agreed upon in the store, where objects go as well, as pickles. Then every
rank makes room for what it will get, and tells whether it could, so that none waits in a collective
for one that could not. Only then tensors and numpy's arrays go, as bytes, by collectives of the
process group, at most ``BATCH_BYTES`` at a time beside the trees. Their timeout is the group's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from torch_ckpt._base.formatting import ranks_text
from torch_ckpt._base.trees import (
    Tree,
    array_bytes,
    as_bytes,
    differences,
    digest,
    empty,
    is_array,
    is_strided,
    kind,
)
from torch_ckpt.loading.shared_reads import _batches, _current_index, _device_of
from torch_ckpt.ranks.calls import Call, Disagreement
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS
from torch_ckpt.ranks.outcomes import first_line

#: Bytes that are sent at once.
BATCH_BYTES = 64 << 20

_STRUCTURE = "the trees differ; all ranks must come with the same containers and kinds of leaves"


def broadcast_one_to_all(
    tree: Any,
    is_source: bool | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """One rank's tree, on all ranks. Every rank of the group calls it.

    What is returned shares no memory with ``tree``, on the source either. Tensors are contiguous,
    require gradients where the source's do, and lie where the leaf does that they replace.

    Args:
        tree: the other ranks' tensors and arrays must have the dtypes and shapes of the source's;
            their values are not looked at. Or None on a rank that has nothing like it: its tensors
            then lie on the same kind of device as the source's, or on the CPU. Of DTensors only
            replicated ones can be sent. Other leaves are pickled.
        is_source: true on exactly one rank; None on all ranks for the first rank of the group.
        process_group: None for the default group.
        timeout: seconds; a rank that has not come by then is given up. Once all have come, tensors
            are sent under the process group's own timeout.

    Raises:
        RanksDisagree: trees differ; none or several are the source; ranks made different calls.
        TimeoutError: ranks did not come; they are named.
        ConnectionError: the store or the process group is lost.
        ValueError: a DTensor is sharded, or this process is not in the group.
    """
    with Call("broadcast_one_to_all()", process_group, timeout) as call:
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
                _packed(own, process_group if call.distributed else None, call) if sends else None,
            )

        def choose(offers: list[Any]) -> Any:
            sources = [rank for rank, offered in enumerate(offers) if offered[0]]
            if len(sources) != 1:
                who = f"it is on {ranks_text(sources)}" if sources else "it is on none"
                return Disagreement(f"is_source must be true on exactly one rank, and {who}")
            [source] = sources
            wanted = {offered[1] for offered in offers} - {None}
            return source, offers[source][2] if len(wanted) == 1 else None

        source, packed = call.exchange(offer, choose)
        if packed is None:
            _raise_differences(call, lambda: None if tree is None and not sends else describe())
        skeleton, objects, sent = pickle.loads(packed)
        indices, spec = pytree.tree_flatten(skeleton)
        like = dict(zip(own.names, own.leaves, strict=True))
        made: dict[int, Any] = dict(objects)
        moved: list[tuple[torch.Tensor, str]] = []

        def make_room() -> None:
            for index, (name, what) in sent.items():
                made[index], data = what.room(like.get(name))
                if sends:
                    data.copy_(_bytes_of(like[name]))
                moved.append((data, what.wire))

        if sent:
            call.all_succeed(make_room)
        if call.distributed:
            for wire in sorted({wire for _data, wire in moved}):
                parts = [data for data, by in moved if by == wire]
                for batch in _batches(parts, BATCH_BYTES):
                    _broadcast(batch, wire, source, call, process_group)
        return pytree.tree_unflatten([made[index] for index in indices], spec)


def process_allgather(
    tree: Any,
    tiled: bool = False,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = TIMEOUT_SECONDS,
) -> Any:
    """The trees of all ranks as one, on all ranks. Every rank of the group calls it.

    What is returned shares no memory with ``tree`` and requires no gradients. Tensors lie where
    the rank's own leaf does. Of every leaf it has, by its kind:

    - tensors and numpy's arrays and numbers: the ranks' stacked along a new first dimension;
    - DTensors: the whole tensor, gathered over its own mesh; ``tiled`` makes no difference;
    - anything else: a list of what the ranks have, by rank. It is pickled.

    Args:
        tree: containers, dtypes and shapes must be the same on all ranks.
        tiled: concatenates along the first dimension instead; ranks' sizes there may differ, and
            what has no dimension counts as having one of size 1.
        process_group: None for the default group.
        timeout: seconds; a rank that has not come by then is given up. Once all have come, tensors
            are sent under the process group's own timeout.

    Raises:
        RanksDisagree: trees differ, or ranks made different calls.
        TimeoutError: ranks did not come; they are named.
        ConnectionError: the store or the process group is lost.
        ValueError: this process is not in a DTensor's mesh, or not in the group.
    """
    with Call(f"process_allgather(tiled={tiled})", process_group, timeout) as call:
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
            rows = [_rows(leaf) for leaf in leaves if _is_bytes(leaf)]
            wires = [_wire(leaf, process_group, call) for leaf in leaves if _is_bytes(leaf)]
            objects = [leaf for leaf in leaves if not _is_bytes(leaf) and not _is_global(leaf)]
            return digest(describe()), rows, wires, pickle.dumps(objects)

        def merge(offers: list[Any]) -> Any:
            if len({offered[0] for offered in offers}) > 1:
                return None
            # One kind of device for each leaf, whatever the others have it on.
            return [offered[1] for offered in offers], offers[0][2], [o[3] for o in offers]

        merged = call.exchange(offer, merge)
        if merged is None:
            _raise_differences(call, describe)
        rows, wires, pickles = merged
        objects = iter(zip(*map(pickle.loads, pickles), strict=True))
        gathers: list[_Gather] = []

        def make_room() -> None:
            for leaf in filter(_is_bytes, leaves):
                number = len(gathers)
                gathers.append(_Gather(leaf, [of[number] for of in rows], tiled, wires[number]))

        if wires:
            call.all_succeed(make_room)
        for wire in sorted(set(wires)):
            _gather_all([g for g in gathers if g.wire == wire], wire, call, process_group)
        results = iter(gathers)
        return own.with_leaves(
            _whole(leaf)
            if _is_global(leaf)
            else next(results).result
            if _is_bytes(leaf)
            else list(next(objects))
            for leaf in leaves
        )


# --- what is sent --------------------------------------------------------------------------------


class _Sent:
    """What a leaf is that is sent as bytes; pickled with the structure.

    Attributes:
        wire: the kind of device that it is sent from and to.
    """

    def __init__(self, leaf: Any, wire: str) -> None:
        self.wire = wire
        self._dtype = leaf.dtype
        local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        self._shape = tuple(local.shape)
        self._is_array = is_array(leaf)
        self._device = "cpu" if self._is_array else local.device.type
        self._requires_grad = not self._is_array and leaf.requires_grad

    def room(self, like: Any) -> tuple[Any, torch.Tensor]:
        """What is returned for the leaf, and its bytes; where ``like`` lies, unless it is None."""
        if self._is_array:
            import numpy

            array = numpy.empty(self._shape, self._dtype)
            return array, array_bytes(array)
        local = like.to_local() if isinstance(like, DTensor) else like
        device = _device(self._device) if local is None else local.device
        tensor = empty(self._shape, self._dtype, device)
        data = as_bytes(tensor)
        if isinstance(like, DTensor):
            tensor = DTensor.from_local(tensor, like.device_mesh, like.placements, run_check=False)
        return tensor.requires_grad_(self._requires_grad), data


class _Gather:
    """What becomes of a leaf whose bytes all ranks send.

    Attributes:
        wire: the kind of device that it is sent from and to.
        own: this rank's bytes.
        lengths: in bytes, of each rank's.
        result: what is returned.
    """

    def __init__(self, leaf: Any, rows: list[int], tiled: bool, wire: str) -> None:
        self.wire = wire
        self.own = _bytes_of(leaf)
        shape = (sum(rows), *leaf.shape[1:]) if tiled else (len(rows), *leaf.shape)
        row_bytes = torch.Size(shape[1:]).numel() * leaf.dtype.itemsize
        self.lengths = [row_bytes * count for count in (rows if tiled else [1] * len(rows))]
        self.result: Any
        if is_array(leaf):
            import numpy

            self.result = numpy.empty(shape, leaf.dtype)
            data = array_bytes(self.result)
        else:
            self.result = empty(shape, leaf.dtype, leaf.device)
            data = as_bytes(self.result)
        self.parts = torch.split(data, self.lengths)


def _packed(own: Tree, group: dist.ProcessGroup | None, call: Call) -> bytes:
    """The source's containers, its objects, and what its other leaves are; by number of leaf."""
    objects: dict[int, Any] = {}
    sent: dict[int, tuple[str, _Sent]] = {}
    for index, (name, leaf) in enumerate(zip(own.names, own.leaves, strict=True)):
        if _is_bytes(leaf) or _is_global(leaf):
            sent[index] = name, _Sent(leaf, _wire(leaf, group, call))
        else:
            objects[index] = leaf
    return pickle.dumps((own.with_leaves(range(len(own.leaves))), objects, sent))


def _refuse_sharded(name: str, leaf: Any) -> None:
    if isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements):
        raise ValueError(
            f"{name or 'the tree'} is a DTensor of which no rank has the whole: send its local "
            "tensors (global_to_local), or gather it (process_allgather)"
        )


def _raise_differences(call: Call, describe: Callable[[], dict[str, str] | None]) -> None:
    def compare(described: list[dict[str, str] | None]) -> Disagreement:
        whole = next(d for d in described if d is not None)
        return Disagreement(_STRUCTURE, differences([d or whole for d in described]))

    call.exchange(describe, compare)


def _is_bytes(leaf: Any) -> bool:
    return is_strided(leaf) or is_array(leaf)


def _is_global(leaf: Any) -> bool:
    return isinstance(leaf, DTensor)


def _bytes_of(leaf: Any) -> torch.Tensor:
    if is_array(leaf):
        return array_bytes(leaf)
    return as_bytes(leaf.to_local() if isinstance(leaf, DTensor) else leaf)


def _as_array(leaf: Any) -> Any:
    """A number of numpy's as an array without dimensions."""
    if type(leaf).__module__ != "numpy":
        return leaf
    import numpy

    return numpy.asarray(leaf) if isinstance(leaf, numpy.generic) else leaf


def _rows(leaf: Any) -> int:
    return int(leaf.shape[0]) if leaf.ndim else 1


def _kind_tiled(leaf: Any) -> str:
    """As ``kind``, whatever the size of the first dimension."""
    if not _is_bytes(leaf) or not leaf.ndim:
        return kind(leaf)
    return (
        f"{kind(leaf).split(', shape')[0]}, shape (any{''.join(f', {n}' for n in leaf.shape[1:])})"
    )


def _whole(tensor: DTensor) -> torch.Tensor:
    """All of a DTensor, bit for bit. Gloo knows few dtypes, so that it goes as bytes."""
    if any(placement.is_partial() for placement in tensor.placements):
        return tensor.full_tensor().detach().clone()
    local, item = tensor.to_local().detach(), tensor.dtype.itemsize
    # A dimension of bytes behind all others keeps the shards' bounds.
    data = as_bytes(local).view(*local.shape, item)
    shape = torch.Size((*tensor.shape, item))
    strides = torch.empty(shape, device="meta").stride()
    as_dtensor = DTensor.from_local(
        data, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=strides
    )
    whole = as_dtensor.full_tensor()
    own = whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    return (whole.clone() if own else whole.contiguous()).view(tensor.dtype).squeeze(-1)


# --- sending -------------------------------------------------------------------------------------


def _wire(leaf: Any, group: dist.ProcessGroup | None, call: Call) -> str:
    device = torch.device("cpu") if is_array(leaf) else leaf.device
    return _device_of(group, device).type if call.distributed else "cpu"


def _device(kind: str) -> torch.device:
    """The device of a kind that this process uses; the CPU where it has none."""
    if kind == "cpu" or (kind == "cuda" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device(kind, _current_index(kind))


def _broadcast(
    batch: Sequence[torch.Tensor],
    wire: str,
    source: int,
    call: Call,
    group: dist.ProcessGroup | None,
) -> None:
    device = _device(wire)
    alone = len(batch) == 1 and batch[0].device == device
    size = sum(part.numel() for part in batch)
    buffer = batch[0] if alone else torch.empty(size, dtype=torch.uint8, device=device)
    if call.rank == source and not alone:
        torch.cat([part.to(device) for part in batch], out=buffer)
    origin = dist.get_global_rank(group, source) if group is not None else source
    _collective(call, dist.broadcast, buffer, src=origin, group=group)
    if call.rank != source and not alone:
        for part, received in zip(
            batch, torch.split(buffer, [p.numel() for p in batch]), strict=True
        ):
            part.copy_(received)


def _gather_all(
    gathers: list[_Gather], wire: str, call: Call, group: dist.ProcessGroup | None
) -> None:
    if not call.distributed:
        for gather in gathers:
            gather.parts[0].copy_(gather.own)
        return
    most = max(1 << 16, BATCH_BYTES // call.size)
    # Kept from batch to batch: fresh memory costs more than what is copied into it.
    kept = min(most, sum(max(gather.lengths) for gather in gathers))
    room = torch.empty(kept * (1 + call.size), dtype=torch.uint8, device=_device(wire))
    batch: list[tuple[_Gather, int, int]] = []
    held = 0
    for gather in gathers:
        # Ranks send as much as the longest of them has, for all must send the same amount.
        longest = max(gather.lengths)
        begin = 0
        while begin < longest:
            end = min(longest, begin + most - held)
            batch.append((gather, begin, end))
            held += end - begin
            begin = end
            if held == most:
                _gather_batch(batch, held, room, call, group)
                batch, held = [], 0
    if batch:
        _gather_batch(batch, held, room, call, group)


def _gather_batch(
    batch: list[tuple[_Gather, int, int]],
    size: int,
    room: torch.Tensor,
    call: Call,
    group: dist.ProcessGroup | None,
) -> None:
    mine, everybodys = torch.split(room[: size * (1 + call.size)], [size, size * call.size])
    at = 0
    for gather, begin, end in batch:
        part = gather.own[begin:end]
        mine[at : at + part.numel()].copy_(part)
        at += end - begin
    _collective(call, dist.all_gather_into_tensor, everybodys, mine, group=group)
    for rank, received in enumerate(torch.split(everybodys, size)):
        at = 0
        for gather, begin, end in batch:
            part = gather.parts[rank][begin:end]
            part.copy_(received[at : at + part.numel()])
            at += end - begin


def _collective(call: Call, collective: Callable[..., Any], *args: Any, **options: Any) -> None:
    try:
        collective(*args, **options)
    except RuntimeError as cause:
        raise ConnectionError(
            f"{call.name}: rank {call.rank} lost the process group while tensors were sent "
            f"({first_line(cause)}): look for a rank that has died or hangs"
        ) from cause
