"""Loads by several ranks: parts of tensors, states that do not fit, damaged files."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import torch_ckpt
from tests.distributed.cases import (
    Launch,
    StateDict,
    assert_everything,
    assert_full_tensors,
    everything,
    everything_emptied,
    failure_of,
    local_parts,
    mesh_1d,
    mesh_2d,
    sharded_tensor,
    tensor_of,
    texts_of,
)
from tests.distributed.launcher import on, on_ranks
from tests.distributed.loads import (
    ALLOWANCE,
    LOADERS,
    by_load,
    bytes_read_by,
    changed_after_rank_0_looked,
    damaged,
    flip,
    on_rank_0,
    save,
    savers,
    stock_save,
)
from tests.loads import with_read_options
from tests.local_steps import saved
from tests.support import assert_equal, data_files, emptied
from torch_ckpt import Corrupt, LoadMismatch, _core
from torch_ckpt.checkpoint.chunks import local_chunks
from torch_ckpt.checkpoint.folders import LocalFolder
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.inspection.diff import diff
from torch_ckpt.steps import LocalSteps

# --- parts ----------------------------------------------------------------------------------------


def case_a_rank_reads_little_more_than_its_rows(launch: Launch) -> None:
    """Saves rows by stock torch and by torch_ckpt, complete and in shards. Loads shards of rows."""
    mesh = mesh_1d(launch)
    full = {f"t{i}": tensor_of(f"t{i}", 4096, 512) for i in range(2)}  # 8 MiB each
    rows = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in full.items()}
    for number, (saver, state) in enumerate(
        (saver, state) for saver in (save, stock_save) for state in (full, rows)
    ):
        path = launch.path(str(number))
        saver(dict(state), path)
        wanted = sum(tensor.nbytes for tensor in full.values()) // launch.size
        for load in LOADERS:
            target = {name: torch.zeros_like(tensor) for name, tensor in rows.items()}
            cost = bytes_read_by(lambda load=load, target=target, path=path: load(target, path))
            assert wanted <= cost <= 1.05 * wanted + ALLOWANCE, (saver.__name__, number)
            assert_full_tensors(target)


@on(4)
def case_any_sharding_is_loaded_into_any_other(launch: Launch) -> None:
    mesh, mesh2 = mesh_1d(launch), mesh_2d(launch)
    shape = (37, 26, 5)
    tensor = tensor_of("t", *shape)

    def shardings() -> dict[str, DTensor]:
        found = {f"dim {d}": distribute_tensor(tensor, mesh, [Shard(d)]) for d in range(3)}
        found["replicated"] = distribute_tensor(tensor, mesh, [Replicate()])
        for a, b in ((0, 1), (1, 2), (2, 0), (0, 0)):
            found[f"dims {a} {b}"] = distribute_tensor(tensor, mesh2, [Shard(a), Shard(b)])
        return found

    for path, saver in savers(launch):
        saver(dict(shardings()) | {"plain": tensor}, path)
        for name, stored in shardings().items():
            # Each loads from another one's data.
            for target in shardings().values():
                loaded: StateDict = {name: torch.zeros_like(target, dtype=torch.float64)}
                by_load(loaded, path)
                assert_equal(loaded[name].full_tensor(), tensor.double(), name)
            assert stored.shape == tensor.shape
        loaded = {"plain": torch.zeros_like(distribute_tensor(tensor, mesh, [Shard(1)]))}
        by_load(loaded, path)
        assert_equal(loaded["plain"].full_tensor(), tensor)


@on(4)
def case_uneven_and_empty_shards_on_two_dimensions_are_saved_in_both_formats(
    launch: Launch,
) -> None:
    mesh = mesh_2d(launch)
    whole: StateDict = {}
    state: StateDict = {}
    for shape in ((1,), (3,), (5,), (7,), (5, 7), (1, 3), (3, 0)):
        last = len(shape) - 1
        for a, b in ((Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Shard(last))):
            name = f"{shape} {a} {b}"
            whole[name] = tensor_of(name, *shape)
            state[name] = distribute_tensor(whole[name], mesh, [a, b])
    for kind in ("checkpoint", "safetensors"):
        path = launch.path() / kind
        torch_ckpt.save(state, path, format=kind)
        target = emptied(whole)
        torch_ckpt.load(target, path, no_dist=True)
        assert_equal(target, whole)


def case_checkpoints_of_several_ranks_are_verified_and_compared(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    tensor = tensor_of("t", 37, 26)
    stored = []
    for path, saver in savers(launch):
        saver({"t": distribute_tensor(tensor, mesh, [Shard(len(stored))]), "step": 7}, path)
        stored.append(path)

    def look() -> None:
        for path in stored:
            report = torch_ckpt.verify(path)
            assert report.ok, str(report)
            assert report.records == launch.size + 1
        assert diff(*stored).equal
        # The payload of the last rank's shard.
        part = tensor.chunk(launch.size)[-1].contiguous().view(torch.uint8).numpy().tobytes()
        (file,) = (file for file in data_files(stored[0]) if part in file.read_bytes())
        flip(file, file.read_bytes().index(part) + 9)
        (damage,) = torch_ckpt.verify(stored[0]).damaged
        assert (damage.name, damage.file) == ("t", file.name)

    on_rank_0(launch, look)


def case_old_sharded_tensors_are_resharded(launch: Launch) -> None:
    mesh = mesh_1d(launch)
    for path, saver in savers(launch):
        saver({"sharded": sharded_tensor(launch)}, path)
        full = tensor_of("sharded", 6 * launch.size, 5)
        for placement in (Shard(0), Shard(1), Replicate()):
            target = torch.zeros_like(distribute_tensor(full, mesh, [placement]))
            by_load({"sharded": target}, path)
            assert_equal(target.full_tensor(), full)
        saver({"sharded": full}, whole := path.with_name(f"{path.name} whole"))
        old = sharded_tensor(launch, zeroed=True)
        by_load({"sharded": old}, whole)
        assert_equal(local_parts(old), local_parts(sharded_tensor(launch)))


def case_dtensors_are_saved_and_loaded_while_the_default_device_is_meta(launch: Launch) -> None:
    mesh, path = mesh_1d(launch), launch.path()
    full = tensor_of("t", 9, 5)
    stored = distribute_tensor(full, mesh, [Shard(0)])
    on_cpu = torch.zeros_like(stored)
    with torch.device("meta"):
        on_meta = torch.empty_like(stored, device="meta")
        save({"t": stored}, path)
        state: StateDict = {"t": on_meta}
        torch_ckpt.load(state, path)
        torch_ckpt.load({"t": on_cpu}, path)
    assert_equal(state["t"].full_tensor(), full)
    assert_equal(on_cpu.full_tensor(), full)


@on(2, 4)
def case_tensors_on_some_ranks_only_are_loaded_there(launch: Launch) -> None:
    """Uses a mesh without some of the ranks."""
    mesh = DeviceMesh("cpu", list(range(launch.size - 1)))
    path = launch.path()
    save({"t": tensor_of("t", 9, 5), "all": tensor_of("all", 4)}, path)
    expected = torch.zeros(12, 5)
    expected[:9] = tensor_of("t", 9, 5)
    for load in LOADERS:
        every: list[dict[str, bool]] = [{}, {"read_once": True}, {"zero_fill": True}]
        for options in every:
            shape = (12, 5) if "zero_fill" in options else (9, 5)
            target = distribute_tensor(torch.full(shape, 7.0), mesh, [Shard(0)])
            state: StateDict = {"t": target, "all": torch.zeros(4)}
            load(state, path, **options)
            assert_equal(state["all"], tensor_of("all", 4))
            if launch.rank < launch.size - 1:
                assert_equal(target.full_tensor(), expected[: shape[0]])
            estimate = torch_ckpt.estimate_read_memory(
                state, path, **with_read_options(dict(options))
            )
            wanted = target.to_local().nbytes if launch.rank < launch.size - 1 else 0
            assert estimate.target_bytes == 16 + wanted


@on(4)
def case_the_parts_of_a_strided_shard_are_the_elements_of_the_rank(launch: Launch) -> None:
    mesh = mesh_2d(launch)
    seed = 5
    choice = random.Random(seed)
    for number in range(200):
        shape = (choice.randrange(1, 12), choice.randrange(1, 12))
        dim, factor = choice.randrange(2), choice.randrange(1, 4)
        other = choice.choice([Shard(0), Shard(1), Replicate()])
        placements = [_StridedShard(dim, split_factor=factor), other]
        if choice.random() < 0.5:
            placements.reverse()
        full = torch.arange(shape[0] * shape[1]).view(shape)
        tensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        found = [
            full[tuple(slice(b, b + n) for b, n in zip(c.offsets, c.sizes, strict=True))]
            for c in local_chunks(tensor)
        ]
        numbers = torch.cat([part.flatten() for part in found]).sort().values
        context = f"seed {seed}, number {number}: {placements} of {shape}"
        assert_equal(numbers, tensor.to_local().flatten().sort().values, context)


@on(4)
def case_strided_shards_of_fsdp_beside_tensor_parallelism_are_loaded(launch: Launch) -> None:
    mesh = mesh_2d(launch)
    full = tensor_of("t", 11, 6)
    placements = (_StridedShard(0, split_factor=2), Shard(0))

    def sharded(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)

    for path, saver in savers(launch):
        saver({"t": sharded(full)}, path)
        for load in LOADERS:
            target = sharded(torch.zeros(11, 6))
            load({"t": target}, path)
            assert_equal(target.to_local(), sharded(full).to_local())
            plain = torch.zeros(11, 6)
            load({"t": plain}, path)
            assert_equal(plain, full)


def case_a_strided_shard_whose_parts_are_not_consecutive_is_refused(launch: Launch) -> None:
    mesh, path = mesh_1d(launch), launch.path()
    full = tensor_of("t", 4 * launch.size, 3)
    save({"a": tensor_of("a", 2), "t": full}, path)

    def strided(tensor: torch.Tensor) -> DTensor:
        placements = [_StridedShard(0, split_factor=2)]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    def refused(
        work: Callable[..., Any], state: StateDict, *arguments: Any, **options: Any
    ) -> None:
        causes = failure_of(launch, work, state, *arguments, **options)
        assert set(causes) == set(range(launch.size))
        for cause in causes.values():
            assert "t: this rank's part of the DTensor is not a single block" in str(cause)

    def in_background(state: StateDict, path: Path) -> None:
        torch_ckpt.async_save(state, path).result(60)

    loads: list[tuple[Any, dict[str, bool]]] = [(load, {}) for load in LOADERS]
    loads += [(by_load, {"free_before_read": True}), (by_load, {"zero_fill": True})]
    for load, options in loads:
        target = strided(torch.full_like(full, 7.0))
        state = {"a": torch.zeros(2), "t": target}
        refused(load, state, path, **options)
        assert (target.to_local() == 7).all()
        assert_equal(state["a"], torch.zeros(2))
    for number, saver in enumerate((torch_ckpt.save, in_background)):
        refused(saver, {"t": strided(full)}, launch.path(f"refused {number}"))


# --- damage ---------------------------------------------------------------------------------------


def saved_rows(launch: Launch) -> tuple[Path, Callable[[], StateDict]]:
    """Makes a checkpoint with one file of rows from each rank, and a state to load it into."""
    mesh, path = mesh_1d(launch), launch.path("good")
    shape = (100 * launch.size, 300)
    save({"t": distribute_tensor(tensor_of("t", *shape), mesh, [Shard(0)])}, path, thread_count=1)

    def target() -> StateDict:
        return {"t": distribute_tensor(torch.zeros(shape), mesh, [Shard(0)])}

    return path, target


def exchange(files: list[Path]) -> None:
    aside = files[0].with_suffix(".aside")
    files[0].rename(aside)
    files[1].rename(files[0])
    aside.rename(files[1])


def case_damage_of_a_ranks_file_is_an_error_on_all_ranks(launch: Launch) -> None:
    good, target = saved_rows(launch)
    choice = random.Random(0)
    kinds: dict[str, Callable[[list[Path]], Any]] = {
        "flipped": lambda files: flip(files[1], choice.randrange(2000, 100_000)),
        "truncated": lambda files: os.truncate(files[1], 50_000),
        "empty": lambda files: os.truncate(files[1], 0),
        "missing": lambda files: files[1].unlink(),
        "exchanged": exchange,
    }
    for kind, damage in kinds.items():
        path = damaged(launch, good, kind, damage)
        for load in LOADERS:
            causes = failure_of(launch, load, target(), path)
            assert set(causes) == ({0, 1} if kind == "exchanged" else {1}), kind
            for rank, cause in causes.items():
                expected = FileNotFoundError if kind == "missing" else Corrupt
                assert isinstance(cause, expected), (kind, cause)
                assert f"__{rank}_" in str(cause), kind
                assert "\n" not in str(cause)
                assert str(cause).startswith("t: ") or "(t)" in str(cause)


# --- zero_fill ------------------------------------------------------------------------------------


def case_sharded_tensors_of_another_shape_load_the_common_region(launch: Launch) -> None:
    """Some ranks' shards lie entirely outside of the stored tensor."""
    mesh, path = mesh_1d(launch), launch.path()
    stored, size = tensor_of("t", 9, 4), launch.size
    save({"t": stored, "s": distribute_tensor(stored, mesh, [Shard(0)])}, path)
    larger = [(9, 4), (24 * size, 4), (9, 8 * size), (19, 11)]
    shapes = [(shape, {"zero_fill": True}) for shape in larger]
    shapes += [(shape, {"allow_shape_mismatch": True}) for shape in [(2, 4), (9, 1), (5, 7)]]
    for load, (shape, options) in itertools.product(LOADERS, shapes):
        expected = torch.zeros(shape)
        region = tuple(slice(0, min(pair)) for pair in zip(shape, stored.shape, strict=True))
        expected[region] = stored[region]
        for placement in (Shard(0), Shard(1), Replicate()):
            full = torch.full(shape, 7.0)
            targets = {name: distribute_tensor(full, mesh, [placement]) for name in ("t", "s")}
            load(targets, path, **options)
            for target in targets.values():
                assert_equal(target.full_tensor(), expected)


