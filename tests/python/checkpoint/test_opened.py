"""The checkpoint that a save returns, and checkpoints that are opened and read value by value."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from tests.loads import MIB, SAVERS
from tests.support import assert_equal, emptied, open_descriptors, stock_load
from torch_ckpt import CheckpointError

STATE = {"weight": torch.arange(4)}


def test_metadata_is_read_on_demand(tmp_path: Path) -> None:
    saved = torch_ckpt.save(STATE, tmp_path / "c")
    assert set(saved.metadata().state_dict_metadata) == {"weight"}
    (tmp_path / "c").rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        saved.metadata()


def test_the_metadata_of_a_later_save_is_refused(tmp_path: Path) -> None:
    first = torch_ckpt.save(STATE, tmp_path)
    second = torch_ckpt.async_save(STATE, tmp_path).result()
    with pytest.raises(CheckpointError, match="another save has replaced"):
        first.metadata()
    assert set(second.metadata().state_dict_metadata) == {"weight"}


def test_a_checkpoint_keeps_no_file_open(tmp_path: Path) -> None:
    before = open_descriptors()
    saved = torch_ckpt.save(STATE, tmp_path / "c")
    saved.metadata()
    assert open_descriptors() <= before


def test_a_checkpoint_can_be_pickled(tmp_path: Path) -> None:
    saved = pickle.loads(pickle.dumps(torch_ckpt.save(STATE, tmp_path)))
    assert saved.path == str(tmp_path)
    assert set(saved.metadata().state_dict_metadata) == {"weight"}


# --- values that are read one by one -------------------------------------------------------------

NESTED = {
    "model": {"weight": torch.arange(12.0).reshape(3, 4), "half": torch.ones(5).bfloat16()},
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "step": 3,
    "text": ["a", "b"],
}
NAMES = ["empty", "model.half", "model.weight", "scalar", "step", "text"]


@pytest.mark.parametrize("saver", SAVERS)
def test_every_value_is_read_as_stock_loads_it(tmp_path: Path, saver: Any) -> None:
    saver(NESTED, tmp_path)
    expected = emptied(NESTED)
    stock_load(expected, tmp_path)
    with torch_ckpt.open(tmp_path) as checkpoint:
        assert sorted(checkpoint.names) == NAMES
        assert_equal(checkpoint.read("model.weight"), expected["model"]["weight"])
        assert_equal(checkpoint.read("model.half"), expected["model"]["half"])
        assert_equal(checkpoint.read("empty"), expected["empty"])
        assert_equal(checkpoint.read("scalar"), expected["scalar"])
        assert checkpoint.read("step") == expected["step"]
        assert checkpoint.read("text") == expected["text"]
        assert checkpoint.tensor("model.half") == (torch.bfloat16, (5,))
        assert checkpoint.tensor("step") is None


@pytest.mark.parametrize(
    "box", [((0, 0), (6, 4)), ((1, 1), (4, 2)), ((5, 3), (1, 1)), ((2, 0), (0, 4))]
)
def test_a_box_is_read_from_several_shards(
    tmp_path: Path, one_rank_mesh: DeviceMesh, box: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    whole = torch.arange(24).reshape(6, 4)
    torch_ckpt.save({"t": distribute_tensor(whole, one_rank_mesh, [Shard(0)])}, tmp_path)
    (row, column), (rows, columns) = box
    with torch_ckpt.open(tmp_path) as checkpoint:
        assert_equal(checkpoint.read("t", box), whole[row : row + rows, column : column + columns])


WRONG = [
    ((0, 0), (4, 4)),
    ((3, 0), (1, 4)),
    ((-1, 0), (1, 4)),
    ((0, 0), (-1, 4)),
    ((0,), (1,)),
    ((0, 0, 0), (1, 1, 1)),
    ((0, 1), (1, 1 << 62)),
]


@pytest.mark.parametrize("box", WRONG)
def test_a_box_outside_of_the_tensor_is_refused(tmp_path: Path, box: Any) -> None:
    torch_ckpt.save({"t": torch.zeros(3, 4), "step": 1}, tmp_path)
    expected = pytest.raises(ValueError, match=r"t has the shape \[3, 4\], so it has no box of")
    with torch_ckpt.open(tmp_path) as checkpoint, expected:
        checkpoint.read("t", box)


def test_an_object_has_no_boxes_and_an_unknown_name_has_no_value(tmp_path: Path) -> None:
    torch_ckpt.save({"step": 1}, tmp_path)
    with torch_ckpt.open(tmp_path) as checkpoint:
        with pytest.raises(ValueError, match="step is an object"):
            checkpoint.read("step", ((), ()))
        with pytest.raises(KeyError, match="steps"):
            checkpoint.read("steps")


def test_an_open_checkpoint_is_read_although_a_later_save_replaces_it(tmp_path: Path) -> None:
    torch_ckpt.save({"t": torch.zeros(MIB)}, tmp_path / "c")
    with torch_ckpt.open(tmp_path / "c") as checkpoint:
        torch_ckpt.save({"t": torch.ones(MIB)}, tmp_path / "c")
        assert not checkpoint.read("t").any()
    with torch_ckpt.open(tmp_path / "c") as checkpoint:
        assert checkpoint.read("t").all()


def test_a_closed_checkpoint_leaves_no_file_open_and_opens_again(tmp_path: Path) -> None:
    torch_ckpt.save(STATE, tmp_path / "c")
    before = open_descriptors()
    with torch_ckpt.open(tmp_path / "c") as checkpoint:
        assert open_descriptors() > before
    assert open_descriptors() == before
    assert_equal(checkpoint.read("weight"), STATE["weight"])
    assert open_descriptors() == before


def test_the_newest_step_of_a_root_and_a_safetensors_file_are_opened(tmp_path: Path) -> None:
    with torch_ckpt.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"t": torch.full((2,), float(step))})
    safetensors.torch.save_file({"t": torch.full((2,), 3.0)}, tmp_path / "m.safetensors")
    for path, expected in [
        (tmp_path / "run", 2),
        (tmp_path / "run" / "1", 1),
        (tmp_path / "m.safetensors", 3),
    ]:
        with torch_ckpt.open(path) as checkpoint:
            assert (checkpoint.read("t") == expected).all()
