"""Requests and saves for queues of asynchronous calls."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.async_saves import planned, request_of, small_state
from tests.gates import LIMIT, Gate
from tests.support import assert_equal, data_files, emptied, load
from torch_ckpt.megatron import AsyncCallsQueue, AsyncRequest, FileSystemWriterAsync


@pytest.fixture
def calls_queue(gate: Gate) -> Iterator[AsyncCallsQueue]:
    made = AsyncCallsQueue(timeout=LIMIT)
    yield made
    gate.open()
    made.close(abort=True)


def wait_for_end(calls_queue: AsyncCallsQueue, number: int = 0) -> None:
    """Waits until the function of an unfinalized call has run. A poll on one rank does not wait."""
    assert calls_queue._calls[number].ended.wait(LIMIT)


def fail(text: str = "refused") -> Any:
    raise OSError(text)


def request(function: Any = None, *args: Any, finalize: Any = (), **fields: Any) -> AsyncRequest:
    return AsyncRequest(function, args, list(finalize), **fields)


def assert_saved(path: Path, seed: int = 0) -> None:
    loaded = emptied(small_state())
    load(loaded, path)
    assert_equal(loaded, small_state(seed))


def schedule(calls_queue: AsyncCallsQueue, path: Path, seed: int = 0, **options: Any) -> None:
    """Saves so that only the queue has a reference to the call."""
    writer = FileSystemWriterAsync(path, **options)
    calls_queue.schedule_async_request(request_of(planned(small_state(seed), writer)))


def is_empty(path: Path) -> bool:
    gc.collect()
    return data_files(path) == []
