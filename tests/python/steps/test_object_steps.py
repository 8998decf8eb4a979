"""Steps beneath URLs: saved, loaded, listed, pinned, deleted and swept."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.object_server import BUCKET, ObjectServer, Request
from tests.object_steps import (
    DENIED,
    PATIENCE,
    calling,
    failing,
    kinds_of,
    loaded,
    make_old,
    marker_of,
    names_of,
    put,
    read,
    save,
    state_of,
)
from tests.support import assert_equal, cause_of, save_step, start_step
from torch_ckpt import ReadOptions, WriteOptions
from torch_ckpt.checkpoint.marker import DELETED_NAME, LAST_SAVED_NAME, MOST_MARKER_BYTES
from torch_ckpt.steps import MARKER_NAME, open_steps
from torch_ckpt.steps.object_steps import ObjectSteps
from torch_ckpt.stores import Entry, ObjectStore
from torch_ckpt.training import load_checkpoint_if_it_exists, save_checkpoint


@pytest.mark.parametrize("is_in_background", [False, True], ids=["save", "async_save"])
def test_a_step_makes_the_round_trip(steps: ObjectSteps, is_in_background: bool) -> None:
    if is_in_background:
        start_step(steps, 7, state_of(4)).result(PATIENCE)
    else:
        save_step(steps, 7, state_of(4))
    metadata = steps.metadata(7)
    assert metadata.state_dict_metadata["model.large"].size == torch.Size([300, 1000])
    assert_equal(loaded(steps, 7), state_of(4))
    assert_equal(loaded(steps, 7, planner=dcp.DefaultLoadPlanner()), state_of(4))
    report = steps.verify(7)
    assert (report.ok, report.unreferenced) == (True, [])


def test_entries_have_the_content_of_the_marker(steps: ObjectSteps) -> None:
    marker = {"metrics": {"loss": 0.5}, "notes": {"by": "test"}, "ranks": 1}
    save(steps, 30, state_of(), marker=lambda: marker)
    save(steps, 4, state_of())
    first, second = steps.entries()
    assert (first.step, second.step) == (4, 30)
    assert second.complete
    assert second.path == f"{steps.root}/0000000030"
    assert (second.metrics, second.notes) == ({"loss": 0.5}, {"by": "test"})
    files = [name for name in names_of(steps) if name.startswith("0000000030/")]
    assert second.bytes == sum(len(read(steps, n)) for n in files if not n.endswith(MARKER_NAME))
    document = marker_of(steps, 30)
    assert (document["step"], document["ranks"]) == (30, 1)


def test_a_missing_root_has_no_step_to_list_load_pin_or_delete(steps: ObjectSteps) -> None:
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


def test_a_step_is_pinned_and_unpinned(steps: ObjectSteps) -> None:
    save(steps, 1, state_of())
    steps.set_pinned(1, True)
    assert [entry.pinned for entry in steps.entries()] == [True]
    steps.set_pinned(1, False)
    assert [entry.pinned for entry in steps.entries()] == [False]


def test_a_step_is_deleted_with_all_its_objects(steps: ObjectSteps) -> None:
    save(steps, 1, state_of())
    save(steps, 2, state_of())
    assert steps.delete(1)
    assert kinds_of(steps) == {2: "complete"}
    assert all(name.startswith("0000000002/") for name in names_of(steps))


def test_a_listing_has_the_later_step_of_a_run_that_deletes_the_listed_one(
    steps: ObjectSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(steps, 1, state_of(4))
    real = ObjectSteps._read_markers

    def read(store: ObjectSteps, found: dict[str, Entry]) -> dict[str, dict[str, Any]]:
        monkeypatch.undo()
        save_step(steps, 2, state_of(4))
        steps.delete(1)
        return real(store, found)

    monkeypatch.setattr(ObjectSteps, "_read_markers", read)
    assert [info.step for info in steps.entries(leftovers=False)] == [2]


def test_markers_are_read_again_only_if_they_have_changed(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 1, state_of())
    save(s3_steps, 2, state_of())
    s3_steps.entries()
    save(s3_steps, 2, state_of(), may_replace=True, marker=lambda: {"metrics": {"loss": 1.0}})
    s3.log.clear()
    assert s3_steps.entries()[1].metrics == {"loss": 1.0}
    assert [request.key for request in s3.log if request.kind == "get"] == [
        f"run/{LAST_SAVED_NAME}",
        f"run/0000000002/{MARKER_NAME}",
    ]


def test_a_marker_without_a_version_is_read_again(s3_steps: ObjectSteps, s3: ObjectServer) -> None:
    s3.etags = False
    marker = f"0000000001/{MARKER_NAME}"
    for loss in (1.0, 2.0):
        put(s3_steps, marker, b'{"metrics": {"loss": %.1f}}' % loss)
        s3.objects[f"run/{marker}"].modified = datetime(2026, 1, 1, tzinfo=timezone.utc)
        [entry] = s3_steps.entries()
        assert entry.metrics == {"loss": loss}


# --- a listing that lags --------------------------------------------------------------------------


@pytest.fixture
def lagging(steps: ObjectSteps, monkeypatch: pytest.MonkeyPatch) -> ObjectSteps:
    """Two steps, of which listings do not have the second yet."""
    save(steps, 1, state_of(1))
    save(steps, 2, state_of(2))
    complete_list = ObjectStore.list

    def list_old(self: ObjectStore, prefix: str = "") -> Iterator[Entry]:
        names = ("0000000002", LAST_SAVED_NAME)
        return (entry for entry in complete_list(self, prefix) if not entry.name.startswith(names))

    monkeypatch.setattr(ObjectStore, "list", list_old)
    return steps


def test_a_listing_that_lags_does_not_hide_the_step_saved_last(lagging: ObjectSteps) -> None:
    found = lagging.entries()
    assert [(entry.step, entry.complete) for entry in found] == [(1, True), (2, True)]
    assert found[1].bytes > state_of()["model"]["large"].nbytes


def test_the_url_of_a_root_leads_to_the_step_saved_last_if_the_listing_lags(
    lagging: ObjectSteps,
) -> None:
    options = lagging._with_storage(ReadOptions())
    with torch_ckpt.open(lagging.root, options=options) as checkpoint:
        assert checkpoint.location == f"{lagging.root}/0000000002"


def test_a_deleted_step_is_not_found_by_its_name(lagging: ObjectSteps) -> None:
    put(lagging, f"0000000002/{DELETED_NAME}", b"")
    assert kinds_of(lagging)[2] != "complete"
    lagging._store.delete([f"0000000002/{MARKER_NAME}"])
    assert kinds_of(lagging) == {1: "complete"}


@pytest.mark.parametrize("content", [b"", b"../0000000002", b"0000000009", b"\xff", b"0" * 100])
def test_a_wrong_record_of_the_last_save_is_ignored(steps: ObjectSteps, content: bytes) -> None:
    save(steps, 1, state_of())
    put(steps, LAST_SAVED_NAME, content)
    assert kinds_of(steps) == {1: "complete"}


def test_a_save_succeeds_although_its_name_cannot_be_recorded(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    s3.fault = failing("put", LAST_SAVED_NAME)
    save(s3_steps, 1, state_of())
    assert kinds_of(s3_steps) == {1: "complete"}


def test_a_marker_that_is_too_long_is_not_read_and_counts_as_empty(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 1, state_of())
    document = b'{"metrics": {"loss": 0.5}}'
    put(s3_steps, f"0000000001/{MARKER_NAME}", document.ljust(MOST_MARKER_BYTES + 1))
    s3.log.clear()
    [entry] = s3_steps.entries()
    assert (entry.complete, entry.metrics) == (True, {})
    assert f"run/0000000001/{MARKER_NAME}" not in [request.key for request in s3.log]


@pytest.mark.parametrize("root", ["nowhere://run", "s3://user:secret@bucket/run"])
def test_a_url_that_is_not_allowed_is_refused(root: str) -> None:
    with pytest.raises(ValueError, match=r"nowhere://run|has a user name") as caught:
        open_steps(root)
    assert "secret" not in str(caught.value)


def test_a_staging_directory_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no file is staged on a local disk any more"):
        torch_ckpt.CheckpointManager("memory://run", staging_dir=tmp_path)  # type: ignore[call-arg]


# --- the manager ----------------------------------------------------------------------------------


def test_a_manager_resumes_beneath_a_url_and_keeps_the_last_steps(
    s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    root, write = f"s3://{BUCKET}/run", WriteOptions(storage_options=s3.options)
    state: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(root, keep=2, write=write) as manager:
        for step in range(manager.restore(state) + 1, 6):
            state["t"] += 1
            state["done"] = step
            manager.save(step, state)
    again: dict[str, Any] = {"t": torch.zeros(3), "done": 0}
    with torch_ckpt.CheckpointManager(root, keep=2, write=write) as manager:
        assert manager.all_steps() == [4, 5]
        assert manager.restore(again) == 5
    assert_equal(again, {"t": torch.full((3,), 5.0), "done": 5})
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_one_checkpoint_is_refused(steps: ObjectSteps) -> None:
    put(steps, ".metadata", b"x")
    with pytest.raises(torch_ckpt.CheckpointError, match="is a single checkpoint"):
        torch_ckpt.CheckpointManager(steps)


@pytest.mark.parametrize(
    ("kind", "named"), [("put", "write"), ("list", "list"), ("delete", "delete")]
)
def test_a_manager_names_a_request_that_the_credentials_do_not_permit(
    s3_steps: ObjectSteps, s3: ObjectServer, kind: str, named: str
) -> None:
    # A bulk delete of one name is a bulk delete.
    s3.fault = lambda request: DENIED if request.kind.endswith(kind) else None
    with pytest.raises(PermissionError, match=f"the credentials do not permit: {named}") as caught:
        torch_ckpt.CheckpointManager(s3_steps)
    assert caught.value.filename == s3_steps.root


def test_a_manager_that_only_reads_needs_no_permission_to_write(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 3, state_of(1))
    s3.fault = lambda request: None if request.kind in ("get", "head", "list") else DENIED
    with torch_ckpt.CheckpointManager(s3_steps, read_only=True) as manager:
        assert manager.all_steps() == [3]


def test_a_manager_warns_if_the_server_ignores_conditions(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    s3.conditions = False
    with pytest.warns(UserWarning, match="Start only one job for each root"):
        manager = torch_ckpt.CheckpointManager(s3_steps)
    with manager:
        manager.save(1, {"t": torch.ones(3)})
        manager.wait_until_finished()
        assert manager.all_steps() == [1]


# --- deletions and sweeps -------------------------------------------------------------------------


def save_and_half_delete(steps: ObjectSteps, s3: ObjectServer, step: int, kept: str) -> None:
    save(steps, step, state_of(1))
    s3.fault = lambda request: DENIED if request.kind.endswith(kept) else None
    with pytest.raises(PermissionError):
        steps.delete(step)
    s3.fault = lambda _request: None


@pytest.mark.parametrize("kept", ["delete", "bulk delete"])
def test_an_interrupted_deletion_is_completed_by_a_sweep(
    s3_steps: ObjectSteps, s3: ObjectServer, kept: str
) -> None:
    save_and_half_delete(s3_steps, s3, 1, kept)
    assert kinds_of(s3_steps) == {1: "deleted"}
    assert s3_steps.sweep(deleted_only=True) == ["0000000001"]
    assert names_of(s3_steps) == []


def test_a_leftover_that_cannot_be_removed_does_not_stop_the_sweep(
    s3_steps: ObjectSteps, s3: ObjectServer, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_and_half_delete(s3_steps, s3, step, "delete")
    first: list[Request] = []

    def refuse_the_first(request: Request) -> Any:
        if request.kind.endswith("delete") and len(first) < 1:
            first.append(request)
            return DENIED
        return None

    s3.fault = refuse_the_first
    assert s3_steps.sweep() == ["0000000002"]
    assert "0000000001" in caplog.text
    assert kinds_of(s3_steps) == {1: "deleted"}


def test_leftovers_of_a_killed_save_are_swept_once_old(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    put(s3_steps, "0000000001/__0_0.distcp", b"x")
    assert s3_steps.sweep() == []
    make_old(s3)
    assert s3_steps.sweep(deleted_only=True) == []
    assert s3_steps.entries(leftovers=False) == []
    assert s3_steps.sweep() == ["0000000001"]
    assert names_of(s3_steps) == []


def test_a_sweep_deletes_what_a_killed_probe_has_left(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    put(s3_steps, ".torch_ckpt-probe-0123", b"1")
    s3_steps.sweep()
    assert names_of(s3_steps) == [".torch_ckpt-probe-0123"]
    make_old(s3)
    s3_steps.sweep()
    assert names_of(s3_steps) == []


def test_a_step_is_saved_over_an_interrupted_deletion(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save_and_half_delete(s3_steps, s3, 1, "delete")
    save(s3_steps, 1, state_of(2))
    assert_equal(loaded(s3_steps, 1), state_of(2))


def test_a_step_that_this_process_saves_is_neither_swept_nor_deleted(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    found: list[Any] = []

    def look(request: Request) -> None:
        if request.kind == "put" and request.key.endswith(MARKER_NAME):
            make_old(s3)
            found.extend([kinds_of(s3_steps), s3_steps.sweep(), s3_steps.delete(1)])

    s3.fault = calling(look)
    save(s3_steps, 1, state_of())
    assert found == [{1: "unfinished"}, [], False]
    assert_equal(loaded(s3_steps, 1), state_of())


def test_a_failed_save_leaves_its_step_free(s3_steps: ObjectSteps, s3: ObjectServer) -> None:
    s3.fault = failing("put", ".distcp")
    with pytest.raises(dcp.CheckpointException):
        save(s3_steps, 1, state_of())
    s3.fault = lambda _request: None
    assert s3_steps.delete(1)


def test_other_objects_stay(s3_steps: ObjectSteps, s3: ObjectServer) -> None:
    put(s3_steps, "logs/0000000001", b"x")
    put(s3_steps, "1/.metadata", b"x")
    make_old(s3)
    assert (s3_steps.entries(), s3_steps.sweep()) == ([], [])
    assert names_of(s3_steps) == ["1/.metadata", "logs/0000000001"]


def test_brackets_in_the_name_of_a_root_are_not_a_pattern() -> None:
    plain, bracketed = ObjectSteps("memory://brackets/a1"), ObjectSteps("memory://brackets/a[1]")
    save(plain, 1, state_of(1))
    save(bracketed, 1, state_of(2))
    save(bracketed, 1, state_of(3), may_replace=True)
    assert_equal(loaded(bracketed, 1), state_of(3))
    assert bracketed.delete(1)
    assert names_of(bracketed) == []
    assert_equal(loaded(plain, 1), state_of(1))


def test_a_failed_listing_is_an_error_and_not_empty(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 1, state_of())
    s3.fault = failing("list", "")
    with pytest.raises(PermissionError) as caught:
        s3_steps.entries()
    assert caught.value.filename == s3_steps.root


def test_a_load_from_an_unlistable_root_fails_and_reports_no_empty_one(
    s3: ObjectServer,
) -> None:
    root, options = f"s3://{BUCKET}/run", torch_ckpt.ReadOptions(storage_options=s3.options)
    write = WriteOptions(storage_options=s3.options)
    save_checkpoint(root, 7, {"t": torch.ones(3)}, options=write)
    s3.fault = failing("list", "")
    with pytest.raises(PermissionError):
        load_checkpoint_if_it_exists(root, {"t": torch.zeros(3)}, options=options)
    s3.fault = lambda _request: None
    assert load_checkpoint_if_it_exists(root, {"t": torch.zeros(3)}, options=options) == 7


def test_a_sweep_keeps_a_step_finished_since_the_listing(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    elsewhere = ObjectSteps(f"s3://{BUCKET}/elsewhere", s3.options)
    save(elsewhere, 1, state_of(1))
    put(s3_steps, "0000000001/__0_0.distcp", b"x")
    make_old(s3)
    lists: list[Request] = []

    def then_saved_by_another_process(request: Request) -> None:
        if request.kind == "list":
            lists.append(request)
        if request.kind == "list" and len(lists) == 2:
            for name in names_of(elsewhere):
                put(s3_steps, name, read(elsewhere, name))

    s3.fault = calling(then_saved_by_another_process)
    assert s3_steps.sweep() == []
    assert_equal(loaded(s3_steps, 1), state_of(1))
