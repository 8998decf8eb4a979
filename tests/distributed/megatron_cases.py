"""Several ranks that save in Megatron's shape; run under torchrun by test_megatron_ranks.py.

As cases.py, whose launches these are. Each rank trains on its own where a case does not say
otherwise: there is no collective between two polls that would keep the ranks in step.
"""

from __future__ import annotations

import dataclasses
import errno
import gc
import random
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed import cases
from tests.distributed.async_cases import overwrite, replaced, users_of_process_groups
from tests.distributed.cases import (
    OURS,
    PATIENCE_SECONDS,
    STOCK,
    Launch,
    StateDict,
    failure_of,
    full_disk_on,
    load,
    mesh_1d,
    tensor_of,
)
from tests.support import assert_equal, data_files
from torch_ckpt import Background, async_plan, nvrx
from torch_ckpt.calls import _Agreement, _Call
from torch_ckpt.errors import CheckpointError, NotCommitted
from torch_ckpt.generations import remove_leftovers
from torch_ckpt.lockstep import Lockstep
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from torch_ckpt.metadata import read_metadata

READERS = (OURS[1], STOCK[1], CachedMetadataFileSystemReader)

# --- a training in Megatron's shape --------------------------------------------------------------


class Decentralized(dcp.DefaultSavePlanner):
    """As Megatron's: each rank knows by itself what it is to write, and no two write the same."""

    can_run_decentralized_global_plan = True

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        rank, size = dist.get_rank(), dist.get_world_size()

        def is_mine(fqn: str) -> bool:
            return fqn.startswith("own.") or zlib.crc32(fqn.encode()) % size == rank

        items = [i for i in plan.items if i.type == WriteItemType.SHARD or is_mine(i.index.fqn)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


PLANNERS: tuple[Callable[[], SavePlanner], ...] = (Decentralized, dcp.DefaultSavePlanner)


def rows_of(launch: Launch, whole: torch.Tensor) -> ShardedTensor:
    """A ShardedTensor of which each rank has the same number of rows."""
    count = whole.shape[0] // launch.size
    sizes = [count, *whole.shape[1:]]

    def place(rank: int) -> ShardMetadata:
        offsets = [count * rank] + [0] * (whole.dim() - 1)
        return ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")

    mine = whole[count * launch.rank : count * (launch.rank + 1)].clone()
    places = [place(rank) for rank in range(launch.size)]
    metadata = ShardedTensorMetadata(places, whole.shape, ShardProperties(dtype=whole.dtype))
    shards = [TensorShard(mine, place(launch.rank))]
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def wholes_of(step: int) -> dict[str, torch.Tensor]:
    """What is sharded over the ranks, at a step."""
    moments = tensor_of("moments", 48, 33).nan_to_num() + step
    return {"weight": tensor_of("weight", 37, 21), "bias": moments[:, 0].clone(), "m": moments}


def state_at(launch: Launch, step: int) -> StateDict:
    wholes = wholes_of(step)
    mesh = mesh_1d(launch)
    return {
        "model": {
            "weight": distribute_tensor(wholes["weight"], mesh, [Shard(0)]),
            "bias": distribute_tensor(wholes["bias"], mesh, [Shard(0)]),
            "norm": torch.full((11,), float(step)),
        },
        "optimizer": {"exp_avg": rows_of(launch, wholes["m"]), "lr": 1.0 / step},
        "step": step,
        "own": {f"rng of {launch.rank}": torch.arange(step, step + 9), str(launch.rank): step},
    }


def gathered(state: StateDict) -> StateDict:
    """The same with the local shards as plain tensors."""

    def local(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: local(inner) for key, inner in value.items()}
        if isinstance(value, DTensor):
            return value.full_tensor()
        if isinstance(value, ShardedTensor):
            return [shard.tensor for shard in value.local_shards()]
        return value

    return {key: local(value) for key, value in state.items()}


def assert_saved(launch: Launch, path: Path, step: int, own: bool = True) -> None:
    """Fails where a directory has not the state of a step, by our readers and by torch's."""
    for reader in READERS:
        loaded, expected = state_at(launch, step + 100), state_at(launch, step)
        overwrite(loaded["model"])
        loaded = {**state_at(launch, step + 100)}
        if not own:
            del loaded["own"], expected["own"]
        load(loaded, path, reader)
        assert_equal(gathered(loaded), gathered(expected))


class Site:
    """What is around the writer in a training: the plans that are kept from save to save.

    Args:
        planner: makes a planner for each save.
        caching: keep them.
        options: of the writers.
    """

    def __init__(
        self,
        planner: Callable[[], SavePlanner] = Decentralized,
        caching: bool = False,
        **options: Any,
    ) -> None:
        self.planner = planner
        self.caching = caching
        self.options = {"thread_count": 2, "timeout": PATIENCE_SECONDS, **options}
        self.central: SavePlan | None = None
        self.local: SavePlan | None = None
        self.is_as_cached = False
        self.is_as_loaded = False
        self.metadata: Any = None
        self.loaded_plans: list[SavePlan] | None = None

    def restarted_from(self, path: Path) -> Site:
        """What another process of the training makes, that loads a checkpoint first."""
        CachedMetadataFileSystemReader.clear_metadata_cache()
        site = Site(self.planner, self.caching, **self.options)
        site.metadata = CachedMetadataFileSystemReader(path).read_metadata()
        site.loaded_plans = getattr(site.metadata, "all_local_plans", None)
        return site

    def request(
        self, state: StateDict, path: Path, *finalize_fns: Callable[[], Any], **options: Any
    ) -> AsyncRequest:
        """Plans a save; ``finalize_fns`` come after that of the save."""
        writer = FileSystemWriterAsync(path, **{**self.options, **options})
        is_valid = self.caching and self.is_as_cached
        planned = save_state_dict_async_plan(
            state,
            writer,
            planner=self.planner(),
            cached_ckpt_structure=(self.central, self.local, is_valid) if self.caching else None,
            loaded_all_plans=self.loaded_plans,
        )
        finalizing, self.central, self.local, self.is_as_cached, self.is_as_loaded = planned
        writer, metadata, wrapper = finalizing
        if metadata is not None:
            self.metadata = metadata
        elif dist.get_rank() == 0:
            metadata = self.metadata
        function, preload, arguments = writer.get_save_function_and_args()
        save = partial(save_state_dict_async_finalize, writer, metadata, wrapper)
        return AsyncRequest(function, arguments, [save, *finalize_fns], preload_fn=preload)


def queue_of(timeout: float = PATIENCE_SECONDS) -> AsyncCallsQueue:
    return AsyncCallsQueue(persistent=True, timeout=timeout)


def save(launch: Launch, path: Path, step: int = 1, site: Site | None = None) -> None:
    """One save from its plan to its commit."""
    queue = queue_of()
    queue.schedule_async_request((site or Site()).request(state_at(launch, step), path))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def train_a_step() -> None:
    """Takes a while: polls alone would keep the quiet threads from the processors."""
    time.sleep(0.002)


def finalized_at(queue: AsyncCallsQueue, call: int = 0) -> int:
    """Polls until a call is finalized; the number of polls that it took."""
    for poll in range(1, 1_000_000):
        if call in queue.maybe_finalize_async_calls():
            return poll
        train_a_step()
    raise AssertionError("it was not finalized")


def of_all(launch: Launch, value: Any) -> list[Any]:
    values: list[Any] = [None] * launch.size
    dist.all_gather_object(values, value)
    return values


def last_of(launch: Launch) -> int:
    """The rank that something happens to."""
    return launch.size - 1


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir()) if path.exists() else []


