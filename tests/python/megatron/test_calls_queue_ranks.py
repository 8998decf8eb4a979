"""The queue of asynchronous calls: calls that hang, and several ranks."""

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
from tests.children import context, on_ranks
from tests.fault_hooks import calling
from tests.gates import LIMIT, Gate, eventually
from tests.support import cause_of
from torch_ckpt.megatron import AsyncCallsQueue, FileSystemWriterAsync

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


#: Seconds after which a call of a test is given up, where one is; else tests do not wait for it.
SHORT = 0.3


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_function_that_does_not_move_is_given_up(gate: Gate, no_dist: bool) -> None:
    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(gate))
    with pytest.raises(CheckpointException) as error:
        calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=no_dist)
    cause = cause_of(error.value)
    assert isinstance(cause, TimeoutError)
    assert re.search(r"rank 0: call 0 made no progress for 0\.3 s .its function.", str(cause))
    assert "AsyncCallsQueue(timeout=...)" in str(cause)
    assert calls_queue.get_num_unfinalized_calls() == 0


def test_a_save_that_does_not_move_is_given_up_with_files_and_phase(
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


def test_writing_in_python_that_does_not_move_is_given_up_with_files_and_items(
    tmp_path: Path, gate: Gate
) -> None:
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


def test_a_function_whose_thread_works_is_not_given_up() -> None:
    def work() -> None:
        begun = time.monotonic()
        while time.monotonic() < begun + 3 * SHORT:
            pass

    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(work))
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_a_save_in_python_threads_that_writes_is_not_given_up(tmp_path: Path) -> None:
    # The thread that waits for the others takes no time of its own.
    never = threading.Event()

    class Stream:
        """Lets an item through a few times in a timeout."""

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
    """By rank what its work returned or raised."""
    return on_ranks(2, lambda rank: work(rank, AsyncCallsQueue(timeout=LIMIT)))


def test_a_failure_on_one_rank_raises_on_both() -> None:
    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        function = fail if rank == 1 else print
        finalized: list[int] = []
        calls_queue.schedule_async_request(
            request(function, finalize=[lambda: finalized.append(rank)])
        )
        try:
            return calls_queue.maybe_finalize_async_calls(blocking=True)
        finally:
            assert finalized == []

    for outcome in on_two_ranks(work):
        assert isinstance(outcome, CheckpointException)
        assert list(outcome.failures) == [1]
        assert "refused" in str(outcome)


def test_ranks_that_finalize_different_calls_are_told() -> None:
    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        for _ in range(rank):
            calls_queue.schedule_async_request(request(print))
            calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        calls_queue.schedule_async_request(request(print))
        return calls_queue.maybe_finalize_async_calls(blocking=True)

    for outcome in on_two_ranks(work):
        assert isinstance(outcome, CheckpointException)
        assert "Unmatched async calls: rank 0 call 0, rank 1 call 1" in str(outcome)


def test_without_the_others_what_has_ended_here_is_finalized() -> None:
    other_is_through = context.Event()

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request(print))
        if rank == 0:
            # Rank 1 has neither scheduled nor polled.
            finalized = calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
            other_is_through.set()
            return finalized
        assert other_is_through.wait(LIMIT)
        return calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    assert on_two_ranks(work) == [[0], [0]]


def test_an_error_on_this_rank_is_raised_without_the_others() -> None:
    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request(fail if rank else print))
        return calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    good, bad = on_two_ranks(work)
    assert good == [0]
    assert list(bad.failures) == [1]


def test_the_first_poll_after_the_last_rank_s_end_finalizes_on_both() -> None:
    begun, ended = context.Barrier(2), context.Barrier(2)

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        gate, told = Gate(), threading.Event()
        with calling({"part is posted": told.set}):
            calls_queue.schedule_async_request(request(gate))
            assert calls_queue.maybe_finalize_async_calls() == []
            begun.wait(LIMIT)
            gate.open()
            assert told.wait(LIMIT)
        ended.wait(LIMIT)
        return calls_queue.maybe_finalize_async_calls()

    assert on_two_ranks(work) == [[0], [0]]


def test_the_second_poll_finalizes_what_had_ended_before_the_first() -> None:
    ended = context.Barrier(2)

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        told = threading.Event()
        with calling({"part is posted": told.set}):
            calls_queue.schedule_async_request(request())
            finalized = calls_queue.maybe_finalize_async_calls()
            assert told.wait(LIMIT)
        ended.wait(LIMIT)
        # By the first, where the ranks have been quick.
        return finalized + calls_queue.maybe_finalize_async_calls()

    assert on_two_ranks(work) == [[0], [0]]


def test_both_ranks_finalize_at_the_same_poll() -> None:
    late = context.Event()

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        polls = 0
        calls_queue.schedule_async_request(
            request(lambda: rank == 1 and late.wait(LIMIT), finalize=[print])
        )
        while not calls_queue.maybe_finalize_async_calls():
            polls += 1
            if rank == 0 and polls == 5:
                late.set()
        return polls

    first, second = on_two_ranks(work)
    assert first == second >= 5
