"""The lease on a root: only one run at a time may write beneath the root.

1. Rank 0 of a run that writes creates a file, locks it with ``flock``, and records its identity in
   it (host, pid and start time). It then renames the file to ``.lease``.
2. It touches the file every ten seconds.
3. A process that finds a lease checks whether the lease's owner is alive. On the same host, it
   reads ``/proc``. For another host, it tests the lock if the file system shares locks between
   hosts. Otherwise, the owner is alive if it touches the file while this process waits, and dead
   once the file has not been touched for a minute.
4. If the owner is dead, its lease is replaced: a new file is renamed over it. The check and the
   rename happen under a ``flock`` on the root itself.
5. A run whose lease was replaced, for example by ``takeover=True``, finds another file in its
   place. Its saves fail; a save in progress fails before it commits.

A lease belongs to a process. Several managers in one process share it. A forked child has none.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.errors import RootInUse

LEASE_NAME = ".lease"

# Size limit of a lease. A longer file was not written by torch_ckpt.
_MOST_BYTES = 4096

#: (device, inode) of a file.
_Identity = tuple[int, int]


@dataclass(frozen=True)
class Times:
    """Intervals in seconds.

    Attributes:
        renew: time between two touches of a lease by its run.
        expiry: time without a touch after which a lease from another host counts as dead.
        poll: time between two checks of a lease while it is unknown whether its run is alive.
    """

    renew: float = 10.0
    expiry: float = 60.0
    poll: float = 1.0


TIMES = Times()


class Lease:
    """One manager's share of its process's lease on a root.

    Several threads may use the object, but the same thread must create and release it.

    Args:
        root: a local directory. If it is None, there is no lease, and the methods do nothing.
        takeover: replace the lease of a running job.
        times: see :class:`Times`.
    """

    def __init__(self, root: str | None, *, takeover: bool = False, times: Times = TIMES) -> None:
        self._root = root
        self._takeover = takeover
        self._times = times
        self._held: _ProcessLease | None = None

    def take(self) -> None:
        """Takes the lease. If the disk is full, the next :meth:`require` tries again.

        Raises:
            RootInUse: another running job holds the lease.
            OSError: the root is not writable.
        """
        try:
            self.require()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # Restoring needs no lease, and a sweep or a deletion may make room.
                LOGGER.warning(
                    "%s: the lease could not be taken (%s). The first save will try again.",
                    self._root,
                    error,
                )
                return
            raise OSError(
                error.errno,
                f"nothing can be saved beneath this root ({error}). Use a directory that this "
                "process can write to, or pass read_only=True if you only need to restore",
                self._root,
            ) from error

    def require(self) -> None:
        """Checks that this process holds the lease. Takes the lease first if necessary.

        Raises:
            RootInUse: another running job holds the lease or has taken it over, or this process is
                a forked child.
            OSError: the lease cannot be written.
        """
        if self._root is None:
            return
        if self._held is None:
            self._held = _take(self._root, self._takeover, self._times)
        self._held.require()

    def release(self) -> None:
        """Releases this manager's share. Releasing the process's last share removes the lease."""
        held, self._held = self._held, None
        if held is not None:
            held.release()


class _ProcessLease:
    """The lease of this process on one root, shared by several managers."""

    def __init__(self, path: str, fd: int, has_made_root: bool, renew_seconds: float) -> None:
        self.users = 1
        self._renew_seconds = renew_seconds
        self._path = path
        self._fd = fd
        self._has_made_root = has_made_root
        self._identity = _identity(os.fstat(fd))
        self._pid = os.getpid()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="torch_ckpt lease", daemon=True)
        self._thread.start()
        _leases[self._identity] = self

    def require(self) -> None:
        if os.getpid() != self._pid:
            raise RootInUse(
                f"{os.path.dirname(self._path)}: this process is a forked child of process "
                f"{self._pid}, which holds the lease. Save in the parent, or use another root."
            )
        other = self._other()
        if other is not None:
            raise RootInUse(
                f"{os.path.dirname(self._path)}: {other} has taken over this root. This run can no "
                "longer save to it."
            )

    def release(self) -> None:
        with _lock:
            if os.getpid() != self._pid or self.users == 0:
                return
            self.users -= 1
            if self.users > 0:
                return
            _leases.pop(self._identity, None)
        self._ends.set()
        root = os.path.dirname(self._path)
        with suppress(OSError), locked_root(root):
            if self._other() is None:
                os.unlink(self._path)
        if self._has_made_root:
            # If a step was saved, rmdir() fails, as it should.
            with suppress(OSError):
                os.rmdir(root)
        with suppress(OSError):
            # Unlock explicitly: a child forked by native code still has the descriptor open.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(self._fd)

    def leave_to_parent(self) -> None:
        """Closes the descriptor in a forked child. The lock stays with the parent."""
        with suppress(OSError):
            os.close(self._fd)

    def _other(self) -> _ExistingLease | None:
        """Returns the lease that has replaced this one; None if it was not replaced."""
        try:
            existing = _ExistingLease(self._path)
        except OSError:
            # Either a user has removed the file, or the file system is failing, and so will the
            # save.
            return None
        existing.close()
        return None if existing.identity == self._identity else existing

    def _renew(self) -> None:
        while not self._ends.wait(self._renew_seconds):
            with suppress(OSError):
                os.utime(self._fd)


class _ExistingLease:
    """A lease found in a root. This process or another one holds it.

    Args:
        path: path of the lease.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """

    def __init__(self, path: str) -> None:
        # On NFS, opening the file revalidates its cached attributes.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(self._fd)
            self.identity = _identity(status)
            self.touched_at = status.st_mtime
            self._record = _parsed(os.read(self._fd, _MOST_BYTES))
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        record = self._record
        began = record.get("began_at")
        since = f", since {time.ctime(began)}" if isinstance(began, int | float) else ""
        return f"process {record.get('pid', '?')} on host {record.get('host', '?')}{since}"

    def close(self) -> None:
        os.close(self._fd)

    def is_alive(self) -> bool | None:
        """True if the process that holds the lease is alive; None if that is still unknown."""
        if self.identity in _leases:
            return True
        process = _Process.of_this()
        namespace = process.namespace
        if namespace and all(self._record.get(key) == value for key, value in namespace.items()):
            pid = self._record.get("pid")
            # The pid is this process's, but _leases lacks the lease: after taking it, the process
            # has replaced its program by exec.
            if not isinstance(pid, int) or pid == os.getpid():
                return False
            start = _start_time(pid)
            return start is not None and start == self._record.get("start")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            has_locks = False
        else:
            has_locks = True
        # A run writes the record before it renames the file, so no run has written an empty one.
        if not self._record:
            return False
        # The lock was free; closing the descriptor releases it again. A kernel knows all locks of
        # its own processes, but may not see locks held on other hosts.
        boot = process.namespace.get("boot")
        return False if has_locks and boot and self._record.get("boot") == boot else None


@dataclass(frozen=True)
class _Process:
    """This process, as recorded in a lease.

    Attributes:
        namespace: identifies the host, its boot and its pid namespace, within which pids are
            unique; empty if the system does not provide them.
    """

    namespace: dict[str, str]

    @classmethod
    def of_this(cls) -> _Process:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            # Containers on one machine have separate pid namespaces.
            pids = os.readlink("/proc/self/ns/pid")
        except OSError:
            return cls({})
        return cls({"host": socket.gethostname(), "boot": boot, "pids": pids})

    def record(self) -> bytes:
        """Returns the content of this process's lease."""
        document: dict[str, Any] = {
            "host": socket.gethostname(),
            **self.namespace,
            "pid": os.getpid(),
            "start": _start_time(os.getpid()),
            "began_at": time.time(),
        }
        return json.dumps(document).encode()


