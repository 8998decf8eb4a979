"""System calls of a save or a load that fail or return early by strace."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests import under_strace
from tests.failed_saves import THREAD_COUNTS, assert_is_checkpoint, names_in, state_of
from tests.support import (
    assert_equal,
    cause_of,
    data_files,
    emptied,
    load,
    pairwise,
    save,
    stock_save,
)
from torch_ckpt.errors import DurabilityUncertain, NotCommitted

# Work of the child process under strace; see under_strace.py.


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


def test_the_first_failure_is_reported(tmp_path: Path) -> None:
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
    """Selects the calling thread's calls from the temporary metadata file to the last fsync."""
    calls = outcome.calls
    first = next(i for i, call in enumerate(calls) if ".metadata.tmp-" in call.arguments)
    last = max(i for i, call in enumerate(calls) if call.name == "fsync")
    return calls[first : last + 1]


@pytest.fixture(scope="module")
def sound_commit(tmp_path_factory: pytest.TempPathFactory) -> list[under_strace.Call]:
    """Returns the calls of a successful commit that replaces a checkpoint."""
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
    above = (len(names) - 10) // 5
    assert above >= 1
    assert names == [
        *("openat", "pwrite64", "fsync", "close"),  # the metadata under a temporary name
        *("openat", "openat", "fsync", "close"),  # the directory above: to open it, and to sync
        *("openat", "openat", "fsync", "close", "close") * (above - 1),  # and those above it
        *("openat", "close", "close"),  # nothing is above the last one
        *("openat", "close"),  # the directory, to find the data files in it
        "renameat",
        "fsync",  # of the directory
    ]


# The position of each call in the list above (negative: from its end, which has the directories),
# and whether the checkpoint is visible when the call fails.
COMMIT_STEPS = [
    pytest.param(0, False, errno.EIO, id="open the temporary file"),
    pytest.param(1, False, errno.EIO, id="write it"),
    pytest.param(2, False, errno.EIO, id="fsync it"),
    pytest.param(3, False, errno.EIO, id="close it"),
    pytest.param(4, False, errno.EIO, id="go to the parent"),
    pytest.param(5, False, errno.EIO, id="open the parent"),
    pytest.param(6, False, errno.EIO, id="fsync the parent"),
    pytest.param(-4, False, errno.EIO, id="list the directory"),
    # EIO would leave open whether the call was carried out.
    pytest.param(-2, False, errno.ENOSPC, id="rename"),
    pytest.param(-1, True, errno.EIO, id="fsync the directory"),
]


@pytest.mark.parametrize(("step", "visible", "error"), COMMIT_STEPS)
def test_a_failed_call_of_the_commit_fails_the_save(
    tmp_path: Path, sound_commit: list[under_strace.Call], step: int, visible: bool, error: int
) -> None:
    save(state_of(0), tmp_path)
    call = sound_commit[step]
    outcome = under_strace.run(
        saving,
        str(tmp_path),
        1,
        {"thread_count": 1},
        trace=COMMIT_TRACE,
        inject=f"{call.name}:error={errno.errorcode[error]}:when={call.nth}",
        main_thread_only=True,
    )
    (injected,) = (c for c in outcome.calls if "INJECTED" in c.result)
    assert injected.name == call.name
    cause = failure_of(outcome)
    assert type(cause) is (DurabilityUncertain if visible else NotCommitted)
    assert cause.errno == error
    assert os.strerror(error) in str(cause)
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
def test_a_short_write_is_continued(tmp_path: Path, count: int, direct_io: bool | str) -> None:
    # strace skips a call that it makes return early, so those bytes are missing in the file.
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


def test_a_write_of_no_bytes_is_a_full_disk_and_not_an_endless_loop(tmp_path: Path) -> None:
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
    ("pwrite64", "EINVAL"),  # a file system that fails only at the first write
    ("close", "EINTR"),  # Linux has closed it
]


@pytest.mark.parametrize(("call", "error"), RETRIED)
def test_a_tolerated_failure_does_not_fail_the_save(tmp_path: Path, call: str, error: str) -> None:
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
    # Data files, their directory, the metadata, the directories above, the directory.
    assert len(outcome.calls_of("fsync")) == thread_count + 3 + directories_above(tmp_path)


def directories_above(path: Path) -> int:
    """Returns the directories up to the root of the file system."""
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
def test_a_tolerated_failure_does_not_fail_the_load(tmp_path: Path, call: str, error: str) -> None:
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


def test_unavailable_direct_io_is_refused_by_name(tmp_path: Path) -> None:
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
    assert f"{tmp_path}/__0_0.distcp: direct_io=True, but this file system does not support" in str(
        cause
    )
    assert names_in(tmp_path) == []
