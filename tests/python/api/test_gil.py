"""The engine uses Python only while it holds the GIL.

Python's debug allocator ends a process that allocates without the GIL. Each call is the first one
of its process, because the engine makes some Python objects when it needs them for the first time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.forked import Server
from torch_ckpt.cli import main


def model() -> dict[str, Any]:
    return {"weight": torch.ones(20, 30), "bias": torch.zeros(20, dtype=torch.bfloat16)}


def state() -> dict[str, Any]:
    lazy = torch.ones(3, dtype=torch.complex64).conj()
    return model() | {"lazy": lazy, "transposed": torch.ones(2, 3).t(), "step": 1}


def restore(path: Path) -> None:
    with torch_ckpt.CheckpointManager(path / "run") as manager:
        manager.restore(state())


def save_with_dcp(path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(path / "new")
    dcp.save(state(), storage_writer=writer, no_dist=True)


def load_with_dcp(path: Path) -> None:
    reader = torch_ckpt.FileSystemReader(path / "checkpoint")
    dcp.load(state(), storage_reader=reader, no_dist=True)


CALLS: dict[str, Callable[[Path], object]] = {
    "save": lambda path: torch_ckpt.save(state(), path / "new"),
    "async_save": lambda path: torch_ckpt.async_save(state(), path / "new").result(),
    "save as safetensors": lambda path: torch_ckpt.save(
        model(), path / "new model", format="safetensors"
    ),
    "publish": lambda path: torch_ckpt.publish(model(), path / "versions", 3, delta=True),
    "dcp.save": save_with_dcp,
    "load": lambda path: torch_ckpt.load(state(), path / "checkpoint"),
    "load of safetensors": lambda path: torch_ckpt.load(model(), path / "versions"),
    "apply_delta": lambda path: torch_ckpt.apply_delta(
        next(path.glob("versions/*/torch_ckpt.delta")), model()
    ),
    "restore": restore,
    "dcp.load": load_with_dcp,
    "verify": lambda path: torch_ckpt.verify(path / "checkpoint"),
    "convert": lambda path: main(["convert", str(path / "checkpoint"), str(path / "new.pt")]),
}


@pytest.fixture(scope="module")
def checking() -> Iterator[Server]:
    server = Server(environment={"PYTHONMALLOC": "debug"})
    yield server
    server.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    torch_ckpt.save(state(), path / "checkpoint")
    torch_ckpt.publish(model(), path / "versions", 1)
    torch_ckpt.publish(model(), path / "versions", 2, delta=True)
    with torch_ckpt.CheckpointManager(path / "run") as manager:
        manager.save(1, state())
    return path


def run(_connection: Connection, name: str, path: Path) -> None:
    CALLS[name](path)


def allocate_without_the_gil(_connection: Connection) -> None:
    # A function of a CDLL is called without the GIL.
    ctypes.CDLL(None).PyObject_Malloc(8)


@pytest.mark.parametrize("name", CALLS)
def test_the_first_call_of_a_process_uses_python_with_the_gil(
    checking: Server, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    log = tmp_path / "log"
    child = checking.start(run, name, checkpoints, output=log)
    assert child.wait() == 0, log.read_text()


def test_an_allocation_without_the_gil_ends_the_process(checking: Server, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = checking.start(allocate_without_the_gil, output=log)
    assert child.wait() != 0
    assert "without holding the GIL" in log.read_text()
