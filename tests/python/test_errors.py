"""A save that fails says so, publishes nothing and leaves nothing behind; the old one stays."""

from __future__ import annotations

import errno
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

import torch_ckpt
from tests import under_strace
from tests.support import (
    StateDict,
    assert_equal,
    cause_of,
    data_files,
    emptied,
    files_limited_to,
    load,
    pairwise,
    random_tensor,
    save,
    save_with,
    stock_load,
    stock_save,
)
from torch_ckpt.errors import CheckpointError, DurabilityUncertain, NotCommitted
from torch_ckpt.progress import Progress

THREAD_COUNTS = [1, 2, 3, 4]

# Large enough for direct I/O in each of four files.
LARGE = 4 * (1 << 20) + (64 << 10)


def state_of(seed: int = 0, bytes_in_all: int = LARGE) -> StateDict:
    """Four tensors of one size, of which each of up to four files gets one or more, and more."""
    rows = bytes_in_all // (4 * 4 * 100)
    state: StateDict = {
        f"t{i}": random_tensor((rows, 100), torch.float32, seed + i) for i in range(4)
    }
    return state | {"step": seed, "small": random_tensor((7,), torch.int64, seed)}


def assert_is_checkpoint(path: Path, state: StateDict) -> None:
    """Fails where the checkpoint is not the state's, to us or to stock torch."""
    for loader in (load, stock_load):
        loaded = emptied(state)
        loader(loaded, path)
        assert_equal(loaded, state)


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


# What a child process under strace does; see under_strace.py.


def saving(path: str, seed: int, options: dict[str, Any]) -> None:
    save(state_of(seed), path, **options)


def stock_saving(path: str, seed: int, options: dict[str, Any]) -> None:
    stock_save(state_of(seed), path, **options)


def loading(path: str, seed: int, options: dict[str, Any]) -> None:
    if not (Path(path) / ".metadata").exists():
        save(state_of(seed), path, thread_count=2)
    loaded = emptied(state_of(seed))
    load(loaded, path, **options)
    assert_equal(loaded, state_of(seed))


def failure_of(outcome: under_strace.Outcome) -> BaseException:
    assert isinstance(outcome.error, dcp.CheckpointException), outcome.error
    return cause_of(outcome.error)


# --- every system call of a data file ------------------------------------------------------------

DATA_FILE_CALLS = [
    ("openat", "EMFILE"),
    ("fallocate", "ENOSPC"),
    ("pwrite64", "ENOSPC"),
    ("pwrite64", "EIO"),
    ("ftruncate", "EIO"),
    ("fsync", "EIO"),
    ("fsync", "EINTR"),
    ("close", "EIO"),
]

EVERY_FILE = [
    (failure, count, file)
    for failure in DATA_FILE_CALLS
    for count in THREAD_COUNTS
    for file in range(count)
]


@pytest.mark.parametrize(("failure", "thread_count", "file"), pairwise(EVERY_FILE))
def test_a_failed_call_on_one_data_file_fails_the_save(
    tmp_path: Path, failure: tuple[str, str], thread_count: int, file: int
) -> None:
    call, error = failure
    target = tmp_path / f"__0_{file}.distcp"
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": thread_count},
        trace=call,
        inject=f"{call}:error={error}:when=1",
        paths=[target, target.name],
    )
    assert "INJECTED" in outcome.calls[0].result
    cause = failure_of(outcome)
    assert isinstance(cause, OSError)
    assert cause.errno == getattr(errno, error)
    assert cause.filename == str(target)
    assert os.strerror(cause.errno) in str(cause)
    assert names_in(tmp_path) == []


OVERWRITE_CALLS = [
    ("fallocate", "ENOSPC"),
    ("pwrite64", "EDQUOT"),
    ("ftruncate", "EIO"),
    ("fsync", "EIO"),
    ("/^rename", "EACCES"),
]


