"""The work of ranks on hosts that share a file system, or do not."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from tests.fault_hooks import at_fault_points
from torch_ckpt import (
    CheckpointManager,
    FileSystemReader,
    FileSystemWriter,
    ReadOptions,
    WriteOptions,
)
from torch_ckpt._base.system import boot_id
from torch_ckpt.cli.host_doctor import diagnose_hosts
from torch_ckpt.errors import RootInUse
from torch_ckpt.manager import LocalTier
from torch_ckpt.steps import open_steps


def state_of(seed: int, dim: int = 0) -> dict[str, Any]:
    """Makes a state of DTensors, a replicated tensor and a number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    state: dict[str, Any] = {}
    for number in range(4):
        local = torch.randn(256, 256, generator=generator)
        state[f"t{number}"] = DTensor.from_local(local, mesh, [Shard(dim)])
    return state | {"replicated": torch.full((1000,), float(seed)), "step": seed}


def blank(dim: int = 0) -> dict[str, Any]:
    return {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
        for name, value in state_of(0, dim).items()
    }


def assert_equal(loaded: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        mine = loaded[name]
        if isinstance(value, DTensor):
            mine, value = mine.to_local(), value.to_local()
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def who_am_i() -> list[str]:
    return [socket.gethostname(), boot_id()]


def save_and_load(root: str) -> None:
    """Saves and loads by every API."""
    torch_ckpt.save(state_of(1), f"{root}/plain")
    loaded = blank()
    torch_ckpt.load(loaded, f"{root}/plain")
    assert_equal(loaded, state_of(1))
    torch_ckpt.async_save(state_of(2), f"{root}/async").result()
    loaded = blank()
    torch_ckpt.load(loaded, f"{root}/async", options=ReadOptions(read_once=True))
    assert_equal(loaded, state_of(2))
    dcp.save(state_of(3), storage_writer=FileSystemWriter(f"{root}/dcp"))
    loaded = blank()
    dcp.load(loaded, storage_reader=FileSystemReader(f"{root}/dcp"))
    assert_equal(loaded, state_of(3))
    for dim in (0, 1):
        torch_ckpt.save(tensors_of(state_of(4, dim)), f"{root}/model{dim}", format="safetensors")
        loaded = tensors_of(blank(dim))
        torch_ckpt.load(loaded, f"{root}/model{dim}")
        assert_equal(loaded, tensors_of(state_of(4, dim)))


def publish_and_load(root: str) -> list[int]:
    """Publishes versions, and loads each. Returns the numbers of the versions at the end."""
    for number in (1, 2, 3):
        state = tensors_of(state_of(number, number % 2))
        torch_ckpt.publish(state, f"{root}/policy", number, delta=number > 1, keep=2)
        for path in (f"{root}/policy", f"{root}/policy/latest"):
            loaded = tensors_of(blank(number % 2))
            torch_ckpt.load(loaded, path)
            assert_equal(loaded, state)
        dist.barrier()
    return [info.step for info in open_steps(f"{root}/policy").entries(leftovers=False)]


def replace_step(root: str) -> int:
    """Saves a step, restores it, and saves it with other values. Returns the restored step."""
    with CheckpointManager(f"{root}/run", interval=1) as manager:
        manager.save(1, {"model": state_of(7)})
        manager.wait_until_finished()
    with CheckpointManager(f"{root}/run", interval=1) as manager:
        manager.restore({"model": blank()})
        manager.save(1, {"model": state_of(1)}, force=True)
        manager.wait_until_finished()
    dist.barrier()
    [info] = open_steps(f"{root}/run").entries()
    assert info.epoch == 2
    return restore(root)


def replace_model(root: str) -> list[str]:
    """Saves a model, and replaces it. Loads it by its path and through a link. Returns the names
    beneath the root, as the first host sees them."""
    options = WriteOptions(overwrite=True)
    for seed in (1, 2):
        state = tensors_of(state_of(seed))
        torch_ckpt.save(state, f"{root}/model", format="safetensors", options=options)
        if dist.get_rank() == 0 and seed == 1:
            os.symlink("model", f"{root}/link")
        dist.barrier()
        for name in ("link", "model"):
            loaded = tensors_of(blank())
            torch_ckpt.load(loaded, f"{root}/{name}")
            assert_equal(loaded, state)
        dist.barrier()
    # The client of another host may list names of removed directories.
    return sorted(os.listdir(root)) if dist.get_rank() == 0 else []


def run_manager(root: str) -> list[int]:
    """Saves, deletes, restores and replaces steps. Returns the steps at the end."""
    with CheckpointManager(f"{root}/run", interval=1, keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": state_of(step)})
        manager.wait_until_finished()
    with CheckpointManager(f"{root}/run", interval=1, keep=2) as manager:
        state = {"model": blank()}
        assert manager.restore(state) == 3
        assert_equal(state["model"], state_of(3))
        manager.save(4, {"model": state_of(4)})
        manager.wait_until_finished()
    dist.barrier()
    if dist.get_rank() == 0:  # the other host's client may list names of removed directories
        assert not [name for name in os.listdir(f"{root}/run") if "deleted" in name]
    return [info.step for info in open_steps(f"{root}/run").entries(leftovers=False)]


def save_to_tier(root: str, disks: str) -> list[int]:
    """Saves steps to the disks of the hosts, from which they are copied. Returns the steps beneath
    the root."""
    tier = LocalTier(f"{disks}/{socket.gethostname()}")
    with CheckpointManager(f"{root}/run", interval=1, local=tier) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": state_of(step)})
        manager.wait_until_finished(published=True)
        return manager.all_steps()


def restore_from_tier(root: str, disks: str) -> int:
    """Restores, and checks the values. Returns the step."""
    tier = LocalTier(f"{disks}/{socket.gethostname()}")
    with CheckpointManager(f"{root}/run", interval=1, local=tier) as manager:
        state = {"model": blank()}
        step = manager.restore(state)
        assert_equal(state["model"], state_of(step))
        return step


def overwrite_and_load(path: str, times: int) -> list[str]:
    """Loads after each overwriting save. Returns the errors."""
    errors = []
    for seed in range(times):
        torch_ckpt.save(state_of(seed), path)
        loaded = blank()
        try:
            torch_ckpt.load(loaded, path)
            assert_equal(loaded, state_of(seed))
        except BaseException as error:
            errors.append(f"{seed}: {type(error).__name__}: {error}")
    return errors


def leave_group() -> Callable[[str], None]:
    """Turns each rank into a job of its own. Returns a function that waits until all jobs have
    called it with the same name."""
    store, ranks, rank = _get_default_store(), range(dist.get_world_size()), dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()

    def wait_for_all(name: str) -> None:
        store.set(f"{name} {rank}", "")
        store.wait([f"{name} {each}" for each in ranks])

    return wait_for_all


def start_at_once(root: str) -> str:
    """Starts a job on each rank at the same time. Returns "" for a job that can save, and the error
    of another job."""
    wait_for_all = leave_group()
    wait_for_all("started")
    try:
        manager = CheckpointManager(f"{root}/run", interval=1)
    except RootInUse as error:
        wait_for_all("refused or saved")
        return str(error)
    with manager:
        manager.save(1, {"t": torch.arange(10)})
        manager.wait_until_finished()
        wait_for_all("refused or saved")
    return ""


def save_to_one_directory(path: str, times: int) -> list[str]:
    """Saves from a job on each rank to the same directory, again and again. Then each job loads.
    Returns the errors of the job."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wait_for_all = leave_group()
    state = {f"{rank} {number}": torch.full((10_000,), float(rank)) for number in range(8)}
    errors = []
    try:
        for _ in range(times):
            torch_ckpt.save(state, path)
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}")
    wait_for_all("saved")
    with torch_ckpt.open(path) as checkpoint:
        for name in checkpoint.names:
            value = checkpoint.read(name)
            if not torch.equal(value, torch.full((10_000,), float(name.split()[0]))):
                errors.append(f"{name} has other values")
        if len(checkpoint.names) != 8:
            errors.append(f"{ranks} jobs were mixed: {checkpoint.names}")
    return errors


def store_of_test() -> dist.TCPStore:
    """Connects to the store in which the test and the ranks set keys for each other."""
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def save_while_a_host_dies(root: str, timeout: float) -> list[Any]:
    """Saves steps until the test has killed the other hosts. Returns the steps that were reported,
    and the seconds and the error of the saves since then."""
    store, errors = store_of_test(), []
    manager = CheckpointManager(f"{root}/run", interval=1, timeout=timeout)
    manager.save(1, {"model": state_of(1)})
    manager.wait_until_finished()
    store.set(f"rank {dist.get_rank()} has saved", "")
    store.wait(["killed"])
    begun = time.monotonic()
    for step in (2, 3):
        try:
            manager.save(step, {"model": state_of(step)})
        except BaseException as error:
            errors.append(str(error))
    try:
        manager.close()
    except BaseException as error:
        errors.append(str(error))
    seconds = time.monotonic() - begun
    # The other ranks are dead, so nothing can be exchanged at the end.
    print(json.dumps([seconds, errors]), flush=True)
    os._exit(0)


#: The ranks that stop in a save, and the operation before which they stop.
PHASES = [(1, "open"), (1, "pwrite"), (1, "fsync"), (0, "rename")]


def stop_in_a_save(root: str, rank: int, operation: str) -> None:
    """Saves a step. In the save of the next step, one rank stops before an operation."""
    store = store_of_test()

    def stop(given: str, path: str) -> int:
        if given == operation and "0000000002" in path and dist.get_rank() == rank:
            store.set("stopped", "")
            threading.Event().wait()
        return 0

    with at_fault_points(stop), CheckpointManager(f"{root}/run", interval=1) as manager:
        for step in (1, 2):
            manager.save(step, {"model": state_of(step)})
            manager.wait_until_finished()


def restore(root: str) -> int:
    """Restores the newest step, and checks the values. Returns the step."""
    with CheckpointManager(f"{root}/run", read_only=True) as manager:
        state = {"model": blank()}
        step = manager.restore(state)
    assert_equal(state["model"], state_of(step))
    return step


def save_while_a_client_sleeps(root: str) -> int:
    """Saves a step, and another one while the test has frozen the client of rank 1. Returns the
    step that can be restored."""
    store, rank = store_of_test(), dist.get_rank()
    with CheckpointManager(f"{root}/run", interval=1) as manager:
        manager.save(1, {"model": state_of(1)})
        manager.wait_until_finished()
        store.set(f"rank {rank} has saved", "")
        store.wait(["frozen"])
        store.set(f"rank {rank} saves", "")
        manager.save(2, {"model": state_of(2)})
        manager.wait_until_finished()
    dist.barrier()
    return restore(root)


def diagnose(path: str) -> dict[str, str] | None:
    """Returns the state of each check of the doctor."""
    report = diagnose_hosts(path, measured_bytes=1 << 20)
    return report and {check.what: check.state for check in report.checks}


def save_on_own_disks(root: str) -> tuple[list[str], list[str]]:
    """Returns the error of each API, and the files that the saves have left on this host."""

    def save_by_manager() -> None:
        with CheckpointManager(f"{root}/run", interval=1) as manager:
            manager.save(1, state_of(1))
            manager.wait_until_finished()

    saves = [
        lambda: torch_ckpt.save(state_of(1), f"{root}/plain"),
        lambda: dcp.save(state_of(1), storage_writer=FileSystemWriter(f"{root}/dcp")),
        lambda: torch_ckpt.save(tensors_of(state_of(1)), f"{root}/model", format="safetensors"),
        save_by_manager,
    ]
    errors = []
    for save in saves:
        try:
            save()
        except BaseException as error:
            errors.append(str(error))
        dist.barrier()
    return errors, [str(path) for path in Path(root).rglob("*") if path.is_file()]
