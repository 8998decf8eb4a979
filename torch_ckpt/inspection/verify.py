"""``verify``: all of a checkpoint against all its checksums, without loading it.

1. The metadata is read, and its directory shared, as for a load.
2. What it says is compared with itself (every shard is stored somewhere, shards cover their tensor)
   and with the lengths of the files: none is shorter or longer than its records.
3. The engine reads every record that lies in a file and compares it with every checksum: blocks,
   archive and objects where the metadata has them, else the CRC-32 of every entry of the archive.
4. An error of the machine, such as a lack of descriptors, is not damage: the report names what
   could not be read apart from what is damaged.

Nothing ends it before its end: a report names all that was found.
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

import torch

from torch_ckpt import _C
from torch_ckpt._base.formatting import plural, printable, size
from torch_ckpt._base.progress import Progress, ProgressOption, Reporter
from torch_ckpt.checkpoint.coverage import gap_in
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import METADATA_NAME, read_index_in
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME, STEP_NAME
from torch_ckpt.errors import Unsafe
from torch_ckpt.loading.reader import DEFAULT_THREADS, LEAST_INFLIGHT_BYTES, shared

_OF_A_RANK = re.compile(rf"^__\d+{re.escape(METADATA_NAME)}$")

# What the system says of a file that is not as the checkpoint needs it. The rest, such as EMFILE,
# EACCES or ETIMEDOUT, is about the machine and the reader.
_OF_THE_FILE = {
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


def is_damage(error_number: int) -> bool:
    """Whether a failed system call says that a file is damaged, and nothing of the machine."""
    return error_number in _OF_THE_FILE


@dataclass(frozen=True)
class Damage:
    """Something in a file that is not as it should be.

    Attributes:
        name: of the tensor or object; None: the file as a whole.
        file: relative to the checkpoint's directory.
        offset: in the file, in bytes; None: not at one place.
        bytes: how many are damaged from there on; 0: not known how many.
        what: a clause for people.
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
class VerifyReport:
    """What :func:`verify` found.

    Attributes:
        checkpoint: the directory.
        records: that were read and compared; of tensors one for each shard.
        bytes: of these records.
        seconds: that it took.
        damaged: damaged records and files, by file and offset.
        missing: (file, names stored in it) of files that are not there.
        incomplete: (name, what) of tensors and objects that the metadata does not place wholly.
        unread: records and files that could not be read for a reason of the machine, such as a lack
            of file descriptors or of permission. Whether they are sound is not known.
        unverifiable: names of records, without a checksum of all of their bytes, such as
            ``torch.serialization.set_crc32_options(False)`` leaves.
        unreferenced: files in the directory that nothing names; these are not damage.
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
        """Whether all was read, and nothing is damaged, missing or incomplete."""
        return not (self.has_damage or self.unread)

    @property
    def has_damage(self) -> bool:
        """Whether something is damaged, missing or incomplete."""
        return bool(self.damaged or self.missing or self.incomplete)

    def faults(self) -> Iterator[str]:
        """A line for each thing that is wrong, with escaped names."""
        for damage in self.damaged:
            yield printable(f"damaged: {damage}")
        for file, names in self.missing:
            yield printable(f"missing: {file}, with {', '.join(names)}")
        for name, what in self.incomplete:
            yield printable(f"incomplete: {name}: {what}")
        for unread in self.unread:
            yield printable(f"not read: {unread}")

    def lines(self) -> Iterator[str]:
        """The whole report for people; the last line says what it comes to."""
        yield from self.faults()
        if self.unreferenced:
            yield printable(f"not part of the checkpoint: {', '.join(self.unreferenced)}")
        if self.unverifiable:
            count = plural(len(self.unverifiable), "record")
            yield printable(f"not verifiable, {count}: {', '.join(self.unverifiable)}")
        verdict = "all is sound"
        if not self.ok:
            parts = [
                (len(self.damaged), "place", "damaged"),
                (len(self.missing), "file", "missing"),
                (len(self.incomplete), "item", "incomplete"),
                (len(self.unread), "place", "not read"),
            ]
            verdict = ", ".join(f"{plural(n, noun)} {what}" for n, noun, what in parts if n)
        elif self.unverifiable:
            verdict = "nothing is wrong, as far as there are checksums"
        rate = self.bytes / self.seconds / 1e9 if self.seconds else 0.0
        yield (
            f"{printable(self.checkpoint)}: {plural(self.records, 'record')}, {size(self.bytes)}, "
            f"{self.seconds:.2f} s, {rate:.2f} GB/s: {verdict}"
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {
            "checkpoint": self.checkpoint,
            "ok": self.ok,
            "records": self.records,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "damaged": [asdict(damage) for damage in self.damaged],
            "missing": [{"file": file, "names": names} for file, names in self.missing],
            "incomplete": [{"name": name, "what": what} for name, what in self.incomplete],
            "unread": [asdict(unread) for unread in self.unread],
            "unverifiable": self.unverifiable,
            "unreferenced": self.unreferenced,
        }


def verify(
    checkpoint_id: str | os.PathLike[str],
    *,
    thread_count: int | None = None,
    max_inflight_bytes: int = 256 << 20,
    direct_io: bool | str = "auto",
    progress: ProgressOption = None,
) -> VerifyReport:
    """Reads all of a checkpoint, stock torch's too, and compares it with all its checksums.

    Args:
        checkpoint_id: directory of the checkpoint; or ``ROOT/40`` for step 40 of a run, or ROOT
            for its newest step.
        thread_count: reads under way at once; None: 8.
        max_inflight_bytes: most memory in bytes that is held, beyond the metadata.
        direct_io: True, False, or "auto": for what the page cache does not hold.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.

    Returns:
        All that is wrong, not only the first of it.

    Raises:
        FileNotFoundError: there is no committed checkpoint.
        Unsafe, Corrupt: its metadata cannot be read.
        OSError: the directory cannot be read.
        ValueError: an option is out of range.
    """
    if thread_count is not None and thread_count < 1:
        raise ValueError(f"thread_count must be at least 1, got {thread_count}")
    if max_inflight_bytes < LEAST_INFLIGHT_BYTES:
        raise ValueError(
            f"max_inflight_bytes must be at least {LEAST_INFLIGHT_BYTES}, got {max_inflight_bytes}"
        )
    if direct_io not in (True, False, "auto"):
        raise ValueError(f'direct_io must be True, False or "auto", got {direct_io!r}')
    begun = time.perf_counter()
    directory = open_checkpoint(checkpoint_id)
    try:
        shared(directory)
        look = _Look(directory)
        for name in _metadata_names(directory):
            look.add(name)
        look.find_unreferenced()
        look.find_trailing_bytes()
        look.read(thread_count or DEFAULT_THREADS, max_inflight_bytes, direct_io, progress)
    finally:
        directory.close()
    look.report.seconds = time.perf_counter() - begun
    return look.report


def _metadata_names(directory: OpenDirectory) -> list[str]:
    """The common metadata, or those of ranks that saved without collectives."""
    present = directory.names()
    of_ranks = sorted(name for name in present if _OF_A_RANK.match(name))
    return of_ranks if of_ranks and METADATA_NAME not in present else [METADATA_NAME]


class _Look:
    """Collects what is to be read, and what is wrong."""

    def __init__(self, directory: OpenDirectory) -> None:
        self.report = VerifyReport(directory.path)
        self._directory = directory
        self._metadata_files: set[str] = set()
        # Lengths of the files that metadata names; None: no record of it can be read.
        self._lengths: dict[str, int | None] = {}
        # Where the last record of a file ends.
        self._ends: dict[str, int] = {}
        self._missing: dict[str, list[str]] = {}
        self._numbers: dict[str, int] = {}
        self._tables: dict[str, bytes] = {}
        self._names: list[str] = []
        self._rows: list[tuple[int, int, int, Any, tuple[int, ...] | None]] = []

    def add(self, name: str) -> None:
        """Looks at what one metadata file says."""
        self._metadata_files.add(name)
        index = read_index_in(self._directory, name)
        self._tables.update(index.tables())
        uncovered = set(index.uncovered())
        for entry in index.names():
            self._look_at_entry(entry, index, is_covered=entry not in uncovered)
        for entry, shard in index.strays():
            self._look_at_place(entry, None, shard)

    def find_unreferenced(self) -> None:
        """Finds files that no metadata names; directories are left alone."""
        named = self._lengths.keys() | self._metadata_files
        if STEP_NAME.match(os.path.basename(os.path.normpath(self._directory.path))):
            named |= {MARKER_NAME, PINNED_NAME}
        unnamed = (name for name in self._directory.names() if name not in named)
        self.report.unreferenced.extend(sorted(filter(self._is_file, unnamed)))

    def find_trailing_bytes(self) -> None:
        """Finds bytes behind the last record of each file, which no writer leaves."""
        for file, has in self._lengths.items():
            end = self._ends.get(file, 0)
            if has is not None and has > end:
                what = "the file is longer than its records"
                self.report.damaged.append(Damage(None, file, end, has - end, what))

    def read(
        self,
        threads: int,
        max_inflight_bytes: int,
        direct_io: bool | str,
        progress: ProgressOption,
    ) -> None:
        """Lets the engine read the records."""
        report, files = self.report, list(self._numbers)
        total = sum(row[2] for row in self._rows)
        title = f"verify {os.path.basename(os.path.normpath(report.checkpoint))}"
        with Reporter(progress, title, None, total) as shown:
            findings, unverifiable = _C.verify_records(
                [(file, self._tables.get(file, b"")) for file in files],
                self._rows,
                directory=self._directory,
                threads=threads,
                max_inflight_bytes=max_inflight_bytes,
                direct_io=direct_io,
                progress=(lambda done: shown.update(Progress(total, 0, done)))
                if shown.active
                else None,
            )
        report.records, report.bytes = len(self._rows), total
        for number, row, offset, count, what, error_number in findings:
            name = None if row is None else self._names[row]
            of_machine = error_number and not is_damage(error_number)
            places = report.unread if of_machine else report.damaged
            places.append(Damage(name, files[number], offset, count, what))
        for places in (report.damaged, report.unread):
            places.sort(key=lambda place: (place.file, place.offset or 0))
        report.missing.extend(sorted(self._missing.items()))
        report.unverifiable.extend(sorted({self._names[row] for row in unverifiable}))

    # --- private ---------------------------------------------------------------------------------

    def _look_at_entry(self, name: str, index: _C.CheckpointIndex, *, is_covered: bool) -> None:
        tensor, shards = index.tensor(name), index.shards(name)
        dtype = None if tensor is None else getattr(torch, tensor[0])
        # Empty shards at one place have one record.
        places: dict[Any, _C.StoredShard] = {}
        for shard in shards:
            if shard[2] is not None:
                places[shard[2:5]] = shard
            elif tensor is None:
                self._incomplete(name, "the metadata does not say where it is stored")
            else:
                self._incomplete(
                    name,
                    f"the metadata does not say where its shard at {list(shard[0])} is stored",
                )
        if tensor is not None and not is_covered:
            fault = fault_of_shards(tensor[1], shards)
            if fault:
                self._incomplete(name, fault)
        for shard in places.values():
            self._look_at_place(name, dtype, shard)

    def _look_at_place(self, name: str, dtype: Any, shard: _C.StoredShard) -> None:
        _offsets, sizes, file, offset, length, is_transformed = shard
        assert file is not None
        if file not in self._lengths:
            self._lengths[file] = self._length_of(file)
        self._ends[file] = max(self._ends.get(file, 0), offset + length)
        has = self._lengths[file]
        if has is None:
            if file in self._missing:
                self._missing[file].append(name)
            return
        if length > has - min(offset, has):
            what = f"the record has {length} bytes, but the file ends at byte {has}"
            self._damaged(name, file, offset, what)
            return
        # A stream transform does not leave records of tensors.
        is_tensor = dtype is not None and not is_transformed
        number = self._numbers.setdefault(file, len(self._numbers))
        self._names.append(name)
        kind, shape = (dtype, sizes) if is_tensor else (None, None)
        self._rows.append((number, offset, length, kind, shape))

    def _is_file(self, name: str) -> bool:
        try:
            return not stat.S_ISDIR(os.stat(name, dir_fd=self._directory.fd).st_mode)
        except OSError:
            # A link to nowhere.
            return True

    def _length_of(self, file: str) -> int | None:
        try:
            return self._directory.length_of(file)
        except FileNotFoundError:
            self._missing[file] = []
        except OSError as error:
            what = f"it cannot be opened: {error.strerror}"
            if is_damage(error.errno or 0):
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


def fault_of_shards(whole: tuple[int, ...], shards: Sequence[_C.StoredShard]) -> str | None:
    """What is wrong with a tensor's shards, which all lie in it; None: they cover it."""
    if not shards and 0 not in whole:
        return "it has no shards"
    gap = gap_in(whole, [shard[:2] for shard in shards])
    return None if gap is None else f"no shard has its element {gap}"
