"""Replacements for nvidia-resiliency-ext's asynchronous saves, with the same names.

Names that both packages share come from torch_ckpt.megatron; see docs/megatron.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_ckpt import megatron
from torch_ckpt.checkpoint.file_system import WriterArguments
from torch_ckpt.megatron import (
    AsyncRequest,
    CachedMetadataFileSystemReader,
    get_write_results_queue,
    save_state_dict_async_finalize,
)
from torch_ckpt.megatron.plan import Finalizing, for_our_writers
from torch_ckpt.megatron.request import make_background
from torch_ckpt.options import Background
from torch_ckpt.ranks.group import TIMEOUT_SECONDS
from torch_ckpt.saving.snapshots import copy_by_pickle

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing since Python 3.11

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

# Private names that callers of nvidia-resiliency-ext access as well.
_results_queue = None
_get_write_results_queue = get_write_results_queue


class FileSystemWriterAsync(megatron.FileSystemWriterAsync):
    """:class:`torch_ckpt.megatron.FileSystemWriterAsync` with nvidia-resiliency-ext's options.

    Args:
        path: directory of the checkpoint.
        separation_hint: see :class:`torch_ckpt.megatron.FileSystemWriterAsync`, which also
            documents the arguments not listed here.
        is_multiproc_io: accepted but ignored, because threads write the files in parallel.
        use_cached_data_structure: accepted but ignored, because there is no worker process to cache
            tensors. Every save reads the live tensors.
        use_cpu_shm_for_gpu_tensors: accepted but ignored, because the engine reuses its own memory.
        on_failure: as in :class:`torch_ckpt.megatron.FileSystemWriterAsync`, but "raise" is the
            default, as in nvidia-resiliency-ext.

    Examples:
        ```python
        writer = torch_ckpt.nvrx.FileSystemWriterAsync("checkpoints/100", thread_count=2)
        finalizing = torch_ckpt.nvrx.save_state_dict_async_plan(state, writer)
        ```
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
        timeout: float = TIMEOUT_SECONDS,
        **kwargs: Unpack[WriterArguments],
    ) -> None:
        super().__init__(
            path,
            *args,
            separation_hint=separation_hint,
            use_msc=use_msc,
            open_file=open_file,
            on_failure=on_failure,
            timeout=timeout,
            **kwargs,
        )
        self.is_multiproc_io = is_multiproc_io
        self.use_cached_data_structure = use_cached_data_structure
        self.use_cpu_shm_for_gpu_tensors = use_cpu_shm_for_gpu_tensors

    original: ClassVar[Callable[[], type[Any]] | None] = None
    original_name: ClassVar[str] = (
        "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async.FileSystemWriterAsync"
    )
    #: Caches of nvidia-resiliency-ext's writer. Its tests clear them by name; here they stay empty.
    _cached_identifiers: ClassVar[set[Any]] = set()
    _cached_tensor_data_ptrs: ClassVar[dict[Any, Any]] = {}
    _shm_tensor_cache: ClassVar[dict[Any, Any]] = {}

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Does nothing: no tensors are cached between saves."""

    @classmethod
    def register_shm_drain_callback(cls, fn: Callable[[], Any]) -> None:
        """Does nothing: saves use no shared memory that would have to be released."""


class AsyncCallsQueue(megatron.AsyncCallsQueue):
    """:class:`torch_ckpt.megatron.AsyncCallsQueue` with nvidia-resiliency-ext's arguments.

    Args:
        persistent: accepted but ignored, because there is no worker process. The same applies to
            ``is_daemon``, ``sigterm_timeout`` and ``cpu_shm_mode``.
        cpu_priority: niceness of the engine's threads, 0 to 19.
        io_priority: I/O scheduling class of the threads: None or 3 for idle; any other number keeps
            the class of the process. If ``cpu_priority`` and ``io_priority`` both have their
            default values, the priorities set by ``warmup_persistent_caller`` apply. If no
            priorities were set, each writer's own priorities apply.
        process_group, timeout, background: as in :class:`torch_ckpt.megatron.AsyncCallsQueue`.

    Raises:
        ValueError: ``cpu_priority`` is out of range.

    Examples:
        ```python
        queue = torch_ckpt.nvrx.AsyncCallsQueue(cpu_priority=19)
        queue.schedule_async_request(request)
        queue.close()
        ```
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30,
        cpu_shm_mode: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = TIMEOUT_SECONDS,
        background: Background | None = None,
    ) -> None:
        if background is None and (cpu_priority, io_priority) != (10, None):
            background = make_background(cpu_priority, io_priority)
        super().__init__(
            persistent, process_group=process_group, timeout=timeout, background=background
        )

    @classmethod
    def warmup_persistent_caller(  # type: ignore[override]  # their signature
        cls,
        rank: int = 0,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30,
        cpu_shm_mode: bool = False,
        *,
        reserve_bytes: int = 0,
        **_others: object,
    ) -> None:
        """Sets the priorities of the engine's threads; see
        :meth:`torch_ckpt.megatron.AsyncCallsQueue.warmup_persistent_caller`."""
        super().warmup_persistent_caller(
            rank,
            cpu_priority=cpu_priority,
            io_priority=io_priority,
            reserve_bytes=reserve_bytes,
        )

    @classmethod
    def get_instances(cls) -> list[AsyncCallsQueue]:
        """Returns the queues of this process that are still referenced."""
        return [queue for queue in cls._instances if isinstance(queue, cls)]


