"""The savers and loaders to compare, by their names in the results."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torch_ckpt

from . import peers, states
from .limits import fsync_directory
from .states import State

Kind = Literal["ours", "stock", "peer", "limit"]

STOCK_READ_THREADS = 8  # the default of torch's unreleased threaded reader
LOAD_BUDGET_BYTES = 64 << 20


@dataclass(frozen=True)
class Saver:
    """One way to save a state to a fresh directory, durable when `save` returns.

    A complete checkpoint has a file with the name `last_file`.
    """

    label: str
    kind: Kind
    save: Callable[[State, Path], None]
    last_file: str = ".metadata"


@dataclass(frozen=True)
class Running:
    """A save in progress.

    `committed` completes when the save is durable and visible, `staged` when the state may change.
    `staged` is None if the state may change as soon as the call returns. The caller must keep
    `handle` during the save.
    """

    committed: Future[Any]
    staged: Future[Any] | None = None
    handle: object = None


@dataclass(frozen=True)
class BackgroundSaver:
    """One way to save a state to a fresh directory while training continues."""

    label: str
    kind: Kind
    start: Callable[[State, Path], Running]


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


def our_saver(max_host_bytes: int | None = None, direct_io: bool | None = None) -> Saver:
    """Returns dcp.save with our writer; None means its default."""
    label = "dcp.save with torch_ckpt"
    label += f", max_host_bytes={max_host_bytes >> 20} MiB" if max_host_bytes is not None else ""
    label += f", direct_io={direct_io}" if direct_io is not None else ""

    def save(state: State, path: Path) -> None:
        writer = torch_ckpt.FileSystemWriter(
            path,
            sync_files=True,
            max_host_bytes=max_host_bytes,
            direct_io="auto" if direct_io is None else direct_io,
        )
        dcp_save(state, storage_writer=writer, no_dist=True)

    return Saver(label, "ours", save)


def _stock_background_saver(
    label: str,
    *,
    process: bool = False,
    stager: DefaultStager | None = None,
    writer: Callable[..., FileSystemWriter] = FileSystemWriter,
    kind: Kind = "stock",
) -> BackgroundSaver:
    where = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD

    def start(state: State, path: Path) -> Running:
        response = dcp_async_save(
            state,
            storage_writer=writer(path, sync_files=True),
            async_checkpointer_type=where,
            async_stager=stager,
            # torch's checkpoint process needs a process group.
            no_dist=not process,
        )
        if isinstance(response, AsyncSaveResponse):
            return Running(response.upload_completion, response.staging_completion)
        return Running(response)

    return BackgroundSaver(label, kind, start)


def our_background_saver(staging: str, max_host_bytes: int | None = None) -> BackgroundSaver:
    """Returns torch_ckpt.async_save; None for `max_host_bytes` means its default."""
    options = torch_ckpt.WriteOptions(max_host_bytes=max_host_bytes)

    def start(state: State, path: Path) -> Running:
        handle = torch_ckpt.async_save(
            state,
            path,
            staging="blocking" if staging == "blocking" else "overlapped",
            options=options,
        )
        return Running(handle.committed, handle.staged, handle)

    label = f"torch_ckpt.async_save, {staging}"
    if max_host_bytes is not None:
        label += f", max_host_bytes={max_host_bytes >> 20} MiB"
    return BackgroundSaver(label, "ours", start)


@contextmanager
def single_rank_group(backend: str = "gloo") -> Iterator[None]:
    """Makes a process group of one rank, which torch's checkpoint process needs."""
    # Without an address torch resolves the host's name, which fails on some machines.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def background_savers() -> Iterator[dict[str, BackgroundSaver]]:
    """Yields all background savers. Ends torch's stager and checkpoint process with the context."""
    # A stager that is kept reuses its staging memory. All options are off: some need CUDA.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        yield {
            "stock_thread": _stock_background_saver("stock dcp.async_save, thread"),
            "stock_thread_kept": _stock_background_saver(
                "stock dcp.async_save, thread, DefaultStager kept", stager=stager
            ),
            "stock_process": _stock_background_saver("stock dcp.async_save, process", process=True),
            "ours_writer": _stock_background_saver(
                "stock dcp.async_save with torch_ckpt's writer",
                writer=torch_ckpt.FileSystemWriter,
                kind="ours",
            ),
            "ours_blocking": our_background_saver("blocking"),
            "ours_overlapped": our_background_saver("overlapped"),
        }
    finally:
        stager.close()
        # torch itself ends its checkpoint process only with the program.
        _async_process_executor._CHECKPOINT_PROCESS = None


