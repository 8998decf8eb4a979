"""The types that an object of a checkpoint may be made of, and how each is made.

What a pickle calls is one of the functions here, never the type itself: ``bytes(2**40)`` is
harmless in what it does, and not in what it takes. None makes more than what it is given (and
:func:`copied_by` says how much that is), none recurses without a limit, and none takes a callable
to call.

``numpy`` is imported when a pickle names it, not before.
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
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch

from torch_ckpt.errors import Unsafe

# Hashing and comparing recurse in C, without a limit of their own.
_DEEPEST_KEY = 8

# They also go through a shared part as often as it is reached.
_LARGEST_KEY = 1024

# Much of what torch's pickles name has no types.
_torch = cast(Any, torch)

# --- builtin types -------------------------------------------------------------------------------


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Unsafe(f"makes {what} in a way that is not on the list of harmless ones")


def as_key(value: Any) -> Any:
    """A key of a mapping or an element of a set."""
    if type(value) in (tuple, frozenset):
        _parts_of_key(value, 0)
    return value


def _parts_of_key(value: Any, depth: int) -> int:
    """How many values a key holds, each as often as it is reached."""
    if type(value) not in (tuple, frozenset):
        return 1
    if depth == _DEEPEST_KEY:
        raise ValueError(f"it has keys that are nested deeper than {_DEEPEST_KEY}")
    count = len(value)
    for part in value:
        if count > _LARGEST_KEY:
            raise ValueError(f"it has keys of more than {_LARGEST_KEY} values")
        count += _parts_of_key(part, depth + 1)
    return count


def _make_set(items: Any = ()) -> Any:
    _require(type(items) in (list, tuple), "a set")
    return set(map(as_key, items))


def _make_frozenset(items: Any = ()) -> Any:
    return frozenset(_make_set(items))


def _make_complex(real: Any, imaginary: Any) -> Any:
    _require(type(real) is float and type(imaginary) is float, "a complex number")
    return complex(real, imaginary)


def _make_slice(*ends: Any) -> Any:
    # Destroying nested ones recurses in C.
    _require(len(ends) == 3 and all(e is None or type(e) is int for e in ends), "a slice")
    return slice(*ends)


def _make_range(*ends: Any) -> Any:
    _require(all(type(e) is int for e in ends), "a range")
    return range(*ends)


def _make_bytes(*nothing: Any) -> Any:
    _require(not nothing, "bytes")
    return b""


def _make_bytearray(*content: Any) -> Any:
    if len(content) == 2:
        content = (_encode(*content),)
    _require(not content or (len(content) == 1 and type(content[0]) is bytes), "a bytearray")
    return bytearray(*content)


def _encode(text: Any, encoding: Any) -> bytes:
    # How protocols before 3 write bytes.
    _require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes")
    return str(text).encode("latin1")


def _make_path(kind: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        _require(all(type(part) is str for part in parts), "a path")
        return kind(*parts)

    return make


def _make_ordered(*nothing: Any) -> Any:
    _require(not nothing or nothing == ([],), "an OrderedDict")
    return OrderedDict()


def _make_defaultdict(factory: Any = None) -> Any:
    _require(factory is None or any(factory is kind for kind in _FACTORIES), "a defaultdict")
    return defaultdict(factory)


def _make_counter(counts: Any = None) -> Any:
    _require(counts is None or type(counts) is dict, "a Counter")
    return Counter(counts or {})


def _make_deque(items: Any = (), limit: Any = None) -> Any:
    _require(type(items) in (tuple, list) and (limit is None or type(limit) is int), "a deque")
    return deque(items, limit)


def _make_namespace() -> Any:
    return types.SimpleNamespace()


def _make_date(kind: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        # bytes, and a time zone that was made in the same way.
        _require(all(type(p) in (bytes, int, str, datetime.timezone) for p in parts), "a date")
        return kind(*parts)

    return make


def _make_timedelta(*parts: Any) -> Any:
    _require(all(type(part) is int for part in parts), "a timedelta")
    return datetime.timedelta(*parts)


def _make_timezone(offset: Any, *name: Any) -> Any:
    _require(type(offset) is datetime.timedelta and all(type(n) is str for n in name), "a zone")
    return datetime.timezone(offset, *name)


def _make_size(sizes: Any) -> Any:
    _require(isinstance(sizes, tuple | list), "a torch.Size")
    _require(all(type(size) is int and size >= 0 for size in sizes), "a torch.Size")
    return torch.Size(sizes)


def _make_device(*parts: Any) -> Any:
    _require(all(type(part) in (str, int) for part in parts), "a torch.device")
    return torch.device(*parts)


_FACTORIES = (int, float, complex, str, bytes, bool, list, dict, tuple, set, frozenset, deque)

#: What is made empty and then gets a state.
EMPTY = frozenset({argparse.Namespace, types.SimpleNamespace, io.BytesIO, OrderedDict})

_MAKERS: dict[Any, Callable[..., Any]] = {
    set: _make_set,
    frozenset: _make_frozenset,
    complex: _make_complex,
    slice: _make_slice,
    range: _make_range,
    bytes: _make_bytes,
    bytearray: _make_bytearray,
    OrderedDict: _make_ordered,
    defaultdict: _make_defaultdict,
    Counter: _make_counter,
    deque: _make_deque,
    types.SimpleNamespace: _make_namespace,
    datetime.datetime: _make_date(datetime.datetime),
    datetime.date: _make_date(datetime.date),
    datetime.time: _make_date(datetime.time),
    datetime.timedelta: _make_timedelta,
    datetime.timezone: _make_timezone,
    torch.Size: _make_size,
    torch.device: _make_device,
}


@lru_cache(maxsize=1)
def _known_names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for kind in (*_FACTORIES, slice, range, bytearray):
        if kind.__module__ == "builtins":
            names[f"builtins.{kind.__name__}"] = kind
    for each in ("OrderedDict", "defaultdict", "Counter", "deque"):
        names[f"collections.{each}"] = getattr(collections, each)
    names["argparse.Namespace"] = argparse.Namespace
    names["types.SimpleNamespace"] = types.SimpleNamespace
    names["_io.BytesIO"] = names["io.BytesIO"] = io.BytesIO
    for each in ("datetime", "date", "time", "timedelta", "timezone"):
        names[f"datetime.{each}"] = getattr(datetime, each)
    # Where Python 3.13 says that they are, and every other version.
    for module in ("pathlib", "pathlib._local"):
        for each in ("Path", "PosixPath", "PurePath", "PurePosixPath"):
            names[f"{module}.{each}"] = getattr(pathlib, each)
    names["_codecs.encode"] = _encode
    names |= _torch_names()
    return names


# --- tensors -------------------------------------------------------------------------------------


def _require_room(storage: Any, offset: Any, size: Any, stride: Any) -> None:
    """Raises where a tensor reaches past its storage: torch would enlarge that."""
    numbers = (offset, *size, *stride)
    _require(all(type(n) is int and n >= 0 for n in numbers), "a tensor")
    _require(len(size) == len(stride) <= 64, "a tensor")
    _require(type(storage) is torch.storage.TypedStorage, "a tensor")
    if 0 in size:
        last = offset
    else:
        steps = zip(size, stride, strict=True)
        last = offset + 1 + sum((n - 1) * step for n, step in steps)
    item = _torch._utils._element_size(storage.dtype)
    # torch takes an empty tensor at any offset, and enlarges nothing for it.
    _require(0 in size or last * item <= storage._untyped_storage.nbytes(), "a tensor")
    _require(math.prod(size) * item < 2**63, "a tensor")


def _require_plain(requires_grad: Any, hooks: Any, metadata: Any = None) -> None:
    # Python code that backward would call; torch.save stores it empty. Anything but a dict there
    # is a crash in backward.
    _require(type(requires_grad) is bool and (hooks is None or _is_empty_dict(hooks)), "a tensor")
    _require(
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
    # Hooks of our own: the pickle could still fill its.
    return _torch._utils._rebuild_tensor_v2(
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
    _require(type(dtype) is torch.dtype, "a tensor")
    _require_plain(grad, hooks, metadata)
    typed = _torch.storage.TypedStorage(
        wrap_storage=storage._untyped_storage, dtype=dtype, _internal=True
    )
    _require_room(typed, offset, size, stride)
    return _torch._utils._rebuild_tensor_v3(
        storage, offset, size, stride, grad, OrderedDict(), dtype, metadata
    )


def _rebuild_qtensor(
    storage: Any, offset: Any, size: Any, stride: Any, quantizer: Any, grad: Any, hooks: Any
) -> Any:
    _require_room(storage, offset, size, stride)
    _require_plain(grad, hooks)
    # torch allocates all of it before it looks at the storage.
    item = _torch._utils._element_size(storage.dtype)
    _require(math.prod(size) * item <= storage._untyped_storage.nbytes(), "a quantized tensor")
    return _torch._utils._rebuild_qtensor(
        storage, offset, size, stride, quantizer, grad, OrderedDict()
    )


def _rebuild_parameter(data: Any, grad: Any, hooks: Any) -> Any:
    _require(isinstance(data, torch.Tensor), "a parameter")
    _require_plain(grad, hooks)
    return _torch._utils._rebuild_parameter(data, grad, OrderedDict())


def _rebuild_parameter_with_state(data: Any, grad: Any, hooks: Any, state: Any) -> Any:
    _require(type(state) is dict, "a parameter")
    made = _rebuild_parameter(data, grad, hooks)
    vars(made).update(_attributes(state))
    return made


def rebuild_from_type(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """A plain tensor with attributes of its own."""
    _require(function is _rebuild_tensor_v2 and type(arguments) is tuple, "a tensor")
    if kind is not torch.Tensor:
        raise Unsafe(f"makes {shown(kind)}")
    made = _rebuild_tensor_v2(*arguments)
    if state:
        vars(made).update(_attributes(state))
    return made


def rebuild_declared(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """The same of a subclass that the user has declared safe, and whose state is its own affair."""
    _require(function is _rebuild_tensor_v2 and type(arguments) is tuple, "a tensor")
    return _torch._tensor._rebuild_from_type_v2(function, kind, arguments, state)


def _rebuild_sparse(layout: Any, data: Any) -> Any:
    # Indices that point outside would be followed in C.
    if layout is torch.sparse_coo:
        indices, values, size, *coalesced = data
        return torch.sparse_coo_tensor(
            indices,
            values,
            _make_size(size),
            check_invariants=True,
            is_coalesced=coalesced[0] if coalesced else None,
        )
    compressed, plain, values, size = data
    return torch.sparse_compressed_tensor(
        compressed, plain, values, _make_size(size), layout=layout, check_invariants=True
    )


def _get_layout(name: Any) -> Any:
    _require(type(name) is str, "a layout")
    return _torch.serialization._get_layout(name)


_OF_TENSORS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_qtensor": _rebuild_qtensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter_with_state,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse,
    "torch._tensor._rebuild_from_type_v2": rebuild_from_type,
    "torch.serialization._get_layout": _get_layout,
}

_FUNCTIONS = frozenset({_encode, *_OF_TENSORS.values()})


def _torch_names() -> dict[str, Any]:
    names: dict[str, Any] = dict(_OF_TENSORS)
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
            stands_for = _torch.serialization.StorageType(kind.__name__)
            names[f"{kind.__module__}.{kind.__name__}"] = stands_for
    return names


# --- numpy, which need not be there --------------------------------------------------------------


@lru_cache(maxsize=1)
def _numpy_names() -> dict[str, Any]:
    try:
        import numpy
    except ImportError as error:
        raise ValueError("it has numpy's arrays, and numpy is not installed") from error

    def make_dtype(kind: Any, align: Any = False, copy: Any = True) -> Any:
        # Never the one that numpy keeps: its state is set next. No objects, no fields.
        _require(type(kind) is str and kind[:1] in "biufcSUV?" and kind[1:].isdecimal(), "a dtype")
        return numpy.dtype(kind, copy=True)

    def make_array(kind: Any, shape: Any, code: Any) -> Any:
        _require(kind is numpy.ndarray and shape == (0,), "an array")
        return numpy.ndarray((0,), "b")

    def make_scalar(dtype: Any, content: Any) -> Any:
        _require(isinstance(dtype, numpy.dtype) and type(content) is bytes, "a number")
        _require(len(content) == dtype.itemsize and not dtype.hasobject, "a number")
        # An empty text has a dtype without bytes, of which a buffer holds none.
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
    _require(type(state) is tuple, "an array")
    if isinstance(target, numpy.dtype):
        _require(len(state) == 8 and state[0] == 3 and state[1] in ("<", ">", "|", "="), "a dtype")
        _require(state[2:5] == (None, None, None) and state[7] in (0, 8), "a dtype")
        size = target.itemsize if target.kind in "SUV" else -1
        _require(state[5] == size and state[6] in (-1, 1, 4), "a dtype")
        target.__setstate__((*state[:7], 8 if target.kind == "U" else 0))
        return
    _require(len(state) == 5 and state[0] == 1 and type(state[4]) is bytes, "an array")
    shape, dtype = state[1], state[2]
    _require(type(shape) is tuple and all(type(n) is int and n >= 0 for n in shape), "an array")
    _require(isinstance(dtype, numpy.dtype) and not dtype.hasobject, "an array")
    _require(len(state[4]) == math.prod(shape) * dtype.itemsize, "an array")
    target.__setstate__(state)


# --- what the interpreter asks ------------------------------------------------------------------


def copied_by(arguments: tuple[Any, ...]) -> int:
    """About the most bytes that a maker or a state copies of its arguments.

    They look into what they get, and into a tuple in it, and no further.
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
            return _make_path(function)
        return _MAKERS.get(function)
    if isinstance(function, types.FunctionType) and (
        function in _FUNCTIONS or (_is_numpys_maker(function))
    ):
        return function
    return None


