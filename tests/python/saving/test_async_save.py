"""torch_ckpt.async_save: waiting, errors and hooks; test_api.py has its refusals of options."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import wait as wait_for_futures
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.async_saves import is_committed
from tests.background_saves import SEEN, STAGINGS, assert_checkpoint, large, unwritable
from tests.gates import LIMIT, Gate
from tests.support import cause_of, data_files, files_limited_to
from torch_ckpt import AsyncSave, Checkpoint, CheckpointError, OnCommitFailed
from torch_ckpt._base.progress import Progress
from torch_ckpt.options import CHUNK_BYTES

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def test_a_blocking_call_returns_after_staging(tmp_path: Path, held_before_commit: Gate) -> None:
    handle = torch_ckpt.async_save({"t": large()}, tmp_path / "c")
    assert handle.staged.done()
    assert not handle.done()
    held_before_commit.open()
    handle.result()


def test_an_overlapped_call_returns_before_staging(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": large()}, tmp_path / "c", staging="overlapped")
    assert not handle.staged.done()
    held.open()
    handle.wait_staged()
    assert handle.staged.done()
    handle.result()
    assert handle.done()
    assert handle.committed.done()


def test_waiting_too_long_is_a_timeout_and_the_save_continues(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", staging="overlapped")
    with pytest.raises(TimeoutError, match=r"c was not staged within 0\.01 s; it continues"):
        handle.wait_staged(0.01)
    with pytest.raises(TimeoutError, match=r"c was not committed within 0\.01 s; it continues"):
        handle.result(0.01)
    assert not handle.staged.cancel()
    assert not handle.committed.cancel()
    held.open()
    handle.result(LIMIT)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_the_result_can_be_read_again_and_progress_has_counted_to_the_end(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": large(), "n": 1}, tmp_path / "c")
    checkpoint = handle.result()
    assert checkpoint.path == str(tmp_path / "c")
    assert checkpoint.metrics is handle.metrics()
    assert handle.result() is checkpoint
    assert handle.committed.result() is checkpoint
    size = sum(file.stat().st_size for file in data_files(tmp_path / "c"))
    assert handle.progress() == Progress(size, size, size)


@pytest.mark.parametrize("save", [torch_ckpt.save, torch_ckpt.async_save])
@pytest.mark.parametrize("second", ["first", "second"], ids=["the same path", "another path"])
def test_a_second_save_waits_for_the_first(
    tmp_path: Path,
    held_before_commit: Gate,
    opened_by_waiting: Gate,
    save: Callable[..., Any],
    second: str,
) -> None:
    first = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "first")
    saved = save({"t": torch.zeros(3)}, tmp_path / second)
    assert first.done()
    if isinstance(saved, AsyncSave):
        saved.result()
    assert_checkpoint(tmp_path / "first", {"t": torch.full((3,), float(second != "first"))})
    assert_checkpoint(tmp_path / second, {"t": torch.zeros(3)})


def test_neither_check_for_errors_nor_a_save_that_refuses_to_wait_waits(
    tmp_path: Path, held_before_commit: Gate
) -> None:
    def save(name: str, **options: Any) -> AsyncSave:
        return torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / name, **options)

    first = save("first")
    torch_ckpt.check_for_errors()
    with pytest.raises(CheckpointError, match=r"the save to .*first is still running"):
        save("second", if_busy="raise")
    assert not first.done()
    assert not (tmp_path / "second").exists()
    held_before_commit.open()
    first.result()
    save("second", if_busy="raise").result()
    for name in ("first", "second"):
        assert_checkpoint(tmp_path / name, {"t": torch.ones(3)})


def test_saves_of_many_threads_run_one_by_one(tmp_path: Path) -> None:
    def save(number: int) -> None:
        torch_ckpt.async_save(
            {"t": large(number)},
            tmp_path / str(number),
            options=torch_ckpt.WriteOptions(max_host_bytes=1 << 20),
        )

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the handle of the save")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch_ckpt.save({}, tmp_path / "last")
    for number in range(4):
        assert_checkpoint(tmp_path / str(number), {"t": large(number)})


def failed_save(tmp_path: Path, **options: Any) -> AsyncSave:
    return torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path), **options)


@pytest.mark.parametrize("way", SEEN)
@pytest.mark.parametrize("staging", STAGINGS)
def test_a_raised_error_is_reported_only_once(tmp_path: Path, way: str, staging: str) -> None:
    handle = failed_save(tmp_path, staging=staging)
    with pytest.raises(CheckpointException):
        SEEN[way](handle)
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


@pytest.mark.parametrize("name", ["staged", "committed"])
def test_an_error_that_was_read_is_not_reported_again(tmp_path: Path, name: str) -> None:
    handle = failed_save(tmp_path)
    assert isinstance(getattr(handle, name).exception(), CheckpointException)
    torch_ckpt.check_for_errors()


def save_again(handle: AsyncSave, path: Path) -> None:
    torch_ckpt.async_save({"t": torch.ones(3)}, path)


def check(handle: AsyncSave, path: Path) -> None:
    wait_for_futures([handle.committed])
    torch_ckpt.check_for_errors()


@pytest.mark.parametrize("call", [save_again, check])
def test_an_unseen_error_is_raised_once_by_the_next_call(
    tmp_path: Path, call: Callable[[AsyncSave, Path], None]
) -> None:
    handle = failed_save(tmp_path)
    with pytest.raises(CheckpointException):
        call(handle, tmp_path / "c")
    assert handle.done()
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


def test_a_synchronous_save_does_not_raise_an_unseen_error(tmp_path: Path) -> None:
    handle = failed_save(tmp_path)
    torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()
    assert handle.done()


def test_several_unseen_errors_are_raised_one_by_one(tmp_path: Path) -> None:
    first = failed_save(tmp_path)
    wait_for_futures([first.committed])
    with pytest.raises(CheckpointException) as error:
        failed_save(tmp_path)
    with pytest.raises(CheckpointException) as other:
        failed_save(tmp_path).result()
    assert error.value is first.committed.exception()
    assert error.value is not other.value


#: Options, and the error.
FAILING: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "files are too large": ({}, OSError, "File too large"),
    "overwrite=False": (
        {"options": torch_ckpt.WriteOptions(overwrite=False)},
        RuntimeError,
        "already exists",
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_failed_save_keeps_the_old_checkpoint_and_the_next_one_replaces_it(
    tmp_path: Path, case: str
) -> None:
    options, kind, text = FAILING[case]
    torch_ckpt.async_save({"t": large(1)}, tmp_path / "c").result()
    before = sorted((tmp_path / "c").iterdir())
    limit = files_limited_to(CHUNK_BYTES) if kind is OSError else nullcontext()
    with limit:
        handle = torch_ckpt.async_save({"t": large(2)}, tmp_path / "c", **options)
        with pytest.raises(CheckpointException, match=text) as error:
            handle.result()
    assert isinstance(cause_of(error.value), kind)
    assert sorted((tmp_path / "c").iterdir()) == before
    assert_checkpoint(tmp_path / "c", {"t": large(1)})
    torch_ckpt.async_save({"t": large(3)}, tmp_path / "c").result()
    assert_checkpoint(tmp_path / "c", {"t": large(3)})


@pytest.mark.parametrize("fails", [False, True])
def test_a_handle_dropped_before_the_end_warns_and_the_save_continues(
    tmp_path: Path, held: Gate, fails: bool
) -> None:
    path = unwritable(tmp_path) if fails else tmp_path / "c"
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, path, staging="overlapped")
    committed = handle.committed
    with pytest.warns(UserWarning, match=f"the handle of the save to {path} was dropped"):
        del handle
    held.open()
    wait_for_futures([committed])
    if fails:
        with pytest.raises(CheckpointException):
            torch_ckpt.check_for_errors()
    else:
        assert_checkpoint(path, {"t": torch.ones(3)})


def test_a_handle_dropped_after_the_end_does_not_warn(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    handle.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle


# --- hooks ---------------------------------------------------------------------------------------


def test_on_commit_is_called_with_the_checkpoint_after_the_commit(
    tmp_path: Path, held: Gate
) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def look(checkpoint: Checkpoint) -> None:
        seen.append((checkpoint.path, is_committed(tmp_path / "c"), handle.done()))

    state = {"t": torch.ones(3)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped", on_commit=look)
    held.open()
    handle.result()
    assert seen == [(str(tmp_path / "c"), True, False)]


@pytest.mark.parametrize(
    "error",
    [OSError("upload"), CheckpointException("upload", {})],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_in_on_commit_reports_that_the_checkpoint_is_committed(
    tmp_path: Path, error: BaseException
) -> None:
    def fail(_: Checkpoint) -> None:
        raise error

    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", on_commit=fail)
    with pytest.raises(OnCommitFailed, match=r"the checkpoint in .*c is committed") as caught:
        handle.result()
    assert isinstance(cause_of(caught.value).__cause__, type(error))
    torch_ckpt.check_for_errors()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_on_commit_is_not_called_for_a_failed_save(tmp_path: Path) -> None:
    called: list[Checkpoint] = []
    handle = failed_save(tmp_path, on_commit=called.append)
    with pytest.raises(CheckpointException):
        handle.result()
    assert called == []


@pytest.mark.parametrize("save", [torch_ckpt.save, torch_ckpt.async_save])
def test_a_save_from_on_commit_is_refused_as_it_would_wait_for_itself(
    tmp_path: Path, save: Callable[..., object]
) -> None:
    def save_more(_: Checkpoint) -> None:
        save({"t": torch.ones(3)}, tmp_path / "more")

    handle = torch_ckpt.async_save({}, tmp_path / "c", on_commit=save_more)
    with pytest.raises((CheckpointError, CheckpointException), match="must not start a save"):
        handle.result(LIMIT)


def test_a_callback_of_the_future_can_save(tmp_path: Path) -> None:
    saved = threading.Event()

    def save_more(_: object) -> None:
        torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "more")
        saved.set()

    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    handle.committed.add_done_callback(save_more)
    assert saved.wait(LIMIT)
    handle.result()
