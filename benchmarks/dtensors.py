"""Measures saves and loads of many small tensors with each planner.

    python -m benchmarks.dtensors --rounds 7 --out FILE

Two gloo ranks save and load 2,000 and 20,000 DTensors, sharded by rows, with 16 KiB of each on
every rank. One process saves and loads 20,000 plain tensors of 1 KiB. Each round runs all methods
in another order. A ratio is stock torch's seconds divided by a method's seconds in the same round.
Seconds are the slowest rank's, CPU seconds are rank 0's. Loads read from the page cache. "stock"
and "stock, plans kept" differ only in the planner.
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
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt

from . import machine, ranks
from .measure import order_of_round

State = dict[str, Any]

ROWS, COLUMNS = 64, 64
PLAIN_ELEMENTS = 256
_RESULT = "dtensors.json"


def _dtensors(count: int) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(dist.get_rank())
    return {
        f"model.layers.{number}.weight": DTensor.from_local(
            torch.rand(ROWS, COLUMNS), mesh, [Shard(0)], run_check=False
        )
        for number in range(count)
    }


def _plain(count: int) -> State:
    torch.manual_seed(1)
    return {f"model.layers.{n}.weight": torch.rand(PLAIN_ELEMENTS) for n in range(count)}


def _our_dcp_save(state: State, path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(path, sync_files=False)
    dcp_save(state, storage_writer=writer)


def _our_dcp_load(state: State, path: Path) -> None:
    reader = torch_ckpt.FileSystemReader(path)
    dcp_load(state, storage_reader=reader)


def _stock_save(state: State, path: Path, *, keeps_plans: bool) -> None:
    writer = FileSystemWriter(path, sync_files=False)
    planner = DefaultSavePlanner(enable_plan_caching=keeps_plans)
    dcp_save(state, storage_writer=writer, planner=planner)


def _stock_load(state: State, path: Path) -> None:
    dcp_load(state, storage_reader=FileSystemReader(path))


NO_FSYNC = torch_ckpt.WriteOptions(sync_files=False)

Method = Callable[[State, Path], Any]

# No fsync, because only the time for each tensor differs.
SAVES: dict[str, Method] = {
    "stock": partial(_stock_save, keeps_plans=False),
    "stock, plans kept": partial(_stock_save, keeps_plans=True),
    "dcp.save with torch_ckpt's writer": _our_dcp_save,
    "torch_ckpt.save": lambda state, path: torch_ckpt.save(state, path, options=NO_FSYNC),
}
LOADS: dict[str, Method] = {
    "stock": _stock_load,
    "dcp.load with torch_ckpt's reader": _our_dcp_load,
    "torch_ckpt.load": torch_ckpt.load,
}


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    _barrier()
    began, used = time.perf_counter(), time.process_time()
    work()
    used = time.process_time() - used
    _barrier()
    return time.perf_counter() - began, used


def _measure(state: State, directory: Path, rounds: int) -> dict[str, Any]:
    """Times every method in every round; returns a summary of each."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    path = {name: directory / str(number) for number, name in enumerate(SAVES)}
    runs: dict[str, list[tuple[float, float]]] = {}
    targets = {name: torch.zeros_like(value) for name, value in state.items()}
    for number in range(-1, rounds):  # the first round warms up
        for methods, kind in ((SAVES, "save"), (LOADS, "load")):
            names = list(methods)
            for index in order_of_round(len(names), max(number, 0), rounds):
                name = names[index]
                if kind == "save":
                    if is_first:
                        shutil.rmtree(path[name], ignore_errors=True)
                        os.sync()
                    took = _timed(partial(methods[name], state, path[name]))
                else:
                    took = _timed(partial(methods[name], targets, path["stock"]))
                if number >= 0:
                    runs.setdefault(f"{kind}: {name}", []).append(took)
    for name, value in state.items():
        assert torch.equal(_local(targets[name]), _local(value)), name
    return {method: _summary(took, runs[f"{method[:4]}: stock"]) for method, took in runs.items()}


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _summary(runs: list[tuple[float, float]], stock: list[tuple[float, float]]) -> dict[str, float]:
    ratios = [of_stock[0] / one[0] for one, of_stock in zip(runs, stock, strict=True)]
    return {
        "seconds": statistics.median(seconds for seconds, _ in runs),
        "cpu_seconds": statistics.median(used for _, used in runs),
        "times_as_fast_as_stock": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def _on_rank(count: int, directory: Path, rounds: int) -> None:
    warnings.simplefilter("ignore")
    found = _measure(_dtensors(count), directory, rounds)
    if dist.get_rank() == 0:
        (directory / _RESULT).write_text(json.dumps(found))


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the ratios; returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensors", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--plain", type=int, default=20_000, help="plain tensors")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dir", type=Path, help="an existing directory (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    directory = Path(tempfile.mkdtemp(prefix="torch_ckpt-dtensors-", dir=options.dir))
    states: dict[str, Any] = {}
    try:
        for count in options.tensors:
            ranks.run(options.ranks, partial(_on_rank, count, directory, options.rounds))
            title = f"{count:,} DTensors of 16 KiB a rank, {options.ranks} ranks"
            states[title] = json.loads((directory / _RESULT).read_text())
        warnings.simplefilter("ignore")
        states[f"{options.plain:,} plain tensors of 1 KiB, one process"] = _measure(
            _plain(options.plain), directory / "plain", options.rounds
        )
        facts = dataclasses.asdict(machine.describe(directory))
    finally:
        shutil.rmtree(directory)
    for title, methods in states.items():
        print(title)
        for method, summary in methods.items():
            print(
                f"  {method:45} {summary['seconds']:8.3f} s {summary['cpu_seconds']:8.3f} CPU s "
                f"{summary['times_as_fast_as_stock']:6.1f} x ({summary['least']:.1f} to "
                f"{summary['most']:.1f})"
            )
    found = {"rounds": options.rounds, "states": states, "machine": facts}
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
