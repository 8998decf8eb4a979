"""Optimizers that wrap another optimizer."""

from __future__ import annotations

from torch.optim import Optimizer


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer that holds the state. For a wrapper, such as Accelerate's, that is the
    wrapped optimizer; otherwise it is the optimizer itself."""
    while True:
        held = (value for value in vars(optimizer).values() if isinstance(value, Optimizer))
        inner = next((o for o in held if o is not optimizer and o.state is optimizer.state), None)
        if inner is None:
            return optimizer
        optimizer = inner
