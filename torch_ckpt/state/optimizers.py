"""Reads optimizer state under torch's names, compares it with a checkpoint, and restores it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Container, Iterable, Iterator, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_ckpt._base.formatting import plural, some_of
from torch_ckpt._base.wrapped_optimizers import unwrapped
from torch_ckpt.checkpoint.objects import PLAIN
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.load import Placeholder, Stored
from torch_ckpt.state.splitting import (
    StateDict,
    python_number,
    require_distinct_names,
    tensor_count,
    unwrap_state,
    wrap_state,
)

#: Key of the list of parameters that had no state. The checkpoint stores zeros for them.
_WITHOUT_STATE = "without_state"

# Keys of a parameter group that are not options.
_NO_OPTIONS = ("params", "param_names")

# Maximum number of names that an error lists.
_MAX_NAMES = 10


def optimizer_state(optimizer: Optimizer, names: list[str], for_load: bool) -> StateDict:
    """Returns an optimizer's state, with parameter names instead of numbers.

    A parameter without state gets a state of zeros and is listed under ``without_state``, so that
    the names in a checkpoint do not depend on whether the optimizer has made a step.

    Args:
        names: the names of the parameters, in order.
        for_load: True raises an error if no state can be created. False leaves the parameter
            without state.

    Raises:
        CheckpointError: ``for_load`` is True, and the optimizer cannot create its state without a
            gradient.
    """
    saved = optimizer.state_dict()
    state = {names[number]: slots for number, slots in saved["state"].items() if slots}
    without: list[str] = []
    numbers = iter(range(len(names)))
    for group in optimizer.param_groups:
        missing = [
            (names[number], parameter)
            for parameter, number in zip(group["params"], numbers, strict=False)
            if parameter.requires_grad and not optimizer.state.get(parameter)
        ]
        try:
            for name, slots in _initial_states(optimizer, group, missing):
                state[name] = slots
                without.append(name)
        except Exception as error:
            if not for_load or optimizer.state:
                continue
            raise CheckpointError(
                f"{type(unwrapped(optimizer)).__name__} has no state before its first step, and a "
                f"step with zero gradients does not create it ({error}). Run a step before the "
                "restore, or save the optimizer as PerRank(optimizer)"
            ) from error
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in saved["param_groups"]
    ]
    return {**saved, "state": state, "param_groups": groups, _WITHOUT_STATE: without}


def _initial_states(
    optimizer: Optimizer, group: StateDict, named: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, StateDict]]:
    """Yields the states, filled with zeros, that a first step would create for parameters of a
    group.

    A stand-in creates the states. It is an instance of the optimizer's class that is set up by
    ``Optimizer.__setstate__``, as if unpickled, and steps a new parameter. It shares nothing with
    the optimizer.
    """
    if not named:
        return
    optimizer = unwrapped(optimizer)
    options = copy.deepcopy({k: v for k, v in group.items() if k not in _NO_OPTIONS})
    groups: list[StateDict] = [{**options, "params": []}]
    # Copy only attributes of plain types: others may refer to parameters or another optimizer.
    attributes = {name: value for name, value in vars(optimizer).items() if _is_plain(value)}
    stand_in = object.__new__(type(optimizer))
    stand_in.__setstate__(
        copy.deepcopy({**attributes, "defaults": optimizer.defaults})
        | {"state": defaultdict(dict), "param_groups": groups}
    )
    if stand_in.param_groups is not groups or stand_in.state:
        raise TypeError(f"{type(optimizer).__name__} keeps its parameters in another object")
    # The hooks around step() belong to the program and must not run.
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    for name, parameter in named:
        own = nn.Parameter(torch.zeros_like(parameter))
        own.grad = torch.zeros_like(parameter)
        groups[0]["params"] = [own]
        with torch.random.fork_rng([parameter.device] if parameter.is_cuda else []):
            step(stand_in)
        slots = stand_in.state.pop(own, {})
        if not slots:
            return
        for slot in slots.values():
            if isinstance(slot, torch.Tensor):
                slot.zero_()
        yield name, slots


def _is_plain(value: Any) -> bool:
    if type(value) in (dict, list, tuple):
        return all(map(_is_plain, value.values() if type(value) is dict else value))
    return type(value) in (*PLAIN, torch.dtype, torch.device)


def to_stock_layout(key: str, state: StateDict) -> StateDict:
    """Converts an optimizer's state to the names and values of torch's ``get_state_dict``.

    If torch would split a container and lose types or keys, the container is wrapped in an object.

    Args:
        key: key of the optimizer.
        state: the result of :func:`optimizer_state`.
    """

    def convert(name: str, value: Any) -> Any:
        if type(value) in (dict, OrderedDict) and tensor_count(value):
            require_distinct_names(value)
            return {part: convert(f"{name}.{part}", inner) for part, inner in value.items()}
        if type(value) is list and tensor_count(value):
            return [convert(f"{name}.{index}", inner) for index, inner in enumerate(value)]
        return convert_leaf(name, value)

    def convert_leaf(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        value = python_number(value)
        if type(value) in (list, tuple) and all(type(part) in PLAIN for part in value):
            return copy.copy(value)
        return value if type(value) in PLAIN else wrap_state(name, value)

    groups = [
        {
            option: convert_leaf(f"{key}.param_groups.{number}.{option}", value)
            for option, value in group.items()
        }
        for number, group in enumerate(state["param_groups"])
    ]
    slots = {
        name: {
            # Most values are tensors. Avoid formatting a name for them.
            slot: value
            if isinstance(value, torch.Tensor)
            else convert(f"{key}.state.{name}.{slot}", value)
            for slot, value in slots.items()
        }
        for name, slots in state["state"].items()
    }
    others = {
        name: convert(f"{key}.{name}", value)
        for name, value in state.items()
        if name not in ("state", "param_groups")
    }
    return {**others, "state": slots, "param_groups": groups}


class OptimizerState(Placeholder):
    """Loads an optimizer's state from any of three layouts.

    1. The layout of :func:`to_stock_layout`: an object for each option of each group.
    2. The layout of ``StateDictOptions(flatten_optimizer_state_dict=True)``: an object for each
       option of each parameter.
    3. The layout of ``Optimizer.state_dict()``: like layout 1, but with parameter numbers instead
       of names.

    Args:
        key: key of the optimizer.
        names: names of its parameters, in order.
        state: the result of :func:`optimizer_state`; its tensors receive the loaded values.
    """

    def __init__(self, key: str, names: list[str], state: StateDict) -> None:
        super().__init__()
        self._prefix = f"{key}."
        self._state = {
            **state,
            "state": {name: dict(slots) for name, slots in state["state"].items()},
        }
        self.numbers = {name: number for number, name in enumerate(names)}
        #: Number of tensors that the checkpoint has for each parameter.
        self.stored_counts: dict[str, int] = {}
        self._has_groups = False
        # Names of the parameters, by their names in the checkpoint.
        self._own_names = {name: name for name in names}
        # Paths of the tensors and objects in the state, by their names in the checkpoint.
        self._paths: dict[str, tuple[Any, ...]] = {}

    def choose(self, stored: Stored, _name: str) -> StateDict:
        is_tensor = {
            name: stored.is_tensor(name) for name in stored.names if name.startswith(self._prefix)
        }
        groups_prefix = f"{self._prefix}param_groups."
        self._has_groups = f"{groups_prefix}0.params" in stored
        if not any(name.startswith(groups_prefix) for name in is_tensor):
            return {groups_prefix[:-1]: self}
        is_ours = self._prefix + _WITHOUT_STATE in stored
        names_of = self._group_by_parameter(is_tensor, self._own_names)
        if not (is_ours or names_of.keys() & self.numbers.keys()):
            # No name is known. Try the numbers of Optimizer.state_dict().
            by_number = {str(number): name for name, number in self.numbers.items()}
            found = self._group_by_parameter(is_tensor, by_number)
            if found.keys() & self.numbers.keys():
                self._own_names, names_of = by_number, found
        self._find_paths()
        self.stored_counts = {
            parameter: sum(is_tensor[name] for name in names)
            for parameter, names in names_of.items()
        }
        # Stock torch saves no state for a parameter that never had a gradient; torch_ckpt saves
        # zeros.
        may_lack = not is_ours and any(name in self.numbers for name in names_of)
        chosen: StateDict = {}
        for name, path in self._paths.items():
            if path[0] == "state" and may_lack and path[1] not in names_of:
                self._state["state"].pop(path[1], None)
            else:
                value = _at(self._state, path)
                if isinstance(value, torch.Tensor):
                    chosen[name] = value
                elif not is_tensor.get(name):
                    # If the checkpoint has a tensor instead, the tensor counts differ, and
                    # set_optimizer_state() raises an error.
                    chosen[name] = self
        for name, has_tensor in is_tensor.items():
            if not has_tensor:
                chosen[name] = self
            elif name.startswith(groups_prefix):
                chosen[name] = stored.meta_tensor(name)
        return chosen

    def _group_by_parameter(
        self, stored: Iterable[str], own_names: dict[str, str]
    ) -> dict[str, list[str]]:
        """Groups names in the checkpoint by parameter. Names of unknown parameters are grouped
        under ""."""
        prefix = f"{self._prefix}state."
        found: dict[str, list[str]] = {}
        for name in stored:
            if name.startswith(prefix):
                parts = _split_after_parameter(name.removeprefix(prefix), own_names)
                found.setdefault(own_names[parts[0]] if parts else "", []).append(name)
        return found

    def _find_paths(self) -> None:
        def add(name: str, value: Any, *path: Any) -> None:
            is_slots = len(path) == 2 and path[0] == "state"
            if is_slots or (type(value) in (dict, OrderedDict, list) and tensor_count(value)):
                parts = enumerate(value) if isinstance(value, list) else value.items()
                for key, part in parts:
                    add(f"{name}.{key}", part, *path, key)
            else:
                self._paths[name] = path

        self._paths.clear()
        slots_of = self._state["state"]
        for stored, own in self._own_names.items():
            if own in slots_of:
                add(f"{self._prefix}state.{stored}", slots_of[own], "state", own)
        for name, value in self._state.items():
            if name not in ("state", "param_groups", _WITHOUT_STATE):
                add(self._prefix + name, value, name)

    def state(self) -> tuple[StateDict, bool]:
        """Returns the state with the loaded values, by name, and whether groups were loaded."""
        values = {name.removeprefix(self._prefix): v for name, v in self.values.items()}
        if not values:
            return self._state, False
        state = {**self._state, _WITHOUT_STATE: values.pop(_WITHOUT_STATE, [])}
        groups: StateDict = {}
        for name, stored in values.items():
            value = unwrap_state(stored)
            path = self._paths.get(self._prefix + name)
            top, _, below = name.partition(".")
            if top == "param_groups":
                groups[below] = value
            elif path is not None:
                _at(state, path[:-1])[path[-1]] = value
            elif top == "state":
                found = _split_after_parameter(below, self._own_names)
                if found is not None:
                    state["state"].setdefault(self._own_names[found[0]], {})[found[1]] = value
            else:
                set_element(state, tuple(name.split(".")), value)
        if groups and self._has_groups:
            state["param_groups"] = self._groups_from_numbers(groups)
        elif groups:
            state["param_groups"] = _groups_from_parameters(
                groups, self._state["param_groups"], self.numbers
            )
        return state, bool(groups)

    def _groups_from_numbers(self, options: StateDict) -> list[StateDict]:
        """Builds parameter groups from options whose names begin with the group number."""
        groups: dict[str, StateDict] = defaultdict(lambda: {"params": []})
        for name, value in options.items():
            number, _, option = name.partition(".")
            groups[number][option] = self._parameter_names(value) if option == "params" else value
        # Compare sets first: a huge group number in a damaged checkpoint must not create that many
        # groups.
        numbers = [str(number) for number in range(len(groups))]
        if groups.keys() != set(numbers):
            raise CheckpointError(
                f"the checkpoint's parameter groups are numbered {', '.join(groups)} instead of "
                f"from 0 to {len(groups) - 1}"
            )
        return [groups[number] for number in numbers]

    def _parameter_names(self, parameters: list[Any]) -> list[Any]:
        """Replaces parameter numbers, which ``Optimizer.state_dict()`` stores in groups, with
        names."""
        if not any(isinstance(parameter, int) for parameter in parameters):
            return parameters
        names, numbers = list(self.numbers), self.numbers
        if any(self._own_names.get(str(n)) == str(n) and numbers[str(n)] != n for n in parameters):
            raise CheckpointError(
                "the checkpoint has the optimizer's own state_dict(), which numbers the "
                "parameters, but the module's parameters have numbers as names, in a different "
                "order"
            )
        return [names[n] if n < len(names) else str(n) for n in parameters]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _split_after_parameter(name: str, parameters: Container[str]) -> tuple[str, str] | None:
    """Splits a name into the longest matching parameter name and the part after it."""
    end = name.rfind(".")
    while end > 0:
        if name[:end] in parameters:
            return name[:end], name[end + 1 :]
        end = name.rfind(".", 0, end)
    return None


def _groups_from_parameters(
    options: StateDict, current: list[StateDict], parameters: Container[str]
) -> list[StateDict]:
    """Builds parameter groups from options whose names begin with the parameter name.

    Keeps the grouping of the current optimizer. Leaves out a parameter if its options differ from
    the options of the first parameter in its group.
    """
    options_of: dict[str, StateDict] = {}
    for name, value in options.items():
        found = _split_after_parameter(name, parameters)
        if found is not None:
            options_of.setdefault(found[0], {})[found[1]] = value
    groups = []
    for group in current:
        members = [name for name in group["params"] if name in options_of]
        first = options_of[members[0]] if members else {}
        members = [name for name in members if _are_equal_options(options_of[name], first)]
        groups.append({**first, "params": members})
    return groups


def _are_equal_options(some: StateDict, others: StateDict) -> bool:
    def are_equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return some.keys() == others.keys() and all(are_equal(v, others[k]) for k, v in some.items())


def set_optimizer_state(optimizer: Optimizer, found: OptimizerState) -> None:
    """Restores an optimizer from a loaded state.

    Raises:
        CheckpointError: the optimizer's parameters, groups or options do not match the checkpoint.
    """
    loaded, has_groups = found.state()
    numbers = found.numbers
    names = list(numbers)
    without = set(loaded.pop(_WITHOUT_STATE))
    slots_of = loaded["state"] or {}
    if has_groups:
        stored = {k: n for k, n in found.stored_counts.items() if k in numbers and n}
        if not slots_of and stored:
            raise CheckpointError(
                f"the checkpoint has per-parameter optimizer state, but "
                f"{type(optimizer).__name__} has none. Restore into an optimizer of the class that "
                "was saved, and freeze parameters only after restoring"
            )
        present = {name: tensor_count(slots) for name, slots in slots_of.items()}
        _require_same_structure(stored, present, numbers.keys() - without)
    # One rank has recorded `without`. Another rank may have saved a state for the parameter, so
    # check that the stored values are zeros.
    state = {
        numbers[name]: slots
        for name, slots in slots_of.items()
        if name in numbers and not (name in without and _is_zero(slots))
    }
    stored_groups = loaded["param_groups"]
    group_of = {name: index for index, g in enumerate(stored_groups) for name in g["params"]}
    groups = []
    next_number = iter(range(len(names)))
    for index, group in enumerate(optimizer.param_groups):
        members = [next(next_number) for _ in group["params"]]
        candidates = {group_of.get(names[number]) for number in members} or {index}
        stored_index = candidates.pop()
        if candidates or stored_index is None or stored_index >= len(stored_groups):
            raise CheckpointError(
                f"the parameters of group {index} ({names[members[0]] if members else 'empty'}, "
                "...) do not belong to the same group in the checkpoint, so the group's learning "
                "rate and other options are unknown. Group the parameters as they were saved. If "
                "ranks optimize different parameters, as pipeline stages do, use different keys in "
                "the state"
            )
        options = {k: v for k, v in stored_groups[stored_index].items() if k not in _NO_OPTIONS}
        lost = [
            option
            for option, value in options.items()
            if isinstance(value, torch.Tensor) and not isinstance(group.get(option), torch.Tensor)
        ]
        if lost:
            raise CheckpointError(
                f"{', '.join(sorted(lost))} of group {index} was saved as a tensor, but is not a "
                "tensor now. Create the optimizer with a tensor for this option"
            )
        # Options that the checkpoint lacks keep their current values.
        groups.append({**group, **options, "params": members})
    options_before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict({**loaded, "state": state, "param_groups": groups})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, slots in state.items():
        restored = optimizer.state[parameters[number]]
        for slot, value in slots.items():
            # load_state_dict() may have cast the value to the parameter's dtype.
            if isinstance(value, torch.Tensor) and slot in restored:
                restored[slot] = value
    for group, before in zip(optimizer.param_groups, options_before, strict=True):
        for option, tensor in before.items():
            # Captured CUDA graphs refer to the tensor's address, so keep the tensor.
            if isinstance(tensor, torch.Tensor) and option in group:
                with torch.no_grad():
                    tensor.copy_(torch.as_tensor(group[option]))
                group[option] = tensor


def _require_same_structure(
    stored: dict[str, int], present: dict[str, int], names: Set[str]
) -> None:
    """Raises CheckpointError if a parameter's number of state tensors differs from the stored
    number."""
    differ = [n for n in sorted(names) if stored.get(n) not in (None, present.get(n, 0))]
    if differ:
        counts = [
            f"{name} ({plural(stored[name], 'tensor')} stored, {present.get(name, 0)} present)"
            for name in differ
        ]
        raise CheckpointError(
            "the optimizer and the checkpoint have different numbers of state tensors for these "
            f"parameters: {some_of(counts, _MAX_NAMES)}. Restore with the saved options and the "
            "same trainable parameters, and change them only after the restore. If the structure "
            "of an optimizer's state changes, as with LBFGS, save it as PerRank(optimizer)"
        )


def _is_zero(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        # Check only this rank's part of a DTensor, since the full tensor would need a collective.
        local = state.to_local() if isinstance(state, DTensor) else state
        return not local.bool().any()
    if isinstance(state, dict):
        return all(map(_is_zero, state.values()))
    return all(map(_is_zero, state)) if isinstance(state, list) else True
