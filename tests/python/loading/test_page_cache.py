"""The decision whether the ranks of a load read through the page cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt.checkpoint.index import decode_index
from torch_ckpt.loading.page_cache import RankReads, want_same_bytes

ALL = 1000


def reads(bytes: int, digest: int, machine: str = "a") -> RankReads:
    return RankReads(bytes, digest, machine=machine)


RANKS: dict[str, tuple[list[RankReads], int | None, bool]] = {
    "one rank": ([reads(ALL, 1)], ALL, False),
    "two ranks that read everything": ([reads(ALL, 1)] * 2, ALL, True),
    "almost everything": ([reads(ALL, 1), reads(ALL + 8, 2)], ALL, True),
    "two ranks that read the same part": ([reads(ALL // 4, 1)] * 2, ALL, True),
    "two ranks that read halves": ([reads(ALL // 2, 1), reads(ALL // 2, 2)], ALL, False),
    "two machines": ([reads(ALL, 1), reads(ALL, 1, "b")], ALL, False),
    "two ranks on each machine": ([reads(ALL, 1, machine) for machine in "aabb"], ALL, True),
    "unknown machines": ([reads(ALL, 1, "")] * 4, ALL, False),
    "a checkpoint for each rank": ([reads(ALL, rank) for rank in range(4)], None, False),
    "nothing to read": ([reads(0, 0)] * 4, ALL, False),
    "no messages": ([], ALL, False),
}


@pytest.mark.parametrize(("ranks", "stored", "expected"), RANKS.values(), ids=RANKS)
def test_ranks_of_a_machine_share_bytes_if_they_read_more_than_can_differ(
    ranks: list[RankReads], stored: int | None, expected: bool
) -> None:
    assert want_same_bytes(ranks, stored, "a") is expected


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
