"""Loads by the engine with unusual targets and metadata."""

from __future__ import annotations

import io
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.forked import in_fork, in_fresh_process
from tests.loads import MIB, load, refusal, save
from tests.support import (
    data_files,
    flip_bit,
    place_of,
    process_memory,
    reset_peak_memory,
    stock_save,
)
from torch_ckpt import Corrupt, ReadOptions, _core
from torch_ckpt.checkpoint.source import Source


def test_lack_of_memory_for_an_object_is_a_memory_error(tmp_path: Path) -> None:
    large = 1 << 40
    with open(tmp_path / "a", "wb") as file:
        file.truncate(large)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (large // 2,) * 2)
        with pytest.raises(MemoryError):
            _core.load_bytes(
                [_core.ObjectRead("object", "a", 0, large)],
                directory=_core.Directory(tmp_path),
                tables={},
                options=ReadOptions(
                    thread_count=1, max_inflight_bytes=2 * large, direct_io=False, verify=False
                ),
            )

    in_fork(work)


# --- targets that share memory -------------------------------------------------------------------


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("shape", "stored_shape", "is_transposed", "part"),
    [
        ((2000, 2100), (2000, 2100), False, slice(None)),
        ((100, 100), (50, 100), False, slice(50, None)),
        ((200, 300), (200, 300), True, slice(None)),
    ],
    ids=["the same memory", "a part", "the earlier is stored transposed"],
)
def test_the_later_of_two_names_that_share_memory_wins(
    tmp_path: Path,
    shape: tuple[int, int],
    stored_shape: tuple[int, int],
    is_transposed: bool,
    part: slice,
    verify: bool,
) -> None:
    earlier = torch.ones(shape[::-1]).t() if is_transposed else torch.ones(shape)
    save({"a": earlier, "b": torch.full(stored_shape, 2.0)}, tmp_path)
    for _ in range(5):
        tied = torch.zeros(shape)
        load({"a": tied, "b": tied[part]}, tmp_path, verify=verify)
        assert tied[part].unique().tolist() == [2.0]
        tied[part] = 1.0
        assert tied.unique().tolist() == [1.0]


def test_parts_of_one_tensor_are_read_at_once(tmp_path: Path) -> None:
    # Their rows are interleaved in the target.
    save({"left": torch.full((64, 32), 1.0), "right": torch.full((64, 32), 2.0)}, tmp_path)
    both = torch.zeros(64, 64)
    load({"left": both[:, :32], "right": both[:, 32:]}, tmp_path)
    assert both[:, :32].unique().tolist() == [1.0]
    assert both[:, 32:].unique().tolist() == [2.0]


# --- what is read by way of a copy ---------------------------------------------------------------


def test_a_stock_tensor_that_is_read_in_parts_is_verified(tmp_path: Path) -> None:
    place = place_of(stock_save({"t": torch.ones(2000, 1000)}, tmp_path), "t")
    (file,) = data_files(tmp_path)
    flip_bit(file, place.offset + place.length // 2, 3)
    target = torch.zeros(2000, 1000)._neg_view()
    cause = refusal(lambda: load({"t": target}, tmp_path, max_inflight_bytes=2 * MIB))
    assert isinstance(cause, Corrupt)
    assert str(cause).startswith("t: ")


@pytest.mark.parametrize("columns", [7, 1000])
def test_views_with_gaps_are_filled_at_the_smallest_limit(tmp_path: Path, columns: int) -> None:
    values = torch.arange(3000.0 * columns).reshape(3000, columns)
    save({"t": values}, tmp_path)
    around = torch.full((3000, columns + 5), -1.0)
    load({"t": around[:, 2:-3]}, tmp_path, max_inflight_bytes=MIB)
    assert torch.equal(around[:, 2:-3], values)
    assert around[:, :2].unique().tolist() == [-1.0]
    assert around[:, -3:].unique().tolist() == [-1.0]


def test_elements_that_overlap_in_the_record_are_read_through_a_buffer(tmp_path: Path) -> None:
    # As many elements as the storage has, or torch would save a copy without overlaps.
    values = torch.arange(9.0).as_strided((3, 3), (1, 1))
    stock_save({"t": values}, tmp_path)
    # The engine cannot write into a negated view.
    target = torch.zeros(3, 3)._neg_view()
    load({"t": target}, tmp_path)
    assert torch.equal(target, values)


def test_a_target_with_overlapping_elements_is_refused(tmp_path: Path) -> None:
    save({"t": torch.ones(4, 3)}, tmp_path)
    # torch before 2.13 prints the text of its error, and returns only a status.
    text = "more than one element|torch has reported an error"
    with pytest.raises(dcp.CheckpointException, match=text):
        load({"t": torch.zeros(3).expand(4, 3)}, tmp_path)


# --- objects -------------------------------------------------------------------------------------


def memory_of_an_object(path: Path) -> int:
    """Returns the bytes that reading the object needs."""
    source = Source(path)
    source.open()
    (place,) = source.metadata().storage_data.values()
    reset_peak_memory()
    before = process_memory("VmRSS")
    read = _core.ObjectRead("note", place.relative_path, place.offset, place.length)
    (data,) = source.read_bytes([read])
    stream = io.BytesIO(data)
    assert stream.seek(0, io.SEEK_END) > 0
    return process_memory("VmHWM") - before


def test_the_bytes_of_an_object_are_held_once(tmp_path: Path) -> None:
    save({"note": b"x" * (50 * MIB)}, tmp_path)
    # The tolerance is for the buffers of the threads.
    limit = 50 * MIB + 32 * MIB + 8 * MIB
    assert in_fresh_process(memory_of_an_object, tmp_path) < limit
