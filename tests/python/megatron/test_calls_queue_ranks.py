"""The queue of asynchronous calls: hanging calls, and several ranks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_calls import fail, is_empty, request, schedule
from tests.async_saves import planned, request_of, small_state
from tests.fault_hooks import calling
from tests.forked import context
from tests.gates import LIMIT, Gate, eventually
from tests.ranks import on_forked_ranks
from tests.support import cause_of
from torch_ckpt.megatron import AsyncCallsQueue, FileSystemWriterAsync

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


#: Timeout in seconds of calls that must time out; other tests do not wait for it.
SHORT = 0.3


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_function_without_progress_times_out(gate: Gate, no_dist: bool) -> None:
    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(gate))
    with pytest.raises(CheckpointException) as error:
        calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=no_dist)
    cause = cause_of(error.value)
    assert isinstance(cause, TimeoutError)
    assert re.search(r"rank 0: call 0 made no progress for 0\.3 s .its function.", str(cause))
    assert "AsyncCallsQueue(timeout=...)" in str(cause)
    assert calls_queue.get_num_unfinalized_calls() == 0


def test_the_timeout_of_a_save_names_files_and_phase(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    calls_queue = AsyncCallsQueue(timeout=SHORT)
    schedule(calls_queue, tmp_path / "c", thread_count=2)
    with pytest.raises(CheckpointException) as error:
        calls_queue.maybe_finalize_async_calls(blocking=True)
    text = str(cause_of(error.value))
    del error
    assert f"__0_0.distcp, __0_1.distcp in {tmp_path / 'c'}: " in text
    assert re.search(r"(staging|writing|fsync), \d+ of \d+ bytes written, \d of 2 files done", text)
    held_after_staging.open()
    eventually(lambda: is_empty(tmp_path / "c"))


def test_the_timeout_of_a_write_in_python_names_files_and_items(tmp_path: Path, gate: Gate) -> None:
    def opening(path: str, mode: str) -> Any:
        if path.endswith("_1.distcp"):
            gate()
        return open(path, mode)

    calls_queue = AsyncCallsQueue(timeout=SHORT)
    schedule(calls_queue, tmp_path / "c", thread_count=2, open_file=opening)
    with pytest.raises(CheckpointException) as error:
        calls_queue.maybe_finalize_async_calls(blocking=True)
    text = str(cause_of(error.value))
    assert f"files __0_* in {tmp_path / 'c'}: writing in Python, 2 of 4 items written" in text


def test_a_function_that_uses_processor_time_does_not_time_out() -> None:
    def work() -> None:
        begun = time.monotonic()
        while time.monotonic() < begun + 3 * SHORT:
            pass

    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(work))
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_a_slow_write_in_python_threads_does_not_time_out(tmp_path: Path) -> None:
    # The thread that waits for the writing threads uses no processor time.
    never = threading.Event()

    class Stream:
        """Stream that writes a few items within a timeout."""

        def __init__(self, path: str, mode: str) -> None:
            self._file = open(path, mode)  # noqa: SIM115  (closed by __exit__)

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def tell(self) -> int:
            return self._file.tell()

        def write(self, data: Any) -> int:
            return self._file.write(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def flush(self) -> None:
            never.wait(SHORT / 5)
            self._file.flush()

    calls_queue = AsyncCallsQueue(timeout=SHORT)
    state = small_state(count=15)
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=1, open_file=Stream)
    calls_queue.schedule_async_request(request_of(planned(state, writer)))
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0]


# --- several ranks -------------------------------------------------------------------------------


def on_two_ranks(work: Callable[[int, AsyncCallsQueue], Any]) -> list[Any]:
    """Returns the result or error of each rank."""
    return on_forked_ranks(2, lambda rank: work(rank, AsyncCallsQueue(timeout=LIMIT)))


def test_no_dist_finalizes_a_call_before_it_ends_on_other_ranks() -> None:
    rank_0_is_done = context.Event()

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request(print))
        if rank == 0:
            # Rank 1 has neither scheduled nor polled.
            finalized = calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
            rank_0_is_done.set()
            return finalized
        assert rank_0_is_done.wait(LIMIT)
        return calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    assert on_two_ranks(work) == [[0], [0]]


def test_no_dist_raises_an_error_on_the_failed_rank_only() -> None:
    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request(fail if rank else print))
        return calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    good, bad = on_two_ranks(work)
    assert good == [0]
    assert list(bad.failures) == [1]


def test_both_ranks_finalize_at_the_first_poll_after_the_last_end() -> None:
    begun, ended = context.Barrier(2), context.Barrier(2)

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        gate, posted = Gate(), threading.Event()
        with calling({"part is posted": posted.set}):
            calls_queue.schedule_async_request(request(gate))
            assert calls_queue.maybe_finalize_async_calls() == []
            begun.wait(LIMIT)
            gate.open()
            assert posted.wait(LIMIT)
        ended.wait(LIMIT)
        return calls_queue.maybe_finalize_async_calls()

    assert on_two_ranks(work) == [[0], [0]]
