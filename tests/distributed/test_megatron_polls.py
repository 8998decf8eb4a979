"""Saves by several ranks through the Megatron interface: ranks finalize a save at the same poll."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.background import replaced, threads_in_collectives
from tests.distributed.cases import (
    PATIENCE_SECONDS,
    Launch,
    failure_of,
)
from tests.distributed.launcher import on, on_ranks
from tests.distributed.megatron_training import (
    Latches,
    Site,
    assert_saved,
    finalized_at,
    last_of,
    names_in,
    of_all,
    poll_of_outcome,
    queue_of,
    save,
    state_at,
    waits_for,
)
from tests.metadata import read_metadata
from torch_ckpt.ranks.polled_event import PolledEvent

# --- polls ----------------------------------------------------------------------------------------


def case_neither_a_save_nor_a_poll_uses_a_process_group_or_a_device(launch: Launch) -> None:
    def used(*_: Any, **__: Any) -> None:
        raise AssertionError("a device was used")

    path, state, queue = launch.path(), state_at(launch, 1), queue_of()
    names = ("synchronize", "current_stream", "_lazy_init")
    with threads_in_collectives() as users, suppress_all(torch.cuda, names, used):
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


def case_ranks_several_steps_ahead_finalize_at_the_same_poll(launch: Launch) -> None:
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

            outcome = of_all(launch, poll_of_outcome(queue, before))
            assert len(set(outcome)) == 1, outcome
            assert outcome[0][1] == (f"failed on [{ahead}]" if fails else "finalized")


@on(2, 4)
def case_ranks_of_different_speed_finalize_at_the_same_poll(launch: Launch) -> None:
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
        outcome: list[tuple[int, str]] = []

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
            _, how = poll_of_outcome(queue, before)
            outcome.append((len(polls), how))
        everywhere = of_all(launch, outcome)
        assert all(of_rank == outcome for of_rank in everywhere), (number, everywhere)


def case_a_failure_that_reaches_one_rank_last_is_raised_at_the_same_poll(launch: Launch) -> None:
    if launch.size == 1:
        return
    queue, latches, ended = queue_of(), Latches(launch), threading.Event()
    stop_waiting = PolledEvent.stop_waiting

    def late(event: PolledEvent) -> None:
        if launch.rank == 0:
            for rank in range(1, launch.size):
                latches.wait(f"rank {rank} was outcome")
        stop_waiting(event)

    error = OSError(errno.EIO, "on purpose") if launch.rank == last_of(launch) else None
    ended.set()
    with replaced(PolledEvent, "stop_waiting", late):
        queue.schedule_async_request(waits_for(ended, error))
        outcome = poll_of_outcome(queue, lambda _: None)
        latches.open(f"rank {launch.rank} was outcome")
    everywhere = of_all(launch, outcome)
    assert len(set(everywhere)) == 1, everywhere
    assert outcome[1] == f"failed on [{last_of(launch)}]"


def case_a_call_that_ended_before_the_first_poll_is_finalized_by_the_second(launch: Launch) -> None:
    parts = threading.Semaphore(0)
    report_part = PolledEvent.report_part

    def counted(event: PolledEvent) -> None:
        report_part(event)
        parts.release()

    queue, ended = queue_of(), threading.Event()
    ended.set()
    with replaced(PolledEvent, "report_part", counted):
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


def case_a_close_finalizes_the_calls_after_a_failed_one(launch: Launch) -> None:
    queue, path, ended = queue_of(), launch.path(), threading.Event()
    ended.set()
    error = OSError(errno.EIO, "on purpose") if launch.rank == last_of(launch) else None
    queue.schedule_async_request(waits_for(ended, error))
    queue.schedule_async_request(Site().request(state_at(launch, 1), path))
    causes = failure_of(launch, queue.close)
    assert set(causes) == {last_of(launch)}
    assert queue.get_num_unfinalized_calls() == 0
    assert_saved(launch, path, 1)


def case_two_concurrent_saves_are_finalized_in_order(launch: Launch) -> None:
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


def case_mismatched_calls_are_detected(launch: Launch) -> None:
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


test_on_ranks = on_ranks(globals(), (1, 2, 4))
