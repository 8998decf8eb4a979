"""Times saves that run in the background of training.

Some training steps are timed without a save. Then the save is called, and steps are timed until the
save is durable. A sample repeats this until it has enough steps that ran during a save.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from .contenders import Running
from .measure import Contender, Sample, cpu_seconds, settle
from .processes import cpu_seconds as cpu_seconds_of

# A save of a tiny state may end within one step, so a sample would never see enough steps.
MAX_SAVES_PER_SAMPLE = 15
_DIGITS = 5  # ten microseconds: finer digits only make the result file longer

#: Start and end of training steps, in seconds since the call of a save.
Steps = list[list[float]]


@dataclass(frozen=True)
class Trace:
    """One save. Times are seconds since its call.

    `stall_s` is the time in the call, during which training stops, `staged_s` the time until the
    state may change, and `durable_s` the time until the save is durable and visible. `cpu_s` is the
    CPU time of this process and its children without the training steps. `idle_steps` ran before
    the call, so their times are negative.
    """

    stall_s: float
    staged_s: float
    durable_s: float
    cpu_s: float
    idle_steps: Steps
    steps: Steps


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


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Runs a training step; returns its start and end."""
    start = time.perf_counter()
    step()
    return start, time.perf_counter()


def since(moment: float, steps: Sequence[tuple[float, float]]) -> Steps:
    """Returns the starts and ends of steps since a moment."""
    return [[round(end - moment, _DIGITS) for end in pair] for pair in steps]


def _cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its children, as torch's saving process."""
    children = multiprocessing.active_children()
    return cpu_seconds() + sum(cpu_seconds_of(child.pid or os.getpid()) for child in children)


def trace_save(contender: Contender, step: Callable[[], None], idle_steps: int) -> Trace:
    """Times one save after `idle_steps` steps."""
    contender.prepare()
    settle()
    idle = [timed(step) for _ in range(idle_steps)]
    cpu_before = _cpu_seconds()
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
            steps.append(timed(step))
        training_cpu = time.thread_time() - trained
        durable = committed.read()
        # If staging ended during the call, the callback ran shortly after the return.
        staged = returned if watch is None else min(watch.read(), durable)
    cpu = _cpu_seconds() - cpu_before - training_cpu
    contender.check()
    return Trace(
        stall_s=round(returned - called, _DIGITS),
        staged_s=round(staged - called, _DIGITS),
        durable_s=round(durable - called, _DIGITS),
        cpu_s=cpu,
        idle_steps=since(called, idle),
        steps=since(called, steps),
    )


def step_ratios(idle: Steps, during: Steps) -> dict[str, float | None]:
    """Divides the median (mean) step during saves by the median (mean) step just before."""
    before, beside = ([end - start for start, end in steps] for steps in (idle, during))
    if not (before and beside):
        return {"step_median_ratio": None, "step_mean_ratio": None}
    return {
        "step_median_ratio": statistics.median(beside) / statistics.median(before),
        "step_mean_ratio": statistics.fmean(beside) / statistics.fmean(before),
    }


def summarize(name: str, traces: Sequence[Trace], round_index: int) -> Sample:
    """Makes the sample of one contender in one round: medians over its saves."""

    def median(quantity: str) -> float:
        return float(statistics.median(getattr(trace, quantity) for trace in traces))

    idle = [step for trace in traces for step in trace.idle_steps]
    during = [step for trace in traces for step in trace.steps]
    return {
        "contender": name,
        "round": round_index,
        "wall_s": median("durable_s"),
        **{quantity: median(quantity) for quantity in ("cpu_s", "stall_s", "staged_s")},
        "steps": len(during),
        **step_ratios(idle, during),
        "saves": [asdict(trace) for trace in traces],
    }


def trace_saves(
    contender: Contender, step: Callable[[], None], idle_steps: int, least_steps: int
) -> list[Trace]:
    """Saves until enough steps ran during the saves; only once if no step runs during a save."""
    traces: list[Trace] = []
    while len(traces) < MAX_SAVES_PER_SAMPLE:
        # Later saves follow at once; the idle steps before the first one serve for all.
        traces.append(trace_save(contender, step, 0 if traces else idle_steps))
        seen = sum(len(trace.steps) for trace in traces)
        if seen >= least_steps or not traces[-1].steps:
            break
    return traces
