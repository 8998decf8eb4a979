"""torch's StorageReader over the engine, for ``dcp.load``, and loads by ``dcp.load``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader as StockReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.futures import Future

from torch_ckpt import _core
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.cycle_collector import RelaxedGc
from torch_ckpt._base.progress import ProgressOption
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.dtypes import warn_of_lost_precision
from torch_ckpt.checkpoint.file_system import OnAnyFileSystem
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES
from torch_ckpt.checkpoint.metadata import checksum_tables, decode_indexed, decode_metadata
from torch_ckpt.checkpoint.opened import Checkpoint
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.errors import CheckpointError
from torch_ckpt.loading.page_cache import RankReads, want_same_bytes
from torch_ckpt.loading.planned_reads import PlannedReads, SafePlanner, let_sizes_differ
from torch_ckpt.options import ReadOptions, named_options
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.failures import reraise_torch_failures
from torch_ckpt.state.states import States


class FileSystemReader(OnAnyFileSystem, StockReader):
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
        path: see :func:`torch_ckpt.open`. Each load looks up the newest step of a root again.
        thread_count, max_inflight_bytes, verify, direct_io: see :class:`torch_ckpt.ReadOptions`.
        zero_fill, allow_shape_mismatch, read_once, progress: see :class:`torch_ckpt.ReadOptions`.
        process_group: the process group that is passed to ``dcp.load``, for ``read_once``; None
            means the default group.
        allow_pickle: accept metadata that names any type, and pass objects to the planner
            unchecked. torch's planner then unpickles the objects. See
            :class:`torch_ckpt.ReadOptions`.
        storage_options: see :class:`torch_ckpt.WriteOptions`.

    Raises:
        ValueError: an option is out of range or contradicts another one.

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
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(path, *args, **kwargs)
        self.options = ReadOptions(
            thread_count=thread_count,
            max_inflight_bytes=max_inflight_bytes,
            verify=verify,
            direct_io=direct_io,
            zero_fill=zero_fill,
            allow_shape_mismatch=allow_shape_mismatch,
            read_once=read_once,
            progress=progress,
            allow_pickle=allow_pickle,
            storage_options=storage_options,
        )
        self.process_group = process_group
        #: Decodes a metadata file, which the engine has checked, into torch's objects.
        self._unpickle = decode_indexed
        self._given_path = path
        self._keep_url()
        self._source: Source | None = None
        self._metadata: Metadata | None = None
        self._refused: Exception | None = None
        self._is_single_rank = False

    # --- in the order in which a load calls these methods ----------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._close()
        self._give_path(checkpoint_id)
        super().reset(checkpoint_id)
        self._keep_url()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        if rank is not None and self._refused is not None:
            # After any failure, torch drops the error and tries the rank's own metadata file. Empty
            # metadata makes torch continue to set_up_storage_reader, which raises the error.
            return Metadata({}, storage_data={})
        self._refused = None
        self._close()
        try:
            metadata = self._read_metadata(rank)
        except FileNotFoundError:
            raise
        except Exception as error:
            self._refused = error
            raise
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        if self.options.lets_sizes_differ:
            let_sizes_differ(metadata, self.options)
        self._metadata = metadata
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        refuse_capture()
        refused, self._refused = self._refused, None
        if refused is not None:
            raise refused
        # torch passes the rank only to a method that has a parameter named `kwargs`.
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        source = self._source
        if self._is_local() and source is None:
            source = self._source = self._new_source()
        if source is not None:
            source.rank = self.rank
            if metadata is not self._metadata:
                # The caller's own metadata may describe anything.
                source.index = source.metadata_digest = None
                source.tables = checksum_tables(metadata)
        self._metadata = metadata
        self._is_single_rank = False
        RelaxedGc.begin()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan = super().prepare_local_plan(plan)
        source, reads = self._source, RankReads()
        if source is not None:
            reads = RankReads(resolved=source.resolved)
            if source.index is not None and self.use_collectives and dist.is_initialized():
                reads = RankReads.of_items(plan.items, source.index, source.resolved)
        return dataclasses.replace(plan, storage_data=reads)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if self.options.read_once and dist.is_initialized():
            # With no_dist, torch calls this method on every rank with only that rank's plan.
            self._is_single_rank = len(plans) == 1
            size = dist.get_world_size(self.process_group)
            if len(plans) not in (1, size):
                raise ValueError(
                    f"{len(plans)} ranks load with read_once, but the reader's process group has "
                    f"{size} ranks; pass the load's process_group to the reader, too"
                )
        source, stored_bytes = self._source, None
        if source is not None and source.index is not None and source.has_all_ranks:
            stored_bytes = source.index.stored_bytes if self.use_collectives else None
        reads = [plan.storage_data for plan in plans if isinstance(plan.storage_data, RankReads)]
        share_bytes = want_same_bytes(reads, stored_bytes, str(self.path))
        plans = [
            dataclasses.replace(plan, storage_data=share_bytes)
            if isinstance(plan.storage_data, RankReads)
            else plan
            for plan in plans
        ]
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        RelaxedGc.end()
        source = self._source
        try:
            if source is None or self._metadata is None:
                return super().read_data(plan, self._guarded(planner))
            if plan.storage_data is True:
                source.read_through_cache()
            if source.directory is None:
                # The caller passed the metadata, so read_metadata() did not open the directory.
                source.open_files()
            reads = PlannedReads(source, plan.items, planner, self._metadata)
            if self.options.read_once and dist.is_initialized() and not self._is_single_rank:
                reads.read_once(self.process_group)
            else:
                reads.read()
            if source.narrowed:
                warn_of_lost_precision(source.narrowed)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # --- private ---------------------------------------------------------------------------------

    def _keep_url(self) -> None:
        # torch's class makes a local path of it.
        if self._is_local() and is_url(self._given_path):
            self.path = self._given_path

    def _new_source(self) -> Source:
        source = Source(self.path, self.options, self.transforms)
        source.decode = self._unpickle
        return source

    def _read_metadata(self, rank: int | None) -> Metadata:
        if not self._is_local():
            return self._read_by_torch(_core.metadata_name(rank))
        source = self._source = self._new_source()
        source.open((_core.metadata_name(rank),))
        return source.metadata()

    def _read_by_torch(self, name: str) -> Metadata:
        """Reads the metadata file through ``fs``."""
        file = os.path.join(self.path, name)
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
            data: bytes = stream.read(MAX_METADATA_BYTES + 1)
        if len(data) > MAX_METADATA_BYTES:
            raise CheckpointError(
                f"{name} in {self.path} is larger than the limit of {MAX_METADATA_BYTES} bytes"
            )
        return decode_metadata(data, file, allow_pickle=self.options.allow_pickle)

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _guarded(self, planner: LoadPlanner) -> LoadPlanner:
        """Wraps the planner so that loading objects runs no code, unless allow_pickle is set."""
        if self.options.allow_pickle:
            return planner
        return cast(LoadPlanner, SafePlanner(planner, self.storage_data))

    @property
    def storage_data(self) -> dict[MetadataIndex, _StorageInfo]:
        """The locations of the items in the checkpoint that is being loaded."""
        return {} if self._metadata is None else self._metadata.storage_data or {}

    @storage_data.setter
    def storage_data(self, _none: dict[MetadataIndex, _StorageInfo]) -> None:
        # torch's reader only assigns an empty dict, to reset the attribute.
        self._metadata = None


# --- loads with a planner -------------------------------------------------------------------------


class SourceReader(FileSystemReader):
    """Reads any source for ``dcp.load``.

    Args:
        source: the checkpoint, which the reader opens and closes.
        process_group: see :class:`FileSystemReader`.
    """

    def __init__(self, source: Source, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__(source.title, process_group=process_group, **named_options(source.options))
        self._own_source = source

    @property
    def checkpoint_id(self) -> str:
        return self._own_source.title

    def _is_local(self) -> bool:
        return True

    def _new_source(self) -> Source:
        return self._own_source


def load_by_dcp(
    state_dict: dict[str, Any],
    source_of: Callable[[], Source],
    planner: LoadPlanner,
    ranks: Exchange,
    process_group: dist.ProcessGroup | None,
    is_strict: bool,
) -> Checkpoint:
    """Loads a state dict by ``dcp.load`` with a planner.

    Args:
        state_dict, planner, process_group: see :func:`torch_ckpt.load`.
        source_of: creates the source. If it fails, the load fails on all ranks.
        ranks: the ranks that load together.
        is_strict: True if the caller requires that all values are loaded, under their own names.
    """

    def prepare() -> tuple[Source, SourceReader]:
        States(state_dict)
        if not is_strict:
            raise ValueError(
                'strict=False, strict="dtypes", names, rename and free_before_read do not work '
                "with a planner. Omit them, or load without a planner."
            )
        _require_states(state_dict)
        source = source_of()
        return source, SourceReader(source, process_group)

    with ranks:
        # dcp.load would wait for a rank that fails before it calls dcp.load.
        source, reader = ranks.run("plan", prepare)
    with reraise_torch_failures(ranks.rank):
        dcp_load(
            state_dict,
            storage_reader=reader,
            planner=planner,
            process_group=process_group,
            no_dist=not ranks.distributed,
        )
    read = ReadOptions(storage_options=source.options.storage_options)
    return Checkpoint(source.title, options=read)


def _require_states(state_dict: dict[str, Any]) -> None:
    """Raises ValueError if the state dict has an optimizer that ``dcp.load`` would not restore."""
    for key, value in state_dict.items():
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            raise ValueError(
                f"{key}: this optimizer has no state yet. A load with a planner calls dcp.load, "
                "which would not restore it. Load without a planner, or pass "
                "get_optimizer_state_dict(model, optimizer) from "
                "torch.distributed.checkpoint.state_dict."
            )
