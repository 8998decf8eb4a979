"""The savers and loaders that are compared, by the names the results use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torch_ckpt

from .states import State

Kind = Literal["ours", "stock", "limit"]


@dataclass(frozen=True)
class Saver:
    """One way to save a state to a fresh directory, durable when `save` returns."""

    label: str
    kind: Kind
    save: Callable[[State, Path], None]


@dataclass(frozen=True)
class Loader:
    """One way to load a checkpoint into a state's tensors, in place."""

    label: str
    kind: Kind
    load: Callable[[State, Path], None]


def _stock_saver(thread_count: int) -> Saver:
    def save(state: State, path: Path) -> None:
        writer = FileSystemWriter(path, thread_count=thread_count, sync_files=True)
        dcp_save(state, storage_writer=writer, no_dist=True)

    return Saver(f"stock dcp.save, thread_count={thread_count}", "stock", save)


def _our_saver(label: str, **options: Any) -> Saver:
    def save(state: State, path: Path) -> None:
        writer = torch_ckpt.FileSystemWriter(path, sync_files=True, **options)
        dcp_save(state, storage_writer=writer, no_dist=True)

    return Saver(label, "ours", save)


def our_saver_with_budget(max_host_bytes: int) -> Saver:
    """dcp.save with our writer, which may hold at most `max_host_bytes` bytes of chunks."""
    label = f"dcp.save with torch_ckpt, max_host_bytes={max_host_bytes >> 20} MiB"
    return _our_saver(label, max_host_bytes=max_host_bytes)


def _save_by_call(state: State, path: Path) -> None:
    torch_ckpt.save(state, path)


def _load_stock(state: State, path: Path) -> None:
    dcp_load(state, storage_reader=FileSystemReader(path), no_dist=True)


def _load_ours(state: State, path: Path) -> None:
    dcp_load(state, storage_reader=torch_ckpt.FileSystemReader(path), no_dist=True)


def _load_by_call(state: State, path: Path) -> None:
    torch_ckpt.load(state, path)


STOCK_SAVERS: dict[str, Saver] = {
    f"stock_{threads}": _stock_saver(threads) for threads in (1, 2, 4)
}
SAVERS: dict[str, Saver] = {
    **STOCK_SAVERS,
    "ours_dcp": _our_saver("dcp.save with torch_ckpt"),
    "ours_call": Saver("torch_ckpt.save", "ours", _save_by_call),
    "ours_buffered": _our_saver("dcp.save with torch_ckpt, direct_io=False", direct_io=False),
}
LOADERS: dict[str, Loader] = {
    "stock": Loader("stock dcp.load", "stock", _load_stock),
    "ours_dcp": Loader("dcp.load with torch_ckpt", "ours", _load_ours),
    "ours_call": Loader("torch_ckpt.load", "ours", _load_by_call),
}
