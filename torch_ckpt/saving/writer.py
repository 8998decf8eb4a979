"""The StorageWriter: DCP's contract on one side, the C++ engine on the other.

This module holds policy only. csrc/planning and csrc/engine decide what is written where;
csrc/directory/lease.h describes the commit protocol.
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
from torch_ckpt.saving.global_plan import GlobalPlan
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
from torch_ckpt.saving.snapshots import copy_of_state

_DEFAULT_BACKGROUND = Background()

#: A rank writes one file for each of these or part of it, up to its number of files. Nearly all
#: chunks of so few bytes are in flight at once (three for each file), so a second file would not
#: make the save faster, but cost a file and its fsync.
BYTES_PER_FILE = 4 * CHUNK_BYTES


def default_thread_count() -> int:
    """Returns how many files a rank writes at once: two saturate a disk, and more cores can
    checksum more."""
    return max(2, min(4, (os.cpu_count() or 1) // 4))


class FileSystemWriter(StockWriter):
    """Writes distributed checkpoints. Replaces torch's class of the same name without other
    changes.

    Args:
        path: directory of the checkpoint; it is created if it does not exist. A relative path is
            resolved now, against the working directory. Each save opens the directory once, when it
            starts, and writes only there.
        single_file_per_rank: write one file for each of ``thread_count`` buckets of similar size.
            False writes one file for each item.
        sync_files: fsync files and directories, so that a completed save survives a power cut.
        thread_count: number of files that this rank writes at once, each with a thread that may
            wait for the disk. None chooses one file for each 16 MiB or part of it, and at most a
            quarter of the cores (but at least 2 and at most 4).
        per_thread_copy_ahead: accepted for compatibility and ignored; the engine copies ahead in
            chunks.
        cache_staged_state_dict: torch's option, for its ``async_save``.
        overwrite: replace a checkpoint in ``path``. The old checkpoint can be loaded until the new
            one is committed.
        _extensions: torch's stream transforms. Items then pass through Python.
        serialization_format: torch's option. Formats other than its default are written by torch's
            own code.
        separation_hint: write items whose fully qualified name begins with this text to separate
            files. Needs ``thread_count >= 2``.
        max_host_bytes: limit of the host memory for staging, in bytes, at least 4096. None: three
            chunks of 4 MiB for each file; half of the free memory for ``async_save``.
        direct_io: True, False, or "auto" to use direct I/O if the file system supports it.
        progress: see :data:`torch_ckpt._base.progress.ProgressOption`.
        background: threads and priorities of background saves: those of ``torch_ckpt.async_save``,
            and those of ``dcp.async_save``, for which the writer is an ``AsyncStager``, too.

    Raises:
        ValueError: an option is out of range or contradicts another one, or ``path`` is a URL (see
            docs/remote.md).

    Raises (from ``dcp.save``, on every rank, inside a ``CheckpointException``):
        OSError: a system call failed; ``errno`` and ``filename`` are set. Nothing was published,
            and the files that the engine wrote on this rank were removed.
        NotCommitted, DurabilityUncertain: the commit itself failed.

    Examples:
        ```python
        writer = torch_ckpt.FileSystemWriter("checkpoints/100")
        dcp.save({"model": model.state_dict()}, storage_writer=writer)
        ```
    """

    #: See :class:`torch_ckpt.checkpoint.lease.DirectoryLease`.
    ends_earlier_leases = True

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
        # An explicit number of files is used even if little is written.
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
        # Readers refuse file names with backslashes.
        if "/" in hint or "\\" in hint or hint.startswith("."):
            raise ValueError(
                "separation_hint is the prefix of file names: it must not have a slash or a "
                f"backslash or begin with a dot, got {separation_hint!r}"
            )
        if direct_io not in (True, False, "auto"):
            raise ValueError(f'direct_io must be True, False or "auto", got {direct_io!r}')
        if max_host_bytes is not None and max_host_bytes < 4096:
            raise ValueError(f"max_host_bytes must be at least 4096, got {max_host_bytes}")
        if type(self) is FileSystemWriter:
            # Subclasses may use another file system, as FsspecWriter does.
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
        # A copy, perhaps in another process, has no part in the running save.
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
        # torch's own check would warn that a checkpoint is replaced. Here the old one can be loaded
        # until the new one is committed.
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
        # Overwrite the prefix: a cached plan has that of an earlier save.
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
                # DCP calls no other method after this one on such a rank.
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
            # DCP passes a rank's result to the coordinator unchanged.
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
                f"{self.path}: the metadata of this save would not load, so it was not committed: "
                f"{error}"
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
        # SavePlanner is set up with this object.
        kind = EngineStorageMeta if self.engine_can_write() else StorageMeta
        # A str, because pickled paths do not load in every version of Python.
        return kind(checkpoint_id=str(self.checkpoint_id), save_id=self.save_id)

    # --- DCP's AsyncStager, for dcp.async_save ---------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Returns a copy of a state dict in host memory that is reused from save to save.

        Objects are deep-copied. Tensors that are neither plain nor DTensors are cloned.
        """
        # From now on training runs while this writer writes.
        self._is_staged = True
        return copy_of_state(state_dict)

    # --- shared with torch_ckpt.save -------------------------------------------------------------

    @property
    def identity(self) -> str | None:
        """A name that all ranks of a save must share; None if their directories may differ."""
        return None

    @property
    def destination(self) -> str:
        """Path or URL of the committed checkpoint."""
        return str(self.path)

    def engine_can_write(self) -> bool:
        """Returns False if a transform, a format or a remote file system needs torch's own code."""
        stock_format = getattr(self, "serialization_format", None)
        return (
            self._is_local()
            and not self.transforms.extensions
            and (stock_format is None or stock_format.name == "TORCH_SAVE")
        )

    @property
    def directory(self) -> OpenDirectory:
        """The directory of the save, opened when the save began. Opened by its path if there is no
        save."""
        if self._directory is None:
            self._directory = OpenDirectory(self.path)
        return self._directory

    @directory.setter
    def directory(self, opened: OpenDirectory) -> None:
        self._directory = opened

    def set_up_for_save(self, rank: int) -> None:
        """Does the work of DCP's set_up_storage_writer and prepare_local_plan."""
        self.rank = rank
        self.use_collectives = True
        self._is_coordinator = rank == 0
        self.prepare_local_plan(SavePlan([]))

    @property
    def tag(self) -> str:
        """On the coordinator: the text after ``__{rank}_`` in the names of all data files."""
        return self._lease.tag if self._lease is not None and self.use_collectives else ""

    def bytes_moved(self) -> int:
        """Returns a number that grows for as long as this rank makes progress."""
        write = self._write
        return 0 if write is None else write.moved()

    def abandon(self) -> None:
        """Ends a failed save. The coordinator removes the files of all ranks.

        Dropping the writer has the same effect.
        """
        self._lease = None
        self._directory = None

    def write_values(
        self, prefix: str, names: list[str], values: list[Any], write: RankWrite | None = None
    ) -> Written:
        """Writes tensors and bytes, fsyncs the files, and waits for the end.

        Args:
            prefix, names, values: see :meth:`RankWrite.run`.
            write: the write of a snapshot, or one with other work to do meanwhile.

        Raises:
            OSError, SourceChanged: see :meth:`RankWrite.run`.
        """
        # Use the background priorities for a state that was staged by :meth:`stage`.
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
        """Removes the files that this rank wrote, after the save has failed on another rank."""
        remove_own(self.directory, set(written.files.names))

    def commit(self, data: bytes, files: set[str]) -> None:
        """Publishes ``data`` as the metadata. Then removes the files that no metadata names.

        Args:
            data: the encoded metadata.
            files: the data files that it names.

        Raises:
            NotCommitted: the previous contents of the directory are intact, and the new data files
                that this process can see were removed. If the path now leads to another directory
                than when the save began, nothing is changed there.
            DurabilityUncertain: the checkpoint may be visible, but a power cut may lose it.
        """
        # Without a save, take a lease now.
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
        """The rank, if ranks save independently; None if they save together."""
        return None if self.use_collectives else self.rank

    def _write_through_torch(
        self, plan: SavePlan, planner: TorchsSavePlanner, prefix: str
    ) -> Future[list[WriteResult]]:
        # With several threads torch loses a worker's exception and reports success, so its own code
        # gets one thread.
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
    """Returns a future that is done, with the results of the writes."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(value)
    return future
