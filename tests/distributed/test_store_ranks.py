"""Ranks that communicate through their store in processes of their own."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed.silent_ranks import (
    PATIENCE_SECONDS,
    TIMEOUT,
    join_group,
    stop_here,
)
from tests.ranks import ranks
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.group import RankGroup


def run(connection: Connection, work: Callable[..., Any], *arguments: Any) -> None:
    """Sends the result of a rank's work. The test ends the ranks: destroying a process group that
    has lost a rank may hang."""
    join_group()
    # Connecting may take longer than the timeout of a silent rank.
    connecting = Exchange.open(RankGroup.of(None), "save", PATIENCE_SECONDS)
    connecting.run("connect", lambda: None)
    connecting.close()
    connection.send(work(connection, *arguments))
    connection.recv()


def write_while_the_host_stops(connection: Connection) -> tuple[str, bool, float]:
    """Stops rank 0, the store's host, in a step that commits.

    Returns the error's text, whether this rank has committed, and the seconds after which it had
    closed its connection to the store.
    """
    ranks = Exchange.open(RankGroup.of(None), "save", TIMEOUT)
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
    return text, bool(committed), time.monotonic() - started


def test_a_stopped_store_host_does_not_commit_after_it_was_declared_dead() -> None:
    with ranks(2, run, write_while_the_host_stops, rank_0_hosts_store=True) as group:
        assert group.answer(0) == "stops"
        text, committed, seconds = group.answer(1)
        lost = "rank 1 lost the connection to the process group's store during 'write'"
        assert f"{lost} (no answer for 2.5 s)" in text
        assert "rank 0 may have committed" in text
        # Waits once, and not again at the end of the step.
        assert seconds < 2 * 1.25 * TIMEOUT
        group.children[0].signal(signal.SIGCONT)
        text, committed, _seconds = group.answer(0)
        assert "rank 0, the coordinator, did not run for" in text
        assert not committed
