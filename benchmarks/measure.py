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
from typing import Any, TypeVar

from .contenders import Kind

T = TypeVar("T")

#: What one contender did in one round: its name, the round, and quantities by name. `wall_s` and
#: `cpu_s` (user and system time of all threads, without write-back by the kernel) are in all of
#: them. With several ranks, bytes and CPU seconds are sums, and `wall_s` is the slowest rank's.
Sample = dict[str, Any]


def _nothing() -> None:
    """Does nothing: for contenders without a preparation or a check."""


@dataclass(frozen=True)
class Contender:
    """A function to time, with untimed functions before and after it.

    `prepare` runs before `settle`, `run` is timed, and `check` raises if the run did not do its
    work.
    """

    name: str
    label: str
    kind: Kind
    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    check: Callable[[], None] = _nothing


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


def cpu_seconds() -> float:
    """Returns the user and system seconds of this process."""
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
    cpu_before = cpu_seconds()
    wall_before = time.perf_counter()
    run()
    wall = time.perf_counter() - wall_before
    return wall, cpu_seconds() - cpu_before


def alternate(contenders: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yields (round, contender) in the order of timing."""
    for round_index in range(rounds):
        for index in order_of_round(len(contenders), round_index, rounds):
            yield round_index, contenders[index]


def measure_alternately(
    contenders: Sequence[Contender],
    rounds: int,
    on_sample: Callable[[Sample], object],
    *,
    ready: Callable[[], object] = _nothing,
) -> list[Sample]:
    """Times every contender once per round, and counts the bytes that it reads.

    time_once describes `ready`.
    """
    samples: list[Sample] = []
    for round_index, contender in alternate(contenders, rounds):
        contender.prepare()
        read_before = bytes_read()
        wall, cpu = time_once(contender.run, ready)
        read = bytes_read() - read_before
        contender.check()
        sample = {"contender": contender.name, "round": round_index, "wall_s": wall}
        samples.append(sample | {"cpu_s": cpu, "read_bytes": read})
        on_sample(samples[-1])
    return samples
