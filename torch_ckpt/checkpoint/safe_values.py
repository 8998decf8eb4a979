"""Constructs the values in objects, after checking the arguments."""

from __future__ import annotations

import argparse
import datetime
import io
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, cast

import torch

from torch_ckpt.errors import Unsafe

# Maximum nesting of a key: hashing and comparing recurse in C, without a limit.
_DEEPEST_KEY = 8

# Maximum number of elements in a key: hashing visits a shared part once for each occurrence.
_LARGEST_KEY = 1024

# Many names in torch's pickles have no type annotations.
untyped_torch = cast(Any, torch)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Unsafe(f"constructs {what} from arguments that are not allow-listed")


def as_key(value: Any) -> Any:
    """Returns a key of a mapping or an item of a set, after checking it."""
    if type(value) in (tuple, frozenset):
        _parts_of_key(value, 0)
    return value


def _parts_of_key(value: Any, depth: int) -> int:
    """Returns the number of elements in a key. A shared part counts once for each occurrence."""
    if type(value) not in (tuple, frozenset):
        return 1
    if depth == _DEEPEST_KEY:
        raise ValueError(f"it has a key that is nested more than {_DEEPEST_KEY} levels deep")
    count = len(value)
    for part in value:
        if count > _LARGEST_KEY:
            raise ValueError(
                f"it has a tuple or frozenset key with more than {_LARGEST_KEY} elements"
            )
        count += _parts_of_key(part, depth + 1)
    return count


def _make_set(items: Any = ()) -> Any:
    require(type(items) in (list, tuple), "a set")
    return set(map(as_key, items))


def _make_bytearray(*content: Any) -> Any:
    if len(content) == 2:
        content = (encode(*content),)
    require(not content or (len(content) == 1 and type(content[0]) is bytes), "a bytearray")
    return bytearray(*content)


def encode(text: Any, encoding: Any) -> bytes:
    # Pickle protocols before 3 store bytes as latin1 text.
    require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes")
    return str(text).encode("latin1")


def make_size(sizes: Any) -> Any:
    require(isinstance(sizes, tuple | list), "a torch.Size")
    require(all(type(size) is int and size >= 0 for size in sizes), "a torch.Size")
    return torch.Size(sizes)


def _checked(kind: type, what: str, accepts: Callable[..., bool]) -> Callable[..., Any]:
    """Returns a function that calls a type if ``accepts`` returns True for the arguments."""

    def make(*arguments: Any) -> Any:
        require(accepts(*arguments), what)
        return kind(*arguments)

    return make


def _each_is(*kinds: type) -> Callable[..., bool]:
    return lambda *arguments: all(type(argument) in kinds for argument in arguments)


def make_path(kind: type) -> Callable[..., Any]:
    return _checked(kind, "a path", _each_is(str))


def _make_date(kind: type) -> Callable[..., Any]:
    # A pickled date is bytes and a time zone.
    return _checked(kind, "a date", _each_is(bytes, int, str, datetime.timezone))


FACTORIES = (int, float, complex, str, bytes, bool, list, dict, tuple, set, frozenset, deque)

#: Types whose objects are constructed empty, before their state is set.
EMPTY = frozenset({argparse.Namespace, types.SimpleNamespace, io.BytesIO, OrderedDict})

# The ends of slices are ints and None: destroying deeply nested slices recurses in C and could
# overflow the stack.
_is_slice = _each_is(int, type(None))

MAKERS: dict[Any, Callable[..., Any]] = {
    set: _make_set,
    frozenset: lambda items=(): frozenset(_make_set(items)),
    complex: _checked(complex, "a complex number", lambda *z: len(z) == 2 and _each_is(float)(*z)),
    slice: _checked(slice, "a slice", lambda *ends: len(ends) == 3 and _is_slice(*ends)),
    range: _checked(range, "a range", _each_is(int)),
    bytes: _checked(bytes, "bytes", lambda *nothing: not nothing),
    bytearray: _make_bytearray,
    OrderedDict: _checked(
        OrderedDict, "an OrderedDict", lambda *nothing: not nothing or nothing == ([],)
    ),
    defaultdict: _checked(
        defaultdict,
        "a defaultdict",
        lambda factory=None: factory is None or any(factory is kind for kind in FACTORIES),
    ),
    Counter: _checked(
        Counter, "a Counter", lambda counts=None: counts is None or type(counts) is dict
    ),
    deque: _checked(
        deque,
        "a deque",
        lambda items=(), limit=None: (
            type(items) in (tuple, list) and (limit is None or type(limit) is int)
        ),
    ),
    types.SimpleNamespace: _checked(types.SimpleNamespace, "a namespace", lambda *no: not no),
    datetime.datetime: _make_date(datetime.datetime),
    datetime.date: _make_date(datetime.date),
    datetime.time: _make_date(datetime.time),
    datetime.timedelta: _checked(datetime.timedelta, "a timedelta", _each_is(int)),
    datetime.timezone: _checked(
        datetime.timezone,
        "a zone",
        lambda offset, *name: type(offset) is datetime.timedelta and _each_is(str)(*name),
    ),
    torch.Size: make_size,
    torch.device: _checked(torch.device, "a torch.device", _each_is(str, int)),
}


def attributes(state: Any) -> dict[str, Any]:
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise ValueError(
            "it sets the state of an object to a value that is not a dict with str keys"
        )
    return state
