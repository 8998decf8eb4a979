"""Training that saves through the Megatron interface.

By default each rank trains independently: no collective between two polls keeps the ranks in step.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.background import overwrite
from tests.distributed.cases import (
    OURS,
    PATIENCE_SECONDS,
    STOCK,
    Launch,
    StateDict,
    load,
    mesh_1d,
    tensor_of,
)
from tests.metadata import read_metadata
from tests.support import assert_equal
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

READERS = (OURS[1], STOCK[1], CachedMetadataFileSystemReader)


# --- a training in Megatron's shape ---------------------------------------------------------------


class Decentralized(dcp.DefaultSavePlanner):
    """Planner like Megatron's: each rank plans its own writes, and no two ranks write the same
    item."""

    can_run_decentralized_global_plan = True

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        rank, size = dist.get_rank(), dist.get_world_size()

        def is_mine(fqn: str) -> bool:
            return fqn.startswith("own.") or zlib.crc32(fqn.encode()) % size == rank

        items = [i for i in plan.items if i.type == WriteItemType.SHARD or is_mine(i.index.fqn)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


PLANNERS: tuple[Callable[[], SavePlanner], ...] = (Decentralized, dcp.DefaultSavePlanner)


def rows_of(launch: Launch, full: torch.Tensor) -> ShardedTensor:
    """Makes a ShardedTensor with the same number of rows on each rank."""
    count = full.shape[0] // launch.size
    sizes = [count, *full.shape[1:]]

    def place(rank: int) -> ShardMetadata:
        offsets = [count * rank] + [0] * (full.dim() - 1)
        return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")

    mine = full[count * launch.rank : count * (launch.rank + 1)].clone()
    places = [place(rank) for rank in range(launch.size)]
    metadata = ShardedTensorMetadata(places, full.shape, ShardProperties(dtype=full.dtype))
    shards = [TensorShard(mine, place(launch.rank))]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def full_tensors_of(step: int) -> dict[str, torch.Tensor]:
    """Makes the full tensors that are sharded over the ranks at a step."""
    moments = tensor_of("moments", 48, 33).nan_to_num() + step
    return {"weight": tensor_of("weight", 37, 21), "bias": moments[:, 0].clone(), "m": moments}


def state_at(launch: Launch, step: int) -> StateDict:
    wholes = full_tensors_of(step)
    mesh = mesh_1d(launch)
    return {
        "model": {
            "weight": distribute_tensor(wholes["weight"], mesh, [Shard(0)]),
            "bias": distribute_tensor(wholes["bias"], mesh, [Shard(0)]),
            "norm": torch.full((11,), float(step)),
        },
        "optimizer": {"exp_avg": rows_of(launch, wholes["m"]), "lr": 1.0 / step},
        "step": step,
        "own": {f"rng of {launch.rank}": torch.arange(step, step + 9), str(launch.rank): step},
    }


def gathered(state: StateDict) -> StateDict:
    """Returns the state with the local shards as plain tensors."""

    def local(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: local(inner) for key, inner in value.items()}
        if isinstance(value, DTensor):
            return value.full_tensor()
        if isinstance(value, ShardedTensor):
            return [shard.tensor for shard in value.local_shards()]
        return value

    return {key: local(value) for key, value in state.items()}


def assert_saved(launch: Launch, path: Path, step: int, own: bool = True) -> None:
    """Checks that torch_ckpt and torch load the state of a step from a directory."""
    for reader in READERS:
        loaded, expected = state_at(launch, step + 100), state_at(launch, step)
        overwrite(loaded["model"])
        loaded = {**state_at(launch, step + 100)}
        if not own:
            del loaded["own"], expected["own"]
        load(loaded, path, reader)
        assert_equal(gathered(loaded), gathered(expected))


class Site:
    """Surroundings of the writer in a training: the plans that are kept from save to save.

    Args:
        planner: makes a planner for each save.
        caching: keep the plans.
        options: options of the writers.
    """

    def __init__(
        self,
        planner: Callable[[], SavePlanner] = Decentralized,
        caching: bool = False,
        **options: Any,
    ) -> None:
        self.planner = planner
        self.caching = caching
        self.options = {"thread_count": 2, "timeout": PATIENCE_SECONDS, **options}
        self.central: SavePlan | None = None
        self.local: SavePlan | None = None
        self.is_as_cached = False
        self.is_as_loaded = False
        self.metadata: Any = None
        self.loaded_plans: list[SavePlan] | None = None

    def restarted_from(self, path: Path) -> Site:
        """Makes the site of a restarted training, which loads a checkpoint first."""
        CachedMetadataFileSystemReader.clear_metadata_cache()
        site = Site(self.planner, self.caching, **self.options)
        site.metadata = CachedMetadataFileSystemReader(path).read_metadata()
        site.loaded_plans = getattr(site.metadata, "all_local_plans", None)
        return site

    def request(
        self, state: StateDict, path: str | Path, *finalize_fns: Callable[[], Any], **options: Any
    ) -> AsyncRequest:
        """Plans a save. ``finalize_fns`` are called after the save's own."""
        writer = FileSystemWriterAsync(path, **{**self.options, **options})
        is_valid = self.caching and self.is_as_cached
        planned = save_state_dict_async_plan(
            state,
            writer,
            planner=self.planner(),
            cached_ckpt_structure=(self.central, self.local, is_valid) if self.caching else None,
            loaded_all_plans=self.loaded_plans,
        )
        finalizing, self.central, self.local, self.is_as_cached, self.is_as_loaded = planned
        writer, metadata, wrapper = finalizing
        if metadata is not None:
            self.metadata = metadata
        elif dist.get_rank() == 0:
            metadata = self.metadata
        function, preload, arguments = writer.get_save_function_and_args()
        save = partial(save_state_dict_async_finalize, writer, metadata, wrapper)
        return AsyncRequest(function, arguments, [save, *finalize_fns], preload_fn=preload)


