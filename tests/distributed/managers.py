"""Helpers of cases of CheckpointManager on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.cases import Launch, mesh_1d, tensor_of
from tests.support import assert_equal
from torch_ckpt import CheckpointManager, PerRank

# Limit of waits that should not block, in seconds.
PATIENCE = 60.0


@contextmanager
def manager_of(launch: Launch, **options: Any) -> Iterator[CheckpointManager]:
    """Makes a manager in the case's directory, without preemption signals by default."""
    root = options.pop("root", launch.path("run"))
    options = {"preemption": None, "timeout": PATIENCE, **options}
    with CheckpointManager(root, **options) as made:
        yield made


def state_of(launch: Launch, step: int) -> dict[str, Any]:
    """Makes a sharded tensor, a replicated one, one value of each rank, and a number."""
    whole = tensor_of("sharded", 4 * launch.size + 1, 3).nan_to_num() + step
    return {
        "sharded": {"w": distribute_tensor(whole, mesh_1d(launch), [Shard(0)], src_data_rank=None)},
        "common": torch.full((5,), float(step)),
        "own": PerRank(100 * launch.rank + step),
        "step": step,
    }


def assert_state(launch: Launch, state: dict[str, Any], step: int) -> None:
    """Checks that the state equals the state of a step."""
    expected = state_of(launch, step)
    sharded = state["sharded"]["w"]
    assert isinstance(sharded, DTensor)
    assert_equal(sharded.to_local(), expected["sharded"]["w"].to_local())
    assert_equal(state["common"], expected["common"])
    assert state["own"].value == expected["own"].value
    assert state["step"] == step


def restored(launch: Launch, made: CheckpointManager, step: int | None = None) -> int:
    """Restores a step, which must be the same on all ranks, and checks its state. Returns the
    step."""
    state = state_of(launch, 0)
    found = made.restore(state, step)
    assert_state(launch, state, found)
    assert gathered(launch, found) == [found] * launch.size
    return found


def gathered(launch: Launch, value: Any) -> list[Any]:
    """Returns the values by rank."""
    values: list[Any] = [None] * launch.size
    dist.all_gather_object(values, value)
    return values


def saved(launch: Launch, made: CheckpointManager, numbers: Any, **options: Any) -> list[int]:
    """Runs these steps. Returns the steps at which all ranks have started a save."""
    found = [n for n in numbers if made.save(n, state_of(launch, n), **options)]
    assert gathered(launch, found) == [found] * launch.size
    return found


def run_of(launch: Launch, numbers: Any) -> None:
    """Runs a training to its end."""
    with manager_of(launch) as made:
        saved(launch, made, numbers)
    dist.barrier()


def is_last(launch: Launch) -> bool:
    return launch.rank == launch.size - 1


def failures_of(work: Callable[[], Any]) -> dict[int, BaseException]:
    """Returns by rank the causes of the CheckpointException that ``work`` must raise."""
    with pytest.raises(CheckpointException) as caught:
        work()
    return {rank: cause for rank, (cause, _stack) in caught.value.failures.items()}


# --- saving and restoring -------------------------------------------------------------------------


class NoState:
    """Stateful value that fails."""

    def state_dict(self) -> Any:
        raise RuntimeError("no state today")

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("never")
