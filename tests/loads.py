"""Loads by torch_ckpt.load and by dcp.load with torch_ckpt's reader, for tests of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan

import torch_ckpt
from tests.metadata import read_metadata
from tests.support import StateDict, cause_of, stock_save
from torch_ckpt import LoadMismatch
from torch_ckpt.checkpoint.metadata import encode_metadata

Shape = tuple[int, ...]

MIB = 1 << 20


def save(state: StateDict, path: Path) -> None:
    torch_ckpt.save(state, path, no_dist=True, options=torch_ckpt.WriteOptions(sync_files=False))


def with_read_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Moves the options of a reader that are among the arguments of a load into ReadOptions."""
    names = {option.name for option in fields(torch_ckpt.ReadOptions)} & arguments.keys()
    options = torch_ckpt.ReadOptions(**{name: arguments[name] for name in names})
    rest = {name: value for name, value in arguments.items() if name not in names}
    return {"options": options, **rest} if names else rest


def load(state: StateDict, path: Path, **arguments: Any) -> Any:
    return torch_ckpt.load(state, path, no_dist=True, **with_read_options(arguments))


def dcp_load(
    state: StateDict, path: Path, planner: dcp.LoadPlanner | None = None, **options: Any
) -> None:
    reader = torch_ckpt.FileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


LOADERS = [load, dcp_load]
SAVERS = [save, stock_save]


def refusal(work: Callable[[], Any]) -> BaseException:
    """Expects a CheckpointException and returns its cause."""
    with pytest.raises(dcp.CheckpointException) as error:
        work()
    return cause_of(error.value)


def mismatch(work: Callable[[], Any]) -> LoadMismatch:
    cause = refusal(work)
    assert isinstance(cause, LoadMismatch)
    return cause


# --- any part, any layout ------------------------------------------------------------------------


class Boxes(dcp.DefaultLoadPlanner):
    """Planner that fills each target with the box at an offset of the stored tensor."""

    def __init__(self, offsets: dict[str, Shape]) -> None:
        super().__init__()
        self.offsets = offsets

    def create_local_plan(self) -> LoadPlan:
        plan = LoadPlan([])
        for name, offsets in self.offsets.items():
            target = self.state_dict[name]
            properties = self.metadata.state_dict_metadata[name]
            (stored,) = dcp.planner_helpers.create_read_items_for_chunk_list(
                name, properties, [dcp.ChunkStorageMetadata(torch.Size(offsets), target.size())]
            )
            plan.items.append(stored)
        return plan

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn]
        return found


def quantized(rows: int, end: float = 3) -> torch.Tensor:
    """Makes a quantized tensor, which only torch can read."""
    values = torch.linspace(-3, end, rows * 6).reshape(rows, 6)
    return torch.quantize_per_tensor(values, 0.05, 3, torch.quint8)


# --- metadata that does not cover a tensor -------------------------------------------------------


def change_metadata(path: Path, change: Callable[[Any], None]) -> None:
    metadata = read_metadata(path)
    change(metadata.state_dict_metadata["t"])
    (path / ".metadata").write_bytes(encode_metadata(metadata))
