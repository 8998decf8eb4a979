"""Ranks that fall silent in a save or a load, and the outcomes on all ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.ranks import Ranks

#: Seconds after which a silent rank is declared dead.
TIMEOUT = 2.0

#: Limit of waits that should not block, in seconds.
PATIENCE_SECONDS = 60.0

#: Concurrent groups of ranks. They mostly wait.
GROUPS_AT_ONCE = 4


class Silence(NamedTuple):
    """Describes which rank falls silent, and how: "killed", "stopped", or another word for a
    process that continues. Tests with more parameters have classes of their own."""

    how: str
    victim: int


@dataclass
class Found:
    """Result of a case.

    Attributes:
        outcomes: by rank the exception; a killed rank has none.
        published: True if a checkpoint existed when the other ranks had their outcomes.
        published_later: True if a checkpoint existed when a surviving victim had its outcome, too.
        names_later: the names in the directory then, if the test notes them.
    """

    outcomes: dict[int, Any]
    published: bool
    published_later: bool
    names_later: list[str] = field(default_factory=list)


def join_group() -> None:
    """Makes the process group of a rank."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_SECONDS))


def given_up_after(victim: int) -> str:
    """Returns how an error states the time for which a rank sent no heartbeat."""
    # The other ranks wait for the coordinator longer than the coordinator waits for them.
    patience = 1.25 * TIMEOUT if victim == 0 else TIMEOUT
    return f"sent no heartbeat for {patience:g} s"


def stop_here() -> None:
    """Stops this process before the calling thread takes another step.

    A signal to the process might be handled by another thread, and the calling thread would
    continue for a moment.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def falls_silent(results: Connection, silence: Any) -> Callable[[], None]:
    """Makes the function that the victim calls to fall silent. The test is notified just before."""

    def fall() -> None:
        results.send("dies")
        if silence.how == "stopped":
            stop_here()
        elif silence.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    return fall


def is_victim(silence: Any) -> bool:
    """Returns True on the rank that is to fall silent."""
    return silence is not None and dist.get_rank() == silence.victim


def outcome_of(work: Callable[[], object]) -> tuple[list[int], str, float] | None:
    """Returns the failed ranks, the text, and the seconds until the error; None for success."""
    start = time.monotonic()
    try:
        work()
    except CheckpointException as error:
        return sorted(error.failures), str(error), time.monotonic() - start
    return None


def outcomes_of(group: Ranks, path: Path, silence: Any) -> Found:
    """Collects the outcomes of the other ranks, and then the outcome of a surviving victim."""
    assert group.answer(silence.victim) == "dies"
    others = [rank for rank in range(group.size) if rank != silence.victim]
    outcomes = {rank: group.answer(rank) for rank in others}
    published = (path / ".metadata").exists()
    if silence.how == "stopped":
        group.children[silence.victim].signal(signal.SIGCONT)
    if silence.how != "killed":
        outcomes[silence.victim] = group.answer(silence.victim)
    return Found(outcomes, published, (path / ".metadata").exists())


D = TypeVar("D")


@contextmanager
def play_in_groups(
    cases: Sequence[D], play: Callable[[D], Found]
) -> Iterator[dict[D, Future[Found]]]:
    """Plays all cases, some at a time."""
    with ThreadPoolExecutor(GROUPS_AT_ONCE) as pool:
        yield {case: pool.submit(play, case) for case in cases}
