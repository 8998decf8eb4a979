"""Names of modules' parameters, as optimizers need them."""

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

# Of each module: its names and what torch calls them on any number of ranks. Each costs some
# microseconds to find out, and none of them changes.
_known: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()


class ParameterNames:
    """The fully qualified names of a program's modules and parameters."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        self._modules = {k: value for k, value in state.items() if isinstance(value, nn.Module)}
        self._parameters: dict[str, dict[torch.Tensor, str]] = {}

    def of(self, module: nn.Module, name: str) -> str:
        """The fully qualified name of what a module names so."""
        known = _known.get(module)
        if known is None:
            if any(isinstance(part, FullyShardedDataParallel) for part in module.modules()):
                raise CheckpointError(
                    "FullyShardedDataParallel (FSDP1) is not supported; fully_shard is. Pass the "
                    "state_dict() of the module to save and load it as torch names it"
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
