"""Loads of parts of tensors into any kind of target, and the bytes that they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from tests.support import (
    DTYPES,
    assert_equal,
    cause_of,
    data_files,
    f32,
    load,
    random_tensor,
    record_of,
    save,
    stock_load,
    stock_save,
    zeros,
)
from torch_ckpt import Corrupt

Offsets = tuple[int, ...]


class Regions(dcp.DefaultLoadPlanner):
    """Planner that fills each target with the region at an offset of the stored tensor."""

    def __init__(self, offsets: dict[str, Offsets]) -> None:
        super().__init__()
        self.offsets = offsets

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, offsets in self.offsets.items():
            zero = torch.Size([0] * len(offsets))
            index = MetadataIndex(name, zero)
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=index,
                    dest_offsets=zero,
                    storage_index=index,
                    storage_offsets=torch.Size(offsets),
                    lengths=self.state_dict[name].size(),
                )
            )
        return LoadPlan(items)


def load_region(path: Path, offsets: Offsets, target: torch.Tensor) -> None:
    load({"weight": target}, path, planner=Regions({"weight": offsets}))


# --- parts of tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize(("offsets", "lengths"), [((5, 0), (0, 30)), ((0, 30), (40, 0))], ids=str)
def test_a_region_without_elements_is_read_beside_others(
    tmp_path: Path, offsets: Offsets, lengths: Offsets
) -> None:
    """test_layouts.py reads regions with elements into targets of any layout."""
    state = {"weight": f32(40, 30), "other": f32(40, 30, seed=1)}
    save(state, tmp_path)
    targets = {"weight": torch.zeros(lengths), "other": torch.zeros(20, 30)}
    load(targets, tmp_path, planner=Regions({"weight": offsets, "other": (20, 0)}))
    assert_equal(targets["other"], state["other"][20:])


@pytest.mark.parametrize("columns", [slice(None), slice(1, -1)], ids=["rows", "a block"])
def test_memory_around_a_target_is_unchanged(tmp_path: Path, columns: slice) -> None:
    save({"weight": torch.ones(20, 30)}, tmp_path)
    around = torch.zeros(10, 30)
    target = around[2:-1, columns]
    load_region(tmp_path, (5, 0), target)
    assert around.sum() == target.sum() == target.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_tensor((9, 5), dtype)
    save({"weight": tensor}, tmp_path)
    target = zeros((4, 5), dtype)
    load_region(tmp_path, (3, 0), target)
    assert_equal(target, tensor[3:7])


@pytest.mark.parametrize("offsets", [(30, 0), (0, 25), (2**62, 0)], ids=str)
def test_a_region_outside_the_stored_tensor_is_refused(tmp_path: Path, offsets: Offsets) -> None:
    save({"weight": f32(40, 30)}, tmp_path)
    message = r"weight: the requested region .* not lie within"
    with pytest.raises(dcp.CheckpointException, match=message):
        load_region(tmp_path, offsets, torch.zeros(20, 10))


# --- kinds of targets ----------------------------------------------------------------------------


def test_a_parameter_is_loaded_in_place_and_stays_a_leaf(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    address = parameter.data_ptr()
    load({"weight": parameter}, tmp_path)
    assert parameter.data_ptr() == address
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert_equal(parameter.detach(), f32(3, 2))


def test_autograd_detects_that_a_load_changed_a_tensor(tmp_path: Path) -> None:
    save({"weight": f32(3)}, tmp_path)
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    load({"weight": weight}, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_load_works_in_inference_mode(tmp_path: Path) -> None:
    save({"weight": f32(3, 2), "step": 3}, tmp_path)
    state = {"weight": torch.zeros(3, 2), "step": 0}
    with torch.inference_mode():
        load(state, tmp_path)
    assert_equal(state, {"weight": f32(3, 2), "step": 3})


class WrongTarget(dcp.DefaultLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.zeros(2, 3)


def test_a_planners_target_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    message = r"weight: size mismatch: the target has \[2, 3\], the requested region has \[3, 2\]"
    with pytest.raises(dcp.CheckpointException, match=message):
        load({"weight": torch.zeros(3, 2)}, tmp_path, planner=WrongTarget())


# --- what only torch.load reads ------------------------------------------------------------------


def quantized(channels: bool, end: float = 3) -> torch.Tensor:
    values = torch.linspace(-3, end, 24).reshape(4, 6)
    if channels:
        scales, zero_points = torch.full((4,), 0.05), torch.zeros(4, dtype=torch.int64)
        return torch.quantize_per_channel(values, scales, zero_points, 0, torch.qint8)
    return torch.quantize_per_tensor(values, 0.05, 3, torch.quint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("channels", [False, True], ids=["per tensor", "per channel"])
@pytest.mark.parametrize("saver", [save, stock_save])
def test_quantized_tensors_are_loaded_as_by_stock(
    tmp_path: Path, channels: bool, saver: Callable[..., Metadata]
) -> None:
    tensor = quantized(channels)
    saver({"weight": tensor}, tmp_path)
    for loader in (load, stock_load):
        state = {"weight": quantized(channels, end=2)}
        loader(state, tmp_path)
        assert torch.equal(state["weight"].dequantize(), tensor.dequantize())


class Tagged(torch.Tensor):
    """Subclass without additional state."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_quantized", [False, True])
def test_the_record_of_a_tensor_that_only_torch_reads_equals_torchs(
    tmp_path: Path, is_quantized: bool
) -> None:
    tensor = quantized(False) if is_quantized else f32(3, 2).as_subclass(Tagged)
    save({"weight": tensor}, tmp_path)
    assert data_files(tmp_path)[0].read_bytes() == record_of(tensor)


@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_tensor_subclass_is_refused_by_name_unless_torch_may_load_it(
    tmp_path: Path, saver: Callable[..., Metadata]
) -> None:
    saver({"weight": f32(3, 2).as_subclass(Tagged)}, tmp_path)
    state = {"weight": torch.zeros(3, 2)}
    message = r"weight: the record in __0_0.distcp at"
    with pytest.raises(dcp.CheckpointException, match=message) as error:
        load(state, tmp_path)
    assert isinstance(cause_of(error.value), Corrupt)
    with torch.serialization.safe_globals([Tagged]):
        load(state, tmp_path)
    assert_equal(state["weight"], f32(3, 2))


def test_a_target_of_a_subclass_is_filled(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    target = torch.zeros(3, 2).as_subclass(Tagged)
    load({"weight": target}, tmp_path)
    assert_equal(target.as_subclass(torch.Tensor), f32(3, 2))
