"""Tests of Schedule: the interval of Young and Daly, and rank 0's decisions, with threads as
ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.rank_threads import PATIENCE_SECONDS, in_threads
from torch_ckpt.intervals import AutoInterval, MeasuredInterval
from torch_ckpt.manager import SaveOptions
from torch_ckpt.manager.policies import Interval
from torch_ckpt.manager.schedule import Schedule
from torch_ckpt.ranks.group import RankGroup

DAY = 86400.0
NAN = math.nan


class Clock:
    """A clock that tests advance."""

    now = 1000.0

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
    clock: Callable[[], float] = time.monotonic,
) -> Schedule:
    return Schedule(
        interval,
        SaveOptions(save_on_steps=steps, if_busy="skip" if skip_if_busy else "wait"),
        group=group or RankGroup(None, 0, 1, ""),
        timeout=PATIENCE_SECONDS,
        clock=clock,
    )


def saves(made: Schedule, step: int, is_busy: Callable[[], bool]) -> bool:
    return made.decide(step, is_busy).saves


def idle() -> bool:
    return False


def busy() -> bool:
    return True


# --- intervals in steps --------------------------------------------------------------------------


#: Schedule, whether a save is running, and the steps that are saved, by the name of the case.
INTERVALS: dict[str, tuple[Callable[[], Schedule], Callable[[], bool], list[int]]] = {
    "an integer": (lambda: schedule(5), idle, [5, 10]),
    "a function of the step": (lambda: schedule(lambda step: step in (2, 3)), idle, [2, 3]),
    "chosen steps and an integer": (lambda: schedule(5, [3, 5, 8]), idle, [3, 5, 8, 10]),
    "chosen steps and a function": (lambda: schedule(lambda _step: False, (4,)), idle, [4]),
    "chosen steps and hours": (lambda: schedule(timedelta(hours=9), (4,)), idle, [4]),
    "a running save postpones none by default": (lambda: schedule(5), busy, [5, 10]),
    "a running save with skip": (lambda: schedule(5, skip_if_busy=True), busy, []),
    "no running save with skip": (lambda: schedule(5, skip_if_busy=True), idle, [5, 10]),
    "chosen steps are not skipped": (
        lambda: schedule(5, (3, 4), skip_if_busy=True),
        busy,
        [3, 4],
    ),
}


@pytest.mark.parametrize("case", INTERVALS)
def test_the_interval_and_the_chosen_steps_decide_which_steps_are_saved(case: str) -> None:
    make, is_busy, expected = INTERVALS[case]
    made = make()
    assert [step for step in range(1, 11) if saves(made, step, is_busy)] == expected


REFUSED: list[tuple[Any, str]] = [
    *((interval, "must be") for interval in (0, -1, 2.5, True, "weekly", None)),
    *((timedelta(seconds=seconds), "must be positive") for seconds in (0, -5)),
]


@pytest.mark.parametrize(("interval", "text"), REFUSED, ids=str)
def test_other_intervals_are_refused(interval: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"interval {text}"):
        schedule(interval)


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
        if saves(made, step, idle):
            found.append((step, clock.now - last))
            last = clock.now
            made.save_started()
    return found


def test_saves_keep_the_time_interval_and_an_extra_save_postpones_the_next(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    assert run(made, clock, range(1, 38)) == [(10, 10.0), (20, 10.0), (30, 10.0)]
    made.save_started()
    assert run(made, clock, range(38, 50)) == [(47, 10.0)]


def test_fast_steps_are_decided_in_blocks_and_slow_ones_one_by_one(clock: Clock) -> None:
    made = schedule(timedelta(seconds=10), clock=clock)
    saves = run(made, clock, range(1, 10_001), seconds=0.01)
    # A block is half a second of steps, so a save is at most half a second late.
    assert len(saves) in (9, 10)
    assert all(10.0 - 1e-6 <= apart <= 10.5 + 1e-6 for _step, apart in saves)
    assert made.agreement.count < 10_000 / 40
    made = schedule(timedelta(seconds=10), clock=clock)
    run(made, clock, range(1, 101), seconds=1.0)
    assert made.agreement.count == 100


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
    assert not saves(made, 1, busy)
    clock.now += 1
    assert saves(made, 2, idle)


# --- Young and Daly ------------------------------------------------------------------------------


def auto(max_overhead: float = 0.5, mtbf_seconds: float = DAY) -> MeasuredInterval:
    return MeasuredInterval(AutoInterval(max_overhead=max_overhead, mtbf_hours=mtbf_seconds / 3600))


@pytest.mark.parametrize(
    ("cost", "mtbf", "expected"),
    [(2.0, 100.0, 20.0), (0.5, DAY, 293.9387691339814), (60.0, 3600.0, 657.2670690061994)],
)
def test_after_the_first_save_the_interval_is_that_of_young_and_daly(
    cost: float, mtbf: float, expected: float
) -> None:
    made = auto(mtbf_seconds=mtbf)
    made.stepped(1.0, False)
    assert made.seconds == 0.0
    made.saved(cost, 0.0)
    assert made.seconds == pytest.approx(expected, rel=1e-12)


EVEN = [(1.0, False)] * 20

#: Durations of steps with whether a save was running, durations of saves, and the cost of a save.
COSTS: dict[str, tuple[list[tuple[float, bool]], list[float], float]] = {
    "slower steps during a save are a cost": (
        [*EVEN, (1.5, True), (1.25, True), (1.0, True)],
        [0.25],
        1.0,
    ),
    "faster steps during a save are no gain": ([*EVEN, (0.1, True)], [0.25], 0.25),
    "slow steps count for the running save": ([(1.0, False), (5.0, True)], [1.0] * 3, 1.0),
    "the first save counts": ([], [50.0], 50.0),
    "until the second has ended": ([], [50.0, 2.0], 2.0),
    "one slow save does not change the cost": ([], [9.0, 1.0, 1.0, 100.0, 1.0, 1.0], 1.0),
    "the cost follows the saves": ([], [1.0] * 20 + [4.0] * 6, 4.0),
}


@pytest.mark.parametrize("case", COSTS)
def test_the_cost_of_a_save_is_that_of_the_usual_one(case: str) -> None:
    steps, saves, cost = COSTS[case]
    made = auto()
    for step in steps:
        made.stepped(*step)
    for seconds in saves:
        made.saved(seconds, 0.0)
    assert made.seconds == pytest.approx(math.sqrt(2 * cost * DAY))


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(({"max_overhead": part}, "between 0 and 1") for part in (0.0, 1.0, -0.1, NAN)),
        *(({"mtbf_hours": mtbf}, "mtbf_hours, .*, must be") for mtbf in (0.0, -1.0, NAN)),
    ],
)
def test_other_overheads_and_times_between_failures_are_refused(
    options: dict[str, float], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        AutoInterval(**options)


def test_the_first_save_starts_at_once_and_its_cost_schedules_the_next(clock: Clock) -> None:
    made = schedule("auto", clock=clock)
    assert made.auto is not None
    assert saves(made, 1, idle)
    made.save_started()
    # While the first save is running, the cost of a save is unknown.
    clock.now += 100
    assert not saves(made, 2, busy)
    made.auto.saved(3.0, 0.5)
    clock.now += math.sqrt(2 * 3.0 * DAY) - 100 - 1
    assert not saves(made, 3, idle)
    clock.now += 1.5
    assert saves(made, 4, idle)


# --- ranks ---------------------------------------------------------------------------------------


def schedules(
    store: dist.Store,
    size: int,
    interval: Interval,
    **options: Any,
) -> list[Schedule]:
    return [
        schedule(interval, group=RankGroup(store, rank, size, "test"), **options)
        for rank in range(size)
    ]


def test_ranks_that_are_busy_at_other_steps_follow_rank_0(store: dist.Store) -> None:
    made = schedules(store, 2, 2, skip_if_busy=True)
    steps = range(1, 9)
    of_rank = [[busy, idle, busy, idle, idle, busy, idle, busy], [idle, busy] * 4]

    def work(rank: int, one: Schedule) -> list[int]:
        return [s for s, state in zip(steps, of_rank[rank], strict=True) if saves(one, s, state)]

    assert in_threads(made, work) == [[2, 4], [2, 4]]


def test_schedules_of_two_managers_are_independent(store: dist.Store) -> None:
    groups = [RankGroup(store, rank, 2, "test") for rank in range(2)]
    one = [schedule(1, group=g.subgroup("one"), skip_if_busy=True) for g in groups]
    other = [schedule(1, group=g.subgroup("other"), skip_if_busy=True) for g in groups]
    both = list(zip(one, other, strict=True))

    def work(rank: int, _schedule: Schedule) -> list[bool]:
        first, second = both[rank]
        return [saves(first, 1, busy), saves(second, 1, idle), saves(first, 2, idle)]

    assert in_threads(one, work) == [[False, True, True]] * 2


def test_rank_0_decides_whether_it_is_idle_unless_a_save_starts(store: dist.Store) -> None:
    made = schedules(store, 2, 2)

    def work(rank: int, one: Schedule) -> list[tuple[bool, bool]]:
        is_busy = (idle, busy)[rank]
        return [tuple(one.decide(step, is_busy, asks_idle=True)) for step in (1, 2, 3)]

    assert in_threads(made, work) == [[(False, True), (True, False), (False, True)]] * 2


def test_a_rank_that_does_not_ask_whether_rank_0_is_idle_makes_no_request() -> None:
    lost = schedule(2, group=RankGroup(None, 1, 2, "test"))
    assert [lost.decide(step, idle) for step in (1, 2)] == [(False, False), (True, False)]


# --- failures ------------------------------------------------------------------------------------


def test_after_a_failure_the_next_save_is_delayed() -> None:
    made = auto()
    made.failed()
    first = made.seconds
    made.failed()
    assert 0 < first < made.seconds


def test_the_duration_of_a_failed_save_is_no_cost() -> None:
    made, other = auto(), auto()
    for one in (made, other):
        for _ in range(3):
            one.stepped(1.0, is_saving=False)
    made.stepped(100.0, is_saving=True)
    made.failed()
    for one in (made, other):
        one.saved(0.5, 1.0)
    assert made.seconds == other.seconds
