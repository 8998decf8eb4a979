"""Concurrent saves and loads in one directory, and files of killed saves."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import signal
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
from tests.fault_hooks import before, failing
from tests.forked import Answering, context, end_of, fork
from tests.gates import Gate, in_thread
from tests.metadata import read_metadata
from tests.support import assert_equal, cause_of, data_files, load, save, save_with, stock_load
from torch_ckpt import CheckpointError, _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.lease import DirectoryLease, remove_leftovers
from torch_ckpt.checkpoint.metadata import encode_metadata
from torch_ckpt.errors import NotCommitted

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
        self.gate = Gate()

    def resolve_data(self, write_item: Any) -> Any:
        self.gate()
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

    with in_thread(run):
        try:
            planner.gate.wait()
            yield raised
        finally:
            planner.gate.open()


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


def test_a_save_without_overwrite_does_not_replace_one_committed_meanwhile(tmp_path: Path) -> None:
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


def test_an_abandoned_save_commits_nothing(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    kept = names_in(tmp_path)
    with held_save(tmp_path, 1) as raised:
        # The interpreter does so at exit if a daemon thread saves.
        for lease in list(DirectoryLease._last.values()):
            lease.discard()
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
            lease.discard()

    with before("rename", give_up):
        save(state_of(1), tmp_path)
    assert_holds(tmp_path, 1)


def is_free(path: Path) -> bool:
    """Returns whether no lease holds the directory."""
    return OpenDirectory(path).try_lock_exclusive()


@contextmanager
def unlistable(path: Path) -> Iterator[None]:
    with failing("readdir", errno.EIO, path):
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    remover = OpenDirectory(path)
    assert remover.try_lock_exclusive()
    yield
    remover.close()


@pytest.mark.parametrize(
    ("unusable", "error", "text"),
    [(locked, CheckpointError, "held the exclusive lock"), (unlistable, OSError, "readdir")],
)
def test_a_save_that_cannot_protect_its_files_does_not_start_and_its_kept_error_holds_no_lock(
    tmp_path: Path, unusable: Any, error: type[Exception], text: str
) -> None:
    with unusable(tmp_path), pytest.raises(error, match=text) as kept:
        DirectoryLease(OpenDirectory(tmp_path), None, patience=0.0)
    assert str(tmp_path) in str(kept.value)
    assert error is not OSError or kept.value.errno == errno.EIO  # type: ignore[attr-defined]
    assert is_free(tmp_path)


def test_a_copy_of_a_writer_does_not_take_part_in_its_save(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(dcp.SavePlan([]))
    copies = [pickle.loads(pickle.dumps(writer)), copy.deepcopy(writer), copy.copy(writer)]
    assert not is_free(tmp_path)
    writer.abandon()
    assert is_free(tmp_path)
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
    assert is_free(tmp_path)


# --- saves that fail -----------------------------------------------------------------------------


class HasNoData(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise RuntimeError("refused")


class CannotPlan(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        raise RuntimeError("refused")


@pytest.mark.parametrize("kind", [HasNoData, CannotPlan])
def test_a_failed_save_releases_the_directory_although_the_planner_is_kept(
    tmp_path: Path, kind: type[DefaultSavePlanner]
) -> None:
    planner = kind()
    with pytest.raises(dcp.CheckpointException, match="refused"):
        torch_ckpt.save(state_of(9), tmp_path, planner=planner, no_dist=True)
    assert is_free(tmp_path)


@pytest.mark.parametrize("is_same_thread", [True, False])
def test_the_next_save_of_the_same_thread_ends_a_failed_one_that_is_still_referenced(
    tmp_path: Path, is_same_thread: bool
) -> None:
    lease = DirectoryLease(OpenDirectory(tmp_path), None)
    mine = tmp_path / f"__1_{lease.tag}0.distcp"
    mine.write_bytes(b"written before another rank failed")
    if is_same_thread:
        save(state_of(1), tmp_path)
    else:
        with in_thread(lambda: save(state_of(1), tmp_path)):
            pass
    left = set() if is_same_thread else {mine.name}
    assert names_in(tmp_path) == named_by_metadata(tmp_path) | {".metadata"} | left
    assert_holds(tmp_path, 1)


def test_a_lease_dropped_late_spares_the_directorys_successor(tmp_path: Path) -> None:
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


def test_a_forked_childs_copy_of_a_lease_neither_removes_nor_protects_files(tmp_path: Path) -> None:
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
    assert is_free(tmp_path)
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
    assert remove_leftovers(tmp_path) == []
    assert names_in(tmp_path) == before
    assert_holds(tmp_path, 1)


# --- what dead saves leave -----------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "overwriting"])
def test_leftovers_of_a_dead_save_can_be_removed_and_are_named(
    tmp_path: Path, is_first: bool
) -> None:
    def killed() -> None:
        with before("files are written", lambda: os.kill(os.getpid(), signal.SIGKILL)):
            save(state_of(7), tmp_path)

    if not is_first:
        save(state_of(0), tmp_path)
    kept = names_in(tmp_path) | {"notes.txt"}
    assert end_of(fork(killed)) == -signal.SIGKILL
    (tmp_path / f".metadata.tmp-{'0' * 32}").write_bytes(b"cut off")
    (tmp_path / "notes.txt").write_text("somebody's")
    added = names_in(tmp_path) - kept
    assert len(added) > 1
    assert remove_leftovers(tmp_path) == sorted(added)
    assert names_in(tmp_path) == kept
    assert remove_leftovers(tmp_path) == []


def test_leftovers_are_not_removed_while_a_save_is_running(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    (tmp_path / "__3_0.distcp").write_bytes(b"whose?")
    with (
        held_save(tmp_path, 1),
        pytest.raises(CheckpointError, match="a save or load is in progress"),
    ):
        remove_leftovers(tmp_path)
    assert_holds(tmp_path, 1)


def test_a_missing_directory_has_no_leftovers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_leftovers(tmp_path / "nothing")


# --- loads beside saves --------------------------------------------------------------------------


SAVES_EACH = 12


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_two_processes_that_save_and_two_that_load_never_see_a_mixture(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    done = context.Event()

    def save_again_and_again(first: int, _send: object) -> bool:
        for number in range(first, first + SAVES_EACH):
            torch_ckpt.save(
                state_of(number), tmp_path, options=torch_ckpt.WriteOptions(thread_count=2)
            )
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
