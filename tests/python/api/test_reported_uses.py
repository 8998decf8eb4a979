"""Uses of checkpoints in which other savers have failed, by reports of their users."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torch_ckpt
from tests.forked import forked, in_fork
from tests.support import assert_equal, emptied, open_descriptors
from torch_ckpt import CheckpointManager, RNGState
from torch_ckpt.manager import SaveOptions

State = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


def model_and_optimizer(steps: int = 1) -> tuple[torch.nn.Linear, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_one_caching_planner_saves_changed_values_and_then_another_structure(
    tmp_path: Path,
) -> None:
    planner = DefaultSavePlanner(enable_plan_caching=True)
    states: list[State] = [{"w": torch.arange(8.0) + i, "i": i} for i in range(3)]
    states += [{"w": torch.arange(12.0), "i": 3}]
    states += [{"w": torch.arange(12.0), "i": 4, "new": torch.ones(1)}]
    for i, state in enumerate(states):
        writer = torch_ckpt.FileSystemWriter(tmp_path / str(i))
        dcp.save(state, storage_writer=writer, planner=planner)
        target = emptied(state)
        torch_ckpt.load(target, tmp_path / str(i))
        assert_equal(target, state)


def test_the_metadata_that_a_save_returns_names_the_save(tmp_path: Path) -> None:
    state = {"a": torch.ones(2)}
    writer = torch_ckpt.FileSystemWriter(tmp_path / "dcp")
    returned = [
        torch_ckpt.save(state, tmp_path / "save").metadata(),
        torch_ckpt.async_save(state, tmp_path / "async").result().metadata(),
        dcp.save(state, storage_writer=writer),
        torch_ckpt.FileSystemReader(tmp_path / "save").read_metadata(),
    ]
    for metadata in returned:
        assert metadata.storage_meta is not None
        assert metadata.storage_meta.save_id


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((10,), float(index))


@forked
def test_background_saves_beside_living_loader_workers_leave_no_descriptor_open(
    tmp_path: Path,
) -> None:
    loader = torch.utils.data.DataLoader(
        Numbers(), num_workers=2, batch_size=4, persistent_workers=True
    )

    def epoch() -> int:
        for batch in loader:
            torch_ckpt.async_save({"batch": batch, "row": batch[0]}, tmp_path / "a").result()
        return len(open_descriptors())

    epoch()
    after_two = epoch()
    epoch()
    assert epoch() <= after_two
    target = {"batch": torch.zeros(4, 10)}
    torch_ckpt.load(target, tmp_path / "a", strict=False)
    assert target["batch"][:, 0].tolist() == [4, 5, 6, 7]


@forked
def test_a_child_forked_during_a_background_save_saves_and_loads(tmp_path: Path) -> None:
    state = {"w": torch.arange(100.0)}
    torch_ckpt.save(state, tmp_path / "before")
    entered, leave = threading.Event(), threading.Event()

    def block(_step: int) -> None:
        entered.set()
        leave.wait()

    def child() -> None:
        target = emptied(state)
        torch_ckpt.load(target, tmp_path / "before")
        assert_equal(target, state)
        torch_ckpt.save(state, tmp_path / "by child")
        torch_ckpt.async_save(state, tmp_path / "by child, in background").result()

    with CheckpointManager(tmp_path / "root", saves=SaveOptions(on_commit=block)) as manager:
        manager.save(1, dict(state))
        entered.wait()  # The save is in progress.
        try:
            in_fork(child)
        finally:
            leave.set()


@forked
def test_repeated_saves_keep_no_descriptor_and_no_thread(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()

    def counts_after(root: Path, steps: int) -> tuple[int, int, int]:
        with CheckpointManager(root, keep=2) as manager:
            for step in range(1, steps + 1):
                state = {"m": model, "o": optimizer, "rng": RNGState(), "step": step}
                manager.save(step, state)
        tasks = len(os.listdir("/proc/self/task"))
        return len(open_descriptors()), threading.active_count(), tasks

    early, late = counts_after(tmp_path / "few", 10), counts_after(tmp_path / "many", 50)
    # A save starts threads as it needs them, so a few may be missing early.
    assert late[0] <= early[0], (early, late)
    assert late[1] <= early[1], (early, late)
    assert late[2] <= early[2] + 4, (early, late)


def test_a_tensor_mapped_from_a_safetensors_file_is_saved_over_that_file(tmp_path: Path) -> None:
    expected = torch.arange(500_000.0)
    torch_ckpt.save({"w": expected}, tmp_path / "m", format="safetensors")
    with safe_open(tmp_path / "m" / "model.safetensors", "pt") as file:
        mapped = file.get_tensor("w")
    torch_ckpt.save({"w": mapped}, tmp_path / "m", format="safetensors")
    target = {"w": torch.zeros(500_000)}
    torch_ckpt.load(target, tmp_path / "m")
    assert_equal(target, {"w": expected})
    torch_ckpt.save({"w": expected * 0}, tmp_path / "m", format="safetensors")
    assert_equal(mapped, expected)


def test_gradients_stay_in_a_save_and_in_a_load(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    gradient = model.weight.grad
    assert gradient is not None
    kept = gradient.clone()
    torch_ckpt.save({"m": model, "o": optimizer}, tmp_path / "a")
    assert_equal(model.weight.grad, kept)
    other, other_optimizer = model_and_optimizer(0)
    other(torch.ones(1, 8) * 5).sum().backward()
    assert other.weight.grad is not None
    own = other.weight.grad.clone()
    torch_ckpt.load({"m": other, "o": other_optimizer}, tmp_path / "a")
    assert_equal(other.weight.detach(), model.weight.detach())
    assert_equal(other.weight.grad, own)
    assert other_optimizer.state[other.weight]["step"] == 1
