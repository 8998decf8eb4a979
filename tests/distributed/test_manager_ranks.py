"""CheckpointManager on ranks: each case of manager_cases.py on one, two and four."""

from __future__ import annotations

from tests.distributed.launcher import Launch, launch_tests
from tests.distributed.manager_cases import CASES, SEVERAL

LAUNCHES = {
    "1 rank": Launch(1, [case for case in CASES if case not in SEVERAL]),
    "2 ranks": Launch(2, list(CASES)),
    "4 ranks": Launch(4, list(CASES)),
}

torchrun, test_on_ranks, test_all_ranks_of_a_launch_end_well = launch_tests(
    "tests.distributed.manager_cases", LAUNCHES
)
