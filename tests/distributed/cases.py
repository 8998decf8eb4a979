"""What several ranks do together; run under torchrun by test_ranks.py.

    torchrun --nproc-per-node=N -m tests.distributed.cases RESULTS WORKDIR CASE...

The cases (functions ``case_*``) are run on all ranks, one after another, in one launch. WORKDIR is
shared by all launches of a test run, so that one can load what another saved. Each rank writes its
outcomes to RESULTS-{rank}.jsonl.
"""

from __future__ import annotations

import datetime
import errno
import io
import json
import pickle
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_ckpt
import torch_ckpt.writer as writer_module
from tests.support import (
    NO_CHECKPOINT,
    assert_equal,
    assert_tables_match,
    data_files,
    files_limited_to,
    random_tensor,
)
from torch_ckpt.errors import NotCommitted
from torch_ckpt.metadata import read_metadata

StateDict = dict[str, Any]

OURS = (torch_ckpt.FileSystemWriter, torch_ckpt.FileSystemReader)
STOCK = (dcp.FileSystemWriter, dcp.FileSystemReader)

#: Writer and reader, one of them or both ours.
PAIRS = [(OURS[0], OURS[1]), (OURS[0], STOCK[1]), (STOCK[0], OURS[1])]

# A rank that waits longer for the others than this has lost them.
PATIENCE_SECONDS = 60


class Launch:
    """What a case gets."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.case = ""

    def path(self, *names: str) -> Path:
        """A path below a directory that is this case's and empty."""
        return self.workdir / f"{self.size}-ranks" / self.case / Path(*names)


# --- states --------------------------------------------------------------------------------------


def tensor_of(name: str, *shape: int) -> torch.Tensor:
    """The same on all ranks."""
    return random_tensor(shape, torch.float32, seed=sum(name.encode()))


def dtensors(mesh: DeviceMesh) -> dict[str, DTensor]:
    """On a mesh of one dimension: even, uneven and empty shards, and replicas."""

    def shard(name: str, dim: int, *shape: int) -> DTensor:
        return distribute_tensor(tensor_of(name, *shape), mesh, [Shard(dim)])

    return {
        "even rows": shard("even rows", 0, 8, 6),
        "uneven rows": shard("uneven rows", 0, 7, 5),
        "fewer rows than ranks": shard("fewer rows than ranks", 0, 1, 5),
        "columns": shard("columns", 1, 6, 8),
        "uneven columns": shard("uneven columns", 1, 3, 5),
        "vector": shard("vector", 0, 9),
        "three dimensions": shard("three dimensions", 1, 3, 5, 4),
        "large": shard("large", 0, 501, 700),
        "large columns": shard("large columns", 1, 500, 701),
        "replicated": distribute_tensor(tensor_of("replicated", 4, 3), mesh, [Replicate()]),
    }


def dtensors_2d(mesh: DeviceMesh) -> dict[str, DTensor]:
    """On a mesh of two dimensions: hybrid sharding, and both dimensions sharded."""
    placements = {
        "hybrid": [Replicate(), Shard(0)],
        "hybrid columns": [Replicate(), Shard(1)],
        "blocks": [Shard(0), Shard(1)],
        "rows twice": [Shard(0), Shard(0)],
        "replicated twice": [Replicate(), Replicate()],
    }
    return {
        name: distribute_tensor(tensor_of(name, 9, 7), mesh, placement)
        for name, placement in placements.items()
    }


def mesh_1d(launch: Launch) -> DeviceMesh:
    return init_device_mesh("cpu", (launch.size,))


