"""Measures the time that a result takes from one process to another, in milliseconds.

    python -m benchmarks.result_latency --rounds 200

A forked child sends time stamps, each after the waiting receiver has received the previous one.
`queue` is the queue of our writers, `manager` the queue of a multiprocessing manager, which
Megatron-core and nvidia-resiliency-ext use. `save` is the time from the end of a save of small
files in the parent's engine until a forked child's wait for the results returns. The parent's
Python is busy until the save ends. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_ckpt import _C, _core, megatron
from torch_ckpt.megatron.results_queue import ResultsQueue
from torch_ckpt.options import Background

from . import machine

_THREADS = 1


def _in_fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child


def _milliseconds_since(then: int) -> float:
    return (time.monotonic_ns() - then) / 1e6


def measure_queue(queue: Any, rounds: int) -> list[float]:
    """Times from a forked child's `put` to the return of `get`."""
    reading, writing = os.pipe()

    def send() -> None:
        for _ in range(rounds):
            os.read(reading, 1)
            time.sleep(0.002)  # until the receiver waits
            queue.put(time.monotonic_ns())

    child = _in_fork(send)
    found = []
    for _ in range(rounds):
        os.write(writing, b"!")
        found.append(_milliseconds_since(queue.get(timeout=60)))
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    return found


def measure_saves(rounds: int) -> list[float]:
    """Times from the end of the engine's save to the return of a forked child's wait for it."""
    directory = tempfile.mkdtemp(prefix="torch_ckpt-latency-")
    opened = _core.Directory(directory)
    found = []
    try:
        for number in range(rounds):
            channel, back = _core.ProcessChannel(), ResultsQueue()

            def wait(channel: Any = channel, back: Any = back) -> None:
                channel.wait_for_files(60.0)
                back.put(time.monotonic_ns())

            child = _in_fork(wait)
            begun = time.monotonic_ns()
            save = _start(opened, f"__{number}_", channel)
            while save.progress()[4] < 2:
                pass  # Python is busy and has the GIL
            save.run()
            ended = begun + round(save.timing()[1] * 1e9)
            found.append((back.get(timeout=60) - ended) / 1e6)
            os.waitpid(child, 0)
    finally:
        shutil.rmtree(directory)
    return found


def _start(directory: _core.Directory, prefix: str, channel: _core.ProcessChannel) -> _C.Save:
    sources = _C.SaveSources()
    for number in range(20):
        sources.add(f"t{number}", torch.zeros(256))
    save = _C.Save()
    save.start(
        directory,
        prefix,
        sources,
        buckets=2,
        max_host_bytes=0,
        direct_io="auto",
        sync=True,
        background=Background(threads=_THREADS),
        children=channel,
    )
    return save


def summary(found: list[float]) -> dict[str, float]:
    """Returns the median, the 99th percentile and the maximum."""
    ordered = sorted(found)
    return {
        "median": round(statistics.median(ordered), 4),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 4),
        "most": round(ordered[-1], 4),
    }


def main() -> None:
    """Measures everything and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    measured = {
        "queue": summary(measure_queue(megatron.get_write_results_queue(), rounds)),
        "save": summary(measure_saves(rounds)),
    }
    with multiprocessing.get_context("spawn").Manager() as manager:
        measured["manager"] = summary(measure_queue(manager.Queue(), rounds))
    described = dataclasses.asdict(machine.describe(Path.cwd()))
    print(json.dumps({"rounds": rounds, "milliseconds": measured, "machine": described}))


if __name__ == "__main__":
    main()
