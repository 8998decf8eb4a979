"""Ranks of a save that communicate through a store: threads as ranks, stores in this process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from traceback import StackSummary
from typing import Any

import pytest
import torch.distributed as dist

from tests.fault_hooks import at_fault_points
from tests.rank_threads import (
    PATIENCE_SECONDS,
    SHORT,
    causes_of,
    fail,
    ranks_of,
    save,
    tcp_store,
    together,
)
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.failures import Failure
from torch_ckpt.ranks.group import RankGroup


def scatter(
    ranks: Exchange,
    local: Callable[[], Any],
    combine: Callable[[list[Any]], list[Any]],
    step: str = "plan",
) -> Any:
    """Sends the local value, and returns this rank's element of the combined values."""
    return ranks.exchange(step, lambda: (local(), None), lambda values: Answers(combine(values)))[0]


# --- what the steps give -------------------------------------------------------------------------


def test_each_rank_receives_its_part_of_the_combined_result(any_store: dist.Store) -> None:
    outcomes = together(
        ranks_of(any_store, 3),
        lambda ranks: scatter(
            ranks, lambda: ranks.rank, lambda values: [f"{values} for {v}" for v in values]
        ),
    )
    assert outcomes == {rank: f"[0, 1, 2] for {rank}" for rank in range(3)}


def test_all_ranks_receive_the_combined_result(any_store: dist.Store) -> None:
    outcomes = together(ranks_of(any_store, 3), lambda ranks: save(ranks, lambda: ranks.rank, sum))
    assert outcomes == {0: 3, 1: 3, 2: 3}


def test_each_rank_keeps_its_own_result_if_all_succeed(any_store: dist.Store) -> None:
    outcomes = together(ranks_of(any_store, 3), lambda ranks: ranks.run("load", lambda: ranks.rank))
    assert outcomes == {0: 0, 1: 1, 2: 2}


def test_steps_of_one_name_follow_each_other(store: dist.Store) -> None:
    def twice(ranks: Exchange) -> list[Any]:
        return [scatter(ranks, lambda: n, list) for n in (1, 2)]  # noqa: B023

    assert together(ranks_of(store, 2), twice) == {0: [1, 2], 1: [1, 2]}


def test_a_single_rank_needs_no_other(store: dist.Store) -> None:
    [ranks] = ranks_of(store, 1)
    assert save(ranks) == ["part"]
    assert scatter(ranks, lambda: 5, list) == 5
    assert ranks.run("load", lambda: 7) == 7


def test_without_distribution_each_process_is_separate() -> None:
    group = RankGroup.of(None, no_dist=True)
    ranks = Exchange.open(group, "save", SHORT)
    with ranks.alive(lambda: 0):
        assert save(ranks) == ["part"]
    ranks.close()
    assert (group.rank, group.size, group.distributed) == (0, 1, False)
    assert (ranks.rank, ranks.size, ranks.distributed) == (0, 1, False)


def test_values_can_be_larger_than_the_limit_of_the_store() -> None:
    large = bytes(range(256)) * (40 << 10)
    ranks = ranks_of(tcp_store(), 2)
    parts = together(ranks, lambda r: scatter(r, lambda: large, list))
    assert all(part == large for part in parts.values())
    outcomes = together(ranks, lambda ranks: save(ranks, lambda: large))
    assert all(outcome == [large, large] for outcome in outcomes.values())


def test_two_concurrent_saves_are_independent(store: dist.Store) -> None:
    groups = [RankGroup(store, rank, 2, "test") for rank in range(2)]
    first, second = ([Exchange.open(one, "save", 300.0) for one in groups] for _ in range(2))
    later_one_is_through = threading.Event()

    def late(ranks: Exchange) -> Any:
        later_one_is_through.wait(PATIENCE_SECONDS)
        return save(ranks, lambda: "first")

    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(together, first, late)
        assert together(second, lambda ranks: save(ranks, lambda: "second")) == {
            rank: ["second", "second"] for rank in range(2)
        }
        later_one_is_through.set()
        assert others.result() == {rank: ["first", "first"] for rank in range(2)}


# --- what fails ----------------------------------------------------------------------------------