@pytest.mark.parametrize(("call", "error"), OVERWRITE_CALLS)
@pytest.mark.parametrize("thread_count", [1, 4])
def test_a_failed_call_while_overwriting_keeps_the_old_checkpoint(
    tmp_path: Path, call: str, error: str, thread_count: int
) -> None:
    save(state_of(0), tmp_path)
    before = names_in(tmp_path)
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        1,
        {"thread_count": thread_count},
        trace=call,
        inject=f"{call}:error={error}",
    )
    cause = failure_of(outcome)
    assert cause.errno == getattr(errno, error)
    if call != "/^rename":
        assert names_in(tmp_path) == before
    assert_is_checkpoint(tmp_path, state_of(0))


def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path) -> None:
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": 4},
        trace="pwrite64",
        inject="pwrite64:error=ENOSPC",
    )
    cause = failure_of(outcome)
    assert cause.errno == errno.ENOSPC
    assert "pwrite failed at byte 0" in str(cause)


def test_files_that_cannot_be_removed_do_not_hide_the_cause(tmp_path: Path) -> None:
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": 2},
        trace="pwrite64,unlinkat",
        inject="pwrite64,unlinkat:error=ENOSPC",
    )
    assert failure_of(outcome).errno == errno.ENOSPC
    assert not (tmp_path / ".metadata").exists()


# --- every system call of the commit -------------------------------------------------------------

COMMIT_TRACE = "openat,pwrite64,fsync,close,/^rename"


def commit_calls(outcome: under_strace.Outcome) -> list[under_strace.Call]:
    """The calling thread's, from the temporary metadata file to the last fsync."""
    calls = outcome.calls
    first = next(i for i, call in enumerate(calls) if ".metadata.tmp-" in call.arguments)
    last = max(i for i, call in enumerate(calls) if call.name == "fsync")
    return calls[first : last + 1]


@pytest.fixture(scope="module")
def sound_commit(tmp_path_factory: pytest.TempPathFactory) -> list[under_strace.Call]:
    """The calls of a commit over an older checkpoint, nothing failing."""
    path = tmp_path_factory.mktemp("sound")
    save(state_of(0), path)
    outcome = under_strace.run(
        saving, str(path), 1, {"thread_count": 1}, trace=COMMIT_TRACE, main_thread_only=True
    )
    assert outcome.error is None
    return commit_calls(outcome)


def test_a_commit_is_durable_before_and_after_it_is_visible(
    sound_commit: list[under_strace.Call],
) -> None:
    names = [call.name for call in sound_commit]
    above = (len(names) - 8) // 5
    assert above >= 1
    assert names == [
        *("openat", "pwrite64", "fsync", "close"),  # the metadata under a temporary name
        *("openat", "openat", "fsync", "close"),  # the directory above: to go there, and to sync
        *("openat", "openat", "fsync", "close", "close") * (above - 1),  # and those above it
        *("openat", "close", "close"),  # nothing is above the last one
        "renameat",
        "fsync",  # of the directory
    ]


# The position of each call in the list above (from its end: behind the directories), and whether
# the checkpoint is visible when it fails.
COMMIT_STEPS = [
    pytest.param(0, False, id="open the temporary file"),
    pytest.param(1, False, id="write it"),
    pytest.param(2, False, id="fsync it"),
    pytest.param(3, False, id="close it"),
    pytest.param(4, False, id="go to the parent"),
    pytest.param(5, False, id="open the parent"),
    pytest.param(6, False, id="fsync the parent"),
    pytest.param(-2, False, id="rename"),
    pytest.param(-1, True, id="fsync the directory"),
]