def assert_nothing_left(path: Path) -> None:
    """Fails where a save that failed, and whose writers are gone on all ranks, has left a file."""
    gc.collect()
    dist.barrier()
    assert names_in(path) == []


@contextmanager
def slow_disk(launch: Launch, rank: int) -> Iterator[Background | None]:
    """Options of the writers: on one rank all but the first bytes do not get to the disk."""
    yield Background(max_bytes_per_second=1) if launch.rank == rank else None


def megabytes_of(launch: Launch, count: int = 12) -> StateDict:
    """Several chunks on each rank."""
    return {"own": {f"t{launch.rank}": torch.arange(count << 18, dtype=torch.int32)}}


# --- what is saved -------------------------------------------------------------------------------


def case_a_training_saves_every_few_steps_and_polls_each_step(launch: Launch) -> None:
    for planner in PLANNERS:
        queue, site, done = queue_of(), Site(planner), []
        for step in range(1, 7):
            state = state_at(launch, step)
            if step % 2 == 0:
                path = launch.path(planner.__name__, str(step))
                request = site.request(state, path, partial(done.append, step))
                request.add_finalize_fn(partial(done.append, -step))
                assert queue.schedule_async_request(request) == step // 2 - 1
                # The next step of the training changes the parameters at once.
                overwrite(state)
            queue.maybe_finalize_async_calls()
        queue.close()
        assert done == [2, -2, 4, -4, 6, -6]
        assert queue.get_num_unfinalized_calls() == 0
        for step in (2, 4, 6):
            assert_saved(launch, launch.path(planner.__name__, str(step)), step)


def case_what_this_number_of_ranks_saves_for_others(launch: Launch) -> None:
    for planner in PLANNERS:
        path = launch.workdir / f"megatron-{launch.size}" / planner.__name__
        save(launch, path, 7, Site(planner))


def case_what_other_numbers_of_ranks_saved_is_loaded(launch: Launch) -> None:
    sources = sorted(launch.workdir.glob("megatron-*/*"))
    assert len(sources) >= 4
    for source in sources:
        assert_saved(launch, source, 7, own=False)


def case_a_source_may_change_as_soon_as_its_save_is_scheduled(launch: Launch) -> None:
    path, queue, state = launch.path(), queue_of(), state_at(launch, 3)
    request = Site().request(state, path)
    queue.schedule_async_request(request)
    overwrite(state)
    queue.close()
    assert_saved(launch, path, 3)


def case_data_files_are_byte_for_byte_those_of_stock_torch(launch: Launch) -> None:
    for planner in PLANNERS:
        stock, ours = launch.path(planner.__name__, "stock"), launch.path(planner.__name__, "ours")
        writer = dcp.FileSystemWriter(stock, thread_count=1)
        dcp.save(state_at(launch, 5), storage_writer=writer, planner=planner())
        save(launch, ours, 5, Site(planner, thread_count=1))
        dist.barrier()
        names = [file.name for file in data_files(stock)]
        assert len(names) == launch.size
        assert [file.name for file in data_files(ours)] == names
        for name in names:
            assert (ours / name).read_bytes() == (stock / name).read_bytes(), name


def case_what_begins_with_the_separation_hint_lies_in_files_of_its_own(launch: Launch) -> None:
    path = launch.path()
    save(launch, path, 2, Site(separation_hint="optimizer", thread_count=4))
    places = read_metadata(path).storage_data
    for index, info in places.items():
        is_apart = info.relative_path.startswith("optimizer__")
        assert is_apart == index.fqn.startswith("optimizer"), (index, info)
    assert {info.relative_path.startswith("optimizer") for info in places.values()} == {True, False}
    assert_saved(launch, path, 2)


def case_ranks_with_nothing_to_write_take_part(launch: Launch) -> None:
    for planner in PLANNERS:
        for writer in {0, last_of(launch)}:
            path = launch.path(planner.__name__, str(writer))
            own = {"own": {"only": tensor_of("only", 20, 30)}}
            state = own if launch.rank == writer else {"own": {}}
            request = Site(planner).request(state, path)
            nothing = (request.async_fn, request.preload_fn, request.async_fn_args)
            assert (nothing == (None, None, [])) is (launch.rank != writer)
            queue = queue_of()
            queue.schedule_async_request(request)
            queue.close()
            for reader in READERS:
                loaded = {"own": {"only": torch.zeros(20, 30)}}
                load(loaded, path, reader)
                assert_equal(loaded, own)


