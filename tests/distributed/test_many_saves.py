"""Many saves in a row, each with its own names, on two ranks and on four: no save fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.tally import SEED
from tests.distributed.launcher import TORTURE
from tests.distributed.many_saves import play
from tests.ranks import ranks

SAVES = 2000 if TORTURE else 80

LIMIT_SECONDS = 1800.0 if TORTURE else 120.0


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("size", [2, 4])
def test_no_save_waits_for_a_key_that_another_rank_has_deleted(tmp_path: Path, size: int) -> None:
    with ranks(size, play, tmp_path / "saves", SAVES, SEED) as group:
        for rank in range(size):
            failures, waits, longest = group.answer(rank, LIMIT_SECONDS)
            print(f"rank {rank}: the longest call took {longest:.2f} s (seed {SEED})")
            assert failures == {}, f"seed {SEED}"
            assert waits == [], f"seed {SEED}"
