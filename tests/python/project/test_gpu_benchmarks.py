"""Measurements for a machine with a GPU, run on the CPU with a few MB. No speed is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_record, peers
from tests import gpu_training
from tests.forked import in_fresh_process

pytestmark = pytest.mark.full

_SMALL = ("--device", "cpu", "--size", "2MB", "--disk-size", "2MB", "--few", "30", "--many", "40")
_SHORT = ("--saves", "2", "--idle-steps", "2")


def _measure_in_fork(function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
    assert timeout > 0
    return in_fresh_process(function, *arguments)


def _measure(
    directory: Path, *arguments: str, run: Callable[..., Any] = _measure_in_fork
) -> dict[str, Any]:
    out = directory / "figures.json"
    where = ("--dir", str(directory / "work"), "--memory-dir", str(directory), "--out", str(out))
    gpu.main([*_SMALL, *_SHORT, *where, *arguments], run)
    document = json.loads(out.read_text())
    assert isinstance(document, dict)
    return document


def test_figures_have_every_group_with_first_and_later_saves(tmp_path: Path) -> None:
    savers = ["ours_overlapped", "ours_blocking", "stock_thread", "stock_staged"]
    if torch.__version__.startswith("2.11."):
        savers.remove("stock_staged")  # fails without a GPU
    document = _measure(tmp_path, "--savers", *savers)
    groups = {group["name"]: group for group in document["groups"]}
    for shape in ("few", "many"):
        for name, expected in (("copies_to_host", savers[:1]), ("on_disk", savers)):
            contenders = {sample["contender"] for sample in groups[f"{name}_{shape}"]["samples"]}
            assert contenders == {f"{kind}_{s}" for kind in ("first", "later") for s in expected}
    loads = {sample["contender"] for sample in groups["loads_few_warm"]["samples"]}
    assert loads == {"ours_call", "stock"}
    limits = document["parameters"]["limits"]
    assert limits["pinned_to_host"] > 0
    assert document["parameters"]["quick"], "what runs on the CPU must not pass for a GPU's figures"


def test_a_measurement_that_fails_is_recorded_and_the_others_continue(tmp_path: Path) -> None:
    def run(function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        if arguments[0] == "stock_thread":
            raise RuntimeError("out of device memory")
        return _measure_in_fork(function, *arguments, timeout=timeout)

    savers = ("--only", "on_disk", "--savers", "stock_thread", "ours_blocking")
    document = _measure(tmp_path, *savers, run=run)
    skipped = {entry["what"]: entry["reason"] for entry in document["skipped"]}
    assert skipped["on_disk_few: stock_thread"] == "out of device memory"
    contenders = {sample["contender"] for sample in document["groups"][0]["samples"]}
    assert contenders == {"first_ours_blocking", "later_ours_blocking"}


def test_measurements_beyond_the_time_limit_are_named(tmp_path: Path) -> None:
    document = _measure(tmp_path, "--seconds", "0")
    assert {entry["reason"] for entry in document["skipped"]} == {"there was no time left"}


def test_torch_checkpointing_is_measured_or_reported_as_missing(tmp_path: Path) -> None:
    only = ("--only", "on_disk", "--savers", "torch_checkpointing")
    document = _measure(tmp_path, *only)
    if document["skipped"]:
        assert peers.TORCH_CHECKPOINTING.title in document["skipped"][0]["reason"]
    else:
        assert [group["name"] for group in document["groups"]] == ["on_disk_few", "on_disk_many"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU scripts/gpu_run.sh does it")
def test_the_state_for_the_sanitizer_makes_the_round_trip() -> None:
    gpu.main(["--round-trip", "--device", "cpu"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("variant", ["overlapped", "captured_blocking"])
def test_killed_training_resumes_with_equal_losses(tmp_path: Path, variant: str) -> None:
    tiny = ["--device", "cpu", "--width", "32", "--layers", "1", "--steps", "8"]
    where = ["--dir", str(tmp_path), "--out", str(tmp_path / "training.json")]
    (outcome,) = gpu_training.main([*tiny, *where, "--at-once", "1", "--variants", variant])
    assert outcome.failure is None
    assert 1 <= outcome.restored <= outcome.killed_after
    assert json.loads((tmp_path / "training.json").read_text())[0]["variant"] == variant


def test_a_loss_that_differs_from_the_reference_fails_its_variant() -> None:
    reference = gpu_training.TrainingRun(0, {1: "0x1p+0", 2: "0x1p-1", 3: "0x1p-2"}, 0)
    first = gpu_training.TrainingRun(0, {1: "0x1p+0"}, -9)
    second = gpu_training.TrainingRun(1, {2: "0x1p-1", 3: "0x1p-3"}, 0)
    found = gpu_training._difference(first, second, reference, 3)
    assert found == "step 3: loss 0x1p-3, without saves 0x1p-2"
    second.losses[3] = "0x1p-2"
    assert gpu_training._difference(first, second, reference, 3) is None


@pytest.mark.parametrize(
    ("device", "statuses", "expected"),
    [("H100", [0, 0], 0), ("H100", [0, 1], 1), ("none", [0, 0], 3), ("none", [124, 0], 1)],
)
def test_the_exit_status_depends_on_the_results_of_the_parts(
    tmp_path: Path, device: str, statuses: list[int], expected: int
) -> None:
    lines = [f"part{number}\t{status}\t2\t9\n" for number, status in enumerate(statuses)]
    (tmp_path / "parts.tsv").write_text("".join(lines))
    assert gpu_record.main(tmp_path, device) == expected
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["device"] == {"none": "no device"}.get(device, device)
    assert record["figures"] is None, "a part that was stopped leaves none"


def test_the_table_of_all_figures_fits_into_sixty_lines(tmp_path: Path) -> None:
    document = _measure(tmp_path, "--savers", "ours_overlapped", "ours_blocking")
    # Five savers in each of two groups.
    for group in document["groups"]:
        if group["name"].startswith("on_disk"):
            group["samples"] = (group["samples"] * 3)[:10]
    training = [
        {"variant": name, "failure": None, "killed_after": 4, "restored": 3, "steps": 8}
        for name in gpu_training.VARIANTS
    ]
    parts = [
        {"part": f"part{number}", "status": 0, "seconds": 2, "limit": 9} for number in range(5)
    ]
    record = {"device": "H100", "parts": parts, "tests": "", "training": training}
    lines = gpu_record.table({**record, "figures": document})
    assert len(lines) < gpu_record.MAX_LINES
    assert sum("torch_ckpt.load" in line for line in lines) >= 1
