"""Makes code that calls torch.cuda unconditionally run on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


# Two functions, because torch._dynamo refuses the same function in two places.
def _synchronize(_device: object = None) -> None:
    """Does nothing."""


def _set_device(_device: object) -> None:
    """Does nothing."""


def _current_device() -> torch.device:
    return torch.device("cpu")


def _device_count() -> int:
    return 1


#: Replacements by name. The current device is the CPU, because callers make tensors on it.
REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "synchronize": _synchronize,
    "set_device": _set_device,
    "current_device": _current_device,
    "device_count": _device_count,
}


def pretend() -> None:
    """Replaces the functions in torch.cuda for this process. Does nothing if there is a GPU."""
    if torch.cuda.is_available():
        return
    for name, replacement in REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
