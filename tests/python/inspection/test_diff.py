"""``diff``: differences of values, shapes, dtypes and names, and checkpoints that are equal."""

from __future__ import annotations

import math
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_ckpt
from tests.commands import Run
from tests.metadata import read_metadata
from tests.support import (
    DTYPES,
    StateDict,
    data_files,
    flip_bit,
    place_of,
    random_tensor,
    record_of,
    save,
    stock_save,
)
from torch_ckpt import Checkpoint, CheckpointError
from torch_ckpt._base.progress import Progress
from torch_ckpt.checkpoint.opened import split_into_boxes
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.diff_report import DiffReport, TensorDifference

MIB = 1 << 20

STATE: StateDict = {
    "weight": random_tensor((40, 30), torch.int32).to(torch.float32),
    "ids": torch.arange(12).view(3, 4),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.5),
    "note": "the quick brown fox",
    "step": 7,
}


def compared(
    tmp_path: Path, a: StateDict, b: StateDict, *, write: Callable[..., Any] = save, **options: Any
) -> DiffReport:
    save(a, tmp_path / "a")
    write(b, tmp_path / "b")
    return diff(tmp_path / "a", tmp_path / "b", **options)


def difference(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, **options: Any
) -> TensorDifference:
    (found,) = compared(tmp_path, {"t": a}, {"t": b}, **options).tensors
    return found


def shards(path: Path, name: str, tensor: torch.Tensor, boxes: list[Any]) -> None:
    """Writes a checkpoint of one tensor, with each of its shards in a separate file."""
    path.mkdir()
    chunks, places = [], {}
    for number, (offsets, sizes) in enumerate(boxes):
        part = tensor
        for dim, (begin, length) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, begin, length)
        data = record_of(part.contiguous())
        (path / f"__{number}_0.distcp").write_bytes(data)
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        place = _StorageInfo(f"__{number}_0.distcp", 0, len(data))
        places[MetadataIndex(name, torch.Size(offsets))] = place
    metadata = Metadata(
        {name: TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), chunks)},
        storage_data=places,
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


# --- equal ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [save, stock_save])
def test_two_checkpoints_of_one_state_are_equal(tmp_path: Path, write: Callable[..., Any]) -> None:
    # Random bits of every dtype, which include many NaNs.
    state = STATE | {str(dtype): random_tensor((30, 40), dtype) for dtype in DTYPES}
    report = compared(tmp_path, state, state, write=write)
    assert report.equal, str(report)
    assert report.same == len(state)
    assert f"are equal: {len(state)} names with equal values" in str(report)


def test_different_shards_of_one_tensor_are_equal(tmp_path: Path) -> None:
    tensor = random_tensor((40, 30), torch.float32)
    shards(tmp_path / "rows", "t", tensor, [((0, 0), (25, 30)), ((25, 0), (15, 30))])
    quarters = [((r, c), (20, 15)) for r in (0, 20) for c in (0, 15)]
    shards(tmp_path / "quarters", "t", tensor, quarters)
    save({"t": tensor}, tmp_path / "whole")
    for other in ("quarters", "whole"):
        assert diff(tmp_path / "rows", tmp_path / other).equal


def test_one_changed_element_in_different_shards_is_found(tmp_path: Path) -> None:
    tensor = random_tensor((40, 30), torch.int16)
    shards(tmp_path / "rows", "t", tensor, [((0, 0), (25, 30)), ((25, 0), (15, 30))])
    tensor[31, 17] += 5
    shards(tmp_path / "columns", "t", tensor, [((0, 0), (40, 7)), ((0, 7), (40, 23))])
    (found,) = diff(tmp_path / "rows", tmp_path / "columns").tensors
    assert (found.differing, found.largest_absolute, found.index) == (1, 5, (31, 17))


# --- names, kinds, shapes, dtypes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("b", "attribute", "expected"),
    [
        ({"x": 0}, "kinds", [("x", "a tensor", "an object")]),
        ({"x": torch.zeros(4, 3)}, "shapes", [("x", (3, 4), (4, 3))]),
        ({}, "only_in_a", ["x"]),
        ({"x": torch.zeros(3, 4), "right": 1, "y": torch.ones(1)}, "only_in_b", ["right", "y"]),
    ],
    ids=["kinds", "shapes", "only in a", "only in b"],
)
def test_different_kinds_shapes_and_names_are_reported(
    tmp_path: Path, b: StateDict, attribute: str, expected: list[Any]
) -> None:
    report = compared(tmp_path, {"x": torch.zeros(3, 4), "both": 1}, {"both": 1, **b})
    assert not report.equal
    assert sorted(getattr(report, attribute)) == expected
    assert report.same == (2 if attribute == "only_in_b" else 1)


