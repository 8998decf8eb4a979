"""Threads as ranks that communicate through a store of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.ranks.group import RankGroup

T = TypeVar("T")

#: Timeout in seconds of ranks in tests in which a rank is declared dead. Other tests do not wait
#: for it.
SHORT = 0.4

#: Limit of waits that should not block, in seconds.
PATIENCE_SECONDS = 60.0


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=["TCPStore", "HashStore"])
def any_store(request: pytest.FixtureRequest) -> dist.Store:
    return tcp_store() if request.param == "TCPStore" else dist.HashStore()


@pytest.fixture
def store() -> dist.Store:
    # Clients of a TCPStore need five seconds to connect if host names do not resolve.
    return dist.HashStore()


def ranks_of(store: dist.Store, size: int, timeout: float = PATIENCE_SECONDS) -> list[Exchange]:
    return [
        Exchange.open(RankGroup(store, rank, size, "test"), "save", timeout) for rank in range(size)
    ]


def in_threads(ranks: list[T], work: Callable[[int, T], Any]) -> list[Any]:
    """Runs the work of each rank in a thread. Returns the result or exception of each rank."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(work, number, one) for number, one in enumerate(ranks)]
        return [future.exception(PATIENCE_SECONDS) or future.result() for future in futures]


def together(ranks: list[Exchange], work: Callable[[Exchange], Any]) -> dict[int, Any]:
    """Runs the work of each rank in a thread. Returns by rank its result or exception."""
    outcomes = in_threads(ranks, lambda _number, one: work(one))
    return {one.rank: outcome for one, outcome in zip(ranks, outcomes, strict=True)}


def causes_of(outcome: Any) -> dict[int, str]:
    """Returns by rank the causes of the CheckpointException that each rank must have raised."""
    assert isinstance(outcome, CheckpointException), repr(outcome)
    return {rank: repr(cause) for rank, (cause, _stack) in outcome.failures.items()}


def save(
    ranks: Exchange,
    local: Callable[[], Any] = lambda: "part",
    combine: Callable[[list[Any]], Any] = list,
    undo: Callable[[Any], None] = lambda part: None,
) -> Any:
    def send() -> tuple[Any, Any]:
        part = local()
        return part, part

    return ranks.exchange("write", send, combine, undo)[0]


def fail(text: str) -> Any:
    raise OSError(text)
