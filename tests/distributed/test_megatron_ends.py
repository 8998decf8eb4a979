"""Ranks that end, or lose their process group, before a save through the Megatron interface
ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.megatron_ends import WAYS
from tests.ranks import by_fork, torchrun
from tests.support import assert_equal, stock_load

pytestmark = pytest.mark.full

PROGRAM = ("-m", "tests.distributed.megatron_ends")


@pytest.mark.parametrize("way", [way for way in WAYS if way != "without_a_process_group"])
def test_the_ranks_exit_with_code_0(tmp_path: Path, way: str) -> None:
    ended = by_fork(2, *PROGRAM, way, tmp_path / "c")
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_a_save_is_complete_although_its_process_group_was_destroyed(tmp_path: Path) -> None:
    ended = torchrun(2, *PROGRAM, "without_a_process_group", tmp_path / "c")
    assert ended.returncode == 0, ended.stdout[-3000:]
    expected = {f"of {rank}": torch.full((9,), rank) for rank in range(2)}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    stock_load(loaded, tmp_path / "c")
    assert_equal(loaded, expected)
