"""torch_ckpt.LoadPlanner with dcp.load."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.loads import refusal
from tests.support import assert_equal, emptied, f32, load, nested_state, save


def loaded_by(state: dict[str, Any], path: Path, **options: Any) -> None:
    load(state, path, planner=torch_ckpt.LoadPlanner(**options))


def test_nested_tensors_are_loaded_in_place_and_objects_are_replaced(tmp_path: Path) -> None:
    state = nested_state() | {"names": ["a", "b"]}
    save(state, tmp_path)
    loaded = emptied(state)
    weight = loaded["model"]["weight"]
    loaded_by(loaded, tmp_path)
    assert loaded["model"]["weight"] is weight
    assert_equal(loaded, state)


def test_a_state_that_does_not_fit_is_refused_before_anything_changes(tmp_path: Path) -> None:
    save({"a": f32(3), "b": f32(3)}, tmp_path)
    loaded = {"a": torch.zeros(3), "b": torch.zeros(4)}
    assert isinstance(refusal(lambda: loaded_by(loaded, tmp_path)), torch_ckpt.LoadMismatch)
    assert_equal(loaded["a"], torch.zeros(3))


@pytest.mark.parametrize("state", [{"b": torch.zeros(3)}, {"a": torch.zeros(4)}], ids=["b", "a"])
def test_a_mismatch_has_the_text_of_torch(tmp_path: Path, state: dict[str, Any]) -> None:
    save({"a": f32(3)}, tmp_path)
    stock, ours = (
        str(refusal(lambda planner=planner: load(dict(state), tmp_path, planner=planner)))
        for planner in (dcp.DefaultLoadPlanner(), torch_ckpt.LoadPlanner())
    )
    assert stock.rstrip(".") in ours


def test_after_a_load_it_has_the_attributes_of_torchs_planner(tmp_path: Path) -> None:
    save(nested_state(), tmp_path)
    ours, stock = torch_ckpt.LoadPlanner(), dcp.DefaultLoadPlanner()
    for _twice in range(2):
        state = nested_state()
        for planner in (ours, stock):
            load(state, tmp_path, planner=planner)
        assert ours.metadata is not None
        assert stock.metadata is not None
        assert ours.metadata.state_dict_metadata == stock.metadata.state_dict_metadata
        assert ours.mappings == stock.mappings
        assert_equal(ours.state_dict, stock.state_dict)
        assert ours.state_dict["model.weight"] is state["model"]["weight"]
    assert not hasattr(ours, "unknown")


def test_a_partial_load_keeps_the_values_of_missing_names(tmp_path: Path) -> None:
    save({"a": f32(3)}, tmp_path)
    loaded = {"a": torch.zeros(3), "new": torch.ones(2)}
    loaded_by(loaded, tmp_path, allow_partial_load=True)
    assert_equal(loaded["a"], f32(3))
    assert_equal(loaded["new"], torch.ones(2))


def dcp_load(state: dict[str, Any], reader: dcp.StorageReader) -> None:
    planner = torch_ckpt.LoadPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


def test_with_the_reader_of_torch_it_is_torchs_planner(tmp_path: Path) -> None:
    save({"w": f32(3), "epoch": 2}, tmp_path)
    loaded = {"w": torch.zeros(3), "epoch": 0}
    dcp_load(loaded, dcp.FileSystemReader(tmp_path))
    assert_equal(loaded["w"], f32(3))
    assert loaded["epoch"] == 2


def test_a_reader_that_returns_our_metadata_fails_instead_of_loading_nothing(
    tmp_path: Path,
) -> None:
    class Borrowing(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            self.ours = torch_ckpt.FileSystemReader(tmp_path)
            return self.ours.read_metadata()

    save({"w": f32(3)}, tmp_path)
    cause = refusal(lambda: dcp_load({"w": torch.zeros(3)}, Borrowing(tmp_path)))
    assert "torch_ckpt.LoadPlanner" in str(cause)


def test_larger_tensors_are_zero_filled_if_the_reader_allows_it(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path)
    loaded = {"w": torch.full((5,), 7.0)}
    dcp_load(loaded, torch_ckpt.FileSystemReader(tmp_path, zero_fill=True))
    assert_equal(loaded["w"], torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]))


def test_a_shard_without_a_location_in_the_metadata_is_named(tmp_path: Path) -> None:
    class Forgetful(torch_ckpt.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            metadata = super().read_metadata(*args, **kwargs)
            metadata.storage_data.clear()
            return metadata

    save({"w": f32(3, 2)}, tmp_path)
    reader, state = Forgetful(tmp_path), {"w": torch.zeros(3, 2)}
    cause = refusal(lambda: dcp.load(state, storage_reader=reader, no_dist=True))
    expected = "w: the metadata gives no location for the shard at offset (0, 0); the save"
    assert str(cause).startswith(expected)


def test_one_planner_can_be_used_for_several_loads(tmp_path: Path) -> None:
    planner = torch_ckpt.LoadPlanner()
    for number in range(2):
        path = tmp_path / str(number)
        save({"w": torch.full((3,), float(number))}, path)
        loaded = {"w": torch.full((3,), -1.0)}
        load(loaded, path, planner=planner)
        assert_equal(loaded["w"], torch.full((3,), float(number)))


def test_metadata_of_our_reader_can_be_read_as_torchs(tmp_path: Path) -> None:
    save({"w": f32(3)}, tmp_path)
    # The reader is deleted before the metadata is read.
    metadata = torch_ckpt.FileSystemReader(tmp_path).read_metadata()
    assert list(metadata.state_dict_metadata) == ["w"]
    assert isinstance(metadata, Metadata)
    assert metadata.__class__ is Metadata
    stock = dcp.FileSystemReader(tmp_path).read_metadata()
    assert metadata.state_dict_metadata == stock.state_dict_metadata
    assert metadata == dataclasses.replace(metadata)
