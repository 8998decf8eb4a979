"""Kills and restarts of a run with a local tier, at random system calls of saves and of copies.

A start restores one save of one step, bit for bit: the save that was reported last, or the save
that was killed. In the end, the root has the steps, and neither the root nor the disk has
leftovers.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.crash.tally import SEED, TORTURE
from tests.fault_hooks import at_fault_points
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

#: Number of steps that a run saves, and the system calls of such a run, about.
STEPS, POINTS = 4, 400


class Save(NamedTuple):
    """A step, and the number that all values of its state have."""

    step: int
    value: int


def state_of(value: int) -> dict[str, Any]:
    return {
        **{name: torch.full((300, 100), float(value)) for name in ("first", "second")},
        "value": value,
    }


def value_in(state: dict[str, Any]) -> int:
    """Returns the number of a state. All its values must have it."""
    value = int(state["value"])
    for name in ("first", "second"):
        assert torch.equal(state[name], state_of(value)[name]), (name, value)
    return value


def manager_of(root: str, disk: str) -> CheckpointManager:
    write = WriteOptions(thread_count=2)
    tier = LocalTier(disk, keep=2)
    return CheckpointManager(root, keep=3, preemption=None, write=write, local=tier)


def train(
    connection: Connection, root: str, disk: str, run: int, back: int, point: int | None
) -> None:
    """Restores a step, and saves some. Sends each restored and each reported save.

    Args:
        run: number of the run, which makes the values of its saves unique.
        back: how many steps to go back.
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
        steps = manager.all_steps()
        state = state_of(0)
        chosen = steps[max(0, len(steps) - 1 - back)] if back and steps else None
        start = manager.restore(state, step=chosen)
        connection.send(("restored", chosen, Save(start, value_in(state))))
        for step in range(start + 1, start + 1 + STEPS):
            save = Save(step, 1000 * run + step)
            manager.save(step, state_of(save.value))
            manager.wait_until_finished(published=step % 3 == 0)
            connection.send(("saved", chosen, save))


def test_a_killed_run_loses_no_reported_step_and_mixes_no_saves(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    children = forking_server("torch_ckpt.steps.tier_copy")
    root, disk = str(tmp_path / "root"), str(tmp_path / "disk")
    # The saves that the next start may restore.
    allowed = {Save(0, 0)}
    kills = run = 0
    while kills < KILLS:
        run += 1
        back = chance.randint(1, 2) if chance.randrange(BACK) == 0 else 0
        point = chance.randint(1, POINTS)
        place = f"seed {SEED}, run {run}, call {point}"
        child = children.start(train, root, disk, run, back, point)
        try:
            while True:
                kind, chosen, save = child.receive()
                if kind == "restored":
                    assert chosen is not None or save in allowed, (place, save, allowed)
                    if chosen is None:
                        allowed = {save}
                    save = Save(save.step, 1000 * run + save.step)
                else:
                    allowed = {save}
                # The save that follows may be committed before it is reported.
                allowed.add(Save(save.step + 1, 1000 * run + save.step + 1))
        except EOFError:
            code = child.wait()
        finally:
            child.kill()
        assert code in (0, -signal.SIGKILL), place
        kills += code != 0
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
