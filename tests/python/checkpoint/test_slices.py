"""Objects with slices of large tensors are stored without the unused memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.support import assert_equal
from torch_ckpt.checkpoint.objects import decode, pickled

LARGE = torch.arange(250_000.0)


def stored_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.distcp"))


class Loader:
    """An object with a state, which is a slice of its data."""

    def __init__(self, data: torch.Tensor) -> None:
        self.rest = data

    def state_dict(self) -> dict[str, Any]:
        return {"rest": (self.rest, "shuffled")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rest = state["rest"][0]


def by_async_save(state: dict[str, Any], path: Path) -> None:
    torch_ckpt.async_save(state, path).result()


def by_manager(state: dict[str, Any], path: Path) -> None:
    with torch_ckpt.CheckpointManager(path) as manager:
        manager.save(1, state, force=True)


@pytest.mark.parametrize("save", [torch_ckpt.save, by_async_save, by_manager])
def test_an_object_with_a_slice_takes_only_the_bytes_of_the_slice(
    tmp_path: Path, save: Any
) -> None:
    state = {
        "own": torch_ckpt.PerRank((LARGE[10:20], 1)),
        "tuple": (LARGE[5:7], LARGE.view(500, 500)[:, 3]),
        "loader": Loader(LARGE[100:110]),
    }
    save(state, tmp_path / "c")
    assert stored_bytes(tmp_path / "c") < 50_000
    if save is by_manager:
        return
    loaded: dict[str, Any] = {
        "own": torch_ckpt.PerRank((torch.zeros(10), 0)),
        "tuple": (torch.zeros(2), torch.zeros(500)),
        "loader": Loader(torch.zeros(10)),
    }
    torch_ckpt.load(loaded, tmp_path / "c")
    assert_equal(loaded["tuple"], state["tuple"])
    assert_equal(loaded["loader"].rest, LARGE[100:110])
    assert_equal(loaded["own"].value, (LARGE[10:20], 1))


def parts() -> dict[str, Any]:
    shared = LARGE[50:60]
    return {
        "overlapping": [LARGE[0:10], LARGE[5:15], LARGE[5:15]],
        "distant": (LARGE[:3], LARGE[-3:]),
        "columns": (LARGE[5:7], LARGE.view(500, 500)[:, 3], LARGE.view(500, 500)[:, 4]),
        "crossing": (LARGE[0:7], LARGE.view(5000, 50)[:40, 3]),
        "empty": (LARGE[7:7], LARGE[7:9]),
        "same": (shared, shared),
        "parameter": torch.nn.Parameter(LARGE[3:6]),
        "repeated": LARGE[3:4].expand(5),
        "reversed": LARGE.view(500, 500).t()[3:5],
        "conjugate": torch.view_as_complex(LARGE.view(-1, 2))[3:5].conj(),
        "half": torch.ones(1000, dtype=torch.float8_e4m3fn)[3:5],
    }


def mixed() -> dict[str, Any]:
    data = torch.arange(20_000, dtype=torch.int64).to(torch.uint8)
    numbers = data.view(torch.uint32)
    return {
        "bytes first": [data[6:20], numbers[2:4]],
        "numbers first": [numbers[2:4], data[9:21]],
        "three sizes": [data[14:33], data.view(torch.uint64)[2:4], data.view(torch.uint16)[9:14]],
        "two ranges": [data[1:9], numbers[1:2], data[103:120], data.view(torch.uint64)[13:14]],
        "column": [data[6:20], data.view(50, 400)[:, 3], numbers[2:4]],
    }


@pytest.mark.parametrize("name", mixed())
def test_slices_of_one_storage_with_items_of_several_sizes_have_their_values(name: str) -> None:
    stock = io.BytesIO()
    torch.save(mixed()[name], stock)
    data = pickled(mixed()[name])
    assert len(data) < len(stock.getbuffer())
    stock.seek(0)
    assert_equal(torch.load(io.BytesIO(data), weights_only=True), mixed()[name])
    assert_equal(torch.load(stock, weights_only=True), mixed()[name])


@pytest.mark.parametrize("name", parts())
def test_a_slice_has_its_values_and_few_bytes(name: str) -> None:
    data = pickled(value := [parts()[name]])
    assert len(data) < 12_000
    for found in (decode(data, name, "file"), torch.load(io.BytesIO(data), weights_only=True)):
        assert_equal(found, value)


def test_tensors_that_overlap_share_memory_after_a_load() -> None:
    first, second, again = decode(pickled(parts()["overlapping"]), "a", "file")
    first[5] = -1
    assert second[0] == -1
    again[0] = -2
    assert second[0] == -2


def test_objects_without_unused_memory_have_the_bytes_of_torch_save() -> None:
    halves = torch.arange(10.0)
    values: list[Any] = [
        {"a": [torch.ones(3), 1]},
        (halves[:5], halves[5:]),
        torch.nn.GRU(2, 3).state_dict(),
        [torch.eye(3).to_sparse(), torch.zeros(0)],
    ]
    for value in values:
        stream = io.BytesIO()
        torch.save(value, stream)
        assert pickled(value) == stream.getbuffer()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_that_an_object_holds_itself_is_complete() -> None:
    data = torch.zeros(1000, dtype=torch.uint8)
    stream = io.BytesIO(pickled((data[:3], data.untyped_storage())))
    slice_, storage = torch.load(stream, weights_only=False)
    assert storage.nbytes() == 1000
    assert storage.data_ptr() == slice_.data_ptr()
