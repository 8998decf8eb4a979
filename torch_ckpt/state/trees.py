"""A state as named tensors and the rest, and put together again."""

from __future__ import annotations

import copy
import re
import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element

from torch_ckpt.checkpoint.objects import PLAIN, warn_of_what_will_not_load
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.load import Discovered, Stored

StateDict = dict[str, Any]

#: Where a value's tensors are, what else its state holds has this name.
OBJECTS = "_objects"

_WITH_TENSORS = (torch.Tensor, dict, list)

_MISSING: Any = object()


def python_number(value: Any) -> Any:
    """A NumPy scalar as the Python number that it holds; else the value itself."""
    if "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].generic):
        number = value.item()
        return number if type(number) in PLAIN else value
    return value


def _on_cpu(state: Any) -> Any:
    """With its tensors on the CPU: those in dicts, lists and tuples, and subclasses of dict and
    named tuples. Plain containers are copied, others where a part has changed."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if type(state) in (dict, OrderedDict):
        return type(state)((key, _on_cpu(part)) for key, part in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(_on_cpu, state))
    if isinstance(state, dict):
        moved = {key: _on_cpu(part) for key, part in state.items()}
        if all(part is state[key] for key, part in moved.items()):
            return state
        copied = copy.copy(state)
        for key, part in moved.items():
            copied[key] = part
        return copied
    if isinstance(state, tuple) and hasattr(state, "_make"):
        return state._make(map(_on_cpu, state))
    return state


def split_state(key: str, state: Any, for_load: bool) -> StateDict:
    """A state as a tree of tensors, and one object of what else there is."""
    rest, tensors = parts_of(state)
    if isinstance(tensors, torch.Tensor):
        raise TypeError(
            f"the state_dict() of {key} is a tensor, which has no name; return a dict that holds it"
        )
    tree = tensors if isinstance(tensors, dict) else {}
    if OBJECTS in tree:
        raise ValueError(f"a tensor must not be named {OBJECTS}")
    whole = {} if rest is _MISSING else rest
    if for_load:
        return {**tree, OBJECTS: _Objects(key, state, whole, tree)}
    return {**tree, OBJECTS: wrapped_state(key, whole, tensor_count(tree))}


class _Objects(Discovered):
    """What a value's state holds beside tensors, to load: one object, or, from stock torch, one for
    each leaf of nested dicts and lists.

    Args:
        key: of the value.
        state: all of its state.
        rest, tensors: its two parts.
    """

    def __init__(self, key: str, state: Any, rest: Any, tensors: StateDict) -> None:
        super().__init__()
        self._key = key
        self._whole = f"{key}.{OBJECTS}"
        self._state = state
        self._rest = rest
        self._tensors = flatten_state_dict({key: tensors})[0]
        self._paths: Mapping[str, Any] = {}

    def choose(self, stored: Stored) -> StateDict:
        for name in (self._whole, self._key):
            if name in stored:
                return {name: self}
        beneath = [name for name in stored.names if name.startswith(f"{self._key}.")]
        of_a_rank = re.compile(rf"{re.escape(self._key)}\.rank\d+")
        if not beneath or any(map(of_a_rank.fullmatch, beneath)):
            return {self._key if type(self._state) in PLAIN else self._whole: self}
        chosen: StateDict = {}
        here = flatten_state_dict({self._key: self._state})[0]
        for name in [*(here.keys() - {self._key}), *beneath]:
            if name in self._tensors:
                continue
            chosen[name] = self
            # In containers that are one object, and have no place for its tensors.
            if isinstance(here.get(name), torch.Tensor) and stored.is_tensor(name):
                chosen[name] = stored.meta_tensor(name)
        self._paths = stored.paths()
        return chosen

    def state(self, part: StateDict) -> Any:
        """The state with what has been loaded, which is nothing where that was not wanted.

        Args:
            part: the tensors that were loaded, and this.
        """
        values = dict(self.values)
        tensors = {name: value for name, value in part.items() if name != OBJECTS}
        if self._key in values:
            return values[self._key]
        if self._whole in values:
            stored, here = values[self._whole].tensors, tensor_count(tensors)
            if stored != here:
                raise CheckpointError(
                    f"the checkpoint has {stored} tensors of it, where now there are {here}. Give "
                    "it the state that it had before restoring; PerRank(...) saves states that "
                    "change their form"
                )
            return joined(values[self._whole].value, tensors)
        state = _with_leaves(joined(self._rest, tensors), self._key, values)
        root = {self._key: state}
        for name, value in values.items():
            path = self._paths.get(name) or tuple(name.split("."))
            if not isinstance(root[self._key], (dict, list)):
                root[self._key] = {} if isinstance(path[1], str) else []
            set_element(root, path, value)
        return root[self._key]


def _with_leaves(value: Any, name: str, leaves: StateDict) -> Any:
    """A copy of nested dicts and lists with other leaves, by name, which are taken away."""
    if name in leaves:
        return leaves.pop(name)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, part in value.items():
            copied[key] = _with_leaves(part, f"{name}.{key}", leaves)
        return copied
    if type(value) is list:
        return [_with_leaves(part, f"{name}.{i}", leaves) for i, part in enumerate(value)]
    return value


def parts_of(state: Any) -> tuple[Any, Any]:
    """(what is left of it without tensors, its tensors by their place), each possibly missing."""
    if isinstance(state, torch.Tensor):
        return _MISSING, state
    if type(state) is dict and state and all(map(_is_named_tensor, state.items())):
        # Nearly all of an optimizer's state.
        return _MISSING, state.copy()
    if type(state) in (dict, OrderedDict):
        items = [(key, parts_of(part)) for key, part in state.items()]
        if (
            type(state) is dict
            and state
            and all(left is _MISSING and isinstance(key, str) for key, (left, _) in items)
        ):
            rest: Any = _MISSING
        else:
            # In their order.
            rest = type(state)(
                (key, None if left is _MISSING else left) for key, (left, _) in items
            )
    elif type(state) is list and any(isinstance(part, _WITH_TENSORS) for part in state):
        items = [(index, parts_of(part)) for index, part in enumerate(state)]
        rest = [None if left is _MISSING else left for _, (left, _) in items]
    else:
        return state.copy() if type(state) is list else state, _MISSING
    tensors = {str(key): part for key, (_, part) in items if part is not _MISSING}
    if tensors and type(state) is not list:
        require_distinct_names(state)
    return rest, tensors or _MISSING


def require_distinct_names(state: Mapping[Any, Any]) -> None:
    if len(set(map(str, state))) < len(state):
        raise ValueError(
            f"keys of the dict with {', '.join(map(str, state))} are the same as text, such as 1 "
            "and '1', and name the same tensor; rename them"
        )


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[1], torch.Tensor) and isinstance(item[0], str)


def joined(rest: Any, tensors: Any) -> Any:
    if not isinstance(tensors, dict):
        return tensors
    if not tensors:
        return rest
    if rest is _MISSING or rest is None:
        rest = {}
    places = {str(key): key for key in (range(len(rest)) if isinstance(rest, list) else rest)}
    for name, part in tensors.items():
        place = places.get(name, name)
        left = rest[place] if name in places else _MISSING
        rest[place] = joined(left, part)
    return rest


def tensor_count(tree: Any) -> int:
    """How many tensors there are in nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return 1
    parts = tree.values() if isinstance(tree, dict) else tree if type(tree) is list else ()
    return sum(map(tensor_count, parts))


