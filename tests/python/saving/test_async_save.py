"""torch_ckpt.async_save: waiting, errors, hooks, and wrong arguments."""

from __future__ import annotations

import errno
import re
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import wait as wait_for_futures
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.async_saves import is_committed
from tests.background_saves import (
    SEEN,
    STAGINGS,
    assert_checkpoint,
    contents,
    large,
    unwritable,
)
from tests.gates import LIMIT, Gate
from tests.support import (
    cause_of,
    data_files,
    files_limited_to,
)
from torch_ckpt import CheckpointError, OnCommitFailed
from torch_ckpt._base.progress import Progress
from torch_ckpt.saving.background import CHUNK_BYTES

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def test_a_blocking_call_returns_after_staging(tmp_path: Path, gate: Gate) -> None:
    handle = torch_ckpt.async_save({"t": large()}, tmp_path / "c", write_done=gate)
    assert handle.staged.done()
    assert not handle.done()
    gate.open()
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
    held.open()
    handle.result(LIMIT)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_the_result_can_be_read_again(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    metadata = handle.result()
    assert handle.result() is metadata
    assert handle.committed.result() is metadata


def test_the_futures_cannot_be_cancelled(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", staging="overlapped")
    assert not handle.staged.cancel()
    assert not handle.committed.cancel()
    held.open()
    handle.result()


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": large(), "n": 1}, tmp_path / "c")
    handle.result()
    size = sum(file.stat().st_size for file in data_files(tmp_path / "c"))
    assert handle.progress() == Progress(size, size, size)


def test_a_second_save_waits_for_the_first(tmp_path: Path, opened_by_waiting: Gate) -> None:
    first = torch_ckpt.async_save(
        {"t": torch.ones(3)}, tmp_path / "first", write_done=opened_by_waiting
    )
    second = torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "second")
    assert first.done()
    second.result()
    assert_checkpoint(tmp_path / "first", {"t": torch.ones(3)})
    assert_checkpoint(tmp_path / "second", {"t": torch.zeros(3)})


def test_a_synchronous_save_waits_for_a_running_one(
    tmp_path: Path, opened_by_waiting: Gate
) -> None:
    first = torch_ckpt.async_save(
        {"t": torch.ones(3)}, tmp_path / "c", write_done=opened_by_waiting
    )
    torch_ckpt.save({"t": torch.zeros(3)}, tmp_path / "c")
    assert first.done()
    assert_checkpoint(tmp_path / "c", {"t": torch.zeros(3)})


def test_a_second_save_can_refuse_to_wait(tmp_path: Path, gate: Gate) -> None:
    first = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "first", write_done=gate)
    with pytest.raises(CheckpointError, match=r"the save to .*first is still running"):
        torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "second", if_busy="raise")
    gate.open()
    first.result()
    assert_checkpoint(tmp_path / "first", {"t": torch.ones(3)})
    assert not (tmp_path / "second").exists()


def test_a_save_that_refuses_to_wait_succeeds_if_no_save_is_running(tmp_path: Path) -> None:
    for name in ("first", "second"):
        torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / name, if_busy="raise").result()


def test_saves_of_many_threads_run_one_by_one(tmp_path: Path) -> None:
    def save(number: int) -> None:
        torch_ckpt.async_save({"t": large(number)}, tmp_path / str(number), max_host_bytes=1 << 20)

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


@pytest.mark.parametrize("way", SEEN)
@pytest.mark.parametrize("staging", STAGINGS)
def test_a_raised_error_is_reported_only_once(tmp_path: Path, way: str, staging: str) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path), staging=staging)
    with pytest.raises(CheckpointException):
        SEEN[way](handle)
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


@pytest.mark.parametrize("name", ["staged", "committed"])
def test_an_error_that_was_read_is_not_reported_again(tmp_path: Path, name: str) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    assert isinstance(getattr(handle, name).exception(), CheckpointException)
    torch_ckpt.check_for_errors()


def test_an_unseen_error_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    with pytest.raises(CheckpointException):
        torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()
    assert handle.done()


def test_an_unseen_error_is_raised_once_by_check_for_errors(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    wait_for_futures([handle.committed])
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


def test_a_synchronous_save_does_not_raise_an_unseen_error(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()
    assert handle.done()


def test_several_unseen_errors_are_raised_one_by_one(tmp_path: Path) -> None:
    first = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    wait_for_futures([first.committed])
    with pytest.raises(CheckpointException) as error:
        torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "file" / "second")
    second = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "file" / "second")
    with pytest.raises(CheckpointException) as other:
        second.result()
    assert error.value is first.committed.exception()
    assert error.value is not other.value


def test_check_for_errors_does_not_wait(tmp_path: Path, gate: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", write_done=gate)
    torch_ckpt.check_for_errors()
    assert not handle.done()
    gate.open()
    handle.result()


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_full_disk_is_enospc_and_leaves_nothing(small_disk: Path, staging: str) -> None:
    handle = torch_ckpt.async_save({"t": large()}, small_disk / "c", staging=staging)
    with pytest.raises(CheckpointException) as error:
        handle.result()
    cause = cause_of(error.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert str(cause.filename).startswith(str(small_disk / "c"))
    assert list((small_disk / "c").iterdir()) == []


def test_a_failed_save_keeps_the_old_checkpoint_and_the_next_one_replaces_it(
    tmp_path: Path,
) -> None:
    torch_ckpt.async_save({"t": large(1)}, tmp_path / "c").result()
    before = sorted((tmp_path / "c").iterdir())
    with files_limited_to(CHUNK_BYTES), pytest.raises(CheckpointException):
        torch_ckpt.async_save({"t": large(2)}, tmp_path / "c").result()
    assert sorted((tmp_path / "c").iterdir()) == before
    assert_checkpoint(tmp_path / "c", {"t": large(1)})
    torch_ckpt.async_save({"t": large(3)}, tmp_path / "c").result()
    assert_checkpoint(tmp_path / "c", {"t": large(3)})


def test_an_object_that_does_not_pickle_fails_the_save(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3), "o": lambda: 1}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="pickle"):
        handle.result()
    assert list((tmp_path / "c").iterdir()) == []


