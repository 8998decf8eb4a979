"""The queue of asynchronous calls: functions, their order, and their errors."""

from __future__ import annotations

import threading
import weakref
from collections import namedtuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_calls import assert_saved, fail, request, schedule, wait_for_end
from tests.async_saves import planned, request_of, small_state
from tests.gates import Gate, eventually
from tests.support import cause_of
from torch_ckpt.megatron import AsyncCallsQueue, AsyncRequest, FileSystemWriterAsync

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


def test_functions_that_cannot_be_pickled_run_with_their_arguments(
    calls_queue: AsyncCallsQueue,
) -> None:
    lock = threading.Lock()  # cannot be pickled
    got: list[Any] = []
    calls_queue.schedule_async_request(
        AsyncRequest(
            lambda *args, **kwargs: got.append((args, kwargs)),
            (1, None, lock),
            [],
            {"more": lock},
            preload_fn=lambda: "preloaded",
        )
    )
    calls_queue.schedule_async_request(request(got.append, 7))
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    assert got == [((1, "preloaded", lock), {"more": lock}), 7]


def test_the_preload_function_runs_while_the_call_is_scheduled(
    calls_queue: AsyncCallsQueue, gate: Gate
) -> None:
    ran: list[int] = []
    calls_queue.schedule_async_request(
        request(lambda *_: gate(), 1, 2, preload_fn=lambda: ran.append(threading.get_ident()))
    )
    assert ran == [threading.get_ident()]


def test_a_request_without_a_function_is_finalized(
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
    assert calls_queue.maybe_finalize_async_calls(blocking=True) == []
    assert done == ["0a", "0b", "1a", "1b", "2a", "2b"]


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
    class Large:
        pass

    large = Large()
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


@pytest.mark.parametrize("blocking", [True, False])
def test_the_error_of_a_function_is_raised_by_finalizing(
    calls_queue: AsyncCallsQueue, blocking: bool
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(fail, finalize=[lambda: finalized.append(1)]))
    wait_for_end(calls_queue)
    finish = partial(calls_queue.maybe_finalize_async_calls, blocking)
    with pytest.raises(CheckpointException) as error:
        eventually(lambda: bool(finish()))
    assert isinstance(cause_of(error.value), OSError)
    assert str(cause_of(error.value)) == "refused"
    assert finalized == []
    assert calls_queue.get_num_unfinalized_calls() == 0


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
def test_calls_after_a_failed_one_are_finalized(
    calls_queue: AsyncCallsQueue, blocking: bool, no_dist: bool
) -> None:
    finalized: list[int] = []
    calls_queue.schedule_async_request(request(fail))
    calls_queue.schedule_async_request(request(print, finalize=[lambda: finalized.append(1)]))
    wait_for_end(calls_queue, 1)
    with pytest.raises(CheckpointException, match="refused"):
        calls_queue.maybe_finalize_async_calls(blocking, no_dist)
    assert finalized == ([1] if blocking else [])
    if not blocking:
        # The next poll finalizes it.
        assert calls_queue.maybe_finalize_async_calls(blocking, no_dist) == [1]
    assert calls_queue.get_num_unfinalized_calls() == 0


def test_close_commits_the_save_after_a_failed_call(
    calls_queue: AsyncCallsQueue, tmp_path: Path
) -> None:
    calls_queue.schedule_async_request(request(fail))
    schedule(calls_queue, tmp_path / "c")
    with pytest.raises(CheckpointException, match="refused"):
        calls_queue.close()
    assert_saved(tmp_path / "c")


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


@pytest.mark.parametrize("of", ["function", "preload function"])
def test_execute_sync_does_not_finalize_after_an_error(of: str) -> None:
    done: list[int] = []
    finalize = [lambda: done.append(1)]
    made = request(fail, finalize=finalize)
    if of == "preload function":
        made = request(print, 1, 2, preload_fn=fail, finalize=finalize)
    with pytest.raises(CheckpointException, match="refused"):
        made.execute_sync()
    assert done == []


def test_execute_sync_saves_a_checkpoint(tmp_path: Path) -> None:
    request_of(planned(small_state(), FileSystemWriterAsync(tmp_path / "c"))).execute_sync()
    assert_saved(tmp_path / "c")
