"""Saves and loads of two hosts over file systems that they share.

``python -m benchmarks.cluster [--kinds juicefs sshfs] [--megabytes 256] [--rounds 5]`` needs root
and /dev/fuse. Both hosts are on this machine (tests/cluster/hosts.py), with one rank and one client
of the file system each. All data is on one disk, so the figures compare contenders, and are not the
speed of a file system.

- save, load: a state sharded by rows, by torch_ckpt and by stock torch.
- write: each host writes and fsyncs a file with as many bytes as it has of the state.
- model by rows, by columns: saves with ``format="safetensors"``.

The contenders take turns within a round, in the same processes. Each save has a new directory,
which is deleted after the round. Seconds are those of the slower rank, CPU seconds those of rank 0
without the file system's client. The ratios are medians over the rounds of the time of a row
divided by torch_ckpt's save (or load), so more than 1 means that torch_ckpt is faster.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from tests.cluster import hosts

_TENSORS, _COLUMNS = 16, 1024

#: Seconds and CPU seconds of each round, by row.
Times = dict[str, list[tuple[float, float]]]


def _state(megabytes: int, dim: int) -> dict[str, Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    rows = (megabytes << 20) // 4 // _COLUMNS // _TENSORS
    shape = (rows // ranks, _COLUMNS) if dim == 0 else (rows, _COLUMNS // ranks)
    return {
        f"t{number}": DTensor.from_local(torch.randn(shape), mesh, [Shard(dim)], run_check=False)
        for number in range(_TENSORS)
    }


def _write(path: str, megabytes: int) -> None:
    block = os.urandom(8 << 20)
    os.makedirs(path, exist_ok=True)
    with open(f"{path}/{dist.get_rank()}", "wb", 0) as file:
        for _ in range(megabytes // dist.get_world_size() // 8):
            file.write(block)
        os.fsync(file.fileno())


def measure(root: str, megabytes: int, rounds: int) -> Times:
    """Measures all contenders, on each rank."""
    torch.set_num_threads(1)
    rows, columns = _state(megabytes, 0), _state(megabytes, 1)
    target = {name: torch.zeros_like(value) for name, value in rows.items()}
    times: Times = {}
    for number in range(rounds + 1):
        at = f"{root}/{number}"
        operations: dict[str, Callable[[], object]] = {
            "save": lambda at=at: torch_ckpt.save(rows, f"{at}/ours"),  # type: ignore[misc]
            "save, stock": lambda at=at: dcp_save(  # type: ignore[misc]
                rows, storage_writer=FileSystemWriter(f"{at}/stock")
            ),
            "save, write": lambda at=at: _write(f"{at}/bytes", megabytes),  # type: ignore[misc]
            "save, model by rows": lambda at=at: torch_ckpt.save(  # type: ignore[misc]
                rows, f"{at}/rows", format="safetensors"
            ),
            "save, model by columns": lambda at=at: torch_ckpt.save(  # type: ignore[misc]
                columns, f"{at}/columns", format="safetensors"
            ),
            "load": lambda at=at: torch_ckpt.load(target, f"{at}/ours"),  # type: ignore[misc]
            "load, stock": lambda at=at: dcp_load(  # type: ignore[misc]
                target, storage_reader=FileSystemReader(f"{at}/stock")
            ),
        }
        for name, operation in operations.items():
            dist.barrier()
            begun, cpu = time.perf_counter(), time.process_time()
            operation()
            cpu = time.process_time() - cpu
            dist.barrier()
            if number > 0:  # the first round warms up
                times.setdefault(name, []).append((time.perf_counter() - begun, cpu))
        if dist.get_rank() == 0:
            shutil.rmtree(at)
        dist.barrier()
    return times


def _print(kind: str, times: Times) -> None:
    print(f"| {kind} | seconds | CPU seconds | time / torch_ckpt |")
    print("|---|---|---|---|")
    for name, rows in times.items():
        ours = times[name.partition(",")[0]]
        seconds, cpu = (statistics.median(row[i] for row in rows) for i in (0, 1))
        ratio = statistics.median(a[0] / b[0] for a, b in zip(rows, ours, strict=True))
        print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {ratio:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kinds", nargs="+", default=["one disk", "juicefs", "sshfs"])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.platform()}, {os.cpu_count()} cores")
    print(f"two hosts, {given.megabytes} MiB, {given.rounds} rounds")
    for kind in given.kinds:
        if missing := hosts.lacking(kind):
            print(f"{kind}: this machine lacks {missing}")
            continue
        with (
            tempfile.TemporaryDirectory() as directory,
            hosts.cluster(kind, Path(directory)) as cluster,
        ):
            # Not the function of __main__, which the ranks could not import.
            from benchmarks.cluster import measure as work

            arguments = str(cluster.path), given.megabytes, given.rounds
            _print(kind, cluster.run(work, *arguments, patience=3600.0)[0])


if __name__ == "__main__":
    main()
