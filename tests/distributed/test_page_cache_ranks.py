"""Ranks of one machine that load the same bytes read them from the disk once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from benchmarks import pagecache
from benchmarks.limits import direct_io_works
from tests.distributed.cases import Launch, mesh_1d, tensor_of
from tests.distributed.launcher import on_ranks
from tests.distributed.loads import by_dcp, by_load, on_rank_0, save
from tests.support import assert_equal, data_files


def by_planner(state: dict[str, Any], path: Any, **options: Any) -> None:
    reader = torch_ckpt.FileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=torch_ckpt.LoadPlanner())


def evict(files: Sequence[Path]) -> None:
    with suppress(pagecache.CacheStateError):
        pagecache.evict(files)


def can_evict(launch: Launch) -> bool:
    """Returns False on a file system that consists of page cache, such as tmpfs."""
    files = data_files(launch.path("c"))
    on_rank_0(launch, lambda: evict(files))
    return direct_io_works(launch.path("c")) and pagecache.resident_fraction(files) < 0.5


def cached_after(launch: Launch, load: Callable[..., None], state: Any, **options: Any) -> float:
    """Evicts the files, loads them on all ranks, and returns the fraction in the page cache."""
    path = launch.path("c")
    on_rank_0(launch, lambda: evict(data_files(path)))
    load(state, path, **options)
    dist.barrier()
    return pagecache.resident_fraction(data_files(path))


def case_bytes_that_all_ranks_want_are_read_through_the_page_cache(launch: Launch) -> None:
    values = {"w": tensor_of("w", 2000, 1000)}
    save(values, launch.path("c"))
    if not can_evict(launch):
        return
    for load in (by_load, by_dcp, by_planner):
        found = {"w": torch.zeros_like(values["w"])}
        assert cached_after(launch, load, found) > 0.9, load
        assert_equal(found["w"], values["w"])


def case_direct_io_is_used_if_it_is_asked_for(launch: Launch) -> None:
    values = {"w": tensor_of("w", 2000, 1000)}
    save(values, launch.path("c"))
    if not can_evict(launch):
        return
    found = {"w": torch.zeros_like(values["w"])}
    assert cached_after(launch, by_load, found, direct_io=True) < 0.5


def case_shards_are_read_with_direct_io(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    state = {"w": distribute_tensor(tensor_of("w", 2000, 1000), mesh, [Shard(0)])}
    save(state, launch.path("c"))
    if not can_evict(launch):
        return
    for load in (by_load, by_dcp, by_planner):
        assert cached_after(launch, load, state) < 0.5, load


def case_the_same_part_is_read_through_the_page_cache(launch: Launch) -> None:
    values = {"w": tensor_of("w", 1000, 1000), "moments": tensor_of("m", 4000, 1000)}
    save(values, launch.path("c"), thread_count=2)
    if not can_evict(launch):
        return
    found = {"w": torch.zeros_like(values["w"])}
    assert cached_after(launch, by_dcp, found) > 0.15
    assert_equal(found["w"], values["w"])


def case_a_checkpoint_of_each_rank_is_read_with_direct_io(launch: Launch) -> None:
    state = {"w": tensor_of(f"w{launch.rank}", 2000, 1000)}
    writer = torch_ckpt.FileSystemWriter(launch.path("c"), sync_files=False)
    dcp.save(state, storage_writer=writer, use_collectives=False)
    dist.barrier()
    if not can_evict(launch):
        return
    for load in (by_load, by_dcp, by_planner):
        found = {"w": torch.zeros_like(state["w"])}
        assert cached_after(launch, load, found) < 0.5, load
        assert_equal(found["w"], state["w"])


test_on_ranks = on_ranks(globals())