def mesh_2d(launch: Launch) -> DeviceMesh:
    return init_device_mesh("cpu", (2, launch.size // 2), mesh_dim_names=("a", "b"))


def zeroed(state: dict[str, DTensor]) -> dict[str, DTensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def assert_whole(state: dict[str, DTensor]) -> None:
    """Fails where a tensor, gathered, is not that of its name."""
    for name, tensor in state.items():
        assert_equal(tensor.full_tensor(), tensor_of(name, *tensor.shape), name)


def save(state: StateDict, path: Path, writer: Any = OURS[0], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        return dcp.save(state, storage_writer=writer(path), **options)


def load(state: StateDict, path: Path, reader: Any = OURS[1], **options: Any) -> None:
    dcp.load(state, storage_reader=reader(path), **options)


def failure_of(launch: Launch, work: Callable[[], Any]) -> dict[int, BaseException]:
    """By rank the causes of the CheckpointException that ``work`` must raise, equal everywhere."""
    try:
        work()
    except dcp.CheckpointException as error:
        causes = {rank: cause for rank, (cause, _traceback) in error.failures.items()}
    else:
        raise AssertionError("no CheckpointException was raised")
    everywhere: list[Any] = [None] * launch.size
    dist.all_gather_object(everywhere, {rank: repr(cause) for rank, cause in causes.items()})
    assert all(seen == everywhere[0] for seen in everywhere), everywhere
    return causes


# --- interoperation and sharding -----------------------------------------------------------------


def case_sharded_tensors_make_the_round_trip_with_stock_torch(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    for number, (writer, reader) in enumerate(PAIRS):
        path = launch.path(str(number))
        save(dtensors(mesh), path, writer)
        loaded = zeroed(dtensors(mesh))
        load(loaded, path, reader)
        assert_whole(loaded)


def case_tensors_on_a_2d_mesh_make_the_round_trip_with_stock_torch(launch: Launch) -> None:
    mesh = mesh_2d(launch)
    for number, (writer, reader) in enumerate(PAIRS):
        path = launch.path(str(number))
        save(dtensors_2d(mesh), path, writer)
        loaded = zeroed(dtensors_2d(mesh))
        load(loaded, path, reader)
        assert_whole(loaded)


def case_rows_are_loaded_as_columns_and_as_whole_tensors(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    path = launch.path()
    save({"t": distribute_tensor(tensor_of("t", 37, 41), mesh, [Shard(0)])}, path)
    for reader in (OURS[1], STOCK[1]):
        columns = torch.zeros_like(distribute_tensor(tensor_of("t", 37, 41), mesh, [Shard(1)]))
        load({"t": columns}, path, reader)
        assert_equal(columns.full_tensor(), tensor_of("t", 37, 41))
        whole = torch.zeros(37, 41)
        load({"t": whole}, path, reader)
        assert_equal(whole, tensor_of("t", 37, 41))


def case_sharded_targets_are_cast_to_their_dtype(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    path = launch.path()
    whole = torch.arange(35.0).reshape(7, 5)
    save({"t": distribute_tensor(whole, mesh, [Shard(0)])}, path)
    target = torch.zeros_like(distribute_tensor(whole.to(torch.bfloat16), mesh, [Shard(1)]))
    load({"t": target}, path)
    assert_equal(target.full_tensor(), whole.to(torch.bfloat16))


def case_meta_tensors_become_real_ones(launch: Launch) -> None:
    path = launch.path()
    save({"t": tensor_of("t", 5, 3)}, path)
    state = {"t": torch.empty(5, 3, device="meta")}
    load(state, path)
    assert_equal(state["t"], tensor_of("t", 5, 3))


def trained_model(launch: Launch, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.GELU(), torch.nn.LayerNorm(13), torch.nn.Linear(13, 3)
    )
    mesh = mesh_1d(launch)
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """Everything, gathered, as plain tensors and objects."""

    def gathered(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.full_tensor()
        if isinstance(value, dict):
            return {str(key): gathered(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [gathered(inner) for inner in value]
        return value

    parts = get_state_dict(model, optimizer)
    return {"model": gathered(parts[0]), "optimizer": gathered(parts[1])}


def case_an_fsdp_model_and_its_optimizer_make_the_round_trip(launch: Launch) -> None:
    for number, (writer, reader) in enumerate(PAIRS):
        path = launch.path(str(number))
        model, optimizer = trained_model(launch, seed=1)
        parts = get_state_dict(model, optimizer)
        save({"model": parts[0], "optimizer": parts[1]}, path, writer)
        other, other_optimizer = trained_model(launch, seed=2)
        parts = get_state_dict(other, other_optimizer)
        loaded = {"model": parts[0], "optimizer": parts[1]}
        load(loaded, path, reader)
        set_state_dict(
            other,
            other_optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        assert_equal(full_state(other, other_optimizer), full_state(model, optimizer))


def case_objects_and_stateful_values_make_the_round_trip(launch: Launch) -> None:
    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> StateDict:
            return {"value": self.value, "tensor": torch.full((3,), float(self.value))}

        def load_state_dict(self, state: StateDict) -> None:
            assert state["tensor"].tolist() == [state["value"]] * 3
            self.value = state["value"]

    for number, (writer, reader) in enumerate(PAIRS):
        path = launch.path(str(number))
        own = f"of rank {launch.rank}"
        save({"counter": Counter(7), "note": "for all", own: {"rank": launch.rank}}, path, writer)
        counter = Counter(0)
        loaded = {"counter": counter, "note": "", own: {"rank": -1}}
        load(loaded, path, reader)
        assert counter.value == 7
        assert loaded["note"] == "for all"
        assert loaded[own] == {"rank": launch.rank}


def case_plain_tensors_that_only_one_rank_has_are_saved(launch: Launch) -> None:
    path = launch.path()
    own = f"of rank {launch.rank}"
    save({own: tensor_of(own, 5 + launch.rank)}, path)
    for rank in range(launch.size):
        name = f"of rank {rank}"
        state = {name: torch.zeros(5 + rank)}
        load(state, path)
        assert_equal(state[name], tensor_of(name, 5 + rank))


def sharded_tensor(launch: Launch) -> ShardedTensor:
    """An old-style ShardedTensor: each rank has two shards of three rows, far from each other."""
    rank, size = launch.rank, launch.size
    whole = tensor_of("sharded", 6 * size, 5)
    starts = [3 * rank, 3 * (size + rank)]
    shards = [
        TensorShard(
            whole[start : start + 3].clone(),
            ShardMetadata([start, 0], [3, 5], f"rank:{rank}/cpu"),
        )
        for start in starts
    ]
    places = [ShardMetadata([3 * i, 0], [3, 5], f"rank:{i % size}/cpu") for i in range(2 * size)]
    metadata = ShardedTensorMetadata(places, torch.Size([6 * size, 5]), ShardProperties())
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def case_several_shards_of_one_tensor_on_a_rank_make_the_round_trip(launch: Launch) -> None:
    for number, (writer, reader) in enumerate(PAIRS):
        path = launch.path(str(number))
        save({"sharded": sharded_tensor(launch)}, path, writer)
        target = sharded_tensor(launch)
        for shard in target.local_shards():
            shard.tensor.zero_()
        load({"sharded": target}, path, reader)
        for shard, expected in zip(
            target.local_shards(), sharded_tensor(launch).local_shards(), strict=True
        ):
            assert_equal(shard.tensor, expected.tensor)
        whole = torch.zeros(6 * launch.size, 5)
        load({"sharded": whole}, path, reader)
        assert_equal(whole, tensor_of("sharded", 6 * launch.size, 5))


def case_a_sharded_optimizer_state_is_loaded_before_the_optimizer_exists(launch: Launch) -> None:
    state = {"state": {"w": {"exp_avg": tensor_of("exp_avg", 4 * launch.size, 3)}}, "lr": 0.5}
    for number, (writer, reader) in enumerate(PAIRS):
        path = launch.path(str(number))
        save({"optim": state}, path, writer)
        loaded = load_sharded_optimizer_state_dict(
            model_state_dict={}, optimizer_key="optim", storage_reader=reader(path)
        )["optim"]
        shards = loaded["state"]["w"]["exp_avg"].local_shards()
        mine = tensor_of("exp_avg", 4 * launch.size, 3)[4 * launch.rank :][:4]
        assert_equal(shards[0].tensor, mine)
        assert loaded["lr"] == 0.5


# --- between launches of different sizes ---------------------------------------------------------


def case_what_this_number_of_ranks_saves_for_another(launch: Launch) -> None:
    for number, (writer, _reader) in enumerate((OURS, STOCK)):
        path = launch.workdir / f"from-{launch.size}" / str(number)
        state: StateDict = dict(dtensors(mesh_1d(launch)))
        if launch.size > 1:
            state |= dtensors_2d(mesh_2d(launch))
        save(state | {"step": launch.size}, path, writer)


def case_what_another_number_of_ranks_saved_is_loaded(launch: Launch) -> None:
    for source in sorted(launch.workdir.glob("from-*")):
        for number, reader in ((0, OURS[1]), (0, STOCK[1]), (1, OURS[1])):
            mesh = mesh_1d(launch)
            tensors = zeroed(dtensors(mesh) | dtensors_2d(mesh_2d(launch)))
            loaded: StateDict = tensors | {"step": 0}
            load(loaded, source / str(number), reader)
            assert_whole(tensors)
            assert f"from-{loaded['step']}" == source.name


# --- who writes what -----------------------------------------------------------------------------


def case_replicated_tensors_are_written_once_and_by_all_ranks(launch: Launch) -> None:
    path = launch.path()
    mesh = mesh_1d(launch)
    count, shape = 8, (100, 100)
    state = {f"t{i}": tensor_of(f"t{i}", *shape) for i in range(count)} | {
        f"d{i}": distribute_tensor(tensor_of(f"d{i}", *shape), mesh, [Replicate()])
        for i in range(count)
    }
    metadata = save(state, path)
    stored = sum(file.stat().st_size for file in data_files(path))
    assert len(metadata.storage_data) == 2 * count
    assert stored < 1.1 * 2 * count * 100 * 100 * 4
    writers = {info.relative_path.split("_")[2] for info in metadata.storage_data.values()}
    assert writers == {str(rank) for rank in range(launch.size)}


def case_each_rank_writes_its_own_files(launch: Launch) -> None:
    path = launch.path()
    writer = torch_ckpt.FileSystemWriter(path, thread_count=2)
    dcp.save(dict(dtensors(mesh_1d(launch))), storage_writer=writer)
    expected = {f"__{rank}_{i}.distcp" for rank in range(launch.size) for i in range(2)}
    assert {file.name for file in data_files(path)} == expected


def case_the_metadata_is_the_same_on_all_ranks(launch: Launch) -> None:
    metadata = save(dict(dtensors(mesh_1d(launch))), launch.path())
    everywhere: list[Any] = [None] * launch.size
    seen = sorted((i.fqn, tuple(i.offset), vars(p)) for i, p in metadata.storage_data.items())
    dist.all_gather_object(everywhere, seen)
    assert all(one == everywhere[0] for one in everywhere)
    read = torch_ckpt.FileSystemReader(launch.path()).read_metadata()
    assert read.storage_data == metadata.storage_data


def case_one_writer_overwrites_a_checkpoint_many_times(launch: Launch) -> None:
    path = launch.path()
    mesh = mesh_1d(launch)
    writer = torch_ckpt.FileSystemWriter(path)
    for step in range(3):
        whole = tensor_of("t", 13, 5) + step
        state = {"t": distribute_tensor(whole, mesh, [Shard(0)]), "step": step}
        metadata = dcp.save(state, storage_writer=writer)
        dist.barrier()
        used = {info.relative_path for info in metadata.storage_data.values()}
        assert {file.name for file in path.iterdir()} == used | {".metadata"}
        loaded = {"t": torch.zeros(13, 5), "step": -1}
        load(loaded, path, STOCK[1])
        assert_equal(loaded, {"t": whole, "step": step})
        dist.barrier()


def case_overwriting_can_be_forbidden(launch: Launch) -> None:
    path = launch.path()
    save({"t": tensor_of("t", 3)}, path)
    dist.barrier()
    writer = torch_ckpt.FileSystemWriter(path, overwrite=False)
    causes = failure_of(launch, lambda: dcp.save({"t": torch.zeros(3)}, storage_writer=writer))
    assert set(causes) == set(range(launch.size))
    assert "Checkpoint already exists" in str(causes[0])
    loaded = {"t": torch.zeros(3)}
    load(loaded, path)
    assert_equal(loaded["t"], tensor_of("t", 3))


def case_ranks_of_a_subgroup_save_and_load_together(launch: Launch) -> None:
    half = launch.size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, launch.size)))]
    side = launch.rank // half
    path = launch.path(str(side))
    save({"t": tensor_of(f"t{side}", 9), "side": side}, path, process_group=groups[side])
    loaded = {"t": torch.zeros(9), "side": -1}
    load(loaded, path, process_group=groups[side])
    assert_equal(loaded, {"t": tensor_of(f"t{side}", 9), "side": side})


def case_without_distribution_each_rank_saves_alone(launch: Launch) -> None:
    path = launch.path(f"rank {launch.rank}")
    save({"rank": launch.rank, "t": tensor_of("t", 4)}, path, no_dist=True)
    loaded = {"rank": -1, "t": torch.zeros(4)}
    load(loaded, path, no_dist=True)
    assert_equal(loaded, {"rank": launch.rank, "t": tensor_of("t", 4)})


# --- checksum tables -----------------------------------------------------------------------------


def case_the_metadata_has_the_checksum_tables_of_all_ranks(launch: Launch) -> None:
    savers: dict[str, Callable[[StateDict, Path], Any]] = {
        "dcp": save,
        "ours": torch_ckpt.save,
        "background": lambda state, path: torch_ckpt.async_save(state, path).result(),
    }
    for name, saver in savers.items():
        path = launch.path(name)
        saver({**dtensors(mesh_1d(launch)), "step": 1}, path)
        assert_tables_match(path, read_metadata(path))


def case_without_collectives_each_rank_has_its_own_checksum_tables(launch: Launch) -> None:
    path = launch.path()
    save(rank_local_state(launch, 1), path, use_collectives=False)
    assert_tables_match(path, read_metadata(path, name=f"__{launch.rank}.metadata"))


# --- without collectives -------------------------------------------------------------------------


def rank_local_state(launch: Launch, step: int) -> StateDict:
    own = tensor_of(f"rank {launch.rank}", 6, 4) + step
    return {"own": own, "rank": launch.rank, "step": step}


def case_without_collectives_each_rank_has_its_own_metadata(launch: Launch) -> None:
    for number, (writer, reader) in enumerate(PAIRS):
        path = launch.path(str(number))
        save(rank_local_state(launch, 1), path, writer, use_collectives=False)
        names = {file.name for file in path.iterdir() if file.suffix != ".distcp"}
        assert names == {f"__{rank}.metadata" for rank in range(launch.size)}
        loaded = {"own": torch.zeros(6, 4), "rank": -1, "step": -1}
        load(loaded, path, reader)
        assert_equal(loaded, rank_local_state(launch, 1))


def case_without_collectives_overwriting_leaves_the_other_ranks_files(launch: Launch) -> None:
    path = launch.path()
    for step in range(3):
        save(rank_local_state(launch, step), path, use_collectives=False)
        dist.barrier()
        loaded = {"own": torch.zeros(6, 4), "rank": -1, "step": -1}
        load(loaded, path)
        assert_equal(loaded, rank_local_state(launch, step))
        dist.barrier()


def case_a_checkpoint_with_collectives_replaces_one_without(launch: Launch) -> None:
    path = launch.path()
    save(rank_local_state(launch, 1), path, use_collectives=False)
    dist.barrier()
    metadata = save({"t": tensor_of("t", 8)}, path)
    dist.barrier()
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {file.name for file in path.iterdir()} == used | {".metadata"}
    loaded = {"t": torch.zeros(8)}
    load(loaded, path)
    assert_equal(loaded["t"], tensor_of("t", 8))


def case_without_collectives_a_checkpoint_of_all_ranks_is_not_touched(launch: Launch) -> None:
    # Loading would prefer the older one.
    path = launch.path()
    save({"t": tensor_of("t", 8)}, path)
    dist.barrier()
    try:
        save(rank_local_state(launch, 1), path, use_collectives=False)
    except FileExistsError:
        pass
    else:
        raise AssertionError("it was saved where no load would find it")
    dist.barrier()
    loaded = {"t": torch.zeros(8)}
    load(loaded, path)
    assert_equal(loaded["t"], tensor_of("t", 8))


# --- plan caching --------------------------------------------------------------------------------


def forget_plans() -> None:
    for name in vars(SavePlanner):
        if name.startswith("_cached_"):
            getattr(SavePlanner, name).clear()


def case_saves_with_cached_plans_hold_their_own_values(launch: Launch) -> None:
    forget_plans()
    mesh = mesh_1d(launch)
    writer = torch_ckpt.FileSystemWriter(launch.path())
    for step in range(4):
        # In the last two the same directory is overwritten.
        path = launch.path(str(min(step, 2)))
        whole = tensor_of("t", 13, 5) + step
        state = {"t": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole, "step": step}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=path, storage_writer=writer, planner=planner)
        dist.barrier()
        for reader in (OURS[1], STOCK[1]):
            loaded = {"t": torch.zeros(13, 5), "plain": torch.zeros(13, 5), "step": -1}
            load(loaded, path, reader)
            assert_equal(loaded, {"t": whole, "plain": whole, "step": step})
        dist.barrier()
    forget_plans()


# --- failures ------------------------------------------------------------------------------------


@contextmanager
def full_disk_on(rank: int) -> Iterator[None]:
    """Lets writes fail on one rank."""
    with files_limited_to(4096) if dist.get_rank() == rank else nullcontext():
        yield


def assert_is_full_disk(causes: dict[int, BaseException], rank: int, path: Path) -> None:
    """Fails where the causes are not the OSError of that rank alone, with errno and file name."""
    assert set(causes) == {rank}
    cause = causes[rank]
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EFBIG
    assert Path(cause.filename).parent == path
    assert Path(cause.filename).name.startswith(f"__{rank}_")


def case_an_error_on_one_rank_fails_all_ranks_and_publishes_nothing(launch: Launch) -> None:
    path = launch.path()
    for rank in range(launch.size):
        state = dict(dtensors(mesh_1d(launch)))
        with full_disk_on(rank):
            causes = failure_of(launch, lambda: save(state, path))  # noqa: B023
        assert_is_full_disk(causes, rank, path)
        assert not (path / ".metadata").exists()
    # And after the next save there is no trace of these.
    metadata = save(dict(dtensors(mesh_1d(launch))), path)
    dist.barrier()
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {file.name for file in path.iterdir()} == used | {".metadata"}
    loaded = zeroed(dtensors(mesh_1d(launch)))
    load(loaded, path, STOCK[1])
    assert_whole(loaded)


class _FailingOn(dcp.DefaultSavePlanner):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == self.rank:
            raise OSError(errno.EIO, "on purpose", "somewhere")
        return super().resolve_data(write_item)


def case_an_error_while_overwriting_keeps_the_old_checkpoint(launch: Launch) -> None:
    path = launch.path()
    mesh = mesh_1d(launch)
    save(dict(dtensors(mesh)), path)
    dist.barrier()
    for rank in range(launch.size):
        state = {name: tensor + 1 for name, tensor in dtensors(mesh).items()}
        planner = _FailingOn(rank)
        causes = failure_of(launch, lambda: save(state, path, planner=planner))  # noqa: B023
        assert set(causes) == {rank}
        assert isinstance(causes[rank], OSError)
        assert causes[rank].errno == errno.EIO
        for reader in (OURS[1], STOCK[1]):
            loaded = zeroed(dtensors(mesh))
            load(loaded, path, reader)
            assert_whole(loaded)
        dist.barrier()


def case_a_failed_commit_fails_all_ranks(launch: Launch) -> None:
    path = launch.path()
    if launch.rank == 0:
        (path / ".metadata").mkdir(parents=True)
    dist.barrier()
    causes = failure_of(launch, lambda: save({"t": tensor_of("t", 4)}, path))
    assert set(causes) == {0}
    assert isinstance(causes[0], NotCommitted)
    assert causes[0].errno == errno.EISDIR


@contextmanager
def led_elsewhere(launch: Launch, path: Path, other: Path, name: str) -> Iterator[None]:
    """Rank 1 opens ``path`` while ``other`` has that name, after rank 0 has opened it."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    claim, opened = writer_module.Claim, writer_module.OpenDirectory

    def claimed(*arguments: Any) -> Any:
        made = claim(*arguments)
        store.set("claimed", "")
        return made

    def opened_late(given: Path) -> Any:
        store.wait(["claimed"], datetime.timedelta(seconds=PATIENCE_SECONDS))
        aside = path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        found = opened(given)
        path.rename(other)
        aside.rename(path)
        return found

    patched: Any = writer_module
    if launch.rank == 0:
        patched.Claim = claimed
    if launch.rank == 1:
        patched.OpenDirectory = opened_late
    try:
        yield
    finally:
        patched.Claim, patched.OpenDirectory = claim, opened


def case_ranks_that_have_opened_different_directories_publish_nothing(launch: Launch) -> None:
    path, other = launch.path("step"), launch.path("other")
    state = {f"t{launch.rank}": tensor_of("t", 40)}
    for directory in (path, other):
        torch_ckpt.save(state, directory)
    dist.barrier()
    for name, work in (
        ("dcp.save", lambda: save(state, path)),
        ("torch_ckpt.save", lambda: torch_ckpt.save(state, path)),
    ):
        contents = {file: file.read_bytes() for file in launch.path().glob("*/*")}
        dist.barrier()
        with led_elsewhere(launch, path, other, name):
            causes = failure_of(launch, work)
        assert isinstance(causes.pop(0), NotCommitted)
        assert not causes
        after = {file: file.read_bytes() for file in launch.path().glob("*/*")}
        dist.barrier()
        assert {file: after.get(file) for file in contents} == contents
        if name == "torch_ckpt.save":
            # DCP does not tell a rank whose writing went well that another's did not.
            assert after == contents


def case_a_damaged_file_fails_the_load_of_all_ranks(launch: Launch) -> None:
    path = launch.path()
    mesh = mesh_1d(launch)
    save({"t": distribute_tensor(torch.zeros(4 * launch.size, 100), mesh, [Shard(0)])}, path)
    dist.barrier()
    if launch.rank == 0:
        (file,) = path.glob(f"__{launch.size - 1}_*.distcp")
        data = bytearray(file.read_bytes())
        data[data.index(bytes(1500)) + 700] ^= 1
        file.write_bytes(data)
    dist.barrier()
    target = distribute_tensor(torch.ones(4 * launch.size, 100), mesh, [Shard(0)])
    causes = failure_of(launch, lambda: load({"t": target}, path))
    assert set(causes) == {launch.size - 1}
    assert "the bytes are damaged" in str(causes[launch.size - 1])


def case_a_directory_without_a_checkpoint_fails_the_load_of_all_ranks(launch: Launch) -> None:
    causes = failure_of(launch, lambda: load({"t": torch.zeros(3)}, launch.path("nothing")))
    assert set(causes) == set(range(launch.size))
    assert NO_CHECKPOINT in str(causes[0])


def finished(response: Any) -> Any:
    """The result of an async_save; torch returns a future, or two."""
    future: Future[Any] = getattr(response, "upload_completion", response)
    return future.result(timeout=PATIENCE_SECONDS)


class _WatchedStager(torch_ckpt.FileSystemWriter):
    """Tells how many bytes of kept memory each save has been staged into."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.taken: list[int] = []

    def stage(self, state_dict: StateDict) -> StateDict:
        before = torch_ckpt._C.pool_bytes()
        staged = super().stage(state_dict)
        self.taken.append(before - torch_ckpt._C.pool_bytes())
        return staged


def async_saves(launch: Launch, kind: AsyncCheckpointerType) -> None:
    mesh = mesh_1d(launch)
    writer = _WatchedStager(launch.path())
    for step in range(3):
        path = launch.path(str(step))
        whole = tensor_of("t", 13, 5) + step
        state = {"t": distribute_tensor(whole, mesh, [Shard(0)]), "plain": whole, "step": step}
        response = dcp.async_save(
            state, checkpoint_id=path, storage_writer=writer, async_checkpointer_type=kind
        )
        # The state was staged, so that training may go on.
        state["t"].to_local().fill_(-1)
        finished(response)
        dist.barrier()
        for reader in (OURS[1], STOCK[1]):
            loaded = {"t": torch.zeros(13, 5), "plain": torch.zeros(13, 5), "step": -1}
            load(loaded, path, reader)
            assert loaded["step"] == step
            assert_equal(loaded["t"], whole)
        dist.barrier()
    # What the first left is what the others use.
    staged = whole.nbytes + state["t"].to_local().nbytes
    assert min(writer.taken[1:]) >= staged, writer.taken


def case_async_saves_in_a_thread(launch: Launch) -> None:
    async_saves(launch, AsyncCheckpointerType.THREAD)


def case_async_saves_in_a_process(launch: Launch) -> None:
    async_saves(launch, AsyncCheckpointerType.PROCESS)


def case_an_async_save_that_fails_says_so(launch: Launch) -> None:
    path = launch.path()

    def saving() -> None:
        writer = torch_ckpt.FileSystemWriter(path)
        finished(dcp.async_save(dict(dtensors(mesh_1d(launch))), storage_writer=writer))

    with full_disk_on(1):
        causes = failure_of(launch, saving)
    assert_is_full_disk(causes, 1, path)
    assert not (path / ".metadata").exists()


def case_a_writer_survives_pickling_after_a_save(launch: Launch) -> None:
    writer = torch_ckpt.FileSystemWriter(launch.path("a"), thread_count=3, separation_hint="t")
    dcp.save({"t": tensor_of("t", 4)}, storage_writer=writer)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.thread_count == 3
    assert copy.separation_hint == "t"
    dcp.save({"t": tensor_of("t", 4)}, checkpoint_id=launch.path("b"), storage_writer=copy)
    loaded = {"t": torch.zeros(4)}
    load(loaded, launch.path("b"))
    assert_equal(loaded["t"], tensor_of("t", 4))


# --- torch_ckpt.save and torch_ckpt.load -------------------------------------------------------


def everything(launch: Launch) -> StateDict:
    """Plain, sharded and other values, on all ranks and on one."""
    own = f"of rank {launch.rank}"
    return {
        "sharded": dict(dtensors(mesh_1d(launch))),
        "plain": [tensor_of(f"plain {i}", 50, 20) for i in range(6)],
        "old": sharded_tensor(launch),
        "note": "for all",
        own: tensor_of(own, 5 + launch.rank),
    }


def everything_emptied(launch: Launch) -> StateDict:
    state = everything(launch)
    old = sharded_tensor(launch)
    for shard in old.local_shards():
        shard.tensor.zero_()
    own = f"of rank {launch.rank}"
    return {
        "sharded": zeroed(state["sharded"]),
        "plain": [torch.zeros_like(tensor) for tensor in state["plain"]],
        "old": old,
        "note": "",
        own: torch.zeros_like(state[own]),
    }


def assert_everything(launch: Launch, state: StateDict) -> None:
    expected = everything(launch)
    assert_whole(state["sharded"])
    for actual, wanted in zip(
        state["old"].local_shards(), expected["old"].local_shards(), strict=True
    ):
        assert_equal(actual.tensor, wanted.tensor)
    for name in ("plain", "note", f"of rank {launch.rank}"):
        assert_equal(state[name], expected[name], name)


def case_torch_ckpt_save_and_load_do_what_dcp_does(launch: Launch) -> None:
    def save_by_dcp(state: StateDict, path: Path) -> None:
        save(state, path, STOCK[0])

    def load_by_dcp(state: StateDict, path: Path) -> None:
        load(state, path, STOCK[1])

    pairs: list[tuple[Any, Any]] = [
        (torch_ckpt.save, torch_ckpt.load),
        (torch_ckpt.save, load_by_dcp),
        (save_by_dcp, torch_ckpt.load),
    ]
    for number, (saving, loading) in enumerate(pairs):
        path = launch.path(str(number))
        saving(everything(launch), path)
        state = everything_emptied(launch)
        loading(state, path)
        assert_everything(launch, state)


def case_torch_ckpt_save_writes_plain_tensors_once_and_by_all_ranks(launch: Launch) -> None:
    path = launch.path()
    state = {f"t{i}": tensor_of(f"t{i}", 100, 100) for i in range(8)}
    metadata = torch_ckpt.save(state, path)
    writers = {info.relative_path.split("_")[2] for info in metadata.storage_data.values()}
    assert writers == {str(rank) for rank in range(launch.size)}
    stored = sum(file.stat().st_size for file in data_files(path))
    assert stored < 1.1 * 8 * 100 * 100 * 4


def case_torch_ckpt_save_that_fails_on_one_rank_leaves_no_files(launch: Launch) -> None:
    path = launch.path()
    with full_disk_on(1):
        causes = failure_of(launch, lambda: torch_ckpt.save(everything(launch), path))
    dist.barrier()
    assert_is_full_disk(causes, 1, path)
    assert list(path.iterdir()) == []


def case_torch_ckpt_load_that_fails_on_one_rank_fails_on_all(launch: Launch) -> None:
    path = launch.path()
    torch_ckpt.save({"t": tensor_of("t", 4)}, path)
    name = "missing" if launch.rank == 1 else "t"
    causes = failure_of(launch, lambda: torch_ckpt.load({name: torch.zeros(4)}, path))
    assert set(causes) == {1}
    assert "missing" in str(causes[1])


# --- running them --------------------------------------------------------------------------------

CASES: dict[str, Callable[[Launch], None]] = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}

#: Those that start a process with torch in it for each rank; one number of ranks is enough.
SLOW = {"async_saves_in_a_process"}

#: Loads what earlier launches left.
LOADS_OTHERS = "what_another_number_of_ranks_saved_is_loaded"


def attempt(launch: Launch, name: str, case: Callable[[Launch], None]) -> str | None:
    """Runs a case; the traceback where it failed on this rank."""
    launch.case = name
    if launch.rank == 0:
        shutil.rmtree(launch.path(), ignore_errors=True)
    dist.barrier()
    try:
        case(launch)
    except BaseException:
        return traceback.format_exc()
    return None


def others_failed_too(store: dist.Store, launch: Launch, name: str, failure: str | None) -> bool:
    """Waits for all ranks to end the case. Collectives cannot be used: ranks may have lost step."""
    store.set(f"{name}/{launch.rank}", "failed" if failure else "passed")
    keys = [f"{name}/{rank}" for rank in range(launch.size)]
    store.wait(keys, datetime.timedelta(seconds=PATIENCE_SECONDS))
    return len({store.get(key) for key in keys}) == 1


def main(
    workdir: Path,
    results: Path,
    names: list[str],
    cases: Mapping[str, Callable[[Launch], None]],
    at_end: Callable[[Launch], None] = lambda launch: None,
) -> None:
    """Runs cases by their names; then ``at_end``, and leaves."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    launch = Launch(workdir)
    store = dist.PrefixStore("cases", dist.distributed_c10d._get_default_store())
    with Path(f"{results}-{launch.rank}.jsonl").open("w", buffering=1) as log:
        for name in names:
            begun = time.monotonic()
            failure = attempt(launch, name, cases[name])
            seconds = round(time.monotonic() - begun, 2)
            log.write(json.dumps({"case": name, "failure": failure, "seconds": seconds}) + "\n")
            if not others_failed_too(store, launch, name, failure):
                break
    at_end(launch)
    # Without this barrier gloo's thread sometimes aborts while Python exits (torch 2.15).
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[2]), Path(sys.argv[1]), sys.argv[3:], CASES)
