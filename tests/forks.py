"""Children that are forked from a test, so that torch is imported: for one thing, or as ranks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

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
            # The parent's garbage may have threads, as servers of stores do; they are not here.
            gc.freeze()
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

    Each rank is a forked child. Their process group has a store and no collectives.
    """
    with tempfile.TemporaryDirectory() as directory:

        def of_rank(rank: int, writing: int) -> None:
            # Clients of a TCPStore, and gloo, take seconds to connect where names do not resolve.
            store = dist.FileStore(os.path.join(directory, "store"), size)
            dist.init_process_group("fake", store=store, rank=rank, world_size=size)
            try:
                outcome = work(rank)
            except CheckpointException as error:
                outcome = error
            with os.fdopen(writing, "wb") as stream:
                pickle.dump(outcome, stream)

        children, readers = [], []
        for rank in range(size):
            reading, writing = os.pipe()
            readers.append(reading)
            children.append(fork(partial(of_rank, rank, writing)))
            os.close(writing)
        outcomes = []
        for reading in readers:
            with os.fdopen(reading, "rb") as stream:
                outcomes.append(stream.read())
        assert [end_of(child) for child in children] == [0] * size
    return [pickle.loads(outcome) for outcome in outcomes]
