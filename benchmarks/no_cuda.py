"""Lets code that calls torch.cuda without asking run on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


# torch._dynamo refuses one function in two places.
def _synchronize(_device: object = None) -> None:
    """There is nothing to wait for."""


def _set_device(_device: object) -> None:
    """There is nothing to choose."""


def _current_device() -> torch.device:
    return torch.device("cpu")


def _device_count() -> int:
    return 1


#: What is replaced. The device is asked for to make tensors there, so it is the CPU.
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "synchronize": _synchronize,
    "set_device": _set_device,
    "current_device": _current_device,
    "device_count": _device_count,
}


def pretend() -> None:
    """Replaces these functions of torch.cuda in this process; does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    for name, replacement in REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
