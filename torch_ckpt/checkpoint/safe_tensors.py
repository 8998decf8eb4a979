"""Rebuilds the tensors in objects, after checking the arguments."""

from __future__ import annotations

import builtins
import math
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from torch_ckpt.checkpoint.safe_values import attributes, make_size, require, untyped_torch
from torch_ckpt.errors import Unsafe


def _require_room(storage: Any, offset: Any, size: Any, stride: Any) -> None:
    """Refuses a tensor that does not fit into its storage: torch would enlarge the storage."""
    numbers = (offset, *size, *stride)
    require(all(type(n) is int and n >= 0 for n in numbers), "a tensor")
    require(len(size) == len(stride) <= 64, "a tensor")
    require(type(storage) is torch.storage.TypedStorage, "a tensor")
    if 0 in size:
        last = offset
    else:
        steps = zip(size, stride, strict=True)
        last = offset + 1 + sum((n - 1) * step for n, step in steps)
    item = untyped_torch._utils._element_size(storage.dtype)
    # An empty tensor may have any offset: torch does not enlarge the storage for it.
    require(0 in size or last * item <= storage._untyped_storage.nbytes(), "a tensor")
    require(math.prod(size) * item < 2**63, "a tensor")


def _require_plain(requires_grad: Any, hooks: Any, metadata: Any = None) -> None:
    # Hooks are Python code that backward would call, so allow only an empty dict, as torch.save
    # stores it. Anything but a dict would crash backward.
    require(type(requires_grad) is bool and (hooks is None or _is_empty_dict(hooks)), "a tensor")
    require(
        metadata is None
        or (
            (type(metadata) is dict and {"conj", "neg"} >= metadata.keys())
            and all(type(flag) is bool for flag in metadata.values())
        ),
        "a tensor",
    )


def _is_empty_dict(value: Any) -> bool:
    return type(value) in (dict, OrderedDict) and not value


def _rebuild_tensor_v2(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, metadata: Any = None
) -> Any:
    _require_room(storage, offset, size, stride)
    _require_plain(grad, hooks, metadata)
    # Pass a new dict for hooks, because the pickle could still add hooks to its own dict.
    return untyped_torch._utils._rebuild_tensor_v2(
        storage, offset, size, stride, grad, OrderedDict(), metadata
    )


def _rebuild_tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Any:
    require(type(dtype) is torch.dtype, "a tensor")
    _require_plain(grad, hooks, metadata)
    typed = untyped_torch.storage.TypedStorage(
        wrap_storage=storage._untyped_storage, dtype=dtype, _internal=True
    )
    _require_room(typed, offset, size, stride)
    return untyped_torch._utils._rebuild_tensor_v3(
        storage, offset, size, stride, grad, OrderedDict(), dtype, metadata
    )


def _rebuild_qtensor(
    storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, grad: Any, hooks: Any
) -> Any:
    _require_room(storage, offset, size, stride)
    _require_plain(grad, hooks)
    # Check the size first: torch allocates the complete tensor before it checks the storage.
    item = untyped_torch._utils._element_size(storage.dtype)
    require(math.prod(size) * item <= storage._untyped_storage.nbytes(), "a quantized tensor")
    return untyped_torch._utils._rebuild_qtensor(
        storage, offset, size, stride, quantizer, grad, OrderedDict()
    )


def _rebuild_parameter(data: Any, grad: Any, hooks: Any) -> Any:
    require(isinstance(data, torch.Tensor), "a parameter")
    _require_plain(grad, hooks)
    return untyped_torch._utils._rebuild_parameter(data, grad, OrderedDict())


def _rebuild_parameter_with_state(data: Any, grad: Any, hooks: Any, state: Any) -> Any:
    require(type(state) is dict, "a parameter")
    made = _rebuild_parameter(data, grad, hooks)
    vars(made).update(attributes(state))
    return made


def rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Rebuilds a plain tensor with attributes."""
    require(function is _rebuild_tensor_v2 and type(arguments) is tuple, "a tensor")
    if kind is not torch.Tensor:
        raise Unsafe(f"constructs {shown(kind)}, which is not an allow-listed type")
    made = _rebuild_tensor_v2(*arguments)
    if state:
        vars(made).update(attributes(state))
    return made


def rebuild_declared(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Rebuilds a tensor of a subclass that the user has declared safe. The subclass may set its own
    state."""
    require(function is _rebuild_tensor_v2 and type(arguments) is tuple, "a tensor")
    return untyped_torch._tensor._rebuild_from_type_v2(function, kind, arguments, state)


def _rebuild_sparse(layout: Any, data: Any) -> Any:
    # Check the invariants: C code would follow indices that are out of range.
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = data
        return torch.sparse_coo_tensor(
            indices,
            values,
            make_size(size),
            check_invariants=True,
            is_coalesced=coalesced[0] if coalesced else None,
        )
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(
        compressed, plain, values, make_size(size), layout=layout, check_invariants=True
    )


def _get_layout(name: Any) -> Any:
    require(type(name) is str, "a layout")
    return untyped_torch.serialization._get_layout(name)


OF_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_qtensor": _rebuild_qtensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter_with_state,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse,
    "torch._tensor._rebuild_from_type_v2": rebuild_from_type,
    "torch.serialization._get_layout": _get_layout,
}


def torch_names() -> dict[str, Any]:
    names: dict[str, Any] = dict(OF_TENSORS)
    names["torch.Size"] = torch.Size
    names["torch.device"] = torch.device
    names["torch.Tensor"] = torch.Tensor
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype | torch.qscheme):
            names[f"torch.{name}"] = value
            names[str(value)] = value
    for kind in torch._storage_classes:
        if kind is torch.storage.UntypedStorage:
            names["torch.storage.UntypedStorage"] = kind
        elif kind is not torch.storage.TypedStorage:
            stands_for = untyped_torch.serialization.StorageType(kind.__name__)
            names[f"{kind.__module__}.{kind.__name__}"] = stands_for
    return names


def shown(value: Any) -> str:
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        module = value.__module__
        return (
            value.__qualname__ if module == builtins.__name__ else f"{module}.{value.__qualname__}"
        )
    return f"a {type(value).__name__}"
