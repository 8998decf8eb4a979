"""Ranks that end during a background save."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_ckpt
from tests.ranks import ranks, torchrun
from tests.support import assert_equal, emptied, stock_load
from torch_ckpt import Background


def state_of(rank: int) -> dict[str, Any]:
    """Makes three chunks."""
    return {f"of rank {rank}": torch.arange(3 << 20, dtype=torch.int32) + rank, "step": 1}


def leave_a_save_under_way(_: Connection | None, path: Path) -> None:
    """Leaves a save running while the process group is destroyed and the interpreter ends."""
    dist.init_process_group("gloo")
    slow = Background(max_bytes_per_second=40_000_000)
    torch_ckpt.async_save(
        state_of(dist.get_rank()), path, options=torch_ckpt.WriteOptions(background=slow)
    )
    # Without this barrier gloo's thread sometimes aborts while Python exits (torch 2.15).
    dist.barrier()
    dist.destroy_process_group()


def assert_left_whole(path: Path, size: int) -> None:
    for rank in range(size):
        expected = state_of(rank)
        loaded = emptied(expected)
        stock_load(loaded, path)
        assert_equal(loaded, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_a_save_that_runs_when_the_interpreter_ends_is_complete(tmp_path: Path, size: int) -> None:
    with ranks(size, leave_a_save_under_way, tmp_path) as group:
        assert group.codes() == [0] * size, group.said()
    assert_left_whole(tmp_path, size)


def test_a_save_is_complete_if_the_store_ends_with_its_rank(tmp_path: Path) -> None:
    with ranks(2, leave_a_save_under_way, tmp_path, rank_0_hosts_store=True) as group:
        assert group.codes() == [0, 0], group.said()
    assert_left_whole(tmp_path, 2)


def test_a_save_that_runs_at_the_end_is_complete_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "tests.distributed.test_async_rank_ends", tmp_path)
    assert done.returncode == 0, done.stdout
    assert_left_whole(tmp_path, 2)


if __name__ == "__main__":
    leave_a_save_under_way(None, Path(sys.argv[1]))
