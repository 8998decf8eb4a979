"""Saves by several ranks through the Megatron interface: failures and aborts."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.background import replaced
from tests.distributed.cases import (
    PATIENCE_SECONDS,
    Launch,
    StateDict,
    failure_of,
    full_disk_on,
    tensor_of,
)
from tests.distributed.launcher import on, on_ranks
from tests.distributed.megatron_training import (
    PLANNERS,
    Latches,
    Site,
    assert_nothing_left,
    assert_saved,
    finalized_at,
    last_of,
    names_in,
    of_all,
    poll_of_outcome,
    queue_of,
    save,
    state_at,
    train_a_step,
    waits_for,
)
from tests.metadata import read_metadata
from torch_ckpt import Background
from torch_ckpt._base import exit_threads
from torch_ckpt.errors import NotCommitted
from torch_ckpt.megatron import AsyncCallsQueue
from torch_ckpt.megatron.call import Agreement, Call

# --- a training in Megatron's shape ---------------------------------------------------------------


@contextmanager
def slow_disk(launch: Launch, rank: int) -> Iterator[Background | None]:
    """Makes options of the writers: on one rank only the first bytes reach the disk."""
    yield Background(max_bytes_per_second=1) if launch.rank == rank else None


def megabytes_of(launch: Launch, count: int = 12) -> StateDict:
    """Makes several chunks on each rank."""
    return {"own": {f"t{launch.rank}": torch.arange(count << 18, dtype=torch.int32)}}


# --- failures -------------------------------------------------------------------------------------


@on(2, 4)
def case_a_bucket_that_fails_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
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


def case_a_failed_save_keeps_the_older_checkpoint(launch: Launch) -> None:
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


def case_a_preload_that_fails_on_one_rank_fails_the_call_on_all(launch: Launch) -> None:
    path, queue, done = launch.path(), queue_of(), []
    request = Site().request(state_at(launch, 1), path, partial(done.append, 1))
    if launch.rank == last_of(launch):

        def fail() -> None:
            raise MemoryError("on purpose")

        request = request._replace(preload_fn=fail)
    queue.schedule_async_request(request)
    del request
    outcome = poll_of_outcome(queue, lambda _: None)
    assert set(of_all(launch, outcome)) == {(outcome[0], f"failed on [{last_of(launch)}]")}
    assert done == []
    assert_nothing_left(path)
    queue.schedule_async_request(Site().request(state_at(launch, 1), path))
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert_saved(launch, path, 1)


def case_the_error_of_a_failed_call_keeps_no_file_open(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    request = Site().request(state_at(launch, 1), path)
    if launch.rank == last_of(launch):
        # A request with a preload function needs two arguments.
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


def case_a_finalize_function_that_raises_fails_only_its_call_on_its_rank(launch: Launch) -> None:
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
    # The ranks are still in step.
    assert len(set(of_all(launch, polls))) == 1
    for step in (1, 2):
        assert_saved(launch, launch.path(str(step)), step)


def case_a_blocking_close_after_a_failed_finalize_function_ends_the_next_call(
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


def case_a_rank_absent_from_finalize_is_named_and_takes_part_in_the_next_save(
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
            assert f"rank {absent} sent no heartbeat" in str(error)  # noqa: PT017
        except OSError:
            assert launch.rank == absent
        else:
            raise AssertionError("nothing was raised")
        dist.barrier()
        assert not (path / ".metadata").exists()
        del request
        save(launch, path)
        assert_saved(launch, path, 1)


def case_a_rank_that_stops_polling_does_not_block_the_others(
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


@on(2, 4)
def case_an_abort_after_a_poll_on_some_ranks_only(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site().request(state_at(launch, 5), path))
    # A single rank would finalize it.
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
    # A single rank would finalize it.
    if launch.rank % 2 == 0 and launch.size > 1:
        queue.maybe_finalize_async_calls()
    assert_aborted(launch, queue, path)


def case_an_abort_when_all_is_written_of_a_referenced_save(launch: Launch) -> None:
    path, queue = launch.path(), queue_of()
    held = Site().request(state_at(launch, 5), path)
    queue.schedule_async_request(held)
    assert queue._calls[0].ended.wait(PATIENCE_SECONDS)
    queue.close(abort=True)
    # Files of the other ranks may still exist: ranks abort at different times.
    assert not [name for name in names_in(path) if name.startswith(f"__{launch.rank}_")]
    causes = failure_of(launch, held.finalize_fns[0])
    assert set(causes) == set(range(launch.size))
    for cause in causes.values():
        assert "Worker failure: aborted" in str(cause)
    assert not (path / ".metadata").exists()


def case_an_abort_after_some_ranks_have_finalized_the_call(launch: Launch) -> None:
    if launch.size == 1:
        return
    path, queue = launch.path(), queue_of()
    queue.schedule_async_request(Site(timeout=2.0).request(state_at(launch, 5), path))
    if launch.rank != last_of(launch):
        # The last rank aborts before it finalizes.
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


def case_an_abort_by_another_thread_while_ranks_wait_for_an_absent_one(
    launch: Launch,
) -> None:
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
        thread = threading.Thread(target=abort)
        with replaced(Agreement, "wait", watched):
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
    assert_no_thread_waits()
    save(launch, launch.path())
    assert_saved(launch, launch.path(), 1)


test_on_ranks = on_ranks(globals(), (1, 2, 4))
