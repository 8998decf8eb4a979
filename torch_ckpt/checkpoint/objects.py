"""Decodes the objects of a checkpoint without running their code.

An object is stored as ``torch.save`` writes it: an archive of a pickle, which is a program, and the
data of its tensors. DCP's planner executes that program. Here, the interpreter in
checkpoint/unpickler.py executes it: it knows a list of names, the arguments with which each may be
called, and the operations that are allowed on the results.

``torch.load(weights_only=True)`` is not used, because its list can be extended only for the
complete process (including loads in other threads, and leaving ``safe_globals`` removes the user's
own additions), it has no deque, no defaultdict and no limit on what a constructor allocates, and
before torch 2.15 it does not validate sparse tensors.
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
from torch_ckpt.checkpoint.unpickler import Archive, NoSuchDevice, Unpickler
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe

#: Types of objects that always load.
PLAIN = (bool, int, float, complex, str, bytes, type(None))

_CONTAINERS = (list, tuple, set, frozenset, deque)

# (name, types) of the objects that have been checked.
_checked: set[tuple[str, frozenset[type]]] = set()
# Types of objects that are known to load without allow_pickle.
_known_to_load: set[frozenset[type]] = set()

# Longest text of an error in characters.
_LONGEST_REASON = 400


def decode(data: bytes | memoryview, name: str, file: str) -> Any:
    """Decodes an object from the bytes that ``torch.save`` wrote.

    Tensors are restored on the devices from which they were saved, as with ``torch.load``.

    Args:
        data: the record of the object.
        name: its fully qualified name, for messages.
        file: the file of the record, for messages.

    Raises:
        Unsafe: it names something that is neither allow-listed nor declared safe by the user.
        Corrupt: it was not written by ``torch.save``.
        CheckpointError: a tensor in it was saved from a device that this process does not have, or
            it has NumPy values and numpy is not installed.
    """
    try:
        archive = Archive(data)
        return Unpickler(archive).load()
    except Unsafe as error:
        raise Unsafe(
            f"{name}: the object in {file} {_told(error)}; pass allow_pickle=True (to a "
            "CheckpointManager: load_options={'allow_pickle': True}) only if you trust its writer, "
            "or declare your own types safe: torch.serialization.add_safe_globals([...])"
        ) from None
    except NotInstalled as error:
        raise CheckpointError(
            f"{name}: the object in {file} has NumPy values, and numpy is not installed; "
            "install it: pip install numpy"
        ) from error
    except NoSuchDevice as error:
        raise CheckpointError(
            f"{name}: the object in {file} has a tensor on {error}; load it on a machine with that "
            "device, or, if you trust its writer, with allow_pickle=True and a planner whose "
            "load_bytes calls torch.load(map_location=...)"
        ) from None
    except Exception as error:
        raise Corrupt(
            f"{name}: the object in {file} was not written by torch.save: {_told(error)}; with "
            "allow_pickle=True the planner gets its bytes unchecked"
        ) from error


def unpicklable(name: str, value: Any, error: Exception) -> CheckpointError:
    """Builds the error for an object that cannot be saved.

    Args:
        name: its fully qualified name.
        error: the error of pickling or copying it.
    """
    name, value = _culprit(name, value, _record)
    return CheckpointError(
        f"{name}: an object of type {type(value).__qualname__} cannot be saved "
        f"({type(error).__name__}: {error}); leave it out of the state, or save the tensors, "
        "numbers and strings that it is made of"
    )


def warn_of_what_will_not_load(
    name: str, value: Any, data: bytes | memoryview | None = None
) -> None:
    """Warns if a load will refuse an object of a state dict. Checks each combination of name and
    types once.

    Args:
        name: fully qualified name of the object.
        data: its record, if it is known.

    Raises:
        CheckpointError: the object cannot be pickled.
    """
    if type(value) in PLAIN:
        return
    types: set[type] = set()
    _add_types(value, types, set())
    looked_at = name, frozenset(types)
    if looked_at in _checked or looked_at[1] in _known_to_load:
        return
    try:
        data = _record(value) if data is None else data
    except Exception as error:
        raise unpicklable(name, value, error) from None
    _checked.add(looked_at)
    try:
        _require_loadable(name, value, data)
    except CheckpointError:
        name, value = _culprit(name, value, lambda part: _require_loadable("", part, _record(part)))
        try:
            _require_loadable(name, value, _record(value))
        except CheckpointError as error:
            warn(f"a saved object will be refused on load: {error}", stacklevel=3)
    else:
        _known_to_load.add(looked_at[1])


def _record(value: Any) -> memoryview:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getbuffer()


def _require_loadable(name: str, value: Any, data: bytes | memoryview) -> None:
    if isinstance(value, torch.Tensor):
        _require_loadable_tensor(name, data)
    else:
        decode(data, name, "its checkpoint")


def _culprit(name: str, value: Any, work: Callable[[Any], object]) -> tuple[str, Any]:
    """Returns name and value of the innermost part for which ``work`` fails, as it does for the
    whole value."""
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
    # An AppState wraps a value in a namespace, which adds nothing to the name.
    is_wrapper = type(value) is SimpleNamespace
    return [
        (name if is_wrapper else f"{name}.{key}", part)
        for key, part in own.items()
        if not key.startswith("__")  # attributes of Python itself, as a member of an enum has
    ]


def _require_loadable_tensor(name: str, data: bytes | memoryview) -> None:
    stream = io.BytesIO(data)
    unsafe = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    if unsafe:
        raise Unsafe(
            f"{name}: a tensor subclass whose record names {unsafe}; save a plain tensor, or "
            "declare the class safe in the program that loads it "
            "(torch.serialization.add_safe_globals([...]))"
        )


def _add_types(value: Any, types: set[type], seen: set[int]) -> None:
    """Adds the types of a value and of its parts, as far as Python exposes them."""
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


def _told(error: Exception) -> str:
    """Returns the text of an error, shortened: it may quote the pickle, and every rank gets it."""
    text = str(error) or type(error).__name__
    return printable(text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}...")
