"""Who may write beneath a root: one run at a time.

1. Rank 0 of a run that writes makes a file, holds a ``flock`` of it, and says in it which process
   it is: host, pid, and when the process began. Then it names the file ``.lease``.
2. It touches the file every ten seconds.
3. Who finds a lease asks whether its process lives. On the same host ``/proc`` tells. For another
   host the lock tells where it reaches there. Elsewhere the process lives if the file is touched
   while this one waits, and is dead once the file has not been touched for a minute.
4. The lease of a dead process is replaced: a new file is renamed over it. Looking and replacing are
   done under a ``flock`` of the root itself.
5. A run whose lease was replaced, as by ``takeover=True``, finds another file in its place. Its
   saves fail, the one under way before its commit.

The lease is the process's. Several managers of one process share it. A forked child has none.
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

#: More is not a lease of ours.
_MOST_BYTES = 4096

#: (device, inode) of a file.
_Identity = tuple[int, int]


@dataclass(frozen=True)
class Times:
    """How long things take, in seconds.

    Attributes:
        renew: from one touch of a lease by its run to the next.
        expiry: after which a lease of another host that was not touched is that of a dead run.
        look: between looks at a lease of which nobody knows whether its run lives.
    """

    renew: float = 10.0
    expiry: float = 60.0
    look: float = 1.0


TIMES = Times()


class Lease:
    """One manager's part in its process's lease on a root.

    Used by several threads, but made and released by one.

    Args:
        root: a local directory. None: nothing is held, and every method does nothing.
        takeover: whether the lease of a run that lives is replaced.
        times: see :class:`Times`.
    """

    def __init__(self, root: str | None, *, takeover: bool = False, times: Times = TIMES) -> None:
        self._root = root
        self._takeover = takeover
        self._times = times
        self._held: _Held | None = None

    def take(self) -> None:
        """Takes the lease. If the disk is full, :meth:`require` tries again.

        Raises:
            RootInUse: another run lives.
            OSError: the root cannot be written.
        """
        try:
            self.require()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # The steps can be restored, and a sweep or a deletion may make room.
                LOGGER.warning("the first save tries again to take the lease: %s", error)
                return
            raise OSError(
                error.errno,
                f"nothing can be saved beneath this root ({error}). Use a directory that this "
                "process can write, or pass read_only=True to restore only",
                self._root,
            ) from error

    def require(self) -> None:
        """Returns if this process holds the lease, and takes it first where it has none.

        Raises:
            RootInUse: another run lives, or has taken the lease over; or this is a forked child.
            OSError: the lease cannot be written.
        """
        if self._root is None:
            return
        if self._held is None:
            self._held = _take(self._root, self._takeover, self._times)
        self._held.require()

    def release(self) -> None:
        """Lets go of the lease, and with the last manager removes it; once."""
        held, self._held = self._held, None
        if held is not None:
            held.release()


class _Held:
    """The lease of this process on one root, for as long as it has users."""

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
        _all[self._identity] = self

    def require(self) -> None:
        if os.getpid() != self._pid:
            raise RootInUse(
                f"{os.path.dirname(self._path)}: this process was forked by the run that writes "
                "here, and cannot write beside it"
            )
        other = self._other()
        if other is not None:
            raise RootInUse(
                f"{os.path.dirname(self._path)}: {other} has taken over this root, so this run "
                "saves no more"
            )

    def release(self) -> None:
        with _lock:
            if os.getpid() != self._pid or self.users == 0:
                return
            self.users -= 1
            if self.users > 0:
                return
            _all.pop(self._identity, None)
        self._ends.set()
        root = os.path.dirname(self._path)
        with suppress(OSError), in_turn(root):
            if self._other() is None:
                os.unlink(self._path)
        if self._has_made_root:
            # Nothing was saved where it is empty.
            with suppress(OSError):
                os.rmdir(root)
        with suppress(OSError):
            # Explicitly: a child that was forked without Python's knowledge has the lock, too.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(self._fd)

    def leave_to_parent(self) -> None:
        """In a forked child: the lock stays the parent's."""
        with suppress(OSError):
            os.close(self._fd)

    def _other(self) -> _Found | None:
        """Whose lease is there instead of this one."""
        try:
            there = _Found(self._path)
        except OSError:
            # It was removed by hand, or the file system does not answer: the save will tell.
            return None
        there.close()
        return None if there.identity == self._identity else there

    def _renew(self) -> None:
        while not self._ends.wait(self._renew_seconds):
            with suppress(OSError):
                os.utime(self._fd)


class _Found:
    """A lease that is there.

    Args:
        path: of its file.

    Raises:
        OSError: it is not there, or cannot be read.
    """

    def __init__(self, path: str) -> None:
        # With close-to-open consistency this asks the server.
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

    def lives(self) -> bool | None:
        """Whether the process lives that has it; None: nobody knows yet."""
        if self.identity in _all:
            return True
        process = _Process.of_this()
        if process.where and all(self._record.get(key) == at for key, at in process.where.items()):
            pid = self._record.get("pid")
            # What this process was before it ran another program is dead, too.
            if not isinstance(pid, int) or pid == os.getpid():
                return False
            start = _start_of(pid)
            return start is not None and start == self._record.get("start")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            has_locks = False
        else:
            has_locks = True
        # A run writes it before it gives it its name.
        if not self._record:
            return False
        # The lock is let go of with the descriptor. One kernel knows all of its locks.
        boot = process.where.get("boot")
        return False if has_locks and boot and self._record.get("boot") == boot else None


