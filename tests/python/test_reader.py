"""Loading: parts of tensors into any kind of target, how much is read, and damage of all kinds."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
import pickle
import random
import re
import signal
import subprocess
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import torch_ckpt
from tests.fresh import in_fresh_process
from tests.support import (
    DTYPES,
    StateDict,
    assert_equal,
    bytes_of,
    cause_of,
    data_files,
    emptied,
    flip_bit,
    load,
    pairwise,
    place_of,
    random_tensor,
    record_of,
    save,
    save_with,
    stock_load,
    stock_save,
    zeros,
)
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe
from torch_ckpt.metadata import read_metadata
from torch_ckpt.progress import Progress

Offsets = tuple[int, ...]


def f32(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_tensor(shape, torch.float32, seed)


class Regions(dcp.DefaultLoadPlanner):
    """Fills each target with the region at an offset of a stored tensor."""

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
    # Numbers, since the signs of NaNs would not survive negation.
    torch.manual_seed(0)
    tensor = torch.randn(40 * scale, 30 * scale)
    offsets, lengths = (tuple(scale * n for n in numbers) for numbers in REGIONS[region])
    save({"weight": STORED[stored_kind](tensor)}, tmp_path, sync_files=False)
    target = TARGETS[target_kind](lengths)
    load_region(tmp_path, "weight", offsets, target)
    assert torch.equal(target, region_of(tensor, offsets, lengths))


@pytest.mark.parametrize("target_kind", ["part of a larger one", "rows of a larger one"])
def test_nothing_around_a_target_is_written(tmp_path: Path, target_kind: str) -> None:
    save({"weight": torch.ones(20, 30)}, tmp_path)
    target = TARGETS[target_kind]((7, 30))
    load_region(tmp_path, "weight", (5, 0), target)
    around = torch.empty(0).set_(target.untyped_storage())
    assert around.sum() == target.sum() == 7 * 30


@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [
        ((0, 0, 0), (2, 9, 11)),
        ((3, 4, 0), (1, 5, 11)),
        ((1, 2, 3), (4, 5, 6)),
        ((6, 8, 10), (1, 1, 1)),
    ],
    ids=str,
)
def test_a_region_of_three_dimensions_is_read(
    tmp_path: Path, offsets: Offsets, lengths: Offsets
) -> None:
    tensor = f32(7, 9, 11)
    save({"weight": tensor}, tmp_path)
    target = torch.zeros(lengths)
    load_region(tmp_path, "weight", offsets, target)
    assert_equal(target, region_of(tensor, offsets, lengths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = random_tensor((9, 5), dtype)
    save({"weight": tensor}, tmp_path)
    target = zeros((4, 5), dtype)
    load_region(tmp_path, "weight", (3, 0), target)
    assert_equal(target, tensor[3:7])


def test_one_stored_tensor_fills_many_targets(tmp_path: Path) -> None:
    tensor = f32(40, 30)
    save({"weight": tensor}, tmp_path)
    offsets = {f"target {i}": ("weight", (3 * i, i)) for i in range(10)}
    state = {name: torch.zeros(8, 15) for name in offsets}
    load(state, tmp_path, planner=Regions(offsets))
    for name, (_stored, (row, column)) in offsets.items():
        assert_equal(state[name], tensor[row : row + 8, column : column + 15])


def test_a_hundred_regions_of_one_large_tensor_are_read(tmp_path: Path) -> None:
    tensor = f32(1000, 500)
    save({"weight": tensor}, tmp_path)
    offsets = {f"target {i}": ("weight", (9 * i, 0)) for i in range(100)}
    state = {name: torch.zeros(20, 500) for name in offsets}
    load(state, tmp_path, planner=Regions(offsets))
    for name, (_stored, (row, _column)) in offsets.items():
        assert_equal(state[name], tensor[row : row + 20])


@pytest.mark.parametrize("offsets", [(30, 0), (0, 25), (2**62, 0)], ids=str)
def test_a_region_outside_the_stored_tensor_is_refused(tmp_path: Path, offsets: Offsets) -> None:
    save({"weight": f32(40, 30)}, tmp_path)
    with pytest.raises(
        dcp.CheckpointException, match=r"weight: the wanted region .* not lie within"
    ):
        load_region(tmp_path, "weight", offsets, torch.zeros(20, 10))


# --- kinds of targets ----------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.int64, torch.complex64])
def test_values_are_cast_to_the_targets_dtype(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensor = torch.arange(-20, 20).reshape(8, 5).to(stored)
    save({"weight": tensor}, tmp_path)
    target = {"weight": torch.zeros(8, 5, dtype=wanted)}
    load(target, tmp_path)
    assert_equal(target["weight"], tensor.to(wanted))


def test_a_parameter_is_filled_in_place_and_stays_a_leaf(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    address = parameter.data_ptr()
    load({"weight": parameter}, tmp_path)
    assert parameter.data_ptr() == address
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert_equal(parameter.detach(), f32(3, 2))


def test_autograd_notices_that_a_load_changed_a_tensor(tmp_path: Path) -> None:
    save({"weight": f32(3)}, tmp_path)
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    load({"weight": weight}, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("stored_kind", STORED)
def test_an_inference_tensor_is_filled(tmp_path: Path, stored_kind: str) -> None:
    save({"weight": STORED[stored_kind](torch.ones(3, 2))}, tmp_path)
    with torch.inference_mode():
        target = torch.zeros(3, 2)
    load({"weight": target}, tmp_path)
    assert torch.equal(target, torch.ones(3, 2))


def test_inference_mode_may_be_on(tmp_path: Path) -> None:
    save({"weight": f32(3, 2), "step": 3}, tmp_path)
    state = {"weight": torch.zeros(3, 2), "step": 0}
    with torch.inference_mode():
        load(state, tmp_path)
    assert_equal(state, {"weight": f32(3, 2), "step": 3})


def test_a_sequence_of_targets_in_one_storage_is_filled(tmp_path: Path) -> None:
    save({"a": f32(5), "b": f32(5, seed=1)}, tmp_path)
    storage = torch.zeros(10)
    load({"a": storage[:5], "b": storage[5:]}, tmp_path)
    assert_equal(storage, torch.cat([f32(5), f32(5, seed=1)]))


@pytest.mark.parametrize("scale", [1, 300], ids=["small", "large"])
def test_a_conjugate_is_read_as_its_values(tmp_path: Path, scale: int) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(4 * scale, 3 * scale, dtype=torch.complex64)
    save({"weight": tensor.conj()}, tmp_path)
    state = {"weight": torch.zeros_like(tensor)}
    load(state, tmp_path)
    assert torch.equal(state["weight"], tensor.conj())


def test_a_target_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"Size mismatch.*\[3, 2\].*\[2, 3\].*weight"):
        load({"weight": torch.zeros(2, 3)}, tmp_path)


class WrongTarget(dcp.DefaultLoadPlanner):
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.zeros(2, 3)


def test_a_planners_target_of_another_size_is_refused_by_name(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    said = r"weight: mismatch sizes: the target has \[2, 3\], the wanted region \[3, 2\]"
    with pytest.raises(dcp.CheckpointException, match=said):
        load({"weight": torch.zeros(3, 2)}, tmp_path, planner=WrongTarget())


def test_a_missing_name_is_refused(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: bias"):
        load({"bias": torch.zeros(2)}, tmp_path)


def test_a_missing_name_is_left_alone_where_that_is_allowed(tmp_path: Path) -> None:
    save({"weight": f32(3, 2)}, tmp_path)
    state = {"bias": torch.ones(2), "weight": torch.zeros(3, 2)}
    load(state, tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert_equal(state, {"bias": torch.ones(2), "weight": f32(3, 2)})


class Noting(dcp.DefaultLoadPlanner):
    """Notes the calls of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.planned: list[str] = []
        self.thread = threading.get_ident()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.planned = [item.dest_index.fqn for item in new_plan.items]
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert threading.get_ident() == self.thread
        self.calls.append(("resolve", read_item.dest_index.fqn))
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        assert threading.get_ident() == self.thread
        assert bytes_of(tensor) == bytes_of(self.state_dict[read_item.dest_index.fqn])
        self.calls.append(("commit", read_item.dest_index.fqn))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        assert value.tell() == 0
        self.calls.append(("bytes", read_item.dest_index.fqn))
        super().load_bytes(read_item, value)


