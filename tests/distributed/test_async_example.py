"""The training script examples/async_training.py: every way to save leaves complete checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stock_load

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "examples" / "async_training.py"
SMALL = ["--width", "64", "--steps", "4", "--save-every", "2", "--keep"]


def run(*arguments: str | Path, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, *launcher, str(SCRIPT), *SMALL, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def step_in(checkpoint: Path) -> int:
    loaded = {"step": -1}
    stock_load(loaded, checkpoint)
    return loaded["step"]


def test_each_way_to_save_has_a_line_in_the_comparison(tmp_path: Path) -> None:
    lines = run("--save", "all", "--checkpoints", tmp_path).splitlines()
    for mode, line in zip(("stock", "blocking", "overlapped"), lines[-3:], strict=True):
        assert line.startswith(f"{mode}: ")
        assert "blocked training for" in line
        assert "durable after" in line
        assert [step_in(tmp_path / mode / f"step_{step}") for step in (2, 4)] == [2, 4]


def test_several_ranks_save_in_the_background(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run("--save", "overlapped", "--checkpoints", tmp_path, launcher=launcher)
    assert [step_in(tmp_path / "overlapped" / f"step_{step}") for step in (2, 4)] == [2, 4]
