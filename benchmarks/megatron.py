"""Times saves as Megatron makes them: a plan, a request to a queue, and a poll at every step.

Fresh processes, one for each rank, make all saves of a contender in a round. The first save starts
workers and makes memory; later saves reuse them. Two more saves are not timed: during one of them
a thread watches the memory, and after the call of the other the state is changed, to check
that the snapshot was saved.
"""

from __future__ import annotations

import importlib
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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
from .background import MAX_SAVES_PER_SAMPLE, Steps, since, step_ratios, timed
from .contenders import SAVERS, Kind
from .groups import Run
from .measure import Sample, alternate, settle
from .memory import trim
from .peers import Peer
from .results import ContenderInfo, readable_size
from .states import State
from .training import Training, one_thread

#: Number of files that a rank writes.
_THREAD_COUNT = 2
# One chunk of the engine for each file, whose last chunk may be partly unused.
_SPARE_BYTES = 4 << 20
# About one rank's share of a model, and its small tensors.
_MAX_BYTES = 500_000_000
_PART_OF_SMALL_TENSORS = 1 / 4
_WARM_UP_STEPS = 10
_DIGITS = 7  # a tenth of a microsecond


@dataclass(frozen=True)
class _QueueSaver:
    """One way to save through a queue.

    Attributes:
        package: the modules of Megatron's API are in it.
        queue: name of the module of the queue.
        copies: the caller clones the tensors and saves the clones.
        warms_up: before its first save the caller warms up the queue and waits for the end.
    """

    label: str
    kind: Kind
    package: str
    queue: str
    peer: Peer | None = None
    copies: bool = False
    warms_up: bool = False

    def find(self, module: str, name: str) -> Any:
        """Imports a class or function of Megatron's API."""
        within = "" if self.peer is None else f".{self.queue if module == 'queue' else module}"
        return getattr(importlib.import_module(self.package + within), name)


_NVRX = ("nvidia_resiliency_ext.checkpointing.async_ckpt", "core", peers.NVRX)
_MCORE = ("megatron.core.dist_checkpointing.strategies", "async_utils", peers.MEGATRON_CORE)
_SAVERS = {
    "ours": _QueueSaver("torch_ckpt.megatron", "ours", "torch_ckpt.megatron", ""),
    "ours_warm": _QueueSaver(
        "torch_ckpt.megatron, warmed up", "ours", "torch_ckpt.megatron", "", warms_up=True
    ),
    "nvrx": _QueueSaver(peers.NVRX.title, "peer", *_NVRX),
    "nvrx_copies": _QueueSaver(f"{peers.NVRX.title}, of copies", "peer", *_NVRX, copies=True),
    "mcore": _QueueSaver(peers.MEGATRON_CORE.title, "peer", *_MCORE),
}


@dataclass(frozen=True)
class _Work:
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


@dataclass(frozen=True)
class QueueSave:
    """One save of one rank, in seconds.

    `call_s` is the time from the start of the call until the queue has accepted the request,
    including the clone of the state, if any. `durable_s` is the time from the start of the call
    until the finalizing poll has returned. `polls` are the polls that found the save unfinished.
    Steps are pairs of start and end since the start of the call.
    """

    rank: int
    call_s: float
    durable_s: float
    cpu_s: float
    polls: list[float]
    idle_steps: Steps
    steps: Steps


