"""Resolves the fully qualified parameter names of modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.optim import Optimizer

from torch_ckpt.errors import CheckpointError

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
