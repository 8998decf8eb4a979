"""torch's StorageWriter: writes the checkpoints of ``dcp.save`` with the C++ engine.

This class has torch's contract only. ``torch_ckpt.save`` does not use it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import refuse_capture
from torch_ckpt._base.cycle_collector import RelaxedGc
from torch_ckpt._base.progress import ProgressOption
from torch_ckpt._base.system import absolute, is_url
from torch_ckpt.checkpoint.directory import (
    DirectoryIdentity,
    OpenDirectory,
    require_one_directory,
)
from torch_ckpt.checkpoint.file_system import OnAnyFileSystem, torch_writes
from torch_ckpt.checkpoint.lease import DirectoryLease
from torch_ckpt.options import DEFAULT_OPTIONS, Background, WriteOptions
from torch_ckpt.saving.items import completed, encoded_with, results_of, sources_of
from torch_ckpt.saving.object_target import ObjectTarget, checkpoint_target
from torch_ckpt.saving.snapshots import copy_of_state
from torch_ckpt.saving.target import DirectoryTarget
from torch_ckpt.saving.write import write_files


@dataclasses.dataclass
class _ProbedPrefix(_StoragePrefix):
    """torch's prefix of file names, with a probe for :meth:`DirectoryTarget.require_probe`."""

    probe: bytes = b""


