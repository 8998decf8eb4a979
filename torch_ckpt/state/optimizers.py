"""Reads optimizer state under torch's names, compares it with a checkpoint, and restores it."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from torch_ckpt._base.formatting import plural, some_of
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.objects import PLAIN
from torch_ckpt.errors import CheckpointError
from torch_ckpt.state.parameter_groups import pair_groups
from torch_ckpt.state.placeholders import Placeholder, Stored
from torch_ckpt.state.splitting import (
    OBJECTS,
    StateDict,
    is_plain,
    python_number,
    require_distinct_names,
    tensor_count,
    unwrap_state,
    wrap_state,
)
from torch_ckpt.state.state_targets import StateTarget

#: Key of the list of parameters that had no state. The checkpoint stores zeros for them.
_WITHOUT_STATE = "without_state"

# Options that torch's schedulers and averages add to a parameter group.
_OF_SCHEDULERS = frozenset(
    ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")
)

# Keys of a parameter group that are not options.
_NO_OPTIONS = ("params", "param_names")

# Types of the attributes of an optimizer that its stand-in gets.
_COPIED = PLAIN | {torch.dtype, torch.device}

# Maximum number of names that an error lists.
_MAX_NAMES = 10


def has_layout_of_torch(optimizer: Optimizer, saved: Any) -> bool:
    """Returns True if a state has the layout of ``Optimizer.state_dict()``, with the optimizer's
    parameters by number.

    Other classes and hooks of an optimizer may return any state, such as a flat dict, or a state
    under names.
    """
    if not isinstance(saved, dict):
        return False
    state, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    members = [group.get("params") if isinstance(group, dict) else None for group in groups]
    lists = [part for part in members if isinstance(part, list)]
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if len(lists) < len(groups) or list(map(len, lists)) != counts:
        return False
    numbers = [number for part in lists for number in part]
    return (
        all(type(number) is int for number in (*numbers, *state))
        and sorted(numbers) == list(range(sum(counts)))
        and state.keys() <= set(numbers)
        and all(isinstance(slots, dict) for slots in state.values())
    )


def optimizer_state(
    optimizer: Optimizer, saved: StateDict, names: list[str], for_load: bool
) -> StateDict:
    """Returns an optimizer's state, with parameter names instead of numbers.

    A parameter without state gets a state of zeros and is listed under ``without_state``, so that
    the names in a checkpoint do not depend on whether the optimizer has made a step.

    Args:
        saved: the result of the optimizer's ``state_dict()``.
        names: the names of the parameters, in order.
        for_load: True raises an error if no state can be created. False leaves the parameter
            without state.

    Raises:
        CheckpointError: ``for_load`` is True, and the optimizer cannot create its state without a
            gradient.
    """
    state = {names[number]: slots for number, slots in saved["state"].items() if slots}
    without: list[str] = []
    for group, named in _named_groups(optimizer, names):
        missing = [
            (name, parameter)
            for name, parameter in named
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


def _named_groups(
    optimizer: Optimizer, names: Iterable[str]
) -> Iterator[tuple[StateDict, list[tuple[str, torch.Tensor]]]]:
    """Yields each parameter group, with the names and parameters of its members."""
    remaining = iter(names)
    for group in optimizer.param_groups:
        yield group, [(next(remaining), parameter) for parameter in group["params"]]


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
    attributes = {n: value for n, value in vars(optimizer).items() if is_plain(value, _COPIED)}
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
    """Loads an optimizer's state from any of four layouts.

    1. The layout of :func:`to_stock_layout`: an object for each option of each group.
    2. The layout of ``StateDictOptions(flatten_optimizer_state_dict=True)``: an object for each
       option of each parameter.
    3. The layout of ``Optimizer.state_dict()``: like layout 1, but with parameter numbers instead
       of names.
    4. The layout of other objects, if the optimizer had states under other keys when it was saved.

    Args:
        key: key of the optimizer.
        names: names of its parameters, in order.
        state: the result of :func:`optimizer_state`; its tensors receive the loaded values.
        optimizer: the optimizer, which is not changed.
        as_object: loads layout 4.
    """

    def __init__(
        self,
        key: str,
        names: list[str],
        state: StateDict,
        optimizer: Optimizer,
        as_object: StateTarget,
    ) -> None:
        super().__init__()
        #: The target that loads the state, if the checkpoint has it in layout 4.
        self.as_object: StateTarget | None = None
        self._as_object = as_object
        self._prefix = f"{key}."
        self._optimizer = optimizer
        self._state = {
            **state,
            "state": {name: dict(slots) for name, slots in state["state"].items()},
        }
        self.numbers = {name: number for number, name in enumerate(names)}
        # True if the parameters are identified by numbers instead of names.
        self._is_numbered = names == [str(number) for number in range(len(names))]
        # Names of the stored values of each parameter, without the parameter's name, and True for
        # each tensor.
        self._stored_slots: dict[str, dict[str, bool]] = {}
        self._has_groups = False
        # Names of the parameters, by their names in the checkpoint.
        self._own_names = {name: name for name in names}
        # Names in the checkpoint's lists of parameters, if `rename` has changed them.
        self._renamed: dict[str, str] = {}
        # Paths of the tensors and objects in the state, by their names in the checkpoint.
        self._paths: dict[str, tuple[Any, ...]] = {}
        # Names that are loaded; None until the checkpoint is compared.
        self._loaded: Set[str] | None = None

    def choose(self, stored: Stored, name: str) -> StateDict:
        if f"{self._prefix}{OBJECTS}" in stored:
            self.as_object = self._as_object
            self.values = self.as_object.values
            return self.as_object.choose(stored, name)
        is_tensor = {name: stored.is_tensor(name) for name in self._as_object.beneath(stored)}
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
        self._stored_slots = {
            parameter: {slot: is_tensor[name] for name, slot in slots.items()}
            for parameter, slots in names_of.items()
            if parameter in self.numbers
        }
        self._create_states_of_frozen()
        self._find_paths()
        # Stock torch saves no state for a parameter that never had a gradient; torch_ckpt saves
        # zeros.
        is_new = self._state["state"].keys() <= set(self._state[_WITHOUT_STATE])
        may_lack = not is_ours and (bool(self._stored_slots) or is_new)
        chosen: StateDict = {}
        for name, path in self._paths.items():
            if path[0] == "state" and may_lack and path[1] not in names_of:
                self._state["state"].pop(path[1], None)
            else:
                value = _at(self._state, path)
                if isinstance(value, torch.Tensor):
                    chosen[name] = value
                elif not is_tensor.get(name):
                    # If the checkpoint has a tensor instead, refusals() reports it.
                    chosen[name] = self
        for name, has_tensor in is_tensor.items():
            if not has_tensor:
                chosen[name] = self
            elif name.startswith(groups_prefix):
                chosen[name] = stored.meta_tensor(name)
        return chosen

    def _group_by_parameter(
        self, stored: Iterable[str], own_names: dict[str, str]
    ) -> dict[str, dict[str, str]]:
        """Groups names in the checkpoint by parameter. Names of unknown parameters are grouped
        under "".

        Returns:
            For each parameter, the ends of the names after the parameter, by name.
        """
        prefix = f"{self._prefix}state."
        found: dict[str, dict[str, str]] = {}
        for name in stored:
            if name.startswith(prefix):
                parts = _split_after_parameter(name.removeprefix(prefix), own_names)
                parameter, slot = (own_names[parts[0]], parts[1]) if parts else ("", name)
                found.setdefault(parameter, {})[name] = slot
        return found

    def _create_states_of_frozen(self) -> None:
        """Creates the missing states of frozen parameters for which the checkpoint has tensors.
        Such parameters were frozen after they had been trained.

        Other frozen parameters get no state, which would need as much memory as the parameters.
        """
        for group, named in _named_groups(self._optimizer, self.numbers):
            missing = [
                (name, parameter)
                for name, parameter in named
                if name not in self._state["state"]
                and not parameter.requires_grad
                and any(self._stored_slots.get(name, {}).values())
            ]
            # If a state cannot be created, refusals() reports the parameter.
            with contextlib.suppress(Exception):
                for name, slots in _initial_states(self._optimizer, group, missing):
                    self._state["state"][name] = slots
                    self._state[_WITHOUT_STATE] = [*self._state[_WITHOUT_STATE], name]

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

    def refusals(self, stored: Stored, is_chosen: Callable[[str], bool]) -> list[str]:
        if self.as_object is not None:
            return self.as_object.refusals(stored, is_chosen)
        reasons: list[str] = []
        states, groups = f"{self._prefix}state.", f"{self._prefix}param_groups."
        names = [*self._paths, *self._as_object.beneath(stored)]
        without = self._prefix + _WITHOUT_STATE
        if any(name.startswith(states) and is_chosen(name) for name in names):
            reasons += self._differing_states()
            if without in stored and not is_chosen(without):
                # Otherwise, the zeros of parameters without state would become their states.
                found = stored.read([without])
                self.values |= found
                self._find_renamed(stored, {n: unwrap_state(v) for n, v in found.items()})
        names = [name for name in names if name.startswith(groups)]
        options = {name for name in names if is_chosen(name)}
        reasons += self._options_of_another_class(options)
        members = [name for name in names if self._has_groups and self._is_member_list(name)]
        if options and not all(map(is_chosen, members)):
            reasons.append(
                "names= chooses options without the lists of parameters, which identify the groups."
                f" Add {groups + '*.params'!r} to names="
            )
        elif options:
            # Read before the comparison, whose errors are differences and not damage.
            values: StateDict = {}
            if self._has_groups:
                identities = [n for n in options if n.endswith((".params", ".name"))]
                values = stored.read(n for n in identities if not stored.is_tensor(n))
            try:
                self._compare_groups(stored, options, values)
            except CheckpointError as error:
                reasons.append(
                    f"{error}. Group the parameters as they were saved, and change the groups "
                    f"after the restore; or keep the current options with {_names_without(groups)}"
                )
        return [f"{self._prefix[:-1]}: {reason}" for reason in reasons]

    def matched(self, loaded: Set[str]) -> None:
        self._loaded = loaded

    def _differing_states(self) -> Iterator[str]:
        """Yields an error if parameters and checkpoint have different state tensors."""
        present: dict[str, dict[str, bool]] = {name: {} for name in self._stored_slots}
        for path in self._paths.values():
            if path[0] == "state" and path[1] in present:
                is_tensor = isinstance(_at(self._state, path), torch.Tensor)
                present[path[1]][".".join(map(str, path[2:]))] = is_tensor
        differ = [n for n, has in self._stored_slots.items() if not _fit(has, present[n])]
        if not differ:
            return
        kind, way_out = type(unwrapped(self._optimizer)).__name__, self._way_out()
        has, needs = (sorted(_tops(of[differ[0]])) for of in (self._stored_slots, present))
        if has != needs:
            yield (
                "another class of optimizer was saved, or the same class with other options: for "
                f"{some_of(differ, _MAX_NAMES)}, the checkpoint has {some_of(has)}, and {kind} "
                f"has {some_of(needs) or 'no state'}. {way_out}"
            )
            return
        counts = [
            f"{name} ({plural(sum(self._stored_slots[name].values()), 'tensor')} stored, "
            f"{sum(present[name].values())} present)"
            for name in differ
        ]
        yield (
            f"{kind} and the checkpoint have different numbers of state tensors for these "
            f"parameters: {some_of(counts, _MAX_NAMES)}. {way_out}. If the structure of an "
            "optimizer's state changes, as with LBFGS, save it as PerRank(optimizer)"
        )

    def _options_of_another_class(self, names: Iterable[str]) -> Iterator[str]:
        """Yields an error if the checkpoint has the options of another class of optimizer. Stored
        states identify the class better, so options are compared only without them.

        Args:
            names: the stored names of the options that are loaded.
        """
        if any(self._stored_slots.values()):
            return
        prefix = f"{self._prefix}param_groups."
        stored: set[str] = set()
        for name in names:
            below = name.removeprefix(prefix)
            if self._has_groups:
                stored.add(below.partition(".")[2])
            else:
                found = _split_after_parameter(below, self.numbers)
                stored |= set() if found is None else {found[1]}
        present = {option for group in self._optimizer.param_groups for option in group}
        # An option can contain tensors, whose names begin with the name of the option.
        unknown = {option.partition(".")[0] for option in stored}
        unknown -= present | _OF_SCHEDULERS | {*_NO_OPTIONS, "name"}
        lacking = self._optimizer.defaults.keys() - stored
        if unknown and (lacking or self._state["state"]):
            yield (
                "another class of optimizer was saved, or the same class with other options: the "
                f"checkpoint has no states of the parameters, and {some_of(sorted(unknown))} in "
                f"the groups, which {type(unwrapped(self._optimizer)).__name__} lacks. "
                f"{self._way_out()}"
            )

    def _is_member_list(self, name: str) -> bool:
        """Returns True for the stored name of a group's list of parameters."""
        parts = name.removeprefix(f"{self._prefix}param_groups.").split(".")
        return len(parts) == 2 and parts[0].isdecimal() and parts[1] == "params"

    def _way_out(self) -> str:
        return (
            "Create the optimizer as it was saved, or leave it out with "
            f"{_names_without(self._prefix)}"
        )

    def _compare_groups(self, stored: Stored, names: Set[str], values: StateDict) -> None:
        """Raises CheckpointError if options are unknown, or do not fit the optimizer's groups.

        Args:
            names: the stored names of the options that are loaded.
            values: the values that identify groups, by name.
        """
        prefix = f"{self._prefix}param_groups."
        if not self._has_groups:
            found = (_split_after_parameter(n.removeprefix(prefix), self.numbers) for n in names)
            known = {parts[0] for parts in found if parts is not None}
            lacking = [name for name in self.numbers if name not in known]
            if lacking:
                raise CheckpointError(
                    f"the checkpoint has no options for {some_of(lacking, _MAX_NAMES)}"
                )
            return
        if any(name.endswith(".params") and name not in values for name in names):
            return  # only torch's code can read them; state() compares the groups
        self._find_renamed(stored, values)
        options = {n.removeprefix(prefix): unwrap_state(values.get(n)) for n in sorted(names)}
        groups = self._groups_from_numbers(options)
        for index, number in enumerate(self._pair(groups)):
            tensors = [o for o in groups[number] if stored.is_tensor(f"{prefix}{number}.{o}")]
            _require_tensors(self._optimizer.param_groups[index], index, tensors)

    def _find_renamed(self, stored: Stored, values: StateDict) -> None:
        """Finds the parameters whose states were renamed by ``rename``, which does not rename them
        in the groups, because their names are values there."""
        lists = [value for value in values.values() if isinstance(value, list)]
        old_names = {name for value in lists for name in value if isinstance(name, str)}
        for stored_name, parameter in self._own_names.items():
            for slot in self._stored_slots.get(parameter, ()):
                name = f"{self._prefix}state.{stored_name}.{slot}"
                old = stored.old_name(name)
                if old == name or not old.endswith(f".{slot}"):
                    continue
                old = old.removesuffix(f".{slot}")
                while old and old not in old_names:
                    old = old.partition(".")[2]
                if old:
                    self._renamed[old] = parameter

    def state(self) -> StateDict:
        """Returns the state with the loaded values, by name. Its groups are in the order of the
        optimizer's groups.

        Raises:
            CheckpointError: the options of a group are unknown.
        """
        values = {name.removeprefix(self._prefix): v for name, v in self.values.items()}
        state = {**self._state, "state": dict(self._state["state"] or {})}
        # Drop states that were created for this load and not loaded completely.
        for name in self._incomplete().intersection(self._state[_WITHOUT_STATE]):
            state["state"].pop(name, None)
        without = values.pop(_WITHOUT_STATE, [])
        state[_WITHOUT_STATE] = [self._renamed.get(name, name) for name in without]
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
            stored_groups = self._groups_from_numbers(groups)
            state["param_groups"] = [stored_groups[n] for n in self._pair(stored_groups)]
        elif groups:
            current = self._state["param_groups"]
            state["param_groups"] = _groups_from_parameters(groups, current, self.numbers)
        return state

    def _incomplete(self) -> set[str]:
        """Returns the parameters with a state of which not all values are loaded."""
        paths, loaded = self._paths.items(), self._loaded
        if loaded is None:
            return set()
        return {path[1] for name, path in paths if path[0] == "state" and name not in loaded}

    def _pair(self, groups: list[StateDict]) -> list[int]:
        """Returns the number of the stored group for each of the optimizer's groups."""
        return pair_groups(groups, self._state["param_groups"], exact=self._is_numbered)

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
        """Returns the current names of parameters in a stored group.

        ``Optimizer.state_dict()`` stores numbers, and ``rename`` does not rename values.
        """
        if not any(isinstance(parameter, int) for parameter in parameters):
            return [self._renamed.get(name, name) for name in parameters]
        names, numbers = list(self.numbers), self.numbers
        if any(self._own_names.get(str(n)) == str(n) and numbers[str(n)] != n for n in parameters):
            raise CheckpointError(
                "the checkpoint has the optimizer's own state_dict(), which numbers the "
                "parameters, but the module's parameters have numbers as names, in a different "
                "order"
            )
        self._is_numbered = True
        return [names[n] if n < len(names) else str(n) for n in parameters]


