"""Loads of safetensors files by several ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.cases import (
    Launch,
    StateDict,
    assert_full_tensors,
    failure_of,
    mesh_1d,
    mesh_2d,
    tensor_of,
)
from tests.distributed.launcher import on, on_ranks
from tests.distributed.loads import ALLOWANCE, LOADERS, by_load, bytes_read_by, flip, on_rank_0
from tests.safetensors_files import write_checksums, write_shards
from tests.support import assert_equal
from torch_ckpt import Corrupt


def files_of(launch: Launch, *shards: StateDict) -> Path:
    """Writes files with an index and with checksums."""
    path = launch.path()
    on_rank_0(launch, lambda: write_checksums(write_shards(path, *shards)))
    return path


@on(4)
def case_safetensors_files_are_loaded_into_any_sharding(launch: Launch) -> None:
    mesh, mesh2 = mesh_1d(launch), mesh_2d(launch)
    shape = (37, 26, 5)
    path = files_of(launch, {"t0": tensor_of("t0", *shape)}, {"t1": tensor_of("t1", *shape)})
    placements = [(mesh, [Shard(d)]) for d in range(3)] + [(mesh, [Replicate()])]
    placements += [(mesh2, [Shard(a), Shard(b)]) for a, b in ((0, 1), (1, 2), (2, 0), (0, 0))]
    for on_mesh, placement in placements:
        for load in LOADERS:
            state = {
                name: distribute_tensor(torch.zeros(shape), on_mesh, placement)
                for name in ("t0", "t1")
            }
            load(state, path)
            assert_full_tensors(state)


def case_a_rank_reads_little_more_than_its_rows(launch: Launch) -> None:
    path = files_of(launch, {f"t{i}": tensor_of(f"t{i}", 4096, 512) for i in range(2)})
    wanted = 2 * 4096 * 512 * 4 // launch.size
    for load in LOADERS:
        state = {
            f"t{i}": distribute_tensor(torch.zeros(4096, 512), mesh_1d(launch), [Shard(0)])
            for i in range(2)
        }
        cost = bytes_read_by(lambda load=load, state=state: load(state, path))
        assert wanted <= cost <= 1.05 * wanted + ALLOWANCE
        assert_full_tensors(state)


def case_safetensors_files_are_read_once(launch: Launch) -> None:
    tensors = {f"t{i}": tensor_of(f"t{i}", 1000, 500) for i in range(4)}
    path = files_of(launch, tensors)
    stored = sum(tensor.nbytes for tensor in tensors.values())
    for load in LOADERS:
        state = {name: torch.zeros(1000, 500) for name in tensors}
        cost = torch.tensor(
            bytes_read_by(lambda load=load, state=state: load(state, path, read_once=True))
        )
        dist.all_reduce(cost)
        assert stored <= int(cost) <= 1.05 * stored + launch.size * ALLOWANCE
        assert_equal(state, tensors)


def case_files_with_equal_headers_are_not_confused(launch: Launch) -> None:
    path = launch.path(str(launch.rank))
    write_shards(path, {"t": torch.full((1000,), float(launch.rank))})
    state = {"t": torch.zeros(1000)}
    by_load(state, path, read_once=True)
    assert_equal(state["t"], torch.full((1000,), float(launch.rank)))


def case_damage_in_the_part_of_one_rank_fails_all_ranks(launch: Launch) -> None:
    path = files_of(launch, {"t": tensor_of("t", 4096, 512)})
    (file,) = path.glob("*.safetensors")
    on_rank_0(launch, lambda: flip(file, file.stat().st_size - 1000))
    state = {"t": distribute_tensor(torch.zeros(4096, 512), mesh_1d(launch), [Shard(0)])}
    causes = failure_of(launch, by_load, state, path)
    assert causes.keys() == {launch.size - 1}
    assert isinstance(causes[launch.size - 1], Corrupt)


test_on_ranks = on_ranks(globals())