@pytest.mark.parametrize(("step", "visible"), COMMIT_STEPS)
def test_a_failed_call_of_the_commit_fails_the_save(
    tmp_path: Path, sound_commit: list[under_strace.Call], step: int, visible: bool
) -> None:
    save(state_of(0), tmp_path)
    call = sound_commit[step]
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        1,
        {"thread_count": 1},
        trace=COMMIT_TRACE,
        inject=f"{call.name}:error=EIO:when={call.nth}",
        main_thread_only=True,
    )
    (injected,) = (c for c in outcome.calls if "INJECTED" in c.result)
    assert injected.name == call.name
    cause = failure_of(outcome)
    assert type(cause) is (DurabilityUncertain if visible else NotCommitted)
    assert cause.errno == errno.EIO
    assert "Input/output error" in str(cause)
    assert not [name for name in names_in(tmp_path) if ".tmp" in name]
    assert_is_checkpoint(tmp_path, state_of(1 if visible else 0))


@pytest.mark.parametrize("thread_count", [1, 4])
def test_a_failed_fsync_of_the_directory_fails_the_save(tmp_path: Path, thread_count: int) -> None:
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": thread_count},
        trace="fsync",
        inject="fsync:error=EIO:when=1",
        paths=[tmp_path],
    )
    cause = failure_of(outcome)
    assert isinstance(cause, OSError)
    assert (cause.errno, cause.filename) == (errno.EIO, str(tmp_path))
    assert names_in(tmp_path) == []


# --- calls that come back early ------------------------------------------------------------------


@pytest.mark.parametrize("count", [4096, 1000, 1])
@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_a_short_write_is_continued_where_it_ended(
    tmp_path: Path, count: int, direct_io: bool | str
) -> None:
    # strace skips the call that it lets return early, so those bytes are missing in the file.
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": 1, "direct_io": direct_io},
        trace="pwrite64",
        inject=f"pwrite64:retval={count}:when=1",
        paths=[tmp_path / "__0_0.distcp", "__0_0.distcp"],
    )
    assert outcome.error is None
    short = [call for call in outcome.calls if "INJECTED" in call.result]
    ranges = [tuple(int(n) for n in c.arguments.rsplit(", ", 2)[1:]) for c in outcome.calls]
    assert short
    for call in short:
        asked, offset = (int(n) for n in call.arguments.rsplit(", ", 2)[1:])
        assert (asked - count, offset + count) in ranges
    size = (tmp_path / "__0_0.distcp").stat().st_size
    save(state_of(0), tmp_path / "sound", thread_count=1)
    assert size == (tmp_path / "sound" / "__0_0.distcp").stat().st_size


def test_a_write_of_no_bytes_is_a_full_disk_and_no_endless_loop(tmp_path: Path) -> None:
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": 2},
        trace="pwrite64",
        inject="pwrite64:retval=0",
    )
    assert failure_of(outcome).errno == errno.ENOSPC
    assert names_in(tmp_path) == []


RETRIED = [
    ("pwrite64", "EINTR"),  # interrupted by a signal
    ("ftruncate", "EINTR"),
    ("fallocate", "EINTR"),
    ("fallocate", "EOPNOTSUPP"),  # a file system without it
    ("openat", "EINVAL"),  # a file system without O_DIRECT
    ("pwrite64", "EINVAL"),  # one that says so late
    ("close", "EINTR"),  # Linux has closed it
]


@pytest.mark.parametrize(("call", "error"), RETRIED)
def test_a_call_that_is_no_failure_does_not_fail_the_save(
    tmp_path: Path, call: str, error: str
) -> None:
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": 1},
        trace=call,
        inject=f"{call}:error={error}:when=1",
        paths=[tmp_path / "__0_0.distcp", "__0_0.distcp"],
    )
    assert "INJECTED" in outcome.calls[0].result
    assert outcome.error is None
    assert_is_checkpoint(tmp_path, state_of(0))


def test_without_fsync_nothing_is_fsynced(tmp_path: Path) -> None:
    outcome = under_strace.run(
        saving, str(tmp_path), 0, {"sync_files": False}, trace="fsync,fdatasync,sync,syncfs"
    )
    assert outcome.error is None
    assert outcome.calls == []