@contextmanager
def device_saver(name: str) -> Iterator[BackgroundSaver]:
    """Yields a saver of DEVICE_SAVERS. Its threads and processes end with the context.

    Raises:
        PeerUnavailableError: the saver's package could not be installed.
    """
    if name == "torch_checkpointing":
        with _torch_checkpointing() as saver:
            yield saver
        return
    if name == "stock_staged":
        on_device = torch.cuda.is_available()
        # torch's defaults, except for those that need CUDA.
        options = StagingOptions(on_device, on_device, True, on_device)
        stager = DefaultStager(options)
        try:
            label = "stock dcp.async_save, DefaultStager"
            yield _stock_background_saver(label, stager=stager)
        finally:
            stager.close()
        return
    with background_savers() as savers:
        yield savers[name]


@contextmanager
def _torch_checkpointing() -> Iterator[BackgroundSaver]:
    """Yields torch_checkpointing's asynchronous save, which does not fsync.

    Its direct I/O fails with EINVAL at the end of a file on ext4, so it is off.
    """
    path = str(peers.TORCH_CHECKPOINTING.install())
    if path not in sys.path:
        sys.path.append(path)
    kind = importlib.import_module("torch_checkpointing").CheckpointManager
    storage = importlib.import_module("torch_checkpointing.storage.filesystem")
    buffered = storage.LocalFileSystemStorageConfig(use_direct_io=False)
    manager = kind(kind.Config(storage_config=buffered))

    def start(state: State, path: Path) -> Running:
        written = manager.save(str(path), {"state": state})
        # The staging future has no public name.
        return Running(written, manager._staging_future)

    try:
        yield BackgroundSaver(f"{peers.TORCH_CHECKPOINTING.title}, no fsync", "peer", start)
    finally:
        manager.close()


#: The savers to compare with tensors on a device.
DEVICE_SAVERS = (
    "ours_overlapped",
    "ours_blocking",
    "stock_thread",
    "stock_staged",
    "torch_checkpointing",
)


class ShardedPlanReader(FileSystemReader):
    """torch's reader on eight threads, as planned for torch's next release.

    Splits the plan evenly by the bytes of the records. torch's own code reads each part.
    """

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        parts: list[list[ReadItem]] = [[] for _ in range(STOCK_READ_THREADS)]
        loads = [0] * STOCK_READ_THREADS
        sizes = [self.storage_data[item.storage_index].length for item in plan.items]
        # Give each item, largest first, to the part with the fewest bytes.
        for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            least = loads.index(min(loads))
            parts[least].append(plan.items[index])
            loads[least] += sizes[index]
        read = super().read_data
        with ThreadPoolExecutor(STOCK_READ_THREADS) as pool:
            reads = [pool.submit(read, replace(plan, items=part), planner) for part in parts]
            for part_read in reads:
                part_read.result().wait()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def _loader_with(
    label: str, kind: Kind, reader: Callable[[Path], FileSystemReader], *, no_dist: bool = True
) -> Loader:
    def load(state: State, path: Path) -> None:
        dcp_load(state, storage_reader=reader(path), no_dist=no_dist)

    return Loader(label, kind, load)


def _our_loader(**options: Any) -> Loader:
    """Returns torch_ckpt.load with these options."""

    def load(state: State, path: Path) -> None:
        torch_ckpt.load(state, path, options=torch_ckpt.ReadOptions(**options))

    label = ", ".join(["torch_ckpt.load", *(f"{name}={value}" for name, value in options.items())])
    return Loader(label, "ours", load)


