"""torch_ckpt.async_save: optimizers that wait for staging, and memory that is kept and released."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import wait as wait_for_futures
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.multiprocessing.reductions import StorageWeakRef

import torch_ckpt
from tests.background_saves import (
    assert_checkpoint,
    copied,
    large,
    pool_bytes,
    step,
    trained,
    unwritable,
)
from tests.fault_hooks import calling
from tests.gates import LIMIT, Gate, eventually
from tests.support import StateDict, files_limited_to
from torch_ckpt import AsyncSave, WriteOptions
from torch_ckpt.options import CHUNK_BYTES

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


# --- guarded optimizers --------------------------------------------------------------------------


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], StateDict]] = {
    "SGD": (torch.optim.SGD, {}),
    "Adam": (torch.optim.Adam, {"foreach": True}),
    "fused Adam": (torch.optim.Adam, {"fused": True}),
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 2}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_guarded_step_waits_until_staged(
    tmp_path: Path, opened_by_a_step: Gate, kind: str
) -> None:
    optimizer_type, options = OPTIMIZERS[kind]
    models = [trained(optimizer_type, **options) for _ in range(2)]
    state = {str(number): model for number, (model, _) in enumerate(models)}
    expected = {name: copied(model.state_dict()) for name, model in state.items()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    for _, optimizer in models:
        handle.guard(optimizer)
    for model, optimizer in models:
        step(model, optimizer)
    handle.result()
    assert_checkpoint(tmp_path / "c", expected)
    assert not torch.equal(state["0"].weight, expected["0"]["weight"])


def test_a_guarded_step_waits_only_until_staged(tmp_path: Path, held_before_commit: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    handle.guard(optimizer)
    step(model, optimizer)
    assert not handle.done()
    held_before_commit.open()
    handle.result()


def test_one_hook_guards_an_optimizer_through_many_saves_and_can_be_pickled(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    expected = []
    for number in range(5):
        expected.append(copied(model.state_dict()))
        state = {"model": model, "number": number}
        handle = torch_ckpt.async_save(state, tmp_path / str(number), staging="overlapped")
        handle.guard(optimizer)
        step(model, optimizer)
        step(model, optimizer)
    handle.result()
    for number, weights in enumerate(expected):
        assert_checkpoint(tmp_path / str(number), {"model": weights, "number": number})
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    pickle.loads(pickle.dumps(optimizer))


@pytest.mark.parametrize("has_ended", [False, True], ids=["failing", "failed"])
def test_a_failed_save_does_not_block_a_step(
    tmp_path: Path, opened_by_a_step: Gate, has_ended: bool
) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, unwritable(tmp_path), staging="overlapped")
    if has_ended:
        opened_by_a_step.open()
        wait_for_futures([handle.committed])
    handle.guard(optimizer)
    step(model, optimizer)
    # The step has not raised the save's error.
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors() if has_ended else handle.result()


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("empty_pool")
@pytest.mark.parametrize(
    "save",
    [torch_ckpt.save, lambda *args, **options: torch_ckpt.async_save(*args, **options).result()],
    ids=["save", "async_save"],
)
def test_the_second_save_uses_and_keeps_the_memory_of_the_first(
    tmp_path: Path, save: Callable[..., object]
) -> None:
    state = {"t": large()}
    # The file is a little larger than its tensor.
    enough = state["t"].nbytes + CHUNK_BYTES

    handle = torch_ckpt.async_save(state, tmp_path / "first", options=WriteOptions(thread_count=1))
    handle.result()
    # The chunks that the first save did not need are allocated after it.
    eventually(lambda: pool_bytes() == enough)
    made: list[None] = []
    with calling({"mmap": lambda: made.append(None)}):
        save(state, tmp_path / "second", options=WriteOptions(thread_count=1))
        torch_ckpt._core.join_executor()
    assert made == []
    assert pool_bytes() == enough


def memory_of(tensor: torch.Tensor) -> Any:
    """Returns a weak reference, which shows whether the memory has been freed."""
    reference: Any = StorageWeakRef
    return reference(tensor.untyped_storage())


def test_sources_are_released_when_they_are_staged(
    tmp_path: Path, held_before_commit: Gate
) -> None:
    tensors = [torch.ones(1000) for _ in range(3)]
    memory = [memory_of(tensor) for tensor in tensors]
    state = {"t": tensors[0], "nested": [{"u": tensors[1]}], "pair": (tensors[2], 1)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    del state, tensors
    assert held_before_commit.reached.wait(LIMIT)
    assert [each.expired() for each in memory] == [True] * 3
    held_before_commit.open()
    handle.result()


def test_sources_are_kept_until_they_are_staged(tmp_path: Path, held: Gate) -> None:
    tensor = torch.ones(1000)
    storage = memory_of(tensor)
    handle = torch_ckpt.async_save({"t": tensor}, tmp_path / "c", staging="overlapped")
    del tensor
    assert not storage.expired()
    held.open()
    handle.result()
    assert storage.expired()


def assert_releases_its_source(save: Callable[[torch.Tensor], AsyncSave]) -> None:
    """Checks that a failed save releases its source although its error is referenced."""
    tensor = torch.ones(1_000_000)
    storage = memory_of(tensor)
    handle = save(tensor)
    error = handle.committed.exception()
    del tensor
    assert error is not None
    assert storage.expired()


@pytest.mark.parametrize("path", ["file", "c"], ids=["in planning", "in writing"])
def test_a_save_that_fails_releases_its_sources(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with files_limited_to(1_000_000):
        assert_releases_its_source(
            lambda tensor: torch_ckpt.async_save({"t": tensor}, tmp_path / path)
        )


def test_a_save_whose_source_changed_too_early_releases_its_sources(
    tmp_path: Path, held: Gate
) -> None:
    def save_and_change(tensor: torch.Tensor) -> AsyncSave:
        handle = torch_ckpt.async_save({"t": tensor}, tmp_path / "c", staging="overlapped")
        tensor.add_(1)
        held.open()
        return handle

    assert_releases_its_source(save_and_change)
