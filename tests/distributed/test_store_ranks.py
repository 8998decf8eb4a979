"""Ranks that communicate through their store: each case of store_cases.py on two and on four."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.distributed.launcher import Outcomes
from tests.distributed.store_cases import TIMEOUT, play, stop_the_host
from tests.ranks import ranks

KILLED = "a_killed_rank_is_declared_dead"
STOPPED = "a_stopped_rank_is_declared_dead_and_fails_when_it_continues"


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[int, Outcomes]]:
    """Runs all launches at the same time; they mostly wait."""
    with ranks(2, play) as two, ranks(4, play) as four:
        yield {of.size: Outcomes(of) for of in (two, four)}


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def launch(request: pytest.FixtureRequest, outcomes: dict[int, Outcomes]) -> Outcomes:
    return outcomes[request.param]


def test_each_kind_of_step_returns_the_values_of_the_ranks(launch: Outcomes) -> None:
    size = launch.ranks.size
    failures = [[rank, repr(OSError(f"on {rank}"))] for rank in range(1, size)]
    for rank, results in enumerate(
        launch.found("each_kind_of_step_returns_the_values_of_the_ranks")
    ):
        assert results == [rank + 10, list(range(size)), rank, failures]


def test_ranks_of_a_subgroup_are_numbered_within_it(launch: Outcomes) -> None:
    half = launch.ranks.size // 2
    expected = [
        [rank % half, half, list(range(rank - rank % half, rank - rank % half + half))]
        for rank in range(launch.ranks.size)
    ]
    assert launch.found("ranks_of_a_subgroup_are_numbered_within_it") == expected


@pytest.mark.parametrize("case", [STOPPED, KILLED])
def test_a_silent_rank_is_named_on_all_others(launch: Outcomes, case: str) -> None:
    last = launch.ranks.size - 1
    for outcome in launch.found(case, dead=last if case == KILLED else None)[:last]:
        assert outcome["ranks"] == [last]
        assert f"rank {last} sent no heartbeat for 2 s during 'write'" in outcome["text"]
        assert outcome["seconds"] > TIMEOUT


def test_a_rank_that_was_stopped_fails_like_the_others(launch: Outcomes) -> None:
    *others, stopped = launch.found(STOPPED)
    assert [other["text"] for other in others] == [stopped["text"]] * len(others)


def test_a_stopped_store_host_does_not_commit_after_it_was_declared_dead() -> None:
    with ranks(2, stop_the_host, rank_0_hosts_store=True) as group:
        assert group.answer(0) == "stops"
        text, committed, seconds = group.answer(1)
        lost = "rank 1 lost the connection to the process group's store during 'write'"
        assert f"{lost} (no answer for 2.5 s)" in text
        assert "rank 0 may have committed" in text
        # Waits once, and not again at the end of the step.
        assert seconds < 2 * 1.25 * TIMEOUT
        group.children[0].signal(signal.SIGCONT)
        text, committed, _seconds = group.answer(0)
        assert "rank 0, the coordinator, did not run for" in text
        assert not committed
