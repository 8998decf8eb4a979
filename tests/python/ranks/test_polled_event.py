"""Ranks that poll in step act at the same poll, for every order of polls and with every store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.polled_event import _NEAR as NEAR
from torch_ckpt.ranks.polled_event import PolledEvent

#: Limit of waits that should not block, in seconds.
LIMIT = 60.0


def never() -> bool:
    return False


def events(
    store: dist.Store, size: int, pause: Callable[[float], None] = time.sleep
) -> list[PolledEvent]:
    made = []
    for rank in range(size):
        group = RankGroup(store, rank, size, "test")
        one = PolledEvent(group, LIMIT, pause)
        one.held = group  # type: ignore[attr-defined]  # as a call does; it has no hold of it
        made.append(one)
    return made


# --- all orders ----------------------------------------------------------------------------------


class Stopped(BaseException):
    """Ends the threads of an example that has failed."""


class Rank:
    """Rank whose polls advance, and wait, only when the test gives it a turn."""

    of_thread = threading.local()

    def __init__(self, event: PolledEvent) -> None:
        self.event = event
        self.answered = 0
        self.has_part = False
        self.acted: int | None = None
        self.stopped = False
        self._turn = threading.Semaphore(0)
        self._over = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """Runs one poll, or one query of a waiting poll."""
        if self.acted is None:
            self._turn.release()
            assert self._over.acquire(timeout=LIMIT), "the poll does not come back"

    def part(self) -> None:
        if not self.has_part:
            self.has_part = True
            self.event.report_part()

    def stop(self) -> None:
        self.stopped = True
        self._turn.release()
        self._thread.join(LIMIT)

    @classmethod
    def pause(cls, _seconds: float) -> None:
        """Returns the turn to the test and waits for the next one."""
        rank: Rank = cls.of_thread.rank
        rank._over.release()
        rank._wait()

    def _wait(self) -> None:
        self._turn.acquire()
        if self.stopped:
            raise Stopped

    def _run(self) -> None:
        self.of_thread.rank = self
        try:
            while self.acted is None:
                self._wait()
                acts = self.event.poll(never)
                self.answered += 1
                if acts:
                    self.acted = self.answered
                self._over.release()
        except Stopped:
            pass


@contextmanager
def ranks_of(size: int) -> Iterator[list[Rank]]:
    ranks = [Rank(one) for one in events(dist.HashStore(), size, Rank.pause)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.stop()


@settings(max_examples=60)
@given(data=st.data())
def test_ranks_act_at_the_first_poll_that_any_rank_makes_after_the_last_part(
    data: st.DataObject,
) -> None:
    size = data.draw(st.integers(2, 4), "ranks")
    actions = [(kind, rank) for rank in range(size) for kind in ("poll", "poll", "poll", "part")]
    order = data.draw(st.lists(st.sampled_from(actions), max_size=80), "order")
    with ranks_of(size) as ranks:
        expected = None
        for kind, number in [*order, *(("part", rank) for rank in range(size))]:
            if kind == "poll":
                ranks[number].step()
                continue
            ranks[number].part()
            if expected is None and all(rank.has_part for rank in ranks):
                expected = max(rank.answered for rank in ranks) + 1
            elif expected is None:
                assert all(rank.acted is None for rank in ranks)
        assert expected is not None
        # Any further order is valid.
        for _ in range(3 * (expected + len(order) + 3)):
            for rank in ranks:
                rank.step()
        assert [rank.acted for rank in ranks] == [expected] * size


@pytest.mark.parametrize("ahead", [0, 1])
def test_no_rank_gets_far_ahead_of_another(ahead: int) -> None:
    with ranks_of(3) as ranks:
        for behind in range(40):
            for _ in range(50):
                ranks[ahead].step()
            assert behind <= ranks[ahead].answered < behind + 2 * NEAR
            for rank in ranks:
                if rank is not ranks[ahead]:
                    rank.step()


def test_a_rank_that_is_ahead_stops_waiting_when_the_event_is_known() -> None:
    one, _other = events(dist.HashStore(), 2, lambda _seconds: one.stop_waiting())
    assert not any(one.poll(never) for _ in range(2 * NEAR))


@pytest.mark.parametrize("seed", range(4))
def test_unsynchronized_threads_act_at_the_same_poll(any_store: dist.Store, seed: int) -> None:
    size = 3
    ranks = events(any_store, size)
    draws = random.Random(seed)
    has_part_at = [draws.randrange(1, 30) for _ in range(size)]
    spins = [[draws.randrange(2000) for _ in range(200)] for _ in range(size)]

    def run(rank: int) -> int:
        for number in range(1, 200):
            for _ in range(spins[rank][number]):
                pass
            if number == has_part_at[rank]:
                ranks[rank].report_part()
            if ranks[rank].poll(never):
                return number
        raise AssertionError("it has not been acted on")

    with ThreadPoolExecutor(size) as pool:
        acted = list(pool.map(run, range(size), timeout=LIMIT))
    assert len(set(acted)) == 1, (seed, acted)
    assert acted[0] >= max(has_part_at), (seed, has_part_at)


# --- what a poll costs ---------------------------------------------------------------------------


def counting_group(rank: int) -> tuple[RankGroup, list[None]]:
    """Returns a group, and a list that grows by one with each use of its store."""
    group, uses = RankGroup(dist.HashStore(), rank, 2, "test"), []
    connection = group.connection

    def counted() -> Any:
        uses.append(None)
        return connection()

    group.connection = counted  # type: ignore[method-assign]
    return group, uses


def test_a_rank_before_its_part_reads_the_store_at_every_eighth_poll_only() -> None:
    group, uses = counting_group(rank=1)
    one = PolledEvent(group, LIMIT)
    assert not any(one.poll(never) for _ in range(NEAR - 1))
    assert len(uses) == 0
    assert not one.poll(never)
    assert len(uses) == 1


def test_ranks_in_step_do_not_wait() -> None:
    def refuse(_seconds: float) -> None:
        raise AssertionError("it waits")

    first, second = events(dist.HashStore(), 2, refuse)
    first.report_part()
    # A few steps ahead, as happens to ranks.
    assert not any(first.poll(never) for _ in range(NEAR - 1))
    for _ in range(10 * NEAR):
        assert not first.poll(never)
        assert not second.poll(never)


# --- failures ------------------------------------------------------------------------------------


def test_a_rank_that_stops_polling_does_not_keep_the_others_from_acting() -> None:
    ranks = events(dist.HashStore(), 2)
    for one in ranks:
        one.report_part()
    for one in ranks:
        assert one.poll(never)


def test_a_lost_event_is_resolved_at_the_same_poll_on_all_ranks() -> None:
    first, second, _lost = events(dist.HashStore(), 3)
    for one in (first, second):
        one.report_part()
        assert not one.poll(never)
    second.stop_waiting()
    assert not first.poll(never)
    assert not second.poll(never)
    assert second.poll(never)
    assert first.poll(never)


def test_a_single_rank_acts_without_the_store() -> None:
    group, uses = counting_group(rank=0)
    assert PolledEvent(group, LIMIT).poll(lambda: True)
    assert len(uses) == 0


def test_a_lost_store_raises() -> None:
    def lost() -> Any:
        raise RuntimeError("Connection reset by peer")

    group = RankGroup(dist.HashStore(), 1, 2, "test")
    group.connection = lost  # type: ignore[method-assign]
    one = PolledEvent(group, LIMIT)
    message = "lost the connection to the process group's store"
    for call in (one.report_part, lambda: one.poll(never)):
        with pytest.raises(CheckpointException, match=message):
            call()


def test_nothing_is_left_in_the_store() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    ranks = events(store, 2)
    for _ in range(3 * NEAR):
        assert not any([one.poll(never) for one in ranks])
    for one in ranks:
        one.report_part()
    assert all([one.poll(never) for one in ranks])
    assert store.num_keys() > before
    for one in ranks:
        one.delete_keys()
    assert store.num_keys() == before


def test_events_of_one_rendezvous_are_independent() -> None:
    store = dist.HashStore()
    groups = [RankGroup(store, rank, 2, "test") for rank in range(2)]
    first = [PolledEvent(group, LIMIT) for group in groups]
    second = [PolledEvent(group, LIMIT) for group in groups]
    for one in (*first, second[0]):
        one.report_part()
    assert [one.poll(never) for one in (*first, *second)] == [True, True, False, False]
