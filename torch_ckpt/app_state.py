"""The state of a training program as a state dict, and back.

1. ``state_dict()`` runs the hooks, then reads every value of the mapping. Tensors keep places of
   their own, named as in torch's ``get_state_dict``; what else a value's state holds becomes one
   object, of types that load without ``allow_pickle``. All of an optimizer has torch's names.
2. ``target()`` is the same without hooks, to load into: its tensors are the live ones. States that
   an optimizer does not have yet are made beside it.
3. ``apply()`` puts back what is not in place yet.

Checkpoints of stock torch are read, too, where what is one object here is one for each leaf.

torch's own ``get_state_dict`` is not called. It gives an optimizer without state one by a step,
after which Adam counts one step too many and SGD's momentum holds the weight decay; and it looks up
every name three times at every save.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Set
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_ckpt.coordination import own_rank
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading import Discovered, IfStored, is_stateful
from torch_ckpt.multihost.calls import Call
from torch_ckpt.objects import PLAIN, warn_of_what_will_not_load
from torch_ckpt.text import plural

StateDict = dict[str, Any]
T = TypeVar("T")

#: Where a value's tensors are, what else its state holds has this name.
_OBJECTS = "_objects"

#: Those of an optimizer's parameters whose stored states are zeros that no step has made.
_WITHOUT_STATE = "without_state"

_WITH_TENSORS = (torch.Tensor, dict, list)

# Of a group of an optimizer's parameters.
_NO_OPTIONS = ("params", "param_names")

# That an error lists.
_MOST_NAMES = 10

_MISSING: Any = object()


class BeforeSave(OrderedDict[int, Callable[[], None]]):
    """Hooks that are called before state is read for a save, in the order they were added."""

    def add(self, hook: Callable[[], None]) -> RemovableHandle:
        """Adds one; ``remove()`` of what is returned takes it away."""
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


class PerRank:
    """A value that each rank has for itself, such as its data loader.

    Each rank saves its own and gets that back. A rank that the checkpoint has none of, since fewer
    ranks saved it, keeps what it has, and warns; but there must be one of rank 0. All of it is
    stored as one object, its tensors as CPU tensors.

    Args:
        value: anything with ``state_dict()`` and ``load_state_dict()``, a tensor, or a plain value,
            which is replaced.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state(self) -> Any:
        """What is saved."""
        return self.value.state_dict() if is_stateful(self.value) else self.value

    def restore(self, state: Any) -> None:
        """Takes what was saved."""
        if is_stateful(self.value):
            self.value.load_state_dict(state)
        elif isinstance(self.value, torch.Tensor):
            if self.value.shape != state.shape:
                raise ValueError(f"it is {list(self.value.shape)}, saved was {list(state.shape)}")
            with torch.no_grad():
                self.value.copy_(state)
        else:
            self.value = state


