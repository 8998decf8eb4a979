"""The queue of asynchronous calls: functions, their errors and timeouts, and several ranks."""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_calls import fail, is_empty, request, schedule, wait_for_end
from tests.fault_hooks import calling
from tests.forked import context
from tests.gates import LIMIT, Gate, eventually
from tests.ranks import on_forked_ranks
from tests.support import cause_of
from torch_ckpt.megatron import AsyncCallsQueue, AsyncRequest

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


def test_functions_that_cannot_be_pickled_run_with_their_arguments(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    lock = threading.Lock()  # cannot be pickled
    got: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> None:
        gate()
        got.append((args, kwargs))

    def preload() -> str:
        got.append(threading.get_ident())
        return "preloaded"

    calls_queue.schedule_async_request(
        AsyncRequest(function, (1, None, lock), [], {"more": lock}, preload_fn=preload)
    )
    # The preload function has run in this thread.
    assert got == [threading.get_ident()]
    gate.open()
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert got[1:] == [((1, "preloaded", lock), {"more": lock})]


def test_a_request_without_a_function_is_finalized(calls_queue: AsyncCallsQueue) -> None:
    finalized: list[int] = []
    for number, preload in enumerate((None, fail)):
        finalize = [lambda n=number: finalized.append(n)]
        calls_queue.schedule_async_request(request(preload_fn=preload, finalize=finalize))
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert finalized == [0, 1]


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


def test_a_single_rank_finalizes_at_the_first_poll_after_the_end(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    calls_queue.schedule_async_request(request(gate))
    assert calls_queue.maybe_finalize_async_calls() == []  # does not wait
    assert calls_queue.get_num_unfinalized_calls() == 1
    gate.open()
    for number in range(20):
        wait_for_end(calls_queue)
        assert calls_queue.maybe_finalize_async_calls() == [number]
        calls_queue.schedule_async_request(request(print))


def test_the_arguments_of_a_function_are_released_when_it_has_ended(
    calls_queue: AsyncCallsQueue,
) -> None:
    large = type("Large", (), {})()
    alive = weakref.ref(large)
    calls_queue.schedule_async_request(request(lambda _: None, large))
    del large
    wait_for_end(calls_queue)
    eventually(lambda: alive() is None)


FIELDS = {
    "older": "async_fn async_fn_args finalize_fns is_frozen call_idx",
    "newer": " ".join((*AsyncRequest._fields, "something_new")),
}


@pytest.mark.parametrize("version", FIELDS)
def test_requests_of_other_versions_run(calls_queue: AsyncCallsQueue, version: str) -> None:
    got: list[Any] = []
    values = {
        "async_fn": lambda *args, **kwargs: got.append((args, kwargs)),
        "async_fn_args": (1, 2),
        "finalize_fns": [lambda: got.append("finalized")],
        "async_fn_kwargs": {"c": 3},
        "preload_fn": dict,
        "is_frozen": False,
        "call_idx": 9,
        "something_new": 5,
    }
    theirs: Any = namedtuple("AsyncRequest", FIELDS[version])
    made = theirs(**{name: values[name] for name in theirs._fields})
    assert calls_queue.schedule_async_request(made) == 0
    calls_queue.close()
    expected = ((1, 2), {}) if version == "older" else ((1, {}), {"c": 3})
    assert got == [expected, "finalized"]


def test_finalize_functions_may_be_added_until_a_request_is_frozen() -> None:
    done: list[int] = []
    made, other = request(print), request(print)
    assert made.async_fn_kwargs == {} == other.async_fn_kwargs
    assert (made.preload_fn, made.is_frozen, made.call_idx) == (None, False, 0)
    made.add_finalize_fn(lambda: done.append(1))
    made.finalize_fns.append(lambda: done.append(2))
    frozen = made.freeze()
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(print)
    assert not made.is_frozen
    assert other.finalize_fns == []
    assert frozen.execute_finalize_fns(validate_matching_call_idx=False) == 0
    assert done == [1, 2]


# --- errors --------------------------------------------------------------------------------------


class Unpicklable(Exception):
    """An error that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


def raising(error: type[BaseException]) -> Any:
    def function(*_: object) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (request(raising(AssertionError), 1, 2, preload_fn=fail), "refused"),
        (request(print, 1, preload_fn=dict), "at least two arguments"),
        (request(raising(Unpicklable)), "Unpicklable: with a lock"),
        (request(raising(SystemExit)), "SystemExit"),
        (request(raising(KeyboardInterrupt)), "KeyboardInterrupt"),
    ],
    ids=["in the preload function", "too few arguments", "unpicklable", "exit", "interruption"],
)
def test_an_error_fails_its_call(
    calls_queue: AsyncCallsQueue, made: AsyncRequest, message: str
) -> None:
    assert calls_queue.schedule_async_request(made) == 0
    with pytest.raises(CheckpointException, match=message):
        calls_queue.maybe_finalize_async_calls(blocking=True)


def test_the_error_of_a_finalize_function_is_raised_unchanged(calls_queue: AsyncCallsQueue) -> None:
    done: list[int] = []
    of_call = [lambda: done.append(1), fail, lambda: done.append(2)]
    calls_queue.schedule_async_request(request(print, finalize=of_call))
    with pytest.raises(OSError, match="refused"):
        calls_queue.maybe_finalize_async_calls(blocking=True)
    assert done == [1]
    assert calls_queue.get_num_unfinalized_calls() == 0


@pytest.mark.parametrize("no_dist", [False, True])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_failed_call_raises_its_error_and_later_calls_are_finalized(
    calls_queue: AsyncCallsQueue, blocking: bool, no_dist: bool
) -> None:
    finalized: list[int] = []
    for number, function in enumerate((fail, print)):
        finalize = [lambda n=number: finalized.append(n)]
        calls_queue.schedule_async_request(request(function, finalize=finalize))
    wait_for_end(calls_queue, 1)
    with pytest.raises(CheckpointException) as error:
        calls_queue.maybe_finalize_async_calls(blocking, no_dist)
    cause = cause_of(error.value)
    assert (type(cause), str(cause)) == (OSError, "refused")
    assert finalized == ([1] if blocking else [])
    if not blocking:
        # The next poll finalizes it.
        assert calls_queue.maybe_finalize_async_calls(blocking, no_dist) == [1]
    assert finalized == [1]
    assert calls_queue.get_num_unfinalized_calls() == 0


def test_close_raises_the_first_of_several_errors_and_logs_the_others(
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
    assert second == "rank 0: call 2 was not finalized: the third"


# --- execute_sync --------------------------------------------------------------------------------


def test_execute_sync_runs_all_functions_of_a_request() -> None:
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
    AsyncRequest(None, (), [lambda: done.append("nothing to run")]).execute_sync()
    assert done[2:] == ["nothing to run"]


@pytest.mark.parametrize(
    "fields", [(fail,), (print, 1, 2, fail)], ids=["function", "preload function"]
)
def test_execute_sync_does_not_finalize_after_an_error(fields: Any) -> None:
    done: list[int] = []
    function, *arguments = fields
    preload = arguments.pop() if arguments else None
    made = request(function, *arguments, preload_fn=preload, finalize=[lambda: done.append(1)])
    with pytest.raises(CheckpointException, match="refused"):
        made.execute_sync()
    assert done == []


# --- timeouts ------------------------------------------------------------------------------------


#: Timeout in seconds of calls that must time out; other tests do not wait for it.
SHORT = 0.3


def timeout_of(calls_queue: AsyncCallsQueue, **options: bool) -> str:
    """Returns the text of the timeout that the next blocking call must raise."""
    with pytest.raises(CheckpointException) as error:
        calls_queue.maybe_finalize_async_calls(blocking=True, **options)
    cause = cause_of(error.value)
    assert isinstance(cause, TimeoutError)
    assert calls_queue.get_num_unfinalized_calls() == 0
    return str(cause)


@pytest.mark.parametrize("no_dist", [False, True])
def test_a_function_without_progress_times_out(gate: Gate, no_dist: bool) -> None:
    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(gate))
    text = timeout_of(calls_queue, no_dist=no_dist)
    assert re.search(r"rank 0: call 0 made no progress for 0\.3 s .its function.", text)
    assert "AsyncCallsQueue(timeout=...)" in text


def test_the_timeout_of_a_save_names_files_and_phase(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    calls_queue = AsyncCallsQueue(timeout=SHORT)
    schedule(calls_queue, tmp_path / "c", thread_count=2)
    text = timeout_of(calls_queue)
    assert f"__0_0.distcp, __0_1.distcp in {tmp_path / 'c'}: " in text
    assert re.search(r"(staging|writing|fsync), \d+ of \d+ bytes written, \d of 2 files done", text)
    held_after_staging.open()
    eventually(lambda: is_empty(tmp_path / "c"))


def test_a_function_that_uses_processor_time_does_not_time_out() -> None:
    def work() -> None:
        begun = time.monotonic()
        while time.monotonic() < begun + 3 * SHORT:
            pass

    calls_queue = AsyncCallsQueue(timeout=SHORT)
    calls_queue.schedule_async_request(request(work))
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
