"""Several ranks: each case of cases.py on two and on four, a launch of torchrun for each number."""

from __future__ import annotations

from tests.distributed.cases import CASES, LOADS_OTHERS, SLOW
from tests.distributed.launcher import Launch, launch_tests

LAUNCHES = {
    "2 ranks": Launch(2, [name for name in CASES if name != LOADS_OTHERS]),
    "4 ranks": Launch(4, [name for name in CASES if name not in SLOW], before="2 ranks"),
    "2 ranks again": Launch(2, [LOADS_OTHERS], before="4 ranks"),
}

torchrun, test_on_ranks, test_all_ranks_of_a_launch_end_well = launch_tests(
    "tests.distributed.cases", LAUNCHES, case_first=True
)
