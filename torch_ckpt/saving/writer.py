"""torch's StorageWriter: writes the checkpoints of ``dcp.save`` with the C++ engine.

This class has torch's contract only. ``torch_ckpt.save`` does not use it.
"""

from __future__ import annotations

import dataclasses
import os
from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, _StoragePrefix
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.cycle_collector import RelaxedGc, no_gc
from torch_ckpt._base.paths import absolute, is_url, refuse_url
from torch_ckpt._base.progress import ProgressOption
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory, require_one_directory
from torch_ckpt.checkpoint.file_system import FilesBeneath
from torch_ckpt.checkpoint.lease import DirectoryLease, refuse_hidden_save
from torch_ckpt.checkpoint.metadata import (
    DCP_VERSION,
    encode_metadata,
    require_readable,
    with_checksum_tables,
)
from torch_ckpt.options import DEFAULT_FILES, Background, WriteOptions
from torch_ckpt.saving.items import brought_with, keeps_default_lookup, resolve, results_of
from torch_ckpt.saving.snapshots import copy_of_state
from torch_ckpt.saving.write import write_files

_DEFAULT_BACKGROUND = Background()


class FileSystemWriter(StockWriter):
    """Writes distributed checkpoints. A drop-in replacement for torch's class of the same name.

    Args:
        path: the checkpoint directory. The directory is created if it does not exist. When the
            writer is created, a relative path is resolved against the current working directory.
            Each save opens the directory once, at the start of the save, and writes only to the
            opened directory.
        single_file_per_rank: True groups this rank's items into ``thread_count`` files of similar
            size. False writes one file per item.
        sync_files: fsync files and directories, so that a completed save survives a power cut.
        thread_count: number of files that this rank writes concurrently, each with up to two writes
            in flight. None chooses one file per 16 MiB of data (rounded up), but at most 4.
        per_thread_copy_ahead: accepted for compatibility and ignored, because the engine copies
            ahead in chunks.
        cache_staged_state_dict: torch's option, for torch's own ``async_save``.
        overwrite: replace any existing checkpoint in ``path``. The existing checkpoint can be
            loaded until the new checkpoint is committed.
        _extensions: torch's stream transforms. With transforms, all items pass through Python.
        serialization_format: torch's option. torch's own code writes every format other than the
            default.
        separation_hint: prefix of fully qualified names. Items with this prefix are written to
            different files than all other items. Requires ``thread_count >= 2``.
        max_host_bytes: maximum host memory for staging, in bytes; at least 4096. None means this
            rank's share of half of the free memory for ``async_save``, and three 4 MiB chunks per
            file for other saves.
        direct_io: True, False, or "auto", which uses direct I/O if the file system supports it.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        background: threads and priorities of background saves by ``torch_ckpt.async_save`` or
            ``dcp.async_save``. For ``dcp.async_save``, the writer is also an ``AsyncStager``.

    Raises:
        ValueError: an option is out of range or contradicts another one, or ``path`` is a URL (see
            docs/remote.md).

    Raises (from ``dcp.save``, on every rank, inside a ``CheckpointException``):
        OSError: a system call failed; ``errno`` and ``filename`` are set. Nothing was published,
            and the files that the engine wrote on this rank were removed.
        NotCommitted, DurabilityUncertain: the commit failed.

    Examples:
        ```python
        writer = torch_ckpt.FileSystemWriter("checkpoints/100")
        dcp.save({"model": model.state_dict()}, storage_writer=writer)
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        *args: Any,
        separation_hint: str | None = None,
        max_host_bytes: int | None = None,
        direct_io: bool | str = "auto",
        progress: ProgressOption = None,
        background: Background = _DEFAULT_BACKGROUND,
        **kwargs: Any,
    ) -> None:
        if type(self) is FileSystemWriter:
            # Subclasses may use another file system, as FsspecWriter does.
            refuse_url(path)
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            DEFAULT_FILES if thread_count is None else thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            *args,
            **kwargs,
        )
        self._given_path: str | os.PathLike[str] = path
        self._make_absolute()
        self._chooses_files = thread_count is None
        self.separation_hint = separation_hint
        self.max_host_bytes = max_host_bytes
        self.direct_io = direct_io
        self.progress = progress
        self.background = background
        self.write_options()  # refuses invalid options now, not in the first save
        self._is_staged = False
        self._is_coordinator = False
        self._is_alone = False
        self._directory: OpenDirectory | None = None
        self._lease: DirectoryLease | None = None
        #: See :class:`torch_ckpt.checkpoint.lease.DirectoryLease`.
        self.ends_earlier_leases = True

    def __getstate__(self) -> dict[str, Any]:
        # A copy, which may be in another process, does not participate in the running save.
        return self.__dict__ | {"_directory": None, "_lease": None}

    # --- the contract, in the order of a save ----------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._given_path = checkpoint_id or self._given_path
        self._refuse_url()
        super().reset(checkpoint_id)
        self._make_absolute()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        refuse_capture()
        # torch passes the rank only to a method that has a parameter named `kwargs`.
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._is_coordinator = is_coordinator
        RelaxedGc.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.abandon()
        self._refuse_url()
        if not self._is_local():
            return super().prepare_local_plan(plan)
        _core.make_directories(self.path)
        refuse_hidden_save(self.directory, self._own_rank())
        # Replaces torch's own check, which would warn that a checkpoint is overwritten. That needs
        # no warning here, because the old checkpoint can be loaded until the new one is committed.
        if not self.overwrite and _core.metadata_name(self._own_rank()) in self.directory.names():
            raise RuntimeError(
                f"Checkpoint already exists in {self.path}; pass overwrite=True to replace it"
            )
        if self.rank is not None and not self.use_collectives:
            plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        if self._commits:
            self._lease = DirectoryLease(self.directory, self._own_rank(), self.ends_earlier_leases)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        self._is_alone = len(plans) == 1
        if self._lease is None or not self.use_collectives:
            return plans
        # Set the prefix again, because a cached plan has the prefix of an earlier save.
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_{self.tag}"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return self._write_files(plan, planner)
        except BaseException:
            if self._is_alone:
                self.abandon()
            raise
        finally:
            if not self._commits:
                # This is the last method that DCP calls on such a rank.
                self._directory = None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if not self._is_local():
            super().finish(metadata, results)
            return
        with no_gc():
            metadata.version = DCP_VERSION
            metadata.storage_data = {
                result.index: result.storage_data for of_rank in results for result in of_rank
            }
            metadata.storage_meta = self.storage_meta()
            tables, directories = brought_with(results)
            complete = with_checksum_tables(metadata, dict(ChainMap(*tables)))
            data = encode_metadata(complete)
        try:
            require_one_directory([DirectoryIdentity.of(self.directory), *directories])
            require_readable(data, str(self.path))
        except BaseException:
            self.abandon()
            raise
        self.commit(data, {info.relative_path for info in metadata.storage_data.values()})

    def storage_meta(self) -> StorageMeta | None:
        # Convert the path to str, because not every Python version can load pickled paths.
        return StorageMeta(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a state dict in host memory, for ``dcp.async_save``. Later saves reuse
        the memory.

        Objects are deep-copied. Tensors that are neither plain tensors nor DTensors are cloned.
        """
        refuse_capture()
        # From now on, this writer writes while training runs.
        self._is_staged = True
        return copy_of_state(state_dict)

    # --- the parts that Megatron's writer uses, too -----------------------------------------------

    def write_options(self) -> WriteOptions:
        """Returns the options of the next write. As with torch's writer, callers may change the
        attributes until then."""
        is_default = self._chooses_files and self.thread_count == DEFAULT_FILES
        return WriteOptions(
            thread_count=None if is_default else self.thread_count,
            single_file_per_rank=self.single_file_per_rank,
            sync_files=self.sync_files,
            overwrite=self.overwrite,
            separation_hint=self.separation_hint,
            max_host_bytes=self.max_host_bytes,
            direct_io=self.direct_io,
            progress=self.progress,
            background=self.background,
        )

    def engine_can_write(self) -> bool:
        """Returns False if torch's own code must write: the writer has stream transforms, a format
        other than the default, or a remote file system."""
        stock_format = getattr(self, "serialization_format", None)
        return (
            self._is_local()
            and not self.transforms.extensions
            and (stock_format is None or stock_format.name == "TORCH_SAVE")
        )

    @property
    def directory(self) -> OpenDirectory:
        """The checkpoint directory, as opened at the start of the save. If no save has begun, opens
        the directory by its path."""
        if self._directory is None:
            self._directory = OpenDirectory(self.path)
        return self._directory

    @property
    def tag(self) -> str:
        """The text that follows ``__{rank}_`` in the names of all data files. Only valid on the
        coordinator."""
        return self._lease.tag if self._lease is not None and self.use_collectives else ""

    def abandon(self) -> None:
        """Ends a failed save. The coordinator removes the files of all ranks.

        Dropping the writer has the same effect.
        """
        self._lease = None
        self._directory = None

    def commit(self, data: bytes, files: set[str]) -> None:
        """Publishes ``data`` as the metadata, then removes the files that the metadata does not
        name.

        Args:
            data: the contents of ``.metadata``.
            files: the data files that the metadata names.

        Raises:
            NotCommitted: nothing was published. The previous contents of the directory are intact,
                and the new data files that this process can see were removed. If the path has been
                made to refer to another directory since the save began, that other directory was
                not changed.
            DurabilityUncertain: the checkpoint might be visible already, but a power cut could lose
                the checkpoint.
        """
        # If no save has begun, take a lease now.
        lease = self._lease or DirectoryLease(self.directory, self._own_rank())
        self._lease = self._directory = None
        encoded = _core.EncodedMetadata(data)
        lease.commit(encoded, files, sync=self.sync_files, replace=self.overwrite)

    # --- private ---------------------------------------------------------------------------------

    @property
    def _commits(self) -> bool:
        return self._is_coordinator or not self.use_collectives

    def _make_absolute(self) -> None:
        # Subclasses may use another file system, as FsspecWriter does.
        if type(self.fs) is FileSystem and not is_url(self._given_path):
            self.path = absolute(self.path)

    def _refuse_url(self) -> None:
        if self._is_local():
            refuse_url(self._given_path)

    def _is_local(self) -> bool:
        return type(self.fs) is FileSystem

    def _own_rank(self) -> int | None:
        """Returns the rank if ranks save independently, and None if they save together."""
        return None if self.use_collectives else self.rank

    def _write_files(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        RelaxedGc.end()
        prefix: str = plan.storage_data.prefix
        if self._is_local():
            prefix = _core.choose_prefix(self.directory, prefix)
        if not self.engine_can_write():
            return self._write_through_torch(plan, planner, prefix)
        sources = _C.SaveSources()
        with no_gc():
            direct = keeps_default_lookup(planner)
            for item in plan.items:
                sources.add(item.index.fqn, resolve(planner, item, direct))
        written = write_files(
            _C.Save(),
            self.directory,
            prefix,
            sources,
            self.write_options(),
            title=f"save {Path(self.path).name}",
            rank=self.rank,
            # If stage() has copied the state, training is running.
            background=self.background if self._is_staged else None,
        )
        return completed(results_of(plan.items, written))

    def _write_through_torch(
        self, plan: SavePlan, planner: SavePlanner, prefix: str
    ) -> Future[list[WriteResult]]:
        # Use one thread for torch's own code: with several threads, torch loses exceptions of its
        # workers and reports success.
        plan = dataclasses.replace(plan, storage_data=_StoragePrefix(prefix))
        thread_count, self.thread_count = self.thread_count, 1
        is_local, fs = self._is_local(), self.fs
        try:
            if is_local:
                self.fs = FilesBeneath(self.directory)
            future = super().write_data(plan, planner)
        finally:
            self.thread_count, self.fs = thread_count, fs
        if is_local and self.sync_files:
            self.directory.sync()
        return future


def completed(value: list[Any]) -> Future[list[WriteResult]]:
    """Returns a completed future with the results of the writes."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(value)
    return future
