"""Children forked from the test process, with torch already imported, and their process groups."""

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
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, ParamSpec

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

P = ParamSpec("P")

#: Time limit of a child, in seconds. A slower child is killed.
LIMIT = 60

#: Factory of what ranks share: events, barriers, counters.
context = multiprocessing.get_context("fork")


def fork(work: Callable[[], object]) -> int:
    """Forks a child that runs ``work``. Returns its pid; the child exits with 0 unless ``work``
    raises."""
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 and newer warn if the process has threads. Some tests are about threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            # The parent's garbage may own threads, such as a store's server, which the child does
            # not have.
            gc.freeze()
            signal.alarm(LIMIT)
            work()
            code = 0
        except BaseException:
            # Bypasses pytest's capture, which would never show it.
            os.write(2, f"in the child: {traceback.format_exc()}".encode())
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int:
    """Waits for a child. Returns its exit code, or the negative number of the signal that ended
    it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_fork(work: Callable[[], object]) -> None:
    """Runs ``work`` in a forked child, and fails if ``work`` raises."""
    assert end_of(fork(work)) == 0


def forked(test: Callable[P, None]) -> Callable[P, None]:
    """Decorates a test that needs a fresh process, or changes state of the process."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_fork(lambda: test(*args, **kwargs))

    return run


class Answering:
    """Forked child that sends what ``work`` returns.

    Args:
        work: function of the child; its argument is a function that sends a value before the end.
    """

    def __init__(self, work: Callable[[Callable[[Any], None]], Any]) -> None:
        reading, writing = os.pipe()

        def send(answer: Any) -> None:
            with os.fdopen(writing, "wb") as stream:
                pickle.dump(answer, stream)

        def run() -> None:
            os.close(reading)
            send(work(send))

        self.pid = fork(run)
        os.close(writing)
        self._reading = reading

    def answer(self) -> Any:
        """Waits for the next value from the child."""
        with os.fdopen(self._reading, "rb") as stream:
            answer = stream.read()
        return pickle.loads(answer) if answer else None


def answer_of(work: Callable[[], Any]) -> Any:
    """Runs ``work`` in a forked child, and returns its result."""
    child = Answering(lambda _send: work())
    answer = child.answer()
    assert end_of(child.pid) == 0
    return answer


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs ``work(rank)`` in a forked child for each rank. Returns by rank its result, or the
    CheckpointException that it raised.

    The process group of the ranks has a store and no collectives.
    """
    with tempfile.TemporaryDirectory() as directory:

        def of_rank(rank: int, _send: object) -> Any:
            # Clients of a TCPStore, and gloo, need seconds to connect if host names do not resolve.
            store = dist.FileStore(os.path.join(directory, "store"), size)
            dist.init_process_group("fake", store=store, rank=rank, world_size=size)
            try:
                return work(rank)
            except CheckpointException as error:
                return error

        children = [Answering(partial(of_rank, rank)) for rank in range(size)]
        answers = [child.answer() for child in children]
        assert [end_of(child.pid) for child in children] == [0] * size
    return answers


@pytest.fixture
def default_group() -> Iterator[None]:
    """Makes a process group with one rank, which hosts its store."""
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