def test_different_dtypes_are_reported_and_values_are_compared(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    report = compared(tmp_path, {"x": values}, {"x": values.to(torch.bfloat16)})
    assert report.dtypes == [("x", "float32", "bfloat16")]
    assert not report.tensors
    assert not report.equal
    tolerant = diff(tmp_path / "a", tmp_path / "b", atol=0.0)
    assert tolerant.equal
    assert tolerant.dtypes == report.dtypes


@pytest.mark.parametrize(
    ("a", "b", "index", "largest"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 3.5]), (2,), 0.5),
        (torch.tensor([True, False]), torch.tensor([1, 7]), (1,), 7),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1.0j]), (1,), 1.0),
        (torch.tensor([1, -1]), torch.tensor([1, 2**64 - 1], dtype=torch.uint64), (1,), 2**64),
        (torch.tensor([0, 5], dtype=torch.uint8), torch.tensor([0, -5]), (1,), 10),
    ],
    ids=["int and float", "bool and int", "float and complex", "int64 and uint64", "uint8 and int"],
)
def test_values_of_different_dtypes_are_compared_as_numbers(
    tmp_path: Path, a: torch.Tensor, b: torch.Tensor, index: Any, largest: float
) -> None:
    found = difference(tmp_path, a, b)
    assert (found.differing, found.index, found.largest_absolute) == (1, index, largest)


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype.is_floating_point or dtype.is_complex], ids=str
)
def test_a_changed_element_of_any_floating_dtype_is_found(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    a = random_tensor((8, 16), torch.uint8).view(dtype)
    bits = a.clone().view(torch.uint8)
    bits[3, -1] ^= 0x10  # of the last byte, in the exponent
    found = difference(tmp_path, a, bits.view(dtype))
    assert found.outside == 1
    if found.differing is not None:  # else torch cannot convert the dtype
        assert found.differing == 1
        assert found.index == (3, a.size(1) - 1)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [
        (torch.int64, -(2**63), 2**63 - 1, 2**64 - 1),
        (torch.int64, 2**53, 2**53 + 1, 1),
        (torch.uint64, 2**64 - 1, 0, 2**64 - 1),
        (torch.uint64, 2**63, 2**63 - 1, 1),
        (torch.uint32, 2**32 - 1, 0, 2**32 - 1),
        (torch.uint16, 0, 2**16 - 1, 2**16 - 1),
        (torch.int8, -128, 127, 255),
        (torch.bool, True, False, 1),
    ],
)
def test_integers_are_compared_exactly(
    tmp_path: Path, dtype: torch.dtype, a: int, b: int, apart: int
) -> None:
    one, other = (torch.tensor([1, value], dtype=dtype) for value in (a, b))
    found = difference(tmp_path, one, other)
    assert (found.differing, found.index, found.largest_absolute) == (1, (1,), apart)
    assert isinstance(found.largest_absolute, int)


def test_the_count_size_and_index_of_differences_are_reported(tmp_path: Path) -> None:
    a = torch.ones(10, 20)
    b = a.clone()
    b[2, 3], b[7, 19], b[9, 0] = 1.5, -3.0, 1.25
    found = difference(tmp_path, a, b)
    assert (found.elements, found.differing, found.outside) == (200, 3, 3)
    assert (found.largest_absolute, found.index) == (4.0, (7, 19))
    assert found.largest_relative == pytest.approx(4 / 3)
    assert str(found) == (
        "t: 3 of 200 elements differ; largest difference 4 at [7, 19], "
        "largest relative difference 1.33333"
    )


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("a", "b", "differing", "index"),
    [
        ([NAN, NAN, 1.0, complex(NAN, 1)], [NAN, 2.0, NAN, complex(NAN, 1)], 2, (1,)),
        ([INF, INF, 1.0, -INF], [INF, -INF, INF, 5.0], 3, (1,)),
    ],
    ids=["NaN", "infinity"],
)
def test_a_nan_or_infinity_equals_only_itself_within_any_tolerance(
    tmp_path: Path, a: list[Any], b: list[Any], differing: int, index: tuple[int]
) -> None:
    tolerances = {"atol": 1e300, "rtol": 1e300}
    found = difference(tmp_path, torch.tensor(a), torch.tensor(b), **tolerances)
    assert (found.differing, found.outside, found.index) == (differing, differing, index)
    assert found.largest_absolute == INF


