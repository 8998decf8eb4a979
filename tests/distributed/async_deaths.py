"""Saves in which a rank falls silent; run by test_async_rank_ends.py.

Every rank runs all cases in order and sends their results. One rank is stopped in one case and
killed in the last.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.distributed.silent_ranks import stop_here
from torch_ckpt import Background
from torch_ckpt._base.progress import Progress

#: Seconds after which a silent rank is declared dead.
TIMEOUT = 3.0

#: Limit of waits that should not block, in seconds.
PATIENCE_SECONDS = 60.0

#: Bytes of one rank: three chunks.
STATE_BYTES = 12 << 20


def state_of(rank: int) -> dict[str, Any]:
    numbers = torch.arange(STATE_BYTES // 4, dtype=torch.int32)
    return {f"of rank {rank}": numbers + rank, "step": 1}


class Case:
    def __init__(self, workdir: Path, victim: int) -> None:
        self.workdir = workdir
        self.is_victim = dist.get_rank() == victim
        self.store = dist.PrefixStore("deaths", dist.distributed_c10d._get_default_store())

    def failure_of(self, name: str, **options: Any) -> dict[str, Any]:
        """Runs a save that must fail. Returns the failed ranks, the reason, and the seconds."""
        path = self.workdir / name
        start = time.monotonic()
        handle = torch_ckpt.async_save(
            state_of(dist.get_rank()), path, timeout=TIMEOUT, staging="overlapped", **options
        )
        try:
            handle.result(PATIENCE_SECONDS)
        except CheckpointException as error:
            return {
                "ranks": sorted(error.failures),
                "text": str(error),
                "seconds": time.monotonic() - start,
                "published": (path / ".metadata").exists(),
            }
        raise AssertionError("no CheckpointException was raised")


def save_together(path: Path) -> int:
    handle = torch_ckpt.async_save(state_of(dist.get_rank()), path, timeout=PATIENCE_SECONDS)
    return len(handle.result(PATIENCE_SECONDS).state_dict_metadata)


def case_first(case: Case) -> int:
    """Connects to the store, which may take seconds. The other cases have short timeouts."""
    return save_together(case.workdir / "first")


def case_stopped(case: Case) -> dict[str, Any]:
    def stop() -> None:
        case.store.set("stopped", str(os.getpid()))
        stop_here()

    found = case.failure_of("stopped", write_done=stop if case.is_victim else None)
    if not case.is_victim and case.store.add("resumed", 1) == 1:
        os.kill(int(case.store.get("stopped")), signal.SIGCONT)
    return found


def case_next(case: Case) -> int:
    return save_together(case.workdir / "next")


def case_killed(case: Case) -> dict[str, Any]:
    def kill(progress: Progress) -> None:
        # The first chunk is on the disk, the others are not.
        if progress.bytes_done > 0:
            os.kill(os.getpid(), signal.SIGKILL)

    dies: dict[str, Any] = {"progress": kill, "background": Background(max_bytes_per_second=1)}
    return case.failure_of("killed", **(dies if case.is_victim else {}))


CASES: dict[str, Callable[[Case], Any]] = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}


def play(connection: Connection, workdir: Path, victim: int) -> None:
    """Runs the cases on one rank."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    case = Case(workdir, victim)
    for name, function in CASES.items():
        connection.send((name, function(case)))
    # Destroying a process group that has lost a rank may hang.
    os._exit(0)
