"""torch_ckpt.app_state and async_checkpoint on ranks: the cases of state_cases.py on one, two and
four, and what other numbers of ranks have left."""

from __future__ import annotations

import pytest

from tests.distributed.launcher import TIMEOUT_SECONDS, Launch, Torchrun
from tests.distributed.state_cases import CASES

OF_2, OF_4 = "what_2_ranks_left_is_restored", "what_4_ranks_left_is_restored"

ALONE = [case for case in CASES if case not in (OF_2, OF_4)]

LAUNCHES = {
    "2 ranks": Launch(2, ALONE),
    "4 ranks": Launch(4, [*ALONE, OF_2], before="2 ranks"),
    "2 ranks after 4": Launch(2, [OF_4], before="4 ranks"),
    "1 rank": Launch(1, [*ALONE, OF_2, OF_4], before="4 ranks"),
}

RUNS = [(launch, case) for launch, of in LAUNCHES.items() for case in of.cases]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    workdir = tmp_path_factory.mktemp("state")
    return Torchrun("tests.distributed.state_cases", LAUNCHES, workdir)


@pytest.mark.timeout(3 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(("launch", "case"), RUNS)
def test_on_ranks(torchrun: Torchrun, launch: str, case: str) -> None:
    failures = torchrun.failures(launch, case)
    assert not failures, "\n".join(failures)


@pytest.mark.timeout(3 * TIMEOUT_SECONDS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_ranks_of_a_launch_end_well(torchrun: Torchrun, launch: str) -> None:
    torchrun.run(launch)
    assert torchrun.codes[launch] == 0, torchrun.outputs[launch]
