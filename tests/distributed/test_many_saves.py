"""Many saves in a row, each with its own names, on two ranks and on four: no save fails.

One rank posts what ranks share of a structure, and deletes it while the next save starts. The store
has a short timeout. Waits for an absent key are counted, so the test does not depend on the clock.
"""

from __future__ import annotations

import datetime
import os
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.crash.tally import SEED
from tests.distributed.launcher import TORTURE
from tests.ranks import ranks
from torch_ckpt.ranks.group import RankGroup

pytestmark = pytest.mark.full

SAVES = 2000 if TORTURE else 80

LIMIT_SECONDS = 1800.0 if TORTURE else 120.0

#: Seconds after which the store ends a wait for a key.
STORE_SECONDS = 5

#: Seconds after which a rank is declared dead; no rank is.
PATIENCE_SECONDS = 120.0


def state_of(number: int, rank: int, chance: random.Random) -> dict[str, object]:
    """Makes a state with unique names, of which the ranks share a random part."""
    state: dict[str, object] = {
        f"{number}.{index}": torch.full((3,), float(number)) for index in range(3)
    }
    if chance.random() < 0.3:
        state[f"of rank {rank}"] = number
    return state


class Watched(dist.Store):  # type: ignore[misc]
    """A connection to the store that counts reads of absent keys, and fails them at once."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store = store
        self.waits: list[str] = []

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._store.compare_set(key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))

    deleteKey = delete_key  # the name by which torch calls it

    def get(self, key: str) -> bytes:
        if not self._store.check([key]):
            self.waits.append(key)
            raise RuntimeError(f"would wait for {key}")
        return bytes(self._store.get(key))


def play(connection: Connection, workdir: Path, saves: int, seed: int) -> None:
    """Runs one rank. Sends by the number of the save the failures, the absent keys that were read,
    and the longest call in seconds."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=STORE_SECONDS))
    group = RankGroup.of(None)
    watched = Watched(group.connection())
    group.connections[:] = [watched]
    chance = random.Random(seed)  # the same choices on all ranks
    failures: dict[int, str] = {}
    longest = 0.0
    handle: torch_ckpt.AsyncSave | None = None
    for number in range(saves):
        start = time.monotonic()
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
        longest = max(longest, time.monotonic() - start)
    try:
        if handle is not None:
            handle.result(PATIENCE_SECONDS)
        torch_ckpt.check_for_errors()
    except CheckpointException as error:
        failures[saves] = str(error)
    connection.send((failures, watched.waits, longest))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(workdir, ignore_errors=True)
    os._exit(0)


@pytest.mark.timeout(LIMIT_SECONDS + 60)
@pytest.mark.parametrize("size", [2, 4])
def test_no_save_waits_for_a_key_that_another_rank_has_deleted(tmp_path: Path, size: int) -> None:
    with ranks(size, play, tmp_path / "saves", SAVES, SEED) as group:
        for rank in range(size):
            failures, waits, longest = group.answer(rank, LIMIT_SECONDS)
            print(f"rank {rank}: the longest call took {longest:.2f} s (seed {SEED})")
            assert failures == {}, f"seed {SEED}"
            assert waits == [], f"seed {SEED}"
