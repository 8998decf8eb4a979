"""What a save in the background reads, as it was at the call.

Containers are copied, so that a state dict may be changed afterwards; tensors are held by aliases,
so that they may be freed or their ``.data`` re-assigned; everything else that could change is
copied. The tensors' contents are not: they are read later, and ``changed`` tells whether they were
still the same then.
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

# (fully qualified name, the tensor that will be read, its version, how to find it again)
_Find = Callable[[], torch.Tensor]


class Watched:
    """Tensors whose contents are read later.

    Attributes:
        devices: the CUDA devices that they lie on.
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
        """Adds one.

        Args:
            name: fully qualified.
            find: gets the tensor from its holder, who may exchange it for another; None: nobody
                can.
        """
        if tensor.is_cuda:
            self.devices.add(tensor.device)
        if find is not None:
            self._finds[len(self._tensors)] = find
        self._names.append(name)
        self._tensors.append(tensor)
        self._versions.append(version_of(tensor))

    def changed(self) -> list[str]:
        """Names of the tensors that were written to since they are watched.

        What torch's version counters see: operations on tensors do count, those on ``.data`` or
        through NumPy do not, nor do all fused optimizers (their ``step`` tensors do).
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
        """Lets go of them."""
        self._names, self._tensors, self._versions, self._finds = [], [], [], {}


class Sources(Watched):
    """The snapshot of a state dict.

    Attributes:
        values: the state dict to save; empty once released.
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        super().__init__()
        self._forgets: list[Callable[[], None]] = []
        self.values: dict[str, Any] = {
            key: _mapped(value, self._taken, str(key)) for key, value in state_dict.items()
        }

    def forget_with(self, forget: Callable[[], None]) -> None:
        """Also calls ``forget`` when the sources are let go of."""
        self._forgets.append(forget)

    def release(self) -> None:
        """Lets go of everything, whoever else has ``values``."""
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
    """A deep copy of a state dict on the CPU.

    CPU tensors go to memory of the engine's pool, which takes it back when the last of them is
    dropped, by several threads at once.
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
    """What ``torch.load`` would make of what ``torch.save`` would write, on the CPU, in memory.

    Objects are pickled and made again, so that all they share stays shared; storages are copied
    once each.

    Raises:
        pickle.PicklingError, TypeError, AttributeError: it holds what cannot be pickled.
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
                held.append(storage)  # or another one could have its address
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
    """The same nest with other tensors and objects in it."""

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
    """The same nest of dicts, lists and tuples with other leaves, visited in a fixed order.

    Not by torch's pytree: named tuples, and what others register there, are leaves here, as they
    are to torch's planners.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return of_leaf(value, name)  # most values are tensors, and to ask an ABC is slow
    if kind is list or kind is tuple:
        return kind(_mapped(item, of_leaf, f"{name}.{i}") for i, item in enumerate(value))
    if kind is dict or isinstance(value, Mapping):
        items = {key: _mapped(item, of_leaf, f"{name}.{key}") for key, item in value.items()}
        return items if kind is dict else _with_items(value, items)
    return of_leaf(value, name)


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A copy with other values."""
    if not isinstance(mapping, dict):
        # A shallow copy may share its memory with the original, which is the caller's.
        return items
    # It keeps what the kind is more than a dict.
    copied = copy.copy(mapping)
    for key, item in items.items():
        copied[key] = item  # not by update(), which adds up what a Counter has
    return copied


def _moved(now: torch.Tensor, then: torch.Tensor) -> bool:
    return now is not then and (
        now.size() != then.size() or now.untyped_storage()._cdata != then.untyped_storage()._cdata
    )


def version_of(tensor: torch.Tensor) -> int:
    """Changes whenever torch writes to the tensor; see :meth:`Watched.changed`."""
    try:
        return tensor._version
    except RuntimeError:
        # Inference tensors have none.
        return -1


def source_changed(names: list[str], advice: str) -> SourceChanged:
    """Says which sources were written to too early, and what to do."""
    shown = ", ".join(names[:10]) + (" and more" if len(names) > 10 else "")
    return SourceChanged(
        f"{shown}: changed before the save had copied it, so nothing is saved. {advice}"
    )
