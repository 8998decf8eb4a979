"""Saves by several ranks through the Megatron interface: polls, failures and aborts.

tests/python/ranks/test_polled_event.py tests the order of polls in one process.
"""

from __future__ import annotations

import errno
import gc
import itertools
import random
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.background import replaced, threads_in_collectives
from tests.distributed.cases import PATIENCE_SECONDS, Launch, failure_of, full_disk_on, tensor_of
from tests.distributed.launcher import on, on_ranks, takes_several
from tests.distributed.megatron_training import (
    PLANNERS,
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
    train_a_step,
    waits_for,
)
from tests.gates import in_thread
from torch_ckpt import Background
from torch_ckpt._base import exit_threads
from torch_ckpt.errors import NotCommitted
from torch_ckpt.megatron import AsyncCallsQueue
from torch_ckpt.megatron.call import Agreement, Call

pytestmark = pytest.mark.full

# --- polls ----------------------------------------------------------------------------------------


def case_neither_a_save_nor_a_poll_uses_a_process_group_or_a_device(launch: Launch) -> None:
    def used(*_: Any, **__: Any) -> None:
        raise AssertionError("a device was used")

    path, state, queue = launch.path(), state_at(launch, 1), queue_of()
    with ExitStack() as stack:
        users = stack.enter_context(threads_in_collectives())
        for name in ("synchronize", "current_stream", "_lazy_init"):
            stack.enter_context(replaced(torch.cuda, name, used))
        queue.schedule_async_request(Site().request(state, path))
        finalized_at(queue)
    assert users == set()
    assert_saved(launch, path, 1)


@on(2, 4)
def case_ranks_of_different_speed_finalize_at_the_same_poll(launch: Launch) -> None:
    for seed in range(20, 32):
        numbers = random.Random(f"{seed} on {launch.rank}")
        queue, events = queue_of(), [threading.Event() for _ in range(3)]
        for call, event in enumerate(events):
            fails = call == seed % 4 and launch.rank == seed % launch.size
            queue.schedule_async_request(waits_for(event, on_purpose() if fails else None))
        ends = sorted(numbers.randrange(1, 60) for _ in events)
        outcome: list[tuple[int, Any]] = []
        for poll in itertools.count(1):
            for end, event in zip(ends, events, strict=True):
                if poll >= end:
                    event.set()
            try:
                outcome += [(poll, call) for call in queue.maybe_finalize_async_calls()]
            except CheckpointException as error:
                outcome.append((poll, f"failed on {sorted(error.failures)}"))
            if not queue.get_num_unfinalized_calls():
                break
            train_a_step()
        everywhere = of_all(launch, outcome)
        assert everywhere == [outcome] * launch.size, (seed, everywhere)


def case_concurrent_saves_are_finalized_in_order_even_after_a_failed_call(launch: Launch) -> None:
    queue, site, done = queue_of(), Site(), []
    paths = [launch.path("1"), launch.path("2"), launch.path("1")]
    for step, path in enumerate(paths, start=1):
        request = site.request(state_at(launch, step), path, partial(done.append, step))
        assert queue.schedule_async_request(request) == step - 1
    assert queue.get_num_unfinalized_calls() == 3
    polls = finalized_at(queue, 2)
    assert done == [1, 2, 3]
    assert len(set(of_all(launch, polls))) == 1
    assert_saved(launch, launch.path("2"), 2)
    assert_saved(launch, launch.path("1"), 3)
    for path in paths:
        assert_no_other_files(path)
    dist.barrier()
    error = on_purpose() if launch.rank == last_of(launch) else None
    queue.schedule_async_request(waits_for(opened(), error))
    queue.schedule_async_request(site.request(state_at(launch, 4), launch.path("4")))
    assert set(failure_of(launch, queue.close)) == {last_of(launch)}
    assert queue.get_num_unfinalized_calls() == 0
    assert_saved(launch, launch.path("4"), 4)


@takes_several
def case_mismatched_calls_are_detected(launch: Launch) -> None:
    queue = queue_of()
    if launch.rank == last_of(launch):
        queue.schedule_async_request(waits_for(opened()))
        queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    for number, finish in enumerate((queue.close, partial(finalized_at, queue))):
        queue.schedule_async_request(waits_for(opened()))
        causes = failure_of(launch, finish)
        assert set(causes) == {0}
        assert f"rank 0 call {number}" in str(causes[0])
        assert f"rank {last_of(launch)} call {number + 1}" in str(causes[0])
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


# --- failures -------------------------------------------------------------------------------------


def on_purpose() -> OSError:
    return OSError(errno.EIO, "on purpose")


def fail_on(launch: Launch, rank: int) -> None:
    if launch.rank == rank:
        raise on_purpose()


