"""Sharded tensors that several ranks save under one name: copies are saved, others refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_ckpt
from tests.distributed.cases import Launch, failure_of, mesh_1d
from tests.distributed.launcher import on, on_ranks
from tests.support import assert_equal

Save = Callable[[dict[str, Any], Path], Any]
SECONDS = 60


def by_async_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    torch_ckpt.async_save(state, path, **options).result(SECONDS)


def by_manager(state: dict[str, Any], path: Path) -> None:
    with torch_ckpt.CheckpointManager(
        path, saves=torch_ckpt.manager.SaveOptions(check_replicas="off")
    ) as manager:
        manager.save(1, state, force=True)


#: Each kind of save, with the options that compare least.
SAVES: dict[str, Save] = {
    "save": partial(torch_ckpt.save, check_replicas="off"),
    "async_save": partial(by_async_save, check_replicas="off"),
    "safetensors": partial(torch_ckpt.save, format="safetensors", check_replicas="off"),
    "manager": by_manager,
}


def halves() -> tuple[DeviceMesh, int]:
    """Returns this rank's mesh of two ranks, and its number. All ranks create both meshes."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    group = dist.get_rank() // 2
    return meshes[group], group


def dtensor(mesh: DeviceMesh, *placements: Placement, add: float = 0.0) -> DTensor:
    full = torch.arange(16.0).reshape(4, 4) + add
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def refusal(launch: Launch, state: dict[str, Any], save: Save = SAVES["save"]) -> str:
    """Saves a state, and returns the text of the error. All ranks fail, and nothing is saved."""
    path = launch.path("refused")
    causes = failure_of(launch, partial(save, state, path))
    assert not [*path.rglob(".metadata"), *path.rglob("*.safetensors*"), *path.rglob("*.distcp")]
    return str(next(iter(causes.values())))


@on(4, only=True)
def case_experts_of_several_groups_under_one_name_are_refused(launch: Launch) -> None:
    mesh, group = halves()
    state = {
        "same": dtensor(mesh, Shard(0)),
        "experts.w": dtensor(mesh, Shard(0), add=100.0 * group),
    }
    for kind, save in SAVES.items():
        text = refusal(launch, state, save)
        assert "experts.w: " in text, (kind, text)
        assert "on the meshes (ranks 0-1), (ranks 2-3)" in text, (kind, text)
        assert "same" not in text.replace("the same", ""), (kind, text)
    # The plan of the previous save is reused.
    path = launch.path("later")
    state["experts.w"] = dtensor(mesh, Shard(0))
    torch_ckpt.save(state, path, check_replicas="off")
    state["experts.w"].to_local().add_(group)
    assert "experts.w: " in refusal(launch, state)


@on(4, only=True)
def case_copies_on_several_meshes_are_saved_once(launch: Launch) -> None:
    mesh, _ = halves()
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        "tied": dtensor(mesh, Shard(0)),
        "replicated in a stage": dtensor(mesh, Replicate()),
        "tensor parallel": dtensor(both["tp"], Shard(1)),
        "sharded over dp": dtensor(both["dp"], Shard(0)),
        "hybrid": dtensor(both, Replicate(), Shard(0)),
        "empty": distribute_tensor(torch.zeros(1, 3), mesh, [Shard(0)]),
    }
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    for kind, save in SAVES.items():
        path = launch.path(kind)
        save(state, path)
        if kind == "manager":
            (metadata,) = path.rglob(".metadata")
            path = metadata.parent
        loaded = {name: torch.full_like(tensor, -1.0) for name, tensor in full.items()}
        torch_ckpt.load(loaded, path)
        assert_equal(loaded, full, kind)
        sharded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        torch_ckpt.load(sharded, path)
        assert_equal({name: t.full_tensor() for name, t in sharded.items()}, full, kind)


@on(4, only=True)
def case_only_names_on_several_meshes_are_compared(launch: Launch) -> None:
    mesh, group = halves()
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Replicas that differ are not compared if check_replicas is off, or if they have one mesh.
    hybrid = dtensor(whole, Replicate(), Shard(0))
    hybrid.to_local().add_(group)
    state = {"hybrid": hybrid, "plain": torch.full((3,), float(launch.rank))}
    torch_ckpt.save(state | {"tied": dtensor(mesh, Shard(0))}, launch.path(), check_replicas="off")


