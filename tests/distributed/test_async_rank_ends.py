"""Ranks that end while a save is under way, and ranks that fall silent in one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import torch_ckpt
from tests.distributed import async_deaths
from tests.distributed.async_deaths import TIMEOUT, state_of
from tests.distributed.launcher import Outcomes, torchrun
from tests.ranks import ranks
from tests.support import assert_equal, emptied, stock_load
from torch_ckpt import Background

#: By number of ranks the one that dies: the coordinator, and another one.
VICTIMS = {2: 0, 4: 3}


def leave_a_save_under_way(_: Connection | None, path: Path) -> None:
    """Nobody waits for it; the process group goes, and then the interpreter."""
    dist.init_process_group("gloo")
    slow = Background(max_bytes_per_second=40_000_000)
    torch_ckpt.async_save(state_of(dist.get_rank()), path, background=slow)
    # Without this barrier gloo's thread sometimes aborts while Python exits (torch 2.15).
    dist.barrier()
    dist.destroy_process_group()


def assert_left_whole(path: Path, size: int) -> None:
    for rank in range(size):
        expected = state_of(rank)
        loaded = emptied(expected)
        stock_load(loaded, path)
        assert_equal(loaded, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_a_save_under_way_when_the_interpreter_ends_is_whole(tmp_path: Path, size: int) -> None:
    with ranks(size, leave_a_save_under_way, tmp_path) as group:
        assert group.codes() == [0] * size, group.said()
    assert_left_whole(tmp_path, size)


def test_it_is_whole_also_where_a_rank_that_ends_hosts_the_store(tmp_path: Path) -> None:
    with ranks(2, leave_a_save_under_way, tmp_path, rank_0_hosts_store=True) as group:
        assert group.codes() == [0, 0], group.said()
    assert_left_whole(tmp_path, 2)


def test_it_is_whole_also_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "tests.distributed.test_async_rank_ends", tmp_path)
    assert done.returncode == 0, done.stdout
    assert_left_whole(tmp_path, 2)


class Deaths:
    """The cases of async_deaths.py on a number of ranks."""

    def __init__(self, size: int, workdir: Path, stack: ExitStack) -> None:
        self.workdir = workdir
        self.victim = VICTIMS[size]
        self.others = [rank for rank in range(size) if rank != self.victim]
        group = stack.enter_context(ranks(size, async_deaths.play, workdir, self.victim))
        self.outcomes = Outcomes(group)

    def found(self, case: str) -> list[Any]:
        return self.outcomes.found(case, dead=self.victim if case == "killed" else None)


@pytest.fixture(scope="module")
def all_deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Deaths]]:
    """At the same time, for they mostly wait."""
    with ExitStack() as stack:
        yield {size: Deaths(size, tmp_path_factory.mktemp("deaths"), stack) for size in VICTIMS}


@pytest.fixture(
    params=VICTIMS, ids=[f"rank {victim} of {size}" for size, victim in VICTIMS.items()]
)
def deaths(request: pytest.FixtureRequest, all_deaths: dict[int, Deaths]) -> Deaths:
    return all_deaths[request.param]


@pytest.mark.parametrize("case", ["stopped", "killed"])
def test_a_rank_that_falls_silent_in_a_save_is_named_on_all_others(
    deaths: Deaths, case: str
) -> None:
    found = deaths.found(case)
    # The others wait for the coordinator for longer than it waits for them.
    patience = 1.25 * TIMEOUT if deaths.victim == 0 else TIMEOUT
    reason = f"rank {deaths.victim} sent no heartbeat for {patience:g} s in 'write'"
    for rank in deaths.others:
        assert found[rank]["ranks"] == [deaths.victim]
        assert reason in found[rank]["text"]
        assert not found[rank]["published"]
    assert not (deaths.workdir / case / ".metadata").exists()


def test_a_rank_that_goes_on_fails_like_the_others_and_leaves_nothing(deaths: Deaths) -> None:
    found = deaths.found("stopped")
    assert {outcome["text"] for outcome in found} == {found[0]["text"]}
    assert list((deaths.workdir / "stopped").iterdir()) == []


def test_the_ranks_save_again_after_one_that_was_stopped_goes_on(deaths: Deaths) -> None:
    size = len(deaths.others) + 1
    assert deaths.found("next") == [size + 1] * size
    for rank in range(size):
        expected = state_of(rank)
        loaded = emptied(expected)
        stock_load(loaded, deaths.workdir / "next")
        assert_equal(loaded, expected)


if __name__ == "__main__":
    leave_a_save_under_way(None, Path(sys.argv[1]))