def queue_of(timeout: float = PATIENCE_SECONDS) -> AsyncCallsQueue:
    return AsyncCallsQueue(persistent=True, timeout=timeout)


def save(launch: Launch, path: Path, step: int = 1, site: Site | None = None) -> None:
    """Runs a save from plan to commit."""
    queue = queue_of()
    queue.schedule_async_request((site or Site()).request(state_at(launch, step), path))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def train_a_step() -> None:
    """Sleeps, because polls without pauses would keep the low-priority threads from the
    processors."""
    time.sleep(0.002)


def finalized_at(queue: AsyncCallsQueue, call: int = 0) -> int:
    """Polls until a call is finalized. Returns the number of polls."""
    for poll in range(1, 1_000_000):
        if call in queue.maybe_finalize_async_calls():
            return poll
        train_a_step()
    raise AssertionError("it was not finalized")


def of_all(launch: Launch, value: Any) -> list[Any]:
    values: list[Any] = [None] * launch.size
    dist.all_gather_object(values, value)
    return values


def last_of(launch: Launch) -> int:
    """Returns the rank that fails in a case."""
    return launch.size - 1


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir()) if path.exists() else []


def assert_nothing_left(path: Path) -> None:
    """Checks that a failed save has left no file, once its writers have ended on all ranks."""
    gc.collect()
    dist.barrier()
    assert names_in(path) == []


def assert_no_other_files(path: Path) -> None:
    """Checks that a directory has only the files that its metadata names."""
    named = {info.relative_path for info in read_metadata(path).storage_data.values()}
    assert set(names_in(path)) == named | {".metadata"}


# --- polls ----------------------------------------------------------------------------------------


def waits_for(event: threading.Event, error: BaseException | None = None) -> AsyncRequest:
    """Makes a request whose function ends when the latch is open."""

    def function() -> None:
        assert event.wait(PATIENCE_SECONDS)
        if error is not None:
            raise error

    return AsyncRequest(function, [], [])
