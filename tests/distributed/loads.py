"""What the cases of several ranks that load share."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.distributed import cases
from tests.distributed.cases import (
    Launch,
    StateDict,
)
from tests.support import data_files

#: The metadata, and whatever Python reads meanwhile.
ALLOWANCE = 256 << 10


def by_load(state: StateDict, path: Path, **options: Any) -> None:
    torch_ckpt.load(state, path, **options)


def by_dcp(state: StateDict, path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(path, **options))


LOADERS = [by_load, by_dcp]


def save(state: StateDict, path: Path, **options: Any) -> None:
    torch_ckpt.save(state, path, sync_files=False, **options)


def stock_save(state: StateDict, path: Path) -> None:
    cases.save(state, path, dcp.FileSystemWriter)


def bytes_read() -> int:
    """By this process so far, from the page cache too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def cost_of(work: Callable[[], Any]) -> int:
    """How many bytes it reads on this rank."""
    before = bytes_read()
    work()
    return bytes_read() - before


def on_rank_0(launch: Launch, work: Callable[[], Any]) -> None:
    """Does it there, between all that is before and all that is after."""
    dist.barrier()
    if launch.rank == 0:
        work()
    dist.barrier()


# --- damage ---------------------------------------------------------------------------------------


def damaged(launch: Launch, good: Path, name: str, damage: Callable[[list[Path]], Any]) -> Path:
    path = launch.path(name)

    def work() -> None:
        shutil.copytree(good, path)
        damage(data_files(path))

    on_rank_0(launch, work)
    return path


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 16
    file.write_bytes(data)
