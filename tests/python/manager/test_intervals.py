"""Tests of Schedule: the interval of Young and Daly, and rank 0's decisions, with threads as
ranks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.errors import CheckpointError
from torch_ckpt.intervals import AutoInterval
from torch_ckpt.manager.option_groups import Interval, ScheduleOptions
from torch_ckpt.manager.schedule import Schedule
from torch_ckpt.ranks.group import RankGroup

#: Limit in seconds for operations that should not have to wait.
PATIENCE = 60.0

#: Timeout in seconds for a rank that never arrives.
SHORT = 0.4

DAY = 86400.0


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def schedule(
    interval: Interval,
    steps: Collection[int] = (),
    *,
    skip_if_busy: bool = False,
    group: RankGroup | None = None,
    timeout: float = PATIENCE,
    max_overhead: float = 0.01,
    clock: Callable[[], float] = time.monotonic,
) -> Schedule:
    if_busy = "skip" if skip_if_busy else "wait"
    return Schedule(
        ScheduleOptions(interval, steps, max_overhead, DAY / 3600, if_busy),
        group=group or RankGroup(None, 0, 1, ""),
        timeout=timeout,
        clock=clock,
    )


def idle() -> bool:
    return False


def busy() -> bool:
    return True


def saves_of(
    made: Schedule, steps: Collection[int], is_busy: Callable[[], bool] = idle
) -> list[int]:
    return [step for step in steps if made.should_save(step, is_busy)]


# --- intervals in steps --------------------------------------------------------------------------


def test_an_integer_interval_saves_every_so_many_steps() -> None:
    assert saves_of(schedule(5), range(1, 18)) == [5, 10, 15]


def test_a_function_of_the_step_decides_when_to_save() -> None:
    made = schedule(lambda step: step in (2, 3, 5, 7))
    assert saves_of(made, range(1, 10)) == [2, 3, 5, 7]


def test_chosen_steps_are_always_saved() -> None:
    assert saves_of(schedule(5, [3, 5, 8]), range(1, 11)) == [3, 5, 8, 10]
    assert saves_of(schedule(lambda _step: False, (4,)), range(1, 11)) == [4]
    assert saves_of(schedule(timedelta(hours=9), (4,)), range(1, 11)) == [4]


def test_a_running_save_postpones_no_save_by_default() -> None:
    assert saves_of(schedule(2), range(1, 7), busy) == [2, 4, 6]
    assert saves_of(schedule(2, skip_if_busy=True), range(1, 7), busy) == []
    assert saves_of(schedule(2, skip_if_busy=True), range(1, 7), idle) == [2, 4, 6]


def test_chosen_steps_are_not_skipped() -> None:
    assert saves_of(schedule(2, (3, 4), skip_if_busy=True), range(1, 7), busy) == [3, 4]


@pytest.mark.parametrize("interval", [0, -1, 2.5, True, "weekly", None])
def test_other_intervals_are_refused(interval: Any) -> None:
    with pytest.raises(ValueError, match="interval must be"):
        schedule(interval)


@pytest.mark.parametrize("seconds", [0, -5])
def test_a_time_interval_must_be_positive(seconds: float) -> None:
    with pytest.raises(ValueError, match="interval must be positive"):
        schedule(timedelta(seconds=seconds))


# --- intervals in time ---------------------------------------------------------------------------


def run(
    made: Schedule, clock: Clock, steps: Collection[int], seconds: float = 1.0
) -> list[tuple[int, float]]:
    """Runs steps of so many seconds, and saves when a save is due. Returns (step, time since the
    last save) for each save."""
    found = []
    last = clock.now
    for step in steps:
        clock.now += seconds
        if made.should_save(step, idle):
            found.append((step, clock.now - last))
            last = clock.now
            made.save_started()
    return found


def test_saves_keep_the_time_interval(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    assert run(made, clock, range(1, 36)) == [(10, 10.0), (20, 10.0), (30, 10.0)]


def test_an_extra_save_postpones_the_next_one(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    assert run(made, clock, range(1, 8)) == []
    made.save_started()
    assert run(made, clock, range(8, 20)) == [(17, 10.0)]


def test_fast_steps_are_decided_in_blocks(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    saves = run(made, clock, range(1, 10_001), seconds=0.01)
    # A block is half a second of steps, so a save is at most half a second late.
    assert len(saves) in (9, 10)
    assert all(10.0 - 1e-6 <= apart <= 10.5 + 1e-6 for _step, apart in saves)
    assert made.decisions.count < 10_000 / 40


def test_slow_steps_are_decided_one_by_one(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    run(made, clock, range(1, 101), seconds=1.0)
    assert made.decisions.count == 100


def test_blocks_shrink_soon_when_steps_become_slow(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    run(made, clock, range(1, 4), seconds=1e-9)
    # While steps seem to take no time, blocks grow slowly.
    assert run(made, clock, range(4, 40), seconds=10.0)[0][0] <= 10


def test_rewound_training_is_saved_again(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    run(made, clock, range(1, 100_001), seconds=1e-3)
    saves = run(made, clock, range(1, 20_001), seconds=1e-3)
    assert saves
    assert saves[0][0] <= 10_500


def test_a_skipping_schedule_saves_nothing_while_a_save_is_running(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), skip_if_busy=True, clock=clock)
    clock.now += 11
    assert not made.should_save(1, busy)
    clock.now += 1
    assert made.should_save(2, idle)


# --- Young and Daly ------------------------------------------------------------------------------


def auto(max_overhead: float = 0.5, mtbf_seconds: float = DAY) -> AutoInterval:
    return AutoInterval(max_overhead, mtbf_seconds)


def test_the_interval_is_unknown_until_the_first_save_has_ended() -> None:
    made = auto()
    assert made.seconds == 0.0
    made.stepped(1.0, False)
    assert made.seconds == 0.0


@pytest.mark.parametrize(
    ("cost", "mtbf", "expected"),
    [(2.0, 100.0, 20.0), (0.5, DAY, 293.9387691339814), (60.0, 3600.0, 657.2670690061994)],
)
def test_the_interval_is_that_of_young_and_daly(cost: float, mtbf: float, expected: float) -> None:
    made = auto(mtbf_seconds=mtbf)
    made.saved(cost, 0.0)
    assert made.seconds == pytest.approx(expected, rel=1e-12)


def test_slower_steps_during_a_save_are_a_cost() -> None:
    made = auto()
    for _ in range(20):
        made.stepped(1.0, False)
    for seconds in (1.5, 1.25, 1.0):
        made.stepped(seconds, True)
    made.saved(0.25, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * 1.0 * DAY))


def test_faster_steps_during_a_save_are_no_gain() -> None:
    made = auto()
    for _ in range(20):
        made.stepped(1.0, False)
    made.stepped(0.1, True)
    made.saved(0.25, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * 0.25 * DAY))


def test_slow_steps_count_for_the_running_save() -> None:
    made = auto()
    made.stepped(1.0, False)
    made.stepped(5.0, True)
    made.saved(1.0, 0.0)
    made.saved(1.0, 0.0)
    made.saved(1.0, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * 1.0 * DAY))


def test_the_first_save_counts_until_the_second_has_ended() -> None:
    made = auto()
    made.saved(50.0, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * 50.0 * DAY))
    made.saved(2.0, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * 2.0 * DAY))


def test_one_slow_save_does_not_change_the_cost() -> None:
    made = auto()
    for cost in (9.0, 1.0, 1.0, 100.0, 1.0, 1.0):
        made.saved(cost, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * 1.0 * DAY))


def test_the_interval_follows_changing_costs() -> None:
    made = auto()
    for cost in [1.0] * 20 + [4.0] * 6:
        made.saved(cost, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * 4.0 * DAY))


@pytest.mark.parametrize("cost", [0.001, 1.0, 500.0, 50_000.0])
@pytest.mark.parametrize("max_overhead", [0.001, 0.01, 0.3])
def test_saves_cost_no_more_than_their_bound(cost: float, max_overhead: float) -> None:
    made = auto(max_overhead, mtbf_seconds=600.0)
    made.saved(cost, 0.0)
    assert cost / made.seconds <= max_overhead * (1 + 1e-9)


def test_a_save_does_not_start_before_the_previous_one_is_written() -> None:
    made = auto()
    made.saved(0.001, 4000.0)
    assert made.seconds == 4000.0


@pytest.mark.parametrize("max_overhead", [0.0, 1.0, -0.1, math.nan])
def test_an_overhead_that_is_not_a_fraction_is_refused(max_overhead: float) -> None:
    with pytest.raises(ValueError, match="max_overhead must be between 0 and 1"):
        AutoInterval(max_overhead, DAY)


@pytest.mark.parametrize("mtbf", [0.0, -3600.0, math.nan])
def test_a_time_between_failures_that_is_not_positive_is_refused(mtbf: float) -> None:
    with pytest.raises(ValueError, match="mtbf_seconds"):
        AutoInterval(0.01, mtbf)


def test_the_first_save_starts_at_once_and_its_cost_schedules_the_next(clock: Clock) -> None:
    made = schedule("auto", clock=clock)
    assert made.auto is not None
    assert made.should_save(1, idle)
    made.save_started()
    # While the first save is running, the cost of a save is unknown.
    clock.now += 100
    assert not made.should_save(2, busy)
    made.auto.saved(3.0, 0.5)
    clock.now += math.sqrt(2 * 3.0 * DAY) - 100 - 1
    assert not made.should_save(3, idle)
    clock.now += 1.5
    assert made.should_save(4, idle)


# --- ranks ---------------------------------------------------------------------------------------


def schedules(
    store: dist.Store,
    size: int,
    interval: Interval,
    *,
    timeout: float = PATIENCE,
    **options: Any,
) -> list[Schedule]:
    return [
        schedule(interval, group=RankGroup(store, rank, size, "test"), timeout=timeout, **options)
        for rank in range(size)
    ]


def together(made: list[Schedule], work: Callable[[int, Schedule], Any]) -> list[Any]:
    """Calls a function for all schedules in threads. Returns the result or exception of each
    rank."""
    with ThreadPoolExecutor(len(made)) as pool:
        futures = [pool.submit(work, rank, one) for rank, one in enumerate(made)]
        return [future.exception(PATIENCE) or future.result() for future in futures]


def test_all_ranks_save_at_the_steps_that_rank_0_chooses(any_store: dist.Store) -> None:
    made = schedules(any_store, 3, timedelta(hours=1))
    # Shift the clocks of ranks 0 and 1: only rank 0's counts.
    made[0]._last_start -= 7200
    made[1]._last_start -= 3600

    def work(_rank: int, one: Schedule) -> list[int]:
        found = []
        for step in range(1, 40):
            if one.should_save(step, idle):
                found.append(step)
                one.save_started()
        return found

    assert together(made, work) == [[1]] * 3
    assert made[0].decisions.count == made[1].decisions.count == made[2].decisions.count


def test_ranks_that_are_busy_at_other_steps_follow_rank_0(store: dist.Store) -> None:
    made = schedules(store, 2, 2, skip_if_busy=True)
    steps = range(1, 9)
    of_rank = [[busy, idle, busy, idle, idle, busy, idle, busy], [idle, busy] * 4]

    def work(rank: int, one: Schedule) -> list[int]:
        return [
            s for s, state in zip(steps, of_rank[rank], strict=True) if one.should_save(s, state)
        ]

    assert together(made, work) == [[2, 4], [2, 4]]


def test_a_rank_that_is_ahead_waits_for_rank_0(store: dist.Store) -> None:
    rank_0, rank_1 = schedules(store, 2, timedelta(hours=1))
    rank_0._last_start -= 7200
    asked = threading.Event()

    class Noticing:
        """The store as rank 1 uses it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            asked.set()
            return store.compare_set(key, expected, desired)

    rank_1.decisions._group.keys = lambda below: Noticing()  # type: ignore[assignment,method-assign,return-value]
    rank_0.decisions._group.keys = lambda below: store  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(rank_1.should_save, 1, idle)
        assert asked.wait(PATIENCE)
        assert not ahead.done()
        assert rank_0.should_save(1, idle)
        assert ahead.result(PATIENCE)


