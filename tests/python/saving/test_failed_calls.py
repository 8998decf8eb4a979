"""System calls that a save or a load tolerates or reports in its own words; they fail by strace.

tests/faults/test_every_call.py makes each call of a save fail.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from tests import under_strace
from tests.failed_saves import assert_is_checkpoint, names_in, state_of
from tests.support import assert_equal, cause_of, data_files, emptied, load, save

# Work of the child process under strace; see under_strace.py.


def saving(path: str, options: dict[str, Any]) -> None:
    save(state_of(), path, **options)


def loading(path: str) -> None:
    # The child first loads from a directory of its own, in which nothing fails.
    if not (Path(path) / ".metadata").exists():
        save(state_of(), path, thread_count=2)
    loaded = emptied(state_of())
    load(loaded, path)
    assert_equal(loaded, state_of())


def failure_of(outcome: under_strace.Outcome) -> BaseException:
    assert isinstance(outcome.error, dcp.CheckpointException), outcome.error
    return cause_of(outcome.error)


def saved(path: Path, inject: str, **options: Any) -> under_strace.Outcome:
    """Saves to one file, whose system calls fail."""
    paths = [path / "__0_0.distcp", "__0_0.distcp"]
    options = {"thread_count": 1, **options}
    return under_strace.run(saving, str(path), options, inject=inject, paths=paths)


def test_a_write_of_no_bytes_is_a_full_disk_and_not_an_endless_loop(tmp_path: Path) -> None:
    outcome = saved(tmp_path, "pwrite64:retval=0")
    assert failure_of(outcome).errno == errno.ENOSPC
    assert names_in(tmp_path) == []


#: tests/faults/test_every_call.py has the calls that a signal interrupts or a file system lacks.
RETRIED = [
    ("openat", "EINVAL"),  # a file system without O_DIRECT
    ("pwrite64", "EINVAL"),  # a file system that fails only at the first write
]


@pytest.mark.parametrize(("call", "error"), RETRIED)
def test_a_tolerated_failure_does_not_fail_the_save(tmp_path: Path, call: str, error: str) -> None:
    outcome = saved(tmp_path, f"{call}:error={error}:when=1")
    assert outcome.injected > 0
    assert outcome.error is None
    assert_is_checkpoint(tmp_path, state_of())


def test_unavailable_direct_io_is_refused_by_name(tmp_path: Path) -> None:
    cause = failure_of(saved(tmp_path, "openat:error=EINVAL:when=1", direct_io=True))
    assert isinstance(cause, ValueError)
    message = f"{tmp_path}/__0_0.distcp: direct_io=True, but this file system does not support"
    assert message in str(cause)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(("call", "error"), [("pread64", "EINTR"), ("preadv2", "EOPNOTSUPP")])
def test_a_tolerated_failure_does_not_fail_the_load(tmp_path: Path, call: str, error: str) -> None:
    save(state_of(), tmp_path, thread_count=2)
    inject = f"{call}:error={error}:when=1"
    outcome = under_strace.run(loading, str(tmp_path), inject=inject, paths=data_files(tmp_path))
    assert outcome.error is None
