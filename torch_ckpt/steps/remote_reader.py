"""A load of a remote checkpoint.

1. The metadata is copied to a staging directory and read as any.
2. Before the engine reads a wave of records, the bytes of them that it will look at are fetched:
   into sparse files of the names and lengths of the remote ones, at the offsets that they have
   there. Resharding, conversion and verification are then the engine's, as for local files.
3. What was fetched is let go of behind each wave, and the directory at the end of the load.

Of a record that is wanted in part the ends are fetched first, since how its elements lie is written
there. Only of row-major ones it is known where the wanted part is; of others all is fetched.
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
from torch.distributed.checkpoint.utils import _create_file_view

from torch_ckpt import _C
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES
from torch_ckpt.checkpoint.metadata import checksum_tables
from torch_ckpt.checkpoint.step_names import MARKER_NAME
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.planners import place_of
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.reading import ByteRow, Reading, Row, places_of
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

# Of one request: large enough for the way there to cost little, and so many are held in memory.
_REQUEST_BYTES = 8 << 20

_Wanted = dict[str, list[Range]]
_Record = tuple[str, int]  # its file, and its offset there


class RemoteReader(FileSystemReader):
    """Reads a checkpoint beneath a URL, byte ranges of it.

    Args:
        files: of the checkpoint.
        staging_dir: a local directory for what is fetched; the system's temporary one if None.
        wave_bytes: fetched at most before the engine reads it, but for a single record that is
            larger.
        options: passed to :class:`FileSystemReader`.

    Raises (as :class:`FileSystemReader`, and):
        FileNotFoundError: the checkpoint, or its marker, is not there.
        OSError: a request failed; ``filename`` is the URL. Or the staging directory is full.
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
        self._blocks: dict[str, dict[int, int]] = {}
        self._version: str | None = None

    @property
    def checkpoint_id(self) -> str:
        return self._files.url

    @property
    def version(self) -> str | None:
        # Nothing holds the checkpoint: it may be replaced between two ranks' looks at it.
        return self._version

    def _refuse_url(self) -> None:
        """What is local here is the staging directory."""

    def release(self) -> None:
        super().release()
        self._end_staging()

    def read_all_but_rows(self, reading: Reading) -> None:
        wanted: _Wanted = defaultdict(list)
        for item in reading.transformed:
            info = place_of(item, self.storage_data)
            wanted[info.relative_path].append((info.offset, info.offset + info.length))
        with self._staged(wanted):
            super().read_all_but_rows(reading)

    def read_match(self, match: _C.LoadMatch) -> None:
        self.read_rows(match.files(), match.rows())

    def read_bytes(self, files: list[str], rows: list[ByteRow]) -> list[bytes]:
        places_of(files, rows, self._tables())  # refuses files outside of the directory
        wanted: _Wanted = defaultdict(list)
        for _name, file, offset, length in rows:
            wanted[files[file]].append((offset, offset + length))
        with self._staged(wanted):
            return super().read_bytes(files, rows)

    def read_rows(self, files: list[str], rows: list[Row]) -> None:
        places_of(files, rows, self._tables())
        for wave, wanted in self._waves_of_rows(files, rows):
            with self._staged(wanted):
                super().read_rows(files, wave)

    # --- private ---------------------------------------------------------------------------------

    def _metadata_bytes(self, name: str) -> tuple[bytes, str]:
        listing = self._files.list()
        for needed in (name, MARKER_NAME):
            if needed not in listing:
                raise FileNotFoundError(
                    errno.ENOENT, f"no complete checkpoint: there is no {needed}", self._files.url
                )
        self._sizes = {file: entry.bytes for file, entry in listing.items()}
        self._blocks = {}
        if self._sizes[name] > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{self._files.url_of(name)} has {self._sizes[name]} bytes, more than "
                f"{MAX_METADATA_BYTES}"
            )
        staging = tempfile.mkdtemp(prefix="torch_ckpt-", dir=self._staging_dir)
        # dcp.load tells its reader nothing at its end.
        self._end_staging = weakref.finalize(self, shutil.rmtree, staging, ignore_errors=True)
        # The name is that of titles and messages.
        self.path = self._staged_path = Path(staging, os.path.basename(self._files.url))
        self._staged_path.mkdir()
        data = self._files.read(name)
        self._version = hashlib.sha256(data).hexdigest()
        (self._staged_path / name).write_bytes(data)
        return super()._metadata_bytes(name)

    @contextmanager
    def _opening(self) -> Iterator[None]:
        with super()._opening(), self._told():
            yield

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors with the URL instead of the staging directory, which nobody knows."""
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
        """A block in which these ranges are in the staging directory."""
        self._fetch(wanted)
        with self._told():
            yield
        for file in wanted:
            # Frees what was fetched; a failed load removes the directory.
            os.truncate(self._staged_path / file, 0)
            os.truncate(self._staged_path / file, self._sizes[file])

    def _waves_of_rows(
        self, files: list[str], rows: list[Row]
    ) -> Iterator[tuple[list[Row], _Wanted]]:
        """Runs of rows, in their order, that are staged together, with what is staged for them."""
        ranges_of = self._ranges_of(files, rows)
        wave: list[Row] = []
        wanted: dict[_Record, list[Range]] = {}
        held = 0
        for row in rows:
            record = files[row[1]], row[2]
            more = sum(end - begin for begin, end in ranges_of[record])
            if record not in wanted:
                if wave and held + more > self._wave_bytes:
                    yield wave, _by_file(wanted)
                    wave, wanted, held = [], {}, 0
                wanted[record] = ranges_of[record]
                held += more
            wave.append(row)
        if wave:
            yield wave, _by_file(wanted)

    def _ranges_of(self, files: list[str], rows: list[Row]) -> dict[_Record, list[Range]]:
        """Of each record the bytes, in its file, that the engine looks at for some rows."""
        records: dict[_Record, list[Row]] = defaultdict(list)
        for row in rows:
            records[files[row[1]], row[2]].append(row)
        parts = {place: of for place, of in records.items() if all(map(_may_be_read_in_part, of))}
        self._fetch(_by_file({place: _ends(place[1], of[0]) for place, of in parts.items()}))
        found = {}
        for (file, offset), of_record in records.items():
            length = max(row[3] for row in of_record)
            ranges: list[Range] = [(0, length)]
            if (file, offset) in parts and self._is_row_major(file, of_record[0]):
                ranges = record_ranges(
                    (box for row in of_record for box in box_ranges(*row[5:8], row[4].itemsize)),
                    length,
                    _payload_bytes(of_record[0]),
                    self._block_bytes(file, offset),
                )
            found[file, offset] = [(offset + begin, offset + end) for begin, end in ranges]
        return found

    def _is_row_major(self, file: str, row: Row) -> bool:
        """Whether a record whose ends are there holds the tensor that a row tells of, row-major."""
        with open(self._staged_path / file, "rb") as stream, torch.serialization.skip_data():
            view: Any = _create_file_view(cast(io.IOBase, stream), row[2], row[3])
            try:
                stored = torch.load(view, map_location="cpu", weights_only=True)
            except Exception:
                # What is wrong with it the engine says, or it is one of those for torch.load.
                return False
        return (
            type(stored) is torch.Tensor
            and stored.dtype == row[4]
            and tuple(stored.shape) == tuple(row[5])
            and bool(stored.is_contiguous())
            and int(stored.storage_offset()) == 0
        )

    def _block_bytes(self, file: str, offset: int) -> int:
        """Of the checksummed blocks of a record; 1 where it has none."""
        if file not in self._blocks:
            table = checksum_tables(self._metadata).get(file, b"") if self.verify else b""
            self._blocks[file] = block_sizes(table)
        return self._blocks[file].get(offset, 1)

    def _fetch(self, wanted: _Wanted) -> None:
        requests = []
        for file, ranges in wanted.items():
            self._make_sparse(file)
            for begin, range_end in coalesced(ranges):
                # What lies behind the end the engine tells of.
                end = min(range_end, self._sizes[file])
                starts = range(begin, end, _REQUEST_BYTES)
                requests += [(file, at, min(at + _REQUEST_BYTES, end)) for at in starts]
        total = sum(end - begin for _file, begin, end in requests)
        require_staging_room(str(self._staged_path), total, self._files.url)
        self._files.for_each(self._fetch_one, requests)

    def _fetch_one(self, file: str, begin: int, end: int) -> None:
        data = memoryview(self._files.read(file, begin, end))
        self.moved.add(len(data))
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
                "the checkpoint names a file that is not there; was it replaced meanwhile?",
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


def _ends(offset: int, row: Row) -> list[Range]:
    """Of the record of a row, which begins at ``offset`` in its file."""
    length = row[3]
    known = ends_of_record(length, _payload_bytes(row))
    assert known is not None
    return [(offset, offset + known), (offset + length - known, offset + length)]


def _is_whole(row: Row) -> bool:
    return not row[7] or tuple(row[7]) == tuple(row[5])


def _payload_bytes(row: Row) -> int:
    """Of the tensor that a row tells of, where its record has nothing else."""
    return int(prod(row[5])) * row[4].itemsize


def _may_be_read_in_part(row: Row) -> bool:
    if row[3] <= SMALL_BYTES or _is_whole(row):
        return False
    return ends_of_record(row[3], _payload_bytes(row)) is not None
