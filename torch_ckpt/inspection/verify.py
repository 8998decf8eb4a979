"""``verify``: checks an entire checkpoint against its checksums, without loading it.

1. Take a shared lock on the directory, as a load does, and read the metadata.
2. Check that the metadata locates every shard, that the shards cover their tensors, and that no
   file is shorter or longer than its records.
3. Have the engine read every record and check it against all its checksums: those of blocks,
   archives and objects if the metadata has them, otherwise the CRC-32 of every archive entry.
4. List records that could not be read for a reason other than damage, such as too few file
   descriptors, separately from damaged records.

The check continues after damage, and the report lists all of it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.formatting import Report, plural, printable, size
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.index import METADATA_NAME, read_index_in
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.read_options import ReadOptions
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME, STEP_NAME
from torch_ckpt.errors import Unsafe

_METADATA_OF_RANK = re.compile(rf"^__\d+{re.escape(METADATA_NAME)}$")

# Errors that indicate a damaged file. Other errors, such as EMFILE, EACCES or ETIMEDOUT, are due to
# the machine or the reader's permissions.
_FILE_DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ENXIO,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EIO,
    errno.EREMOTEIO,
    errno.ENODATA,
    errno.EBADMSG,
    errno.EUCLEAN,
}


def is_file_damage(error_number: int) -> bool:
    """True if an errno indicates a damaged file rather than a failing machine."""
    return error_number in _FILE_DAMAGE


@dataclass(frozen=True)
class Damage:
    """A damaged or unreadable region of a file.

    Attributes:
        name: the tensor or object; None if the file itself is damaged.
        file: file name relative to the checkpoint directory.
        offset: byte offset in the file; None if the damage has no single offset.
        bytes: number of damaged bytes, starting at ``offset``; 0 if unknown.
        what: short description of the problem.

    Example::

        for damage in torch_ckpt.verify("run/40").damaged:
            print(damage.file, damage.offset, damage.what)
    """

    name: str | None
    file: str
    offset: int | None
    bytes: int
    what: str

    def __str__(self) -> str:
        text = self.file if self.name is None else f"{self.name}: {self.file}"
        if self.offset is not None:
            text += f" at byte {self.offset}"
        if self.bytes:
            text += f", {plural(self.bytes, 'byte')}"
        return f"{text}: {self.what}"


@dataclass
class VerifyReport(Report):
    """Result of :func:`verify`.

    Attributes:
        checkpoint: the checkpoint directory.
        records: number of records that were read and verified; each shard of a tensor is one
            record.
        bytes: total size of these records.
        seconds: duration of the verification.
        damaged: damaged records and files, sorted by file and offset.
        missing: (file, names stored in it) for each file that does not exist.
        incomplete: (name, problem) for each tensor or object whose data the metadata does not
            locate completely.
        unread: records and files that could not be read for a reason other than damage, such as too
            few file descriptors or a lack of permission. These records and files can still be
            intact.
        unverifiable: names of records without a checksum that covers every byte, such as records
            written with ``torch.serialization.set_crc32_options(False)``.
        unreferenced: files in the directory that the metadata does not name. These do not count as
            damage.

    Example::

        report = torch_ckpt.verify("run/40")
        if not report.ok:
            print(*report.faults(), sep="\\n")
    """

    checkpoint: str
    records: int = 0
    bytes: int = 0
    seconds: float = 0.0
    damaged: list[Damage] = field(default_factory=list)
    missing: list[tuple[str, list[str]]] = field(default_factory=list)
    incomplete: list[tuple[str, str]] = field(default_factory=list)
    unread: list[Damage] = field(default_factory=list)
    unverifiable: list[str] = field(default_factory=list)
    unreferenced: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if all records were read, and nothing is damaged, missing or incomplete."""
        return not (self.has_damage or self.unread)

    @property
    def has_damage(self) -> bool:
        """True if anything is damaged, missing or incomplete."""
        return bool(self.damaged or self.missing or self.incomplete)

    def faults(self) -> Iterator[str]:
        """Yields a line for each fault, with escaped names."""
        for damage in self.damaged:
            yield printable(f"damaged: {damage}")
        for file, names in self.missing:
            yield printable(f"missing: {file}, which holds {', '.join(names)}")
        for name, what in self.incomplete:
            yield printable(f"incomplete: {name}: {what}")
        for unread in self.unread:
            yield printable(f"not read: {unread}")

    def lines(self) -> Iterator[str]:
        """Yields the report as text, with escaped names; the last line is the verdict."""
        yield from self.faults()
        if self.unreferenced:
            yield printable(f"not part of the checkpoint: {', '.join(self.unreferenced)}")
        if self.unverifiable:
            count = plural(len(self.unverifiable), "record")
            yield printable(f"not verifiable, {count}: {', '.join(self.unverifiable)}")
        verdict = "no damage found"
        if not self.ok:
            parts = [
                (len(self.damaged), "location", "damaged"),
                (len(self.missing), "file", "missing"),
                (len(self.incomplete), "item", "incomplete"),
                (len(self.unread), "location", "not read"),
            ]
            verdict = ", ".join(f"{plural(n, noun)} {what}" for n, noun, what in parts if n)
        elif self.unverifiable:
            verdict = "no damage found, but some records lack checksums"
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        yield (
            f"{printable(self.checkpoint)}: {plural(self.records, 'record')}, {size(self.bytes)}, "
            f"{self.seconds:.2f} s, {rate:.2f} GB/s: {verdict}"
        )

    def document(self) -> dict[str, Any]:
        """Returns the report as a JSON document."""
        document = {"checkpoint": self.checkpoint, "ok": self.ok} | asdict(self)
        document["missing"] = [{"file": file, "names": names} for file, names in self.missing]
        document["incomplete"] = [{"name": name, "what": what} for name, what in self.incomplete]
        return document


