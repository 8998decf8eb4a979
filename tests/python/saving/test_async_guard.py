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
    everything,
    large,
    pool_bytes,
    step,
    trained,
    unwritable,
)
from tests.fault_hooks import calling
from tests.gates import LIMIT, Gate, eventually
from tests.support import (
    StateDict,
    files_limited_to,
)
from torch_ckpt import AsyncSave, Background
from torch_ckpt._base.progress import Progress
from torch_ckpt.saving.background import CHUNK_BYTES

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
    model, optimizer = trained(optimizer_type, **options)
    expected = copied(model.state_dict())
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    handle.guard(optimizer)
    step(model, optimizer)
    handle.result()
    assert_checkpoint(tmp_path / "c", {"model": expected})
    assert not torch.equal(model.weight, expected["weight"])


def test_a_guarded_step_waits_only_until_staged(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save(
        {"model": model}, tmp_path / "c", staging="overlapped", write_done=gate
    )
    handle.guard(optimizer)
    step(model, optimizer)
    assert not handle.done()
    gate.open()
    handle.result()


def test_one_hook_guards_an_optimizer_through_many_saves(tmp_path: Path) -> None:
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


def test_one_save_guards_many_optimizers(tmp_path: Path, opened_by_a_step: Gate) -> None:
    models = [trained(torch.optim.SGD) for _ in range(2)]
    state = {str(number): model for number, (model, _) in enumerate(models)}
    expected = {name: copied(model.state_dict()) for name, model in state.items()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    for _, optimizer in models:
        handle.guard(optimizer)
    for model, optimizer in models:
        step(model, optimizer)
    handle.result()
    assert_checkpoint(tmp_path / "c", expected)


def test_a_failing_save_does_not_block_a_step(tmp_path: Path, opened_by_a_step: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, unwritable(tmp_path), staging="overlapped")
    handle.guard(optimizer)
    step(model, optimizer)
    # The step has not raised the save's error.
    with pytest.raises(CheckpointException):
        handle.result()


def test_a_failed_save_does_not_block_a_step(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, unwritable(tmp_path), staging="overlapped")
    wait_for_futures([handle.committed])
    handle.guard(optimizer)
    step(model, optimizer)
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()


def test_a_guarded_optimizer_pickles(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c")
    handle.guard(optimizer)
    handle.result()
    pickle.loads(pickle.dumps(optimizer))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("empty_pool")
@pytest.mark.parametrize("budget", [4096, CHUNK_BYTES // 2, 2 * CHUNK_BYTES + 1])
def test_a_state_above_the_budget_is_staged_in_waves(tmp_path: Path, budget: int) -> None:
    chunks = 5 if budget > CHUNK_BYTES else 1
    state = {"a": large(1, chunks), "b": large(2, chunks), "more": everything()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", max_host_bytes=budget)
    # Staged data that is not yet written is in memory.
    assert handle.progress().bytes_done >= handle.metrics().bytes - budget
    handle.result()
    assert pool_bytes() <= budget
    assert_checkpoint(tmp_path / "c", state)


def test_the_budget_limits_the_staged_bytes(tmp_path: Path) -> None:
    budget = 2 * CHUNK_BYTES
    ahead = []

    def look(progress: Progress) -> None:
        ahead.append(progress.bytes_staged - progress.bytes_done)

    torch_ckpt.async_save(
        {"t": large(chunks=6)},
        tmp_path / "c",
        max_host_bytes=budget,
        progress=look,
        background=Background(max_bytes_per_second=64 << 20),
    ).result()
    assert len(ahead) > 1
    assert max(ahead) <= budget


def fill_pool(path: Path, state: StateDict) -> int:
    """Saves until the pool has memory for all of a state in one file. Returns the number of
    bytes."""
    size: int = sum(tensor.nbytes for tensor in state.values())
    # The file is a little larger than its tensors.
    expected = (size // CHUNK_BYTES + 1) * CHUNK_BYTES

    def save() -> bool:
        # Memory beyond the first chunks is allocated during the save, if a thread becomes free.
        torch_ckpt.async_save(state, path, thread_count=1).result()
        torch_ckpt._core.join_executor()
        return pool_bytes() == expected

    eventually(save)
    return expected


@pytest.mark.usefixtures("empty_pool")
def test_a_synchronous_save_keeps_the_memory_for_the_next_one(tmp_path: Path) -> None:
    state = {"t": large()}
    kept = fill_pool(tmp_path / "first", state)
    torch_ckpt.save(state, tmp_path / "second", thread_count=1)
    assert pool_bytes() == kept


@pytest.mark.usefixtures("empty_pool")
def test_trim_pool_frees_the_memory(tmp_path: Path) -> None:
    fill_pool(tmp_path / "c", {"t": large()})
    for kept in (2 * CHUNK_BYTES, 0):
        torch_ckpt.trim_pool(kept)
        assert pool_bytes() == kept


@pytest.mark.usefixtures("empty_pool")
@pytest.mark.parametrize("trim", [False, True])
def test_the_second_save_allocates_nothing(tmp_path: Path, trim: bool) -> None:
    state = {"t": large()}
    fill_pool(tmp_path / "first", state)
    if trim:
        torch_ckpt.trim_pool(0)
    made: list[None] = []
    with calling({"mmap": lambda: made.append(None)}):
        torch_ckpt.async_save(state, tmp_path / "second", thread_count=1).result()
        torch_ckpt._core.join_executor()
    # Memory that was freed before is allocated again.
    assert bool(made) == trim


def memory_of(tensor: torch.Tensor) -> Any:
    """Returns a weak reference, which shows whether the memory has been freed."""
    reference: Any = StorageWeakRef
    return reference(tensor.untyped_storage())


def test_sources_are_released_when_they_are_staged(tmp_path: Path, gate: Gate) -> None:
    tensors = [torch.ones(1000) for _ in range(3)]
    memory = [memory_of(tensor) for tensor in tensors]
    state = {"t": tensors[0], "nested": [{"u": tensors[1]}], "pair": (tensors[2], 1)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped", write_done=gate)
    del state, tensors
    assert gate.reached.wait(LIMIT)
    assert [each.expired() for each in memory] == [True] * 3
    gate.open()
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


def test_a_save_that_fails_in_planning_releases_its_sources(tmp_path: Path) -> None:
    assert_releases_its_source(
        lambda tensor: torch_ckpt.async_save({"t": tensor}, unwritable(tmp_path))
    )


def test_a_save_that_fails_in_writing_releases_its_sources(tmp_path: Path) -> None:
    with files_limited_to(1_000_000):
        assert_releases_its_source(
            lambda tensor: torch_ckpt.async_save({"t": tensor}, tmp_path / "c")
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
