"""Copies of state dicts: for snapshots of background saves, and in host memory.

A snapshot holds tensors by aliases and copies all other mutable values. The contents of tensors are
read later, and a watch (csrc/torch/source_watch.h) detects tensors that were written to before.
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

_IMMUTABLE = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)


def snapshot_of(value: Any, name: str, watch: _C.SourceWatch) -> Any:
    """Returns the value that a snapshot keeps of an object, or of a tensor that is not plain.

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
        if isinstance(leaf, _IMMUTABLE):
            return leaf
        if isinstance(leaf, DTensor):
            watch.add(name, leaf._local_tensor.detach(), leaf, "_local_tensor")
            return leaf
        if isinstance(leaf, ShardedTensor):
            for shard in leaf.local_shards():
                watch.add(name, shard.tensor.detach(), shard, "tensor")
            return leaf
        if isinstance(leaf, torch.Tensor):
            copied = leaf.detach().clone()
            # The device copies it on the current stream.
            watch.add(name, copied)
            return copied
        try:
            return copy.deepcopy(leaf)
        except Exception as error:
            raise unpicklable(name, leaf, error) from None

    return _mapped(value, keep, name)


def copy_of_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns a deep copy of a state dict on the CPU.

    CPU tensors are copied by several threads into memory of the engine's pool, which gets it back
    when the last of the copies is freed.
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
                held.append(storage)  # otherwise another storage could get its address
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
    """Returns a copy of nested containers with other tensors and objects in it."""

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
        return leaf if isinstance(leaf, _IMMUTABLE) else of_object(leaf)

    return _mapped(value, changed)


def _mapped(value: Any, of_leaf: Callable[[Any, str], Any], name: str = "") -> Any:
    """Returns a copy of nested dicts, lists and tuples with other leaves, visited in a fixed order.

    Does not use torch's pytree: named tuples, and types that are registered there, are leaves here,
    as they are for torch's planners.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return of_leaf(
            value, name
        )  # first: most values are tensors, and a check against an ABC is slow
    if kind is list or kind is tuple:
        return kind(_mapped(item, of_leaf, f"{name}.{i}") for i, item in enumerate(value))
    if kind is dict or isinstance(value, Mapping):
        items = {key: _mapped(item, of_leaf, f"{name}.{key}") for key, item in value.items()}
        return items if kind is dict else _with_items(value, items)
    return of_leaf(value, name)


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Returns a copy of a mapping with other values."""
    if not isinstance(mapping, dict):
        # A shallow copy may share its memory with the caller's mapping.
        return items
    # A copy keeps what distinguishes the type from a dict.
    copied = copy.copy(mapping)
    for key, item in items.items():
        copied[key] = item  # not update(), which adds to the counts of a Counter
    return copied


def source_changed(names: list[str], advice: str) -> SourceChanged:
    """Builds the error for sources that were written to too early."""
    shown = ", ".join(names[:10]) + (" and more" if len(names) > 10 else "")
    return SourceChanged(
        f"{shown}: changed before the save had copied it, so nothing was saved. {advice}"
    )
