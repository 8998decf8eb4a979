"""Times saves that go on while training does.

Training steps are timed without a save, then the save is called, then steps go on until it is
durable. A sample holds as many such saves, one after another, as it takes to see enough steps.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contenders import Running
from .measure import Contender, Sample, alternate, settle

# With a tiny state a save may be durable within a step, and yet a sample must end.
MOST_SAVES_PER_SAMPLE = 15
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Of a line of /proc/PID/stat, counted from behind the command's name in parentheses.
_USER_TICKS, _SYSTEM_TICKS = 11, 12
# Ten microseconds: finer digits only make the result file longer.
_DIGITS = 5


@dataclass(frozen=True)
class Effort:
    """How much training a sample sees: steps without a save, and the least number beside saves."""

    idle_steps: int
    least_steps: int


@dataclass(frozen=True)
class Trace:
    """One save. Times are seconds since its call; steps are pairs of start and end.

    `last_write_s` is when a data file last changed, to some 4 ms (the clock of file times); None
    for what writes no files. `cpu_s` is of the save alone: this process and its children, less
    what the training steps used. `idle_steps` ended before the call, so their times are negative.
    """

    stall_s: float
    staged_s: float
    last_write_s: float | None
    durable_s: float
    cpu_s: float
    idle_steps: list[list[float]]
    steps: list[list[float]]


@dataclass(frozen=True)
class BackgroundSample(Sample):
    """The saves of one contender in one round: medians over them.

    `stall_s` is the time in the call, for which training stands still; `staged_s` and `durable_s`
    are from the call until the state may change and until the save is durable. `wall_s` is
    `durable_s`. The ratios are of the median and mean step beside a save to those without one just
    before; None where no step ran.
    """

    stall_s: float
    staged_s: float
    durable_s: float
    steps: int
    step_median_ratio: float | None
    step_mean_ratio: float | None
    saves: list[Trace]


def _children_cpu_seconds() -> float:
    """User and system seconds of live child processes; torch's checkpoint process is one."""
    seconds = 0.0
    for child in multiprocessing.active_children():
        line = Path(f"/proc/{child.pid}/stat").read_text()
        fields = line.rpartition(")")[2].split()
        seconds += (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / _TICKS_PER_SECOND
    return seconds


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime + _children_cpu_seconds()


class _Stopwatch:
    """Notes when a future ends, by the thread that ends it."""

    def __init__(self, future: Future[Any]) -> None:
        self.at: float | None = None
        self._future = future
        future.add_done_callback(self._note)

    def _note(self, _future: Future[Any]) -> None:
        self.at = time.perf_counter()

    def read(self) -> float:
        """The time of the end, by time.perf_counter; waits for it."""
        self._future.result()
        # Those who wait are woken before callbacks run.
        while self.at is None:
            time.sleep(1e-4)
        return self.at


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    start = time.perf_counter()
    step()
    return start, time.perf_counter()


def _last_write(target: Path | None) -> float | None:
    """When a data file of `target` last changed, by time.time."""
    files = [] if target is None else list(target.rglob("*.distcp"))
    return max((file.stat().st_mtime for file in files), default=None)


def _save_once(contender: Contender, step: Callable[[], None], idle_steps: int) -> Trace:
    contender.prepare()
    settle()
    idle = [_timed(step) for _ in range(idle_steps)]
    cpu_before = _cpu_seconds()
    clock = time.time()
    called = time.perf_counter()
    running = contender.run()
    returned = time.perf_counter()
    staged = durable = returned
    steps: list[tuple[float, float]] = []
    training_cpu = 0.0
    if isinstance(running, Running):
        committed = _Stopwatch(running.committed)
        watch = None if running.staged is None else _Stopwatch(running.staged)
        trained = time.thread_time()
        while not running.committed.done():
            steps.append(_timed(step))
        training_cpu = time.thread_time() - trained
        durable = committed.read()
        # The callback of what had ended by then ran a little after the return.
        staged = returned if watch is None else min(watch.read(), durable)
    cpu = _cpu_seconds() - cpu_before - training_cpu
    last_write = _last_write(contender.target)
    contender.check()

    def since_call(moment: float) -> float:
        return round(moment - called, _DIGITS)

    return Trace(
        stall_s=since_call(returned),
        staged_s=since_call(staged),
        last_write_s=None if last_write is None else round(max(0.0, last_write - clock), _DIGITS),
        durable_s=since_call(durable),
        cpu_s=cpu,
        idle_steps=[[since_call(start), since_call(end)] for start, end in idle],
        steps=[[since_call(start), since_call(end)] for start, end in steps],
    )


def _lengths(steps: Sequence[Sequence[float]]) -> list[float]:
    return [end - start for start, end in steps]


def sample_of(
    name: str, traces: list[Trace], bytes_moved: int, *, round_index: int = 0, position: int = 0
) -> BackgroundSample:
    """What the saves of one contender in one round come to."""
    idle = [length for trace in traces for length in _lengths(trace.idle_steps)]
    beside = [length for trace in traces for length in _lengths(trace.steps)]
    both = bool(idle and beside)
    durable = statistics.median(trace.durable_s for trace in traces)
    return BackgroundSample(
        contender=name,
        round=round_index,
        position=position,
        wall_s=durable,
        cpu_s=statistics.median(trace.cpu_s for trace in traces),
        bytes=bytes_moved,
        stall_s=statistics.median(trace.stall_s for trace in traces),
        staged_s=statistics.median(trace.staged_s for trace in traces),
        durable_s=durable,
        steps=len(beside),
        step_median_ratio=statistics.median(beside) / statistics.median(idle) if both else None,
        step_mean_ratio=statistics.fmean(beside) / statistics.fmean(idle) if both else None,
        saves=traces,
    )


def saves_beside_training(
    contender: Contender, step: Callable[[], None], effort: Effort
) -> list[Trace]:
    """Saves until enough steps ran beside them; one where nothing goes on beside training."""
    traces: list[Trace] = []
    while len(traces) < MOST_SAVES_PER_SAMPLE:
        # Short saves follow each other so closely that the steps before the first stand for all.
        idle_steps = effort.idle_steps if not traces else 0
        traces.append(_save_once(contender, step, idle_steps))
        seen = sum(len(trace.steps) for trace in traces)
        if seen >= effort.least_steps or not traces[-1].steps:
            break
    return traces


def measure_beside_training(
    contenders: Sequence[Contender],
    rounds: int,
    bytes_moved: int,
    step: Callable[[], None],
    effort: Effort,
    on_sample: Callable[[BackgroundSample], None],
) -> list[BackgroundSample]:
    """Samples every contender once per round; `step` is one step of training."""
    samples: list[BackgroundSample] = []
    for round_index, position, contender in alternate(contenders, rounds):
        traces = saves_beside_training(contender, step, effort)
        sample = sample_of(
            contender.name, traces, bytes_moved, round_index=round_index, position=position
        )
        samples.append(sample)
        on_sample(sample)
    return samples
