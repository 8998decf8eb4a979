"""Helpers of cases of background saves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

import torch_ckpt
from tests.distributed import cases
from tests.distributed.cases import (
    STOCK,
    Launch,
    StateDict,
    assert_everything,
    everything_emptied,
)

STAGINGS = ("blocking", "overlapped")


def load_by_dcp(state: StateDict, path: Path) -> None:
    cases.load(state, path, STOCK[1])


LOADS: tuple[Callable[[StateDict, Path], None], ...] = (torch_ckpt.load, load_by_dcp)


def overwrite(value: Any) -> None:
    """Changes in place all that can be changed."""
    if isinstance(value, DTensor):
        value.to_local().fill_(-1)
    elif isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            shard.tensor.fill_(-1)
    elif isinstance(value, torch.Tensor):
        value.fill_(-1)
    elif isinstance(value, dict):
        for inner in value.values():
            overwrite(inner)
        value.clear()
    elif isinstance(value, list):
        for inner in value:
            overwrite(inner)
        value.clear()


def assert_saved(launch: Launch, path: Path) -> None:
    """Checks that ``path`` holds what everything() returns."""
    for load in LOADS:
        loaded = everything_emptied(launch)
        load(loaded, path)
        assert_everything(launch, loaded)


# --- background saves -----------------------------------------------------------------------------

_COLLECTIVES = """
_allgather_base _reduce_scatter_base allgather allgather_coalesced allgather_into_tensor_coalesced
allreduce allreduce_coalesced alltoall alltoall_base barrier broadcast gather monitored_barrier
recv recv_anysource reduce reduce_scatter reduce_scatter_tensor_coalesced scatter send
"""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def threads_in_collectives() -> Iterator[set[str]]:
    """Yields the names of the threads that call any collective of a process group."""
    users: set[str] = set()
    # getattr() would return functions that do not bind to an object when they are restored.
    methods = vars(dist.ProcessGroup)
    before = {name: methods[name] for name in _COLLECTIVES.split() if name in methods}

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*args: Any, **kwargs: Any) -> Any:
            users.add(threading.current_thread().name)
            return function(*args, **kwargs)

        return watching

    for name in before:
        setattr(dist.ProcessGroup, name, watched(getattr(dist.ProcessGroup, name)))
    try:
        yield users
    finally:
        for name, method in before.items():
            setattr(dist.ProcessGroup, name, method)
