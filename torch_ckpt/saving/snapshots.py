"""Copies of state dicts: snapshots for background saves, and copies in host memory.

A snapshot aliases tensors and copies all other mutable values. The contents of tensors are read
later. A watch (csrc/torch/source_watch.h) detects tensors that were written to in the meantime.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor

from torch_ckpt import _C
from torch_ckpt.checkpoint.objects import unpicklable
from torch_ckpt.errors import SourceChanged
from torch_ckpt.state.splitting import is_container, map_children

#: Types whose instances a snapshot keeps without a copy.
IMMUTABLE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)


def snapshot_of(value: Any, name: str, watch: _C.SourceWatch) -> Any:
    """Returns the value that a snapshot keeps for an object, or for a tensor that is not plain.

    Containers and objects are copied. Tensors are held by aliases and watched; tensors of a
    subclass are cloned.

    Raises:
        CheckpointError: an object cannot be copied.
    """

    def keep(leaf: Any, name: str) -> Any:
        if type(leaf) in (torch.Tensor, torch.nn.Parameter):
            alias = leaf.detach().requires_grad_(leaf.requires_grad)
            watch.add(name, alias)
            return alias
        if isinstance(leaf, IMMUTABLE):
            return leaf
        if isinstance(leaf, DTensor):
            watch.add(name, leaf._local_tensor.detach(), leaf, "_local_tensor")
            return leaf
        if isinstance(leaf, ShardedTensor):
            for shard in leaf.local_shards():
                watch.add(name, shard.tensor.detach(), shard, "tensor")
            return leaf
        if isinstance(leaf, torch.Tensor):
            try:
                copied = leaf.detach().clone()
            except Exception as error:
                raise unpicklable(name, leaf, error) from None
            # The copy is in progress on the device's current stream, so record the device.
            watch.add(name, copied)
            return copied
        try:
            return copy.deepcopy(leaf)
        except Exception as error:
            raise unpicklable(name, leaf, error) from None

    return _map_leaves(value, keep, name)


def copy_of_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a deep copy of a state dict on the CPU.

    Several threads copy CPU tensors into memory of the engine's pool. The memory returns to the
    pool when the last copy is freed.
    """
    originals: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if _is_pooled(tensor):
            originals.append(tensor)
        return tensor

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if _is_pooled(tensor):
            return next(copies)
        copied: torch.Tensor = tensor.detach().to("cpu", copy=True)
        return copied

    _with_tensors(state_dict, collect, lambda value: value)
    copies: Iterator[torch.Tensor] = iter(
        _C.copy_to_pool([tensor.detach() for tensor in originals])
    )
    copied = _with_tensors(state_dict, replace, copy.deepcopy)
    assert isinstance(copied, dict)
    return copied


def copy_by_pickle(value: Any) -> Any:
    """Returns a copy on the CPU, as ``torch.save`` followed by ``torch.load`` would make it, but in
    memory.

    Objects are pickled and unpickled, so that shared parts stay shared; each storage is copied
    once.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: a part cannot be pickled.
    """
    copies: list[torch.UntypedStorage] = []
    numbers: dict[int, int] = {}
    held: list[torch.UntypedStorage] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            if isinstance(obj, torch.storage.TypedStorage):
                storage, dtype = obj._untyped_storage, obj.dtype
            elif isinstance(obj, torch.UntypedStorage):
                storage, dtype = obj, None
            else:
                return None
            if storage._cdata not in numbers:
                numbers[storage._cdata] = len(copies)
                held.append(storage)  # otherwise another storage could reuse its address
                memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
                copied = memory.untyped_storage()
                copied.copy_(storage)
                copies.append(copied)
            return numbers[storage._cdata], dtype

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            number, dtype = pid
            if dtype is None:
                return copies[number]
            return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=copies[number], dtype=dtype, _internal=True
            )

    stream = io.BytesIO()
    Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    stream.seek(0)
    return Unpickler(stream).load()


def _is_pooled(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and (
        tensor.is_cpu and _C.is_plain(tensor.detach()) and _C.is_dense(tensor)
    )


def _with_tensors(
    value: Any,
    of_tensor: Callable[[torch.Tensor], torch.Tensor],
    of_object: Callable[[Any], Any],
) -> Any:
    """Returns a copy of nested containers, with each tensor replaced by ``of_tensor(tensor)`` and
    each other object by ``of_object(object)``."""

    def changed(leaf: Any, _name: str) -> Any:
        if isinstance(leaf, DTensor):
            return DTensor.from_local(
                of_tensor(leaf._local_tensor),
                leaf.device_mesh,
                leaf.placements,
                run_check=False,
                shape=leaf.shape,
                stride=leaf.stride(),
            )
        if isinstance(leaf, ShardedTensor):
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                [Shard(of_tensor(shard.tensor), shard.metadata) for shard in leaf.local_shards()],
                leaf.metadata(),
                process_group=leaf._process_group,
                init_rrefs=False,
                sharding_spec=leaf.sharding_spec(),
            )
        if isinstance(leaf, torch.Tensor):
            return of_tensor(leaf)
        return leaf if isinstance(leaf, IMMUTABLE) else of_object(leaf)

    return _map_leaves(value, changed)


def _map_leaves(value: Any, of_leaf: Callable[[Any, str], Any], name: str = "") -> Any:
    """Returns a copy of nested mappings, lists and tuples, with each leaf replaced by ``of_leaf``.

    The order of the calls is fixed. Does not use torch's pytree, which descends into named tuples
    and registered types: torch's planners treat these as leaves.
    """
    # Check this first: most values are tensors, and the check against an ABC below is slow.
    if isinstance(value, torch.Tensor):
        return of_leaf(value, name)
    if isinstance(value, Mapping) and not isinstance(value, dict):
        # A shallow copy may share memory with the caller's mapping.
        value = dict(value)
    if not is_container(value):
        return of_leaf(value, name)
    return map_children(value, lambda part, key: _map_leaves(part, of_leaf, f"{name}.{key}"))


def source_changed(names: list[str], advice: str) -> SourceChanged:
    """Returns the error for sources that were written to too early."""
    shown = ", ".join(names[:10]) + (" and more" if len(names) > 10 else "")
    return SourceChanged(
        f"{shown}: changed before the save had copied it, so nothing was saved. {advice}"
    )
