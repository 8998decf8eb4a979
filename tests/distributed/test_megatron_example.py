"""The training script examples/megatron_training.py: a killed run continues with the same
losses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ranks import by_fork
from tests.support import stock_load

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "examples" / "megatron_training.py"


def train(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return by_fork(4, SCRIPT, *arguments)


def losses(path: Path) -> dict[int, set[float]]:
    """Returns the losses by step, of all runs that reached the step."""
    found: dict[int, set[float]] = {}
    for entry in map(json.loads, path.read_text().splitlines()):
        found.setdefault(entry["step"], set()).add(entry["loss"])
    return found


@pytest.mark.timeout(800)
def test_a_training_killed_during_a_save_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = train("--steps", "10", "--checkpoints", tmp_path / "a", "--losses", tmp_path / "a.l")
    assert straight.returncode == 0, straight.stdout
    again = ("--checkpoints", tmp_path / "b", "--losses", tmp_path / "b.l")
    first = train("--steps", "4", *again)
    assert first.returncode == 0, first.stdout
    killed = train("--steps", "10", "--kill-after", "6", *again)
    assert killed.returncode != 0
    assert "resumes after step 4" in killed.stdout
    resumed = train("--steps", "10", *again)
    assert resumed.returncode == 0, resumed.stdout
    # The save of step 6 was running.
    assert "resumes after step 4" in resumed.stdout or "resumes after step 6" in resumed.stdout
    assert "with the plan of the loaded checkpoint" in resumed.stdout
    assert losses(tmp_path / "b.l") == losses(tmp_path / "a.l")
    assert set(losses(tmp_path / "a.l")) == set(range(1, 11))
    states = []
    for run in ("a", "b"):
        state = {
            "step": 0,
            "model.up": torch.zeros(256, 64),
            "model.down": torch.zeros(64, 256),
            "optimizer.exp_avg.up": torch.zeros(256, 64),
            "optimizer.exp_avg_sq.down": torch.zeros(64, 256),
        }
        stock_load(state, tmp_path / run / "step_10")
        states.append(state)
    assert states[0].pop("step") == states[1].pop("step") == 10
    for name, tensor in states[0].items():
        assert tensor.count_nonzero() > 0, name
        assert torch.equal(tensor, states[1][name]), name
