"""Concurrent saves and loads in one directory, and files of killed saves."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torch_ckpt
from tests.fault_hooks import at_fault_points, before, failing
from tests.forked import Answering, context, end_of, fork
from tests.metadata import read_metadata
from tests.support import assert_equal, cause_of, data_files, load, save, save_with, stock_load
from torch_ckpt import CheckpointError, Corrupt, NotCommitted, _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.lease import DirectoryLease
from torch_ckpt.checkpoint.metadata import encode_metadata

PATIENCE_SECONDS = 60

TENSORS = 8


def state_of(number: int) -> dict[str, Any]:
    """Makes a state whose values all identify it, so that a mixture is detected."""
    return {f"t{i}": torch.full((1000 + i,), number) for i in range(TENSORS)} | {"n": number}


def assert_holds(path: Path, number: int) -> None:
    """Checks that torch_ckpt and stock torch load that state from the checkpoint."""
    for loader in (load, stock_load):
        loaded = state_of(-1)
        loader(loaded, path)
        assert_equal(loaded, state_of(number))


def names_in(path: Path) -> set[str]:
    return set(os.listdir(path))


def named_by_metadata(path: Path) -> set[str]:
    return {info.relative_path for info in read_metadata(path).storage_data.values()}


class HeldPlanner(DefaultSavePlanner):
    """Blocks a save between its plan and its first byte."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.may_go = threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.reached.set()
        assert self.may_go.wait(PATIENCE_SECONDS)
        return super().resolve_data(write_item)


@contextmanager
def held_save(path: Path, number: int, **options: Any) -> Iterator[list[BaseException]]:
    """Starts a save that has leased the directory and written nothing; it continues after the
    block.

    Its exception is in the list after the block.
    """
    planner = HeldPlanner()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            writer = torch_ckpt.FileSystemWriter(path, **options)
            save_with(writer, state_of(number), planner=planner)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert planner.reached.wait(PATIENCE_SECONDS)
        yield raised
    finally:
        planner.may_go.set()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()


# --- saves at the same time ----------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "overwriting"])
def test_the_later_commit_of_two_simultaneous_saves_is_complete(
    tmp_path: Path, is_first: bool
) -> None:
    if not is_first:
        save(state_of(0), tmp_path)
    with held_save(tmp_path, 1) as raised:
        save(state_of(2), tmp_path)
        assert_holds(tmp_path, 2)
    assert raised == []
    assert_holds(tmp_path, 1)
    assert names_in(tmp_path) == named_by_metadata(tmp_path) | {".metadata"}


def test_a_save_without_overwrite_does_not_replace_one_committed_meanwhile(
    tmp_path: Path,
) -> None:
    with held_save(tmp_path, 1, overwrite=False) as raised:
        save(state_of(2), tmp_path)
        before = names_in(tmp_path)
    (error,) = raised
    assert isinstance(error, dcp.CheckpointException)
    cause = cause_of(error)
    assert isinstance(cause, NotCommitted)
    assert cause.errno == errno.EEXIST
    assert_holds(tmp_path, 2)
    assert names_in(tmp_path) == before


def save_by_another_thread(path: Path, number: int) -> None:
    thread = threading.Thread(target=save, args=(state_of(number), path))
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "overwriting"])
def test_a_save_whose_checkpoint_was_replaced_at_once_keeps_the_new_one_complete(
    tmp_path: Path, is_first: bool
) -> None:
    if not is_first:
        save(state_of(0), tmp_path)
    reached: list[str] = []

    def hook(operation: str, _path: str) -> None:
        # The point after the rename is between the commits of the two saves.
        if operation == "fsync_directory" and reached == ["rename"]:
            reached.append("replace")
            save_by_another_thread(tmp_path, 2)
        elif operation == "rename" and not reached:
            reached.append(operation)

    with at_fault_points(hook):
        save(state_of(1), tmp_path)
    assert reached == ["rename", "replace"]
    assert_holds(tmp_path, 2)
    assert names_in(tmp_path) == named_by_metadata(tmp_path) | {".metadata"}


