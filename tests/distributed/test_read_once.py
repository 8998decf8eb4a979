"""read_once: several ranks read shared data once, and send it to each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
from tests.distributed.cases import (
    Launch,
    StateDict,
    assert_full_tensors,
    dtensors,
    dtensors_2d,
    failure_of,
    mesh_1d,
    mesh_2d,
    tensor_of,
    texts_of,
    zeroed,
)
from tests.distributed.launcher import on, on_ranks
from tests.distributed.loads import (
    ALLOWANCE,
    LOADERS,
    by_dcp,
    by_load,
    bytes_read_by,
    damaged,
    flip,
    save,
    stock_save,
)
from tests.metadata import read_metadata
from tests.support import assert_equal, place_of, random_tensor
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.errors import Corrupt
from torch_ckpt.loading import planned_reads, shared_reads
from torch_ckpt.loading.load import LoadRun
from torch_ckpt.loading.planned_reads import PlannedReads


@contextmanager
def batches_of(count: int) -> Iterator[None]:
    """Sets the bytes of a batch, which are also the size of the parts of large tensors."""
    with mock.patch.object(shared_reads, "BATCH_BYTES", count):
        yield


def tensors(count: int, *shape: int) -> StateDict:
    return {f"t{i}": tensor_of(f"t{i}", *shape) for i in range(count)}


def blank(state: StateDict) -> StateDict:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def bytes_read_once(
    launch: Launch, load: Callable[..., None], state: StateDict, path: Path, stored: int
) -> list[int]:
    """Loads, checks that the ranks have read all bytes once, and returns these by rank."""
    costs: list[Any] = [None] * launch.size
    cost = bytes_read_by(lambda: load(state, path, read_once=True, direct_io=False))
    dist.all_gather_object(costs, cost)
    assert stored <= sum(costs) <= 1.05 * stored + launch.size * ALLOWANCE
    return costs


@on(2, 4)
def case_data_that_all_ranks_need_is_read_once(launch: Launch) -> None:
    path = launch.path()
    state = {f"t{i}": tensor_of(f"t{i}", 300, 400 + i) for i in range(8)}
    state["large"] = tensor_of("large", 4000, 500)
    save(state, path)
    stored = sum(tensor.nbytes for tensor in state.values())
    for load in LOADERS:
        loaded = blank(state)
        with batches_of(1 << 20):
            costs = bytes_read_once(launch, load, loaded, path, stored)
        assert_equal(loaded, state)
        # The large tensor is cut, so that each rank reads about its share.
        assert max(costs) <= 1.2 * stored / launch.size + ALLOWANCE


def case_without_read_once_each_rank_reads_all_that_it_needs(launch: Launch) -> None:
    path = launch.path()
    state = {"large": tensor_of("large", 4000, 500)}
    save(state, path)
    for load in LOADERS:
        cost = bytes_read_by(lambda load=load: load(blank(state), path))
        assert cost >= state["large"].nbytes


@on(4)
def case_shards_on_several_ranks_are_read_once(launch: Launch) -> None:
    """Sharded over one dimension of the mesh and replicated over the other."""
    mesh, path = mesh_2d(launch), launch.path()
    full = tensors(4, 512, 1024)
    save(full, path)
    for load in LOADERS:
        state = {
            name: distribute_tensor(torch.zeros(512, 1024), mesh, [Replicate(), Shard(0)])
            for name in full
        }
        bytes_read_once(launch, load, state, path, 4 * 512 * 1024 * 4)
        assert_full_tensors(state)


def case_every_rank_warns_of_narrowing_in_a_read_once(launch: Launch) -> None:
    path = launch.path()
    save(tensors(6, 30, 20), path)
    for load in LOADERS:
        state = {f"t{i}": torch.zeros(30, 20, dtype=torch.bfloat16) for i in range(6)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(state, path, read_once=True)
        messages = [str(w.message) for w in caught if "loading converts" in str(w.message)]
        assert len(messages) == 1
        assert all(f"{name} (torch.float32" in messages[0] for name in state), messages


def replicated(launch: Launch) -> StateDict:
    tied = tensor_of("tied", 30, 20)
    return {
        "model": {
            "weight": tensor_of("weight", 700, 300),
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 4),
            "half": random_tensor((50, 3), torch.bfloat16),
            "flags": random_tensor((77,), torch.bool),
            "conjugated": torch.complex(tied, tied + 1).conj(),
            "transposed": tensor_of("transposed", 40, 50).t(),
            "tied": tied,
            "also tied": tied,
        },
        "hybrid": dict(dtensors_2d(mesh_2d(launch))),
        "sharded": dict(dtensors(mesh_1d(launch))),
        "step": 3,
        "note": "text",
        "list": [tensor_of("of a list", 5), 7],
    }


def replicated_emptied(launch: Launch) -> StateDict:
    state = replicated(launch)
    tied = torch.zeros(30, 20)
    state["model"] = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype)
        for name, tensor in state["model"].items()
    } | {"tied": tied, "also tied": tied}
    state["hybrid"], state["sharded"] = zeroed(state["hybrid"]), zeroed(state["sharded"])
    return state | {"step": 0, "note": "", "list": [torch.zeros(5), 0]}


def assert_replicated(launch: Launch, state: StateDict) -> None:
    expected = replicated(launch)
    assert_full_tensors(state["hybrid"])
    assert_full_tensors(state["sharded"])
    for key in ("model", "step", "note", "list"):
        assert_equal(state[key], expected[key], key)


@on(4)
def case_read_once_loads_correct_values(launch: Launch) -> None:
    for number, saver in enumerate((save, stock_save)):
        path = launch.path(str(number))
        saver(replicated(launch), path)
        for load in LOADERS:
            for batch in (1 << 12, 1 << 26):
                state = replicated_emptied(launch)
                with batches_of(batch):
                    load(state, path, read_once=True, max_inflight_bytes=2 << 20)
                assert_replicated(launch, state)


def case_read_once_fills_targets_of_all_kinds(launch: Launch) -> None:
    """Ranks differ in layout and dtype, so that they do not read the same data."""
    path = launch.path()
    names = ["dtype", "strided", "negated", "transposed", "inference", "parameter", "alike"]
    single = torch.zeros(3)[::2][:1]
    alone = {"single": torch.ones(1), "quantized": quantized(-3)}
    save({name: tensor_of(name, 60, 70) for name in names} | alone, path)
    odd = launch.rank % 2 == 1
    with torch.inference_mode():
        inference = torch.zeros(60, 70)
    state: StateDict = {
        "dtype": torch.zeros(60, 70, dtype=torch.float64 if odd else torch.float32),
        "strided": torch.zeros(60, 140)[:, ::2] if odd else torch.zeros(60, 70),
        "negated": torch.zeros(60, 70)._neg_view(),
        "transposed": torch.zeros(70, 60).t(),
        "inference": inference,
        "parameter": torch.nn.Parameter(torch.zeros(60, 70)),
        "alike": torch.zeros(60, 70, dtype=torch.float64),
    }
    for load in LOADERS:
        # Only torch reads quantized tensors.
        target = quantized(-4)
        load({**state, "single": single, "quantized": target}, path, read_once=True)
        assert single.tolist() == [1.0]
        assert torch.equal(target.dequantize(), quantized(-3).dequantize())
        single.zero_()
        for name, target in state.items():
            found = target.detach().float().nan_to_num(7)
            assert torch.equal(found, tensor_of(name, 60, 70).nan_to_num(7)), name
            if name != "inference":
                target.data.zero_()


def quantized(first: int) -> torch.Tensor:
    values = torch.linspace(first, first + 6, 24).reshape(4, 6)
    return torch.quantize_per_tensor(values, 0.05, 3, torch.quint8)


@on(2, 4)
def case_ranks_can_read_different_items(launch: Launch) -> None:
    path = launch.path()
    names = ["all", "none of rank 0", "even", "of the last", "of nobody"]
    save({name: tensor_of(name, 300, 200) for name in names}, path)
    wants = {
        "all": True,
        "none of rank 0": launch.rank != 0,
        "even": launch.rank % 2 == 0,
        "of the last": launch.rank == launch.size - 1,
    }
    wanted = {name: tensor_of(name, 300, 200) for name, is_wanted in wants.items() if is_wanted}
    for load in LOADERS:
        state = blank(wanted)
        with batches_of(1 << 16):
            load(state, path, read_once=True)
        assert_equal(state, wanted)
    wanted = {} if launch.rank == 0 else wanted
    state = blank(wanted)
    by_load(state, path, read_once=True)
    assert_equal(state, wanted)


@on(4)
def case_a_subgroup_reads_once(launch: Launch) -> None:
    """Uses the last ranks, whose numbers in the group differ from those in the world."""
    members = list(range(1, launch.size))
    group = dist.new_group(members)
    path = launch.path()
    wanted = tensors(4, 300, 200)
    save(wanted, path)
    if launch.rank not in members:
        return
    if launch.rank == 1:
        del wanted["t3"]

    def by_dcp_in_group(state: StateDict, **options: Any) -> None:
        reader = torch_ckpt.FileSystemReader(path, read_once=True, **options)
        dcp.load(state, storage_reader=reader, process_group=group)

    load = partial(by_load, path=path, read_once=True, process_group=group)
    for loading in (
        load,
        partial(load, planner=dcp.DefaultLoadPlanner()),
        partial(by_dcp_in_group, process_group=group),
    ):
        state = blank(wanted)
        with batches_of(1 << 16):
            loading(state)
        assert_equal(state, wanted)
    if len(members) > 1:
        with pytest.raises(
            dcp.CheckpointException, match="pass the load's process_group to the reader"
        ):
            by_dcp_in_group(state)


class Hooked(dcp.DefaultLoadPlanner):
    """Planner that forbids writes to a tensor before it has been asked for the tensor."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return super().resolve_tensor(read_item)


