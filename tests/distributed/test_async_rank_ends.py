"""Ranks that end or fall silent during a background save."""

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
from tests.distributed.launcher import Outcomes
from tests.ranks import ranks, torchrun
from tests.support import assert_equal, emptied, stock_load
from torch_ckpt import Background

#: The rank that dies, by number of ranks: the coordinator, and another one.
VICTIMS = {2: 0, 4: 3}


def leave_a_save_under_way(_: Connection | None, path: Path) -> None:
    """Leaves a save running while the process group is destroyed and the interpreter ends."""
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
def test_a_save_that_runs_when_the_interpreter_ends_is_complete(tmp_path: Path, size: int) -> None:
    with ranks(size, leave_a_save_under_way, tmp_path) as group:
        assert group.codes() == [0] * size, group.said()
    assert_left_whole(tmp_path, size)


def test_a_save_is_complete_if_the_store_ends_with_its_rank(tmp_path: Path) -> None:
    with ranks(2, leave_a_save_under_way, tmp_path, rank_0_hosts_store=True) as group:
        assert group.codes() == [0, 0], group.said()
    assert_left_whole(tmp_path, 2)


def test_a_save_that_runs_at_the_end_is_complete_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "tests.distributed.test_async_rank_ends", tmp_path)
    assert done.returncode == 0, done.stdout
    assert_left_whole(tmp_path, 2)


class Deaths:
    """Results of the cases of async_deaths.py on a number of ranks."""

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
    """Runs all numbers of ranks at the same time; they mostly wait."""
    with ExitStack() as stack:
        yield {size: Deaths(size, tmp_path_factory.mktemp("deaths"), stack) for size in VICTIMS}


@pytest.fixture(
    params=VICTIMS, ids=[f"rank {victim} of {size}" for size, victim in VICTIMS.items()]
)
def deaths(request: pytest.FixtureRequest, all_deaths: dict[int, Deaths]) -> Deaths:
    return all_deaths[request.param]


@pytest.mark.parametrize("case", ["stopped", "killed"])
def test_a_silent_rank_is_named_on_all_others(deaths: Deaths, case: str) -> None:
    found = deaths.found(case)
    # The other ranks wait for the coordinator longer than the coordinator waits for them.
    patience = 1.25 * TIMEOUT if deaths.victim == 0 else TIMEOUT
    reason = f"rank {deaths.victim} sent no heartbeat for {patience:g} s during 'write'"
    for rank in deaths.others:
        assert found[rank]["ranks"] == [deaths.victim]
        assert reason in found[rank]["text"]
        assert not found[rank]["published"]
    assert not (deaths.workdir / case / ".metadata").exists()


def test_a_stopped_rank_that_continues_fails_and_leaves_no_files(deaths: Deaths) -> None:
    found = deaths.found("stopped")
    assert {outcome["text"] for outcome in found} == {found[0]["text"]}
    assert list((deaths.workdir / "stopped").iterdir()) == []


def test_the_ranks_save_again_after_a_stopped_rank_continues(deaths: Deaths) -> None:
    size = len(deaths.others) + 1
    assert deaths.found("next") == [size + 1] * size
    for rank in range(size):
        expected = state_of(rank)
        loaded = emptied(expected)
        stock_load(loaded, deaths.workdir / "next")
        assert_equal(loaded, expected)


if __name__ == "__main__":
    leave_a_save_under_way(None, Path(sys.argv[1]))
