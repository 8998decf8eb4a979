"""Measures what a background save costs training, and divides the cost by its cause.

    python -m benchmarks.training_cost --out FILE

Each round runs training steps on one thread: without a save, while another process writes the same
number of bytes to the disk, and during background saves with several options. For each of these:

1. The lost time: the time of the call, plus the time by which the steps until the save was durable
   took longer than the same number of median steps without a save, measured just before.
2. The part of it for which the training thread was ready to run but another thread had its core.
3. The number of times that the thread slept in a step: it waited for the GIL or another lock.
4. The 99th percentile of the steps, divided by this percentile without a save.

The remaining lost time is slower execution: the caches, the memory and, in a virtual machine, the
host's work for the disk. The raw write by another process shows this part, as it shares nothing
with the training process but the machine. Prints medians over the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch_ckpt
from torch_ckpt import Background, WriteOptions

from . import limits, machine, states
from .measure import order_of_round, settle
from .run import parse_size
from .training import Training, one_thread

_IDLE_SECONDS = 1.0

#: Starts a save or a write; returns functions that return True once it is staged, and durable.
Start = Callable[[], tuple[Callable[[], bool], Callable[[], bool]]]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the figures; returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("2GB"))
    parser.add_argument("--small-tensors", type=int, default=20_000, help="of 1 KiB")
    parser.add_argument("--idle-steps", type=int, default=100, help="before each save")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    path = options.dir / "training_cost"
    options.dir.mkdir(parents=True, exist_ok=True)
    samples: dict[str, list[dict[str, float]]] = {}
    with one_thread(), _Writer(path, options.size) as writer:
        starts = _starts(options.size, options.small_tensors, path, writer)
        names = list(starts)
        training = Training()
        # The first round allocates the memory for copies, and is not counted.
        for number in range(options.rounds + 1):
            for index in order_of_round(len(names), number, options.rounds + 1):
                shutil.rmtree(path, ignore_errors=True)
                sample = _measure(starts[names[index]], training.step, options.idle_steps)
                if number > 0:
                    samples.setdefault(names[index], []).append(sample)
    shutil.rmtree(path, ignore_errors=True)
    medians = {
        name: {field: statistics.median(one[field] for one in of_name) for field in of_name[0]}
        for name, of_name in samples.items()
    }
    for name in names:
        print(f"{name:44}" + "".join(f" {f} {v:.4g}" for f, v in medians[name].items()))
    found = {
        "bytes": options.size,
        "small_tensors": options.small_tensors,
        "rounds": options.rounds,
        "medians": medians,
        "samples": samples,
        "machine": dataclasses.asdict(machine.describe(options.dir)),
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


class _Writer:
    """Another process that writes `size` bytes with direct I/O each time it is asked."""

    def __init__(self, path: Path, size: int) -> None:
        self._requests, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_write_on_request, args=(theirs, path, size), daemon=True
        )

    def __enter__(self) -> _Writer:
        self._process.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.terminate()
        self._process.join()

    def start(self) -> tuple[Callable[[], bool], Callable[[], bool]]:
        self._requests.send(None)

        def is_durable() -> bool:
            return self._requests.poll() and self._requests.recv() is None

        return lambda: True, is_durable


def _write_on_request(requests: Connection, path: Path, size: int) -> None:
    raw = limits.RawWriter()
    while True:
        requests.recv()
        raw.write(path, size, limits.WriteShape(4, 2, direct=limits.direct_io_works(path.parent)))
        requests.send(None)


def _starts(size: int, small_tensors: int, path: Path, writer: _Writer) -> dict[str, Start]:
    state = states.training_state(size, tensor_count=120)
    small = states.small_tensors_state(small_tensors)

    def nothing() -> tuple[Callable[[], bool], Callable[[], bool]]:
        end = time.perf_counter() + _IDLE_SECONDS
        return lambda: True, lambda: time.perf_counter() > end

    def save(of: states.State, staging: str, rate: int = 0) -> Start:
        options = WriteOptions(background=Background(max_bytes_per_second=rate))

        def start() -> tuple[Callable[[], bool], Callable[[], bool]]:
            handle = torch_ckpt.async_save(of, path, staging=staging, options=options)

            def is_durable() -> bool:
                return handle.done() and handle.result() is not None

            return handle.staged.done, is_durable

        return start

    def capped(rate: int) -> Start:
        return save(state, "overlapped", rate)

    return {
        "no save": nothing,
        "raw direct write by another process": writer.start,
        "blocking": save(state, "blocking"),
        "overlapped": save(state, "overlapped"),
        "overlapped, max_bytes_per_second=1e9": capped(1_000_000_000),
        "overlapped, max_bytes_per_second=5e8": capped(500_000_000),
        f"blocking, {small_tensors:,} tensors of 1 KiB": save(small, "blocking"),
        f"overlapped, {small_tensors:,} tensors of 1 KiB": save(small, "overlapped"),
    }


def _measure(start: Start, step: Callable[[], None], idle_steps: int) -> dict[str, float]:
    settle()
    idle: list[float] = []
    _run_steps(step, lambda: len(idle) == idle_steps, idle)
    median = statistics.median(idle)
    began = time.perf_counter()
    is_staged, is_durable = start()
    call = time.perf_counter() - began
    while_staging: list[float] = []
    while_writing: list[float] = []
    waited, sleeps = _run_steps(step, is_staged, while_staging)
    staged = time.perf_counter() - began
    more_waited, more_sleeps = _run_steps(step, is_durable, while_writing)
    steps = while_staging + while_writing
    return {
        "call_ms": 1e3 * call,
        "slower_while_staging_ms": 1e3 * sum(taken - median for taken in while_staging),
        "slower_while_writing_ms": 1e3 * sum(taken - median for taken in while_writing),
        "lost_ms": 1e3 * (call + sum(taken - median for taken in steps)),
        "waited_for_core_ms": waited + more_waited,
        "sleeps": sleeps + more_sleeps,
        "staged_ms": 1e3 * staged,
        "durable_ms": 1e3 * (time.perf_counter() - began),
        "steps": len(steps),
        "step_ms": 1e3 * median,
        "p99_ratio": _percentile_99(steps) / _percentile_99(idle) if steps else 1.0,
    }


def _run_steps(
    step: Callable[[], None], ended: Callable[[], bool], taken: list[float]
) -> tuple[float, int]:
    """Runs steps until `ended` returns True, and appends their times in seconds to `taken`.

    Returns the milliseconds for which this thread waited for a core, and how often it slept.
    """
    waited, sleeps = _scheduling()
    while not ended():
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    waited_after, sleeps_after = _scheduling()
    return waited_after - waited, sleeps_after - sleeps


def _scheduling() -> tuple[float, int]:
    task = Path(f"/proc/self/task/{threading.get_native_id()}")
    waited_ns = int((task / "schedstat").read_text().split()[1])
    lines = (task / "status").read_text().splitlines()
    sleeps = next(line for line in lines if line.startswith("voluntary_ctxt_switches"))
    return waited_ns / 1e6, int(sleeps.split()[1])


def _percentile_99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


if __name__ == "__main__":
    main()
