"""A checkpoint's directory, held open, and who works in it.

No lock decides what a checkpoint is: the commit's rename does. The locks (``flock`` of the
directory itself, so that nothing is left behind) only keep files from being removed under
somebody's hands:

1. Who saves or loads shares the directory for as long: one descriptor for each save, of the
   coordinator, and one for each load.
2. Who removes files that no metadata names must have the directory alone; otherwise they stay for
   the next save, or for :func:`torch_ckpt.remove_leftovers`.
3. A process that dies lets go of its locks, once the children have ended that it forked meanwhile.
   Where the file system has no such locks, or keeps them within one machine (some network file
   systems), rule 2 does not protect.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref
from contextlib import suppress

# What flock says where another descriptor holds the lock.
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN)


class OpenDirectory:
    """One open descriptor of a directory. Safe to drop: the descriptor is closed then.

    Args:
        path: of the directory; links on the way to it are followed, since the caller chose it.

    Attributes:
        path: as given.
        fd: the descriptor, for calls that open files beneath it.

    Raises:
        OSError: there is no such directory, or it may not be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, _let_go, self.fd, os.getpid())

    def share(self, patience: float = 10.0) -> bool:
        """Keeps others from removing files that no metadata names any more.

        Args:
            patience: seconds to wait for somebody who has the directory alone, which takes
                milliseconds unless that process is stopped.

        Returns:
            False where that was too short; nothing is kept from anybody then.
        """
        until = time.monotonic() + patience
        while not self._lock(fcntl.LOCK_SH):
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        return True

    def take_alone(self) -> bool:
        """Whether nobody else works in the directory; a share of this descriptor's is given up."""
        return self._lock(fcntl.LOCK_EX)

    def status(self) -> os.stat_result:
        """What fstat says of the directory.

        Raises:
            OSError: it failed; ``filename`` is the path.
        """
        try:
            return os.fstat(self.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None

    def names(self) -> list[str]:
        """What is in the directory, in no order.

        Raises:
            OSError: it cannot be listed; ``filename`` is the path.
        """
        try:
            return os.listdir(self.fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.path) from None

    def sync(self) -> None:
        """fsync of the directory.

        Raises:
            OSError: it failed; ``filename`` is the path.
        """
        try:
            os.fsync(self.fd)
        except OSError as error:
            # Some network file systems have none; their creations are synchronous.
            if error.errno != errno.EINVAL:
                raise OSError(error.errno, error.strerror, self.path) from None

    def remove(self, name: str) -> None:
        """Removes a file; one that is not there is no error.

        Raises:
            OSError: it cannot be removed; ``filename`` is its path.
        """
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            path = os.path.join(self.path, name)
            raise OSError(error.errno, error.strerror, path) from None

    def close(self) -> None:
        """Closes the descriptor and lets go of the lock; once, further calls do nothing."""
        self._close()

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _BUSY
        return True


def _let_go(fd: int, pid: int) -> None:
    # A forked child has the same lock, and would keep it were it not released explicitly; but it is
    # not the child's to release.
    if os.getpid() == pid:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_UN)
    # Nothing was written through it; and a save that has been committed has not failed.
    with suppress(OSError):
        os.close(fd)
