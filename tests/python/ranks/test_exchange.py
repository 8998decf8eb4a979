"""Ranks of a save that communicate through a store: threads as ranks, stores in this process."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


def test_each_step_returns_its_own_result_to_each_rank(any_store: dist.Store) -> None:
    def work(ranks: Exchange) -> list[Any]:
        return [
            scatter(
                ranks, lambda: ranks.rank, lambda values: [f"{values} for {v}" for v in values]
            ),
            *(scatter(ranks, lambda: n, list) for n in (1, 2)),  # noqa: B023
            save(ranks, lambda: ranks.rank, sum),
            ranks.run("load", lambda: ranks.rank),
        ]

    outcomes = together(ranks_of(any_store, 3), work)
    assert outcomes == {rank: [f"[0, 1, 2] for {rank}", 1, 2, 3, rank] for rank in range(3)}


def test_a_single_rank_needs_no_other(store: dist.Store) -> None:
    [ranks] = ranks_of(store, 1)
    assert save(ranks) == ["part"]
    assert scatter(ranks, lambda: 5, list) == 5
    assert ranks.run("load", lambda: 7) == 7
    assert shared_bytes_of(Exchange()) == [b"alike"]


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


@pytest.mark.parametrize(
    ("work", "rank", "cause"),
    [
        (lambda ranks: save(ranks, combine=lambda values: fail("no")), 0, "OSError('no')"),
        (lambda ranks: scatter(ranks, int, lambda values: fail("no")), 0, "OSError('no')"),
        (
            lambda ranks: save(ranks, lambda: threading.Lock() if ranks.rank == 1 else None),
            1,
            'TypeError("cannot pickle',
        ),
        (
            lambda ranks: save(ranks, combine=lambda values: threading.Lock()),
            0,
            'TypeError("cannot pickle',
        ),
    ],
    ids=["combination", "combination of separate answers", "unpicklable value", "answer"],
)
def test_what_cannot_be_combined_or_sent_fails_all_ranks(
    store: dist.Store, work: Callable[[Exchange], Any], rank: int, cause: str
) -> None:
    for outcome in together(ranks_of(store, 2), work).values():
        ((found, text),) = causes_of(outcome).items()
        assert found == rank
        assert text.startswith(cause)


def test_only_ranks_that_succeeded_undo_their_part(store: dist.Store) -> None:
    undone: list[int] = []

    def work(ranks: Exchange) -> Any:
        return save(
            ranks, lambda: ranks.rank if ranks.rank != 1 else fail("no"), undo=undone.append
        )

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


@pytest.mark.parametrize("late", [0, 2], ids=["coordinator", "other rank"])
@pytest.mark.parametrize("step", STEPS)
def test_a_rank_that_was_declared_dead_fails_like_the_others(
    store: dist.Store, step: str, late: int
) -> None:
    others = ranks_of(store, 3, SHORT)
    last = others.pop(late)
    outcomes = together(others, lambda ranks: STEPS[step](ranks, lambda: None))
    outcomes |= together([last], lambda ranks: STEPS[step](ranks, lambda: None))
    for outcome in outcomes.values():
        assert causes_of(outcome) == causes_of(outcomes[1])
        assert set(causes_of(outcome)) == {late}


def test_a_straggler_undoes_its_part(store: dist.Store) -> None:
    undone: list[Any] = []
    together(ranks_of(store, 2, SHORT)[:1], save)
    together(ranks_of(store, 2, SHORT)[1:], lambda ranks: save(ranks, undo=undone.append))
    assert undone == ["part"]


def test_a_rank_that_arrives_after_the_coordinator_was_declared_dead_does_not_wait(
    store: dist.Store,
) -> None:
    _, patient, _ = ranks_of(store, 3, PATIENCE_SECONDS)
    _, _, impatient = ranks_of(store, 3, SHORT)
    outcomes = together([impatient], save) | together([patient], save)
    assert causes_of(outcomes[1]) == causes_of(outcomes[2])


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_wait_for_a_rank_whose_heartbeat_advances(store: dist.Store, slow: int) -> None:
    beats, is_done = itertools.count(1), threading.Event()

    def beat() -> int:
        count = next(beats)
        # Each heartbeat takes a tenth of the timeout.
        if count == 20:
            is_done.set()
        return count

    def local(ranks: Exchange) -> bool:
        if ranks.rank != slow:
            return True
        with ranks.alive(beat):
            return is_done.wait(PATIENCE_SECONDS)

    outcomes = together(ranks_of(store, 3, SHORT), lambda ranks: save(ranks, lambda: local(ranks)))
    assert outcomes == {rank: [True, True, True] for rank in range(3)}


def test_a_woken_rank_polls_the_store_as_often_as_at_the_start(store: dist.Store) -> None:
    waiting = ranks_of(store, 2)[1]
    looks: queue.SimpleQueue[float] = queue.SimpleQueue()

    def hook(operation: str, _path: str) -> None:
        if operation == "wait for ranks":
            looks.put(time.monotonic())

    def rests(count: int) -> list[float]:
        """Returns the times between ``count`` reads of the store."""
        return [
            b - a
            for a, b in itertools.pairwise(
                looks.get(timeout=PATIENCE_SECONDS) for _ in range(count)
            )
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


# --- the store -----------------------------------------------------------------------------------


def complete_save(ranks: Exchange, local: Callable[[Exchange], Any]) -> None:
    """Runs a save of several steps and a large value, with heartbeats, to its end."""
    beaten = threading.Event()

    def start() -> None:
        with ranks.alive(lambda: beaten.set() or 1):  # type: ignore[func-returns-value]
            beaten.wait(PATIENCE_SECONDS)

    try:
        ranks.run("start", start)
        scatter(ranks, lambda: bytes(9 << 20), list)
        save(ranks, lambda: local(ranks))
    finally:
        ranks.close(PATIENCE_SECONDS)


@pytest.mark.parametrize("failing", [None, 1])
def test_a_save_leaves_no_keys(any_store: dist.Store, failing: int | None) -> None:
    def local(ranks: Exchange) -> Any:
        return fail("no") if ranks.rank == failing else None

    ranks = ranks_of(any_store, 3, 5.0)
    outcomes = together(ranks, lambda ranks: complete_save(ranks, local))
    if failing is None:
        assert outcomes == dict.fromkeys(range(3))
    else:
        assert all(set(causes_of(outcome)) == {failing} for outcome in outcomes.values())
    assert any_store.num_keys() == 0


def shared_bytes_of(ranks: Exchange) -> Any:
    """Returns the bytes that the coordinator has received of data that ranks share."""
    try:
        return scatter(
            ranks,
            lambda: ranks.share(b"alike" if ranks.rank < 2 else b"other"),
            lambda tokens: [[ranks.shared(t) for t in tokens]] * len(tokens),
        )
    finally:
        ranks.close(PATIENCE_SECONDS)


def test_shared_bytes_reach_the_coordinator(any_store: dist.Store) -> None:
    received = together(ranks_of(any_store, 3, 5.0), shared_bytes_of)
    assert received == {rank: [b"alike", b"alike", b"other"] for rank in range(3)}
    assert any_store.num_keys() == 0


def saved_and_closed(ranks: Exchange) -> None:
    try:
        save(ranks)
    finally:
        ranks.close(PATIENCE_SECONDS)


def names_of_keys(store: dist.Store) -> set[str]:
    return {key.removeprefix("torch_ckpt/test/save/0/") for key in store.list_keys()}


def test_a_rank_that_was_declared_dead_finds_the_verdict_and_leaves_none_of_its_values(
    store: dist.Store,
) -> None:
    *others, late = ranks_of(store, 3, SHORT)
    together(others, saved_and_closed)
    verdict = {"1.write/verdict", "1.write/to/all"}
    assert names_of_keys(store) == verdict
    together([late], saved_and_closed)
    assert names_of_keys(store) == verdict | {"bye/2"}


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
