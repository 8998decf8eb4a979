"""Loads of parts of tensors into any kind of target, and the bytes that they read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from benchmarks.measure import bytes_read
from tests.support import (
    DTYPES,
    assert_equal,
    cause_of,
    data_files,
    f32,
    load,
    pairwise,
    random_tensor,
    record_of,
    save,
    stock_load,
    stock_save,
    zeros,
)
from torch_ckpt.errors import Corrupt

Offsets = tuple[int, ...]


class Regions(dcp.DefaultLoadPlanner):
    """Planner that fills each target with the region at an offset of a stored tensor."""

    def __init__(self, wanted: dict[str, tuple[str, Offsets]]) -> None:
        super().__init__()
        self.wanted = wanted

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, (stored, offsets) in self.wanted.items():
            target = self.state_dict[name]
            zero = torch.Size([0] * len(offsets))
            items.append(
                ReadItem(
                    type=LoadItemType.TENSOR,
                    dest_index=MetadataIndex(name, zero),
                    dest_offsets=zero,
                    storage_index=MetadataIndex(stored, zero),
                    storage_offsets=torch.Size(offsets),
                    lengths=target.size(),
                )
            )
        return LoadPlan(items)


def load_region(
    path: Path, stored: str, offsets: Offsets, target: torch.Tensor, **options: Any
) -> None:
    planner = Regions({"target": (stored, offsets)})
    load({"target": target}, path, planner=planner, **options)


def region_of(tensor: torch.Tensor, offsets: Offsets, lengths: Offsets) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


# --- parts of tensors ----------------------------------------------------------------------------

REGIONS: dict[str, tuple[Offsets, Offsets]] = {
    "everything": ((0, 0), (40, 30)),
    "first rows": ((0, 0), (7, 30)),
    "last rows": ((33, 0), (7, 30)),
    "middle rows": ((11, 0), (13, 30)),
    "one row": ((39, 0), (1, 30)),
    "first columns": ((0, 0), (40, 4)),
    "last columns": ((0, 26), (40, 4)),
    "one column": ((0, 17), (40, 1)),
    "a block": ((5, 6), (7, 8)),
    "one element": ((39, 29), (1, 1)),
    "part of a row": ((4, 3), (1, 20)),
    "no rows": ((5, 0), (0, 30)),
    "no columns": ((0, 30), (40, 0)),
}

TARGETS: dict[str, Callable[[Offsets], torch.Tensor]] = {
    "contiguous": lambda sizes: torch.zeros(sizes),
    "transposed": lambda sizes: torch.zeros(sizes[::-1]).t(),
    "every second column": lambda sizes: torch.zeros(sizes[0], 2 * sizes[1])[:, ::2],
    "part of a larger one": lambda sizes: torch.zeros(sizes[0] + 3, sizes[1] + 2)[2:-1, 1:-1],
    "rows of a larger one": lambda sizes: torch.zeros(sizes[0] + 3, sizes[1])[1:-2],
    "negated": lambda sizes: torch.zeros(sizes)._neg_view(),
}

STORED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row-major": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "negated": lambda tensor: (-tensor)._neg_view(),
}


@pytest.mark.parametrize(
    ("region", "target_kind", "stored_kind", "scale"),
    pairwise(itertools.product(REGIONS, TARGETS, STORED, [1, 32])),
)
def test_a_region_is_read_into_any_target(
    tmp_path: Path, region: str, target_kind: str, stored_kind: str, scale: int
) -> None:
    # Numbers, because negation would not keep the signs of NaNs.
    torch.manual_seed(0)
    tensor = torch.randn(40 * scale, 30 * scale)
    offsets, lengths = (tuple(scale * n for n in numbers) for numbers in REGIONS[region])
    save({"weight": STORED[stored_kind](tensor)}, tmp_path, sync_files=False)
    target = TARGETS[target_kind](lengths)
    load_region(tmp_path, "weight", offsets, target)
    assert torch.equal(target, region_of(tensor, offsets, lengths))


@pytest.mark.parametrize("target_kind", ["part of a larger one", "rows of a larger one"])
def test_memory_around_a_target_is_unchanged(tmp_path: Path, target_kind: str) -> None:
    save({"weight": torch.ones(20, 30)}, tmp_path)
    target = TARGETS[target_kind]((7, 30))
    load_region(tmp_path, "weight", (5, 0), target)
    around = torch.empty(0).set_(target.untyped_storage())
    assert around.sum() == target.sum() == 7 * 30


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_tensor((9, 5), dtype)
    save({"weight": tensor}, tmp_path)
    target = zeros((4, 5), dtype)
    load_region(tmp_path, "weight", (3, 0), target)
    assert_equal(target, tensor[3:7])


@pytest.mark.parametrize("offsets", [(30, 0), (0, 25), (2**62, 0)], ids=str)
def test_a_region_outside_the_stored_tensor_is_refused(tmp_path: Path, offsets: Offsets) -> None:
    save({"weight": f32(40, 30)}, tmp_path)
    with pytest.raises(
        dcp.CheckpointException, match=r"weight: the requested region .* not lie within"
    ):
        load_region(tmp_path, "weight", offsets, torch.zeros(20, 10))


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


@pytest.mark.parametrize("stored_kind", STORED)
def test_an_inference_tensor_is_loaded(tmp_path: Path, stored_kind: str) -> None:
    save({"weight": STORED[stored_kind](torch.ones(3, 2))}, tmp_path)
    with torch.inference_mode():
        target = torch.zeros(3, 2)
    load({"weight": target}, tmp_path)
    assert torch.equal(target, torch.ones(3, 2))


def test_a_load_works_in_inference_mode(tmp_path: Path) -> None:
    save({"weight": f32(3, 2), "step": 3}, tmp_path)
    state = {"weight": torch.zeros(3, 2), "step": 0}
    with torch.inference_mode():
        load(state, tmp_path)
    assert_equal(state, {"weight": f32(3, 2), "step": 3})


def test_a_target_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"Size mismatch.*\[3, 2\].*\[2, 3\].*weight"):
        load({"weight": torch.zeros(2, 3)}, tmp_path)


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


@pytest.mark.filterwarnings("ignore")
def test_the_record_of_a_quantized_tensor_equals_torchs(tmp_path: Path) -> None:
    save({"weight": quantized(False)}, tmp_path)
    assert data_files(tmp_path)[0].read_bytes() == record_of(quantized(False))


class Tagged(torch.Tensor):
    """Subclass without additional state."""


def test_a_tensor_subclass_is_written_as_by_torch(tmp_path: Path) -> None:
    tensor = f32(3, 2).as_subclass(Tagged)
    save({"weight": tensor}, tmp_path)
    assert data_files(tmp_path)[0].read_bytes() == record_of(tensor)


@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_tensor_subclass_is_loaded_if_torch_may_load_it(
    tmp_path: Path, saver: Callable[..., Metadata]
) -> None:
    saver({"weight": f32(3, 2).as_subclass(Tagged)}, tmp_path)
    state = {"weight": torch.zeros(3, 2)}
    with torch.serialization.safe_globals([Tagged]):
        load(state, tmp_path)
    assert_equal(state["weight"], f32(3, 2))


def test_a_tensor_subclass_that_torch_may_not_load_is_refused_by_name(tmp_path: Path) -> None:
    save({"weight": f32(3, 2).as_subclass(Tagged)}, tmp_path)
    with pytest.raises(
        dcp.CheckpointException, match=r"weight: the record in __0_0.distcp at"
    ) as e:
        load({"weight": torch.zeros(3, 2)}, tmp_path)
    assert isinstance(cause_of(e.value), Corrupt)


def test_a_target_of_a_subclass_is_filled(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    target = torch.zeros(3, 2).as_subclass(Tagged)
    load({"weight": target}, tmp_path)
    assert_equal(target.as_subclass(torch.Tensor), f32(3, 2))


@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_reading_a_quarter_of_the_rows_reads_a_quarter_of_the_bytes(
    tmp_path: Path, direct_io: bool | str
) -> None:
    count, rows = 4, 2048
    state = {f"t{i}": f32(rows, 1024, seed=i) for i in range(count)}  # 8 MiB each
    save(state, tmp_path, sync_files=False)
    targets = {name: torch.zeros(rows // 4, 1024) for name in state}
    planner = Regions({name: (name, (rows // 2, 0)) for name in state})
    before = bytes_read()
    load(targets, tmp_path, planner=planner, direct_io=direct_io)
    cost = bytes_read() - before
    wanted = sum(target.nbytes for target in targets.values())
    assert wanted <= cost <= 1.05 * wanted
    assert_equal(targets, {name: tensor[1024:1536] for name, tensor in state.items()})


def test_reading_columns_reads_all_rows_that_they_cross(tmp_path: Path) -> None:
    save({"weight": f32(2048, 1024)}, tmp_path, sync_files=False)
    before = bytes_read()
    load_region(tmp_path, "weight", (512, 7), torch.zeros(512, 5), direct_io=False)
    assert bytes_read() - before <= 1.05 * 512 * 1024 * 4
