"""Several ranks that save while training goes on, two and four: the cases of async_cases.py by
torchrun, and those of async_deaths.py without it, for torchrun ends all ranks when one has died.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.async_cases import CASES, left_at_the_end
from tests.distributed.async_deaths import TIMEOUT, state_of
from tests.distributed.launcher import Launch, Processes, Torchrun, launch_tests
from tests.support import assert_equal, emptied, stock_load

LAUNCHES = {"2 ranks": Launch(2, list(CASES)), "4 ranks": Launch(4, list(CASES))}

#: By number of ranks the one that dies: the coordinator, and another one.
VICTIMS = {2: 0, 4: 3}

torchrun, test_on_ranks, _ = launch_tests(
    "tests.distributed.async_cases", LAUNCHES, case_first=True
)


def assert_left_whole(workdir: Path, size: int) -> None:
    for rank in range(size):
        path, expected = left_at_the_end(workdir, size, rank)
        loaded = emptied(expected)
        stock_load(loaded, path)
        assert_equal(loaded, expected)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_save_under_way_when_the_interpreter_ends_is_whole(
    torchrun: Torchrun, launch: str
) -> None:
    torchrun.run(launch)
    assert torchrun.codes[launch] == 0, torchrun.outputs[launch]
    assert_left_whole(torchrun.workdir, LAUNCHES[launch].ranks)


def test_it_is_whole_also_where_a_rank_that_ends_hosts_the_store(tmp_path: Path) -> None:
    arguments = (tmp_path / "results", tmp_path)
    ranks = Processes("tests.distributed.async_cases", 2, *arguments, rank_0_hosts_store=True)
    assert ranks.codes() == [0, 0], "\n".join(ranks.outputs)
    assert_left_whole(tmp_path, 2)


class Deaths:
    """The cases of async_deaths.py on a number of ranks."""

    def __init__(self, size: int, workdir: Path) -> None:
        workdir.mkdir()
        self.workdir = workdir
        self.victim = VICTIMS[size]
        self.others = [rank for rank in range(size) if rank != self.victim]
        module = "tests.distributed.async_deaths"
        self.ranks = Processes(module, size, workdir / "results", workdir, str(self.victim))


@pytest.fixture(scope="module")
def all_deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Deaths]]:
    """At the same time, for they mostly wait."""
    workdir = tmp_path_factory.mktemp("deaths")
    deaths = {size: Deaths(size, workdir / f"of-{size}") for size in VICTIMS}
    yield deaths
    for of_size in deaths.values():
        of_size.ranks.kill()


@pytest.fixture(
    params=VICTIMS, ids=[f"rank {victim} of {size}" for size, victim in VICTIMS.items()]
)
def deaths(request: pytest.FixtureRequest, all_deaths: dict[int, Deaths]) -> Deaths:
    return all_deaths[request.param]


@pytest.mark.parametrize("case", ["stopped", "killed"])
def test_a_rank_that_falls_silent_in_a_save_is_named_on_all_others(
    deaths: Deaths, case: str
) -> None:
    found = deaths.ranks.found(case, dead=deaths.victim if case == "killed" else None)
    # The others wait for the coordinator for longer than it waits for them.
    patience = 1.25 * TIMEOUT if deaths.victim == 0 else TIMEOUT
    reason = f"rank {deaths.victim} gave no sign of life for {patience:g} s in 'write'"
    for rank in deaths.others:
        assert found[rank]["ranks"] == [deaths.victim]
        assert reason in found[rank]["text"]
        assert not found[rank]["published"]
    assert not (deaths.workdir / case / ".metadata").exists()


def test_a_rank_that_goes_on_fails_like_the_others_and_leaves_nothing(deaths: Deaths) -> None:
    found = deaths.ranks.found("stopped")
    assert {outcome["text"] for outcome in found} == {found[0]["text"]}
    assert list((deaths.workdir / "stopped").iterdir()) == []


def test_the_ranks_save_again_after_one_that_was_stopped_goes_on(deaths: Deaths) -> None:
    size = len(deaths.others) + 1
    assert deaths.ranks.found("next") == [size + 1] * size
    for rank in range(size):
        expected = state_of(rank)
        loaded = emptied(expected)
        stock_load(loaded, deaths.workdir / "next")
        assert_equal(loaded, expected)