class _RankSaves:
    """Makes one rank's saves by one contender, one at a time."""

    def __init__(self, saver: _QueueSaver, work: _Work, directory: Path) -> None:
        self._saver = saver
        self._work = work
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self.state = work.state(self._rank, self._world)
        self._target = directory / "checkpoint"
        self._writer = saver.find("filesystem_async", "FileSystemWriterAsync")
        self._plan = saver.find("state_dict_saver", "save_state_dict_async_plan")
        self._finalize = saver.find("state_dict_saver", "save_state_dict_async_finalize")
        self._request = saver.find("queue", "AsyncRequest")
        self._training = Training()
        for _ in range(_WARM_UP_STEPS):
            self._training.step()
        self.queue = saver.find("queue", "AsyncCallsQueue")(persistent=True)

    def warm_up(self) -> None:
        """Reserves the memory for snapshots and waits for it, if the saver warms up."""
        if self._saver.warms_up:
            size = states.payload_bytes(self.state) + _THREAD_COUNT * _SPARE_BYTES
            self.queue.warmup_persistent_caller(self._rank, reserve_bytes=size)
            torch_ckpt.reserve_pool(size)

    def _prepare(self) -> None:
        dist.barrier()
        if self._rank == 0:
            shutil.rmtree(self._target, ignore_errors=True)
        settle()
        dist.barrier()

    def _check(self) -> None:
        files = list(self._target.glob("*.distcp"))
        if not (self._target / ".metadata").exists() or len(files) != _THREAD_COUNT * self._world:
            found = sorted(file.name for file in self._target.iterdir())
            raise WrongSaveError(f"{self._saver.label} left {found}")

    def save(self, after_call: Callable[[], object] = lambda: None) -> QueueSave:
        """Times one save after the idle steps. Calls `after_call` before the next step."""
        self._prepare()
        idle = [timed(self._training.step) for _ in range(self._work.idle_steps)]
        cpu_before = processes.cpu_seconds(os.getpid())
        called = time.perf_counter()
        state = _clone(self.state) if self._saver.copies else self.state
        writer = self._writer(self._target, thread_count=_THREAD_COUNT)
        planned = self._plan(state, writer, None, 0, planner=_Planner())
        # megatron-core returns a tuple with the result, nvidia-resiliency-ext the result.
        result = planned[0] if isinstance(planned[0], tuple) else planned
        del state
        save, preload, arguments = writer.get_save_function_and_args()
        finalize = [partial(self._finalize, *result)]
        self.queue.schedule_async_request(
            self._request(save, arguments, finalize, preload_fn=preload)
        )
        returned = time.perf_counter()
        after_call()
        trained = 0.0
        steps: list[tuple[float, float]] = []
        polls: list[float] = []
        while True:
            trained -= time.thread_time()
            steps.append(timed(self._training.step))
            trained += time.thread_time()
            poll_start = time.perf_counter()
            done = self.queue.maybe_finalize_async_calls()
            durable = time.perf_counter()
            if done:
                break
            polls.append(round(durable - poll_start, _DIGITS))
        # CPU time has ticks of 10 ms, so the difference may be negative.
        cpu = max(0.0, processes.cpu_seconds(os.getpid()) - cpu_before - trained)
        dist.barrier()
        self._check()
        return QueueSave(
            rank=self._rank,
            call_s=round(returned - called, _DIGITS),
            durable_s=round(durable - called, _DIGITS),
            cpu_s=round(cpu, _DIGITS),
            polls=polls,
            idle_steps=since(called, idle),
            steps=since(called, steps),
        )

    def saves(self) -> list[QueueSave]:
        """Makes all timed saves. Every rank makes the same number."""
        saves = [self.save()]
        seen = 0
        while len(saves) <= self._work.later_saves or (
            seen < self._work.least_steps and len(saves) <= MAX_SAVES_PER_SAMPLE
        ):
            saves.append(self.save())
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


def _memory_bytes() -> int:
    trim()
    return processes.memory_bytes(os.getpid())


def measure_on_rank(name: str, work: dict[str, int], directory: str) -> dict[str, Any]:
    """Makes all saves of a contender in this process, which is one rank."""
    saver, path = _SAVERS[name], Path(directory) / "queue"
    if saver.peer is not None:
        sys.path.insert(0, str(saver.peer.path))
        no_cuda.pretend()
    if work["small"]:
        # The default strategy needs a file descriptor for each tensor on both sides.
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo")
    with one_thread():
        # torch's imports and caches of a first save must not count for a contender.
        warm_up = path / f"warm-up-{dist.get_rank()}"
        SAVERS["stock_1"].save(states.small_tensors_state(2), warm_up)
        rank_saves = _RankSaves(saver, _Work(**work), path)
        before = _memory_bytes()
        rank_saves.warm_up()
        saves = rank_saves.saves()
        with processes.watch() as peak:
            rank_saves.save()
        kept = rank_saves.keeps_snapshot()
        rank_saves.queue.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
    dist.destroy_process_group()
    return {
        "memory_bytes": peak.bytes - before,
        "processes": peak.processes - 1,
        "kept": kept,
        "saves": [asdict(save) for save in saves],
    }


