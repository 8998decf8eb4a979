"""Targets for the states of values: loads what a checkpoint has into the own state of a value.

``load_state_dict()`` receives the object that the value's own ``state_dict()`` returned, with its
type, its attributes and its ``_metadata``. A load fills this object in place:

- A stored tensor is loaded into the tensor of the same name, if that tensor fits: its shape and
  kind of number are equal, its dtype can represent all stored numbers, and none of its elements
  share memory with others. Otherwise, a new tensor replaces the value of that name. In plain dicts,
  which no ``load_state_dict()`` restores, tensors must have the stored names and shapes.
- All other values are replaced.
- A value whose structure has changed gets the structure that was saved.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from torch_ckpt._base.formatting import plural, some_of
from torch_ckpt.errors import CheckpointError
from torch_ckpt.state.filled_memory import FilledMemory, overlaps_itself
from torch_ckpt.state.placeholders import Placeholder, Stored, describe_sharded
from torch_ckpt.state.splitting import (
    OBJECTS,
    is_wrapped,
    map_children,
    next_key,
    place_tensor,
    unwrap_state,
)

_MISSING: Any = object()


class _Index(int):
    """An index of a list within a path; other parts of a path are keys of dicts."""


Path: TypeAlias = tuple[Any, ...]


class ModuleValue(Placeholder):
    """Loads a value of a module that is not filled in place: its extra state, or an object. The
    checkpoint has an object or, if stock torch saved it, a tensor or the leaves of a dict or list.

    Args:
        own: the value.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        self._own = own
        self._leaves: StateTarget | None = None

    @property
    def text_keys(self) -> list[str]:
        """See :class:`StateTarget`."""
        return [] if self._leaves is None else self._leaves.text_keys

    def choose(self, stored: Stored, name: str) -> dict[str, Any]:
        self._leaves = None
        if name in stored or not stored.beneath(f"{name}."):
            device = self._own.device if isinstance(self._own, torch.Tensor) else _CPU
            return {name: stored.meta_tensor(name, device) if stored.is_tensor(name) else self}
        leaves = self._leaves = StateTarget(name, self._own, is_stateful=True, keys=())
        self.values = leaves.values
        return leaves.choose(stored, name)

    def refusals(self, stored: Stored, is_chosen: Callable[[str], bool]) -> list[str]:
        return [] if self._leaves is None else self._leaves.refusals(stored, is_chosen)

    def loaded(self) -> Any:
        """Returns the loaded value, or the own value if nothing was loaded."""
        if self._leaves is not None:
            return self._leaves.state()
        return next(map(unwrap_state, self.values.values()), self._own)


_CPU = torch.device("cpu")


class ModuleTarget(dict[str, Any]):
    """The target for a module: its tensors, and placeholders for its other values, by their names
    in the checkpoint.

    Args:
        own: the object that the module's ``state_dict()`` returned.
        names: the names in the checkpoint, by the names in ``own``.
    """

    def __init__(self, own: dict[str, Any], names: Mapping[str, str]) -> None:
        super().__init__()
        self._own = own
        self._names = names
        for name, value in own.items():
            if is_tensor_of_module(name, value):
                self[names[name]] = value
            else:
                self[names[name]] = ModuleValue(value)

    @property
    def text_keys(self) -> list[str]:
        """See :class:`StateTarget`."""
        return [
            key for part in self.values() if isinstance(part, ModuleValue) for key in part.text_keys
        ]

    def state(self) -> dict[str, Any]:
        """Returns the module's own state dict with the loaded values."""
        for name, stored_name in self._names.items():
            value = self[stored_name]
            self._own[name] = value.loaded() if isinstance(value, ModuleValue) else value
        return self._own


def is_tensor_of_module(name: str, value: Any) -> bool:
    """Returns True if a value of a module's state dict is filled in place. Extra state is replaced
    even if it is a tensor, because its length may change."""
    return isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state"


class _NoNewTensor(Placeholder):
    """Loads nothing, in place of a stored tensor that would be new in a dict of the program."""

    wanted = (
        "no new tensor in this dict (create it before the restore, or save the dict as PerRank)"
    )