class RNGState:
    """The random number generators of this process, each rank's own: torch's for the CPU and, once
    CUDA is in use, for each CUDA device; Python's; and NumPy's, where NumPy has been imported."""

    def state_dict(self) -> StateDict:
        """The generators' states."""
        state: StateDict = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            state["numpy"] = _without_arrays(sys.modules["numpy"].random.get_state(legacy=False))
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Sets the generators that both this process and ``state`` have."""
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if torch.cuda.is_available():
            for device, of_device in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(of_device, device)
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])


def _without_arrays(state: Any) -> Any:
    """With lists in the place of arrays, which ``torch.load(weights_only=True)`` refuses."""
    if isinstance(state, dict):
        return {key: _without_arrays(part) for key, part in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


class AppState:
    """What a training program is made of, as a state dict to save and to load.

    ================================== ============================================================
    value                              how it is saved and restored
    ================================== ============================================================
    ``nn.Module``                      by fully qualified names: no ``module.`` of DDP, no
                                       ``_orig_mod.`` of ``torch.compile``; FSDP2 and tensor
                                       parallel modules as DTensors, which reshard; not FSDP1
    ``Optimizer``                      by the names of its parameters in the mapping's modules;
                                       several modules' names begin with their keys. Parameters of
                                       no module there: by number, as in its ``state_dict()``
    ``PerRank``, ``RNGState``,         each rank's own
    torchdata's ``StatefulDataLoader``
    with ``state_dict()`` and          tensors in it are filled in place, then
    ``load_state_dict()``              ``load_state_dict()`` is called
    tensor                             filled in place
    other                              replaced in the mapping; tensors in dicts and lists are
                                       filled in place
    ================================== ============================================================

    Hooks run before anything is read: those of ``before_save``, then ``before_checkpoint()`` of
    every value, and module within a module, that has such a method.

    Args:
        state: names and values; names must be str. Values may be added and replaced at any time.
        before_save: hooks.
    """

    def __init__(
        self, state: MutableMapping[str, Any], *, before_save: BeforeSave | None = None
    ) -> None:
        self.state = state
        self.before_save = BeforeSave() if before_save is None else before_save

    def state_dict(self) -> StateDict:
        """The state dict to save; its tensors are the live ones. Changes nothing that is trained.

        Raises:
            CheckpointError: a value's state cannot be read; names the key.
            TypeError: the state is no dict, or a key is not a str.
        """
        self._require_dict()
        for hook in list(self.before_save.values()):
            hook()
        self._tell_values()
        return self._read(for_load=False)

    def target(self) -> StateDict:
        """A state dict to load into, by :func:`torch_ckpt.load`; then call :meth:`apply`.

        Raises:
            CheckpointError: a value's state cannot be read, a module is on the meta device, or an
                optimizer without state cannot get one before its first step; names the key.
            TypeError: the state is no dict, or a key is not a str.
        """
        self._require_dict()
        return self._read(for_load=True)

    def apply(self, loaded: StateDict) -> None:
        """Puts back what :meth:`target` returned, once it has been loaded.

        Raises:
            CheckpointError: a value does not take its state; names the key.
        """
        names = _Names(self.state)
        kept: list[str] = []
        for key, value in list(self.state.items()):
            with _naming(key, "could not be restored"):
                part = loaded[key]
                per_rank = _per_rank(value)
                if per_rank is not None:
                    [own] = part.values()
                    if isinstance(own, SimpleNamespace):
                        per_rank.restore(own.value)
                    elif isinstance(own, IfStored) and own.missing:
                        kept.append(key)
                elif isinstance(value, nn.Module):
                    value.load_state_dict(
                        {name: _value(part[names.of(value, name)]) for name in value.state_dict()}
                    )
                elif isinstance(value, Optimizer):
                    _set_optimizer_state(value, part)
                elif is_stateful(value):
                    value.load_state_dict(part[_OBJECTS].state(part))
                elif isinstance(part, torch.Tensor):
                    self.state[key] = part
                elif part[_OBJECTS].values:
                    self.state[key] = part[_OBJECTS].state(part)
        if kept:
            warnings.warn(
                f"{', '.join(kept)}: no state of rank {own_rank()} was in the checkpoint (one of "
                "fewer ranks has none); this rank keeps what it has",
                stacklevel=2,
            )

    def restore(
        self,
        load: Callable[[StateDict], T],
        *,
        call: str,
        process_group: dist.ProcessGroup | None,
        timeout: float,
    ) -> T:
        """:meth:`target`, ``load`` of it, and :meth:`apply`. What fails on one rank is raised on
        all, where the others would wait for it in the load or in their training.

        Args:
            load: called with the target, on every rank.
            call: the function that the ranks are in, for errors.
            timeout: seconds after which a rank that shows no sign of life is given up.

        Returns:
            What ``load`` has returned.

        Raises:
            CheckpointError: as :meth:`target` and :meth:`apply`; on the other ranks RuntimeError.
            TimeoutError: ranks did not come; they are named.
        """
        targets: list[StateDict] = []
        with Call(call, process_group, timeout) as meeting:
            meeting.all_succeed(lambda: targets.append(self.target()))
        [target] = targets
        loaded = load(target)
        with Call(call, process_group, timeout) as meeting:
            meeting.all_succeed(lambda: self.apply(target))
        return loaded

    # --- private ---------------------------------------------------------------------------------

    def _require_dict(self) -> None:
        # Not when it is made, but where what a rank raises is told to the others.
        if not isinstance(self.state, Mapping):
            kind = type(self.state).__name__
            raise TypeError(f'the state must be a dict, as {{"model": model}}, got a {kind}')

    def _tell_values(self) -> None:
        for key, value in list(self.state.items()):
            parts: Iterable[Any] = value.modules() if isinstance(value, nn.Module) else (value,)
            for part in parts:
                # Of its type: asking a module itself for what it does not have is slow.
                if hasattr(type(part), "before_checkpoint"):
                    with _naming(key, "before_checkpoint() failed"):
                        part.before_checkpoint()

    def _read(self, *, for_load: bool) -> StateDict:
        names = _Names(self.state)
        found: StateDict = {}
        for key, value in list(self.state.items()):
            if not isinstance(key, str):
                raise TypeError(f"the names of a state must be str, got {key!r}")
            with _naming(key, "its state could not be read"):
                found[key] = _state_of(key, value, names, for_load)
        return found


def _state_of(key: str, value: Any, names: _Names, for_load: bool) -> Any:
    per_rank = _per_rank(value)
    if per_rank is not None:
        if not for_load:
            own: Any = _wrapped(key, per_rank.state())
        else:
            # Any number of ranks has a rank 0: without its state the key is not there at all.
            own = IfStored() if own_rank() else None
        return {f"rank{own_rank()}": own}
    if isinstance(value, nn.Module):
        return _module_state(key, value, names, for_load)
    value = _python_number(value)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Optimizer):
        parameters = names.of_parameters(value)
        state = _optimizer_state(value, parameters, for_load)
        return _OptimizerState(key, parameters, state) if for_load else _as_stock(key, state)
    if type(value) in PLAIN and not for_load:
        return value
    return _split(key, value.state_dict() if is_stateful(value) else value, for_load)


def _module_state(key: str, module: nn.Module, names: _Names, for_load: bool) -> StateDict:
    found: StateDict = {}
    for name, part in module.state_dict().items():
        # What a module packs into a tensor of its own may change its length.
        is_tensor = isinstance(part, torch.Tensor) and not name.endswith("_extra_state")
        if is_tensor and for_load and part.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device, where it has no memory to load into; call "
                "to_empty(device=...) of the module before the restore"
            )
        found[names.of(module, name)] = part if is_tensor else _wrapped(key, part, 0, for_load)
    return found


def _python_number(value: Any) -> Any:
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


def _per_rank(value: Any) -> PerRank | None:
    if isinstance(value, PerRank):
        return value
    # Not imported: a program that does not use torchdata need not have it.
    is_loader = any(kind.__name__ == "StatefulDataLoader" for kind in type(value).__mro__)
    return PerRank(value) if is_loader or isinstance(value, RNGState) else None


@contextlib.contextmanager
def _naming(key: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{key}: {what} on rank {own_rank()}: {error}") from error


# --- names ---------------------------------------------------------------------------------------

# Of each module: its names and what torch calls them on any number of ranks. Each costs some
# microseconds to find out, and none of them changes.
_known: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


class _Names:
    """The fully qualified names of a program's modules and parameters."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._modules = {k: value for k, value in state.items() if isinstance(value, nn.Module)}
        self._parameters: dict[str, dict[torch.Tensor, str]] = {}

    def of(self, module: nn.Module, name: str) -> str:
        """The fully qualified name of what a module names so."""
        known = _known.get(module)
        if known is None:
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                raise ValueError(
                    "FullyShardedDataParallel (FSDP1) is not supported; fully_shard is"
                )
            known = _known[module] = {}
        found = known.get(name)
        if found is None:
            [found] = _get_fqns(module, name)
            known[name] = found
        return found

    def of_parameters(self, optimizer: Optimizer) -> list[str]:
        """The names of an optimizer's parameters, in their order."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        holders: dict[str, dict[torch.Tensor, str]] = {}
        for key in self._modules:
            names = self._of_module(key)
            if all(parameter in names for parameter in parameters):
                return [names[parameter] for parameter in parameters]
            holders[key] = names
        found = [
            next((f"{key}.{names[p]}" for key, names in holders.items() if p in names), None)
            for p in parameters
        ]
        # "a" + "b.c" is "a.b" + "c".
        if None in found or len(set(found)) < len(set(parameters)):
            return [str(number) for number in range(len(parameters))]
        return cast(list[str], found)

    def _of_module(self, key: str) -> dict[torch.Tensor, str]:
        if key not in self._parameters:
            module = self._modules[key]
            self._parameters[key] = {
                parameter: self.of(module, name) for name, parameter in module.named_parameters()
            }
        return self._parameters[key]


# --- optimizers ----------------------------------------------------------------------------------


def _optimizer_state(optimizer: Optimizer, names: list[str], for_load: bool) -> StateDict:
    """An optimizer's state by names. Parameters that have none yet are listed, and have the state
    of zeros that a first step would start from: so a checkpoint's names depend on no step."""
    saved = optimizer.state_dict()
    state = {names[number]: slots for number, slots in saved["state"].items() if slots}
    without: list[str] = []
    numbers = iter(range(len(names)))
    for group in optimizer.param_groups:
        has_state = True
        for parameter, number in zip(group["params"], numbers, strict=False):
            if not (has_state and parameter.requires_grad) or optimizer.state.get(parameter):
                continue
            try:
                slots = _initial_state(optimizer, group, parameter)
            except Exception as error:
                if not for_load or optimizer.state:
                    break
                raise CheckpointError(
                    f"{type(optimizer).__name__} has no state before its first step, and makes "
                    f"none for a zero gradient ({error}); do a step before the restore, or save it "
                    "as PerRank(optimizer)"
                ) from error
            has_state = bool(slots)
            if has_state:
                state[names[number]] = slots
                without.append(names[number])
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in saved["param_groups"]
    ]
    return {**saved, "state": state, "param_groups": groups, _WITHOUT_STATE: without}


