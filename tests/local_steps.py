"""Steps in a local root for tests: saved, damaged, listed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.support import ATTEMPT, assert_equal, cause_of, load, save_step  # noqa: F401
from torch_ckpt import WriteOptions
from torch_ckpt.options import DEFAULT_OPTIONS
from torch_ckpt.steps import MARKER_NAME, LocalSteps


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((5, 3), value), "n": int(value)}


def saved(
    store: LocalSteps,
    step: int,
    value: float = 1.0,
    write: WriteOptions = DEFAULT_OPTIONS,
    **options: Any,
) -> Path:
    """Saves a step and returns its directory."""
    save_step(store, step, state(value), write, **options)
    return Path(store.path_of(step))


def failure(store: LocalSteps, step: int, **options: Any) -> BaseException:
    """Returns the cause for which saving a step fails."""
    with pytest.raises(CheckpointException) as caught:
        saved(store, step, **options)
    return cause_of(caught.value)


def value_of(path: Path) -> float:
    """Returns the value that was saved in a step's directory."""
    found = state(0.0)
    load(found, path)
    value: float = found["w"][0, 0].item()
    assert_equal(found, state(value))
    return value


def names(store: LocalSteps) -> list[str]:
    root = Path(store.root)
    return sorted(os.listdir(root)) if root.exists() else []


def listed(store: LocalSteps) -> list[tuple[int, str]]:
    return [(info.step, info.state) for info in store.entries()]


def unfinished(store: LocalSteps, step: int, *, marker: str | None = None) -> Path:
    """Makes the directory that a crash leaves before the rename of a save."""
    path = saved(store, step, 7.0)
    left = path.with_name(f"{path.name}.tmp-ffffffff")
    path.rename(left)
    if marker is None:
        (left / MARKER_NAME).unlink()
    else:
        (left / MARKER_NAME).write_text(marker)
    return left
