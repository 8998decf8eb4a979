"""Assembles a file from objects that several ranks have stored.

The file is written in windows of one part each. Threads read the ranges of the objects that a
window consists of, and copy them to their places (csrc/planning/object_files.h). A window's memory
is free when the window is written; then the next window is begun.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.publishing import new_file
from torch_ckpt.checkpoint.shared_directory import NETWORK_SECONDS, PAUSE_SECONDS
from torch_ckpt.stores import part_bytes, parts_in_flight

# Number of threads that read, and the size of the ranges.
_READERS, _RANGE_BYTES = 4, 8 << 20


class Files(Protocol):
    """The calls of a store that an assembly makes; see :class:`torch_ckpt.stores.ObjectStore`."""

    def put(self, name: str, parts: Iterable[memoryview], bytes: int) -> object: ...
    def read_range(self, name: str, offset: int, bytes: int) -> memoryview: ...


class DirectoryFiles:
    """The files of a directory that several hosts share.

    Args:
        directory: the directory.
        sync: fsync each file that is written.
    """

    def __init__(self, directory: OpenDirectory, sync: bool) -> None:
        self._directory = directory
        self._sync = sync

    def put(self, name: str, parts: Iterable[memoryview], bytes: int) -> None:
        with new_file(os.path.join(self._directory.path, name), sync=self._sync) as file:
            for part in parts:
                file.write(part)
                # Another window may be begun only if the memory of this one is free.
                del part

    def read_range(self, name: str, offset: int, bytes: int) -> memoryview:
        """Reads a range. Waits for a file that this host does not see yet, or not completely."""
        give_up = time.monotonic() + NETWORK_SECONDS
        while True:
            try:
                data = self._read(name, offset, bytes)
            except FileNotFoundError:
                if time.monotonic() >= give_up:
                    raise
            else:
                if len(data) == bytes:
                    return memoryview(data)
                if time.monotonic() >= give_up:
                    path = os.path.join(self._directory.path, name)
                    raise OSError(errno.EIO, f"read failed: the file ends at {len(data)}", path)
            time.sleep(PAUSE_SECONDS)

    def _read(self, name: str, offset: int, count: int) -> bytes:
        with open(name, "rb", opener=self._directory.open_for_read) as file:
            file.seek(offset)
            return file.read(count)


def assemble(
    store: Files,
    file: _core.FileAssembly,
    max_host_bytes: int | None,
    on_bytes: Callable[[int], None],
) -> None:
    """Writes a file that is assembled from objects.

    Args:
        max_host_bytes: memory for the windows; at least one window is used. None means enough for
            all connections.
        on_bytes: called with the size of each range that was read, and of each window that was
            sent.

    Raises:
        OSError: an object cannot be read, or the file cannot be written.
    """
    windows = _Windows(store, file, max_host_bytes, on_bytes)
    try:
        store.put(file.name, windows, file.bytes)
    finally:
        windows.stop()


class _Window(bytearray):
    """The bytes of a file from ``begin`` on.

    Attributes:
        missing: number of ranges that are not yet copied to the window.
    """

    begin = 0
    missing = 0


class _Windows(Iterator[memoryview]):
    """The windows of a file, in order. Keeps no reference to a window that the upload has."""

    def __init__(
        self,
        store: Files,
        file: _core.FileAssembly,
        max_host_bytes: int | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._store = store
        self._file = file
        self._on_bytes = on_bytes
        self._step = part_bytes(file.bytes)
        # Two windows more than parts in flight: one is read while another waits.
        self._most = parts_in_flight(file.bytes) + 2
        if max_host_bytes is not None:
            of_windows = max_host_bytes - _READERS * _RANGE_BYTES
            self._most = min(self._most, max(1, of_windows // self._step))
        self._changed = threading.Condition()
        self._next = 0  # offset of the window to begin next
        self._live = 0  # windows whose memory is in use
        self._ahead: deque[_Window] = deque()
        self._ranges: deque[tuple[_Window, int, int, int]] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        for number in range(_READERS):
            name = f"assemble {file.name} {number}"
            threading.Thread(target=self._read, name=name, daemon=True).start()

    def __next__(self) -> memoryview:
        with self._changed:
            self._begin_windows()
            while self._next < self._file.bytes and not self._ahead:
                self._wait()
                self._begin_windows()
            if not self._ahead:
                raise StopIteration
            while self._ahead[0].missing:
                self._wait()
            return memoryview(self._ahead.popleft())

    def stop(self) -> None:
        """Ends the threads. Does not wait for a read in progress."""
        with self._changed:
            self._stopped = True
            self._ahead.clear()
            self._ranges.clear()
            self._changed.notify_all()

    # --- private; the caller holds the lock, except in _read() ------------------------------------

    def _wait(self) -> None:
        if self._error is None and not self._stopped:
            self._changed.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._stopped:
            raise InterruptedError(f"the assembly of {self._file.name} has ended")

    def _begin_windows(self) -> None:
        while self._next < self._file.bytes and self._live < self._most and not self._stopped:
            begin, end = self._next, min(self._next + self._step, self._file.bytes)
            window = _Window(end - begin)
            window.begin = self._next
            weakref.finalize(window, self._free, end - begin)
            self._file.copy_head(begin, window)
            for source, offset, bytes in self._file.ranges(begin, end):
                for at in range(offset, offset + bytes, _RANGE_BYTES):
                    size = min(_RANGE_BYTES, offset + bytes - at)
                    self._ranges.append((window, source, at, size))
                    window.missing += 1
            self._next, self._live = end, self._live + 1
            self._ahead.append(window)
            self._changed.notify_all()

    def _free(self, bytes: int) -> None:
        # Called in any thread, when the last reference to a window ends.
        with self._changed:
            self._live -= 1
            self._changed.notify_all()
        self._on_bytes(bytes)

    def _read(self) -> None:
        """Reads ranges, in a thread."""
        while True:
            with self._changed:
                while not self._ranges and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                window, source, offset, bytes = self._ranges.popleft()
            try:
                data = self._store.read_range(self._file.object_name(source), offset, bytes)
                self._file.copy(source, offset, data, window.begin, window)
                del data
                self._on_bytes(bytes)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error.with_traceback(None)
            with self._changed:
                window.missing -= 1
                self._changed.notify_all()
            del window
