"""Keeps the lease on a local root in a file, ``.lease``.

1. The file is JSON. A run writes and fsyncs a temporary file, locks it with flock, and renames it
   under a lock on the root (csrc/directory/root_lock.h). A file is never changed afterwards, so a
   crash leaves the old record or the new one. A run removes the temporary files of others that are
   a minute old and not locked.
2. The modification time of the file is the heartbeat. Its clock is that of the file system.
3. On the same host, /proc shows whether a process is alive. For another container or host, the lock
   on the file does if the file system shares locks; the kernel releases the lock when the process
   ends.
4. Version 0.1 wrote ``host``, ``boot``, ``pids``, ``pid``, ``start`` and ``began_at``, and removed
   the file at the end of a run. A held record has these fields, too, so version 0.1 refuses to
   write while another run is active. A released record has them in a nested object, which version
   0.1 treats as the lease of a dead run.
5. On a network file system, the lock of 1 may not exclude other hosts, and a host may not see a
   new file for some time. So a run that takes the lease first claims its epoch: it creates an empty
   file ``.lease.epoch-N``, which only one run can create. Then it reads the record again. If the
   record has changed, the run removes its claim. A run that finds a claim waits for the record of
   that epoch. A claim without a record after a minute is abandoned, and the next run takes the next
   epoch. While there are claims, a missing record counts as missing only after 30 seconds. A run
   that has taken the lease removes the claims before the previous epoch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from typing import Any

from torch_ckpt import _core
from torch_ckpt.checkpoint.marker import newest_epoch
from torch_ckpt.checkpoint.shared_directory import create_if_absent
from torch_ckpt.errors import RootInUse
from torch_ckpt.steps.lease_protocol import (
    LEASE_NAME,
    LeaseRecord,
    StoredRecord,
    is_alive_on_this_host,
)

#: Fields that identify a process.
_PROCESS_FIELDS = ("host", "boot", "pids", "pid", "start", "began_at")

# A longer file was not written by torch_ckpt.
_MOST_BYTES = 16 << 10

_CLAIM_NAME = re.compile(rf"{re.escape(LEASE_NAME)}\.epoch-([1-9][0-9]{{0,18}})")

# Seconds until a claim or a temporary file is abandoned, until a missing record is missing, and
# between two looks.
_ABANDONED_SECONDS, _STALE_SECONDS, _PAUSE_SECONDS = 60.0, 30.0, 0.1

_TEMPORARY_NAME = re.compile(rf"{re.escape(LEASE_NAME)}\.[0-9a-f]{{8}}")

# A process holds the lock on the root while it renames a step, and fsyncs the root.
_LOCK_SECONDS = 30.0


class LeaseFile:
    """The lease on a local root.

    Attributes:
        has_made_root: True if this object has created the root.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.has_made_root = False
        self._fd = -1  # the lease of this process, locked
        self._abandoned = 0  # the greatest epoch whose claim was abandoned

    def within(self, seconds: float) -> LeaseFile:
        return self

    def newest_epoch(self) -> int:
        return max(self._abandoned, newest_epoch(self.root))

    def read(self) -> StoredRecord | None:
        try:
            directory = _core.Directory(self.root)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _read_in(directory)
        finally:
            directory.close()

    def compare_and_swap(
        self, expected: StoredRecord | None, record: LeaseRecord
    ) -> StoredRecord | None:
        if expected is not None and expected.record == record:
            # Only the process that holds the lease renews it. If another run has replaced the file,
            # this changes the time of the old one.
            os.utime(self._fd)
            return expected
        while True:
            try:
                directory = self._open_root()
                try:
                    return self._swap(directory, expected, record)
                finally:
                    directory.close()
            except FileNotFoundError:
                # Another run has removed the root that it had created, or this temporary file.
                continue

    def is_alive(self, found: StoredRecord) -> bool | None:
        is_alive = is_alive_on_this_host(found.record)
        if is_alive is not None:
            return is_alive
        is_locked = self._is_locked(found)
        if is_locked:
            return True
        boot = _core.own_process()["boot"]
        is_on_this_boot = bool(boot) and found.record.process.get("boot") == boot
        # A kernel knows all locks of its own processes, but may not see the locks of other hosts.
        return False if is_locked is False and is_on_this_boot else None

    def age(self, found: StoredRecord) -> float | None:
        """See :class:`LeaseStore`. Creates a file, to read the clock of the file system."""
        directory = self._open_root()
        try:
            with _temporary(directory) as (_name, fd):
                now = os.fstat(fd).st_mtime_ns
        finally:
            directory.close()
        return float(now - found.heartbeat) / 1e9

    def release(self) -> None:
        """Unlocks the lease of this process. Removes the root if this object has created it, no
        other run has ever held its lease, it has no other file, as on a network file system, and no
        process holds the lock on it."""
        self.close()
        if not self.has_made_root:
            return
        with contextlib.suppress(OSError, RootInUse):
            directory = _core.Directory(self.root)
            try:
                with locked(directory, 0.0):
                    found = _read(directory)
                    is_unused = not found.record.is_held and found.record.epoch == 1
                    if is_unused and directory.names() == [LEASE_NAME]:
                        os.unlink(LEASE_NAME, dir_fd=directory.fd)
                        os.rmdir(self.root)
            finally:
                directory.close()

    def close(self, *, unlock: bool = True) -> None:
        """Closes the file. A forked child does not unlock it."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        if unlock:
            # Unlock explicitly: a child forked by native code still has the file open.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)

    # --- private ---------------------------------------------------------------------------------

    def _open_root(self) -> _core.Directory:
        while True:
            try:
                return _core.Directory(self.root)
            except FileNotFoundError:
                _core.make_directories(self.root)
                self.has_made_root = True

    def _swap(
        self, directory: _core.Directory, expected: StoredRecord | None, record: LeaseRecord
    ) -> StoredRecord | None:
        with _temporary(directory) as (name, fd):
            _remove_leftovers(directory, fd)
            data = encode(record)
            path = os.path.join(self.root, name)
            _core.fault_point("pwrite", path)
            written = os.write(fd, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            # No process may ever find an incomplete lease, even after the machine has crashed.
            _core.fault_point("fsync", path)
            os.fsync(fd)
            is_new = expected is None or expected.record.epoch != record.epoch
            claim = "" if directory.is_local or not is_new else _claim_of(record.epoch)
            if claim and not self._claim(directory, claim, fd):
                return None
            with contextlib.ExitStack() as undo:
                if claim:
                    undo.callback(_remove, directory, claim)
                with locked(directory):
                    found = _read_in(directory, wait=not claim)
                    if (found and found.version) != (expected and expected.version):
                        return None
                    _core.fault_point("rename", os.path.join(self.root, LEASE_NAME))
                    os.rename(name, LEASE_NAME, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
                undo.pop_all()
            if claim:
                _remove_claims(directory, record.epoch - 1)
            stored = _stored(fd, data)
            self.close()
            if record.is_held:
                self._fd = os.dup(fd)
            return stored

    def _claim(self, directory: _core.Directory, name: str, fd: int) -> bool:
        """Claims an epoch. Returns False if another run has claimed it.

        Args:
            name: name of the claim.
            fd: a new file, which has the time of the file system.
        """
        path = os.path.join(self.root, name)
        _core.fault_point("open", path)
        if create_if_absent(directory, name):
            return True
        with contextlib.suppress(FileNotFoundError):
            if _is_abandoned(os.stat(name, dir_fd=directory.fd, follow_symlinks=False), fd):
                self._abandoned = max(self._abandoned, _epoch_of_claim(name))
                return False
        _core.fault_point("wait for a lease", path)
        time.sleep(_PAUSE_SECONDS)
        return False

    def _is_locked(self, found: StoredRecord) -> bool | None:
        """Returns None if the file system has no locks, or the file was replaced."""
        try:
            fd = os.open(os.path.join(self.root, LEASE_NAME), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if _stored(fd, os.read(fd, _MOST_BYTES)).version != found.version:
                return None
            # Closing the file releases the lock. It does not exclude another process that tests it.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
        finally:
            os.close(fd)
        return False


def encode(record: LeaseRecord) -> bytes:
    """Encodes a record."""
    process: dict[str, Any] = dict(record.process)
    if not record.is_held:
        process = {"process": process}
    state = "held" if record.is_held else "released"
    return json.dumps(
        {**process, "epoch": record.epoch, "run": record.run, "state": state}
    ).encode()


def decode(data: bytes) -> LeaseRecord:
    """Decodes a record. Anything else counts as a lease that was released in epoch 0."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = {}
    if not isinstance(document, dict):
        document = {}
    nested = document.get("process")
    process = nested if isinstance(nested, dict) else document
    process = {
        name: process[name]
        for name in _PROCESS_FIELDS
        if isinstance(process.get(name), str | int | float)
    }
    epoch, run = document.get("epoch"), document.get("run")
    return LeaseRecord(
        epoch if type(epoch) is int and epoch > 0 else 0,
        run if isinstance(run, str) else "",
        bool(process) and document.get("state") != "released",
        process,
    )


