"""Loads remote checkpoints.

1. The metadata is copied to a staging directory and read like the metadata of a local checkpoint.
2. Before the engine reads a wave of records, the bytes that it will read are fetched into sparse
   files, which have the names and lengths of the remote files. The bytes keep their offsets. The
   engine then reads the sparse files like local files.
3. The fetched bytes are freed after each wave. The directory is removed at the end of the load.

csrc/engine/fetch_plan.h computes the ranges, with the planner of the load itself.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_ckpt import _C, _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES, METADATA_NAME
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.checkpoint.step_names import MARKER_NAME
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions
from torch_ckpt.steps.remote_files import RemoteFiles, require_staging_room

# Size of a request: large enough to hide latency, small enough to keep MOST_REQUESTS in memory.
_REQUEST_BYTES = 8 << 20

_Range = tuple[str, int, int]  # file, begin and end


class RemoteSource(Source):
    """A checkpoint beneath a URL that is read.

    Args:
        files: files of the checkpoint.
        staging_dir: local directory for fetched bytes; None uses the system's temporary directory.
        options: the options of the reads.
        fetched_bytes: maximum number of bytes to fetch before the engine reads them. A larger
            record is fetched separately.

    Raises (in addition to :class:`Source`):
        FileNotFoundError: the checkpoint, or its marker, does not exist.
        OSError: a request failed (``filename`` is the URL), or the staging directory is full.
    """

    def __init__(
        self,
        files: RemoteFiles,
        staging_dir: str | None,
        options: ReadOptions = DEFAULT_READ_OPTIONS,
        *,
        fetched_bytes: int = 1 << 30,
    ) -> None:
        # The base class reads the staging directory, which does not exist yet.
        super().__init__(os.path.basename(files.url), options)
        self.title = files.url
        self._fetched_bytes = fetched_bytes
        self._files = files
        self._staging_dir = staging_dir
        self._end_staging: Callable[[], Any] = lambda: None
        self._staged_path = Path()
        self._sizes: dict[str, int] = {}

    def open(self, names: Sequence[str] = (METADATA_NAME,)) -> None:
        listing = self._files.list()
        name = next((name for name in names if name in listing), names[0])
        for needed in (name, MARKER_NAME):
            if needed not in listing:
                raise FileNotFoundError(
                    errno.ENOENT, f"not a complete checkpoint: {needed} is missing", self._files.url
                )
        self._sizes = {file: entry.bytes for file, entry in listing.items()}
        if self._sizes[name] > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{self._files.url_of(name)} has {self._sizes[name]} bytes, more than the limit of "
                f"{MAX_METADATA_BYTES} bytes"
            )
        data = self._files.read(name)
        staging = tempfile.mkdtemp(prefix="torch_ckpt-", dir=self._staging_dir)
        # Use a finalizer, because dcp.load does not notify its reader if it fails.
        self._end_staging = weakref.finalize(self, shutil.rmtree, staging, ignore_errors=True)
        # Progress bars and messages show this name.
        self.path = self._staged_path = Path(staging, os.path.basename(self._files.url))
        self._staged_path.mkdir()
        with self._errors_with_url():
            (self._staged_path / name).write_bytes(data)
            super().open((name,))
        # The checkpoint is not locked, so another save may replace it between two ranks' reads.
        self.resolved = hashlib.sha256(data).hexdigest()

    def close(self) -> None:
        super().close()
        self._end_staging()

    def read_bytes(
        self, reads: list[_core.ObjectRead], options: ReadOptions | None = None
    ) -> list[bytes]:
        with self._staged_objects(reads):
            return super().read_bytes(reads, options)

    def read_tensors(self, reads: _C.TensorReads) -> None:
        plan = reads.fetch_plan(self.tables, self.options.verify)
        self._fetch(plan.ends())
        for numbers, ranges in self._waves(plan, self._fetched_bytes):
            with self._staged(ranges):
                super().read_tensors(reads.subset(numbers))

    # --- private ---------------------------------------------------------------------------------

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

    def _waves(self, plan: _core.FetchPlan, max_bytes: int) -> list[tuple[list[int], list[_Range]]]:
        assert isinstance(self.directory, OpenDirectory)
        return plan.waves(self.directory, max_bytes)

    @contextmanager
    def _staged_objects(self, reads: list[_core.ObjectRead]) -> Iterator[None]:
        """Fetches complete records for the duration of a block."""
        waves = self._waves(_core.FetchPlan(reads), sys.maxsize)
        with self._staged([part for _numbers, ranges in waves for part in ranges]):
            yield

    @contextmanager
    def _staged(self, ranges: list[_Range]) -> Iterator[None]:
        """Fetches ranges into the staging directory for the duration of a block."""
        self._fetch(ranges)
        with self._errors_with_url():
            yield
        for file in {file for file, _begin, _end in ranges}:
            # Free the fetched bytes. After a failure, close() removes the directory.
            os.truncate(self._staged_path / file, 0)
            os.truncate(self._staged_path / file, self._sizes[file])

    def _fetch(self, ranges: list[_Range]) -> None:
        requests = []
        for file, begin, range_end in ranges:
            self._make_sparse(file)
            # The engine reports ranges beyond the end of the file.
            end = min(range_end, self._sizes[file])
            starts = range(begin, end, _REQUEST_BYTES)
            requests += [(file, at, min(at + _REQUEST_BYTES, end)) for at in starts]
        total = sum(end - begin for _file, begin, end in requests)
        require_staging_room(str(self._staged_path), total, self._files.url)
        self._files.for_each(self._fetch_one, requests)

    def _fetch_one(self, file: str, begin: int, end: int) -> None:
        data = memoryview(self._files.read(file, begin, end))
        self.bytes_moved += len(data)
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
