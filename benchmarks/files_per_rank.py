"""Measures what the number of files costs and gives, in one process.

    python -m benchmarks.files_per_rank --dir DIRECTORY --out FILE

Saves a state of tensors in host memory into 1, 2, 4, ... files: the seconds of ``save``, and of the
call and the whole of ``async_save``. "one tensor" is the same number of bytes in a single tensor
and file. Raw writes of the same number of files are the limit. All of them run in each round, one
after another; prints medians over the rounds. To measure the engine on a faster disk than the
machine has, pass a directory of a file system on a loop device over a file in memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_ckpt

from . import limits, machine
from .run import parse_size

_TENSORS = 160


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the figures; returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("2GB"))
    parser.add_argument("--files", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    path = options.dir / "files_per_rank"
    options.dir.mkdir(parents=True, exist_ok=True)
    measured = _measurements(options.size, options.files, path)
    figures: dict[str, list[float]] = {}
    # The first round allocates the memory for copies, and is not counted.
    for number in range(options.rounds + 1):
        for measure in measured:
            shutil.rmtree(path, ignore_errors=True)
            for name, seconds in measure().items():
                if number > 0:
                    figures.setdefault(name, []).append(seconds)
    shutil.rmtree(path, ignore_errors=True)
    found = {
        "bytes": options.size,
        "rounds": options.rounds,
        "medians": {name: statistics.median(values) for name, values in figures.items()},
        "samples": figures,
        "machine": dataclasses.asdict(machine.describe(options.dir)),
    }
    for name, values in figures.items():
        rate = options.size / 1e9 / statistics.median(values)
        print(f"{name:34} {statistics.median(values):8.3f} s {rate:6.1f} GB/s")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _measurements(size: int, counts: list[int], path: Path) -> list[Callable[[], dict[str, float]]]:
    state = {f"weight {n}": torch.rand(size // 4 // _TENSORS) for n in range(_TENSORS)}
    one = {"weight": torch.rand(size // 4)}
    raw = limits.RawWriter()
    direct = limits.direct_io_works(path.parent)

    def save(name: str, values: dict[str, torch.Tensor], files: int) -> dict[str, float]:
        seconds = _seconds(
            lambda: torch_ckpt.save(
                values, path, options=torch_ckpt.WriteOptions(thread_count=files)
            )
        )
        return {f"save, {name}": seconds}

    def save_in_background(
        name: str, values: dict[str, torch.Tensor], files: int
    ) -> dict[str, float]:
        began = time.perf_counter()
        handle = torch_ckpt.async_save(
            values, path, options=torch_ckpt.WriteOptions(thread_count=files)
        )
        called = time.perf_counter() - began
        handle.result()
        whole = time.perf_counter() - began
        return {f"async_save, {name}: call": called, f"async_save, {name}: whole": whole}

    def write(files: int) -> dict[str, float]:
        shape = limits.WriteShape(files, 2 if direct else 1, direct=direct)
        return {shape.label: _seconds(lambda: raw.write(path, size, shape))}

    measured: list[Callable[[], dict[str, float]]] = []
    for files in counts:
        name = f"{files} files"
        measured.append(partial(write, files))
        measured.append(partial(save, name, state, files))
        measured.append(partial(save_in_background, name, state, files))
    measured.append(partial(save, "one tensor", one, 1))
    measured.append(partial(save_in_background, "one tensor", one, 1))
    return measured


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
