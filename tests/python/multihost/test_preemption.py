"""torch_ckpt.multihost: a preemption notice to one rank stops all ranks at the same step."""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from tests.fault_hooks import calling
from tests.forked import end_of, fork, run_script
from tests.gates import in_thread
from torch_ckpt import multihost
from torch_ckpt.multihost import PreemptionWatch
from torch_ckpt.ranks.group import RankGroup

#: Limit of waits that should not block, in seconds.
PATIENCE = 60.0

#: Seconds between two polls of a watch.
POLL = 0.02


@pytest.fixture
def watch() -> Iterator[PreemptionWatch]:
    with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as watch:
        yield watch


def test_a_signal_to_a_single_process_ends_its_step(watch: PreemptionWatch) -> None:
    assert not any(multihost.reached_preemption_sync_point(step) for step in range(6))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert multihost.reached_preemption_sync_point(6)
    assert multihost.reached_preemption_sync_point(6)
    assert not multihost.reached_preemption_sync_point(7)
    assert watch.reason == "SIGUSR1 on rank 0"


@pytest.mark.parametrize("step", [0, 1000])
def test_a_signal_before_the_first_step_ends_that_step(watch: PreemptionWatch, step: int) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watch.reached(step)


def test_each_signal_is_a_separate_notice_and_steps_can_be_skipped(watch: PreemptionWatch) -> None:
    for step in range(0, 500, 10):
        assert not watch.reached(step)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.reached(step + 5)


