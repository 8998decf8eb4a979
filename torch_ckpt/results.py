"""The way of a save's results to the process that asked for it.

In one process it is a queue in memory. What a forked or a spawned child puts goes through a file,
so that nobody has to listen, and no other process is needed:

1. The process that makes the queue owns it. It makes one directory that only its user may enter.
2. A child writes what it puts to a file of its own there, and renames it to the queue's next name.
3. The owner takes what was put in memory, then the files, oldest first.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import queue
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections import deque
from multiprocessing import util
from pathlib import Path
from typing import Any, ClassVar

# How often a blocking get looks for files.
_LOOK_SECONDS = 0.02

# Of what this process puts, by all its queues: two of them may be the same one.
_numbers = itertools.count()


class _Place:
    """The directory that the queues of a process share; one that was forked has another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: str | None = None
        self._pid = 0

    def path(self) -> str:
        with self._lock:
            if self._path is None or self._pid != os.getpid():
                self._path = tempfile.mkdtemp(prefix="torch_ckpt-")
                self._pid = os.getpid()
                # Children of multiprocessing end without atexit, but not without this. After those
                # of this process have been joined, which may put until then.
                util.Finalize(None, _remove, args=(self._path, self._pid), exitpriority=-1)
            return self._path

    def forget(self) -> None:
        """In a forked child: the lock may have been held."""
        self._lock = threading.Lock()


_place = _Place()
os.register_at_fork(after_in_child=_place.forget)


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def place_for_files(name: str | None = None) -> str:
    """A path that nobody has, in a directory that goes when this process ends."""
    return os.path.join(_place.path(), name or uuid.uuid4().hex)


class ResultsQueue:
    """A queue to which children may put and from which its owner takes.

    It can be pickled, by a plain pickle too: what arrives in another process is the way back. Safe
    for use by several threads.
    """

    # Of this process, by name: one that was pickled and comes back is the same.
    _owned: ClassVar[weakref.WeakValueDictionary[str, ResultsQueue]] = weakref.WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._become(os.getpid(), uuid.uuid4().hex)

    def __reduce__(self) -> tuple[Any, ...]:
        self._publish()
        return _queue_of, (self._owner, self._name, self._path)

    def _become(self, owner: int, name: str, path: str | None = None) -> None:
        self._owner = owner
        self._name = name
        self._path = path  # None: no other process can have heard of it
        self._items: deque[Any] = deque()
        self._arrived = threading.Condition()
        if owner == os.getpid():
            with self._lock:
                self._owned[name] = self

    def _publish(self) -> None:
        """Makes it one that other processes can put to."""
        if self._path is None:
            self._path = place_for_files(self._name)

    @classmethod
    def before_fork(cls) -> None:
        """The child may put to each of them."""
        with cls._lock:
            owned = list(cls._owned.values())
        for each in owned:
            # Without a place the child is the one to say so, if it puts anything.
            with contextlib.suppress(OSError):
                each._publish()

    @classmethod
    def after_fork(cls) -> None:
        """In the child: another thread of the parent may have held the lock."""
        cls._lock = threading.Lock()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an item; never waits.

        Raises:
            OSError: this is a child, and the directory of its parent is gone or full.
        """
        if self._owner == os.getpid():
            with self._arrived:
                self._items.append(item)
                self._arrived.notify_all()
            return
        if self._path is None:
            raise OSError(errno.ENOENT, "the parent had no temporary directory for results")
        # Names sort by a time that all processes of the machine have and nobody sets; of one child
        # they are unique.
        name = f"{self._path}.{time.monotonic_ns():020}.{os.getpid()}.{next(_numbers):020}"
        if is_alive(self._owner):
            # Somebody may tidy up temporary directories.
            os.makedirs(os.path.dirname(name), mode=0o700, exist_ok=True)
        with open(f"{name}.part", "wb") as file:
            pickle.dump(item, file)
        os.rename(f"{name}.part", name)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes the oldest item.

        Raises:
            queue.Empty: there is none, or none came within ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._arrived:
            while True:
                if self._items:
                    return self._items.popleft()
                for file in self._files():
                    data = file.read_bytes()
                    # Before it is read: one that cannot be is not met again.
                    file.unlink()
                    return pickle.loads(data)
                if not block or (deadline is not None and time.monotonic() >= deadline):
                    raise queue.Empty
                self._arrived.wait(_LOOK_SECONDS)

    def get_nowait(self) -> Any:
        """Takes the oldest item; ``queue.Empty`` where there is none."""
        return self.get(block=False)

    def qsize(self) -> int:
        """How many items there are."""
        return len(self._items) + len(self._files())

    def empty(self) -> bool:
        """Whether there is none."""
        return self.qsize() == 0

    def _files(self) -> list[Path]:
        if self._path is None:
            return []
        here = Path(self._path)
        files = here.parent.glob(f"{here.name}.*")
        return sorted(file for file in files if file.suffix != ".part")


os.register_at_fork(before=ResultsQueue.before_fork, after_in_child=ResultsQueue.after_fork)


def _queue_of(owner: int, name: str, path: str) -> ResultsQueue:
    known = ResultsQueue._owned.get(name) if owner == os.getpid() else None
    if known is None:
        known = ResultsQueue.__new__(ResultsQueue)
        known._become(owner, name, path)
    return known


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
