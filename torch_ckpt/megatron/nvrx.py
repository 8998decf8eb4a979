"""Asynchronous saves in the shapes of nvidia-resiliency-ext, where they are not Megatron-core's.

Over the same engine as torch_ckpt.megatron, whose names are here, too: see docs/megatron.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_ckpt.megatron import shapes
from torch_ckpt.megatron.cached_reader import CachedMetadataFileSystemReader
from torch_ckpt.megatron.plan import Finalizing, save_state_dict_async_finalize
from torch_ckpt.megatron.request import AsyncRequest, priorities
from torch_ckpt.megatron.results_queue import get_write_results_queue
from torch_ckpt.saving.sources import copy_by_pickle

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "CheckpointMetadataCache",
    "FileSystemWriterAsync",
    "TorchAsyncCheckpoint",
    "abort_nvrx_checkpoint",
    "get_metadata_caching_status",
    "get_write_results_queue",
    "init_checkpoint_metadata_cache",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]

_get_write_results_queue = get_write_results_queue


class FileSystemWriterAsync(shapes.FileSystemWriterAsync):
    """As :class:`torch_ckpt.megatron.FileSystemWriterAsync`.

    Args:
        is_multiproc_io: accepted; files are written by threads, which is as parallel here.
        use_cached_data_structure: accepted; nothing is sent to another process that could be kept
            there, and every save reads the live tensors.
        use_cpu_shm_for_gpu_tensors: accepted; the engine's own memory is kept from save to save.
        on_failure: as theirs does, ``retrieve_write_results`` raises.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        open_file: Callable[..., Any] = open,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        on_failure: str = "raise",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            path,
            *args,
            separation_hint=separation_hint,
            use_msc=use_msc,
            open_file=open_file,
            on_failure=on_failure,
            **kwargs,
        )
        self.is_multiproc_io = is_multiproc_io
        self.use_cached_data_structure = use_cached_data_structure
        self.use_cpu_shm_for_gpu_tensors = use_cpu_shm_for_gpu_tensors

    #: What theirs caches between saves; nothing here.
    _cached_identifiers: ClassVar[set[Any]] = set()
    _cached_tensor_data_ptrs: ClassVar[dict[Any, Any]] = {}
    _shm_tensor_cache: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Does nothing: no tensors are cached between saves."""

    @classmethod
    def register_shm_drain_callback(cls, fn: Callable[[], Any]) -> None:
        """Does nothing: no shared memory has to be free before the next save."""

    @staticmethod
    def write_preloaded_data_multithread(  # type: ignore[override]  # as theirs
        transform_list: list[Any],
        use_msc: bool,
        open_file: Callable[..., Any],
        rank: int,
        staged: Any,
        results_queue: Any,
    ) -> None:
        """As that of :class:`torch_ckpt.megatron.FileSystemWriterAsync`.

        Args:
            open_file: unused, as ``use_msc`` is; the task knows.
        """
        shapes.FileSystemWriterAsync.write_preloaded_data_multithread(
            transform_list, use_msc, rank, staged, results_queue
        )

    def _save_function(self) -> Callable[..., None]:
        return partial(
            type(self).write_preloaded_data_multithread,
            [self.transforms],
            self.use_msc,
            self.open_file,
        )


class AsyncCallsQueue(shapes.AsyncCallsQueue):
    """As :class:`torch_ckpt.megatron.AsyncCallsQueue`.

    Args:
        persistent: accepted, as are ``is_daemon``, ``sigterm_timeout`` and ``cpu_shm_mode``: there
            is no worker process.
        cpu_priority: nice value of the engine's threads, 0 to 19.
        io_priority: their I/O scheduling class: 3 is idle; None: idle, too. With the defaults of
            both it is as ``warmup_persistent_caller`` said, else as each writer says.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30,
        cpu_shm_mode: bool = False,
        **kwargs: Any,
    ) -> None:
        if (cpu_priority, io_priority) != (10, None):
            # Else what warmup_persistent_caller said.
            kwargs.setdefault("background", priorities(cpu_priority, io_priority))
        super().__init__(persistent, **kwargs)

    @classmethod
    def warmup_persistent_caller(  # type: ignore[override]  # as theirs differ
        cls,
        rank: int = 0,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30,
        cpu_shm_mode: bool = False,
        **others: Any,
    ) -> None:
        """As :meth:`torch_ckpt.megatron.AsyncCallsQueue.warmup_persistent_caller`."""
        super().warmup_persistent_caller(
            rank, cpu_priority=cpu_priority, io_priority=io_priority, **others
        )

    @classmethod
    def get_instances(cls) -> list[AsyncCallsQueue]:
        """The queues of this process that somebody has."""
        return [queue for queue in cls._instances if isinstance(queue, cls)]


def abort_nvrx_checkpoint() -> None:
    """Aborts what all queues of this process have under way; for a restart within the process."""
    for queue in AsyncCallsQueue.get_instances():
        queue.close(abort=True)


