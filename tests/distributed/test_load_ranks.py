"""Several ranks that load: each case of load_cases.py on two and on four."""

from __future__ import annotations

from tests.distributed.launcher import Launch, launch_tests
from tests.distributed.load_cases import CASES

LAUNCHES = {"2 ranks": Launch(2, list(CASES)), "4 ranks": Launch(4, list(CASES))}

torchrun, test_on_ranks, test_all_ranks_of_a_launch_end_well = launch_tests(
    "tests.distributed.load_cases", LAUNCHES
)