def case_dcp_saves_by_this_writer(launch: Launch) -> None:
    for planner in PLANNERS:
        path = launch.path(planner.__name__)
        for step in (1, 2):
            cases.save(state_at(launch, step), path, FileSystemWriterAsync, planner=planner())
            dist.barrier()
            assert_saved(launch, path, step)
            named = {info.relative_path for info in read_metadata(path).storage_data.values()}
            assert set(names_in(path)) == named | {".metadata"}
            dist.barrier()


def case_a_request_may_be_carried_out_at_once(launch: Launch) -> None:
    path, done = launch.path(), []
    Site().request(state_at(launch, 4), path, partial(done.append, 1)).execute_sync()
    assert done == [1]
    assert_saved(launch, path, 4)
    with full_disk_on(last_of(launch)):
        request = Site().request(state_at(launch, 4), launch.path("full"), partial(done.append, 2))
        causes = failure_of(launch, request.execute_sync)
    assert set(causes) == {last_of(launch)}
    assert done == [1]
    del request
    assert_nothing_left(launch.path("full"))


def case_another_rank_than_the_first_may_coordinate(launch: Launch) -> None:
    for planner in PLANNERS:
        path, queue = launch.path(planner.__name__), queue_of()
        for step, disk in ((1, full_disk_on(last_of(launch))), (2, nullcontext())):
            writer = FileSystemWriterAsync(path, thread_count=2, timeout=PATIENCE_SECONDS)
            finalizing = save_state_dict_async_plan(
                state_at(launch, step),
                writer,
                coordinator_rank=last_of(launch),
                planner=planner(),
            )[0]
            assert (finalizing[1] is not None) is (launch.rank == last_of(launch))
            function, preload, arguments = writer.get_save_function_and_args()
            finalize = partial(save_state_dict_async_finalize, *finalizing)
            request = AsyncRequest(function, arguments, [finalize], preload_fn=preload)
            with disk:
                queue.schedule_async_request(request)
                if step == 1:
                    causes = failure_of(launch, queue.close)
            if step == 2:
                queue.close()
                assert_saved(launch, path, 2)
            else:
                assert set(causes) == {last_of(launch)}
                del request, finalize, finalizing, writer
                assert_nothing_left(path)


def case_ranks_of_a_subgroup_save_and_the_others_do_not(launch: Launch) -> None:
    if launch.size == 1:
        return
    half = launch.size // 2
    sides = [list(range(half)), list(range(half, launch.size))]
    groups = [dist.new_group(side) for side in sides]
    side = launch.rank // half
    path, queue = launch.path(str(side)), AsyncCallsQueue(process_group=groups[side])
    state = {f"of {launch.rank}": tensor_of(f"of {launch.rank}", 30, 7), "step": 1}
    writer = FileSystemWriterAsync(path, thread_count=1)
    finalizing = save_state_dict_async_plan(state, writer, groups[side])[0]
    function, preload, arguments = writer.get_save_function_and_args()
    finalize = partial(save_state_dict_async_finalize, *finalizing)
    queue.schedule_async_request(AsyncRequest(function, arguments, [finalize], preload_fn=preload))
    assert finalized_at(queue) > 0
    expected = {f"of {rank}" for rank in sides[side]} | {"step"}
    assert set(read_metadata(path).state_dict_metadata) == expected
    for reader in READERS:
        loaded = {f"of {launch.rank}": torch.zeros(30, 7), "step": 0}
        load(loaded, path, reader, process_group=groups[side])
        assert_equal(loaded, state)


# --- plans ---------------------------------------------------------------------------------------


@contextmanager
def meetings_watched() -> Iterator[list[str]]:
    """What ranks meet for."""
    seen: list[str] = []

    class Watched(async_plan._Meetings):
        def reduce_scatter(self, step: str, *args: Any) -> Any:
            seen.append(step)
            return super().reduce_scatter(step, *args)

        def all_reduce(self, step: str, *args: Any) -> Any:
            seen.append(step)
            return super().all_reduce(step, *args)

    with replaced(async_plan, "_Meetings", Watched):
        yield seen


def case_a_decentralized_plan_is_made_by_each_rank_and_kept_in_the_metadata(
    launch: Launch,
) -> None:
    path, planned = launch.path(), []

    class Planner(Decentralized):
        def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
            planned.append("own")
            return super().create_decentralized_global_plan(local_plan)

        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            planned.append("metadata")
            return super().create_global_plan(all_plans)

    site = Site(Planner)
    save(launch, path, 1, site)
    assert planned == (["own", "metadata"] if launch.rank == 0 else ["own"])
    assert site.central is not None
    assert site.central.storage_data.prefix == f"__{launch.rank}_"
    for reader in READERS:
        plans = reader(path).read_metadata().all_local_plans
        assert len(plans) == launch.size
        assert site.local is not None
        names = [item.index for item in plans[launch.rank].items]
        assert names == [item.index for item in site.local.items]


def case_a_central_plan_is_made_by_the_coordinator(launch: Launch) -> None:
    path, site = launch.path(), Site(dcp.DefaultSavePlanner)
    save(launch, path, 1, site)
    assert site.central is not None
    # What all ranks have is written by one.
    names = [item.index.fqn for item in site.central.items]
    assert sum(of_all(launch, names.count("model.norm"))) == 1
    assert not hasattr(read_metadata(path), "all_local_plans")


def case_plans_that_two_saves_had_are_not_exchanged_again(launch: Launch) -> None:
    for planner in PLANNERS:
        site = Site(planner, caching=True)
        with meetings_watched() as met:
            for step in range(1, 5):
                path = launch.path(planner.__name__, str(step))
                save(launch, path, step, site)
                assert site.is_as_cached is (step > 1)
                assert_saved(launch, path, step)
        assert met == ["plan", "write", "plan", "write", "write", "write"]


