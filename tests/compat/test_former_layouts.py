"""Steps of former managers stay readable: they stored plain values like values with a state.

A value that was no number, text or tensor was stored as its tensors, and as one object ``_objects``
with all other parts, in which None stands for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.support import assert_equal

State = dict[str, Any]


def former(value: Any, tensors: int = 0) -> SimpleNamespace:
    """Returns the object with the parts of a value that are no tensors."""
    return SimpleNamespace(value=value, tensors=tensors)


#: The values of a step, and the names and values that a former manager stored for them.
VALUES: State = {
    "step": 7,
    "weight": torch.full((2,), 1.0),
    "losses": [0.5, 0.25],
    "history": {0: 0.5, "none": {}, "pair": (1, "two")},
    "ema": {"weight": torch.full((2,), 2.0), "inner": {1: torch.full((3,), 3.0)}, "decay": 0.9},
    "tensors": {"a": torch.full((2,), 4.0), "b": torch.full((1,), 5.0)},
    "list": [torch.full((2,), 6.0), 5, {"x": torch.full((1,), 7.0)}],
}
STORED: State = {
    "step": 7,
    "weight": VALUES["weight"],
    "losses": {"_objects": former([0.5, 0.25])},
    "history": {"_objects": former({0: 0.5, "none": {}, "pair": (1, "two")})},
    "ema": {
        "weight": VALUES["ema"]["weight"],
        "inner": {"1": VALUES["ema"]["inner"][1]},
        "_objects": former({"weight": None, "inner": {1: None}, "decay": 0.9}, 2),
    },
    "tensors": {**VALUES["tensors"], "_objects": former({}, 2)},
    "list": {
        "0": VALUES["list"][0],
        "2": {"x": VALUES["list"][2]["x"]},
        "_objects": former([None, 5, None], 2),
    },
}


def same_structure() -> State:
    """Returns a state in which only tensors and numbers differ."""
    return {
        "step": 0,
        "weight": torch.zeros(2),
        "losses": [0.0, 0.0],
        "history": {0: 0.0, "none": {}, "pair": ()},
        "ema": {"weight": torch.zeros(2), "inner": {1: torch.zeros(3)}, "decay": 0.0},
        "tensors": {"a": torch.zeros(2), "b": torch.zeros(1)},
        "list": [torch.zeros(2), 0, {"x": torch.zeros(1)}],
    }


def other_structure() -> State:
    """Returns a state with other types and sizes of containers, as before the first step."""
    return {
        **same_structure(),
        "step": None,
        "losses": None,
        "history": {},
        "ema": {"weight": torch.zeros(2), "inner": {1: torch.zeros(3)}},
        "list": [],
    }


def restore(state: State, step: Path) -> None:
    with torch_ckpt.CheckpointManager(step.parent) as manager:
        assert manager.restore(state) == 7


def read(state: State, step: Path) -> None:
    checkpoint = torch_ckpt.AsyncCheckpoint(**state)
    checkpoint.read(step)
    state.update((key, checkpoint.state[key]) for key in state)


def load(state: State, step: Path) -> None:
    torch_ckpt.load(state, step)


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Returns the directory of a step of a former manager."""
    path = tmp_path / "run" / "0000000007"
    torch_ckpt.save(STORED, path)
    (path / "write_completed").touch()
    return path


@pytest.mark.parametrize("restoring", [restore, read, load])
@pytest.mark.parametrize("fresh", [same_structure, other_structure])
def test_a_step_of_a_former_manager_is_restored(
    step: Path, restoring: Callable[[State, Path], None], fresh: Callable[[], State]
) -> None:
    state = fresh()
    ema = state["ema"]["weight"]
    restoring(state, step)
    assert_equal(state, VALUES)
    assert state["ema"]["weight"] is ema


def test_a_step_of_a_former_manager_is_saved_again_in_the_layout_of_dcp(step: Path) -> None:
    state = same_structure()
    with torch_ckpt.CheckpointManager(step.parent) as manager:
        manager.restore(state)
        manager.save(8, state)
        manager.wait_until_finished()
        with torch_ckpt.open(manager.steps()[-1].path) as saved:
            names = set(saved.names)
    torch_ckpt.save(state, step.parent.parent / "saved")
    with torch_ckpt.open(step.parent.parent / "saved") as saved:
        assert set(saved.names) == names
    assert {"ema.weight", "ema.inner.1", "ema.decay", "list.1", "losses"} < names
    assert not any("_objects" in name for name in names)
