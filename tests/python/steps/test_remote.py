"""Steps at URLs: saved, loaded, verified, deleted, on each kind of file system."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.fault_hooks import at_fault_points
from tests.remote_steps import (
    ATTEMPT,
    PATIENCE,
    kinds_of,
    loaded,
    names_of,
    save,
    state_of,
)
from tests.support import assert_equal, cause_of, random_tensor
from torch_ckpt.steps import MARKER_NAME, LocalSteps, open_steps
from torch_ckpt.steps.remote import RemoteSteps
from torch_ckpt.steps.remote_files import RemoteFile, age, modified


def test_a_step_makes_the_round_trip(steps: RemoteSteps) -> None:
    save(steps, 100, state_of(3))
    assert_equal(loaded(steps, 100), state_of(3))


def test_a_step_saved_in_the_background_makes_the_round_trip(steps: RemoteSteps) -> None:
    writer = steps.writer(7, attempt=ATTEMPT)
    torch_ckpt.async_save(state_of(4), storage_writer=writer, no_dist=True).result(PATIENCE)
    assert_equal(loaded(steps, 7), state_of(4))


def test_a_step_is_loaded_by_torchs_planner(steps: RemoteSteps) -> None:
    save(steps, 1, state_of(3))
    state = loaded(steps, 1, planner=dcp.DefaultLoadPlanner())
    assert_equal(state, state_of(3))


def test_a_step_written_by_stock_torch_is_loaded(steps: RemoteSteps, tmp_path: Path) -> None:
    state = {"large": random_tensor((400, 500), torch.float32), "note": "stock"}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    for file in (tmp_path / "stock").iterdir():
        steps._files.write(f"0000000005/{file.name}", file.read_bytes())
    steps._files.write(f"0000000005/{MARKER_NAME}", b"")
    target = {"large": torch.zeros(400, 500), "note": ""}
    steps.load(5, target, no_dist=True)
    assert_equal(target, state)


def test_stock_torch_loads_a_step(tmp_path: Path) -> None:
    save(RemoteSteps(f"file://{tmp_path}"), 100, {"t": torch.arange(5)})
    target = {"t": torch.zeros(5, dtype=torch.int64)}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "0000000100"), no_dist=True)
    assert target["t"].tolist() == [0, 1, 2, 3, 4]


def test_entries_have_the_content_of_the_marker(steps: RemoteSteps) -> None:
    marker = {"metrics": {"loss": 0.5}, "notes": {"by": "test"}}
    save(steps, 30, state_of(), marker=lambda: marker)
    save(steps, 4, state_of())
    first, second = steps.entries()
    assert (first.step, second.step) == (4, 30)
    assert second.complete
    assert second.path == f"{steps.root}/0000000030"
    assert (second.metrics, second.notes) == ({"loss": 0.5}, {"by": "test"})
    files = steps._files.below("0000000030").list()
    assert second.bytes == sum(f.bytes for n, f in files.items() if n != MARKER_NAME)


def test_a_missing_root_has_no_entries(steps: RemoteSteps) -> None:
    assert steps.entries() == []
    assert steps.sweep() == []


def test_metadata_is_read_without_data_files(steps: RemoteSteps, staging: Path) -> None:
    save(steps, 1, state_of())
    found = steps.metadata(1).state_dict_metadata
    assert found["model.large"].size == torch.Size([300, 1000])
    assert list(staging.iterdir()) == []


def test_the_staging_directory_is_empty_afterwards(steps: RemoteSteps, staging: Path) -> None:
    save(steps, 1, state_of())
    loaded(steps, 1)
    steps.verify(1)
    assert list(staging.iterdir()) == []


def test_a_step_is_pinned_and_unpinned(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    steps.set_pinned(1, True)
    assert [entry.pinned for entry in steps.entries()] == [True]
    steps.set_pinned(1, False)
    assert [entry.pinned for entry in steps.entries()] == [False]


def test_a_missing_step_cannot_be_pinned(steps: RemoteSteps) -> None:
    with pytest.raises(FileNotFoundError, match="step 1 cannot be pinned"):
        steps.set_pinned(1, True)


def test_a_missing_step_cannot_be_loaded(steps: RemoteSteps) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(steps, 9)
    cause = cause_of(caught.value)
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == f"{steps.root}/0000000009"


def test_a_step_is_deleted_with_all_its_files(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    save(steps, 2, state_of())
    assert steps.delete(1)
    assert kinds_of(steps) == {2: "complete"}
    assert all(name.startswith("0000000002/") for name in names_of(steps))


def test_deleting_a_missing_step_is_no_error(steps: RemoteSteps) -> None:
    assert steps.delete(1)


def test_verify_finds_a_flipped_bit(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    [name] = [n for n in names_of(steps) if n.endswith("_0.distcp")]
    data = bytearray(steps._files.read(name))
    data[len(data) // 2] ^= 1
    steps._files.write(name, bytes(data))
    report = steps.verify(1)
    assert [damage.file for damage in report.damaged] == [name.partition("/")[2]]


def test_verify_of_an_intact_step_reads_all_records(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    report = steps.verify(1)
    assert report.ok
    assert report.records == len(steps.metadata(1).storage_data)


def test_verify_names_a_missing_file_and_an_unknown_one(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(), thread_count=2)
    [_first, second] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    flaky._files.remove([second])
    flaky._files.write("0000000001/strange", b"x")
    report = flaky.verify(1)
    assert [file for file, _names in report.missing] == [second.partition("/")[2]]
    assert report.unreferenced == ["strange"]


def test_verify_stages_no_more_than_its_limit(flaky: RemoteSteps, staging: Path) -> None:
    save(flaky, 1, state_of(), thread_count=2)
    steps = RemoteSteps(flaky.root, staging, verified_at_once=1)
    seen: set[str] = set()

    def look(operation: str, _path: str) -> None:
        if operation == "pread":
            [file] = staging.rglob("*.distcp")
            seen.add(file.name)

    with at_fault_points(look):
        report = steps.verify(1)
    assert len(seen) == 2
    assert (report.ok, report.records) == (True, len(flaky.metadata(1).storage_data))


def test_a_file_url_is_a_local_root(tmp_path: Path) -> None:
    opened = open_steps(f"file://{tmp_path}")
    assert isinstance(opened, LocalSteps)
    assert opened.root == str(tmp_path)


def test_another_url_is_a_remote_root(staging: Path) -> None:
    assert isinstance(open_steps("memory://run", staging_dir=staging), RemoteSteps)


def test_a_manager_resumes_beneath_a_url_and_keeps_the_last_steps(steps: RemoteSteps) -> None:
    state: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(steps.root, keep_last=2) as manager:
        for step in range(manager.restore(state), 5):
            state["t"] += 1
            state["done"] = step + 1
            manager.save(step + 1, state)
    again: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(steps.root, keep_last=2) as manager:
        assert manager.all_steps() == [4, 5]
        assert manager.restore(again) == 5
    assert_equal(again, {"t": torch.full((3,), 5.0), "done": 5})


def test_a_url_with_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="nowhere://run: Protocol not known"):
        open_steps("nowhere://run")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"LastModified": datetime(2026, 1, 1, tzinfo=timezone.utc)}, 1767225600.0),
        ({"updated": "2026-01-01T00:00:00.000Z"}, 1767225600.0),
        ({"mtime": 1767225600.5}, 1767225600.5),
        ({"updated": "yesterday"}, None),
        ({}, None),
    ],
)
def test_modification_times_of_each_file_system_are_parsed(
    info: dict[str, Any], expected: float | None
) -> None:
    assert modified(info) == expected


def test_the_age_of_files_without_a_time_is_0() -> None:
    assert age([RemoteFile(1, 5.0), RemoteFile(1, None)]) == 0


def test_the_marker_is_json(flaky: RemoteSteps) -> None:
    save(flaky, 12, state_of(), marker=lambda: {"ranks": 1})
    document = json.loads(flaky._files.read(f"0000000012/{MARKER_NAME}"))
    assert (document["step"], document["ranks"]) == (12, 1)
