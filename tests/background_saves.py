"""States, and fixtures that pause saves, for tests of torch_ckpt.async_save."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests import support
from tests.fault_hooks import calling
from tests.gates import Gate
from tests.support import StateDict, data_files, random_tensor
from torch_ckpt import AsyncSave, CheckpointError
from torch_ckpt._base import exit_threads
from torch_ckpt.options import CHUNK_BYTES

STAGINGS = ["blocking", "overlapped"]


@pytest.fixture
def no_save_left() -> Iterator[None]:
    """Waits for saves that the test has left running, and fails if one has an unseen error."""
    yield
    exit_threads.join()
    has_error = True
    while has_error:
        try:
            torch_ckpt.check_for_errors()
            has_error = False
        except (CheckpointException, CheckpointError):
            pass


@pytest.fixture
def held(gate: Gate) -> Iterator[Gate]:
    """Saves only stage until the gate is opened."""
    with calling({"background save begins": gate}):
        yield gate
        gate.open()


@pytest.fixture
def held_before_commit(gate: Gate) -> Iterator[Gate]:
    """The first save of this process writes its files, but commits only when the gate is opened."""
    process, held = os.getpid(), iter([gate])

    def hook() -> None:
        if os.getpid() == process:
            next(held, bool)()

    with calling({"files are written": hook}):
        yield gate
        gate.open()


@pytest.fixture
def opened_by_a_step(gate: Gate) -> Iterator[Gate]:
    """Saves start when a guarded optimizer's step waits for them."""
    with calling({"background save begins": gate, "wait until staged": gate.open}):
        yield gate
        gate.open()


@pytest.fixture
def opened_by_waiting(gate: Gate) -> Iterator[Gate]:
    """Opens the gate when a save waits for the save before it."""
    with calling({"wait for the save before": gate.open}):
        yield gate
        gate.open()


@pytest.fixture
def empty_pool() -> Iterator[None]:
    torch_ckpt._core.trim_pool(0)
    yield
    torch_ckpt._core.trim_pool(0)


def pool_bytes() -> int:
    return torch_ckpt._core.pool_bytes()


#: Functions that return the outcome of a save.
SEEN: dict[str, Callable[[AsyncSave], object]] = {
    "result": lambda handle: handle.result(),
    "wait_staged": lambda handle: handle.wait_staged(),
    "staged.result": lambda handle: handle.staged.result(),
    "committed.result": lambda handle: handle.committed.result(),
}


def large(seed: int = 0, chunks: int = 3) -> torch.Tensor:
    """Makes a tensor that needs ``chunks`` chunks of staging memory."""
    return random_tensor((chunks, CHUNK_BYTES), torch.uint8, seed)


def unwritable(tmp_path: Path) -> Path:
    """Makes a path that even root cannot create."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "checkpoint"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in data_files(path)}


def assert_checkpoint(path: Path, state: StateDict) -> None:
    """Checks that torch_ckpt and stock torch load ``state`` from the checkpoint."""
    # Both need an allow-list for the classes that some states contain.
    support.assert_checkpoint(
        path, state, partial(torch_ckpt.load, options=torch_ckpt.ReadOptions(allow_pickle=True))
    )


@dataclass
class Settings:
    """Mutable object that can be pickled."""

    rate: float = 0.5
    names: list[str] = field(default_factory=lambda: ["a", "b"])


def everything() -> StateDict:
    """Makes a state with one value of each kind that a state dict may hold; equal at each call."""
    complex_numbers = random_tensor((6, 4), torch.complex64, seed=6).nan_to_num()
    weight = torch.nn.Parameter(random_tensor((33, 17), torch.float32, seed=1))
    return {
        "model": OrderedDict(
            weight=weight,
            tied=weight,
            not_a_leaf=weight * 2,
            transposed=random_tensor((6, 9), torch.bfloat16, seed=3).t(),
            view=random_tensor((40,), torch.int64, seed=4)[7:29:3],
            expanded=torch.arange(5).expand(3, 5),
            overlapping=torch.arange(9).as_strided((3, 3), (2, 1)),
            scalar=torch.tensor(3.5),
            empty=torch.empty(0, 4),
            conjugated=complex_numbers.conj(),
            negated=complex_numbers.conj().imag,
        ),
        "optimizer": {
            "lr": 0.1,
            "betas": (0.9, 0.95),
            "step": 12,
            "state": [{"moment": random_tensor((9,), torch.float64, seed=i)} for i in (7, 8)],
        },
        "history": [random_tensor((3,), torch.float16, seed=5), "text", [1, {"deep": None}]],
        "pair": (random_tensor((11,), torch.int8, seed=9), 7),
        "counts": Counter(a=1, b=2),
        "settings": Settings(),
        "bytes": b"\0\1",
    }


def spoil(value: Any) -> None:
    """Changes in place all that a caller can change in a state."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        storage.copy_(random_tensor((storage.size(),), torch.uint8, seed=99).untyped_storage())
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value.clear()
    elif isinstance(value, list | tuple):
        for item in value:
            spoil(item)
        if isinstance(value, list):
            value.append("spoilt")
    elif isinstance(value, Settings):
        value.rate = -1.0
        value.names.append("spoilt")


def trained(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Any, Any]:
    """Makes a model that has been trained for one step, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    made = optimizer(model.parameters(), lr=0.1, **options)
    step(model, made)
    return model, made


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 8)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def copied(state: StateDict) -> StateDict:
    """Copies a model's state."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class OwnMapping(MutableMapping[str, Any]):
    """User-defined mapping; copy.copy() returns a mapping with the same items."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
