"""torch_ckpt.multihost on one rank, with and without a process group, and its parts alone."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.support import DTYPES, random_tensor
from torch_ckpt import multihost
from torch_ckpt.coordination import Meeting
from torch_ckpt.multihost import PreemptionWatch, RanksDisagree, calls, layout, trees
from torch_ckpt.text import ranks_text

#: For what nothing should be waiting.
PATIENCE = 60.0

#: How often watches look.
POLL = 0.02

Pair = namedtuple("Pair", ["one", "two"])


@pytest.fixture
def default_group() -> Iterator[None]:
    """Of one rank, which hosts its store."""
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def watch() -> Iterator[PreemptionWatch]:
    with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as watch:
        yield watch


def tree() -> dict[str, Any]:
    return {
        "t": torch.arange(6.0).view(2, 3),
        "n": [numpy.arange(3), numpy.float32(2.5), 7, None],
        "p": Pair(torch.tensor(True), "text"),
    }


# --- one process without torch.distributed -------------------------------------------------------


def test_a_process_alone_broadcasts_to_itself() -> None:
    before = tree()
    after = multihost.broadcast_one_to_all(before)
    assert torch.equal(after["t"], before["t"])
    assert after["t"].data_ptr() != before["t"].data_ptr()
    assert after["n"][0].tolist() == [0, 1, 2]
    assert after["n"][1:] == [numpy.float32(2.5), 7, None]
    assert after["p"] == Pair(torch.tensor(True), "text")
    with pytest.raises(RanksDisagree, match="exactly one rank, and it is on none"):
        multihost.broadcast_one_to_all(before, is_source=False)


def test_a_process_alone_gathers_from_itself() -> None:
    stacked, tiled = (multihost.process_allgather(tree(), tiled) for tiled in (False, True))
    assert stacked["t"].shape == (1, 2, 3)
    assert torch.equal(tiled["t"], tree()["t"])
    assert [part.tolist() for part in stacked["n"][:2]] == [[[0, 1, 2]], [2.5]]
    assert [part.tolist() for part in tiled["n"][:2]] == [[0, 1, 2], [2.5]]
    assert stacked["n"][2:] == tiled["n"][2:] == [[7], [None]]
    assert stacked["p"] == tiled["p"] == Pair(torch.tensor([True]), ["text"])


def test_a_process_alone_agrees_with_itself() -> None:
    multihost.sync_global_devices("alone")
    multihost.assert_equal(tree(), "alone")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_of_any_dtype_are_sent_and_compared(dtype: torch.dtype) -> None:
    number = random_tensor((), dtype)
    multihost.assert_equal(number)
    for found in (multihost.broadcast_one_to_all(number), multihost.process_allgather(number)[0]):
        assert (found.dtype, found.shape) == (dtype, ())
        assert torch.equal(trees.as_bytes(found), trees.as_bytes(number))


@pytest.mark.parametrize(
    "array",
    [
        numpy.empty((0, 3)),
        numpy.array(["ab", "c"]),
        numpy.array([1, 2], ">i4"),
        numpy.zeros(2, [("a", "i4"), ("b", "f8")]),
        numpy.arange(4.0).reshape(2, 2)[::-1].T,
        numpy.frombuffer(b"read-only", numpy.uint8),
    ],
    ids=["empty", "texts", "big-endian", "fields", "view", "read-only"],
)
def test_arrays_of_any_kind_are_sent_and_compared(array: Any) -> None:
    multihost.assert_equal(array)
    tiled = multihost.process_allgather(array, tiled=True)
    for found in (multihost.broadcast_one_to_all(array), tiled):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable


def test_a_barrier_waits_for_the_work_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append("yes"))
    multihost.sync_global_devices("alone")
    assert waited == ["yes"]


# --- names and words -----------------------------------------------------------------------------


def test_leaves_are_named_by_their_way_from_the_root() -> None:
    taken = trees.Tree({"a": [1, (2, OrderedDict(c=3))], "d": Pair(4, []), 5: None})
    assert taken.names == ["a.0", "a.1.0", "a.1.1.c", "d.one", "5"]
    assert taken.leaves == [1, 2, 3, 4, None]
    assert taken.containers == {
        "": "dict",
        "a": "list",
        "a.1": "tuple",
        "a.1.1": "OrderedDict",
        "d": "Pair",
        "d.two": "list",
    }
    assert taken.with_leaves("vwxyz") == {
        "a": ["v", ("w", OrderedDict(c="x"))],
        "d": Pair("y", []),
        5: "z",
    }


def test_names_that_could_be_two_leaves_are_written_as_python_does() -> None:
    assert trees.Tree({"a.b": 1, "a": {"b": 2}}).names == ["['a.b']", "['a'].b"]
    assert trees.Tree({1: 1, "1": 2}).names == ["[1]", "['1']"]
    assert trees.Tree(3).names == [""]


def test_ranks_are_written_in_runs() -> None:
    texts = [ranks_text(ranks) for ranks in ([3], [0, 1], [7, 0, 1, 2], [1, 3, 5])]
    assert texts == ["rank 3", "ranks 0-1", "ranks 0-2, 7", "ranks 1, 3, 5"]


def test_the_bytes_of_a_view_are_those_of_its_elements() -> None:
    for dtype in (torch.float32, torch.complex128, torch.bfloat16, torch.bool, torch.float8_e5m2):
        whole = random_tensor((4, 6), dtype)
        rows = [trees.as_bytes(column) for column in whole.t().unbind()]
        assert torch.equal(trees.as_bytes(whole.t()), torch.cat(rows))
        assert trees.as_bytes(whole).data_ptr() == whole.data_ptr()
    conjugated = torch.tensor([1 + 2j]).conj()
    assert torch.equal(trees.as_bytes(conjugated), trees.as_bytes(torch.tensor([1 - 2j])))
    assert trees.as_bytes(torch.empty(0, 3)).shape == (0,)


def test_what_is_no_plain_tensor_is_sent_as_an_object() -> None:
    sparse = torch.eye(3).to_sparse()
    assert trees.kind(sparse) == trees.kind(torch.empty(2, device="meta")) == "an object"
    assert torch.equal(multihost.broadcast_one_to_all(sparse).to_dense(), torch.eye(3))
    [gathered] = multihost.process_allgather({"s": sparse})["s"]
    assert torch.equal(gathered.to_dense(), torch.eye(3))
    objects = numpy.array([{}, "x"], dtype=object)
    assert multihost.broadcast_one_to_all(objects).tolist() == [{}, "x"]


# --- a process group of one ----------------------------------------------------------------------


@pytest.mark.usefixtures("default_group")
def test_a_lost_process_group_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    monkeypatch.setattr(dist, "broadcast", fail)
    with pytest.raises(ConnectionError, match=r"broadcast_one_to_all\(\): rank 0 lost the process"):
        multihost.broadcast_one_to_all(torch.ones(1))


@pytest.mark.usefixtures("default_group")
def test_calls_leave_nothing_in_the_store() -> None:
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    for _turn in range(3):
        multihost.sync_global_devices("x")
        multihost.process_allgather(tree())
        multihost.assert_equal(tree())
        multihost.broadcast_one_to_all(tree())
    # What gloo itself leaves, it leaves at its first collective.
    multihost.broadcast_one_to_all(tree())
    after = store.num_keys()
    multihost.broadcast_one_to_all(tree())
    assert store.num_keys() == after
    assert after - before < 10


@pytest.mark.usefixtures("default_group")
def test_a_store_that_fails_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(Meeting, "connection", lambda self: Lost())
    with pytest.raises(ConnectionError, match=r"sync_global_devices\('x'\): rank 0 lost the proc"):
        multihost.sync_global_devices("x", timeout=1)


@pytest.mark.usefixtures("default_group")
def test_wrong_placements_are_told_by_leaf() -> None:
    mesh = init_device_mesh("cpu", (1,))
    local = {"a": torch.ones(2), "b": {"c": torch.ones(3, 3)}}
    wrong: list[tuple[Any, str]] = [
        ([Shard(0), Shard(0)], "a has 2 placements for a mesh of 1"),
        ([Shard(1)], "a has 1 dimensions and cannot be sharded"),
        ({"a": [Shard(0)]}, "the tree and its placements do not have the same keys: b"),
        ({"a": [Shard(0)], "b": "x"}, "b has 'x' in the place of placements"),
        ({"a": [Shard(0)], "b": {"c": []}}, r"b.c has \[\] in the place of placements"),
    ]
    for placements, text in wrong:
        with pytest.raises(ValueError, match=text):
            multihost.local_to_global(local, mesh, placements)


@pytest.mark.usefixtures("default_group")
def test_what_is_global_already_stays_as_it_is() -> None:
    mesh = init_device_mesh("cpu", (1,))
    made = multihost.local_to_global({"a": torch.ones(2)}, mesh, [Shard(0)])
    again = multihost.local_to_global({**made, "b": torch.ones(2)}, mesh, [Replicate()])
    assert again["a"] is made["a"]
    assert again["b"].placements == (Replicate(),)


@pytest.mark.usefixtures("default_group")
def test_what_is_local_already_stays_as_it_is() -> None:
    mesh = init_device_mesh("cpu", (1,))
    made = multihost.local_to_global({"a": torch.ones(2)}, mesh, [Shard(0)])
    local = {"b": torch.ones(2), "c": numpy.ones(2), "d": 1}
    back = multihost.global_to_local({**made, **local}, mesh, [Replicate()])
    assert type(back["a"]) is torch.Tensor
    assert all(back[name] is leaf for name, leaf in local.items())


@pytest.mark.usefixtures("default_group")
def test_a_tensor_of_another_mesh_is_not_made_local() -> None:
    mesh = init_device_mesh("cpu", (1,))
    made = multihost.local_to_global({"a": torch.ones(2)}, mesh, [Shard(0)])
    assert isinstance(made["a"], DTensor)
    other = init_device_mesh("cpu", (1, 1))
    with pytest.raises(ValueError, match=r"a is on .*, not on"):
        multihost.global_to_local(made, other, [Shard(0), Shard(0)])


@pytest.mark.usefixtures("default_group")
def test_a_local_tensor_may_be_a_part_of_a_sum() -> None:
    mesh = init_device_mesh("cpu", (1,))
    made = multihost.local_to_global(torch.ones(2), mesh, [Partial()])
    assert made.placements == (Partial(),)


def test_shards_are_cut_as_torch_cuts_them() -> None:
    for length in range(9):
        for size in range(1, 5):
            parts = [part.shape[0] for part in torch.empty(length).chunk(size) if length]
            cut = [layout._chunk((length,), [Shard(0)], (size,), (at,))[0] for at in range(size)]
            assert cut == parts + [0] * (size - len(parts))
    mesh = (2, 3)
    places = [(row, column) for row in range(2) for column in range(3)]
    for by in ([Shard(0), Shard(0)], [Shard(1), Replicate()], [Replicate(), Shard(0)]):
        shapes = [layout._chunk((7, 5), by, mesh, place) for place in places]
        assert layout._summed(shapes, by, places) == (7, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_go_by_way_of_the_device_where_nccl_is_all_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[str] = []
    broadcast = dist.broadcast

    def note(buffer: torch.Tensor, **options: Any) -> Any:
        sent.append(buffer.device.type)
        return broadcast(buffer, **options)

    monkeypatch.setattr(dist, "broadcast", note)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        state = {"cpu": torch.arange(3), "gpu": torch.arange(4.0, device="cuda"), "n": 7}
        multihost.assert_equal(state)
        for found in (
            multihost.broadcast_one_to_all(state),
            multihost.process_allgather(state, tiled=True),
        ):
            assert (found["cpu"].device.type, found["gpu"].device.type) == ("cpu", "cuda")
            assert found["cpu"].tolist() == [0, 1, 2]
            assert found["gpu"].tolist() == [0, 1, 2, 3]
        assert set(sent) == {"cuda"}
    finally:
        dist.destroy_process_group()


# --- preemption ----------------------------------------------------------------------------------


def test_a_signal_to_a_process_alone_ends_its_step(watch: PreemptionWatch) -> None:
    assert not any(multihost.reached_preemption_sync_point(step) for step in range(6))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert multihost.reached_preemption_sync_point(6)
    assert multihost.reached_preemption_sync_point(6)
    assert not multihost.reached_preemption_sync_point(7)
    assert watch.reason == "SIGUSR1 on rank 0"


def test_a_signal_before_the_first_step_ends_the_first_step(watch: PreemptionWatch) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watch.reached(1000)


def test_steps_may_be_called_for_now_and_then(watch: PreemptionWatch) -> None:
    assert not watch.reached(10)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert watch.reached(20)


def test_each_signal_is_a_notice_of_its_own(watch: PreemptionWatch) -> None:
    for step in range(0, 100, 2):
        assert not watch.reached(step)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert watch.reached(step + 1)


def test_a_file_is_one_notice_until_it_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "stop"

    def first_true(step: int) -> int:
        return next(at for at in range(step, sys.maxsize) if watch.reached(at))

    with multihost.watch_for_preemption((), file, poll_seconds=POLL) as watch:
        assert not watch.reached(0)
        file.touch()
        step = first_true(1)
        assert watch.reason == f"{file} on rank 0"
        looked = threading.Event()
        exists = os.path.exists
        turns = iter(range(3))

        def look(path: str) -> bool:
            if next(turns, None) is None:
                looked.set()
            return exists(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os.path, "exists", look)
            assert looked.wait(PATIENCE)
        assert not watch.reached(step + 1)
        file.unlink()
        with pytest.MonkeyPatch.context() as patch:
            looked.clear()
            turns = iter(range(3))
            patch.setattr(os.path, "exists", look)
            assert looked.wait(PATIENCE)
        file.touch()
        assert first_true(step + 2) > step + 1


def test_handlers_are_called_too_and_come_back() -> None:
    called: list[int] = []

    def handler(number: int, frame: Any) -> None:
        called.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as watch:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert watch.reached(0)
        assert called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_control_c_can_be_a_notice() -> None:
    with multihost.watch_for_preemption([signal.SIGINT], poll_seconds=POLL) as watch:
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.reached(0)


def test_a_signal_without_a_name_is_a_notice_by_its_number() -> None:
    number = signal.SIGRTMIN + 3
    with multihost.watch_for_preemption([number], poll_seconds=POLL) as watch:
        os.kill(os.getpid(), number)
        assert watch.reached(0)
        assert watch.reason == f"signal {number} on rank 0"


def test_where_one_signal_cannot_be_watched_none_is() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(OSError, match="Invalid argument"):
        multihost.watch_for_preemption([signal.SIGUSR1, signal.SIGKILL])
    assert signal.getsignal(signal.SIGUSR1) is before
    with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as watch:
        assert not watch.reached(0)


def test_forked_children_are_ended_by_the_signal() -> None:
    with multihost.watch_for_preemption(poll_seconds=POLL) as watch:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b"1")
            signal.pause()
            os._exit(1)
        os.read(read, 1)
        os.kill(child, signal.SIGTERM)
        _pid, status = os.waitpid(child, 0)
        os.close(read)
        os.close(write)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not watch.reached(0)


def test_the_first_call_watches_for_sigterm_and_python_ends_well() -> None:
    program = """
