"""The StorageReader: DCP's contract on one side, the C++ engine on the other."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
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
from torch_ckpt._base.cuda_events import record_events
from torch_ckpt._base.cycle_collector import RelaxedGc, no_gc
from torch_ckpt._base.paths import refuse_url
from torch_ckpt._base.progress import Progress, ProgressOption, Reporter
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.file_system import FilesBeneath
from torch_ckpt.checkpoint.index import (
    MAX_METADATA_BYTES,
    METADATA_NAME,
    decode_index,
    metadata_bytes_in,
)
from torch_ckpt.checkpoint.limits import DEFAULT_THREADS, LEAST_INFLIGHT_BYTES
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.metadata import (
    checksum_tables,
    decode_indexed,
    decode_metadata,
    index_of,
)
from torch_ckpt.checkpoint.undecoded import NotDecoded, index_kept, undecoded
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.dtypes import LostPrecision
from torch_ckpt.loading.planners import SafePlanner, keeps_default_hooks, require_whole
from torch_ckpt.loading.reading import (
    ByteRow,
    BytesMoved,
    PlansOnIndex,
    Reading,
    Row,
    copy_by_torch,
    in_waves,
    places_of,
    with_names_as_utf8,
)
from torch_ckpt.loading.shared_reads import read_alone, read_once
from torch_ckpt.loading.zero_fill import (
    SIZES,
    let_sizes_differ,
    zero_what_is_not_stored,
)


class FileSystemReader(StockReader):
    """Reads distributed checkpoints, including those of stock torch. Replaces torch's class of the
    same name without other changes.

    For each tensor, only the wanted rows are read: straight into the target if it is contiguous CPU
    memory of the stored dtype, otherwise in pieces of a few MB that are converted, scattered or
    copied to the device. Checkpoints of torch_ckpt are verified completely; of other checkpoints,
    the records that are read completely.

    A tensor is converted to the dtype of its target as by ``Tensor.copy_``. One warning for each
    load names the tensors that lose precision or range.

    From ``read_metadata`` to the end of the load the directory is held open and locked for sharing.
    Files are opened relative to it and never through links, and a concurrent save removes none of
    them, so a load always sees one complete checkpoint.

    Args:
        path: directory of the checkpoint; or ``ROOT/40`` for step 40 of a run; or ROOT for its
            newest complete step at the time of each load.
        thread_count: most reads at once; each has 1 MiB or more, so a small load has fewer. None:
            8.
        max_inflight_bytes: limit of the memory that a load uses beyond its targets, in bytes; at
            least 1 MiB. Records that cannot be read in parts (objects, tensors that only
            ``torch.load`` can decode) are refused if they are larger.
        verify: check CRC-32s.
        direct_io: True, False, or "auto" to use direct I/O for files that are not in the page
            cache.
        zero_fill: allow a tensor to be larger than the stored one; the rest is filled with zeros.
        allow_shape_mismatch: as ``zero_fill``, and a tensor may also be smaller than the stored one
            in any dimension. The common region is loaded. The number of dimensions must be equal.
        read_once: one rank reads a contiguous tensor that several ranks want and sends it to the
            others, over the process group. All ranks of the group must load with it.
        process_group: the process group of the load, the one that ``dcp.load`` gets; None: the
            default group. ``torch_ckpt.load`` sets it.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        allow_pickle: accept metadata that names any type, and pass objects to the planner
            unchecked, where torch's planner unpickles them. Use it only if you trust the writer.
            False allows tensors, builtin types, other allow-listed types (see SECURITY.md) and
            those declared with ``torch.serialization.add_safe_globals``.

    Raises:
        ValueError: an option is out of range or contradicts another one, or ``path`` is a URL (see
            docs/remote.md).

    Raises (from ``dcp.load``, on every rank, inside a ``CheckpointException``):
        FileNotFoundError: there is no committed checkpoint.
        Corrupt: a file is damaged or shorter than the metadata states; the tensor and the offset
            are given.
        Unsafe: the metadata or an object would run code, or names files outside of the checkpoint's
            directory.
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
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, got {thread_count}")
        if max_inflight_bytes < LEAST_INFLIGHT_BYTES:
            raise ValueError(
                f"max_inflight_bytes must be at least {LEAST_INFLIGHT_BYTES}, "
                f"got {max_inflight_bytes}"
            )
        if direct_io not in (True, False, "auto"):
            raise ValueError(f'direct_io must be True, False or "auto", got {direct_io!r}')
        self.thread_count = thread_count or DEFAULT_THREADS
        self.max_inflight_bytes = max_inflight_bytes
        self.verify = verify
        self.direct_io = direct_io
        self.zero_fill = zero_fill or allow_shape_mismatch
        self.allow_shape_mismatch = allow_shape_mismatch
        self.read_once = read_once
        self.process_group = process_group
        self.progress = progress
        self.allow_pickle = allow_pickle
        self._metadata: Metadata | None = None
        self._index: _core.CheckpointIndex | None = None
        self._index_tables: Mapping[str, bytes] | None = None
        self._directory: OpenDirectory | None = None
        self._refused: Exception | None = None
        self._identity: tuple[Metadata | None, bytes] = (None, b"")
        self._is_alone = False
        self.lost_precision = LostPrecision()
        #: Bytes moved by all loads with this reader.
        self.moved = BytesMoved()

    # --- DCP's contract, in the order of a load -------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.release()
        self._given_path = checkpoint_id or self._given_path
        self._refuse_url()
        super().reset(checkpoint_id)

    @property
    def version(self) -> str | None:
        """A name that all ranks of a load must share; None if their directories may differ."""
        # If the path is a root, another step may be the newest when the next rank looks.
        return None if self.location == str(self.path) else self.location

    @property
    def location(self) -> str:
        """Path of the checkpoint's directory: that of a step, if ``path`` is the root of a run."""
        return str(self.path) if self._directory is None else self._directory.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        if rank is not None and self._refused is not None:
            # After any failure, torch tries the rank's own file next and drops the cause. Empty
            # metadata makes torch continue to set_up_storage_reader, which raises the cause.
            return Metadata({}, storage_data={})
        self._refused = None
        try:
            with self._opening():
                return self._decoded(*self._metadata_bytes(_name_of(rank)))
        except FileNotFoundError:
            raise
        except Exception as error:
            self._refused = error
            raise

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Context manager that reads the metadata, and releases the directory if that fails."""
        self.release()
        try:
            self._refuse_url()
            yield
        except BaseException:
            self.release()
            raise

    def _metadata_bytes(self, name: str) -> tuple[bytes, str]:
        """Opens the directory, and returns the contents of the metadata and their path."""
        if not self.engine_can_read():
            return self._remote_bytes(name), os.path.join(self.path, name)
        # Shared before it is read: what it names then is still there.
        self._directory = share_or_warn(open_checkpoint(self.path))
        data = metadata_bytes_in(self._directory, name)
        return data, os.path.join(self._directory.path, name)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        # torch passes the rank only to a method that has a parameter of the name `kwargs`.
        self.use_collectives = kwargs.get("use_collectives", True)
        self.set_up_for_load(kwargs.get("rank"), metadata, index_kept(metadata))
        self._is_alone = False
        RelaxedGc.begin()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan = super().prepare_local_plan(plan)
        if self.version is not None:
            plan = dataclasses.replace(plan, storage_data=_ReadVersion(self.version))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        given = (plan.storage_data for plan in plans)
        require_one_version((v.of if isinstance(v, _ReadVersion) else None for v in given), self)
        if self.read_once and dist.is_initialized():
            # With no_dist torch calls this on every rank, with the plan of that rank.
            self._is_alone = len(plans) == 1
            size = dist.get_world_size(self.process_group)
            if len(plans) not in (1, size):
                raise ValueError(
                    f"{len(plans)} ranks load with read_once, but the reader's process group has "
                    f"{size} ranks; pass process_group to the reader, too"
                )
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            future = self._read_data(plan, planner)
            self.lost_precision.warn()
            return future
        finally:
            self.release()

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        RelaxedGc.end()
        if not self.engine_can_read() or self._metadata is None:
            return super().read_data(plan, self._guarded(planner, self.storage_data))
        planned = isinstance(planner, PlansOnIndex) and planner.has_planned()
        # Then every failure on one rank is reported to the others.
        together = self.read_once and dist.is_initialized() and not self._is_alone

        def prepare() -> Reading:
            if planned:
                return cast(PlansOnIndex, planner).begun()
            assert self._metadata is not None
            require_whole(planner, plan.items, self._metadata)
            self._fill_with_zeros(planner)
            return self.reading(planner, plan.items)

        def read_by_hooks() -> None:
            self._fill_with_zeros(planner)
            # The user's hooks run on this thread, in the plan's order and in pairs.
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
    def size_rule(self) -> str:
        """The sizes that tensors may have: ``"same"`` as stored, ``"growing"`` or ``"any"``."""
        if self.allow_shape_mismatch:
            return "any"
        return "growing" if self.zero_fill else "same"

    @property
    def wave_bytes(self) -> int:
        """Limit of the bytes of objects that are in memory together, except for a single larger
        one.

        Half of ``max_inflight_bytes``, or less, so that the least scratch memory of a load remains.
        """
        limit = self.max_inflight_bytes
        return min(limit // 2, limit - _core.least_scratch_bytes)

    # --- shared with torch_ckpt.load -------------------------------------------------------------

    def engine_can_read(self) -> bool:
        """Returns False if a remote file system needs torch's own reading."""
        return type(self.fs) is FileSystem

    def release(self) -> None:
        """Releases the checkpoint's directory at the end of a load. Further calls have no effect.

        The next ``read_metadata`` opens it again.
        """
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

    def read_index(self, rank: int | None = None) -> tuple[Metadata, _core.CheckpointIndex]:
        """Reads the metadata. Returns it with its index."""
        metadata = self.read_metadata() if rank is None else self.read_metadata(rank=rank)
        return metadata, index_of(metadata, str(self.path))

    def set_up_for_load(
        self, rank: int | None, metadata: Metadata, index: _core.CheckpointIndex | None = None
    ) -> None:
        """Does the work of DCP's set_up_storage_reader.

        Args:
            index: the index of the metadata, if the engine plans.
        """
        self._metadata = metadata
        self._index, self._index_tables = index, None
        self.rank = rank  # type: ignore[assignment]  # torch declares None
        self.lost_precision = LostPrecision()  # discards that of a failed load

    @property
    def storage_data(self) -> dict[MetadataIndex, _StorageInfo]:
        """The locations of the items of the checkpoint that is being loaded."""
        return {} if self._metadata is None else self._metadata.storage_data or {}

    @storage_data.setter
    def storage_data(self, _none: dict[MetadataIndex, _StorageInfo]) -> None:
        # torch's reader assigns to it in order to reset it.
        self._metadata = None

    def reading(self, planner: LoadPlanner, items: list[ReadItem]) -> Reading:
        """Returns the reads of a plan.

        Raises:
            Corrupt: the metadata does not have the location of an item.
        """
        assert self._metadata is not None
        reading = Reading(planner)
        with no_gc():
            reading.add_items(items, self._metadata, self.storage_data)
        return reading

    def read(self, reading: Reading) -> None:
        """Makes the reads and passes the results to the planner.

        Raises:
            Corrupt, Unsafe, OSError, ValueError: see the class.
        """
        self.read_all_but_rows(reading)
        if reading.match is not None:
            self.read_match(reading.match)
        if reading.rows:
            self.read_rows(list(reading.files), reading.rows)
        for item, target in reading.to_commit:
            reading.planner.commit_tensor(item, target)

    def read_all_but_rows(self, reading: Reading) -> None:
        """Reads objects, and items that were written through a stream transform."""
        if reading.transformed:
            with self._opened() as directory, self.moved.elsewhere():
                before, self.fs = self.fs, FilesBeneath(directory)
                try:
                    super().read_data(
                        LoadPlan(reading.transformed),
                        self._guarded(reading.planner, self.storage_data),
                    )
                finally:
                    self.fs = before
        files_of = {item.storage_index: info for item, info in reading.byte_items}
        planner = self._guarded(reading.planner, files_of)
        sizes = ((entry, entry[1].length) for entry in reading.byte_items)
        for wave in in_waves(sizes, self.wave_bytes):
            files: dict[str, int] = {}
            rows = [
                (
                    item.storage_index.fqn,
                    files.setdefault(info.relative_path, len(files)),
                    info.offset,
                    info.length,
                )
                for item, info in wave
            ]
            stored = self.read_bytes(list(files), rows)[::-1]
            for item, _info in wave:
                # BytesIO makes a copy; free the data before it is decoded into an object.
                data = stored.pop()
                self.moved.add(len(data))
                planner.load_bytes(item, io.BytesIO(data))
                del data

    def read_match(self, match: _C.LoadMatch) -> None:
        """Reads the tensors that the engine has planned.

        Raises:
            Corrupt, Unsafe, OSError, ValueError: see the class.
        """
        devices = {torch.device("cuda", number) for number in match.cuda_devices()}

        def load(**options: Any) -> list[int]:
            return _C.load_matched(match, **options)

        unknown = self._load(load, match.bytes if self.progress else 0, devices)
        self.lost_precision.note_conversions(match.conversions())
        if unknown:
            self._read_by_torch(match.files(), [match.row(number) for number in unknown])

    def read_rows(self, files: list[str], rows: list[Row]) -> None:
        """Reads tensors into their targets.

        Args:
            files: names relative to the checkpoint's directory; the file numbers in ``rows`` index
                this list.
            rows: the tensors to read.

        Raises:
            Corrupt, Unsafe, OSError, ValueError: see the class.
        """
        places = places_of(files, rows, self._tables())
        planned = sum(row[8].numel() * row[4].itemsize for row in rows) if self.progress else 0

        def load(**options: Any) -> list[int]:
            return _C.load_tensors(places, with_names_as_utf8(rows), **options)

        unknown = self._load(load, planned, {row[8].device for row in rows if row[8].is_cuda})
        self.lost_precision.note(rows)
        self._read_by_torch(files, [rows[index] for index in unknown])

    def _load(
        self, load: Callable[..., list[int]], planned: int, devices: set[torch.device]
    ) -> list[int]:
        """Calls the engine and reports its progress."""
        events = record_events(devices)
        told = 0

        def tell(done: int) -> None:
            nonlocal told
            self.moved.add(done - told)
            told = done
            shown.update(Progress(planned, 0, done))

        with (
            self._opened() as directory,
            Reporter(self.progress, f"load {Path(self.path).name}", self.rank, planned) as shown,
        ):
            return load(
                directory=directory,
                threads=self.thread_count,
                max_inflight_bytes=self.max_inflight_bytes,
                direct_io=self.direct_io,
                verify=self.verify,
                progress=tell,
                ready=[(device.index, event.cuda_event) for event, device in events],
            )

    def _read_by_torch(self, files: list[str], rows: list[Row]) -> None:
        """Reads the tensors that only torch.load can decode."""
        for row in rows:
            name, number, offset, length, *_rest = row
            with self.moved.elsewhere():
                # Free each record before the next one is read.
                copy_by_torch(
                    self.read_bytes(files, [(name, number, offset, length)])[0], row, files[number]
                )

    def read_bytes(self, files: list[str], rows: list[ByteRow]) -> list[bytes]:
        """Returns the stored bytes of each (name, file number, offset, length)."""
        places = places_of(files, rows, self._tables())
        with self._opened() as directory:
            return _core.load_bytes(
                places,
                with_names_as_utf8(rows),
                directory=directory,
                threads=self.thread_count,
                max_inflight_bytes=self.max_inflight_bytes,
                direct_io=self.direct_io,
                verify=self.verify,
            )

    @property
    def identity(self) -> bytes | None:
        """A digest of the checkpoint being read, equal on ranks that read the same one.

        None if it is unknown, because the metadata is not what ``read_metadata`` returned.
        """
        metadata, identity = self._identity
        return identity if metadata is self._metadata else None

    def can_verify_parts(self, file: str) -> bool:
        """Returns True if a part of a record in a file is verified as strictly as the complete
        record."""
        return not self.verify or file in self._tables()

    # --- private ---------------------------------------------------------------------------------

    def _tables(self) -> Mapping[str, bytes]:
        """Returns the files' checksum tables."""
        if self._index is None:
            return checksum_tables(self._metadata)
        if self._index_tables is None:
            self._index_tables = self._index.tables()
        return self._index_tables

    def _decoded(self, data: bytes, source: str) -> Metadata:
        if self.allow_pickle:
            metadata = decode_metadata(data, source, allow_pickle=True)
            _make_known(metadata, self.size_rule, self.load_id)
        else:
            index, unpickle = decode_index(data, source), self._unpickler()
            size_rule, load_id = self.size_rule, self.load_id

            def decode() -> Metadata:
                # This must not refer to the reader, which may be freed before.
                unpickled = unpickle(data, source)
                _make_known(unpickled, size_rule, load_id)
                return unpickled

            metadata = undecoded(NotDecoded(decode, known_index=index, reader=weakref.ref(self)))
        if self.read_once:
            self._identity = metadata, hashlib.blake2b(data, digest_size=16).digest()
        return metadata

    def _unpickler(self) -> Callable[[bytes, str], Metadata]:
        """Returns the function that decodes checked contents of a metadata file into torch's
        objects."""
        return decode_indexed

    def _guarded(
        self, planner: LoadPlanner, storage: Mapping[MetadataIndex, _StorageInfo]
    ) -> LoadPlanner:
        """Wraps the planner so that objects run no code, unless allow_pickle is set."""
        if self.allow_pickle:
            return planner
        return cast(LoadPlanner, SafePlanner(planner, storage))

    def _remote_bytes(self, name: str) -> bytes:
        """Reads the metadata through the file system of torch or the user."""
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            data: bytes = stream.read(MAX_METADATA_BYTES + 1)
        if len(data) > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{name} in {self.path} has more bytes than the limit, {MAX_METADATA_BYTES}"
            )
        return data

    def _fill_with_zeros(self, planner: LoadPlanner) -> None:
        if not self.zero_fill:
            return
        assert self._metadata is not None
        state_dict = getattr(planner, "state_dict", None)
        if not isinstance(state_dict, dict):
            raise CheckpointError(
                "zero_fill and allow_shape_mismatch need a planner with an attribute state_dict, "
                f"as torch's planners have; {type(planner).__name__} has none"
            )
        zero_what_is_not_stored(state_dict, self._metadata)

    def _refuse_url(self) -> None:
        if self.engine_can_read():
            refuse_url(self._given_path)

    @contextmanager
    def _opened(self) -> Iterator[OpenDirectory]:
        """Yields the open directory; opens the current one if the metadata came from elsewhere."""
        if self._directory is not None:
            yield self._directory
            return
        directory = share_or_warn(open_checkpoint(self.path))
        try:
            yield directory
        finally:
            directory.close()


def _name_of(rank: int | None) -> str:
    return METADATA_NAME if rank is None else f"__{rank}{METADATA_NAME}"


@dataclasses.dataclass(frozen=True)
class _ReadVersion:
    """The version that a rank has read; travels in its plan."""

    of: str


def require_one_version(versions: Iterable[str | None], reader: FileSystemReader) -> None:
    """Raises CheckpointError if ranks have read different checkpoints.

    Args:
        versions: the versions of all ranks.
    """
    if len(set(versions)) > 1:
        raise CheckpointError(
            f"{reader.checkpoint_id}: ranks have read the metadata of different saves: the "
            "checkpoint was replaced, or a newer step was saved, while the load started; load again"
        )


def _make_known(metadata: Metadata, size_rule: str, load_id: str | None) -> None:
    """Adds the size rule and the id of the load to metadata."""
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    assert metadata.storage_meta is not None
    metadata.storage_meta.load_id = load_id
    if size_rule != "same":
        let_sizes_differ(metadata, SIZES[size_rule])