def named(full: str) -> Any:
    """What a pickle means by ``module.name``; None where that is not on the list."""
    known = _known_names().get(full)
    if known is None and full.startswith("numpy."):
        known = _numpy_names().get(full)
    return known


def has_state(made: Any) -> bool:
    """Whether a pickle may set the state of such a thing."""
    return type(made) in EMPTY or _is_numpys(made)


def _is_numpys_maker(function: Any) -> bool:
    return "numpy" in sys.modules and function in _numpy_names().values()


def _attributes(state: Any) -> dict[str, Any]:
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise ValueError("it sets a state that is no attributes")
    return state


def set_state(target: Any, state: Any) -> None:
    if _is_numpys(target):
        _set_numpys_state(target, state)
    elif type(target) is io.BytesIO:
        _require(type(state) is tuple and len(state) == 3 and state[2] is None, "a BytesIO")
        _require(type(state[0]) is bytes and type(state[1]) is int, "a BytesIO")
        # Past the end it would be filled up to there by the next write.
        _require(0 <= state[1] <= len(state[0]), "a BytesIO")
        cast(Any, target).__setstate__(state)
    else:
        vars(target).update(_attributes(state))


def shown(value: Any) -> str:
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        module = value.__module__
        return (
            value.__qualname__ if module == builtins.__name__ else f"{module}.{value.__qualname__}"
        )
    return f"a {type(value).__name__}"
