"""The types that an object in a checkpoint may contain, and the functions that construct them.

A pickle never calls a type directly, because even a simple call such as ``bytes(2**40)`` can
allocate 1 TiB. It calls one of the functions in this module instead. They allocate at most the size
of their arguments, which :func:`copied_by` limits; their recursion depth is limited; and they never
call a function that is passed to them.

``numpy`` is imported only if a pickle names it.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import datetime
import io
import math
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch

from torch_ckpt.checkpoint.safe_values import (
    EMPTY,
    FACTORIES,
    MAKERS,
    attributes,
    encode,
    make_path,
    make_size,
    require,
    untyped_torch,
)
from torch_ckpt.errors import Unsafe

# --- tensors -------------------------------------------------------------------------------------


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


# --- other types ---------------------------------------------------------------------------------


class NotInstalled(Exception):
    """The object needs a package that is not installed."""


@lru_cache(maxsize=1)
def _known_names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for kind in (*FACTORIES, slice, range, bytearray):
        if kind.__module__ == "builtins":
            names[f"builtins.{kind.__name__}"] = kind
    for each in ("OrderedDict", "defaultdict", "Counter", "deque"):
        names[f"collections.{each}"] = getattr(collections, each)
    names["argparse.Namespace"] = argparse.Namespace
    names["types.SimpleNamespace"] = types.SimpleNamespace
    names["_io.BytesIO"] = names["io.BytesIO"] = io.BytesIO
    for each in ("datetime", "date", "time", "timedelta", "timezone"):
        names[f"datetime.{each}"] = getattr(datetime, each)
    # Python 3.13 names the module pathlib._local; all other versions name it pathlib.
    for module in ("pathlib", "pathlib._local"):
        for each in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            names[f"{module}.{each}"] = getattr(pathlib, each)
    names["_codecs.encode"] = encode
    names |= torch_names()
    return names


_FUNCTIONS = frozenset({encode, *OF_TENSORS.values()})


# --- numpy, which may not be installed -----------------------------------------------------------


@lru_cache(maxsize=1)
def _numpy_names() -> dict[str, Any]:
    try:
        import numpy
    except ImportError as error:
        raise NotInstalled("numpy") from error

    def make_dtype(kind: Any, align: Any = False, copy: Any = True) -> Any:
        # Make a copy, because the pickle sets the state of the dtype next, and numpy shares dtypes.
        # Dtypes with fields or Python objects are refused.
        require(type(kind) is str and kind[:1] in "biufcSUV?" and kind[1:].isdecimal(), "a dtype")
        return numpy.dtype(kind, copy=True)

    def make_array(kind: Any, shape: Any, code: Any) -> Any:
        require(kind is numpy.ndarray and shape == (0,), "an array")
        return numpy.ndarray((0,), "b")

    def make_scalar(dtype: Any, content: Any) -> Any:
        require(isinstance(dtype, numpy.dtype) and type(content) is bytes, "a number")
        require(len(content) == dtype.itemsize and not dtype.hasobject, "a number")
        # An empty string has no bytes, and frombuffer() finds no item in an empty buffer.
        return numpy.frombuffer(content, dtype)[0] if content else numpy.zeros((), dtype)[()]

    names: dict[str, Any] = {"numpy.dtype": make_dtype, "numpy.ndarray": numpy.ndarray}
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        names[f"{module}._reconstruct"] = make_array
        names[f"{module}.scalar"] = make_scalar
    return names


def _is_numpys(made: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(made) is numpy.ndarray or isinstance(made, numpy.dtype))


def _set_numpys_state(target: Any, state: Any) -> None:
    numpy = sys.modules["numpy"]
    require(type(state) is tuple, "an array")
    if isinstance(target, numpy.dtype):
        require(len(state) == 8 and state[0] == 3 and state[1] in ("<", ">", "|", "="), "a dtype")
        require(state[2:5] == (None, None, None) and state[7] in (0, 8), "a dtype")
        size = target.itemsize if target.kind in "SUV" else -1
        require(state[5] == size and state[6] in (-1, 1, 4), "a dtype")
        target.__setstate__((*state[:7], 8 if target.kind == "U" else 0))
        return
    require(len(state) == 5 and state[0] == 1 and type(state[4]) is bytes, "an array")
    shape, dtype = state[1], state[2]
    require(type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape), "an array")
    require(isinstance(dtype, numpy.dtype) and not dtype.hasobject, "an array")
    require(len(state[4]) == math.prod(shape) * dtype.itemsize, "an array")
    target.__setstate__(state)


# --- used by the interpreter ---------------------------------------------------------------------


def copied_by(arguments: tuple[Any, ...]) -> int:
    """Returns an upper bound on the bytes that a function or a state copies from its arguments.

    Counts the arguments and, if an argument is a tuple, its items. Nothing deeper is accessed.
    """
    count = 0
    for argument in arguments:
        count += _extent(argument)
        if type(argument) is tuple:
            count += sum(map(_extent, argument))
    return count


def _extent(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if type(value) in _OF_VALUES:
        return _REFERENCE_BYTES * len(value)
    return len(value) if type(value) in (str, bytes, bytearray) else 1


_OF_VALUES = frozenset({tuple, list, dict, set, frozenset, OrderedDict})
_REFERENCE_BYTES = 8


def maker_of(function: Any) -> Callable[..., Any] | None:
    if isinstance(function, type):
        if issubclass(function, pathlib.PurePath):
            return make_path(function)
        return MAKERS.get(function)
    if isinstance(function, types.FunctionType) and (
        function in _FUNCTIONS or (_is_numpys_maker(function))
    ):
        return function
    return None


def named(full: str) -> Any:
    """Returns the type or function for ``module.name`` in a pickle; None if it is not listed."""
    known = _known_names().get(full)
    if known is None and full.startswith("numpy."):
        known = _numpy_names().get(full)
    return known


def has_state(made: Any) -> bool:
    """Returns True if a pickle may set the state of this object."""
    return type(made) in EMPTY or _is_numpys(made)


def _is_numpys_maker(function: Any) -> bool:
    return "numpy" in sys.modules and function in _numpy_names().values()


def set_state(target: Any, state: Any) -> None:
    if _is_numpys(target):
        _set_numpys_state(target, state)
    elif type(target) is io.BytesIO:
        require(type(state) is tuple and len(state) == 3 and state[2] is None, "a BytesIO")
        require(type(state[0]) is bytes and type(state[1]) is int, "a BytesIO")
        # A position past the end is refused: the next write would fill the gap.
        require(0 <= state[1] <= len(state[0]), "a BytesIO")
        cast(Any, target).__setstate__(state)
    else:
        vars(target).update(attributes(state))