def verify(
    checkpoint_id: str | os.PathLike[str],
    *,
    thread_count: int | None = None,
    max_inflight_bytes: int = 256 << 20,
    direct_io: bool | str = "auto",
    progress: ProgressOption = None,
) -> VerifyReport:
    """Reads an entire checkpoint and verifies it against all its checksums.

    Checkpoints written by stock torch are verified against the CRC-32 of each archive entry.

    Args:
        checkpoint_id: a checkpoint directory. If a run is saved in ROOT, pass ``ROOT/40`` for step
            40, or ``ROOT`` for the newest step.
        thread_count: number of concurrent reads; None means 8.
        max_inflight_bytes: memory limit in bytes, not counting the metadata.
        direct_io: bypass the page cache; "auto" does so only for data that is not cached.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.

    Returns:
        All faults found; ``report.ok`` is True if there are none.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Unsafe, Corrupt: the metadata cannot be read.
        OSError: the directory cannot be read.
        ValueError: an option is out of range.

    Example::

        report = torch_ckpt.verify("run/40")
        print(report)
    """
    options = ReadOptions(thread_count, max_inflight_bytes, direct_io)
    begun = time.perf_counter()
    directory = open_checkpoint(checkpoint_id)
    try:
        share_or_warn(directory)
        verification = _Verification(directory)
        for name in _metadata_names(directory):
            verification.add_metadata(name)
        verification.find_unreferenced()
        verification.find_trailing_bytes()
        verification.read_records(options, progress)
    finally:
        directory.close()
    verification.report.seconds = time.perf_counter() - begun
    return verification.report


def _metadata_names(directory: OpenDirectory) -> list[str]:
    """Returns the shared metadata file, or one per rank if ranks saved without collectives."""
    present = directory.names()
    of_ranks = sorted(name for name in present if _METADATA_OF_RANK.match(name))
    return of_ranks if of_ranks and METADATA_NAME not in present else [METADATA_NAME]