def _read(directory: _core.Directory) -> StoredRecord:
    directory.refresh(LEASE_NAME)
    # On NFS, opening the file revalidates its cached contents and attributes.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(LEASE_NAME, flags, dir_fd=directory.fd)
    try:
        return _stored(fd, os.read(fd, _MOST_BYTES))
    finally:
        os.close(fd)


def _read_in(directory: _core.Directory, *, wait: bool = True) -> StoredRecord | None:
    """Reads the record; None if there is none.

    Args:
        wait: wait for a record that a claim announces, because another host may have written it.
    """
    give_up = time.monotonic() + (0.0 if directory.is_local or not wait else _STALE_SECONDS)
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _read(directory)
        if time.monotonic() >= give_up or not any(map(_CLAIM_NAME.fullmatch, directory.names())):
            return None
        time.sleep(_PAUSE_SECONDS)


def _claim_of(epoch: int) -> str:
    return f"{LEASE_NAME}.epoch-{epoch}"


def _epoch_of_claim(name: str) -> int:
    """Returns the epoch that a file claims; 0 if the file is no claim."""
    match = _CLAIM_NAME.fullmatch(name)
    return int(match[1]) if match else 0


def _remove_claims(directory: _core.Directory, before: int) -> None:
    for name in directory.names():
        if 0 < _epoch_of_claim(name) < before:
            _remove(directory, name)


