"""torch_ckpt.app_state and async_checkpoint on ranks: the cases of state_cases.py on one, two and
four, and what other numbers of ranks have left."""

from __future__ import annotations

from tests.distributed.launcher import Launch, launch_tests
from tests.distributed.state_cases import CASES

OF_2, OF_4 = "what_2_ranks_left_is_restored", "what_4_ranks_left_is_restored"

ALONE = [case for case in CASES if case not in (OF_2, OF_4)]

LAUNCHES = {
    "2 ranks": Launch(2, ALONE),
    "4 ranks": Launch(4, [*ALONE, OF_2], before="2 ranks"),
    "2 ranks after 4": Launch(2, [OF_4], before="4 ranks"),
    "1 rank": Launch(1, [*ALONE, OF_2, OF_4], before="4 ranks"),
}

torchrun, test_on_ranks, test_all_ranks_of_a_launch_end_well = launch_tests(
    "tests.distributed.state_cases", LAUNCHES
)
