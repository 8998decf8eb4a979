"""Ranks that are killed, stopped or stuck in a save through the Megatron interface."""

from __future__ import annotations

import datetime
import itertools
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.silent_ranks import (
    PATIENCE_SECONDS,
    TIMEOUT,
    Found,
    falls_silent,
    outcome_of,
    outcomes_of,
)
from tests.ranks import ranks
from torch_ckpt import Background
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    AsyncRequest,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from torch_ckpt.megatron.async_writer import FileSystemWriterAsync

#: Ranks that save together.
SIZE = 3


@dataclass(frozen=True)
class Death:
    """One case.

    Attributes:
        how: "killed", "stopped", or "stuck": the process lives and its disk hangs.
        phase: phase before which the rank falls silent; before "polling" with bytes left to write.
        victim: the rank; 0 is the coordinator.
    """

    how: str
    phase: str
    victim: int

    def __str__(self) -> str:
        return f"rank {self.victim} {self.how} before {self.phase}"

    @property
    def step(self) -> str:
        """Returns the step in which the other ranks notice it."""
        return "plan" if self.phase == "planning" else "write"


#: The step of a save in which a rank falls silent.
PHASES = ("planning", "polling", "finalizing")

DEATHS = [
    *(Death(how, p, victim) for how in ("killed", "stopped") for p in PHASES for victim in (0, 1)),
    *(Death("stuck", "polling", victim) for victim in (0, 1)),
]


def state_of(rank: int, seed: int) -> dict[str, Any]:
    """Makes three chunks on each rank."""
    numbers = torch.arange(3 << 20, dtype=torch.int32)
    return {f"of rank {rank}": numbers + 10 * seed + rank, "seed": seed}


class Training:
    """One rank, which saves and polls until the save ends."""

    def __init__(self, path: Path, timeout: float) -> None:
        self.path = str(path)
        self.timeout = timeout
        self.queue = AsyncCallsQueue(persistent=True, timeout=timeout)
        self.rank = dist.get_rank()

    def save(self, seed: int, death: Death | None, die: Callable[[], None]) -> None:
        """Runs a save from plan to commit."""
        mine = death if death is not None and death.victim == self.rank else None
        phase = mine.phase if mine is not None else ""
        if phase == "planning":
            die()
        options: dict[str, Any] = {}
        if phase == "polling":
            # The first chunk is on the disk, the others are not.
            options["background"] = Background(max_bytes_per_second=1)
        writer = FileSystemWriterAsync(self.path, timeout=self.timeout, thread_count=1, **options)
        finalizing = save_state_dict_async_plan(
            state_of(self.rank, seed), writer, planner=dcp.DefaultSavePlanner()
        )[0]
        function, preload, arguments = writer.get_save_function_and_args()
        finalize = partial(save_state_dict_async_finalize, *finalizing)
        request = AsyncRequest(function, arguments, [finalize], preload_fn=preload)
        if phase == "finalizing":
            request.finalize_fns.insert(0, die)
        self.queue.schedule_async_request(request)
        for poll in itertools.count(1):
            if phase == "polling" and poll == 2:
                die()
            if self.queue.maybe_finalize_async_calls():
                return
            # A training step lets the low-priority threads use the processors.
            time.sleep(0.005)


def run_rank(results: Connection, path: Path, seed: int, death: Death | None = None) -> None:
    """Runs one rank: saves and sends the outcome, twice."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    die = falls_silent(results, death) if death is not None else _nothing
    # Connects and imports before the case, whose time limit is too short for this.
    Training(path.with_name(f"{path.name}-warm"), PATIENCE_SECONDS).save(0, None, die)
    training = Training(path, TIMEOUT)
    results.send(outcome_of(lambda: training.save(seed, death, die)))
    if results.recv() == "again":
        # Through the same queue.
        training.timeout = PATIENCE_SECONDS
        training.queue._timeout = PATIENCE_SECONDS
        training.save(seed + 1, None, die)
        results.send(None)
        results.recv()
    os._exit(0)


def _nothing() -> None:
    pass


def play(path: Path, death: Death) -> Found:
    """Plays one case. If the victim survives, all ranks then save again into the same directory."""
    with ranks(SIZE, run_rank, path, 1, death) as group:
        found = outcomes_of(group, path, death)
        if death.how != "killed":
            for child in group.children:
                child.connection.send("again")
            assert [group.answer(rank) for rank in range(SIZE)] == [None] * SIZE
        return found
