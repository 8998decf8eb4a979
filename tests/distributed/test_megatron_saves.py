"""Saves by several ranks through the Megatron interface: contents, and plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

from tests.distributed import cases
from tests.distributed.background import overwrite, replaced
from tests.distributed.cases import (
    PATIENCE_SECONDS,
    Launch,
    StateDict,
    failure_of,
    full_disk_on,
    load,
    tensor_of,
)
from tests.distributed.launcher import between, on, on_ranks, takes_several
from tests.distributed.megatron_training import (
    PLANNERS,
    READERS,
    Decentralized,
    Site,
    assert_no_other_files,
    assert_nothing_left,
    assert_saved,
    finalized_at,
    last_of,
    names_in,
    of_all,
    queue_of,
    save,
    state_at,
)
from tests.metadata import read_metadata
from tests.support import assert_equal, data_files
from torch_ckpt import CheckpointError, nvrx
from torch_ckpt.checkpoint.lease import remove_leftovers
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    plan,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

# --- what is saved --------------------------------------------------------------------------------


@on(1, 2)
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
                # The next training step changes the parameters at once.
                overwrite(state)
            queue.maybe_finalize_async_calls()
        queue.close()
        assert done == [2, -2, 4, -4, 6, -6]
        assert queue.get_num_unfinalized_calls() == 0
        for step in (2, 4, 6):
            assert_saved(launch, launch.path(planner.__name__, str(step)), step)


@on(only=True)
def case_this_number_of_ranks_saves_for_others(launch: Launch) -> None:
    for planner in PLANNERS:
        path = launch.workdir / f"megatron-{launch.size}" / planner.__name__
        save(launch, path, 7, Site(planner))


@on(only=True)
def case_checkpoints_of_other_numbers_of_ranks_are_loaded(launch: Launch) -> None:
    sources = sorted(launch.workdir.glob("megatron-*/*"))
    assert len(sources) >= len(PLANNERS)
    for source in sources:
        assert_saved(launch, source, 7, own=False)


def case_data_files_equal_those_of_stock_torch_byte_for_byte(launch: Launch) -> None:
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
            assert_no_other_files(path)
            dist.barrier()


def case_a_request_can_be_executed_at_once(launch: Launch) -> None:
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


def request_of(finalizing: Any, finalize: Any = save_state_dict_async_finalize) -> AsyncRequest:
    function, preload, arguments = finalizing[0].get_save_function_and_args()
    finalize = partial(finalize, *finalizing)
    return AsyncRequest(function, arguments, [finalize], preload_fn=preload)


@takes_several
def case_a_coordinator_other_than_the_first_rank_is_refused(launch: Launch) -> None:
    writer = FileSystemWriterAsync(launch.path())
    with pytest.raises(ValueError, match="coordinator_rank must be 0, got"):
        save_state_dict_async_plan(state_at(launch, 1), writer, coordinator_rank=last_of(launch))
    assert names_in(launch.path()) == []


@takes_several
@on(4)
def case_ranks_of_a_subgroup_save_and_the_others_do_not(launch: Launch) -> None:
    half = launch.size // 2
    sides = [list(range(half)), list(range(half, launch.size))]
    groups = [dist.new_group(side) for side in sides]
    side = launch.rank // half
    path, queue = launch.path(str(side)), AsyncCallsQueue(process_group=groups[side])
    state = {f"of {launch.rank}": tensor_of(f"of {launch.rank}", 30, 7), "step": 1}
    writer = FileSystemWriterAsync(path, thread_count=1)
    finalizing = save_state_dict_async_plan(state, writer, groups[side])[0]
    queue.schedule_async_request(request_of(finalizing))
    assert finalized_at(queue) > 0
    expected = {f"of {rank}" for rank in sides[side]} | {"step"}
    assert set(read_metadata(path).state_dict_metadata) == expected
    for reader in READERS:
        loaded = {f"of {launch.rank}": torch.zeros(30, 7), "step": 0}
        load(loaded, path, reader, process_group=groups[side])
        assert_equal(loaded, state)


# --- plans ----------------------------------------------------------------------------------------


@contextmanager
def watched_collectives() -> Iterator[list[str]]:
    """Yields the names of the collectives that ranks call."""
    seen: list[str] = []

    class Watched(plan.Exchange):
        def exchange(self, step: str, *args: Any) -> Any:
            seen.append(step)
            return super().exchange(step, *args)

    with replaced(plan, "Exchange", Watched):
        yield seen


def case_a_decentralized_plan_is_made_by_each_rank_and_kept_in_the_metadata(launch: Launch) -> None:
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
    # One rank writes what all ranks have.
    names = [item.index.fqn for item in site.central.items]
    assert sum(of_all(launch, names.count("model.norm"))) == 1
    assert not hasattr(read_metadata(path), "all_local_plans")


def case_identical_plans_of_two_saves_are_not_exchanged_again(launch: Launch) -> None:
    for planner in PLANNERS:
        site = Site(planner, caching=True)
        with watched_collectives() as met:
            for step in range(1, 5):
                path = launch.path(planner.__name__, str(step))
                save(launch, path, step, site)
                assert site.is_as_cached is (step > 1)
                assert_saved(launch, path, step)
        assert met == ["plan", "write", "plan", "write", "write", "write"]


def case_files_by_a_cached_plan_are_kept_until_the_commit(launch: Launch) -> None:
    path, site, queue = launch.path(), Site(caching=True), queue_of()
    for step in (1, 2):
        save(launch, path, step, site)
    state = state_at(launch, 3)
    if launch.rank != 0:
        # Nothing is exchanged: the coordinator does not know of the file yet.
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


def case_a_save_with_a_removed_file_is_not_committed(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site().request(state_at(launch, 1), path))
    queue._calls[0].ended.wait()
    dist.barrier()
    if launch.rank == 0:
        (path / names_in(path)[-1]).unlink()
    dist.barrier()
    causes = failure_of(launch, queue.close)
    assert set(causes) == {0}
    assert "another program removed or changed it" in str(causes[0])
    assert_nothing_left(path)


def case_after_a_restart_the_loaded_metadata_is_reused(launch: Launch) -> None:
    first = Site(caching=True)
    save(launch, launch.path("1"), 1, first)
    site = first.restarted_from(launch.path("1"))
    with watched_collectives() as met:
        for step in range(2, 6):
            path = launch.path(str(step))
            save(launch, path, step, site)
            assert site.is_as_loaded is (step < 4)
            assert_saved(launch, path, step)
            assert len(read_metadata(path).all_local_plans) == launch.size
    assert met == ["plan", "write", "plan", "write", "write", "write"]


def changed_on(launch: Launch, rank: int, step: int) -> StateDict:
    """Makes the state of a step, with an additional tensor on one rank."""
    state = state_at(launch, step)
    if launch.rank == rank:
        state["own"]["added"] = tensor_of("added", 4)
    return state


def case_a_change_on_one_rank_keeps_all_ranks_from_using_cached_plans(launch: Launch) -> None:
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


def case_a_change_on_one_rank_fails_a_save_with_cached_plans_on_all(launch: Launch) -> None:
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


def case_a_change_on_one_rank_after_a_restart_makes_all_ranks_plan(launch: Launch) -> None:
    first = Site(caching=True)
    save(launch, launch.path("1"), 1, first)
    for rank in {0, last_of(launch)}:
        for change in ("another state", "no loaded plans"):
            path, queue = launch.path(f"{change} on {rank}"), queue_of()
            site = first.restarted_from(launch.path("1"))
            state = state_at(launch, 2)
            if change == "another state":
                state = changed_on(launch, rank, 2)
            elif launch.rank == rank:
                site.loaded_plans = None
            queue.schedule_async_request(site.request(state, path))
            queue.close()
            assert not site.is_as_loaded
            has_change = "own.added" in read_metadata(path).state_dict_metadata
            assert has_change is (change == "another state")
            assert_saved(launch, path, 2)


def case_a_planner_that_fails_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("on purpose")

    for method in ("create_local_plan", "resolve_data"):
        path, queue = launch.path(method), queue_of()
        site = Site()
        if launch.rank == last_of(launch):
            site = Site(type("Failing", (Decentralized,), {method: fail}))

        def run(site: Site = site, path: Path = path, queue: AsyncCallsQueue = queue) -> None:
            queue.schedule_async_request(site.request(state_at(launch, 1), path))
            queue.close()

        causes = failure_of(launch, run)
        assert set(causes) == {last_of(launch)}
        assert "on purpose" in str(causes[last_of(launch)])
        if method == "create_local_plan":
            # The plan itself has failed.
            assert type(causes[last_of(launch)]) is KeyError
            assert queue.get_num_unfinalized_calls() == 0
        assert_nothing_left(path)
        save(launch, path)
        assert_saved(launch, path, 1)


def case_plans_are_cached_with_the_interface_of_the_other_library(launch: Launch) -> None:
    cache = nvrx.CheckpointMetadataCache()
    for step in range(1, 8):
        path, queue = launch.path(str(step)), nvrx.AsyncCallsQueue(timeout=PATIENCE_SECONDS)
        if step == 5:
            # A restart.
            cache = nvrx.CheckpointMetadataCache()
            metadata = CachedMetadataFileSystemReader(launch.path("4")).read_metadata()
            cache.set_cached_global_metadata(metadata)
        finalizing = nvrx.save_state_dict_async_plan(
            state_at(launch, step),
            nvrx.FileSystemWriterAsync(path, thread_count=2, timeout=PATIENCE_SECONDS),
            planner=Decentralized(),
            enable_cache=True,
            metadata_cache=cache,
        )
        queue.schedule_async_request(request_of(finalizing, nvrx.save_state_dict_async_finalize))
        queue.close()
        assert cache.validated_cache_reuse is (step not in (1, 5))
        assert cache.validated_loaded_metadata_reuse is (step in (5, 6))
        assert_saved(launch, path, step)


test_on_ranks = on_ranks(globals(), (1, 2, 4))
test_checkpoints_of_other_numbers_of_ranks_are_loaded = between(
    "this_number_of_ranks_saves_for_others",
    "checkpoints_of_other_numbers_of_ranks_are_loaded",
    [(1, 4), (2, 4), (4, 2)],
)
