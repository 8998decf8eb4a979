"""The queue of results: items of a process and its children arrive once and in order."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.forked import answer_of, in_fork
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.results_queue import ResultsQueue

#: Limit of all waits in seconds; a wait that reaches it fails the test.
LIMIT = 60.0

#: Timeout in seconds of gets that find no item.
SHORT = 0.05


def by_multiprocessing(how: str, work: Callable[..., None], *args: Any) -> None:
    child = multiprocessing.get_context(how).Process(target=work, args=args)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0


def python(program: str, *args: str, **options: Any) -> str:
    """Runs a Python program, which must succeed. Returns its output."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=os.environ | {"PYTHONPATH": path},
        **options,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# --- in one process ------------------------------------------------------------------------------


def test_items_are_taken_in_the_order_of_their_puts() -> None:
    results = ResultsQueue()
    for number in range(5):
        results.put(number)
    assert [results.get() for _ in range(5)] == list(range(5))


def test_an_item_from_the_same_process_is_the_same_object() -> None:
    results = ResultsQueue()
    lock = threading.Lock()  # cannot be pickled
    results.put(lock)
    assert results.get() is lock


@pytest.mark.parametrize(
    "options", [{"block": False}, {"timeout": 0.0}, {"timeout": SHORT}], ids=str
)
def test_a_get_from_an_empty_queue_raises(options: dict[str, Any]) -> None:
    with pytest.raises(queue.Empty):
        ResultsQueue().get(**options)


def test_the_size_counts_items_from_all_processes() -> None:
    results = ResultsQueue()
    assert results.empty()
    results.put("parent")
    in_fork(lambda: results.put("child"))
    assert results.qsize() == 2
    assert not results.empty()
    results.get()
    results.get()
    assert results.empty()


def test_a_put_wakes_a_waiting_get_of_another_thread() -> None:
    results = ResultsQueue()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(results.get, timeout=LIMIT)
        results.put("item")
        assert waiting.result(LIMIT) == "item"


def test_several_threads_put_and_get_every_item_once() -> None:
    results = ResultsQueue()

    def take(_: int) -> list[Any]:
        return [results.get(timeout=LIMIT) for _ in range(25)]

    with ThreadPoolExecutor(4) as takers, ThreadPoolExecutor(4) as putters:
        taken = [takers.submit(take, n) for n in range(4)]
        for putter in range(4):
            putters.submit(put, results, *((putter, n) for n in range(25)))
        items = [item for one in taken for item in one.result(LIMIT)]
    assert sorted(items) == [(putter, n) for putter in range(4) for n in range(25)]
    assert results.empty()


def test_several_threads_take_each_item_of_a_child_once() -> None:
    results = ResultsQueue()
    in_fork(lambda: [results.put(number) for number in range(40)] and None)
    with ThreadPoolExecutor(8) as pool:
        items = list(pool.map(lambda _: results.get(timeout=LIMIT), range(40)))
    assert sorted(items) == list(range(40))
    assert results.empty()


def test_two_queues_do_not_mix() -> None:
    one, other = ResultsQueue(), ResultsQueue()
    in_fork(lambda: one.put("one"))
    in_fork(lambda: other.put("other"))
    assert (one.get(), other.get()) == ("one", "other")
    assert one.empty()
    assert other.empty()


# --- from children -------------------------------------------------------------------------------


def put(results: ResultsQueue, *items: Any) -> None:
    for item in items:
        results.put(item)


def put_by_all(results: ResultsQueue, pickled: bytes) -> None:
    # Each request contains a pickle of the queue.
    queues = results, pickle.loads(pickled), pickle.loads(pickled)
    for number in range(12):
        queues[number % 3].put(number)


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_items_of_a_child_arrive_in_order_through_a_queue_and_its_pickles(how: str) -> None:
    results = ResultsQueue()
    by_multiprocessing(how, put_by_all, results, pickle.dumps(results))
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))
    assert results.empty()


def test_unpickling_in_the_owner_returns_the_same_queue() -> None:
    results = ResultsQueue()
    assert pickle.loads(pickle.dumps(results)) is results


def test_a_put_to_a_deleted_queue_raises() -> None:
    pickled = pickle.dumps(ResultsQueue())
    gc.collect()

    def work() -> None:
        with pytest.raises(FileNotFoundError):
            pickle.loads(pickled).put("item")

    in_fork(work)


def test_only_the_owner_takes_items() -> None:
    results = ResultsQueue()

    def work() -> None:
        with pytest.raises(CheckpointError, match="the results queue belongs to process"):
            results.get_nowait()

    in_fork(work)


def test_items_put_before_a_fork_are_not_sent_by_the_child() -> None:
    results = ResultsQueue()
    results.put("parent")
    in_fork(lambda: results.put("child"))
    assert [results.get(), results.get(timeout=LIMIT)] == ["parent", "child"]
    assert results.empty()


def test_a_child_can_put_although_a_thread_held_the_queues_lock_at_the_fork() -> None:
    results = ResultsQueue()
    with results._items_lock:
        in_fork(lambda: results.put("item"))
    assert results.get(timeout=LIMIT) == "item"


