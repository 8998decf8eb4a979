"""The StorageWriter: writes checkpoints for DCP and ``torch_ckpt.save``, by the C++ engine.

This module contains only policy. csrc/planning and csrc/engine decide what is written where.
csrc/directory/lease.h describes the commit protocol.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

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

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.cycle_collector import RelaxedGc, no_gc
from torch_ckpt._base.paths import absolute, is_url, refuse_url
from torch_ckpt._base.progress import ProgressOption
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory, require_one_directory
from torch_ckpt.checkpoint.file_system import FilesBeneath
from torch_ckpt.checkpoint.lazy_metadata import SavedMetadata, make_lazy, saved_contents
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
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.saving.background import CHUNK_BYTES, Background
from torch_ckpt.saving.global_plan import Assignment, GlobalPlan
from torch_ckpt.saving.items import (
    Written,
    brought_with,
    keeps_default_lookup,
    names_of_files,
    resolve,
    results_of,
)
from torch_ckpt.saving.rank_write import RankWrite, WriteOptions
from torch_ckpt.saving.save_planner import EngineStorageMeta, SavePlanner, global_plan_of
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.snapshots import copy_of_state

_DEFAULT_BACKGROUND = Background()


class Saved(Protocol):
    """A committed save, in the form in which the coordinator sends it to the other ranks."""

    def metadata(self) -> Metadata:
        """Returns the metadata."""


#: By default a rank writes one file per this many bytes or fraction thereof, up to its number of
#: files. For less data a second file would cost an fsync but not make the save faster: nearly all
#: chunks of one file are in flight at once (three per file).
BYTES_PER_FILE = 4 * CHUNK_BYTES

#: By default a rank writes up to this many files concurrently. On the disks measured with
#: benchmarks/files_per_rank.py, fewer files were slower and more files were not faster.
DEFAULT_FILES = 4


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

    #: See :class:`torch_ckpt.checkpoint.lease.DirectoryLease`.
    ends_earlier_leases = True

    #: True if background saves with this writer are compared with the previous save.
    finds_unchanged = True

    #: True if the code that starts a background save with this writer reports its error. The error
    #: is then neither logged nor raised by the next save or check_for_errors().
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
        # If the caller chose a number of files, use it even if little is written.
        self.bytes_per_file = BYTES_PER_FILE if thread_count is None else 0
        self.separation_hint = separation_hint
        self.max_host_bytes = max_host_bytes
        self.direct_io = direct_io
        self.progress = progress
        self.write_options()  # refuses invalid options now, not in the first save
        self.background = background
        self._is_staged = False
        self._is_coordinator = False
        self._is_alone = False
        self._is_working = False
        self._directory: OpenDirectory | None = None
        self._lease: DirectoryLease | None = None
        self._write: RankWrite | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, which may be in another process, does not participate in the running save.
        return self.__dict__ | {"_directory": None, "_lease": None, "_write": None}

    # --- DCP's contract, in the order of a save -------------------------------------------------

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

    def write_data(self, plan: SavePlan, planner: TorchsSavePlanner) -> Future[list[WriteResult]]:
        try:
            return self._write_data_of(plan, planner)
        except BaseException:
            if self._is_alone:
                self.abandon()
            raise
        finally:
            if not self._commits:
                # This is the last method that DCP calls on such a rank.
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
            # DCP passes the result of a rank to the coordinator unchanged, so it may have any type.
            sources, seconds, checksums = planner.take_sources(plan, bool(self.separation_hint))
            written = self.write_values(prefix, sources)
            written.seconds = (*seconds, *written.seconds)
            if checksums:
                written.checksums = checksums
            return completed([written])
        sources = _C.SaveSources()
        with no_gc():
            direct = keeps_default_lookup(planner)
            for item in plan.items:
                sources.add(item.index.fqn, resolve(planner, item, direct))
        return completed(results_of(plan.items, self.write_values(prefix, sources)))

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
            complete = with_checksum_tables(metadata, dict(ChainMap(*tables)))
            data = _core.EncodedMetadata(encode_metadata(complete))
        try:
            require_one_directory([DirectoryIdentity.of(self.directory), *directories])
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
                f"{self.path}: this save was not committed, because its metadata could not be "
                f"loaded again: {error}"
            ) from error

    def _finish_planned(self, plan: GlobalPlan, metadata: Metadata, results: list[Any]) -> None:
        written: list[Written] = [of_rank[0] for of_rank in results]
        try:
            require_one_directory([of_rank.directory for of_rank in written])
            plan.require_equal_copies(written)
            data = plan.encode(written, self.storage_meta())
        except BaseException:
            self.abandon()
            raise
        self.commit(data, names_of_files(written))
        make_lazy(metadata, saved_contents(data))

    def storage_meta(self) -> StorageMeta | None:
        # torch passes this object to the planner; SavePlanner detects by its type that the engine
        # can write.
        kind = EngineStorageMeta if self.engine_can_write() else StorageMeta
        # Convert the path to str, because not every Python version can load pickled paths.
        return kind(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    # --- DCP's AsyncStager, for dcp.async_save ---------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a state dict in host memory. Later saves reuse the memory.

        Objects are deep-copied. Tensors that are neither plain tensors nor DTensors are cloned.
        """
        refuse_capture()
        # From now on, this writer writes while training runs.
        self._is_staged = True
        return copy_of_state(state_dict)

    # --- shared with torch_ckpt.save -------------------------------------------------------------

    @property
    def identity(self) -> str | None:
        """An identifier that must be the same on all ranks of a save; None if there is nothing to
        compare."""
        return None

    @property
    def destination(self) -> str:
        """Path or URL of the committed checkpoint."""
        return str(self.path)

    def write_options(self) -> WriteOptions:
        """Returns the options of the next write. As with torch's writer, callers may change the
        attributes until then."""
        return WriteOptions(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(WriteOptions)}
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

    @directory.setter
    def directory(self, opened: OpenDirectory) -> None:
        self._directory = opened

    def set_up_for_save(self, rank: int) -> None:
        """Prepares a save, as DCP's set_up_storage_writer and prepare_local_plan do."""
        self.rank = rank
        self.use_collectives = True
        self._is_coordinator = rank == 0
        self.prepare_local_plan(SavePlan([]))

    @property
    def tag(self) -> str:
        """The text that follows ``__{rank}_`` in the names of all data files. Only valid on the
        coordinator."""
        return self._lease.tag if self._lease is not None and self.use_collectives else ""

    def bytes_moved(self) -> int:
        """Returns a number that increases as long as this rank makes progress."""
        write = self._write
        moved = 0 if write is None else write.moved()
        return moved + (time.monotonic_ns() if self._is_working else 0)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Sends heartbeats during a block that may take long but moves no bytes."""
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = False

    def abandon(self) -> None:
        """Ends a failed save. The coordinator removes the files of all ranks.

        Dropping the writer has the same effect.
        """
        self._lease = None
        self._directory = None

    def write_values(
        self, prefix: str, sources: _C.SaveSources, write: RankWrite | None = None
    ) -> Written:
        """Writes tensors and bytes, fsyncs the files, and blocks until the write is done.

        Args:
            prefix, sources: see :meth:`RankWrite.run`.
            write: the RankWrite to use; None creates one. Pass a RankWrite to write a snapshot, or
                to run other work while the engine writes.

        Raises:
            OSError, SourceChanged: see :meth:`RankWrite.run`.
        """
        # If stage() has copied the state, training is running: write at the background priorities.
        quiet = self.background if self._is_staged else None
        self._write = write or RankWrite(background=quiet)
        title = f"save {Path(self.path).name}"
        try:
            return self._write.run(
                self.directory, self.write_options(), prefix, sources, title, self.rank
            )
        finally:
            self._write = None

    def prepare_state(self, state: SaveState) -> None:
        """Removes values from a state dict that this writer does not write."""

    def offer_memory(self) -> bytes:
        """Returns the address of memory that the ranks of this machine can use for the save; empty
        if this rank offers none."""
        return b""

    def places(self, plan: GlobalPlan, offers: list[bytes]) -> Sequence[bytes]:
        """Returns the places of each rank's values in files that several ranks write; empty if each
        rank writes files of its own. Called on the coordinator.

        Args:
            offers: the result of :meth:`offer_memory` on each rank.
        """
        return ()

    def sources(self, state: SaveState, assignment: Assignment, places: bytes) -> _C.SaveSources:
        """Returns the values that this rank writes.

        Args:
            places: this rank's :meth:`places`.
        """
        return state.sources(assignment, bool(self.separation_hint))

    def prefix_of_files(self, tag: str) -> str:
        """Returns the prefix for the names of this rank's files.

        Args:
            tag: the coordinator's :attr:`tag`.
        """
        return _core.choose_prefix(self.directory, f"__{self.rank}_{tag}")

    def prepare_commit(self, plan: GlobalPlan) -> None:
        """Does the coordinator's work for the commit that does not depend on the files."""
        plan.engine.describe()

    def commit_plan(self, plan: GlobalPlan, written: list[Written], ranks: int) -> Saved:
        """Commits a save that the engine has planned, on the coordinator.

        Args:
            written: the results of the writes, indexed by rank.
            ranks: number of ranks that receive the result.

        Raises:
            NotCommitted, DurabilityUncertain: see :meth:`commit`.
        """
        data = plan.encode(written, self.storage_meta())
        self.commit(data, names_of_files(written))
        return SavedMetadata(data, self.destination, ranks)

    def undo(self, written: Written) -> None:
        """Removes the files that this rank wrote, after the save has failed on another rank."""
        remove_own(self.directory, set(written.files.names))

    def commit(self, data: _core.EncodedMetadata, files: set[str]) -> None:
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
        lease.commit(data, files, sync=self.sync_files, replace=self.overwrite)

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

    def _write_through_torch(
        self, plan: SavePlan, planner: TorchsSavePlanner, prefix: str
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
