"""Saves and loads of two hosts over file systems that they share.

This needs root and /dev/fuse. Both hosts are on this machine (tests/cluster/hosts.py), with one
rank and one client of the file system each. All data is on one disk, so the figures compare
contenders, and are not the speed of a file system.

- save, load: a state sharded by rows, by torch_ckpt and by stock torch.
- cp: each host copies a local file with as many bytes as it has of the state, and fsyncs the copy.
- model by rows, by columns: saves with ``format="safetensors"``.
- manager: saves of three managers: with the root on the shared file system, with the root on the
  local disk, and with a local tier. ``stall`` is the call of ``save``, ``durable`` lasts until
  ``wait_until_finished`` has returned, and ``published`` until a local tier has copied the step to
  the root. ``local tier that copies``: a save that begins while the step before it is copied.

The contenders take turns within a round, in the same processes. Each save has a new directory,
which is deleted after the round. Seconds are those of the slower rank, CPU seconds those of rank 0
without the file system's client. Rows of managers are compared with the manager whose root is on
the local disk.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
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

from .groups import Run
from .measure import Sample
from .results import ContenderInfo, readable_size

_TENSORS, _COLUMNS = 16, 1024
_KINDS = ("juicefs", "moosefs", "sshfs")

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
                        moment: str, *, name: str = name, begun: float = begun, cpu: float = cpu
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
                        note("durable", name=f"{name} published")
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


def _add(run: Run, group: str, title: str, times: Times) -> None:
    infos: list[ContenderInfo] = []
    samples: list[Sample] = []
    for label, rounds in times.items():
        what, _, who = label.partition(", ")
        name = f"{who or 'ours'}_{what}"
        kind = "limit" if who == "cp" else "stock" if who == "stock" else "ours"
        infos.append(ContenderInfo(name, label, kind))
        for number, (wall, cpu) in enumerate(rounds):
            samples.append({"contender": name, "round": number, "wall_s": wall, "cpu_s": cpu})
            run.show(label, samples[-1])
    run.add(group, title, run.effort.state_bytes, infos, samples)


def use_shared_file_systems(run: Run) -> None:
    """Times saves and loads of two hosts over each file system that this machine has."""
    for kind in _KINDS:
        if missing := hosts.lacking(kind):
            run.skip(kind, f"this machine lacks {missing}")
            continue
        with (
            run.scratch("cluster") as directory,
            hosts.cluster(kind, directory, keeps_removed=False) as cluster,
        ):
            local = directory / "local"
            local.mkdir()
            for group, work in (("cluster", measure), ("cluster_managers", measure_managers)):
                title = f"{readable_size(run.effort.state_bytes)}, two hosts, {kind}"
                run.begin(title)
                megabytes = run.effort.state_bytes >> 20
                settings = str(cluster.path), str(local), megabytes, run.effort.rounds
                times = cluster.run(work, *settings, patience=3600.0)[0]
                _add(run, f"{group}_{kind.replace(' ', '_')}", title, times)
