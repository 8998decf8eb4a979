"""Many saves in a row, each with a structure of its own, on ranks whose store waits briefly; run by
test_many_saves.py.

What ranks share of a structure is posted by one of them, and deleted while the next save begins. A
call that waits for a key that another rank has deleted ends after the store's time-out, and fails
the save: it is noticed by the failure, not by the clock.
"""

from __future__ import annotations

import datetime
import os
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt

#: Seconds after which the store ends a wait for a key.
STORE_SECONDS = 5

#: Seconds after which a rank is declared dead; no rank is.
PATIENCE_SECONDS = 120.0


def state_of(number: int, rank: int, chance: random.Random) -> dict[str, object]:
    """A state with names of its own, of which the ranks share a random part."""
    state: dict[str, object] = {
        f"{number}.{index}": torch.full((3,), float(number)) for index in range(3)
    }
    if chance.random() < 0.3:
        state[f"of rank {rank}"] = number
    return state


def play(connection: Connection, workdir: Path, saves: int, seed: int) -> None:
    """Runs one rank. Sends what failed, by the number of the save, the keys that are left in the
    store, and the longest save in seconds.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=STORE_SECONDS))
    chance = random.Random(seed)  # the same choices on all ranks
    failures: dict[int, str] = {}
    longest = 0.0
    handle: torch_ckpt.AsyncSave | None = None
    for number in range(saves):
        begun = time.monotonic()
        path = workdir / str(number % 4)
        state = state_of(number, dist.get_rank(), chance)
        in_background, waits = chance.random() < 0.6, chance.random() < 0.5
        try:
            if in_background:
                handle = torch_ckpt.async_save(state, path, timeout=PATIENCE_SECONDS)
                if waits:
                    handle.result(PATIENCE_SECONDS)
            else:
                torch_ckpt.save(state, path, timeout=PATIENCE_SECONDS)
        except CheckpointException as error:
            failures[number] = str(error)
        longest = max(longest, time.monotonic() - begun)
    try:
        if handle is not None:
            handle.result(PATIENCE_SECONDS)
        torch_ckpt.check_for_errors()
    except CheckpointException as error:
        failures[saves] = str(error)
    connection.send((failures, longest))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(workdir, ignore_errors=True)
    os._exit(0)
