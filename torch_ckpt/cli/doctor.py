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
from functools import partial
from pathlib import Path
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.checks import require_at_least
from torch_ckpt._base.formatting import plural, size
from torch_ckpt._base.progress import Progress
from torch_ckpt._base.system import free_bytes, mount_of, require_room
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.cli.diagnosis import Diagnosis, median_ms_of, seconds_of
from torch_ckpt.stores.probe import Check

#: Thread counts for which bandwidth is measured.
THREADS = (1, 2, 4, 8)

#: Bytes written and read in each measurement.
DEFAULT_MEASURED = 256 << 20

#: Minimum size of a measurement; less data would not measure the disk.
LEAST_MEASURED = 8 * 4096

# File systems that were tested with power cuts and crashes: docs/durability.md.
_TESTED = {"ext4", "xfs"}
_IN_MEMORY = {"tmpfs", "ramfs"}

# The assumptions in docs/durability.md that can be checked on one machine.
_ASSUMPTIONS = {
    1: "data survives a power cut after fsync",
    2: "renames are atomic",
    3: "the file system recovers from its journal",
    5: "all ranks see the same file system",
    6: "flock works between all processes that save",
}

#: "write" (includes fsync) or "read" (bypasses the page cache, includes checksums); True for direct
#: I/O; number of concurrent reads or writes.
Measurement = tuple[str, bool, int]

#: Bytes per second.
Rates = dict[Measurement, float]

# Measurements vary by about 10 % between runs, so treat this fraction of the best as equal.
_AS_GOOD = 0.9

_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def diagnose(
    path: str | os.PathLike[str],
    *,
    measured_bytes: int = DEFAULT_MEASURED,
    progress: Callable[[Progress], None] | None = None,
) -> Diagnosis:
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
    free, inodes = free_bytes(real_path), space.f_favail if space.f_files else None
    report = Diagnosis(
        os.fspath(path),
        {
            "file_system": mount.file_system,
            "mount_point": mount.point,
            "mount_options": mount.options,
            "free_bytes": free,
            "free_inodes": inodes,
        },
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
        alignment = measure_alignment(directory)
        is_direct = alignment is not None
        report.facts["direct_io"] = f"aligned to {alignment} bytes" if is_direct else "no"
        report.measured["fsync_ms"] = median_ms_of(
            lambda: _write_and_fsync(os.path.join(directory, "fsync"), 4096)
        )
        with closing(OpenDirectory(directory)) as opened:
            report.measured["commit_ms"] = median_ms_of(
                lambda: _core.publish_contents(opened, "metadata", b"x" * 4096)
            )
            renames, is_local = _check_exclusive_rename(opened), opened.is_local
        locks = _check_locks(directory)
        rates: Rates = {}
        total = (2 if is_direct else 1) * 2 * len(THREADS) * measured_bytes
        for measurement, rate in _measure(directory, measured_bytes, is_direct):
            rates[measurement] = rate
            if progress is not None:
                progress(Progress(total, 0, len(rates) * measured_bytes))
    for (kind, direct, threads), rate in rates.items():
        name = f"{kind}{'_direct' if direct else ''}_{plural(threads, 'thread')}".replace(" ", "_")
        report.measured[f"{name}_bytes_per_second"] = rate
    report.options["FileSystemWriter"] = choose_options("write", rates)
    report.options["FileSystemReader"] = choose_options("read", rates)
    report.checks = check_assumptions(
        mount.file_system, mount.options, is_local=is_local, renames=renames, locks=locks
    )
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


def _measure(directory: str, count: int, is_direct: bool) -> Iterator[tuple[Measurement, float]]:
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
    for direct in (False, True) if is_direct else (False,):
        # The first save starts the engine's threads and allocates its memory. Do not measure it.
        options = WriteOptions(thread_count=parts, direct_io=direct)
        save(state, target, no_dist=True, options=options)
        for threads in THREADS:
            shutil.rmtree(target)
            options = WriteOptions(thread_count=threads, direct_io=direct)
            write = partial(save, state, target, no_dist=True, options=options)
            yield ("write", direct, threads), total / seconds_of(write)
            _drop_page_cache(target)
            read_options = ReadOptions(thread_count=threads, direct_io=direct)
            read = partial(load, state, target, no_dist=True, options=read_options)
            yield ("read", direct, threads), total / seconds_of(read)
        shutil.rmtree(target)


def _drop_page_cache(directory: str) -> None:
    """Evicts a directory's files, which must already be on disk, from the page cache."""
    for path in Path(directory).iterdir():
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# --- conclusions ----------------------------------------------------------------------------------


def choose_options(kind: str, measured: Rates) -> dict[str, Any]:
    """Chooses the fewest threads that nearly reach the best rate, and direct I/O unless slower."""
    rates: dict[bool, dict[int, float]] = {False: {}, True: {}}
    for (measured_kind, direct, threads), rate in measured.items():
        if measured_kind == kind:
            rates[direct][threads] = rate
    best = {direct: max(of_mode.values(), default=0.0) for direct, of_mode in rates.items()}
    direct = best[True] >= _AS_GOOD * best[False]
    threads = min(n for n, rate in rates[direct].items() if rate >= _AS_GOOD * best[direct])
    return {"thread_count": threads, "direct_io": "auto" if direct or not rates[True] else False}


def check_assumptions(
    kind: str, mount_options: str, *, is_local: bool, renames: bool, locks: bool
) -> list[Check]:
    """Checks the assumptions in docs/durability.md, as far as one machine can.

    Args:
        kind: the file system.
        mount_options: separated by commas.
        is_local: True if other machines do not have the file system.
        renames: True if a rename can fail instead of replacing an existing file.
        locks: True if flock on one file descriptor excludes another.
    """
    tested = ("holds", f"tested on {kind}")
    if kind not in _TESTED:
        tested = ("unknown", f"not tested on {kind}")
    verdicts = dict.fromkeys(_ASSUMPTIONS, tested)
    if kind in _IN_MEMORY:
        verdicts[1] = "fails", f"{kind} is in memory, so nothing survives"
        verdicts[3] = "fails", f"{kind} has no journal"
    elif {*mount_options.split(",")} & {"nobarrier", "barrier=0"}:
        verdicts[1] = "fails", "the file system is mounted without barriers"
    elif kind in _TESTED:
        verdicts[1] = "holds", f"tested on {kind}; a disk that ignores flushes cannot be detected"
    if not renames:
        verdicts[2] = "fails", "exclusive renames are not supported, or one replaced a file"
    if is_local:
        verdicts[5] = "holds", "for the ranks on this machine"
        verdicts[6] = "holds", "flock excluded a second file descriptor"
    else:
        across = "run torchrun -m torch_ckpt doctor on two of them"
        verdicts[5] = verdicts[6] = "unknown", f"if several hosts share this {kind}, {across}"
    if not locks:
        verdicts[6] = "fails", "flock does not exclude a second file descriptor"
    return [Check(f"{n}. {what}", *verdicts[n]) for n, what in _ASSUMPTIONS.items()]
