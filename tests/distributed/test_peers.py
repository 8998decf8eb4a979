"""Ours beside Megatron-core's and nvidia-resiliency-ext's released code, where that is installed.

Each case of peer_cases.py on one, two and four ranks, a launch of torchrun for each number.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from benchmarks import no_cuda
from tests.distributed.launcher import Launch, launch_tests
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
SKIPPED = {name: reason for name, reason in REASONS.items() if reason}

FAST = [name for name in CASES if name not in SLOW]

LAUNCHES = {
    "1 rank": Launch(1, FAST, skipped=SKIPPED),
    "2 ranks": Launch(2, list(CASES), skipped=SKIPPED),
    "4 ranks": Launch(4, FAST, skipped=SKIPPED),
}

torchrun, test_on_ranks, test_all_ranks_of_a_launch_end_well = launch_tests(
    "tests.distributed.peer_cases", LAUNCHES, case_first=True
)


@pytest.mark.parametrize("name", no_cuda.REPLACEMENTS)
def test_other_tests_have_torch_cuda_as_it_is(name: str) -> None:
    """The cases are imported here too, for their names."""
    assert getattr(torch.cuda, name) is not no_cuda.REPLACEMENTS[name]
