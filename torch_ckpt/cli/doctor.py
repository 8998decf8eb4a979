"""``torch-ckpt doctor``: what a directory's file system is and does, measured there.

All files are made in a directory of their own beneath it, which is removed whatever happens, but
for a signal that ends the process at once.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from torch_ckpt import _core
from torch_ckpt._base.formatting import printable, size, table
from torch_ckpt._base.free_space import free_bytes, require_room
from torch_ckpt.api import load, save
from torch_ckpt.checkpoint.directory import OpenDirectory

#: Threads with which bandwidth is measured.
THREADS = (1, 2, 4, 8)

#: Of the bytes that are written and read for each measurement.
DEFAULT_BYTES = 256 << 20

#: Less says nothing of a disk.
LEAST_BYTES = 8 * 4096

# Power cuts and crash states were tried with these: docs/durability.md.
_TRIED = {"ext4", "xfs"}
_IN_MEMORY = {"tmpfs", "ramfs"}
_OF_ONE_MACHINE = _TRIED | _IN_MEMORY | {"ext2", "ext3", "btrfs", "zfs", "f2fs", "bcachefs"}

# So much slower than the best is as good as it: one run varies that much.
_AS_GOOD = 0.9

_ALIGNMENTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_TIMES = 20


@dataclass(frozen=True)
class Bandwidth:
    """One measurement, by a save or a load of the package itself.

    Attributes:
        kind: "write", with fsync, or "read", not from the page cache, checksums included.
        direct: whether by direct I/O.
        threads: reads or writes under way at once.
        bytes_per_second: what that came to.
    """

    kind: str
    direct: bool
    threads: int
    bytes_per_second: float


@dataclass(frozen=True)
class Assumption:
    """One of those that the promises of docs/durability.md rest on.

    Attributes:
        number: there.
        what: a clause for people.
        state: "holds", "fails" or "unknown".
        why: a clause for people.
    """

    number: int
    what: str
    state: str
    why: str


@dataclass
class DoctorReport:
    """What :func:`diagnose` found.

    Attributes:
        path: the directory.
        file_system, mount_point, mount_options: as the kernel says.
        free_bytes, free_inodes: for this user; None where the file system does not say.
        alignment: what offsets and lengths of direct I/O are aligned to at least, in bytes; None:
            there is no direct I/O.
        fsync_ms: median time of writing 4 KiB and fsync, in milliseconds.
        commit_ms: likewise of a commit: metadata written and renamed, files and directories
            fsynced.
        exclusive_rename: whether a rename can refuse to replace a file.
        locks: whether flock keeps two descriptors apart.
        bandwidths: what was measured.
        writer_options, reader_options: of FileSystemWriter and FileSystemReader, that suit it.
        assumptions: what of them can be told from here.
    """

    path: str
    file_system: str
    mount_point: str
    mount_options: str
    free_bytes: int | None
    free_inodes: int | None
    alignment: int | None = None
    fsync_ms: float = 0.0
    commit_ms: float = 0.0
    exclusive_rename: bool = False
    locks: bool = False
    bandwidths: list[Bandwidth] = field(default_factory=list)
    writer_options: dict[str, Any] = field(default_factory=dict)
    reader_options: dict[str, Any] = field(default_factory=dict)
    assumptions: list[Assumption] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no assumption is known to fail."""
        return all(assumption.state != "fails" for assumption in self.assumptions)

    def lines(self) -> Iterator[str]:
        """The whole report for people."""
        inodes = "" if self.free_inodes is None else f", {self.free_inodes} inodes"
        yield printable(f"{self.path}: {self.file_system} at {self.mount_point}")
        yield printable(f"mount options: {self.mount_options}")
        free = "not known" if self.free_bytes is None else size(self.free_bytes)
        yield f"free: {free}{inodes}"
        aligned = "no" if self.alignment is None else f"yes, aligned to {self.alignment} bytes"
        yield f"direct I/O: {aligned}"
        yield f"fsync: {self.fsync_ms:.2f} ms; a commit: {self.commit_ms:.2f} ms"
        yield f"locks: {'yes' if self.locks else 'no'}"
        yield ""
        header = ("THREADS", *(title for title, _, _ in self._columns()))
        rows = []
        for threads in THREADS:
            rates = (self._rate(kind, direct, threads) for _, kind, direct in self._columns())
            rows.append((str(threads), *(f"{size(rate)}/s" for rate in rates)))
        yield from table(header, rows, right=frozenset(header))
        yield ""
        for kind, options in (("Writer", self.writer_options), ("Reader", self.reader_options)):
            said = ", ".join(f"{name}={value!r}" for name, value in options.items())
            yield f"FileSystem{kind}(..., {said})"
        yield ""
        for assumption in self.assumptions:
            yield printable(
                f"assumption {assumption.number}, {assumption.what}: {assumption.state} "
                f"({assumption.why})"
            )

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "ok": self.ok}

    def _columns(self) -> list[tuple[str, str, bool]]:
        kinds = [(one.kind, one.direct) for one in self.bandwidths if one.threads == THREADS[0]]
        return [
            (f"{kind.upper()}{', DIRECT' if direct else ''}", kind, direct)
            for kind, direct in kinds
        ]

    def _rate(self, kind: str, direct: bool, threads: int) -> float:
        wanted = (kind, direct, threads)
        return next(
            one.bytes_per_second
            for one in self.bandwidths
            if (one.kind, one.direct, one.threads) == wanted
        )


