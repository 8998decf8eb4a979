"""Splits a state into named tensors and one object with all other values, and joins them again."""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt._base.containers import map_children
from torch_ckpt._base.formatting import plural
from torch_ckpt.checkpoint.objects import PLAIN, warn_of_what_will_not_load
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.load import Placeholder, Stored

StateDict = dict[str, Any]

#: Name of the object that holds the non-tensor part of a value's state, next to its tensors.
OBJECTS = "_objects"

# Types that may be or contain tensors to split off.
_SPLIT_TYPES = (torch.Tensor, dict, list)

_MISSING: Any = object()


def python_number(value: Any) -> Any:
    """Converts a NumPy scalar to a Python number; returns other values unchanged."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        number = value.item()
        return number if type(number) in PLAIN else value
    return value


def _on_cpu(state: Any) -> Any:
    """Returns the state with its tensors on the CPU.

    Finds tensors in dicts and their subclasses, lists, tuples and named tuples. Plain containers
    are always copied, subclasses of dict only if they contain a tensor.
    """
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, tuple) and hasattr(state, "_make"):
        return state._make(map(_on_cpu, state))
    if type(state) in (dict, OrderedDict):
        # Without the attributes of an OrderedDict, which might not be picklable.
        return type(state)((key, _on_cpu(part)) for key, part in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(_on_cpu, state))
    if isinstance(state, dict):
        moved = {key: _on_cpu(part) for key, part in state.items()}
        if any(part is not state[key] for key, part in moved.items()):
            return map_children(state, lambda _part, key: moved[key])
    return state


def split_state(key: str, state: Any, for_load: bool) -> StateDict:
    """Splits a state into a tree of tensors and one object with all other values.

    Raises:
        TypeError: the state is a bare tensor.
        ValueError: a tensor has the reserved name, or two keys have the same text.
    """
    rest, tensors = split_tensors(state)
    if isinstance(tensors, torch.Tensor):
        raise TypeError(
            f"the state_dict() of {key} is a bare tensor, which has no name. Return a dict instead"
        )
    tree = tensors if isinstance(tensors, dict) else {}
    if OBJECTS in tree:
        raise ValueError(f"the name {OBJECTS} is reserved; rename the tensor")
    rest = {} if rest is _MISSING else rest
    if for_load:
        return {**tree, OBJECTS: _Objects(key, state, rest, tree)}
    return {**tree, OBJECTS: wrap_state(key, rest, tensor_count(tree))}


class _Objects(Placeholder):
    """Loads the non-tensor part of a value's state.

    torch_ckpt stores this part as one object. Stock torch stores each leaf of nested dicts and
    lists as an object.

    Args:
        key: key of the value.
        state: the complete state.
        rest, tensors: the non-tensor part and the tensors of the state.
    """

    def __init__(self, key: str, state: Any, rest: Any, tensors: StateDict) -> None:
        super().__init__()
        self._key = key
        self._rest_name = f"{key}.{OBJECTS}"
        self._state = state
        self._rest = rest
        self._tensors = flatten_state_dict({key: tensors})[0]
        self._paths: Mapping[str, Any] = {}

    def choose(self, stored: Stored, _name: str) -> StateDict:
        for name in (self._rest_name, self._key):
            if name in stored:
                return {name: self}
        beneath = [name for name in stored.names if name.startswith(f"{self._key}.")]
        saved_per_rank = re.compile(rf"{re.escape(self._key)}\.rank\d+")
        if not beneath or any(map(saved_per_rank.fullmatch, beneath)):
            return {self._key if type(self._state) in PLAIN else self._rest_name: self}
        chosen: StateDict = {}
        leaves = flatten_state_dict({self._key: self._state})[0]
        for name in [*(leaves.keys() - {self._key}), *beneath]:
            if name in self._tensors:
                continue
            chosen[name] = self
            # The tensor is in a container that torch_ckpt would store as one object.
            if isinstance(leaves.get(name), torch.Tensor) and stored.is_tensor(name):
                chosen[name] = stored.meta_tensor(name)
        self._paths = stored.paths()
        return chosen

    def state(self, part: StateDict) -> Any:
        """Returns the state with the loaded values. Values that were not loaded are unchanged.

        Args:
            part: the loaded tensors by name, and this object under the name ``OBJECTS``.

        Raises:
            CheckpointError: the checkpoint has a different number of tensors.
        """
        values = dict(self.values)
        tensors = {name: value for name, value in part.items() if name != OBJECTS}
        if self._key in values:
            return values[self._key]
        if self._rest_name in values:
            stored, present = values[self._rest_name].tensors, tensor_count(tensors)
            if stored != present:
                raise CheckpointError(
                    f"the checkpoint has {plural(stored, 'tensor')}, but the state now has "
                    f"{present}. Create the same tensors before the restore, or save states "
                    "whose structure changes as PerRank(...)"
                )
            return join_tensors(values[self._rest_name].value, tensors)
        state = _replace_leaves(join_tensors(self._rest, tensors), self._key, values)
        root = {self._key: state}
        for name, value in values.items():
            path = self._paths.get(name) or tuple(name.split("."))
            if not isinstance(root[self._key], (dict, list)):
                root[self._key] = {} if isinstance(path[1], str) else []
            set_element(root, path, value)
        return root[self._key]


def _replace_leaves(value: Any, name: str, leaves: StateDict) -> Any:
    """Copies nested dicts and lists, replacing the leaves that are in ``leaves``. Removes the used
    ones from ``leaves``."""
    if name in leaves:
        return leaves.pop(name)
    if type(value) is not list and not isinstance(value, dict):
        return value
    return map_children(value, lambda part, key: _replace_leaves(part, f"{name}.{key}", leaves))


def split_tensors(state: Any) -> tuple[Any, Any]:
    """Returns the state without its tensors, and a tree of its tensors; each may be _MISSING."""
    if isinstance(state, torch.Tensor):
        return _MISSING, state
    if type(state) is dict and state and all(map(_is_named_tensor, state.items())):
        # Fast path: most optimizer states have this form.
        return _MISSING, state.copy()
    if type(state) in (dict, OrderedDict):
        items = [(key, split_tensors(part)) for key, part in state.items()]
        if (
            type(state) is dict
            and state
            and all(left is _MISSING and isinstance(key, str) for key, (left, _) in items)
        ):
            rest: Any = _MISSING
        else:
            # Keep the keys of tensors, with the value None, to preserve the order of the keys.
            rest = type(state)(
                (key, None if left is _MISSING else left) for key, (left, _) in items
            )
    elif type(state) is list and any(isinstance(part, _SPLIT_TYPES) for part in state):
        items = [(index, split_tensors(part)) for index, part in enumerate(state)]
        rest = [None if left is _MISSING else left for _, (left, _) in items]
    else:
        return state.copy() if type(state) is list else state, _MISSING
    tensors = {str(key): part for key, (_, part) in items if part is not _MISSING}
    if tensors and type(state) is not list:
        require_distinct_names(state)
    return rest, tensors or _MISSING


def require_distinct_names(state: Mapping[Any, Any]) -> None:
    """Raises ValueError if two keys have the same text."""
    if len(set(map(str, state))) < len(state):
        raise ValueError(
            f"the dict with the keys {', '.join(map(str, state))} has two keys with the same text, "
            "such as 1 and '1'. Rename one of them"
        )


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[1], torch.Tensor) and isinstance(item[0], str)


def join_tensors(rest: Any, tensors: Any) -> Any:
    """Merges the tensors of a state into its other part; the inverse of :func:`split_tensors`."""
    if not isinstance(tensors, dict):
        return tensors
    if not tensors:
        return rest
    if rest is _MISSING or rest is None:
        rest = {}
    keys = {str(key): key for key in (range(len(rest)) if isinstance(rest, list) else rest)}
    for name, part in tensors.items():
        key = keys.get(name, name)
        left = rest[key] if name in keys else _MISSING
        rest[key] = join_tensors(left, part)
    return rest


def tensor_count(tree: Any) -> int:
    """Counts the tensors in nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return 1
    parts = tree.values() if isinstance(tree, dict) else tree if type(tree) is list else ()
    return sum(map(tensor_count, parts))


