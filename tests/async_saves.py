"""Saves through the Megatron interface: plan, run in several kinds of caller, finalize."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tests.fault_hooks import at_fault_points
from tests.gates import LIMIT, Gate
from tests.metadata import read_metadata  # noqa: F401
from tests.support import StateDict, assert_checkpoint, data_files, random_tensor  # noqa: F401
from torch_ckpt.megatron import (
    AsyncRequest,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

Caller = Callable[[FileSystemWriterAsync], None]

FORK = multiprocessing.get_context("fork")


class DecentralizedPlanner(DefaultSavePlanner):
    """Planner like Megatron-core's: each rank makes its part of the global plan."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


def state_of(seed: int = 0) -> StateDict:
    """Makes tensors, views, a parameter, containers and objects; equal for equal seeds."""
    base = random_tensor((40, 10), torch.float32, 10 * seed + 1).nan_to_num()
    return {
        "model": {
            "weight": torch.nn.Parameter(base.clone()),
            "bias": random_tensor((33,), torch.bfloat16, 10 * seed + 2),
            "row": base[3],
            "strided": base[:, ::2],
            "transposed": base.t(),
            "expanded": torch.arange(seed, seed + 5).expand(3, 5),
            "scalar": torch.tensor(3.5 + seed),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {
            "exp_avg": random_tensor((300, 100), torch.float32, 10 * seed + 3),
            "exp_avg_sq": random_tensor((300, 100), torch.float32, 10 * seed + 4),
            "step": 12 + seed,
            "betas": (0.9, 0.95),
        },
        "name": f"seed {seed}",
        "nothing": None,
    }


def small_state(seed: int = 0, count: int = 4) -> StateDict:
    """Makes ``count`` tensors of one size, which are written to at most that many files."""
    return {f"t{n}": random_tensor((100, 8), torch.float32, 10 * seed + n) for n in range(count)}


def planned(
    state: StateDict, writer: FileSystemWriterAsync, planner: SavePlanner | None = None
) -> Any:
    """Plans a save and returns the arguments of the finalizing function."""
    return save_state_dict_async_plan(state, writer, planner=planner)[0]


def request_of(finalizing: Any) -> AsyncRequest:
    """Makes the request for an asynchronous queue from a plan, as Megatron does."""
    function, preload, arguments = finalizing[0].get_save_function_and_args()
    finalize = [lambda: save_state_dict_async_finalize(*finalizing)]
    return AsyncRequest(function, arguments, finalize, preload_fn=preload)


@dataclasses.dataclass
class PlannedSave:
    """A planned save, and what its writer returned for the caller's queue.

    Attributes:
        finalizing: arguments of the finalizing function.
    """

    finalizing: Any
    writer: FileSystemWriterAsync
    function: Callable[..., None]
    preload: Callable[[], Any]
    arguments: list[Any]

    def stage(self) -> Any:
        """Runs the preload function. Returns the staged task."""
        (task,) = self.arguments[1] = self.preload()
        return task

    def run(self) -> None:
        """Runs the save function."""
        self.function(*self.arguments)

    def child(self) -> Any:
        """Returns a forked process, not started yet, that runs the save function."""
        return FORK.Process(target=self.function, args=self.arguments)

    def finalize(self) -> None:
        save_state_dict_async_finalize(*self.finalizing)

    def failure(self) -> str:
        """Returns the text of the error that the writer returns instead of results."""
        return str(failure_of(self.writer))


def plan_save(
    state: StateDict, path: str | Path, planner: SavePlanner | None = None, **options: Any
) -> PlannedSave:
    writer = FileSystemWriterAsync(path, **options)
    finalizing = planned(state, writer, planner)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    return PlannedSave(finalizing, writer, function, preload, arguments)


# --- callers -------------------------------------------------------------------------------------


def here(writer: FileSystemWriterAsync) -> None:
    """Runs all functions of a save in this process."""
    _run_all(*writer.get_save_function_and_args())


def in_fork_after_preload(writer: FileSystemWriterAsync) -> None:
    """Runs the preload function in this process and the rest in a child, as Megatron's temporal
    caller."""
    function, preload, arguments = writer.get_save_function_and_args()
    assert preload is not None
    in_child(function, arguments[0], preload(), arguments[2])


def in_fork(writer: FileSystemWriterAsync) -> None:
    in_child(_run_all, *writer.get_save_function_and_args())


class Worker:
    """Sends requests through a queue to a spawned process, as Megatron's persistent caller does."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._requests = context.Queue()
        self._done = context.Queue()
        self._process = context.Process(
            target=_work, args=(self._requests, self._done), daemon=True
        )
        self._process.start()

    def __call__(self, writer: FileSystemWriterAsync) -> None:
        function, preload, arguments = writer.get_save_function_and_args()
        self._requests.put(AsyncRequest(function, arguments, [], preload_fn=preload))
        assert self._done.get(timeout=LIMIT) is None

    def close(self) -> None:
        self._requests.put(None)
        self._process.join(LIMIT)


def _work(requests: Any, done: Any) -> None:
    while (request := requests.get()) is not None:
        try:
            _run_all(request.async_fn, request.preload_fn, list(request.async_fn_args))
            done.put(None)
        except BaseException as error:
            done.put(repr(error))


def _run_all(function: Any, preload: Any, arguments: list[Any]) -> None:
    if function is not None:
        arguments[1] = preload()
        function(*arguments)


def in_child(work: Any, *arguments: Any) -> None:
    """Runs a function in a forked process."""
    child = FORK.Process(target=work, args=arguments)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


CALLERS = {"here": here, "fork after preload": in_fork_after_preload, "fork": in_fork}


@pytest.fixture(params=[*CALLERS, "spawned worker"])
def caller(request: pytest.FixtureRequest) -> Caller:
    found: Caller = CALLERS.get(request.param) or request.getfixturevalue("worker")
    return found


@pytest.fixture
def held_after_staging(gate: Gate) -> Iterator[Gate]:
    """Saves stage and write, but fsync no data file until the gate is opened."""

    def hook(operation: str, path: str) -> None:
        if operation == "fsync" and path.endswith(".distcp"):
            gate()

    with at_fault_points(hook):
        yield gate
        gate.open()


class Priority(NamedTuple):
    """Scheduling of a thread. ``is_idle`` is its I/O class, or None if ``ionice`` is not
    installed."""

    nice: int
    is_idle: bool | None


@contextmanager
def priorities_of_writers(gate: Gate) -> Iterator[list[Priority]]:
    """Yields the priorities of the threads that fsync data files. Writes wait for the gate.

    Until a save is staged, threads of normal priority may write its files.
    """
    priorities: list[Priority] = []

    def hook(operation: str, path: str) -> None:
        if not path.endswith(".distcp"):
            return
        if operation == "pwrite":
            gate()
        elif operation == "fsync":
            thread = threading.get_native_id()
            is_idle = None
            if shutil.which("ionice"):
                command = ["ionice", "-p", str(thread)]
                is_idle = "idle" in subprocess.run(command, capture_output=True, text=True).stdout
            priorities.append(Priority(os.getpriority(os.PRIO_PROCESS, thread), is_idle))

    with at_fault_points(hook):
        yield priorities
        gate.open()


def assert_priorities(priorities: list[Priority], nice: int, is_idle: bool = True) -> None:
    """Checks that the threads have this niceness, or the niceness of the process if that is
    higher."""
    expected = Priority(max(nice, os.getpriority(os.PRIO_PROCESS, 0)), is_idle)
    assert priorities
    for each in priorities:
        assert each._replace(is_idle=is_idle if each.is_idle is None else each.is_idle) == expected


# --- saves ---------------------------------------------------------------------------------------


def save(
    state: StateDict,
    path: str | Path,
    caller: Caller = here,
    planner: SavePlanner | None = None,
    **options: Any,
) -> Metadata:
    """Plans, runs and commits a save. Returns its metadata."""
    finalizing = planned(state, FileSystemWriterAsync(path, **options), planner)
    finish(finalizing, caller)
    assert finalizing[1] is not None
    return finalizing[1]


def save_to(path: str, threads: int) -> None:
    """Saves with temporary files beside ``path``, for children whose system calls fail."""
    tempfile.tempdir = os.path.dirname(path)
    save(small_state(), path, thread_count=threads)


def finish(finalizing: Any, caller: Caller = here) -> None:
    """Runs the functions of a planned save, and commits the save."""
    caller(finalizing[0])
    save_state_dict_async_finalize(*finalizing)


def is_committed(path: Path) -> bool:
    return (path / ".metadata").exists()


def names_in(path: Path) -> list[str]:
    return [file.name for file in data_files(path)]


def failure_of(writer: FileSystemWriterAsync) -> BaseException:
    """Returns the error that ``retrieve_write_results`` returns instead of results."""
    outcome = writer.retrieve_write_results()
    assert isinstance(outcome, tuple), outcome
    assert isinstance(outcome[0], RuntimeError)
    return outcome[0]
