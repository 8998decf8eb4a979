"""Classes with the arguments of torch's classes, and checkpoints that are overwritten."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.failed_saves import FailingAt, StopsBeforeCommit
from tests.fault_hooks import at_fault_points
from tests.support import (
    StateDict,
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


def assert_loads(state: StateDict, path: str | Path, *loaders: Callable[..., None]) -> None:
    for loader in loaders or (load,):
        loaded = emptied(state)
        loader(loaded, path)
        assert_equal(loaded, state)


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
def test_invalid_options_are_refused(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        torch_ckpt.FileSystemWriter(tmp_path, **options)


@pytest.mark.parametrize("kind", [str, Path])
def test_one_writer_and_one_reader_work_for_many_checkpoint_ids(tmp_path: Path, kind: type) -> None:
    path = kind(tmp_path / "new" / "deep")
    writer, reader = torch_ckpt.FileSystemWriter(path), torch_ckpt.FileSystemReader(path)
    for step in range(3):
        save_with(writer, nested_state(step), checkpoint_id=kind(tmp_path / "below" / str(step)))
    for step in reversed(range(3)):
        loaded = emptied(nested_state())
        there = kind(tmp_path / "below" / str(step))
        dcp.load(loaded, checkpoint_id=there, storage_reader=reader, no_dist=True)
        assert_equal(loaded, nested_state(step))
    assert not Path(path).exists()
    save({"a": f32(3)}, path)
    assert_loads({"a": f32(3)}, path)


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
    assert_loads({"a": f32(3)}, tmp_path, stock_load)


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
    assert getattr(dcp, kind.__name__).validate_checkpoint_id(checkpoint_id) is valid


def test_a_relative_path_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("checkpoint", "."):
        save({"a": f32(3)}, path)
        assert_loads({"a": f32(3)}, path)
    monkeypatch.chdir("/")
    assert_loads({"a": f32(3)}, tmp_path / "checkpoint")
    assert_loads({"a": f32(3)}, tmp_path)


@pytest.mark.parametrize(
    ("options", "mib", "files"),
    [({"thread_count": 1}, 1, 1), ({"thread_count": 4}, 1, 4), ({}, 1, 1), ({}, 18, 2)],
    ids=str,
)
def test_a_rank_has_thread_count_files_or_one_for_each_started_16_mib(
    tmp_path: Path, options: dict[str, int], mib: int, files: int
) -> None:
    save({f"t{i}": f32(mib << 15) for i in range(8)}, tmp_path, **options)
    assert [file.name for file in data_files(tmp_path)] == [f"__0_{i}.distcp" for i in range(files)]


def test_items_with_the_separation_hint_have_separate_files(tmp_path: Path) -> None:
    state = {
        "optimizer": {f"m{i}": f32(10) for i in range(3)},
        "model": {f"w{i}": f32(10) for i in range(3)},
        "epoch": 1,
    }
    metadata = save(state, tmp_path, thread_count=2, separation_hint="optimizer")
    for index, info in metadata.storage_data.items():
        prefix = "optimizer__0_" if index.fqn.startswith("optimizer.") else "__0_"
        assert info.relative_path.startswith(prefix), index
    assert_loads(state, tmp_path, load, stock_load)


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
@pytest.mark.parametrize(
    ("writer", "planner"),
    [(torch_ckpt.FileSystemWriter, FailingAt("epoch")), (StopsBeforeCommit, None)],
    ids=["planner", "writer"],
)
def test_a_failed_save_keeps_the_old_checkpoint(
    tmp_path: Path, first_saver: Callable[..., object], writer: Any, planner: Any
) -> None:
    first_saver(nested_state(0), tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(writer(tmp_path), nested_state(1), planner=planner)
    if planner:
        assert sorted(os.listdir(tmp_path)) == before
    assert_loads(nested_state(0), tmp_path, load, stock_load)


@pytest.mark.parametrize("first_saver", [save, stock_save])
def test_overwriting_deletes_the_files_of_the_old_checkpoint_and_no_others(
    tmp_path: Path, first_saver: Callable[..., object]
) -> None:
    foreign = {"notes.txt", "model.distcp", "__0_0.distcp.bak", "tokenizer.json"}
    for name in foreign:
        (tmp_path / name).write_text("keep")
    first_saver(nested_state(0), tmp_path, single_file_per_rank=False)
    metadata = save(nested_state(1), tmp_path, thread_count=2)
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {file.name for file in tmp_path.iterdir()} == used | {".metadata"} | foreign
    assert all((tmp_path / name).read_text() == "keep" for name in foreign)
