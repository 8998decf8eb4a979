"""Children that are forked from a test, so that torch is imported, and process groups for them."""

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


def forked(test: Callable[P, None]) -> Callable[P, None]:
    """A test that needs a process without traces of others, and leaves some."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_fork(lambda: test(*args, **kwargs))

    return run


class Answering:
    """A forked child that sends what ``work`` returns, and perhaps goes on then.

    Args:
        work: what it does; gets a function that sends something before its end.
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
        """Waits for what it sends."""
        with os.fdopen(self._reading, "rb") as stream:
            answer = stream.read()
        return pickle.loads(answer) if answer else None


def answer_of(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child."""
    child = Answering(lambda _send: work())
    answer = child.answer()
    assert end_of(child.pid) == 0
    return answer


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """By rank what ``work(rank)`` returns, or the CheckpointException that it raises.

    Each rank is a forked child. Their process group has a store and no collectives.
    """
    with tempfile.TemporaryDirectory() as directory:

        def of_rank(rank: int, _send: object) -> Any:
            # Clients of a TCPStore, and gloo, take seconds to connect where names do not resolve.
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
    """Of one rank, which hosts its store."""
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
