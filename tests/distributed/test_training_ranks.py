"""Several ranks that log, profile and draw: each case of training_cases.py on two and on four."""

from __future__ import annotations

import pytest

from tests.distributed.launcher import TIMEOUT_SECONDS, Launch, Torchrun
from tests.distributed.training_cases import CASES

LAUNCHES = {"2 ranks": Launch(2, list(CASES)), "4 ranks": Launch(4, list(CASES))}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    return Torchrun("tests.distributed.training_cases", LAUNCHES, tmp_path_factory.mktemp("runs"))


@pytest.mark.timeout(2 * TIMEOUT_SECONDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_on_ranks(torchrun: Torchrun, launch: str, case: str) -> None:
    failures = torchrun.failures(launch, case)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_ranks_of_a_launch_end_well(torchrun: Torchrun, launch: str) -> None:
    torchrun.run(launch)
    assert torchrun.codes[launch] == 0, torchrun.outputs[launch]