@pytest.mark.parametrize("thread_count", THREAD_COUNTS)
def test_every_file_and_the_directory_are_fsynced(tmp_path: Path, thread_count: int) -> None:
    outcome = under_strace.run(
        saving, str(tmp_path), 0, {"thread_count": thread_count}, trace="fsync"
    )
    # Data files, the directory with them, the metadata, the directories above, the directory.
    assert len(outcome.calls_of("fsync")) == thread_count + 3 + directories_above(tmp_path)


def directories_above(path: Path) -> int:
    """Up to the root of the file system."""
    above = [parent for parent in path.parents if parent.stat().st_dev == path.stat().st_dev]
    return len(above)


# --- loads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"), [("openat2", "EACCES"), ("openat2", "EMFILE"), ("pread64", "EIO")]
)
@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_a_failed_call_on_a_data_file_fails_the_load(
    tmp_path: Path, call: str, error: str, direct_io: bool | str
) -> None:
    save(state_of(0), tmp_path, thread_count=2)
    target = tmp_path / "__0_1.distcp"
    outcome = under_strace.run(
        loading,
        str(tmp_path),
        0,
        {"direct_io": direct_io},
        trace=call,
        inject=f"{call}:error={error}",
        paths=[target, target.name],
    )
    cause = failure_of(outcome)
    assert isinstance(cause, OSError)
    assert (cause.errno, cause.filename) == (getattr(errno, error), str(target))


@pytest.mark.parametrize(("call", "error"), [("pread64", "EINTR"), ("preadv2", "EOPNOTSUPP")])
def test_a_call_that_is_no_failure_does_not_fail_the_load(
    tmp_path: Path, call: str, error: str
) -> None:
    save(state_of(0), tmp_path, thread_count=2)
    outcome = under_strace.run(
        loading,
        str(tmp_path),
        0,
        {},
        trace=call,
        inject=f"{call}:error={error}:when=1",
        paths=data_files(tmp_path),
    )
    assert outcome.error is None


# --- without strace: real full disks, limits and directories -------------------------------------