def test_equal_values_with_different_bits_are_equal_and_reported(tmp_path: Path) -> None:
    a = torch.tensor([0.0, math.nan])
    b = torch.tensor([0x80000000, 0x7FC00001], dtype=torch.int64).to(torch.uint32)
    report = compared(tmp_path, {"t": a}, {"t": b.view(torch.float32)})
    assert report.equal
    assert (report.bits, report.tensors) == (["t"], [])


def test_tolerances_are_relative_to_the_second_checkpoint(tmp_path: Path) -> None:
    a, b = torch.tensor([100.0, 1.0, 0.0]), torch.tensor([101.0, 1.0, 0.5])
    report = compared(tmp_path, {"t": a}, {"t": b}, atol=0.5, rtol=0.005)
    assert report.equal
    assert report.tensors[0].differing == 2
    stricter = diff(tmp_path / "a", tmp_path / "b", atol=0.4, rtol=0.0099)
    assert not stricter.equal
    assert stricter.tensors[0].outside == 1


def test_a_transposed_tensor_is_compared_by_index(tmp_path: Path) -> None:
    a = torch.arange(12.0).view(3, 4).t()
    b = a.contiguous().clone()
    b[3, 1] += 1
    assert difference(tmp_path, a, b).index == (3, 1)


def test_large_tensors_are_compared_in_parts(tmp_path: Path) -> None:
    a = random_tensor((50, 1000, 100), torch.int32)
    b = a.clone()
    b[48, 999, 99] ^= 1
    b[0, 0, 0] ^= 2
    found = difference(tmp_path, a, b, max_inflight_bytes=8 * MIB)
    assert (found.differing, found.largest_absolute, found.index) == (2, 2, (0, 0, 0))


def test_the_values_of_a_wave_are_freed_before_the_next_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_boxes = Checkpoint.read_boxes
    parts: list[weakref.ref[torch.Tensor]] = []
    held: list[int] = []

    def watched(stored: Checkpoint, boxes: Any) -> list[torch.Tensor]:
        read = read_boxes(stored, boxes)
        parts.extend(map(weakref.ref, read))
        alive = [part for reference in parts if (part := reference()) is not None]
        held.append(sum(part.nbytes for part in alive))
        return read

    monkeypatch.setattr(Checkpoint, "read_boxes", watched)
    state = {"t": torch.zeros(24 * MIB, dtype=torch.uint8)}
    assert compared(tmp_path, state, state, max_inflight_bytes=8 * MIB).equal
    # Half of the limit is for values; the rest is for the reads and the comparison.
    assert len(held) > 4
    assert max(held) <= 4 * MIB


def test_many_small_tensors_are_compared_together(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((3,), float(i)) for i in range(500)}
    other = {**state, "t77": torch.zeros(3), "t499": torch.ones(3)}
    report = compared(tmp_path, state, other)
    assert [tensor.name for tensor in report.tensors] == ["t77", "t499"]
    assert report.same == 498


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((), 1),
        ((7,), 3),
        ((4, 5), 5),
        ((4, 5), 4),
        ((2, 3, 4), 1),
        ((3, 1, 7, 2), 5),
        ((2, 9), 100),
    ],
)
def test_boxes_cover_the_tensor(shape: tuple[int, ...], most: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int64)
    for offsets, lengths in split_into_boxes(shape, most):
        assert math.prod(lengths) <= most
        part = seen
        for dim, (begin, length) in enumerate(zip(offsets, lengths, strict=True)):
            part = part.narrow(dim, begin, length)
        part += 1
    assert (seen == 1).all()


def test_quantized_tensors_are_compared_by_their_bytes(tmp_path: Path) -> None:
    values = torch.randn(30, 30, generator=torch.Generator().manual_seed(5))
    one, other = (torch.quantize_per_tensor(values, scale, 0, torch.quint8) for scale in (0.1, 0.2))
    report = compared(tmp_path, {"same": one, "q": one}, {"same": one, "q": other})
    (found,) = report.tensors
    assert (found.name, found.differing) == ("q", None)
    assert not report.equal
    assert report.same == 1