def _initial_state(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """The state that a parameter would get, all zeros; of a copy that shares nothing with it."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    beside = object.__new__(type(optimizer))
    beside.__dict__.update(optimizer.__dict__)
    beside.state = defaultdict(dict)
    beside.param_groups = [{**group, "params": [stand_in]}]
    # Without the hooks around it, which are the program's; an LR scheduler, which counts steps,
    # has put its own on the optimizer itself.
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    devices = [parameter.device] if parameter.is_cuda else []
    with torch.random.fork_rng(devices):
        step(beside)
    slots: dict[str, Any] = beside.state[stand_in]
    for slot in slots.values():
        if isinstance(slot, torch.Tensor):
            slot.zero_()
    return slots


def _as_stock(key: str, state: StateDict) -> StateDict:
    """An optimizer's state to save, with the names and values of torch's ``get_state_dict``. What
    torch would take apart, and so lose types or keys of, is wrapped."""

    def stored(name: str, value: Any) -> Any:
        if type(value) in (dict, OrderedDict) and _holds_tensors(value):
            _require_distinct(value)
            return {place: stored(f"{name}.{place}", part) for place, part in value.items()}
        if type(value) is list and _holds_tensors(value):
            return [stored(f"{name}.{place}", part) for place, part in enumerate(value)]
        return stored_leaf(name, value)

    def stored_leaf(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        value = _python_number(value)
        if type(value) in (list, tuple) and all(type(part) in PLAIN for part in value):
            return copy.copy(value)
        return value if type(value) in PLAIN else _wrapped(name, value)

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


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return any(map(_holds_tensors, value)) if type(value) is list else torch.is_tensor(value)


class _OptimizerState(Discovered):
    """An optimizer's state, to load, from any of three layouts.

    1. That of :func:`_as_stock`: an object for each option of each group.
    2. That of ``StateDictOptions(flatten_optimizer_state_dict=True)``: one for each parameter's.
    3. That of the first versions: all that is no tensor, or an option's, is one object.

    Args:
        key: of the optimizer.
        names: of its parameters, in their order.
        state: as of :func:`_optimizer_state`; its tensors receive the values.
    """

    def __init__(self, key: str, names: list[str], state: StateDict) -> None:
        super().__init__()
        self.numbers = {name: number for number, name in enumerate(names)}
        self._prefix = f"{key}."
        self._state = {
            **{k: v for k, v in state.items() if k != "state"},
            "state": {name: dict(slots) for name, slots in state["state"].items()},
        }
        #: Tensors and objects here, by the name that they have in any checkpoint of layout 1 or 2.
        self._leaves: dict[str, tuple[Any, ...]] = {}
        for name, slots in self._state["state"].items():
            self._add_leaves(slots, "state", name)
        for name, value in self._state.items():
            if name not in ("state", "param_groups", _WITHOUT_STATE):
                self._add_leaves(value, name)
        #: How many tensors the checkpoint has of each parameter.
        self.stored_counts: dict[str, int] = {}
        self._has_groups = False

    def _add_leaves(self, value: Any, *path: Any) -> None:
        is_slots = len(path) == 2 and path[0] == "state"
        if is_slots or (type(value) in (dict, OrderedDict, list) and _holds_tensors(value)):
            parts = enumerate(value) if isinstance(value, list) else value.items()
            for place, part in parts:
                self._add_leaves(part, *path, place)
        else:
            self._leaves[self._prefix + ".".join(map(str, path))] = path

    def choose(self, metadata: Metadata) -> StateDict:
        known = metadata.state_dict_metadata
        is_tensor = {
            name: isinstance(stored, TensorStorageMetadata)
            for name, stored in known.items()
            if name.startswith(self._prefix)
        }
        of_groups = f"{self._prefix}param_groups."
        of_state = f"{self._prefix}state."
        is_one_object = self._prefix + _OBJECTS in known
        self._has_groups = f"{of_groups}0.params" in known
        if not is_one_object and not any(name.startswith(of_groups) for name in is_tensor):
            return {of_groups[:-1]: self}
        of_parameters: dict[str, list[str]] = {}
        for name in is_tensor:
            if name.startswith(of_state):
                found = _of_parameter(name.removeprefix(of_state), self.numbers)
                of_parameters.setdefault(found[0] if found else "", []).append(name)
        self.stored_counts = {
            parameter: sum(is_tensor[name] for name in names)
            for parameter, names in of_parameters.items()
        }
        # Stock torch saves no state of what never had a gradient, where ours has zeros.
        may_lack = not is_one_object and self._prefix + _WITHOUT_STATE not in known
        may_lack = may_lack and any(name in self.numbers for name in of_parameters)
        chosen: StateDict = {}
        for name, path in self._leaves.items():
            if path[0] == "state" and may_lack and path[1] not in of_parameters:
                self._state["state"].pop(path[1], None)
            else:
                value = _at(self._state, path)
                if isinstance(value, torch.Tensor):
                    chosen[name] = value
                elif not is_one_object and not is_tensor.get(name):
                    chosen[name] = self  # where a tensor has taken its place, their numbers differ
        for name, is_one in is_tensor.items():
            if not is_one:
                chosen[name] = self
            elif name.startswith(of_groups):
                stored: Any = known[name]
                dtype = stored.properties.dtype
                chosen[name] = torch.empty(tuple(stored.size), dtype=dtype, device="meta")
        return chosen

    def state(self) -> tuple[StateDict, bool]:
        """The state with what has been loaded, by names; and whether its groups have been."""
        values = {name.removeprefix(self._prefix): v for name, v in self.values.items()}
        if _OBJECTS in values:
            tensors = _parts({k: v for k, v in self._state.items() if k != "param_groups"})[1]
            tree = tensors if isinstance(tensors, dict) else {}
            for name, value in values.items():
                if name != _OBJECTS:
                    set_element(tree, tuple(name.split(".")), value)
            return _join(values[_OBJECTS].value, tree), True
        if not values:
            return self._state, False
        state = {**self._state, _WITHOUT_STATE: values.pop(_WITHOUT_STATE, [])}
        groups: StateDict = {}
        for name, stored in values.items():
            value = _value(stored)
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
        if groups:
            state["param_groups"] = (
                _groups_by_number(groups)
                if self._has_groups
                else _groups_by_parameter(groups, self._state["param_groups"], self.numbers)
            )
        return state, bool(groups)


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
    groups: dict[int, StateDict] = defaultdict(lambda: {"params": []})
    for name, value in options.items():
        number, _, option = name.partition(".")
        groups[int(number)][option] = value
    return [groups[number] for number in range(max(groups) + 1)]


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


def _set_optimizer_state(optimizer: Optimizer, found: _OptimizerState) -> None:
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
        here = {name: _count(slots) for name, slots in slots_here.items()}
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
        kept = {k: v for k, v in group.items() if k not in _NO_OPTIONS}
        groups.append({**kept, **options, "params": members})
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


# --- tensors and other values --------------------------------------------------------------------


def _split(key: str, state: Any, for_load: bool) -> StateDict:
    """A state as a tree of tensors, and one object of what else there is."""
    rest, tensors = _parts(state)
    if isinstance(tensors, torch.Tensor):
        raise TypeError(
            f"the state_dict() of {key} is a tensor, which has no name; return a dict that holds it"
        )
    tree = tensors if isinstance(tensors, dict) else {}
    if _OBJECTS in tree:
        raise ValueError(f"a tensor must not be named {_OBJECTS}")
    whole = {} if rest is _MISSING else rest
    if for_load:
        return {**tree, _OBJECTS: _Objects(key, state, whole, tree)}
    return {**tree, _OBJECTS: _wrapped(key, whole, _count(tree))}


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
        self._whole = f"{key}.{_OBJECTS}"
        self._state = state
        self._rest = rest
        self._tensors = flatten_state_dict({key: tensors})[0]
        self._paths: dict[str, Any] = {}

    def choose(self, metadata: Metadata) -> StateDict:
        known = metadata.state_dict_metadata
        for name in (self._whole, self._key):
            if name in known:
                return {name: self}
        beneath = [name for name in known if name.startswith(f"{self._key}.")]
        of_a_rank = re.compile(rf"{re.escape(self._key)}\.rank\d+")
        if not beneath or any(map(of_a_rank.fullmatch, beneath)):
            return {self._key if type(self._state) in PLAIN else self._whole: self}
        chosen: StateDict = {}
        here = flatten_state_dict({self._key: self._state})[0]
        for name in [*(here.keys() - {self._key}), *beneath]:
            stored = known.get(name)
            if name in self._tensors:
                continue
            chosen[name] = self
            # In containers that are one object, and have no place for its tensors.
            if isinstance(here.get(name), torch.Tensor) and isinstance(
                stored, TensorStorageMetadata
            ):
                dtype = stored.properties.dtype
                chosen[name] = torch.empty(tuple(stored.size), dtype=dtype, device="meta")
        self._paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        return chosen

    def state(self, part: StateDict) -> Any:
        """The state with what has been loaded, which is nothing where that was not wanted.

        Args:
            part: the tensors that were loaded, and this.
        """
        values = dict(self.values)
        tensors = {name: value for name, value in part.items() if name != _OBJECTS}
        if self._key in values:
            return values[self._key]
        if self._whole in values:
            stored, here = values[self._whole].tensors, _count(tensors)
            if stored != here:
                raise CheckpointError(
                    f"the checkpoint has {stored} tensors of it, where now there are {here}. Give "
                    "it the state that it had before restoring; PerRank(...) saves states that "
                    "change their form"
                )
            return _join(values[self._whole].value, tensors)
        state = _with_leaves(_join(self._rest, tensors), self._key, values)
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


def _parts(state: Any) -> tuple[Any, Any]:
    """(what is left of it without tensors, its tensors by their place), each possibly missing."""
    if isinstance(state, torch.Tensor):
        return _MISSING, state
    if type(state) is dict and state and all(map(_is_named_tensor, state.items())):
        # Nearly all of an optimizer's state.
        return _MISSING, state.copy()
    if type(state) in (dict, OrderedDict):
        items = [(key, _parts(part)) for key, part in state.items()]
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
        items = [(index, _parts(part)) for index, part in enumerate(state)]
        rest = [None if left is _MISSING else left for _, (left, _) in items]
    else:
        return state.copy() if type(state) is list else state, _MISSING
    tensors = {str(key): part for key, (_, part) in items if part is not _MISSING}
    if tensors and type(state) is not list:
        _require_distinct(state)
    return rest, tensors or _MISSING


def _require_distinct(state: Mapping[Any, Any]) -> None:
    if len(set(map(str, state))) < len(state):
        raise ValueError(
            f"keys of the dict with {', '.join(map(str, state))} are the same as text, such as 1 "
            "and '1', and name the same tensor; rename them"
        )


def _is_named_tensor(item: tuple[Any, Any]) -> bool:
    return isinstance(item[1], torch.Tensor) and isinstance(item[0], str)


def _join(rest: Any, tensors: Any) -> Any:
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
        rest[place] = _join(left, part)
    return rest


def _count(tree: Any) -> int:
    if isinstance(tree, torch.Tensor):
        return 1
    parts = tree.values() if isinstance(tree, dict) else tree if type(tree) is list else ()
    return sum(map(_count, parts))


def _wrapped(key: str, state: Any, tensors: int = 0, for_load: bool = False) -> SimpleNamespace:
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
    if _is_wrapped(value.get(_OBJECTS)):
        tensors = {name: part for name, part in value.items() if name != _OBJECTS}
        value = _join(value[_OBJECTS].value, tensors)
    else:
        value = {name: as_states(part) for name, part in value.items()}
    if isinstance(value, dict) and isinstance(value.get("param_groups"), list):
        # No name in a checkpoint stands for an empty dict.
        value.setdefault("state", {})
    return value


def _is_wrapped(value: Any) -> bool:
    return isinstance(value, SimpleNamespace) and {"value", "tensors"} <= vars(value).keys()


def _value(part: Any) -> Any:
    return part.value if isinstance(part, SimpleNamespace) else part