def case_a_single_rank_reads_once(launch: Launch) -> None:
    path, wanted = launch.path(), tensors(1, 300, 200)
    save(wanted, path)
    planners: list[Any] = [None, dcp.DefaultLoadPlanner(), Hooked()]
    for who in (0, launch.size - 1):
        dist.barrier()
        for planner in planners if launch.rank == who else []:
            reader = torch_ckpt.FileSystemReader(path, read_once=True)
            for load in (
                partial(
                    torch_ckpt.load,
                    checkpoint_id=path,
                    options=torch_ckpt.ReadOptions(read_once=True),
                ),
                partial(dcp.load, storage_reader=reader),
            ):
                state = blank(wanted)
                load(state, no_dist=True, planner=planner)
                assert_equal(state, wanted)


def case_ranks_that_read_once_can_have_different_planners_and_limits(launch: Launch) -> None:
    path, wanted = launch.path(), tensors(4, 300, 1000)
    save(wanted, path)
    planner = [Hooked if launch.rank == odd else dcp.DefaultLoadPlanner for odd in range(2)]
    limit = {"max_inflight_bytes": (1 + launch.rank) << 20}
    for load, options in (
        (by_load, {"planner": planner[0]()}),
        (by_load, {"planner": planner[1]()}),
        (by_load, limit),
        (by_dcp, limit),
    ):
        state = blank(wanted)
        load(state, path, read_once=True, **options)
        assert_equal(state, wanted)


