"""Steps at URLs: saved, loaded, verified, deleted and swept, on each kind of file system."""

from __future__ import annotations

import json
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.fault_hooks import at_fault_points, before
from tests.remote_steps import (
    PATIENCE,
    fail_at,
    failing_at_the_end,
    kinds_of,
    loaded,
    make_old,
    names_of,
    save,
    state_of,
)
from tests.remote_stores import BUCKET, hooked, hooked_url, s3_server
from tests.support import assert_equal, cause_of, random_tensor, save_step, start_step
from torch_ckpt import WriteOptions
from torch_ckpt.steps import MARKER_NAME, open_steps
from torch_ckpt.steps.busy import busy
from torch_ckpt.steps.remote import RemoteSteps
from torch_ckpt.steps.remote_files import RemoteFile, age
from torch_ckpt.stores.fsspec_store import modified
from torch_ckpt.training import load_checkpoint_if_it_exists, save_checkpoint


@pytest.mark.parametrize("is_in_background", [False, True], ids=["save", "async_save"])
def test_a_step_makes_the_round_trip_and_leaves_no_staged_file(
    steps: RemoteSteps, staging: Path, is_in_background: bool
) -> None:
    if is_in_background:
        start_step(steps, 7, state_of(4)).result(PATIENCE)
    else:
        save_step(steps, 7, state_of(4))
    metadata = steps.metadata(7)
    assert metadata.state_dict_metadata["model.large"].size == torch.Size([300, 1000])
    assert list(staging.iterdir()) == []
    assert_equal(loaded(steps, 7), state_of(4))
    assert_equal(loaded(steps, 7, planner=dcp.DefaultLoadPlanner()), state_of(4))
    report = steps.verify(7)
    assert (report.ok, report.records) == (True, len(metadata.storage_data))
    assert list(staging.iterdir()) == []


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
    marker = {"metrics": {"loss": 0.5}, "notes": {"by": "test"}, "ranks": 1}
    save(steps, 30, state_of(), marker=lambda: marker)
    save(steps, 4, state_of())
    first, second = steps.entries()
    assert (first.step, second.step) == (4, 30)
    assert second.complete
    assert second.path == f"{steps.root}/0000000030"
    assert (second.metrics, second.notes) == ({"loss": 0.5}, {"by": "test"})
    files = steps._files.below("0000000030").list()
    assert second.bytes == sum(f.bytes for n, f in files.items() if n != MARKER_NAME)
    document = json.loads(steps._files.read(f"0000000030/{MARKER_NAME}"))
    assert (document["step"], document["ranks"]) == (30, 1)


def test_a_missing_root_has_no_step_to_list_load_pin_or_delete(steps: RemoteSteps) -> None:
    assert steps.entries() == []
    assert steps.sweep() == []
    assert steps.delete(1)
    with pytest.raises(FileNotFoundError, match="step 1 cannot be pinned"):
        steps.set_pinned(1, True)
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(steps, 9)
    cause = cause_of(caught.value)
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == f"{steps.root}/0000000009"