def case_a_sharded_tensor_that_is_smaller_than_stored_is_refused(launch: Launch) -> None:
    mesh, path = mesh_1d(launch), launch.path()
    save({"t": tensor_of("t", 9, 4)}, path)
    for load in LOADERS:
        target = distribute_tensor(torch.full((8, 5), 7.0), mesh, [Shard(0)])
        causes = failure_of(launch, load, {"t": target}, path, zero_fill=True)
        assert set(causes) == set(range(launch.size))
        assert (target.full_tensor() == 7).all()


# --- what fits ------------------------------------------------------------------------------------


def case_a_state_that_does_not_fit_on_one_rank_changes_nothing_on_any(launch: Launch) -> None:
    path = launch.path()
    save(everything(launch), path)
    for free in (False, True):
        state = everything_emptied(launch)
        if launch.rank == 1:
            state["absent"] = 0
            state["plain"][0] = torch.zeros(3)
        causes = failure_of(launch, by_load, state, path, free_before_read=free)
        assert set(causes) == {1}
        cause = causes[1]
        assert isinstance(cause, LoadMismatch)
        assert cause.report.missing == ["absent"]
        assert [name for name, _has, _wants in cause.report.shapes] == ["plain.0"]
        assert pickle.loads(pickle.dumps(cause)).report == cause.report
        assert state["note"] == ""
        assert all((t == 0).all() for t in state["plain"])
        assert all((t.to_local() == 0).all() for t in state["sharded"].values())


