"""The training script of examples/ with the demo's settings, scaled down."""

import json
from pathlib import Path

import pytest

from tests.ranks import by_fork, torchrun

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "examples" / "train_transformer.py"


def losses(path: Path) -> dict[int, float]:
    entries = map(json.loads, path.read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries}


def test_training_resumed_on_another_number_of_ranks_has_the_same_losses(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    saving = ("--checkpoints", checkpoints, "--save-every", "2")
    trained = torchrun(2, SCRIPT, "--steps", "4", "--losses", straight, *saving)
    assert trained.returncode == 0, trained.stdout
    resume = ("--resume", checkpoints / "step_0000000002")
    trained = by_fork(1, SCRIPT, "--steps", "4", "--losses", resumed, *resume)
    assert trained.returncode == 0, trained.stdout
    expected = losses(straight)
    assert set(expected) == {1, 2, 3, 4}
    assert set(losses(resumed)) == {3, 4}
    for step, loss in losses(resumed).items():
        assert abs(loss - expected[step]) <= 1e-12 * abs(expected[step])
