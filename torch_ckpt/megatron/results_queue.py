"""The queue through which a save's results come back to the process that asked for it.

In one process it is a queue in memory. What a forked or a spawned child puts comes through a
channel of the engine's (csrc/engine/process_channel.h), so that no other process is needed and
nobody has to listen.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import time
import uuid
import weakref
from collections import deque
from typing import Any, ClassVar, NamedTuple

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import Part, register
from torch_ckpt.errors import CheckpointError


class _Pickled(NamedTuple):
    """An item of another process, as it came."""

    data: bytes


class ResultsQueue:
    """A queue to which children may put and from which the process that made it takes.

    It can be pickled, by a plain pickle too: what arrives in another process is the way back, for
    as long as its owner keeps the queue. Safe for use by several threads.
    """

    # Of this process, by name: one that was pickled and comes back is the same.
    _owned: ClassVar[weakref.WeakValueDictionary[str, ResultsQueue]] = weakref.WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._become(os.getpid(), uuid.uuid4().hex, None)
        with self._lock:
            self._owned[self._name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _queue_of, (self._owner, self._name, self._publish().address)

    def _become(self, owner: int, name: str, channel: _core.ProcessChannel | None) -> None:
        self._owner = owner
        self._name = name
        self._channel = channel  # None: no other process can have heard of it
        self._items: deque[Any] = deque()
        # Reentrant: the collector may drop what pickles a queue while it is held.
        self._items_lock = threading.RLock()

    def _publish(self) -> _core.ProcessChannel:
        """Makes it one that other processes can put to."""
        if self._channel is None:
            if self._owner != os.getpid():
                raise CheckpointError(
                    f"process {self._owner} had no memory or no descriptors for a channel to "
                    "its children when it forked this one"
                )
            with self._items_lock:
                self._channel = self._channel or _core.ProcessChannel()
        return self._channel

    @classmethod
    def before_fork(cls) -> None:
        """The child may put to each of them."""
        with cls._lock:
            owned = list(cls._owned.values())
        for each in owned:
            # Without a channel the child is the one to say so, if it puts anything.
            with contextlib.suppress(OSError):
                each._publish()

    @classmethod
    def after_fork(cls) -> None:
        """In the child: another thread of the parent may have held the lock."""
        cls._lock = threading.Lock()

    def begin(self, what: str) -> None:
        """Tells that this process is going to put an item, which is missed if it dies before.

        Args:
            what: it is going to do, for the message.

        Raises:
            OSError: the owner is gone, or has no memory.
        """
        if self._owner != os.getpid():
            self._publish().begin(what)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an item; never waits for anybody to take it.

        Raises:
            OSError: this is another process than the owner, which is gone or has no memory.
        """
        if self._owner != os.getpid():
            self._publish().send_object(pickle.dumps(item))
            return
        with self._items_lock:
            self._items.append(item)
            if self._channel is not None:
                self._channel.wake()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes the oldest item; in the process that made the queue.

        Instead of an item that a process owes and that has died there is a CheckpointError.

        Raises:
            queue.Empty: there is none, or none came within ``timeout`` seconds.
            CheckpointError: another process made the queue.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._items_lock:
                self._receive()
                if self._items:
                    item = self._items.popleft()
                    if self._items and self._channel is not None:
                        self._channel.wake()  # another thread may wait
                    break
                rest = 3600.0 if deadline is None else deadline - time.monotonic()
                if not block or rest <= 0:
                    raise queue.Empty
                # Whoever puts from now on wakes it.
                channel = self._publish()
            channel.wait(rest)
        return pickle.loads(item.data) if isinstance(item, _Pickled) else item

    def get_nowait(self) -> Any:
        """Takes the oldest item; ``queue.Empty`` where there is none."""
        return self.get(block=False)

    def qsize(self) -> int:
        """How many items there are."""
        with self._items_lock:
            self._receive()
            return len(self._items)

    def empty(self) -> bool:
        """Whether there is none."""
        return self.qsize() == 0

    def _receive(self) -> None:
        if self._owner != os.getpid():
            raise CheckpointError(f"only process {self._owner}, which made this queue, takes of it")
        if self._channel is None:
            return
        self._items.extend(map(_Pickled, self._channel.take_objects()))
        for process, what in self._channel.take_missed():
            self._items.append(
                CheckpointError(
                    f"process {process} has ended before it sent its result ({what}); look "
                    "whether it was killed, as for want of memory"
                )
            )


register(Part.RESULTS, before_fork=ResultsQueue.before_fork, in_child=ResultsQueue.after_fork)


def _queue_of(owner: int, name: str, address: _core.ChannelAddress) -> ResultsQueue:
    known = ResultsQueue._owned.get(name) if owner == os.getpid() else None
    if known is None:
        known = ResultsQueue.__new__(ResultsQueue)
        known._become(owner, name, _core.ProcessChannel.at(address))
    return known


_queue: ResultsQueue | None = None


def get_write_results_queue(mp_mode: str = "spawn") -> ResultsQueue:
    """A queue of this process to which its children may put. Writers have queues of their own.

    Args:
        mp_mode: accepted as Megatron's; children of any kind may use it.
    """
    global _queue
    if _queue is None:
        _queue = ResultsQueue()
    return _queue
