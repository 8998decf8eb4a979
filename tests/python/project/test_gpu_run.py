"""What scripts/gpu_run.sh runs on a GPU machine, without a GPU and with small states."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_process, gpu_report, gpu_training

REPOSITORY = Path(__file__).resolve().parents[3]
LIMITS = {"pinned_to_host": 50e9, "pinned_to_device": 40e9, "disk_read": 2e9}


def _run_here(module: str, arguments: Sequence[str], _seconds: float) -> Any:
    assert module == "gpu_process"
    return json.loads(json.dumps(gpu_process.measure(arguments)))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("gpu")
    out = directory / "figures.json"
    command = ["--device", "cpu", "--size", "2MB", "--disk-size", "2MB", "--few", "30"]
    command += ["--many", "40", "--idle-steps", "2", "--saves", "2", "--savers"]
    command += ["ours_overlapped", "ours_blocking", "stock_thread"]
    command += ["--dir", str(directory / "disk"), "--memory-dir", str(directory / "memory")]
    gpu.main([*command, "--out", str(out)], run=_run_here)
    assert not any((directory / "disk").iterdir()), "the run left checkpoints behind"
    return dict(json.loads(out.read_text()))


def test_copies_saves_and_loads_are_measured(figures: dict[str, Any]) -> None:
    assert {group["name"] for group in figures["groups"]} >= {
        "copies_to_host_few",
        "copies_to_host_many",
        "loads_few_warm",
        "on_disk_few",
        "on_disk_many",
    }
    assert figures["skipped"] == []


def test_the_table_has_a_line_for_each_part_and_each_saver(figures: dict[str, Any]) -> None:
    parts = gpu_report.parts_of("build\tpassed\t20\nmemcheck\tfailed: exit status 9\t31\n")
    lines = gpu_report.lines_of(parts, figures)
    assert len(lines) <= gpu_report.MOST_LINES
    assert lines[0].split() == ["build", "20", "s", "passed"]
    assert lines[1].endswith("failed: exit status 9")
    for info in (info for group in figures["groups"] for info in group["contenders"]):
        assert any(info["label"] in line for line in lines), info["label"]


def test_a_copy_to_the_host_is_compared_with_a_pinned_copy() -> None:
    trace = {"idle_steps": [[-1.0, -0.9]], "steps": [[0.0, 0.1], [0.1, 0.4]]}
    sample = {"contender": "first_ours", "stall_s": 0.01, "staged_s": 0.5, "durable_s": 2.0}
    group = {
        "name": "copies_to_host_few",
        "title": "10 GB",
        "bytes": 10**10,
        "contenders": [{"name": "first_ours", "label": "ours: first", "kind": "ours"}],
        "samples": [sample | {"saves": [trace]}],
    }
    parameters = {"limits": LIMITS, "device_memory_bytes": {"copies_to_host_few.ours": 4_000_000}}
    line = gpu_report.lines_of([], {"parameters": parameters, "groups": [group]})[-1]
    assert "call 0.010 s, staged 0.500 s (20.0 GB/s, 0.40 of pinned), committed 2.00 s" in line
    assert "steps 200.0 ms, p99 300.0 ms (idle 100.0 ms)" in line
    assert line.endswith("device memory 4 MB")


def test_a_cold_load_is_compared_with_the_disk() -> None:
    group = {
        "name": "loads_few_cold",
        "title": "1 GB",
        "bytes": 10**9,
        "contenders": [{"name": "ours_call", "label": "torch_ckpt.load", "kind": "ours"}],
        "samples": [{"contender": "ours_call", "wall_s": 1.0}],
    }
    line = gpu_report.lines_of([], {"parameters": {"limits": LIMITS}, "groups": [group]})[-1]
    assert line == "  torch_ckpt.load: 1.000 s (1.00 GB/s, 0.50 of the limit)"


def test_a_part_that_failed_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parts").write_text("build\tpassed\t20\ntests\tfailed: exit status 1\t3\n")
    arguments = ["--parts", str(tmp_path / "parts"), "--out", str(tmp_path)]
    assert gpu_report.main(arguments) == 1
    assert "no figures" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "run.json").read_text())["parts"]) == 2


def test_a_killed_training_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    command = ["--device", "cpu", "--steps", "4", "--width", "32", "--layers", "1"]
    command += ["--variants", "overlapped", "captured_blocking", "--dir", str(tmp_path)]
    outcomes = gpu_training.main(command)
    assert [outcome.failure for outcome in outcomes] == [None, None]
    assert all(outcome.restored >= 1 for outcome in outcomes)


@pytest.mark.torture
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_kit_builds_and_the_run_ends_with_3(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no CUDA toolkit")
    tree = tmp_path / "tree"
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True
    ).stdout
    for name in files.decode().split("\0")[:-1]:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, tree / name)
    subprocess.run(["scripts/gpu_kit.sh", sys.executable, "build/gpu-kit"], cwd=tree, check=True)
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    run = subprocess.run(["scripts/gpu_run.sh"], cwd=tree, env=environment, check=False)
    assert run.returncode == 3
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["device"] == "no device"
    assert record["parts"][0]["outcome"] == "passed"
