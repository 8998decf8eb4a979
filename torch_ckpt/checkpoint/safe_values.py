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


def _make_frozenset(items: Any = ()) -> Any:
    return frozenset(_make_set(items))


def _make_complex(real: Any, imaginary: Any) -> Any:
    require(type(real) is float and type(imaginary) is float, "a complex number")
    return complex(real, imaginary)


def _make_slice(*ends: Any) -> Any:
    # Allow only ints and None: destroying deeply nested slices recurses in C and could overflow the
    # stack.
    require(len(ends) == 3 and all(e is None or type(e) is int for e in ends), "a slice")
    return slice(*ends)


def _make_range(*ends: Any) -> Any:
    require(all(type(e) is int for e in ends), "a range")
    return range(*ends)


def _make_bytes(*nothing: Any) -> Any:
    require(not nothing, "bytes")
    return b""


def _make_bytearray(*content: Any) -> Any:
    if len(content) == 2:
        content = (encode(*content),)
    require(not content or (len(content) == 1 and type(content[0]) is bytes), "a bytearray")
    return bytearray(*content)


def encode(text: Any, encoding: Any) -> bytes:
    # Pickle protocols before 3 store bytes as latin1 text.
    require(type(text) is str and encoding in ("latin1", "latin-1"), "bytes")
    return str(text).encode("latin1")


def make_path(kind: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        require(all(type(part) is str for part in parts), "a path")
        return kind(*parts)

    return make


def _make_ordered(*nothing: Any) -> Any:
    require(not nothing or nothing == ([],), "an OrderedDict")
    return OrderedDict()


def _make_defaultdict(factory: Any = None) -> Any:
    require(factory is None or any(factory is kind for kind in FACTORIES), "a defaultdict")
    return defaultdict(factory)


def _make_counter(counts: Any = None) -> Any:
    require(counts is None or type(counts) is dict, "a Counter")
    return Counter(counts or {})


def _make_deque(items: Any = (), limit: Any = None) -> Any:
    require(type(items) in (tuple, list) and (limit is None or type(limit) is int), "a deque")
    return deque(items, limit)


def _make_namespace() -> Any:
    return types.SimpleNamespace()


def _make_date(kind: type) -> Callable[..., Any]:
    def make(*parts: Any) -> Any:
        # A pickled date is bytes and a time zone, which _make_timezone has constructed.
        require(all(type(p) in (bytes, int, str, datetime.timezone) for p in parts), "a date")
        return kind(*parts)

    return make


def _make_timedelta(*parts: Any) -> Any:
    require(all(type(part) is int for part in parts), "a timedelta")
    return datetime.timedelta(*parts)


def _make_timezone(offset: Any, *name: Any) -> Any:
    require(type(offset) is datetime.timedelta and all(type(n) is str for n in name), "a zone")
    return datetime.timezone(offset, *name)


def make_size(sizes: Any) -> Any:
    require(isinstance(sizes, tuple | list), "a torch.Size")
    require(all(type(size) is int and size >= 0 for size in sizes), "a torch.Size")
    return torch.Size(sizes)


def _make_device(*parts: Any) -> Any:
    require(all(type(part) in (str, int) for part in parts), "a torch.device")
    return torch.device(*parts)


FACTORIES = (int, float, complex, str, bytes, bool, list, dict, tuple, set, frozenset, deque)

#: Types whose objects are constructed empty, before their state is set.
EMPTY = frozenset({argparse.Namespace, types.SimpleNamespace, io.BytesIO, OrderedDict})

MAKERS: dict[Any, Callable[..., Any]] = {
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
    torch.Size: make_size,
    torch.device: _make_device,
}


def attributes(state: Any) -> dict[str, Any]:
    if type(state) is not dict or not all(type(name) is str for name in state):
        raise ValueError(
            "it sets the state of an object to a value that is not a dict with str keys"
        )
    return state
