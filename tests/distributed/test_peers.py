"""Ours beside Megatron-core's and nvidia-resiliency-ext's released code, where that is installed.

Each case of peer_cases.py on one, two and four ranks, a launch of torchrun for each number.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from benchmarks import no_cuda
from tests.distributed.launcher import TIMEOUT_SECONDS, Launch, Torchrun
from tests.distributed.peer_cases import CASES, OF_NVRX, SLOW


def lacking(*modules: str) -> str:
    """Why cases that need some modules are skipped; "" where they are all there."""
    for module in modules:
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            return f"{module} is not installed; scripts/setup.sh installs it where PyPI has it"
    return ""


# The first name of each is there without importing anything large.
WITHOUT_MEGATRON = lacking("megatron.core")
WITHOUT_NVRX = lacking("nvidia_resiliency_ext", "psutil")

REASONS = {name: WITHOUT_NVRX if name in OF_NVRX else WITHOUT_MEGATRON for name in CASES}


def cases_for(ranks: int) -> list[str]:
    return [name for name in CASES if ranks == 2 or name not in SLOW]


LAUNCHES = {
    title: Launch(ranks, [name for name in cases_for(ranks) if not REASONS[name]])
    for title, ranks in (("1 rank", 1), ("2 ranks", 2), ("4 ranks", 4))
}


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    return Torchrun("tests.distributed.peer_cases", LAUNCHES, tmp_path_factory.mktemp("peers"))


@pytest.mark.timeout(3 * TIMEOUT_SECONDS)
@pytest.mark.parametrize(
    ("launch", "case"),
    [
        pytest.param(title, case, id=f"{case}-{title}")
        for title, launch in LAUNCHES.items()
        for case in cases_for(launch.ranks)
    ],
)
def test_on_ranks(torchrun: Torchrun, launch: str, case: str) -> None:
    if REASONS[case]:
        pytest.skip(REASONS[case])
    failures = torchrun.failures(launch, case)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_all_ranks_of_a_launch_end_well(torchrun: Torchrun, launch: str) -> None:
    """The interpreter's exit too."""
    if not LAUNCHES[launch].cases:
        pytest.skip(f"{WITHOUT_MEGATRON}; {WITHOUT_NVRX}")
    torchrun.run(launch)
    assert torchrun.codes[launch] == 0, torchrun.outputs[launch]


@pytest.mark.parametrize("name", no_cuda.REPLACEMENTS)
def test_other_tests_have_torch_cuda_as_it_is(name: str) -> None:
    """The cases are imported here too, for their names."""
    assert getattr(torch.cuda, name) is not no_cuda.REPLACEMENTS[name]