def case_items_skipped_on_any_rank_are_reported_on_rank_0(launch: Launch) -> None:
    path = launch.path()
    save({"model": {"a": torch.ones(2)}}, path)
    state = {"model": {"a": torch.zeros(2), f"of_rank_{launch.rank}": torch.zeros(1)}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = torch_ckpt.load(state, path, strict=False)
    assert report.missing == [f"model.of_rank_{launch.rank}"]
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (1 if launch.rank == 0 else 0)
    for rank, message in itertools.product(range(launch.size), messages):
        assert f"model.of_rank_{rank} (missing)" in message
    # A value of which nothing can be loaded is refused.
    state = {"model": {"a": torch.zeros(2)}}
    if launch.rank == 1:
        state["optimizer"] = {"a": torch.zeros(2)}
    causes = failure_of(launch, torch_ckpt.load, state, path, strict=False)
    assert set(causes) == {1}
    assert "no value of optimizer can be loaded" in str(causes[1])
    assert (state["model"]["a"] == 0).all()


def case_a_wrong_path_on_one_rank_is_a_short_error_on_all(launch: Launch) -> None:
    path, wrong = launch.path(), launch.path("wrong")
    state = {"a": torch.zeros(2)}
    save(state, path)
    with pytest.raises(FileNotFoundError) as caught:
        torch_ckpt.load(state, wrong if launch.rank == 1 else path)
    assert caught.value.filename == str(wrong)
    assert isinstance(caught.value, dcp.CheckpointException)
    lines = "".join(traceback.format_exception(caught.value)).splitlines()
    assert len(lines) <= 12
    assert lines[-1].endswith(f"no committed checkpoint: there is no such directory: '{wrong}'")


def case_meta_tensors_are_materialized_only_if_all_ranks_load(launch: Launch) -> None:
    mesh, path = mesh_1d(launch), launch.path()
    full = tensor_of("t", 7, 3)
    save({"d": distribute_tensor(full, mesh, [Shard(0)]), "t": full, "unwanted": full}, path)

    def on_meta() -> StateDict:
        local = distribute_tensor(torch.zeros(7, 3), mesh, [Shard(0)])
        return {
            "d": torch.empty_like(local, device="meta"),
            "t": torch.empty(7, 3, device="meta"),
            "unwanted": torch.empty(7, 3, device="meta"),
        }

    for options in ({}, {"read_once": True}, {"free_before_read": True}):
        state = on_meta()
        if launch.rank == 1:
            state["absent"] = 0
        causes = failure_of(launch, by_load, state, path, **options)
        assert set(causes) == {1}
        assert all(state[name].is_meta for name in ("d", "t", "unwanted"))
        state = on_meta()
        by_load(state, path, names=["d", "t"], **options)
        assert isinstance(state["d"], DTensor)
        assert_equal(state["d"].full_tensor(), full)
        assert_equal(state["t"], full)
        assert state["unwanted"].is_meta


def case_partial_loads_and_loads_that_free_first_fill_what_fits(launch: Launch) -> None:
    path = launch.path()
    save(everything(launch), path)
    state = everything_emptied(launch)
    name = f"absent on {launch.rank}"
    state[name] = torch.full((2,), 7.0)
    report = torch_ckpt.load(state, path, strict=False)
    assert report.missing == [name]
    assert (state.pop(name) == 7).all()
    assert_everything(launch, state)
    state = everything_emptied(launch)
    by_load(state, path, free_before_read=True)
    assert_everything(launch, state)


# --- Stateful values ------------------------------------------------------------------------------


class Collective:
    """Stateful whose methods use collectives. One method fails on one rank."""

    def __init__(self, launch: Launch, rank: int = -1, fails: str = "") -> None:
        self.tensor = torch.zeros(5)
        self.fails = fails if launch.rank == rank else ""

    def state_dict(self) -> StateDict:
        self.do("state_dict")
        return {"t": self.tensor}

    def load_state_dict(self, state: StateDict) -> None:
        self.do("load_state_dict")

    def do(self, what: str) -> None:
        if self.fails == what:
            raise RuntimeError(f"{what} failed on purpose")
        self.wait()

    def wait(self) -> None:
        dist.barrier()


class IndependentStateful(Collective):
    """Stateful that fails on one rank, without collectives."""

    def wait(self) -> None:
        pass


def case_a_stateful_value_that_fails_on_one_rank_fails_the_load_on_all(launch: Launch) -> None:
    """The next value may free memory by a collective."""
    path = launch.path()
    save({key: {"t": tensor_of(key, 5)} for key in ("a", "b")}, path)
    for fails, what in (
        ("state_dict", "its state could not be read"),
        ("load_state_dict", "could not be restored"),
    ):
        failing = IndependentStateful(launch, 1, fails)
        for free, key, kind in (
            (False, "a", IndependentStateful),
            (False, "b", IndependentStateful),
            (True, "a", IndependentStateful),
            (True, "b", IndependentStateful),
            (True, "a", Collective),
        ):
            state = {"a": kind(launch), "b": kind(launch)} | {key: failing}
            causes = failure_of(launch, by_load, state, path, free_before_read=free)
            assert texts_of(causes) == {1: f"{key}: {what} on rank 1: {fails} failed on purpose"}
    state = {"a": Collective(launch), "b": Collective(launch)}
    by_load(state, path, free_before_read=True)
    assert_equal(state["b"].tensor, tensor_of("b", 5))


def case_freeing_needs_the_same_stateful_values_on_all_ranks(launch: Launch) -> None:
    path = launch.path()
    save({"a": {"t": tensor_of("a", 5)}, "b": {"t": tensor_of("b", 5)}, "c": torch.ones(1)}, path)
    state: StateDict = {"a": Collective(launch)}
    if launch.rank == 1:
        state["b"] = Collective(launch)
    causes = failure_of(launch, by_load, state, path, free_before_read=True)
    assert "all ranks have values with a state under the same keys" in str(causes[0])
    assert "rank 1 has ['a', 'b']" in str(causes[0])
    others: StateDict = {"a": Collective(launch)}
    if launch.rank == 1:
        others["c"] = torch.zeros(1)
    by_load(others, path, free_before_read=True)
    assert_equal(others["a"].tensor, tensor_of("a", 5))


def case_a_pattern_may_match_on_one_rank_only(launch: Launch) -> None:
    path = launch.path()
    save({f"stage {i}": torch.full((3,), float(i)) for i in range(launch.size)}, path)
    for free in (False, True):
        name = f"stage {launch.rank}"
        state = {name: torch.full((3,), 7.0)}
        patterns = [f"stage {i}" for i in range(launch.size)]
        by_load(state, path, names=patterns, free_before_read=free)
        assert (state[name] == launch.rank).all()
        patterns.append("of nobody")
        causes = failure_of(launch, by_load, state, path, names=patterns, free_before_read=free)
        (cause,) = causes.values()
        assert isinstance(cause, ValueError)
        assert str(cause) == "no name in the state dict matches 'of nobody'"


# --- roots ---------------------------------------------------------------------------------------


def case_all_ranks_load_the_newest_step_of_a_root_unless_it_changes_meanwhile(
    launch: Launch,
) -> None:
    root = launch.path("run")
    on_rank_0(launch, lambda: saved(LocalSteps(root), 1))
    for load in LOADERS:
        state = {"w": torch.zeros(5, 3)}
        load(state, root)
        assert state["w"][0].tolist() == [1.0] * 3
    for step, load in enumerate(LOADERS, 2):
        state = {"w": torch.zeros(5, 3)}
        with changed_after_rank_0_looked(
            launch, Source, str(step), partial(saved, LocalSteps(root), step)
        ):
            causes = failure_of(launch, load, state, root)
        assert "ranks have read the metadata of different saves" in str(causes[0])
        assert not state["w"].any()


def case_ranks_wait_until_all_of_them_see_the_newest_step(launch: Launch) -> None:
    root = launch.path("run")
    on_rank_0(launch, lambda: (saved(LocalSteps(root), 1), saved(LocalSteps(root), 2, 2.0)))
    stale = iter(["0000000002"] if launch.rank == 1 else [])
    real = LocalFolder.markers

    def markers(folder: LocalFolder) -> dict[str, dict[str, Any] | None]:
        missing = next(stale, "")
        return {name: marker for name, marker in real(folder).items() if name != missing}

    state = {"w": torch.zeros(5, 3)}
    with (
        mock.patch.object(LocalFolder, "markers", markers),
        mock.patch.object(_core.Directory, "is_local", False),
    ):
        torch_ckpt.load(state, root)
    assert state["w"][0].tolist() == [2.0] * 3


def case_ranks_wait_until_all_of_them_see_the_newest_save(launch: Launch) -> None:
    path = launch.path()
    former = launch.path("former")
    save({"w": torch.ones(5, 3)}, former)
    save({"w": torch.full((5, 3), 2.0)}, path)
    stale = iter([former] if launch.rank == 1 else [])
    real = LocalFolder.read

    def read(folder: LocalFolder, name: str, limit: int) -> bytes:
        seen = next(stale, "") if name == METADATA_NAME else ""
        return real(LocalFolder(seen) if seen else folder, name, limit)

    state = {"w": torch.zeros(5, 3)}
    with (
        mock.patch.object(LocalFolder, "read", read),
        mock.patch.object(_core.Directory, "is_local", False),
    ):
        torch_ckpt.load(state, path, names=iter(["w"]))
    assert state["w"][0].tolist() == [2.0] * 3


def case_ranks_load_a_root_that_is_local_on_one_host_only(launch: Launch) -> None:
    root = launch.path("run")
    on_rank_0(launch, lambda: saved(LocalSteps(root), 1))
    state = {"w": torch.zeros(5, 3)}
    with mock.patch.object(_core.Directory, "is_local", launch.rank == 0):
        torch_ckpt.load(state, root)
    assert state["w"][0].tolist() == [1.0] * 3


def case_an_error_of_one_rank_before_a_load_with_a_planner_is_raised_on_all(
    launch: Launch,
) -> None:
    path = launch.path()
    save({"w": torch.ones(2)}, path)
    other = launch.path("absent") if launch.rank == 1 else path
    state = {"w": torch.zeros(2), "o": torch.optim.SGD([torch.zeros(2)], momentum=0.9)}
    if launch.rank != 1:
        del state["o"]
    planner = dcp.DefaultLoadPlanner()
    causes = failure_of(launch, torch_ckpt.load, state, other, planner=planner)
    assert set(causes) == {1}
    assert "this optimizer has no state yet" in str(causes[1])


def case_an_error_of_one_rank_before_a_save_with_a_planner_is_raised_on_all(
    launch: Launch,
) -> None:
    def state() -> StateDict:
        if launch.rank == 1:
            raise OSError(f"rank {launch.rank} cannot read its state")
        return {"w": torch.ones(2)}

    planner = dcp.DefaultSavePlanner()
    causes = failure_of(launch, torch_ckpt.save, state, launch.path("new"), planner=planner)
    assert set(causes) == {1}
    assert "rank 1 cannot read its state" in str(causes[1])


test_on_ranks = on_ranks(globals())
