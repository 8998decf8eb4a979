"""The script examples/rl_publication.py: a worker follows the versions of a sharded policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import torch_ckpt
from torch_ckpt.steps import open_steps

SCRIPT = Path(__file__).parents[2] / "examples" / "rl_publication.py"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(root: Path, steps: int, *launcher: str, worker: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, *launcher, str(SCRIPT), "--root", str(root), "--steps", str(steps)]
    return subprocess.Popen(
        [*command, *(["--worker"] if worker else [])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output.splitlines()


def test_a_worker_has_the_weights_of_the_newest_version(tmp_path: Path) -> None:
    # The worker starts first, so that it sees at least one version before the last.
    worker = start(tmp_path, 40, worker=True)
    trainer = start(tmp_path, 40, *LAUNCHER)
    assert output_of(trainer)[-1].startswith("published version 40, loss")
    lines = output_of(worker)
    assert lines[-1].startswith("version 40: ")
    assert [info.step for info in open_steps(tmp_path).entries()] == [20, 30, 40]
    weights = {"0.weight": torch.zeros(256, 64), "2.weight": torch.zeros(8, 256)}
    weights |= {"0.bias": torch.zeros(256), "2.bias": torch.zeros(8)}
    weights = {name: value.bfloat16() for name, value in weights.items()}
    torch_ckpt.load(weights, tmp_path, no_dist=True)
    total = sum(value.double().sum().item() for value in weights.values())
    assert lines[-1].endswith(f"sum {total:.6f}")