def _names_without(prefix: str) -> str:
    """Returns the option of a load that leaves out all names with a prefix."""
    return f"names=lambda name: not name.startswith({prefix!r})"


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


def _tops(slots: Iterable[str]) -> set[str]:
    """Returns the names of states, without the names of the values that they contain."""
    return {slot.partition(".")[0] for slot in slots}


def _fit(stored: dict[str, bool], present: dict[str, bool]) -> bool:
    """Returns True if a parameter has the state tensors that the checkpoint has for it.

    The checkpoint may have a number for a tensor, as for step counters.

    Args:
        stored, present: True for each tensor, by the name of the state.
    """
    return all(present.get(slot, False) for slot, is_tensor in stored.items() if is_tensor) and all(
        slot in stored for slot, is_tensor in present.items() if is_tensor
    )


def _groups_from_parameters(
    options: StateDict, current: list[StateDict], parameters: Container[str]
) -> list[StateDict]:
    """Builds parameter groups from options whose names begin with the parameter name.

    The checkpoint has no groups. The current groups are kept.

    Raises:
        CheckpointError: the checkpoint has different options for parameters of one group, or none.
    """
    options_of: dict[str, StateDict] = {}
    for name, value in options.items():
        found = _split_after_parameter(name, parameters)
        if found is not None:
            options_of.setdefault(found[0], {})[found[1]] = value
    groups: list[StateDict] = []
    for number, group in enumerate(current):
        members = group["params"]
        first = options_of.get(members[0], {}) if members else {}
        for name in members:
            differ = _differing_options(first, options_of.get(name, {}))
            if differ or name not in options_of:
                raise CheckpointError(
                    f"the parameters of group {number} do not belong to the same group in the "
                    f"checkpoint: {members[0]} and {name} differ in {some_of(differ)}. Group the "
                    "parameters as they were saved, and change the groups after the restore"
                )
        groups.append({**first, "params": members})
    _warn_of_equal_options(groups, current)
    return groups