def case_cached_plans_write_into_one_directory_again_and_again(launch: Launch) -> None:
    path, site = launch.path(), Site(caching=True)
    for step in range(1, 5):
        save(launch, path, step, site)
        assert_saved(launch, path, step)
        dist.barrier()
    named = {info.relative_path for info in read_metadata(path).storage_data.values()}
    assert set(names_in(path)) == named | {".metadata"}


def case_files_by_a_cached_plan_are_nobodys_to_remove_before_the_commit(launch: Launch) -> None:
    path, site, queue = launch.path(), Site(caching=True), queue_of()
    for step in (1, 2):
        save(launch, path, step, site)
    state = state_at(launch, 3)
    if launch.rank != 0:
        # Nothing is exchanged: the coordinator does not know of it yet.
        queue.schedule_async_request(site.request(state, path))
        queue._calls[0].ended.wait()
    dist.barrier()
    removed = []
    if launch.rank == 0:
        with suppress(CheckpointError):
            removed = remove_leftovers(path)
    assert removed == []
    dist.barrier()
    if launch.rank == 0:
        queue.schedule_async_request(site.request(state, path))
    queue.close()
    assert_saved(launch, path, 3)


def case_a_save_whose_file_somebody_has_removed_is_not_committed(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site().request(state_at(launch, 1), path))
    queue._calls[0].ended.wait()
    dist.barrier()
    if launch.rank == 0:
        (path / names_in(path)[-1]).unlink()
    dist.barrier()
    causes = failure_of(launch, queue.close)
    assert set(causes) == {0}
    assert "somebody has removed or changed it" in str(causes[0])
    assert_nothing_left(path)


def case_after_a_restart_the_loaded_metadata_is_used_again(launch: Launch) -> None:
    first = Site(caching=True)
    save(launch, launch.path("1"), 1, first)
    site = first.restarted_from(launch.path("1"))
    with meetings_watched() as met:
        for step in range(2, 6):
            path = launch.path(str(step))
            save(launch, path, step, site)
            assert site.is_as_loaded is (step < 4)
            assert_saved(launch, path, step)
            assert len(read_metadata(path).all_local_plans) == launch.size
    assert met == ["plan", "write", "plan", "write", "write", "write"]


def changed_on(launch: Launch, rank: int, step: int) -> StateDict:
    """The state of a step, with a tensor more on one rank."""
    state = state_at(launch, step)
    if launch.rank == rank:
        state["own"]["added"] = tensor_of("added", 4)
    return state


def case_a_change_on_one_rank_makes_no_rank_take_the_plans_for_the_cached_ones(
    launch: Launch,
) -> None:
    for planner in PLANNERS:
        site = Site(planner, caching=True)
        for number, state in enumerate(
            (state_at(launch, 1), changed_on(launch, last_of(launch), 2), state_at(launch, 3))
        ):
            path, queue = launch.path(planner.__name__, str(number)), queue_of()
            queue.schedule_async_request(site.request(state, path))
            queue.close()
            assert not site.is_as_cached
            assert ("own.added" in read_metadata(path).state_dict_metadata) is (number == 1)
            assert_saved(launch, path, number + 1)


def case_a_change_on_one_rank_fails_a_save_by_cached_plans_on_all(launch: Launch) -> None:
    for rank in {0, last_of(launch)}:
        site = Site(caching=True)
        for step in (1, 2):
            save(launch, launch.path(f"{rank}", f"{step}"), step, site)
        path, queue = launch.path(f"{rank}", "3"), queue_of()
        queue.schedule_async_request(site.request(changed_on(launch, rank, 3), path))
        causes = failure_of(launch, queue.close)
        assert set(causes) == {rank}
        assert "own.added" in str(causes[rank])
        assert "plan without cached_ckpt_structure" in str(causes[rank])
        assert_nothing_left(path)
        site = Site(caching=True)
        queue.schedule_async_request(site.request(changed_on(launch, rank, 3), path))
        queue.close()
        assert_saved(launch, path, 3)


def case_a_change_on_one_rank_since_the_loaded_checkpoint_is_saved(launch: Launch) -> None:
    first = Site(caching=True)
    save(launch, launch.path("1"), 1, first)
    for rank in {0, last_of(launch)}:
        path, queue = launch.path(f"changed on {rank}"), queue_of()
        site = first.restarted_from(launch.path("1"))
        queue.schedule_async_request(site.request(changed_on(launch, rank, 2), path))
        queue.close()
        assert not site.is_as_loaded
        assert "own.added" in read_metadata(path).state_dict_metadata
        assert_saved(launch, path, 2)


def case_a_rank_without_the_loaded_plans_makes_all_ranks_plan(launch: Launch) -> None:
    first = Site(caching=True)
    save(launch, launch.path("1"), 1, first)
    for rank in {0, last_of(launch)}:
        site = first.restarted_from(launch.path("1"))
        if launch.rank == rank:
            site.loaded_plans = None
        save(launch, launch.path(f"without on {rank}"), 2, site)
        assert not site.is_as_loaded
        assert_saved(launch, launch.path(f"without on {rank}"), 2)


def case_a_plan_that_fails_on_one_rank_fails_on_all(launch: Launch) -> None:
    class Failing(Decentralized):
        def create_local_plan(self) -> SavePlan:
            if dist.get_rank() == last_of(launch):
                raise KeyError("on purpose")
            return super().create_local_plan()

    path = launch.path()
    causes = failure_of(launch, lambda: Site(Failing).request(state_at(launch, 1), path))
    assert {rank: type(cause) for rank, cause in causes.items()} == {last_of(launch): KeyError}
    assert_nothing_left(path)
    save(launch, path)
    assert_saved(launch, path, 1)


