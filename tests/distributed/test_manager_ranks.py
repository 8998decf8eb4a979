"""CheckpointManager on ranks: each case of manager_cases.py on one, two and four."""

from __future__ import annotations

import pytest

from tests.distributed.launcher import TIMEOUT_SECONDS, Launch, Torchrun
from tests.distributed.manager_cases import CASES, SEVERAL

LAUNCHES = {
    "1 rank": Launch(1, [case for case in CASES if case not in SEVERAL]),
    "2 ranks": Launch(2, list(CASES)),
    "4 ranks": Launch(4, list(CASES)),
}

RUNS = [(launch, case) for launch, of in LAUNCHES.items() for case in of.cases]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    workdir = tmp_path_factory.mktemp("manager")
    return Torchrun("tests.distributed.manager_cases", LAUNCHES, workdir)


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(("launch", "case"), RUNS)
def test_on_ranks(torchrun: Torchrun, launch: str, case: str) -> None:
    failures = torchrun.failures(launch, case)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_ranks_of_a_launch_end_well(torchrun: Torchrun, launch: str) -> None:
    torchrun.run(launch)
    assert torchrun.codes[launch] == 0, torchrun.outputs[launch]