class StateTarget(Placeholder):
    """The target for any other value. Loads what the checkpoint has for it from any of three
    layouts.

    1. The layout of :func:`split_state`: each tensor, and one object with all other values.
    2. One tensor or object under the key itself.
    3. The layout of stock torch: each leaf of nested dicts and lists.

    Args:
        key: key of the value.
        own: the state of the value: the object that its ``state_dict()`` returned, or the value
            itself.
        is_stateful: True if ``load_state_dict()`` receives the state. Then nested plain dicts and
            lists are replaced, not filled, because the object might still use them.
        keys: the keys of the mapping.
    """

    def __init__(self, key: str, own: Any, *, is_stateful: bool, keys: Iterable[str]) -> None:
        super().__init__()
        self._key = key
        self._own = own
        self._is_stateful = is_stateful
        self._keys = keys
        self._object_name = f"{key}.{OBJECTS}"
        # Targets by stored name, in the order of the checkpoint. Objects have this placeholder as
        # their target.
        self._chosen: dict[str, Any] = {}
        # Own tensors in plain dicts that the checkpoint lacks, next to its object.
        self._lacking_tensors: dict[str, torch.Tensor] = {}
        # Stored tensors that would be new in plain dicts, and the number of all stored tensors.
        self._extra: list[str] = []
        self._tensor_count = 0
        # Reasons why a stored tensor cannot be restored, by name.
        self._refused: dict[str, str] = {}
        # Stored paths of the names that the own state lacks.
        self._stored_paths: dict[str, Any] = {}
        # The result of _keys_of(), by the id of the dict.
        self._own_keys: dict[int, tuple[dict[str, Any], bool]] = {}
        #: Names of loaded values whose keys were perhaps numbers, and are now texts.
        self.text_keys: list[str] = []
        self._loads_all = False

    @cached_property
    def _leaves(self) -> dict[str, tuple[Path, Any]]:
        """Path and value of each leaf of the own state, by name."""
        found: dict[str, tuple[Path, Any]] = {}
        for path, value in _leaves(self._own, ()):
            found.setdefault(_name(self._key, path), (path, value))
        return found

    @cached_property
    def _containers(self) -> dict[str, bool]:
        """The containers of the leaves, by name: True for a list."""
        return {
            _name(self._key, path[:at]): isinstance(part, _Index)
            for path, _value in self._leaves.values()
            for at, part in enumerate(path)
        }

    def choose(self, stored: Stored, _name: str) -> dict[str, Any]:
        key = self._key
        chosen: dict[str, Any] = {}
        self._chosen, self._lacking_tensors, self._refused = {}, {}, {}
        self._extra, self._tensor_count = [], 0
        self._loads_all = stored.loads_all
        has_object = self._object_name in stored
        if has_object:
            names = [name for name in self.beneath(stored) if stored.is_tensor(name)]
            chosen[self._object_name] = self
            self._tensor_count = len(names)
        elif key in stored:
            names = [key]
        else:
            names = self.beneath(stored)
            is_empty = not names and next(self._lacking(()), None) is None
            if is_empty and self._is_stateful and not stored.object_keys:
                # Stock torch stores nothing for an empty state; torch_ckpt stores an object.
                return {}
            if self._is_per_rank(stored, names):
                names = []
            if not names and self._is_stateful:
                return {self._object_name: self}
            chosen = {name: self for name in self._lacking(names)}
        filled = FilledMemory()
        for name in names:
            if not self._is_stateful and stored.is_tensor(name) and self._is_in_own_dict(name):
                # The program reads the tensors of this dict, so a new one would have no effect.
                self._extra.append(name)
                chosen[name] = _NoNewTensor()
                continue
            self._chosen[name] = self._target(stored, name, filled)
        if not self._is_stateful and has_object:
            lacking = [name for name in self._lacking(names) if self._is_own_tensor(name)]
            self._lacking_tensors = {name: self._leaves[name][1] for name in lacking}
        # Read the paths while the metadata is available. The object has the keys of its tensors, so
        # only names with several parts are ambiguous.
        least = 1 if has_object else 0
        unknown = [
            name
            for name in (*self._chosen, *self._extra)
            if name not in self._leaves and name[len(key) + 1 :].count(".") >= least
        ]
        stored_paths = stored.paths() if unknown and names != [key] else {}
        self._stored_paths = {name: stored_paths.get(name) for name in unknown}
        self.text_keys = []
        return {**chosen, **self._chosen, **self._lacking_tensors}

    def beneath(self, stored: Stored) -> list[str]:
        """Returns the stored names that begin with the key. Leaves out the names that begin with a
        longer key. The mapping may lack this key."""
        prefix = f"{self._key}."
        keys = (*self._keys, *stored.object_keys)
        longer = tuple(f"{key}." for key in keys if key.startswith(prefix))
        return [n for n in stored.beneath(prefix) if not f"{n}.".startswith(longer)]

    def _is_per_rank(self, stored: Stored, names: Iterable[str]) -> bool:
        """Returns True if the value was saved as PerRank, and not as a dict with such keys."""
        pattern = re.compile(rf"{re.escape(self._key)}\.rank\d+")
        for name in names:
            if pattern.fullmatch(name) and name not in self._leaves and not stored.is_tensor(name):
                return is_wrapped(stored.read([name]).get(name))
        return False

    def refusals(self, stored: Stored, is_chosen: Callable[[str], bool]) -> list[str]:
        reasons = [reason for name, reason in self._refused.items() if is_chosen(name)]
        if self._object_name in stored and is_chosen(self._object_name):
            omitted = [n for n in self._chosen if n not in self._leaves and not is_chosen(n)]
            if omitted:
                reasons.append(
                    f"{self._key}: names= omits {some_of(omitted)}, and the state has no value of "
                    "this name. Add it to names=, or omit the complete value"
                )
        return reasons

    def _is_in_own_dict(self, name: str) -> bool:
        """Returns True if a name is new in a dict of the own state: not in a list, and not in place
        of a value such as None."""
        if name in self._leaves:
            return False
        for end in reversed(_dots(name)):
            if name[:end] in self._leaves:
                return _is_empty_dict(self._leaves[name[:end]][1])
            if name[:end] in self._containers:
                return not self._containers[name[:end]]
        return False

    def replaced(self, state: Any) -> list[str]:
        """Returns the names of own tensors that other values have replaced.

        Args:
            state: the result of :meth:`state`.
        """
        return [
            name
            for name, (path, value) in self._leaves.items()
            if isinstance(value, torch.Tensor)
            and not value.is_meta
            and not _has_or_drops(state, path, value)
        ]

    def state(self) -> Any:
        """Returns the own state with the loaded values. Values that were not loaded are unchanged.

        Raises:
            CheckpointError: the checkpoint is inconsistent.
        """
        if self._key in self.values:
            return self._filled(unwrap_state(self.values[self._key]))
        if self._object_name in self.values:
            return self._filled(self._joined(self.values[self._object_name]))
        if not self._chosen or not (self.values or self._loads_all):
            return self._own
        # Stock torch does not store the types of dicts.
        return self._filled(self._nested(), keeps_types=True)

    # --- private ---------------------------------------------------------------------------------

    def _is_own_tensor(self, name: str) -> bool:
        return isinstance(self._leaves.get(name, _NO_LEAF)[1], torch.Tensor)

    def _target(self, stored: Stored, name: str, filled: FilledMemory) -> Any:
        """Returns the target for a stored value: the own tensor if it fits, or a new one."""
        if not stored.is_tensor(name):
            return self
        own = self._leaves.get(name, _NO_LEAF)[1]
        if not isinstance(own, torch.Tensor):
            if stored.is_sharded(name):
                self._refused[name] = describe_sharded(name)
            return stored.meta_tensor(name, torch.device("cpu"))
        is_plain = type(own) in (torch.Tensor, nn.Parameter) and not own.is_quantized
        if not is_plain or own.layout != torch.strided:
            return own
        if not self._is_stateful:
            if not own.is_meta and overlaps_itself(own):
                self._refused[name] = (
                    f"{name}: elements of the tensor share memory, as in an expanded tensor, so "
                    "they cannot have the stored values. Replace the tensor with a copy of it, "
                    "such as tensor.contiguous(), before the restore"
                )
            return own
        # Tensors that share memory can have been different tensors when they were saved.
        if stored.fits(name, own) and (own.is_meta or filled.add(own)):
            return own
        return stored.meta_tensor(name, torch.device("cpu") if own.is_meta else own.device)

    def _lacking(self, stored: Iterable[str], *, with_empty: bool = False) -> Iterator[str]:
        """Yields the names of own leaves that a checkpoint in the layout of stock torch lacks.

        Args:
            with_empty: also yield the names of empty dicts, which stock torch does not store.
        """
        names = set(stored)
        containers = {name[:end] for name in names for end in _dots(name)}
        for name, (path, value) in self._leaves.items():
            # The leaf is a container in the checkpoint, or inside a list that is shorter there.
            is_replaced = name in names or name in containers
            for at, part in enumerate(path):
                container = _name(self._key, path[:at])
                is_replaced |= container in names
                is_replaced |= isinstance(part, _Index) and container in containers
            if not is_replaced and (with_empty or not _is_empty_dict(value)):
                yield name

    def _loaded(self, name: str) -> Any:
        """Returns the loaded value of a name, or the own value if it was not loaded."""
        if name in self.values:
            return unwrap_state(self.values[name])
        target = self._chosen.get(name)
        if isinstance(target, torch.Tensor) and not target.is_meta:
            return target
        return self._leaves.get(name, _NO_LEAF)[1]

    def _path(self, name: str) -> Path:
        """Returns the path of a name beneath the key."""
        if name in self._leaves:
            return self._leaves[name][0]
        path: Any = self._stored_paths.get(name)
        # Do not trust the stored path.
        if isinstance(path, tuple) and ".".join(map(str, path)) == name:
            # The key of a module's extra state has several parts.
            ends = (at for at in range(len(path)) if ".".join(map(str, path[:at])) == self._key)
            end = next(ends, None)
            if end is not None:
                return tuple(
                    _Index(part) if type(part) is int else str(part) for part in path[end:]
                )
        return tuple(name[len(self._key) + 1 :].split("."))

    def _with_own_keys(self, name: str) -> Path:
        """Returns the path of a value that was saved without the types of keys: with the keys of
        own dicts, and integers as new keys of own dicts of integers."""
        if name in self._leaves:
            return self._leaves[name][0]
        path: list[Any] = []
        container: Any = self._own
        for part in self._path(name):
            key: Any = part
            if isinstance(part, _Index):
                is_present = isinstance(container, list) and part < len(container)
            else:
                keys, are_integers = self._keys_of(container)
                is_present = part in keys
                number = _integer(part)
                if is_present or (are_integers and number is not None):
                    key = keys.get(part, number)
                elif number is not None and name not in self.text_keys[-1:]:
                    self.text_keys.append(name)
            path.append(key)
            container = container[key] if is_present else None
        return tuple(path)

    def _keys_of(self, container: Any) -> tuple[dict[str, Any], bool]:
        """Returns the keys of a dict by their texts, and True if all of them are integers."""
        if not isinstance(container, Mapping):
            return {}, False
        found = self._own_keys.get(id(container))
        if found is None:
            keys = {str(key): key for key in container}
            are_integers = bool(keys) and all(type(key) is int for key in container)
            found = self._own_keys[id(container)] = keys, are_integers
        return found

    def _joined(self, stored: Any) -> Any:
        """Returns the stored state: its object, with the tensors in their places."""
        if not is_wrapped(stored) or stored.tensors != self._tensor_count:
            saved = plural(getattr(stored, "tensors", 0), "tensor")
            raise CheckpointError(
                f"{self._object_name} was saved with {saved}, but the checkpoint has "
                f"{self._tensor_count}. If a renaming or another key of the state uses the name of "
                "a tensor, change it"
            )
        state = stored.value
        keys: dict[int, dict[str, Any]] = {}
        for name in self._chosen:
            parts = [str(part) for part in self._path(name)]
            state = place_tensor(state, parts, self._loaded(name), keys)
        # The load skips tensors that either side lacks, so the own dicts are unchanged.
        for name in self._extra:
            self._remove_placeholder(state, name, keys)
        for name, tensor in self._lacking_tensors.items():
            state = _set(state, self._leaves[name][0], tensor)
        return state

    def _remove_placeholder(self, state: Any, name: str, keys: dict[int, dict[str, Any]]) -> None:
        """Removes the None that stands for a tensor, or for a dict with only tensors, from the
        stored object. An own empty dict of this name is kept."""
        parts: Sequence[str] = [str(part) for part in self._path(name)]
        while parts and isinstance(state, list | dict):
            key, parts = next_key(state, parts, keys)
            if isinstance(state, dict) and state.get(key, _MISSING) is None:
                end = len(name) - sum(len(part) + 1 for part in parts)
                if name[:end] in self._leaves:
                    state[key] = self._leaves[name[:end]][1]
                else:
                    del state[key]
                return
            if isinstance(state, dict) and key not in state:
                return
            state = state[key]

    def _nested(self) -> Any:
        """Returns the state as nested dicts and lists: stored values, and own values that were not
        loaded."""
        root: Any = _MISSING
        for name in [*self._chosen, *self._lacking(self._chosen, with_empty=True)]:
            value = self._loaded(name)
            if value is not _MISSING:
                root = _set(root, self._with_own_keys(name), value)
        return root

    def _filled(self, loaded: Any, *, keeps_types: bool = False) -> Any:
        is_stateful = self._is_stateful
        keeps_types |= is_stateful
        return fill(self._own, loaded, replaces_plain=is_stateful, keeps_types=keeps_types)


