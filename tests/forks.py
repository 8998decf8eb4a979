"""Children that are forked from a test, so that torch is imported: for one thing, or as ranks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

#: No child here is meant to take long, in seconds. One that does is killed.
LIMIT = 60

#: What ranks share: events, barriers, counters.
context = multiprocessing.get_context("fork")


def fork(work: Callable[[], object]) -> int:
    """The number of a child that does ``work``, and ends with 0 where it raises nothing."""
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Since Python 3.12: that there are threads, which some tests are about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(LIMIT)
            work()
            code = 0
        except BaseException:
            # Past pytest, which would show it nowhere.
            os.write(2, f"in the child: {traceback.format_exc()}".encode())
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int:
    """The exit code, or the negative signal, of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_fork(work: Callable[[], object]) -> None:
    """Does ``work`` in a forked child; fails where it raises."""
    assert end_of(fork(work)) == 0


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """By rank what ``work(rank)`` returns, or the CheckpointException that it raises.

    Each rank is a forked child, in a gloo process group whose store is the test's.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def of_rank(rank: int, writing: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        patience = timedelta(seconds=LIMIT)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=patience)
        try:
            outcome = work(rank)
        except CheckpointException as error:
            outcome = error
        with os.fdopen(writing, "wb") as stream:
            pickle.dump(outcome, stream)

    pipes = [os.pipe() for _ in range(size)]
    children = []
    for rank, (_reading, writing) in enumerate(pipes):
        children.append(fork(lambda rank=rank, writing=writing: of_rank(rank, writing)))
        os.close(writing)
    outcomes = []
    for reading, _writing in pipes:
        with os.fdopen(reading, "rb") as stream:
            outcomes.append(stream.read())
    assert [end_of(child) for child in children] == [0] * size
    return [pickle.loads(outcome) for outcome in outcomes]
