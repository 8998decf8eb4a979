"""The queue of results: what a process and its children put arrives once, in order."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from torch_ckpt.results import ResultsQueue, _place

#: No wait here is meant to be long, in seconds. What waits so long has failed.
LIMIT = 60.0

#: Seconds that a get waits for what does not come.
SHORT = 0.05


def in_fork(work: Callable[[], None]) -> None:
    """Runs ``work`` in a child that is forked and ends without any clean-up."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def by_multiprocessing(how: str, work: Callable[..., None], *args: Any) -> None:
    child = multiprocessing.get_context(how).Process(target=work, args=args)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0


def python(program: str, *args: str, **options: Any) -> str:
    """What a program prints, which has this package and must succeed."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
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


def test_the_order_is_kept_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    results = ResultsQueue()
    backwards = iter(range(100, 0, -1))
    monkeypatch.setattr(time, "time_ns", lambda: next(backwards))
    in_fork(lambda: put(results, *range(12)))
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))


def test_nothing_is_lost_or_mixed_up_where_a_clock_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = ResultsQueue()
    pickled = pickle.dumps(results)

    def work() -> None:
        # The same queue twice, as in two requests.
        one, other = pickle.loads(pickled), pickle.loads(pickled)
        for clock in ("time_ns", "monotonic_ns"):
            monkeypatch.setattr(time, clock, lambda: 5)
        for number in range(12):
            (one if number % 2 else other).put(number)

    in_fork(work)
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_what_a_child_of_multiprocessing_puts_arrives_in_order(how: str) -> None:
    results = ResultsQueue()
    by_multiprocessing(how, put, results, *range(12))
    assert [results.get(timeout=LIMIT) for _ in range(12)] == list(range(12))
    assert results.empty()


def test_a_plain_pickle_of_a_queue_is_the_way_back_from_another_process() -> None:
    results = ResultsQueue()
    by_multiprocessing("spawn", unpickled_put, pickle.dumps(results), "item")
    assert results.get(timeout=LIMIT) == "item"


def test_the_owner_gets_its_own_queue_back_from_a_pickle() -> None:
    results = ResultsQueue()
    assert pickle.loads(pickle.dumps(results)) is results


def test_a_queue_that_was_dropped_can_still_be_taken_from_by_a_pickle_of_it() -> None:
    results = ResultsQueue()
    pickled = pickle.dumps(results)
    in_fork(lambda: unpickled_put(pickled, "item"))
    del results
    assert pickle.loads(pickled).get(timeout=LIMIT) == "item"


def test_what_was_put_here_before_a_fork_is_not_the_childs_to_send() -> None:
    results = ResultsQueue()
    results.put("here")
    in_fork(lambda: results.put("there"))
    assert [results.get(), results.get(timeout=LIMIT)] == ["here", "there"]
    assert results.empty()


def test_a_child_puts_though_another_thread_held_the_queue_at_the_fork() -> None:
    results = ResultsQueue()
    with results._arrived:
        in_fork(lambda: results.put("item"))
    assert results.get(timeout=LIMIT) == "item"


def test_a_child_makes_a_queue_though_another_thread_was_making_one_at_the_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # it ends without tidying up
    with _place._lock:
        in_fork(lambda: pickle.dumps(ResultsQueue()))
    assert len(list(tmp_path.iterdir())) == 1


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
    program = """
import pickle, sys
from torch_ckpt.results import ResultsQueue
sys.stdout.write(pickle.dumps(ResultsQueue()).hex())
"""
    orphaned = pickle.loads(bytes.fromhex(python(program)))
    with pytest.raises(FileNotFoundError) as error:
        orphaned.put("item")
    assert str(orphaned._path) in str(error.value)


# --- what is left --------------------------------------------------------------------------------


def test_nothing_is_left_of_a_process_that_ends(tmp_path: Path) -> None:
    program = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from torch_ckpt.results import ResultsQueue
results = ResultsQueue()
if os.fork() == 0:
    results.put("never taken")
    os._exit(0)
os.wait()
assert not results.empty()
assert len(os.listdir(sys.argv[1])) == 1
"""
    python(program, str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
def test_nothing_is_left_of_children_of_multiprocessing(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    place = tmp_path / "place"
    place.mkdir()
    program.write_text("""
import glob, multiprocessing, os, pickle, sys, tempfile
tempfile.tempdir = sys.argv[1]
from torch_ckpt.results import ResultsQueue

def child():
    results = ResultsQueue()
    pickle.dumps(results)  # now others may put
    assert len(glob.glob(sys.argv[1] + "/torch_ckpt-*")) == 2

if __name__ == "__main__":
    results = ResultsQueue()
    pickle.dumps(results)
    process = multiprocessing.get_context(sys.argv[2]).Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert len(glob.glob(sys.argv[1] + "/torch_ckpt-*")) == 1
""")
    subprocess.run(
        [sys.executable, str(program), str(place), how],
        check=True,
        timeout=LIMIT,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert list(place.glob("torch_ckpt-*")) == []


def test_the_directory_is_the_users_alone() -> None:
    results = ResultsQueue()
    pickle.dumps(results)  # now others may put
    assert results._path is not None
    assert Path(results._path).parent.stat().st_mode & 0o777 == 0o700


def test_a_child_that_the_parents_end_waits_for_may_still_put(tmp_path: Path) -> None:
    # multiprocessing joins its children when the interpreter ends, after the parent's own end has
    # begun. What is registered first is run last.
    program = """
import multiprocessing, os, sys, tempfile
from multiprocessing import util
tempfile.tempdir = sys.argv[1]
reading, writing = os.pipe()
util.Finalize(None, os.close, args=(writing,), exitpriority=0)
from torch_ckpt.results import ResultsQueue
results = ResultsQueue()

def child():
    os.close(writing)
    assert os.read(reading, 1) == b""
    results.put("item")
    print("put")

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
"""
    assert python(program, str(tmp_path)) == "put\n"
    assert os.listdir(tmp_path) == []