_NO_LEAF: tuple[Path, Any] = ((), _MISSING)


def fill(
    own: Any,
    loaded: Any,
    *,
    replaces_plain: bool = True,
    keeps_types: bool = True,
    is_root: bool = True,
) -> Any:
    """Fills a state with a loaded one and returns it. Returns the loaded one if their types differ.

    Args:
        own: the object that ``state_dict()`` returned, or a part of it.
        loaded: the state that was saved, or a part of it.
        replaces_plain: True replaces nested plain dicts and lists, which have no attributes.
        keeps_types: True fills mappings of any type: the root, and others from plain dicts.
        is_root: True for the complete state.
    """
    is_filled = is_root or not replaces_plain
    if isinstance(loaded, Mapping) and isinstance(own, MutableMapping):
        parts = {
            key: fill(
                own.get(key),
                part,
                replaces_plain=replaces_plain,
                keeps_types=keeps_types,
                is_root=False,
            )
            for key, part in loaded.items()
        }
        has_same_type = type(own) is type(loaded)
        has_same_type |= keeps_types and (is_root or type(loaded) is dict)
        if not (has_same_type and (is_filled or type(own) is not dict)):
            return map_children(loaded, lambda _part, key: parts[key])
        own.clear()
        for key, part in parts.items():
            own[key] = part  # update() would add to the counts of a Counter
        if isinstance(loaded, OrderedDict) and isinstance(own, OrderedDict):
            for name, value in vars(loaded).items():
                vars(own).setdefault(name, value)
        return own
    if type(loaded) is list and isinstance(own, list):
        items = [
            fill(
                own[index] if index < len(own) else None,
                part,
                replaces_plain=replaces_plain,
                keeps_types=keeps_types,
                is_root=False,
            )
            for index, part in enumerate(loaded)
        ]
        if not is_filled:
            return items
        own[:] = items
        return own
    return loaded


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields the leaves of a state and their paths, with the names of torch's planners. An empty
    dict is a leaf, too."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(value, list) and not _is_leaf(value):
        for index, part in enumerate(value):
            yield from _leaves(part, (*path, _Index(index)))
    else:
        yield path, value