def test_a_step_is_pinned_and_unpinned(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    steps.set_pinned(1, True)
    assert [entry.pinned for entry in steps.entries()] == [True]
    steps.set_pinned(1, False)
    assert [entry.pinned for entry in steps.entries()] == [False]


def test_a_step_is_deleted_with_all_its_files(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    save(steps, 2, state_of())
    assert steps.delete(1)
    assert kinds_of(steps) == {2: "complete"}
    assert all(name.startswith("0000000002/") for name in names_of(steps))


def test_verify_finds_a_flipped_bit(steps: RemoteSteps) -> None:
    save(steps, 1, state_of())
    [name] = [n for n in names_of(steps) if n.endswith("_0.distcp")]
    data = bytearray(steps._files.read(name))
    data[len(data) // 2] ^= 1
    steps._files.write(name, bytes(data))
    report = steps.verify(1)
    assert [damage.file for damage in report.damaged] == [name.partition("/")[2]]


def test_verify_names_a_missing_file_and_an_unknown_one(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(), write=WriteOptions(thread_count=2))
    [_first, second] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    flaky._files.remove([second])
    flaky._files.write("0000000001/strange", b"x")
    report = flaky.verify(1)
    assert [file for file, _names in report.missing] == [second.partition("/")[2]]
    assert report.unreferenced == ["strange"]


def test_verify_stages_no_more_than_its_limit(flaky: RemoteSteps, staging: Path) -> None:
    save(flaky, 1, state_of(), write=WriteOptions(thread_count=2))
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


def test_a_url_of_a_known_protocol_is_a_remote_root(staging: Path) -> None:
    assert isinstance(open_steps("memory://run", staging_dir=staging), RemoteSteps)
    with pytest.raises(ValueError, match="nowhere://run: Protocol not known"):
        open_steps("nowhere://run")


def test_a_manager_resumes_beneath_a_url_and_keeps_the_last_steps(steps: RemoteSteps) -> None:
    state: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(steps.root, keep=2) as manager:
        for step in range(manager.restore(state) + 1, 6):
            state["t"] += 1
            state["done"] = step
            manager.save(step, state)
    again: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(steps.root, keep=2) as manager:
        assert manager.all_steps() == [4, 5]
        assert manager.restore(again) == 5
    assert_equal(again, {"t": torch.full((3,), 5.0), "done": 5})


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
def test_modification_times_are_parsed(info: dict[str, Any], expected: float | None) -> None:
    assert modified(info) == expected


def test_the_age_of_files_without_a_time_is_0() -> None:
    assert age([RemoteFile(1, 5.0), RemoteFile(1, None)]) == 0


# --- deletions and sweeps -------------------------------------------------------------------------


def save_and_half_delete(steps: RemoteSteps, step: int, fails_at: str = ".distcp") -> None:
    save(steps, step, state_of(1))
    with fail_at("remove", fails_at), pytest.raises(PermissionError):
        steps.delete(step)


@pytest.mark.parametrize("fails_at", [".distcp", MARKER_NAME])
def test_an_interrupted_deletion_is_completed_by_a_sweep(flaky: RemoteSteps, fails_at: str) -> None:
    save_and_half_delete(flaky, 1, fails_at)
    assert kinds_of(flaky) == {1: "deleted"}
    assert flaky.sweep() == ["0000000001"]
    assert names_of(flaky) == []


def test_a_leftover_that_cannot_be_removed_does_not_stop_the_sweep(
    flaky: RemoteSteps, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_and_half_delete(flaky, step)
    with fail_at("remove", "0000000001"):
        assert flaky.sweep() == ["0000000002"]
    assert "0000000001" in caplog.text
    assert kinds_of(flaky) == {1: "deleted"}


def test_a_sweep_of_deletions_keeps_the_files_of_a_killed_save(flaky: RemoteSteps) -> None:
    flaky._files.write("0000000001/__0_0.distcp", b"x")
    make_old(flaky)
    assert flaky.sweep(deleted_only=True) == []
    assert flaky.entries(leftovers=False) == []
    assert flaky.sweep() == ["0000000001"]


def test_a_step_is_saved_over_an_interrupted_deletion(flaky: RemoteSteps) -> None:
    save_and_half_delete(flaky, 1)
    save(flaky, 1, state_of(2))
    assert_equal(loaded(flaky, 1), state_of(2))


def test_a_step_that_this_process_saves_is_neither_swept_nor_deleted(flaky: RemoteSteps) -> None:
    found: list[Any] = []

    def look(kind: str, path: str) -> None:
        if kind == "write" and path.endswith(MARKER_NAME):
            make_old(flaky)
            found.extend([kinds_of(flaky), flaky.sweep(), flaky.delete(1)])

    with hooked(look):
        save(flaky, 1, state_of())
    assert found == [{1: "unfinished"}, [], False]
    assert_equal(loaded(flaky, 1), state_of())


def test_a_step_that_this_process_loads_is_not_deleted(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    found: list[bool] = []

    def look(kind: str, path: str) -> None:
        if kind == "read" and path.endswith(".distcp"):
            found.append(flaky.delete(1))

    with hooked(look):
        loaded(flaky, 1)
    assert found
    assert not any(found)


def test_a_failed_save_leaves_its_step_free(flaky: RemoteSteps) -> None:
    with fail_at("upload", ".distcp"), pytest.raises(dcp.CheckpointException):
        save(flaky, 1, state_of())
    assert f"{flaky.root}/0000000001" not in busy


def test_other_directories_stay(flaky: RemoteSteps) -> None:
    flaky._files.write("logs/0000000001", b"x")
    flaky._files.write("1/.metadata", b"x")
    make_old(flaky)
    assert (flaky.entries(), flaky.sweep()) == ([], [])
    assert names_of(flaky) == ["1/.metadata", "logs/0000000001"]


def test_brackets_in_the_name_of_a_root_are_not_a_pattern(steps: RemoteSteps) -> None:
    plain, bracketed = RemoteSteps(f"{steps.root}/a1"), RemoteSteps(f"{steps.root}/a[1]")
    save(plain, 1, state_of(1))
    save(bracketed, 1, state_of(2))
    save(bracketed, 1, state_of(3), may_replace=True)
    assert_equal(loaded(bracketed, 1), state_of(3))
    assert bracketed.delete(1)
    assert names_of(bracketed) == []
    assert_equal(loaded(plain, 1), state_of(1))


@pytest.mark.parametrize("part", ["run", "0000000001"])
def test_a_failed_listing_is_an_error_and_not_empty(staging: Path, part: str) -> None:
    steps = RemoteSteps(hooked_url().replace("hooked", "walked"), staging)
    save(steps, 1, state_of())
    with hooked(failing_at_the_end("list", part)), pytest.raises(PermissionError) as caught:
        steps.entries()
    assert caught.value.filename == steps.root
    assert kinds_of(steps) == {1: "complete"}


def test_a_load_from_an_unlistable_root_fails_and_reports_no_empty_one(staging: Path) -> None:
    root = hooked_url().replace("hooked", "walked")
    save_checkpoint(root, 7, {"t": torch.ones(3)})
    with hooked(failing_at_the_end("list", "run")), pytest.raises(PermissionError):
        load_checkpoint_if_it_exists(root, {"t": torch.zeros(3)})


def test_a_sweep_keeps_a_step_finished_since_the_listing(flaky: RemoteSteps, staging: Path) -> None:
    flaky._files.write("0000000001/__0_0.distcp", b"x")
    make_old(flaky)
    elsewhere = RemoteSteps(hooked_url(), staging)
    save(elsewhere, 1, state_of(1))

    def then_saved_by_another_process(kind: str, path: str) -> None:
        if kind == "list" and path.endswith("0000000001"):
            for name in names_of(elsewhere):
                flaky._files.write(name, elsewhere._files.read(name))

    with hooked(then_saved_by_another_process):
        assert flaky.sweep() == []
    assert_equal(loaded(flaky, 1), state_of(1))


@pytest.mark.parametrize("way", ["delete", "sweep"])
def test_a_save_waits_for_the_removal_of_its_step(flaky: RemoteSteps, way: str) -> None:
    save(flaky, 1, state_of(1))
    if way == "sweep":
        flaky._files.write("0000000001/deleted", b"")
    saver = threading.Thread(
        target=save, args=(flaky, 1, state_of(2)), kwargs={"may_replace": True}
    )
    waits = threading.Event()

    def save_meanwhile(kind: str, _path: str) -> None:
        if kind == "remove" and saver.ident is None:
            saver.start()
            assert waits.wait(PATIENCE)

    with before("wait for the removal of a step", waits.set), hooked(save_meanwhile):
        if way == "delete":
            assert flaky.delete(1)
        else:
            assert flaky.sweep() == ["0000000001"]
        saver.join(PATIENCE)
    assert_equal(loaded(flaky, 1), state_of(2))


@pytest.mark.parametrize("number", [1, 2])
def test_each_server_starts_empty(number: int) -> None:
    with s3_server() as settings:
        files = fsspec.filesystem("s3", **settings)
        assert files.find(BUCKET) == []
        files.pipe(f"{BUCKET}/left", b"behind")
