"""Helpers of cases on several ranks: states, saves and loads by DCP, and the runner of cases.

A case is a function that all ranks of a launch call. Launches of one file share a directory, so
that one can load what another saved.
"""

from __future__ import annotations

import datetime
import errno
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import torch_ckpt
from tests.support import assert_equal, files_limited_to, random_tensor

StateDict = dict[str, Any]

OURS = (torch_ckpt.FileSystemWriter, torch_ckpt.FileSystemReader)
STOCK = (dcp.FileSystemWriter, dcp.FileSystemReader)

#: Writer and reader: torch_ckpt's for one of them or both.
PAIRS = [(OURS[0], OURS[1]), (OURS[0], STOCK[1]), (STOCK[0], OURS[1])]

# Timeout of the process group, in seconds.
PATIENCE_SECONDS = 60


class Launch:
    """Argument of a case."""

    def __init__(self, workdir: Path) -> None:
        self.workdir = workdir
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.case = ""

    def path(self, *names: str) -> Path:
        """Returns a path below a directory of this case, which is empty at the start."""
        return self.workdir / f"{self.size}-ranks" / self.case / Path(*names)


def pairs(launch: Launch) -> Iterator[tuple[Path, Any, Any]]:
    """Yields each of ``PAIRS`` with a path."""
    for number, (writer, reader) in enumerate(PAIRS):
        yield launch.path(str(number)), writer, reader


# --- states ---------------------------------------------------------------------------------------


def tensor_of(name: str, *shape: int) -> torch.Tensor:
    """Makes a tensor that is identical on all ranks."""
    return random_tensor(shape, torch.float32, seed=sum(name.encode()))


def dtensors(mesh: DeviceMesh) -> dict[str, DTensor]:
    """Makes DTensors on a mesh of one dimension: even, uneven and empty shards, and replicas."""

    sharded = {
        "even rows": (0, 8, 6),
        "uneven rows": (0, 7, 5),
        "fewer rows than ranks": (0, 1, 5),
        "columns": (1, 6, 8),
        "uneven columns": (1, 3, 5),
        "vector": (0, 9),
        "three dimensions": (1, 3, 5, 4),
        "large": (0, 501, 700),
        "large columns": (1, 500, 701),
    }
    replicated = distribute_tensor(tensor_of("replicated", 4, 3), mesh, [Replicate()])
    return {
        name: distribute_tensor(tensor_of(name, *shape), mesh, [Shard(dim)])
        for name, (dim, *shape) in sharded.items()
    } | {"replicated": replicated}


def dtensors_2d(mesh: DeviceMesh) -> dict[str, DTensor]:
    """Makes DTensors on a mesh of two dimensions: hybrid sharding, and both dimensions sharded."""
    placements = {
        "hybrid": [Replicate(), Shard(0)],
        "hybrid columns": [Replicate(), Shard(1)],
        "blocks": [Shard(0), Shard(1)],
        "rows twice": [Shard(0), Shard(0)],
        "replicated twice": [Replicate(), Replicate()],
    }
    return {
        name: distribute_tensor(tensor_of(name, 9, 7), mesh, placement)
        for name, placement in placements.items()
    }


def mesh_1d(launch: Launch) -> DeviceMesh:
    return init_device_mesh("cpu", (launch.size,))


