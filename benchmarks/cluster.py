"""Saves and loads of two hosts over file systems that they share.

``python -m benchmarks.run cluster [--kinds juicefs moosefs] [--megabytes 256] [--rounds 5]`` needs
root and /dev/fuse. Both hosts are on this machine (tests/cluster/hosts.py), with one rank and one
client of the file system each. All data is on one disk, so the figures compare contenders, and are
not the speed of a file system.

- save, load: a state sharded by rows, by torch_ckpt and by stock torch.
- cp: each host copies a local file with as many bytes as it has of the state, and fsyncs the copy.
- model by rows, by columns: saves with ``format="safetensors"``.
- manager: saves of three managers: with the root on the shared file system, with the root on the
  local disk, and with a local tier. ``stall`` is the call of ``save``, ``durable`` lasts until
  ``wait_until_finished`` has returned, and ``published`` until a local tier has copied the step to
  the root. ``local tier that copies``: a save that begins while the step before it is copied.

The contenders take turns within a round, in the same processes. Each save has a new directory,
which is deleted after the round. Seconds are those of the slower rank, CPU seconds those of rank 0
without the file system's client. The ratios are medians over the rounds of the time of a row
divided by torch_ckpt's save (or load), so more than 1 means that torch_ckpt is faster. Rows of
managers are divided by the manager whose root is on the local disk.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
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
from torch_ckpt import CheckpointManager
from torch_ckpt.manager import LocalTier

_TENSORS, _COLUMNS = 16, 1024

# Seconds before an operation that is measured, because the client of a file system still works when
# a call has returned.
_SETTLE_SECONDS = 1.0

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


def _write_local_file(path: str, megabytes: int) -> None:
    block = os.urandom(8 << 20)
    with open(path, "wb", 0) as file:
        for _ in range(megabytes // dist.get_world_size() // 8):
            file.write(block)


def _copy(path: str, directory: str) -> None:
    os.makedirs(directory, exist_ok=True)
    to = f"{directory}/{dist.get_rank()}"
    subprocess.run(["cp", path, to], check=True)
    with open(to, "rb", 0) as file:
        os.fsync(file.fileno())


def measure_managers(root: str, local: str, megabytes: int, rounds: int) -> Times:
    """Measures the saves of managers, on each rank.

    Args:
        root: on the shared file system.
        local: on the local disk, the same directory for all hosts.
    """
    torch.set_num_threads(1)
    state, times = _state(megabytes, 0), Times()
    tier = LocalTier(f"{local}/{socket.gethostname()}", keep=1)
    options: dict[str, Any] = {"interval": 1, "keep": 1, "preemption": None}
    with (
        CheckpointManager(f"{root}/run", **options) as shared,
        CheckpointManager(f"{local}/run", **options) as on_disk,
        CheckpointManager(f"{root}/tier", local=tier, **options) as tiered,
    ):
        copying = "local tier that copies"
        managers = {"root": shared, "local disk": on_disk, "local tier": tiered, copying: tiered}
        for number in range(rounds + 1):
            for name, manager in managers.items():
                # Only the second of two saves finds the memory of the first one.
                for is_second in (False, True):
                    step = (manager.last_step or 0) + 1
                    is_measured = is_second and number > 0
                    if is_second and name != copying:
                        time.sleep(_SETTLE_SECONDS)
                    dist.barrier()
                    begun, cpu = time.perf_counter(), time.process_time()

                    def note(
                        moment: str, name: str = name, begun: float = begun, cpu: float = cpu
                    ) -> None:
                        seconds = time.perf_counter() - begun
                        used = time.process_time() - cpu
                        if is_measured:  # noqa: B023
                            times.setdefault(f"{moment}, {name}", []).append((seconds, used))

                    manager.save(step, state)
                    note("stall")
                    manager.wait_until_finished()
                    dist.barrier()
                    note("durable")
                    if manager is tiered and (is_second or name != copying):
                        manager.wait_until_finished(published=True)
                        dist.barrier()
                        note("published")
    return times


def measure(root: str, local: str, megabytes: int, rounds: int) -> Times:
    """Measures saves and loads, on each rank. Args: see :func:`measure_managers`."""
    torch.set_num_threads(1)
    rows, columns = _state(megabytes, 0), _state(megabytes, 1)
    target = {name: torch.zeros_like(value) for name, value in rows.items()}
    own = f"{local}/file{dist.get_rank()}"
    _write_local_file(own, megabytes)
    times: Times = {}
    for number in range(rounds + 1):
        at = f"{root}/{number}"
        operations: dict[str, Callable[[], object]] = {
            "save": lambda at=at: torch_ckpt.save(rows, f"{at}/ours"),  # type: ignore[misc]
            "save, stock": lambda at=at: dcp_save(  # type: ignore[misc]
                rows, storage_writer=FileSystemWriter(f"{at}/stock")
            ),
            "save, cp": lambda at=at: _copy(own, f"{at}/bytes"),  # type: ignore[misc]
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
            time.sleep(_SETTLE_SECONDS)
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
        first = name.partition(",")[0]
        ours = times.get(first) or times.get(f"{first}, local disk") or times["durable, local disk"]
        seconds, cpu = (statistics.median(row[i] for row in rows) for i in (0, 1))
        ratio = statistics.median(a[0] / b[0] for a, b in zip(rows, ours, strict=True))
        print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {ratio:.2f} |")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--kinds", nargs="+", default=["one disk", "juicefs", "moosefs", "sshfs"])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {platform.platform()}, {os.cpu_count()} cores")
    print(f"two hosts, {given.megabytes} MiB, {given.rounds} rounds")
    for kind in given.kinds:
        if missing := hosts.lacking(kind):
            print(f"{kind}: this machine lacks {missing}")
            continue
        with (
            tempfile.TemporaryDirectory() as directory,
            hosts.cluster(kind, Path(directory), keeps_removed=False) as cluster,
        ):
            local = Path(directory) / "local"
            local.mkdir()
            for title, work in ((kind, measure), (f"{kind}: managers", measure_managers)):
                settings = str(cluster.path), str(local), given.megabytes, given.rounds
                _print(title, cluster.run(work, *settings, patience=3600.0)[0])
