"""Times contenders. All of them run in every round, in an order that changes between rounds.

The speed of a shared disk changes by factors within minutes. So contenders are compared by the
ratio of their times within a round, and the median over the rounds counts.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .contenders import Kind

T = TypeVar("T")


def _nothing() -> None:
    """Does nothing: for contenders without a preparation or a check."""


@dataclass(frozen=True)
class Contender:
    """A function to time, with untimed functions before and after it.

    `prepare` runs before `settle`, `run` is timed, and `check` raises if the run did not do its
    work. `target` is the directory that a save writes.
    """

    name: str
    label: str
    kind: Kind
    run: Callable[[], object]
    prepare: Callable[[], None] = _nothing
    check: Callable[[], None] = _nothing
    target: Path | None = None


@dataclass(frozen=True)
class Sample:
    """One timed run. CPU seconds are user and system time of all threads of this process.

    Write-back by kernel threads is not included, which favours buffered writers.
    """

    contender: str
    round: int
    position: int
    wall_s: float
    cpu_s: float
    bytes: int


@dataclass(frozen=True)
class ReadSample(Sample):
    """One timed load: `bytes` is the size of the loaded tensors, `read_bytes` the bytes read.

    For several ranks, bytes and CPU seconds are sums, and `wall_s` is the slowest rank's.
    """

    read_bytes: int


@dataclass(frozen=True)
class CallSample(Sample):
    """Calls of one contender in one round. Seconds are for one call.

    `wall_s` is the mean of `calls` calls in steps that are not saved, because a few of them query
    the store; it is the median of all other calls. For several ranks it is the slowest rank's.
    """

    calls: int


def bytes_read() -> int:
    """Returns the bytes that read system calls have returned to this process so far.

    `rchar` of /proc/self/io counts reads from the page cache and direct reads, but not the pages
    that a memory mapping faults in.
    """
    first, _, _ = Path("/proc/self/io").read_text().partition("\n")
    return int(first.removeprefix("rchar:"))


def order_of_round(count: int, round_index: int, rounds: int) -> list[int]:
    """Returns the indices of the contenders in the order of this round.

    Rounds start with different contenders if there are enough. Every second round is reversed:
    with rotation only, each contender would always follow the same one.
    """
    first = round_index * count // rounds
    step = -1 if round_index % 2 else 1
    return [(first + step * position) % count for position in range(count)]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def settle() -> None:
    """Collects garbage and writes dirty pages, so that they do not disturb the next timing."""
    gc.collect()
    os.sync()


def time_once(
    run: Callable[[], object], ready: Callable[[], object] = _nothing
) -> tuple[float, float]:
    """Settles, then times one call; returns (wall seconds, CPU seconds).

    `ready` is called just before the clock starts, for example as a barrier of ranks.
    """
    settle()
    ready()
    cpu_before = _cpu_seconds()
    wall_before = time.perf_counter()
    run()
    wall = time.perf_counter() - wall_before
    return wall, _cpu_seconds() - cpu_before


def alternate(contenders: Sequence[T], rounds: int) -> Iterator[tuple[int, int, T]]:
    """Yields (round, position in the round, contender) in the order of timing."""
    for round_index in range(rounds):
        order = order_of_round(len(contenders), round_index, rounds)
        for position, index in enumerate(order):
            yield round_index, position, contenders[index]


def measure_alternately(
    contenders: Sequence[Contender],
    rounds: int,
    bytes_moved: int,
    on_sample: Callable[[Sample], None],
    *,
    count_reads: bool = False,
    ready: Callable[[], object] = _nothing,
) -> list[Sample]:
    """Times every contender once per round. With `count_reads` the samples are ReadSamples.

    time_once describes `ready`.
    """
    samples: list[Sample] = []
    for round_index, position, contender in alternate(contenders, rounds):
        contender.prepare()
        read_before = bytes_read()
        wall, cpu = time_once(contender.run, ready)
        read = bytes_read() - read_before
        contender.check()
        sample = Sample(contender.name, round_index, position, wall, cpu, bytes_moved)
        if count_reads:
            sample = ReadSample(**vars(sample), read_bytes=read)
        samples.append(sample)
        on_sample(sample)
    return samples
