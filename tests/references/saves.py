"""Saves whose bytes are recorded: states of each kind, on one, two and four ranks.

The recorded digests (recorded.json) are the gate of a change that must not change files. To make
the bytes reproducible, the ranks save with a fixed clock and to a path of a fixed length, and
``digests`` blanks what still differs between two runs.

    python -m tests.references.record     records the digests of the installed version
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
from benchmarks import ranks
from tests.distributed.cases import dtensors, dtensors_2d, sharded_tensor
from tests.support import f32, nested_state, random_tensor

RECORDED = Path(__file__).parent / "recorded.json"

#: Each path that contains the saves has this many characters.
PATH_CHARACTERS = 120

#: The time of each save.
NOW = 1_700_000_000.0

State = dict[str, Any]


class Subclass(torch.Tensor):
    """A tensor that the engine cannot plan without torch."""


# --- states ---------------------------------------------------------------------------------------


def objects() -> State:
    """Returns values that are no tensors, and containers that DCP flattens or keeps."""
    return {
        "step": 7,
        "text": "a sample \N{GREEK SMALL LETTER ALPHA}",
        "large": "x" * 100_000,
        "rates": [0.1, 0.01],
        "tuple": (1, (2, "three")),
        "nothing": None,
        "empty": {},
        "empty list": [],
        "by number": {0: {"a": 1}, 1: torch.ones(2)},
        "list": [torch.full((2,), 5), {"deep": torch.full((2,), 6)}, "text"],
        "ordered": OrderedDict(first=1, second=torch.zeros(3)),
    }


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model and its optimizer with states. The values are the same on all machines."""
    module = torch.nn.Sequential(torch.nn.Linear(31, 17), torch.nn.BatchNorm1d(17), torch.nn.GELU())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(8, 31)).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    for number, tensor in enumerate([*module.state_dict().values(), *states]):
        if tensor.dim() > 0:
            tensor.copy_(random_tensor(tuple(tensor.shape), tensor.dtype, seed + number))
    return module, optimizer


def training(seed: int = 0) -> State:
    module, optimizer = trained(seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"model": module, "optimizer": optimizer, "scheduler": scheduler, "step": seed}


def meshes() -> list[DeviceMesh]:
    """Returns a mesh of one dimension, and on four ranks one of two."""
    size = dist.get_world_size()
    return [init_device_mesh("cpu", (size,))] + (
        [init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))] if size == 4 else []
    )


def sharded() -> State:
    """Returns DTensors of each layout, replicas, and values of one rank."""
    line, *square = meshes()
    rank = dist.get_rank()
    tied = distribute_tensor(f32(8, 6, seed=3), line, [Shard(0)])
    return {
        "line": dtensors(line),
        "square": dtensors_2d(square[0]) if square else {},
        "tied": {"one": tied, "other": tied},
        "plain": {f"{i}": f32(40 + i, 9, seed=i) for i in range(7)},
        "large": f32(3_000, 700, seed=5),
        "note": "for all",
        f"of rank {rank}": {"tensor": f32(5 + rank, 4), "number": rank},
    }


def planned_by_torch() -> State:
    """Returns tensors that the engine plans by asking torch, and others between them."""
    launch: Any = SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size())
    return {
        "before": f32(30, 3),
        "old": sharded_tensor(launch),
        f"subclass of rank {launch.rank}": f32(12, 5, seed=1).as_subclass(Subclass),
        "after": {"tensor": f32(7, 3, seed=2), "number": 3},
    }


def shards_of_model() -> State:
    mesh = meshes()[0]
    return {
        "embed.weight": distribute_tensor(f32(1_000, 64), mesh, [Shard(0)]),
        "up.weight": distribute_tensor(f32(64, 256, seed=1), mesh, [Shard(1)]),
        "norm.weight": distribute_tensor(f32(64, seed=2), mesh, [Replicate()]),
        "bias": random_tensor((64,), torch.bfloat16, 3),
    }


# --- saves ----------------------------------------------------------------------------------------


def save_objects(root: Path) -> None:
    torch_ckpt.save(objects(), root / "objects")


def save_plain(root: Path) -> None:
    options = {
        "default": torch_ckpt.WriteOptions(),
        "two": torch_ckpt.WriteOptions(thread_count=2),
        "each": torch_ckpt.WriteOptions(single_file_per_rank=False),
        "hinted": torch_ckpt.WriteOptions(thread_count=4, separation_hint="model"),
    }
    for name, chosen in options.items():
        torch_ckpt.save(nested_state(), root / name, options=chosen)
    large = {f"{i}": f32(200_000 + 1_000 * i, 3, seed=i) for i in range(12)}
    torch_ckpt.save(large, root / "several files")


def save_modules(root: Path) -> None:
    torch_ckpt.save(training(), root / "modules")


def save_in_background(root: Path) -> None:
    torch_ckpt.async_save(nested_state(), root / "background").result()


