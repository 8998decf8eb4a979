"""Helpers for tests of ``convert``: states, and checks of refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import random_tensor
from torch_ckpt import convert

STATE = {
    "model": {
        "weight": random_tensor((7, 5), torch.float32),
        "bias": random_tensor((7,), torch.bfloat16),
    },
    "optimizer": {
        "state": [{"step": torch.tensor(3.0), "m": random_tensor((7, 5), torch.float64)}]
    },
    "none": torch.empty(0, 4),
    "epoch": 12,
    "rng": (torch.arange(5, dtype=torch.uint8), "text"),
}

TENSORS = {"b": random_tensor((2, 3), torch.float16), "a.b": torch.ones(4), "c": torch.tensor(True)}


class Foreign:
    """Class that is not on torch's allow-list."""


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refused(
    directory: Path, error: type[Exception], match: str, *names: str, **options: Any
) -> None:
    """Expects that the conversion fails and leaves the directory unchanged."""
    before = names_in(directory)
    with pytest.raises(error, match=match):
        convert(directory / names[0], directory / names[1], **options)
    assert names_in(directory) == before