def test_an_abandoned_save_commits_nothing(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    kept = names_in(tmp_path)
    with held_save(tmp_path, 1) as raised:
        # The interpreter does so at exit if a daemon thread saves.
        for lease in list(DirectoryLease._last.values()):
            lease.abandon()
    (error,) = raised
    assert isinstance(error, dcp.CheckpointException)
    assert isinstance(cause_of(error), NotCommitted)
    assert_holds(tmp_path, 0)
    assert kept <= names_in(tmp_path)


def test_a_save_that_is_being_committed_can_no_longer_be_abandoned(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)

    def give_up() -> None:
        leases = list(DirectoryLease._last.values())
        assert leases
        for lease in leases:
            lease.abandon()

    with before("rename", give_up):
        save(state_of(1), tmp_path)
    assert_holds(tmp_path, 1)


def test_a_save_that_cannot_protect_its_files_does_not_start(
    tmp_path: Path,
) -> None:
    remover = OpenDirectory(tmp_path)
    assert remover.try_lock_exclusive()
    with pytest.raises(CheckpointError, match="held the exclusive lock") as raised:
        DirectoryLease(OpenDirectory(tmp_path), None, patience=0.0)
    assert str(tmp_path) in str(raised.value)
    remover.close()
    # The error is referenced, and the descriptor is closed.
    assert OpenDirectory(tmp_path).try_lock_exclusive()


def test_a_kept_error_of_an_unlistable_directory_holds_no_lock(tmp_path: Path) -> None:
    with (
        failing("readdir", errno.EIO, tmp_path),
        pytest.raises(OSError, match="readdir") as kept,
    ):
        DirectoryLease(OpenDirectory(tmp_path), None)
    assert OpenDirectory(tmp_path).try_lock_exclusive()
    assert kept.value.errno == errno.EIO


def test_a_copy_of_a_writer_does_not_take_part_in_its_save(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    writer.set_up_for_save(0)
    copies = [pickle.loads(pickle.dumps(writer)), copy.deepcopy(writer), copy.copy(writer)]
    assert not OpenDirectory(tmp_path).try_lock_exclusive()
    writer.abandon()
    assert OpenDirectory(tmp_path).try_lock_exclusive()
    for number, each in enumerate(copies):
        save_with(each, state_of(number))
        assert_holds(tmp_path, number)


def test_a_file_that_cannot_be_removed_fails_no_save_even_if_warnings_are_errors(
    tmp_path: Path,
) -> None:
    (tmp_path / "__9_0.distcp").mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(an )?unused file")
        save_with(torch_ckpt.FileSystemWriter(tmp_path), state_of(1))
    assert_holds(tmp_path, 1)
    assert OpenDirectory(tmp_path).try_lock_exclusive()


# --- saves that fail -----------------------------------------------------------------------------


class FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise RuntimeError("no data")


def fail_to_save(path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(path)
    with pytest.raises(dcp.CheckpointException, match="no data"):
        save_with(writer, state_of(9), planner=FailingPlanner())


def test_a_failed_save_releases_the_directory_at_once(tmp_path: Path) -> None:
    fail_to_save(tmp_path)
    assert OpenDirectory(tmp_path).try_lock_exclusive()


def test_a_failed_save_releases_the_directory_although_planner_and_writer_are_kept(
    tmp_path: Path,
) -> None:
    class CannotPlan(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            raise RuntimeError("no plan")

    writer = torch_ckpt.FileSystemWriter(tmp_path)
    with pytest.raises(dcp.CheckpointException, match="no plan"):
        torch_ckpt.save(state_of(9), storage_writer=writer, planner=CannotPlan(), no_dist=True)
    assert OpenDirectory(tmp_path).try_lock_exclusive()


def test_the_next_save_of_the_thread_ends_a_failed_one_that_is_still_referenced(
    tmp_path: Path,
) -> None:
    failed = DirectoryLease(OpenDirectory(tmp_path), None)
    (tmp_path / f"__1_{failed.tag}0.distcp").write_bytes(b"written before another rank failed")
    save(state_of(1), tmp_path)
    assert names_in(tmp_path) == named_by_metadata(tmp_path) | {".metadata"}


def test_a_lease_of_another_thread_does_not_count_as_failed(tmp_path: Path) -> None:
    lease = DirectoryLease(OpenDirectory(tmp_path), None)
    mine = tmp_path / f"__1_{lease.tag}0.distcp"
    mine.write_bytes(b"being written")
    thread = threading.Thread(target=save, args=(state_of(1), tmp_path))
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert mine.exists()
    assert_holds(tmp_path, 1)


def test_a_lease_dropped_late_spares_the_directorys_successor(
    tmp_path: Path,
) -> None:
    path, old = tmp_path / "ck", tmp_path / "old"
    path.mkdir()
    lease = DirectoryLease(OpenDirectory(path), None)
    path.rename(old)
    path.mkdir()
    for directory in (path, old):
        (directory / "__0_0.distcp").write_bytes(b"of somebody else, in the one")
    del lease
    assert names_in(path) == {"__0_0.distcp"}
    assert names_in(old) == set()


def test_a_forked_childs_copy_of_a_lease_neither_removes_nor_protects_files(
    tmp_path: Path,
) -> None:
    lease = DirectoryLease(OpenDirectory(tmp_path), None)
    mine = tmp_path / f"__0_{lease.tag}0.distcp"
    mine.write_bytes(b"being written")
    may_end, end = os.pipe()

    def work() -> None:
        nonlocal lease
        del lease
        gc.collect()
        assert mine.exists()
        os.close(end)
        os.read(may_end, 1)

    child = fork(work)
    # The child continues to run, like a worker of a DataLoader.
    lease.commit(_core.EncodedMetadata(b""), {mine.name}, sync=True, replace=True)
    assert OpenDirectory(tmp_path).try_lock_exclusive()
    os.close(may_end)
    os.close(end)
    assert end_of(child) == 0


def test_a_file_named_with_another_spelling_in_the_metadata_stays(tmp_path: Path) -> None:
    save(state_of(1), tmp_path)
    metadata = read_metadata(tmp_path)
    del metadata.torch_ckpt  # type: ignore[attr-defined]
    for info in metadata.storage_data.values():
        info.relative_path = f"./{info.relative_path}"
    (tmp_path / ".metadata").write_bytes(encode_metadata(metadata))
    before = names_in(tmp_path)
    assert torch_ckpt.remove_leftovers(tmp_path) == []
    assert names_in(tmp_path) == before
    assert_holds(tmp_path, 1)


# --- what dead saves leave -----------------------------------------------------------------------


def killed_amid_its_data(path: Path) -> None:
    """Makes a child that is killed after its files are written and before the commit."""

    def work() -> None:
        with before("files are written", lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save(state_of(7), path)

    assert end_of(fork(work)) == -signal.SIGKILL


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "overwriting"])
def test_leftovers_of_a_dead_save_can_be_removed_and_are_named(
    tmp_path: Path, is_first: bool
) -> None:
    if not is_first:
        save(state_of(0), tmp_path)
    before = names_in(tmp_path)
    killed_amid_its_data(tmp_path)
    (tmp_path / f".metadata.tmp-{'0' * 32}").write_bytes(b"cut off")
    (tmp_path / "notes.txt").write_text("somebody's")
    added = names_in(tmp_path) - before - {"notes.txt"}
    assert torch_ckpt.remove_leftovers(tmp_path) == sorted(added)
    assert names_in(tmp_path) == before | {"notes.txt"}
    assert torch_ckpt.remove_leftovers(tmp_path) == []


def test_leftovers_are_not_removed_while_a_save_is_running(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    (tmp_path / "__3_0.distcp").write_bytes(b"whose?")
    with (
        held_save(tmp_path, 1),
        pytest.raises(CheckpointError, match="a save or load is in progress"),
    ):
        torch_ckpt.remove_leftovers(tmp_path)
    assert_holds(tmp_path, 1)


def test_nothing_is_removed_if_the_metadata_cannot_be_read(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    (tmp_path / "__3_0.distcp").write_bytes(b"perhaps named")
    (tmp_path / ".metadata").write_bytes(b"damaged")
    before = names_in(tmp_path)
    with pytest.raises(Corrupt):
        torch_ckpt.remove_leftovers(tmp_path)
    lease = DirectoryLease(OpenDirectory(tmp_path), None)
    with pytest.warns(UserWarning, match="unused files are left"):
        del lease
    assert names_in(tmp_path) == before


def test_a_missing_directory_has_no_leftovers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        torch_ckpt.remove_leftovers(tmp_path / "nothing")


# --- loads beside saves --------------------------------------------------------------------------


class HeldLoadPlanner(dcp.DefaultLoadPlanner):
    """Blocks a load between its metadata and its first byte."""

    def __init__(self, between: Callable[[], object]) -> None:
        super().__init__()
        self.between = between

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.between()
        return plan


def test_a_load_during_a_commit_gets_the_complete_old_checkpoint(tmp_path: Path) -> None:
    save(state_of(1), tmp_path)
    old = named_by_metadata(tmp_path)
    loaded = state_of(-1)
    load(loaded, tmp_path, planner=HeldLoadPlanner(lambda: save(state_of(2), tmp_path)))
    assert_equal(loaded, state_of(1))
    assert old <= names_in(tmp_path)
    assert_holds(tmp_path, 2)
    save(state_of(3), tmp_path)
    assert names_in(tmp_path) == named_by_metadata(tmp_path) | {".metadata"}


@pytest.mark.parametrize("how", ["dcp.load", "load", "preflight", "failed load"])
def test_a_load_that_has_ended_releases_the_directory(tmp_path: Path, how: str) -> None:
    save(state_of(1), tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)
    if how == "dcp.load":
        dcp.load(state_of(-1), storage_reader=reader, no_dist=True)
    elif how == "load":
        torch_ckpt.load(state_of(-1), storage_reader=reader, no_dist=True)
    elif how == "preflight":
        torch_ckpt.preflight(state_of(-1), tmp_path)
    else:
        with pytest.raises(dcp.CheckpointException):
            torch_ckpt.load({"absent": 1}, storage_reader=reader, no_dist=True)
    assert OpenDirectory(tmp_path).try_lock_exclusive()


SAVES_EACH = 12


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_two_processes_that_save_and_two_that_load_never_see_a_mixture(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    done = context.Event()

    def save_again_and_again(first: int, _send: object) -> bool:
        for number in range(first, first + SAVES_EACH):
            torch_ckpt.save(state_of(number), tmp_path, thread_count=2)
        return True

    def load_again_and_again(by: Callable[..., None], _send: object) -> int:
        count, last = 0, False
        while not last:
            last = done.is_set()
            loaded = state_of(-1)
            by(loaded, tmp_path)
            assert_equal(loaded, state_of(loaded["n"]))
            count += 1
        return count

    savers = [Answering(partial(save_again_and_again, first)) for first in (100, 200)]
    loaders = [Answering(partial(load_again_and_again, by)) for by in (torch_ckpt.load, load)]
    saved = [saver.answer() for saver in savers]
    done.set()
    counts = [loader.answer() for loader in loaders]
    assert [end_of(child.pid) for child in (*savers, *loaders)] == [0] * 4
    assert saved == [True, True]
    assert min(counts) > 0
    last = {100 + SAVES_EACH - 1, 200 + SAVES_EACH - 1}
    loaded = state_of(-1)
    load(loaded, tmp_path)
    assert loaded["n"] in last
    save(state_of(1), tmp_path)
    assert data_files(tmp_path) == sorted(tmp_path / name for name in named_by_metadata(tmp_path))