def opened() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@on(2, 4)
def case_a_bucket_that_fails_on_one_rank_fails_the_save_on_all_and_keeps_the_older_one(
    launch: Launch,
) -> None:
    for planner in PLANNERS:
        path, queue, done = launch.path(planner.__name__), queue_of(), []
        save(launch, path, 1, Site(planner))
        dist.barrier()
        before = names_in(path)
        large = {"own": {f"{launch.rank}.{i}": tensor_of(f"{i}", 40, 50) for i in range(4)}}
        small = {"step": 1}
        site = Site(planner, thread_count=4)
        with full_disk_on(last_of(launch)):
            request = site.request({**large, **small}, path, partial(done.append, 1))
            queue.schedule_async_request(request)
            causes = failure_of(launch, queue.close)
        assert set(causes) == {last_of(launch)}
        text = str(causes[last_of(launch)])
        assert text.startswith("Worker failure: [Errno 27]"), text
        assert f"{path}/__{last_of(launch)}_" in text
        assert done == []
        del request
        gc.collect()
        dist.barrier()
        assert names_in(path) == before
        assert_saved(launch, path, 1)
        queue.schedule_async_request(site.request(state_at(launch, 2), path))
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        assert_saved(launch, path, 2)


def case_a_failed_save_by_a_cached_plan_keeps_the_older_checkpoint(launch: Launch) -> None:
    path, queue, site = launch.path(), queue_of(), Site(caching=True)
    for step in (1, 2):
        save(launch, path, step, site)
    assert site.is_as_cached
    dist.barrier()
    before = names_in(path)
    # The next save exchanges nothing before it writes.
    dist.barrier()
    with full_disk_on(last_of(launch)):
        queue.schedule_async_request(site.request(state_at(launch, 3), path))
        failure_of(launch, queue.close)
    gc.collect()
    dist.barrier()
    assert names_in(path) == before
    assert_saved(launch, path, 2)


def case_a_request_that_cannot_start_on_one_rank_fails_on_all(launch: Launch) -> None:
    def fail() -> None:
        raise MemoryError("on purpose")

    # A request with a preload function needs two arguments.
    changes: tuple[dict[str, Any], ...] = ({"preload_fn": fail}, {"async_fn_args": [1]})
    for number, change in enumerate(changes):
        path, queue, done = launch.path(str(number)), queue_of(), []
        request = Site().request(state_at(launch, 1), path, partial(done.append, 1))
        if launch.rank == last_of(launch):
            request = request._replace(**change)
        queue.schedule_async_request(request)
        del request
        kept: list[CheckpointException] = []
        polls = 0
        while not kept:
            polls += 1
            try:
                queue.maybe_finalize_async_calls()
            except CheckpointException as error:
                kept.append(error)
            train_a_step()
        assert sorted(kept[0].failures) == [last_of(launch)]
        assert len(set(of_all(launch, polls))) == 1
        assert done == []
        # The error keeps no file open.
        assert_nothing_left(path)
        queue.schedule_async_request(Site().request(state_at(launch, 1), path))
        assert queue.maybe_finalize_async_calls(blocking=True) == [1]
        assert_saved(launch, path, 1)


def case_a_finalize_function_that_raises_fails_only_its_call_on_its_rank(launch: Launch) -> None:
    queue, site = queue_of(), Site()
    is_last = launch.rank == last_of(launch)
    for first, finish in ((1, queue.maybe_finalize_async_calls), (3, queue.close)):
        raised, done, polls = [], [], 0
        for step in (first, first + 1):
            request = site.request(state_at(launch, step), launch.path(str(step)))
            if step == first:
                request.add_finalize_fn(partial(fail_on, launch, last_of(launch)))
            request.add_finalize_fn(partial(done.append, step))
            queue.schedule_async_request(request)
        while queue.get_num_unfinalized_calls():
            polls += 1
            try:
                finish()
            except OSError as error:
                raised.append(error.errno)
            train_a_step()
        # The ranks are still in step.
        assert len(set(of_all(launch, polls))) == 1
        assert raised == [errno.EIO] * is_last
        assert done == ([first + 1] if is_last else [first, first + 1])
        for step in (first, first + 1):
            assert_saved(launch, launch.path(str(step)), step)


@takes_several
def case_a_rank_absent_from_finalize_is_named_and_takes_part_in_the_next_save(
    launch: Launch,
) -> None:
    for absent in (last_of(launch), 0):
        path, queue = launch.path(str(absent)), queue_of()
        request = Site(timeout=2.0).request(state_at(launch, 1), path)
        request.finalize_fns.insert(0, partial(fail_on, launch, absent))
        queue.schedule_async_request(request)
        error_type = OSError if launch.rank == absent else CheckpointException
        with pytest.raises(error_type) as caught:
            queue.close()
        if isinstance(caught.value, CheckpointException):
            assert sorted(caught.value.failures) == [absent]
            assert f"rank {absent} sent no heartbeat" in str(caught.value)
        del caught
        dist.barrier()
        assert not (path / ".metadata").exists()
        del request
        save(launch, path)
        assert_saved(launch, path, 1)


