"""Helpers of cases of loads on several ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.distributed import cases
from tests.distributed.cases import Launch, StateDict
from tests.loads import with_read_options
from tests.support import data_files
from torch_ckpt.checkpoint.source import Source

#: Limit for the metadata and for reads by Python in the meantime.
ALLOWANCE = 256 << 10


def by_load(state: StateDict, path: Path, **arguments: Any) -> None:
    torch_ckpt.load(state, path, **with_read_options(arguments))


def by_dcp(state: StateDict, path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(path, **options))


LOADERS = [by_load, by_dcp]


def save(state: StateDict, path: Path, thread_count: int | None = None) -> None:
    options = torch_ckpt.WriteOptions(sync_files=False, thread_count=thread_count)
    torch_ckpt.save(state, path, options=options)


def stock_save(state: StateDict, path: Path) -> None:
    cases.save(state, path, dcp.FileSystemWriter)


def savers(launch: Launch) -> Iterator[tuple[Path, Callable[..., None]]]:
    """Yields the savers of torch_ckpt and torch, each with a path."""
    for saver in (save, stock_save):
        yield launch.path(saver.__name__), saver


def bytes_read() -> int:
    """Returns the bytes that this process has read so far, including those from the page cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def bytes_read_by(work: Callable[[], Any]) -> int:
    """Returns the bytes that ``work`` reads on this rank."""
    before = bytes_read()
    work()
    return bytes_read() - before


def on_rank_0(launch: Launch, work: Callable[[], Any]) -> None:
    """Runs ``work`` on rank 0, between two barriers."""
    dist.barrier()
    if launch.rank == 0:
        work()
    dist.barrier()


@contextmanager
def changed_after_rank_0_looked(
    launch: Launch, source: type[Source], token: str, change: Callable[[], Any]
) -> Iterator[None]:
    """Makes rank 1 change what rank 0 has read the metadata of, before the other ranks read it."""
    store = dist.PrefixStore(launch.case, dist.distributed_c10d._get_default_store())
    before = source.open

    def read_metadata(self: Source, *arguments: Any) -> None:
        if launch.rank != 0:
            store.wait([token])
        if launch.rank == 1:
            change()
        before(self, *arguments)
        if launch.rank == 0:
            store.set(token, "")

    with mock.patch.object(source, "open", read_metadata):
        yield


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
