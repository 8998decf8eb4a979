"""Ranks that fall silent in a save or a load, and what comes of it on all of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.ranks import Ranks

#: Seconds after which a silent rank is given up.
TIMEOUT = 2.0

#: For what nothing should be waiting.
PATIENCE_SECONDS = 60.0

#: Groups of ranks at the same time; they mostly wait.
GROUPS_AT_ONCE = 4


class Silence(Protocol):
    """Which rank falls silent, and how."""

    @property
    def how(self) -> str:
        """ "killed", "stopped", or another word for a process that goes on."""

    @property
    def victim(self) -> int:
        """The rank."""


D = TypeVar("D", bound=Silence)


@dataclass
class Found:
    """What came of a case.

    Attributes:
        outcomes: by rank what was raised; none of a rank that was killed.
        published: whether there was a checkpoint when the others were told.
        published_later: whether there was one when a victim that goes on had been told, too.
    """

    outcomes: dict[int, Any]
    published: bool
    published_later: bool


def given_up_after(victim: int) -> str:
    """How an error says for how long that rank was silent."""
    # The others wait for the coordinator for longer than it waits for them.
    patience = 1.25 * TIMEOUT if victim == 0 else TIMEOUT
    return f"sent no heartbeat for {patience:g} s"


def stop_here() -> None:
    """Stops this process before the calling thread takes another step.

    A signal to the process might be another thread's, and this one would go on for a moment.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def falls_silent(results: Connection, silence: Silence) -> Callable[[], None]:
    """What the victim calls to fall silent; the test hears of it just before."""

    def fall() -> None:
        results.send("dies")
        if silence.how == "stopped":
            stop_here()
        elif silence.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

    return fall


def is_victim(silence: Silence | None) -> bool:
    """Whether it is this rank that is to fall silent."""
    return silence is not None and dist.get_rank() == silence.victim


def outcome_of(work: Callable[[], object]) -> tuple[list[int], str, float] | None:
    """Who failed, the text, and after how many seconds; None: nobody did."""
    begun = time.monotonic()
    try:
        work()
    except CheckpointException as error:
        return sorted(error.failures), str(error), time.monotonic() - begun
    return None


def outcomes_of(group: Ranks, path: Path, silence: Silence) -> Found:
    """The others', and then of a victim that is alive."""
    assert group.answer(silence.victim) == "dies"
    others = [rank for rank in range(group.size) if rank != silence.victim]
    outcomes = {rank: group.answer(rank) for rank in others}
    published = (path / ".metadata").exists()
    if silence.how == "stopped":
        group.children[silence.victim].signal(signal.SIGCONT)
    if silence.how != "killed":
        outcomes[silence.victim] = group.answer(silence.victim)
    return Found(outcomes, published, (path / ".metadata").exists())


@contextmanager
def some_at_a_time(
    cases: Sequence[D], play: Callable[[D], Found]
) -> Iterator[dict[D, Future[Found]]]:
    """Every case is played."""
    with ThreadPoolExecutor(GROUPS_AT_ONCE) as pool:
        yield {case: pool.submit(play, case) for case in cases}
