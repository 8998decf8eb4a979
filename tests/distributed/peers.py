"""Helpers of cases of Megatron-core and nvidia-resiliency-ext.

"Ours" is what ``install()`` puts into their modules, or single classes of torch_ckpt that a case
puts there. "Theirs" is the released code of these packages.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.cases import Launch, StateDict
from tests.metadata import read_metadata
from tests.support import assert_equal, assert_tables_match, random_tensor
from torch_ckpt.megatron import install, uninstall


def lacking(*modules: str) -> str:
    """Returns why cases that need some modules are skipped; "" if all are installed."""
    for module in modules:
        with suppress(ModuleNotFoundError):
            if find_spec(module) is not None:
                continue
        return f"{module} is not installed; scripts/environment.sh installs it where PyPI has it"
    return ""


#: Why cases are skipped; empty if the packages that they need are installed.
WITHOUT_MEGATRON = lacking("megatron.core")
WITHOUT_NVRX = lacking("nvidia_resiliency_ext", "psutil")


def why_skipped(case: str) -> str:
    return WITHOUT_NVRX if "nvrx" in case or "torch_save" in case else WITHOUT_MEGATRON


def strategies(module: str) -> Any:
    return import_module(f"megatron.core.dist_checkpointing.strategies.{module}")


@contextmanager
def installed(**options: Any) -> Iterator[None]:
    assert install(**options)
    try:
        yield
    finally:
        uninstall()


# --- states ---------------------------------------------------------------------------------------


def sharded(name: str, data: torch.Tensor, *place: Any, **options: Any) -> Any:
    """Makes Megatron's ShardedTensor."""
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor.from_rank_offsets(name, data, *place, **options)


def megatron_state(launch: Launch, seed: int) -> StateDict:
    """Makes a state of ShardedTensors and ShardedObjects. Every value depends on the seed."""
    from megatron.core.dist_checkpointing import ShardedObject

    rank, size = launch.rank, launch.size

    def tensor(name: str, dtype: torch.dtype, *shape: int, of: int = rank) -> torch.Tensor:
        return random_tensor(shape, dtype, seed=seed * 1000 + sum(name.encode()) + of)

    def shard(name: str, dtype: torch.dtype, *shape: int, axis: int = 0, layers: int = 0) -> Any:
        data = tensor(name, dtype, *shape)
        return sharded(name, data, (axis, rank, size), prepend_axis_num=layers)

    replicated = tensor("model.replicated", torch.float32, 5, 3, of=0)
    view = tensor("model.view", torch.float32, 40, 30)[10:20]
    return {
        "rows": shard("model.rows", torch.float32, 6, 5),
        "columns": shard("model.columns", torch.bfloat16, 4, 7, axis=1),
        "layer": shard("model.layers.weight", torch.float32, 3, 4, layers=1),
        "large": shard("optimizer.state.exp_avg.rows", torch.float32, 300, 701),
        "small": shard("optimizer.state.step", torch.int64, 1),
        "view": sharded("model.view", view, (0, rank, size)),
        "replicated": sharded("model.replicated", replicated, replica_id=rank),
        "object": ShardedObject("model.extra", {"seed": seed, "rank": rank}, (size,), (rank,)),
        "random state": ShardedObject("rng", [view[0].clone(), seed], (size,), (rank,)),
        "iteration": seed,
    }


def plain(state: StateDict) -> StateDict:
    """Makes the result of Megatron's load for a state."""
    return {name: getattr(value, "data", value) for name, value in state.items()}


def emptied(state: StateDict) -> StateDict:
    """Makes an empty copy of a state, to load into."""
    from megatron.core.dist_checkpointing import ShardedTensor

    for value in state.values():
        if isinstance(value, ShardedTensor):
            value.data = torch.zeros_like(value.data)
        elif hasattr(value, "data"):
            value.data = None
    return {name: value for name, value in state.items() if name != "iteration"}


# --- saves and loads, as Megatron's training has them ---------------------------------------------


def directory(launch: Launch, *names: str) -> Path:
    """Makes an empty directory, as Megatron does before it saves."""
    path = launch.path(*names)
    if launch.rank == 0:
        path.mkdir(parents=True)
    dist.barrier()
    return path


def their_queue(**options: Any) -> Any:
    """Makes the queue that Megatron-core's module has now."""
    return strategies("async_utils").AsyncCallsQueue(**options)


def request_of(state: StateDict, path: Path, strategy: Any = None) -> Any:
    """Makes Megatron-core's request to save a state."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.save(state, str(path), strategy, async_sharded_save=True)


def request_for(launch: Launch, path: Path, seed: int, strategy: Any = None) -> Any:
    return request_of(megatron_state(launch, seed), path, strategy)


def run_in(queue: Any, request: Any) -> None:
    """Runs a save to its end in a queue."""
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)


def save_through(queue: Any, request: Any) -> None:
    """Runs a save to its end in a queue, which is then closed."""
    queue.schedule_async_request(request)
    assert queue.get_num_unfinalized_calls() == 1
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


def loaded(state: StateDict, path: Path, *strategy: Any) -> StateDict:
    """Loads by Megatron-core into a state without values."""
    from megatron.core import dist_checkpointing

    found: StateDict = dist_checkpointing.load(state, str(path), *strategy)
    return found


def save_strategy(threads: int = 2, hint: str | None = None, cached: bool = False) -> Any:
    return strategies("torch").TorchDistSaveShardedStrategy(
        "torch_dist", 1, thread_count=threads, separation_hint=hint, cached_metadata=cached
    )


def assert_loads(launch: Launch, path: Path, seed: int) -> None:
    """Checks that Megatron-core's load returns the saved state."""
    found = loaded(emptied(megatron_state(launch, seed)), path)
    for name, value in plain(megatron_state(launch, seed)).items():
        assert_equal(found[name], value, name)


def assert_is_ours(launch: Launch, path: Path) -> None:
    """Checks that torch_ckpt has written all items: other writers store no checksums."""
    if launch.rank == 0:
        assert_tables_match(path, read_metadata(path))


def children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}
