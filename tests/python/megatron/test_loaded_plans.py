"""Saves that reuse the metadata of a loaded checkpoint, as in a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import SavePlan

from tests.support import random_tensor
from torch_ckpt.megatron import (
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)


class Planner(dcp.DefaultSavePlanner):
    """Plans like Megatron's planner, without an exchange between ranks."""

    can_run_decentralized_global_plan = True

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


def plan(
    state: dict[str, Any], path: Path, loaded: list[SavePlan] | None = None
) -> tuple[Any, ...]:
    return save_state_dict_async_plan(
        state, FileSystemWriterAsync(path), planner=Planner(), loaded_all_plans=loaded
    )


def saved_plans(state: dict[str, Any], path: Path) -> list[SavePlan]:
    """Saves a checkpoint. Returns the plans in its metadata."""
    finalizing = plan(state, path)[0]
    save, preload, arguments = finalizing[0].get_save_function_and_args()
    arguments[1] = preload()
    save(*arguments)
    save_state_dict_async_finalize(*finalizing)
    return CachedMetadataFileSystemReader(path).read_metadata().all_local_plans


def state_of(rows: int) -> dict[str, Any]:
    return {
        "plain": random_tensor((rows, 3), torch.float32),
        "transposed": random_tensor((5, 4), torch.float32).T,
        "number": rows,
    }


def test_the_same_state_has_the_plan_of_the_loaded_checkpoint(tmp_path: Path) -> None:
    loaded = saved_plans(state_of(4), tmp_path / "before")
    *_, is_as_loaded = plan(state_of(4), tmp_path / "after", loaded)
    assert is_as_loaded


def test_another_shape_has_another_plan_than_the_loaded_checkpoint(tmp_path: Path) -> None:
    loaded = saved_plans(state_of(4), tmp_path / "before")
    *_, is_as_loaded = plan(state_of(5), tmp_path / "after", loaded)
    assert not is_as_loaded
