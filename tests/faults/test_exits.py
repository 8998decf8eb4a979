"""Processes exit without an error in every state of a save, a load or a watch.

No state ends in a collective over gloo. If the process group exists at the exit, a thread of torch
may release the tensors of such a collective after the interpreter has ended, which kills the
process (docs/async.md).
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.exits import GROUPS, STATES, be_busy, be_rank
from tests.forked import server
from tests.ranks import ranks
from tests.sweeps import TORTURE

pytestmark = pytest.mark.full

# With 5 ranks in three groups and 11 states: 550 exits.
ROUNDS = 10 if TORTURE else 1

# Limit for the exit of the ranks.
LIMIT_SECONDS = 120.0


@pytest.fixture(scope="module", autouse=True)
def busy() -> Iterator[None]:
    process = server().start(be_busy)
    yield
    process.kill()


@pytest.mark.timeout(3600 if TORTURE else 300)
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_exit_without_error_in_every_state(tmp_path: Path, group: str) -> None:
    wrong = []
    for turn, state in itertools.product(range(ROUNDS), STATES):
        path = tmp_path / f"{turn}-{state}"
        with ranks(GROUPS[group], be_rank, state, str(path), group) as ended:
            if any(codes := ended.codes(LIMIT_SECONDS)):
                wrong.append(f"{state}: exit codes {codes}\n{ended.said()}")
        shutil.rmtree(path, ignore_errors=True)
    assert not wrong, "\n".join(wrong)
