"""The decision whether the ranks of a machine read through the page cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt._core import CheckpointIndex
from torch_ckpt.checkpoint.index import decode_index
from torch_ckpt.loading.page_cache import RankReads, machines_that_share

BYTES = 4 * 100_000


@pytest.fixture
def index(tmp_path: Path) -> CheckpointIndex:
    torch_ckpt.save({"w": torch.zeros(100_000)}, tmp_path)
    return decode_index((tmp_path / ".metadata").read_bytes(), "here")


@pytest.mark.parametrize(
    ("reads", "machines"),
    [
        pytest.param([(BYTES, "a")], [], id="one rank"),
        pytest.param([(BYTES, "a"), (BYTES, "a")], ["a"], id="two ranks that read everything"),
        pytest.param([(BYTES // 2, "a"), (BYTES // 2, "a")], [], id="two ranks that read halves"),
        pytest.param([(BYTES, "a"), (BYTES, "b")], [], id="two machines"),
        pytest.param([(BYTES, "")] * 4, [], id="unknown machines"),
        pytest.param([(BYTES, "a")] * 2 + [(BYTES // 2, "b")] * 2, ["a"], id="one of two machines"),
    ],
)
def test_ranks_of_a_machine_share_bytes_if_they_read_more_than_there_is(
    index: CheckpointIndex, reads: list[tuple[int, str]], machines: list[str]
) -> None:
    given = [RankReads(bytes, machine) for bytes, machine in reads]
    assert machines_that_share(given, index) == frozenset(machines)


def test_ranks_without_an_index_share_nothing() -> None:
    assert machines_that_share([RankReads(BYTES, "a")] * 2, None) == frozenset()


def test_the_bytes_of_a_plan_are_those_of_its_tensors(
    tmp_path: Path, index: CheckpointIndex
) -> None:
    planner = dcp.DefaultLoadPlanner()
    reader = torch_ckpt.FileSystemReader(tmp_path)
    planner.set_up_planner({"w": torch.zeros(100_000)}, reader.read_metadata(), True)
    assert RankReads.of_items(planner.create_local_plan().items, index).bytes == BYTES
