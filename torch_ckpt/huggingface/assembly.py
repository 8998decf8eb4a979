"""Assembles files from the parts of several ranks.

Only one rank can write an object of a store, and only one host should write to a file of a network
file system. So the ranks that have parts of a file send them to the rank that assembles the file
(csrc/planning/object_files.h). No rank holds a complete tensor of several ranks.

1. The coordinator sends each rank its :class:`Share`: the files that it assembles, and the streams
   that it sends. A stream has the sender's parts of one file. All streams between two ranks use one
   connection (ranks/streams.py), in the order of the layout.
2. The engine of a sender stages and packs the parts, and passes them to :meth:`Assembly.write`,
   which waits for the turn of the stream and sends them.
3. The receiver assembles its files one after the other, in the order of the layout, in *windows* as
   large as a part of an upload. It begins windows as its memory permits. Threads receive the bytes
   of a window, and copy them to their places. When the window is complete, it is written, and its
   memory is free for another one.
4. The engines write their files in the order of the layout, too. So the receiver of the first
   unfinished file gets all of its streams, and ranks never wait for each other in a circle.
5. A rank that fails closes its connections, and first connects to those receivers that still wait
   for it. So the other ranks fail at once.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

from torch_ckpt import _core
from torch_ckpt._base.system import memory_for_io
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.publishing import write_new_file
from torch_ckpt.options import WriteOptions
from torch_ckpt.ranks.streams import (
    Connection,
    Listener,
    OwnStream,
    connect,
    open_connection,
    start_heartbeats,
)
from torch_ckpt.stores import part_bytes, parts_in_flight

# Number of threads that receive. Each of them has the connections of some senders.
_RECEIVERS = 4
# Number of bytes that such a thread receives before it copies them.
_RECEIVED_BYTES = 1 << 20

# Seconds between two checks that the save still runs.
_REST_SECONDS = 0.2


class Files(Protocol):
    """The call of a store that an assembly makes; see :class:`torch_ckpt.stores.ObjectStore`."""

    def put(self, name: str, parts: Iterable[memoryview], bytes: int) -> object: ...


class DirectoryFiles:
    """The files of a directory that several hosts share, as a store.

    Args:
        open: opens the directory; called for the first file.
        options: ``direct_io`` and ``sync_files`` are used.
    """

    def __init__(self, open: Callable[[], OpenDirectory], options: WriteOptions) -> None:
        self._open = open
        self._options = options
        self._directory: OpenDirectory | None = None

    def sync(self) -> None:
        """Makes the names of the files durable."""
        if self._directory is not None and self._options.sync_files:
            self._directory.sync()

    def put(self, name: str, parts: Iterable[memoryview], bytes: int) -> None:
        if self._directory is None:
            self._directory = self._open()
        options = self._options
        write_new_file(
            self._directory,
            name,
            parts,
            bytes,
            direct_io=options.direct_io,
            sync=options.sync_files,
        )


class Share(NamedTuple):
    """The share of one rank in the assembly of files.

    Attributes:
        assembled: encoded assemblies of the files that the rank assembles.
        sent: the receiver, the file and the size of each stream that the rank sends.
        addresses: addresses of the receivers.
    """

    assembled: Sequence[bytes]
    sent: Sequence[tuple[int, str, int]]
    addresses: dict[int, bytes]


def shares_of(
    layout: _core.SafetensorsLayout,
    coordinator: _core.SaveCoordinator,
    addresses: Sequence[bytes],
    assembles_all: bool,
) -> tuple[list[bytes], list[Share]]:
    """Distributes the files of a layout over the ranks.

    Args:
        addresses: the addresses of the ranks' listeners.
        assembles_all: also assemble a file of which one rank has all parts.

    Returns:
        For each rank: the places of its values, and its share.
    """
    places, assembled, sent = layout.object_files(coordinator, assembles_all)
    return places, [
        Share(files, streams, {rank: addresses[rank] for rank, _file, _bytes in streams})
        for files, streams in zip(assembled, sent, strict=True)
    ]


class Assembly:
    """One rank's part in the assembly of files. Begins to assemble at once, in a thread.

    Args:
        share: the rank's share.
        rank: this rank.
        listener: the rank's listener.
        timeout: seconds without a heartbeat after which another rank is declared dead.
        files: where to write the files.
        max_host_bytes: memory for the windows; at least one window is used. None means enough for
            all connections.
        on_bytes: called with the size of each window that was written, and regularly with 1 while
            this rank waits for other ranks.

    Attributes:
        names: the names of the files that this rank assembles.
        error: the first error.
    """

    def __init__(
        self,
        share: Share,
        rank: int,
        listener: Listener,
        timeout: float,
        files: Files,
        max_host_bytes: int | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._files = [_core.FileAssembly(encoded) for encoded in share.assembled]
        self.names = [file.name for file in self._files]
        self._share = share
        self._rank = rank
        self._listener = listener
        self._timeout = timeout
        self._store = files
        self._max_host_bytes = max_host_bytes
        self._on_bytes = on_bytes
        self._changed = threading.Condition()
        self._own = OwnStream()  # to this rank itself
        self._connections: list[Connection] = []
        self._end_heartbeats: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        self._is_closed = False
        # None until all connections are made.
        self._receivers: dict[int, Connection] | None = None
        self._senders: dict[int, Connection] = {}
        self._windows: _Windows | None = None  # of the file that is being assembled
        self._receiver_of = {name: to for to, name, _bytes in share.sent}
        # The streams to each receiver that are not yet sent, and the offset in the first of them.
        self._waiting: dict[int, deque[str]] = {}
        for to, name, bytes in share.sent:
            if bytes > 0:
                self._waiting.setdefault(to, deque()).append(name)
        self._offsets = dict.fromkeys(self._waiting, 0)
        self._connected: set[int] = set()  # the receivers to which this rank has connected
        self._thread = threading.Thread(target=self._run, name="assemble", daemon=True)
        self._thread.start()

    def sends(self, name: str) -> bool:
        """Returns True if the engine's bytes of a file are a stream to the file's receiver."""
        return name in self._receiver_of

    def write(self, name: str, piece: _core.FilePiece) -> None:
        """Sends a piece of a stream. Returns when the piece is not needed any more.

        Raises:
            ConnectionError: see :meth:`Connection.send`.
        """
        if piece.bytes == 0:
            return
        to = self._receiver_of[name]
        waiting = self._waiting[to]
        with self._keeping_error():
            with self._changed:
                while (
                    self._receivers is None
                    or waiting[0] != name
                    or self._offsets[to] != piece.offset
                ):
                    self._require_running()
                    if piece.is_cancelled:
                        raise InterruptedError(errno.EINTR, "the save was cancelled")
                    self._changed.wait(_REST_SECONDS)
                stream = self._own if to == self._rank else self._receivers[to]
            stream.send(piece.buffer(), lambda: piece.is_cancelled)
        with self._changed:
            self._offsets[to] += piece.bytes
            if piece.is_last:
                waiting.popleft()
                self._offsets[to] = 0
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until the files of this rank are complete.

        Raises:
            OSError: a file cannot be written.
            ConnectionError: see :meth:`Connection.receive`.
        """
        while self._thread.is_alive():
            self._thread.join(_REST_SECONDS)
        with self._changed:
            self._require_running()

    def stop(self, seconds: float) -> None:
        """Closes the connections. Calls that wait end. Waits, at most for ``seconds``, until this
        rank writes no more."""
        self._close()
        self._thread.join(seconds)

    # --- private ---------------------------------------------------------------------------------

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            connections, self._connections = self._connections, []
            self._changed.notify_all()
        self._end_heartbeats()
        self._listener.close()
        self._own.close()
        for connection in connections:
            connection.close()
        if self._receivers is None:
            # These receivers wait for this rank. They find that the connection is closed.
            for rank in self._share.addresses.keys() - self._connected - {self._rank}:
                threading.Thread(target=self._connect_and_close, args=[rank], daemon=True).start()

    def _connect_and_close(self, rank: int) -> None:
        with suppress(OSError):
            open_connection(self._share.addresses[rank], self._rank, rank).close()

    def _require_running(self) -> None:
        if self.error is not None:
            raise self.error.with_traceback(None)
        if self._is_closed:
            raise InterruptedError(errno.EINTR, "the assembly was stopped")

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            with self._changed:
                # After a cancellation, the engine reports why the save was cancelled.
                if not (self._is_closed or isinstance(error, InterruptedError)):
                    self.error = self.error or error.with_traceback(None)
            self._close()
            raise

    def _run(self) -> None:
        # The error is kept for wait().
        with suppress(BaseException), self._keeping_error():
            self._connect()
            for file in self._files:
                senders = [self._senders.get(rank, self._own) for rank in file.ranks]
                windows = _Windows(file, senders, self._max_host_bytes, self._on_bytes)
                self._windows = windows
                try:
                    self._store.put(file.name, windows, file.bytes)
                finally:
                    windows.stop()
            self._windows = None

    def _connect(self) -> None:
        """Connects this rank with its receivers and its senders."""
        own, timeout = self._rank, self._timeout
        ranks = {rank for file in self._files for rank in file.ranks}
        accepted, receivers = self._senders, dict[int, Connection]()
        self._end_heartbeats = start_heartbeats(receivers, accepted, timeout, self._beat)
        for rank in sorted(self._share.addresses.keys() - {own}):
            with self._changed:
                self._require_running()
            receivers[rank] = connect(self._share.addresses[rank], own, rank, timeout)
            self._connected.add(rank)
            self._keep([receivers[rank]])
        accepted.update(self._listener.accept(ranks - {own}, own, timeout))
        self._keep(accepted.values())
        with self._changed:
            self._require_running()
            self._receivers = receivers
            self._changed.notify_all()

    def _beat(self) -> None:
        """Reports progress while this rank waits for other ranks. A rank whose own disk or device
        does not answer must not count as alive."""
        if self._receivers is None:
            self._on_bytes(1)
        elif self._windows is None or self._windows.is_waiting:
            connections = [*self._receivers.values(), *self._senders.values()]
            if any(connection.is_waiting for connection in connections):
                self._on_bytes(1)

    def _keep(self, connections: Iterable[Connection]) -> None:
        """Notes connections to close at the end."""
        with self._changed:
            self._connections += connections
            is_closed = self._is_closed
        if is_closed:
            self._close()