def _warn_of_equal_options(stored: list[StateDict], current: list[StateDict]) -> None:
    """Warns if groups lose the options in which they differ, because the checkpoint has the same
    options for all their parameters. Perhaps these parameters were one group."""
    for number, group in enumerate(current):
        for other in range(number):
            lost = _differing_options(group, current[other])
            is_used = group["params"] and current[other]["params"]
            if lost and is_used and not _differing_options(stored[number], stored[other]):
                warn(
                    f"the checkpoint has the same options for the parameters of group {other} and "
                    f"group {number}, so both get the same {some_of(lost)}. If the groups were "
                    "created after the save, set their options again",
                )


def _differing_options(some: StateDict, others: StateDict) -> list[str]:
    def are_equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return [
        option
        for option in sorted(some.keys() | others.keys())
        if option not in _NO_OPTIONS
        and not (option in some and option in others and are_equal(some[option], others[option]))
    ]


def _require_tensors(group: StateDict, number: int, options: Iterable[str]) -> None:
    """Raises CheckpointError if options that were saved as tensors are not tensors now."""
    lost = sorted(o for o in options if not isinstance(group.get(o), torch.Tensor))
    if lost:
        raise CheckpointError(
            f"{', '.join(lost)} of group {number} was saved as a tensor, but is not a tensor now. "
            "Create the optimizer with a tensor for this option"
        )


