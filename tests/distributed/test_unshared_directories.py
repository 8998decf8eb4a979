"""Ranks with different file systems at one path, like hosts with a local disk each."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.ranks import ranks
from torch_ckpt import CheckpointManager

# A rank begins with copies of all mounts, so tests that mount images must not run meanwhile.
pytestmark = [
    pytest.mark.full,
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount file systems"),
]

_NEW_MOUNTS, _PRIVATE, _RECURSIVE = 0x00020000, 1 << 18, 1 << 14


def mount_own(path: Path) -> None:
    """Mounts an empty file system at a path, for this process only."""
    libc = ctypes.CDLL(None, use_errno=True)
    calls = [
        lambda: libc.unshare(_NEW_MOUNTS),
        lambda: libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None),
        lambda: libc.mount(b"own", os.fsencode(path), b"tmpfs", 0, None),
    ]
    for call in calls:
        if call() != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def state() -> dict[str, Any]:
    return {f"t{dist.get_rank()}": torch.arange(1000)}


def save(path: Path) -> None:
    torch_ckpt.save(state(), path / "checkpoint")


def save_by_dcp(path: Path) -> None:
    dcp.save(state(), storage_writer=torch_ckpt.FileSystemWriter(path / "checkpoint"))


def save_model(path: Path) -> None:
    torch_ckpt.save(state(), path / "model", format="safetensors")


def save_by_manager(path: Path) -> None:
    with CheckpointManager(path / "run") as manager:
        manager.save(1, {"state": state()})
        manager.wait_until_finished()


SAVES = [save, save_by_dcp, save_model, save_by_manager]


def on_rank(connection: Connection, path: Path, call: Callable[[Path], None]) -> None:
    """Saves on a rank with a file system of its own at the path. Sends the error, and the files."""
    mount_own(path)
    dist.init_process_group("gloo")
    try:
        call(path)
    except BaseException as error:
        text = str(error)
    else:
        text = ""
    # dcp.save does not notify a writer of a failed save, so the files go with the writer.
    gc.collect()
    files = [file.name for file in path.rglob("*") if file.is_file() and file.name != ".lease"]
    connection.send((text, files))
    dist.barrier()


@pytest.mark.parametrize("call", SAVES)
def test_a_path_that_the_hosts_do_not_share_is_named_before_data_is_written(
    tmp_path: Path, call: Callable[[Path], None]
) -> None:
    with ranks(2, on_rank, tmp_path, call) as group:
        found = [group.answer(rank) for rank in range(2)]
    for text, files in found:
        assert "the hosts have different directories at this path" in text
        assert "tmpfs on own" in text
        assert files == []


def on_shared_path(connection: Connection, path: Path) -> None:
    """Saves and loads on a rank with its own mounts, which are equal."""
    libc = ctypes.CDLL(None)
    assert libc.unshare(_NEW_MOUNTS) == 0
    dist.init_process_group("gloo")
    for call in SAVES:
        call(path / call.__name__)
    target = {name: torch.zeros_like(value) for name, value in state().items()}
    torch_ckpt.load(target, path / "save" / "checkpoint")
    connection.send(target[f"t{dist.get_rank()}"].tolist() == list(range(1000)))
    dist.barrier()


def test_ranks_with_different_mounts_of_one_directory_save(tmp_path: Path) -> None:
    with ranks(2, on_shared_path, tmp_path) as group:
        assert [group.answer(rank) for rank in range(2)] == [True, True]
    assert list(tmp_path.rglob("*.tmp-*")) == []
