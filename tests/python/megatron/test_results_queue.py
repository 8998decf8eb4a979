"""The queue of results: what a process and its children put arrives once, in order."""

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

from tests.children import answer_of, in_fork
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.results_queue import ResultsQueue

#: No wait here is meant to be long, in seconds. What waits so long has failed.
LIMIT = 60.0

#: Seconds that a get waits for what does not come.
SHORT = 0.05


def by_multiprocessing(how: str, work: Callable[..., None], *args: Any) -> None:
    child = multiprocessing.get_context(how).Process(target=work, args=args)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0


def python(program: str, *args: str, **options: Any) -> str:
    """What a program prints, which has this package and must succeed."""
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


def test_items_come_in_the_order_in_which_they_were_put() -> None:
    results = ResultsQueue()
    for number in range(5):
        results.put(number)
    assert [results.get() for _ in range(5)] == list(range(5))


def test_an_item_of_the_own_process_is_the_object_itself() -> None:
    results = ResultsQueue()
    lock = threading.Lock()  # which no pickle holds
    results.put(lock)
    assert results.get() is lock


def test_an_empty_queue_says_so_at_once() -> None:
    results = ResultsQueue()
    with pytest.raises(queue.Empty):
        results.get_nowait()
    with pytest.raises(queue.Empty):
        results.get(block=False)


@pytest.mark.parametrize("timeout", [0.0, SHORT])
def test_a_get_with_a_timeout_ends_without_an_item(timeout: float) -> None:
    with pytest.raises(queue.Empty):
        ResultsQueue().get(timeout=timeout)


def test_the_size_is_that_of_all_that_was_put() -> None:
    results = ResultsQueue()
    assert results.empty()
    results.put("here")
    in_fork(lambda: results.put("there"))
    assert results.qsize() == 2
    assert not results.empty()
    results.get()
    results.get()
    assert results.empty()


def test_a_get_that_waits_is_woken_by_another_threads_put() -> None:
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


def test_several_threads_take_what_a_child_has_put_once() -> None:
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


def unpickled_put(pickled: bytes, *items: Any) -> None:
    put(pickle.loads(pickled), *items)


def test_what_a_forked_child_puts_arrives_in_order() -> None:
    results = ResultsQueue()
    in_fork(lambda: put(results, *range(12)))
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))


def test_the_same_queue_may_be_put_to_by_two_pickles_of_it() -> None:
    results = ResultsQueue()
    pickled = pickle.dumps(results)

    def work() -> None:
        # As in two requests.
        one, other = pickle.loads(pickled), pickle.loads(pickled)
        for number in range(12):
            (one if number % 2 else other).put(number)

    in_fork(work)
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))


@pytest.mark.parametrize("how", ["fork", "forkserver"])
def test_what_a_child_of_multiprocessing_puts_arrives_in_order(how: str) -> None:
    results = ResultsQueue()
    by_multiprocessing(how, put, results, *range(12))
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))
    assert results.empty()


def put_by_both(results: ResultsQueue, pickled: bytes) -> None:
    put(results, *range(12))
    unpickled_put(pickled, "item")


def test_a_queue_and_a_plain_pickle_of_it_are_ways_back_from_a_process_of_its_own() -> None:
    results = ResultsQueue()
    by_multiprocessing("spawn", put_by_both, results, pickle.dumps(results))
    assert [results.get(timeout=LIMIT) for _ in range(13)] == [*range(12), "item"]
    assert results.empty()


def test_the_owner_gets_its_own_queue_back_from_a_pickle() -> None:
    results = ResultsQueue()
    assert pickle.loads(pickle.dumps(results)) is results


def test_a_put_to_a_queue_that_nobody_has_any_more_fails_and_says_so() -> None:
    pickled = pickle.dumps(ResultsQueue())
    gc.collect()

    def work() -> None:
        with pytest.raises(FileNotFoundError):
            unpickled_put(pickled, "item")

    in_fork(work)


def test_only_the_process_that_made_the_queue_takes_of_it() -> None:
    results = ResultsQueue()

    def work() -> None:
        with pytest.raises(CheckpointError, match="the results queue belongs to process"):
            results.get_nowait()

    in_fork(work)


def test_what_was_put_here_before_a_fork_is_not_the_childs_to_send() -> None:
    results = ResultsQueue()
    results.put("here")
    in_fork(lambda: results.put("there"))
    assert [results.get(), results.get(timeout=LIMIT)] == ["here", "there"]
    assert results.empty()


def test_a_child_puts_though_another_thread_held_the_queue_at_the_fork() -> None:
    results = ResultsQueue()
    with results._items_lock:
        in_fork(lambda: results.put("item"))
    assert results.get(timeout=LIMIT) == "item"


def test_a_forked_childs_own_queue_is_its_own() -> None:
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


def test_large_items_arrive_whole() -> None:
    # More than any pipe or socket buffers: nobody is there to read while it is put.
    results = ResultsQueue()
    large = bytes(range(256)) * (64 << 10)
    in_fork(lambda: results.put(large))
    assert results.get(timeout=LIMIT) == large


def test_several_children_at_once_lose_nothing() -> None:
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


def test_a_childs_item_that_cannot_be_pickled_fails_its_put_and_is_never_seen() -> None:
    results = ResultsQueue()

    def work() -> None:
        with pytest.raises(TypeError):
            results.put(threading.Lock())

    in_fork(work)
    assert results.empty()
    with pytest.raises(queue.Empty):
        results.get_nowait()


def test_half_an_item_is_not_seen() -> None:
    results = ResultsQueue()

    class Dies:
        def __reduce__(self) -> Any:
            os._exit(0)

    in_fork(lambda: results.put([bytes(1 << 20), Dies()]))
    assert results.empty()
    with pytest.raises(queue.Empty):
        results.get(timeout=SHORT)


def test_a_child_whose_parent_is_gone_is_told_by_its_put() -> None:
    orphaned = pickle.loads(answer_of(lambda: pickle.dumps(ResultsQueue())))
    with pytest.raises(FileNotFoundError):
        orphaned.put("item")


# --- children that die ---------------------------------------------------------------------------


def test_a_child_that_dies_before_its_item_is_told_in_its_place() -> None:
    results = ResultsQueue()
    child = os.fork()
    if child == 0:
        results.begin("the files of rank 3")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    error = results.get_nowait()
    assert isinstance(error, CheckpointError)
    assert f"process {child} has ended before it sent its result (the files of rank 3)" in str(
        error
    )
    assert results.empty()


def test_who_waits_for_a_child_is_told_at_once_that_it_has_died() -> None:
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


def test_a_child_that_has_put_its_item_may_die() -> None:
    results = ResultsQueue()

    def work() -> None:
        results.begin("files")
        results.put("item")

    in_fork(work)
    assert results.get_nowait() == "item"
    assert results.empty()


# --- what is left --------------------------------------------------------------------------------


def descriptors() -> set[str]:
    """Numbers of the open ones; one of them lists the directory."""
    return set(os.listdir("/proc/self/fd"))


def test_a_queue_that_is_dropped_leaves_no_descriptor() -> None:
    gc.collect()  # what the errors of earlier tests hold
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


def test_what_was_taken_takes_no_memory() -> None:
    results = ResultsQueue()
    in_fork(lambda: results.put(bytes(1 << 20)))
    results.get()
    memory = results._open_channel().address[1]
    assert os.stat(f"/proc/self/fd/{memory}").st_size < 100


def test_a_child_that_the_parents_end_waits_for_may_still_put() -> None:
    # multiprocessing joins its children when the interpreter ends, after the parent's own end has
    # begun. What is registered first is run last.
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
