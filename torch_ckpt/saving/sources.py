"""The snapshot that a background save reads.

Containers are copied, so that the state dict may change after the call. Tensors are held by
aliases, so that they may be freed or their ``.data`` reassigned. All other mutable values are
copied. The contents of tensors are read later, and ``changed`` detects tensors that were written to
before.
"""

from __future__ import annotations

import copy
import functools
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

# Finds the current tensor again in its holder.
_Find = Callable[[], torch.Tensor]


class Watched:
    """Tensors whose contents are read later.

    Attributes:
        devices: the CUDA devices of the tensors.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._finds: dict[int, _Find] = {}  # by the number of the tensor
        self.devices: set[torch.device] = set()

    def watch(
        self, name: str, tensor: torch.Tensor, find: Callable[[], torch.Tensor] | None = None
    ) -> None:
        """Adds a tensor.

        Args:
            name: fully qualified name.
            find: returns the tensor from its holder, which may replace it by another one; None if
                it cannot be replaced.
        """
        if tensor.is_cuda:
            self.devices.add(tensor.device)
        if find is not None:
            self._finds[len(self._tensors)] = find
        self._names.append(name)
        self._tensors.append(tensor)
        self._versions.append(version_of(tensor))

    def changed(self) -> list[str]:
        """Returns the names of the tensors that were written to since they were added.

        Detects what torch's version counters see: operations on the tensors. Writes through
        ``.data`` or NumPy are not seen, nor are those of all fused optimizers (except to their
        ``step`` tensors).
        """
        changed: set[int] = set()
        versions = _C.versions_of(self._tensors)
        if versions != self._versions:
            both = zip(versions, self._versions, strict=True)
            changed.update(number for number, (now, then) in enumerate(both) if now != then)
        changed.update(n for n, find in self._finds.items() if _moved(find(), self._tensors[n]))
        # Several shards may have one name.
        return list(dict.fromkeys(self._names[number] for number in sorted(changed)))

    def release(self) -> None:
        """Releases the tensors."""
        self._names, self._tensors, self._versions, self._finds = [], [], [], {}


class Sources(Watched):
    """The snapshot of a state dict.

    Attributes:
        values: the state dict to save; empty after :meth:`release`.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        super().__init__()
        self._forgets: list[Callable[[], None]] = []
        self.values: dict[str, Any] = {
            key: _mapped(value, self._taken, str(key)) for key, value in state_dict.items()
        }

    def forget_with(self, forget: Callable[[], None]) -> None:
        """Also calls ``forget`` when the sources are released."""
        self._forgets.append(forget)

    def release(self) -> None:
        """Releases all values, even if other code still refers to ``values``."""
        super().release()
        self.values.clear()
        while self._forgets:
            self._forgets.pop()()

    # --- private ---------------------------------------------------------------------------------

    def _taken(self, value: Any, name: str) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            alias = value.detach()
            if value.requires_grad:
                alias.requires_grad_(True)
            self.watch(name, alias)
            return alias
        if isinstance(value, _IMMUTABLE):
            return value
        if isinstance(value, DTensor):
            self.watch(name, value._local_tensor.detach(), lambda: value._local_tensor)
            return value
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                self.watch(name, shard.tensor.detach(), functools.partial(getattr, shard, "tensor"))
            return value
        if isinstance(value, torch.Tensor):
            copied = value.detach().clone()
            if copied.is_cuda:
                self.devices.add(copied.device)
            return copied
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise unpicklable(name, value, error) from None


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


def _moved(now: torch.Tensor, then: torch.Tensor) -> bool:
    return now is not then and (
        now.size() != then.size() or now.untyped_storage()._cdata != then.untyped_storage()._cdata
    )


def version_of(tensor: torch.Tensor) -> int:
    """Returns a number that changes whenever torch writes to the tensor; see
    :meth:`Watched.changed`."""
    try:
        return tensor._version
    except RuntimeError:
        # Inference tensors have no version.
        return -1


def source_changed(names: list[str], advice: str) -> SourceChanged:
    """Builds the error for sources that were written to too early."""
    shown = ", ".join(names[:10]) + (" and more" if len(names) > 10 else "")
    return SourceChanged(
        f"{shown}: changed before the save had copied it, so nothing was saved. {advice}"
    )
