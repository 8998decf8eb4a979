"""Decodes the objects of a checkpoint without running their code.

An object is stored as ``torch.save`` writes it: an archive of a pickle and the data of tensors. A
pickle is a program, and DCP's planner executes it. Here, the interpreter in checkpoint/unpickler.py
executes it instead. It has a list of names, of the arguments with which each may be called, and of
the operations that are allowed on the results.

``torch.load(weights_only=True)`` is not used, for these reasons:

- Its list can be extended only for the whole process, including loads in other threads, and leaving
  ``safe_globals`` removes the user's own additions.
- It supports neither deque nor defaultdict, and does not limit what a constructor allocates.
- Before torch 2.15 it does not validate sparse tensors.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from torch_ckpt._base.formatting import printable
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.safe_types import NotInstalled
from torch_ckpt.checkpoint.slices import save_compactly
from torch_ckpt.checkpoint.unpickler import Archive, NoSuchDevice, Unpickler
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe

#: Types of objects that can always be loaded.
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})

_CONTAINERS = (list, tuple, set, frozenset, deque)

# (name, types in the object) of each object that has been checked.
_checked: set[tuple[str, frozenset[type]]] = set()
# The sets of types with which an object can be loaded without allow_pickle.
_known_to_load: set[frozenset[type]] = set()

# Maximum length of an error text, in characters.
_LONGEST_REASON = 400


def decode(data: bytes | memoryview, name: str, file: str) -> Any:
    """Decodes an object from the bytes that ``torch.save`` wrote.

    Tensors are restored on the devices from which they were saved, as by ``torch.load``.

    Args:
        data: the record of the object.
        name: fully qualified name of the object, for messages.
        file: the file with the record, for messages.

    Raises:
        Unsafe: the pickle names a type or function that is neither allow-listed nor declared safe
            by the user.
        Corrupt: ``torch.save`` did not write the record.
        CheckpointError: a tensor in the object was saved from a device that this process does not
            have, or the object contains NumPy values and numpy is not installed.
    """
    try:
        archive = Archive(data)
        return Unpickler(archive).load()
    except Unsafe as error:
        raise Unsafe(
            f"{name}: the object in {file} {_short_text(error)}; pass "
            "ReadOptions(allow_pickle=True) (to a FileSystemReader: allow_pickle=True) only if you "
            "trust the writer, or declare your own types safe: "
            "torch.serialization.add_safe_globals([...])"
        ) from None
    except NotInstalled as error:
        raise CheckpointError(
            f"{name}: the object in {file} contains NumPy values, but numpy is not installed; "
            "install it: pip install numpy"
        ) from error
    except NoSuchDevice as error:
        raise CheckpointError(
            f"{name}: the object in {file} contains a tensor on {error}; load it on a machine that "
            "has this device. If you trust the writer, you can also load it by dcp.load with "
            "FileSystemReader(allow_pickle=True) and a planner whose load_bytes calls "
            "torch.load(map_location=...)"
        ) from None
    except Exception as error:
        raise Corrupt(
            f"{name}: the object in {file} was not written by torch.save: {_short_text(error)}; "
            "if a planner of your own decodes it, use FileSystemReader(allow_pickle=True)"
        ) from error


def unpicklable(name: str, value: Any, error: Exception) -> CheckpointError:
    """Builds the error for an object that cannot be saved.

    Args:
        name: fully qualified name of the object.
        error: the error from pickling or copying the object.
    """
    name, value = _culprit(name, value, pickled)
    return CheckpointError(
        f"{name}: an object of type {type(value).__qualname__} cannot be saved "
        f"({type(error).__name__}: {error}); remove it from the state, or save the tensors, "
        "numbers and strings in it instead"
    )


def warn_of_what_will_not_load(
    name: str, value: Any, data: bytes | memoryview | None = None
) -> None:
    """Warns if a load will refuse an object of a state dict. Checks each combination of a name and
    the types in the object only once.

    Args:
        name: fully qualified name of the object.
        data: the record of the object, if the caller has it.

    Raises:
        CheckpointError: the object cannot be pickled.
    """
    if type(value) in PLAIN:
        return
    types: set[type] = set()
    _add_types(value, types, set())
    key = name, frozenset(types)
    if key in _checked or key[1] in _known_to_load:
        return
    try:
        data = pickled(value) if data is None else data
    except Exception as error:
        raise unpicklable(name, value, error) from None
    _checked.add(key)
    try:
        _require_loadable(name, value, data)
    except CheckpointError:
        name, value = _culprit(name, value, lambda part: _require_loadable("", part, pickled(part)))
        try:
            _require_loadable(name, value, pickled(value))
        except CheckpointError as error:
            warn(f"an object was saved that a load will refuse: {error}")
    else:
        _known_to_load.add(key[1])


def pickled(value: Any) -> memoryview:
    """Returns the bytes that torch.save writes for a value, without the memory that its tensors do
    not use."""
    return save_compactly(value).getbuffer()


def _require_loadable(name: str, value: Any, data: bytes | memoryview) -> None:
    if isinstance(value, torch.Tensor):
        _require_loadable_tensor(name, data)
    else:
        decode(data, name, "its checkpoint")


def _culprit(name: str, value: Any, work: Callable[[Any], object]) -> tuple[str, Any]:
    """Returns the name and value of the innermost part for which ``work`` fails. ``work`` must fail
    for the complete value."""
    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for inner, part in _parts(name, value):
            try:
                work(part)
            except Exception:
                name, value = inner, part
                break
    return name, value


def _parts(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"{name}.{key}", part) for key, part in value.items()]
    if isinstance(value, _CONTAINERS):
        return [(f"{name}.{index}", part) for index, part in enumerate(value)]
    own = getattr(value, "__dict__", None)
    if not isinstance(own, dict) or isinstance(value, type | ModuleType | FunctionType):
        return []
    # The namespace in which state/splitting.py wraps a state is not part of the names.
    is_wrapper = type(value) is SimpleNamespace
    return [
        (name if is_wrapper else f"{name}.{key}", part)
        for key, part in own.items()
        if not key.startswith("__")  # Python's own attributes, such as those of enum members
    ]


def _require_loadable_tensor(name: str, data: bytes | memoryview) -> None:
    stream = io.BytesIO(data)
    unsafe = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    if unsafe:
        raise Unsafe(
            f"{name}: this tensor subclass is saved with the names {unsafe}, which are not "
            "allow-listed; save a plain tensor, or declare them safe in the program that loads it "
            "(torch.serialization.add_safe_globals([...]))"
        )


def _add_types(value: Any, types: set[type], seen: set[int]) -> None:
    """Adds the types of a value and of all its parts that Python exposes."""
    types.add(type(value))
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, dict):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, _CONTAINERS):
        parts += value
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        parts += own.values()
    kinds = set(map(type, parts))
    types |= kinds
    if not kinds.issubset(PLAIN):
        for part in parts:
            if type(part) not in PLAIN:
                _add_types(part, types, seen)


def _short_text(error: Exception) -> str:
    """Returns the text of an error, shortened because it may quote the pickle and is sent to every
    rank."""
    text = str(error) or type(error).__name__
    return printable(text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}...")