class CheckpointMetadataCache:
    """What one save leaves for the next: plans, and the metadata that was made of them.

    Attributes:
        cached_central_plan: what this rank wrote.
        cached_local_plan: what it had.
        cached_global_metadata: on the coordinator, or of the loaded checkpoint.
        validated_cache_reuse: two saves had the same central plan; plans are not exchanged then.
        validated_loaded_metadata_reuse: all ranks' plans were those of the loaded checkpoint.
        loaded_all_plans: the plans of all ranks in the loaded checkpoint.
    """

    def __init__(self) -> None:
        self.cached_central_plan: SavePlan | None = None
        self.cached_local_plan: SavePlan | None = None
        self.cached_global_metadata: Metadata | None = None
        self.validated_cache_reuse = False
        self.validated_loaded_metadata_reuse = False
        self.loaded_all_plans: list[SavePlan] | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        """Takes the metadata of a checkpoint that was loaded."""
        self.cached_global_metadata = cached_global_metadata
        self.loaded_all_plans = getattr(cached_global_metadata, "all_local_plans", None)

    def set_cache_metadata(
        self,
        central_plan: SavePlan,
        local_plan: SavePlan,
        global_md_verify_reuse: bool,
        is_as_cached: bool | None = None,
    ) -> None:
        """Takes the plans of a save.

        Args:
            global_md_verify_reuse: all ranks' plans are those of the loaded checkpoint.
            is_as_cached: all ranks' plans are those of the save before; None: compare this rank's.
        """
        self.validated_loaded_metadata_reuse = global_md_verify_reuse
        if not global_md_verify_reuse:
            # The metadata that is kept will be another one.
            self.loaded_all_plans = None
        if is_as_cached is None:
            is_as_cached = self.cached_central_plan == central_plan
        self.validated_cache_reuse = is_as_cached
        self.cached_central_plan = central_plan
        self.cached_local_plan = local_plan

    def prepare_save_state_dict_ret(
        self, rank: int, coordinator: int, save_state_dict_ret: Finalizing
    ) -> Finalizing:
        """What the plan of a save returns, on the coordinator with the metadata to commit."""
        writer, metadata, wrapper = save_state_dict_ret
        if metadata is not None:
            # Also of a first save: the third one may come without.
            self.cached_global_metadata = metadata
        elif rank == coordinator and (
            self.validated_cache_reuse or self.validated_loaded_metadata_reuse
        ):
            metadata = self.cached_global_metadata
        return writer, metadata, wrapper

    def get_cache_metadata(
        self,
    ) -> tuple[SavePlan | None, SavePlan | None, bool, list[SavePlan] | None]:
        """Central plan, local plan, whether they are valid, and the loaded plans."""
        return (
            self.cached_central_plan,
            self.cached_local_plan,
            self.validated_cache_reuse,
            self.loaded_all_plans,
        )

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """Whether plans are used again, and whether those of the loaded checkpoint are."""
        return self.validated_cache_reuse, self.validated_loaded_metadata_reuse


_checkpoint_metadata_cache: CheckpointMetadataCache | None = None


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Makes the process's cache where there is none; gives it the metadata that was loaded."""
    global _checkpoint_metadata_cache
    if _checkpoint_metadata_cache is None:
        _checkpoint_metadata_cache = CheckpointMetadataCache()
    _checkpoint_metadata_cache.set_cached_global_metadata(cached_global_metadata)


def get_metadata_caching_status() -> tuple[bool, bool] | None:
    """Of the process's cache; None without one."""
    cache = _checkpoint_metadata_cache
    return None if cache is None else cache.get_metadata_caching_status()


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: shapes.FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> Finalizing:
    """The first part of a save; see :func:`torch_ckpt.megatron.save_state_dict_async_plan`.

    Args:
        enable_cache: use the plans of the save before, as soon as two were equal.
        metadata_cache: the process's cache if None.

    Returns:
        What :func:`save_state_dict_async_finalize` takes.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    cache = metadata_cache if metadata_cache is not None else _checkpoint_metadata_cache
    of_save = (state_dict, storage_writer, process_group, coordinator_rank, planner)
    if not enable_cache or cache is None:
        return shapes.save_state_dict_async_plan(*of_save).finalizing
    central, local, is_valid, loaded = cache.get_cache_metadata()
    planned = shapes.save_state_dict_async_plan(*of_save, (central, local, is_valid), loaded)
    cache.set_cache_metadata(
        planned.central_plan, planned.local_plan, planned.is_as_loaded, planned.is_as_cached
    )
    wrapper = planned.finalizing[2]
    return cache.prepare_save_state_dict_ret(
        wrapper.get_rank(), coordinator_rank, planned.finalizing
    )


class TorchAsyncCheckpoint:
    """``torch.save`` beside training: a copy is taken at the call, a thread writes it.

    What is saved is what ``torch.save`` would save, on the CPU: the same objects, with the storages
    that tensors share.

    Args:
        persistent_queue: accepted; there is no worker process.
    """

    async_fn: ClassVar[Callable[..., Any]] = staticmethod(torch.save)

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._async_calls_queue = AsyncCallsQueue(persistent=persistent_queue)

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        """As ``torch.save(state_dict, *args, **kwargs)``; returns when its sources may change.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: it holds what cannot be pickled.
        """
        arguments = (copy_by_pickle(state_dict), *args)
        request = AsyncRequest(torch.save, arguments, [], kwargs)
        self._async_calls_queue.schedule_async_request(request)

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Finalizes saves that have ended; the errors of those that failed are raised here.

        Args:
            blocking: wait for all saves.
            no_dist: look at this rank alone.
            terminate: close the queue.

        Raises:
            CheckpointException: a save failed.
        """
        self._async_calls_queue.maybe_finalize_async_calls(blocking, no_dist)
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:
        """Ends the queue; see :meth:`AsyncCallsQueue.close`."""
        if abort:
            self._async_calls_queue.close(abort=True)
        else:
            self._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
