"""The queue of asynchronous calls: order, errors, aborts in every phase, and calls that hang."""

from __future__ import annotations

import gc
import logging
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_saves import (
    LIMIT,
    Gate,
    eventually,
    in_thread,
    is_committed,
    planned,
    request_of,
    small_state,
)
from tests.support import assert_equal, cause_of, data_files, emptied, load
from torch_ckpt import Background, calls, write_tasks
from torch_ckpt.coordination import Meeting
from torch_ckpt.lockstep import Lockstep
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    AsyncRequest,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
)
from torch_ckpt.write_tasks import EngineWrite

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")

#: Seconds after which a call of a test is given up, where one is; else tests do not wait for it.
SHORT = 0.3


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def calls_queue(gate: Gate) -> Iterator[AsyncCallsQueue]:
    made = AsyncCallsQueue(timeout=LIMIT)
    yield made
    gate.open()
    made.close(abort=True)


def fail(text: str = "refused") -> Any:
    raise OSError(text)


def request(function: Any = None, *args: Any, finalize: Any = (), **fields: Any) -> AsyncRequest:
    return AsyncRequest(function, args, list(finalize), **fields)


# --- what runs -----------------------------------------------------------------------------------


def test_any_function_runs_with_its_arguments(calls_queue: AsyncCallsQueue) -> None:
    lock = threading.Lock()  # nothing is pickled
    got: list[Any] = []
    calls_queue.schedule_async_request(
        AsyncRequest(
            lambda *args, **kwargs: got.append((args, kwargs)), (1, lock), [], {"more": lock}
        )
    )
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert got == [((1, lock), {"more": lock})]


def test_bound_methods_run(calls_queue: AsyncCallsQueue) -> None:
    got: list[int] = []
    calls_queue.schedule_async_request(request(got.append, 7))
    calls_queue.close()
    assert got == [7]


def test_what_the_preload_function_returns_is_the_second_argument(
    calls_queue: AsyncCallsQueue,
) -> None:
    got: list[Any] = []
    calls_queue.schedule_async_request(
        request(lambda *args: got.extend(args), 1, None, 3, preload_fn=lambda: "preloaded")
    )
    calls_queue.close()
    assert got == [1, "preloaded", 3]


