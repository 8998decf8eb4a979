"""A checkpoint that is read: its open directory, its index, and the engine's reads.

1. :meth:`Source.open` opens the directory, or the objects beneath a URL (folders.py). It takes a
   shared lock on a directory, so that no concurrent save removes files. Then it reads the metadata,
   or the headers of safetensors files, into an index.
2. The caller plans reads from the index (csrc/torch/load_state.h), and :meth:`Source.read` makes
   them. Files are opened relative to the directory, and links are never followed.
3. :meth:`Source.close` closes and unlocks the directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.filesystem import _StorageReaderTransforms

from torch_ckpt import _C, _core
from torch_ckpt._base.checks import require_instance
from torch_ckpt._base.cuda_events import record_events
from torch_ckpt._base.progress import Progress, reporting
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.directory import share_or_warn
from torch_ckpt.checkpoint.dtypes import Conversions, lost_precision
from torch_ckpt.checkpoint.folders import Folder, LocalFolder, RemoteFolder
from torch_ckpt.checkpoint.index import (
    METADATA_NAME,
    decode_index,
    metadata_bytes_in,
    read_safetensors,
)
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import (
    decode_indexed,
    decode_metadata,
    index_of,
    metadata_of,
)
from torch_ckpt.checkpoint.reading import Reading, copy_by_torch, in_waves
from torch_ckpt.checkpoint.shared_directory import PAUSE_SECONDS, STALE_SECONDS, may_be_stale
from torch_ckpt.errors import Corrupt
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions
from torch_ckpt.stores import Version

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


#: Pairs of a question and an answer, as strings.
Facts = tuple[tuple[str, str], ...]


class RemoteMetadata(NamedTuple):
    """The metadata of a checkpoint beneath a URL, as a rank has read it.

    Attributes:
        location, resolved: see :class:`Source`.
        version: of the object.
        data: contents of the object.
    """

    location: str
    resolved: Facts
    version: Version
    data: bytes


class Source:
    """A checkpoint that is read. The docstring of the module lists the steps.

    Args:
        path: see :func:`torch_ckpt.open`.
        options: the options of the reads.
        transforms: undoes the stream transforms of records.

    Attributes:
        title: the checkpoint as the user knows it, for messages.
        size_rule: allowed target sizes relative to the stored sizes.
        wave_bytes: maximum total size of the objects held in memory at the same time. A larger
            object is loaded on its own.
        decode: decodes a metadata file, which the engine has checked, into torch's objects.
        rank: the rank that reads, which decides whether to show progress.
        narrowed: the tensors of the load that lose precision or range; see checkpoint/dtypes.py.
        bytes_moved: the bytes moved by all reads.

    Attributes that :meth:`open` sets:
        directory: the open directory, or the objects beneath a URL; None if it is closed.
        location: path of the checkpoint directory or of the safetensors file, or the URL. If
            ``path`` is a run's root, this is the step's directory.
        resolved: what the path has led to: the directory for a root or a step number, the version
            of the metadata for a URL, a digest of the metadata on a network file system. Ranks of a
            load that have the same question must have the same answer.
        index: the index of the checkpoint; None if the caller of ``dcp.load`` passed the metadata.
        safetensors: the contents of safetensors files, if the checkpoint consists of these.
        tables: the checksum tables, or the index that has them.
        metadata_digest: a digest of the metadata, which is equal on all ranks that read the same
            checkpoint; None without ``read_once``.
        may_be_stale: True if another host may have changed the directory without this host seeing
            it yet.
        has_all_ranks: False if the metadata describes only the values of one rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: ReadOptions = DEFAULT_READ_OPTIONS,
        transforms: _StorageReaderTransforms | None = None,
    ) -> None:
        require_instance("options", options, ReadOptions)
        self.path = path
        self.title = self.location = os.fspath(path)
        self.options = options
        self.size_rule = _C.SizeRule.GROWING if options.zero_fill else _C.SizeRule.SAME
        if options.allow_shape_mismatch:
            self.size_rule = _C.SizeRule.ANY
        # Half of the limit, or less if half would leave too little scratch memory for the load.
        limit = options.max_inflight_bytes
        self.wave_bytes = min(limit // 2, limit - _core.least_scratch_bytes)
        self.decode: Callable[[bytes, str], Metadata] = decode_indexed
        self.rank: int | None = 0
        self.narrowed: Conversions = {}
        self.bytes_moved = 0
        self.directory: Folder | None = None
        self.resolved: Facts = ()
        self.index: _core.CheckpointIndex | None = None
        self.safetensors: _core.SafetensorsFiles | None = None
        self.tables: _core.CheckpointIndex | dict[str, bytes] = {}
        self.metadata_digest: bytes | None = None
        self.has_all_ranks = True
        self.may_be_stale = False
        self._transforms = transforms
        self._is_elsewhere = False
        # Time by time.monotonic() until which a directory may be stale; 0 if none has been.
        self._give_up = 0.0
        # The contents of the metadata file and its path, and the decoded metadata.
        self._encoded: tuple[bytes, str] | None = None
        self._metadata: Metadata | None = None
        self._descriptors: dict[tuple[str, int], Sequence[str]] | None = None

    # --- the checkpoint --------------------------------------------------------------------------

    def open(
        self,
        names: Sequence[str] = (METADATA_NAME,),
        received: RemoteMetadata | None = None,
    ) -> None:
        """Opens the directory or the objects, and builds the index of the metadata. Opens a
        directory again as long as its metadata may be stale (shared_directory.py).

        Args:
            names: the metadata files to look for, such as the file of a rank that has saved without
                collectives. The first that exists is read.
            received: the metadata beneath a URL, which another rank has read. With it, no request
                is made.

        Raises:
            FileNotFoundError: there is no committed checkpoint.
            Corrupt, Unsafe, CheckpointError, OSError: the metadata cannot be read.
        """
        while True:
            self.index = self.safetensors = self.metadata_digest = None
            self._metadata = self._descriptors = None
            try:
                data, _at = self._encoded = (
                    self._open(names) if received is None else self._open_received(received)
                )
                if self.safetensors is not None:
                    self.index = self.safetensors.index
                elif self.options.allow_pickle:
                    self.index = index_of(self.metadata(), self.title)
                else:
                    self.index = decode_index(*self._encoded)
                self.tables = self.index
                if self.options.read_once:
                    self.metadata_digest = _digest_of(data)
                return
            except BaseException as error:
                try:
                    self._pause_if_stale(error)
                finally:
                    self.close()

    def remote_metadata(self) -> RemoteMetadata | None:
        """Returns the metadata object that :meth:`open` has read, for :meth:`open` on other ranks;
        None if the checkpoint has another form."""
        folder = self.directory
        if self._encoded is None or self.safetensors is not None or not self.has_all_ranks:
            return None
        if not isinstance(folder, RemoteFolder):
            return None
        data, at = self._encoded
        version = folder.versions[os.path.basename(at)]
        return RemoteMetadata(self.location, self.resolved, version, data)

    def _open_received(self, received: RemoteMetadata) -> tuple[bytes, str]:
        folder = RemoteFolder(received.location, self.options.storage_options)
        folder.versions[METADATA_NAME] = received.version
        self.directory, self.location = folder, received.location
        self.resolved, self.has_all_ranks = received.resolved, True
        return received.data, os.path.join(folder.path, METADATA_NAME)

    def open_files(self) -> None:
        """Opens the directory or the objects, without the metadata, which the caller has."""
        opened = open_checkpoint(self.path, self.options.storage_options)
        self.directory = share_or_warn(opened.folder)

    def _open(self, names: Sequence[str]) -> tuple[bytes, str]:
        """Opens the directory or the objects. Returns the contents of the metadata file and its
        path, or, for safetensors files, a description of the headers and the location."""
        options = self.options.storage_options
        folder, self.location, file = open_checkpoint(self.path, options)
        # Lock the directory before reading the metadata: from then on, no save can remove the files
        # that it names.
        self.directory = share_or_warn(folder)
        self.may_be_stale = isinstance(folder, LocalFolder) and not folder.is_local
        is_remote = is_url(self.path)
        # Only a root or a step number must be resolved to the same directory on all ranks: a newer
        # step may be completed before the next rank looks for the newest one.
        given = os.fspath(self.path).rstrip("/") if is_remote else str(Path(self.path))
        self.resolved = () if self.location == given else ((given, self.location),)
        name = next((name for name in names if folder.contains(name)), names[0])
        self.has_all_ranks = name == METADATA_NAME
        if file is None:
            data = metadata_bytes_in(folder, name)
            if isinstance(folder, RemoteFolder):
                self.resolved = ((given, f"{self.location} {folder.versions[name]}"),)
            elif self.may_be_stale and self.has_all_ranks:
                self.resolved += ((f"metadata of {given}", _digest_of(data).hex()),)
            return data, os.path.join(folder.path, name)
        self.safetensors = read_safetensors(folder, file)
        # Models of the same architecture have equal headers, so include the path.
        files = [(f.name, f.bytes, f.header_crc) for f in self.safetensors.files]
        path = self.location if is_remote else os.path.realpath(self.location)
        contents = _text_of((files, self.safetensors.index.tables()))
        if self.may_be_stale:
            # Hosts may have mounted the file system at different paths.
            found = _digest_of(_text_of(os.path.basename(path)) + contents)
            self.resolved += ((f"metadata of {given}", found.hex()),)
        return _text_of(path) + contents, self.location

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

    def close(self) -> None:
        """Closes and unlocks the checkpoint directory, if it is open."""
        directory, self.directory = self.directory, None
        if directory is not None:
            directory.close()

    # --- the reads -------------------------------------------------------------------------------

    def read_through_cache(self) -> None:
        """Makes the reads go through the page cache, because other ranks want the same bytes (see
        loading/page_cache.py). An option of the caller has precedence."""
        if not self.options.read_once and self.options.direct_io == "auto":
            self.options = dataclasses.replace(self.options, direct_io=False)

    def read(self, reading: Reading, tensors: _C.TensorReads | None = None) -> None:
        """Makes the reads.

        Args:
            tensors: the tensors to read; None for all tensors of ``reading``.

        Raises:
            Corrupt: a file is damaged, or shorter than the metadata states. The message names the
                tensor and the offset.
            Unsafe: an object would run code.
            OSError: a system call failed.
            ValueError: a record is larger than ``max_inflight_bytes``.
        """
        allow_pickle = self.options.allow_pickle
        for read in reading.transformed:
            with self.elsewhere():
                data = self._untransformed(self.read_bytes([read])[0], read)
                reading.store(read, data, allow_pickle)
        sizes = ((read, read.length) for read in reading.objects)
        for wave in in_waves(sizes, self.wave_bytes):
            stored = self.read_bytes(wave)[::-1]
            for read in wave:
                data = stored.pop()
                self.bytes_moved += len(data)
                reading.store(read, data, allow_pickle)
                del data
        tensors = reading.tensors if tensors is None else tensors
        if len(tensors):
            self.read_tensors(tensors)

    def read_tensors(self, reads: _C.TensorReads) -> None:
        """Reads tensors into their targets."""
        folder = self.directory
        assert folder is not None
        progress = self.options.progress
        before = self.bytes_moved
        planned = reads.stored_bytes if progress else 0
        events = record_events(reads.devices)

        def report(done: int) -> None:
            self.bytes_moved = before + done
            if shown is not None:
                shown(Progress(planned, 0, done))

        showing: AbstractContextManager[Callable[[Progress], None] | None] = nullcontext()
        if progress:
            showing = reporting(progress, f"load {Path(self.path).name}", self.rank, planned)
        with showing as shown:
            while True:
                try:
                    with folder.own_errors():
                        unknown = reads.load(
                            directory=folder,
                            tables=self.tables,
                            options=self.options,
                            progress=report,
                            ready=[(device.index, event.cuda_event) for event, device in events],
                        )
                    break
                except (Corrupt, FileNotFoundError) as error:
                    self._pause_if_stale(error)
        self.narrowed.update(lost_precision(reads))
        for number in unknown:
            read = reads[number]
            record = _core.ObjectRead(read.name, read.file, read.offset, read.length)
            with self.elsewhere():
                # Free each record before the next one is read.
                data = self.read_bytes([record])[0]
                if read.is_transformed:
                    data = self._untransformed(data, read)
                copy_by_torch(data, read)

    def read_bytes(
        self, reads: list[_core.ObjectRead], options: ReadOptions | None = None
    ) -> list[bytes]:
        """Returns the stored bytes of objects.

        Args:
            options: replaces the options of the source.
        """
        folder = self.directory
        assert folder is not None
        while True:
            try:
                with folder.own_errors():
                    return _core.load_bytes(
                        reads,
                        directory=folder,
                        tables=self.tables,
                        options=options or self.options,
                    )
            except (Corrupt, FileNotFoundError) as error:
                self._pause_if_stale(error)

    def verifies_parts(self) -> Callable[[str], bool]:
        """Returns a function that returns True for files whose records are verified in partial
        reads as strictly as in full reads."""
        if not self.options.verify or self.safetensors is not None:
            # Without checksums, safetensors files are not verified in full reads either.
            return lambda _file: True
        tables = self.tables if isinstance(self.tables, dict) else self.tables.tables()
        return tables.__contains__

    def progress(self) -> int:
        """Returns a number that changes as long as the reads make progress. A rank that reads sends
        heartbeats based on it."""
        return time.monotonic_ns() if self._is_elsewhere else self.bytes_moved

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Block in which other code reads, or waits for ranks, without reporting its progress. The
        block always counts as progress."""
        self._is_elsewhere = True
        try:
            yield
        finally:
            self._is_elsewhere = False

    # --- private ---------------------------------------------------------------------------------

    def _pause_if_stale(self, error: BaseException) -> None:
        """Pauses before the directory is read again, if the error may come from a stale directory.
        Otherwise, raises the error."""
        folder, now = self.directory, time.monotonic()
        self._give_up = self._give_up or now + STALE_SECONDS
        is_stale = isinstance(folder, LocalFolder) and may_be_stale(folder, error)
        if not is_stale or now >= self._give_up:
            raise error
        time.sleep(PAUSE_SECONDS)

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


def _text_of(value: object) -> bytes:
    return repr(value).encode(errors="surrogatepass")


def _digest_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