class _Verification:
    """Collects the records to read and the faults found."""

    def __init__(self, directory: OpenDirectory) -> None:
        self.report = VerifyReport(directory.path)
        self._directory = directory
        self._metadata_files: set[str] = set()
        # Length of each file that the metadata names; None if the file cannot be read.
        self._lengths: dict[str, int | None] = {}
        # End of the last record of each file.
        self._ends: dict[str, int] = {}
        self._missing: dict[str, list[str]] = {}
        self._numbers: dict[str, int] = {}
        self._tables: dict[str, bytes] = {}
        self._names: list[str] = []
        self._rows: list[tuple[int, int, int, str | None, tuple[int, ...] | None]] = []

    def add_metadata(self, file: str) -> None:
        """Checks one metadata file and collects its records."""
        self._metadata_files.add(file)
        index = read_index_in(self._directory, file)
        self._tables.update(index.tables())
        uncovered = set(index.uncovered())
        for name in index.names():
            self._add_item(name, index, is_covered=name not in uncovered)
        for name, shard in index.strays():
            self._add_record(name, None, shard)

    def find_unreferenced(self) -> None:
        """Finds files that no metadata names; ignores directories."""
        named = self._lengths.keys() | self._metadata_files
        if STEP_NAME.match(os.path.basename(os.path.normpath(self._directory.path))):
            named |= {MARKER_NAME, PINNED_NAME}
        unnamed = (name for name in self._directory.names() if name not in named)
        self.report.unreferenced.extend(sorted(filter(self._is_file, unnamed)))

    def find_trailing_bytes(self) -> None:
        """Finds bytes after the last record of each file; no writer leaves any there."""
        for file, length in self._lengths.items():
            end = self._ends.get(file, 0)
            if length is not None and length > end:
                what = "the file is longer than its records"
                self.report.damaged.append(Damage(None, file, end, length - end, what))

    def read_records(self, options: ReadOptions, progress: ProgressOption) -> None:
        """Has the engine read and verify the records."""
        report, files = self.report, list(self._numbers)
        total = sum(row[2] for row in self._rows)
        title = f"verify {os.path.basename(os.path.normpath(report.checkpoint))}"
        with reporting(progress, title, None, total) as shown:
            findings, unverifiable = _core.verify_records(
                [(file, self._tables.get(file, b"")) for file in files],
                self._rows,
                directory=self._directory,
                threads=options.threads,
                max_inflight_bytes=options.max_inflight_bytes,
                direct_io=options.direct_io,
                progress=shown and (lambda done: shown(Progress(total, 0, done))),
            )
        report.records, report.bytes = len(self._rows), total
        for number, row, offset, count, what, error_number in findings:
            name = None if row is None else self._names[row]
            is_unread = error_number and not is_file_damage(error_number)
            faults = report.unread if is_unread else report.damaged
            faults.append(Damage(name, files[number], offset, count, what))
        for faults in (report.damaged, report.unread):
            faults.sort(key=lambda fault: (fault.file, fault.offset or 0))
        report.missing.extend(sorted(self._missing.items()))
        report.unverifiable.extend(sorted({self._names[row] for row in unverifiable}))

    # --- private ---------------------------------------------------------------------------------

    def _add_item(self, name: str, index: _core.CheckpointIndex, *, is_covered: bool) -> None:
        tensor, shards = index.tensor(name), index.shards(name)
        dtype = None if tensor is None else tensor[0]
        # Use locations as keys, because empty shards may share one record.
        records: dict[Any, _core.StoredShard] = {}
        for shard in shards:
            if shard[2] is not None:
                records[shard[2:5]] = shard
            elif tensor is None:
                self._incomplete(name, "the metadata gives no location for it")
            else:
                self._incomplete(
                    name, f"the metadata gives no location for the shard at offset {list(shard[0])}"
                )
        if tensor is not None and not is_covered:
            fault = find_shard_fault(tensor[1], shards)
            if fault:
                self._incomplete(name, fault)
        for shard in records.values():
            self._add_record(name, dtype, shard)

    def _add_record(self, name: str, dtype: str | None, shard: _core.StoredShard) -> None:
        _offsets, sizes, file, offset, length, is_transformed = shard
        assert file is not None
        if file not in self._lengths:
            self._lengths[file] = self._length_of(file)
        self._ends[file] = max(self._ends.get(file, 0), offset + length)
        file_length = self._lengths[file]
        if file_length is None:
            if file in self._missing:
                self._missing[file].append(name)
            return
        if length > file_length - min(offset, file_length):
            what = f"the record has {length} bytes, but the file ends at byte {file_length}"
            self._damaged(name, file, offset, what)
            return
        # The engine cannot check the dtype and shape of transformed data.
        is_tensor = dtype is not None and not is_transformed
        number = self._numbers.setdefault(file, len(self._numbers))
        self._names.append(name)
        kind, shape = (dtype, sizes) if is_tensor else (None, None)
        self._rows.append((number, offset, length, kind, shape))

    def _is_file(self, name: str) -> bool:
        try:
            return not stat.S_ISDIR(os.stat(name, dir_fd=self._directory.fd).st_mode)
        except OSError:
            # A dangling link.
            return True

    def _length_of(self, file: str) -> int | None:
        try:
            return self._directory.length_of(file)
        except FileNotFoundError:
            self._missing[file] = []
        except OSError as error:
            what = f"the file cannot be opened: {error.strerror}"
            if is_file_damage(error.errno or 0):
                self._damaged(None, file, None, what)
            else:
                self.report.unread.append(Damage(None, file, None, 0, what))
        except (Unsafe, ValueError) as error:
            self._damaged(None, file, None, str(error))
        return None

    def _damaged(self, name: str | None, file: str, offset: int | None, what: str) -> None:
        self.report.damaged.append(Damage(name, file, offset, 0, what))

    def _incomplete(self, name: str, what: str) -> None:
        self.report.incomplete.append((name, what))


def find_shard_fault(shape: tuple[int, ...], shards: Sequence[_core.StoredShard]) -> str | None:
    """Describes the gap between the shards of a tensor; None if the shards cover the tensor."""
    if not shards and 0 not in shape:
        return "the tensor has no shards"
    gap = _core.first_gap(shape, [shard[:2] for shard in shards])
    return None if gap is None else f"no shard covers the element at {gap}"
