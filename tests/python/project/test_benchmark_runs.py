"""Trial runs of the benchmark: one group by default, all with make torture. No speed is
asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peers, run, suites

REPOSITORY = Path(__file__).resolve().parents[3]

# A run starts dozens of processes that import torch, which takes minutes if all cores are busy.
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def _run(directory: Path, groups: Sequence[str]) -> Any:
    """Returns the results of a run with tiny sizes."""
    out = directory / "results" / "tiny.json"
    command = [sys.executable, "-m", "benchmarks.run", "--quick", "--size", "2MB"]
    command += ["--tensors", "30", "--small-tensors", "20", "--dir", str(directory / "work")]
    command += [f"--only={group}" for group in groups]
    subprocess.run([*command, "--out", str(out)], cwd=REPOSITORY, check=True)
    assert not any((directory / "work").iterdir()), "the run left checkpoints behind"
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of all groups except the queues, which take as long as all others together."""
    groups = [group for group in run.GROUPS if group not in suites.QUEUE_GROUPS]
    return _run(tmp_path_factory.mktemp("bench"), groups)


@pytest.fixture(scope="module")
def queue_document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of the queues."""
    return _run(tmp_path_factory.mktemp("bench-queues"), list(suites.QUEUE_GROUPS))


@pytest.fixture(scope="module")
def samples(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Samples of each group."""
    return {group["name"]: group["samples"] for group in document["groups"]}


def assert_samples_are_complete(document: dict[str, Any]) -> None:
    for group in document["groups"]:
        contenders = {info["name"] for info in group["contenders"]}
        assert {sample["contender"] for sample in group["samples"]} == contenders
        for sample in group["samples"]:
            assert sample["wall_s"] > 0
            assert sample["cpu_s"] >= 0
            assert sample["bytes"] > 0


def test_a_quick_run_measures_one_group_and_is_marked_as_quick(tmp_path: Path) -> None:
    document = _run(tmp_path, ["save"])
    assert [group["name"] for group in document["groups"]] == ["save"]
    assert_samples_are_complete(document)
    held = {entry["key"]: entry["met"] for entry in document["comparisons"] if entry["target"]}
    assert held.keys() >= {"save.stock_1", "save.best_stock", "save.cpu", "save.buffered"}
    assert {type(met) for met in held.values()} == {bool}
    assert not document["representative"]


@pytest.mark.torture
def test_a_run_measures_every_group_or_gives_the_reason(document: dict[str, Any]) -> None:
    assert_samples_are_complete(document)
    names = {group["name"] for group in document["groups"]}
    warm = "save load_warm small_save small_load partial_warm reshard_warm replicas_warm manager"
    assert names >= {*warm.split(), "async", "async_small", "async_first"}
    # The page cache of some file systems cannot be dropped (tmpfs is nothing but page cache).
    cold = {"load_cold", "partial_cold", "reshard_cold", "replicas_cold"}
    skipped = [entry["what"] for entry in document["skipped"] if "cold" in entry["what"]]
    assert len(cold & names) + len(skipped) == len(cold)
    measured = {sample["contender"] for sample in document["memory"]}
    assert {"stock_1", "load_stock", "load_ours_dcp"} <= measured or any(
        "memory" in entry["what"] for entry in document["skipped"]
    )


@pytest.mark.torture
def test_samples_of_background_saves_have_the_slowdown_of_training(
    samples: dict[str, list[dict[str, Any]]],
) -> None:
    for name in ("async", "async_small", "async_first"):
        for sample in samples[name]:
            assert 0 < sample["stall_s"] <= sample["staged_s"] <= sample["durable_s"]
            assert sample["steps"] == sum(len(save["steps"]) for save in sample["saves"])
    beside = {sample["contender"]: sample for sample in samples["async"]}
    assert {"stock_thread", "ours_blocking", "ours_overlapped"} <= beside.keys()
    for sample in beside.values():
        first = sample["saves"][0]
        assert all(start < end <= 0 for start, end in first["idle_steps"])
        assert all(first["stall_s"] <= start < end for start, end in first["steps"])
    assert beside["stock_1"]["steps"] == 0, "a synchronous save leaves no time to train"


