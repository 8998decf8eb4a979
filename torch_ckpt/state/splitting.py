"""Splits a state into named tensors and one object with all other values, and joins them again."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any

import torch

from torch_ckpt.checkpoint.objects import PLAIN, warn_of_what_will_not_load

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
        moved = type(state)((key, _on_cpu(part)) for key, part in state.items())
        _copy_attributes(state, moved)
        return moved
    if type(state) in (list, tuple):
        return type(state)(map(_on_cpu, state))
    if isinstance(state, dict):
        moved = {key: _on_cpu(part) for key, part in state.items()}
        if any(part is not state[key] for key, part in moved.items()):
            return map_children(state, lambda _part, key: moved[key])
    return state


def _copy_attributes(source: Any, copied: Any) -> None:
    """Copies the attributes of an OrderedDict that consist of plain values, such as the versions in
    the ``_metadata`` of a module's state dict. Others might not be picklable."""
    if type(source) is OrderedDict and vars(source):
        plain = {name: value for name, value in vars(source).items() if is_plain(value)}
        vars(copied).update(copy.deepcopy(plain))


def is_plain(value: Any, leaves: Set[object] = PLAIN) -> bool:
    """Returns True if a value consists of numbers, texts and containers of them.

    Args:
        leaves: the types of the values that are no containers.
    """
    if type(value) in (dict, OrderedDict):
        value = [*value, *value.values()]
    if type(value) in (list, tuple):
        return all(is_plain(part, leaves) for part in value)
    return type(value) in leaves


def split_state(key: str, state: Any) -> Any:
    """Splits a state into a tree of tensors and one object with all other values, for a save.

    A state that is a tensor is returned unchanged.

    Raises:
        ValueError: a tensor has the reserved name, or two keys have the same text.
    """
    rest, tensors = split_tensors(state)
    if isinstance(tensors, torch.Tensor):
        return tensors
    tree = tensors if isinstance(tensors, dict) else {}
    if OBJECTS in tree:
        raise ValueError(f"the name {OBJECTS} is reserved; rename the tensor")
    rest = {} if rest is _MISSING else rest
    return {**tree, OBJECTS: wrap_state(key, rest, tensor_count(tree))}


def split_tensors(state: Any) -> tuple[Any, Any]:
    """Returns the state without its tensors, and a tree of its tensors; each may be _MISSING.

    Quantized tensors stay in the state: a new one cannot be created from its dtype and shape.
    """
    if isinstance(state, torch.Tensor):
        return (state, _MISSING) if state.is_quantized else (_MISSING, state)
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
            _copy_attributes(state, rest)
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
    key, value = item
    return isinstance(key, str) and isinstance(value, torch.Tensor) and not value.is_quantized


def join_tensors(rest: Any, tensors: Any) -> Any:
    """Merges the tensors of a state into its other part; the inverse of :func:`split_tensors`."""
    keys: dict[int, dict[str, Any]] = {}
    for parts, tensor in _named_tensors(tensors, ()):
        rest = place_tensor(rest, parts, tensor, keys)
    return rest