import os, signal
from torch_ckpt.multihost import reached_preemption_sync_point as reached
assert not reached(0)
os.kill(os.getpid(), signal.SIGTERM)
assert reached(1)
print("saved")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr
    assert "preemption notice (SIGTERM on rank 0): all ranks stop at step 1" in done.stderr


def test_a_group_is_watched_once(watch: PreemptionWatch) -> None:
    with pytest.raises(ValueError, match="watched already"):
        multihost.watch_for_preemption()
    watch.close()
    with multihost.watch_for_preemption((), poll_seconds=POLL) as other:
        assert not other.reached(0)
    with pytest.raises(RuntimeError, match="has ended"):
        watch.reached(1)


def test_a_negative_step_is_refused(watch: PreemptionWatch) -> None:
    with pytest.raises(ValueError, match="step -1 is negative"):
        watch.reached(-1)


def test_signals_are_watched_from_the_main_thread_only() -> None:
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(multihost.reached_preemption_sync_point, 0)
        assert "main thread" in str(refused.exception(PATIENCE))


def test_a_watch_ends_with_its_group(default_group: None) -> None:
    called = []
    before = signal.signal(signal.SIGUSR1, lambda *_: called.append("before"))
    try:
        watch = multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL)
        meeting = weakref.ref(Meeting.of(None, no_dist=False))
        dist.destroy_process_group()
        gc.collect()
        watch._thread.join(PATIENCE)
        assert meeting() is None
        # The signal means what it did; and so it does when the next group has been watched.
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called == ["before"]
        with multihost.watch_for_preemption([signal.SIGUSR1], poll_seconds=POLL) as other:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert other.reached(0)
        assert called == ["before"] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_group_goes_when_the_thread_that_watches_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking, told = threading.Event(), threading.Event()

    class Slow:
        """The store, which is being asked when the group goes."""

        distributed, rank = True, 0

        def keys(self, below: str) -> Slow:
            return self

        def check(self, keys: list[str]) -> bool:
            asking.set()
            assert told.wait(PATIENCE)
            return False

    watch = PreemptionWatch(cast(Meeting, Slow()), (), None, POLL, PATIENCE, lambda _w: None)
    assert asking.wait(PATIENCE)
    join = watch._thread.join

    def answered(timeout: float | None = None) -> None:
        told.set()
        join(PATIENCE)

    monkeypatch.setattr(watch._thread, "join", answered)
    watch._group_has_gone()
    assert not watch._thread.is_alive()