def save_safetensors(root: Path) -> None:
    tensors = {"a": f32(30, 7), "b": random_tensor((9,), torch.bfloat16), "c": f32(4, 6).t()}
    torch_ckpt.save(tensors, root / "safetensors", format="safetensors")
    form = torch_ckpt.Safetensors(
        dtype="bf16", max_shard_size=500, metadata={"format": "pt", "a": "b"}
    )
    torch_ckpt.save(tensors, root / "converted", format=form)


def save_versions(root: Path) -> None:
    for version, seed in ((1, 0), (2, 9)):
        tensors = {"frozen": f32(500, 7), "trained": f32(90, 7, seed=seed)}
        torch_ckpt.publish(tensors, root / "versions", version, delta=version == 2)


def save_by_dcp(root: Path) -> None:
    dcp.save(nested_state(), storage_writer=torch_ckpt.FileSystemWriter(root / "dcp"), no_dist=True)


def save_steps(root: Path) -> None:
    """Saves steps of a manager, on one rank or several."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    with torch_ckpt.CheckpointManager(root / "run", interval=1) as manager:
        for step in (1, 2):
            own = torch_ckpt.PerRank({"loader": rank, "order": f32(4, seed=rank)})
            plain = {"epochs": step, "losses": [0.5, 0.25], "scale": torch.tensor(2.0)}
            state = {**training(step), "own": own, "plain": plain, "objects": objects()}
            manager.save(step, state, metrics={"loss": 1 / step}, notes={"by": "a test"})


def save_sharded(root: Path) -> None:
    torch_ckpt.save(sharded(), root / "sharded")
    torch_ckpt.async_save(sharded(), root / "background").result()


def save_sharded_by_dcp(root: Path) -> None:
    dcp.save(sharded(), storage_writer=torch_ckpt.FileSystemWriter(root / "dcp"))


def save_planned_by_torch(root: Path) -> None:
    torch_ckpt.save(planned_by_torch(), root / "planned by torch")


def save_shards_of_model(root: Path) -> None:
    torch_ckpt.save(shards_of_model(), root / "model", format="safetensors")


#: Each kind of save, with the numbers of ranks that make it. 0: without a process group.
SAVES: list[tuple[Callable[[Path], None], tuple[int, ...]]] = [
    (save_objects, (0,)),
    (save_plain, (0,)),
    (save_modules, (0,)),
    (save_in_background, (0,)),
    (save_safetensors, (0,)),
    (save_versions, (0,)),
    (save_by_dcp, (0,)),
    (save_steps, (0, 2)),
    (save_sharded, (1, 2, 4)),
    (save_sharded_by_dcp, (2,)),
    (save_planned_by_torch, (1, 2)),
    (save_shards_of_model, (2, 4)),
]


# --- digests --------------------------------------------------------------------------------------


def root_within(parent: Path) -> Path:
    """Makes a directory for the saves, with a path of the fixed length."""
    return parent / ("r" * (PATH_CHARACTERS - len(os.fspath(parent)) - 1))


def write_all(root: Path) -> None:
    """Makes all saves beneath a root, those of a number of ranks in one directory."""
    for size in sorted({size for _save, sizes in SAVES for size in sizes}):
        work = partial(_write_on_rank, root / f"{size} ranks", size)
        if size == 0:
            work()
        else:
            ranks.run(size, work)


def _write_on_rank(root: Path, size: int) -> None:
    with (
        mock.patch.object(time, "time", return_value=NOW),
        # The clock of the durations that a save records.
        mock.patch.object(time, "perf_counter", return_value=0.0),
    ):
        for save, sizes in SAVES:
            if size in sizes:
                save(root)


def digests(root: Path) -> dict[str, str]:
    """Returns a digest of each file beneath a root, by its path within the root."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink())
    return {os.fspath(path.relative_to(root)): _digest(path, root) for path in files}


def _digest(path: Path, root: Path) -> str:
    data = path.read_bytes()
    if path.name == ".metadata":
        # The seal is a checksum of the bytes before, which differ.
        data = data[: data.rindex(b"TCM1")]
        meta = dcp.FileSystemReader(path.parent).read_metadata().storage_meta
        if meta is not None and meta.save_id is not None:
            data = data.replace(meta.save_id.encode(), b"-" * len(meta.save_id))
    if path.name == "write_completed":
        # The process that saved the step.
        data = re.sub(rb'"run": ".*"', b"", data)
    if path.name == ".lease":
        return "a lease"
    data = data.replace(os.fspath(root).encode(), b"/" * PATH_CHARACTERS)
    return hashlib.sha256(data).hexdigest()[:16]


def version() -> str:
    """Returns the version of torch, on which metadata and records depend."""
    return ".".join(re.findall(r"\d+", torch.__version__)[:2])


def made(parent: Path) -> dict[str, str]:
    """Makes all saves in a directory and returns their digests."""
    root = root_within(parent)
    write_all(root)
    return digests(root)