# Files that a program can map into memory, to copy the tensors from them. Neither loader verifies
# checksums. `_save_torch` and `_save_safetensors` write the files, as durably as the other savers.
_MAPPED_FILE = "state.pt"
_SAFETENSORS_FILE = "state.safetensors"
_OTHERS_FILE = "others.pt"  # the leaves that are no tensors


def _save_torch(state: State, path: Path) -> None:
    path.mkdir()
    torch.save(dict(states.leaves(state)), path / _MAPPED_FILE)
    _sync(path, _MAPPED_FILE)


def _save_safetensors(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    path.mkdir()
    leaves = dict(states.leaves(state))
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    torch.save({n: v for n, v in leaves.items() if n not in tensors}, path / _OTHERS_FILE)
    save_file(tensors, path / _SAFETENSORS_FILE)
    _sync(path, _OTHERS_FILE, _SAFETENSORS_FILE)


def _sync(path: Path, *names: str) -> None:
    for name in names:
        with (path / name).open("rb") as file:
            os.fsync(file.fileno())
    fsync_directory(path)


def _load_mapped(state: State, path: Path) -> None:
    states.fill(state, torch.load(path / _MAPPED_FILE, mmap=True))


def _load_safetensors(state: State, path: Path) -> None:
    from safetensors.torch import load_file

    states.fill(state, torch.load(path / _OTHERS_FILE) | load_file(path / _SAFETENSORS_FILE))


def _save_by_call(state: State, path: Path) -> None:
    torch_ckpt.save(state, path)


def _save_stock_by_ranks(state: State, path: Path) -> None:
    dcp_save(state, storage_writer=FileSystemWriter(path))


STOCK_SAVERS: dict[str, Saver] = {
    f"stock_{threads}": _stock_saver(threads) for threads in (1, 2, 4)
}
SAVERS: dict[str, Saver] = {
    **STOCK_SAVERS,
    "ours_dcp": our_saver(),
    "ours_call": Saver("torch_ckpt.save", "ours", _save_by_call),
    "ours_buffered": our_saver(direct_io=False),
}
LOADERS: dict[str, Loader] = {
    "stock": _loader_with("stock dcp.load", "stock", FileSystemReader),
    "stock_threads": _loader_with(
        f"stock dcp.load, plan sharded over {STOCK_READ_THREADS} threads",
        "stock",
        ShardedPlanReader,
    ),
    "ours_dcp": _loader_with("dcp.load with torch_ckpt", "ours", torch_ckpt.FileSystemReader),
    "ours_budget": _loader_with(
        f"dcp.load with torch_ckpt, max_inflight_bytes={LOAD_BUDGET_BYTES >> 20} MiB",
        "ours",
        partial(torch_ckpt.FileSystemReader, max_inflight_bytes=LOAD_BUDGET_BYTES),
    ),
    "ours_call": _our_loader(),
    "ours_unverified": _our_loader(verify=False),
}
# Savers and loaders of single files, which neither need nor support a process group.
MAPPED_SAVERS: dict[str, Saver] = {
    "mapped": Saver("torch.save", "stock", _save_torch, _MAPPED_FILE),
    "safetensors": Saver("safetensors", "peer", _save_safetensors, _SAFETENSORS_FILE),
}
MAPPED_LOADERS: dict[str, Loader] = {
    "mapped": Loader("torch.load(mmap=True), copy_", "stock", _load_mapped),
    "safetensors": Loader("safetensors, copy_", "peer", _load_safetensors),
}
# Collective: all ranks of the process group call these.
RANK_SAVERS: dict[str, Saver] = {
    "stock": Saver("stock dcp.save", "stock", _save_stock_by_ranks),
    "ours": Saver("torch_ckpt.save", "ours", _save_by_call),
}
RANK_LOADERS: dict[str, Loader] = {
    "stock": _loader_with("stock dcp.load", "stock", FileSystemReader, no_dist=False),
    "ours_dcp": _loader_with(
        "dcp.load with torch_ckpt", "ours", torch_ckpt.FileSystemReader, no_dist=False
    ),
    "ours_each": LOADERS["ours_call"],
    "ours_once": _our_loader(read_once=True),
    "ours_direct": _our_loader(direct_io=True),
}
