"""The training script of examples/: what the demo shows, in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "train_transformer.py"


def train(ranks: int, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(SCRIPT), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=120)


def losses(path: Path) -> dict[int, float]:
    entries = map(json.loads, path.read_text().splitlines())
    return {entry["step"]: entry["loss"] for entry in entries}


def test_training_resumed_on_another_number_of_ranks_has_the_same_losses(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    straight, resumed = tmp_path / "straight.jsonl", tmp_path / "resumed.jsonl"
    saving = ("--checkpoints", checkpoints, "--save-every", "2")
    train(2, "--steps", "4", "--losses", straight, *saving)
    train(1, "--steps", "4", "--losses", resumed, "--resume", checkpoints / "step_0000000002")
    expected = losses(straight)
    assert set(expected) == {1, 2, 3, 4}
    assert set(losses(resumed)) == {3, 4}
    for step, loss in losses(resumed).items():
        assert abs(loss - expected[step]) <= 1e-12 * abs(expected[step])
