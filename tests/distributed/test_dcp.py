"""Saves and loads by DCP on several ranks: contents, assignment to ranks, and reading by torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ckpt
from tests.distributed.cases import (
    OURS,
    STOCK,
    Launch,
    StateDict,
    assert_full_tensors,
    assert_only_used,
    dtensors,
    dtensors_2d,
    full_state,
    full_state_loaded,
    load,
    mesh_1d,
    mesh_2d,
    pairs,
    save,
    tensor_of,
    trained_model,
    zeroed,
)
from tests.distributed.launcher import between, on, on_ranks
from tests.metadata import read_metadata
from tests.support import assert_equal, assert_tables_match, data_files

# --- interoperation and sharding ------------------------------------------------------------------


def all_dtensors(launch: Launch) -> dict[str, DTensor]:
    return dtensors(mesh_1d(launch)) | dtensors_2d(mesh_2d(launch))


@on(2, 4)
def case_sharded_tensors_make_the_round_trip_with_stock_torch(launch: Launch) -> None:
    for path, writer, reader in pairs(launch):
        save(all_dtensors(launch), path, writer)
        loaded = zeroed(all_dtensors(launch))
        load(loaded, path, reader)
        assert_full_tensors(loaded)


def case_an_fsdp_model_and_its_optimizer_make_the_round_trip(launch: Launch) -> None:
    for path, writer, reader in pairs(launch):
        model, optimizer = trained_model(launch, seed=1)
        parts = get_state_dict(model, optimizer)
        save({"model": parts[0], "optimizer": parts[1]}, path, writer)
        loaded = full_state_loaded(launch, path, partial(load, reader=reader))
        assert_equal(loaded, full_state(model, optimizer))


def case_a_sharded_optimizer_state_is_loaded_before_the_optimizer_exists(launch: Launch) -> None:
    state = {"state": {"w": {"exp_avg": tensor_of("exp_avg", 4 * launch.size, 3)}}, "lr": 0.5}
    for path, writer, reader in pairs(launch):
        save({"optim": state}, path, writer)
        loaded = load_sharded_optimizer_state_dict(
            model_state_dict={}, optimizer_key="optim", storage_reader=reader(path)
        )["optim"]
        shards = loaded["state"]["w"]["exp_avg"].local_shards()
        mine = tensor_of("exp_avg", 4 * launch.size, 3)[4 * launch.rank :][:4]
        assert_equal(shards[0].tensor, mine)
        assert loaded["lr"] == 0.5


# --- between launches of different sizes ----------------------------------------------------------


@on(only=True)
def case_this_number_of_ranks_saves_for_another(launch: Launch) -> None:
    for number, (writer, _reader) in enumerate((OURS, STOCK)):
        path = launch.workdir / f"from-{launch.size}" / str(number)
        save(all_dtensors(launch) | {"step": launch.size}, path, writer)


@on(only=True)
def case_a_checkpoint_of_another_number_of_ranks_is_loaded(launch: Launch) -> None:
    for source in sorted(launch.workdir.glob("from-*")):
        for number, reader in ((0, OURS[1]), (0, STOCK[1]), (1, OURS[1])):
            tensors = zeroed(all_dtensors(launch))
            loaded: StateDict = tensors | {"step": 0}
            load(loaded, source / str(number), reader)
            assert_full_tensors(tensors)
            assert f"from-{loaded['step']}" == source.name


# --- assignment to ranks --------------------------------------------------------------------------


def case_each_rank_writes_its_own_files_and_has_the_metadata_of_all(launch: Launch) -> None:
    path = launch.path()
    writer = torch_ckpt.FileSystemWriter(path, thread_count=2)
    metadata = dcp.save(dict(dtensors(mesh_1d(launch))), storage_writer=writer)
    expected = {f"__{rank}_{i}.distcp" for rank in range(launch.size) for i in range(2)}
    assert {file.name for file in data_files(path)} == expected
    everywhere: list[Any] = [None] * launch.size
    seen = sorted((i.fqn, tuple(i.offset), vars(p)) for i, p in metadata.storage_data.items())
    dist.all_gather_object(everywhere, seen)
    assert all(one == everywhere[0] for one in everywhere)
    read = torch_ckpt.FileSystemReader(path).read_metadata()
    assert read.storage_data == metadata.storage_data


def case_one_writer_saves_many_times_with_and_without_cached_plans(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    for caching in (False, True):
        forget_plans()
        writer = torch_ckpt.FileSystemWriter(launch.path())
        for step in range(4):
            # The last two overwrite the same directory.
            path = launch.path(f"{caching} {min(step, 2)}")
            full = tensor_of("t", 13, 5) + step
            state = {"t": distribute_tensor(full, mesh, [Shard(0)]), "plain": full, "step": step}
            planner = dcp.DefaultSavePlanner(enable_plan_caching=caching)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                metadata = dcp.save(
                    state, checkpoint_id=path, storage_writer=writer, planner=planner
                )
            dist.barrier()
            assert_only_used(path, metadata)
            for reader in (OURS[1], STOCK[1]):
                loaded = {"t": torch.zeros(13, 5), "plain": torch.zeros(13, 5), "step": -1}
                load(loaded, path, reader)
                assert_equal(loaded, {"t": full, "plain": full, "step": step})
            dist.barrier()
    forget_plans()


def forget_plans() -> None:
    for name in vars(SavePlanner):
        if name.startswith("_cached_"):
            getattr(SavePlanner, name).clear()


@on(4)
def case_ranks_of_a_subgroup_save_and_load_together(launch: Launch) -> None:
    half = launch.size // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, launch.size)))]
    side = launch.rank // half
    path = launch.path(str(side))
    save({"t": tensor_of(f"t{side}", 9), "side": side}, path, process_group=groups[side])
    loaded = {"t": torch.zeros(9), "side": -1}
    load(loaded, path, process_group=groups[side])
    assert_equal(loaded, {"t": tensor_of(f"t{side}", 9), "side": side})


# --- checksum tables ------------------------------------------------------------------------------


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


test_on_ranks = on_ranks(globals())
test_a_checkpoint_of_another_number_of_ranks_is_loaded = between(
    "this_number_of_ranks_saves_for_another",
    "a_checkpoint_of_another_number_of_ranks_is_loaded",
    [(2, 4), (4, 2)],
)