# --- objects -------------------------------------------------------------------------------------


def test_objects_are_compared_by_their_bytes(tmp_path: Path) -> None:
    a = {"same": [1, 2], "step": 7, "note": "x" * 100}
    report = compared(tmp_path, a, {**a, "step": 8, "note": "x" * 101}, write=stock_save)
    assert sorted(report.objects) == ["note", "step"]
    assert report.same == 1
    assert not report.equal


class Boom:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('unpickled')",)


def test_objects_are_never_unpickled(tmp_path: Path) -> None:
    assert compared(tmp_path, {"x": Boom()}, {"x": Boom()}).equal


def test_objects_larger_than_the_memory_are_compared(tmp_path: Path) -> None:
    a = bytes(9 * MIB)
    b = a[:-1] + b"x"
    states = {"same": a, "x": a}, {"same": a, "x": b}
    report = compared(tmp_path, *states, max_inflight_bytes=8 * MIB)
    assert (report.objects, report.same) == (["x"], 1)


# --- checkpoints that cannot be read -------------------------------------------------------------


def test_damage_is_an_error_and_not_a_difference(tmp_path: Path) -> None:
    for name in "ab":
        save(STATE, tmp_path / name, thread_count=1)
    place = place_of(read_metadata(tmp_path / "b"), "weight")
    flip_bit(data_files(tmp_path / "b")[0], place.offset + 1000, 0)
    with pytest.raises(torch_ckpt.Corrupt, match="weight"):
        diff(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("atol", -1.0, "atol must not be negative"),
        ("rtol", math.nan, "rtol must not be negative"),
        ("max_inflight_bytes", MIB, "max_inflight_bytes must be at least"),
    ],
)
def test_options_out_of_range_are_refused(
    tmp_path: Path, option: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        diff(tmp_path, tmp_path, **{option: value})


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    seen: list[Progress] = []
    state = {"a": torch.zeros(100, 3), "b": torch.zeros(7)}
    compared(tmp_path, state, state, progress=seen.append)
    assert seen[-1].bytes_done == seen[-1].bytes_planned == 2 * 307 * 4


# --- the command line ----------------------------------------------------------------------------


def test_the_commands_exit_code_depends_on_equality(tmp_path: Path, run: Run) -> None:
    save({"x": torch.tensor([1.0, 2.0])}, tmp_path / "a")
    stock_save({"x": torch.tensor([1.0, 2.5])}, tmp_path / "b")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    run("diff", a, a)
    run("diff", a, b, code=1)
    assert "values: x: 1 of 2 elements differ; largest difference 0.5 at [1]" in run.out
    run("diff", a, b, "--atol", "0.6")
    assert "beyond the tolerances" in run("diff", a, b, "--rtol", "1e-3", code=1)
    run("diff", a, tmp_path / "none", code=2)
    assert "there is no such directory" in run.err


def test_names_select_the_compared_values(tmp_path: Path) -> None:
    common = {"model": {"a": torch.zeros(3), "b": 1}, "modelling": 1}
    save({**common, "step": 1, "only a": 1}, tmp_path / "a")
    save({**common, "step": 2, "only b": 1}, tmp_path / "b")
    assert not diff(tmp_path / "a", tmp_path / "b").equal
    report = diff(tmp_path / "a", tmp_path / "b", ["model"])
    assert (report.equal, report.same) == (True, 2)
    report = diff(tmp_path / "a", tmp_path / "b", ["only*"])
    assert (report.only_in_a, report.only_in_b, report.objects) == (["only a"], ["only b"], [])
    with pytest.raises(CheckpointError, match="no name matches other"):
        diff(tmp_path / "a", tmp_path / "b", ["other"])


def test_the_command_can_print_only_differences(tmp_path: Path, run: Run) -> None:
    save({"x": torch.zeros(3), "n": 1}, tmp_path / "a")
    save({"x": torch.zeros(3), "n": 2}, tmp_path / "b")
    both = [tmp_path / "a", tmp_path / "b"]
    assert run("diff", *both, "x", "--quiet") == ""
    assert "object: n: the stored bytes differ" in run("diff", *both, "--quiet", code=1)
