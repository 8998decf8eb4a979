"""A disk that records every write and flush, and the states that a crash could leave on it.

A disk keeps the data written before a flush. It may lose any part of later writes, in any order,
down to single sectors. So the recorded writes and flushes of a save give the states that a crash
may leave: all writes before a flush, and some of the writes after it.

The disk is an NBD server in a thread of this process, with the oldest and shortest form of the
protocol. nbdfuse exposes it as a file, and a loop device exposes the file as a disk and passes
flushes on as fsync. Loop devices have no writes past the cache (FUA); the kernel writes and then
flushes instead.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.crash.disks import KINDS, Disk, copy_sparse

# Larger writes are logged in pieces, each of which a crash may lose.
_PIECE_BYTES = 128 << 10

_PATIENCE_SECONDS = 60

_HELLO = struct.Struct(">8sQQI124x")
_REQUEST = struct.Struct(">IHHQQI")
_ANSWER = struct.Struct(">IIQ")
_REQUEST_MAGIC, _ANSWER_MAGIC = 0x25609513, 0x67446698
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_HAS_FLAGS, _CAN_FLUSH = 1, 4
_EINVAL = 22


@functools.cache
def unavailable_reason() -> str:
    """Returns the reason why this machine cannot record a disk; empty if it can."""
    if shutil.which("nbdfuse") is None:
        return "nbdfuse is not installed"
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse does not exist"
    return ""


def skip_without_recorder() -> None:
    if reason := unavailable_reason():
        pytest.skip(f"recording a disk: {reason}")


@dataclass
class Write:
    """One write to the disk."""

    offset: int
    data: bytes

    def sectors(self, size: int) -> list[Write]:
        """Splits the write at multiples of ``size`` on the disk."""
        end = self.offset + len(self.data)
        begins = [self.offset, *range(self.offset // size * size + size, end, size)]
        bounds = zip(begins, [*begins[1:], end], strict=True)
        return [Write(a, self.data[a - self.offset : b - self.offset]) for a, b in bounds]


@dataclass
class Log:
    """The recorded writes and flushes of a disk.

    Attributes:
        image: the disk's contents before the recording.
        sector_bytes: size of the unit that the disk writes atomically.
        events: the writes in order; None is a flush.
        marks: the number of events before each mark, by its name.
    """

    image: Path
    sector_bytes: int
    events: list[Write | None] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)

    def mark(self, name: str) -> None:
        assert name not in self.marks, f"{name} happened twice"
        self.marks[name] = len(self.events)


@dataclass(frozen=True)
class CrashState:
    """The state of a disk after a crash.

    Attributes:
        position: the number of events before the crash.
        lost: numbers of the lost writes, all after the last flush.
        torn: number of a partly written write, and its written sectors; None: no such write.
    """

    position: int
    lost: frozenset[int] = frozenset()
    torn: tuple[int, frozenset[int]] | None = None

    def __str__(self) -> str:
        parts = [f"a crash after {self.position} events"]
        if self.lost:
            parts.append(f"without the writes {sorted(self.lost)}")
        if self.torn:
            number, sectors = self.torn
            parts.append(f"with only sectors {sorted(sectors)} of write {number}")
        return ", ".join(parts)


@contextmanager
def recorded(disk: Disk) -> Iterator[Log]:
    """Mounts a disk and records its writes and flushes until the end of the block.

    All writes go to a copy of the disk's image.
    """
    log = Log(disk.image, KINDS[disk.kind].sector_bytes)
    copy = disk.image.with_suffix(".recorded")
    copy_sparse(disk.image, copy)
    file = disk.image.with_suffix(".nbd")
    file.touch()
    try:
        with _served(copy, log, file):
            disk.mount_device(file, KINDS[disk.kind].mount_options)
            try:
                yield log
            finally:
                disk.unmount()
    finally:
        copy.unlink()
        file.unlink()


@contextmanager
def _served(image: Path, log: Log, file: Path) -> Iterator[None]:
    """Exposes an image as ``file`` and logs writes and flushes to it."""
    ours, theirs = socket.socketpair()
    ready, pid_pipe = os.pipe()
    server = threading.Thread(target=_serve, args=(ours, image, log), daemon=True)
    server.start()
    command = ["nbdfuse", "-P", f"/dev/fd/{pid_pipe}", str(file), "--fd", str(theirs.fileno())]
    fuse = subprocess.Popen(command, pass_fds=[theirs.fileno(), pid_pipe])
    theirs.close()
    os.close(pid_pipe)
    try:
        # nbdfuse writes its process id once the file can be used.
        assert os.read(ready, 32), f"nbdfuse ended with code {fuse.wait(_PATIENCE_SECONDS)}"
        yield
    finally:
        os.close(ready)
        # Lazily, because the loop device releases the file a little later.
        subprocess.run(["umount", "-l", str(file)], check=False, capture_output=True)
        try:
            fuse.wait(_PATIENCE_SECONDS)
        finally:
            fuse.kill()
            fuse.wait()
            server.join(_PATIENCE_SECONDS)
            ours.close()


def _serve(connection: socket.socket, image: Path, log: Log) -> None:
    with open(image, "r+b") as file, connection.makefile("rwb") as stream:
        fd = file.fileno()
        flags = _HAS_FLAGS | _CAN_FLUSH
        hello = _HELLO.pack(b"NBDMAGIC", 0x00420281861253, os.fstat(fd).st_size, flags)
        stream.write(hello)
        stream.flush()
        # Serve one request at a time: a flush must cover all writes answered before it.
        while len(request := stream.read(_REQUEST.size)) == _REQUEST.size:
            magic, _flags, kind, handle, offset, length = _REQUEST.unpack(request)
            if magic != _REQUEST_MAGIC or kind == _DISCONNECT:
                return
            error, answer = 0, b""
            if kind == _READ:
                answer = os.pread(fd, length, offset)
            elif kind == _WRITE:
                data = stream.read(length)
                os.pwrite(fd, data, offset)
                for at in range(0, length, _PIECE_BYTES):
                    log.events.append(Write(offset + at, data[at : at + _PIECE_BYTES]))
            elif kind == _FLUSH:
                log.events.append(None)
            else:
                error = _EINVAL
            stream.write(_ANSWER.pack(_ANSWER_MAGIC, error, handle) + answer)
            stream.flush()


# --- crash states --------------------------------------------------------------------------------


def prefixes(log: Log) -> list[CrashState]:
    """Returns a crash after each write, without lost writes."""
    numbers = [number for number, event in enumerate(log.events) if event is not None]
    return [CrashState(0), *(CrashState(number + 1) for number in numbers)]


def reordered(log: Log, count: int, chance: random.Random) -> list[CrashState]:
    """Returns random crashes that lose some of the writes since the last flush and may tear one.

    All intervals between flushes are equally likely, whatever was written in them: a small journal
    write is more critical than a large file.

    The crashes are distinct and in order of position. They are fewer than ``count`` if the search
    finds no more.
    """
    moments: dict[int, list[int]] = {}
    for number, event in enumerate(log.events):
        if event is not None:
            moments.setdefault(_count_safe_events(log, number + 1), []).append(number + 1)
    found: set[CrashState] = set()
    for _ in range(20 * count if moments else 0):
        if len(found) == count:
            break
        begin = chance.choice(list(moments))
        end = chance.choice(moments[begin])
        state = _choose_losses(log, range(begin, end), chance)
        if state.lost or state.torn:
            found.add(state)
    return sorted(found, key=lambda state: (state.position, str(state)))


def _choose_losses(log: Log, writes: range, chance: random.Random) -> CrashState:
    """Returns a random crash that may lose or tear any of some writes."""
    share = chance.choice((0.1, 0.5, 0.9))
    lost = frozenset(number for number in writes if chance.random() < share)
    torn = None
    arrived = [number for number in writes if number not in lost]
    if arrived and chance.random() < 0.5:
        number = chance.choice(arrived)
        event = log.events[number]
        assert event is not None
        sectors = range(len(event.sectors(log.sector_bytes)))
        some = frozenset(s for s in sectors if chance.random() < 0.5)
        torn = (number, some) if 0 < len(some) < len(sectors) else None
    return CrashState(writes.stop, lost, torn)


def _count_safe_events(log: Log, end: int) -> int:
    """Returns the number of events that a crash after ``end`` events cannot lose."""
    return next((at + 1 for at in reversed(range(end)) if log.events[at] is None), 0)


class States:
    """Creates the images of crash states; fast if their positions only increase."""

    def __init__(self, log: Log) -> None:
        self._log = log
        # The writes that no later crash can lose.
        self._safe = log.image.with_suffix(".safe")
        copy_sparse(log.image, self._safe)
        self._applied = 0

    def make(self, state: CrashState, image: Path) -> None:
        begin = _count_safe_events(self._log, state.position)
        if begin < self._applied:
            copy_sparse(self._log.image, self._safe)
            self._applied = 0
        with open(self._safe, "r+b") as file:
            for event in self._log.events[self._applied : begin]:
                if event is not None:
                    os.pwrite(file.fileno(), event.data, event.offset)
        self._applied = begin
        copy_sparse(self._safe, image)
        with open(image, "r+b") as file:
            for number in range(begin, state.position):
                event = self._log.events[number]
                if event is None or number in state.lost:
                    continue
                pieces = [event]
                if state.torn is not None and state.torn[0] == number:
                    sectors = event.sectors(self._log.sector_bytes)
                    pieces = [sectors[i] for i in sorted(state.torn[1])]
                for piece in pieces:
                    os.pwrite(file.fileno(), piece.data, piece.offset)

    def close(self) -> None:
        self._safe.unlink()