def diagnose(path: str | os.PathLike[str], *, measured_bytes: int = DEFAULT_BYTES) -> DoctorReport:
    """Looks at the file system of a directory, and measures what saves and loads reach there.

    Writes ``measured_bytes`` ten times and reads them eight times, half of that by direct I/O;
    never more is there at once, nor in memory.

    Args:
        path: a directory that is there and may be written to.
        measured_bytes: of one measurement.

    Raises:
        OSError: it is not there, or may not be written to; ``ENOSPC`` where less is free.
        ValueError: ``measured_bytes`` is too few.
    """
    if measured_bytes < LEAST_BYTES:
        raise ValueError(f"measured_bytes must be at least {LEAST_BYTES}, got {measured_bytes}")
    place = os.path.realpath(path)
    mount = mount_of(place, _mounts())
    space = os.statvfs(place)
    report = DoctorReport(
        path=os.fspath(path),
        file_system=mount.file_system,
        mount_point=mount.point,
        mount_options=mount.options,
        free_bytes=free_bytes(place),
        free_inodes=space.f_favail if space.f_files else None,
    )
    require_room(
        report.path,
        2 * measured_bytes,
        f"a measurement writes {size(measured_bytes)}, and twice as much must be free",
        "choose a smaller size (--size), or make room",
    )
    with _directory_in(place) as directory:
        report.alignment = direct_alignment(directory)
        report.fsync_ms = _median_ms(_fsync_of(directory))
        with closing(OpenDirectory(directory)) as opened:
            report.commit_ms = _median_ms(
                lambda: _core.publish_contents(opened, "metadata", b"x" * 4096)
            )
        report.exclusive_rename = _renames_exclusively(directory)
        report.locks = _has_locks(directory)
        for direct in (False, True) if report.alignment is not None else (False,):
            _measure(directory, measured_bytes, direct, report.bandwidths)
    report.writer_options = options_for("write", report.bandwidths)
    report.reader_options = options_for("read", report.bandwidths)
    report.assumptions = assumptions_of(report)
    return report


