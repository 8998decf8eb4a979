"""Several ranks: each case of cases.py on two and on four, a launch of torchrun for each number."""

from __future__ import annotations

import pytest

from tests.distributed.cases import CASES, LOADS_OTHERS, SLOW
from tests.distributed.launcher import TIMEOUT_SECONDS, Launch, Torchrun

LAUNCHES = {
    "2 ranks": Launch(2, [name for name in CASES if name != LOADS_OTHERS]),
    "4 ranks": Launch(4, [name for name in CASES if name not in SLOW], before="2 ranks"),
    "2 ranks again": Launch(2, [LOADS_OTHERS], before="4 ranks"),
}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    return Torchrun("tests.distributed.cases", LAUNCHES, tmp_path_factory.mktemp("ranks"))


@pytest.mark.timeout(3 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    ("launch", "case"),
    [
        pytest.param(name, case, id=f"{case}-{name}")
        for name, launch in LAUNCHES.items()
        for case in launch.cases
    ],
)
def test_on_ranks(torchrun: Torchrun, launch: str, case: str) -> None:
    failures = torchrun.failures(launch, case)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_ranks_of_a_launch_end_well(torchrun: Torchrun, launch: str) -> None:
    """The interpreter's exit too, with the engine's threads in it."""
    torchrun.run(launch)
    assert torchrun.codes[launch] == 0, torchrun.outputs[launch]