def test_within_a_block_no_rank_reads_the_store(store: dist.Store) -> None:
    made = schedules(store, 2, timedelta(hours=1))
    together(made, lambda _rank, one: [one.should_save(step, idle) for step in range(1, 2000)])
    assert made[0].decisions.count < 100
    before = made[1].decisions.count
    # Rank 0 does not run now, so it cannot decide.
    block = made[1].decisions._block
    inside = range(1999, block.stop)
    assert [made[1].should_save(step, idle) for step in inside] == [False] * len(inside)
    assert made[1].decisions.count == before


def test_a_rank_at_another_step_raises(store: dist.Store) -> None:
    made = schedules(store, 2, timedelta(hours=1))
    outcomes = together(made, lambda rank, one: one.should_save(5 + rank, idle))
    assert outcomes[0] is False
    assert isinstance(outcomes[1], CheckpointError)
    assert "rank 1 is at step 6, but rank 0 is at step 5" in str(outcomes[1])


def test_a_missing_rank_0_is_named(store: dist.Store) -> None:
    _rank_0, rank_1 = schedules(store, 2, timedelta(hours=1), timeout=SHORT)
    with pytest.raises(CheckpointException) as caught:
        rank_1.should_save(1, idle)
    [(rank, (cause, _stack))] = caught.value.failures.items()
    assert rank == 0
    assert isinstance(cause, TimeoutError)
    assert "rank 0 sent no heartbeat for 0.4 s during 'save decision'" in str(cause)


