"""Times saves as Megatron makes them: a plan, a request to a queue, and a poll at every step.

Fresh processes, one for each rank, make all saves of a contender in a round. The first save starts
workers and makes memory; later saves reuse them. Two more saves are not timed: during one of them
another process watches the memory, and after the call of the other the state is changed, to check
that the snapshot was saved.

queue_process is the process; it prints one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import torch_ckpt

from . import fresh_process, no_cuda, peers, processes, states
from .background import MAX_SAVES_PER_SAMPLE
from .contenders import SAVERS, Kind
from .measure import Sample, settle
from .peers import Peer
from .states import State
from .training import Training, one_thread

#: Number of files that a rank writes.
THREAD_COUNT = 2
# One chunk of the engine for each file, whose last chunk may be partly unused.
_SPARE_BYTES = 4 << 20
#: torch's strategy to share small tensors with a worker. The default needs a file descriptor for
#: each tensor on both sides.
SHARING_OF_SMALL = "file_system"
_WARM_UP_STEPS = 10
_DIGITS, _FINE_DIGITS = 5, 7  # ten microseconds; a tenth of a microsecond for short times


@dataclass(frozen=True)
class Api:
    """The classes and functions of a package that Megatron's checkpointing uses."""

    writer: Callable[..., Any]
    request: Callable[..., Any]
    queue: Any
    plan: Callable[..., Any]
    finalize: Callable[..., None]


def _ours() -> Api:
    module = importlib.import_module("torch_ckpt.megatron")
    return Api(
        writer=module.FileSystemWriterAsync,
        request=module.AsyncRequest,
        queue=module.AsyncCallsQueue,
        plan=module.save_state_dict_async_plan,
        finalize=module.save_state_dict_async_finalize,
    )


def _peer_api(package: str, queue_module: str) -> Api:
    """Imports the API of a peer. Both peers use the same module names, except for the queue."""
    queue = importlib.import_module(f"{package}.{queue_module}")
    writer = importlib.import_module(f"{package}.filesystem_async")
    saver = importlib.import_module(f"{package}.state_dict_saver")
    return Api(
        writer=writer.FileSystemWriterAsync,
        request=queue.AsyncRequest,
        queue=queue.AsyncCallsQueue,
        plan=saver.save_state_dict_async_plan,
        finalize=saver.save_state_dict_async_finalize,
    )


@dataclass(frozen=True)
class QueueSaver:
    """One way to save through a queue.

    Args:
        copies: the caller clones the tensors and saves the clones.
        warms_up: before its first save the caller warms up the queue and waits for the end.
    """

    label: str
    kind: Kind
    api: Callable[[], Api]
    peer: Peer | None = None
    copies: bool = False
    warms_up: bool = False


_nvrx = partial(_peer_api, "nvidia_resiliency_ext.checkpointing.async_ckpt", "core")
_mcore = partial(_peer_api, "megatron.core.dist_checkpointing.strategies", "async_utils")
SAVERS_BY_QUEUE: dict[str, QueueSaver] = {
    "ours": QueueSaver("torch_ckpt.megatron", "ours", _ours),
    "ours_warm": QueueSaver("torch_ckpt.megatron, warmed up", "ours", _ours, warms_up=True),
    "nvrx": QueueSaver(peers.NVRX.title, "peer", _nvrx, peers.NVRX),
    "nvrx_copies": QueueSaver(
        f"{peers.NVRX.title}, of copies", "peer", _nvrx, peers.NVRX, copies=True
    ),
    "mcore": QueueSaver(peers.MEGATRON_CORE.title, "peer", _mcore, peers.MEGATRON_CORE),
}


@dataclass(frozen=True)
class QueueSave:
    """One save of one rank, in seconds.

    `call_s` is the time from the start of the call until the queue has accepted the request,
    including the clone of the state, if any; `plan_s` and `schedule_s` are parts of it.
    `durable_s` is the time from the start of the call until the finalizing poll has returned;
    `finalize_s` is that poll's time in the finalize function. `polls` are the polls that found the
    save unfinished. Steps are pairs of start and end since the start of the call.
    """

    rank: int
    call_s: float
    plan_s: float
    schedule_s: float
    finalize_s: float
    durable_s: float
    cpu_s: float
    polls: list[float]
    idle_steps: list[list[float]]
    steps: list[list[float]]


