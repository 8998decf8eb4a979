"""The objects of a training program: reads their states for a save, and restores them in a load.

1. :meth:`States.saved` runs hooks, then replaces each value that has a state by this state. Each
   tensor of a state becomes an item, named as in torch's ``get_state_dict``. All other parts of the
   state become one object, whose types load without ``allow_pickle``. For an optimizer, all names
   are torch's. All other values are saved as by ``dcp.save``: each leaf has its own name.
2. :meth:`States.read` returns the target of a load. Its tensors are the live ones, and no hooks
   run. State that an optimizer does not have yet is created separately from the optimizer.
3. :meth:`States.apply` restores a value that a load cannot fill in place.

Checkpoints of stock torch, which store an object for each leaf, can be read, too. So can those of
former managers, which stored plain values like values with a state.

torch's own ``get_state_dict`` is not used, because it creates missing optimizer state by running a
step. After that, Adam has counted one step too many, and SGD's momentum contains the weight decay.
``get_state_dict`` also resolves every name three times per save.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.objects import PLAIN
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.failures import convert_torch_failure
from torch_ckpt.ranks.group import own_rank
from torch_ckpt.state.optimizers import (
    OptimizerState,
    has_layout_of_torch,
    optimizer_state,
    set_optimizer_state,
    to_stock_layout,
)
from torch_ckpt.state.placeholders import OptionalObject
from torch_ckpt.state.splitting import StateDict, split_state, wrap_state
from torch_ckpt.state.state_targets import ModuleTarget, StateTarget, fill, is_tensor_of_module

_NO_NAME = "the keys of a state must be str, got {!r}"

# Types of values that have neither a state nor a hook.
_WITHOUT_STATE = PLAIN | {torch.Tensor, nn.Parameter, dict, list}


class BeforeSave(OrderedDict[int, Callable[[], None]]):
    """Hooks to call before state is read for a save, in the order in which they were added."""

    def add(self, hook: Callable[[], None]) -> RemovableHandle:
        """Adds a hook. Call ``remove()`` on the returned handle to remove the hook."""
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle

    def read(self, state: StateDict) -> StateDict:
        """Calls the hooks, then returns the state to save.

        Raises:
            TypeError: see :func:`require_state`.
        """
        require_state(state)
        for hook in list(self.values()):
            try:
                hook()
            except CheckpointException as error:
                # The hook has called a function of torch, whose exceptions are no Exception.
                raise convert_torch_failure(error) from None
        return state


class PerRank:
    """Wraps a value that differs between ranks, such as a data loader.

    Each rank saves its own state and gets that state back. If the checkpoint was saved by fewer
    ranks, the additional ranks keep their current values and warn. The checkpoint must contain the
    state of rank 0. The state is stored as one object, with its tensors on the CPU.

    Args:
        value: an object with ``state_dict()`` and ``load_state_dict()`` methods; or a tensor, which
            is filled in place, or replaced if the saved tensor has another shape; or a plain value,
            which is replaced.

    Example::

        state = {"model": model, "loader": torch_ckpt.PerRank(data_loader)}
        torch_ckpt.save(state, "checkpoints/100")
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def state(self) -> Any:
        """Returns the state to save."""
        return self.value.state_dict() if is_stateful(self.value) else self.value

    def restore(self, state: Any) -> None:
        """Restores a saved state."""
        value = self.value
        if isinstance(value, nn.Module):
            value.load_state_dict(fill(value.state_dict(), state))
        elif is_stateful(value):
            # Do not call state_dict(): a data loader would start its workers.
            value.load_state_dict(state)
        elif (
            isinstance(value, torch.Tensor)
            and isinstance(state, torch.Tensor)
            and (value.shape, value.dtype) == (state.shape, state.dtype)
        ):
            with torch.no_grad():
                value.copy_(state)
        else:
            self.value = state


