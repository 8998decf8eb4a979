"""Processes end well in whatever state of a save, a load or a watch they come to their last line.

No state ends in a collective over gloo. Where the process group is kept, a thread of torch's may
let go of that collective's tensors when the interpreter has ended, and so end the process
(docs/async.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.exits import GROUPS, STATES
from tests.sweeps import TORTURE

# Times 5 ranks in the three groups, in each state: 550 exits.
ROUNDS = 10 if TORTURE else 1


@pytest.mark.timeout(3600 if TORTURE else 300)
@pytest.mark.parametrize("group", GROUPS)
def test_ranks_end_well_in_every_state(tmp_path: Path, group: str) -> None:
    # Threads of torch's would be missing in what is forked.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.faults.exits", group, str(ROUNDS), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_every_state_is_tried() -> None:
    assert len(STATES) * sum(GROUPS.values()) * 10 >= 500