def ranks_that_watch(size: int, timeout: float) -> list[PreemptionWatch]:
    """Threads as ranks; without signals, of which a process has but one of each."""
    store = dist.HashStore()
    return [
        PreemptionWatch(
            Meeting(store, rank, size, "test"), (), None, POLL, timeout, lambda _w: None
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_are_many_steps_apart_stop_at_the_same_one(seed: int) -> None:
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


def test_a_call_for_a_step_that_was_posted_does_not_wait() -> None:
    first, second = ranks_that_watch(2, PATIENCE)
    try:
        assert not first.reached(5)
        # Held back before it posts: the agreement waits for it.
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


def test_without_a_notice_no_step_asks_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Callable[..., Any]] = []
    store = dist.HashStore()
    meeting = Meeting(store, 0, 2, "test")
    watch = PreemptionWatch(meeting, (), None, PATIENCE, PATIENCE, lambda _w: None)
    try:
        monkeypatch.setattr(Meeting, "connection", lambda self: asked.append(self))
        assert not any(watch.reached(step) for step in range(1000))
        assert asked == []
    finally:
        watch.close()


def test_failures_are_told_as_the_caller_knows_them() -> None:
    def explained(causes: dict[int, BaseException], rank: int) -> BaseException:
        from torch.distributed.checkpoint.api import CheckpointException

        error = CheckpointException("step", {r: (cause, None) for r, cause in causes.items()})
        return calls.explained(error, "f()", rank, 5.0)

    mine = KeyError("x")
    assert explained({1: mine}, 1) is mine
    other = explained({1: mine}, 0)
    assert type(other) is RuntimeError
    assert str(other) == "f() failed on rank 1: KeyError: 'x'"
    late = explained({1: TimeoutError(), 2: TimeoutError()}, 1)
    assert type(late) is TimeoutError
    assert str(late).startswith("f(): ranks 1-2 did not come within 5 s")
    assert type(explained({0: ConnectionError()}, 0)) is ConnectionError
