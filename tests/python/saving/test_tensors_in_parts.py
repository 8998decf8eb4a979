"""Plain tensors that declare the parts of a larger tensor that they hold (torch 2.15)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from tests.metadata import read_metadata

pytestmark = pytest.mark.skipif(
    not hasattr(planner_helpers, "CheckpointableTensor"), reason="torch knows no such tensors"
)


def in_parts(values: torch.Tensor) -> torch.Tensor:
    """Makes the two halves of a vector, in reverse order and with padding between them."""
    half = len(values) // 2
    local: Any = torch.cat([values[half:], torch.full((1,), -1.0), values[:half]])
    local.global_shape = (2 * half,)
    local.global_offsets = ((half,), (0,))
    local.local_offsets = ((0,), (half + 1,))
    local.local_sizes = ((half,), (half,))
    return local


@pytest.mark.parametrize("kept", [False, True])
def test_the_parts_are_saved_instead_of_the_tensor(tmp_path: Path, kept: bool) -> None:
    values = torch.arange(6.0)
    for number in range(2 if kept else 1):
        torch_ckpt.save({"w": in_parts(values + number), "step": number}, tmp_path)
    stored: Any = read_metadata(tmp_path).state_dict_metadata["w"]
    assert tuple(stored.size) == (6,)
    assert sorted(tuple(chunk.offsets) for chunk in stored.chunks) == [(0,), (3,)]
    full = {"w": torch.zeros(6)}
    torch_ckpt.load(full, tmp_path, names=["w"])
    assert torch.equal(full["w"], values + (1 if kept else 0))


def test_the_parts_are_loaded_at_their_offsets(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.arange(6.0)}, tmp_path)
    target = in_parts(torch.zeros(6))
    torch_ckpt.load({"w": target}, tmp_path)
    assert torch.equal(target, in_parts(torch.arange(6.0)))


def test_the_parts_of_a_shard_are_saved_as_torch_saves_them(
    tmp_path: Path, one_rank_mesh: DeviceMesh
) -> None:
    shard = DTensor.from_local(in_parts(torch.arange(6.0)), one_rank_mesh, [Shard(0)])
    dcp.save({"w": shard}, checkpoint_id=tmp_path / "stock", no_dist=True)
    torch_ckpt.save({"w": shard}, tmp_path / "ours", no_dist=True)
    stock, ours = (read_metadata(tmp_path / name) for name in ("stock", "ours"))
    chunks: list[Any] = [one.state_dict_metadata["w"] for one in (stock, ours)]
    assert chunks[0].chunks == chunks[1].chunks
    full = {"w": torch.zeros(7)}
    torch_ckpt.load(full, tmp_path / "ours")
    assert torch.equal(full["w"], in_parts(torch.arange(6.0)))


class Scattered(torch.Tensor):
    """A tensor that plans its items under other names."""

    def __create_write_items__(self, name: str, _value: Any) -> list[Any]:
        return planner_helpers._create_write_items(f"{name}.part", torch.zeros(3))


def test_a_tensor_that_is_stored_under_other_names_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3).as_subclass(Scattered)}
    with pytest.raises(dcp.CheckpointException, match=r"w: a Scattered .* only be saved by dcp"):
        torch_ckpt.save(state, tmp_path)
    assert not (tmp_path / ".metadata").exists()
