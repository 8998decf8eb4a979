"""The state of optimizers under stock's names: read, compared with what is stored, and set."""

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

from torch_ckpt._base.formatting import plural
from torch_ckpt._base.wrapped_optimizers import unwrapped
from torch_ckpt.checkpoint.objects import PLAIN
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.load import Discovered, Stored
from torch_ckpt.state.trees import (
    StateDict,
    python_number,
    require_distinct_names,
    tensor_count,
    value_of_part,
    wrapped_state,
)

#: Those of an optimizer's parameters whose stored states are zeros that no step has made.
_WITHOUT_STATE = "without_state"

# Of a group of an optimizer's parameters.
_NO_OPTIONS = ("params", "param_names")

# That an error lists.
_MOST_NAMES = 10


def optimizer_state(optimizer: Optimizer, names: list[str], for_load: bool) -> StateDict:
    """An optimizer's state by names. Parameters that have none yet are listed, and have the state
    of zeros that a first step would start from: so a checkpoint's names depend on no step."""
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
                f"{type(unwrapped(optimizer)).__name__} has no state before its first step, and "
                f"makes none for a zero gradient ({error}); do a step before the restore, or save "
                "it as PerRank(optimizer)"
            ) from error
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in saved["param_groups"]
    ]
    return {**saved, "state": state, "param_groups": groups, _WITHOUT_STATE: without}


def _initial_states(
    optimizer: Optimizer, group: StateDict, named: list[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, StateDict]]:
    """Yields the states that parameters of a group would get, all zeros.

    They come from a stand-in that shares nothing with the optimizer: an instance of its class that
    is set up as an unpickled one (``Optimizer.__setstate__``) and steps a parameter of its own.
    """
    if not named:
        return
    optimizer = unwrapped(optimizer)
    options = copy.deepcopy({k: v for k, v in group.items() if k not in _NO_OPTIONS})
    groups: list[StateDict] = [{**options, "params": []}]
    # Of its other attributes those that refer to nothing else: no parameters, no other optimizer.
    attributes = {name: value for name, value in vars(optimizer).items() if _is_plain(value)}
    stand_in = object.__new__(type(optimizer))
    stand_in.__setstate__(
        copy.deepcopy({**attributes, "defaults": optimizer.defaults})
        | {"state": defaultdict(dict), "param_groups": groups}
    )
    if stand_in.param_groups is not groups or stand_in.state:
        raise TypeError(f"{type(optimizer).__name__} keeps its parameters in another object")
    # Without the hooks around it, which are the program's.
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


