"""Loads open files only in the directory in which the metadata was read."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.forked import in_fresh_process
from tests.loads import dcp_load, load, refusal
from tests.metadata import read_metadata
from tests.support import (
    StateDict,
    assert_equal,
    cause_of,
    data_files,
    emptied,
    open_descriptors,
    place_of,
    save,
)
from torch_ckpt import Corrupt, Unsafe
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES

STATE: StateDict = {
    "weight": torch.arange(12000, dtype=torch.float32).view(40, 300),
    "transposed": torch.arange(600, dtype=torch.int32).view(30, 20).t(),
    "note": "the quick brown fox",
}


def load_freeing(state: StateDict, path: Path) -> None:
    load(state, path, free_before_read=True)


USES = [load, dcp_load, load_freeing, torch_ckpt.preflight, torch_ckpt.estimate_read_memory]


def is_in_use(path: Path) -> bool:
    """Returns True if a process holds a shared lock, as a process that removes files would see."""
    with closing(OpenDirectory(path)) as directory:
        return not directory.try_lock_exclusive()


# --- links and other things instead of files ------------------------------------------------


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_link_in_place_of_a_file_is_refused(tmp_path: Path, where: str) -> None:
    path = tmp_path / "checkpoint"
    save(STATE, path, thread_count=1)
    (file,) = data_files(path)
    for linked in (file, path / ".metadata"):
        real = (path if where == "inside" else tmp_path) / f"real {linked.name}"
        linked.rename(real)
        linked.symlink_to(real)
        cause = refusal(lambda: load(emptied(STATE), path))
        assert isinstance(cause, Unsafe)
        assert str(linked) in str(cause)
        assert "copy the files themselves" in str(cause)
    for read in (torch_ckpt.FileSystemReader(path).read_metadata, lambda: read_metadata(path)):
        with pytest.raises(Unsafe, match=r"\.metadata: the path is or contains a symbolic link"):
            read()


def test_a_link_to_a_checkpoint_and_a_hard_link_to_its_file_are_allowed(tmp_path: Path) -> None:
    save(STATE, tmp_path / "step_1", thread_count=1)
    (file,) = data_files(tmp_path / "step_1")
    os.link(file, tmp_path / "other name")
    (tmp_path / "latest").symlink_to("step_1")
    target = emptied(STATE)
    load(target, tmp_path / "latest")
    assert_equal(target, STATE)


@pytest.mark.parametrize("name", ["weight", "note"])
@pytest.mark.parametrize("file", ["../real", "below\\real", "real/", "real/."], ids=repr)
def test_a_name_of_no_file_in_the_directory_is_refused(
    tmp_path: Path, file: str, name: str
) -> None:
    path = tmp_path / "checkpoint"
    metadata = save(STATE, path, thread_count=1)
    place_of(metadata, name).relative_path = file
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    cause = refusal(lambda: load(emptied(STATE), path))
    assert isinstance(cause, Unsafe)
    assert repr(file) in str(cause)


def test_metadata_is_read_only_after_its_size_was_checked(tmp_path: Path) -> None:
    with (tmp_path / ".metadata").open("wb") as stream:
        stream.truncate(MAX_METADATA_BYTES + 1)
    with pytest.raises(torch_ckpt.CheckpointError, match=f"the limit is {MAX_METADATA_BYTES}"):
        read_metadata(tmp_path)


def read(_state: StateDict, path: Path) -> None:
    torch_ckpt.FileSystemReader(path).read_metadata()


@pytest.mark.parametrize(
    "use", [load, load_freeing, torch_ckpt.preflight, torch_ckpt.estimate_read_memory, read]
)
def test_the_error_for_no_directory_is_that_there_is_no_checkpoint(
    tmp_path: Path, use: Callable[[StateDict, Path], Any]
) -> None:
    with pytest.raises((dcp.CheckpointException, FileNotFoundError)) as error:
        use(emptied(STATE), tmp_path / "none")
    wrapped = isinstance(error.value, dcp.CheckpointException)
    cause = cause_of(error.value) if wrapped else error.value
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == str(tmp_path / "none")
    assert "no committed checkpoint" in str(cause)


# --- the directory is shared for as long as a load lasts -----------------------------------------


@pytest.mark.parametrize("use", USES)
def test_no_lock_on_the_directory_is_left_after_a_load(
    tmp_path: Path, use: Callable[[StateDict, Path], None]
) -> None:
    save(STATE, tmp_path)
    before = open_descriptors()
    gc.disable()
    try:
        use(emptied(STATE), tmp_path)
        assert not is_in_use(tmp_path)
        assert open_descriptors() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("use", USES)
def test_no_lock_on_the_directory_is_left_after_a_failed_load(
    tmp_path: Path, use: Callable[[StateDict, Path], None]
) -> None:
    save(STATE, tmp_path, thread_count=1)
    if use in USES[3:]:  # these read no data
        (tmp_path / ".metadata").write_bytes(b"damaged")
    else:
        (file,) = data_files(tmp_path)
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises((dcp.CheckpointException, Corrupt)) as kept:
        use(emptied(STATE), tmp_path)
    assert kept.value is not None  # and with it its frames
    assert not is_in_use(tmp_path)


def test_the_directory_is_locked_from_the_metadata_to_the_data(tmp_path: Path) -> None:
    seen = []

    class Watching(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> dcp.LoadPlan:
            seen.append(is_in_use(tmp_path))
            return super().create_local_plan()

        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            seen.append(is_in_use(tmp_path))

    save(STATE, tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)
    for _ in range(2):
        dcp.load(emptied(STATE), storage_reader=reader, planner=Watching(), no_dist=True)
        assert seen == [True] * 3
        assert not is_in_use(tmp_path)
        seen.clear()


@pytest.mark.parametrize("how", ["reset", "drop", "read another"])
def test_a_reader_that_reads_no_data_releases_the_directory(tmp_path: Path, how: str) -> None:
    for name in ("one", "two"):
        save(STATE, tmp_path / name)
    reader = torch_ckpt.FileSystemReader(tmp_path / "one")
    reader.read_metadata()
    assert is_in_use(tmp_path / "one")
    match how:
        case "reset":
            reader.reset()
        case "drop":
            del reader
        case "read another":
            reader.reset(tmp_path / "two")
            reader.read_metadata()
            assert is_in_use(tmp_path / "two")
    assert not is_in_use(tmp_path / "one")


def test_a_reader_with_metadata_from_elsewhere_opens_the_directory(tmp_path: Path) -> None:
    save(STATE, tmp_path)
    metadata = torch_ckpt.FileSystemReader(tmp_path).read_metadata()
    reader = torch_ckpt.FileSystemReader(tmp_path)
    planner, state = dcp.DefaultLoadPlanner(), emptied(STATE)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert_equal(state, STATE)
    assert not is_in_use(tmp_path)


def save_another(path: Path) -> None:
    save(emptied(STATE) | {"note": ""}, path)


def test_a_load_during_a_save_reads_the_old_checkpoint(tmp_path: Path) -> None:
    left = []

    class SavingMeanwhile(dcp.DefaultLoadPlanner):
        def create_local_plan(self) -> dcp.LoadPlan:
            in_fresh_process(save_another, tmp_path)
            left.extend(file for file in files if file.exists())
            return super().create_local_plan()

    save(STATE, tmp_path)
    files = data_files(tmp_path)
    target = emptied(STATE)
    dcp_load(target, tmp_path, planner=SavingMeanwhile())
    assert left == files
    assert_equal(target, STATE)
    load(target, tmp_path)
    assert target["note"] == ""