@dataclass(frozen=True)
class _Process:
    """This process, as a lease names it.

    Attributes:
        where: what is the same for all processes that its pid tells it from; empty where the system
            does not say.
    """

    where: dict[str, str]

    @classmethod
    def of_this(cls) -> _Process:
        try:
            with open("/proc/sys/kernel/random/boot_id") as file:
                boot = file.read().strip()
            # Containers of one machine do not see each other's processes.
            pids = os.readlink("/proc/self/ns/pid")
        except OSError:
            return cls({})
        return cls({"host": socket.gethostname(), "boot": boot, "pids": pids})

    def record(self) -> bytes:
        """The content of a lease."""
        document: dict[str, Any] = {
            "host": socket.gethostname(),
            **self.where,
            "pid": os.getpid(),
            "start": _start_of(os.getpid()),
            "began_at": time.time(),
        }
        return json.dumps(document).encode()


_lock = threading.Lock()
# Of this process.
_all: dict[_Identity, _Held] = {}


def _take(root: str, takeover: bool, times: Times) -> _Held:
    path = os.path.join(root, LEASE_NAME)
    has_made_root = False
    first: _Found | None = None
    begun = time.monotonic()
    while True:
        has_made_root = has_made_root or not os.path.lexists(root)
        _core.make_directories(root)
        try:
            with _lock, in_turn(root):
                waited = time.monotonic() - begun
                taken, found = _look(path, first, waited, takeover, has_made_root, times)
        except FileNotFoundError:
            # Another manager was released meanwhile, perhaps with its root, or was in this turn.
            continue
        if taken is not None:
            return taken
        if first is None:
            first = found
            LOGGER.warning(
                "%s has a lease of %s: waiting for up to %.0f s to learn whether it still runs",
                root,
                found,
                times.expiry,
            )
        _core.fault_point("wait for a lease", path)
        time.sleep(times.look)


def _look(
    path: str,
    first: _Found | None,
    waited: float,
    takeover: bool,
    has_made_root: bool,
    times: Times,
) -> tuple[_Held | None, _Found | None]:
    """The lease, once it is taken; else whose it is while nobody knows whether that lives."""
    try:
        found: _Found | None = _Found(path)
    except FileNotFoundError:
        found = None
    if found is not None and found.identity in _all:
        found.close()
        held = _all[found.identity]
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
            # A file system without locks has the record.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, _Process.of_this().record())
        # Whoever finds it by its name, be it after a crash of the machine, finds it whole.
        os.fsync(fd)
        if found is not None:
            lives = found.lives()
            if lives is None and first is not None and found.identity == first.identity:
                lives = True if found.touched_at != first.touched_at else None
            if lives is None and (
                waited > times.expiry
                # Both by the file system's clock.
                or os.fstat(fd).st_mtime - found.touched_at > times.expiry
            ):
                lives = False
            if lives and not takeover:
                raise RootInUse(
                    f"{os.path.dirname(path)}: another run writes here, {found}. Wait for its end, "
                    "or use another root; CheckpointManager(..., takeover=True) ends its saves"
                )
            if lives is None and not takeover:
                os.close(fd)
                os.unlink(temporary)
                return None, found
        os.rename(temporary, path)
        temporary = path
        return _Held(path, fd, has_made_root, times.renew), None
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
    """Removes what processes have left that were killed while they took the lease.

    Nobody is in that by now; where the root has no locks, whoever is begins anew.
    """
    root, name = os.path.split(path)
    for other in os.listdir(root):
        if re.fullmatch(rf"{re.escape(name)}\.[0-9a-f]{{8}}", other):
            with suppress(OSError):
                os.unlink(os.path.join(root, other))


@contextmanager
def in_turn(root: str | OpenDirectory) -> Iterator[bool]:
    """A block that one thread of one process at a time runs, where the file system has locks.

    Yields:
        False if another one has kept its turn for a second, and this one goes on beside it.
    """
    with closing(OpenDirectory(root) if isinstance(root, str) else root.reopen()) as opened:
        until = time.monotonic() + TIMES.look
        while not (has_turn := _has_turn(opened)) and time.monotonic() < until:
            time.sleep(0.005)
        yield has_turn


def _has_turn(root: OpenDirectory) -> bool:
    """True on a file system without locks, where the record of the lease decides."""
    return root.try_lock_exclusive() or not root.has_locks


def _identity(status: os.stat_result) -> _Identity:
    return status.st_dev, status.st_ino


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _start_of(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None where it does not run."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may hold anything.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    # A zombie writes nothing more.
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _release_all() -> None:
    for held in list(_all.values()):
        held.users = 1
        held.release()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    for held in _all.values():
        held.leave_to_parent()
    _all.clear()


register(Part.LEASES, at_exit=_release_all, in_child=_forget_in_child)
