"""Short training runs on two ranks reach their ends, interpreters included."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.crash.tally import SEED
from tests.distributed.launcher import TORTURE
from tests.distributed.training_runs import ENDINGS, train
from tests.forked import ENVIRONMENT, REPOSITORY
from tests.ranks import ADDRESS, WHERE_SIGNAL, environment_of, ranks

pytestmark = pytest.mark.full

#: Runs in forked processes, and in new interpreters.
FORKED, OWN = (250, 50) if TORTURE else (6, 0)

#: Seconds for one run; an import of torch takes most of it on a busy machine.
LIMIT_SECONDS = 300.0


def run_forked(root: Path, number: int) -> None:
    ending = ENDINGS[number]
    with ranks(2, train, root, ending, rank_0_hosts_store=ending.rank_0_hosts_store) as group:
        codes = group.codes(LIMIT_SECONDS)
        assert codes == [0, 0], f"{ending}: exit codes {codes}\n{group.said()}"


def run_in_interpreters(root: Path, number: int) -> None:
    store = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    program = [sys.executable, "-m", "tests.distributed.training_runs", root, str(number)]
    processes = [
        subprocess.Popen(
            program,
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, **environment_of(rank, 2, store.port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=LIMIT_SECONDS)[0])
        except subprocess.TimeoutExpired:
            for other in processes:
                other.send_signal(WHERE_SIGNAL)
            break
    for process in processes[len(outputs) :]:
        try:
            outputs.append(process.communicate(timeout=5.0)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate()[0])
    codes = [process.returncode for process in processes]
    assert codes == [0, 0], f"{ENDINGS[number]}: exit codes {codes}\n" + "\n".join(outputs)


@pytest.mark.timeout(7200 if TORTURE else 900)
def test_training_runs_end_however_they_close_manager_and_process_group(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    starts = [run_forked] * FORKED + [run_in_interpreters] * OWN
    chance.shuffle(starts)
    for count, start in enumerate(starts):
        # Every eighth run starts anew; the others restore.
        start(tmp_path / f"root{count // 8}", chance.randrange(len(ENDINGS)))