def wrap_state(key: str, state: Any, tensors: int = 0, for_load: bool = False) -> SimpleNamespace:
    """Wraps a state in the object that the checkpoint stores.

    Warns once if the state has types that do not load without ``allow_pickle``.

    Args:
        key: key of the value, for the warning.
        state: the state without its tensors.
        tensors: number of tensors that were split off.
        for_load: True if the object is only loaded into, so that neither a copy nor a warning is
            needed.
    """
    if for_load:
        return SimpleNamespace(value=state, tensors=tensors)
    wrapped = SimpleNamespace(value=_on_cpu(state), tensors=tensors)
    warn_of_what_will_not_load(key, wrapped)
    return wrapped


def as_states(value: Any) -> Any:
    """Converts the layout of :class:`AppState` into the states that ``state_dict()`` returned.

    Args:
        value: nested dicts and lists of a checkpoint. Tensors may be replaced by placeholders.
    """
    if _is_wrapped(value):
        return value.value
    if type(value) is list:
        return [as_states(part) for part in value]
    if type(value) is not dict:
        return value
    if _is_wrapped(value.get(OBJECTS)):
        tensors = {name: part for name, part in value.items() if name != OBJECTS}
        value = join_tensors(value[OBJECTS].value, tensors)
    else:
        value = {name: as_states(part) for name, part in value.items()}
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        # A checkpoint does not store empty dicts.
        value.setdefault("state", {})
    return value


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, SimpleNamespace) and {"value", "tensors"} <= vars(value).keys()


def unwrap_state(part: Any) -> Any:
    """Returns the value of a wrapped state; returns other values unchanged."""
    return part.value if isinstance(part, SimpleNamespace) else part
