"""Times saves as Megatron makes them: a plan, a request to a queue, and a poll at every step.

All of one contender's saves in a round are made by fresh processes, one for each rank: a first
one, for which workers are started and memory is made, and later ones. Two more saves are not
timed: beside one of them memory is watched from outside, and after the call of the other the state
is changed, to see which state was saved.

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
from .background import MOST_SAVES_PER_SAMPLE
from .contenders import SAVERS, Kind
from .measure import Sample, settle
from .peers import Peer
from .states import State
from .training import Training, one_thread

#: Files that a rank writes.
THREAD_COUNT = 2
# A chunk of the engine's for each, of which a part may stay unused.
_SPARE_BYTES = 4 << 20
#: How torch hands small tensors to a worker. By default each takes a file descriptor on both sides.
SHARING_OF_SMALL = "file_system"
_WARM_UP_STEPS = 10
# Ten microseconds; of what takes less, a tenth of one.
_DIGITS, _FINE_DIGITS = 5, 7


@dataclass(frozen=True)
class Api:
    """What Megatron's checkpointing uses of a package."""

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


def _api_of(package: str, queue_module: str) -> Api:
    """Of a package whose modules have the names that they have in both peers."""
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
        copies: the caller copies the tensors first and hands the copies over.
        warms_up: the caller warms the queue up, and waits for that, before its first save.
    """

    label: str
    kind: Kind
    api: Callable[[], Api]
    peer: Peer | None = None
    copies: bool = False
    warms_up: bool = False


_nvrx = partial(_api_of, "nvidia_resiliency_ext.checkpointing.async_ckpt", "core")
_mcore = partial(_api_of, "megatron.core.dist_checkpointing.strategies", "async_utils")
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

    `call_s` is from its start until the queue has taken the request, with a copy of the state where
    one is made; `plan_s` and `schedule_s` are parts of it. `durable_s` is from the start until the
    poll that finalized has returned, `finalize_s` the part of that poll in the finalize function.
    `polls` are the others, which found it unfinished. Steps are pairs of start and end, since the
    start of the call.
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
    """The saves of one contender in one round. Of several ranks the slowest one's seconds count.

    Fields that begin with `first` are of the first save of the processes, the others medians over
    later ones; `wall_s` is `durable_s`. `stall_s` is all that training stands still for: the call,
    the polls and the finalization. The ratios are those of a BackgroundSample. `cpu_s` and
    `memory_bytes` (beyond what there was before the first save) are of all ranks and all processes
    that they have started, `processes` counts the latter. `kept` tells whether a change of the
    state after the call stayed out of the checkpoint.
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
    """What each process saves, and how often.

    `size` is that of the training state in bytes, over all ranks; where there are `small` tensors
    these are saved instead of it. After its first save a process makes `later_saves`, and more
    where fewer than `least_steps` ran beside these; `idle_steps` are timed before each.
    """

    size: int
    tensors: int
    small: int
    later_saves: int
    idle_steps: int
    least_steps: int

    def state(self, rank: int, world: int) -> State:
        """This rank's part, by flat names of its own, as Megatron hands it to the planner."""
        if self.small:
            state = states.small_tensors_state(self.small // world, seed=rank)
        else:
            state = states.training_state(self.size // world, self.tensors, seed=rank)
        return {f"rank{rank}.{name}": value for name, value in states.leaves(state)}


class WrongSaveError(RuntimeError):
    """A contender did not save what it was timed for."""


class _Planner(DefaultSavePlanner):
    """torch's planner with Megatron's settings, the same for all contenders.

    Names are flat, and each rank turns its own plan into what it writes.
    """

    can_run_decentralized_global_plan = True

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


class _Bench:
    """One rank's saves by one contender, one at a time."""

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
        """Makes memory for snapshots, where the saver does; returns when it is there."""
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
        """One save, with steps before it, and `after_call` between the call and the first step."""
        self._prepare()
        idle = [self._step() for _ in range(idle_steps)]
        finalized = [0.0, 0.0]
        cpu_before = processes.cpu_seconds(os.getpid())
        called = time.perf_counter()
        state = _clone(self.state) if self._saver.copies else self.state
        began = time.perf_counter()
        writer = self._api.writer(self._target, thread_count=THREAD_COUNT)
        planned = self._api.plan(state, writer, None, 0, planner=_Planner())
        # megatron-core returns more beside it, and nvidia-resiliency-ext only this.
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
        # Ticks are coarser than the clock of the steps.
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
        """All that are timed. Every rank makes as many."""
        saves = [self.save(idle_steps=self._work.idle_steps)]
        seen = 0
        while len(saves) <= self._work.later_saves or (
            seen < self._work.least_steps and len(saves) <= MOST_SAVES_PER_SAMPLE
        ):
            saves.append(self.save(idle_steps=self._work.idle_steps))
            # Ranks that counted for themselves would not agree.
            steps = torch.tensor(sum(len(save.steps) for save in saves[1:]))
            dist.broadcast(steps, 0)
            seen = int(steps)
        return saves

    def keeps_the_state_of_the_call(self) -> bool:
        """Whether what is done to the tensors after the call stays out of the checkpoint."""
        expected = _clone(self.state)

        def change() -> None:
            for tensor in states.tensors(self.state):
                tensor.add_(1)

        self.save(after_call=change)
        loaded = states.blank_copy(expected)
        try:
            torch_ckpt.load(loaded, self._target)
        except CheckpointException:
            # Changed between the checksum and the write: nobody's state.
            return False
        return states.first_difference(expected, loaded) is None


def _clone(state: State) -> State:
    """A flat state whose tensors are copies."""
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


def _own_memory() -> int:
    gc.collect()
    # Freed memory that malloc keeps would be counted as there before and hide as much growth.
    ctypes.CDLL(None).malloc_trim(0)
    return processes.memory_bytes(os.getpid())


def main() -> None:
    """Measures one contender in this process, which is one rank and leads its process group."""
    try:
        _measure()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # An interpreter that ends would wait for its workers, which after a failure nobody ends.
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
        # What torch imports and caches at its first save is nobody's own.
        warm_up = path / f"warm-up-{dist.get_rank()}"
        SAVERS["stock_1"].save(states.small_tensors_state(2), warm_up)
        bench = _Bench(saver, work, path)
        before = _own_memory()
        bench.warm_up()
        saves = bench.saves()
        with processes.watcher() as watcher:
            watcher.start()
            bench.save()
            peak = watcher.stop()
        kept = bench.keeps_the_state_of_the_call()
        bench.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
    measured = {
        "bytes": states.payload_bytes(bench.state),
        "memory_bytes": peak.bytes - before,
        "processes": peak.processes - 1,
        "kept": kept,
        "saves": [asdict(save) for save in saves],
    }
    print("\n" + json.dumps(measured))


def _lengths(steps: Sequence[Sequence[float]]) -> list[float]:
    return [end - start for start, end in steps]


def _of_saves(traces: Sequence[QueueSave], what: Callable[[QueueSave], float]) -> float:
    """The median over the saves, each of which is as slow as its slowest rank."""
    ranks = sorted({trace.rank for trace in traces})
    by_rank = [[what(trace) for trace in traces if trace.rank == rank] for rank in ranks]
    slowest: list[float] = [max(of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    return statistics.median(slowest)


def sample_of(
    name: str, measured: Sequence[dict[str, Any]], *, round_index: int, position: int
) -> QueueSample:
    """What the processes of all ranks printed, as one sample."""
    by_rank = [[QueueSave(**save) for save in rank["saves"]] for rank in measured]
    first = [saves[0] for saves in by_rank]
    later = [save for saves in by_rank for save in saves[1:]]
    idle = [length for save in later for length in _lengths(save.idle_steps)]
    beside = [length for save in later for length in _lengths(save.steps)]
    polls = [poll for save in later for poll in save.polls]

    def cpu(saves: Sequence[QueueSave]) -> float:
        return sum(save.cpu_s for save in saves)

    durable = _of_saves(later, lambda save: save.durable_s)
    return QueueSample(
        contender=name,
        round=round_index,
        position=position,
        wall_s=durable,
        cpu_s=cpu(later) / (len(later) / len(measured)),
        bytes=sum(rank["bytes"] for rank in measured),
        first_call_s=_of_saves(first, lambda save: save.call_s),
        first_durable_s=_of_saves(first, lambda save: save.durable_s),
        first_cpu_s=cpu(first),
        call_s=_of_saves(later, lambda save: save.call_s),
        plan_s=_of_saves(later, lambda save: save.plan_s),
        schedule_s=_of_saves(later, lambda save: save.schedule_s),
        finalize_s=_of_saves(later, lambda save: save.finalize_s),
        poll_s=statistics.median(polls) if polls else None,
        stall_s=_of_saves(later, lambda save: save.durable_s - sum(_lengths(save.steps))),
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
    """One contender's saves of one round, by `world` ranks."""
    arguments = [name, "--work", json.dumps(asdict(work)), "--dir", str(directory.resolve())]
    measured = fresh_process.run_ranks("queue_process", arguments, world)
    return sample_of(name, measured, round_index=round_index, position=position)
