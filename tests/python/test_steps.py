"""The steps beneath a local root: what is one, what is left of one, and what may go."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import closing
from errno import EIO, ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.support import assert_equal, cause_of, data_files, load, stock_load
from torch_ckpt import free_space, steps
from torch_ckpt.directory import OpenDirectory
from torch_ckpt.errors import DurabilityUncertain, NotCommitted
from torch_ckpt.steps import (
    LARGEST_STEP,
    MARKER_NAME,
    PINNED_NAME,
    LocalSteps,
    StepInfo,
    open_steps,
    put_aside,
    read_marker,
    step_name,
)

ATTEMPT = "0a1b2c3d"


@pytest.fixture
def store(tmp_path: Path) -> LocalSteps:
    return LocalSteps(tmp_path / "run")


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((5, 3), value), "n": int(value)}


def saved(store: LocalSteps, step: int, value: float = 1.0, **options: Any) -> Path:
    """Saves a step; its directory."""
    torch_ckpt.save(
        state(value),
        storage_writer=store.writer(step, **{"attempt": ATTEMPT, **options}),
        no_dist=True,
    )
    return Path(store.path_of(step))


def failure(store: LocalSteps, step: int, **options: Any) -> BaseException:
    """Why a save of a step fails."""
    with pytest.raises(CheckpointException) as caught:
        saved(store, step, **options)
    return cause_of(caught.value)


def value_of(path: Path) -> float:
    """The value that the step in a directory was saved with."""
    found = state(0.0)
    load(found, path)
    value: float = found["w"][0, 0].item()
    assert_equal(found, state(value))
    return value


def names(store: LocalSteps) -> list[str]:
    root = Path(store.root)
    return sorted(os.listdir(root)) if root.exists() else []


def listed(store: LocalSteps) -> list[tuple[int, str]]:
    return [(info.step, info.state) for info in store.entries()]


def unfinished(store: LocalSteps, step: int, *, marker: str | None = None) -> Path:
    """What is left of a save that a crash has interrupted just before its rename, or earlier."""
    path = saved(store, step, 7.0)
    left = path.with_name(f"{path.name}.tmp-ffffffff")
    path.rename(left)
    if marker is None:
        (left / MARKER_NAME).unlink()
    else:
        (left / MARKER_NAME).write_text(marker)
    return left


def fail(error: BaseException) -> Callable[..., Any]:
    def work(*_: object, **__: object) -> Any:
        raise error

    return work


# --- 1 to 4: a save ------------------------------------------------------------------------------


def test_a_saved_step_is_a_checkpoint_in_ten_digits(store: LocalSteps) -> None:
    path = saved(store, 100, 3.0)
    assert path == Path(store.root) / "0000000100"
    assert names(store) == ["0000000100"]
    assert value_of(path) == 3.0
    found = {"w": torch.zeros(5, 3)}
    stock_load(found, path)
    assert_equal(found["w"], state(3.0)["w"])


def test_the_marker_says_what_the_step_is(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps.time, "time", lambda: 1234.5)
    path = saved(store, 7, marker=lambda: {"metrics": {"loss": 0.5}, "notes": {"a": [1]}, "x": 2})
    size = sum(file.stat().st_size for file in path.iterdir() if file.name != MARKER_NAME)
    assert json.loads((path / MARKER_NAME).read_bytes()) == {
        "step": 7,
        "saved_at": 1234.5,
        "bytes": size,
        "metrics": {"loss": 0.5},
        "notes": {"a": [1]},
        "x": 2,
    }
    [info] = store.entries()
    assert info == StepInfo(7, str(path), "complete", 1234.5, size, {"loss": 0.5}, {"a": [1]})
    assert info.complete


def test_while_it_is_saved_a_step_has_another_name_and_is_none(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    rename = OpenDirectory.rename

    def look_and_rename(directory: OpenDirectory, source: str, target: str) -> None:
        path = os.path.join(directory.path, source)
        if os.path.isdir(path):
            seen.append((names(store), listed(store), read_marker(path) is not None))
        rename(directory, source, target)

    monkeypatch.setattr(OpenDirectory, "rename", look_and_rename)
    saved(store, 5)
    assert seen == [([f"0000000005.tmp-{ATTEMPT}"], [(5, "unfinished")], True)]


def test_the_marker_is_durable_before_the_name_and_the_name_before_the_end(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync = os.fsync
    rename, sync = OpenDirectory.rename, OpenDirectory.sync

    def named(path: Any) -> str:
        return os.path.relpath(path, store.root).replace(f".tmp-{ATTEMPT}", ".tmp")

    def synced(fd: int) -> None:
        calls.append(f"fsync of {named(os.readlink(f'/proc/self/fd/{fd}'))}")
        fsync(fd)

    def renamed(directory: OpenDirectory, source: str, target: str) -> None:
        calls.append(f"rename to {named(os.path.join(directory.path, target))}")
        rename(directory, source, target)

    def synced_itself(directory: OpenDirectory) -> None:
        calls.append(f"fsync of {named(directory.path)}")
        sync(directory)

    monkeypatch.setattr(steps.os, "fsync", synced)
    monkeypatch.setattr(OpenDirectory, "rename", renamed)
    monkeypatch.setattr(OpenDirectory, "sync", synced_itself)
    saved(store, 5)
    assert calls[-5:] == [
        "fsync of 0000000005.tmp/write_completed.tmp",
        "rename to 0000000005.tmp/write_completed",
        "fsync of 0000000005.tmp",
        "rename to 0000000005",
        "fsync of .",
    ]


def test_without_syncing_nothing_here_is_fsynced(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps.os, "fsync", fail(AssertionError("fsync")))
    monkeypatch.setattr(steps._C, "sync_directory", fail(AssertionError("fsync of a directory")))
    monkeypatch.setattr(OpenDirectory, "sync", fail(AssertionError("fsync of a directory")))
    assert value_of(saved(store, 5, 2.0, sync_files=False)) == 2.0


def test_the_metadata_names_the_step_not_the_place_it_was_written_in(store: LocalSteps) -> None:
    path = saved(store, 5)
    meta = store.metadata(5).storage_meta
    assert meta is not None
    assert meta.checkpoint_id == str(path)


@pytest.mark.parametrize("step", [0, LARGEST_STEP])
def test_the_first_and_the_last_number_are_steps(store: LocalSteps, step: int) -> None:
    saved(store, step)
    assert listed(store) == [(step, "complete")]


@pytest.mark.parametrize("step", [-1, LARGEST_STEP + 1])
def test_a_number_without_ten_digits_is_refused(store: LocalSteps, step: int) -> None:
    with pytest.raises(ValueError, match=f"a step must be from 0 to 9999999999, got {step}"):
        store.writer(step, attempt=ATTEMPT)


def test_a_save_that_fails_leaves_neither_a_step_nor_its_files(store: LocalSteps) -> None:
    saved(store, 1)
    error = failure(store, 2, marker=fail(OSError(EIO, "the marker")))
    assert isinstance(error, NotCommitted)
    assert names(store) == ["0000000001"]


def test_a_marker_that_is_no_json_fails_the_save(store: LocalSteps) -> None:
    assert isinstance(failure(store, 2, marker=lambda: {"x": {1, 2}}), TypeError)
    assert names(store) == []


def test_a_rename_that_fails_is_a_step_that_is_not_there(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = OpenDirectory.rename

    def not_to_the_step(directory: OpenDirectory, source: str, target: str) -> None:
        if target == step_name(2):
            raise OSError(EIO, "no", target)
        rename(directory, source, target)

    monkeypatch.setattr(OpenDirectory, "rename", not_to_the_step)
    error = failure(store, 2)
    assert isinstance(error, NotCommitted)
    assert error.errno == EIO
    assert listed(store) == []


def test_a_replacing_rename_that_fails_keeps_the_old_step(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 2, 1.0)
    rename = OpenDirectory.rename

    def not_of_the_new(directory: OpenDirectory, source: str, target: str) -> None:
        if ".tmp-" in source and target == step_name(2):
            raise OSError(EIO, "no", target)
        rename(directory, source, target)

    monkeypatch.setattr(OpenDirectory, "rename", not_of_the_new)
    assert isinstance(failure(store, 2, value=2.0, overwrite=True), NotCommitted)
    assert names(store) == ["0000000002"]
    assert value_of(Path(store.path_of(2))) == 1.0


def test_where_the_last_fsync_fails_the_step_is_there_and_the_error_says_so(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = OpenDirectory.sync

    def not_the_root(directory: OpenDirectory) -> None:
        if directory.path == store.root:
            raise OSError(EIO, "no", directory.path)
        sync(directory)

    monkeypatch.setattr(OpenDirectory, "sync", not_the_root)
    assert isinstance(failure(store, 2), DurabilityUncertain)
    assert listed(store) == [(2, "complete")]


def test_metadata_that_may_not_last_is_no_step(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps._C, "commit_metadata", fail(DurabilityUncertain("fsync", EIO)))
    error = failure(store, 2)
    assert isinstance(error, NotCommitted)
    assert error.errno == EIO
    assert names(store) == []


def test_a_save_after_a_failed_one_of_the_same_run_succeeds(store: LocalSteps) -> None:
    failure(store, 2, marker=fail(OSError(EIO, "the marker")))
    assert value_of(saved(store, 2, 4.0)) == 4.0


def test_what_an_earlier_run_has_left_is_not_in_the_way(store: LocalSteps) -> None:
    left = unfinished(store, 2)
    assert value_of(saved(store, 2, 4.0)) == 4.0
    assert left.exists()


# --- replacing -----------------------------------------------------------------------------------


def test_a_complete_step_is_not_replaced_unasked(store: LocalSteps) -> None:
    path = saved(store, 3, 1.0)
    error = failure(store, 3, value=2.0)
    assert isinstance(error, FileExistsError)
    assert error.filename == str(path)
    assert value_of(path) == 1.0
    assert names(store) == ["0000000003"]


def test_a_step_that_becomes_complete_meanwhile_is_not_replaced_unasked(store: LocalSteps) -> None:
    other = LocalSteps(store.root)
    error = failure(
        store, 3, value=1.0, marker=lambda: saved(other, 3, 2.0, attempt="00000000") and {}
    )
    assert isinstance(error, FileExistsError)
    assert value_of(Path(store.path_of(3))) == 2.0
    assert names(store) == ["0000000003"]


def test_a_step_is_replaced_where_asked_for(store: LocalSteps) -> None:
    saved(store, 3, 1.0)
    assert value_of(saved(store, 3, 2.0, overwrite=True)) == 2.0
    assert names(store) == ["0000000003"]


def test_a_directory_of_ten_digits_without_a_marker_is_replaced(store: LocalSteps) -> None:
    path = saved(store, 3, 1.0)
    (path / MARKER_NAME).unlink()
    assert listed(store) == [(3, "unfinished")]
    assert value_of(saved(store, 3, 2.0)) == 2.0
    assert names(store) == ["0000000003"]


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_has_a_steps_name_and_is_not_a_directory_is_refused_and_stays(
    store: LocalSteps, kind: str
) -> None:
    path = Path(store.root) / "0000000100"
    path.parent.mkdir()
    if kind == "file":
        path.write_text("somebody's")
    else:
        path.symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="has a step's name and is not a directory: move it"):
        saved(store, 100, overwrite=True)
    assert [entry.name for entry in os.scandir(store.root)] == ["0000000100"]
    path.unlink()
    saved(store, 100)


def test_a_replaced_step_stays_for_who_is_reading_it(store: LocalSteps) -> None:
    path = saved(store, 3, 1.0)
    with closing(OpenDirectory(path)) as reader:
        assert reader.share()
        saved(store, 3, 2.0, overwrite=True)
        assert listed(store) == [(3, "complete"), (3, "deleted")]
        aside = Path(reader.path).with_name(names(store)[1])
        assert value_of(aside) == 1.0
        assert store.sweep() == []
    assert store.sweep() == [aside.name]
    assert names(store) == ["0000000003"]


# --- free space ----------------------------------------------------------------------------------


def test_a_save_for_which_there_is_no_room_is_refused_before_it_writes(store: LocalSteps) -> None:
    error = failure(store, 3, expected_bytes=1 << 62)
    assert isinstance(error, OSError)
    assert error.errno == ENOSPC
    assert error.filename == store.root
    assert "keep fewer steps, or make room" in str(error)
    assert names(store) == []


def test_room_is_made_before_a_save_is_refused(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Space:
        f_blocks = 1000
        f_frsize = 1
        f_bavail = 99

    def make_room() -> None:
        Space.f_bavail = 100

    monkeypatch.setattr(free_space.os, "statvfs", lambda path: Space)
    saved(store, 3, expected_bytes=100, make_room=make_room)
    assert listed(store) == [(3, "complete")]


def test_a_file_system_that_does_not_say_what_is_free_is_tried(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        f_blocks = f_frsize = f_bavail = 0

    monkeypatch.setattr(free_space.os, "statvfs", lambda path: Silent)
    saved(store, 3, expected_bytes=100)
    assert listed(store) == [(3, "complete")]


def test_a_replaced_step_stays_pinned(store: LocalSteps) -> None:
    saved(store, 3, 1.0)
    store.set_pinned(3, True)
    saved(store, 3, 2.0, overwrite=True)
    [info] = store.entries()
    assert info.pinned
    assert value_of(Path(info.path)) == 2.0


def test_a_step_that_was_named_while_another_was_to_go_stays(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 3, 1.0)
    take_alone = OpenDirectory.take_alone

    def and_then_it_is_replaced(opened: OpenDirectory) -> bool:
        has_taken = take_alone(opened)
        monkeypatch.setattr(OpenDirectory, "take_alone", take_alone)
        if opened.path == store.path_of(3):
            saved(store, 3, 2.0, overwrite=True)
        return has_taken

    monkeypatch.setattr(OpenDirectory, "take_alone", and_then_it_is_replaced)
    assert not store.delete(3)
    assert value_of(Path(store.path_of(3))) == 2.0


def test_files_that_are_not_here_are_no_step(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_PATIENCE_SECONDS", 0.0)
    writer = store.writer(3, attempt=ATTEMPT)
    writer.set_up_for_save(0)
    with pytest.raises(NotCommitted, match="what other ranks have written is not here"):
        writer.commit(b"", {"__1_0.distcp"})
    writer.abandon()
    assert [info.complete for info in store.entries()] in ([], [False])


def test_room_is_not_made_where_there_is_enough(store: LocalSteps) -> None:
    saved(store, 3, expected_bytes=1, make_room=fail(AssertionError("there is room")))


def test_a_full_disk_fails_the_save_and_keeps_the_steps(small_disk: Path) -> None:
    store = LocalSteps(small_disk / "run")
    saved(store, 1, 5.0)
    large = {"w": torch.ones(4 << 20)}
    with pytest.raises(CheckpointException) as caught:
        torch_ckpt.save(large, storage_writer=store.writer(2, attempt=ATTEMPT), no_dist=True)
    error = cause_of(caught.value)
    assert isinstance(error, OSError)
    assert error.errno == ENOSPC
    assert names(store) == ["0000000001"]
    assert value_of(Path(store.path_of(1))) == 5.0
    saved(store, 2)


# --- listing -------------------------------------------------------------------------------------


def test_a_root_that_is_not_there_has_no_steps(store: LocalSteps) -> None:
    assert store.entries() == []
    assert store.sweep() == []
    assert not os.path.exists(store.root)


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        LocalSteps(tmp_path / "file").entries()


def test_steps_and_leftovers_are_listed_by_number(store: LocalSteps) -> None:
    for step in (20, 3):
        saved(store, step)
    unfinished(store, 10)
    saved(store, 2)
    with closing(OpenDirectory(store.root)) as root:
        put_aside(root, step_name(2))
    assert listed(store) == [(2, "deleted"), (3, "complete"), (10, "unfinished"), (20, "complete")]


FOREIGN = [
    "events.out",
    "100",
    "00000000100",
    "000000100a",
    "0000000100 ",
    "0000000100.tmp",
    "0000000100.tmp-xyz",
    "0000000100.tmp-0A1B2C3D",
    "0000000100.tmp-0a1b2c3d4",
    "0000000100.tmp-0a1b2c3d.bak",
    "0000000100.deleted",
    "x0000000100.deleted-0a1b2c3d",
    "\u0660" * 10,
]


@pytest.mark.parametrize("is_directory", [True, False])
@pytest.mark.parametrize("name", FOREIGN)
def test_other_names_are_no_steps_and_stay(
    store: LocalSteps, name: str, is_directory: bool
) -> None:
    path = Path(store.root) / name
    if is_directory:
        path.mkdir(parents=True)
        (path / MARKER_NAME).touch()
    else:
        path.parent.mkdir()
        path.touch()
    assert listed(store) == []
    assert store.sweep() == []
    assert path.exists()


@pytest.mark.parametrize("suffix", ["", f".tmp-{ATTEMPT}", f".deleted-{ATTEMPT}"])
def test_files_with_the_names_of_steps_are_none_and_stay(store: LocalSteps, suffix: str) -> None:
    path = Path(store.root) / f"0000000100{suffix}"
    path.parent.mkdir()
    path.touch()
    assert listed(store) == []
    assert store.sweep() == []
    assert path.exists()


MARKERS: dict[str, tuple[bytes, dict[str, Any]]] = {
    "empty": (b"", {}),
    "no JSON": (b"step 100 is complete", {}),
    "no text": (bytes(range(256)), {}),
    "a list": (b"[1, 2]", {}),
    "deep": (b"[" * 100_000, {}),
    "many digits": (b"1" * 10_000, {}),
    "wrong types": (
        b'{"saved_at": "now", "bytes": "many", "metrics": [1], "notes": 3, "step": {}}',
        {},
    ),
    "truth values": (b'{"saved_at": true, "bytes": true, "metrics": {"a": true}}', {}),
    "a negative size": (b'{"bytes": -1}', {}),
    "a huge metric": (b'{"metrics": {"a": 1' + b"0" * 400 + b', "b": 2}}', {"metrics": {"b": 2.0}}),
    "a huge time": (b'{"saved_at": 1' + b"0" * 400 + b"}", {}),
    "an endless time": (b'{"saved_at": Infinity}', {}),
    "no time": (b'{"saved_at": NaN}', {}),
    "whole numbers": (b'{"saved_at": 5, "bytes": 6}', {"saved_at": 5.0, "bytes": 6}),
}


@pytest.mark.parametrize("kind", MARKERS)
def test_a_marker_of_any_content_makes_a_step_complete(store: LocalSteps, kind: str) -> None:
    path = saved(store, 100)
    content, expected = MARKERS[kind]
    (path / MARKER_NAME).write_bytes(content)
    [info] = store.entries()
    size = sum(file.stat().st_size for file in path.iterdir())
    assert info == StepInfo(100, str(path), "complete", **{"bytes": size, **expected})


def test_a_directory_in_the_markers_place_makes_a_step_complete(store: LocalSteps) -> None:
    path = saved(store, 100)
    (path / MARKER_NAME).unlink()
    (path / MARKER_NAME).mkdir()
    assert listed(store) == [(100, "complete")]


def test_metrics_that_are_no_numbers_come_back(store: LocalSteps) -> None:
    saved(store, 1, marker=lambda: {"metrics": {"a": math.nan, "b": -math.inf}})
    [info] = store.entries()
    assert math.isnan(info.metrics["a"])
    assert info.metrics["b"] == -math.inf


def test_a_step_that_goes_while_it_is_listed_is_left_out(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 1)
    left = unfinished(store, 2)
    saved(store, 3)
    monkeypatch.setattr(
        steps.os,
        "scandir",
        lambda path: fail(FileNotFoundError(2, "gone", path))() if path == str(left) else None,
    )
    assert listed(store) == [(1, "complete"), (3, "complete")]


# --- 5: deletions --------------------------------------------------------------------------------


def test_a_deleted_step_goes_with_all_its_files(store: LocalSteps) -> None:
    saved(store, 1)
    path = saved(store, 2)
    (path / "something else").touch()
    assert store.delete(2)
    assert names(store) == ["0000000001"]


def test_a_deletion_of_what_is_not_there_is_no_error(store: LocalSteps) -> None:
    assert store.delete(2)
    saved(store, 1)
    assert store.delete(2)
    assert names(store) == ["0000000001"]


def test_a_deleted_step_is_renamed_durably_before_its_first_file_goes(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(store, 2)
    calls: list[str] = []
    sync = OpenDirectory.sync

    def synced(directory: OpenDirectory) -> None:
        calls.append(f"fsync with {listed(store)}")
        assert directory.path == store.root
        sync(directory)

    monkeypatch.setattr(OpenDirectory, "sync", synced)
    monkeypatch.setattr(steps.shutil, "rmtree", lambda where: calls.append(f"rmtree {where[:-8]}"))
    assert store.delete(2)
    assert calls == ["fsync with [(2, 'deleted')]", f"rmtree {path}.deleted-"]


def test_nothing_is_deleted_in_another_root_that_has_come_to_the_place_since_the_save(
    store: LocalSteps, tmp_path: Path
) -> None:
    saved(store, 2)
    other = LocalSteps(tmp_path / "other")
    saved(other, 2)
    os.rename(store.root, tmp_path / "away")
    os.rename(other.root, store.root)
    with pytest.raises(OSError, match="another directory than at the last save"):
        store.delete(2)
    assert listed(store) == [(2, "complete")]
    # Whose root it is by now.
    saved(store, 3)
    assert store.delete(2)
    assert listed(store) == [(3, "complete")]


def test_a_deletion_that_was_interrupted_is_no_step_and_is_ended_by_the_sweep(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(store, 2)
    with monkeypatch.context() as patch:
        patch.setattr(steps.shutil, "rmtree", fail(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            store.delete(2)
    assert listed(store) == [(2, "deleted")]
    [name] = names(store)
    assert name.startswith(f"{path.name}.deleted-")
    assert store.sweep() == [name]
    assert names(store) == []


def test_a_step_that_is_being_loaded_is_not_deleted(store: LocalSteps) -> None:
    path = saved(store, 2)
    with closing(OpenDirectory(path)) as reader:
        assert reader.share()
        assert not store.delete(2)
        assert value_of(path) == 1.0
    assert store.delete(2)
    assert names(store) == []


def test_a_load_keeps_its_step_until_it_has_ended(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(store, 2, 6.0)
    answers: list[bool] = []
    read = torch_ckpt.FileSystemReader.read_rows

    def try_to_delete(self: Any, *args: Any) -> Any:
        answers.append(store.delete(2))
        return read(self, *args)

    monkeypatch.setattr(torch_ckpt.FileSystemReader, "read_rows", try_to_delete)
    found = state(0.0)
    store.load(2, found, no_dist=True)
    assert_equal(found, state(6.0))
    assert answers
    assert not any(answers)


def test_a_step_that_is_a_link_goes_and_leaves_what_it_points_to(
    store: LocalSteps, tmp_path: Path
) -> None:
    path = saved(store, 2)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert listed(store) == [(2, "complete")]
    assert store.delete(2)
    assert names(store) == []
    assert value_of(elsewhere) == 1.0


# --- 6: the sweep --------------------------------------------------------------------------------


def test_the_sweep_removes_what_has_no_marker(store: LocalSteps) -> None:
    saved(store, 1)
    left = unfinished(store, 2)
    assert store.sweep() == [left.name]
    assert names(store) == ["0000000001"]
    assert store.sweep() == []


def test_the_sweep_names_a_step_that_lacked_only_its_name(store: LocalSteps) -> None:
    unfinished(store, 2, marker='{"metrics": {"loss": 0.25}}')
    assert store.sweep() == []
    [info] = store.entries()
    assert (info.step, info.complete, info.metrics) == (2, True, {"loss": 0.25})
    assert value_of(Path(info.path)) == 7.0


def test_the_sweep_keeps_a_step_and_removes_the_one_that_was_to_replace_it(
    store: LocalSteps,
) -> None:
    left = unfinished(store, 2, marker="{}")
    saved(store, 2, 1.0)
    assert store.sweep() == [left.name]
    assert value_of(Path(store.path_of(2))) == 1.0


def test_the_sweep_ends_a_replacement_that_had_put_the_old_step_aside(store: LocalSteps) -> None:
    left = unfinished(store, 2, marker="{}")
    saved(store, 2, 1.0)
    with closing(OpenDirectory(store.root)) as root:
        aside = put_aside(root, step_name(2))
    assert store.sweep() == [aside]
    assert not left.exists()
    assert value_of(Path(store.path_of(2))) == 7.0


@pytest.mark.parametrize("marker", [None, "{}"])
def test_the_sweep_leaves_alone_where_somebody_works(store: LocalSteps, marker: str | None) -> None:
    left = unfinished(store, 2, marker=marker)
    with closing(OpenDirectory(left)) as other:
        assert other.share()
        assert store.sweep() == []
        assert names(store) == [left.name]


def test_the_sweep_of_a_run_spares_what_its_ranks_have_begun(store: LocalSteps) -> None:
    left = unfinished(store, 2)
    assert store.sweep(attempt="ffffffff") == []
    assert store.sweep(attempt=ATTEMPT) == [left.name]


def test_a_save_spares_the_directory_that_another_rank_is_making(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(store.root) / f"0000000002.tmp-{ATTEMPT}"
    path.mkdir(parents=True)
    removed: list[str] = []
    rmdir = os.rmdir

    def note_and_remove(where: Any, **options: Any) -> None:
        removed.append(f"{where} with {read_marker(store.path_of(2))}")
        rmdir(where, **options)

    monkeypatch.setattr(steps.os, "rmdir", note_and_remove)
    saved(store, 2)
    assert all("with None" not in one for one in removed), removed


def test_the_sweep_of_another_manager_spares_a_save_under_way(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[list[str]] = []
    write_values = torch_ckpt.FileSystemWriter.write_values

    def sweep_and_write(self: Any, *args: Any, **options: Any) -> Any:
        swept.append(LocalSteps(store.root).sweep())
        return write_values(self, *args, **options)

    monkeypatch.setattr(torch_ckpt.FileSystemWriter, "write_values", sweep_and_write)
    assert value_of(saved(store, 2, 3.0)) == 3.0
    assert swept == [[]]


def test_the_sweep_of_another_manager_spares_a_save_that_commits(store: LocalSteps) -> None:
    swept: list[list[str]] = []

    def marker() -> dict[str, Any]:
        swept.append(LocalSteps(store.root).sweep())
        return {}

    assert value_of(saved(store, 2, 3.0, marker=marker)) == 3.0
    assert swept == [[]]


def test_a_leftover_that_goes_meanwhile_is_no_error(
    store: LocalSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = unfinished(store, 2)
    listdir = os.listdir

    def gone_then(path: Any) -> list[str]:
        found = listdir(path)
        if path == store.root:
            steps.shutil.rmtree(left, ignore_errors=True)
        return found

    monkeypatch.setattr(steps.os, "listdir", gone_then)
    assert store.sweep() == []


# --- pins, verification, roots -------------------------------------------------------------------


def test_a_step_is_pinned_until_it_is_not(store: LocalSteps) -> None:
    path = saved(store, 2)
    for _ in range(2):
        store.set_pinned(2, True)
        assert [info.pinned for info in store.entries()] == [True]
    assert (path / PINNED_NAME).read_bytes() == b""
    for _ in range(2):
        store.set_pinned(2, False)
        assert [info.pinned for info in store.entries()] == [False]


def test_a_step_that_is_not_complete_cannot_be_pinned(store: LocalSteps) -> None:
    path = saved(store, 2)
    (path / MARKER_NAME).unlink()
    for step in (2, 3):
        with pytest.raises(FileNotFoundError, match="there is no complete step to pin"):
            store.set_pinned(step, True)
    assert not (path / PINNED_NAME).exists()


def test_a_verified_step_is_well_until_it_is_damaged(store: LocalSteps) -> None:
    path = saved(store, 2)
    assert store.verify(2).ok
    [file] = data_files(path)[:1]
    file.write_bytes(file.read_bytes()[:-1])
    assert not store.verify(2).ok


def test_a_local_root_may_be_a_url(tmp_path: Path) -> None:
    found = open_steps(f"file://{tmp_path}/run")
    assert isinstance(found, LocalSteps)
    assert found.root == str(tmp_path / "run")


def test_a_relative_root_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_steps("run")
    monkeypatch.chdir("/")
    assert store.root == str(tmp_path / "run")


def test_a_staging_directory_for_a_local_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="staging_dir is for remote roots"):
        open_steps(tmp_path, staging_dir=tmp_path)
