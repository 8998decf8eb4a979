"""Measures the cost of ``check_replicas`` in a save of tensors that are identical on all ranks.

    python -m benchmarks.replica_checksums --rounds 9

Two gloo ranks save 2 GB in 100 plain tensors, and 20,000 tensors of 1 KiB, by ``torch_ckpt.save``.
Each round saves with every mode, starting with another mode. A ratio is a mode's seconds divided by
the seconds of "off" in the same round. CPU seconds are rank 0's. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

import torch_ckpt

from . import machine

_RANKS = 2
_MODES = ("off", "warn", "error")
_STATES = {"2 GB in 100 tensors": (100, 5_000_000), "20,000 tensors of 1 KiB": (20_000, 256)}


def _seconds_of(state: dict[str, Any], path: Path, mode: str) -> tuple[float, float]:
    shutil.rmtree(path, ignore_errors=True)
    os.sync()
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    torch_ckpt.save(state, path, check_replicas=mode)
    return time.perf_counter() - began, time.process_time() - used


def _rank(rank: int, port_file: str, directory: str, rounds: int) -> None:
    store = FileStore(port_file, _RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    found: dict[str, Any] = {}
    for title, (tensors, elements) in _STATES.items():
        torch.manual_seed(1)
        state = {f"t{number}": torch.rand(elements) for number in range(tensors)}
        runs: dict[str, list[tuple[float, float]]] = {mode: [] for mode in _MODES}
        for number in range(rounds + 1):
            turn = number % len(_MODES)
            for mode in _MODES[turn:] + _MODES[:turn]:
                seconds = _seconds_of(state, Path(directory, "checkpoint"), mode)
                if number > 0:  # the first round warms up
                    runs[mode].append(seconds)
        found[title] = {mode: _summary(runs[mode], runs["off"]) for mode in _MODES}
    if rank == 0:
        facts = dataclasses.asdict(machine.describe(Path(directory)))
        print(json.dumps({"machine": facts, "rounds": rounds, "saves": found}, indent=2))
    dist.destroy_process_group()


def _summary(runs: list[tuple[float, float]], off: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [one[0] / other[0] for one, other in zip(runs, off, strict=True)]
    return {
        "seconds": statistics.median(seconds for seconds, _ in runs),
        "cpu_seconds": statistics.median(used for _, used in runs),
        "ratio": statistics.median(ratios),
        "least_ratio": min(ratios),
        "most_ratio": max(ratios),
        "cpu_ratio": statistics.median(
            one[1] / other[1] for one, other in zip(runs, off, strict=True)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, help="an existing directory (default: a temporary one)")
    arguments = parser.parse_args()
    directory = tempfile.mkdtemp(prefix="torch_ckpt-replicas-", dir=arguments.dir)
    try:
        port_file = os.path.join(directory, "store")
        spawn(_rank, (port_file, directory, arguments.rounds), nprocs=_RANKS)  # type: ignore[no-untyped-call]
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