@pytest.mark.torture
def test_saves_through_queues_have_the_slowdown_of_training(queue_document: dict[str, Any]) -> None:
    groups = queue_document["groups"]
    assert [g["name"] for g in groups] == ["megatron", "megatron_small", "megatron_ranks"]
    for sample in (sample for group in groups for sample in group["samples"]):
        for save in sample["saves"]:
            # Rounded to ten microseconds.
            assert 0 < save["plan_s"] + save["schedule_s"] <= save["call_s"] + 1e-4
            steps = sum(end - start for start, end in save["steps"])
            beside = steps + save["finalize_s"] + sum(save["polls"])
            assert 0 < save["call_s"] + beside <= save["durable_s"] + 1e-3
        assert 0 < sample["stall_s"] < sample["durable_s"]
        assert sample["memory_bytes"] > 0
        later = []
        for rank in {save["rank"] for save in sample["saves"]}:
            later += [save for save in sample["saves"] if save["rank"] == rank][1:]
        assert sample["steps"] == sum(len(save["steps"]) for save in later) > 0


@pytest.mark.torture
def test_a_queue_without_workers_has_no_processes_and_saves_a_snapshot(
    queue_document: dict[str, Any],
) -> None:
    for group in queue_document["groups"]:
        (ours,) = [sample for sample in group["samples"] if sample["contender"] == "ours"]
        assert ours["processes"] == 0
        assert ours["kept"]


@pytest.mark.torture
def test_peers_are_measured_with_their_workers_or_skipped_with_a_reason(
    queue_document: dict[str, Any],
) -> None:
    skipped = {entry["what"]: entry["reason"] for entry in queue_document["skipped"]}
    of = {sample["contender"]: sample for sample in queue_document["groups"][0]["samples"]}
    for name, peer in (("nvrx_copies", peers.NVRX), ("mcore", peers.MEGATRON_CORE)):
        if peer.title in skipped:
            assert "pip" in skipped[peer.title] or "/dev/shm" in skipped[peer.title]
            continue
        # At least a worker and a manager.
        assert of[name]["processes"] >= 2
        # The scheduler decides whether the other worker reads before or after the change.
        assert of[name]["kept"] or name != "nvrx_copies"
    replaced = queue_document["parameters"]["megatron"]["replaced_for_peers"]
    assert ("torch.cuda.synchronize" in replaced) != torch.cuda.is_available()


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


@pytest.mark.torture
def test_a_manager_has_targets_for_its_time_in_a_step_and_in_a_save(
    document: dict[str, Any],
) -> None:
    held = {
        entry["key"]: (entry["quantity"], entry["target"])
        for entry in document["comparisons"]
        if entry["key"].startswith("manager.") and entry["target"] is not None
    }
    for world in (1, 2):
        for interval in ("number", "time", "auto"):
            assert held.pop(f"manager.step_{interval}_{world}") == ("time in the call", 1.0)
        for state in ("tensors", "modules"):
            assert held.pop(f"manager.{state}_{world}") == ("added time", 5.0)
    assert not held


@pytest.mark.torture
def test_the_crossover_of_reading_once_is_recorded(document: dict[str, Any]) -> None:
    titles = [g["title"] for g in document["groups"] if g["name"].startswith("replicas_")]
    assert [crossover["work"] for crossover in document["crossovers"]] == titles
    assert all(crossover["largest"] == 2 for crossover in document["crossovers"])
    assert all(crossover["world"] in (None, 2) for crossover in document["crossovers"])


@pytest.mark.torture
def test_every_target_is_reported_as_met_or_missed(document: dict[str, Any]) -> None:
    held = [entry for entry in document["comparisons"] if entry["target"] is not None]
    targets = """
    save.stock_1 save.best_stock save.cpu save.buffered load_warm.stock load_warm.stock_threads
    load_warm.limit load_warm.budget partial_warm.read reshard_warm.read.3 small_save.stock_1
    small_save.call small_load.stock small_load.call async.memcpy async.stall.stock_thread
    async.overlapped.call async.blocking.durable async.overlapped.durable
    async_small.overlapped.call async_first.blocking.stall async_first.blocking.durable
    """
    assert {entry["key"] for entry in held} >= {*targets.split()}
    assert all(isinstance(entry["met"], bool) for entry in held)
    assert not document["representative"], "a quick run must not pass for a real one"