def test_a_lost_store_is_an_error_of_the_rank_itself() -> None:
    class Lost:
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("connection reset by peer")

    rank_1 = schedule(timedelta(hours=1), group=RankGroup(dist.HashStore(), 1, 2, "test"))
    rank_1.decisions._group.keys = lambda below: Lost()  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(CheckpointException) as caught:
        rank_1.should_save(1, idle)
    [(rank, (cause, _stack))] = caught.value.failures.items()
    assert rank == 1
    assert isinstance(cause, ConnectionError)


def test_decisions_that_all_ranks_have_read_are_deleted(store: dist.Store) -> None:
    made = schedules(store, 2, 1, skip_if_busy=True)
    before = store.num_keys()
    together(made, lambda _rank, one: [one.should_save(step, idle) for step in range(1, 11)])
    assert store.num_keys() == before + 10
    made[0].decisions.delete(7)
    assert store.num_keys() == before + 3
    made[0].decisions.delete(7)
    made[0].decisions.delete(made[0].decisions.count)
    assert store.num_keys() == before
    # Decisions continue with the next number.
    assert together(made, lambda _rank, one: one.should_save(11, idle)) == [True, True]


def test_schedules_of_two_managers_are_independent(store: dist.Store) -> None:
    groups = [RankGroup(store, rank, 2, "test") for rank in range(2)]
    one = [schedule(1, group=g.subgroup("one"), skip_if_busy=True) for g in groups]
    other = [schedule(1, group=g.subgroup("other"), skip_if_busy=True) for g in groups]
    both = list(zip(one, other, strict=True))

    def work(rank: int, _schedule: Schedule) -> list[bool]:
        first, second = both[rank]
        return [first.should_save(1, busy), second.should_save(1, idle), first.should_save(2, idle)]

    assert together(one, work) == [[False, True, True]] * 2


# --- failures ------------------------------------------------------------------------------------


def test_after_a_failure_the_next_save_is_delayed() -> None:
    auto = AutoInterval(0.01, 3600.0)
    assert auto.seconds == 0
    auto.failed()
    first = auto.seconds
    auto.failed()
    assert 0 < first < auto.seconds


def test_the_duration_of_a_failed_save_is_no_cost() -> None:
    auto, other = AutoInterval(0.01, 3600.0), AutoInterval(0.01, 3600.0)
    for one in (auto, other):
        for _ in range(3):
            one.stepped(1.0, is_saving=False)
    auto.stepped(100.0, is_saving=True)
    auto.failed()
    for one in (auto, other):
        one.saved(0.5, 1.0)
    assert auto.seconds == other.seconds