@dataclass(frozen=True)
class QueueSample(Sample):
    """The saves of one contender in one round. Seconds are the slowest rank's.

    Fields that begin with `first` describe the first save of the processes; other fields are
    medians over later saves. `wall_s` equals `durable_s`. `stall_s` is the time for which training
    stops: the call, the polls and the finalization. The ratios are as in BackgroundSample. `cpu_s`
    and `memory_bytes` (growth since before the first save) are of all ranks and of the processes
    that they started; `processes` is the number of the started ones. `kept` is True if a change of
    the state after the call did not reach the checkpoint.
    """

    first_call_s: float
    first_durable_s: float
    first_cpu_s: float
    call_s: float
    plan_s: float
    schedule_s: float
    finalize_s: float
    poll_s: float | None
    stall_s: float
    durable_s: float
    steps: int
    step_median_ratio: float
    step_mean_ratio: float
    memory_bytes: int
    processes: int
    kept: bool
    saves: list[QueueSave]


@dataclass(frozen=True)
class Work:
    """The state and the number of saves of each process.

    `size` is the training state of all ranks in bytes. If `small` is not 0, so many small tensors
    are saved instead. After its first save a process makes `later_saves` saves, or more until
    `least_steps` training steps ran during them. `idle_steps` are timed before each save.
    """

    size: int
    tensors: int
    small: int
    later_saves: int
    idle_steps: int
    least_steps: int

    def state(self, rank: int, world: int) -> State:
        """Makes this rank's part, with flat names of its own, as in Megatron."""
        if self.small:
            state = states.small_tensors_state(self.small // world, seed=rank)
        else:
            state = states.training_state(self.size // world, self.tensors, seed=rank)
        return {f"rank{rank}.{name}": value for name, value in states.leaves(state)}


class WrongSaveError(RuntimeError):
    """A contender did not write the checkpoint that it was timed for."""


class _Planner(DefaultSavePlanner):
    """torch's planner with Megatron's settings, for all contenders.

    Names are flat, and each rank makes its own plan.
    """

    can_run_decentralized_global_plan = True

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


class _RankSaves:
    """Makes one rank's saves by one contender, one at a time."""

    def __init__(self, saver: QueueSaver, work: Work, directory: Path) -> None:
        self._saver = saver
        self._work = work
        self._api = saver.api()
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.state = work.state(self._rank, self._world)
        self._target = directory / "checkpoint"
        self._training = Training()
        for _ in range(_WARM_UP_STEPS):
            self._training.step()
        self._queue = self._api.queue(persistent=True)

    def warm_up(self) -> None:
        """Reserves the memory for snapshots and waits for it, if the saver warms up."""
        if self._saver.warms_up:
            size = states.payload_bytes(self.state) + THREAD_COUNT * _SPARE_BYTES
            self._api.queue.warmup_persistent_caller(self._rank, reserve_bytes=size)
            torch_ckpt.reserve_pool(size)

    def close(self) -> None:
        """Ends the queue and its workers."""
        self._queue.close()

    def _prepare(self) -> None:
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(self._target, ignore_errors=True)
        settle()
        dist.barrier()

    def _check(self) -> None:
        files = list(self._target.glob("*.distcp"))
        if not (self._target / ".metadata").exists() or len(files) != THREAD_COUNT * self._world:
            found = sorted(file.name for file in self._target.iterdir())
            raise WrongSaveError(f"{self._saver.label} left {found}")

    def _step(self) -> tuple[float, float]:
        start = time.perf_counter()
        self._training.step()
        return start, time.perf_counter()

    def save(
        self, *, idle_steps: int = 0, after_call: Callable[[], object] = lambda: None
    ) -> QueueSave:
        """Times one save after `idle_steps` steps. Calls `after_call` before the next step."""
        self._prepare()
        idle = [self._step() for _ in range(idle_steps)]
        finalized = [0.0, 0.0]
        cpu_before = processes.cpu_seconds(os.getpid())
        called = time.perf_counter()
        state = _clone(self.state) if self._saver.copies else self.state
        began = time.perf_counter()
        writer = self._api.writer(self._target, thread_count=THREAD_COUNT)
        planned = self._api.plan(state, writer, None, 0, planner=_Planner())
        # megatron-core returns a tuple with the result, nvidia-resiliency-ext the result.
        result = planned[0] if isinstance(planned[0], tuple) else planned
        del state

        def finalize() -> None:
            finalized[0] = time.perf_counter()
            self._api.finalize(*result)
            finalized[1] = time.perf_counter()

        save, preload, arguments = writer.get_save_function_and_args()
        plan_end = time.perf_counter()
        request = self._api.request(save, arguments, [finalize], preload_fn=preload)
        self._queue.schedule_async_request(request)
        returned = time.perf_counter()
        after_call()
        trained = 0.0
        steps: list[tuple[float, float]] = []
        polls: list[float] = []
        while True:
            trained -= time.thread_time()
            steps.append(self._step())
            trained += time.thread_time()
            poll_start = time.perf_counter()
            done = self._queue.maybe_finalize_async_calls()
            durable = time.perf_counter()
            if done:
                break
            polls.append(durable - poll_start)
        # CPU time has ticks of 10 ms, so the difference may be negative.
        cpu = max(0.0, processes.cpu_seconds(os.getpid()) - cpu_before - trained)
        dist.barrier()
        self._check()

        def since_call(pairs: Sequence[tuple[float, float]]) -> list[list[float]]:
            return [[round(end - called, _DIGITS) for end in pair] for pair in pairs]

        return QueueSave(
            rank=self._rank,
            call_s=round(returned - called, _DIGITS),
            plan_s=round(plan_end - began, _DIGITS),
            schedule_s=round(returned - plan_end, _FINE_DIGITS),
            finalize_s=round(finalized[1] - finalized[0], _DIGITS),
            durable_s=round(durable - called, _DIGITS),
            cpu_s=round(cpu, _DIGITS),
            polls=[round(poll, _FINE_DIGITS) for poll in polls],
            idle_steps=since_call(idle),
            steps=since_call(steps),
        )

    def saves(self) -> list[QueueSave]:
        """Makes all timed saves. Every rank makes the same number."""
        saves = [self.save(idle_steps=self._work.idle_steps)]
        seen = 0
        while len(saves) <= self._work.later_saves or (
            seen < self._work.least_steps and len(saves) <= MAX_SAVES_PER_SAMPLE
        ):
            saves.append(self.save(idle_steps=self._work.idle_steps))
            # Ranks count different numbers of steps, so rank 0 decides.
            steps = torch.tensor(sum(len(save.steps) for save in saves[1:]))
            dist.broadcast(steps, 0)
            seen = int(steps)
        return saves

    def keeps_snapshot(self) -> bool:
        """True if a change of the tensors after the call does not reach the checkpoint."""
        expected = _clone(self.state)

        def change() -> None:
            for tensor in states.tensors(self.state):
                tensor.add_(1)

        self.save(after_call=change)
        loaded = states.blank_copy(expected)
        try:
            torch_ckpt.load(loaded, self._target)
        except CheckpointException:
            return False  # changed between the checksum and the write
        return states.first_difference(expected, loaded) is None


def _clone(state: State) -> State:
    """Clones the tensors of a flat state."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


@contextmanager
def _group() -> Iterator[None]:
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _measure_memory() -> int:
    gc.collect()
    # Freed memory that malloc keeps would count as used before, and hide as much growth.
    ctypes.CDLL(None).malloc_trim(0)
    return processes.memory_bytes(os.getpid())


def main() -> None:
    """Measures one contender in this process: one rank, and the leader of its process group."""
    try:
        _measure()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # A normal exit would wait for the workers, which do not end after a failure.
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


def _measure() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("saver", choices=SAVERS_BY_QUEUE)
    parser.add_argument("--work", type=json.loads, required=True, help="a Work as JSON")
    parser.add_argument("--dir", type=Path, required=True, help="an existing directory")
    arguments = parser.parse_args()

    saver = SAVERS_BY_QUEUE[arguments.saver]
    if saver.peer is not None:
        sys.path.insert(0, str(saver.peer.path))
        no_cuda.pretend()
    path: Path = arguments.dir / "queue"
    work = Work(**arguments.work)
    if work.small:
        torch.multiprocessing.set_sharing_strategy(  # type: ignore[no-untyped-call]
            SHARING_OF_SMALL
        )
    with _group(), one_thread():
        # torch's imports and caches of a first save must not count for a contender.
        warm_up = path / f"warm-up-{dist.get_rank()}"
        SAVERS["stock_1"].save(states.small_tensors_state(2), warm_up)
        rank_saves = _RankSaves(saver, work, path)
        before = _measure_memory()
        rank_saves.warm_up()
        saves = rank_saves.saves()
        with processes.watcher() as watcher:
            watcher.start()
            rank_saves.save()
            peak = watcher.stop()
        kept = rank_saves.keeps_snapshot()
        rank_saves.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
    measured = {
        "bytes": states.payload_bytes(rank_saves.state),
        "memory_bytes": peak.bytes - before,
        "processes": peak.processes - 1,
        "kept": kept,
        "saves": [asdict(save) for save in saves],
    }
    print("\n" + json.dumps(measured))


def _lengths(steps: Sequence[Sequence[float]]) -> list[float]:
    return [end - start for start, end in steps]


def _median_of_slowest(traces: Sequence[QueueSave], what: Callable[[QueueSave], float]) -> float:
    """Returns the median over the saves of the slowest rank's time."""
    ranks = sorted({trace.rank for trace in traces})
    by_rank = [[what(trace) for trace in traces if trace.rank == rank] for rank in ranks]
    slowest: list[float] = [max(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    return statistics.median(slowest)


def summarize(
    name: str, measured: Sequence[dict[str, Any]], *, round_index: int, position: int
) -> QueueSample:
    """Makes one sample of the output of all ranks."""
    by_rank = [[QueueSave(**save) for save in rank["saves"]] for rank in measured]
    first = [saves[0] for saves in by_rank]
    later = [save for saves in by_rank for save in saves[1:]]
    idle = [length for save in later for length in _lengths(save.idle_steps)]
    beside = [length for save in later for length in _lengths(save.steps)]
    polls = [poll for save in later for poll in save.polls]

    def cpu(saves: Sequence[QueueSave]) -> float:
        return sum(save.cpu_s for save in saves)

    durable = _median_of_slowest(later, lambda save: save.durable_s)
    return QueueSample(
        contender=name,
        round=round_index,
        position=position,
        wall_s=durable,
        cpu_s=cpu(later) / (len(later) / len(measured)),
        bytes=sum(rank["bytes"] for rank in measured),
        first_call_s=_median_of_slowest(first, lambda save: save.call_s),
        first_durable_s=_median_of_slowest(first, lambda save: save.durable_s),
        first_cpu_s=cpu(first),
        call_s=_median_of_slowest(later, lambda save: save.call_s),
        plan_s=_median_of_slowest(later, lambda save: save.plan_s),
        schedule_s=_median_of_slowest(later, lambda save: save.schedule_s),
        finalize_s=_median_of_slowest(later, lambda save: save.finalize_s),
        poll_s=statistics.median(polls) if polls else None,
        stall_s=_median_of_slowest(later, lambda save: save.durable_s - sum(_lengths(save.steps))),
        durable_s=durable,
        steps=len(beside),
        step_median_ratio=statistics.median(beside) / statistics.median(idle),
        step_mean_ratio=statistics.fmean(beside) / statistics.fmean(idle),
        memory_bytes=sum(rank["memory_bytes"] for rank in measured),
        processes=sum(rank["processes"] for rank in measured),
        kept=all(rank["kept"] for rank in measured),
        saves=[save for saves in by_rank for save in saves],
    )


def sample_in_fresh_processes(
    name: str, work: Work, directory: Path, *, world: int, round_index: int, position: int
) -> QueueSample:
    """Samples one contender's saves in one round, on `world` ranks."""
    arguments = [name, "--work", json.dumps(asdict(work)), "--dir", str(directory.resolve())]
    measured = fresh_process.run_ranks("queue_process", arguments, world)
    return summarize(name, measured, round_index=round_index, position=position)