def abort_nvrx_checkpoint() -> None:
    """Aborts all calls of all queues in this process, for example before an in-process restart.

    Examples:
        ```python
        torch_ckpt.nvrx.abort_nvrx_checkpoint()  # on all ranks
        ```
    """
    for queue in AsyncCallsQueue.get_instances():
        queue.close(abort=True)


@dataclass(eq=False)
class CheckpointMetadataCache:
    """Plans and metadata that one save keeps for the next.

    Attributes:
        cached_central_plan: this rank's final plan in the last save.
        cached_local_plan: this rank's local plan in the last save.
        cached_global_metadata: metadata of the last save (on the coordinator only) or of the loaded
            checkpoint.
        validated_cache_reuse: True if two consecutive saves had the same plans on all ranks. The
            next save then exchanges no plans.
        validated_loaded_metadata_reuse: True if all ranks have the plans of the loaded
            checkpoint.
        loaded_all_plans: plans of all ranks in the loaded checkpoint.

    Examples:
        ```python
        cache = torch_ckpt.nvrx.CheckpointMetadataCache()
        finalizing = torch_ckpt.nvrx.save_state_dict_async_plan(
            state, writer, enable_cache=True, metadata_cache=cache
        )
        ```
    """

    cached_central_plan: SavePlan | None = None
    cached_local_plan: SavePlan | None = None
    cached_global_metadata: Metadata | None = None
    validated_cache_reuse: bool = False
    validated_loaded_metadata_reuse: bool = False
    loaded_all_plans: list[SavePlan] | None = None

    def set_cached_global_metadata(self, cached_global_metadata: Metadata | None) -> None:
        """Sets the metadata of the loaded checkpoint."""
        self.cached_global_metadata = cached_global_metadata
        self.loaded_all_plans = getattr(cached_global_metadata, "all_local_plans", None)

    def set_cache_metadata(
        self,
        central_plan: SavePlan,
        local_plan: SavePlan,
        global_md_verify_reuse: bool,
        is_as_cached: bool | None = None,
    ) -> None:
        """Sets the plans of the last save.

        Args:
            central_plan: this rank's final plan.
            local_plan: this rank's local plan.
            global_md_verify_reuse: True if all ranks have the plans of the loaded checkpoint.
            is_as_cached: True if all ranks have the plans of the previous save; None
                means that only this rank's plan is compared.
        """
        self.validated_loaded_metadata_reuse = global_md_verify_reuse
        if not global_md_verify_reuse:
            # The cached metadata will no longer belong to the loaded checkpoint.
            self.loaded_all_plans = None
        if is_as_cached is None:
            is_as_cached = self.cached_central_plan == central_plan
        self.validated_cache_reuse = is_as_cached
        self.cached_central_plan = central_plan
        self.cached_local_plan = local_plan

    def prepare_save_state_dict_ret(
        self, rank: int, coordinator: int, save_state_dict_ret: Finalizing
    ) -> Finalizing:
        """Returns the result of planning; on the coordinator, with the metadata to commit."""
        writer, metadata, wrapper = save_state_dict_ret
        if metadata is not None:
            # Cache it from the first save on, because the third save may not create any.
            self.cached_global_metadata = metadata
        elif rank == coordinator and (
            self.validated_cache_reuse or self.validated_loaded_metadata_reuse
        ):
            metadata = self.cached_global_metadata
        return writer, metadata, wrapper

    def get_cache_metadata(
        self,
    ) -> tuple[SavePlan | None, SavePlan | None, bool, list[SavePlan] | None]:
        """Returns the central plan, the local plan, a flag (True if both are valid), and the loaded
        plans."""
        return (
            self.cached_central_plan,
            self.cached_local_plan,
            self.validated_cache_reuse,
            self.loaded_all_plans,
        )

    def get_metadata_caching_status(self) -> tuple[bool, bool]:
        """Returns ``validated_cache_reuse`` and ``validated_loaded_metadata_reuse``."""
        return self.validated_cache_reuse, self.validated_loaded_metadata_reuse


_checkpoint_metadata_cache: CheckpointMetadataCache | None = None