def summarize(name: str, measured: Sequence[dict[str, Any]], round_index: int) -> Sample:
    """Makes one sample of the output of all ranks. Seconds are the slowest rank's.

    `first_call_s` describes the first save of the processes; other numbers are of later saves.
    `stall_s` is the time for which training stops: the call, the polls and the finalization.
    `cpu_s` and `memory_bytes` (growth since before the first save) are of all ranks and of the
    processes that they started; `processes` is the number of the started ones. `kept` is True if a
    change of the state after the call did not reach the checkpoint.
    """
    by_rank = [[QueueSave(**save) for save in rank["saves"]] for rank in measured]
    later = [saves[1:] for saves in by_rank]

    def slowest(what: Callable[[QueueSave], float]) -> float:
        times = [[what(save) for save in saves] for saves in later]
        return float(statistics.median(map(max, zip(*times, strict=True))))

    def stalled(save: QueueSave) -> float:
        return save.durable_s - sum(end - start for start, end in save.steps)

    saves = [save for of_rank in later for save in of_rank]
    polls = [poll for save in saves for poll in save.polls]
    idle = [step for save in saves for step in save.idle_steps]
    return {
        "contender": name,
        "round": round_index,
        "wall_s": slowest(lambda save: save.durable_s),
        "cpu_s": sum(save.cpu_s for save in saves) / len(later[0]),
        "first_call_s": max(saves[0].call_s for saves in by_rank),
        "call_s": slowest(lambda save: save.call_s),
        "poll_s": statistics.median(polls) if polls else None,
        "stall_s": slowest(stalled),
        **step_ratios(idle, [step for save in saves for step in save.steps]),
        "memory_bytes": sum(rank["memory_bytes"] for rank in measured),
        "processes": sum(rank["processes"] for rank in measured),
        "kept": all(rank["kept"] for rank in measured),
        "saves": [asdict(save) for of_rank in by_rank for save in of_rank],
    }


def save_through_queues(run: Run) -> None:
    """Times saves in Megatron's flow, with this package and with Megatron's own packages."""
    effort = run.effort
    size = min(effort.state_bytes, _MAX_BYTES)
    small = max(1, int(effort.small_tensors * _PART_OF_SMALL_TENSORS))
    usable = _usable_savers(run, size)
    few = [name for name in ("ours", "nvrx", "mcore") if name in usable]
    what, small_what = readable_size(size), f"{small:,} tensors of 1 KiB"
    counts = effort.later_saves, effort.idle_steps, effort.least_steps
    for name, title, names, work, world in (
        ("megatron", what, usable, _Work(size, effort.tensors, 0, *counts), 1),
        ("megatron_small", small_what, few, _Work(size, effort.tensors, small, *counts), 1),
        ("megatron_ranks", f"{what} by 2 ranks", few, _Work(size, effort.tensors, 0, *counts), 2),
    ):
        title = f"Save {title} through Megatron's queue"
        run.begin(title)
        samples: list[Sample] = []
        with run.scratch(name) as scratch:
            for round_index, contender in alternate(names, effort.rounds):
                is_peer = _SAVERS[contender].peer is not None
                measured = fresh_process.run_ranks(
                    measure_on_rank,
                    *(contender, asdict(work), scratch),
                    world=world,
                    variables={fresh_process.PRETENDS: "1"} if is_peer else None,
                )
                samples.append(summarize(contender, measured, round_index))
                run.show(_SAVERS[contender].label, samples[-1])
        infos = [ContenderInfo(n, _SAVERS[n].label, _SAVERS[n].kind) for n in names]
        run.add(name, title, size, infos, samples)


def _usable_savers(run: Run, size: int) -> list[str]:
    """Returns the savers that can save `size` bytes here. Records why other savers cannot."""
    missing: set[Peer] = set()
    # torch passes CPU tensors to workers through /dev/shm. If that is full, the process is killed.
    free = shutil.disk_usage("/dev/shm").free
    for peer in (peers.NVRX, peers.MEGATRON_CORE):
        try:
            if free < 1.1 * size:
                raise peers.PeerUnavailableError(f"/dev/shm has only {readable_size(free)} free")
            peer.install()
        except peers.PeerUnavailableError as error:
            missing.add(peer)
            run.skip(peer.title, str(error))
    return [name for name, saver in _SAVERS.items() if saver.peer not in missing]