def case_ranks_that_read_different_checkpoints_each_get_theirs(launch: Launch) -> None:
    """The data is at the same locations in files of the same names."""
    for number, saver in enumerate((torch_ckpt.save, dcp.save)):
        path = launch.path(str(number), f"of {launch.rank}")
        saver({"t": torch.full((300, 200), float(launch.rank))}, checkpoint_id=path, no_dist=True)
        for load in LOADERS:
            state = {"t": torch.full((300, 200), 7.0)}
            load(state, path, read_once=True)
            assert (state["t"] == launch.rank).all()


def case_read_once_zero_fills(launch: Launch) -> None:
    mesh, path = mesh_2d(launch), launch.path()
    stored = tensor_of("t", 30, 40)
    save({"t": stored, "h": stored}, path)
    expected = torch.zeros(50, 41)
    expected[:30, :40] = stored
    for load in LOADERS:
        hybrid = distribute_tensor(torch.full((50, 41), 7.0), mesh, [Replicate(), Shard(0)])
        state: StateDict = {"t": torch.full((50, 41), 7.0), "h": hybrid}
        load(state, path, read_once=True, zero_fill=True)
        assert_equal(state["t"], expected)
        assert_equal(hybrid.full_tensor(), expected)


@contextmanager
def failing_on(launch: Launch, rank: int, name: str) -> Iterator[None]:
    """Makes a method of the source or of the reads, or a function of theirs, raise on one rank."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} failed on purpose")

    places = [Source, planned_reads, PlannedReads, LoadRun]
    having = [place for place in places if hasattr(place, name)]
    assert having
    with ExitStack() as patches:
        for place in having if launch.rank == rank else []:
            patches.enter_context(mock.patch.object(place, name, fail))
        yield


@on(2, 4)
def case_a_failure_on_one_rank_fails_a_read_once_on_all(launch: Launch) -> None:
    path = launch.path()
    state = tensors(8, 30, 20) | {"step": 3}
    save(state, path)
    last = launch.size - 1

    def target(rows: int = 30) -> StateDict:
        return {f"t{i}": torch.zeros(rows, 20) for i in range(8)} | {"step": 0}

    for load in LOADERS:
        planning, zeroing = "_begin", "_begin"
        if load is by_dcp:
            planning, zeroing = "_reading", "zero_what_is_not_stored"
        for method in ("read_tensors", "read_bytes", planning):
            with failing_on(launch, last, method):
                causes = failure_of(launch, load, target(), path, read_once=True)
            assert texts_of(causes) == {last: f"{method} failed on purpose"}
        with failing_on(launch, last, zeroing):
            causes = failure_of(launch, load, target(31), path, read_once=True, zero_fill=True)
        assert texts_of(causes) == {last: f"{zeroing} failed on purpose"}
        # The ranks are still in step.
        found = target()
        load(found, path, read_once=True)
        assert_equal(found, state)


def case_a_state_that_does_not_fit_on_one_rank_fails_a_read_once_on_all(launch: Launch) -> None:
    path = launch.path()
    save({"t": tensor_of("t", 30, 20)}, path)
    for load in LOADERS:
        shape = (30, 21) if launch.rank == 1 else (30, 20)
        target = torch.full(shape, 7.0)
        causes = failure_of(launch, load, {"t": target}, path, read_once=True)
        assert set(causes) == {1}
        assert (target == 7).all()


def case_damage_fails_a_read_once_on_all(launch: Launch) -> None:
    good = launch.path("good")
    stored = tensors(2 * launch.size, 300, 200)
    save(stored, good)
    place = place_of(read_metadata(good), "t1")

    def flip_t1(files: list[Path]) -> None:
        flip(files[0].parent / place.relative_path, place.offset + place.length // 2)

    def remove(files: list[Path]) -> None:
        (files[0].parent / place.relative_path).unlink()

    for kind, damage in (("flipped", flip_t1), ("missing", remove)):
        path = damaged(launch, good, kind, damage)
        for load in LOADERS:
            causes = failure_of(launch, load, blank(stored), path, read_once=True)
            assert causes
            for cause in causes.values():
                assert isinstance(cause, FileNotFoundError if kind == "missing" else Corrupt)
                assert place.relative_path in str(cause)
            if kind == "flipped":
                # Only its owner has read it.
                assert len(causes) == 1
                assert next(iter(causes.values())).args[0].startswith("t1: ")


test_on_ranks = on_ranks(globals())
