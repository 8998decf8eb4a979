"""The tensors of a training state, read without calling any ``state_dict()``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree


def live_tensors(state: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors of modules and optimizers, and those in dicts and lists.

    Leaves out the state of other objects. Their ``state_dict()`` may be slow or have side effects,
    so only a save calls it.
    """
    for value in list(state.values()):
        if isinstance(value, torch.nn.Module):
            yield from itertools.chain(value.parameters(), value.buffers())
            continue
        # Some optimizers have no attribute `state`, because they consist of several optimizers.
        part = dict(getattr(value, "state", {})) if isinstance(value, Optimizer) else value
        for leaf in pytree.tree_leaves(part):
            if isinstance(leaf, torch.Tensor):
                yield leaf
