"""Queue that returns the results of a save to the process that requested it.

Within one process, it is an in-memory queue. Items from a forked or spawned child arrive through a
channel of the engine (csrc/engine/process_channel.h), without a manager process or a listening
thread.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import threading
import time
import uuid
from collections import deque
from typing import Any, ClassVar, NamedTuple

from torch_ckpt import _core
from torch_ckpt._base.life_cycle import LiveObjects, Part, register
from torch_ckpt.errors import CheckpointError


class _Pickled(NamedTuple):
    """A pickled item from another process."""

    data: bytes


class ResultsQueue:
    """Queue into which child processes put items. Its owner, the process that created it, takes the
    items.

    It can be pickled by any pickler. The unpickled queue sends its items to the owner, as long as
    the owner still has the queue. Thread-safe. Only unpickling passes arguments.
    """

    # Queues that were created in this process or in those that it was forked from.
    _created: ClassVar[LiveObjects[ResultsQueue]] = LiveObjects()

    def __init__(
        self,
        owner: int | None = None,
        name: str | None = None,
        channel: _core.ProcessChannel | None = None,
    ) -> None:
        self._owner = owner or os.getpid()
        self._name = name or uuid.uuid4().hex
        self._channel = channel  # None: no other process has this queue
        self._items: deque[Any] = deque()
        # Reentrant: the garbage collector may run code that pickles the queue while the lock is
        # held.
        self._items_lock = threading.RLock()
        if owner is None:
            self._created.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_queue, (self._owner, self._name, self._open_channel().address)

    def _open_channel(self) -> _core.ProcessChannel:
        """Returns the channel for items from other processes, creating it on first use."""
        if self._channel is None:
            if self._owner != os.getpid():
                raise CheckpointError(
                    f"process {os.getpid()} cannot send results to process {self._owner}, which "
                    "had too little memory or too few file descriptors for a channel when it "
                    "forked; raise its limits and save again"
                )
            with self._items_lock:
                self._channel = self._channel or _core.ProcessChannel()
        return self._channel

    @classmethod
    def before_fork(cls) -> None:
        """Opens the channels of all queues, so that the child can put items."""
        for each in cls._created:
            # Without a channel, put() raises in the child.
            with contextlib.suppress(OSError, CheckpointError):
                each._open_channel()

    def begin(self, what: str) -> None:
        """Announces an item. If this process dies before putting it, the owner gets an error.

        Args:
            what: description of the item in the error.

        Raises:
            OSError: the owner has exited or is out of memory.
        """
        if self._owner != os.getpid():
            self._open_channel().begin(what)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an item, without waiting until it is taken.

        Raises:
            OSError: the owner is another process, which has exited or is out of memory.
        """
        if self._owner != os.getpid():
            self._open_channel().send_object(pickle.dumps(item))
            return
        with self._items_lock:
            self._items.append(item)
            if self._channel is not None:
                self._channel.wake()

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Takes the oldest item. Only the owner may call it.

        If a process died before putting an announced item, the item is a CheckpointError.

        Raises:
            queue.Empty: the queue is empty, and no item arrived within ``timeout`` seconds.
            CheckpointError: this process is not the owner.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._items_lock:
                self._receive()
                if self._items:
                    item = self._items.popleft()
                    if self._items and self._channel is not None:
                        self._channel.wake()  # another thread may be waiting
                    break
                remaining = 3600.0 if deadline is None else deadline - time.monotonic()
                if not block or remaining <= 0:
                    raise queue.Empty
                # Later puts wake this channel.
                channel = self._open_channel()
            channel.wait(remaining)
        return pickle.loads(item.data) if isinstance(item, _Pickled) else item

    def get_nowait(self) -> Any:
        """Takes the oldest item. Raises ``queue.Empty`` if there is none."""
        return self.get(block=False)

    def qsize(self) -> int:
        """Returns the number of items."""
        with self._items_lock:
            self._receive()
            return len(self._items)

    def empty(self) -> bool:
        """Returns True if the queue has no items."""
        return self.qsize() == 0

    def _receive(self) -> None:
        if self._owner != os.getpid():
            raise CheckpointError(
                f"the results queue belongs to process {self._owner}, not to process "
                f"{os.getpid()}; read the results in process {self._owner}"
            )
        if self._channel is None:
            return
        self._items.extend(map(_Pickled, self._channel.take_objects()))
        for process, what in self._channel.take_missed():
            self._items.append(
                CheckpointError(
                    f"process {process} exited before sending its result ({what}); check "
                    "whether it was killed, for example because memory ran out"
                )
            )


register(Part.RESULTS, before_fork=ResultsQueue.before_fork)


def _rebuild_queue(
    owner: int, name: str, address: tuple[int, int, int, int, int, int, int, int]
) -> ResultsQueue:
    if owner == os.getpid():
        for each in ResultsQueue._created:
            if each._name == name:
                return each
    return ResultsQueue(owner, name, _core.ProcessChannel.at(address))


_queue: ResultsQueue | None = None


def get_write_results_queue(mp_mode: str = "spawn") -> ResultsQueue:
    """Returns this process's results queue, into which child processes can put items.

    Every call returns the same queue. Writers have their own queues.

    Args:
        mp_mode: accepted for compatibility with Megatron, but ignored; both forked and spawned
            children can use the queue.

    Examples:
        ```python
        results = torch_ckpt.megatron.get_write_results_queue("spawn")
        save_fn(rank, staged, results)  # in any process
        outcome = results.get(timeout=60)
        ```
    """
    global _queue
    if _queue is None:
        _queue = ResultsQueue()
    return _queue