class RNGState:
    """Saves and restores the states of this process's random number generators, separately for each
    rank.

    The generators are torch's CPU generator; torch's generator for each CUDA device, if CUDA has
    been initialized; Python's ``random``; and NumPy's global generator, if NumPy has been imported.

    Example::

        torch_ckpt.save({"model": model, "rng": torch_ckpt.RNGState()}, "checkpoints/100")
    """

    def state_dict(self) -> StateDict:
        """Returns the states of the generators."""
        state: StateDict = {"torch": torch.get_rng_state(), "python": random.getstate()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        if "numpy" in sys.modules:
            # torch.load(weights_only=True) rejects NumPy arrays, so store lists.
            state["numpy"] = pytree.tree_map(
                lambda part: part.tolist() if hasattr(part, "tolist") else part,
                sys.modules["numpy"].random.get_state(legacy=False),
            )
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Restores those generators that exist in this process and have a state in ``state``."""
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if torch.cuda.is_available():
            for device, saved in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(saved, device)
        if "numpy" in state and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state["numpy"])


def require_state(state: object) -> None:
    """Raises TypeError if the state of a training program is not a dict with names. Do not call it
    in constructors, whose errors do not reach the other ranks."""
    for key in States(state).values:
        if not isinstance(key, str):
            raise TypeError(_NO_NAME.format(key))


def is_stateful(value: Any) -> bool:
    """Returns the same as isinstance(value, Stateful), which takes 20 µs before Python 3.12."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


class States:
    """Reads and restores the states of the values of a state dict. docs/state.md has a table of the
    types of values.

    Values without a state are saved and loaded as by ``dcp.save`` and ``dcp.load``. :meth:`read`
    and :meth:`apply` can also restore the structure of such values.

    Args:
        state_dict: the state dict.
        calls: also accept a function that returns the state dict.

    Attributes:
        values: the state dict, in which :meth:`apply` replaces values.
        only_compared: True if nothing is loaded, so that modules may be on the meta device.

    Raises:
        TypeError: the state dict is not a mapping.
    """

    only_compared = False

    def __init__(self, state_dict: object, *, calls: bool = False) -> None:
        # Modules are callable, too.
        if calls and callable(state_dict) and not is_stateful(state_dict):
            refuse_capture()
            state_dict = state_dict()
        if not isinstance(state_dict, Mapping):
            name = "model" if isinstance(state_dict, nn.Module) else "state"
            has_state = is_stateful(state_dict)
            wrapped = f"{{{name!r}: ...}}" if has_state else "a dict of names and values"
            raise TypeError(
                f"the state must be a dict, got {type(state_dict).__name__}. Pass {wrapped}."
            )
        self.values: StateDict = state_dict  # type: ignore[assignment]
        self._missing: list[str] = []
        self._replaced: list[str] = []
        self._text_keys: list[str] = []

    @functools.cached_property
    def names(self) -> ParameterNames:
        """The names of the modules' parameters."""
        return ParameterNames(self.values)

    def objects(self) -> list[str]:
        """Returns the keys of the values that may have a state or a hook."""
        return [
            key
            for key, value in self.values.items()
            # The first check is faster, and decides for nearly all values.
            if type(value) not in _WITHOUT_STATE and not isinstance(value, torch.Tensor)
        ]

    def stateful(self) -> list[str]:
        """Returns the keys of the values that have a state: modules, optimizers, PerRank and others
        with ``state_dict()`` and ``load_state_dict()``."""
        values = self.values
        keys = self.objects()
        return [k for k in keys if isinstance(values[k], PerRank) or is_stateful(values[k])]

    def saved(self) -> StateDict:
        """Returns a copy of the state dict to save, in which states replace the values that have a
        state.

        First calls the ``before_checkpoint()`` method of each value and each submodule that has
        one. The tensors are the live tensors, not copies. Models and optimizers are not modified.

        Raises:
            CheckpointError: the state of a value cannot be read; the message begins with its key.
            RuntimeError: see :func:`refuse_capture`.
            TypeError: the key of a value that has a state is not a str.
        """
        refuse_capture()
        objects = self.objects()
        for key in objects:
            self._call_hooks(key)
        values = dict(self.values)
        if objects:
            values.update((key, self.read(key)) for key in self.stateful())
        return values

    def read(self, key: str, *, for_load: bool = False) -> Any:
        """Returns the state of a value, to save it or to load into it. After a load, call
        :meth:`apply`.

        Raises:
            CheckpointError: the state cannot be read. For a load: a module is on the meta device,
                or an optimizer's state is missing and cannot be created before the first step. The
                message begins with the key.
            TypeError: the key is not a str.
        """
        if not isinstance(key, str):
            raise TypeError(_NO_NAME.format(key))
        with self._adding_key(key, "its state could not be read"):
            return _read_state(key, self, self.values[key], for_load)

    def apply(self, key: str, part: Any) -> None:
        """Restores a value from a target that has been loaded.

        Raises:
            CheckpointError: the value does not accept its state; the message begins with the key.
        """
        with self._adding_key(key, "could not be restored"):
            value = self.values[key]
            per_rank = _as_per_rank(value)
            if per_rank is not None:
                [own] = part.values()
                if isinstance(own, OptionalObject):
                    if own.missing:
                        self._missing.append(key)
                    own = next(iter(own.values.values()), None)
                if isinstance(own, SimpleNamespace):
                    per_rank.restore(own.value)
            elif isinstance(part, OptimizerState):
                set_optimizer_state(value, part)
            elif is_stateful(value):
                value.load_state_dict(part.state())
            else:
                state = part.state()
                self._replaced += part.replaced(state)
                self.values[key] = state
            if isinstance(part, StateTarget | ModuleTarget):
                self._text_keys += part.text_keys

    def warn_of_differences(self) -> None:
        """Warns about values for which the checkpoint has no state of this rank, about tensors of
        the state dict that were not filled in place, and about keys whose type is unknown."""
        if self._replaced:
            warn(
                f"{some_of(self._replaced)}: the checkpoint has no tensor of this name but another "
                "value, which has replaced the tensor in the state. Read the value from the state "
                "after the restore"
            )
        if self._missing:
            warn(
                f"{', '.join(self._missing)}: the checkpoint has no state for rank {own_rank()}, "
                "probably because fewer ranks saved it; this rank keeps its current state"
            )
        if self._text_keys:
            warn(
                f"{some_of(self._text_keys)}: new keys of a dict were restored as texts, because a "
                "checkpoint does not contain the types of keys. If they were numbers, convert them "
                "back, and save PerRank values or objects with load_state_dict() instead"
            )

    # --- private ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _adding_key(self, key: str, what: str) -> Iterator[None]:
        """Block whose errors begin with a key."""
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is not an Exception
            raise CheckpointError(f"{key}: {what} on rank {own_rank()}: {error}") from error

    def _call_hooks(self, key: str) -> None:
        value = self.values[key]
        parts: Iterable[Any] = value.modules() if isinstance(value, nn.Module) else (value,)
        for part in parts:
            # Check the type, because nn.Module.__getattr__ is slow for missing attributes.
            if hasattr(type(part), "before_checkpoint"):
                with self._adding_key(key, "before_checkpoint() failed"):
                    part.before_checkpoint()


def _read_state(key: str, states: States, value: Any, for_load: bool) -> Any:
    per_rank = _as_per_rank(value)
    if per_rank is not None:
        if not for_load:
            own: Any = wrap_state(key, per_rank.state())
        else:
            # Only rank 0's state is required: if it is missing, the checkpoint lacks the key.
            own = OptionalObject() if own_rank() else None
        return {f"rank{own_rank()}": own}
    if isinstance(value, nn.Module):
        return _module_state(key, value, states, for_load)
    has_state = is_stateful(value)
    state = value.state_dict() if has_state else value
    target = None
    if for_load:
        target = StateTarget(key, state, is_stateful=has_state, keys=states.values)
    if isinstance(value, Optimizer) and has_layout_of_torch(value, state):
        parameters = states.names.of_parameters(value)
        state = optimizer_state(value, state, parameters, for_load)
        if target is not None:
            return OptimizerState(key, parameters, state, value, target)
        return to_stock_layout(key, state)
    if target is not None:
        return target
    if isinstance(state, Mapping) and type(state) is not OrderedDict:
        # A restore fills the object that state_dict() returns, so its type is not stored.
        state = dict(state)
    return split_state(key, state)


def _module_state(key: str, module: nn.Module, states: States, for_load: bool) -> StateDict:
    own = module.state_dict()
    resolved = states.names.resolve_all(module, own)
    if not for_load:
        return {
            resolved[name]: part if is_tensor_of_module(name, part) else wrap_state(key, part)
            for name, part in own.items()
        }
    for name, part in own.items() if not states.only_compared else ():
        if is_tensor_of_module(name, part) and part.device.type == "meta":
            raise CheckpointError(
                f"{name} is on the meta device and has no memory to load into. Call the module's "
                "to_empty(device=...) before the restore"
            )
    return ModuleTarget(own, resolved)


def _as_per_rank(value: Any) -> PerRank | None:
    if isinstance(value, PerRank):
        return value
    # Recognize the class by name, because torchdata is an optional dependency.
    is_loader = any(kind.__name__ == "StatefulDataLoader" for kind in type(value).__mro__)
    return PerRank(value) if is_loader or isinstance(value, RNGState) else None


# --- parameter names ------------------------------------------------------------------------------


# Resolved names by module. Cached, because torch takes a few microseconds to resolve a name, and
# names never change.
_resolved: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


class ParameterNames:
    """Fully qualified names of the parameters of all modules in a state.

    Args:
        state: names and values; values that are not modules are ignored.
    """

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._modules = {k: value for k, value in state.items() if isinstance(value, nn.Module)}
        self._parameters: dict[str, dict[torch.Tensor, str]] = {}

    def resolve(self, module: nn.Module, name: str) -> str:
        """Returns the fully qualified name for a name in the state dict of a module.

        Raises:
            CheckpointError: the module contains FSDP1 modules.
        """
        resolved = _resolved.get(module)
        if resolved is None:
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                raise CheckpointError(
                    "FullyShardedDataParallel (FSDP1) is not supported. Use fully_shard (FSDP2), "
                    "or pass module.state_dict() to save and load torch's own names"
                )
            resolved = _resolved[module] = {}
        full_name = resolved.get(name)
        if full_name is None:
            full_name = resolved[name] = _resolve(module, name)
        return full_name

    def resolve_all(self, module: nn.Module, names: Iterable[str]) -> dict[str, str]:
        """Returns the fully qualified names, by the names in the state dict of a module.

        Raises:
            CheckpointError: two names would become the same; see also :meth:`resolve`.
        """
        resolved = {name: self.resolve(module, name) for name in names}
        if len(set(resolved.values())) < len(resolved):
            first: dict[str, str] = {}
            for name, full_name in resolved.items():
                other = first.setdefault(full_name, name)
                if other != name:
                    raise CheckpointError(
                        f"{other} and {name} would both be saved as {full_name}, without the "
                        "prefixes of wrappers. Rename one of them, or pass module.state_dict() to "
                        "save and load the names with their prefixes"
                    )
        return resolved

    def of_parameters(self, optimizer: Optimizer) -> list[str]:
        """Returns the names of an optimizer's parameters, in order.

        The names are numbers if a parameter is in no module, or if two parameters would have the
        same name.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names_by_key: dict[str, dict[torch.Tensor, str]] = {}
        for key in self._modules:
            names = self._names_in_module(key)
            if all(parameter in names for parameter in parameters):
                return [names[parameter] for parameter in parameters]
            names_by_key[key] = names
        found = [
            next((f"{key}.{names[p]}" for key, names in names_by_key.items() if p in names), None)
            for p in parameters
        ]
        # Names may collide: "b.c" in the module with key "a", and "c" in the module with key "a.b".
        if None in found or len(set(found)) < len(set(parameters)):
            return [str(number) for number in range(len(parameters))]
        return cast(list[str], found)

    def _names_in_module(self, key: str) -> dict[torch.Tensor, str]:
        if key not in self._parameters:
            module = self._modules[key]
            self._parameters[key] = {
                parameter: self.resolve(module, name)
                for name, parameter in module.named_parameters()
            }
        return self._parameters[key]


def _resolve(module: nn.Module, name: str) -> str:
    """Returns a name without the prefixes of wrappers.

    State dict hooks may add and rename entries, so the end of a name may name no attribute. The end
    is kept unchanged.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        # torch resolves the names of extra state without accessing an attribute.
        beginning = [*parts[:end], _EXTRA_STATE_KEY_SUFFIX]
        try:
            [found] = _get_fqns(module, ".".join(beginning))
        except (AssertionError, AttributeError, RuntimeError):
            continue
        return ".".join([*found.split(".")[:-1], *parts[end:]])
    return name
