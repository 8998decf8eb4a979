"""The queue of results: items of a process and its children arrive once and in order.

tests/cpp/process_channel_test.cpp tests the channel through which children send them.
"""

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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.forked import REPOSITORY, answer_of, end_of, fork, in_fork
from tests.support import open_descriptors
from torch_ckpt import CheckpointError
from torch_ckpt.megatron.results_queue import ResultsQueue

#: Limit of all waits in seconds; a wait that reaches it fails the test.
LIMIT = 60.0

#: Timeout in seconds of gets that find no item.
SHORT = 0.05


# --- in one process ------------------------------------------------------------------------------


def test_items_of_the_same_process_are_taken_in_order_and_are_the_same_objects() -> None:
    results = ResultsQueue()
    items = [threading.Lock(), 1, 2, 3]  # a lock cannot be pickled
    for item in items:
        results.put(item)
    taken = [results.get() for _ in items]
    assert taken[0] is items[0]
    assert taken == items


@pytest.mark.parametrize(
    "options", [{"block": False}, {"timeout": 0.0}, {"timeout": SHORT}], ids=str
)
def test_a_get_from_an_empty_queue_raises(options: dict[str, Any]) -> None:
    with pytest.raises(queue.Empty):
        ResultsQueue().get(**options)


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
    in_fork(lambda: put(results, *range(40)))
    with ThreadPoolExecutor(8) as pool:
        items = list(pool.map(lambda _: results.get(timeout=LIMIT), range(40)))
    assert sorted(items) == list(range(40))
    assert results.empty()


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
def test_items_of_a_child_arrive_in_order_through_a_queue_and_its_pickles(how: Any) -> None:
    results = ResultsQueue()
    child = multiprocessing.get_context(how).Process(
        target=put_by_all, args=(results, pickle.dumps(results))
    )
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))
    assert results.empty()


def test_the_size_counts_items_from_all_processes_and_a_child_sends_only_its_own() -> None:
    results, other = ResultsQueue(), ResultsQueue()
    assert results.empty()
    results.put("parent")
    in_fork(lambda: results.put("child"))
    in_fork(lambda: in_fork(lambda: results.put("grandchild")))
    in_fork(lambda: other.put("of another queue"))
    assert results.qsize() == 3
    assert not results.empty()
    assert [results.get() for _ in range(3)] == ["parent", "child", "grandchild"]
    assert results.empty()
    assert other.get() == "of another queue"


def test_unpickling_in_the_owner_returns_the_same_queue() -> None:
    results = ResultsQueue()
    assert pickle.loads(pickle.dumps(results)) is results


@pytest.mark.parametrize("ends", ["the queue", "its owner"])
def test_a_put_raises_once_the_queue_or_its_owner_has_ended(ends: str) -> None:
    def pickled() -> bytes:
        return pickle.dumps(ResultsQueue())

    orphaned = answer_of(pickled) if ends == "its owner" else pickled()
    gc.collect()

    def work() -> None:
        with pytest.raises(FileNotFoundError):
            pickle.loads(orphaned).put("item")

    in_fork(work)


def test_only_the_owner_takes_items() -> None:
    results = ResultsQueue()

    def work() -> None:
        with pytest.raises(CheckpointError, match="the results queue belongs to process"):
            results.get_nowait()

    in_fork(work)


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

    in_fork(work)


def test_no_item_of_several_concurrent_children_is_lost() -> None:
    results = ResultsQueue()
    reading, writing = os.pipe()

    def work(number: int) -> None:
        os.close(writing)
        os.read(reading, 1)  # ends when the parent closes its end
        put(results, *((number, n) for n in range(10)))

    children = [fork(lambda n=number: work(n)) for number in range(4)]
    os.close(writing)
    os.close(reading)
    assert [end_of(child) for child in children] == [0] * 4
    items = [results.get(timeout=LIMIT) for _ in range(40)]
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


def test_a_waiting_get_gets_the_death_of_a_child_at_once() -> None:
    results = ResultsQueue()
    reading, writing = os.pipe()

    def work() -> None:
        results.begin("the files of rank 3")
        os.write(writing, b"!")
        signal.pause()

    child = fork(work)
    os.read(reading, 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(results.get)
        os.kill(child, signal.SIGKILL)
        error = waiting.result(LIMIT)
    assert isinstance(error, CheckpointError)
    assert f"process {child} exited before sending its result (the files of rank 3)" in str(error)
    assert end_of(child) == -signal.SIGKILL
    assert results.empty()
    os.close(reading)
    os.close(writing)


# --- released resources --------------------------------------------------------------------------


def test_a_deleted_queue_leaves_no_descriptor_open() -> None:
    gc.collect()  # frees objects that errors of earlier tests refer to
    before = open_descriptors()

    def use() -> None:
        results = ResultsQueue()
        in_fork(lambda: results.put("never taken"))
        assert not open_descriptors() <= before

    use()
    gc.collect()
    assert open_descriptors() <= before


def test_a_queue_that_only_this_process_uses_has_no_descriptor() -> None:
    before = open_descriptors()
    results = ResultsQueue()
    results.put("item")
    assert results.get() == "item"
    assert open_descriptors() <= before


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
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "put\n", "")