def _stored(fd: int, data: bytes) -> StoredRecord:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"{LEASE_NAME} is not a regular file. Remove it")
    return StoredRecord(decode(data), data, status.st_mtime_ns)


@contextlib.contextmanager
def _temporary(directory: _core.Directory) -> Iterator[tuple[str, int]]:
    """Creates a temporary file in the root and locks it. Removes the file unless it is renamed."""
    name = f"{LEASE_NAME}.{secrets.token_hex(4)}"
    _core.fault_point("open", os.path.join(directory.path, name))
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(name, flags, 0o666, dir_fd=directory.fd)
    try:
        # Ignore a file system without locks: the record then has to suffice.
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield name, fd
    finally:
        os.close(fd)
        _remove(directory, name)


def _remove(directory: _core.Directory, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory.fd)


@contextlib.contextmanager
def locked(directory: _core.Directory, seconds: float | None = None) -> Iterator[None]:
    """Block that holds the lock on a root (csrc/directory/root_lock.h).

    Args:
        seconds: how long to wait for another process; None for 30 seconds.

    Raises:
        RootInUse: another process has held the lock for so long.
    """
    seconds = _LOCK_SECONDS if seconds is None else seconds
    lock = _core.RootLock(directory, seconds)
    try:
        if not lock.is_held:
            raise RootInUse(
                f"{directory.path}: another process has held the lock on this root for "
                f"{seconds:.0f} s. Check that the process is not stopped; end it to free the "
                "root."
            )
        yield
    finally:
        lock.release()


def _remove_leftovers(directory: _core.Directory, fd: int) -> None:
    """Removes the temporary files of processes that were killed.

    Args:
        fd: see :func:`_is_abandoned`.
    """
    for name in filter(_TEMPORARY_NAME.fullmatch, directory.names()):
        with contextlib.suppress(OSError):
            leftover = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=directory.fd)
            try:
                # A process locks its file only after it has created it.
                if _is_abandoned(os.fstat(leftover), fd):
                    fcntl.flock(leftover, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=directory.fd)
            finally:
                os.close(leftover)


def _is_abandoned(status: os.stat_result, fd: int) -> bool:
    """Returns True if a file is so old that its process must have ended.

    Args:
        fd: a new file, which has the time of the file system.
    """
    return os.fstat(fd).st_mtime_ns - status.st_mtime_ns > _ABANDONED_SECONDS * 1e9