_lock = threading.Lock()
# The leases that this process holds.
_leases: dict[_Identity, _ProcessLease] = {}


def _take(root: str, takeover: bool, times: Times) -> _ProcessLease:
    path = os.path.join(root, LEASE_NAME)
    has_made_root = False
    first: _ExistingLease | None = None
    started = time.monotonic()
    while True:
        has_made_root = has_made_root or not os.path.lexists(root)
        _core.make_directories(root)
        try:
            with _lock, locked_root(root):
                waited = time.monotonic() - started
                taken, found = _try_take(path, first, waited, takeover, has_made_root, times)
        except FileNotFoundError:
            # Another manager has removed its lease or the root. On a file system without locks, it
            # may also have removed this manager's temporary file.
            continue
        if taken is not None:
            return taken
        if first is None:
            first = found
            LOGGER.warning(
                "%s has a lease held by %s. Waiting up to %.0f s to determine whether that process "
                "is still running",
                root,
                found,
                times.expiry,
            )
        _core.fault_point("wait for a lease", path)
        time.sleep(times.poll)


def _try_take(
    path: str,
    first: _ExistingLease | None,
    waited: float,
    takeover: bool,
    has_made_root: bool,
    times: Times,
) -> tuple[_ProcessLease | None, _ExistingLease | None]:
    """Takes the lease, or a share of the lease that this process already holds.

    Args:
        first: the lease found by the first try.
        waited: seconds since the first try.

    Returns:
        The lease if it was taken. Otherwise the existing lease, whose process may still be alive.
    """
    try:
        found: _ExistingLease | None = _ExistingLease(path)
    except FileNotFoundError:
        found = None
    if found is not None and found.identity in _leases:
        found.close()
        held = _leases[found.identity]
        held.users += 1
        return held, None
    _remove_temporaries(path)
    temporary = f"{path}.{uuid.uuid4().hex[:8]}"
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except BaseException:
        if found is not None:
            found.close()
        raise
    try:
        with suppress(OSError):
            # On a file system without locks, the record in the file has to suffice.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, _Process.of_this().record())
        # No process may ever find an incomplete lease, even after the machine has crashed.
        os.fsync(fd)
        if found is not None:
            is_alive = found.is_alive()
            if is_alive is None and first is not None and found.identity == first.identity:
                is_alive = True if found.touched_at != first.touched_at else None
            if is_alive is None and (
                waited > times.expiry
                # Both times are from the file system's clock.
                or os.fstat(fd).st_mtime - found.touched_at > times.expiry
            ):
                is_alive = False
            if is_alive and not takeover:
                raise RootInUse(
                    f"{os.path.dirname(path)}: another run is writing to this root: {found}. Wait "
                    "until it has ended, or use another root. To take over the root and make the "
                    "other run's saves fail, pass takeover=True to CheckpointManager."
                )
            if is_alive is None and not takeover:
                os.close(fd)
                os.unlink(temporary)
                return None, found
        os.rename(temporary, path)
        temporary = path
        return _ProcessLease(path, fd, has_made_root, times.renew), None
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        with suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        if found is not None:
            found.close()