STEPS: dict[str, Callable[[Exchange, Callable[[], Any]], Any]] = {
    "separate answers": lambda ranks, local: scatter(ranks, local, list, "write"),
    "one answer": lambda ranks, local: save(ranks, local),
    "no answer": lambda ranks, local: ranks.run("write", local),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_on_one_rank_raises_its_error_on_all(store: dist.Store, step: str) -> None:
    def work(ranks: Exchange) -> Any:
        return STEPS[step](ranks, lambda: fail(f"of {ranks.rank}") if ranks.rank else None)

    for outcome in together(ranks_of(store, 3), work).values():
        assert causes_of(outcome) == {1: "OSError('of 1')", 2: "OSError('of 2')"}


def test_a_failing_combination_fails_all(store: dist.Store) -> None:
    def combine(values: list[Any]) -> Any:
        return fail("no")

    ranks = ranks_of(store, 2)
    for outcome in together(ranks, lambda ranks: save(ranks, combine=combine)).values():
        assert causes_of(outcome) == {0: "OSError('no')"}
    plans = together(ranks, lambda r: scatter(r, lambda: 0, combine))
    for outcome in plans.values():
        assert causes_of(outcome) == {0: "OSError('no')"}


def test_a_value_that_does_not_pickle_fails_all(store: dist.Store) -> None:
    def work(ranks: Exchange) -> Any:
        return save(ranks, lambda: threading.Lock() if ranks.rank == 1 else None)

    for outcome in together(ranks_of(store, 2), work).values():
        assert "cannot pickle" in causes_of(outcome)[1]


def test_an_answer_that_does_not_pickle_fails_all(store: dist.Store) -> None:
    def work(ranks: Exchange) -> Any:
        return save(ranks, combine=lambda values: threading.Lock())

    for outcome in together(ranks_of(store, 2), work).values():
        assert "cannot pickle" in causes_of(outcome)[0]


def test_only_ranks_that_succeeded_undo_their_part(store: dist.Store) -> None:
    undone: list[int] = []

    def work(ranks: Exchange) -> Any:
        def local() -> int:
            return fail("no") if ranks.rank == 1 else ranks.rank

        return save(ranks, local, undo=undone.append)

    together(ranks_of(store, 3), work)
    assert sorted(undone) == [0, 2]


def test_nothing_is_undone_once_combining_has_started(store: dist.Store) -> None:
    undone: list[Any] = []
    together(
        ranks_of(store, 2),
        lambda r: save(r, combine=lambda values: fail("no"), undo=undone.append),
    )
    assert undone == []


# --- silent ranks --------------------------------------------------------------------------------


def test_all_missing_ranks_are_named_with_the_phase_on_every_other_rank(store: dist.Store) -> None:
    undone: list[Any] = []
    present = ranks_of(store, 4, SHORT)[:2]
    outcomes = together(present, lambda ranks: save(ranks, undo=undone.append))
    assert causes_of(outcomes[0]) == causes_of(outcomes[1])
    assert set(causes_of(outcomes[0])) == {2, 3}
    assert "ranks 2, 3 sent no heartbeat for 0.4 s during 'write'" in str(outcomes[0])
    assert all(type(cause) is TimeoutError for cause, _stack in outcomes[0].failures.values())
    assert undone == ["part", "part"]


def test_a_rank_that_fell_silent_later_is_named_with_the_others(store: dist.Store) -> None:
    coordinator, _, later = ranks_of(store, 3, SHORT)
    with later.alive(lambda: 1):
        [outcome] = together([coordinator], save).values()
    assert "ranks 1, 2 sent no heartbeat" in str(outcome)


def test_ranks_that_miss_their_coordinator_agree_on_the_missing_ranks(store: dist.Store) -> None:
    present = ranks_of(store, 4, SHORT)[1:3]
    outcomes = together(present, save)
    assert causes_of(outcomes[1]) == causes_of(outcomes[2])
    assert "ranks 0, 3 sent no heartbeat" in str(outcomes[1])


@pytest.mark.parametrize("step", STEPS)
def test_a_straggler_fails_like_the_others(store: dist.Store, step: str) -> None:
    *others, late = ranks_of(store, 3, SHORT)
    outcomes = together(others, lambda ranks: STEPS[step](ranks, lambda: None))
    outcomes |= together([late], lambda ranks: STEPS[step](ranks, lambda: None))
    for outcome in outcomes.values():
        assert causes_of(outcome) == causes_of(outcomes[0])
        assert set(causes_of(outcome)) == {2}


def test_a_straggler_undoes_its_part(store: dist.Store) -> None:
    undone: list[Any] = []
    together(ranks_of(store, 2, SHORT)[:1], save)
    together(ranks_of(store, 2, SHORT)[1:], lambda ranks: save(ranks, undo=undone.append))
    assert undone == ["part"]


@pytest.mark.parametrize("step", ["separate answers", "one answer"])
def test_a_coordinator_that_was_declared_dead_fails(store: dist.Store, step: str) -> None:
    coordinator, *others = ranks_of(store, 3, SHORT)
    outcomes = together(others, lambda ranks: STEPS[step](ranks, lambda: None))
    outcomes |= together([coordinator], lambda ranks: STEPS[step](ranks, lambda: None))
    for outcome in outcomes.values():
        assert causes_of(outcome) == causes_of(outcomes[1])
        assert set(causes_of(outcome)) == {0}


def test_a_rank_that_arrives_after_the_coordinator_was_declared_dead_does_not_wait(
    store: dist.Store,
) -> None:
    _, patient, _ = ranks_of(store, 3, PATIENCE_SECONDS)
    _, _, impatient = ranks_of(store, 3, SHORT)
    outcomes = together([impatient], save) | together([patient], save)
    assert causes_of(outcomes[1]) == causes_of(outcomes[2])


def test_a_coordinator_that_was_declared_dead_does_not_commit(store: dist.Store) -> None:
    committed: list[Any] = []
    coordinator, other = ranks_of(store, 2, SHORT)
    together([other], save)
    together([coordinator], lambda ranks: save(ranks, combine=committed.append))
    assert committed == []


def test_nothing_is_undone_if_the_coordinator_may_have_committed(store: dist.Store) -> None:
    undone: list[Any] = []
    given_up = threading.Event()

    def work(ranks: Exchange) -> Any:
        try:
            return save(ranks, combine=lambda values: given_up.wait(), undo=undone.append)
        finally:
            given_up.set()

    outcome = together(ranks_of(store, 2, SHORT), work)[1]
    assert "rank 0 may have committed" in str(outcome)
    assert undone == []


class SlowWork:
    """Work that ends after twenty heartbeats, of which each takes a tenth of the timeout."""

    def __init__(self) -> None:
        self._count = 0
        self._is_done = threading.Event()

    def beat(self) -> int:
        self._count += 1
        if self._count == 20:
            self._is_done.set()
        return self._count

    def run(self, ranks: Exchange) -> bool:
        with ranks.alive(self.beat):
            return self._is_done.wait(PATIENCE_SECONDS)


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_wait_for_a_rank_whose_heartbeat_advances(store: dist.Store, slow: int) -> None:
    slow_work = SlowWork()

    def work(ranks: Exchange) -> Any:
        return save(ranks, lambda: ranks.rank != slow or slow_work.run(ranks))

    outcomes = together(ranks_of(store, 3, SHORT), work)
    assert outcomes == {rank: [True, True, True] for rank in range(3)}


def test_ranks_wait_for_a_coordinator_whose_heartbeat_advances_while_combining(
    store: dist.Store,
) -> None:
    slow_work = SlowWork()

    def work(ranks: Exchange) -> Any:
        return save(ranks, combine=lambda values: slow_work.run(ranks))

    assert together(ranks_of(store, 2, SHORT), work) == {0: True, 1: True}


def test_a_woken_rank_polls_the_store_as_often_as_at_the_start(store: dist.Store) -> None:
    waiting = ranks_of(store, 2)[1]
    looks: queue.SimpleQueue[float] = queue.SimpleQueue()

    def hook(operation: str, _path: str) -> None:
        if operation == "wait for ranks":
            looks.put(time.monotonic())

    def rests(count: int) -> list[float]:
        """Returns the times between ``count`` reads of the store."""
        return [
            b - a for a, b in pairwise(looks.get(timeout=PATIENCE_SECONDS) for _ in range(count))
        ]

    def rests_around_a_wake() -> tuple[float, float]:
        """Returns the longest rest before the wake, and the sum of five after it."""
        longest = max(rests(40))
        waiting.wake()
        # It may have read the store just before.
        rests(2)
        return longest, sum(rests(6))

    with at_fault_points(hook), ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(save, waiting)
        # Several measurements, because any rest may be long on a busy machine.
        found = [rests_around_a_wake() for _ in range(3)]
        waiting.cancel(Failure(OSError("enough"), StackSummary()))
        assert "enough" in str(outcome.exception(PATIENCE_SECONDS))
    assert any(five < 2 * longest for longest, five in found), found


def test_a_rank_whose_heartbeat_stops_advancing_is_declared_dead(store: dist.Store) -> None:
    others_have_failed = threading.Event()
    ranks = ranks_of(store, 2, SHORT)

    def work(ranks: Exchange) -> Any:
        def local() -> bool:
            with ranks.alive(lambda: 5):
                return others_have_failed.wait(PATIENCE_SECONDS)

        try:
            return save(ranks, local if ranks.rank == 1 else lambda: True)
        finally:
            others_have_failed.set()

    for outcome in together(ranks, work).values():
        assert set(causes_of(outcome)) == {1}


# --- the store -----------------------------------------------------------------------------------


def complete_save(ranks: Exchange, last: Callable[[Exchange], Any] = save) -> None:
    """Runs a save of several steps and a large value, with heartbeats, to its end."""
    beaten = threading.Event()

    def local() -> None:
        with ranks.alive(lambda: beaten.set() or 1):  # type: ignore[func-returns-value]
            beaten.wait(PATIENCE_SECONDS)

    try:
        ranks.run("start", local)
        scatter(ranks, lambda: bytes(9 << 20), list)
        last(ranks)
    finally:
        ranks.close(PATIENCE_SECONDS)


def test_a_save_leaves_no_keys(any_store: dist.Store) -> None:
    assert together(ranks_of(any_store, 3, 5.0), complete_save) == dict.fromkeys(range(3))
    assert any_store.num_keys() == 0


def test_a_failed_save_leaves_no_keys(any_store: dist.Store) -> None:
    def last(ranks: Exchange) -> Any:
        return save(ranks, lambda: fail("no") if ranks.rank == 1 else None)

    outcomes = together(ranks_of(any_store, 3, 5.0), lambda ranks: complete_save(ranks, last))
    assert all(set(causes_of(outcome)) == {1} for outcome in outcomes.values())
    assert any_store.num_keys() == 0


def shared_bytes_of(ranks: Exchange, fails_on: int | None = None) -> Any:
    """Returns the bytes that the coordinator has received of data that ranks share."""

    def local() -> Any:
        token = ranks.share(b"alike" if ranks.rank < 2 else b"other")
        return fail("no") if ranks.rank == fails_on else token

    try:
        return scatter(
            ranks, local, lambda tokens: [[ranks.shared(t) for t in tokens]] * len(tokens)
        )
    finally:
        ranks.close(PATIENCE_SECONDS)


def test_shared_bytes_reach_the_coordinator(any_store: dist.Store) -> None:
    received = together(ranks_of(any_store, 3, 5.0), shared_bytes_of)
    assert received == {rank: [b"alike", b"alike", b"other"] for rank in range(3)}
    assert any_store.num_keys() == 0


def test_shared_bytes_are_deleted_with_a_failed_step(any_store: dist.Store) -> None:
    together(ranks_of(any_store, 3, 5.0), lambda ranks: shared_bytes_of(ranks, fails_on=2))
    assert any_store.num_keys() == 0


def test_a_single_process_keeps_its_shared_bytes() -> None:
    assert shared_bytes_of(Exchange()) == [b"alike"]


def saved_and_closed(ranks: Exchange) -> None:
    try:
        save(ranks)
    finally:
        ranks.close(PATIENCE_SECONDS)


def names_of_keys(store: dist.Store) -> set[str]:
    return {key.removeprefix("torch_ckpt/test/save/0/") for key in store.list_keys()}


def test_only_the_verdict_is_left_for_a_rank_that_was_declared_dead(store: dist.Store) -> None:
    together(ranks_of(store, 3, SHORT)[:2], saved_and_closed)
    assert names_of_keys(store) == {"1.write/verdict", "1.write/to/all"}


def test_a_straggler_leaves_none_of_its_values(store: dist.Store) -> None:
    *others, late = ranks_of(store, 3, SHORT)
    together(others, saved_and_closed)
    before = names_of_keys(store)
    together([late], saved_and_closed)
    assert names_of_keys(store) == before | {"bye/2"}


def test_the_coordinator_closes_after_all_have_read_the_answer(store: dist.Store) -> None:
    coordinator, other = ranks_of(store, 2, SHORT)
    together([coordinator, other], save)
    sign_of_waiting = "torch_ckpt/test/save/0/alive/0"
    store.delete_key(sign_of_waiting)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(coordinator.close, PATIENCE_SECONDS)
        store.wait([sign_of_waiting])
        assert not closing.done()
        other.close()
        closing.result()
    assert store.num_keys() == 0


def test_the_coordinator_closes_after_a_timeout(store: dist.Store) -> None:
    coordinator, other = ranks_of(store, 2)
    together([coordinator, other], save)
    coordinator.close(timeout=0.05)
    assert store.num_keys() > 0
