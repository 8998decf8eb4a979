"""``torch-ckpt doctor``: measures a directory's file system and checks what saves rely on.

All files are written to a temporary directory inside the examined one. The temporary directory is
deleted even after an error or Ctrl-C, but not if a signal kills the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.checks import require_at_least
from torch_ckpt._base.formatting import Block, Report, Table, printable, size
from torch_ckpt._base.free_space import free_bytes, require_room
from torch_ckpt._base.mounts import mount_of
from torch_ckpt._base.progress import Progress
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.cli.timing import median_ms_of, seconds_of

#: Thread counts for which bandwidth is measured.
THREADS = (1, 2, 4, 8)

#: Bytes written and read in each measurement.
DEFAULT_MEASURED = 256 << 20

#: Minimum size of a measurement; less data would not measure the disk.
LEAST_MEASURED = 8 * 4096

# File systems that were tested with power cuts and crashes: docs/durability.md.
_TESTED = {"ext4", "xfs"}
_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCAL = _TESTED | _IN_MEMORY | {"ext2", "ext3", "btrfs", "zfs", "f2fs", "bcachefs"}

# The assumptions in docs/durability.md that can be checked on one machine.
_ASSUMPTIONS = {
    1: "data survives a power cut after fsync",
    2: "renames are atomic",
    3: "the file system recovers from its journal",
    5: "all ranks see the same file system",
    6: "flock works between all processes that save",
}

# Measurements vary by about 10 % between runs, so treat this fraction of the best as equal.
_AS_GOOD = 0.9

_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Bandwidth:
    """The measured bandwidth of one save or load."""

    kind: str  # "write" (includes fsync) or "read" (bypasses the page cache, includes checksums)
    direct: bool  # True for direct I/O
    threads: int  # number of concurrent reads or writes
    bytes_per_second: float


@dataclass(frozen=True)
class Assumption:
    """One of the numbered assumptions in docs/durability.md."""

    number: int
    what: str
    state: str  # "holds", "fails" or "unknown"
    why: str  # the reason for the state


@dataclass
class DoctorReport(Report):
    """The result of :func:`diagnose`."""

    path: str
    file_system: str
    mount_point: str
    mount_options: str
    # Available to this user; None if the file system does not report them.
    free_bytes: int | None
    free_inodes: int | None
    # Smallest alignment in bytes that direct I/O accepts for offsets and lengths; None if direct
    # I/O is not supported.
    alignment: int | None = None
    fsync_ms: float = 0.0  # median time to write 4 KiB and fsync
    # Median time of a commit: write and rename the metadata, fsync the file and the directory.
    commit_ms: float = 0.0
    exclusive_rename: bool = False  # a rename can fail instead of replacing an existing file
    locks: bool = False  # flock on one file descriptor excludes another
    bandwidths: list[Bandwidth] = field(default_factory=list)
    # Recommended options for FileSystemWriter and FileSystemReader.
    writer_options: dict[str, Any] = field(default_factory=dict)
    reader_options: dict[str, Any] = field(default_factory=dict)
    # Only those that can be checked on one machine.
    assumptions: list[Assumption] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True unless an assumption fails."""
        return all(assumption.state != "fails" for assumption in self.assumptions)

    def blocks(self) -> Iterator[Block]:
        """Yields the report as lines and a bandwidth table."""
        yield printable(f"{self.path}: {self.file_system} at {self.mount_point}")
        yield printable(f"mount options: {self.mount_options}")
        free = "unknown" if self.free_bytes is None else size(self.free_bytes)
        inodes = "" if self.free_inodes is None else f", {self.free_inodes} inodes"
        yield f"free: {free}{inodes}"
        aligned = "no" if self.alignment is None else f"yes, aligned to {self.alignment} bytes"
        yield f"direct I/O: {aligned}"
        yield f"fsync: {self.fsync_ms:.2f} ms, commit: {self.commit_ms:.2f} ms"
        yield f"locks: {'yes, within this host' if self.locks else 'no'}"
        yield ""
        yield self._bandwidth_table()
        yield ""
        for kind, options in (("Writer", self.writer_options), ("Reader", self.reader_options)):
            text = ", ".join(f"{name}={value!r}" for name, value in options.items())
            yield f"FileSystem{kind}(..., {text})"
        yield ""
        for assumption in self.assumptions:
            yield printable(
                f"assumption {assumption.number}, {assumption.what}: {assumption.state} "
                f"({assumption.why})"
            )

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document."""
        return {**asdict(self), "ok": self.ok}

    def _bandwidth_table(self) -> Table:
        rates = {(b.kind, b.direct, b.threads): b.bytes_per_second for b in self.bandwidths}
        columns = list(dict.fromkeys((kind, direct) for kind, direct, _ in rates))
        rows = [
            [str(threads), *(f"{size(rates[kind, direct, threads])}/s" for kind, direct in columns)]
            for threads in THREADS
        ]
        header = ["THREADS"]
        header += [f"{kind.upper()}{', DIRECT' if direct else ''}" for kind, direct in columns]
        return Table(header, rows, right=frozenset(header))


def diagnose(
    path: str | os.PathLike[str],
    *,
    measured_bytes: int = DEFAULT_MEASURED,
    progress: Callable[[Progress], None] | None = None,
) -> DoctorReport:
    """Examines the file system of a directory and measures saves and loads there.

    Writes ``measured_bytes`` ten times and reads them eight times, half of the times with direct
    I/O. At any time, at most ``measured_bytes`` are on disk, and the same amount is in memory.

    Args:
        path: an existing, writable directory.
        measured_bytes: number of bytes that each measurement writes or reads.
        progress: called after each measurement.

    Raises:
        OSError: the directory does not exist or is not writable; ``ENOSPC`` if the file system has
            less than twice ``measured_bytes`` of free space.
        ValueError: ``measured_bytes`` is too small.
    """
    require_at_least("measured_bytes", measured_bytes, LEAST_MEASURED)
    if os.path.exists(path) and not os.path.isdir(path):
        raise NotADirectoryError(
            errno.ENOTDIR,
            "this is a file. Pass the directory to examine, such as the one that contains the file",
            os.fspath(path),
        )
    real_path = os.path.realpath(path)
    mount = mount_of(real_path)
    space = os.statvfs(real_path)
    report = DoctorReport(
        path=os.fspath(path),
        file_system=mount.file_system,
        mount_point=mount.point,
        mount_options=mount.options,
        free_bytes=free_bytes(real_path),
        free_inodes=space.f_favail if space.f_files else None,
    )
    require_room(
        report.path,
        2 * measured_bytes,
        f"a measurement of {size(measured_bytes)} needs twice as much free space",
        "choose a smaller size (--size), or free some space",
    )
    with tempfile.TemporaryDirectory(
        prefix=".torch-ckpt-doctor-", dir=real_path, ignore_cleanup_errors=True
    ) as directory:
        report.alignment = measure_alignment(directory)
        report.fsync_ms = median_ms_of(
            lambda: _write_and_fsync(os.path.join(directory, "fsync"), 4096)
        )
        with closing(OpenDirectory(directory)) as opened:
            report.commit_ms = median_ms_of(
                lambda: _core.publish_contents(opened, "metadata", b"x" * 4096)
            )
            report.exclusive_rename = _check_exclusive_rename(opened)
        report.locks = _check_locks(directory)
        modes = (False,) if report.alignment is None else (False, True)
        total = len(modes) * 2 * len(THREADS) * measured_bytes
        for bandwidth in _measure_bandwidths(directory, measured_bytes, modes):
            report.bandwidths.append(bandwidth)
            if progress is not None:
                progress(Progress(total, 0, len(report.bandwidths) * measured_bytes))
    report.writer_options = choose_options("write", report.bandwidths)
    report.reader_options = choose_options("read", report.bandwidths)
    report.assumptions = check_assumptions(report)
    return report


# --- measurements and checks ----------------------------------------------------------------------


def measure_alignment(directory: str) -> int | None:
    """Finds the smallest alignment in bytes that direct reads accept; None if all of them fail."""
    path = os.path.join(directory, "direct")
    _write_and_fsync(path, 2 * _ALIGNMENTS[-1])
    # Anonymous memory starts at a page boundary, which is sufficient alignment for every device.
    memory = mmap.mmap(-1, _ALIGNMENTS[-1])
    with closing(memory), suppress(OSError), open(path, "rb", 0, opener=_open_direct) as file:
        for alignment in _ALIGNMENTS:
            with suppress(OSError), memoryview(memory)[:alignment] as target:
                if os.preadv(file.fileno(), [target], alignment) == alignment:
                    return alignment
    return None


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_DIRECT)


def _write_and_fsync(path: str, count: int) -> None:
    with open(path, "wb") as stream:
        stream.write(bytes(count))
        stream.flush()
        os.fsync(stream.fileno())


def _check_exclusive_rename(directory: OpenDirectory) -> bool:
    try:
        _core.publish_contents(directory, "exclusive", b"old", replace=False)
        _core.publish_contents(directory, "exclusive", b"new", replace=False)
    except FileExistsError:
        return Path(directory.path, "exclusive").read_bytes() == b"old"
    except OSError:
        pass
    return False


def _check_locks(directory: str) -> bool:
    with closing(OpenDirectory(directory)) as first, closing(OpenDirectory(directory)) as second:
        return first.try_lock_exclusive() and not second.try_lock_exclusive()


def _measure_bandwidths(directory: str, count: int, modes: tuple[bool, ...]) -> Iterator[Bandwidth]:
    import torch

    from torch_ckpt.api import load, save
    from torch_ckpt.options import ReadOptions, WriteOptions

    # Random values, because some file systems compress data; one tensor per thread.
    parts = max(THREADS)
    state = {f"t{n}": torch.empty(count // parts // 8, dtype=torch.int64) for n in range(parts)}
    for tensor in state.values():
        tensor.random_()
    total = sum(tensor.nbytes for tensor in state.values())

    target = os.path.join(directory, "checkpoint")
    for direct in modes:
        # The first save starts the engine's threads and allocates its memory. Do not measure it.
        options = WriteOptions(thread_count=parts, direct_io=direct)
        save(state, target, no_dist=True, options=options)
        for threads in THREADS:
            shutil.rmtree(target)
            options = WriteOptions(thread_count=threads, direct_io=direct)
            write = partial(save, state, target, no_dist=True, options=options)
            yield Bandwidth("write", direct, threads, total / seconds_of(write))
            _drop_page_cache(target)
            read_options = ReadOptions(thread_count=threads, direct_io=direct)
            read = partial(load, state, target, no_dist=True, options=read_options)
            yield Bandwidth("read", direct, threads, total / seconds_of(read))
        shutil.rmtree(target)


def _drop_page_cache(directory: str) -> None:
    """Evicts a directory's files, which must already be on disk, from the page cache."""
    for path in Path(directory).iterdir():
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- conclusions ----------------------------------------------------------------------------------


