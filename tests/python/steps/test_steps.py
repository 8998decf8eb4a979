"""Saves of a step: its name, its replacement, and refusals for lack of space."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from errno import EIO, ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.fault_hooks import at_fault_points, before, failing
from tests.local_steps import ATTEMPT, failure, listed, names, saved, state, unfinished, value_of
from tests.support import assert_equal, cause_of, save_step, stock_load
from torch_ckpt import WriteOptions, _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.marker import read_marker
from torch_ckpt.errors import DurabilityUncertain, NotCommitted
from torch_ckpt.options import DEFAULT_OPTIONS
from torch_ckpt.steps import LARGEST_STEP, MARKER_NAME, LocalSteps, StepInfo


@pytest.fixture
def store(tmp_path: Path) -> LocalSteps:
    return LocalSteps(tmp_path / "run")


def fail(error: BaseException) -> Callable[..., Any]:
    def work(*_: object, **__: object) -> Any:
        raise error

    return work


# --- 1 to 4: a save ------------------------------------------------------------------------------


def test_a_saved_step_is_a_checkpoint_named_by_ten_digits(store: LocalSteps) -> None:
    path = saved(store, 100, 3.0)
    assert path == Path(store.root) / "0000000100"
    assert names(store) == ["0000000100"]
    assert value_of(path) == 3.0
    found = {"w": torch.zeros(5, 3)}
    stock_load(found, path)
    assert_equal(found["w"], state(3.0)["w"])
    meta = store.metadata(100).storage_meta
    assert meta is not None
    assert meta.checkpoint_id == str(path)


def test_the_marker_describes_the_step(store: LocalSteps) -> None:
    start = time.time()
    path = saved(store, 7, marker=lambda: {"metrics": {"loss": 0.5}, "notes": {"a": [1]}, "x": 2})
    size = sum(file.stat().st_size for file in path.iterdir() if file.name != MARKER_NAME)
    document = json.loads((path / MARKER_NAME).read_bytes())
    saved_at = document.pop("saved_at")
    assert start <= saved_at <= time.time()
    assert document == {
        "step": 7,
        "bytes": size,
        "metrics": {"loss": 0.5},
        "notes": {"a": [1]},
        "x": 2,
    }
    [info] = store.entries()
    assert info == StepInfo(
        7, str(path), "complete", saved_at, size, {"loss": 0.5}, {"a": [1]}, epoch=0
    )
    assert info.complete


def test_a_step_that_is_being_saved_has_another_name_and_is_not_listed(store: LocalSteps) -> None:
    seen: list[Any] = []
    attempt = f"0000000005.tmp-{ATTEMPT}"

    def look() -> None:
        has_marker = read_marker(os.path.join(store.root, attempt)) is not None
        seen.append((names(store), listed(store), has_marker))

    with before("rename", look, store.path_of(5)):
        saved(store, 5)
    assert seen == [([attempt], [(5, "unfinished")], True)]


def test_without_syncing_nothing_is_fsynced(store: LocalSteps) -> None:
    calls: list[str] = []
    with at_fault_points(lambda operation, _path: calls.append(operation)):
        assert value_of(saved(store, 5, 2.0, WriteOptions(sync_files=False))) == 2.0
    assert "rename" in calls
    assert not {"fsync", "fsync_directory"} & set(calls)


@pytest.mark.parametrize("step", [0, LARGEST_STEP])
def test_the_smallest_and_the_largest_number_are_valid_steps(store: LocalSteps, step: int) -> None:
    saved(store, step)
    assert listed(store) == [(step, "complete")]


#: Operation that fails, its errno and path, and the type and a part of the message of the error.
FAILURES = {
    "the disk is full": ("pwrite", ENOSPC, "", OSError, ""),
    "the outcome of the marker's rename is unknown": (
        "rename",
        EIO,
        f"*/{MARKER_NAME}",
        NotCommitted,
        "it is unknown whether the rename was carried out",
    ),
    "the root cannot be identified": ("statx", EIO, "*/run", NotCommitted, ""),
    "the step cannot be renamed": ("rename", ENOSPC, "*/0000000002", NotCommitted, ""),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_save_leaves_neither_a_step_nor_files(store: LocalSteps, case: str) -> None:
    operation, number, path, kind, text = FAILURES[case]
    saved(store, 1, 5.0)
    with failing(operation, number, path):
        error = failure(store, 2)
    assert isinstance(error, kind)
    assert error.errno == number
    assert text in str(error)
    assert "may already be visible" not in str(error)
    assert names(store) == ["0000000001"]
    assert value_of(Path(store.path_of(1))) == 5.0
    assert value_of(saved(store, 2, 4.0)) == 4.0


@pytest.mark.parametrize(
    ("marker", "kind"),
    [(fail(OSError(EIO, "the marker")), NotCommitted), (lambda: {"x": {1, 2}}, TypeError)],
    ids=["that raises", "that is not JSON"],
)
def test_a_marker_fails_the_save(store: LocalSteps, marker: Any, kind: type[Exception]) -> None:
    assert isinstance(failure(store, 2, marker=marker), kind)
    assert names(store) == []
    assert value_of(saved(store, 2, 4.0)) == 4.0


def test_metadata_of_uncertain_durability_makes_no_step(store: LocalSteps) -> None:
    has_metadata: list[bool] = []

    def fail_after_the_rename(operation: str, path: str) -> int:
        if (operation, os.path.basename(path)) == ("rename", ".metadata"):
            has_metadata.append(True)
        return EIO if has_metadata and operation == "fsync_directory" else 0

    with at_fault_points(fail_after_the_rename):
        error = failure(store, 2)
    assert isinstance(error, NotCommitted)
    assert error.errno == EIO
    assert names(store) == []


def test_a_rename_of_unknown_outcome_leaves_the_step_to_the_next_sweep(store: LocalSteps) -> None:
    with failing("rename", EIO, store.path_of(2)):
        error = failure(store, 2, value=2.0)
    assert isinstance(error, DurabilityUncertain)
    assert error.errno == EIO
    assert store.sweep() == []
    assert listed(store) == [(2, "complete")]
    assert value_of(Path(store.path_of(2))) == 2.0


def test_a_renamed_step_is_saved_even_if_the_root_cannot_be_identified(store: LocalSteps) -> None:
    renamed: list[str] = []

    def fail_after_the_rename(operation: str, path: str) -> int:
        if (operation, path) == ("rename", store.path_of(2)):
            renamed.append(path)
        return EIO if renamed and (operation, path) == ("statx", store.root) else 0

    with at_fault_points(fail_after_the_rename):
        path = saved(store, 2, 2.0)
    assert renamed
    assert value_of(path) == 2.0


def test_a_directory_created_meanwhile_with_the_name_of_the_step_stays(store: LocalSteps) -> None:
    final = Path(store.path_of(2))

    def hook(operation: str, path: str) -> int:
        if (operation, path) == ("rename", str(final)) and not final.exists():
            final.mkdir()
            (final / "somebodys").write_text("the only copy")
        return 0

    with at_fault_points(hook):
        error = failure(store, 2)
    assert isinstance(error, FileExistsError)
    assert names(store) == [final.name]
    assert (final / "somebodys").read_text() == "the only copy"


def test_if_the_last_fsync_fails_the_step_exists_and_an_error_reports_it(store: LocalSteps) -> None:
    with failing("fsync_directory", EIO, store.root):
        assert isinstance(failure(store, 2), DurabilityUncertain)
    assert listed(store) == [(2, "complete")]


def test_leftovers_of_an_earlier_run_do_not_block_a_save(store: LocalSteps) -> None:
    left = unfinished(store, 2)
    assert value_of(saved(store, 2, 4.0)) == 4.0
    assert left.exists()


# --- replacing -----------------------------------------------------------------------------------


def test_a_complete_step_is_replaced_only_on_request(store: LocalSteps) -> None:
    path = saved(store, 3, 1.0)
    error = failure(store, 3, value=2.0)
    assert isinstance(error, FileExistsError)
    assert error.filename == str(path)
    assert value_of(path) == 1.0
    assert names(store) == ["0000000003"]
    assert value_of(saved(store, 3, 2.0, may_replace=True)) == 2.0
    assert names(store) == ["0000000003"]


def test_a_step_completed_meanwhile_is_replaced_only_on_request(store: LocalSteps) -> None:
    other = LocalSteps(store.root)
    error = failure(
        store, 3, value=1.0, marker=lambda: saved(other, 3, 2.0, attempt="00000000") and {}
    )
    assert isinstance(error, FileExistsError)
    assert value_of(Path(store.path_of(3))) == 2.0
    assert names(store) == ["0000000003"]


def test_a_directory_of_ten_digits_without_a_marker_is_replaced(store: LocalSteps) -> None:
    path = saved(store, 3, 1.0)
    (path / MARKER_NAME).unlink()
    assert listed(store) == [(3, "unfinished")]
    assert value_of(saved(store, 3, 2.0)) == 2.0
    assert names(store) == ["0000000003"]


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_file_with_the_name_of_a_step_is_refused_and_stays(store: LocalSteps, kind: str) -> None:
    path = Path(store.root) / "0000000100"
    path.parent.mkdir()
    if kind == "file":
        path.write_text("somebody's")
    else:
        path.symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="a file has the name of this step"):
        saved(store, 100, may_replace=True)
    assert [entry.name for entry in os.scandir(store.root)] == ["0000000100"]
    path.unlink()
    saved(store, 100)


def test_a_replaced_step_stays_while_it_is_being_loaded(store: LocalSteps) -> None:
    path = saved(store, 3, 1.0)
    with closing(OpenDirectory(path)) as reader:
        assert reader.share()
        saved(store, 3, 2.0, may_replace=True)
        assert listed(store) == [(3, "complete"), (3, "deleted")]
        aside = Path(reader.path).with_name(names(store)[1])
        assert value_of(aside) == 1.0
        assert store.sweep() == []
    assert store.sweep() == [aside.name]
    assert names(store) == ["0000000003"]


def test_a_replacing_save_locks_the_root_while_it_renames(store: LocalSteps) -> None:
    saved(store, 2, 1.0)
    has_turn: list[bool] = []

    def look() -> None:
        with closing(OpenDirectory(store.root)) as other:
            has_turn.append(other.try_lock_exclusive())

    with (
        before("rename", look, f"{store.root}/*.deleted-*"),
        before("rename", look, store.path_of(2)),
    ):
        saved(store, 2, 2.0, may_replace=True)
    assert has_turn == [False, False]


# --- free space ----------------------------------------------------------------------------------


def test_a_save_without_enough_space_is_refused_before_it_writes(store: LocalSteps) -> None:
    too_large = torch.zeros(1).expand(1 << 60)
    with pytest.raises(CheckpointException) as caught:
        save_step(store, 3, {"t": too_large}, DEFAULT_OPTIONS)
    error = cause_of(caught.value)
    assert isinstance(error, OSError)
    assert error.errno == ENOSPC
    assert error.filename == store.root
    assert "keep fewer steps, or free space" in str(error)
    assert names(store) == []


def test_make_room_is_called_only_before_a_save_is_refused(small_disk: Path) -> None:
    store = LocalSteps(small_disk / "run")
    saved(store, 1, make_room=fail(AssertionError("there is room")))
    other = small_disk / "other"
    other.write_bytes(bytes(7 << 20))
    save_step(store, 3, {"t": torch.ones(1 << 20)}, DEFAULT_OPTIONS, make_room=other.unlink)
    assert listed(store) == [(1, "complete"), (3, "complete")]


def test_a_file_system_of_unknown_free_space_is_tried(ram_disk: Path) -> None:
    store = LocalSteps(ram_disk / "run")
    saved(store, 3)
    assert listed(store) == [(3, "complete")]


def test_a_pin_that_is_set_during_a_replacing_save_is_kept(tmp_path: Path) -> None:
    store = LocalSteps(tmp_path)
    saved(store, 1)
    pinning = threading.Thread(target=store.set_pinned, args=(1, True))

    def pin() -> None:
        pinning.start()
        # The pin waits for the lock, or is set before the rename.
        pinning.join(0.2)

    with before("rename", pin, tmp_path / "0000000001"):
        saved(store, 1, may_replace=True)
    pinning.join()
    assert store.is_pinned(1)


def test_a_step_is_not_deleted_while_another_process_holds_the_lock_on_the_root(
    tmp_path: Path,
) -> None:
    store = LocalSteps(tmp_path)
    saved(store, 1)
    with closing(OpenDirectory(tmp_path)) as root:
        lock = _core.RootLock(root, 0.0)
        assert not store.delete(1)
        lock.release()
    assert store.delete(1)
