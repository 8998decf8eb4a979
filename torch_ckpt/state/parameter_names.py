"""Resolves the fully qualified parameter names of modules and optimizers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.fsdp import FullyShardedDataParallel
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
            [full_name] = _get_fqns(module, name)
            resolved[name] = full_name
        return full_name

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
