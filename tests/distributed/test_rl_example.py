"""The script examples/rl_publication.py: a worker follows the versions of a sharded policy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_ckpt
from tests.object_server import BUCKET, KEY, SECRET, ObjectServer

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[2] / "examples" / "rl_publication.py"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(
    root: Path | str, steps: int, *launcher: str, worker: bool = False
) -> subprocess.Popen[str]:
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


def test_a_worker_loads_a_version_and_then_applies_deltas(tmp_path: Path) -> None:
    assert output_of(start(tmp_path, 10, *LAUNCHER))[-1] == "trained from step 0 to step 10"
    worker = start(tmp_path, 20, worker=True)
    assert worker.stdout is not None
    assert worker.stdout.readline().startswith("version 10: loaded all weights")
    assert output_of(start(tmp_path, 20, *LAUNCHER))[-1] == "trained from step 10 to step 20"
    (line,) = output_of(worker)
    assert line.startswith("version 20: applied a delta")
    weights = {"0.weight": torch.zeros(256, 64), "2.weight": torch.zeros(8, 256)}
    weights |= {"0.bias": torch.zeros(256), "2.bias": torch.zeros(8)}
    weights = {name: value.bfloat16() for name, value in weights.items()}
    torch_ckpt.load(weights, tmp_path, no_dist=True)
    total = sum(value.double().sum().item() for value in weights.values())
    assert line.endswith(f"sum {total:.6f}")


def test_a_worker_follows_versions_beneath_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    url = f"s3://{BUCKET}/policy"
    with ObjectServer().running() as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        for first, last in ((0, 10), (10, 20)):
            trained = f"trained from step {first} to step {last}"
            assert output_of(start(url, last, *LAUNCHER))[-1] == trained
            (line,) = output_of(start(url, last, worker=True))
            assert line.startswith(f"version {last}: loaded all weights")