def set_optimizer_state(optimizer: Optimizer, found: OptimizerState) -> None:
    """Restores an optimizer from a loaded state.

    Raises:
        CheckpointError: the optimizer's groups or options do not match the checkpoint.
    """
    if found.as_object is not None:
        optimizer.load_state_dict(found.as_object.state())
        return
    loaded = found.state()
    numbers = found.numbers
    without = set(loaded.pop(_WITHOUT_STATE))
    # One rank has recorded `without`. Another rank may have saved a state for the parameter, so
    # check that the stored values are zeros.
    state = {
        numbers[name]: slots
        for name, slots in sorted(
            loaded["state"].items(), key=lambda item: numbers.get(item[0], -1)
        )
        if name in numbers and not (name in without and _is_zero(slots))
    }
    groups = []
    next_number = iter(range(len(numbers)))
    pairs = zip(optimizer.param_groups, loaded["param_groups"], strict=True)
    for index, (group, stored) in enumerate(pairs):
        options = {option: v for option, v in stored.items() if option not in _NO_OPTIONS}
        tensors = [option for option, v in options.items() if isinstance(v, torch.Tensor)]
        _require_tensors(group, index, tensors)
        # Options that the checkpoint lacks keep their current values.
        members = [next(next_number) for _ in group["params"]]
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


def _is_zero(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        # Check only this rank's part of a DTensor, since the full tensor would need a collective.
        local = state.to_local() if isinstance(state, DTensor) else state
        return not local.bool().any()
    if isinstance(state, dict):
        return all(map(_is_zero, state.values()))
    return all(map(_is_zero, state)) if isinstance(state, list) else True


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that holds the state. For a wrapper, such as Accelerate's, that is the
    wrapped optimizer; otherwise it is the optimizer itself."""
    while True:
        held = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
        inner = next((o for o in held if o is not optimizer and o.state is optimizer.state), None)
        if inner is None:
            return optimizer
        optimizer = inner