class _Window:
    """The bytes of a file from ``begin`` on.

    Args:
        begin, bytes: the range of the file.
        memory: at least as many bytes.

    Attributes:
        data: the bytes. The memory is in use as long as the object exists.
        missing: number of ranges that are not yet copied to the window.
    """

    def __init__(self, begin: int, bytes: int, memory: memoryview) -> None:
        self.begin = begin
        self.data: ctypes.Array[ctypes.c_char] = (ctypes.c_char * bytes).from_buffer(memory)
        self.missing = 0


class _Range(NamedTuple):
    """Bytes of a stream that a window needs."""

    window: _Window
    stream: int
    offset: int
    bytes: int


class _Windows(Iterator[memoryview]):
    """The windows of a file, in order. Keeps no reference to a window that the upload has.

    Args:
        file: the file.
        senders: the streams of the ranks of the file.
        max_host_bytes, on_bytes: see :class:`Assembly`.

    Attributes:
        is_waiting: True while the next window is not complete.
    """

    def __init__(
        self,
        file: _core.FileAssembly,
        senders: Sequence[Connection | OwnStream],
        max_host_bytes: int | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.is_waiting = False
        self._file = file
        self._senders = senders
        self._on_bytes = on_bytes
        self._step = part_bytes(file.bytes)
        # Two windows more than parts in flight: one is filled while another waits.
        self._most = parts_in_flight(file.bytes) + 2
        if max_host_bytes is not None:
            self._most = min(self._most, max(1, max_host_bytes // self._step))
        self._changed = threading.Condition()
        self._next = 0  # offset of the window to begin next
        self._live = 0  # windows whose memory is in use
        self._unused: list[memoryview] = []  # memory for windows
        self._ahead: deque[_Window] = deque()
        # The ranges to receive, by thread.
        self._ranges: list[deque[_Range]] = [deque() for _ in range(_RECEIVERS)]
        self._received = [0] * len(self._senders)  # bytes of each stream
        self._error: BaseException | None = None
        self._stopped = False
        for number in range(min(_RECEIVERS, len(self._senders))):
            name = f"assemble {file.name} {number}"
            threading.Thread(target=self._receive, args=[number], name=name, daemon=True).start()

    def __next__(self) -> memoryview:
        with self._changed:
            self._begin_windows()
            while self._next < self._file.bytes and not self._ahead:
                self._wait()
                self._begin_windows()
            if not self._ahead:
                raise StopIteration
            self.is_waiting = True
            while self._error is not None or self._ahead[0].missing:
                self._wait()
            self.is_waiting = False
            return memoryview(self._ahead.popleft().data).cast("B")

    def stop(self) -> None:
        """Ends the threads. Does not wait for them."""
        with self._changed:
            self._stopped = True
            self._ahead.clear()
            self._unused.clear()
            for ranges in self._ranges:
                ranges.clear()
            self._changed.notify_all()

    # --- private; the caller holds the lock, except in _receive() ---------------------------------

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
            memory = self._unused.pop() if self._unused else memory_for_io(self._step)
            window = _Window(begin, end - begin, memory)
            weakref.finalize(window.data, self._free, memory, end - begin)
            self._file.copy_head(begin, window.data)
            for stream, offset, bytes in self._file.ranges(begin, end):
                self._ranges[stream % _RECEIVERS].append(_Range(window, stream, offset, bytes))
                window.missing += 1
            self._next, self._live = end, self._live + 1
            self._ahead.append(window)
            self._changed.notify_all()

    def _free(self, memory: memoryview, bytes: int) -> None:
        # Called in any thread, when the last reference to the data of a window ends.
        with self._changed:
            self._live -= 1
            if not self._stopped:
                self._unused.append(memory)
            self._changed.notify_all()
        self._on_bytes(bytes)

    def _receive(self, number: int) -> None:
        """Receives the streams of some ranks, in a thread. The ranges of a stream are in order."""
        ranges, buffer = self._ranges[number], memoryview(bytearray(_RECEIVED_BYTES))
        while True:
            with self._changed:
                while not ranges and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                window, stream, offset, bytes = ranges.popleft()
            try:
                if offset != self._received[stream]:
                    raise AssertionError(f"{self._file.name}: the ranges of a stream have gaps")
                self._received[stream] += bytes
                for data in self._senders[stream].receive(bytes, buffer):
                    self._file.copy(stream, offset, data, window.begin, window.data)
                    offset += len(data)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error.with_traceback(None)
            with self._changed:
                window.missing -= 1
                self._changed.notify_all()
            del window
