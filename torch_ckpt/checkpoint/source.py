"""A checkpoint that is read: its open directory, its index, and the engine's reads.

1. :meth:`Source.open` opens the directory and takes a shared lock on it, so that no concurrent save
   removes files. Then it reads the metadata, or the headers of safetensors files, into an index.
2. The caller plans reads from the index (csrc/torch/load_state.h), and :meth:`Source.read` makes
   them. Files are opened relative to the directory, and links are never followed.
3. :meth:`Source.close` closes and unlocks the directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms

from torch_ckpt import _C, _core
from torch_ckpt._base.checks import require_instance
from torch_ckpt._base.cuda_events import record_events
from torch_ckpt._base.paths import refuse_url
from torch_ckpt._base.progress import Progress, reporting
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.dtypes import Conversions, lost_precision
from torch_ckpt.checkpoint.index import decode_index, metadata_bytes_in, read_safetensors
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import (
    decode_indexed,
    decode_metadata,
    index_of,
    metadata_of,
)
from torch_ckpt.checkpoint.reading import BytesMoved, Reading, copy_by_torch, in_waves
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


class Source:
    """A checkpoint that is read. The docstring of the module lists the steps.

    Args:
        path: see :func:`torch_ckpt.open`.
        options: the options of the reads.
        transforms: undoes the stream transforms of records.

    Attributes:
        index: the index of the checkpoint that is open; None if the metadata was unpickled.
        safetensors: the contents of safetensors files, if the checkpoint consists of these.
        tables: the checksum tables, or the index that has them.
        identity: a digest that is equal on all ranks that read the same checkpoint; None without
            ``read_once``.
        has_all_ranks: False if the metadata describes only the values of one rank.
        rank: the rank that reads, which decides whether to show progress.
        shares_bytes: True if other ranks of the load want the same bytes; see
            loading/page_cache.py.
        narrowed: the tensors of the load that lose precision or range; see checkpoint/dtypes.py.
        moved: the bytes moved by all reads.

    Raises:
        ValueError: ``path`` is a URL.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: ReadOptions = DEFAULT_READ_OPTIONS,
        transforms: _StorageReaderTransforms | None = None,
    ) -> None:
        require_instance("options", options, ReadOptions)
        self._refuse_url(path)
        self.path = path
        self.options = options
        self.index: _core.CheckpointIndex | None = None
        self.safetensors: _core.SafetensorsFiles | None = None
        self.tables: _core.CheckpointIndex | dict[str, bytes] = {}
        self.identity: bytes | None = None
        self.has_all_ranks = True
        self.rank: int | None = 0
        self.shares_bytes = False
        self.narrowed: Conversions = {}
        self.moved = BytesMoved()
        #: Decodes a metadata file, which the engine has checked, into torch's objects.
        self.decode: Callable[[bytes, str], Metadata] = decode_indexed
        self._transforms = transforms
        self._directory: OpenDirectory | None = None
        self._location = ""
        # The contents of the metadata file and its path, and the decoded metadata.
        self._encoded: tuple[bytes, str] | None = None
        self._metadata: Metadata | None = None
        self._descriptors: dict[tuple[str, int], Sequence[str]] | None = None

    # --- the checkpoint --------------------------------------------------------------------------

    @property
    def location(self) -> str:
        """Path of the checkpoint directory or of the safetensors file. If ``path`` is a run's root,
        this is the step's directory."""
        return os.fspath(self.path) if self._directory is None else self._location

    @property
    def title(self) -> str:
        """The checkpoint as the user knows it, for messages."""
        return os.fspath(self.path)

    @property
    def version(self) -> str | None:
        """The directory that must be the same on all ranks of a load; None if there is nothing to
        compare."""
        # Only a root or a step number must be resolved to the same directory on all ranks: a newer
        # step may be completed before the next rank looks for the newest one.
        path = None if self._directory is None else self._location
        return None if path == str(Path(self.path)) else path

    def open(self, rank: int | None = None) -> _core.CheckpointIndex:
        """Opens the checkpoint for a load, and returns its index.

        If there is no metadata for all ranks, because the ranks saved without collectives, reads
        this rank's own metadata.

        Raises:
            FileNotFoundError: there is no committed checkpoint.
            Corrupt, Unsafe, CheckpointError, OSError: the metadata cannot be read.
        """
        self.rank = rank
        try:
            self.open_metadata()
        except FileNotFoundError as error:
            if rank is None:
                raise
            try:
                self.open_metadata(rank)
            except FileNotFoundError:
                raise error from None
        if self.index is None:
            self.tables = self.index = index_of(self.metadata(), self.title)
        return self.index

    def open_metadata(self, rank: int | None = None) -> None:
        """Opens the directory, and reads the metadata and, unless it is unpickled, its index.

        Args:
            rank: read the metadata that this rank has saved without collectives.
        """
        self.close()
        self.index = self.safetensors = self.identity = None
        self._metadata = self._descriptors = self._encoded = None
        self.narrowed = {}  # forget the tensors of a failed load
        self.shares_bytes = False
        self.has_all_ranks = rank is None
        try:
            data, source = self._open(_core.metadata_name(rank))
            if self.safetensors is not None:
                self.index = self.safetensors.index
            elif not self.options.allow_pickle:
                self.index = decode_index(data, source)
            self.tables = {} if self.index is None else self.index
            self._encoded = data, source
            if self.options.read_once:
                self.identity = hashlib.blake2b(data, digest_size=16).digest()
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> tuple[bytes, str]:
        """Opens the directory, and returns the contents and the path of the metadata file. For
        safetensors files, reads their headers, and returns bytes that identify the contents."""
        # Lock the directory before reading the metadata: from then on, no save can remove the files
        # that it names.
        self._directory, self._location, safetensors = open_checkpoint(self.path)
        share_or_warn(self._directory)
        if safetensors is None:
            data = metadata_bytes_in(self._directory, name)
            return data, os.path.join(self._directory.path, name)
        self.safetensors = read_safetensors(self._directory, safetensors)
        # Models of the same architecture have equal headers, so include the path.
        files = [(file.name, file.bytes, file.header_crc) for file in self.safetensors.files]
        contents = os.path.realpath(self._location), files, self.safetensors.index.tables()
        return repr(contents).encode(errors="surrogatepass"), self._location

    def metadata(self) -> Metadata:
        """Returns the metadata, decoded into torch's objects."""
        if self._metadata is None:
            assert self._encoded is not None
            if self.safetensors is not None:
                self._metadata = metadata_of(self.safetensors.index)
            elif self.options.allow_pickle:
                self._metadata = decode_metadata(*self._encoded, allow_pickle=True)
            else:
                self._metadata = self.decode(*self._encoded)
            self._encoded = None
        return self._metadata

    def is_sealed_by(self, seal: bytes) -> bool:
        """Returns True if the metadata that was read last ends with a seal."""
        return not seal or (self._encoded is not None and self._encoded[0].endswith(seal))

    def release_metadata(self) -> None:
        """Releases the metadata, which can be large. The rest of a load needs only the index."""
        self._metadata = self._encoded = None

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the checkpoint; None if they are unknown, or if this rank has its own
        checkpoint."""
        if self.index is None or not self.has_all_ranks:
            return None
        return self.index.stored_bytes

    def close(self) -> None:
        """Closes and unlocks the checkpoint directory, if it is open."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    # --- the reads -------------------------------------------------------------------------------

    @property
    def size_rule(self) -> _C.SizeRule:
        """Allowed target sizes relative to the stored sizes."""
        if self.options.allow_shape_mismatch:
            return _C.SizeRule.ANY
        return _C.SizeRule.GROWING if self.options.zero_fill else _C.SizeRule.SAME

    @property
    def wave_bytes(self) -> int:
        """Maximum total size of the objects held in memory at the same time.

        A larger object is loaded on its own. The maximum is half of ``max_inflight_bytes``, or less
        if half would leave too little scratch memory for the load.
        """
        limit = self.options.max_inflight_bytes
        return min(limit // 2, limit - _core.least_scratch_bytes)

    def read(self, reading: Reading) -> None:
        """Makes the reads.

        Raises:
            Corrupt: a file is damaged, or shorter than the metadata states. The message names the
                tensor and the offset.
            Unsafe: an object would run code.
            OSError: a system call failed.
            ValueError: a record is larger than ``max_inflight_bytes``.
        """
        self.read_all_but_tensors(reading)
        if len(reading.tensors):
            self.read_tensors(reading.tensors)
        reading.finish()

    def read_all_but_tensors(self, reading: Reading) -> None:
        """Reads objects."""
        allow_pickle = self.options.allow_pickle
        for read in reading.transformed:
            with self.moved.elsewhere():
                data = self._untransformed(self.read_bytes([read])[0], read)
                reading.store(read, data, allow_pickle)
        sizes = ((read, read.length) for read in reading.objects)
        for wave in in_waves(sizes, self.wave_bytes):
            stored = self.read_bytes(wave)[::-1]
            for read in wave:
                data = stored.pop()
                self.moved.bytes += len(data)
                reading.store(read, data, allow_pickle)
                del data

    def read_tensors(self, reads: _C.TensorReads) -> None:
        """Reads tensors into their targets."""
        progress = self.options.progress
        before = self.moved.bytes
        planned = reads.stored_bytes if progress else 0
        events = record_events(reads.devices)

        def report(done: int) -> None:
            self.moved.bytes = before + done
            if shown is not None:
                shown(Progress(planned, 0, done))

        showing: AbstractContextManager[Callable[[Progress], None] | None] = nullcontext()
        if progress:
            showing = reporting(progress, f"load {Path(self.path).name}", self.rank, planned)
        with self.engine_arguments() as arguments, showing as shown:
            ready = [(device.index, event.cuda_event) for event, device in events]
            unknown = reads.load(**arguments, progress=report, ready=ready)
        self.narrowed.update(lost_precision(reads))
        for number in unknown:
            read = reads[number]
            record = _core.ObjectRead(read.name, read.file, read.offset, read.length)
            with self.moved.elsewhere():
                # Free each record before the next one is read.
                data = self.read_bytes([record])[0]
                if read.is_transformed:
                    data = self._untransformed(data, read)
                copy_by_torch(data, read)

    def read_bytes(self, reads: list[_core.ObjectRead]) -> list[bytes]:
        """Returns the stored bytes of objects."""
        with self.engine_arguments() as arguments:
            return _core.load_bytes(reads, **arguments)

    def verifies_parts(self) -> Callable[[str], bool]:
        """Returns a function that returns True for files whose records are verified in partial
        reads as strictly as in full reads."""
        if not self.options.verify or self.safetensors is not None:
            # Without checksums, safetensors files are not verified in full reads either.
            return lambda _file: True
        tables = self.tables if isinstance(self.tables, dict) else self.tables.tables()
        return tables.__contains__

    # --- private ---------------------------------------------------------------------------------

    def _refuse_url(self, path: str | os.PathLike[str]) -> None:
        refuse_url(path)

    def _untransformed(self, data: bytes, read: _core.ObjectRead | _C.TensorRead) -> bytes:
        """Undoes the stream transforms of a record."""
        if self._descriptors is None:
            self._descriptors = {
                (info.relative_path, info.offset): info.transform_descriptors or ()
                for info in (self.metadata().storage_data or {}).values()
            }
        transforms = self._transforms or _StorageReaderTransforms(ExtensionRegistry())
        # torch's function does not use the item.
        stream = transforms.transform_load_stream(
            None,  # type: ignore[arg-type]
            self._descriptors[read.file, read.offset],
            io.BytesIO(data),
        )
        return stream.read(-1)

    @contextmanager
    def engine_arguments(self) -> Iterator[dict[str, Any]]:
        """Block with the arguments of the engine's loads: the open directory, the checksum tables
        of its files, and the options. If the directory is closed, opens it for the block."""
        is_open = self._directory is not None
        directory = self._directory or share_or_warn(open_checkpoint(self.path).directory)
        try:
            options = self.options
            if self.shares_bytes and not options.read_once and options.direct_io == "auto":
                options = dataclasses.replace(options, direct_io=False)
            yield {"directory": directory, "tables": self.tables, "options": options}
        finally:
            if not is_open:
                directory.close()
