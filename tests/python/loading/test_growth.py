"""Targets whose size differs from the stored one, and metadata that does not cover a tensor."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from tests.loads import (
    LOADERS,
    SAVERS,
    Boxes,
    Shape,
    change_metadata,
    dcp_load,
    load,
    mismatch,
    quantized,
    refusal,
    save,
)
from tests.metadata import read_metadata
from tests.support import StateDict, assert_equal, pairwise, random_tensor
from torch_ckpt import Corrupt
from torch_ckpt.checkpoint.metadata import encode_metadata
from torch_ckpt.loading.planned_reads import GrowingSize

#: Stored and wanted shape, and the option that lets them differ.
FITTING: list[tuple[Shape, Shape, str]] = [
    ((), (), "zero_fill"),
    ((3,), (5,), "zero_fill"),
    ((3,), (3,), "zero_fill"),
    ((0,), (4,), "zero_fill"),
    ((3, 4), (5, 4), "zero_fill"),
    ((3, 4), (3, 9), "zero_fill"),
    ((3, 4), (6, 8), "zero_fill"),
    ((2, 3, 4), (4, 5, 6), "zero_fill"),
    ((300, 200), (500, 333), "zero_fill"),
    *(
        ((3, 4), wanted, "allow_shape_mismatch")
        for wanted in ((2, 4), (3, 1), (0, 4), (2, 6), (5, 2), (6, 6), (3, 4))
    ),
]


@pytest.mark.parametrize(
    ("shapes", "loader", "saver"), pairwise(itertools.product(FITTING, LOADERS, SAVERS))
)
def test_the_common_region_of_two_shapes_is_loaded_and_the_rest_zero_filled(
    tmp_path: Path, shapes: tuple[Shape, Shape, str], loader: Any, saver: Any
) -> None:
    stored, wanted, option = shapes
    tensor = random_tensor(stored, torch.int32)
    saver({"t": tensor}, tmp_path)
    target = torch.full(wanted, 7, dtype=torch.int32)
    loader({"t": target}, tmp_path, **{option: True})
    expected = torch.zeros(wanted, dtype=torch.int32)
    common = tuple(slice(0, min(sizes)) for sizes in zip(stored, wanted, strict=True))
    expected[common] = tensor[common]
    assert_equal(target, expected)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "wanted", [torch.full((6, 4), 7.0).t(), torch.full((4, 12), 7.0)[:, ::2]], ids=["t", "strided"]
)
def test_a_larger_target_can_be_strided_and_of_another_dtype(
    tmp_path: Path, loader: Any, wanted: torch.Tensor
) -> None:
    save({"t": torch.ones(2, 3, dtype=torch.int16)}, tmp_path)
    target = wanted.clone(memory_format=torch.preserve_format)
    loader({"t": target}, tmp_path, zero_fill=True)
    expected = torch.zeros(4, 6)
    expected[:2, :3] = 1
    assert torch.equal(target, expected)


@pytest.mark.parametrize("loader", LOADERS)
def test_inference_tensors_are_loaded_and_zero_filled(tmp_path: Path, loader: Any) -> None:
    save({"t": torch.ones(3, 4), "u": torch.ones(2, 3).t(), "q": quantized(4)}, tmp_path)
    with torch.inference_mode():
        state = {"t": torch.full((5, 4), 7.0), "u": torch.zeros(3, 2), "q": quantized(4, end=2)}
    assert state["t"].is_inference()
    loader(state, tmp_path, zero_fill=True)
    assert (state["t"][:3] == 1).all()
    assert (state["t"][3:] == 0).all()
    assert (state["u"] == 1).all()
    assert torch.equal(state["q"].dequantize(), quantized(4).dequantize())


@pytest.mark.parametrize("loader", LOADERS)
def test_a_record_of_another_shape_is_damage(tmp_path: Path, loader: Any) -> None:
    """Damages values that only torch reads. The engine checks the values that it reads itself."""
    save({"t": quantized(4)}, tmp_path)

    def change(stored: Any) -> None:
        stored.size = torch.Size((8, 6))
        stored.chunks = [dcp.metadata.ChunkStorageMetadata(torch.Size((0, 0)), stored.size)]

    change_metadata(tmp_path, change)
    for work in (
        lambda: loader({"t": quantized(8)}, tmp_path),
        lambda: dcp_load({"t": quantized(2)}, tmp_path, planner=Boxes({"t": (5, 0)})),
    ):
        cause = refusal(work)
        assert type(cause) is Corrupt
        assert str(cause).startswith("t: the record in ")
        assert (
            "holds a Tensor of shape [4, 6], but the metadata describes a tensor of shape [8, 6]"
            in str(cause)
        )


REFUSED: list[tuple[Shape, StateDict]] = [
    ((5, 4), {}),
    ((2, 4), {"zero_fill": True}),
    ((9, 3), {"zero_fill": True}),
    ((3,), {"zero_fill": True}),
    ((3, 4, 1), {"zero_fill": True}),
    ((3,), {"allow_shape_mismatch": True}),
]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(("wanted", "options"), REFUSED, ids=str)
def test_a_target_of_another_shape_is_refused(
    tmp_path: Path, loader: Any, wanted: Shape, options: StateDict
) -> None:
    save({"the tensor": torch.ones(3, 4)}, tmp_path)
    target = torch.full(wanted, 7.0)
    cause = refusal(lambda: loader({"the tensor": target}, tmp_path, **options))
    assert "the tensor" in str(cause)
    assert (target == 7).all()


def test_truncated_and_zero_filled_tensors_are_reported(tmp_path: Path) -> None:
    save({"t": torch.ones(3, 3), "u": torch.ones(3, 3)}, tmp_path)
    state = {"t": torch.ones(2, 3), "u": torch.ones(2, 4)}
    report = torch_ckpt.preflight(
        state, tmp_path, options=torch_ckpt.ReadOptions(allow_shape_mismatch=True)
    )
    assert report.fits
    assert [name for name, _stored, _wanted in report.truncated] == ["t", "u"]
    assert [name for name, _stored, _wanted in report.grown] == ["u"]
    assert "2 smaller than stored:\n  t: stored [3, 3], wanted [2, 3]" in str(report)
    state = {"t": torch.ones(5, 3), "u": torch.ones(3, 3)}
    report = torch_ckpt.preflight(state, tmp_path, options=torch_ckpt.ReadOptions(zero_fill=True))
    assert report.fits
    assert report.grown == [("t", torch.Size([3, 3]), torch.Size([5, 3]))]
    assert "t: stored [3, 3], wanted [5, 3]" in str(report)
    assert (state["t"] == 1).all()


def test_a_lost_shard_is_detected_although_shapes_may_differ(tmp_path: Path) -> None:
    save({"t": torch.ones(4)}, tmp_path)
    change_metadata(tmp_path, lambda stored: setattr(stored, "size", torch.Size((8,))))
    cause = refusal(lambda: load({"t": torch.zeros(6)}, tmp_path, allow_shape_mismatch=True))
    assert type(cause) is Corrupt


def test_only_selected_names_are_zero_filled(tmp_path: Path) -> None:
    save({"t": torch.ones(3), "u": torch.ones(3)}, tmp_path)
    state = {"t": torch.full((5,), 7.0), "u": torch.full((5,), 7.0)}
    load(state, tmp_path, zero_fill=True, names=["t"])
    assert state["t"].tolist() == [1, 1, 1, 0, 0]
    assert state["u"].tolist() == [7] * 5


@pytest.mark.parametrize("free", [False, True])
def test_nothing_is_zeroed_if_the_state_does_not_fit(tmp_path: Path, free: bool) -> None:
    save({"t": torch.ones(3), "u": torch.ones(3)}, tmp_path)
    state = {"t": torch.full((5,), 7.0), "u": torch.full((2,), 7.0)}
    mismatch(lambda: load(state, tmp_path, zero_fill=True, free_before_read=free))
    assert state["t"].tolist() == [7] * 5


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saver", SAVERS)
def test_names_that_are_not_utf8_are_loaded(
    tmp_path: Path, saver: Callable[..., object], loader: Callable[..., object]
) -> None:
    saver({"a\udc80": torch.ones(3), "b\udc80": [1, "text"], "\u00e9": torch.ones(2)}, tmp_path)
    state: StateDict = {"a\udc80": torch.zeros(3), "b\udc80": [0, ""], "\u00e9": torch.zeros(2)}
    loader(state, tmp_path)
    assert state["a\udc80"].tolist() == [1, 1, 1]
    assert state["b\udc80"] == [1, "text"]
    assert state["\u00e9"].tolist() == [1, 1]


#: Offsets and sizes of shards of a tensor of [3, 4], and the error.
UNCOVERED: Any = [
    ((), "contain only 0 of the 12 wanted elements"),
    ((((0, 0), (2, 4)),), "contain only 8 of the 12 wanted elements"),
    (
        (((1, 0), (3, 4)),),
        "a shard of [3, 4] at [1, 0], which lies outside the tensor of [3, 4]",
    ),
    ((((0, 0), (4, 4)),), "a shard of [4, 4] at [0, 0], which lies outside"),
    ((((-1, 0), (3, 4)),), "a shard offset of -1"),
    ((((0,), (12,)),), "a shard of [12] at [0], which lies outside"),
]


def chunks(places: Iterable[tuple[Shape, Shape]]) -> list[dcp.metadata.ChunkStorageMetadata]:
    return [
        dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in places
    ]


@pytest.mark.parametrize(
    ("uncovered", "sharded", "zero_fill"),
    pairwise(itertools.product(UNCOVERED, [False, True], [False, True])),
)
def test_metadata_that_does_not_cover_a_tensor_is_damage(
    tmp_path: Path,
    one_rank_mesh: DeviceMesh,
    uncovered: tuple[tuple[tuple[Shape, Shape], ...], str],
    sharded: bool,
    zero_fill: bool,
) -> None:
    places, message = uncovered
    path = tmp_path / "checkpoint"
    save({"t": torch.ones(3, 4)}, path)
    change_metadata(path, lambda stored: setattr(stored, "chunks", chunks(places)))
    target = torch.full((5, 4) if zero_fill else (3, 4), 7.0)
    state = {"t": distribute_tensor(target, one_rank_mesh, [Shard(0)]) if sharded else target}
    cause = refusal(lambda: load(state, path, zero_fill=zero_fill))
    assert type(cause) is Corrupt
    assert str(cause).startswith(("t: the metadata ", "t: the shards in the metadata "))
    assert message in str(cause)
    assert (target == 7).all()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("loader", [load, dcp_load])
def test_a_duplicate_shard_does_not_replace_a_missing_one(
    tmp_path: Path, one_rank_mesh: DeviceMesh, sharded: bool, loader: Callable[..., object]
) -> None:
    path = tmp_path / "checkpoint"
    save({"t": distribute_tensor(torch.ones(4, 3), one_rank_mesh, [Shard(0)])}, path)
    # The shards have as many elements as the tensor, but none of the last row.
    places = [((0, 0), (3, 2)), ((0, 1), (3, 2))]
    metadata = read_metadata(path)
    metadata.state_dict_metadata["t"].chunks = chunks(places)
    [location] = metadata.storage_data.values()
    half = location.length // 2
    metadata.storage_data = {
        MetadataIndex("t", torch.Size(offsets)): replace(location, offset=half * i, length=half)
        for i, (offsets, _) in enumerate(places)
    }
    (path / ".metadata").write_bytes(encode_metadata(metadata))
    target = torch.full((4, 3), 7.0)
    state = {"t": distribute_tensor(target, one_rank_mesh, [Shard(0)]) if sharded else target}
    cause = refusal(lambda: loader(state, path))
    assert type(cause) is Corrupt
    assert str(cause).startswith(
        "t: shards in the metadata overlap, and no shard covers the element at [3, 0]"
    )
    assert (target == 7).all()


def test_a_least_size_equals_every_size_that_is_at_least_as_large() -> None:
    size = GrowingSize((3, 4))
    assert size == (3, 4)
    assert size == torch.Size([5, 4])
    assert not size != torch.Size([5, 4])  # noqa: SIM202
    for other in ((2, 9), (9, 3), (3,), (3, 4, 5), (), [3, 4], None, 3):
        assert size != other
        assert not size == other  # noqa: SIM201
    assert GrowingSize(()) == ()
    assert GrowingSize(()) != (1,)


def test_a_least_size_is_hashed_as_a_tuple_and_pickled_with_its_class() -> None:
    size = GrowingSize((3, 4))
    assert hash(size) == hash((3, 4))
    back = pickle.loads(pickle.dumps(size))
    assert type(back) is GrowingSize
    assert tuple(back) == (3, 4)
    assert size.numel() == 12