def wrapped_state(
    key: str, state: Any, tensors: int = 0, for_load: bool = False
) -> SimpleNamespace:
    """State as an object of the checkpoint; warns once where it will not load as it is."""
    if for_load:
        return SimpleNamespace(value=state, tensors=tensors)
    wrapped = SimpleNamespace(value=_on_cpu(state), tensors=tensors)
    warn_of_what_will_not_load(key, wrapped)
    return wrapped


def as_states(value: Any) -> Any:
    """What lies in nested dicts and lists of a checkpoint of :class:`AppState`, as what the values'
    ``state_dict()`` has returned. Tensors may be anything that stands for them."""
    if _is_wrapped(value):
        return value.value
    if type(value) is list:
        return [as_states(part) for part in value]
    if type(value) is not dict:
        return value
    if _is_wrapped(value.get(OBJECTS)):
        tensors = {name: part for name, part in value.items() if name != OBJECTS}
        value = joined(value[OBJECTS].value, tensors)
    else:
        value = {name: as_states(part) for name, part in value.items()}
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        # No name in a checkpoint stands for an empty dict.
        value.setdefault("state", {})
    return value


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, SimpleNamespace) and {"value", "tensors"} <= vars(value).keys()


def value_of_part(part: Any) -> Any:
    return part.value if isinstance(part, SimpleNamespace) else part
