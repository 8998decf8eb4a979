"""Ranks that poll in step act at the same poll: under every order of steps, with every store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt import lockstep
from torch_ckpt.coordination import Meeting
from torch_ckpt.lockstep import Lockstep

#: Seconds after which a coordinator of a test is given up, where one is.
SHORT = 0.2

#: For what nothing should be waiting, in seconds.
LIMIT = 60.0


def never() -> bool:
    return False


def locksteps(store: dist.Store, size: int, timeout: float = LIMIT) -> list[Lockstep]:
    made = []
    for rank in range(size):
        meeting = Meeting(store, rank, size, "test")
        one = Lockstep(meeting, timeout)
        one.held = meeting  # type: ignore[attr-defined]  # as a call does; it has no hold of it
        made.append(one)
    return made


# --- all orders ----------------------------------------------------------------------------------


class Stopped(BaseException):
    """Ends the threads of an example that has failed."""


class Rank:
    """A rank whose polls go on, and wait, only when it is given a turn."""

    of_thread = threading.local()

    def __init__(self, lockstep: Lockstep) -> None:
        self.lockstep = lockstep
        self.polls = 0
        self.looked: int | None = None
        self.acted: int | None = None
        self.stopped = False
        self._turn = threading.Semaphore(0)
        self._over = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self) -> None:
        """One poll, or one more look of a poll that waits."""
        if self.acted is None:
            self._turn.release()
            assert self._over.acquire(timeout=LIMIT), "the poll does not come back"

    def look(self) -> None:
        if self.looked is None:
            self.looked = self.lockstep.look()

    def stop(self) -> None:
        self.stopped = True
        self._turn.release()
        self._thread.join(LIMIT)

    @classmethod
    def sleep(cls, _seconds: float) -> None:
        """In the place of time.sleep: somebody else's turn."""
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
                self.polls += 1
                if self.lockstep.poll(never):
                    self.acted = self.polls
                self._over.release()
        except Stopped:
            pass


@contextmanager
def ranks_of(size: int) -> Iterator[list[Rank]]:
    before = lockstep.time
    lockstep.time = SimpleNamespace(monotonic=time.monotonic, sleep=Rank.sleep)  # type: ignore
    ranks = [Rank(one) for one in locksteps(dist.HashStore(), size)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.stop()
        lockstep.time = before


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_ranks_act_at_the_same_poll_and_not_before_all_have_looked(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4), "ranks")
    actions = [(kind, rank) for rank in range(size) for kind in ("poll", "poll", "poll", "look")]
    order = data.draw(st.lists(st.sampled_from([*actions, ("happen", 0)]), max_size=50), "order")
    with ranks_of(size) as ranks:
        polls_of_coordinator = None
        for kind, number in order:
            if kind == "poll":
                ranks[number].step()
            elif kind == "look":
                ranks[number].look()
            elif polls_of_coordinator is None and all(rank.looked is not None for rank in ranks):
                polls_of_coordinator = happen(ranks)
        for rank in ranks:
            rank.look()
        if polls_of_coordinator is None:
            assert all(rank.acted is None for rank in ranks)
            polls_of_coordinator = happen(ranks)
        after = max(rank.looked or 0 for rank in ranks)
        expected = max(polls_of_coordinator + 1, after) + 1
        # Any further order serves.
        for _ in range(3 * (expected + len(order) + 3)):
            for rank in ranks:
                rank.step()
        assert [rank.acted for rank in ranks] == [expected] * size


def happen(ranks: list[Rank]) -> int:
    """Everybody's part has happened; the coordinator's number of polls by then."""
    ranks[0].lockstep.happened(max(rank.looked or 0 for rank in ranks))
    return ranks[0].polls


