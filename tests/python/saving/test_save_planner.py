"""torch_ckpt.SavePlanner: what dcp.save and dcp.async_save write with it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.support import (
    StateDict,
    assert_equal,
    cause_of,
    f32,
    nested_state,
    save_with,
    stock_load,
)
from torch_ckpt.checkpoint.metadata import read_metadata


def saved(state: StateDict, path: Path, planner: torch_ckpt.SavePlanner | None = None) -> Metadata:
    planner = planner or torch_ckpt.SavePlanner()
    return save_with(torch_ckpt.FileSystemWriter(path), state, planner=planner)


def test_stock_torch_loads_what_was_planned_by_the_engine(tmp_path: Path) -> None:
    state = nested_state()
    saved(state, tmp_path)
    loaded = nested_state()
    loaded["model"]["weight"].zero_()
    stock_load(loaded, tmp_path)
    assert_equal(loaded["model"]["weight"], state["model"]["weight"])


def test_the_metadata_that_is_returned_is_that_of_the_directory(tmp_path: Path) -> None:
    metadata = saved({"w": f32(3, 4), "step": 7}, tmp_path)
    assert isinstance(metadata, Metadata)
    assert metadata == read_metadata(tmp_path)


@pytest.mark.parametrize("copied", [copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
def test_metadata_at_which_nobody_has_looked_can_be_copied(tmp_path: Path, copied: object) -> None:
    metadata = saved({"w": f32(3)}, tmp_path)
    assert callable(copied)
    assert copied(metadata) == read_metadata(tmp_path)


def test_one_planner_serves_saves_one_after_the_other(tmp_path: Path) -> None:
    planner = torch_ckpt.SavePlanner()
    for number in range(2):
        state = {"w": torch.full((3,), float(number))}
        saved(state, tmp_path / str(number), planner)
    for number in range(2):
        loaded = {"w": torch.zeros(3)}
        stock_load(loaded, tmp_path / str(number))
        assert_equal(loaded["w"], torch.full((3,), float(number)))


def test_async_save_of_torch_goes_through_the_planner(tmp_path: Path) -> None:
    state = {"w": f32(5, 2), "epoch": 3}
    future = dcp.async_save(
        state,
        storage_writer=torch_ckpt.FileSystemWriter(tmp_path),
        planner=torch_ckpt.SavePlanner(),
        no_dist=True,
    )
    future.result()  # type: ignore[union-attr]
    loaded = {"w": torch.zeros(5, 2), "epoch": 0}
    stock_load(loaded, tmp_path)
    assert loaded["epoch"] == 3
    assert_equal(loaded["w"], state["w"])


def test_the_writer_of_another_library_is_refused_and_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(
            {"w": f32(3)},
            storage_writer=dcp.FileSystemWriter(tmp_path),
            planner=torch_ckpt.SavePlanner(),
            no_dist=True,
        )
    assert "torch_ckpt.FileSystemWriter" in str(cause_of(caught.value))
    assert not (tmp_path / ".metadata").exists()


def test_a_tensor_without_values_is_named(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        saved({"head": torch.empty(3, device="meta")}, tmp_path)
    assert "head" in str(cause_of(caught.value))


def test_after_the_save_the_planner_holds_no_tensor(tmp_path: Path) -> None:
    planner = torch_ckpt.SavePlanner()
    saved({"w": f32(3)}, tmp_path, planner)
    assert all(value is None for value in vars(planner).values())
