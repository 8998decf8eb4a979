"""Saves to disks that are really full, and to one that really fails.

Quota errors are injected in test_every_call.py; ../python/saving/test_failed_saves.py has full
tmpfs, limits on file sizes and read-only file systems.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.faults.disks import FailingDisk, ext4_of, failing_disk, mounted
from tests.faults.saves import save_with_descriptors
from tests.interposed import Order, Server
from tests.support import cause_of
from tests.sweeps import (
    NEW,
    NEXT,
    OLD,
    SWEEPING,
    found_in,
    names_in,
    save_alone,
    save_by_dcp,
    save_through_page_cache,
    unnamed_in,
)
from torch_ckpt.errors import NotCommitted

pytestmark = [*SWEEPING, pytest.mark.full]


def errno_of_failed_save(path: Path, threads: int) -> int:
    """Makes a save of NEW that fails. Returns its errno and releases the error."""
    with pytest.raises(dcp.CheckpointException) as error:
        save_by_dcp(str(path), NEW, threads)
    cause = cause_of(error.value)
    assert isinstance(cause, OSError | NotCommitted)
    return cause.errno or 0


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 20))


# --- full ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_a_full_ext4_fails_the_save_keeps_the_old_checkpoint_and_stays_usable(
    tmp_path: Path, threads: int
) -> None:
    with ext4_of(tmp_path, 16 << 20) as disk:
        path = disk / "checkpoint"
        save_alone(str(path), OLD, threads)
        before = names_in(path)
        filler = disk / "filler"
        _fill(filler)
        assert errno_of_failed_save(path, threads) == errno.ENOSPC
        assert names_in(path) == before
        assert found_in(path) == "old"
        filler.unlink()
        save_alone(str(path), NEXT, threads)
        assert found_in(path) == "next"
        assert not unnamed_in(path)


@pytest.mark.parametrize("inodes", range(1, 6))
def test_a_disk_without_inodes_fails_the_save_which_leaves_no_file(
    tmp_path: Path, inodes: int
) -> None:
    # A first save with four threads needs six inodes: its directory, four data files and the
    # metadata. The root directory of the disk needs another one.
    options = ("-t", "tmpfs", "-o", f"size=32m,nr_inodes={inodes + 1}", "tmpfs")
    with mounted(tmp_path / "disk", *options) as disk:
        path = disk / "checkpoint"
        assert errno_of_failed_save(path, 4) == errno.ENOSPC
        assert names_in(path) == set()


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", range(5))
def test_a_save_without_descriptors_keeps_the_old_checkpoint(
    server: Server, tmp_path: Path, spare: int
) -> None:
    path = tmp_path / "checkpoint"
    save_alone(str(path), OLD, 4)
    before = names_in(path)
    run = server.run(Order(), tmp_path, save_with_descriptors, str(path), NEW, 4, spare)
    refused = [call for call in run.calls if call.errno == errno.EMFILE]
    if run.error is None:
        assert not refused
        assert found_in(path) == "new"
        return
    assert refused
    assert isinstance(run.error, dcp.CheckpointException)
    assert cause_of(run.error).errno == errno.EMFILE
    assert names_in(path) == before
    assert found_in(path) == "old"


# --- a medium that fails -------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    with failing_disk(tmp_path) as made:
        yield made


def test_the_fsync_after_a_failed_one_succeeds(disk: FailingDisk) -> None:
    # This is why a file must not be used again after a failed fsync.
    file = disk.path / "file"
    file.write_bytes(b"old!" * 1024)
    fd = os.open(file, os.O_RDWR)
    try:
        os.fsync(fd)
        os.pwrite(fd, b"new!" * 1024, 0)
        with disk.failing():
            outcomes = [_fsync(fd)]
        outcomes += [_fsync(fd) for _ in range(3)]
        assert outcomes == ["EIO", "ok", "ok", "ok"]
        assert os.pread(fd, 4, 0) == b"new!"
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(fd, 4, 0) == b"old!"
    finally:
        os.close(fd)


def _fsync(fd: int) -> str:
    try:
        os.fsync(fd)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "ok"


@pytest.mark.parametrize("threads", [1, 4])
def test_a_failed_fsync_is_reported_and_not_repeated(
    server: Server, disk: FailingDisk, threads: int
) -> None:
    path = disk.path / "checkpoint"
    save_alone(str(path), OLD, threads)
    os.sync()
    before = names_in(path)
    with disk.failing():
        run = server.run(Order(), disk.path, save_through_page_cache, str(path), NEW, threads)
        # Check the visible names while the disk still fails.
        assert names_in(path) == before
    assert isinstance(run.error, dcp.CheckpointException)
    cause = cause_of(run.error)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EIO
    fsyncs = [call.path for call in run.of("fsync")]
    assert fsyncs
    assert len(set(fsyncs)) == len(fsyncs)
    assert any(call.errno == errno.EIO for call in run.of("fsync"))
    assert not run.of("rename")
    assert found_in(path) == "old"


@pytest.mark.parametrize("threads", [1, 4])
def test_failed_direct_writes_are_reported(disk: FailingDisk, threads: int) -> None:
    path = disk.path / "checkpoint"
    save_alone(str(path), OLD, threads)
    before = names_in(path)
    with disk.failing():
        assert errno_of_failed_save(path, threads) == errno.EIO
        assert names_in(path) == before
    assert found_in(path) == "old"
