"""Measures the cost of the number of tensors, in one process.

    python -m benchmarks.run many_tensors --out FILE

Saves and loads a million plain tensors of 1 KiB: seconds, and peak memory beyond the memory before
the call. Then saves 20,000 of them with ``async_save``, first as a new state and then unchanged:
milliseconds for which the save's thread holds the GIL. Nothing is fsynced; loads read from the page
cache. Prints medians over the rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_ckpt

from . import machine
from .memory import measure_growth

_NO_FSYNC = torch_ckpt.WriteOptions(sync_files=False)
_ELEMENTS = 256


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the figures; returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=1_000_000)
    parser.add_argument("--background", type=int, default=20_000, help="tensors of an async_save")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for number in range(options.rounds):
            _measure_background(figures, _state(options.background), Path(directory), number)
        state = _state(options.tensors)
        for number in range(options.rounds):
            _measure(figures, state, Path(directory) / "many" / str(number))
    found = {
        "tensors": options.tensors,
        "background": options.background,
        "rounds": options.rounds,
        "medians": {name: statistics.median(values) for name, values in figures.items()},
        "most": {name: max(values) for name, values in figures.items()},
        "samples": figures,
        "machine": dataclasses.asdict(machine.describe(options.dir)),
    }
    for name, values in figures.items():
        middle = statistics.median(values)
        print(f"{name:50} {middle:10.4g} ({min(values):.4g} to {max(values):.4g})")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _state(count: int) -> dict[str, torch.Tensor]:
    values = torch.rand(count, _ELEMENTS)
    return {f"model.layers.{number}.weight": values[number].clone() for number in range(count)}


def _measure(figures: dict[str, list[float]], state: dict[str, torch.Tensor], path: Path) -> None:
    _measure_call(figures, "save", lambda: torch_ckpt.save(state, path, options=_NO_FSYNC))
    targets = {name: torch.zeros_like(value) for name, value in state.items()}
    _measure_call(figures, "load", lambda: torch_ckpt.load(targets, path))
    assert all(torch.equal(targets[name], value) for name, value in state.items())


def _measure_call(figures: dict[str, list[float]], name: str, call: Callable[[], Any]) -> None:
    taken: list[float] = []

    def timed() -> None:
        began, used = time.perf_counter(), time.process_time()
        call()
        taken[:] = time.perf_counter() - began, time.process_time() - used

    before, peak = measure_growth(timed)
    figures.setdefault(f"{name}: seconds", []).append(taken[0])
    figures.setdefault(f"{name}: CPU seconds", []).append(taken[1])
    beyond = (peak - before) / 1e9
    figures.setdefault(f"{name}: memory beyond the state, GB", []).append(beyond)


def _measure_background(
    figures: dict[str, list[float]], state: dict[str, torch.Tensor], directory: Path, number: int
) -> None:
    # A new name prevents the reuse of the previous round's plan.
    state = {f"round {number}": torch.zeros(1), **state}
    for kind in ("first", "unchanged"):
        path = directory / "background" / f"{number}-{kind}"
        handle = torch_ckpt.async_save(state, path, options=_NO_FSYNC, warn_unchanged=False)
        handle.result()
        held = 1000 * handle.metrics().python_s
        figures.setdefault(f"async_save, {kind}: GIL held, ms", []).append(held)