def mesh_2d(launch: Launch) -> DeviceMesh:
    return init_device_mesh("cpu", (2, launch.size // 2), mesh_dim_names=("a", "b"))


def zeroed(state: dict[str, DTensor]) -> dict[str, DTensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def assert_full_tensors(state: dict[str, DTensor]) -> None:
    """Checks that each gathered tensor has the values that belong to its name."""
    for name, tensor in state.items():
        assert_equal(tensor.full_tensor(), tensor_of(name, *tensor.shape), name)


def save(state: StateDict, path: Path, writer: Any = OURS[0], **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        return dcp.save(state, storage_writer=writer(path), **options)


def load(state: StateDict, path: Path, reader: Any = OURS[1], **options: Any) -> None:
    dcp.load(state, storage_reader=reader(path), **options)


def assert_only_used(path: Path, metadata: Metadata) -> None:
    """Checks that a checkpoint has only the files that its metadata names."""
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {file.name for file in path.iterdir()} == used | {".metadata"}


def failure_of(
    launch: Launch, work: Callable[..., Any], *arguments: Any, **options: Any
) -> dict[int, BaseException]:
    """Returns by rank the causes of the CheckpointException that ``work(*arguments)`` must raise on
    all ranks."""
    try:
        work(*arguments, **options)
    except dcp.CheckpointException as error:
        causes = {rank: cause for rank, (cause, _traceback) in error.failures.items()}
    else:
        raise AssertionError("no CheckpointException was raised")
    everywhere: list[Any] = [None] * launch.size
    dist.all_gather_object(everywhere, {rank: repr(cause) for rank, cause in causes.items()})
    assert all(seen == everywhere[0] for seen in everywhere), everywhere
    return causes


def texts_of(causes: dict[int, BaseException]) -> dict[int, str]:
    return {rank: str(cause) for rank, cause in causes.items()}


# --- interoperation and sharding ------------------------------------------------------------------


def trained_model(launch: Launch, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.GELU(), torch.nn.LayerNorm(13), torch.nn.Linear(13, 3)
    )
    mesh = mesh_1d(launch)
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 7)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> StateDict:
    """Gathers a state as plain tensors and objects."""

    def gathered(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.full_tensor()
        if isinstance(value, dict):
            return {str(key): gathered(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [gathered(inner) for inner in value]
        return value

    parts = get_state_dict(model, optimizer)
    return {"model": gathered(parts[0]), "optimizer": gathered(parts[1])}


def full_state_loaded(
    launch: Launch, path: Path, load: Callable[[StateDict, Path], Any]
) -> StateDict:
    """Loads a model and its optimizer with ``load(state, path)``, and returns their full state."""
    model, optimizer = trained_model(launch, seed=2)
    parts = get_state_dict(model, optimizer)
    state: StateDict = {"model": parts[0], "optimizer": parts[1]}
    load(state, path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return full_state(model, optimizer)


def sharded_tensor(launch: Launch, *, zeroed: bool = False) -> ShardedTensor:
    """Makes a ShardedTensor. Each rank has two shards of three rows that are not adjacent."""
    rank, size = launch.rank, launch.size
    whole = tensor_of("sharded", 6 * size, 5)
    if zeroed:
        whole.zero_()
    places = [ShardMetadata([3 * i, 0], [3, 5], f"rank:{i % size}/cpu") for i in range(2 * size)]
    shards = [TensorShard(whole[3 * i : 3 * i + 3].clone(), places[i]) for i in (rank, size + rank)]
    metadata = ShardedTensorMetadata(places, torch.Size([6 * size, 5]), ShardProperties())
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


def local_parts(tensor: ShardedTensor) -> list[torch.Tensor]:
    return [shard.tensor for shard in tensor.local_shards()]


# --- without collectives --------------------------------------------------------------------------


def rank_local_state(launch: Launch, step: int) -> StateDict:
    own = tensor_of(f"rank {launch.rank}", 6, 4) + step
    return {"own": own, "rank": launch.rank, "step": step}


# --- failures -------------------------------------------------------------------------------------


@contextmanager
def full_disk_on(rank: int) -> Iterator[None]:
    """Fails writes on one rank with ENOSPC."""
    with files_limited_to(4096) if dist.get_rank() == rank else nullcontext():
        yield


def assert_is_full_disk(causes: dict[int, BaseException], rank: int, path: Path) -> None:
    """Checks that the only cause is the OSError of that rank, with errno and file name."""
    assert set(causes) == {rank}
    cause = causes[rank]
    assert isinstance(cause, OSError)
    assert cause.errno == errno.EFBIG
    assert Path(cause.filename).parent == path
    assert Path(cause.filename).name.startswith(f"__{rank}_")


# --- torch_ckpt.save and torch_ckpt.load ----------------------------------------------------------


def everything(launch: Launch) -> StateDict:
    """Makes plain, sharded and other values, on all ranks and on one."""
    own = f"of rank {launch.rank}"
    return {
        "sharded": dict(dtensors(mesh_1d(launch))),
        "plain": [tensor_of(f"plain {i}", 50, 20) for i in range(6)],
        "old": sharded_tensor(launch),
        "note": "for all",
        own: tensor_of(own, 5 + launch.rank),
        f"object {own}": {"rank": launch.rank},
    }


def everything_emptied(launch: Launch) -> StateDict:
    state = everything(launch)
    own = f"of rank {launch.rank}"
    return {
        "sharded": zeroed(state["sharded"]),
        "plain": [torch.zeros_like(tensor) for tensor in state["plain"]],
        "old": sharded_tensor(launch, zeroed=True),
        "note": "",
        own: torch.zeros_like(state[own]),
        f"object {own}": {"rank": -1},
    }


def assert_everything(launch: Launch, state: StateDict) -> None:
    expected = everything(launch)
    assert_full_tensors(state["sharded"])
    assert_equal(local_parts(state["old"]), local_parts(expected["old"]))
    own = f"of rank {launch.rank}"
    for name in ("plain", "note", own, f"object {own}"):
        assert_equal(state[name], expected[name], name)


# --- running cases -------------------------------------------------------------------------------


def attempt(launch: Launch, name: str, case: Callable[[Launch], None]) -> str | None:
    """Runs a case. Returns the traceback if it failed on this rank."""
    launch.case = name
    if launch.rank == 0:
        shutil.rmtree(launch.path(), ignore_errors=True)
    dist.barrier()
    try:
        case(launch)
    except BaseException:
        return traceback.format_exc()
    return None


def serve(connection: Connection, module: str, workdir: Path) -> None:
    """Runs cases on a rank. Sends that the rank is ready, receives names of cases, and sends None
    or the traceback for each."""
    warnings.simplefilter("ignore")
    # As in a program: processes that a rank spawns import the module again, under another name.
    cases = sys.modules["__main__"] = import_module(module)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    launch = Launch(workdir)
    connection.send("ready")
    while (name := connection.recv()) is not None:
        connection.send(attempt(launch, name, getattr(cases, f"case_{name}")))
    getattr(cases, "at_end", bool)()
    # Without this barrier gloo's thread sometimes aborts while Python exits (torch 2.15).
    dist.barrier()
    dist.destroy_process_group()
