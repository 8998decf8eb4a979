"""Kills and restarts of a run whose root is beneath a URL, during random requests (rewinds.py).

After the last run, a sweep leaves no object except the lease.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.crash.rewinds import kill_runs, state_of, train, value_in
from tests.crash.tally import SEED, TORTURE
from tests.forked import Child
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

#: Requests of a run, about.
REQUESTS = 90


def train_beneath_url(
    connection: Connection, root: str, options: dict[str, Any], run: int, back: int
) -> None:
    """Restores a step, and saves some; see :func:`tests.crash.rewinds.train`."""
    write = WriteOptions(thread_count=2, storage_options=options)
    with CheckpointManager(root, keep=3, preemption=None, write=write) as manager:
        train(manager, connection, run, back, lambda _step: manager.wait_until_finished())


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

        def start(run: int, back: int) -> tuple[Child, str]:
            store.fault = lambda _request: None
            child = server_of_children.start(train_beneath_url, root, store.options, run, back)
            number, carried_out = random_numbers.randint(1, REQUESTS), random_numbers.random() < 0.5
            store.fault = killing(child.pid, number, carried_out)
            return child, f"seed {SEED}, run {run}, request {number}"

        kill_runs(KILLS, random_numbers, BACK, start)
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