def case_values_that_are_not_found_on_one_rank_fail_the_save_of_all(launch: Launch) -> None:
    class Failing(Decentralized):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == last_of(launch):
                raise KeyError("on purpose")
            return super().resolve_data(write_item)

    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site(Failing).request(state_at(launch, 1), path))
    causes = failure_of(launch, queue.close)
    assert set(causes) == {last_of(launch)}
    assert "on purpose" in str(causes[last_of(launch)])
    assert_nothing_left(path)
    save(launch, path)
    assert_saved(launch, path, 1)


def case_plans_are_cached_in_the_other_library_s_shape(launch: Launch) -> None:
    cache = nvrx.CheckpointMetadataCache()
    for step in range(1, 8):
        path, queue = launch.path(str(step)), nvrx.AsyncCallsQueue(timeout=PATIENCE_SECONDS)
        if step == 5:
            # A restart.
            cache = nvrx.CheckpointMetadataCache()
            metadata = CachedMetadataFileSystemReader(launch.path("4")).read_metadata()
            cache.set_cached_global_metadata(metadata)
        writer = nvrx.FileSystemWriterAsync(path, thread_count=2, timeout=PATIENCE_SECONDS)
        finalizing = nvrx.save_state_dict_async_plan(
            state_at(launch, step),
            writer,
            planner=Decentralized(),
            enable_cache=True,
            metadata_cache=cache,
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = partial(nvrx.save_state_dict_async_finalize, *finalizing)
        request = AsyncRequest(function, arguments, [finalize], preload_fn=preload)
        queue.schedule_async_request(request)
        queue.close()
        assert cache.validated_cache_reuse is (step not in (1, 5))
        assert cache.validated_loaded_metadata_reuse is (step in (5, 6))
        assert_saved(launch, path, step)


# --- polls ---------------------------------------------------------------------------------------


def case_neither_a_save_nor_a_poll_uses_a_process_group_or_a_device(launch: Launch) -> None:
    def used(*_: Any, **__: Any) -> None:
        raise AssertionError("a device was used")

    path, state, queue = launch.path(), state_at(launch, 1), queue_of()
    names = ("synchronize", "current_stream", "_lazy_init")
    with users_of_process_groups() as users, suppress_all(torch.cuda, names, used):
        queue.schedule_async_request(Site().request(state, path))
        finalized_at(queue)
    assert users == set()
    assert_saved(launch, path, 1)


@contextmanager
def suppress_all(owner: Any, names: tuple[str, ...], value: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in names}
    for name in names:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, original in before.items():
            setattr(owner, name, original)


class Latches:
    """Keys that ranks wait for, apart from the process group."""

    def __init__(self, launch: Launch) -> None:
        store = dist.distributed_c10d._get_default_store().clone()
        self.store = dist.PrefixStore(f"latches of {launch.case}", store)

    def open(self, name: str) -> None:
        self.store.set(name, "open")

    def wait(self, name: str) -> None:
        self.store.wait([name])


def waits_for(event: threading.Event, error: BaseException | None = None) -> AsyncRequest:
    """A request whose function ends when it may."""

    def function() -> None:
        assert event.wait(PATIENCE_SECONDS)
        if error is not None:
            raise error

    return AsyncRequest(function, [], [])


def polls_until_told(queue: AsyncCallsQueue, before_poll: Callable[[int], Any]) -> tuple[int, str]:
    """The number of the poll that finalized or failed the next call, and which of both it was."""
    for poll in range(1, 1_000_000):
        before_poll(poll)
        try:
            if queue.maybe_finalize_async_calls():
                return poll, "finalized"
        except CheckpointException as error:
            return poll, f"failed on {sorted(error.failures)}"
        train_a_step()
    raise AssertionError("it was not told")


def case_ranks_that_are_steps_ahead_finalize_at_the_same_poll(launch: Launch) -> None:
    latches = Latches(launch)
    for ahead in range(launch.size):
        for fails in (False, True):
            queue, event, key = queue_of(), threading.Event(), f"{ahead}/{fails}"
            is_ahead = launch.rank == ahead
            error = OSError(errno.EIO, "on purpose") if fails and is_ahead else None
            queue.schedule_async_request(waits_for(event, error))

            def before(
                poll: int,
                is_ahead: bool = is_ahead,
                event: threading.Event = event,
                key: str = key,
            ) -> None:
                if poll == 9 or not is_ahead:
                    event.set()
                if is_ahead and poll == 9:
                    latches.open(key)
                elif not is_ahead and poll == 1:
                    latches.wait(key)

            told = of_all(launch, polls_until_told(queue, before))
            assert len(set(told)) == 1, told
            assert told[0][1] == (f"failed on [{ahead}]" if fails else "finalized")


def case_ranks_at_any_speed_finalize_at_the_same_poll(launch: Launch) -> None:
    seed = 20
    for number in range(seed, seed + 12):
        numbers = random.Random(f"{number} on {launch.rank}")
        queue, requests, polls = queue_of(), [threading.Event() for _ in range(3)], []
        failing = number % 4
        for call, event in enumerate(requests):
            error = OSError(errno.EIO, "on purpose") if call == failing else None
            if launch.rank != number % launch.size:
                error = None
            queue.schedule_async_request(waits_for(event, error))
        ends = sorted(numbers.randrange(1, 60) for _ in requests)
        told: list[tuple[int, str]] = []

        def before(
            _: int,
            polls: list[int] = polls,
            ends: list[int] = ends,
            requests: list[threading.Event] = requests,
        ) -> None:
            polls.append(1)
            for end, event in zip(ends, requests, strict=True):
                if len(polls) >= end:
                    event.set()

        while queue.get_num_unfinalized_calls():
            _, how = polls_until_told(queue, before)
            told.append((len(polls), how))
        everywhere = of_all(launch, told)
        assert all(of_rank == told for of_rank in everywhere), (number, everywhere)


def case_a_failure_that_one_rank_hears_of_last_is_raised_at_the_same_poll(launch: Launch) -> None:
    if launch.size == 1:
        return
    queue, latches, ended = queue_of(), Latches(launch), threading.Event()
    over = Lockstep.over

    def late(lockstep: Lockstep) -> None:
        if launch.rank == 0:
            for rank in range(1, launch.size):
                latches.wait(f"rank {rank} was told")
        over(lockstep)

    error = OSError(errno.EIO, "on purpose") if launch.rank == last_of(launch) else None
    ended.set()
    with replaced(Lockstep, "over", late):
        queue.schedule_async_request(waits_for(ended, error))
        told = polls_until_told(queue, lambda _: None)
        latches.open(f"rank {launch.rank} was told")
    everywhere = of_all(launch, told)
    assert len(set(everywhere)) == 1, everywhere
    assert told[1] == f"failed on [{last_of(launch)}]"


def case_what_ended_before_the_first_poll_is_finalized_by_the_second(launch: Launch) -> None:
    parts = threading.Semaphore(0)
    part = Lockstep.part

    def counted(lockstep: Lockstep) -> None:
        part(lockstep)
        parts.release()

    queue, ended = queue_of(), threading.Event()
    ended.set()
    with replaced(Lockstep, "part", counted):
        for call in range(3):
            queue.schedule_async_request(waits_for(ended))
            assert queue._calls[0].ended.wait(PATIENCE_SECONDS)
            finalized = queue.maybe_finalize_async_calls()
            if launch.size == 1:
                assert finalized == [call]
            else:
                assert parts.acquire(timeout=PATIENCE_SECONDS)
                dist.barrier()
                finalized += queue.maybe_finalize_async_calls()
            assert of_all(launch, finalized) == [[call]] * launch.size


def case_ranks_that_poll_all_the_time_and_one_that_polls_seldom_finalize_soon(
    launch: Launch,
) -> None:
    queue, event, polls = queue_of(), threading.Event(), 0
    queue.schedule_async_request(waits_for(event))
    while not queue.maybe_finalize_async_calls():
        polls += 1
        if launch.rank == last_of(launch):
            time.sleep(0.02)
        if launch.rank != last_of(launch) or polls >= 10:
            event.set()
    # The others had the time for thousands.
    assert launch.size == 1 or polls < 40
    assert of_all(launch, polls) == [polls] * launch.size


def case_a_close_finalizes_the_calls_after_one_that_failed(launch: Launch) -> None:
    queue, path, ended = queue_of(), launch.path(), threading.Event()
    ended.set()
    error = OSError(errno.EIO, "on purpose") if launch.rank == last_of(launch) else None
    queue.schedule_async_request(waits_for(ended, error))
    queue.schedule_async_request(Site().request(state_at(launch, 1), path))
    causes = failure_of(launch, queue.close)
    assert set(causes) == {last_of(launch)}
    assert queue.get_num_unfinalized_calls() == 0
    assert_saved(launch, path, 1)


def case_two_saves_in_flight_are_finalized_in_their_order(launch: Launch) -> None:
    queue, site, done = queue_of(), Site(), []
    paths = [launch.path("1"), launch.path("2"), launch.path("1")]
    for step, path in enumerate(paths, start=1):
        request = site.request(state_at(launch, step), path, partial(done.append, step))
        assert queue.schedule_async_request(request) == step - 1
    assert queue.get_num_unfinalized_calls() == 3
    polls = [finalized_at(queue, 2)]
    assert done == [1, 2, 3]
    assert len(set(of_all(launch, polls[0]))) == 1
    assert_saved(launch, launch.path("2"), 2)
    assert_saved(launch, launch.path("1"), 3)
    for path in paths:
        named = {info.relative_path for info in read_metadata(path).storage_data.values()}
        assert set(names_in(path)) == named | {".metadata"}


def case_calls_that_do_not_match_are_found(launch: Launch) -> None:
    if launch.size == 1:
        return
    queue, ended = queue_of(), threading.Event()
    ended.set()
    if launch.rank == last_of(launch):
        queue.schedule_async_request(waits_for(ended))
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    for blocking in (True, False):
        queue.schedule_async_request(waits_for(ended))
        causes = failure_of(
            launch,
            (lambda: queue.maybe_finalize_async_calls(blocking=True))
            if blocking
            else (lambda: finalized_at(queue)),
        )
        assert set(causes) == {0}
        first, last = ("call 0", "call 1") if blocking else ("call 1", "call 2")
        assert f"rank 0 {first}" in str(causes[0])
        assert f"rank {launch.size - 1} {last}" in str(causes[0])
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


# --- failures ------------------------------------------------------------------------------------


def case_a_bucket_that_fails_on_one_rank_fails_the_save_of_all(launch: Launch) -> None:
    for planner in PLANNERS:
        path, queue, done = launch.path(planner.__name__), queue_of(), []
        large = {"own": {f"{launch.rank}.{i}": tensor_of(f"{i}", 40, 50) for i in range(4)}}
        small = {"step": 1}
        with full_disk_on(last_of(launch)):
            site = Site(planner, thread_count=4)
            request = site.request({**large, **small}, path, partial(done.append, 1))
            queue.schedule_async_request(request)
            causes = failure_of(launch, queue.close)
        assert set(causes) == {last_of(launch)}
        text = str(causes[last_of(launch)])
        assert text.startswith("Worker failure: [Errno 27]"), text
        assert f"{path}/__{last_of(launch)}_" in text
        assert done == []
        del request
        assert_nothing_left(path)
        queue.schedule_async_request(site.request(state_at(launch, 1), path))
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        assert_saved(launch, path, 1)


def case_a_preload_that_fails_on_one_rank_fails_the_call_of_all(launch: Launch) -> None:
    path, queue, done = launch.path(), queue_of(), []
    request = Site().request(state_at(launch, 1), path, partial(done.append, 1))
    if launch.rank == last_of(launch):

        def fail() -> None:
            raise MemoryError("on purpose")

        request = request._replace(preload_fn=fail)
    queue.schedule_async_request(request)
    del request
    told = polls_until_told(queue, lambda _: None)
    assert set(of_all(launch, told)) == {(told[0], f"failed on [{last_of(launch)}]")}
    assert done == []
    assert_nothing_left(path)
    queue.schedule_async_request(Site().request(state_at(launch, 1), path))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert_saved(launch, path, 1)


def case_who_keeps_the_error_of_a_failed_call_keeps_none_of_its_files(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    request = Site().request(state_at(launch, 1), path)
    if launch.rank == last_of(launch):
        # Two arguments are needed where there is a preload function.
        request = request._replace(async_fn_args=[1])
    queue.schedule_async_request(request)
    del request
    kept = []
    try:
        queue.close()
    except CheckpointException as error:
        kept.append(error)
    assert [sorted(error.failures) for error in kept] == [[last_of(launch)]]
    assert_nothing_left(path)


def case_a_finalize_function_that_raises_on_one_rank_ends_its_call_alone(launch: Launch) -> None:
    queue, site, done = queue_of(), Site(), []

    def fail() -> None:
        if launch.rank == last_of(launch):
            raise OSError(errno.EIO, "on purpose")

    for step in (1, 2):
        path = launch.path(str(step))
        request = site.request(state_at(launch, step), path, *([fail] if step == 1 else []))
        request.add_finalize_fn(partial(done.append, step))
        queue.schedule_async_request(request)
    raised, polls = [], 0
    while queue.get_num_unfinalized_calls():
        polls += 1
        try:
            queue.maybe_finalize_async_calls()
        except OSError as error:
            raised.append(error.errno)
        train_a_step()
    assert raised == ([errno.EIO] if launch.rank == last_of(launch) else [])
    assert done == ([2] if launch.rank == last_of(launch) else [1, 2])
    # Nor have the ranks lost step.
    assert len(set(of_all(launch, polls))) == 1
    for step in (1, 2):
        assert_saved(launch, launch.path(str(step)), step)


def case_a_finalize_function_that_raises_does_not_keep_a_blocking_close_from_the_next_call(
    launch: Launch,
) -> None:
    queue, site = queue_of(), Site()

    def fail() -> None:
        if launch.rank == last_of(launch):
            raise OSError(errno.EIO, "on purpose")

    queue.schedule_async_request(site.request(state_at(launch, 1), launch.path("1"), fail))
    queue.schedule_async_request(site.request(state_at(launch, 2), launch.path("2")))
    with suppress(OSError) if launch.rank == last_of(launch) else nullcontext():
        queue.close()
    assert queue.get_num_unfinalized_calls() == 0
    assert_saved(launch, launch.path("2"), 2)


def case_a_rank_that_does_not_come_to_finalize_is_named_and_comes_to_the_next_save(
    launch: Launch,
) -> None:
    if launch.size == 1:
        return
    for absent in (last_of(launch), 0):
        path, queue, site = launch.path(str(absent)), queue_of(), Site(timeout=2.0)
        request = site.request(state_at(launch, 1), path)
        if launch.rank == absent:

            def fail() -> None:
                raise OSError(errno.EIO, "on purpose")

            request.finalize_fns.insert(0, fail)
        queue.schedule_async_request(request)
        try:
            queue.close()
        except CheckpointException as error:
            assert sorted(error.failures) == [absent]  # noqa: PT017
            assert f"rank {absent} gave no sign of life" in str(error)  # noqa: PT017
        except OSError:
            assert launch.rank == absent
        else:
            raise AssertionError("nothing was raised")
        dist.barrier()
        assert not (path / ".metadata").exists()
        del request
        save(launch, path)
        assert_saved(launch, path, 1)


def case_a_rank_that_polls_no_more_does_not_keep_the_others_from_finalizing(
    launch: Launch,
) -> None:
    for silent in {0, last_of(launch)}:
        queue, ended, latches = queue_of(), threading.Event(), Latches(launch)
        ended.set()
        queue.schedule_async_request(waits_for(ended))
        if launch.rank == silent:
            finalized = queue.maybe_finalize_async_calls()
            for rank in set(range(launch.size)) - {silent}:
                latches.wait(f"rank {rank} has finalized without {silent}")
            finalized += queue.maybe_finalize_async_calls(blocking=True)
            assert finalized == [0]
        else:
            finalized_at(queue)
            latches.open(f"rank {launch.rank} has finalized without {silent}")
        assert queue.get_num_unfinalized_calls() == 0
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


def case_a_commit_that_fails_fails_all_ranks(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    request = Site().request(state_at(launch, 1), path)
    if launch.rank == 0:
        (path / ".metadata").mkdir()
    queue.schedule_async_request(request)
    causes = failure_of(launch, queue.close)
    assert {rank: type(cause) for rank, cause in causes.items()} == {0: NotCommitted}
    del request
    gc.collect()
    dist.barrier()
    assert names_in(path) == [".metadata"]
    dist.barrier()
    if launch.rank == 0:
        (path / ".metadata").rmdir()
    dist.barrier()
    save(launch, path)
    assert_saved(launch, path, 1)


def case_a_failed_save_keeps_the_checkpoint_that_it_was_to_replace(launch: Launch) -> None:
    path, queue, site = launch.path(), queue_of(), Site(caching=True)
    for step in (1, 2):
        save(launch, path, step, site)
    dist.barrier()
    before = names_in(path)
    with full_disk_on(last_of(launch)):
        queue.schedule_async_request(site.request(state_at(launch, 3), path))
        failure_of(launch, queue.close)
    gc.collect()
    dist.barrier()
    assert names_in(path) == before
    assert_saved(launch, path, 2)


# --- aborts --------------------------------------------------------------------------------------


def assert_nobody_waits() -> None:
    """Fails where a thread of a call still waits for other ranks."""
    for thread in threading.enumerate():
        if thread.name == "torch_ckpt call":
            thread.join(PATIENCE_SECONDS / 2)
            assert not thread.is_alive()


def assert_aborted(launch: Launch, queue: AsyncCallsQueue, path: Path) -> None:
    """Aborts on all ranks; then nothing is left, and saves work by this queue and by another."""
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls() == []
    assert_nobody_waits()
    gc.collect()
    dist.barrier()
    assert not (path / ".metadata").exists()
    request = Site().request(state_at(launch, 1), path)
    index = queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [index]
    del request
    assert_saved(launch, path, 1)
    dist.barrier()
    named = {info.relative_path for info in read_metadata(path).storage_data.values()}
    assert set(names_in(path)) == named | {".metadata"}
    dist.barrier()
    save(launch, path, 2)
    assert_saved(launch, path, 2)


def case_an_abort_before_the_call_is_scheduled(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    request = Site().request(state_at(launch, 5), path)
    assert request.finalize_fns
    del request
    assert_aborted(launch, queue, path)


def case_an_abort_after_a_poll_on_some_ranks_only(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site().request(state_at(launch, 5), path))
    # One that is alone would finalize it.
    if launch.rank % 2 == 0 and launch.size > 1:
        queue.maybe_finalize_async_calls()
    assert_aborted(launch, queue, path)


def case_an_abort_while_bytes_are_written(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    with slow_disk(launch, last_of(launch)) as background:
        options = {"background": background} if background else {}
        queue.schedule_async_request(Site().request(megabytes_of(launch), path, **options))
    queue.maybe_finalize_async_calls()
    assert queue.get_num_unfinalized_calls() == 1
    assert_aborted(launch, queue, path)


def case_an_abort_when_all_is_written(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site().request(state_at(launch, 5), path))
    assert queue._calls[0].ended.wait(PATIENCE_SECONDS)
    dist.barrier()
    # One that is alone would finalize it.
    if launch.rank % 2 == 0 and launch.size > 1:
        queue.maybe_finalize_async_calls()
    assert_aborted(launch, queue, path)


def case_an_abort_when_all_is_written_of_a_save_that_somebody_holds(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    held = Site().request(state_at(launch, 5), path)
    queue.schedule_async_request(held)
    assert queue._calls[0].ended.wait(PATIENCE_SECONDS)
    queue.close(abort=True)
    # The others' may still be there: they abort in their own time.
    assert not [name for name in names_in(path) if name.startswith(f"__{launch.rank}_")]
    causes = failure_of(launch, held.finalize_fns[0])
    assert set(causes) == set(range(launch.size))
    for cause in causes.values():
        assert "Worker failure: aborted" in str(cause)
    assert not (path / ".metadata").exists()


def case_an_abort_of_which_some_ranks_have_finalized_their_call(launch: Launch) -> None:
    if launch.size == 1:
        return
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site(timeout=2.0).request(state_at(launch, 5), path))
    if launch.rank != last_of(launch):
        # The last rank is aborted before it comes to finalize.
        finalized = False
        with suppress(CheckpointException):
            queue._calls[0].ended.wait(PATIENCE_SECONDS)
            queue._calls[0].request.execute_finalize_fns(validate_matching_call_idx=False)
            finalized = True
        assert not finalized
    assert_aborted(launch, queue, path)


def case_an_abort_by_another_thread_while_a_call_is_staged(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    staging, aborted = threading.Event(), threading.Event()
    request = Site().request(state_at(launch, 5), path)

    def held(preload: Any = request.preload_fn) -> Any:
        staging.set()
        assert aborted.wait(PATIENCE_SECONDS)
        return preload()

    def abort() -> None:
        assert staging.wait(PATIENCE_SECONDS)
        queue.close(abort=True)
        aborted.set()

    thread = threading.Thread(target=abort)
    thread.start()
    queue.schedule_async_request(request._replace(preload_fn=held))
    thread.join()
    del request, held
    assert queue.get_num_unfinalized_calls() == 0
    assert_aborted(launch, queue, path)


def case_an_abort_on_one_rank_is_told_to_those_that_have_polled(launch: Launch) -> None:
    for aborting in {0, last_of(launch)}:
        queue, event = queue_of(), threading.Event()
        queue.schedule_async_request(waits_for(event))
        queue.maybe_finalize_async_calls()
        dist.barrier()
        if launch.rank == aborting:
            call: _Call = queue._calls[0]
            call.abort()
        else:
            event.set()
        causes = failure_of(launch, lambda: queue.maybe_finalize_async_calls(blocking=True))  # noqa: B023
        event.set()
        assert set(causes) == {aborting}
        assert "call 0 was aborted" in str(causes[aborting])
        assert_nobody_waits()
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


def case_an_abort_by_another_thread_while_ranks_wait_for_one_that_does_not_come(
    launch: Launch,
) -> None:
    # Nobody would be given up.
    queue, event, waits = queue_of(timeout=1e6), threading.Event(), threading.Event()
    wait = _Agreement.wait

    def watched(agreement: _Agreement) -> None:
        waits.set()
        wait(agreement)

    def abort() -> None:
        assert waits.wait(PATIENCE_SECONDS)
        queue.close(abort=True)

    queue.schedule_async_request(waits_for(event))
    queue.schedule_async_request(waits_for(event))
    if launch.rank == last_of(launch) and launch.size > 1:
        queue.close(abort=True)
    else:
        thread = threading.Thread(target=abort)
        with replaced(_Agreement, "wait", watched):
            thread.start()
            try:
                queue.close()
            except CheckpointException as error:
                assert "call 0 was aborted" in str(error)  # noqa: PT017
            else:
                raise AssertionError("nothing was raised")
        thread.join()
    event.set()
    assert queue.get_num_unfinalized_calls() == 0
    assert_nobody_waits()
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


# --- running them --------------------------------------------------------------------------------

CASES: dict[str, Callable[[Launch], None]] = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}

#: Loads what earlier launches left.
LOADS_OTHERS = "what_other_numbers_of_ranks_saved_is_loaded"

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cases.main(Path(sys.argv[2]), Path(sys.argv[1]), sys.argv[3:], CASES)