def test_an_existing_checkpoint_can_be_protected(tmp_path: Path) -> None:
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()
    with pytest.raises(CheckpointException, match="already exists"):
        torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "c", overwrite=False).result()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_a_handle_dropped_before_the_end_warns(tmp_path: Path, gate: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", write_done=gate)
    committed = handle.committed
    with pytest.warns(UserWarning, match="the handle of the save to .*c was dropped"):
        del handle
    gate.open()
    committed.result(LIMIT)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_the_error_of_a_dropped_handle_is_warned_of(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path), staging="overlapped")
    committed = handle.committed
    with pytest.warns(UserWarning, match="dropped"):
        del handle
    held.open()
    wait_for_futures([committed])
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()


def test_a_handle_dropped_after_the_end_does_not_warn(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    handle.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle


# --- hooks ---------------------------------------------------------------------------------------


def test_write_done_is_called_on_another_thread_before_the_commit(tmp_path: Path) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def look() -> None:
        thread = threading.current_thread().name
        seen.append((thread, contents(tmp_path / "c") == saved, is_committed(tmp_path / "c")))

    torch_ckpt.save({"t": large()}, tmp_path / "saved")
    saved = contents(tmp_path / "saved")
    torch_ckpt.async_save({"t": large()}, tmp_path / "c", write_done=look).result()
    assert seen == [("torch_ckpt save", True, False)]


def test_an_exception_in_write_done_fails_the_save(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PermissionError("not today")

    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()
    before = sorted((tmp_path / "c").iterdir())
    handle = torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "c", write_done=refuse)
    with pytest.raises(CheckpointException, match="not today") as error:
        handle.result()
    assert isinstance(cause_of(error.value), PermissionError)
    handle.wait_staged()
    assert sorted((tmp_path / "c").iterdir()) == before
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_on_commit_is_called_with_the_metadata_after_the_commit(tmp_path: Path, held: Gate) -> None:
    seen: list[tuple[Metadata, bool, bool]] = []

    def look(metadata: Metadata) -> None:
        seen.append((metadata, is_committed(tmp_path / "c"), handle.done()))

    state = {"t": torch.ones(3)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped", on_commit=look)
    held.open()
    metadata = handle.result()
    assert seen == [(metadata, True, False)]


@pytest.mark.parametrize("error", [OSError, CheckpointException])
def test_an_exception_in_on_commit_reports_that_the_checkpoint_is_committed(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(_: Metadata) -> None:
        raise error("upload", {}) if error is CheckpointException else error("upload")

    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", on_commit=fail)
    with pytest.raises(OnCommitFailed, match=r"the checkpoint in .*c is committed") as caught:
        handle.result()
    assert isinstance(cause_of(caught.value).__cause__, error)
    torch_ckpt.check_for_errors()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_on_commit_is_not_called_for_a_failed_save(tmp_path: Path) -> None:
    called: list[Metadata] = []
    handle = torch_ckpt.async_save(
        {"t": torch.ones(3)}, unwritable(tmp_path), on_commit=called.append
    )
    with pytest.raises(CheckpointException):
        handle.result()
    assert called == []


@pytest.mark.parametrize("hook", ["write_done", "on_commit"])
@pytest.mark.parametrize("save", [torch_ckpt.save, torch_ckpt.async_save])
def test_a_save_from_a_hook_is_refused_as_it_would_wait_for_itself(
    tmp_path: Path, hook: str, save: Callable[..., object]
) -> None:
    def save_more(*_: Metadata) -> None:
        save({"t": torch.ones(3)}, tmp_path / "more")

    handle = torch_ckpt.async_save({}, tmp_path / "c", **{hook: save_more})  # type: ignore[arg-type]
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


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"staging": "later"}, "staging must be one of 'blocking', 'overlapped', got 'later'"),
        ({"if_busy": "skip"}, "if_busy must be one of 'wait', 'raise', got 'skip'"),
        ({"checkpoint_id": None}, "Pass a checkpoint_id or a FileSystemWriter"),
        ({"thread_count": 0}, "thread_count must be at least 1"),
        ({"max_host_bytes": 1}, "max_host_bytes must be at least 4096"),
        ({"storage_writer": "mine"}, "expected a torch_ckpt.FileSystemWriter, got str"),
        (
            {"storage_writer": "mine", "thread_count": 2},
            "thread_count cannot be combined with a FileSystemWriter",
        ),
        ({"_extensions": [object()]}, "Pass this writer to dcp.async_save instead"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, dict) else "",
)
def test_contradicting_options_are_an_error_of_one_sentence(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    arguments = {"checkpoint_id": tmp_path / "c"} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_ckpt.async_save({}, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_option_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="stagign"):
        torch_ckpt.async_save({}, tmp_path / "c", stagign="blocking")
