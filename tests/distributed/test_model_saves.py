"""Saves in Hugging Face's layout by several ranks, into the final files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_ckpt
from tests.distributed.cases import Launch, StateDict, failure_of, mesh_1d, mesh_2d, tensor_of
from tests.distributed.launcher import on, on_ranks
from tests.fault_hooks import at_fault_points, failing
from tests.support import assert_equal

#: Small enough for several files.
SHARD_BYTES = 30_000


def by_save(state: StateDict, path: Path, dtype: str | None = None) -> None:
    format = torch_ckpt.Safetensors(max_shard_size=SHARD_BYTES, dtype=dtype)
    torch_ckpt.save(state, path, format=format)


def by_async_save(state: StateDict, path: Path) -> None:
    format = torch_ckpt.Safetensors(max_shard_size=SHARD_BYTES)
    torch_ckpt.async_save(state, path, format=format, staging="overlapped").result()


SAVERS = (by_save, by_async_save)


def files_in(path: Path) -> StateDict:
    state: StateDict = {}
    for file in sorted(path.glob("*.safetensors")):
        state |= safetensors.torch.load_file(file)
    return state


def calls_of(action: Callable[[], object]) -> list[str]:
    """Returns the operations of the fault points that ``action`` passes."""
    calls: list[str] = []
    with at_fault_points(lambda operation, _path: calls.append(operation)):
        action()
    return calls


def assert_saved(launch: Launch, path: Path, expected: StateDict) -> None:
    """Checks the directory on one rank, with the safetensors library and by its checksums."""
    if launch.rank == 0:
        found = files_in(path)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert_equal(value, expected[name], name)
        assert torch_ckpt.verify(path).ok
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    dist.barrier()


def assert_each_saver_saves(launch: Launch, state: StateDict, expected: StateDict) -> None:
    for number, save in enumerate(SAVERS):
        path = launch.path(str(number), "model")
        save(state, path)
        assert_saved(launch, path, expected)


@on(4)
def case_shards_of_any_kind_are_written_to_their_places(launch: Launch) -> None:
    mesh, mesh2, shape = mesh_1d(launch), mesh_2d(launch), (37, 26, 5)
    placements = [(mesh, [Shard(d)]) for d in range(3)] + [(mesh, [Replicate()])]
    placements += [(mesh2, [Shard(a), Shard(b)]) for a, b in ((0, 1), (1, 2), (2, 0), (0, 0))]
    placements += [(mesh2, [Replicate(), Shard(1)]), (mesh2, [Shard(0), Replicate()])]
    expected = {f"t{i}": tensor_of(f"t{i}", *shape) for i in range(len(placements))}
    state: StateDict = {
        name: distribute_tensor(tensor, *placement)
        for (name, tensor), placement in zip(expected.items(), placements, strict=True)
    }
    expected["plain"] = state["plain"] = tensor_of("plain", 11)
    # Fewer elements than ranks: some ranks have none.
    expected["short"] = tensor_of("short", 2, 3)
    state["short"] = distribute_tensor(expected["short"], mesh, [Shard(0)])
    assert_each_saver_saves(launch, state, expected)


@on(4)
def case_short_runs_of_several_ranks_are_collected(launch: Launch) -> None:
    mesh, mesh2 = mesh_1d(launch), mesh_2d(launch)
    expected = {
        "columns": tensor_of("columns", 500, 3001),
        "blocks": tensor_of("blocks", 701, 3, 999),
        "rows": tensor_of("rows", 600, 1000),
    }
    state: StateDict = {
        "columns": distribute_tensor(expected["columns"], mesh, [Shard(1)]),
        "blocks": distribute_tensor(expected["blocks"], mesh2, [Shard(0), Shard(2)]),
        "rows": distribute_tensor(expected["rows"], mesh, [Shard(0)]),
    }
    for number, save in enumerate(SAVERS):
        path = launch.path(str(number), "model")
        calls = calls_of(lambda save=save, path=path: save(state, path))
        assert_saved(launch, path, expected)
        writes = torch.tensor(calls.count("pwrite"))
        dist.all_reduce(writes)
        # Each rank has more than a thousand runs.
        assert int(writes) < 200


@on(4)
def case_columns_are_saved_without_shared_memory(launch: Launch) -> None:
    expected = {"columns": tensor_of("columns", 500, 3001)}
    state: StateDict = {
        "columns": distribute_tensor(expected["columns"], mesh_1d(launch), [Shard(1)])
    }
    with failing("memfd_create", errno.EMFILE):
        assert_each_saver_saves(launch, state, expected)


@on(4)
def case_the_coordinator_frees_shared_memory_at_the_end_of_a_save(launch: Launch) -> None:
    state = {"columns": distribute_tensor(torch.ones(500, 3001), mesh_1d(launch), [Shard(1)])}
    by_save(state, launch.path("model"))
    if launch.rank == 0:
        opened = [
            os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()
        ]
        assert [name for name in opened if "torch_ckpt shared memory" in name] == []
    dist.barrier()


@on(4)
def case_a_rank_that_cannot_share_memory_fails_the_save(launch: Launch) -> None:
    state = {"columns": distribute_tensor(torch.ones(500, 3001), mesh_1d(launch), [Shard(1)])}
    path = launch.path("model")
    for save in SAVERS:
        with failing("mmap", errno.ENOMEM if launch.rank == 1 else 0, "/proc/*"):
            causes = failure_of(launch, save, state, path)
        assert causes.keys() == {1}
        assert isinstance(causes[1], OSError)
        assert "could not share the memory" in str(causes[1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(24)
        self.register_buffer("positions", torch.arange(7))


@on(4)
def case_models_of_fsdp_tp_and_hsdp_are_written_whole(launch: Launch) -> None:
    expected = Model().state_dict()
    mesh, mesh2 = mesh_1d(launch), mesh_2d(launch)
    plan = {f"blocks.{i}.up": ColwiseParallel() for i in range(3)}
    plan |= {f"blocks.{i}.down": RowwiseParallel() for i in range(3)}
    models = {
        "fsdp": fully_shard(Model(), mesh=mesh),
        "hsdp": fully_shard(Model(), mesh=mesh2),
        "tp": parallelize_module(Model(), mesh, plan),
        "fsdp and tp": fully_shard(parallelize_module(Model(), mesh2["b"], plan), mesh=mesh2["a"]),
    }
    for name, model in models.items():
        path = launch.path(name, "model")
        by_save(get_model_state_dict(model), path)
        assert_saved(launch, path, expected)


@on(4)
def case_a_model_saved_by_one_rank_is_loaded_into_fsdp(launch: Launch) -> None:
    expected, path = Model().state_dict(), launch.path("model")
    if launch.rank == 0:
        path.mkdir(parents=True)
        safetensors.torch.save_file(expected, path / "model.safetensors")
    dist.barrier()
    model = Model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    state = get_model_state_dict(fully_shard(model, mesh=init_device_mesh("cpu", (launch.size,))))
    torch_ckpt.load(state, path)
    for name, value in state.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert_equal(whole, expected[name], name)


def case_tensors_are_stored_with_another_dtype(launch: Launch) -> None:
    whole = tensor_of("t", 33, 18).nan_to_num()
    state = {"t": distribute_tensor(whole, mesh_1d(launch), [Shard(1)])}
    path = launch.path("model")
    by_save(state, path, dtype="bf16")
    assert_saved(launch, path, {"t": whole.bfloat16()})


def case_a_failure_on_one_rank_publishes_nothing(launch: Launch) -> None:
    path = launch.path("runs", "model")
    state = {"t": distribute_tensor(tensor_of("t", 40, 40), mesh_1d(launch), [Shard(0)])}
    for save in SAVERS:
        if launch.rank == 1:
            with failing("pwrite", errno.ENOSPC):
                causes = failure_of(launch, save, state, path)
        else:
            causes = failure_of(launch, save, state, path)
        assert isinstance(causes[1], OSError)
        assert causes[1].errno == errno.ENOSPC
        dist.barrier()
        assert os.listdir(path.parent) == []
        dist.barrier()


def case_ranks_with_different_options_are_refused(launch: Launch) -> None:
    path = launch.path("runs", "model")
    causes = failure_of(
        launch, by_save, {"t": torch.ones(3)}, path, dtype="bf16" if launch.rank else None
    )
    assert "ranks save different checkpoints" in str(causes[0])


def case_a_dtensor_whose_part_contradicts_its_size_is_refused(launch: Launch) -> None:
    path = launch.path("runs", "model")
    local = torch.ones(2 - launch.rank, 6)
    shard = DTensor.from_local(
        local, mesh_1d(launch), [Shard(0)], run_check=False, shape=torch.Size((5, 6)), stride=(6, 1)
    )
    causes = failure_of(launch, by_save, {"t": shard}, path)
    assert str(causes[0]).startswith("t: safetensors files hold only plain tensors and DTensors")


test_on_ranks = on_ranks(globals())
