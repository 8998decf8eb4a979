"""The types that an object in a checkpoint may contain, and the functions that construct them.

A pickle never calls a type directly, because even a simple call such as ``bytes(2**40)`` can
allocate 1 TiB. It calls one of the functions in this module instead. They allocate at most the size
of their arguments, which :func:`copied_by` limits; their recursion depth is limited; and they never
call a function that is passed to them.

``numpy`` is imported only if a pickle names it.
"""

from __future__ import annotations

import argparse
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

from torch_ckpt.checkpoint.safe_tensors import OF_TENSORS, torch_names
from torch_ckpt.checkpoint.safe_values import (
    EMPTY,
    FACTORIES,
    MAKERS,
    attributes,
    encode,
    make_path,
    require,
)


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


# --- used by the interpreter --------------------------------------------------------------------


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
