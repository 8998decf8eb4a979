"""Converts the state of a training program into a state dict and back.

1. ``state_dict()`` runs the hooks, then reads every value of the mapping. Each tensor becomes an
   item, named as in torch's ``get_state_dict``. All other parts of a value's state become one
   object, whose types load without ``allow_pickle``. For an optimizer, all names are torch's.
2. ``target()`` returns a state dict to load into. Its tensors are the live ones, and no hooks run.
   State that an optimizer does not have yet is created separately from the optimizer.
3. ``apply()`` restores the values that a load cannot fill in place.

Checkpoints of stock torch, which store an object for each leaf, can be read, too.

torch's own ``get_state_dict`` is not used, because it creates missing optimizer state by running a
step. After that, Adam has counted one step too many, and SGD's momentum contains the weight decay.
``get_state_dict`` also resolves every name three times per save.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.objects import PLAIN
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.load import OptionalObject
from torch_ckpt.ranks.collective_call import CollectiveCall
from torch_ckpt.ranks.group import own_rank
from torch_ckpt.state.optimizers import (
    OptimizerState,
    has_layout_of_torch,
    optimizer_state,
    set_optimizer_state,
    to_stock_layout,
)
from torch_ckpt.state.parameter_names import ParameterNames
from torch_ckpt.state.splitting import StateDict, python_number, split_state, wrap_state
from torch_ckpt.state.state_targets import ModuleTarget, StateTarget, fill, is_tensor_of_module

T = TypeVar("T")

_WITHOUT_STATE = PLAIN | {torch.Tensor, nn.Parameter, dict, list}


def require_state(state: object) -> None:
    """Raises TypeError if the state is not a dict. Do not call it in constructors, whose errors do
    not reach the other ranks."""
    if not isinstance(state, Mapping):
        kind = type(state).__name__
        raise TypeError(f'the state must be a dict such as {{"model": model}}, got a {kind}')


class BeforeSave(OrderedDict[int, Callable[[], None]]):
    """Hooks to call before state is read for a save, in the order in which they were added."""

    def add(self, hook: Callable[[], None]) -> RemovableHandle:
        """Adds a hook. Call ``remove()`` on the returned handle to remove the hook."""
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


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


class AppState:
    """Converts the objects of a training program into a state dict, and back.

    How a value is saved and restored depends on its type:

    - ``nn.Module``: saved under fully qualified names, without the prefixes ``module.`` (DDP) and
      ``_orig_mod.`` (``torch.compile``). FSDP2 and tensor parallel modules are saved as DTensors,
      which can be resharded. FSDP1 is not supported.
    - ``Optimizer``: saved under the names that its parameters have in the modules of ``state``. If
      the parameters belong to several modules, the names begin with the modules' keys. If a
      parameter is not in any module, all parameters are numbered, as in the optimizer's
      ``state_dict()``.
    - ``PerRank``, ``RNGState``, torchdata's ``StatefulDataLoader``: saved separately for each rank.
    - Other objects with ``state_dict()`` and ``load_state_dict()`` methods: the tensors in their
      state dict are filled in place, then ``load_state_dict()`` is called.
    - Tensors: filled in place.
    - Other values: replaced in ``state``. Exception: tensors in dicts and lists are filled in
      place.

    Hooks run before any value is read: first the hooks in ``before_save``, then the
    ``before_checkpoint()`` method of each value and each submodule that has one.

    Args:
        state: mapping from names to values. The names must be str. You can add and replace values
            at any time.
        before_save: hooks to run before each save; None starts with no hooks.

    Example::

        app_state = AppState({"model": model, "optimizer": optimizer, "step": 100})
        torch_ckpt.save(app_state.state_dict, "checkpoints/100")

        target = app_state.target()
        torch_ckpt.load(target, "checkpoints/100")
        app_state.apply(target)
    """

    def __init__(
        self, state: MutableMapping[str, Any], *, before_save: BeforeSave | None = None
    ) -> None:
        self.state = state
        self.before_save = BeforeSave() if before_save is None else before_save

    def state_dict(self) -> StateDict:
        """Runs the hooks and returns the state dict to save.

        The tensors in the state dict are the live tensors, not copies. Models and optimizers are
        not modified.

        Raises:
            CheckpointError: the state of a value cannot be read; the message begins with the
                value's key.
            TypeError: the state is not a dict, or a key is not a str.
        """
        require_state(self.state)
        for hook in list(self.before_save.values()):
            hook()
        states = States(self.state)
        states.call_hooks(self.state)
        return {key: states.read(key) for key in list(self.state)}

    def target(self) -> StateDict:
        """Returns a state dict for :func:`torch_ckpt.load`; after the load, call :meth:`apply`.

        Raises:
            CheckpointError: the state of a value cannot be read, a module is on the meta device, or
                an optimizer's state is missing and cannot be created before the first step. The
                message begins with the value's key.
            TypeError: the state is not a dict, or a key is not a str.
        """
        require_state(self.state)
        states = States(self.state)
        return {key: states.read(key, for_load=True) for key in list(self.state)}

    def apply(self, loaded: StateDict) -> None:
        """Restores the values from a loaded :meth:`target`.

        Raises:
            CheckpointError: a value does not accept its state; the message begins with the value's
                key.
        """
        states = States(self.state)
        for key in list(self.state):
            states.apply(key, loaded[key])
        states.warn_of_differences()

    def restore(
        self,
        load: Callable[[StateDict], T],
        *,
        call: str,
        process_group: dist.ProcessGroup | None,
        timeout: float,
    ) -> T:
        """Calls :meth:`target`, ``load`` and :meth:`apply` on every rank of a group.

        If one rank fails, all ranks raise an exception. Without this, the ranks that succeeded
        would wait for the failed rank during the load or later in training.

        Args:
            load: called with the target on every rank.
            call: name of the function that the user called, for error messages.
            process_group: ranks that restore; None for the default group.
            timeout: a rank that sends no heartbeat for this many seconds is declared dead.

        Returns:
            The result of ``load``.

        Raises:
            CheckpointError: :meth:`target` or :meth:`apply` failed on this rank.
            RuntimeError: one of these methods failed on another rank.
            TimeoutError: a rank did not call this method in time; the message names the rank.
        """
        with CollectiveCall(call, process_group, timeout) as exchange:
            target = exchange.run_on_all(self.target)
        loaded = load(target)
        with CollectiveCall(call, process_group, timeout) as exchange:
            exchange.run_on_all(lambda: self.apply(target))
        return loaded


class States:
    """Reads and restores the states of a mapping's values, one value at a time.

    Args:
        values: the mapping.
        wraps_errors: True converts any exception raised by a value to a CheckpointError whose
            message begins with the value's key. False does this only for torch_ckpt's own errors;
            others are raised unchanged.
    """

    def __init__(self, values: MutableMapping[str, Any], *, wraps_errors: bool = True) -> None:
        self._values = values
        self._missing: list[str] = []
        self._replaced: list[str] = []
        self._wrapped: type[Exception] = Exception if wraps_errors else CheckpointError

    @functools.cached_property
    def names(self) -> ParameterNames:
        """The names of the modules' parameters."""
        return ParameterNames(self._values)

    @property
    def keys(self) -> list[str]:
        """The keys of the mapping."""
        return list(self._values)

    @contextlib.contextmanager
    def _adding_key(self, key: str, what: str) -> Iterator[None]:
        """Block whose errors begin with a key."""
        try:
            yield
        except self._wrapped as error:
            raise CheckpointError(f"{key}: {what} on rank {own_rank()}: {error}") from error

    def call_hooks(self, keys: Iterable[str]) -> None:
        """Calls ``before_checkpoint()`` on the values and their submodules, if they have it."""
        for key in list(keys):
            value = self._values[key]
            parts: Iterable[Any] = value.modules() if isinstance(value, nn.Module) else (value,)
            for part in parts:
                # Check the type, because nn.Module.__getattr__ is slow for missing attributes.
                if hasattr(type(part), "before_checkpoint"):
                    with self._adding_key(key, "before_checkpoint() failed"):
                        part.before_checkpoint()

    def read(self, key: str, *, for_load: bool = False) -> Any:
        """Returns the state of a value, to save it or to load into it."""
        if not isinstance(key, str):
            raise TypeError(f"the keys of a state must be str, got {key!r}")
        with self._adding_key(key, "its state could not be read"):
            return _read_state(key, self, self._values[key], for_load)

    def apply(self, key: str, part: Any) -> None:
        """Restores a value from a state that :meth:`read` returned and a load has filled."""
        with self._adding_key(key, "could not be restored"):
            value = self._values[key]
            per_rank = _as_per_rank(value)
            if per_rank is not None:
                [own] = part.values()
                if isinstance(own, OptionalObject):
                    if own.missing:
                        self._missing.append(key)
                    own = next(iter(own.values.values()), None)
                if isinstance(own, SimpleNamespace):
                    per_rank.restore(own.value)
            elif isinstance(part, ModuleTarget):
                value.load_state_dict(part.state())
            elif isinstance(part, OptimizerState):
                set_optimizer_state(value, part)
            elif is_stateful(value):
                value.load_state_dict(part.state())
            else:
                state = part.state()
                self._replaced += part.replaced(state)
                self._values[key] = state

    def warn_of_differences(self) -> None:
        """Warns about values for which the checkpoint has no state of this rank, and about tensors
        of the mapping that were not filled in place."""
        # Attribute the warnings to the caller's caller.
        if self._replaced:
            warnings.warn(
                f"{some_of(self._replaced)}: the checkpoint has no tensor of this name but another "
                "value, which has replaced the tensor in the state. Read the value from the state "
                "after the restore",
                stacklevel=3,
            )
        if self._missing:
            warnings.warn(
                f"{', '.join(self._missing)}: the checkpoint has no state for rank {own_rank()}, "
                "probably because fewer ranks saved it; this rank keeps its current state",
                stacklevel=3,
            )