def test_a_load_planners_hooks_are_called_in_pairs_and_in_the_plans_order(tmp_path: Path) -> None:
    state: StateDict = {f"t{i}": f32(5 * i) for i in range(6)} | {"step": 3, "more": f32(2)}
    save(state, tmp_path)
    planner = Noting()
    loaded = emptied(state)
    load(loaded, tmp_path, planner=planner)
    expected = []
    for name in planner.planned:
        if name == "step":
            expected.append(("bytes", name))
        else:
            expected += [("resolve", name), ("commit", name)]
    assert planner.calls == expected
    assert_equal(loaded, state)


class Aside(dcp.DefaultLoadPlanner):
    """Receives elsewhere and copies when a tensor is complete, as a GPU planner does."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor)


def test_a_load_planner_may_receive_elsewhere(tmp_path: Path) -> None:
    state = {"a": f32(30, 4), "b": f32(7)}
    save(state, tmp_path)
    loaded = emptied(state)
    load(loaded, tmp_path, planner=Aside())
    assert_equal(loaded, state)


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
def test_quantized_tensors_are_loaded_as_stock_loads_them(
    tmp_path: Path, channels: bool, saver: Callable[..., Metadata]
) -> None:
    tensor = quantized(channels)
    saver({"weight": tensor}, tmp_path)
    for loader in (load, stock_load):
        state = {"weight": quantized(channels, end=2)}
        loader(state, tmp_path)
        assert torch.equal(state["weight"].dequantize(), tensor.dequantize())


@pytest.mark.filterwarnings("ignore")
def test_the_record_of_a_quantized_tensor_is_torchs(tmp_path: Path) -> None:
    save({"weight": quantized(False)}, tmp_path)
    assert data_files(tmp_path)[0].read_bytes() == record_of(quantized(False))


class Tagged(torch.Tensor):
    """A subclass without state of its own."""


def test_a_tensor_subclass_is_written_as_torch_writes_it(tmp_path: Path) -> None:
    tensor = f32(3, 2).as_subclass(Tagged)
    save({"weight": tensor}, tmp_path)
    assert data_files(tmp_path)[0].read_bytes() == record_of(tensor)


@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_tensor_subclass_is_loaded_where_torch_may_load_it(
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


# --- options -------------------------------------------------------------------------------------

OPTIONS_STATE = {
    "large": f32(1500, 700),
    "transposed": f32(600, 700).t(),
    **{f"small {i}": f32(i + 1, 33, seed=i) for i in range(50)},
    "step": 7,
    "note": "x" * 5000,
}


def direct_io_works(path: Path) -> bool:
    try:
        os.close(os.open(path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("thread_count", "direct_io", "verify"),
    pairwise(itertools.product([1, 2, 8], [True, False, "auto"], [True, False])),
)
def test_every_pair_of_options_reads_the_same(
    tmp_path: Path, thread_count: int, direct_io: bool | str, verify: bool
) -> None:
    if direct_io is True and not direct_io_works(tmp_path):
        pytest.skip("this file system has no direct I/O")
    save(OPTIONS_STATE, tmp_path, sync_files=False)
    loaded = emptied(OPTIONS_STATE)
    load(loaded, tmp_path, thread_count=thread_count, direct_io=direct_io, verify=verify)
    assert_equal(loaded, OPTIONS_STATE)


@pytest.mark.parametrize("direct_io", [True, False, "auto"])
def test_what_the_page_cache_does_not_hold_is_read(tmp_path: Path, direct_io: bool | str) -> None:
    if direct_io is True and not direct_io_works(tmp_path):
        pytest.skip("this file system has no direct I/O")
    save(OPTIONS_STATE, tmp_path)
    for file in data_files(tmp_path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    loaded = emptied(OPTIONS_STATE)
    load(loaded, tmp_path, direct_io=direct_io)
    assert_equal(loaded, OPTIONS_STATE)


def test_temporary_copies_take_turns_under_a_small_limit(tmp_path: Path) -> None:
    state = {f"t{i}": f32(400, 500, seed=i) for i in range(6)}  # 800 kB each
    save(state, tmp_path)
    loaded = {name: torch.zeros(500, 400).t() for name in state}
    load(loaded, tmp_path, max_inflight_bytes=1 << 20)
    assert_equal(loaded, state)


def test_direct_targets_need_no_room_under_the_limit(tmp_path: Path) -> None:
    state = {"large": f32(1500, 1000)}
    save(state, tmp_path)
    loaded = emptied(state)
    load(loaded, tmp_path, max_inflight_bytes=1 << 20)
    assert_equal(loaded, state)


@pytest.mark.parametrize(
    "target", [lambda: torch.zeros(1000, 1500).t(), lambda: torch.zeros(1500, 1000).double()]
)
def test_a_strided_or_converted_tensor_beyond_the_limit_is_read_in_parts(
    tmp_path: Path, target: Callable[[], torch.Tensor]
) -> None:
    large = torch.arange(1_500_000.0).reshape(1500, 1000)
    save({"large": large}, tmp_path)
    loaded = {"large": target()}
    load(loaded, tmp_path, max_inflight_bytes=1 << 20)
    assert torch.equal(loaded["large"].float(), large)


def test_an_object_beyond_the_limit_is_refused_by_name(tmp_path: Path) -> None:
    save({"note": "x" * (2 << 20)}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"note: reading it takes .* at once"):
        load({"note": ""}, tmp_path, max_inflight_bytes=1 << 20)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thread_count": 0}, "thread_count must be at least 1, got 0"),
        ({"max_inflight_bytes": 5}, "max_inflight_bytes must be at least 1048576, got 5"),
        ({"direct_io": 1.5}, "direct_io must be True, False or"),
    ],
    ids=str,
)
def test_the_reader_refuses_options_that_make_no_sense(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        torch_ckpt.FileSystemReader(tmp_path, **options)


def test_progress_of_a_load_grows_to_the_total(tmp_path: Path) -> None:
    save(OPTIONS_STATE, tmp_path)
    seen: list[Progress] = []
    load(emptied(OPTIONS_STATE), tmp_path, progress=seen.append)
    done = [progress.bytes_done for progress in seen]
    tensors = (value for value in OPTIONS_STATE.values() if isinstance(value, torch.Tensor))
    assert done == sorted(done)
    assert done[-1] == seen[-1].bytes_planned == sum(tensor.nbytes for tensor in tensors)


def interrupt(_progress: Progress) -> None:
    signal.raise_signal(signal.SIGINT)


def test_control_c_ends_a_load(tmp_path: Path) -> None:
    save(OPTIONS_STATE, tmp_path)
    with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)) as error:
        load(emptied(OPTIONS_STATE), tmp_path, progress=interrupt)
    assert "KeyboardInterrupt" in error.exconly()


# --- how much is read ----------------------------------------------------------------------------


def bytes_read_so_far() -> int:
    """By all threads of this process, from the page cache too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize("direct_io", [False, "auto"])