@pytest.mark.parametrize("thread_count", THREAD_COUNTS)
@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_a_full_disk_fails_the_save_and_is_empty_again(
    small_disk: Path, thread_count: int, direct_io: bool | str
) -> None:
    path = small_disk / "checkpoint"
    with pytest.raises(dcp.CheckpointException) as error:
        save(state_of(0, 12 << 20), path, thread_count=thread_count, direct_io=direct_io)
    cause = cause_of(error.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert os.path.dirname(cause.filename) == str(path)
    assert names_in(path) == []


@pytest.mark.parametrize("thread_count", THREAD_COUNTS)
def test_a_disk_too_small_for_two_checkpoints_keeps_the_first(
    small_disk: Path, thread_count: int
) -> None:
    save(state_of(0, 5 << 20), small_disk, thread_count=thread_count)
    before = names_in(small_disk)
    with pytest.raises(dcp.CheckpointException, match="No space left"):
        save(state_of(1, 5 << 20), small_disk, thread_count=thread_count)
    assert names_in(small_disk) == before
    assert_is_checkpoint(small_disk, state_of(0, 5 << 20))


def test_a_full_disk_without_room_for_the_metadata_publishes_nothing(small_disk: Path) -> None:
    path = small_disk / "checkpoint"
    path.mkdir()
    # The data fit, but then there is no page left.
    state = {"a": torch.zeros(1 << 20, dtype=torch.uint8)}
    save(state, path, thread_count=1)
    size = data_files(path)[0].stat().st_size
    for file in path.iterdir():
        file.unlink()
    with (small_disk / "filler").open("wb") as filler:
        free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
        filler.write(bytes(free - -(-size // 4096) * 4096))
    with pytest.raises(dcp.CheckpointException, match="No space left") as error:
        save(state, path, thread_count=1)
    assert isinstance(cause_of(error.value), NotCommitted)
    assert not [name for name in names_in(path) if name.startswith(".metadata")]


@pytest.mark.parametrize("thread_count", THREAD_COUNTS)
@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_a_limit_on_file_sizes_fails_the_save(
    tmp_path: Path, thread_count: int, direct_io: bool | str
) -> None:
    with pytest.raises(dcp.CheckpointException) as error, files_limited_to(1 << 20):
        save(state_of(), tmp_path, thread_count=thread_count, direct_io=direct_io)
    cause = cause_of(error.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EFBIG
    assert names_in(tmp_path) == []


def test_a_read_only_disk_fails_the_save_and_can_be_loaded_from(small_disk: Path) -> None:
    save(state_of(0, 1 << 20), small_disk)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (small_disk, small_disk / "new"):
        with pytest.raises(dcp.CheckpointException) as error:
            save(state_of(1, 1 << 20), path)
        cause = cause_of(error.value)
        assert isinstance(cause, OSError)
        assert cause.errno == errno.EROFS
    assert_is_checkpoint(small_disk, state_of(0, 1 << 20))


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_in_the_place_of_the_directory_fails_the_save(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("keep")
    with pytest.raises(dcp.CheckpointException) as error:
        save(state_of(), tmp_path / path)
    cause = cause_of(error.value)
    assert isinstance(cause, OSError)
    assert cause.filename is not None
    assert (tmp_path / "file").read_text() == "keep"


@pytest.mark.filterwarnings("ignore:an unused file could not be removed")
@pytest.mark.parametrize("thread_count", THREAD_COUNTS)
def test_a_directory_in_the_place_of_a_data_file_is_no_reason_to_lose_data(
    tmp_path: Path, thread_count: int
) -> None:
    (tmp_path / f"__0_{thread_count - 1}.distcp").mkdir()
    save(state_of(), tmp_path, thread_count=thread_count)
    assert_is_checkpoint(tmp_path, state_of())


def test_stock_torch_with_four_threads_reports_success_where_a_file_could_not_be_written(
    tmp_path: Path,
) -> None:
    # What the tests of this file are for. Newer torch may have mended it.
    (tmp_path / "__0_1.distcp").mkdir()
    hook, threading_hook = [], pytest.MonkeyPatch()
    threading_hook.setattr("threading.excepthook", hook.append)
    try:
        stock_save(state_of(), tmp_path, thread_count=4)
    except dcp.CheckpointException:
        pytest.skip("this torch reports the failure")
    finally:
        threading_hook.undo()
    assert (tmp_path / ".metadata").exists()
    with pytest.raises(dcp.CheckpointException):
        stock_load(emptied(state_of()), tmp_path)


def test_the_checkpoint_that_stock_torch_published_so_is_refused_with_its_reason(
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


def error_of_save(path: Path) -> dcp.CheckpointException:
    with pytest.raises(dcp.CheckpointException) as error, files_limited_to(1 << 20):
        save(state_of(), path, thread_count=1)
    return error.value


def test_the_raised_exception_makes_the_way_to_other_ranks(tmp_path: Path) -> None:
    error = error_of_save(tmp_path)
    copy = pickle.loads(pickle.dumps(error))
    cause, copied = cause_of(error), cause_of(copy)
    assert type(copied) is type(cause)
    assert (copied.errno, copied.filename) == (errno.EFBIG, str(tmp_path / "__0_0.distcp"))
    assert str(copied) == str(cause)


def test_the_message_names_the_call_and_the_file(tmp_path: Path) -> None:
    text = str(cause_of(error_of_save(tmp_path)))
    assert "fallocate failed" in text
    assert "File too large" in text
    assert str(tmp_path / "__0_0.distcp") in text


@pytest.mark.parametrize("kind", [NotCommitted, DurabilityUncertain])
def test_errors_of_the_commit_can_be_pickled(kind: type[NotCommitted]) -> None:
    error = kind("fsync x: Input/output error", errno.EIO)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.errno) == (str(error), error.errno)


def test_direct_io_that_is_not_to_be_had_is_refused_by_name(tmp_path: Path) -> None:
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        0,
        {"thread_count": 1, "direct_io": True},
        trace="openat",
        inject="openat:error=EINVAL:when=1",
        paths=[tmp_path / "__0_0.distcp", "__0_0.distcp"],
    )
    cause = failure_of(outcome)
    assert isinstance(cause, ValueError)
    assert f"{tmp_path}/__0_0.distcp: direct_io=True, but this file system has no" in str(cause)
    assert names_in(tmp_path) == []


class Unhelpful(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        return "not a tensor"


def test_a_planner_that_gives_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
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
def test_a_tensor_that_torch_cannot_save_is_not_saved(tmp_path: Path, kind: str) -> None:
    for saver in (save, stock_save):
        path = tmp_path / saver.__name__
        with pytest.raises(dcp.CheckpointException):
            saver({"a": SPARSE[kind]()}, path)
        assert not (path / ".metadata").exists()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this object cannot be pickled")


def test_an_object_that_cannot_be_pickled_fails_the_save(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    with pytest.raises(dcp.CheckpointException, match="this object cannot be pickled"):
        save(state_of(1) | {"object": Unpicklable()}, tmp_path)
    assert_is_checkpoint(tmp_path, state_of(0))


def test_a_failed_save_leaves_no_file_open_and_the_engine_ready(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "good")
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        with pytest.raises(dcp.CheckpointException), files_limited_to(1 << 20):
            save(state_of(), tmp_path / "bad", thread_count=4)
    assert os.listdir("/proc/self/fd") == before
    assert names_in(tmp_path / "bad") == []
    save(state_of(), tmp_path / "bad", thread_count=4)
    assert_is_checkpoint(tmp_path / "bad", state_of())


def test_a_link_in_the_place_of_a_data_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "__0_0.distcp").symlink_to(victim)
    save(state_of(), tmp_path / "checkpoint", thread_count=1)
    assert victim.read_text() == "keep"
    assert_is_checkpoint(tmp_path / "checkpoint", state_of())


# --- progress and Ctrl-C -------------------------------------------------------------------------


def test_progress_of_a_save_grows_to_the_total(tmp_path: Path) -> None:
    seen: list[Progress] = []
    save(state_of(), tmp_path, progress=seen.append)
    written = sum(file.stat().st_size for file in data_files(tmp_path))
    assert {progress.bytes_planned for progress in seen} == {written}
    for counts in ([p.bytes_staged for p in seen], [p.bytes_done for p in seen]):
        assert counts == sorted(counts)
        assert counts[-1] == written
    assert all(progress.bytes_done <= progress.bytes_staged for progress in seen)


def test_progress_true_draws_a_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(state_of(), tmp_path / "step-7", progress=True)
    load(emptied(state_of()), tmp_path / "step-7", progress=True)
    drawn = capsys.readouterr().err
    assert "save step-7: 100%" in drawn
    assert "load step-7: 100%" in drawn


@pytest.mark.parametrize("option", [None, False])
def test_without_progress_nothing_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: bool | None
) -> None:
    save(state_of(), tmp_path, progress=option)
    load(emptied(state_of()), tmp_path, progress=option)
    assert capsys.readouterr() == ("", "")


def interrupt(_progress: Progress) -> None:
    signal.raise_signal(signal.SIGINT)


def complain(_progress: Progress) -> None:
    raise ValueError("the progress function failed")


@pytest.mark.parametrize(
    ("function", "said"), [(interrupt, "KeyboardInterrupt"), (complain, "progress function failed")]
)
@pytest.mark.parametrize("bytes_in_all", [LARGE, 200 << 20], ids=["done by then", "under way"])
def test_an_interrupted_save_removes_its_files(
    scratch: Path, function: Callable[[Progress], None], said: str, bytes_in_all: int
) -> None:
    save(state_of(0), scratch)
    before = names_in(scratch)
    with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)) as error:
        save(state_of(1, bytes_in_all), scratch, progress=function, max_host_bytes=1 << 20)
    assert said in error.exconly()
    assert names_in(scratch) == before
    assert_is_checkpoint(scratch, state_of(0))
