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

from torch_ckpt._base.stateful import is_stateful
from torch_ckpt.checkpoint.objects import PLAIN
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.load import IfStored
from torch_ckpt.ranks.calls import Call
from torch_ckpt.ranks.meeting import own_rank
from torch_ckpt.state.optimizers import (
    OptimizerState,
    as_stock_state,
    optimizer_state,
    set_optimizer_state,
)
from torch_ckpt.state.parameter_names import ParameterNames
from torch_ckpt.state.trees import (
    OBJECTS,
    StateDict,
    python_number,
    split_state,
    value_of_part,
    wrapped_state,
)

T = TypeVar("T")


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
            # Lists in the place of arrays, which torch.load(weights_only=True) refuses.
            state["numpy"] = pytree.tree_map(
                lambda part: part.tolist() if hasattr(part, "tolist") else part,
                sys.modules["numpy"].random.get_state(legacy=False),
            )
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
            TypeError: the state is not a dict, or a key is not a str.
        """
        self._require_dict()
        for hook in list(self.before_save.values()):
            hook()
        states = States(self.state)
        states.call_hooks(self.state)
        return {key: states.read(key) for key in list(self.state)}

    def target(self) -> StateDict:
        """A state dict to load into, by :func:`torch_ckpt.load`; then call :meth:`apply`.

        Raises:
            CheckpointError: a value's state cannot be read, a module is on the meta device, or an
                optimizer without state cannot get one before its first step; names the key.
            TypeError: the state is not a dict, or a key is not a str.
        """
        self._require_dict()
        states = States(self.state)
        return {key: states.read(key, for_load=True) for key in list(self.state)}

    def apply(self, loaded: StateDict) -> None:
        """Puts back what :meth:`target` returned, once it has been loaded.

        Raises:
            CheckpointError: a value does not take its state; names the key.
        """
        states = States(self.state)
        for key in list(self.state):
            states.apply(key, loaded[key])
        states.warn_of_kept()

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
            raise TypeError(f'the state must be a dict such as {{"model": model}}, got a {kind}')


class States:
    """The states of a mapping's values, each read and set for itself.

    Args:
        values: the mapping.
        wraps_errors: what a value raises becomes a CheckpointError that names its key. If not, it
            is raised as it is, and only errors of torch_ckpt itself name the key.
    """

    def __init__(self, values: MutableMapping[str, Any], *, wraps_errors: bool = True) -> None:
        self._values = values
        self._kept: list[str] = []
        self._naming = _naming if wraps_errors else _naming_own

    @functools.cached_property
    def _names(self) -> ParameterNames:
        return ParameterNames(self._values)

    def call_hooks(self, keys: Iterable[str]) -> None:
        """Calls ``before_checkpoint()`` of values and of modules within modules."""
        for key in list(keys):
            value = self._values[key]
            parts: Iterable[Any] = value.modules() if isinstance(value, nn.Module) else (value,)
            for part in parts:
                # Of its type: asking a module itself for what it does not have is slow.
                if hasattr(type(part), "before_checkpoint"):
                    with self._naming(key, "before_checkpoint() failed"):
                        part.before_checkpoint()

    def read(self, key: str, *, for_load: bool = False) -> Any:
        """Returns the state of a value to save, or one to load into."""
        if not isinstance(key, str):
            raise TypeError(f"the names of a state must be str, got {key!r}")
        with self._naming(key, "its state could not be read"):
            return _state_of(key, self._values[key], self._names, for_load)

    def apply(self, key: str, part: Any) -> None:
        """Puts back a state that was read for a load, and loaded."""
        with self._naming(key, "could not be restored"):
            value = self._values[key]
            per_rank = _per_rank(value)
            if per_rank is not None:
                [own] = part.values()
                if isinstance(own, SimpleNamespace):
                    per_rank.restore(own.value)
                elif isinstance(own, IfStored) and own.missing:
                    self._kept.append(key)
            elif isinstance(value, nn.Module):
                value.load_state_dict(
                    {
                        name: value_of_part(part[self._names.of(value, name)])
                        for name in value.state_dict()
                    }
                )
            elif isinstance(value, Optimizer):
                set_optimizer_state(value, part)
            elif is_stateful(value):
                value.load_state_dict(part[OBJECTS].state(part))
            elif isinstance(part, torch.Tensor):
                self._values[key] = part
            elif part[OBJECTS].values:
                self._values[key] = part[OBJECTS].state(part)

    def warn_of_kept(self) -> None:
        """Warns of the values that the checkpoint had no state of for this rank."""
        if self._kept:
            # It names the line that calls what calls this.
            warnings.warn(
                f"{', '.join(self._kept)}: no state of rank {own_rank()} was in the checkpoint "
                "(one of fewer ranks has none); this rank keeps what it has",
                stacklevel=3,
            )


def has_state(value: Any) -> bool:
    """True if a value is saved by its state: modules, optimizers, PerRank, Stateful values."""
    return is_stateful(value) or isinstance(value, PerRank)


def saved_values(state_dict: MutableMapping[str, Any]) -> StateDict:
    """Returns the values of a state dict to save: states in the place of values that have one."""
    values = dict(state_dict)
    keys = [k for k, v in values.items() if not isinstance(v, torch.Tensor) and has_state(v)]
    if keys:
        states = States(state_dict, wraps_errors=False)
        states.call_hooks(keys)
        values.update((key, states.read(key)) for key in keys)
    return values


def _state_of(key: str, value: Any, names: ParameterNames, for_load: bool) -> Any:
    per_rank = _per_rank(value)
    if per_rank is not None:
        if not for_load:
            own: Any = wrapped_state(key, per_rank.state())
        else:
            # Any number of ranks has a rank 0: without its state the key is not there at all.
            own = IfStored() if own_rank() else None
        return {f"rank{own_rank()}": own}
    if isinstance(value, nn.Module):
        return _module_state(key, value, names, for_load)
    value = python_number(value)
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Optimizer):
        parameters = names.of_parameters(value)
        state = optimizer_state(value, parameters, for_load)
        return OptimizerState(key, parameters, state) if for_load else as_stock_state(key, state)
    if type(value) in PLAIN and not for_load:
        return value
    return split_state(key, value.state_dict() if is_stateful(value) else value, for_load)


def _module_state(key: str, module: nn.Module, names: ParameterNames, for_load: bool) -> StateDict:
    found: StateDict = {}
    for name, part in module.state_dict().items():
        # What a module packs into a tensor of its own may change its length.
        is_tensor = isinstance(part, torch.Tensor) and not name.endswith("_extra_state")
        if is_tensor and for_load and part.device.type == "meta":
            raise CheckpointError(
                f"{name} is on the meta device, where it has no memory to load into; call "
                "to_empty(device=...) of the module before the restore"
            )
        found[names.of(module, name)] = part if is_tensor else wrapped_state(key, part, 0, for_load)
    return found


def _per_rank(value: Any) -> PerRank | None:
    if isinstance(value, PerRank):
        return value
    # Not imported: a program that does not use torchdata need not have it.
    is_loader = any(kind.__name__ == "StatefulDataLoader" for kind in type(value).__mro__)
    return PerRank(value) if is_loader or isinstance(value, RNGState) else None


@contextlib.contextmanager
def _naming_own(key: str, what: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{key}: {what} on rank {own_rank()}: {error}") from error


@contextlib.contextmanager
def _naming(key: str, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{key}: {what} on rank {own_rank()}: {error}") from error