def _named_tensors(tree: Any, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the tensors in a tree, with the parts of their names."""
    if isinstance(tree, dict):
        for name, part in tree.items():
            yield from _named_tensors(part, (*parts, name))
    else:
        yield parts, tree


def place_tensor(
    rest: Any, parts: Sequence[str], tensor: Any, keys: dict[int, dict[str, Any]]
) -> Any:
    """Puts a tensor into a state without its tensors, and returns the state.

    Args:
        rest: the state; see :func:`split_tensors`.
        parts: the parts of the tensor's name. The keys of ``rest`` decide how the name is divided;
            beneath them, the parts do.
        keys: a cache for calls with the same state.
    """
    if not parts:
        return tensor
    root = rest = {} if rest is _MISSING or rest is None else rest
    while True:
        key, parts = next_key(rest, parts, keys)
        if not parts:
            rest[key] = tensor
            return root
        inner = rest[key] if isinstance(rest, list) or key in rest else None
        if inner is None:
            inner = rest[key] = {}
        rest = inner


def next_key(
    container: Any, parts: Sequence[str], keys: dict[int, dict[str, Any]]
) -> tuple[Any, Sequence[str]]:
    """Returns the key of a container with which a name begins, and the remaining parts.

    Args:
        container: list or dict without its tensors.
        parts, keys: see :func:`place_tensor`.
    """
    if isinstance(container, list):
        if not parts[0].isdecimal():
            parts = ".".join(parts).split(".")
        return int(parts[0]), parts[1:]
    if parts[0] in container:
        return parts[0], parts[1:]
    by_text = keys.setdefault(id(container), {str(key): key for key in container})
    if parts[0] in by_text:
        return by_text[parts[0]], parts[1:]
    name = ".".join(parts)
    end = len(name)
    while end > 0:
        if name[:end] in by_text:
            return by_text[name[:end]], name[end + 1 :].split(".") if end < len(name) else []
        end = name.rfind(".", 0, end)
    return parts[0], parts[1:]


def tensor_count(tree: Any) -> int:
    """Counts the tensors in nested dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return 1
    parts = tree.values() if isinstance(tree, dict) else tree if type(tree) is list else ()
    return sum(map(tensor_count, parts))


def wrap_state(key: str, state: Any, tensors: int = 0) -> SimpleNamespace:
    """Wraps a state in the object that the checkpoint stores.

    Warns once if the state has types that do not load without ``allow_pickle``.

    Args:
        key: key of the value, for the warning.
        state: the state without its tensors.
        tensors: number of tensors that were split off.
    """
    wrapped = SimpleNamespace(value=_on_cpu(state), tensors=tensors)
    warn_of_what_will_not_load(key, wrapped)
    return wrapped


def as_states(value: Any) -> Any:
    """Converts the layout of :func:`split_state` into the states that ``state_dict()`` returned.

    Args:
        value: nested dicts and lists of a checkpoint. Tensors may be replaced by placeholders.
    """
    if is_wrapped(value):
        return value.value
    if type(value) is list:
        return [as_states(part) for part in value]
    if type(value) is not dict:
        return value
    if is_wrapped(value.get(OBJECTS)):
        tensors = {name: part for name, part in value.items() if name != OBJECTS}
        value = join_tensors(value[OBJECTS].value, tensors)
    else:
        value = {name: as_states(part) for name, part in value.items()}
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        # A checkpoint does not store empty dicts.
        value.setdefault("state", {})
    return value


def is_wrapped(value: Any) -> bool:
    return isinstance(value, SimpleNamespace) and {"value", "tensors"} <= vars(value).keys()


def unwrap_state(part: Any) -> Any:
    """Returns the value of a wrapped state; returns other values unchanged."""
    return part.value if is_wrapped(part) else part


def is_container(value: Any) -> bool:
    """Returns True for a dict, list or tuple, and for subclasses of dict.

    Subclasses of list and tuple, such as named tuples, are leaves, as for torch's planners.
    """
    return type(value) in (list, tuple) or isinstance(value, dict)


def map_children(container: Any, each: Callable[[Any, Any], Any]) -> Any:
    """Returns a copy of a container, with each value replaced by ``each(value, key)``.

    The copy has the type and the attributes of the container. The order of the calls is the order
    of the values.

    Args:
        container: see :func:`is_container`.
        each: called with a value and its key or index.
    """
    kind = type(container)
    if kind is dict:
        return {key: each(value, key) for key, value in container.items()}
    if kind in (list, tuple):
        return kind(each(value, index) for index, value in enumerate(container))
    copied = copy.copy(container)
    for key, value in container.items():
        copied[key] = each(value, key)  # update() would add to the counts of a Counter
    return copied
