"""Times saves that run in the background of training.

Some training steps are timed without a save. Then the save is called, and steps are timed until the
save is durable. A sample repeats this until it has enough steps that ran during a save.
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

# A save of a tiny state may end within one step, so a sample would never see enough steps.
MAX_SAVES_PER_SAMPLE = 15
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Fields of /proc/PID/stat, counted from the first after the command's name in parentheses.
_USER_TICKS, _SYSTEM_TICKS = 11, 12
_DIGITS = 5  # ten microseconds: finer digits only make the result file longer


@dataclass(frozen=True)
class Effort:
    """Training steps of a sample: how many without a save, and the minimum during saves."""

    idle_steps: int
    least_steps: int


@dataclass(frozen=True)
class Trace:
    """One save. Times are seconds since its call; a step is a pair of start and end.

    `last_write_s` is the last change of a data file, with the resolution of file times (about
    4 ms); None if the contender writes no files. `cpu_s` is the CPU time of this process and its
    children without the training steps. `idle_steps` ran before the call, so their times are
    negative.
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
    """Medians over the saves of one contender in one round.

    `stall_s` is the time in the call, during which training stops. `staged_s` is the time from the
    call until the state may change, `durable_s` until the save is durable; `wall_s` equals
    `durable_s`. A ratio is the median (mean) step during a save divided by the median (mean) step
    just before; None if no step ran.
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
    """Records the time at which a future completes, on the thread that completes it."""

    def __init__(self, future: Future[Any]) -> None:
        self.at: float | None = None
        self._future = future
        future.add_done_callback(self._note)

    def _note(self, _future: Future[Any]) -> None:
        self.at = time.perf_counter()

    def read(self) -> float:
        """Waits for the future; returns the time of its completion by time.perf_counter."""
        self._future.result()
        # result() may return before the callback has run.
        while self.at is None:
            time.sleep(1e-4)
        return self.at


def _timed(step: Callable[[], None]) -> tuple[float, float]:
    start = time.perf_counter()
    step()
    return start, time.perf_counter()


def _last_write(target: Path | None) -> float | None:
    """Returns the time of the last change of a data file in `target`, by time.time."""
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
        # If staging ended during the call, the callback ran shortly after the return.
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


def summarize(
    name: str, traces: list[Trace], bytes_moved: int, *, round_index: int = 0, position: int = 0
) -> BackgroundSample:
    """Summarizes the saves of one contender in one round."""
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


def trace_saves(contender: Contender, step: Callable[[], None], effort: Effort) -> list[Trace]:
    """Saves until enough steps ran during the saves; only once if no step runs during a save."""
    traces: list[Trace] = []
    while len(traces) < MAX_SAVES_PER_SAMPLE:
        # Later saves follow at once; the idle steps before the first one serve for all.
        idle_steps = effort.idle_steps if not traces else 0
        traces.append(_save_once(contender, step, idle_steps))
        seen = sum(len(trace.steps) for trace in traces)
        if seen >= effort.least_steps or not traces[-1].steps:
            break
    return traces


def measure_background_saves(
    contenders: Sequence[Contender],
    rounds: int,
    bytes_moved: int,
    step: Callable[[], None],
    effort: Effort,
    on_sample: Callable[[BackgroundSample], None],
) -> list[BackgroundSample]:
    """Samples every contender once per round; `step` is one step of training.

    Each contender saves once before its sample, because the previous contender may have freed the
    memory for copies. benchmarks/first_saves.py measures first saves.
    """
    samples: list[BackgroundSample] = []
    for round_index, position, contender in alternate(contenders, rounds):
        _save_once(contender, step, idle_steps=0)
        traces = trace_saves(contender, step, effort)
        sample = summarize(
            contender.name, traces, bytes_moved, round_index=round_index, position=position
        )
        samples.append(sample)
        on_sample(sample)
    return samples
