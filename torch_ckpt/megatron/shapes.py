"""The functions that Megatron-core calls, in its shapes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from torch_ckpt.megatron.cached_reader import CachedMetadataFileSystemReader
from torch_ckpt.megatron.calls_queue import AsyncCallsQueue
from torch_ckpt.megatron.plan import (
    CachedStructure,
    Finalizing,
    plan_save,
    save_state_dict_async_finalize,
)
from torch_ckpt.megatron.request import AsyncRequest
from torch_ckpt.megatron.results_queue import ResultsQueue
from torch_ckpt.megatron.writer import FileSystemWriterAsync

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CachedMetadataFileSystemReader",
    "FileSystemWriterAsync",
    "get_write_results_queue",
    "save_state_dict_async_finalize",
    "save_state_dict_async_plan",
]

_queue: ResultsQueue | None = None


def get_write_results_queue(mp_mode: str = "spawn") -> ResultsQueue:
    """A queue of this process to which its children may put. Writers have queues of their own.

    Args:
        mp_mode: accepted as Megatron's; children of any kind may use it.
    """
    global _queue
    if _queue is None:
        _queue = ResultsQueue()
    return _queue


def save_state_dict_async_plan(
    state_dict: dict[str, Any],
    storage_writer: FileSystemWriterAsync,
    process_group: dist.ProcessGroup | None = None,
    coordinator_rank: int = 0,
    planner: SavePlanner | None = None,
    cached_ckpt_structure: CachedStructure | None = None,
    loaded_all_plans: list[SavePlan] | None = None,
) -> tuple[Finalizing, SavePlan, SavePlan, bool, bool]:
    """The first part of a save; see :func:`plan_save`.

    Returns:
        What :func:`save_state_dict_async_finalize` takes (its metadata is None where that of an
        earlier save is to be used again, and on ranks that are not the coordinator); central plan
        and local plan, to be passed with the next save; whether the central plan is the one that
        was passed; whether all plans are those of ``loaded_all_plans``.

    Raises:
        CheckpointException: on every rank, with the cause of each rank that failed.
    """
    cached = cached_ckpt_structure or (None, None, False)
    planned = plan_save(
        state_dict,
        storage_writer,
        process_group,
        coordinator_rank,
        planner,
        cached,
        loaded_all_plans,
    )
    # A plain tuple, as theirs: sites unpack it.
    finalizing, central, local, is_as_cached, is_as_loaded = planned
    return finalizing, central, local, is_as_cached, is_as_loaded