class FileSystemWriter(OnAnyFileSystem, StockWriter):
    """Writes distributed checkpoints. A drop-in replacement for torch's class of the same name.

    Args:
        path: the checkpoint directory, or the URL of a checkpoint (docs/remote.md). The directory
            is created if it does not exist. When the writer is created, a relative path is resolved
            against the current working directory. Each save opens the directory once, at the start
            of the save, and writes only to the opened directory.
        single_file_per_rank, sync_files, thread_count, overwrite: see :class:`WriteOptions`.
        separation_hint, max_host_bytes, direct_io, progress: see :class:`WriteOptions`.
        per_thread_copy_ahead: accepted for compatibility and ignored, because the engine copies
            ahead in chunks.
        cache_staged_state_dict: torch's option, for torch's own ``async_save``.
        _extensions: torch's stream transforms. With transforms, all items pass through Python.
        serialization_format: torch's option. torch's own code writes every format other than the
            default.
        background: threads and priorities of background saves by ``dcp.async_save``. For that
            function, the writer is also an ``AsyncStager``.
        storage_options: see :class:`WriteOptions`.

    Raises:
        ValueError: an option is out of range or contradicts another one.

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

    #: True if the plan of each rank has the identity of its directory.
    sends_identity = True

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
        background: Background = DEFAULT_OPTIONS.background,
        storage_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path,
            single_file_per_rank,
            sync_files,
            thread_count or 1,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            *args,
            **kwargs,
        )
        self._given_path = path
        self._resolve_path()
        self.thread_count = thread_count  # type: ignore[assignment]
        self.separation_hint = separation_hint
        self.options = WriteOptions(
            max_host_bytes=max_host_bytes,
            direct_io=direct_io,
            progress=progress,
            background=background,
            storage_options=storage_options,
        )
        self.write_options()  # refuses invalid options now, not in the first save
        self._is_staged = False
        self._commits = False
        self._is_single_rank = False
        self._target: DirectoryTarget | ObjectTarget | None = None
        #: See :class:`torch_ckpt.checkpoint.lease.DirectoryLease`.
        self.ends_earlier_leases = True

    def __getstate__(self) -> dict[str, Any]:
        # A copy, which may be in another process, does not participate in the running save.
        return self.__dict__ | {"_target": None}

    # --- the contract, in the order of a save ----------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._give_path(checkpoint_id)
        super().reset(checkpoint_id)
        self._resolve_path()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        refuse_capture()
        # torch passes the rank only to a method that has a parameter named `kwargs`.
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._commits = is_coordinator or not self.use_collectives
        RelaxedGc.begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.abandon()
        if not self._is_local():
            return super().prepare_local_plan(plan)
        # Replaces torch's own check, which would warn that a checkpoint is overwritten. That needs
        # no warning here, because the old checkpoint can be loaded until the new one is committed.
        opened = self.target.open(0 if self._commits else 1, 1)
        if self.use_collectives and self.sends_identity:
            plan = dataclasses.replace(plan, storage_data=opened.directory)
        elif self.rank is not None and not self.use_collectives:
            plan = dataclasses.replace(plan, storage_data=_StoragePrefix(f"__{self.rank}_"))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        opened = [plan.storage_data for plan in plans]
        plans = super().prepare_global_plan(plans)
        self._is_single_rank = len(plans) == 1
        tag = None if self._target is None else self._target.tag
        if tag is None or not self.use_collectives:
            return plans
        target, probe = self._target, b""
        identities = [one for one in opened if isinstance(one, DirectoryIdentity)]
        may_differ = require_one_directory(identities)
        if may_differ and isinstance(target, DirectoryTarget):
            probe = target.leave_probe()
        # Set the prefix again, because a cached plan has the prefix of an earlier save.
        return [
            dataclasses.replace(plan, storage_data=_ProbedPrefix(f"__{rank}_{tag}", probe))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return self._write_files(plan, planner)
        except BaseException:
            if self._is_single_rank:
                self.abandon()
            raise
        finally:
            if not self._commits:
                # This is the last method that DCP calls on such a rank.
                self.abandon()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if not self._is_local():
            super().finish(metadata, results)
            return
        target = self.target
        try:
            data = encoded_with(results, metadata, self.storage_meta(), target.directory)
            if isinstance(target, DirectoryTarget) and target.lease is None:  # no save has begun
                target.take_lease()
            files = {info.relative_path for info in (metadata.storage_data or {}).values()}
            target.publish(data, files)
        finally:
            self.abandon()

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
        """Returns the options of the next write. As with torch's writer, callers may change torch's
        attributes and ``separation_hint`` until then."""
        return dataclasses.replace(
            self.options,
            thread_count=self.thread_count,
            single_file_per_rank=self.single_file_per_rank,
            sync_files=self.sync_files,
            overwrite=self.overwrite,
            separation_hint=self.separation_hint,
        )

    def engine_can_write(self) -> bool:
        """Returns False if torch's own code must write: the writer has stream transforms, a format
        other than the default, or a remote file system."""
        is_default = self.serialization_format == SerializationFormat.TORCH_SAVE
        return self._is_local() and is_default and not self.transforms.extensions

    @property
    def target(self) -> DirectoryTarget | ObjectTarget:
        """The target of the save that has begun; else a new one."""
        if self._target is None:
            own_rank = None if self.use_collectives else self.rank
            self._target = checkpoint_target(
                self.path, self.write_options(), own_rank, self.ends_earlier_leases
            )
        return self._target

    @property
    def lease(self) -> DirectoryLease | None:
        """The lease of the save on the directory, if this rank has one."""
        return self._target.lease if isinstance(self._target, DirectoryTarget) else None

    def abandon(self) -> None:
        """Ends a save. Unless it is committed, the coordinator removes the files of all ranks.

        Dropping the writer has the same effect.
        """
        target, self._target = self._target, None
        if target is not None:
            target.discard()

    # --- private ---------------------------------------------------------------------------------

    def _resolve_path(self) -> None:
        if self._is_local():
            is_remote = is_url(self._given_path)
            self.path = self._given_path if is_remote else absolute(self.path)

    def _directory_for_torch(self) -> OpenDirectory | None:
        """Returns the directory in which torch's own code writes; None if it writes elsewhere."""
        if not self._is_local():
            return None
        if isinstance(self.target, ObjectTarget):
            raise ValueError(
                f"{self.path}: stream transforms and formats other than the default cannot be "
                "saved to a URL. Save to a local directory, or use torch's FsspecWriter"
            )
        return self.target.directory

    def _write_files(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        RelaxedGc.end()
        prefix: str = plan.storage_data.prefix
        if self._is_local() and isinstance(self.target, DirectoryTarget):
            if isinstance(plan.storage_data, _ProbedPrefix) and plan.storage_data.probe:
                self.target.require_probe(plan.storage_data.probe, self.rank)
            prefix = _core.choose_prefix(self.target.directory, prefix)
        elif self._is_local() and not self.use_collectives:
            prefix += self.target.tag or ""  # the plan of a rank that saves independently has none
        if not self.engine_can_write():
            plan = dataclasses.replace(plan, storage_data=_StoragePrefix(prefix))
            with torch_writes(self, self._directory_for_torch()):
                return super().write_data(plan, planner)
        written = write_files(
            _C.Save(),
            self.target.directory,
            prefix,
            sources_of(plan.items, planner),
            self.write_options(),
            title=f"save {os.path.basename(self.path)}",
            rank=self.rank,
            # If stage() has copied the state, training is running.
            background=self.options.background if self._is_staged else None,
        )
        return completed(results_of(plan.items, written))