def init_checkpoint_metadata_cache(cached_global_metadata: Metadata | None = None) -> None:
    """Creates this process's cache if there is none, and sets the loaded metadata.

    Args:
        cached_global_metadata: metadata of the loaded checkpoint; None if none was loaded.

    Examples:
        ```python
        reader = torch_ckpt.nvrx.CachedMetadataFileSystemReader("checkpoints/100")
        torch_ckpt.nvrx.init_checkpoint_metadata_cache(reader.read_metadata())
        ```
    """
    global _checkpoint_metadata_cache
    if _checkpoint_metadata_cache is None:
        _checkpoint_metadata_cache = CheckpointMetadataCache()
    _checkpoint_metadata_cache.set_cached_global_metadata(cached_global_metadata)


def get_metadata_caching_status() -> tuple[bool, bool] | None:
    """Returns the cache's ``get_metadata_caching_status()``; None if this process has no cache.

    Examples:
        ```python
        reuses_plans, reuses_loaded = torch_ckpt.nvrx.get_metadata_caching_status()
        ```
    """
    cache = _checkpoint_metadata_cache
    return None if cache is None else cache.get_metadata_caching_status()


@for_our_writers
def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: megatron.FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    enable_cache: bool = False,
    metadata_cache: CheckpointMetadataCache | None = None,
) -> Finalizing:
    """Plans a save. All ranks must call this function. See
    :func:`torch_ckpt.megatron.save_state_dict_async_plan` for the arguments not listed here.

    Args:
        enable_cache: reuse the plans of the previous save as soon as two consecutive saves have had
            equal plans.
        metadata_cache: cache to use; None means the cache of this process.

    Returns:
        The arguments of :func:`save_state_dict_async_finalize`.

    Raises:
        CheckpointException: planning failed; raised on every rank with the cause from each failed
            rank.

    Examples:
        ```python
        writer = torch_ckpt.nvrx.FileSystemWriterAsync("checkpoints/100")
        finalizing = torch_ckpt.nvrx.save_state_dict_async_plan(state, writer, enable_cache=True)
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        ```
    """
    cache = metadata_cache if metadata_cache is not None else _checkpoint_metadata_cache
    arguments = (state_dict, storage_writer, process_group, coordinator_rank, planner)
    if not enable_cache or cache is None:
        return megatron.save_state_dict_async_plan(*arguments).finalizing
    central, local, is_valid, loaded = cache.get_cache_metadata()
    planned = megatron.save_state_dict_async_plan(*arguments, (central, local, is_valid), loaded)
    cache.set_cache_metadata(
        planned.central_plan, planned.local_plan, planned.is_as_loaded, planned.is_as_cached
    )
    wrapper = planned.finalizing[2]
    return cache.prepare_save_state_dict_ret(
        wrapper.get_rank(), coordinator_rank, planned.finalizing
    )


class TorchAsyncCheckpoint:
    """Runs ``torch.save`` in the background: the call copies the objects, and a thread writes the
    copy.

    The file contains the objects that ``torch.save`` would save, with tensors on the CPU. Tensors
    that share a storage also do so in the file.

    Args:
        persistent_queue: accepted but unused: there is no worker process.

    Examples:
        ```python
        checkpoints = torch_ckpt.nvrx.TorchAsyncCheckpoint()
        checkpoints.async_save({"model": model.state_dict()}, "model.pt")
        checkpoints.finalize_async_save()  # in each step
        checkpoints.finalize_async_save(blocking=True, terminate=True)
        ```
    """

    async_fn: ClassVar[Callable[..., Any]] = staticmethod(torch.save)

    def __init__(self, persistent_queue: bool = True) -> None:
        self.save = torch.save
        self._async_calls_queue = AsyncCallsQueue(persistent=persistent_queue)

    def async_save(self, state_dict: Any, *args: object, **kwargs: object) -> None:
        """Starts ``torch.save(state_dict, *args, **kwargs)``. Returns once its sources may change.

        Raises:
            pickle.PicklingError, TypeError, AttributeError: an object cannot be pickled.
        """
        arguments = (copy_by_pickle(state_dict), *args)
        request = AsyncRequest(torch.save, arguments, [], kwargs)
        self._async_calls_queue.schedule_async_request(request)

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Finalizes the saves that have ended. Raises the error of a save that failed.

        Args:
            blocking: wait for all saves.
            no_dist: finalize the saves that have ended on this rank, without asking other ranks.
            terminate: close the queue.

        Raises:
            CheckpointException: a save failed.
        """
        self._async_calls_queue.maybe_finalize_async_calls(blocking, no_dist)
        if terminate:
            self.close()

    def close(self, abort: bool = False) -> None:
        """Waits for all saves, or aborts them; see :meth:`AsyncCallsQueue.close`."""
        if abort:
            self._async_calls_queue.close(abort=True)
        else:
            self._async_calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