def _remove_temporaries(path: str) -> None:
    """Removes the temporary files of processes that were killed while taking the lease.

    The caller holds the lock on the root, so no other process is taking the lease now. On a file
    system without locks, another process may lose its temporary file. It then tries again.
    """
    root, name = os.path.split(path)
    for other in os.listdir(root):
        if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{8}}", other):
            with suppress(OSError):
                os.unlink(os.path.join(root, other))


@contextmanager
def locked_root(root: str | OpenDirectory) -> Iterator[bool]:
    """Locks a root against other threads and processes, if the file system has locks.

    Yields:
        False if another thread or process has held the lock for a second. The block then runs
        without the lock.
    """
    with closing(OpenDirectory(root) if isinstance(root, str) else root.reopen()) as opened:
        until = time.monotonic() + TIMES.poll
        while not (is_locked := _try_lock(opened)) and time.monotonic() < until:
            time.sleep(0.005)
        yield is_locked


def _try_lock(root: OpenDirectory) -> bool:
    """Tries to lock a root. Also returns True if the file system has no locks: the record in the
    lease then has to suffice."""
    return root.try_lock_exclusive() or not root.has_locks


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _start_time(pid: int) -> str | None:
    """Returns the start time of a process, in clock ticks since boot; None if it is not running."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The process name in parentheses may contain any character.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # A zombie no longer writes.
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _release_all() -> None:
    for held in list(_leases.values()):
        held.users = 1
        held.release()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for held in _leases.values():
        held.leave_to_parent()
    _leases.clear()


register(Part.LEASES, at_exit=_release_all, in_child=_forget_in_child)