def is_stateful(value: Any) -> bool:
    """Returns the same as isinstance(value, Stateful), which takes 20 µs before Python 3.12."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def stateful_keys(state_dict: Mapping[str, Any]) -> list[str]:
    """Returns the keys of values that are saved through their state: modules, optimizers, PerRank
    and Stateful values."""
    others = [
        (key, value)
        for key, value in state_dict.items()
        # The first check is faster, and decides for nearly all values.
        if type(value) not in _WITHOUT_STATE and not isinstance(value, torch.Tensor)
    ]
    return [key for key, value in others if isinstance(value, PerRank) or is_stateful(value)]


def resolve_state_dict(
    state_dict: StateDict | Callable[[], StateDict], *, calls: bool = True
) -> StateDict:
    """Returns the state dict. If the caller passed a function, calls it.

    Args:
        calls: False refuses a function.

    Raises:
        TypeError: the state dict is not a mapping.
    """
    # Modules are callable, too.
    if calls and callable(state_dict) and not is_stateful(state_dict):
        state_dict = state_dict()
    if isinstance(state_dict, Mapping):
        return state_dict
    name = "model" if isinstance(state_dict, nn.Module) else "state"
    wrapped = f"{{{name!r}: ...}}" if is_stateful(state_dict) else "a dict of names and values"
    raise TypeError(f"state_dict must be a dict, got {type(state_dict).__name__}. Pass {wrapped}.")


def saved_values(state_dict: StateDict | Callable[[], StateDict]) -> StateDict:
    """Returns a copy of a state dict to save. Values that have a state are replaced by it.

    Args:
        state_dict: see :func:`resolve_state_dict`.

    Raises:
        RuntimeError: see :func:`refuse_capture`.
    """
    refuse_capture()
    state_dict = resolve_state_dict(state_dict)
    values = dict(state_dict)
    keys = stateful_keys(values)
    if keys:
        states = States(state_dict, wraps_errors=False)
        states.call_hooks(keys)
        values.update((key, states.read(key)) for key in keys)
    return values


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
        return _module_state(key, value, states.names, for_load)
    has_state = is_stateful(value)
    state = value.state_dict() if has_state else python_number(value)
    target = None
    if for_load:
        target = StateTarget(key, state, is_stateful=has_state, other_keys=states.keys)
    if isinstance(value, Optimizer) and has_layout_of_torch(value, state):
        parameters = states.names.of_parameters(value)
        state = optimizer_state(value, state, parameters, for_load)
        if target is not None:
            return OptimizerState(key, parameters, state, value, target)
        return to_stock_layout(key, state)
    if target is not None:
        return target
    if type(state) in PLAIN and not has_state:
        return state
    if has_state and isinstance(state, Mapping) and type(state) is not OrderedDict:
        # A restore fills the object that state_dict() returns, so its type is not stored.
        state = dict(state)
    return split_state(key, state)


def _module_state(key: str, module: nn.Module, names: ParameterNames, for_load: bool) -> StateDict:
    own = module.state_dict()
    resolved = names.resolve_all(module, own)
    if not for_load:
        return {
            resolved[name]: part if is_tensor_of_module(name, part) else wrap_state(key, part)
            for name, part in own.items()
        }
    for name, part in own.items():
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