def test_a_file_is_one_notice_until_it_is_deleted(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    looked: queue.SimpleQueue[None] = queue.SimpleQueue()

    def looks(count: int) -> None:
        """Waits until the watch has checked for the file ``count`` times."""
        with calling({"stat": lambda: looked.put(None)}):
            for _ in range(count):
                looked.get(timeout=PATIENCE)

    def first_true(step: int) -> int:
        return next(at for at in range(step, sys.maxsize) if watch.reached(at))

    with multihost.watch_for_preemption((), file, poll_seconds=POLL) as watch:
        assert not watch.reached(0)
        file.touch()
        step = first_true(1)
        assert watch.reason == f"{file} on rank 0"
        looks(3)
        assert not watch.reached(step + 1)
        file.unlink()
        looks(3)
        file.touch()
        assert first_true(step + 2) > step + 1


@pytest.fixture
def called() -> Iterator[list[int]]:
    """Installs a handler of SIGUSR1 that appends the signal's number to this list."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def test_previous_handlers_are_called_and_restored(called: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as watch:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.reached(0)
    assert called == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "SIGINT"), (signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}")],
)
def test_any_signal_can_be_a_notice_and_is_named(number: int, name: str) -> None:
    with multihost.watch_for_preemption([number], poll_seconds=POLL) as watch:
        os.kill(os.getpid(), number)
        assert watch.reached(0)
        assert watch.reason == f"{name} on rank 0"


def test_if_one_signal_cannot_be_watched_none_is() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ValueError, match=r"SIGKILL.* is not a signal that a process can watch"):
        multihost.watch_for_preemption([signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) is before
    with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as watch:
        assert not watch.reached(0)


def test_forked_children_are_terminated_by_the_signal() -> None:
    with multihost.watch_for_preemption(poll_seconds=POLL) as watch:
        read, write = os.pipe()

        def wait() -> None:
            os.write(write, b"1")
            signal.pause()

        child = fork(wait)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        assert end_of(child) == -signal.SIGTERM
        os.close(read)
        os.close(write)
        assert not watch.reached(0)


def test_the_first_call_watches_for_sigterm_and_python_exits_with_code_0() -> None:
    program = """
import os, signal
from torch_ckpt.multihost import reached_preemption_sync_point as reached
assert not reached(0)
os.kill(os.getpid(), signal.SIGTERM)
assert reached(1)
print("saved")
"""
    done = run_script(program)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
    assert "preemption notice (SIGTERM on rank 0): all ranks stop at step 1" in done.stderr


def test_a_group_is_watched_once(watch: PreemptionWatch) -> None:
    with pytest.raises(ValueError, match="step -1 is negative"):
        watch.reached(-1)
    with pytest.raises(ValueError, match="already being watched"):
        multihost.watch_for_preemption()
    watch.close()
    with multihost.watch_for_preemption((), poll_seconds=POLL) as other:
        assert not other.reached(0)
    with pytest.raises(RuntimeError, match="the watch was closed"):
        watch.reached(1)


def test_signals_can_be_watched_only_from_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(multihost.reached_preemption_sync_point, 0)
        assert "main thread" in str(refused.exception(PATIENCE))


def test_a_watch_ends_with_its_group(default_group: None, called: list[int]) -> None:
    watch = multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL)
    group = weakref.ref(RankGroup.of(None, no_dist=False))
    dist.destroy_process_group()
    gc.collect()
    watch._thread.join(PATIENCE)
    assert group() is None
    # The previous handler is restored, also after the next group has been watched.
    os.kill(os.getpid(), signal.SIGUSR1)
    assert called == [signal.SIGUSR1]
    with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as other:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert other.reached(0)
    assert called == [signal.SIGUSR1] * 2


def test_a_group_is_deleted_after_the_thread_that_watches_it_has_ended() -> None:
    asking, answered = threading.Event(), threading.Event()

    class Slow:
        """Store that is in use when the group is deleted."""

        distributed, rank = True, 0

        def keys(self, below: str) -> Slow:
            return self

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            asking.set()
            assert answered.wait(PATIENCE)
            return expected.encode()

    watch = PreemptionWatch(cast(RankGroup, Slow()), (), None, POLL, PATIENCE)
    assert asking.wait(PATIENCE)
    with in_thread(watch._group_was_destroyed):
        assert not answered.wait(POLL)
        answered.set()
    assert not watch._thread.is_alive()


def ranks_that_watch(size: int, timeout: float) -> list[PreemptionWatch]:
    """Makes threads as ranks, without signals, which are per process."""
    store = dist.HashStore()
    return [
        PreemptionWatch(RankGroup(store, rank, size, "test"), (), None, POLL, timeout)
        for rank in range(size)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_with_different_step_numbers_stop_at_the_same_step(seed: int) -> None:
    draw = random.Random(seed)
    size = 4
    told_at = {draw.randrange(size): draw.randrange(200) for _notice in range(draw.choice([1, 2]))}
    watches = ranks_that_watch(size, PATIENCE)

    def train(rank: int) -> int:
        for step in range(sys.maxsize):
            if watches[rank].reached(step):
                return step
            if step == told_at.get(rank):
                watches[rank]._wake.put(f"notice on rank {rank}")
        raise AssertionError

    try:
        with ThreadPoolExecutor(size) as pool:
            stopped = list(pool.map(train, range(size), timeout=PATIENCE))
    finally:
        for watch in watches:
            watch.close()
    assert stopped == stopped[:1] * size, f"seed {seed}"
    assert stopped[0] > min(told_at.values()), f"seed {seed}"
    assert len({watch.reason for watch in watches}) == 1, f"seed {seed}"


def test_a_call_for_a_posted_step_does_not_wait() -> None:
    first, second = ranks_that_watch(2, PATIENCE)
    try:
        assert not first.reached(5)
        # Blocked before it posts: the agreement waits for it.
        second._changed.acquire()
        first._wake.put("notice")
        with first._changed:
            assert first._changed.wait_for(lambda: first._posted == 5, PATIENCE)
        assert not first.reached(5)
        second._changed.release()
        assert first.reached(6)
    finally:
        first.close()
        second.close()


def test_without_a_notice_no_step_reads_the_store() -> None:
    called: list[str] = []

    class Asked:
        """Store that records the names of all calls."""

        def __getattr__(self, name: str) -> Any:
            called.append(name)
            raise RuntimeError("the store cannot be reached")

    group = RankGroup(cast(Any, Asked()), 0, 2, "test")
    watch = PreemptionWatch(group, (), None, PATIENCE, PATIENCE)
    try:
        assert not any(watch.reached(step) for step in range(1000))
        assert called == []
    finally:
        watch.close()
