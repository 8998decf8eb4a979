"""Tools of the benchmark: states, raw reads and writes, memory, training steps."""

from __future__ import annotations

import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    background,
    contenders,
    limits,
    measure,
    megatron,
    memory,
    no_cuda,
    pagecache,
    peers,
    planning,
    processes,
    ranks,
    sizes,
    states,
)
from benchmarks.contenders import Running
from benchmarks.training import Training, one_thread
from tests.forked import in_fresh_process

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 MiB", 3 << 19), ("100", 100), ("64kb", 64_000)]
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert sizes.parse_size(text) == size


def test_every_round_runs_all_contenders_and_starts_with_another() -> None:
    orders = [measure.order_of_round(7, index, 5) for index in range(5)]
    assert all(sorted(order) == list(range(7)) for order in orders)
    assert len({order[0] for order in orders}) == 5


@pytest.mark.parametrize("tensor_count", [30, 120, 126])
def test_the_training_state_has_the_wanted_size_and_tensors(tensor_count: int) -> None:
    state = states.training_state(30_000_000, tensor_count)
    steps = len(state["optimizer"]["state"])
    assert len(states.tensors(state)) == tensor_count + steps
    assert states.payload_bytes(state) == pytest.approx(30_000_000, rel=0.01)


def test_no_number_of_ranks_divides_the_rows_of_the_uneven_state_evenly() -> None:
    state = states.uneven_state(10**6, 9)
    assert states.payload_bytes(state) == pytest.approx(10**6, rel=0.3)
    rows = [tensor.shape[0] for tensor in states.tensors(state)]
    assert all(count % world for count in rows for world in (2, 3, 4, 8))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_shards_of_all_ranks_make_the_state(world: int) -> None:
    state = states.training_state(10**6, 30)
    parts = []
    for rank in range(world):
        with ranks.mesh_without_peers(world, rank) as mesh:
            shards = states.sharded(state, mesh)
            assert states.first_difference(shards, shards) is None
            assert not any(map(torch.count_nonzero, states.tensors(states.blank_copy(shards))))
            parts.append(states.tensors(shards))
    for full, of_ranks in zip(states.tensors(state), zip(*parts, strict=True), strict=True):
        assert torch.equal(full, torch.cat(of_ranks) if full.dim() else of_ranks[0])


def test_bytes_read_are_counted_with_and_without_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(3_000_000))
    before = measure.bytes_read()
    file.read_bytes()
    assert 3_000_000 <= measure.bytes_read() - before < 3_100_000


def test_small_tensors_own_their_storage() -> None:
    tensors = states.tensors(states.small_tensors_state(5))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes == 1024 for tensor in tensors)


def test_a_single_changed_element_is_found() -> None:
    expected, actual = states.training_state(10**6, 30), states.training_state(10**6, 30)
    assert states.first_difference(expected, actual) is None
    actual["optimizer"]["state"]["norm.weight"]["exp_avg"][3] += 1
    assert states.first_difference(expected, actual) == "optimizer.state.norm.weight.exp_avg"


def test_wiping_leaves_no_value_that_would_hide_a_failed_load() -> None:
    state = states.training_state(10**6, 30)
    states.wipe(state)
    assert not any(torch.count_nonzero(tensor) for tensor in states.tensors(state))
    assert state["step"] == 0


