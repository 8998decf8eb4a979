"""The work of ranks on hosts that share a file system, or do not."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from torch_ckpt import CheckpointManager, FileSystemReader, FileSystemWriter, ReadOptions
from torch_ckpt._base.machine import boot_id
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
    return [info.step for info in open_steps(f"{root}/run").entries(leftovers=False)]


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


def save_on_own_disks(root: str) -> list[str]:
    """Returns the error of each API."""

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
    return errors
