"""Kills and restarts of a run with a local tier, at random system calls of saves and of copies
(rewinds.py).

In the end, the root has the steps, and neither the root nor the disk has leftovers.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.crash.rewinds import kill_runs, state_of, train, value_in
from tests.crash.tally import SEED, TORTURE
from tests.fault_hooks import at_fault_points
from tests.forked import Child
from tests.forked import server as forking_server
from torch_ckpt import CheckpointManager, WriteOptions
from torch_ckpt.manager import LocalTier

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600 if TORTURE else 300),
    pytest.mark.filterwarnings("ignore"),
]

KILLS = 1000 if TORTURE else 60

#: In one of BACK starts, an older step is restored, so that its successors are replaced.
BACK = 4

#: System calls of a run, about.
POINTS = 400


def manager_of(root: str, disk: str) -> CheckpointManager:
    write = WriteOptions(thread_count=2)
    tier = LocalTier(disk, keep=2)
    return CheckpointManager(root, keep=3, preemption=None, write=write, local=tier)


def train_with_tier(
    connection: Connection, root: str, disk: str, run: int, back: int, point: int | None
) -> None:
    """Restores a step, and saves some; see :func:`tests.crash.rewinds.train`.

    Args:
        point: the system call before which the run kills itself; None: it ends.
    """
    lock = threading.Lock()
    calls = 0

    def kill(_operation: str, path: str) -> int:
        nonlocal calls
        if path.startswith((root, disk)):
            with lock:
                calls += 1
                if calls == point:
                    os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with ExitStack() as stack:
        stack.enter_context(at_fault_points(kill))
        manager = stack.enter_context(manager_of(root, disk))

        def wait(step: int) -> None:
            manager.wait_until_finished(published=step % 3 == 0)

        train(manager, connection, run, back, wait)


def test_a_killed_run_loses_no_reported_step_and_mixes_no_saves(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    children = forking_server("torch_ckpt.steps.tier_copy")
    root, disk = str(tmp_path / "root"), str(tmp_path / "disk")

    def start(run: int, back: int) -> tuple[Child, str]:
        point = chance.randint(1, POINTS)
        child = children.start(train_with_tier, root, disk, run, back, point)
        return child, f"seed {SEED}, run {run}, call {point}"

    kill_runs(KILLS, chance, BACK, start)
    for _ in range(2):  # the second start finds all steps in the root
        with manager_of(root, disk) as manager:
            manager.restore(state_of(0))
            manager.wait_until_finished(published=True)
    with manager_of(root, disk) as manager:
        for step in manager.all_steps():
            state = state_of(0)
            manager.restore(state, step=step)
            value_in(state)
    names = [
        path.name
        for top in (tmp_path / "root", *(tmp_path / "disk").iterdir())
        for path in top.iterdir()
    ]
    assert [name for name in names if not name.isdecimal() and not name.startswith(".lease")] == []
