"""Ranks that meet through their store: each case of store_cases.py on two and on four.

Not by torchrun, which ends all ranks when one has died: this process hosts the store as its agent
does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.store_cases import TIMEOUT

REPOSITORY = Path(__file__).parents[2]

# All cases of a launch together.
TIMEOUT_SECONDS = 120

KILLED = "a_killed_rank_is_given_up"
STOPPED = "a_stopped_rank_is_given_up_and_fails_when_it_goes_on"


class Launch:
    """The cases on a number of ranks, each in a process of its own."""

    def __init__(self, size: int, results: Path) -> None:
        self.size = size
        self.results = results
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [self._start(rank) for rank in range(size)]
        self.outputs: list[str] = []

    def found(self, case: str) -> list[Any]:
        """By rank what a case returned; None where the rank did not live to see its end."""
        if not self.outputs:
            self._wait()
        logs = [Path(f"{self.results}-{rank}.json") for rank in range(self.size)]
        found = [json.loads(log.read_text()) if log.exists() else {} for log in logs]
        alive = self.size - 1 if case == KILLED else self.size
        assert all(case in of_rank for of_rank in found[:alive]), "\n".join(self.outputs)
        return [of_rank.get(case) for of_rank in found]

    def _start(self, rank: int) -> subprocess.Popen[str]:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        place = {"RANK": str(rank), "WORLD_SIZE": str(self.size)}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.store_cases", str(self.results)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                **address,
                **place,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _wait(self) -> None:
        for process in self.processes:
            try:
                self.outputs.append(process.communicate(timeout=TIMEOUT_SECONDS)[0])
            except subprocess.TimeoutExpired:
                process.kill()
                self.outputs.append(f"{process.communicate()[0]}\nkilled by the test")


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Launch]]:
    """At the same time, for they mostly wait."""
    results = tmp_path_factory.mktemp("store")
    launches = {size: Launch(size, results / f"of-{size}") for size in (2, 4)}
    yield launches
    for launch in launches.values():
        for process in launch.processes:
            process.kill()
            process.wait()


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def launch(request: pytest.FixtureRequest, launches: dict[int, Launch]) -> Launch:
    return launches[request.param]


def test_steps_give_what_they_give_over_the_process_group(launch: Launch) -> None:
    for over_group, over_store in launch.found("steps_give_what_they_give_over_the_process_group"):
        assert len(over_group) == 4
        assert over_store == over_group


def test_ranks_of_a_subgroup_are_numbered_within_it(launch: Launch) -> None:
    half = launch.size // 2
    expected = [
        [rank % half, half, list(range(rank - rank % half, rank - rank % half + half))]
        for rank in range(launch.size)
    ]
    assert launch.found("ranks_of_a_subgroup_are_numbered_within_it") == expected


@pytest.mark.parametrize("case", [STOPPED, KILLED])
def test_a_silent_rank_is_named_on_all_others(launch: Launch, case: str) -> None:
    last = launch.size - 1
    for outcome in launch.found(case)[:last]:
        assert outcome["ranks"] == [last]
        assert f"rank {last} gave no sign of life for 2 s in 'write'" in outcome["text"]
        assert outcome["seconds"] > TIMEOUT


def test_a_rank_that_was_stopped_fails_like_the_others(launch: Launch) -> None:
    *others, stopped = launch.found(STOPPED)
    assert [other["text"] for other in others] == [stopped["text"]] * len(others)
