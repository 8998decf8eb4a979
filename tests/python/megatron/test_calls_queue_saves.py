"""The queue of asynchronous calls: saves, and aborts in each of their phases."""

from __future__ import annotations

import gc
import logging
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_calls import assert_saved, is_empty, request, schedule, wait_for_end
from tests.async_saves import (
    assert_priorities,
    is_committed,
    planned,
    priorities_of_writers,
    request_of,
    small_state,
)
from tests.fault_hooks import before, calling
from tests.gates import LIMIT, Gate, eventually, in_thread
from tests.support import data_files
from torch_ckpt import Background
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
)

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


def test_saves_are_committed_in_order_and_their_sources_may_change_once_scheduled(
    calls_queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    for seed in (1, 2, 3):
        state = small_state(seed)
        writer = FileSystemWriterAsync(tmp_path / "c")
        calls_queue.schedule_async_request(request_of(planned(state, writer)))
        for tensor in state.values():
            tensor.zero_()
    assert not is_committed(tmp_path / "c")
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert_saved(tmp_path / "c", seed=3)


@pytest.mark.parametrize(
    ("by_queue", "by_warm_up", "nice", "is_idle"),
    [
        (3, (5, 3), 3, True),
        (None, (5, 3), 5, True),
        (None, (4, None), 4, True),
        (None, (4, 2), 4, False),
        (None, None, 7, True),
    ],
    ids=["the queue", "the warm-up", "idle by default", "the process's I/O class", "the writer"],
)
def test_the_writing_threads_have_the_priorities_set_for(
    tmp_path: Path,
    gate: Gate,
    by_queue: int | None,
    by_warm_up: tuple[int, int | None] | None,
    nice: int,
    is_idle: bool,
) -> None:
    class Fresh(AsyncCallsQueue):
        """Queue class with its own default priorities."""

    if by_warm_up is not None:
        Fresh.warmup_persistent_caller(0, "spawn", *by_warm_up)
    background = None if by_queue is None else Background(nice=by_queue)
    calls_queue = Fresh(persistent=True, background=background)
    with priorities_of_writers(gate) as priorities:
        schedule(calls_queue, tmp_path / "c", background=Background(nice=7))
        gate.open()
        calls_queue.close()
    assert_priorities(priorities, nice, is_idle)


# --- abort ---------------------------------------------------------------------------------------


def assert_usable(calls_queue: AsyncCallsQueue, path: Path) -> None:
    schedule(calls_queue, path, seed=5)
    calls_queue.close()
    assert_saved(path, seed=5)


#: Fault points of a write by the engine, and other moments.
PHASES = [
    "preload function",
    "engine has begun",
    "sources are copied",
    "fsync",
    "files are written",  # too late to be cancelled
    "end",
]


@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_in_any_phase_leaves_no_file_although_the_plan_is_referenced(
    calls_queue: AsyncCallsQueue, tmp_path: Path, gate: Gate, phase: str
) -> None:
    held = request_of(planned(small_state(), FileSystemWriterAsync(tmp_path / "c")))
    preload = held.preload_fn
    assert preload is not None
    if phase == "preload function":
        held = held._replace(preload_fn=lambda: [gate(), preload()][1])
    with (
        calling({phase: gate}),
        in_thread(lambda: calls_queue.schedule_async_request(held) and None),
    ):
        if phase == "end":
            eventually(lambda: calls_queue.get_num_unfinalized_calls() == 1)
            wait_for_end(calls_queue)
            assert data_files(tmp_path / "c")
        else:
            gate.wait()
        calls_queue.close(abort=True)
        gate.open()
    assert calls_queue.get_num_unfinalized_calls() == 0
    eventually(lambda: is_empty(tmp_path / "c"))
    assert not is_committed(tmp_path / "c")
    assert_usable(calls_queue, tmp_path / "c")


@pytest.fixture
def held_at_the_end(gate: Gate) -> Iterator[Gate]:
    """Gate at which the engine waits after it has written all files, too late to be cancelled."""
    with calling({"files are written": gate}):
        yield gate
        gate.open()


@pytest.mark.parametrize("has_ended", [True, False])
def test_an_aborted_save_cannot_be_finalized(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_at_the_end: Gate, has_ended: bool
) -> None:
    finalizing = planned(small_state(), FileSystemWriterAsync(tmp_path / "c"))
    calls_queue.schedule_async_request(request_of(finalizing))
    if has_ended:
        held_at_the_end.open()
        wait_for_end(calls_queue)
    calls_queue.close(abort=True)
    with pytest.raises(CheckpointException, match="Worker failure: aborted"):
        save_state_dict_async_finalize(*finalizing)
    assert not is_committed(tmp_path / "c")


def test_a_writer_can_be_reused_while_its_aborted_save_ends(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_at_the_end: Gate
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    calls_queue.schedule_async_request(request_of(planned(small_state(), writer)))
    held_at_the_end.wait()
    aborted = calls_queue._calls[0].writes[0]
    calls_queue.close(abort=True)
    again = planned(small_state(5), writer)
    held_at_the_end.open()
    aborted.outcome()
    calls_queue.schedule_async_request(request_of(again))
    calls_queue.close()
    assert_saved(tmp_path / "c", seed=5)


def test_an_abort_keeps_a_save_that_the_caller_has_finalized(
    calls_queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    finalizing = planned(small_state(), FileSystemWriterAsync(tmp_path / "c"))
    calls_queue.schedule_async_request(request_of(finalizing))
    wait_for_end(calls_queue)
    save_state_dict_async_finalize(*finalizing)
    calls_queue.close(abort=True)
    assert_saved(tmp_path / "c")


def test_an_abort_keeps_the_previous_checkpoint(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_after_staging: Gate
) -> None:
    held_after_staging.open()
    assert_usable(calls_queue, tmp_path / "c")
    before = data_files(tmp_path / "c")
    schedule(calls_queue, tmp_path / "c")
    calls_queue.close(abort=True)
    eventually(lambda: (gc.collect(), data_files(tmp_path / "c"))[1] == before)
    assert_saved(tmp_path / "c", seed=5)


def test_an_abort_does_not_wait_for_a_function_of_the_caller(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    finalized: list[int] = []
    for function in (gate, print):
        finalize = [lambda: finalized.append(1)]
        calls_queue.schedule_async_request(request(function, finalize=finalize))
    gate.wait()
    calls_queue.close(abort=True)
    gate.open()
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == []
    assert finalized == []
    # Other ranks abort as well and compare the numbers of calls.
    assert calls_queue.schedule_async_request(request(print)) == 2


def test_an_abort_ends_a_wait_in_another_thread(calls_queue: AsyncCallsQueue, gate: Gate) -> None:
    calls_queue.schedule_async_request(request(gate))
    gate.wait()
    call = calls_queue._calls[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(calls_queue.maybe_finalize_async_calls, True)
        eventually(lambda: call.agreement is not None)
        calls_queue.close(abort=True)
        with pytest.raises(CheckpointException, match="call 0 was aborted"):
            waiting.result(LIMIT)


def test_a_call_that_another_thread_aborts_after_its_end_is_not_finalized(
    calls_queue: AsyncCallsQueue,
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(print, finalize=[lambda: finalized.append(1)]))

    def abort() -> None:
        with in_thread(lambda: calls_queue.close(abort=True)):
            pass

    with (
        before("call has ended", abort),
        pytest.raises(CheckpointException, match="call 0 was aborted"),
    ):
        calls_queue.maybe_finalize_async_calls(blocking=True)
    assert finalized == []


def test_a_queue_deleted_with_calls_logs_an_error(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    for is_closed in (True, False):
        used = AsyncCallsQueue()
        used.schedule_async_request(request(print if is_closed else gate))
        if is_closed:
            used.close()
        else:
            gate.wait()
        with caplog.at_level(logging.DEBUG, "torch_ckpt"):
            del used
            gc.collect()
        assert ("1 async calls were never finalized" in caplog.text) is not is_closed
        assert [record.levelname for record in caplog.records] == ["ERROR"] * (not is_closed)


def test_control_c_during_staging_is_raised_and_fails_the_call(
    calls_queue: AsyncCallsQueue, tmp_path: Path, gate: Gate
) -> None:
    main = threading.get_ident()

    def interrupt() -> None:
        gate.wait()
        signal.pthread_kill(main, signal.SIGINT)

    with calling({"engine has begun": gate}):
        with in_thread(interrupt), pytest.raises(KeyboardInterrupt):
            schedule(calls_queue, tmp_path / "c")
        gate.open()
    with pytest.raises(CheckpointException, match="KeyboardInterrupt"):
        calls_queue.maybe_finalize_async_calls(blocking=True)
    # The files are deleted when the write ends, in the background.
    eventually(lambda: is_empty(tmp_path / "c"))
    assert_usable(calls_queue, tmp_path / "c")
    assert len(data_files(tmp_path / "c")) == 1