def case_a_rank_that_stops_polling_does_not_block_the_others(launch: Launch) -> None:
    # The queue's threads use the default store at the same time.
    store = dist.PrefixStore(launch.case, dist.distributed_c10d._get_default_store().clone())
    for silent in {0, last_of(launch)}:
        queue = queue_of()
        queue.schedule_async_request(waits_for(opened()))
        if launch.rank == silent:
            finalized = queue.maybe_finalize_async_calls()
            store.wait([f"{rank} of {silent}" for rank in range(launch.size) if rank != silent])
            finalized += queue.maybe_finalize_async_calls(blocking=True)
            assert finalized == [0]
        else:
            finalized_at(queue)
            store.set(f"{launch.rank} of {silent}", "finalized")
        assert queue.get_num_unfinalized_calls() == 0
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


def case_a_failed_commit_fails_all_ranks(launch: Launch) -> None:
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


# --- aborts ---------------------------------------------------------------------------------------


def assert_no_thread_waits() -> None:
    """Checks that no thread of a call waits for other ranks."""
    for thread in threading.enumerate():
        if thread.name == "torch_ckpt call":
            thread.join(PATIENCE_SECONDS / 2)
            assert not thread.is_alive()


def assert_aborted(launch: Launch, queue: AsyncCallsQueue, path: Path) -> None:
    """Aborts on all ranks, and checks that nothing is left and that this queue and another can
    save."""
    queue.close(abort=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls() == []
    assert_no_thread_waits()
    gc.collect()
    dist.barrier()
    assert not (path / ".metadata").exists()
    request = Site().request(state_at(launch, 1), path)
    index = queue.schedule_async_request(request)
    assert queue.maybe_finalize_async_calls(blocking=True) == [index]
    del request
    assert_saved(launch, path, 1)
    dist.barrier()
    # Files of a cancelled write are deleted when the write ends, which no thread waits for.
    assert exit_threads.join()
    dist.barrier()
    assert_no_other_files(path)
    dist.barrier()
    save(launch, path, 2)
    assert_saved(launch, path, 2)


MOMENTS = ("planned", "polled on some ranks", "writing on one rank", "written and polled on some")


@on(2, 4)
def case_a_save_can_be_aborted_at_any_moment(launch: Launch) -> None:
    for moment in MOMENTS:
        path, queue, options = launch.path(moment), queue_of(), {}
        state = state_at(launch, 5)
        if moment == "writing on one rank":
            # Several chunks on each rank.
            state = {"own": {f"t{launch.rank}": torch.arange(12 << 18, dtype=torch.int32)}}
            if launch.rank == last_of(launch):
                # Only the first bytes reach the disk.
                options["background"] = Background(max_bytes_per_second=1)
        request = Site().request(state, path, **options)
        if moment != "planned":
            queue.schedule_async_request(request)
        del request
        if moment == "written and polled on some":
            assert queue._calls[0].ended.wait(PATIENCE_SECONDS)
            dist.barrier()
        # A single rank would finalize it.
        is_polling = launch.rank % 2 == 0 and launch.size > 1
        if ("polled" in moment and is_polling) or moment == "writing on one rank":
            queue.maybe_finalize_async_calls()
            assert queue.get_num_unfinalized_calls() == 1
        assert_aborted(launch, queue, path)


@takes_several
def case_an_abort_after_some_ranks_have_finalized_the_call(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site(timeout=2.0).request(state_at(launch, 5), path))
    if launch.rank != last_of(launch):
        # The last rank aborts before it finalizes.
        queue._calls[0].ended.wait(PATIENCE_SECONDS)
        with pytest.raises(CheckpointException):
            queue._calls[0].request.execute_finalize_fns(validate_matching_call_idx=False)
    assert_aborted(launch, queue, path)


def case_an_abort_on_one_rank_is_reported_to_ranks_that_have_polled(launch: Launch) -> None:
    for aborting in {0, last_of(launch)}:
        queue, event = queue_of(), threading.Event()
        queue.schedule_async_request(waits_for(event))
        queue.maybe_finalize_async_calls()
        dist.barrier()
        if launch.rank == aborting:
            call: Call = queue._calls[0]
            call.abort()
        else:
            event.set()
        causes = failure_of(launch, lambda: queue.maybe_finalize_async_calls(blocking=True))  # noqa: B023
        event.set()
        assert set(causes) == {aborting}
        assert "call 0 was aborted" in str(causes[aborting])
        assert_no_thread_waits()
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


def case_an_abort_by_another_thread_while_ranks_wait_for_an_absent_one(launch: Launch) -> None:
    # No rank would be declared dead.
    queue, event, waits = queue_of(timeout=1e6), threading.Event(), threading.Event()
    wait = Agreement.wait

    def watched(agreement: Agreement) -> None:
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
        aborted = pytest.raises(CheckpointException, match="call 0 was aborted")
        with replaced(Agreement, "wait", watched), in_thread(abort), aborted:
            queue.close()
    event.set()
    assert queue.get_num_unfinalized_calls() == 0
    assert_no_thread_waits()
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


test_on_ranks = on_ranks(globals(), (1, 2, 4))
