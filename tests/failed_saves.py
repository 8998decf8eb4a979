"""Helpers for tests of failing saves: states to save, and checks of the remaining files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

import torch_ckpt
from tests.support import StateDict, assert_checkpoint, random_tensor

assert_is_checkpoint = assert_checkpoint

THREAD_COUNTS = [1, 2, 3, 4]

# Large enough for direct I/O in each of four files.
LARGE = 4 * (1 << 20) + (64 << 10)


def state_of(seed: int = 0, bytes_in_all: int = LARGE) -> StateDict:
    """Makes four tensors of one size, so that each of up to four files gets data, and more
    items."""
    rows = bytes_in_all // (4 * 4 * 100)
    state: StateDict = {
        f"t{i}": random_tensor((rows, 100), torch.float32, seed + i) for i in range(4)
    }
    return state | {"step": seed, "small": random_tensor((7,), torch.int64, seed)}


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


class Refused(Exception):
    """Raised on purpose."""


class FailingAt(dcp.DefaultSavePlanner):
    """Planner that fails to return the data of one item."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn == self.name:
            raise Refused(self.name)
        return super().resolve_data(write_item)


class StopsBeforeCommit(torch_ckpt.FileSystemWriter):
    """Writer that fails after all data is written and before the commit."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        raise Refused("finish")
