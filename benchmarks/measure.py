"""Timing. All contenders run in every round, in an order that changes from round to round.

A shared disk's speed drifts by factors within minutes, so contenders are compared by the ratio of
their times within a round, and rounds by the median.
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
    """For contenders that need no preparation or no check."""


@dataclass(frozen=True)
class Contender:
    """What is timed, and what happens around it untimed.

    `prepare` runs before disk and memory are settled, `run` is timed, `check` raises unless the run
    did its work. `target` is the directory that a save writes.
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

    The kernel's own write-back threads are not in them, which favours buffered writers.
    """

    contender: str
    round: int
    position: int
    wall_s: float
    cpu_s: float
    bytes: int


@dataclass(frozen=True)
class ReadSample(Sample):
    """One timed load that also counts: `bytes` are those wanted, `read_bytes` those really read.

    Of several ranks all bytes and CPU seconds add up, and the slowest one's wall time counts.
    """

    read_bytes: int


@dataclass(frozen=True)
class CallSample(Sample):
    """Calls of one contender in one round: seconds are those of one call.

    `wall_s` is the mean of `calls` calls in steps that are not saved, a few of which ask the store,
    and the median of all others. Of several ranks the slowest one's counts.
    """

    calls: int


def bytes_read() -> int:
    """Bytes that this process has got from read system calls so far.

    That is `rchar` of /proc/self/io, which counts reads of the page cache and direct reads alike,
    but not what a memory mapping faults in.
    """
    first, _, _ = Path("/proc/self/io").read_text().partition("\n")
    return int(first.removeprefix("rchar:"))


def order_of_round(count: int, round_index: int, rounds: int) -> list[int]:
    """Indices of the contenders in the order of this round.

    Every round starts with another contender, as far as there are enough. Every second round goes
    backwards, since rotation alone would leave each contender behind the same predecessor.
    """
    first = round_index * count // rounds
    step = -1 if round_index % 2 else 1
    return [(first + step * position) % count for position in range(count)]


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def settle() -> None:
    """Gets garbage and dirty pages out of the way of what is timed next."""
    gc.collect()
    os.sync()


def time_once(
    run: Callable[[], object], ready: Callable[[], object] = _nothing
) -> tuple[float, float]:
    """(wall seconds, CPU seconds) of one call, after dirty pages and garbage are out of the way.

    `ready` is called last before the clock starts, for ranks to wait for each other.
    """
    settle()
    ready()
    cpu_before = _cpu_seconds()
    wall_before = time.perf_counter()
    run()
    wall = time.perf_counter() - wall_before
    return wall, _cpu_seconds() - cpu_before


def alternate(contenders: Sequence[T], rounds: int) -> Iterator[tuple[int, int, T]]:
    """(round, position in the round, contender) in the order in which they are to be timed."""
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
    """Times every contender once per round; gives ReadSamples if reads are to be counted.

    See time_once for `ready`.
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
