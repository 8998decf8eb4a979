"""The StorageReader: reads checkpoints for DCP and ``torch_ckpt.load``, by the C++ engine."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.filesystem import FileSystemReader as StockReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import record_events, refuse_capture
from torch_ckpt._base.cycle_collector import RelaxedGc, no_gc
from torch_ckpt._base.paths import refuse_url
from torch_ckpt._base.progress import Progress, ProgressOption, reporting
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.file_system import FilesBeneath
from torch_ckpt.checkpoint.index import (
    MAX_METADATA_BYTES,
    decode_index,
    metadata_bytes_in,
    read_safetensors,
)
from torch_ckpt.checkpoint.lazy_metadata import LazyContents, LazyMetadata, lazy_contents
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import (
    checksum_tables,
    decode_indexed,
    decode_metadata,
    index_of,
    metadata_of,
)
from torch_ckpt.checkpoint.read_options import ReadOptions
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.dtypes import Conversions, lost_precision, warn_of_lost_precision
from torch_ckpt.loading.page_cache import RankReads, share_bytes
from torch_ckpt.loading.reading import (
    BytesMoved,
    PlansByEngine,
    Reading,
    SafePlanner,
    copy_by_torch,
    in_waves,
    keeps_default_hooks,
    require_whole,
)
from torch_ckpt.loading.shared_reads import read_alone, read_once
from torch_ckpt.loading.zero_fill import (
    SIZES,
    let_sizes_differ,
    zero_what_is_not_stored,
)


class FileSystemReader(StockReader):
    """Reads distributed checkpoints, including checkpoints written by stock torch, and safetensors
    files. A drop-in replacement for torch's class of the same name.

    From each tensor, only the rows that the state dict needs are read, in pieces of a few MB. Each
    piece is then copied, converted or scattered into the target, or copied to the device. All data
    from torch_ckpt's checkpoints is verified against checksums. In stock torch's checkpoints, only
    records that are read in full are verified.

    Tensors are converted to the dtypes of their targets, as ``Tensor.copy_`` does. One warning per
    load names the tensors that lose precision or range.

    The reader keeps the directory open, with a shared lock, from ``read_metadata`` to the end of
    the load. Files are opened relative to the directory, links are never followed, and no
    concurrent save removes any of the files. A load therefore always sees one complete checkpoint.

    Args:
        path: the checkpoint directory; or ``ROOT/40`` for step 40 of a run; or ROOT for the newest
            complete step of the run; or a safetensors file, or a directory with one such file or
            with several files and their index. Each load looks up the newest step again.
        thread_count: maximum number of concurrent reads; None means 8. Each read covers at least 1
            MiB, so small loads use fewer concurrent reads.
        max_inflight_bytes: maximum memory that a load uses in addition to its targets, in bytes; at
            least 1 MiB. Some records cannot be read in parts: objects, and tensors that only
            ``torch.load`` can decode. If such a record is larger than the limit, the load fails.
        verify: verify CRC-32 checksums.
        direct_io: True, False, or "auto", which uses direct I/O for data that is not in the page
            cache, unless several ranks of a machine load the same data.
        zero_fill: allow tensors in the state dict that are larger than the stored tensors. The
            elements outside the stored tensor are set to zero.
        allow_shape_mismatch: like ``zero_fill``, but also allow tensors in the state dict that are
            smaller than the stored tensors in some dimensions. The common region is loaded. The
            number of dimensions must be the same.
        read_once: if several ranks need the same contiguous tensor, one of the ranks reads the
            tensor and sends the data to the other ranks over the process group. All ranks of the
            group must load with this option.
        process_group: the process group that is passed to ``dcp.load``; None means the default
            group. ``torch_ckpt.load`` sets this option.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        allow_pickle: accept metadata that names any type, and pass objects to the planner
            unchecked. torch's planner then unpickles the objects. Use this option only for
            checkpoints that you trust. By default, only tensors, builtin types, other allow-listed
            types (see SECURITY.md) and types declared with ``torch.serialization.add_safe_globals``
            are loaded.

    Raises:
        ValueError: an option is out of range or contradicts another one, or ``path`` is a URL (see
            docs/remote.md).

    Raises (from ``dcp.load``, on every rank, inside a ``CheckpointException``):
        FileNotFoundError: there is no committed checkpoint.
        Corrupt: a file is damaged, or shorter than the metadata states. The message names the
            tensor and the offset.
        Unsafe: the metadata or an object would run code, or the metadata names a file outside the
            checkpoint directory.
        OSError: a system call failed.

    Examples:
        ```python
        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=torch_ckpt.FileSystemReader("checkpoints/100"))
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        thread_count: int | None = None,
        max_inflight_bytes: int = 32 * 10**9,
        verify: bool = True,
        direct_io: bool | str = "auto",
        zero_fill: bool = False,
        allow_shape_mismatch: bool = False,
        read_once: bool = False,
        process_group: dist.ProcessGroup | None = None,
        progress: ProgressOption = None,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> None:
        if type(self) is FileSystemReader:
            # Subclasses may use another file system, as FsspecReader does.
            refuse_url(path)
        super().__init__(path, *args, **kwargs)
        self._given_path: str | os.PathLike[str] = path
        self.options = ReadOptions(thread_count, max_inflight_bytes, direct_io, verify)
        self.zero_fill = zero_fill or allow_shape_mismatch
        self.allow_shape_mismatch = allow_shape_mismatch
        self.read_once = read_once
        self.process_group = process_group
        self.progress = progress
        self.allow_pickle = allow_pickle
        self._metadata: Metadata | None = None
        self._index: _core.CheckpointIndex | None = None
        self._directory: OpenDirectory | None = None
        self._location = ""
        # The contents of safetensors files, if the checkpoint consists of these.
        self._safetensors: _core.SafetensorsFiles | None = None
        self._refused: Exception | None = None
        self._identity: tuple[Metadata | None, bytes] = (None, b"")
        self._is_alone = False
        #: True if other ranks of this load want the same bytes; see loading/page_cache.py.
        self.shares_bytes = False
        #: Allowed target sizes relative to the stored sizes.
        self.size_rule = _C.SizeRule.GROWING if self.zero_fill else _C.SizeRule.SAME
        if allow_shape_mismatch:
            self.size_rule = _C.SizeRule.ANY
        # Decodes a metadata file, which the engine has checked, into torch's objects.
        self._unpickle: Callable[[bytes, str], Metadata] = decode_indexed
        #: The tensors of this load that lose precision or range; see loading/dtypes.py.
        self.narrowed: Conversions = {}
        #: Bytes moved by all loads with this reader.
        self.moved = BytesMoved()

    # --- DCP's interface, in the order in which a load calls it -----------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.release()
        self._given_path = checkpoint_id or self._given_path
        self._refuse_url()
        super().reset(checkpoint_id)

    @property
    def version(self) -> str | None:
        """The directory that must be the same on all ranks of a load; None if there is nothing to
        compare."""
        # Only a root or a step number must be resolved to the same directory on all ranks: a newer
        # step may be completed before the next rank looks for the newest one.
        path = None if self._directory is None else self._location
        return None if path == str(self.path) else path

    @property
    def location(self) -> str:
        """Path of the checkpoint directory or of the safetensors file. If ``path`` is a run's root,
        this is the step's directory."""
        return str(self.path) if self._directory is None else self._location

    @property
    def safetensors_metadata(self) -> dict[str, str] | None:
        """The metadata of the safetensors files that were opened last; None for other formats."""
        return None if self._safetensors is None else self._safetensors.metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        if rank is not None and self._refused is not None:
            # After any failure, torch drops the error and tries the rank's own metadata file. Empty
            # metadata makes torch continue to set_up_storage_reader, which raises the error.
            return Metadata({}, storage_data={})
        self._refused = None
        try:
            return self._read_metadata(rank)[0]
        except FileNotFoundError:
            raise
        except Exception as error:
            self._refused = error
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        refuse_capture()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        # torch passes the rank only to a method that has a parameter named `kwargs`.
        self.use_collectives = kwargs.get("use_collectives", True)
        lazy = lazy_contents(metadata)
        self.set_up_for_load(kwargs.get("rank"), metadata, lazy.index if lazy else None)
        self._is_alone = False
        RelaxedGc.begin()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan = super().prepare_local_plan(plan)
        reads = plan.storage_data
        if not isinstance(reads, RankReads):
            reads = RankReads()
            if self._index is not None and self.use_collectives and dist.is_initialized():
                reads = RankReads.of_items(plan.items, self._index)
        return dataclasses.replace(plan, storage_data=_RankPlan(self.version, reads))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        own = [p.storage_data if isinstance(p.storage_data, _RankPlan) else None for p in plans]
        require_one_version((None if of is None else of.version for of in own), self)
        if self.read_once and dist.is_initialized():
            # With no_dist, torch calls this method on every rank with only that rank's plan.
            self._is_alone = len(plans) == 1
            size = dist.get_world_size(self.process_group)
            if len(plans) not in (1, size):
                raise ValueError(
                    f"{len(plans)} ranks load with read_once, but the reader's process group has "
                    f"{size} ranks; pass the load's process_group to the reader, too"
                )
        shares = share_bytes((of.reads for of in own if of is not None), self.stored_bytes)
        plans = [
            plan if of_rank is None else dataclasses.replace(plan, storage_data=_Shares(shares))
            for plan, of_rank in zip(plans, own, strict=True)
        ]
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            future = self._read_data(plan, planner)
            if self.narrowed:
                warn_of_lost_precision(self.narrowed)
            return future
        finally:
            self.release()

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        RelaxedGc.end()
        if not self.engine_can_read() or self._metadata is None:
            return super().read_data(plan, self._guarded(planner))
        if isinstance(plan.storage_data, _Shares):
            self.shares_bytes = plan.storage_data.of
        planned = isinstance(planner, PlansByEngine) and planner.has_planned()
        # If ranks read together, they must also exchange their failures.
        together = self.read_once and dist.is_initialized() and not self._is_alone

        def prepare() -> Reading:
            if planned:
                return cast(PlansByEngine, planner).begin()
            assert self._metadata is not None
            require_whole(planner, plan.items, self._metadata)
            self._fill_with_zeros(planner)
            return self.reading(planner, plan.items)

        def read_by_hooks() -> None:
            self._fill_with_zeros(planner)
            # Read items one by one: the user's hooks run on this thread, in the order of the plan,
            # and each resolve_tensor is followed by its commit_tensor.
            for item in plan.items:
                self.read(self.reading(planner, [item]))

        if not planned and not keeps_default_hooks(planner):
            if together:
                read_alone(self, read_by_hooks, self.process_group)
            else:
                read_by_hooks()
        elif together:
            read_once(self, prepare, self.process_group)
        else:
            self.read(prepare())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @property
    def wave_bytes(self) -> int:
        """Maximum total size of the objects held in memory at the same time.

        A larger object is loaded on its own. The maximum is half of ``max_inflight_bytes``, or less
        if half would leave too little scratch memory for the load.
        """
        limit = self.options.max_inflight_bytes
        return min(limit // 2, limit - _core.least_scratch_bytes)

    # --- shared with torch_ckpt.load -------------------------------------------------------------

    def engine_can_read(self) -> bool:
        """Returns False if the file system is not local. In that case, torch's own code reads."""
        return type(self.fs) is FileSystem

    def release(self) -> None:
        """Closes and unlocks the checkpoint directory, if it is open, at the end of a load.

        The next ``read_metadata`` opens the directory again.
        """
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def open(self, rank: int | None = None) -> tuple[Metadata, _core.CheckpointIndex]:
        """Reads the metadata, and prepares a load that the engine plans.

        If there is no metadata for all ranks, because the ranks saved without collectives, reads
        this rank's own metadata.
        """
        self.use_collectives = True
        try:
            metadata, index = self._read_metadata(None)
        except FileNotFoundError as error:
            if rank is None:
                raise
            self.use_collectives = False
            try:
                metadata, index = self._read_metadata(rank)
            except FileNotFoundError:
                raise error from None
        if index is None:
            index = index_of(metadata, str(self.path))
        self.set_up_for_load(rank, metadata, index)
        return metadata, index

    def set_up_for_load(
        self, rank: int | None, metadata: Metadata, index: _core.CheckpointIndex | None = None
    ) -> None:
        """Prepares a load, as DCP's set_up_storage_reader does.

        Args:
            index: the index of the metadata, if the engine plans the load.
        """
        self._metadata = metadata
        self._index = index
        self.rank = rank  # type: ignore[assignment]  # torch declares None
        self.narrowed = {}  # forget the tensors of a failed load
        self.shares_bytes = False

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the checkpoint; None if they are unknown, or if this rank has its own
        checkpoint."""
        if self._index is None or not self.use_collectives:
            return None
        return self._index.stored_bytes

    def release_metadata(self) -> None:
        """Releases the metadata, which can be large. The rest of the load needs only its index."""
        empty = Metadata({}, storage_data={})
        if self._identity[0] is self._metadata:
            self._identity = empty, self._identity[1]
        self._metadata = empty

    @property
    def storage_data(self) -> dict[MetadataIndex, _StorageInfo]:
        """The locations of the items in the checkpoint that is being loaded."""
        return {} if self._metadata is None else self._metadata.storage_data or {}

    @storage_data.setter
    def storage_data(self, _none: dict[MetadataIndex, _StorageInfo]) -> None:
        # torch's reader only assigns an empty dict, to reset the attribute.
        self._metadata = None

    def reading(self, planner: LoadPlanner, items: list[ReadItem]) -> Reading:
        """Returns the reads that load the items of a plan.

        Raises:
            Corrupt: the metadata does not contain the location of an item.
        """
        assert self._metadata is not None
        reading = Reading(planner)
        with no_gc():
            reading.add_items(items, self._metadata)
        return reading

    def read(self, reading: Reading) -> None:
        """Performs the reads and passes the results to the planner.

        Raises:
            Corrupt, Unsafe, OSError, ValueError: see the class docstring.
        """
        self.read_all_but_tensors(reading)
        if len(reading.tensors):
            self.read_tensors(reading.tensors)
        for item, target in reading.to_commit:
            assert reading.planner is not None
            reading.planner.commit_tensor(item, target)

    def read_all_but_tensors(self, reading: Reading) -> None:
        """Reads objects, and items that were written through a stream transform."""
        if reading.transformed:
            assert reading.planner is not None
            with self._engine_arguments() as arguments, self.moved.elsewhere():
                before, self.fs = self.fs, FilesBeneath(arguments["directory"])
                try:
                    super().read_data(LoadPlan(reading.transformed), self._guarded(reading.planner))
                finally:
                    self.fs = before
        sizes = ((read, read.length) for read in reading.objects)
        for wave in in_waves(sizes, self.wave_bytes):
            stored = self.read_bytes(wave)[::-1]
            for read in wave:
                data = stored.pop()
                self.moved.bytes += len(data)
                reading.store(read, data, self.allow_pickle)
                del data

    def read_tensors(self, reads: _C.TensorReads) -> None:
        """Reads tensors into their targets.

        Raises:
            Corrupt, Unsafe, OSError, ValueError: see the class docstring.
        """
        before = self.moved.bytes
        planned = reads.stored_bytes if self.progress else 0
        events = record_events(reads.devices)

        def report(done: int) -> None:
            self.moved.bytes = before + done
            if shown is not None:
                shown(Progress(planned, 0, done))

        showing: AbstractContextManager[Callable[[Progress], None] | None] = nullcontext()
        if self.progress:
            title = f"load {Path(self.path).name}"
            showing = reporting(self.progress, title, self.rank, planned)
        with self._engine_arguments() as arguments, showing as shown:
            ready = [(device.index, event.cuda_event) for event, device in events]
            unknown = reads.load(**arguments, progress=report, ready=ready)
        self.narrowed.update(lost_precision(reads))
        for number in unknown:
            read = reads[number]
            record = _core.ObjectRead(read.name, read.file, read.offset, read.length)
            with self.moved.elsewhere():
                # Free each record before the next one is read.
                copy_by_torch(self.read_bytes([record])[0], read)

    def read_bytes(self, reads: list[_core.ObjectRead]) -> list[bytes]:
        """Returns the stored bytes of objects."""
        with self._engine_arguments() as arguments:
            return _core.load_bytes(reads, **arguments)

    @property
    def identity(self) -> bytes | None:
        """A digest of the metadata, equal on all ranks that read the same checkpoint.

        None if the caller uses metadata that ``read_metadata`` did not return.
        """
        metadata, identity = self._identity
        return identity if metadata is self._metadata else None

    def verifies_parts(self) -> Callable[[str], bool]:
        """Returns a function that returns True for files whose records are verified in partial
        reads as strictly as in full reads."""
        if not self.options.verify or self._safetensors is not None:
            # Without checksums, safetensors files are not verified in full reads either.
            return lambda _file: True
        return self.checksum_tables().__contains__

    def checksum_tables(self) -> dict[str, bytes]:
        """Returns the encoded checksum table of each file that has one, by file name."""
        tables = self._tables()
        return tables if isinstance(tables, dict) else tables.tables()

    # --- private ---------------------------------------------------------------------------------

    def _read_metadata(self, rank: int | None) -> tuple[Metadata, _core.CheckpointIndex | None]:
        """Opens the directory, and reads the metadata and, unless it is unpickled, its index.
        Releases the directory if this fails."""
        self.release()
        self._safetensors = None
        try:
            data, source = self._metadata_bytes(_core.metadata_name(rank))
            size_rule, load_id = self.size_rule, self.load_id
            index: _core.CheckpointIndex | None = None
            convert: Callable[[], Metadata] = partial(self._unpickle, data, source)
            if self._safetensors is not None:
                index = self._safetensors.index
                convert = partial(metadata_of, index)
            elif not self.allow_pickle:
                index = decode_index(data, source)
            if index is None:
                metadata = decode_metadata(data, source, allow_pickle=True)
                _make_known(metadata, size_rule, load_id)
            else:

                def decode() -> Metadata:
                    # Do not refer to the reader here: lazy metadata must not keep it alive.
                    converted = convert()
                    _make_known(converted, size_rule, load_id)
                    return converted

                metadata = LazyMetadata(LazyContents(decode, index=index, reader=weakref.ref(self)))
            if self.read_once:
                self._identity = metadata, hashlib.blake2b(data, digest_size=16).digest()
            return metadata, index
        except BaseException:
            self.release()
            raise

    def _metadata_bytes(self, name: str) -> tuple[bytes, str]:
        """Opens the directory, and returns the contents and the path of the metadata file. For
        safetensors files, reads their headers, and returns bytes that identify the contents."""
        self._refuse_url()
        if not self.engine_can_read():
            return self._remote_bytes(name), os.path.join(self.path, name)
        # Lock the directory before reading the metadata: from then on, no save can remove the files
        # that it names.
        self._directory, self._location, safetensors = open_checkpoint(self.path)
        share_or_warn(self._directory)
        if safetensors is None:
            data = metadata_bytes_in(self._directory, name)
            return data, os.path.join(self._directory.path, name)
        self._safetensors = read_safetensors(self._directory, safetensors)
        # Models of the same architecture have equal headers, so include the path.
        files = [(file.name, file.bytes, file.header_crc) for file in self._safetensors.files]
        contents = os.path.realpath(self._location), files, self._safetensors.index.tables()
        return repr(contents).encode(errors="surrogatepass"), self._location

    def _guarded(self, planner: LoadPlanner) -> LoadPlanner:
        """Wraps the planner so that loading objects runs no code, unless allow_pickle is set."""
        if self.allow_pickle:
            return planner
        return cast(LoadPlanner, SafePlanner(planner, self.storage_data))

    def _remote_bytes(self, name: str) -> bytes:
        """Reads the metadata file through the reader's own file system, ``fs``."""
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            data: bytes = stream.read(MAX_METADATA_BYTES + 1)
        if len(data) > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{name} in {self.path} is larger than the limit of {MAX_METADATA_BYTES} bytes"
            )
        return data

    def _fill_with_zeros(self, planner: LoadPlanner) -> None:
        if not self.zero_fill:
            return
        assert self._metadata is not None
        state_dict = getattr(planner, "state_dict", None)
        if not isinstance(state_dict, dict):
            raise CheckpointError(
                "zero_fill and allow_shape_mismatch need a planner with a state_dict attribute "
                f"that is a dict, as in torch's planners; {type(planner).__name__} has none"
            )
        zero_what_is_not_stored(state_dict, self._metadata)

    def _refuse_url(self) -> None:
        if self.engine_can_read():
            refuse_url(self._given_path)

    def _tables(self) -> _core.CheckpointIndex | dict[str, bytes]:
        """Returns the checksum tables, or the index that has them, for the engine."""
        if self._index is not None:
            return self._index
        # The metadata may have been decoded, and then has no index.
        if self._safetensors is not None:
            return self._safetensors.index
        return checksum_tables(self._metadata)

    @contextmanager
    def _engine_arguments(self) -> Iterator[dict[str, Any]]:
        """Block with the arguments of the engine's loads: the open directory, the checksum tables
        of its files, and the options. If ``read_metadata`` has not opened the directory, opens it
        for the block."""
        is_open = self._directory is not None
        directory = self._directory or share_or_warn(open_checkpoint(self.path).directory)
        try:
            options = self.options
            if self.shares_bytes and not self.read_once and options.direct_io == "auto":
                options = dataclasses.replace(options, direct_io=False)
            yield {"directory": directory, "tables": self._tables(), "options": options}
        finally:
            if not is_open:
                directory.close()


@dataclasses.dataclass(frozen=True)
class _RankPlan:
    """The reader's ``version`` and reads on one rank, sent as part of the plan."""

    version: str | None
    reads: RankReads


@dataclasses.dataclass(frozen=True)
class _Shares:
    """The value of ``shares_bytes``, sent to each rank as part of its plan."""

    of: bool


def require_one_version(versions: Iterable[str | None], reader: FileSystemReader) -> None:
    """Raises CheckpointError if ranks have read different checkpoints.

    Args:
        versions: the reader's ``version`` on each rank.
    """
    if len(set(versions)) > 1:
        raise CheckpointError(
            f"{reader.checkpoint_id}: ranks have read the metadata of different saves, because the "
            "checkpoint was replaced or a newer step was saved while the load started; load again"
        )


def _make_known(metadata: Metadata, size_rule: _C.SizeRule, load_id: str | None) -> None:
    """Stores the load id in the metadata and applies the size rule to it."""
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    assert metadata.storage_meta is not None
    metadata.storage_meta.load_id = load_id
    if size_rule != _C.SizeRule.SAME:
        let_sizes_differ(metadata, SIZES[size_rule])