def _is_leaf(value: list[Any]) -> bool:
    return not any(
        isinstance(part, torch.Tensor | Mapping) or (isinstance(part, list) and not _is_leaf(part))
        for part in value
    )


def _is_empty_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _name(key: str, path: Path) -> str:
    return ".".join((key, *map(str, path)))


def _integer(text: str) -> int | None:
    """Returns the integer with exactly this text; None if there is none."""
    digits = text.removeprefix("-")
    # Python refuses to convert long texts, which are no keys of programs.
    is_integer = digits.isascii() and digits.isdecimal() and len(digits) < 20
    return int(text) if is_integer and str(int(text)) == text else None


def _dots(name: str) -> list[int]:
    return [at for at, letter in enumerate(name) if letter == "."]


def _has_or_drops(state: Any, path: Path, tensor: torch.Tensor) -> bool:
    """Returns True if a state has a tensor at a path, or a list that is too short for the path."""
    for part in path:
        if isinstance(state, list) and isinstance(part, _Index):
            if part >= len(state):
                return True
            state = state[part]
        elif isinstance(state, Mapping) and part in state:
            state = state[part]
        else:
            return False
    return state is tensor


def _set(root: Any, path: Path, value: Any) -> Any:
    """Sets a value in nested dicts and lists, which are created as needed, and returns the root."""
    if not path:
        return value
    part = path[0]
    if isinstance(part, _Index):
        if not isinstance(root, list):
            root = []
        # A checkpoint does not contain empty dicts, so a missing part of a list was one.
        root.extend({} for _ in range(part + 1 - len(root)))
        root[part] = _set(root[part], path[1:], value)
        return root
    if not isinstance(root, dict):
        root = {}
    root[part] = _set(root.get(part), path[1:], value)
    return root