def test_a_quarter_of_the_rows_costs_a_quarter_of_the_bytes(
    tmp_path: Path, direct_io: bool | str
) -> None:
    count, rows = 4, 2048
    state = {f"t{i}": f32(rows, 1024, seed=i) for i in range(count)}  # 8 MiB each
    save(state, tmp_path, sync_files=False)
    targets = {name: torch.zeros(rows // 4, 1024) for name in state}
    planner = Regions({name: (name, (rows // 2, 0)) for name in state})
    before = bytes_read_so_far()
    load(targets, tmp_path, planner=planner, direct_io=direct_io)
    cost = bytes_read_so_far() - before
    wanted = sum(target.nbytes for target in targets.values())
    assert wanted <= cost <= 1.05 * wanted
    assert_equal(targets, {name: tensor[1024:1536] for name, tensor in state.items()})


def test_columns_cost_the_rows_that_they_cross(tmp_path: Path) -> None:
    save({"weight": f32(2048, 1024)}, tmp_path, sync_files=False)
    before = bytes_read_so_far()
    load_region(tmp_path, "weight", (512, 7), torch.zeros(512, 5), direct_io=False)
    assert bytes_read_so_far() - before <= 1.05 * 512 * 1024 * 4


def test_a_whole_load_reads_nothing_twice(tmp_path: Path) -> None:
    save(OPTIONS_STATE, tmp_path, sync_files=False)
    loaded = emptied(OPTIONS_STATE)
    stored = sum(file.stat().st_size for file in tmp_path.iterdir())
    before = bytes_read_so_far()
    load(loaded, tmp_path, direct_io=False)
    # The transposed tensor's archive is looked at once more.
    assert bytes_read_so_far() - before <= 1.05 * stored


# --- damage --------------------------------------------------------------------------------------

DAMAGE_STATE = {
    "weight": f32(40, 30),
    "large": f32(600, 500),
    "transposed": f32(17, 13).t(),
    "half": random_tensor((77,), torch.bfloat16),
    "eighth": random_tensor((77,), torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "conj": random_tensor((5, 4), torch.complex64).conj(),
    "step": 7,
    "lr": 0.001,
    "note": "the quick brown fox",
}


def refused_or_right(path: Path) -> bool:
    """Whether a load raises, or gives what was saved; False where it gives something else."""
    loaded = emptied(DAMAGE_STATE)
    try:
        load(loaded, path)
    except dcp.CheckpointException:
        return True
    try:
        assert_equal(loaded, DAMAGE_STATE)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def damaged_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file, which each test damages and repairs again."""
    path = tmp_path_factory.mktemp("damaged")
    save(DAMAGE_STATE, path, thread_count=1)
    return path


def test_a_flipped_bit_anywhere_is_never_loaded(damaged_directory: Path) -> None:
    file = damaged_directory / "__0_0.distcp"
    size = file.stat().st_size
    choice = random.Random(0)
    survivors = []
    for _ in range(200):
        # Evenly among the records, so that the small ones get their share.
        metadata = torch_ckpt.FileSystemReader(damaged_directory).read_metadata()
        name = choice.choice(sorted(DAMAGE_STATE))
        place = place_of(metadata, name)
        byte, bit = place.offset + choice.randrange(place.length), choice.randrange(8)
        flip_bit(file, byte, bit)
        if not refused_or_right(damaged_directory):
            survivors.append((name, byte - place.offset, bit))
        flip_bit(file, byte, bit)
    assert file.stat().st_size == size
    assert not survivors


def every_bit_of(path: Path, name: str) -> list[tuple[int, int]]:
    place = place_of(torch_ckpt.FileSystemReader(path).read_metadata(), name)
    return [(place.offset + byte, bit) for byte in range(place.length) for bit in range(8)]


@pytest.mark.parametrize("name", ["scalar", "transposed", "lr"])
def test_no_flipped_bit_of_a_small_record_is_loaded(damaged_directory: Path, name: str) -> None:
    file = damaged_directory / "__0_0.distcp"
    reader = torch_ckpt.FileSystemReader(damaged_directory)
    metadata = reader.read_metadata()
    survivors = []
    for byte, bit in every_bit_of(damaged_directory, name):
        flip_bit(file, byte, bit)
        loaded = {name: emptied(DAMAGE_STATE[name])}
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(loaded, metadata, True)
        reader.set_up_storage_reader(metadata, True)
        try:
            reader.read_data(planner.create_local_plan(), planner)
            assert_equal(loaded[name], DAMAGE_STATE[name])
        except AssertionError:
            survivors.append((byte, bit))
        except Exception:
            pass
        flip_bit(file, byte, bit)
    assert not survivors


@pytest.mark.parametrize("name", ["weight", "large", "transposed", "half", "conj", "eighth"])
@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_damaged_payload_is_named_with_tensor_and_file(
    tmp_path: Path, name: str, saver: Callable[..., Metadata]
) -> None:
    saver(DAMAGE_STATE, tmp_path, thread_count=1)
    # Older torch does not return the places of what it stored.
    place = place_of(read_metadata(tmp_path), name)
    data = (tmp_path / place.relative_path).read_bytes()
    record = data[place.offset : place.offset + place.length]
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        payload = archive.read("archive/data/0")
    position = place.offset + record.index(payload) + len(payload) // 2
    flip_bit(tmp_path / place.relative_path, position, 3)
    with pytest.raises(dcp.CheckpointException) as error:
        load(emptied(DAMAGE_STATE), tmp_path)
    cause = cause_of(error.value)
    assert isinstance(cause, Corrupt)
    text = str(cause)
    assert text.startswith(f"{name}: ")
    # The record, or the block of it.
    (said,) = re.findall(rf"{place.relative_path} at byte (\d+): ", text)
    assert place.offset <= int(said) <= position
    assert "the bytes are damaged: CRC-32 0x" in text
    assert "\n" not in text


def test_a_damaged_object_is_named_with_its_file(tmp_path: Path) -> None:
    metadata = save(DAMAGE_STATE, tmp_path, thread_count=1)
    place = place_of(metadata, "note")
    file = tmp_path / place.relative_path
    flip_bit(file, file.read_bytes().index(b"quick brown"), 0)
    with pytest.raises(dcp.CheckpointException, match=r"note: .*__0_0.distcp.*damaged") as error:
        load(emptied(DAMAGE_STATE), tmp_path)
    assert isinstance(cause_of(error.value), Corrupt)


def test_damage_is_not_looked_for_where_verification_is_off(tmp_path: Path) -> None:
    save({"weight": torch.zeros(1000, dtype=torch.uint8)}, tmp_path, thread_count=1)
    (file,) = data_files(tmp_path)
    flip_bit(file, file.read_bytes().index(bytes(900)) + 10, 0)
    state = {"weight": torch.zeros(1000, dtype=torch.uint8)}
    load(state, tmp_path, verify=False)
    assert state["weight"].sum() == 1


def error_of_load(state: StateDict, path: Path) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as error:
        load(emptied(state), path)
    cause = cause_of(error.value)
    assert "\n" not in str(cause), "one sentence"
    return cause


@pytest.mark.parametrize("keep", [0, 1, 1000, -1, -5000])
def test_a_truncated_data_file_is_named(tmp_path: Path, keep: int) -> None:
    state = {"weight": f32(40, 30), "bias": f32(9)}
    save(state, tmp_path, thread_count=1)
    (file,) = data_files(tmp_path)
    size = keep if keep >= 0 else file.stat().st_size + keep
    os.truncate(file, size)
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, Corrupt)
    assert str(cause).startswith(("weight: ", "bias: "))
    assert f"{file} at byte" in str(cause)
    assert f"but the file has {size}" in str(cause)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30)}
    save(state, tmp_path, thread_count=1)
    (file,) = data_files(tmp_path)
    file.unlink()
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == str(file)
    assert "weight" in str(cause)


def test_swapped_data_files_are_noticed(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30), "bias": f32(30, 40)}
    save(state, tmp_path, thread_count=2)
    one, two = data_files(tmp_path)
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, Corrupt)
    assert "the bytes are damaged" in str(cause)


class Casting(dcp.DefaultSavePlanner):
    """Stores another dtype than the one that its plan, and so the metadata, says."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(40, 30), (700, 500)], ids=["small", "large"])
def test_a_record_of_another_dtype_than_the_metadata_says_is_cast_as_stock_does(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    save_with(torch_ckpt.FileSystemWriter(tmp_path), {"weight": tensor}, planner=Casting())
    for loader in (load, stock_load):
        state = {"weight": torch.zeros(shape)}
        loader(state, tmp_path)
        assert_equal(state["weight"], tensor.bfloat16().float())


@pytest.mark.parametrize("kind", ["zeros", "noise", "text"])
def test_a_data_file_of_something_else_is_noticed(tmp_path: Path, kind: str) -> None:
    state = {"weight": f32(40, 30), "bias": f32(3)}
    save(state, tmp_path, thread_count=1)
    (file,) = data_files(tmp_path)
    size = file.stat().st_size
    content = {"zeros": bytes(size), "noise": random.Random(0).randbytes(size), "text": b"x" * size}
    file.write_bytes(content[kind])
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, Corrupt)
    assert str(file) in str(cause)


def test_a_compressed_record_is_refused_by_name(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30)}
    metadata = save(state, tmp_path, thread_count=1)
    place = place_of(metadata, "weight")
    file = tmp_path / place.relative_path
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(file) as archive,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for name in archive.namelist():
            compressed.writestr(name, archive.read(name))
    file.write_bytes(stream.getvalue())
    place.length = len(stream.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "is compressed" in str(error_of_load(state, tmp_path))


def test_a_fifo_in_the_place_of_a_data_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30)}
    save(state, tmp_path, thread_count=1)
    (tmp_path / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "__0_0.distcp")
    cause = error_of_load(state, tmp_path)
    assert "__0_0.distcp: not a regular file" in str(cause)
    assert "weight" in str(cause)


def test_a_directory_in_the_place_of_a_data_file_is_refused(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30)}
    save(state, tmp_path, thread_count=1)
    (tmp_path / "__0_0.distcp").unlink()
    (tmp_path / "__0_0.distcp").mkdir()
    assert "__0_0.distcp: not a regular file" in str(error_of_load(state, tmp_path))


# --- metadata that is damaged or means harm ------------------------------------------------------


def error_of_metadata(path: Path) -> BaseException:
    """What the reader raises; ``dcp.load`` tries another file then and wraps both errors."""
    with pytest.raises(dcp.CheckpointException):
        load({"a": 1}, path)
    with pytest.raises((CheckpointError, OSError)) as error:
        torch_ckpt.FileSystemReader(path).read_metadata()
    assert "\n" not in str(error.value), "one sentence"
    return error.value


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"not a pickle", pickle.dumps({"a": 1})[:-3], pickle.dumps([1])],
    ids=["empty", "zeros", "text", "cut short", "a list"],
)
def test_metadata_that_is_not_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    save({"weight": f32(3)}, tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    cause = error_of_metadata(tmp_path)
    assert isinstance(cause, Corrupt)
    assert str(tmp_path / ".metadata") in str(cause)


def test_a_fifo_in_the_place_of_the_metadata_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    assert ".metadata is not a regular file" in str(error_of_metadata(tmp_path))


def test_a_directory_in_the_place_of_the_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").mkdir()
    assert isinstance(error_of_metadata(tmp_path), IsADirectoryError)


def test_truncated_metadata_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    save({"weight": f32(3), "step": 1}, tmp_path)
    file = tmp_path / ".metadata"
    content = file.read_bytes()
    for size in range(0, len(content), 7):
        file.write_bytes(content[:size])
        with pytest.raises(Corrupt):
            torch_ckpt.FileSystemReader(tmp_path).read_metadata()


class Runs:
    """A pickle that calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


ATTACKS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda mark: Runs(os.system, f"touch {mark}"),
    "eval": lambda mark: Runs(eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Runs(open, str(mark), "w"),
    "getattr": lambda mark: Runs(getattr, "", "format"),
    "subprocess": lambda mark: Runs(subprocess.run, ["touch", str(mark)]),
    "torch.load": lambda mark: Runs(torch.load, str(mark)),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_metadata_that_would_run_code_is_refused(
    tmp_path: Path, attack: str, protocol: int
) -> None:
    save({"weight": f32(3)}, tmp_path)
    mark = tmp_path / "mark"
    content = pickle.dumps(ATTACKS[attack](mark), protocol)
    (tmp_path / ".metadata").write_bytes(content)
    cause = error_of_metadata(tmp_path)
    assert isinstance(cause, Unsafe)
    assert str(tmp_path / ".metadata") in str(cause)
    assert "not on the list" in str(cause)
    assert not mark.exists()


def test_an_attack_inside_good_metadata_is_refused(tmp_path: Path) -> None:
    metadata = save({"weight": f32(3)}, tmp_path)
    mark = tmp_path / "mark"
    metadata.planner_data = {"weight": Runs(os.system, f"touch {mark}")}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert isinstance(error_of_metadata(tmp_path), Unsafe)
    assert not mark.exists()


def test_metadata_of_a_trusted_writer_may_name_more(tmp_path: Path) -> None:
    metadata = save({"weight": f32(3)}, tmp_path)
    metadata.planner_data["more"] = Tagged
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"weight": torch.zeros(3)}
    load(state, tmp_path, allow_pickle=True)
    assert_equal(state["weight"], f32(3))


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "a/../../outside", "..", "", ".", "a\0b"], ids=repr
)
@pytest.mark.parametrize("name", ["weight", "step"])
def test_a_data_file_outside_the_checkpoint_is_refused(
    tmp_path: Path, path: str, name: str
) -> None:
    state = {"weight": f32(3), "step": 1}
    metadata = save(state, tmp_path / "checkpoint", thread_count=1)
    data = data_files(tmp_path / "checkpoint")[0].read_bytes()
    (tmp_path / "outside").write_bytes(data)
    place_of(metadata, name).relative_path = path
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(metadata))
    cause = error_of_load(state, tmp_path / "checkpoint")
    assert isinstance(cause, Unsafe)
    assert str(cause).startswith(f"{name}: ")
    assert repr(path) in str(cause)


def test_a_data_file_in_a_folder_of_the_checkpoint_is_read(tmp_path: Path) -> None:
    state = {"weight": f32(3), "step": 1}
    metadata = save(state, tmp_path, thread_count=1)
    (tmp_path / "rank0").mkdir()
    data_files(tmp_path)[0].rename(tmp_path / "rank0" / "data")
    for info in metadata.storage_data.values():
        info.relative_path = "rank0/data"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = emptied(state)
    load(loaded, tmp_path)
    assert_equal(loaded, state)


@pytest.mark.parametrize("name", ["weight", "step"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", -1),
        ("offset", 2**40),
        ("offset", 2**63),
        ("offset", 2**64 - 1),
        ("offset", 2**70),
        ("offset", "0"),
        ("length", -1),
        ("length", 2**34),
        ("length", 2**64 - 1),
        ("length", 2**70),
        ("length", 1.5),
        ("relative_path", 3),
    ],
    ids=str,
)
def test_metadata_with_impossible_places_is_refused_by_name(
    tmp_path: Path, name: str, field: str, value: Any
) -> None:
    state = {"weight": f32(3), "step": 1}
    metadata = save(state, tmp_path, thread_count=1)
    setattr(place_of(metadata, name), field, value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, CheckpointError)
    assert str(cause).startswith(f"{name}: ")


def test_metadata_that_would_fill_the_memory_is_refused_by_name(tmp_path: Path) -> None:
    metadata = save({"step": 1}, tmp_path, thread_count=1)
    place_of(metadata, "step").length = 2**50
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.CheckpointException, match="a record of 1125899906842624 bytes"):
        load({"step": 0}, tmp_path)


@pytest.mark.parametrize("sizes", [(2**62,), (2**31, 2**31, 2**31), (4,), (3, 1)], ids=str)
def test_metadata_with_impossible_sizes_is_refused(tmp_path: Path, sizes: Offsets) -> None:
    state = {"weight": f32(3)}
    metadata = save(state, tmp_path, thread_count=1)
    stored = metadata.state_dict_metadata["weight"]
    (chunk,) = stored.chunks
    stored.chunks = [dataclasses.replace(chunk, sizes=torch.Size(sizes))]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.CheckpointException):
        load(emptied(state), tmp_path)


def test_metadata_without_a_place_for_an_item_is_refused(tmp_path: Path) -> None:
    # What stock torch publishes when a writing thread of its fails.
    state = {"weight": f32(3), "bias": f32(2)}
    metadata = save(state, tmp_path)
    metadata.storage_data = {
        index: info for index, info in metadata.storage_data.items() if index.fqn != "bias"
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, Corrupt)
    assert str(cause).startswith("bias: ")
    assert "incomplete" in str(cause)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    cause = error_of_metadata(tmp_path / "nothing")
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == str(tmp_path / "nothing")
    assert "no committed checkpoint" in str(cause)


def test_errors_of_a_load_can_be_pickled(tmp_path: Path) -> None:
    # They travel between ranks.
    save({"weight": f32(3)}, tmp_path, thread_count=1)
    data_files(tmp_path)[0].unlink()
    cause = error_of_load({"weight": f32(3)}, tmp_path)
    copy = pickle.loads(pickle.dumps(cause))
    assert type(copy) is type(cause)
    assert (copy.errno, copy.filename) == (cause.errno, cause.filename)


def test_loading_needs_no_writable_directory(tmp_path: Path) -> None:
    save({"weight": f32(3)}, tmp_path)
    before = sorted((file.name, file.stat().st_mtime_ns) for file in tmp_path.iterdir())
    load({"weight": torch.zeros(3)}, tmp_path)
    assert sorted((file.name, file.stat().st_mtime_ns) for file in tmp_path.iterdir()) == before


def test_a_load_leaves_no_file_open(tmp_path: Path) -> None:
    save(OPTIONS_STATE, tmp_path)
    before = os.listdir("/proc/self/fd")
    load(emptied(OPTIONS_STATE), tmp_path)
    assert os.listdir("/proc/self/fd") == before


def save_and_load_before_and_after_a_fork(path: Path) -> int:
    """The exit code of the child; 0 where it got what it saved."""
    warnings.simplefilter("ignore")
    save({"a": torch.ones(1000)}, path)
    load({"a": torch.zeros(1000)}, path)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            state = {"a": torch.zeros(1000)}
            save({"a": torch.ones(1000)}, path)
            load(state, path)
            status = 0 if state["a"].sum() == 1000 else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_saves_and_loads_after_its_parent_did(tmp_path: Path) -> None:
    assert in_fresh_process(save_and_load_before_and_after_a_fork, tmp_path) == 0
