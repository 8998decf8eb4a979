"""Steps at a URL whose upload one rank does not finish.

Run by test_remote_ranks.py on two ranks. Each runs all cases in order and sends their results. Rank
1 is stopped in one case and killed in the last.
"""

from __future__ import annotations

import datetime
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.distributed.silent_ranks import stop_here
from torch_ckpt.steps.remote import RemoteSteps
from torch_ckpt.steps.remote_files import RemoteFiles

#: Seconds after which a silent rank is declared dead.
TIMEOUT = 3.0

PATIENCE_SECONDS = 60.0

_STORE = "deaths"


def save(steps: RemoteSteps, step: int, timeout: float) -> None:
    # Two files on each rank.
    state = {f"{n} of rank {dist.get_rank()}": torch.arange(1000) for n in range(2)}
    writer = steps.writer(step, attempt="0123abcd", thread_count=2)
    torch_ckpt.save(state, storage_writer=writer, timeout=timeout)


def failure_of(steps: RemoteSteps, step: int, after_one_file: Callable[[], None]) -> dict[str, Any]:
    """Returns the failure of a save in which rank 1 calls a function after its first upload."""
    upload = RemoteFiles.upload

    def interrupted(self: RemoteFiles, *args: Any) -> None:
        upload(self, *args)
        RemoteFiles.upload = upload  # type: ignore[method-assign]
        after_one_file()

    if dist.get_rank() == 1:
        RemoteFiles.upload = interrupted  # type: ignore[method-assign]
    try:
        save(steps, step, TIMEOUT)
    except CheckpointException as error:
        return {
            "ranks": sorted(error.failures),
            "text": str(error),
            "files": [name for name in steps._files.list() if name.startswith(f"{step:010d}/")],
        }
    raise AssertionError("no CheckpointException was raised")


def case_first(steps: RemoteSteps) -> None:
    """Connects to the store, which may take seconds. The other cases have short timeouts."""
    save(steps, 1, PATIENCE_SECONDS)


def case_stopped(steps: RemoteSteps) -> dict[str, Any]:
    store = dist.PrefixStore(_STORE, dist.distributed_c10d._get_default_store())

    def stop() -> None:
        store.set("stopped", str(os.getpid()))
        stop_here()

    found = failure_of(steps, 2, stop)
    if dist.get_rank() == 0:
        os.kill(int(store.get("stopped")), signal.SIGCONT)
    return found


def case_killed(steps: RemoteSteps) -> dict[str, Any]:
    return failure_of(steps, 3, lambda: os.kill(os.getpid(), signal.SIGKILL))


CASES: dict[str, Callable[[RemoteSteps], Any]] = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}


def play(connection: Connection, workdir: Path) -> None:
    """Runs the cases on one rank."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    steps = RemoteSteps(f"file://{workdir}/run", workdir)
    for name, function in CASES.items():
        connection.send((name, function(steps)))
    # Destroying a process group that has lost a rank may hang.
    os._exit(0)
