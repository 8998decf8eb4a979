"""Classes with the arguments of torch's classes, and checkpoints that are overwritten."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.failed_saves import FailingAt, StopsBeforeCommit
from tests.fault_hooks import at_fault_points
from tests.support import (
    assert_equal,
    data_files,
    emptied,
    f32,
    load,
    nested_state,
    save,
    save_with,
    stock_load,
    stock_save,
)

# --- the arguments of torch's classes ------------------------------------------------------------


def test_the_writer_accepts_torchs_arguments_by_position(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path, False, False, 3, 5_000_000, True, False, None)
    assert isinstance(writer, dcp.FileSystemWriter)
    assert not writer.single_file_per_rank
    assert not writer.sync_files
    assert writer.thread_count == 3
    assert writer.per_thread_copy_ahead == 5_000_000
    assert writer.cache_staged_state_dict
    assert not writer.overwrite


def test_attributes_changed_before_a_save_apply_to_it(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path, thread_count=1)
    writer.thread_count, writer.separation_hint, writer.sync_files = 2, "a", False
    calls: list[str] = []

    def note(operation: str, path: str) -> None:
        calls.append(operation)

    with at_fault_points(note):
        dcp.save({"a": f32(3), "b": f32(4)}, storage_writer=writer, no_dist=True)
    assert [file.name for file in data_files(tmp_path)] == ["__0_0.distcp", "a__0_1.distcp"]
    assert not {"fsync", "fsync_directory"} & set(calls)
    writer.thread_count = 0
    with pytest.raises(dcp.CheckpointException, match="thread_count must be at least 1, got 0"):
        dcp.save({"a": f32(3)}, storage_writer=writer, no_dist=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"thread_count": 0}, "thread_count must be at least 1, got 0"),
        (
            {"thread_count": 2, "separation_hint": "a\\b"},
            "separation_hint is used as a prefix of",
        ),
        ({"thread_count": 1, "separation_hint": "x"}, "separation_hint requires thread_count >= 2"),
        ({"direct_io": "maybe"}, "direct_io must be True, False or \"auto\", got 'maybe'"),
        ({"max_host_bytes": 100}, "max_host_bytes must be at least 4096, got 100"),
    ],
    ids=str,
)
def test_the_writer_refuses_invalid_options(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        torch_ckpt.FileSystemWriter(tmp_path, **options)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_can_be_a_string_or_a_path(tmp_path: Path, kind: type) -> None:
    save({"a": f32(3)}, kind(tmp_path / "new" / "deep"))
    loaded = {"a": torch.zeros(3)}
    load(loaded, kind(tmp_path / "new" / "deep"))
    assert_equal(loaded["a"], f32(3))


@pytest.mark.parametrize("kind", [str, Path])
def test_checkpoint_id_overrides_the_path(tmp_path: Path, kind: type) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "first")
    save_with(writer, {"a": f32(3)}, checkpoint_id=kind(tmp_path / "second"))
    assert not (tmp_path / "first").exists()
    reader = torch_ckpt.FileSystemReader(tmp_path / "first")
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=kind(tmp_path / "second"), storage_reader=reader, no_dist=True)
    assert_equal(loaded["a"], f32(3))


def test_one_writer_and_one_reader_work_for_many_checkpoints(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)
    for step in range(4):
        save_with(writer, nested_state(step), checkpoint_id=tmp_path / str(step))
    for step in reversed(range(4)):
        loaded = emptied(nested_state())
        dcp.load(loaded, checkpoint_id=tmp_path / str(step), storage_reader=reader, no_dist=True)
        assert_equal(loaded, nested_state(step))


def test_the_methods_that_torch_calls_need_no_reset(tmp_path: Path) -> None:
    # torch's deprecated save_state_dict and other frameworks do not call reset.
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"a": f32(3)}, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    loaded = {"a": torch.zeros(3)}
    stock_load(loaded, tmp_path)
    assert_equal(loaded["a"], f32(3))


@pytest.mark.parametrize(
    ("checkpoint_id", "valid"),
    [("new/dir", True), (Path("new"), True), ("/", False), ("s3://bucket/x", False)],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch_ckpt.FileSystemWriter, torch_ckpt.FileSystemReader])
def test_checkpoint_ids_are_valid_if_torchs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, checkpoint_id: Any, valid: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    assert kind.validate_checkpoint_id(checkpoint_id) is valid
    assert kind.__mro__[1].validate_checkpoint_id(checkpoint_id) is valid


def test_a_relative_path_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a": f32(3)}, "checkpoint")
    monkeypatch.chdir("/")
    loaded = {"a": torch.zeros(3)}
    load(loaded, tmp_path / "checkpoint")
    assert_equal(loaded["a"], f32(3))


def test_a_save_can_be_made_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a": f32(3)}, ".")
    loaded = {"a": torch.zeros(3)}
    load(loaded, ".")
    assert_equal(loaded["a"], f32(3))


@pytest.mark.parametrize("thread_count", [1, 2, 3, 4])
def test_thread_count_is_the_number_of_files(tmp_path: Path, thread_count: int) -> None:
    save({f"t{i}": f32(100) for i in range(8)}, tmp_path, thread_count=thread_count)
    names = [file.name for file in data_files(tmp_path)]
    assert names == [f"__0_{i}.distcp" for i in range(thread_count)]


def test_the_default_is_one_file_for_each_started_16_mib_of_a_rank(tmp_path: Path) -> None:
    save({f"t{i}": f32(100) for i in range(8)}, tmp_path / "little")
    assert len(data_files(tmp_path / "little")) == 1
    save({f"t{i}": f32(9 << 18) for i in range(2)}, tmp_path / "18 MiB")
    assert len(data_files(tmp_path / "18 MiB")) == 2


def test_items_with_the_separation_hint_have_separate_files(tmp_path: Path) -> None:
    state = {
        "optimizer": {f"m{i}": f32(10) for i in range(3)},
        "model": {f"w{i}": f32(10) for i in range(3)},
        "epoch": 1,
    }
    metadata = save(state, tmp_path, thread_count=2, separation_hint="optimizer")
    of_item = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
    optimizer_files = {file for name, file in of_item.items() if name.startswith("optimizer.")}
    other_files = {file for name, file in of_item.items() if not name.startswith("optimizer.")}
    assert not optimizer_files & other_files
    assert all(file.startswith("optimizer__0_") for file in optimizer_files)
    assert all(file.startswith("__0_") for file in other_files)
    for loader in (load, stock_load):
        loaded = emptied(state)
        loader(loaded, tmp_path)
        assert_equal(loaded, state)


# --- overwriting ---------------------------------------------------------------------------------


def test_overwriting_causes_no_warning(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    dcp.save({"a": 1}, storage_writer=writer, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch warns at each save without a process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"a": 1}, storage_writer=writer, no_dist=True)


def test_overwriting_can_be_forbidden(tmp_path: Path) -> None:
    save(nested_state(0), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(dcp.CheckpointException, match="Checkpoint already exists"):
        save(nested_state(1), tmp_path, overwrite=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("first_saver", [save, stock_save])
def test_overwriting_keeps_the_old_checkpoint_until_the_new_one_is_complete(
    tmp_path: Path, first_saver: Callable[..., object]
) -> None:
    first_saver(nested_state(0), tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(
            torch_ckpt.FileSystemWriter(tmp_path), nested_state(1), planner=FailingAt("epoch")
        )
    assert sorted(os.listdir(tmp_path)) == before
    loaded = emptied(nested_state())
    stock_load(loaded, tmp_path)
    assert_equal(loaded, nested_state(0))


@pytest.mark.parametrize("first_saver", [save, stock_save])
def test_data_files_of_an_uncommitted_save_do_not_touch_the_old_checkpoint(
    tmp_path: Path, first_saver: Callable[..., object]
) -> None:
    first_saver(nested_state(0), tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(StopsBeforeCommit(tmp_path), nested_state(1))
    for loader in (load, stock_load):
        loaded = emptied(nested_state())
        loader(loaded, tmp_path)
        assert_equal(loaded, nested_state(0))


@pytest.mark.parametrize("first_saver", [save, stock_save])
def test_the_old_files_are_deleted_after_the_commit_of_the_new_checkpoint(
    tmp_path: Path, first_saver: Callable[..., object]
) -> None:
    first_saver(nested_state(0), tmp_path, single_file_per_rank=False)
    metadata = save(nested_state(1), tmp_path, thread_count=2)
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {file.name for file in tmp_path.iterdir()} == used | {".metadata"}


def test_foreign_files_survive_overwriting(tmp_path: Path) -> None:
    names = ["notes.txt", "model.distcp", "__0_0.distcp.bak", "tokenizer.json"]
    for name in names:
        (tmp_path / name).write_text("keep")
    save(nested_state(0), tmp_path)
    save(nested_state(1), tmp_path)
    assert all((tmp_path / name).read_text() == "keep" for name in names)