@pytest.fixture
def shape(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Shape of raw writes or reads; skips the test if the file system does not support it."""
    if request.param.direct and not limits.direct_io_works(tmp_path):
        pytest.skip("no O_DIRECT on this file system")
    return request.param


def shapes(by_name: Mapping[str, Any]) -> pytest.MarkDecorator:
    names = sorted(by_name)
    return pytest.mark.parametrize("shape", [by_name[n] for n in names], ids=names, indirect=True)


@shapes(limits.WRITE_SHAPES)
def test_raw_writes_write_all_bytes(shape: Any, tmp_path: Path) -> None:
    limits.RawWriter().write(tmp_path / "raw", 9_000_001, shape)
    written = sum(file.stat().st_size for file in (tmp_path / "raw").iterdir())
    assert 9_000_001 <= written < 9_000_001 + shape.files * 4096


@shapes(limits.READ_SHAPES)
def test_raw_reads_read_all_bytes(shape: Any, tmp_path: Path) -> None:
    files = [tmp_path / "long", tmp_path / "short"]
    for file, size in zip(files, (9_000_001, 5), strict=True):
        file.write_bytes(os.urandom(size))
    assert limits.RawReader(shape).read(files) == 9_000_006


def test_the_page_cache_can_be_filled_and_dropped(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(random.Random(0).randbytes(1 << 20))
    pagecache.warm([file])
    assert pagecache.resident_fraction([file]) == 1.0
    try:
        pagecache.evict([file])
    except pagecache.CacheStateError:
        pytest.skip("this file system keeps its pages")
    assert pagecache.resident_fraction([file]) <= 0.01


def test_memory_growth_includes_memory_that_is_freed_again() -> None:
    def save() -> None:
        torch.ones(8 << 20)

    try:
        before, peak = memory.measure_growth(save)
    except memory.PeakResetError:
        pytest.skip("this kernel does not reset the peak")
    assert peak - before >= 30 << 20


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Starts a child that runs commands from its stdin, and answers each."""
    program = "import sys\nfor line in sys.stdin:\n    exec(line)\n    print('done', flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _tell(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    print(line, file=child.stdin, flush=True)
    assert child.stdout.readline() == "done\n"


@pytest.mark.alone
def test_memory_of_a_process_includes_that_of_its_children(child: subprocess.Popen[str]) -> None:
    before = processes.memory_bytes(os.getpid())
    _tell(child, "data = bytearray(b'x' * (32 << 20))")
    assert processes.memory_bytes(os.getpid()) - before >= 32 << 20


@pytest.mark.alone
def test_memory_that_two_processes_share_counts_once(child: subprocess.Popen[str]) -> None:
    size = 32 << 20
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as shared:
            shared[:] = bytes(size)
            before = processes.memory_bytes(os.getpid())
            _tell(
                child,
                f"import mmap; f = open('/proc/{os.getpid()}/fd/{file.fileno()}', 'r+b');"
                f" shared = mmap.mmap(f.fileno(), {size}); sum(shared[::4096])",
            )
            assert processes.memory_bytes(os.getpid()) - before < size // 2


def test_processor_time_of_a_process_includes_that_of_its_children(
    child: subprocess.Popen[str],
) -> None:
    before = processes.cpu_seconds(os.getpid())
    _tell(child, "import time; [None for _ in iter(lambda: time.process_time() < 0.3, False)]")
    assert processes.cpu_seconds(os.getpid()) - before >= 0.2


@pytest.mark.alone
def test_the_watch_includes_memory_and_processes_that_have_ended() -> None:
    with processes.watch() as idle:
        pass
    program = "data = bytearray(b'x' * (32 << 20)); print(); input()"
    with (
        processes.watch() as seen,
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        while seen.processes == idle.processes or seen.bytes - idle.bytes < 32 << 20:
            time.sleep(0.01)
        child.communicate(b"\n")
    assert seen.processes == idle.processes + 1


def test_a_peer_that_cannot_be_installed_gives_the_reason_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "_REPOSITORY", tmp_path)
    monkeypatch.setattr(peers, "_DIRECTORY", tmp_path / "peers")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(peers.PeerUnavailableError, match="pip install --no-deps --target peers/"):
        peers.NVRX.install()
    assert not any((tmp_path / "peers").iterdir())


def _device_without_a_gpu() -> str:
    no_cuda.pretend()
    torch.cuda.synchronize()
    torch.cuda.set_device(0 % torch.cuda.device_count())
    return str(torch.zeros(1, device=torch.cuda.current_device()).device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_code_for_the_current_device_runs_on_the_cpu() -> None:
    assert in_fresh_process(_device_without_a_gpu) == "cpu"


def _queue_save(rank: int, call: float) -> dict[str, Any]:
    """Makes the record of a save whose call takes these seconds, and each of two steps two."""
    steps = [[call, call + 2], [call + 2, call + 4]]
    times = {"call_s": call, "durable_s": call + 5, "cpu_s": 0.25, "polls": [0.1]}
    return {"rank": rank, "steps": steps, "idle_steps": [[-2.0, -1.0]], **times}


def _summary_of(kept: Sequence[bool], *calls: Sequence[float]) -> dict[str, Any]:
    """Summarizes saves through queues, with the seconds of the calls of each rank."""
    measured = [
        {
            **{"memory_bytes": 5, "processes": 2, "kept": kept[rank]},
            "saves": [_queue_save(rank, call) for call in of_rank],
        }
        for rank, of_rank in enumerate(calls)
    ]
    return megatron.summarize("fake", measured, 0)


def test_a_save_through_queues_is_as_slow_as_its_slowest_rank() -> None:
    sample = _summary_of([True] * 2, (9.0, 1.0, 4.0, 3.0), (8.0, 2.0, 2.0, 2.0))
    assert (sample["first_call_s"], sample["call_s"]) == (9.0, 3.0)
    assert (sample["memory_bytes"], sample["processes"]) == (10, 4)
    # The slower rank's, for one save; everything except the steps.
    assert (sample["cpu_s"], sample["stall_s"], sample["step_median_ratio"]) == (0.5, 4.0, 2.0)


def test_a_torn_save_on_one_rank_makes_the_sample_torn() -> None:
    assert not _summary_of([True, False], (1.0, 1.0), (1.0, 1.0))["kept"]


@pytest.mark.parametrize("threads", [1, 2, 3, None])
def test_memcpy_copies_every_byte_with_any_number_of_threads(threads: int | None) -> None:
    source = states.training_state(10**6, 30)
    target = states.blank_copy(source)
    if threads is None:
        limits.copy_memory_by_torch(source, target)
    else:
        limits.copy_memory(source, target, threads)
    assert all(map(torch.equal, states.tensors(source), states.tensors(target)))


def test_the_sharded_plan_loads_every_tensor_and_number(tmp_path: Path) -> None:
    state = states.training_state(10**6, 30)
    contenders.SAVERS["stock_1"].save(state, tmp_path / "checkpoint")
    loaded = states.blank_copy(state)
    contenders.LOADERS["stock_threads"].load(loaded, tmp_path / "checkpoint")
    assert states.first_difference(state, loaded) is None


def test_the_training_step_learns_on_one_thread() -> None:
    training = Training()
    parameters = list(training._model.parameters())
    before = [parameter.clone() for parameter in parameters]
    with one_thread():
        assert torch.get_num_threads() == 1
        training.step()
    assert not all(map(torch.equal, before, parameters))


class _FakeSave:
    """Save that becomes durable during a certain training step after its call."""

    def __init__(self, durable_after_steps: int) -> None:
        self._durable_after_steps = durable_after_steps
        self._left = 0

    def run(self) -> Running:
        self._left = self._durable_after_steps
        self._committed: Future[None] = Future()
        return Running(self._committed)

    def step(self) -> None:
        time.sleep(1e-3)
        self._left -= 1
        if self._left == 0:
            self._committed.set_result(None)

    def traces(self) -> list[background.Trace]:
        contender = measure.Contender("fake", "fake", "ours", self.run)
        return background.trace_saves(contender, self.step, 4, 5)


def test_a_long_save_is_one_sample() -> None:
    (trace,) = _FakeSave(7).traces()
    assert (len(trace.steps), len(trace.idle_steps)) == (7, 4)


def test_short_saves_are_repeated_until_enough_steps_were_measured() -> None:
    traces = _FakeSave(2).traces()
    assert [len(trace.steps) for trace in traces] == [2, 2, 2]
    sample = background.summarize("fake", traces, 0)
    assert sample["steps"] == 6
    assert sample["step_median_ratio"] is not None


def test_a_save_that_is_durable_when_the_call_returns_is_not_repeated() -> None:
    runs: list[None] = []
    contender = measure.Contender("sync", "sync", "ours", lambda: runs.append(None))
    (trace,) = background.trace_saves(contender, lambda: None, 1, 5)
    assert len(runs) == 1
    assert trace.stall_s == trace.staged_s == trace.durable_s
    assert background.summarize("sync", [trace], 0)["step_median_ratio"] is None


def test_a_failed_save_ends_the_measurement() -> None:
    failed: Future[None] = Future()
    failed.set_exception(OSError("disk full"))
    contender = measure.Contender("failing", "failing", "ours", lambda: Running(failed))
    with pytest.raises(OSError, match="disk full"):
        background.trace_saves(contender, lambda: None, 1, 1)


def test_cpu_seconds_exclude_the_steps() -> None:
    committed: Future[None] = Future()
    wanted, burnt = 0.1, threading.Event()

    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    def save() -> None:
        burn(wanted)
        burnt.set()

    def step() -> None:
        burn(2 * wanted)
        burnt.wait()
        if not committed.done():
            committed.set_result(None)

    def start() -> Running:
        threading.Thread(target=save).start()
        return Running(committed)

    contender = measure.Contender("burner", "burner", "ours", start)
    (trace,) = background.trace_saves(contender, step, 0, 1)
    assert trace.cpu_s == pytest.approx(wanted, rel=0.5)


def test_step_ratios_compare_steps_during_the_save_with_steps_before() -> None:
    trace = background.Trace(
        stall_s=0.5,
        staged_s=0.5,
        durable_s=9.0,
        cpu_s=1.0,
        idle_steps=[[-3.0, -2.0], [-2.0, -1.0], [-1.0, 0.0]],
        steps=[[1.0, 2.0], [2.0, 4.0], [4.0, 10.0]],
    )
    sample = background.summarize("name", [trace], 0)
    assert (sample["step_median_ratio"], sample["step_mean_ratio"]) == (2.0, 3.0)
    assert (sample["stall_s"], sample["wall_s"]) == (0.5, 9.0)


def test_the_plan_of_many_ranks_is_simulated(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    sizes = ["--ranks", "3", "--tensors", "2", "--rounds", "1"]
    found = planning.main([*sizes, "--out", str(out)])
    assert found == json.loads(out.read_text())
    assert {"first: planned", "unchanged: metadata"} <= found["seconds"].keys()
    assert found["bytes"]["metadata"] > 0