def test_a_forked_child_can_own_a_queue() -> None:
    ResultsQueue()

    def work() -> None:
        results = ResultsQueue()
        results.put("item")
        assert results.get_nowait() == "item"
        in_fork(lambda: results.put("of a grandchild"))
        assert results.get(timeout=LIMIT) == "of a grandchild"

    by_multiprocessing("fork", work)


def test_a_grandchild_puts_to_the_queue_of_the_first_process() -> None:
    results = ResultsQueue()
    in_fork(lambda: in_fork(lambda: results.put("item")))
    assert results.get(timeout=LIMIT) == "item"


def test_large_items_arrive_complete() -> None:
    # More than any pipe or socket buffers, because the owner does not read during the put.
    results = ResultsQueue()
    large = bytes(range(256)) * (64 << 10)
    in_fork(lambda: results.put(large))
    assert results.get(timeout=LIMIT) == large


def test_no_item_of_several_concurrent_children_is_lost() -> None:
    results = ResultsQueue()
    ways = [os.pipe() for _ in range(4)]
    children = []
    for number, (reading, writing) in enumerate(ways):
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)
            put(results, *((number, n) for n in range(10)))
            os._exit(0)
        children.append(child)
    for reading, writing in ways:
        os.write(writing, b"!")
        os.close(reading)
        os.close(writing)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    items = [results.get(timeout=LIMIT) for _ in range(40)]
    assert sorted(items) == [(number, n) for number in range(4) for n in range(10)]
    for number in range(4):
        assert [n for of, n in items if of == number] == list(range(10))


def test_an_item_that_cannot_be_pickled_fails_its_put() -> None:
    results = ResultsQueue()

    def work() -> None:
        with pytest.raises(TypeError):
            results.put(threading.Lock())

    in_fork(work)
    assert results.empty()
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_a_partly_sent_item_is_not_received() -> None:
    results = ResultsQueue()

    class Dies:
        def __reduce__(self) -> Any:
            os._exit(0)

    in_fork(lambda: results.put([bytes(1 << 20), Dies()]))
    assert results.empty()
    with pytest.raises(queue.Empty):
        results.get(timeout=SHORT)


def test_a_put_raises_after_the_owner_has_ended() -> None:
    orphaned = pickle.loads(answer_of(lambda: pickle.dumps(ResultsQueue())))
    with pytest.raises(FileNotFoundError):
        orphaned.put("item")


# --- children that die ---------------------------------------------------------------------------


def test_a_child_that_dies_before_its_item_is_reported_instead() -> None:
    results = ResultsQueue()
    child = os.fork()
    if child == 0:
        results.begin("the files of rank 3")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    error = results.get_nowait()
    assert isinstance(error, CheckpointError)
    assert f"process {child} exited before sending its result (the files of rank 3)" in str(error)
    assert results.empty()


def test_a_waiting_get_gets_the_death_of_a_child_at_once() -> None:
    results = ResultsQueue()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        results.begin("files")
        os.write(writing, b"!")
        signal.pause()
    os.read(reading, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(results.get)
        os.kill(child, signal.SIGKILL)
        assert isinstance(waiting.result(LIMIT), CheckpointError)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)


def test_a_child_may_exit_after_its_item() -> None:
    results = ResultsQueue()

    def work() -> None:
        results.begin("files")
        results.put("item")

    in_fork(work)
    assert results.get_nowait() == "item"
    assert results.empty()


# --- released resources --------------------------------------------------------------------------


def descriptors() -> set[str]:
    """Returns the open descriptors, including the one that lists the directory."""
    return set(os.listdir("/proc/self/fd"))


def test_a_deleted_queue_leaves_no_descriptor_open() -> None:
    gc.collect()  # frees objects that errors of earlier tests refer to
    before = descriptors()

    def use() -> None:
        results = ResultsQueue()
        in_fork(lambda: results.put("never taken"))
        assert descriptors() != before

    use()
    gc.collect()
    assert descriptors() == before


def test_a_queue_that_only_this_process_uses_has_no_descriptor() -> None:
    before = descriptors()
    results = ResultsQueue()
    results.put("item")
    assert results.get() == "item"
    assert descriptors() == before


def test_items_that_were_taken_use_no_memory() -> None:
    results = ResultsQueue()
    in_fork(lambda: results.put(bytes(1 << 20)))
    results.get()
    memory = results._open_channel().address[1]
    assert os.stat(f"/proc/self/fd/{memory}").st_size < 100


def test_a_child_that_is_joined_at_exit_can_still_put() -> None:
    # When the interpreter exits, multiprocessing joins its children after the other exit handlers.
    # Handlers run in reverse order of registration.
    program = """
import multiprocessing, os
from multiprocessing import util
reading, writing = os.pipe()
util.Finalize(None, os.close, args=(writing,), exitpriority=0)
from torch_ckpt.megatron.results_queue import ResultsQueue
results = ResultsQueue()

def child():
    os.close(writing)
    assert os.read(reading, 1) == b""
    results.put("item")
    print("put")

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
"""
    assert python(program) == "put\n"