# --- what the kernel says ------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """A line of ``/proc/self/mountinfo``.

    Attributes:
        point: where it is mounted.
        file_system: its type.
        options: of the mount and of the file system.
    """

    point: str
    file_system: str
    options: str


def _mounts() -> list[Mount]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return [parsed_mount(line) for line in lines]


def parsed_mount(line: str) -> Mount:
    """The mount that a line of ``mountinfo`` is about (proc(5) has its fields)."""
    own, _, super_block = line.partition(" - ")
    fields, (file_system, _source, options) = own.split(), super_block.split(maxsplit=2)
    # Blanks and the like are written as octal numbers.
    point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
    both = dict.fromkeys([*fields[5].split(","), *options.strip().split(",")])
    return Mount(point, file_system, ",".join(both))


def mount_of(path: str, mounts: list[Mount]) -> Mount:
    """The mount that a path without links lies in: the deepest, and of these the last."""
    found = Mount("/", "unknown", "")
    for mount in mounts:
        beneath = mount.point.rstrip("/") + "/"
        if f"{path}/".startswith(beneath) and len(mount.point) >= len(found.point):
            found = mount
    return found


# --- what is tried -------------------------------------------------------------------------------


@contextmanager
def _directory_in(path: str) -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix=".torch-ckpt-doctor-", dir=path)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def direct_alignment(directory: str) -> int | None:
    """The smallest alignment, in bytes, with which a file there is read directly; None: none."""
    path = os.path.join(directory, "direct")
    with open(path, "wb") as stream:
        stream.write(bytes(2 * _ALIGNMENTS[-1]))
        stream.flush()
        os.fsync(stream.fileno())
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
    # Anonymous memory begins at a page, and a page is aligned to all that devices ask for.
    with closing(mmap.mmap(-1, _ALIGNMENTS[-1])) as memory:
        try:
            for alignment in _ALIGNMENTS:
                with suppress(OSError), memoryview(memory)[:alignment] as target:
                    if os.preadv(descriptor, [target], alignment) == alignment:
                        return alignment
        finally:
            os.close(descriptor)
    return None


def _fsync_of(directory: str) -> Callable[[], None]:
    path = os.path.join(directory, "fsync")

    def write() -> None:
        with open(path, "wb") as stream:
            stream.write(bytes(4096))
            stream.flush()
            os.fsync(stream.fileno())

    return write


def _median_ms(action: Callable[[], None]) -> float:
    times = []
    for _ in range(_TIMES):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def _renames_exclusively(directory: str) -> bool:
    try:
        with closing(OpenDirectory(directory)) as opened:
            _core.publish_contents(opened, "exclusive", b"old", replace=False)
            _core.publish_contents(opened, "exclusive", b"new", replace=False)
    except FileExistsError:
        with open(os.path.join(directory, "exclusive"), "rb") as stream:
            return stream.read() == b"old"
    except OSError:
        return False
    return False


def _has_locks(directory: str) -> bool:
    with closing(OpenDirectory(directory)) as one, closing(OpenDirectory(directory)) as other:
        return one.try_lock_exclusive() and not other.try_lock_exclusive()


def _measure(directory: str, count: int, direct: bool, found: list[Bandwidth]) -> None:
    # Random, since some file systems compress; as many tensors as threads have work for.
    parts = max(THREADS)
    state = {f"t{n}": torch.empty(count // parts // 8, dtype=torch.int64) for n in range(parts)}
    for tensor in state.values():
        tensor.random_()
    total = sum(tensor.nbytes for tensor in state.values())

    def add(kind: str, threads: int, begun: float) -> None:
        rate = total / (time.perf_counter() - begun)
        found.append(Bandwidth(kind, direct, threads, rate))

    # The engine's threads and memory come with the first save.
    save(state, os.path.join(directory, "warm"), no_dist=True, thread_count=parts, direct_io=direct)
    shutil.rmtree(os.path.join(directory, "warm"))
    for threads in THREADS:
        target = os.path.join(directory, f"{threads}")
        begun = time.perf_counter()
        save(state, target, no_dist=True, thread_count=threads, direct_io=direct)
        add("write", threads, begun)
        _drop_cached(target)
        begun = time.perf_counter()
        load(state, target, no_dist=True, thread_count=threads, direct_io=direct)
        add("read", threads, begun)
        shutil.rmtree(target)


def _drop_cached(directory: str) -> None:
    """Has the page cache forget files, which are clean."""
    for name in os.listdir(directory):
        descriptor = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# --- what follows from it ------------------------------------------------------------------------


def options_for(kind: str, bandwidths: list[Bandwidth]) -> dict[str, Any]:
    """The fewest threads that are about as fast as any, and direct I/O unless it is slower."""
    of_kind = [one for one in bandwidths if one.kind == kind]

    def best(direct: bool) -> float:
        return max((one.bytes_per_second for one in of_kind if one.direct is direct), default=0.0)

    use_direct = best(True) >= _AS_GOOD * best(False)
    enough = _AS_GOOD * best(use_direct)
    threads = min(
        one.threads
        for one in of_kind
        if one.direct is use_direct and one.bytes_per_second >= enough
    )
    is_known = any(one.direct for one in of_kind)
    return {"thread_count": threads, "direct_io": "auto" if use_direct or not is_known else False}


def assumptions_of(report: DoctorReport) -> list[Assumption]:
    """What of docs/durability.md's list can be told by the file system and by what was tried."""
    kind = report.file_system
    options = set(report.mount_options.split(","))
    tried = ("holds", f"tried on {kind}") if kind in _TRIED else ("unknown", f"not tried on {kind}")

    flushed = tried
    if kind in _IN_MEMORY:
        flushed = "fails", f"{kind} is memory: nothing survives"
    elif options & {"nobarrier", "barrier=0"}:
        flushed = "fails", "it is mounted without barriers"
    elif kind in _TRIED:
        flushed = "holds", f"tried on {kind}; a disk that lies about flushes is not seen from here"

    renamed = tried
    if not report.exclusive_rename:
        renamed = "fails", "a rename that must not replace a file replaced it, or is not offered"

    recovered = tried
    if kind in _IN_MEMORY:
        recovered = "fails", f"{kind} has no journal"

    seen = "unknown", f"machines may share {kind}, and their caches then differ"
    locked = "unknown", f"it keeps two descriptors apart here; {kind} may not tell other machines"
    if kind in _OF_ONE_MACHINE:
        seen = "holds", "for ranks on this machine"
        locked = "holds", "two descriptors were kept apart"
    if not report.locks:
        locked = "fails", "flock does not keep two descriptors apart"

    found = [
        (1, "fsync survives a power cut", flushed),
        (2, "a rename is atomic", renamed),
        (3, "the file system recovers by its journal", recovered),
        (5, "all ranks see one file system", seen),
        (6, "flock reaches all who save", locked),
    ]
    return [Assumption(number, what, *verdict) for number, what, verdict in found]
