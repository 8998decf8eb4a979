"""Ranks of one machine that load the same bytes read them from the disk once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ckpt
from benchmarks import pagecache
from benchmarks.limits import direct_io_works
from tests.distributed.cases import Launch, mesh_1d, tensor_of
from tests.distributed.launcher import on_ranks
from tests.distributed.loads import by_dcp, by_load, on_rank_0, save
from tests.support import assert_equal, data_files

pytestmark = pytest.mark.full

LOADERS = (by_load, by_dcp)


def evict(files: Sequence[Path]) -> None:
    with suppress(pagecache.CacheStateError):
        pagecache.evict(files)


def local(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()}


def cached_after(
    launch: Launch, state: Any, loads: Sequence[Callable[..., None]] = LOADERS, **options: Any
) -> Iterator[float]:
    """Yields for each way to load the fraction of the files in the page cache after all ranks have
    loaded. Yields nothing on a file system that consists of page cache, such as tmpfs."""
    path = launch.path("c")
    files = data_files(path)
    on_rank_0(launch, lambda: evict(files))
    if not direct_io_works(path) or pagecache.resident_fraction(files) >= 0.5:
        return
    for load in loads:
        target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        on_rank_0(launch, lambda: evict(files))
        load(target, path, **options)
        dist.barrier()
        yield pagecache.resident_fraction(files)
        assert_equal(local(target), local(state))


def case_bytes_that_all_ranks_want_are_read_through_the_page_cache(launch: Launch) -> None:
    state = {"w": tensor_of("w", 2000, 1000)}
    save(state, launch.path("c"))
    assert all(cached > 0.9 for cached in cached_after(launch, state))
    assert all(cached < 0.5 for cached in cached_after(launch, state, [by_load], direct_io=True))


def case_shards_are_read_with_direct_io(launch: Launch) -> None:
    state = {"w": distribute_tensor(tensor_of("w", 2000, 1000), mesh_1d(launch), [Shard(0)])}
    save(state, launch.path("c"))
    assert all(cached < 0.5 for cached in cached_after(launch, state))


def case_the_same_part_is_read_through_the_page_cache(launch: Launch) -> None:
    state = {"w": tensor_of("w", 1000, 1000), "moments": tensor_of("m", 4000, 1000)}
    save(state, launch.path("c"), thread_count=2)
    del state["moments"]
    assert all(cached > 0.15 for cached in cached_after(launch, state, [by_dcp]))


def case_a_checkpoint_of_each_rank_is_read_with_direct_io(launch: Launch) -> None:
    state = {"w": tensor_of(f"w{launch.rank}", 2000, 1000)}
    writer = torch_ckpt.FileSystemWriter(launch.path("c"), sync_files=False)
    dcp.save(state, storage_writer=writer, use_collectives=False)
    dist.barrier()
    assert all(cached < 0.5 for cached in cached_after(launch, state))


test_on_ranks = on_ranks(globals())
