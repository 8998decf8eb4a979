"""The checkpoint's directory is replaced during a load.

The attacker waits until the metadata was read and checked, and then replaces the directory by
another one or by a link: other weights under a name that was accepted. torch opens each file by its
path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.attacks.support import TABLE, Checkpoint
from tests.support import stock_save

ATTACK = "directory: another one between check and open"


class Swapping(dcp.DefaultLoadPlanner):
    """Planner that replaces the directory after the metadata was read."""

    def __init__(self, directory: Path, other: Path) -> None:
        super().__init__()
        self._directory, self._other = directory, other

    def create_local_plan(self) -> Any:
        self._directory.rename(self._directory.with_name("aside"))
        self._other.rename(self._directory)
        return super().create_local_plan()


def swapped(c: Checkpoint) -> Swapping:
    c.save_with_torch()
    evil = {name: value + 1000 for name, value in c.state.items()}
    stock_save(evil, c.folder / "evil")
    return Swapping(c.path, c.folder / "evil")


def test_a_load_reads_the_directory_that_it_has_checked(checkpoint: Checkpoint) -> None:
    TABLE.setdefault(ATTACK, {})["ours"] = "not stopped"
    state = checkpoint.targets()
    reader = torch_ckpt.FileSystemReader(checkpoint.path)
    dcp.load(state, storage_reader=reader, planner=swapped(checkpoint), no_dist=True)
    assert torch.equal(state["weight"], checkpoint.state["weight"])
    TABLE[ATTACK]["ours"] = "stopped: reads what it has opened"


@pytest.mark.torture
def test_the_outcome_of_stock_torch_is_recorded(checkpoint: Checkpoint) -> None:
    planner = swapped(checkpoint)
    state = checkpoint.targets()
    reader = dcp.FileSystemReader(checkpoint.path)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    taken = state["weight"][0, 0] >= 1000
    TABLE.setdefault(ATTACK, {})["stock"] = "read the other" if taken else "read"
