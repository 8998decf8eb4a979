"""The StorageWriter: DCP's contract on one side, the C++ engine on the other.

Policy only. What is written where, and how, is decided in csrc/planning and csrc/engine; the commit
protocol is at the top of csrc/commit.cpp.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    _StoragePrefix,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as TorchsSavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt import _core
from torch_ckpt._base.cycle_collector import RelaxedGc, no_gc
from torch_ckpt._base.paths import absolute, is_url, refuse_url
from torch_ckpt._base.progress import ProgressOption
from torch_ckpt.checkpoint.directory import OpenDirectory, Place, require_one_directory
from torch_ckpt.checkpoint.file_system import FilesBeneath
from torch_ckpt.checkpoint.lease import (
    DirectoryLease,
    refuse_hidden_save,
    remove_own,
)
from torch_ckpt.checkpoint.metadata import (
    DCP_VERSION,
    encode_metadata,
    index_of,
    with_checksum_tables,
)
from torch_ckpt.checkpoint.saved_metadata import decode_when_used
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.saving.background import CHUNK_BYTES, Background
from torch_ckpt.saving.items import (
    Written,
    brought_with,
    keeps_default_lookup,
    names_of_files,
    resolve,
    results_of,
)
from torch_ckpt.saving.plan import GlobalPlan
from torch_ckpt.saving.rank_write import RankWrite, WriteOptions
from torch_ckpt.saving.save_planner import EngineStorageMeta, SavePlanner, global_plan_of
from torch_ckpt.saving.sources import copy_of_state

_DEFAULT_BACKGROUND = Background()

#: A rank makes one file for each of these that begins, up to its number of files. The chunks of so
#: few bytes are nearly all in flight at once (three of a file): a second file makes the save no
#: faster, and costs a file and its fsync.
BYTES_PER_FILE = 4 * CHUNK_BYTES


def default_thread_count() -> int:
    """Files that one rank writes at once: two feed a disk, more cores can checksum for more."""
    return max(2, min(4, (os.cpu_count() or 1) // 4))


class FileSystemWriter(StockWriter):
    """Writes distributed checkpoints; a drop-in for torch's class of the same name.

    Args:
        path: directory of the checkpoint; made if it is not there. A relative path is one of the
            working directory at this call. Each save opens the directory once, when it begins, and
            writes there alone.
        single_file_per_rank: one file for each of ``thread_count`` size-balanced buckets; False
            makes one file for each item.
        sync_files: fsync files and directories, so that a save that returned survives a power cut.
        thread_count: files that this rank writes at once, each with a thread that may wait for the
            disk. None: one file for each 16 MiB that begins, at most a quarter of the cores, which
            counts as at least 2 and at most 4.
        per_thread_copy_ahead: accepted as torch's; the engine's chunks take its place.
        cache_staged_state_dict: torch's, for its ``async_save``.
        overwrite: whether a checkpoint in ``path`` may be replaced. It stays loadable until the new
            one is committed.
        _extensions: torch's stream transforms; items then pass through Python.
        serialization_format: torch's; anything but its default is written by torch's own code.
        separation_hint: items whose fully qualified name begins with it go into files of their own.
            Needs ``thread_count >= 2``.
        max_host_bytes: most host memory in bytes for staging. None: three chunks of 4 MiB a file,
            and for ``async_save`` half of the free memory.
        direct_io: True, False, or "auto": where the file system offers it.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        background: how saves in the background behave: those of ``torch_ckpt.async_save``, and of
            ``dcp.async_save`` with this writer, which is then its ``AsyncStager``, too.

    Raises:
        ValueError: contradicting options; or ``path`` is a URL (docs/remote.md).

    Raises (from ``dcp.save``, on every rank, inside a ``CheckpointException``):
        OSError: a system call failed; ``errno`` and ``filename`` say which and where. Nothing was
            published and the files that the engine wrote on this rank are gone.
        NotCommitted, DurabilityUncertain: the commit itself failed.
    """

    #: See :class:`torch_ckpt.checkpoint.lease.DirectoryLease`.
    ends_earlier_leases = True

    #: Whoever has a background save made with it tells how that ends: it is not logged then, and
    #: neither the next save nor check_for_errors() raises its error.
    reported_elsewhere = False

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
        # An explicit number of files is made, however little is written.
        bytes_per_file = BYTES_PER_FILE if thread_count is None else 0
        if thread_count is None:
            thread_count = default_thread_count()
        if thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, got {thread_count}")
        if separation_hint and thread_count < 2:
            raise ValueError(
                "separation_hint needs thread_count >= 2 (one file for each side), "
                f"got {thread_count}"
            )
        hint = separation_hint or ""
        # Readers refuse backslashes in names of files.
        if "/" in hint or "\\" in hint or hint.startswith("."):
            raise ValueError(
                f"separation_hint begins file names, so it may not be {separation_hint!r}"
            )
        if direct_io not in (True, False, "auto"):
            raise ValueError(f'direct_io must be True, False or "auto", got {direct_io!r}')
        if max_host_bytes is not None and max_host_bytes < 4096:
            raise ValueError(f"max_host_bytes must be at least 4096, got {max_host_bytes}")
        if type(self) is FileSystemWriter:
            # Others may put another file system instead of the local one, as FsspecWriter.
            refuse_url(path)
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            *args,
            **kwargs,
        )
        self._given_path: str | os.PathLike[str] = path
        self._make_absolute()
        self.bytes_per_file = bytes_per_file
        self.separation_hint = separation_hint
        self.max_host_bytes = max_host_bytes
        self.direct_io = direct_io
        self.progress = progress
        self.background = background
        self._is_staged = False
        self._is_coordinator = False
        self._is_alone = False
        self._directory: OpenDirectory | None = None
        self._lease: DirectoryLease | None = None
        self._write: RankWrite | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, in another process perhaps, has no part in the save that is under way.
        return self.__dict__ | {"_directory": None, "_lease": None, "_write": None}

    # --- DCP's contract, in the order of a save -------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._given_path = checkpoint_id or self._given_path
        self._refuse_url()
        super().reset(checkpoint_id)
        self._make_absolute()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # torch passes the rank only to a method that has a parameter of the name `kwargs`.
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
        # Not torch's own, which warns that a checkpoint is replaced: here that stays loadable until
        # the new one is committed.
        if not self.overwrite and _core.metadata_name(self._own_rank()) in self.directory.names():
            raise RuntimeError(f"Checkpoint already exists in {self.path}, and overwrite=False")
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
        # Whatever prefix they have: a cached plan has that of an earlier save.
        return [
            dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{rank}_{self.tag}"))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: TorchsSavePlanner) -> Future[list[WriteResult]]:
        try:
            return self._write_data_of(plan, planner)
        except BaseException:
            if self._is_alone:
                self.abandon()
            raise
        finally:
            if not self._commits:
                # DCP calls no other method of it.
                self._directory = None

    def _write_data_of(
        self, plan: SavePlan, planner: TorchsSavePlanner
    ) -> Future[list[WriteResult]]:
        RelaxedGc.end()
        prefix: str = plan.storage_data.prefix
        if self._is_local():
            prefix = _core.choose_prefix(self.directory, prefix)
        if not self.engine_can_write():
            return self._write_through_torch(plan, planner, prefix)
        if isinstance(planner, SavePlanner) and planner.has_planned():
            # DCP hands on what a rank has written as it is.
            return completed([planner.write(plan, functools.partial(self.write_values, prefix))])
        items = list(plan.items)
        names = [item.index.fqn for item in items]
        with no_gc():
            direct = keeps_default_lookup(planner)
            values = [resolve(planner, item, direct) for item in items]
        written = self.write_values(prefix, names, values)
        return completed(results_of(items, written))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if not self._is_local():
            super().finish(metadata, results)
            return
        plan = global_plan_of(metadata)
        if plan is not None:
            self._finish_planned(plan, metadata, results)
            return
        with no_gc():
            metadata.version = DCP_VERSION
            metadata.storage_data = {
                result.index: result.storage_data for of_rank in results for result in of_rank
            }
            meta = self.storage_meta()
            metadata.storage_meta = None if meta is None else StorageMeta(**vars(meta))
            tables, directories = brought_with(results)
            complete = with_checksum_tables(metadata, tables)
            data = encode_metadata(complete)
        try:
            require_one_directory([Place.of(self.directory), *directories])
            self._refuse_unreadable(complete)
        except BaseException:
            self.abandon()
            raise
        self.commit(data, {info.relative_path for info in metadata.storage_data.values()})

    def _refuse_unreadable(self, metadata: Metadata) -> None:
        try:
            index_of(metadata, str(self.path))
        except (Corrupt, Unsafe) as error:
            raise CheckpointError(
                f"the metadata of this save could not be loaded, so it is not committed: {error}"
            ) from error

    def _finish_planned(self, plan: GlobalPlan, metadata: Metadata, results: list[Any]) -> None:
        written: list[Written] = [of_rank[0] for of_rank in results]
        try:
            require_one_directory([of_rank.directory for of_rank in written])
            data = plan.encode(written, self.storage_meta())
        except BaseException:
            self.abandon()
            raise
        self.commit(data, names_of_files(written))
        decode_when_used(metadata, data)

    def storage_meta(self) -> StorageMeta | None:
        # For SavePlanner, which is set up with it.
        kind = EngineStorageMeta if self.engine_can_write() else StorageMeta
        # A str and not a Path: pickled paths do not load in every version of Python.
        return kind(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    # --- DCP's AsyncStager, for dcp.async_save ---------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state dict in memory that is kept from one save to the next.

        Objects are deep-copied; tensors that are neither plain nor DTensors are cloned.
        """
        # From now on somebody trains beside our writing.
        self._is_staged = True
        return copy_of_state(state_dict)

    # --- shared with torch_ckpt.save -------------------------------------------------------------

    @property
    def identity(self) -> str | None:
        """What all ranks of a save must have alike; None: their directories may differ."""
        return None

    @property
    def destination(self) -> str:
        """Where the checkpoint is once it is committed."""
        return str(self.path)

    def engine_can_write(self) -> bool:
        """False where a transform, a format or a remote file system needs torch's own writing."""
        stock_format = getattr(self, "serialization_format", None)
        return (
            self._is_local()
            and not self.transforms.extensions
            and (stock_format is None or stock_format.name == "TORCH_SAVE")
        )

    @property
    def directory(self) -> OpenDirectory:
        """That of the save, opened when it began; as the path leads, where this is called alone."""
        if self._directory is None:
            self._directory = OpenDirectory(self.path)
        return self._directory

    @directory.setter
    def directory(self, opened: OpenDirectory) -> None:
        self._directory = opened

    def set_up_for_save(self, rank: int) -> None:
        """What DCP does by set_up_storage_writer and prepare_local_plan."""
        self.rank = rank
        self.use_collectives = True
        self._is_coordinator = rank == 0
        self.prepare_local_plan(SavePlan([]))

    @property
    def tag(self) -> str:
        """On the coordinator: what all ranks put behind ``__{rank}_`` in names of data files."""
        return self._lease.tag if self._lease is not None and self.use_collectives else ""

    def bytes_moved(self) -> int:
        """Grows for as long as this rank moves anything."""
        write = self._write
        return 0 if write is None else write.moved()

    def abandon(self) -> None:
        """Ends a save that has failed: on the coordinator its files go, all ranks'.

        A writer that is dropped does the same.
        """
        self._lease = None
        self._directory = None

    def write_values(
        self, prefix: str, names: list[str], values: list[Any], write: RankWrite | None = None
    ) -> Written:
        """Writes tensors and bytes, fsynced, and waits for the end.

        Args:
            prefix, names, values: as for :meth:`RankWrite.run`.
            write: that of a snapshot, or one that has something to do meanwhile.

        Raises:
            OSError, SourceChanged: see :meth:`RankWrite.run`.
        """
        # Beside training, of a state that was staged by :meth:`stage`.
        quiet = self.background if self._is_staged else None
        self._write = write or RankWrite(background=quiet)
        title = f"save {Path(self.path).name}"
        try:
            return self._write.run(
                self.directory, WriteOptions.of(self), prefix, names, values, title, self.rank
            )
        finally:
            self._write = None

    def undo(self, written: Written) -> None:
        """Removes what this rank has written, of a save that has failed on another one."""
        remove_own(self.directory, set(written.files.names))

    def commit(self, data: bytes, files: set[str]) -> None:
        """Publishes ``data`` as the metadata; then removes what no metadata names any more.

        Args:
            data: the metadata, encoded.
            files: the data files that it names.

        Raises:
            NotCommitted: what was in the directory before is still there and whole. The new data
                files that this process can see are gone. So it is, too, where the path leads to
                another directory than when the save began; nothing is touched there.
            DurabilityUncertain: the checkpoint may be visible, and may not last.
        """
        # Where somebody calls this by itself.
        lease = self._lease or DirectoryLease(self.directory, self._own_rank())
        self._lease = self._directory = None
        lease.commit(data, files, sync=self.sync_files, replace=self.overwrite)

    # --- private ---------------------------------------------------------------------------------

    @property
    def _commits(self) -> bool:
        return self._is_coordinator or not self.use_collectives

    def _make_absolute(self) -> None:
        # Others may put another file system instead of the local one, as FsspecWriter.
        if type(self.fs) is FileSystem and not is_url(self._given_path):
            self.path = absolute(self.path)

    def _refuse_url(self) -> None:
        if self._is_local():
            refuse_url(self._given_path)

    def _is_local(self) -> bool:
        return type(self.fs) is FileSystem

    def _own_rank(self) -> int | None:
        """The rank where ranks save on their own; None where they save together."""
        return None if self.use_collectives else self.rank

    def _write_through_torch(
        self, plan: SavePlan, planner: TorchsSavePlanner, prefix: str
    ) -> Future[list[WriteResult]]:
        # With more than one thread torch loses a worker's exception and reports success, so its own
        # writing gets one thread.
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
    """What has been written."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(value)
    return future