def as_stock_state(key: str, state: StateDict) -> StateDict:
    """An optimizer's state to save, with the names and values of torch's ``get_state_dict``. What
    torch would take apart, and so lose types or keys of, is wrapped."""

    def stored(name: str, value: Any) -> Any:
        if type(value) in (dict, OrderedDict) and tensor_count(value):
            require_distinct_names(value)
            return {place: stored(f"{name}.{place}", part) for place, part in value.items()}
        if type(value) is list and tensor_count(value):
            return [stored(f"{name}.{place}", part) for place, part in enumerate(value)]
        return stored_leaf(name, value)

    def stored_leaf(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        value = python_number(value)
        if type(value) in (list, tuple) and all(type(part) in PLAIN for part in value):
            return copy.copy(value)
        return value if type(value) in PLAIN else wrapped_state(name, value)

    groups = [
        {
            option: stored_leaf(f"{key}.param_groups.{number}.{option}", value)
            for option, value in group.items()
        }
        for number, group in enumerate(state["param_groups"])
    ]
    slots = {
        name: {
            # Nearly all are tensors, whose names are never needed.
            slot: value
            if isinstance(value, torch.Tensor)
            else stored(f"{key}.state.{name}.{slot}", value)
            for slot, value in slots.items()
        }
        for name, slots in state["state"].items()
    }
    rest = {
        name: stored(f"{key}.{name}", value)
        for name, value in state.items()
        if name not in ("state", "param_groups")
    }
    return {**rest, "state": slots, "param_groups": groups}


class OptimizerState(Discovered):
    """An optimizer's state, to load, from any of three layouts.

    1. That of :func:`as_stock_state`: an object for each option of each group.
    2. That of ``StateDictOptions(flatten_optimizer_state_dict=True)``: one for each parameter's.
    3. That of ``Optimizer.state_dict()`` itself: as the first one, with numbers of parameters.

    Args:
        key: of the optimizer.
        names: of its parameters, in their order.
        state: as of :func:`optimizer_state`; its tensors receive the values.
    """

    def __init__(self, key: str, names: list[str], state: StateDict) -> None:
        super().__init__()
        self._prefix = f"{key}."
        #: How many tensors the checkpoint has of each parameter.
        self.stored_counts: dict[str, int] = {}
        self._has_groups = False
        self._set_names(names, names, state)

    def _set_names(self, names: list[str], before: list[str], state: StateDict) -> None:
        name_of = dict(zip(before, names, strict=True))
        self.numbers = {name: number for number, name in enumerate(names)}
        self._state = {
            **state,
            "state": {name_of[name]: dict(slots) for name, slots in state["state"].items()},
            "param_groups": [
                {**group, "params": [name_of[name] for name in group["params"]]}
                for group in state["param_groups"]
            ],
            _WITHOUT_STATE: [name_of[name] for name in state[_WITHOUT_STATE]],
        }
        #: Tensors and objects here, by the name that they have in a checkpoint of layout 1 or 2.
        self._leaves: dict[str, tuple[Any, ...]] = {}
        for name, slots in self._state["state"].items():
            self._add_leaves(slots, "state", name)
        for name, value in self._state.items():
            if name not in ("state", "param_groups", _WITHOUT_STATE):
                self._add_leaves(value, name)

    def _add_leaves(self, value: Any, *path: Any) -> None:
        is_slots = len(path) == 2 and path[0] == "state"
        if is_slots or (type(value) in (dict, OrderedDict, list) and tensor_count(value)):
            parts = enumerate(value) if isinstance(value, list) else value.items()
            for place, part in parts:
                self._add_leaves(part, *path, place)
        else:
            self._leaves[self._prefix + ".".join(map(str, path))] = path

    @staticmethod
    def _of_parameters(
        names: Iterable[str], of_state: str, parameters: Container[str]
    ) -> dict[str, list[str]]:
        """Groups names in the checkpoint by parameter; "" for parameters unknown here."""
        found: dict[str, list[str]] = {}
        for name in names:
            if name.startswith(of_state):
                parts = _of_parameter(name.removeprefix(of_state), parameters)
                found.setdefault(parts[0] if parts else "", []).append(name)
        return found

    def choose(self, stored: Stored) -> StateDict:
        is_tensor = {
            name: stored.is_tensor(name) for name in stored.names if name.startswith(self._prefix)
        }
        of_groups = f"{self._prefix}param_groups."
        of_state = f"{self._prefix}state."
        self._has_groups = f"{of_groups}0.params" in stored
        if not any(name.startswith(of_groups) for name in is_tensor):
            return {of_groups[:-1]: self}
        is_of_names = self._prefix + _WITHOUT_STATE in stored
        of_parameters = self._of_parameters(is_tensor, of_state, self.numbers)
        if not (is_of_names or of_parameters.keys() & self.numbers.keys()):
            # Nothing has a name from here: perhaps numbers, as of Optimizer.state_dict().
            names = list(self.numbers)
            numbers = [str(number) for number in range(len(names))]
            by_number = self._of_parameters(is_tensor, of_state, numbers)
            if by_number.keys() & set(numbers):
                self._set_names(numbers, names, self._state)
                of_parameters = by_number
        self.stored_counts = {
            parameter: sum(is_tensor[name] for name in names)
            for parameter, names in of_parameters.items()
        }
        # Stock torch saves no state of what never had a gradient, where ours has zeros.
        may_lack = not is_of_names and any(name in self.numbers for name in of_parameters)
        chosen: StateDict = {}
        for name, path in self._leaves.items():
            if path[0] == "state" and may_lack and path[1] not in of_parameters:
                self._state["state"].pop(path[1], None)
            else:
                value = _at(self._state, path)
                if isinstance(value, torch.Tensor):
                    chosen[name] = value
                elif not is_tensor.get(name):
                    chosen[name] = self  # where a tensor has taken its place, their numbers differ
        for name, is_one in is_tensor.items():
            if not is_one:
                chosen[name] = self
            elif name.startswith(of_groups):
                chosen[name] = stored.meta_tensor(name)
        return chosen

    def state(self) -> tuple[StateDict, bool]:
        """The state with what has been loaded, by names; and whether its groups have been."""
        values = {name.removeprefix(self._prefix): v for name, v in self.values.items()}
        if not values:
            return self._state, False
        state = {**self._state, _WITHOUT_STATE: values.pop(_WITHOUT_STATE, [])}
        groups: StateDict = {}
        for name, stored in values.items():
            value = value_of_part(stored)
            path = self._leaves.get(self._prefix + name)
            top, _, rest = name.partition(".")
            if top == "param_groups":
                groups[rest] = value
            elif path is not None:
                _at(state, path[:-1])[path[-1]] = value
            elif top == "state":
                found = _of_parameter(rest, self.numbers)
                if found is not None:
                    state["state"].setdefault(found[0], {})[found[1]] = value
            else:
                set_element(state, tuple(name.split(".")), value)
        if groups and self._has_groups:
            _name_parameters(groups, list(self.numbers))
        if groups:
            state["param_groups"] = (
                _groups_by_number(groups)
                if self._has_groups
                else _groups_by_parameter(groups, self._state["param_groups"], self.numbers)
            )
        return state, bool(groups)


def _name_parameters(options: StateDict, names: list[str]) -> None:
    """Names the parameters of groups, which ``Optimizer.state_dict()`` lists by numbers."""
    for option, value in options.items():
        if option.endswith(".params") and any(isinstance(number, int) for number in value):
            options[option] = [names[n] if n < len(names) else str(n) for n in value]
            if any(str(n) in names and names.index(str(n)) != n for n in value):
                raise CheckpointError(
                    "the checkpoint has the optimizer's own state_dict(), whose parameters have "
                    "numbers, and the module here names other parameters by these numbers"
                )


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for place in path:
        value = value[place]
    return value


def _of_parameter(name: str, parameters: Container[str]) -> tuple[str, str] | None:
    """A name as that of a parameter, and what follows it."""
    end = name.rfind(".")
    while end > 0:
        if name[:end] in parameters:
            return name[:end], name[end + 1 :]
        end = name.rfind(".", 0, end)
    return None


def _groups_by_number(options: StateDict) -> list[StateDict]:
    """The groups of a state whose options are named by the numbers of groups."""
    groups: dict[str, StateDict] = defaultdict(lambda: {"params": []})
    for name, value in options.items():
        number, _, option = name.partition(".")
        groups[number][option] = value
    # The numbers come from the checkpoint: a large one must not make as many groups.
    numbers = [str(number) for number in range(len(groups))]
    if groups.keys() != set(numbers):
        raise CheckpointError(f"the checkpoint has groups {', '.join(groups)}, not 0 and on")
    return [groups[number] for number in numbers]


def _groups_by_parameter(
    options: StateDict, here: list[StateDict], parameters: Container[str]
) -> list[StateDict]:
    """The same where options are named by parameters: in the groups that there are here, of which
    those are left out whose options are others."""
    of_parameter: dict[str, StateDict] = {}
    for name, value in options.items():
        found = _of_parameter(name, parameters)
        if found is not None:
            of_parameter.setdefault(found[0], {})[found[1]] = value
    groups = []
    for group in here:
        members = [name for name in group["params"] if name in of_parameter]
        first = of_parameter[members[0]] if members else {}
        alike = [name for name in members if _same_options(of_parameter[name], first)]
        groups.append({**first, "params": alike})
    return groups


def _same_options(some: StateDict, others: StateDict) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return torch.equal(a, b)
        return type(a) is type(b) and bool(a == b)

    return some.keys() == others.keys() and all(same(v, others[k]) for k, v in some.items())


def set_optimizer_state(optimizer: Optimizer, found: OptimizerState) -> None:
    loaded, has_groups = found.state()
    numbers = found.numbers
    names = list(numbers)
    without = set(loaded.pop(_WITHOUT_STATE))
    slots_here = loaded["state"] or {}
    if has_groups:
        # Of an older version, or another rank, the list may be that of another one's state.
        stored = {k: n for k, n in found.stored_counts.items() if k in numbers and n}
        if not slots_here and stored:
            raise CheckpointError(
                f"the checkpoint has states of parameters, and {type(optimizer).__name__} keeps "
                "none: was another optimizer saved, or is all of it frozen now?"
            )
        here = {name: tensor_count(slots) for name, slots in slots_here.items()}
        _require_same_state(stored, here, numbers.keys() - without)
    # The list is that of one rank, at the save or here: another one may have had a state.
    state = {
        numbers[name]: slots
        for name, slots in slots_here.items()
        if name in numbers and not (name in without and _is_zero(slots))
    }
    stored_groups = loaded["param_groups"]
    of_name = {name: index for index, g in enumerate(stored_groups) for name in g["params"]}
    groups = []
    own = iter(range(len(names)))
    for index, group in enumerate(optimizer.param_groups):
        members = [next(own) for _ in group["params"]]
        places = {of_name.get(names[number]) for number in members} or {index}
        place = places.pop()
        if places or place is None or place >= len(stored_groups):
            raise CheckpointError(
                f"the parameters of group {index} ({names[members[0]] if members else 'empty'}, "
                "...) are not of one group in the checkpoint, so its learning rate and other "
                "options are not known. Group them as they were; ranks that optimize different "
                "parameters, as pipeline stages do, need different keys in the state"
            )
        options = {k: v for k, v in stored_groups[place].items() if k not in _NO_OPTIONS}
        lost = [
            option
            for option, value in options.items()
            if isinstance(value, torch.Tensor) and not isinstance(group.get(option), torch.Tensor)
        ]
        if lost:
            raise CheckpointError(
                f"{', '.join(sorted(lost))} of group {index} was saved as a tensor and is none "
                "now; make the optimizer with a tensor there"
            )
        # An option that the checkpoint does not know keeps the value that it has here.
        groups.append({**group, **options, "params": members})
    options_before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict({**loaded, "state": state, "param_groups": groups})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, slots in state.items():
        of_parameter = optimizer.state[parameters[number]]
        for slot, value in slots.items():
            # It may have been cast to the parameter's dtype.
            if isinstance(value, torch.Tensor) and slot in of_parameter:
                of_parameter[slot] = value
    for group, before in zip(optimizer.param_groups, options_before, strict=True):
        for option, tensor in before.items():
            # Captured graphs know it by its address.
            if isinstance(tensor, torch.Tensor) and option in group:
                with torch.no_grad():
                    tensor.copy_(torch.as_tensor(group[option]))
                group[option] = tensor


def _require_same_state(stored: dict[str, int], here: dict[str, int], names: Set[str]) -> None:
    differ = [name for name in sorted(names) if stored.get(name) not in (None, here.get(name, 0))]
    if differ:
        shown = ", ".join(
            f"{name} (stored {plural(stored[name], 'tensor')}, here {here.get(name, 0)})"
            for name in differ[:_MOST_NAMES]
        )
        more = f" and {len(differ) - _MOST_NAMES} more" if len(differ) > _MOST_NAMES else ""
        raise CheckpointError(
            f"the state of these parameters has another form than when it was saved: {shown}{more}."
            " Restore into an optimizer of the same options with the same parameters trainable, "
            "and freeze them or change options after that; PerRank(optimizer) saves a state that "
            "changes its form, as that of LBFGS"
        )


def _is_zero(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        # Of a DTensor this rank's part: the whole would take the other ranks.
        own = state.to_local() if isinstance(state, DTensor) else state
        return not own.bool().any()
    if isinstance(state, dict):
        return all(map(_is_zero, state.values()))
    return all(map(_is_zero, state)) if isinstance(state, list) else True
