"""Loads remote checkpoints.

1. The metadata is copied to a staging directory and read like the metadata of a local checkpoint.
2. Before the engine reads a wave of records, the bytes that it will read are fetched into sparse
   files, which have the names and lengths of the remote files. The bytes keep their offsets. The
   engine then reads the sparse files like local files.
3. The fetched bytes are freed after each wave. The directory is removed at the end of the load.

For a partial read of a record, both ends of the record are fetched first, because they describe the
layout of the elements. The location of the wanted part can be computed only for row-major tensors.
Other records are fetched in full.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.utils import _create_file_view

from torch_ckpt import _C, _core
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES
from torch_ckpt.checkpoint.step_names import MARKER_NAME
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.reading import Reading, location_of
from torch_ckpt.steps.remote_files import RemoteFiles, require_staging_room
from torch_ckpt.steps.remote_ranges import (
    SMALL_BYTES,
    Range,
    block_sizes,
    box_ranges,
    coalesced,
    ends_of_record,
    record_ranges,
)

# Size of a request: large enough to hide latency, small enough to keep MOST_REQUESTS in memory.
_REQUEST_BYTES = 8 << 20

_Wanted = dict[str, list[Range]]
_Record = tuple[str, int]  # file, and offset in the file


class RemoteReader(FileSystemReader):
    """Reads byte ranges of a checkpoint beneath a URL.

    Args:
        files: files of the checkpoint.
        staging_dir: local directory for fetched bytes; None uses the system's temporary directory.
        wave_bytes: maximum number of bytes to fetch before the engine reads them. A larger record
            is fetched separately.
        options: passed to :class:`FileSystemReader`.

    Raises (in addition to :class:`FileSystemReader`):
        FileNotFoundError: the checkpoint, or its marker, does not exist.
        OSError: a request failed (``filename`` is the URL), or the staging directory is full.
    """

    def __init__(
        self,
        files: RemoteFiles,
        staging_dir: str | None,
        *,
        wave_bytes: int = 1 << 30,
        **options: Any,
    ) -> None:
        super().__init__(files.url, **options)
        self._wave_bytes = wave_bytes
        self._files = files
        self._staging_dir = staging_dir
        self._end_staging: Callable[[], Any] = lambda: None
        self._staged_path = Path()
        self._sizes: dict[str, int] = {}
        self._tables: dict[str, bytes] = {}
        self._blocks: dict[str, dict[int, int]] = {}
        self._version: str | None = None

    @property
    def checkpoint_id(self) -> str:
        return self._files.url

    @property
    def version(self) -> str | None:
        # The checkpoint is not locked, so another save may replace it between two ranks' reads.
        return self._version

    def _refuse_url(self) -> None:
        """Accepts the URL: the base class reads the local staging directory."""

    def release(self) -> None:
        super().release()
        self._end_staging()

    def read_all_but_tensors(self, reading: Reading) -> None:
        wanted: _Wanted = defaultdict(list)
        for item in reading.transformed:
            info = location_of(item, self.storage_data)
            wanted[info.relative_path].append((info.offset, info.offset + info.length))
        with self._staged(wanted):
            super().read_all_but_tensors(reading)

    def read_bytes(self, reads: list[_core.ObjectRead]) -> list[bytes]:
        wanted: _Wanted = defaultdict(list)
        for read in reads:
            wanted[read.file].append((read.offset, read.offset + read.length))
        with self._staged(wanted):
            return super().read_bytes(reads)

    def read_tensors(self, reads: _C.TensorReads) -> None:
        for wave, wanted in self._waves(list(reads)):
            with self._staged(wanted):
                super().read_tensors(reads.subset(wave))

    # --- private ---------------------------------------------------------------------------------

    def _metadata_bytes(self, name: str) -> tuple[bytes, str]:
        listing = self._files.list()
        for needed in (name, MARKER_NAME):
            if needed not in listing:
                raise FileNotFoundError(
                    errno.ENOENT, f"not a complete checkpoint: {needed} is missing", self._files.url
                )
        self._sizes = {file: entry.bytes for file, entry in listing.items()}
        self._tables, self._blocks = {}, {}
        if self._sizes[name] > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{self._files.url_of(name)} has {self._sizes[name]} bytes, more than the limit of "
                f"{MAX_METADATA_BYTES} bytes"
            )
        staging = tempfile.mkdtemp(prefix="torch_ckpt-", dir=self._staging_dir)
        # Use a finalizer, because dcp.load does not notify its reader when it ends.
        self._end_staging = weakref.finalize(self, shutil.rmtree, staging, ignore_errors=True)
        # Progress bars and messages show this name.
        self.path = self._staged_path = Path(staging, os.path.basename(self._files.url))
        self._staged_path.mkdir()
        data = self._files.read(name)
        self._version = hashlib.sha256(data).hexdigest()
        (self._staged_path / name).write_bytes(data)
        return super()._metadata_bytes(name)

    def _read_metadata(self, rank: int | None) -> tuple[Metadata, _core.CheckpointIndex | None]:
        with self._errors_with_url():
            return super()._read_metadata(rank)

    @contextmanager
    def _errors_with_url(self) -> Iterator[None]:
        """Replaces the path of the staging directory with the URL in errors."""
        try:
            yield
        except CheckpointError as error:
            error.args = tuple(
                self._with_url(arg) if isinstance(arg, str) else arg for arg in error.args
            )
            raise
        except OSError as error:
            if isinstance(error.filename, str) and error.errno != errno.ENOSPC:
                error.filename = self._with_url(error.filename)
            raise

    def _with_url(self, text: str) -> str:
        staged = self._staged_path
        return text.replace(str(staged), self._files.url) if staged.name else text

    @contextmanager
    def _staged(self, wanted: _Wanted) -> Iterator[None]:
        """Fetches ranges into the staging directory for the duration of a block."""
        self._fetch(wanted)
        with self._errors_with_url():
            yield
        for file in wanted:
            # Free the fetched bytes. After a failure, release() removes the directory.
            os.truncate(self._staged_path / file, 0)
            os.truncate(self._staged_path / file, self._sizes[file])

    def _waves(self, reads: list[_C.TensorRead]) -> Iterator[tuple[list[int], _Wanted]]:
        """Groups the reads that are staged together, in order. Yields the numbers of each group
        with the byte ranges to stage."""
        ranges_of = self._ranges_of(reads)
        wave: list[int] = []
        wanted: dict[_Record, list[Range]] = {}
        total = 0
        for number, read in enumerate(reads):
            record = read.file, read.offset
            more = sum(end - begin for begin, end in ranges_of[record])
            if record not in wanted:
                if wave and total + more > self._wave_bytes:
                    yield wave, _by_file(wanted)
                    wave, wanted, total = [], {}, 0
                wanted[record] = ranges_of[record]
                total += more
            wave.append(number)
        if wave:
            yield wave, _by_file(wanted)

    def _ranges_of(self, reads: list[_C.TensorRead]) -> dict[_Record, list[Range]]:
        """Returns the byte ranges that the engine reads, by record, as offsets in the record's
        file."""
        records: dict[_Record, list[_C.TensorRead]] = defaultdict(list)
        for read in reads:
            records[read.file, read.offset].append(read)
        partial = {
            record: its_reads
            for record, its_reads in records.items()
            if all(map(_may_be_read_partially, its_reads))
        }
        ends = {record: _ends(its_reads[0]) for record, its_reads in partial.items()}
        self._fetch(_by_file(ends))
        found = {}
        for (file, offset), its_reads in records.items():
            length = max(read.length for read in its_reads)
            ranges: list[Range] = [(0, length)]
            if (file, offset) in partial and self._is_row_major(its_reads[0]):
                ranges = record_ranges(
                    (
                        box
                        for read in its_reads
                        for box in box_ranges(
                            read.sizes,
                            read.region_offsets,
                            read.region_lengths,
                            read.dtype.itemsize,
                        )
                    ),
                    length,
                    _payload_bytes(its_reads[0]),
                    self._block_bytes(file, offset),
                )
            found[file, offset] = [(offset + begin, offset + end) for begin, end in ranges]
        return found

    def _is_row_major(self, read: _C.TensorRead) -> bool:
        """True if a record contains the tensor that a read describes, in row-major order. Both ends
        of the record must have been fetched."""
        with open(self._staged_path / read.file, "rb") as stream, torch.serialization.skip_data():
            view: Any = _create_file_view(cast(io.IOBase, stream), read.offset, read.length)
            try:
                stored = torch.load(view, map_location="cpu", weights_only=True)
            except Exception:
                # The engine will report the damage, or read the record with torch.load.
                return False
        return (
            type(stored) is torch.Tensor
            and stored.dtype == read.dtype
            and stored.shape == read.sizes
            and bool(stored.is_contiguous())
            and int(stored.storage_offset()) == 0
        )

    def _block_bytes(self, file: str, offset: int) -> int:
        """Returns the size of a record's checksummed blocks, in bytes; 1 if it has none."""
        if file not in self._blocks:
            if self.options.verify and not self._tables:
                self._tables = self.checksum_tables()
            self._blocks[file] = block_sizes(self._tables.get(file, b""))
        return self._blocks[file].get(offset, 1)

    def _fetch(self, wanted: _Wanted) -> None:
        requests = []
        for file, ranges in wanted.items():
            self._make_sparse(file)
            for begin, range_end in coalesced(ranges):
                # The engine reports ranges beyond the end of the file.
                end = min(range_end, self._sizes[file])
                starts = range(begin, end, _REQUEST_BYTES)
                requests += [(file, at, min(at + _REQUEST_BYTES, end)) for at in starts]
        total = sum(end - begin for _file, begin, end in requests)
        require_staging_room(str(self._staged_path), total, self._files.url)
        self._files.for_each(self._fetch_one, requests)

    def _fetch_one(self, file: str, begin: int, end: int) -> None:
        data = memoryview(self._files.read(file, begin, end))
        self.moved.bytes += len(data)
        descriptor = os.open(self._staged_path / file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while data:
                written = os.pwrite(descriptor, data, begin)
                data, begin = data[written:], begin + written
        finally:
            os.close(descriptor)

    def _make_sparse(self, file: str) -> None:
        path = self._staged_path / file
        if file not in self._sizes:
            raise FileNotFoundError(
                errno.ENOENT,
                "the metadata names a file that does not exist; another save may have replaced the "
                "checkpoint during this load",
                self._files.url_of(file),
            )
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, self._sizes[file])


def _by_file(records: dict[_Record, list[Range]]) -> _Wanted:
    wanted: _Wanted = defaultdict(list)
    for (file, _offset), ranges in records.items():
        wanted[file] += ranges
    return wanted


def _ends(read: _C.TensorRead) -> list[Range]:
    """Returns the ranges of both ends of a read's record, as offsets in the file."""
    end_bytes = ends_of_record(read.length, _payload_bytes(read))
    assert end_bytes is not None
    begin, end = read.offset, read.offset + read.length
    return [(begin, begin + end_bytes), (end - end_bytes, end)]


def _payload_bytes(read: _C.TensorRead) -> int:
    """Returns the size of the stored tensor in bytes."""
    return prod(read.sizes) * read.dtype.itemsize


def _may_be_read_partially(read: _C.TensorRead) -> bool:
    if read.length <= SMALL_BYTES or read.region_lengths == read.sizes:
        return False
    return ends_of_record(read.length, _payload_bytes(read)) is not None
