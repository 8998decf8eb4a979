"""Kills and restarts of a run whose root is beneath a URL, during random requests.

A start restores one save of one step, bit for bit: the save that was reported last, or the save
that was killed. After the last run, a sweep leaves no object except the lease.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch

from tests.crash.tally import SEED, TORTURE
from tests.forked import server as forking_server
from tests.object_server import BUCKET, Fault, ObjectServer, Request
from tests.object_steps import make_old, names_of
from torch_ckpt import CheckpointManager, WriteOptions
from torch_ckpt.steps.lease_protocol import LEASE_NAME
from torch_ckpt.steps.object_steps import ObjectSteps

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600 if TORTURE else 300),
    pytest.mark.filterwarnings("ignore"),
]

KILLS = 300 if TORTURE else 30

#: In one of BACK starts, an older step is restored, so that its successors are replaced.
BACK = 3

#: Number of steps that a run saves, and the requests of such a run, about.
STEPS, REQUESTS = 4, 90


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


def train(connection: Connection, root: str, options: dict[str, Any], run: int, back: int) -> None:
    """Restores a step, and saves some. Sends each restored and each reported save.

    Args:
        run: number of the run, which makes the values of its saves unique.
        back: how many steps to go back.
    """
    write = WriteOptions(thread_count=2, storage_options=options)
    with CheckpointManager(root, keep=3, preemption=None, write=write) as manager:
        steps = manager.all_steps()
        state = state_of(0)
        chosen = steps[max(0, len(steps) - 1 - back)] if back and steps else None
        start = manager.restore(state, step=chosen)
        connection.send(("restored", chosen, Save(start, value_in(state))))
        for step in range(start + 1, start + 1 + STEPS):
            save = Save(step, 1000 * run + step)
            manager.save(step, state_of(save.value))
            manager.wait_until_finished()
            connection.send(("saved", chosen, save))


def killing(pid: int, number: int, carried_out: bool) -> Callable[[Request], Fault | None]:
    """Makes a ``fault`` that kills a process during one of its requests."""
    seen: list[Request] = []

    def fault(request: Request) -> Fault | None:
        seen.append(request)
        if len(seen) != number:
            return None
        os.kill(pid, signal.SIGKILL)
        return Fault("reset", after=carried_out)

    return fault


def test_a_killed_run_loses_no_reported_step_and_mixes_no_saves() -> None:
    pytest.importorskip("obstore")
    random_numbers = random.Random(SEED)
    server_of_children = forking_server("obstore", "torch_ckpt.steps.object_steps")
    with ObjectServer().running() as store:
        root = f"s3://{BUCKET}/run"
        # The saves that the next start may restore.
        allowed = {Save(0, 0)}
        kills = 0
        run = 0
        while kills < KILLS:
            run += 1
            back = random_numbers.randint(1, 2) if random_numbers.randrange(BACK) == 0 else 0
            store.fault = lambda _request: None
            child = server_of_children.start(train, root, store.options, run, back)
            number, carried_out = random_numbers.randint(1, REQUESTS), random_numbers.random() < 0.5
            store.fault = killing(child.pid, number, carried_out)
            place = f"seed {SEED}, run {run}, request {number}"
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
        store.fault = lambda _request: None
        steps = ObjectSteps(root, store.options)
        for info in steps.entries(leftovers=False):
            state = state_of(0)
            steps.load(info.step, state, no_dist=True)
            value_in(state)
            assert steps.delete(info.step)
        make_old(store)
        steps.sweep()
        assert names_of(steps) == [LEASE_NAME]
