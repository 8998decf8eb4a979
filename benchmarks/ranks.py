"""Saves and loads by several ranks at once.

A rank is a process on this machine in a gloo group, with one thread for torch's operators, as under
torchrun. Ranks are forked from a process that has only imported torch, because eight imports of
torch would take longer than the measurement.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes
from torch.testing._internal.distributed.fake_pg import FakeStore

from . import pagecache, states
from .contenders import RANK_LOADERS, RANK_SAVERS
from .fresh_process import environment_of, start_store
from .measure import Contender, Sample, measure_alternately
from .states import State

_SAMPLES = "samples.json"


@dataclass(frozen=True)
class Content:
    """The state that each rank makes.

    If `sharded`, each rank has its rows of a states.uneven_state of `size` bytes. Otherwise each
    rank has a complete training state of `size` bytes.
    """

    size: int
    tensors: int
    sharded: bool

    def state(self) -> State:
        """Makes this rank's state."""
        if not self.sharded:
            return states.training_state(self.size, self.tensors)
        whole = states.uneven_state(self.size, max(1, self.tensors // 2))
        return states.sharded(whole, init_device_mesh("cpu", (dist.get_world_size(),)))


@dataclass(frozen=True)
class RankLoad:
    """A contender: `loader`, a name in RANK_LOADERS, loads the checkpoint at `path`."""

    contender: str
    loader: str
    path: Path


@contextmanager
def mesh_without_peers(world: int, rank: int) -> Iterator[DeviceMesh]:
    """Yields the mesh of `world` ranks as rank `rank` sees it, without other processes.

    DTensors on it are sharded as on that rank. Collectives do nothing.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield DeviceMesh("cpu", torch.arange(world))
    finally:
        dist.destroy_process_group()


def save(world: int, content: Content, paths: dict[str, Path]) -> None:
    """Saves the state on `world` ranks. `paths` has a path for each name in RANK_SAVERS to use."""
    run(world, partial(_save, content, paths))


def load(
    world: int,
    content: Content,
    loads: Sequence[RankLoad],
    rounds: int,
    set_cache: Callable[[Sequence[Path]], None],
    directory: Path,
) -> list[Sample]:
    """Times the loads alternately on `world` ranks, which write their samples to `directory`.

    Raises:
        CacheStateError: the page cache cannot be set for the files.
    """
    for entry in loads:
        # Fail before the ranks start.
        set_cache(_files(entry.path))
    run(world, partial(_load, content, loads, rounds, set_cache, directory))
    samples: list[Sample] = json.loads((directory / _SAMPLES).read_text())
    return samples


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def run(world: int, work: Callable[[], None]) -> None:
    """Calls `work` on each of `world` ranks, which are fresh processes.

    Raises:
        CacheStateError: a rank raised it.
        ProcessRaisedException: a rank raised another exception.
    """
    # The first DTensor imports torch._dynamo, which takes as long as all other work of a rank.
    multiprocessing.set_forkserver_preload(["benchmarks.ranks", "torch._dynamo"])
    store = start_store()
    try:
        start_processes(  # type: ignore[no-untyped-call]
            _on_rank, (world, store.port, work), nprocs=world, start_method="forkserver"
        )
    except ProcessRaisedException as error:
        # The exception of a rank arrives only as the text of its traceback.
        if pagecache.CacheStateError.__name__ in str(error):
            raise pagecache.CacheStateError(str(error).strip().splitlines()[-1]) from error
        raise


def _on_rank(rank: int, world: int, port: int, work: Callable[[], None]) -> None:
    os.environ |= environment_of(rank, world, port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        work()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _save(content: Content, paths: dict[str, Path]) -> None:
    state = content.state()
    for name, path in paths.items():
        RANK_SAVERS[name].save(state, path)


def _load(
    content: Content,
    loads: Sequence[RankLoad],
    rounds: int,
    set_cache: Callable[[Sequence[Path]], None],
    directory: Path,
) -> None:
    expected = content.state()
    target = states.blank_copy(expected)
    first = dist.get_rank() == 0

    def prepare(path: Path) -> None:
        states.wipe(target)
        if first:
            set_cache(_files(path))

    def check(label: str) -> None:
        # No rank changes the page cache before all ranks have loaded.
        dist.barrier()
        difference = states.first_difference(expected, target)
        if difference is not None:
            raise RuntimeError(f"{label} loaded a wrong value of {difference}")

    entries = []
    for entry in loads:
        loader = RANK_LOADERS[entry.loader]
        entries.append(
            Contender(
                name=entry.contender,
                label=loader.label,
                kind=loader.kind,
                run=partial(loader.load, target, entry.path),
                prepare=partial(prepare, entry.path),
                check=partial(check, loader.label),
            )
        )
    for contender in entries:
        # Warm up imports, thread pools and connections between the ranks.
        contender.run()
    size = states.payload_bytes(target)
    own = measure_alternately(entries, rounds, lambda _sample: None, ready=dist.barrier)
    merged = merge([{**sample, "bytes": size} for sample in own])
    if first:
        (directory / _SAMPLES).write_text(json.dumps(merged))


def merge(own: Sequence[Sample]) -> list[Sample]:
    """Merges the samples of all ranks: the longest time, and sums of the other numbers."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    return [
        {
            **of_ranks[0],
            "wall_s": max(sample["wall_s"] for sample in of_ranks),
            **{
                name: sum(sample[name] for sample in of_ranks)
                for name in ("cpu_s", "bytes", "read_bytes")
                if name in of_ranks[0]
            },
        }
        for of_ranks in zip(*by_rank, strict=True)
    ]
