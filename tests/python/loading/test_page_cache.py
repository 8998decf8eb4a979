"""The decision whether the ranks of a load read through the page cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt.checkpoint.index import decode_index
from torch_ckpt.loading.page_cache import RankReads, share_bytes

ALL = 1000


def reads(bytes: int, digest: int, machine: str = "a") -> RankReads:
    return RankReads(bytes, digest, machine)


@pytest.mark.parametrize(
    ("ranks", "stored", "expected"),
    [
        pytest.param([reads(ALL, 1)], ALL, False, id="one rank"),
        pytest.param([reads(ALL, 1)] * 2, ALL, True, id="two ranks that read everything"),
        pytest.param([reads(ALL, 1), reads(ALL + 8, 2)], ALL, True, id="almost everything"),
        pytest.param([reads(ALL // 4, 1)] * 2, ALL, True, id="two ranks that read the same part"),
        pytest.param(
            [reads(ALL // 2, 1), reads(ALL // 2, 2)], ALL, False, id="two ranks that read halves"
        ),
        pytest.param([reads(ALL, 1), reads(ALL, 1, "b")], ALL, False, id="two machines"),
        pytest.param(
            [reads(ALL, 1, machine) for machine in "aabb"],
            ALL,
            True,
            id="two ranks on each machine",
        ),
        pytest.param([reads(ALL, 1, "")] * 4, ALL, False, id="unknown machines"),
        pytest.param(
            [reads(ALL, rank) for rank in range(4)], None, False, id="a checkpoint for each rank"
        ),
        pytest.param([reads(0, 0)] * 4, ALL, False, id="nothing to read"),
        pytest.param([], ALL, False, id="no messages"),
    ],
)
def test_ranks_of_a_machine_share_bytes_if_they_read_more_than_can_differ(
    ranks: list[RankReads], stored: int | None, expected: bool
) -> None:
    assert share_bytes(ranks, stored) is expected


def items_of(path: Path, rows: int) -> RankReads:
    """Describes the plan of torch's planner for the first rows."""
    planner = dcp.DefaultLoadPlanner()
    metadata = torch_ckpt.FileSystemReader(path).read_metadata()
    planner.set_up_planner({"w": torch.zeros(rows, 10)}, metadata, True)
    index = decode_index((path / ".metadata").read_bytes(), "here")
    return RankReads.of_items(planner.create_local_plan().items, index)


def test_a_plan_of_torch_is_described_by_its_tensors(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.zeros(100, 10), "n": 3}, tmp_path)
    assert items_of(tmp_path, 100).bytes == 4 * 100 * 10
    assert items_of(tmp_path, 100) == items_of(tmp_path, 100)


def test_a_reader_forgets_the_decision_with_the_next_load(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.zeros(100)}, tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)
    reader.shares_bytes = True
    torch_ckpt.load({"w": torch.ones(100)}, storage_reader=reader)
    assert not reader.shares_bytes
