"""Cases of ranks that communicate through their store; run by test_store_ranks.py.

Every rank runs all cases in order and sends their results. The last rank is stopped in one case and
killed in the last.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.silent_ranks import stop_here
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.group import RankGroup

#: Seconds after which a silent rank is declared dead.
TIMEOUT = 2.0

#: Limit of waits that should not block, in seconds.
PATIENCE_SECONDS = 60.0


def store_of_torchrun() -> dist.Store:
    return dist.PrefixStore("cases", dist.distributed_c10d._get_default_store())


def steps(ranks: Exchange) -> list[Any]:
    """Returns the result of each kind of step, and of a failing one."""

    def fail() -> None:
        raise OSError(f"on {ranks.rank}")

    results = [
        ranks.exchange(
            "plan",
            lambda: (ranks.rank, None),
            lambda values: Answers([value + 10 for value in values]),
        )[0],
        ranks.exchange("write", lambda: (ranks.rank, None), list, lambda part: None)[0],
        ranks.run("load", lambda: ranks.rank),
    ]
    try:
        ranks.run("fail", lambda: fail() if ranks.rank else None)
    except CheckpointException as error:
        results.append([[rank, repr(cause)] for rank, (cause, _) in error.failures.items()])
    return results


def silent_ranks(work: Callable[[], Any]) -> dict[str, Any]:
    """Returns the ranks that a step must have declared dead, the reason, and the seconds until
    then."""
    started = time.monotonic()
    try:
        work()
    except CheckpointException as error:
        return {
            "ranks": sorted(error.failures),
            "text": str(error),
            "seconds": time.monotonic() - started,
        }
    raise AssertionError("no CheckpointException was raised")


def case_each_kind_of_step_returns_the_values_of_the_ranks() -> list[Any]:
    ranks = Exchange.open(RankGroup.of(None), "save", PATIENCE_SECONDS)
    results = steps(ranks)
    ranks.close()
    return results


def case_ranks_of_a_subgroup_are_numbered_within_it() -> list[Any]:
    half = dist.get_world_size() // 2
    groups = [dist.new_group(range(start, start + half)) for start in (0, half)]
    group = RankGroup.of(groups[dist.get_rank() // half])
    ranks = Exchange.open(group, "save", PATIENCE_SECONDS)
    members, _ = ranks.exchange("who", lambda: (dist.get_rank(), None), list)
    ranks.close()
    return [group.rank, group.size, members]


def case_a_stopped_rank_is_declared_dead_and_fails_when_it_continues() -> dict[str, Any]:
    ranks = Exchange.open(RankGroup.of(None), "save", TIMEOUT)
    store = store_of_torchrun()

    def local() -> tuple[None, None]:
        if ranks.rank == ranks.size - 1:
            store.set("pid", str(os.getpid()))
            stop_here()
        return None, None

    found = silent_ranks(lambda: ranks.exchange("write", local, list, lambda part: None))
    if ranks.rank == 0:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    ranks.close()
    return found


def case_a_killed_rank_is_declared_dead() -> dict[str, Any]:
    ranks = Exchange.open(RankGroup.of(None), "save", TIMEOUT)

    def local() -> tuple[None, None]:
        if ranks.rank == ranks.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return None, None

    found = silent_ranks(lambda: ranks.exchange("write", local, list, lambda part: None))
    ranks.close()
    return found


def stop_the_host(connection: Connection) -> None:
    """Runs one of two ranks. Rank 0, the store's host, is stopped in a step that commits.

    Sends the error's text, whether this rank has committed, and the seconds after which it had
    closed its connection to the store.
    """
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    group = RankGroup.of(None)
    # Connecting may take longer than the timeout.
    connecting = Exchange.open(group, "save", PATIENCE_SECONDS)
    connecting.run("connect", lambda: None)
    connecting.close()
    ranks = Exchange.open(group, "save", TIMEOUT)
    committed: list[Any] = []

    def local() -> tuple[None, None]:
        if ranks.rank == 0:
            connection.send("stops")
            stop_here()
        return None, None

    started, text = time.monotonic(), ""
    try:
        with ranks.alive(time.monotonic_ns):
            ranks.exchange("write", local, committed.append, lambda part: None)
    except CheckpointException as error:
        text = str(error)
    ranks.close(TIMEOUT)
    connection.send((text, bool(committed), time.monotonic() - started))
    connection.recv()
    os._exit(0)


CASES: dict[str, Callable[[], Any]] = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}


def play(connection: Connection) -> None:
    """Runs the cases on one rank."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    for name, case in CASES.items():
        connection.send((name, case()))
    # Destroying a process group that has lost a rank may hang.
    os._exit(0)