def test_the_preload_function_has_run_when_the_call_is_scheduled(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    ran: list[int] = []
    calls_queue.schedule_async_request(
        request(lambda *_: gate(), 1, 2, preload_fn=lambda: ran.append(threading.get_ident()))
    )
    assert ran == [threading.get_ident()]


def test_a_request_of_a_rank_that_has_nothing_to_do_is_finalized(
    calls_queue: AsyncCallsQueue,
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(finalize=[lambda: finalized.append(1)]))
    calls_queue.schedule_async_request(
        request(preload_fn=fail, finalize=[lambda: finalized.append(2)])
    )
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert finalized == [1, 2]


def test_functions_run_one_after_the_other(calls_queue: AsyncCallsQueue, gate: Gate) -> None:
    ran: list[int] = []

    def first() -> None:
        gate()
        ran.append(1)

    calls_queue.schedule_async_request(request(first))
    calls_queue.schedule_async_request(request(lambda: ran.append(2)))
    gate.wait()
    assert ran == []
    gate.open()
    calls_queue.close()
    assert ran == [1, 2]


def test_calls_are_numbered_and_finalized_in_order(calls_queue: AsyncCallsQueue) -> None:
    done: list[str] = []
    for number in range(3):
        of_call = [lambda n=number, f=f: done.append(f"{n}{f}") for f in "ab"]
        assert calls_queue.schedule_async_request(request(print, finalize=of_call)) == number
    assert calls_queue.get_num_unfinalized_calls() == 3
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert calls_queue.get_num_unfinalized_calls() == 0
    assert done == ["0a", "0b", "1a", "1b", "2a", "2b"]


def test_a_poll_does_not_wait_and_finalizes_what_has_ended(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    calls_queue.schedule_async_request(request(gate))
    assert calls_queue.maybe_finalize_async_calls() == []
    assert calls_queue.get_num_unfinalized_calls() == 1
    gate.open()
    finalized: list[int] = []
    eventually(
        lambda: bool(finalized.extend(calls_queue.maybe_finalize_async_calls()) or finalized)
    )
    assert finalized == [0]


def test_the_first_poll_after_its_end_finalizes_a_call_of_a_rank_alone(
    calls_queue: AsyncCallsQueue,
) -> None:
    for number in range(20):
        calls_queue.schedule_async_request(request(print))
        assert calls_queue._calls[0].ended.wait(LIMIT)
        assert calls_queue.maybe_finalize_async_calls() == [number]


def test_an_empty_queue_has_nothing_to_finalize(calls_queue: AsyncCallsQueue) -> None:
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == []


def test_what_a_function_had_is_let_go_of_when_it_has_ended(calls_queue: AsyncCallsQueue) -> None:
    class Large:
        pass

    large = Large()
    alive = weakref.ref(large)
    calls_queue.schedule_async_request(request(lambda _: None, large))
    del large
    call = calls_queue._calls[0]
    assert call.ended.wait(LIMIT)
    eventually(lambda: alive() is None)


class OldRequest(NamedTuple):
    """Of a version that knows neither preload functions nor keyword arguments."""

    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    is_frozen: bool = False
    call_idx: int = 0


def test_requests_of_older_classes_run(calls_queue: AsyncCallsQueue) -> None:
    got: list[Any] = []
    old = OldRequest(got.append, (1,), [lambda: got.append("finalized")])
    assert calls_queue.schedule_async_request(old) == 0  # type: ignore[arg-type]
    calls_queue.close()
    assert got == [1, "finalized"]


class NewerRequest(NamedTuple):
    async_fn: Any
    async_fn_args: Any
    finalize_fns: Any
    async_fn_kwargs: Any
    preload_fn: Any
    is_frozen: bool
    call_idx: int
    something_new: int = 5


def test_requests_of_newer_classes_run(calls_queue: AsyncCallsQueue) -> None:
    got: list[Any] = []
    newer = NewerRequest(
        lambda a, b, c: got.append((a, b, c)), (1, None), [], {"c": 3}, dict, False, 9
    )
    assert calls_queue.schedule_async_request(newer) == 0  # type: ignore[arg-type]
    calls_queue.close()
    assert got == [(1, {}, 3)]


def test_finalize_functions_may_be_added_until_a_request_is_frozen() -> None:
    done: list[int] = []
    made = request(print)
    made.add_finalize_fn(lambda: done.append(1))
    made.finalize_fns.append(lambda: done.append(2))
    frozen = made.freeze()
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(print)
    assert not made.is_frozen
    assert frozen.execute_finalize_fns(validate_matching_call_idx=False) == 0
    assert done == [1, 2]


def test_two_requests_do_not_share_keyword_arguments() -> None:
    one, other = request(print), request(print)
    assert one.async_fn_kwargs == {} == other.async_fn_kwargs
    assert (one.preload_fn, one.is_frozen, one.call_idx) == (None, False, 0)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_the_error_of_a_function_is_raised_when_it_is_finalized(
    calls_queue: AsyncCallsQueue, blocking: bool
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(fail, finalize=[lambda: finalized.append(1)]))
    assert calls_queue._calls[0].ended.wait(LIMIT)
    finish = partial(calls_queue.maybe_finalize_async_calls, blocking)
    with pytest.raises(CheckpointException) as error:
        eventually(lambda: bool(finish()))
    assert isinstance(cause_of(error.value), OSError)
    assert str(cause_of(error.value)) == "refused"
    assert finalized == []
    assert calls_queue.get_num_unfinalized_calls() == 0


def test_the_error_of_a_preload_function_is_raised_when_it_is_finalized(
    calls_queue: AsyncCallsQueue,
) -> None:
    ran: list[int] = []
    made = request(lambda *_: ran.append(1), 1, 2, preload_fn=fail)
    assert calls_queue.schedule_async_request(made) == 0
    with pytest.raises(CheckpointException, match="refused"):
        calls_queue.maybe_finalize_async_calls(blocking=True)
    assert ran == []


def test_the_error_of_a_finalize_function_is_raised_as_it_is(calls_queue: AsyncCallsQueue) -> None:
    done: list[int] = []
    of_call = [lambda: done.append(1), fail, lambda: done.append(2)]
    calls_queue.schedule_async_request(request(print, finalize=of_call))
    with pytest.raises(OSError, match="refused"):
        calls_queue.maybe_finalize_async_calls(blocking=True)
    assert done == [1]
    assert calls_queue.get_num_unfinalized_calls() == 0


def test_calls_after_one_that_failed_are_finalized_by_the_next_poll(
    calls_queue: AsyncCallsQueue,
) -> None:
    calls_queue.schedule_async_request(request(fail))
    calls_queue.schedule_async_request(request(print))
    assert calls_queue._calls[1].ended.wait(LIMIT)
    with pytest.raises(CheckpointException):
        calls_queue.maybe_finalize_async_calls()
    assert calls_queue.maybe_finalize_async_calls() == [1]


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_blocking_poll_finalizes_the_calls_after_one_that_failed(
    calls_queue: AsyncCallsQueue, no_dist: bool
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(fail))
    calls_queue.schedule_async_request(request(print, finalize=[lambda: finalized.append(1)]))
    with pytest.raises(CheckpointException, match="refused"):
        calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=no_dist)
    assert finalized == [1]
    assert calls_queue.get_num_unfinalized_calls() == 0


def test_a_close_commits_the_save_after_a_call_that_failed(
    calls_queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    calls_queue.schedule_async_request(request(fail))
    schedule(calls_queue, tmp_path / "c")
    with pytest.raises(CheckpointException, match="refused"):
        calls_queue.close()
    assert_saved(tmp_path / "c")


def test_a_close_raises_the_first_of_several_errors_and_logs_the_others(
    calls_queue: AsyncCallsQueue, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("the first", "the second"):
        calls_queue.schedule_async_request(request(fail, text))
    calls_queue.schedule_async_request(request(finalize=[lambda: fail("the third")]))
    with pytest.raises(CheckpointException, match="the first"):
        calls_queue.close()
    first, second = caplog.messages
    assert "call 1 was not finalized" in first
    assert "the second" in first
    assert second == "call 2 was not finalized: the third"


def test_an_error_that_cannot_be_pickled_is_told_by_its_text(calls_queue: AsyncCallsQueue) -> None:
    class Local(Exception):
        def __init__(self) -> None:
            super().__init__("of a class that nobody can import")
            self.lock = threading.Lock()

    def function() -> None:
        raise Local

    calls_queue.schedule_async_request(request(function))
    with pytest.raises(CheckpointException, match="Local: of a class that nobody can import"):
        calls_queue.maybe_finalize_async_calls(blocking=True)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_function_that_would_end_the_process_ends_its_call(
    calls_queue: AsyncCallsQueue, error: type[BaseException]
) -> None:
    def function() -> None:
        raise error

    calls_queue.schedule_async_request(request(function))
    with pytest.raises(CheckpointException, match=error.__name__):
        calls_queue.maybe_finalize_async_calls(blocking=True)


def test_a_preload_function_without_a_place_is_told(calls_queue: AsyncCallsQueue) -> None:
    calls_queue.schedule_async_request(request(print, 1, preload_fn=dict))
    with pytest.raises(CheckpointException, match="at least two arguments"):
        calls_queue.maybe_finalize_async_calls(blocking=True)


# --- at once -------------------------------------------------------------------------------------


def test_a_request_runs_at_once() -> None:
    done: list[Any] = []
    made = AsyncRequest(
        lambda *args, **kwargs: done.append((args, kwargs)),
        (1, None, 3),
        [lambda: done.append("finalized")],
        {"more": 4},
        lambda: 2,
    )
    made.execute_sync()
    assert done == [((1, 2, 3), {"more": 4}), "finalized"]


def test_a_request_of_a_rank_that_has_nothing_to_do_runs_at_once() -> None:
    done: list[int] = []
    AsyncRequest(None, (), [lambda: done.append(1)]).execute_sync()
    assert done == [1]


@pytest.mark.parametrize("of", ["function", "preload function"])
def test_what_fails_at_once_is_not_finalized(of: str) -> None:
    done: list[int] = []
    finalize = [lambda: done.append(1)]
    made = request(fail, finalize=finalize)
    if of == "preload function":
        made = request(print, 1, 2, preload_fn=fail, finalize=finalize)
    with pytest.raises(CheckpointException, match="refused"):
        made.execute_sync()
    assert done == []


def test_a_save_at_once_is_a_checkpoint(tmp_path: Path) -> None:
    request_of(planned(small_state(), FileSystemWriterAsync(tmp_path / "c"))).execute_sync()
    assert_saved(tmp_path / "c")


# --- saves ---------------------------------------------------------------------------------------


def assert_saved(path: Path, seed: int = 0) -> None:
    loaded = emptied(small_state())
    load(loaded, path)
    assert_equal(loaded, small_state(seed))


def schedule(calls_queue: AsyncCallsQueue, path: Path, seed: int = 0, **options: Any) -> None:
    """A save that only the queue knows of."""
    writer = FileSystemWriterAsync(path, **options)
    calls_queue.schedule_async_request(request_of(planned(small_state(seed), writer)))


def is_empty(path: Path) -> bool:
    gc.collect()
    return data_files(path) == []


def test_saves_are_committed_in_order(calls_queue: AsyncCallsQueue, tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        schedule(calls_queue, tmp_path / "c", seed)
    assert not is_committed(tmp_path / "c")
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert_saved(tmp_path / "c", seed=3)


def test_sources_may_change_when_the_call_is_scheduled(
    calls_queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    state = small_state()
    writer = FileSystemWriterAsync(tmp_path / "c")
    calls_queue.schedule_async_request(request_of(planned(state, writer)))
    for tensor in state.values():
        tensor.zero_()
    calls_queue.close()
    assert_saved(tmp_path / "c")


@pytest.mark.parametrize(
    ("by_queue", "by_warm_up", "seen"),
    [(3, 5, 3), (None, 5, 5), (None, None, 7)],
    ids=["the queue", "the warm-up", "the writer"],
)
def test_priorities_are_those_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by_queue: int | None,
    by_warm_up: int | None,
    seen: int,
) -> None:
    monkeypatch.setattr(AsyncCallsQueue, "_default_background", None)
    if by_warm_up is not None:
        AsyncCallsQueue.warmup_persistent_caller(0, "spawn", cpu_priority=by_warm_up, io_priority=3)
    background = None if by_queue is None else Background(nice=by_queue)
    told: list[int] = []
    options = EngineWrite.engine_options

    def telling(self: EngineWrite) -> Any:
        made = options(self)
        told.append(made.writers.nice)
        return made

    monkeypatch.setattr(EngineWrite, "engine_options", telling)
    calls_queue = AsyncCallsQueue(persistent=True, background=background)
    schedule(calls_queue, tmp_path / "c", background=Background(nice=7))
    calls_queue.close()
    assert told == [seen]


@pytest.mark.parametrize(("io_priority", "idle"), [(None, True), (3, True), (2, False)])
def test_the_io_class_is_idle_or_the_process_own(
    monkeypatch: pytest.MonkeyPatch, io_priority: int | None, idle: bool
) -> None:
    monkeypatch.setattr(AsyncCallsQueue, "_default_background", None)
    AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=4, io_priority=io_priority)
    assert AsyncCallsQueue._default_background == Background(nice=4, idle_io=idle)


# --- abort ---------------------------------------------------------------------------------------


def assert_usable(calls_queue: AsyncCallsQueue, path: Path) -> None:
    schedule(calls_queue, path, seed=5)
    calls_queue.close()
    assert_saved(path, seed=5)


def test_an_abort_before_staging_leaves_no_file(
    calls_queue: AsyncCallsQueue, tmp_path: Path, gate: Gate
) -> None:
    def schedule_slowly() -> None:
        made = request_of(planned(small_state(), FileSystemWriterAsync(tmp_path / "c")))
        preload = made.preload_fn
        assert preload is not None
        calls_queue.schedule_async_request(made._replace(preload_fn=lambda: [gate(), preload()][1]))

    with in_thread(schedule_slowly):
        gate.wait()
        calls_queue.close(abort=True)
        gate.open()
    assert calls_queue.get_num_unfinalized_calls() == 0
    eventually(lambda: is_empty(tmp_path / "c"))
    assert_usable(calls_queue, tmp_path / "c")


def test_an_abort_while_another_thread_stages_leaves_no_file(
    calls_queue: AsyncCallsQueue, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = EngineWrite.started

    def held(self: EngineWrite, save: Any) -> None:
        gate()
        started(self, save)

    monkeypatch.setattr(EngineWrite, "started", held)
    with in_thread(lambda: schedule(calls_queue, tmp_path / "c")):
        gate.wait()
        calls_queue.close(abort=True)
        gate.open()
    assert calls_queue.get_num_unfinalized_calls() == 0
    eventually(lambda: is_empty(tmp_path / "c"))
    assert_usable(calls_queue, tmp_path / "c")


@pytest.fixture
def held_after_staging(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Saves have staged, and do not end until it is opened."""
    copied = EngineWrite.sources_copied

    def copied_and_held(self: EngineWrite) -> None:
        copied(self)
        gate()

    monkeypatch.setattr(EngineWrite, "sources_copied", copied_and_held)
    return gate


def test_an_abort_while_it_is_written_leaves_no_file(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_after_staging: Gate
) -> None:
    schedule(calls_queue, tmp_path / "c")
    held_after_staging.wait()
    calls_queue.close(abort=True)
    assert calls_queue.get_num_unfinalized_calls() == 0
    held_after_staging.open()
    eventually(lambda: is_empty(tmp_path / "c"))
    assert_usable(calls_queue, tmp_path / "c")


def test_an_abort_between_writing_and_finalizing_leaves_no_file(
    calls_queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    schedule(calls_queue, tmp_path / "c")
    assert calls_queue._calls[0].ended.wait(LIMIT)
    assert data_files(tmp_path / "c")
    calls_queue.close(abort=True)
    eventually(lambda: is_empty(tmp_path / "c"))
    assert not is_committed(tmp_path / "c")
    assert_usable(calls_queue, tmp_path / "c")


def test_an_abort_of_writing_in_python_leaves_no_file(
    calls_queue: AsyncCallsQueue, tmp_path: Path, gate: Gate
) -> None:
    def opening(path: str, mode: str) -> Any:
        stream = open(path, mode)  # noqa: SIM115  (the writer's)
        gate()
        return stream

    schedule(calls_queue, tmp_path / "c", open_file=opening)
    gate.wait()
    assert data_files(tmp_path / "c")
    calls_queue.close(abort=True)
    gate.open()
    eventually(lambda: is_empty(tmp_path / "c"))


def open_in_python(path: str, mode: str) -> Any:
    return open(path, mode)


@pytest.mark.parametrize("options", [{}, {"open_file": open_in_python}], ids=["engine", "Python"])
def test_an_abort_of_what_is_written_leaves_no_file_where_somebody_holds_the_plan(
    calls_queue: AsyncCallsQueue, tmp_path: Path, options: dict[str, Any]
) -> None:
    held = planned(small_state(), FileSystemWriterAsync(tmp_path / "c", **options))
    calls_queue.schedule_async_request(request_of(held))
    assert calls_queue._calls[0].ended.wait(LIMIT)
    assert data_files(tmp_path / "c")
    calls_queue.close(abort=True)
    assert is_empty(tmp_path / "c")


@pytest.fixture
def held_at_the_end(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """The engine has written everything, too late to be cancelled."""
    results_of = write_tasks.results_of
    monkeypatch.setattr(write_tasks, "results_of", lambda *of: [gate(), results_of(*of)][1])
    return gate


def test_an_abort_that_comes_too_late_to_cancel_leaves_no_file_where_somebody_holds_the_plan(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_at_the_end: Gate
) -> None:
    held = planned(small_state(), FileSystemWriterAsync(tmp_path / "c"))
    calls_queue.schedule_async_request(request_of(held))
    held_at_the_end.wait()
    calls_queue.close(abort=True)
    held_at_the_end.open()
    eventually(lambda: is_empty(tmp_path / "c"))


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_save_that_was_aborted_cannot_be_finalized(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_at_the_end: Gate, has_ended: bool
) -> None:
    finalizing = planned(small_state(), FileSystemWriterAsync(tmp_path / "c"))
    calls_queue.schedule_async_request(request_of(finalizing))
    if has_ended:
        held_at_the_end.open()
        assert calls_queue._calls[0].ended.wait(LIMIT)
    calls_queue.close(abort=True)
    with pytest.raises(CheckpointException, match="Worker failure: aborted"):
        save_state_dict_async_finalize(*finalizing)
    assert not is_committed(tmp_path / "c")


def test_a_writer_may_be_used_again_while_its_aborted_save_comes_to_an_end(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_at_the_end: Gate
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    calls_queue.schedule_async_request(request_of(planned(small_state(), writer)))
    held_at_the_end.wait()
    aborted = calls_queue._calls[0].stage.writes[0]
    calls_queue.close(abort=True)
    again = planned(small_state(5), writer)
    held_at_the_end.open()
    aborted.outcome(None)
    calls_queue.schedule_async_request(request_of(again))
    calls_queue.close()
    assert_saved(tmp_path / "c", seed=5)


def test_an_abort_keeps_what_somebody_has_finalized_by_hand(
    calls_queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    finalizing = planned(small_state(), FileSystemWriterAsync(tmp_path / "c"))
    calls_queue.schedule_async_request(request_of(finalizing))
    assert calls_queue._calls[0].ended.wait(LIMIT)
    save_state_dict_async_finalize(*finalizing)
    calls_queue.close(abort=True)
    assert_saved(tmp_path / "c")


def test_an_abort_keeps_the_checkpoint_that_was_there(
    calls_queue: AsyncCallsQueue, tmp_path: Path, held_after_staging: Gate
) -> None:
    held_after_staging.open()
    assert_usable(calls_queue, tmp_path / "c")
    before = data_files(tmp_path / "c")
    schedule(calls_queue, tmp_path / "c")
    calls_queue.close(abort=True)
    eventually(lambda: (gc.collect(), data_files(tmp_path / "c"))[1] == before)
    assert_saved(tmp_path / "c", seed=5)


def test_an_abort_does_not_wait_for_a_function_of_others(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(gate, finalize=[lambda: finalized.append(1)]))
    calls_queue.schedule_async_request(request(print, finalize=[lambda: finalized.append(2)]))
    gate.wait()
    calls_queue.close(abort=True)
    gate.open()
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == []
    assert finalized == []


def test_calls_keep_their_numbers_after_an_abort(calls_queue: AsyncCallsQueue) -> None:
    # Whoever compares numbers with other ranks, which aborted as well.
    calls_queue.schedule_async_request(request(print))
    calls_queue.close(abort=True)
    assert calls_queue.schedule_async_request(request(print)) == 1


def test_a_wait_in_another_thread_ends_with_an_abort(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    calls_queue.schedule_async_request(request(gate))
    gate.wait()
    call = calls_queue._calls[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(calls_queue.maybe_finalize_async_calls, True)
        eventually(lambda: call.agreement is not None)
        calls_queue.close(abort=True)
        with pytest.raises(CheckpointException, match="call 0 was aborted"):
            waiting.result(LIMIT)


def test_what_another_thread_aborts_when_it_has_ended_is_not_finalized(
    calls_queue: AsyncCallsQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(print, finalize=[lambda: finalized.append(1)]))
    has_ended = calls_queue._has_ended

    def aborted_at_the_last_moment(*args: Any) -> bool:
        ended = has_ended(*args)
        with in_thread(lambda: calls_queue.close(abort=True)):
            pass
        return ended

    monkeypatch.setattr(calls_queue, "_has_ended", aborted_at_the_last_moment)
    with pytest.raises(CheckpointException, match="call 0 was aborted"):
        calls_queue.maybe_finalize_async_calls(blocking=True)
    assert finalized == []


def test_a_close_finalizes_and_the_queue_may_be_used_again(calls_queue: AsyncCallsQueue) -> None:
    finalized: list[int] = []
    for number in range(2):
        calls_queue.schedule_async_request(
            request(print, finalize=[lambda n=number: finalized.append(n)])
        )
        calls_queue.close()
    assert finalized == [0, 1]


def test_a_queue_that_goes_with_calls_says_so(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    forgotten = AsyncCallsQueue()
    forgotten.schedule_async_request(request(gate))
    gate.wait()
    with caplog.at_level(logging.ERROR, "torch_ckpt"):
        del forgotten
        gc.collect()
    assert "1 async calls were never finalized" in caplog.text


def test_a_queue_that_goes_without_calls_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    used = AsyncCallsQueue()
    used.schedule_async_request(request(print))
    used.close()
    with caplog.at_level(logging.DEBUG, "torch_ckpt"):
        del used
        gc.collect()
    assert caplog.text == ""


def test_control_c_while_it_is_staged_is_raised_and_fails_the_call(
    calls_queue: AsyncCallsQueue, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = EngineWrite.started
    writes: list[EngineWrite] = []

    def held(self: EngineWrite, save: Any) -> None:
        writes.append(self)
        gate()
        started(self, save)

    monkeypatch.setattr(EngineWrite, "started", held)
    main = threading.get_ident()

    def interrupt() -> None:
        gate.wait()
        signal.pthread_kill(main, signal.SIGINT)

    with in_thread(interrupt), pytest.raises(KeyboardInterrupt):
        schedule(calls_queue, tmp_path / "c")
    gate.open()
    with pytest.raises(CheckpointException, match="KeyboardInterrupt"):
        calls_queue.maybe_finalize_async_calls(blocking=True)
    # Its files go when it ends, which nobody waits for.
    assert writes[0]._ended.wait(LIMIT)
    assert_usable(calls_queue, tmp_path / "c")
    assert len(data_files(tmp_path / "c")) == 2


# --- what does not move --------------------------------------------------------------------------


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_function_that_does_not_move_is_given_up(gate: Gate, no_dist: bool) -> None:
    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(gate))
    with pytest.raises(CheckpointException) as error:
        calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=no_dist)
    cause = cause_of(error.value)
    assert isinstance(cause, TimeoutError)
    assert re.search(r"rank 0: call 0 has not moved for 0\.3 s .its function.", str(cause))
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


def looks(
    monkeypatch: pytest.MonkeyPatch, moves: Callable[[int], int], last: Callable[[], Any]
) -> None:
    """Lets each look at the processor time see ``moves(number)``; ``last`` comes after 30 looks.

    A look is a tenth of the timeout after the one before, so these are three timeouts.
    """
    count = iter(range(1_000_000))

    def processor_time(_: object) -> int:
        number = next(count)
        if number == 30:
            last()
        return moves(number)

    monkeypatch.setattr(calls, "_processor_time", processor_time)


def test_a_function_whose_thread_works_is_not_given_up(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks(monkeypatch, lambda number: number, gate.open)
    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(gate))
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_a_save_in_python_threads_that_writes_is_not_given_up(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An item at each look: the thread that waits for the others takes no time of its own.
    written = threading.Semaphore(0)
    looks(monkeypatch, lambda _: written.release() or 0, lambda: written.release(1000))

    class Stream:
        """Lets one item through for each look."""

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
            assert written.acquire(timeout=LIMIT)
            self._file.flush()

    calls_queue = AsyncCallsQueue(timeout=SHORT)
    state = small_state(count=40)
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=1, open_file=Stream)
    calls_queue.schedule_async_request(request_of(planned(state, writer)))
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0]


# --- several ranks -------------------------------------------------------------------------------


class TwoRanks:
    """Threads of this process as ranks, which meet in a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = dist.HashStore()
        meetings = [Meeting(store, rank, 2, "calls") for rank in range(2)]
        self._here = threading.local()
        monkeypatch.setattr(Meeting, "of", lambda *_, **__: meetings[self._here.rank])
        monkeypatch.setattr(calls, "own_rank", lambda: getattr(self._here, "rank", "?"))

    def run(self, work: Callable[[int, AsyncCallsQueue], Any]) -> list[Any]:
        """By rank what its work returned or raised."""

        def of_rank(rank: int) -> Any:
            self._here.rank = rank
            try:
                return work(rank, AsyncCallsQueue(timeout=LIMIT))
            except CheckpointException as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(of_rank, rank) for rank in range(2)]
            return [future.result(LIMIT) for future in futures]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    return TwoRanks(monkeypatch)


def test_a_failure_on_one_rank_raises_on_both(two_ranks: TwoRanks) -> None:
    finalized: list[int] = []

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        function = fail if rank == 1 else print
        calls_queue.schedule_async_request(
            request(function, finalize=[lambda: finalized.append(rank)])
        )
        return calls_queue.maybe_finalize_async_calls(blocking=True)

    for outcome in two_ranks.run(work):
        assert isinstance(outcome, CheckpointException)
        assert list(outcome.failures) == [1]
        assert "refused" in str(outcome)
    assert finalized == []


def test_ranks_that_finalize_different_calls_are_told(two_ranks: TwoRanks) -> None:
    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        for _ in range(rank):
            calls_queue.schedule_async_request(request(print))
            calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        calls_queue.schedule_async_request(request(print))
        return calls_queue.maybe_finalize_async_calls(blocking=True)

    for outcome in two_ranks.run(work):
        assert isinstance(outcome, CheckpointException)
        assert "Unmatched async calls: rank 0 call 0, rank 1 call 1" in str(outcome)


def test_without_the_others_what_has_ended_here_is_finalized(two_ranks: TwoRanks) -> None:
    other_is_through = threading.Event()

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request(print))
        if rank == 0:
            # Rank 1 has neither scheduled nor polled.
            finalized = calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
            other_is_through.set()
            return finalized
        assert other_is_through.wait(LIMIT)
        return calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    assert two_ranks.run(work) == [[0], [0]]


def test_an_error_on_this_rank_is_raised_without_the_others(two_ranks: TwoRanks) -> None:
    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request(fail if rank else print))
        return calls_queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    good, bad = two_ranks.run(work)
    assert good == [0]
    assert list(bad.failures) == [1]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """One for each rank that has told the others of its function's end."""
    told = threading.Semaphore(0)
    part = Lockstep.part

    def counted(lockstep: Lockstep) -> None:
        part(lockstep)
        told.release()

    monkeypatch.setattr(Lockstep, "part", counted)
    return told


def test_the_first_poll_after_the_last_rank_s_end_finalizes_on_both(
    two_ranks: TwoRanks, gate: Gate, parts: threading.Semaphore
) -> None:
    begun, ended = threading.Barrier(2), threading.Barrier(2)

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request(gate))
        assert calls_queue.maybe_finalize_async_calls() == []
        begun.wait(LIMIT)
        gate.open()
        assert parts.acquire(timeout=LIMIT)
        ended.wait(LIMIT)
        return calls_queue.maybe_finalize_async_calls()

    assert two_ranks.run(work) == [[0], [0]]


def test_the_second_poll_finalizes_what_had_ended_before_the_first(
    two_ranks: TwoRanks, parts: threading.Semaphore
) -> None:
    ended = threading.Barrier(2)

    def work(rank: int, calls_queue: AsyncCallsQueue) -> Any:
        calls_queue.schedule_async_request(request())
        finalized = calls_queue.maybe_finalize_async_calls()
        assert parts.acquire(timeout=LIMIT)
        ended.wait(LIMIT)
        # By the first, where the ranks have been quick.
        return finalized + calls_queue.maybe_finalize_async_calls()

    assert two_ranks.run(work) == [[0], [0]]


def test_both_ranks_finalize_at_the_same_poll(two_ranks: TwoRanks) -> None:
    late = threading.Event()

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

    first, second = two_ranks.run(work)
    assert first == second >= 5
