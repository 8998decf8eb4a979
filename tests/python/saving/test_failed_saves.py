"""Failed saves: they raise, publish nothing, leave no files and keep the old checkpoint."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torch_ckpt
from tests.failed_saves import LARGE, THREAD_COUNTS, assert_is_checkpoint, names_in, state_of
from tests.support import (
    StateDict,
    cause_of,
    data_files,
    emptied,
    files_limited_to,
    load,
    open_descriptors,
    pairwise,
    save,
    save_with,
    stock_save,
)
from torch_ckpt import CheckpointError
from torch_ckpt._base.progress import Progress
from torch_ckpt.errors import DurabilityUncertain, NotCommitted

# --- without strace: real full disks, limits and directories -------------------------------------


def error_of_save(state: StateDict, path: Path, **options: Any) -> BaseException:
    """Returns the cause of the error of a save that must fail."""
    with pytest.raises(dcp.CheckpointException) as error:
        save(state, path, **options)
    return cause_of(error.value)


def test_metadata_that_no_load_accepts_is_not_committed(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    state = {"n" * 70_000: torch.ones(2)}
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(), no_dist=True)
    assert "has a name of 70000 bytes" in str(cause_of(error.value))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("thread_count", "direct_io", "is_first"),
    pairwise(itertools.product(THREAD_COUNTS, [False, "auto"], [True, False])),
)
def test_a_full_disk_fails_the_save_and_keeps_only_the_old_checkpoint(
    small_disk: Path, thread_count: int, direct_io: bool | str, is_first: bool
) -> None:
    path = small_disk / "checkpoint"
    path.mkdir()
    options: StateDict = {"thread_count": thread_count, "direct_io": direct_io}
    if not is_first:
        save(state_of(0, 5 << 20), path, **options)
    before = names_in(path)
    cause = error_of_save(state_of(1, (12 if is_first else 5) << 20), path, **options)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert os.path.dirname(cause.filename) == str(path)
    assert names_in(path) == before
    if not is_first:
        assert_is_checkpoint(path, state_of(0, 5 << 20))


def test_a_read_only_disk_fails_the_save_and_can_be_loaded_from(small_disk: Path) -> None:
    save(state_of(0, 1 << 20), small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (small_disk, small_disk / "new"):
        cause = error_of_save(state_of(1, 1 << 20), path)
        assert isinstance(cause, OSError)
        assert cause.errno == errno.EROFS
    assert_is_checkpoint(small_disk, state_of(0, 1 << 20))


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_in_place_of_the_directory_fails_the_save(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("keep")
    cause = error_of_save(state_of(), tmp_path / path)
    assert isinstance(cause, OSError)
    assert cause.filename is not None
    assert (tmp_path / "file").read_text() == "keep"


@pytest.mark.filterwarnings("ignore:an unused file could not be removed")
@pytest.mark.parametrize("thread_count", THREAD_COUNTS)
def test_a_directory_in_place_of_a_data_file_loses_no_data(
    tmp_path: Path, thread_count: int
) -> None:
    (tmp_path / f"__0_{thread_count - 1}.distcp").mkdir()
    save(state_of(), tmp_path, thread_count=thread_count)
    assert_is_checkpoint(tmp_path, state_of())


def test_the_incomplete_checkpoint_of_stock_torch_is_refused_with_the_reason(
    tmp_path: Path,
) -> None:
    (tmp_path / "__0_1.distcp").mkdir()
    patch = pytest.MonkeyPatch()
    patch.setattr("threading.excepthook", lambda _: None)
    try:
        stock_save(state_of(), tmp_path, thread_count=4)
    except dcp.CheckpointException:
        pytest.skip("this torch reports the failure")
    finally:
        patch.undo()
    with pytest.raises(dcp.CheckpointException, match="the save that wrote it was incomplete"):
        load(emptied(state_of()), tmp_path)


# --- what is raised ------------------------------------------------------------------------------


def test_the_raised_exception_names_call_and_file_and_can_be_sent_to_other_ranks(
    tmp_path: Path,
) -> None:
    with pytest.raises(dcp.CheckpointException) as error, files_limited_to(1 << 20):
        save(state_of(), tmp_path, thread_count=1)
    cause, copied = cause_of(error.value), cause_of(pickle.loads(pickle.dumps(error.value)))
    for part in ("fallocate failed", "File too large", str(tmp_path / "__0_0.distcp")):
        assert part in str(cause)
    assert type(copied) is type(cause)
    assert (copied.errno, copied.filename) == (errno.EFBIG, str(tmp_path / "__0_0.distcp"))
    assert str(copied) == str(cause)


@pytest.mark.parametrize("kind", [NotCommitted, DurabilityUncertain])
def test_errors_of_the_commit_can_be_pickled(kind: type[NotCommitted]) -> None:
    error = kind("fsync x: Input/output error", errno.EIO)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.errno) == (str(error), error.errno)


class Unhelpful(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return "not a tensor"


def test_a_planner_that_returns_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="a: the planner resolved") as error:
        save_with(torch_ckpt.FileSystemWriter(tmp_path), {"a": torch.zeros(2)}, planner=Unhelpful())
    assert isinstance(cause_of(error.value), CheckpointError)


SPARSE = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_tensor_that_torch_cannot_save_is_refused(tmp_path: Path, kind: str) -> None:
    for saver in (save, stock_save):
        path = tmp_path / saver.__name__
        with pytest.raises(dcp.CheckpointException):
            saver({"a": SPARSE[kind]()}, path)
        assert not (path / ".metadata").exists()


def test_a_failed_save_leaves_no_file_open_and_the_engine_ready(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "good")
    before = open_descriptors()
    for _ in range(5):
        with pytest.raises(dcp.CheckpointException), files_limited_to(1 << 20):
            save(state_of(), tmp_path / "bad", thread_count=4)
    assert open_descriptors() <= before
    assert names_in(tmp_path / "bad") == []
    save(state_of(), tmp_path / "bad", thread_count=4)
    assert_is_checkpoint(tmp_path / "bad", state_of())


# --- progress and Ctrl-C -------------------------------------------------------------------------


def test_progress_of_a_save_reaches_the_total(tmp_path: Path) -> None:
    seen: list[Progress] = []
    save(state_of(), tmp_path, progress=seen.append)
    written = sum(file.stat().st_size for file in data_files(tmp_path))
    assert {progress.bytes_planned for progress in seen} == {written}
    for counts in ([p.bytes_staged for p in seen], [p.bytes_done for p in seen]):
        assert counts == sorted(counts)
        assert counts[-1] == written
    assert all(progress.bytes_done <= progress.bytes_staged for progress in seen)


def test_only_progress_true_draws_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (True, None, False):
        save(state_of(), tmp_path / "step-7", progress=option)
        load(emptied(state_of()), tmp_path / "step-7", progress=option)
        drawn = capsys.readouterr()
        if option:
            assert "save step-7: 100%" in drawn.err
            assert "load step-7: 100%" in drawn.err
        else:
            assert drawn == ("", "")


def interrupt(_progress: Progress) -> None:
    signal.raise_signal(signal.SIGINT)


def complain(_progress: Progress) -> None:
    raise ValueError("the progress function failed")


@pytest.mark.parametrize(
    ("function", "text"), [(interrupt, "KeyboardInterrupt"), (complain, "progress function failed")]
)
@pytest.mark.parametrize("bytes_in_all", [LARGE, 200 << 20], ids=["done by then", "under way"])
def test_an_interrupted_save_removes_its_files(
    scratch: Path, function: Callable[[Progress], None], text: str, bytes_in_all: int
) -> None:
    save(state_of(0), scratch)
    before = names_in(scratch)
    with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)) as error:
        save(state_of(1, bytes_in_all), scratch, progress=function, max_host_bytes=1 << 20)
    assert text in error.exconly()
    assert names_in(scratch) == before
    assert_is_checkpoint(scratch, state_of(0))