@pytest.mark.parametrize("kind", ["TCPStore", "HashStore"])
@pytest.mark.parametrize("seed", range(4))
def test_threads_that_run_freely_act_at_the_same_poll(kind: str, seed: int) -> None:
    store = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if kind == "TCPStore"
        else dist.HashStore()
    )
    size = 3
    ranks = locksteps(store, size)
    draws = random.Random(seed)
    looks_at = [draws.randrange(1, 30) for _ in range(size)]
    spins = [[draws.randrange(2000) for _ in range(200)] for _ in range(size)]
    looked: list[int] = []
    lock = threading.Lock()

    def run(rank: int) -> int:
        for number in range(1, 200):
            for _ in range(spins[rank][number]):
                pass
            if number == looks_at[rank]:
                with lock:
                    looked.append(ranks[rank].look())
                    if len(looked) == size:
                        ranks[0].happened(max(looked))
            if ranks[rank].poll(never):
                return number
        raise AssertionError("it has not been acted on")

    with ThreadPoolExecutor(size) as pool:
        acted = list(pool.map(run, range(size), timeout=LIMIT))
    assert len(set(acted)) == 1, (seed, acted)
    assert acted[0] > max(looked), (seed, looked)


# --- what a poll costs ---------------------------------------------------------------------------


class Counting:
    """A meeting's store that is counted, or lost."""

    def __init__(self, rank: int, size: int = 2) -> None:
        self.meeting = Meeting(dist.HashStore(), rank, size, "test")
        self.asked = 0
        connection = self.meeting.connection

        def counted() -> Any:
            self.asked += 1
            return connection()

        self.meeting.connection = counted  # type: ignore[method-assign]


def test_a_rank_that_has_not_looked_does_not_ask_the_store() -> None:
    counting = Counting(rank=1)
    one = Lockstep(counting.meeting, LIMIT)
    assert not any(one.poll(never) for _ in range(5))
    assert counting.asked == 0


def test_a_process_alone_asks_nobody() -> None:
    alone = Lockstep(Meeting(None, 0, 1, ""), LIMIT)
    assert alone.look() == 0
    assert not alone.poll(never)
    alone.happened(0)
    assert alone.poll(never)
    alone.end()


def test_a_rank_in_step_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr(lockstep, "time", SimpleNamespace(monotonic=time.monotonic, sleep=refuse))
    coordinator, other = locksteps(dist.HashStore(), 2)
    other.look()
    for _ in range(5):
        # A step ahead, as ranks are now and then.
        assert not other.poll(never)
        assert not coordinator.poll(never)


# --- failures ------------------------------------------------------------------------------------


def test_a_coordinator_that_polls_no_more_is_given_up() -> None:
    _, other = locksteps(dist.HashStore(), 2, SHORT)
    other.look()
    assert not other.poll(never)
    with pytest.raises(CheckpointException) as error:
        other.poll(never)
    [(rank, (cause, _stack))] = error.value.failures.items()
    assert rank == 0
    assert isinstance(cause, TimeoutError)
    assert "rank 0 gave no sign of life for 0.2 s in 'finalize'" in str(cause)


def test_a_failure_that_is_known_ends_the_wait_for_the_coordinator() -> None:
    _, other = locksteps(dist.HashStore(), 2)
    other.look()
    assert not other.poll(never)
    answers = iter([False, False, True])
    assert other.poll(lambda: next(answers))


def test_a_store_that_is_lost_is_told() -> None:
    counting = Counting(rank=1)

    def lost() -> Any:
        raise RuntimeError("Connection reset by peer")

    counting.meeting.connection = lost  # type: ignore[method-assign]
    other = Lockstep(counting.meeting, LIMIT)
    other.look()
    assert not other.poll(never)
    with pytest.raises(CheckpointException, match="lost the process group's store"):
        other.poll(never)


def test_nothing_is_left_in_the_store() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    coordinator, other = locksteps(store, 2)
    after = max(coordinator.look(), other.look())
    coordinator.happened(after)
    while not coordinator.poll(never):
        pass
    while not other.poll(never):
        pass
    assert store.num_keys() > before
    for one in (coordinator, other):
        one.end()
    assert store.num_keys() == before


def test_events_of_one_meeting_do_not_meet() -> None:
    store = dist.HashStore()
    meetings = [Meeting(store, rank, 2, "test") for rank in range(2)]
    first = [Lockstep(meeting, LIMIT) for meeting in meetings]
    second = [Lockstep(meeting, LIMIT) for meeting in meetings]
    for one in (*first, *second):
        one.look()
    first[0].happened(0)
    for _ in range(3):
        acted = [one.poll(never) for one in (*first, *second)]
    assert acted == [True, True, False, False]
