"""Tests of StepAgreement, with threads as ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.rank_threads import PATIENCE_SECONDS, SHORT, in_threads
from torch_ckpt import CheckpointError
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.step_agreement import StepAgreement

NAME = "save decision"


def agreements(store: Any, size: int, timeout: float = PATIENCE_SECONDS) -> list[StepAgreement]:
    """Returns the agreement of each rank."""
    return [
        StepAgreement(NAME, RankGroup(store, rank, size, "test"), timeout) for rank in range(size)
    ]


def number(step: int) -> Callable[[], str]:
    return lambda: f"decision {step}"


def refuse() -> str:
    raise AssertionError("only rank 0 decides")


def test_all_ranks_get_the_decisions_of_rank_0(any_store: dist.Store) -> None:
    def work(rank: int, one: StepAgreement) -> list[str]:
        return [one.next(step, refuse if rank else number(step)) for step in range(1, 40)]

    first, *others = in_threads(agreements(any_store, 3), work)
    assert first[0] == "decision 1"
    assert others == [first, first]


def test_a_decision_may_contain_any_text(store: dist.Store) -> None:
    made = agreements(store, 2)
    text = "SIGTERM: on rank 3: über"
    assert in_threads(made, lambda _rank, one: one.next(1, lambda: text)) == [text, text]


def test_a_single_process_needs_no_store() -> None:
    [single] = agreements(None, 1)
    assert single.next(1, number(1)) == "decision 1"


def test_a_rank_that_is_ahead_waits_for_rank_0(store: dist.Store) -> None:
    rank_0, rank_1 = agreements(store, 2)
    asked = threading.Event()

    class Noticing:
        """The store as rank 1 uses it."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            asked.set()
            return store.compare_set(key, expected, desired)

    rank_1._group.keys = lambda below: Noticing()  # type: ignore[assignment,method-assign,return-value]
    rank_0._group.keys = lambda below: store  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(rank_1.next, 1, refuse)
        assert asked.wait(PATIENCE_SECONDS)
        assert not ahead.done()
        rank_0.next(1, number(1))
        assert ahead.result(PATIENCE_SECONDS) == "decision 1"


def test_within_a_block_no_rank_reads_the_store(store: dist.Store) -> None:
    made = agreements(store, 2)
    in_threads(made, lambda _rank, one: [one.next(step, number(step)) for step in range(1, 2000)])
    assert made[0].count < 100
    before = made[1].count
    # Rank 0 does not run now, so it cannot decide.
    inside = range(1999, made[1]._block.stop)
    assert [made[1].next(step, refuse) for step in inside] == [""] * len(inside)
    assert made[1].count == before


def test_a_step_can_end_a_block(store: dist.Store) -> None:
    made = agreements(store, 2)
    in_threads(made, lambda _rank, one: [one.next(step, number(step)) for step in range(1, 2000)])

    def work(_rank: int, one: StepAgreement) -> list[str]:
        return [one.next(2000, number(2000), ends_block=True), one.next(2001, number(2001))]

    assert in_threads(made, work) == [["decision 2000", "decision 2001"]] * 2


def test_a_rank_at_another_step_raises(store: dist.Store) -> None:
    outcomes = in_threads(agreements(store, 2), lambda rank, one: one.next(5 + rank, number(5)))
    assert outcomes[0] == "decision 5"
    assert isinstance(outcomes[1], CheckpointError)
    assert "rank 1 is at step 6, but rank 0 is at step 5" in str(outcomes[1])


def failure_of(rank_1: StepAgreement) -> tuple[int, BaseException]:
    """Returns the rank that rank 1 holds responsible for its failed decision, and the cause."""
    with pytest.raises(CheckpointException) as caught:
        rank_1.next(1, refuse)
    [(rank, (cause, _stack))] = caught.value.failures.items()
    return rank, cause


def test_a_missing_rank_0_is_named(store: dist.Store) -> None:
    _rank_0, rank_1 = agreements(store, 2, SHORT)
    rank, cause = failure_of(rank_1)
    assert rank == 0
    assert isinstance(cause, TimeoutError)
    assert f"rank 0 sent no heartbeat for 0.4 s during '{NAME}'" in str(cause)


def test_a_lost_store_is_an_error_of_the_rank_itself(store: dist.Store) -> None:
    class Lost:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("connection reset by peer")

    _rank_0, rank_1 = agreements(store, 2)
    rank_1._group.keys = lambda below: Lost()  # type: ignore[assignment,method-assign,return-value]
    rank, cause = failure_of(rank_1)
    assert rank == 1
    assert isinstance(cause, ConnectionError)


def keys_after(store: dist.Store, made: list[StepAgreement], steps: range) -> int:
    """Makes decisions, one for each step, on all ranks in order. Returns the number of keys."""
    for step in steps:
        for one in made:
            one.next(step, number(step), ends_block=True)
    return store.num_keys()


def test_decisions_that_all_ranks_have_read_are_deleted(store: dist.Store) -> None:
    made = agreements(store, 3)
    first = keys_after(store, made, range(1, 100))
    assert keys_after(store, made, range(100, 1000)) == pytest.approx(first, abs=16)
    assert first < 40


def test_a_decision_that_a_rank_has_not_read_is_kept(store: dist.Store) -> None:
    rank_0, rank_1, behind = agreements(store, 3)
    keys_after(store, [rank_0, rank_1], range(1, 100))
    assert [behind.next(step, refuse, ends_block=True) for step in range(1, 100)] == [
        f"decision {step}" for step in range(1, 100)
    ]
