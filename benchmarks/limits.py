"""The machine's limits for the same number of bytes: raw writes, raw reads, memcpy.

These baselines only move bytes: blocks of a few MiB from or to page-aligned memory, several in
flight, with an fsync of written files and their directory at the end. os.pwrite, os.preadv and
ctypes.memmove release the GIL, so Python threads reach the speed of the system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .states import State, tensors

BLOCK_BYTES = 4 << 20
_ALIGNMENT = 4096
_ARENA_BYTES = 64 << 20


def _aligned_memory(size: int) -> mmap.mmap:
    """Maps `size` bytes of page-aligned memory, on huge pages if the kernel supports them.

    With huge pages a direct write of 4 MiB pins two pages instead of 1,024, and takes up to a
    fifth less time. The memory is private: shared memory, Python's default, gets no huge pages.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses. Ordinary pages also work, but are slower.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@dataclass(frozen=True)
class Shape:
    """Layout of raw writes or reads. The fastest depends on the disk, so several are measured.

    A write has `in_flight` blocks for each of `files` files. A read reads the files that exist.
    """

    direct: bool
    in_flight: int
    files: int = 0
    block_bytes: int = BLOCK_BYTES

    @property
    def label(self) -> str:
        """Label in tables, such as 'raw direct write, 2 files x 2 in flight'."""
        way = "direct" if self.direct else "buffered"
        if not self.files:
            size = self.block_bytes >> 20
            return f"raw {way} read, {self.in_flight} in flight of {size} MiB"
        files = "1 file" if self.files == 1 else f"{self.files} files"
        return f"raw {way} write, {files} x {self.in_flight} in flight"


WRITE_SHAPES = {
    f"raw_{'direct' if direct else 'buffered'}_{files}x{lanes}": Shape(direct, lanes, files)
    for direct, files, lanes in (
        *((True, 1, 1), (True, 1, 4), (True, 2, 1), (True, 2, 2), (True, 4, 2)),
        *((False, 1, 1), (False, 2, 1)),
    )
}
READ_SHAPES = {
    **{f"raw_buffered_{lanes}": Shape(False, lanes) for lanes in (1, 2)},
    **{
        f"raw_direct_{lanes}x{mebibytes}": Shape(True, lanes, block_bytes=mebibytes << 20)
        for lanes, mebibytes in ((2, 4), (4, 4), (8, 1), (8, 4), (4, 16), (16, 1))
    },
}


def direct_io_works(directory: Path) -> bool:
    """Returns True if the file system of `directory` accepts an aligned O_DIRECT write."""
    probe = directory / "direct-io-probe"
    buffer = _aligned_memory(_ALIGNMENT)
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            return os.write(fd, buffer) == _ALIGNMENT
        finally:
            os.close(fd)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
        buffer.close()


def fsync_directory(directory: Path) -> None:
    """Makes the directory's entries durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class RawWriter:
    """Writes a number of bytes durably to a fresh directory, at the speed of the disk.

    The source is 64 MiB of random bytes, written repeatedly. Zeros could be free on some disks.
    """

    def __init__(self) -> None:
        self._arena = _aligned_memory(_ARENA_BYTES)
        for offset in range(0, _ARENA_BYTES, BLOCK_BYTES):
            self._arena[offset : offset + BLOCK_BYTES] = os.urandom(BLOCK_BYTES)

    def write(self, directory: Path, total_bytes: int, shape: Shape) -> None:
        """Writes `total_bytes`, rounded up to 4 KiB per file; returns when they are on disk."""
        directory.mkdir(parents=True)
        file_bytes = -(-total_bytes // (shape.files * _ALIGNMENT)) * _ALIGNMENT
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if shape.direct else 0)
        fds = [os.open(directory / f"{index}.raw", flags, 0o600) for index in range(shape.files)]
        try:
            with ThreadPoolExecutor(shape.files * shape.in_flight) as pool:
                writes = [
                    pool.submit(self._write_stripe, fd, file_bytes, lane, shape.in_flight)
                    for fd in fds
                    for lane in range(shape.in_flight)
                ]
                for write in writes:
                    write.result()
                for synced in [pool.submit(os.fsync, fd) for fd in fds]:
                    synced.result()
        finally:
            for fd in fds:
                os.close(fd)
        fsync_directory(directory)

    def _write_stripe(self, fd: int, file_bytes: int, lane: int, lanes: int) -> None:
        with memoryview(self._arena) as arena:
            for offset in range(lane * BLOCK_BYTES, file_bytes, lanes * BLOCK_BYTES):
                length = min(BLOCK_BYTES, file_bytes - offset)
                source = offset % _ARENA_BYTES
                done = 0
                while done < length:
                    done += os.pwrite(fd, arena[source + done : source + length], offset + done)


class RawReader:
    """Reads complete files in blocks, several at a time, into memory that is reused."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._buffers = [_aligned_memory(shape.block_bytes) for _ in range(shape.in_flight)]
        for buffer in self._buffers:
            buffer.write(bytes(shape.block_bytes))

    def read(self, files: Sequence[Path]) -> int:
        """Reads every byte of `files` and returns their number."""
        flags = os.O_RDONLY | (os.O_DIRECT if self._shape.direct else 0)
        step = self._shape.block_bytes
        fds = [os.open(path, flags) for path in files]
        try:
            # All lanes share one iterator, so a slow read delays only its own lane.
            blocks = iter(
                [
                    (fd, at, size)
                    for fd in fds
                    for size in [os.fstat(fd).st_size]
                    for at in range(0, size, step)
                ]
            )
            with ThreadPoolExecutor(self._shape.in_flight) as pool:
                reads = [pool.submit(_read_blocks, blocks, buffer) for buffer in self._buffers]
                return sum(read.result() for read in reads)
        finally:
            for fd in fds:
                os.close(fd)


def _read_blocks(blocks: Iterator[tuple[int, int, int]], buffer: mmap.mmap) -> int:
    total = 0
    for fd, offset, size in blocks:
        expected = min(len(buffer), size - offset)
        received = os.preadv(fd, [buffer], offset)
        if received < expected:
            raise OSError(f"read {received} of {expected} bytes at offset {offset}")
        total += received
    return total


def copy_memory(source: State, target: State, threads: int = 1) -> None:
    """Copies the tensors of `source` into `target` by memcpy; the threads share each tensor."""
    pairs = [
        (copy.data_ptr(), original.data_ptr(), original.nbytes)
        for original, copy in zip(tensors(source), tensors(target), strict=True)
    ]

    def copy_share(lane: int) -> None:
        for destination, origin, size in pairs:
            begin, end = size * lane // threads, size * (lane + 1) // threads
            ctypes.memmove(destination + begin, origin + begin, end - begin)

    with ThreadPoolExecutor(threads) as pool:
        for copied in [pool.submit(copy_share, lane) for lane in range(threads)]:
            copied.result()


def copy_memory_by_torch(source: State, target: State) -> None:
    """Copies the tensors of `source` into `target` by Tensor.copy_, which chooses its threads."""
    for original, copy in zip(tensors(source), tensors(target), strict=True):
        copy.copy_(original)
