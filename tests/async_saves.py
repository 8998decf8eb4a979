"""Saves in Megatron's shape for tests: planned, run by callers of several kinds, finalized."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tests.support import StateDict, random_tensor
from torch_ckpt.megatron import (
    AsyncRequest,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

#: No wait here is meant to be long, in seconds. What waits so long has failed.
LIMIT = 60.0

Caller = Callable[[FileSystemWriterAsync], None]


class Gate:
    """Stops a thread that calls it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._opened.wait(LIMIT), "nobody has opened the gate"

    def wait(self) -> None:
        """Until somebody stands before it."""
        assert self.reached.wait(LIMIT), "nobody has come to the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def eventually(condition: Callable[[], bool]) -> None:
    """For what other threads do in their own time and tell nobody."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        os.sched_yield()


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Runs ``work`` in a thread beside the block, and raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(LIMIT)
    assert not thread.is_alive(), "it does not end"
    if raised:
        raise raised[0]


class DecentralizedPlanner(DefaultSavePlanner):
    """A planner in the manner of Megatron-core's: ranks make their part of the global plan."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


def state_of(seed: int = 0) -> StateDict:
    """Tensors, views, a parameter, containers, objects; the same at each call."""
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
    """So many tensors of one size, which go to as many files at most."""
    return {f"t{n}": random_tensor((100, 8), torch.float32, 10 * seed + n) for n in range(count)}


def planned(
    state: StateDict, writer: FileSystemWriterAsync, planner: SavePlanner | None = None
) -> Any:
    """What the finalizing function takes."""
    return save_state_dict_async_plan(state, writer, planner=planner)[0]


def request_of(finalizing: Any) -> AsyncRequest:
    """For an asynchronous queue, as Megatron makes it of a plan."""
    function, preload, arguments = finalizing[0].get_save_function_and_args()
    finalize = [lambda: save_state_dict_async_finalize(*finalizing)]
    return AsyncRequest(function, arguments, finalize, preload_fn=preload)


# --- callers -------------------------------------------------------------------------------------


def here(writer: FileSystemWriterAsync) -> None:
    """All in this process, one after the other."""
    _run_all(*writer.get_save_function_and_args())


def in_fork_after_preload(writer: FileSystemWriterAsync) -> None:
    """What Megatron's temporal caller does: the preload function here, the rest in a child."""
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    arguments[1] = preload()
    _in_child("fork", function, *arguments)


def in_fork(writer: FileSystemWriterAsync) -> None:
    _in_child("fork", _run_all, *writer.get_save_function_and_args())


class Worker:
    """What Megatron's persistent caller does: a spawned process gets requests through a queue."""

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


def _in_child(how: str, work: Callable[..., None], *arguments: Any) -> None:
    child = multiprocessing.get_context(how).Process(target=work, args=arguments)
    child.start()
    child.join(LIMIT)
    assert child.exitcode == 0


# --- whole saves ---------------------------------------------------------------------------------


def save(
    state: StateDict,
    path: str | Path,
    caller: Caller = here,
    planner: SavePlanner | None = None,
    **options: Any,
) -> Metadata:
    """Plans, runs and commits a save; its metadata."""
    finalizing = planned(state, FileSystemWriterAsync(path, **options), planner)
    caller(finalizing[0])
    save_state_dict_async_finalize(*finalizing)
    metadata = finalizing[1]
    assert metadata is not None
    return metadata


def save_to(path: str, threads: int) -> None:
    """For children whose system calls fail, and that leave nothing elsewhere; imported by name."""
    tempfile.tempdir = os.path.dirname(path)
    save(small_state(), path, thread_count=threads)


def is_committed(path: Path) -> bool:
    return (path / ".metadata").exists()