@on(4, only=True)
def case_dtensors_of_different_forms_are_refused_with_name_and_meshes(launch: Launch) -> None:
    mesh, group = halves()
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    by_group: dict[str, tuple[Any, Any]] = {
        "placements": (dtensor(mesh, Shard(0)), dtensor(mesh, Shard(1))),
        "replicas": (dtensor(mesh, Shard(0)), dtensor(mesh, Replicate())),
        "one mesh": (dtensor(whole, Replicate(), Shard(0)), dtensor(whole, Shard(0), Replicate())),
        "dtypes": (dtensor(mesh, Shard(0)), dtensor(mesh, Shard(0)).double()),
        "sizes": (dtensor(mesh, Shard(0)), dtensor(mesh, Shard(0))[:2]),
        "kinds": (dtensor(mesh, Shard(0)), torch.zeros(4, 4)),
    }
    for kind, values in by_group.items():
        text = refusal(launch, {"fine": torch.ones(1), "culprit": values[group]})
        assert "culprit: " in text, (kind, text)
        if kind == "kinds":
            assert "rank 0 has a DTensor, rank 2 has a plain tensor" in text
        else:
            assert "the mesh of ranks 0-1" in text, (kind, text)
            assert "the mesh of ranks 2-3" in text, (kind, text)


@on(4, only=True)
def case_shards_of_two_tensors_are_not_mixed(launch: Launch) -> None:
    # The ranks that have the tensor have one half each, but of different tensors.
    mesh, group = halves()
    state = {"w": dtensor(mesh, Shard(0), add=group)} if launch.rank in (0, 3) else {}
    text = refusal(launch, state)
    assert "w: DTensors with this name have several layouts" in text


@on(4, only=True)
def case_sharded_tensors_of_several_groups_are_compared(launch: Launch) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, place = launch.rank // 2, launch.rank % 2

    def sharded(add: float) -> ShardedTensor:
        part = torch.arange(4.0).reshape(2, 2) + 10 * place + add
        remote = f"rank:{launch.rank}/cpu"
        shard = TensorShard.from_tensor_and_offsets(part, [2 * place, 0], launch.rank)
        shard.metadata.placement = torch.distributed._remote_device(remote)  # type: ignore[attr-defined]
        return init_from_local_shards([shard], 4, 2, process_group=groups[group])

    same = {"s": sharded(0.0)}
    torch_ckpt.save(same, launch.path())
    loaded = {"s": torch.zeros(4, 2)}
    torch_ckpt.load(loaded, launch.path())
    assert loaded["s"][:, 0].tolist() == [0.0, 2.0, 10.0, 12.0]
    text = refusal(launch, {"s": sharded(100.0 * group)})
    assert "s: ranks 0, 2 have" in text or "s: rank 0 has one value, rank 2 another" in text


def case_partial_sums_are_refused(launch: Launch) -> None:
    partial_sum = DTensor.from_local(torch.ones(2), mesh_1d(launch), [Partial()])
    assert "culprit: the DTensor has the placements (Partial" in refusal(
        launch, {"culprit": partial_sum}
    )
    path = launch.path("whole")
    torch_ckpt.save({"culprit": torch.ones(2)}, path)
    failure = failure_of(launch, partial(torch_ckpt.load, {"culprit": partial_sum}, path))
    assert "culprit: the DTensor has the placements (Partial" in str(failure), failure


@on(4, only=True)
def case_parts_without_elements_are_planned_as_stock_plans_them(launch: Launch) -> None:
    def parallel_model() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 4))
        full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"]), full

    model, full = parallel_model()
    shapes = [tuple(tensor.to_local().shape) for tensor in model.parameters()]
    found: list[Any] = [None] * launch.size
    dist.all_gather_object(found, shapes)
    assert (0, 0) in [shape for of_rank in found for shape in of_rank]
    state = model.state_dict()
    saves = SAVES | {"stock": lambda state, path: dcp.save(state, checkpoint_id=path)}
    del saves["manager"]
    for kind, save in saves.items():
        save(state, launch.path(kind))
        loaded = {name: torch.full_like(tensor, -9.0) for name, tensor in full.items()}
        torch_ckpt.load(loaded, launch.path(kind))
        assert_equal(loaded, full, kind)
        other, _ = parallel_model()
        for tensor in other.parameters():
            tensor.data.to_local().fill_(-9.0)
        if kind in ("safetensors", "stock"):
            torch_ckpt.load(other.state_dict(), launch.path(kind))
        else:
            dcp.load(other.state_dict(), checkpoint_id=launch.path(kind))
        for name, tensor in other.state_dict().items():
            assert torch.equal(tensor.to_local(), state[name].to_local()), (kind, name)


test_on_ranks = on_ranks(globals())
