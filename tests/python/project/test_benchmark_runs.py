"""Trial runs of the benchmarks: one group by default, all with make torture. No speed is
asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import peers, run

REPOSITORY = Path(__file__).resolve().parents[3]

# A run starts dozens of processes that import torch, which takes minutes if all cores are busy.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def _run(directory: Path, groups: Sequence[str]) -> Any:
    """Returns the results of a run with tiny sizes."""
    out = directory / "results" / "tiny.json"
    command = [sys.executable, "-m", "benchmarks.run", *groups, "--quick", "--size", "2MB"]
    command += ["--tensors", "30", "--small-tensors", "20", "--dir", str(directory / "work")]
    subprocess.run([*command, "--out", str(out)], cwd=REPOSITORY, check=True)
    assert not any((directory / "work").iterdir()), "the run left checkpoints behind"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of all groups that need no servers."""
    groups = [name for name in run.GROUPS if name not in run.WITH_SERVERS]
    return _run(tmp_path_factory.mktemp("bench"), groups)


@pytest.fixture(scope="module")
def samples(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Samples of each group."""
    return {group["name"]: group["samples"] for group in document["groups"]}


def assert_samples_are_complete(document: dict[str, Any]) -> None:
    for group in document["groups"]:
        contenders = {info["name"] for info in group["contenders"]}
        assert {sample["contender"] for sample in group["samples"]} == contenders
        assert group["bytes"] > 0
        for sample in group["samples"]:
            assert sample.get("wall_s", 1) > 0
            assert sample.get("cpu_s", 0) >= 0


def test_a_quick_run_measures_one_group_and_is_marked_as_quick(tmp_path: Path) -> None:
    document = _run(tmp_path, ["save"])
    assert [group["name"] for group in document["groups"]] == ["save"]
    assert_samples_are_complete(document)
    assert document["parameters"]["quick"]


def test_an_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["save", "loud"])
    assert "unknown groups: loud" in capsys.readouterr().err


@pytest.mark.torture
def test_a_run_measures_every_group_or_gives_the_reason(document: dict[str, Any]) -> None:
    assert_samples_are_complete(document)
    names = {group["name"] for group in document["groups"]}
    warm = "save load_warm small_save small_load partial_warm reshard_warm replicas_warm"
    queues = {"megatron", "megatron_small", "megatron_ranks"}
    assert names >= {*warm.split(), "async", "async_small", "async_first", *queues}
    # The page cache of some file systems cannot be dropped (tmpfs is nothing but page cache), and
    # some kernels do not reset the peak of the memory.
    others = {"load_cold", "partial_cold", "reshard_cold", "replicas_cold"}
    others |= {"memory_save", "memory_load", "memory_async"}
    skipped = [one["what"] for one in document["skipped"]]
    reasons = [what for what in skipped if "cold page cache" in what or "Memory" in what]
    assert len(others & names) + len(reasons) == len(others)


@pytest.mark.torture
def test_samples_of_background_saves_have_the_slowdown_of_training(
    samples: dict[str, list[dict[str, Any]]],
) -> None:
    for name in ("async", "async_small", "async_first"):
        for sample in samples[name]:
            assert 0 < sample["stall_s"] <= sample["staged_s"] <= sample["wall_s"]
            assert sample["steps"] == sum(len(save["steps"]) for save in sample["saves"])
    during = {sample["contender"]: sample for sample in samples["async"]}
    assert {"stock_thread", "ours_blocking", "ours_overlapped"} <= during.keys()
    for sample in during.values():
        first = sample["saves"][0]
        assert all(start < end <= 0 for start, end in first["idle_steps"])
        assert all(first["stall_s"] <= start < end for start, end in first["steps"])
    assert during["stock_1"]["steps"] == 0, "a synchronous save leaves no time to train"


@pytest.mark.torture
def test_a_queue_without_workers_has_no_processes_and_saves_a_snapshot(
    samples: dict[str, list[dict[str, Any]]],
) -> None:
    for name in ("megatron", "megatron_small", "megatron_ranks"):
        for sample in samples[name]:
            assert 0 < sample["stall_s"] < sample["wall_s"]
            assert sample["memory_bytes"] > 0
        (ours,) = [sample for sample in samples[name] if sample["contender"] == "ours"]
        assert ours["processes"] == 0
        assert ours["kept"]


@pytest.mark.torture
def test_peers_are_measured_with_their_workers_or_skipped_with_a_reason(
    document: dict[str, Any], samples: dict[str, list[dict[str, Any]]]
) -> None:
    skipped = {entry["what"]: entry["reason"] for entry in document["skipped"]}
    of = {sample["contender"]: sample for sample in samples["megatron"]}
    for name, peer in (("nvrx_copies", peers.NVRX), ("mcore", peers.MEGATRON_CORE)):
        if peer.title in skipped:
            assert "pip" in skipped[peer.title] or "/dev/shm" in skipped[peer.title]
            continue
        # At least a worker and a manager.
        assert of[name]["processes"] >= 2
        # The scheduler decides whether the other worker reads before or after the change.
        assert of[name]["kept"] or name != "nvrx_copies"


@pytest.mark.torture
def test_loads_of_parts_and_by_ranks_have_the_bytes_read(
    document: dict[str, Any], samples: dict[str, list[dict[str, Any]]]
) -> None:
    for name in ("partial_warm", "reshard_warm", "replicas_warm"):
        assert all(sample["read_bytes"] > 0 for sample in samples[name])
    (reshard,) = [group for group in document["groups"] if group["name"] == "reshard_warm"]
    labels = [info["label"] for info in reshard["contenders"]]
    assert labels == ["3 ranks: stock dcp.load", "3 ranks: dcp.load with torch_ckpt"]
    read = {sample["contender"]: sample["read_bytes"] for sample in samples["partial_warm"]}
    assert read["ours_dcp"] < read["stock"]