def choose_options(kind: str, bandwidths: list[Bandwidth]) -> dict[str, Any]:
    """Chooses the fewest threads that nearly reach the best rate, and direct I/O unless slower."""
    rates: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for one in bandwidths:
        if one.kind == kind:
            rates[one.direct][one.threads] = one.bytes_per_second
    best = {direct: max(of_mode.values(), default=0.0) for direct, of_mode in rates.items()}
    direct = best[True] >= _AS_GOOD * best[False]
    threads = min(n for n, rate in rates[direct].items() if rate >= _AS_GOOD * best[direct])
    return {"thread_count": threads, "direct_io": "auto" if direct or not rates[True] else False}


def check_assumptions(report: DoctorReport) -> list[Assumption]:
    """Checks the assumptions in docs/durability.md, as far as one machine can."""
    kind, options = report.file_system, set(report.mount_options.split(","))
    tested = ("holds", f"tested on {kind}")
    if kind not in _TESTED:
        tested = ("unknown", f"not tested on {kind}")
    verdicts = dict.fromkeys(_ASSUMPTIONS, tested)
    if kind in _IN_MEMORY:
        verdicts[1] = "fails", f"{kind} is in memory, so nothing survives"
        verdicts[3] = "fails", f"{kind} has no journal"
    elif options & {"nobarrier", "barrier=0"}:
        verdicts[1] = "fails", "the file system is mounted without barriers"
    elif kind in _TESTED:
        verdicts[1] = "holds", f"tested on {kind}; a disk that ignores flushes cannot be detected"
    if not report.exclusive_rename:
        verdicts[2] = "fails", "exclusive renames are not supported, or one replaced a file"
    if kind in _LOCAL:
        verdicts[5] = "holds", "for the ranks on this machine"
        verdicts[6] = "holds", "flock excluded a second file descriptor"
    else:
        across = "run torchrun -m torch_ckpt doctor on two of them"
        verdicts[5] = verdicts[6] = "unknown", f"if several hosts share this {kind}, {across}"
    if not report.locks:
        verdicts[6] = "fails", "flock does not exclude a second file descriptor"
    return [Assumption(number, what, *verdicts[number]) for number, what in _ASSUMPTIONS.items()]
