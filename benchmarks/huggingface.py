"""Times saves of safetensors files by several ranks, and loads of such files."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt

from . import pagecache, ranks
from .contenders import Kind
from .groups import Run
from .measure import Contender, Sample, measure_alternately
from .memory import measure_growth
from .results import ContenderInfo, readable_size

State = dict[str, Any]

_RANKS = 4
#: Rows and columns of each tensor, in bfloat16: 32 MiB.
_SHAPE = (4096, 4096)
#: max_host_bytes of the saves whose memory is measured.
_BUDGET = 64 << 20
_STOCK_ROUNDS = 2  # torch's writer is slow
_SAVERS: dict[str, tuple[str, Kind]] = {
    "checkpoint": ("checkpoint", "ours"),
    "rows": ("safetensors, row shards", "ours"),
    "columns": ("safetensors, column shards", "ours"),
    "stock": ("torch's writer, consolidated, 2 rounds", "stock"),
}


def _names(size: int) -> list[str]:
    count = max(1, size // (_SHAPE[0] * _SHAPE[1] * 2))
    return [f"model.layers.{number}.weight" for number in range(count)]


def _make_state(size: int) -> State:
    torch.manual_seed(0)
    return {name: torch.empty(_SHAPE, dtype=torch.bfloat16).uniform_(1, 2) for name in _names(size)}


# --- files ---------------------------------------------------------------------------------------


def save_and_load_files(run: Run) -> None:
    """Times saves of the same tensors as a checkpoint and as safetensors files, and their loads."""
    size, rounds = run.effort.state_bytes, run.effort.rounds
    infos = [ContenderInfo(name, *about) for name, about in _SAVERS.items()]
    with run.scratch("huggingface") as path:
        title = f"Save {readable_size(size)} of bfloat16 by {_RANKS} ranks"
        run.begin(title)
        ranks.run(_RANKS, partial(_save_on_rank, size, rounds, path))
        samples: list[Sample] = json.loads((path / "samples.json").read_text())
        run.add("huggingface_save", title, size, infos, samples)
        growths: list[Sample] = []
        for name in _SAVERS:
            ranks.run(_RANKS, partial(_memory_on_rank, size, name, path))
            growth = json.loads((path / "memory.json").read_text())
            growths.append({"contender": name, "round": 0, "growth_bytes": growth})
        title = "Memory per rank beyond the state, max_host_bytes=64 MiB in torch_ckpt"
        run.add("memory_huggingface", title, size, infos, growths)
        title = f"Load {readable_size(size)} of safetensors files, warm page cache"
        run.measure("huggingface_load", title, size, _loaders(path / "rows"))


def _savers(size: int, path: Path, budget: int | None) -> dict[str, Callable[[], object]]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = _make_state(size)
    rows, columns = (
        {name: distribute_tensor(value, mesh, [Shard(dim)]) for name, value in whole.items()}
        for dim in (0, 1)
    )

    def by_us(state: State, name: str, **options: Any) -> Callable[[], object]:
        return lambda: torch_ckpt.save(
            state, path / name, options=torch_ckpt.WriteOptions(max_host_bytes=budget), **options
        )

    def by_stock() -> None:
        writer = HuggingFaceStorageWriter(
            str(path / "stock"),
            fqn_to_index_mapping=dict.fromkeys(rows, 1),
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp_save(rows, storage_writer=writer)

    return {
        "checkpoint": by_us(rows, "checkpoint"),
        "rows": by_us(rows, "rows", format="safetensors"),
        "columns": by_us(columns, "columns", format="safetensors"),
        "stock": by_stock,
    }


def _remove_stock(path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path / "stock", ignore_errors=True)
    dist.barrier()


def _save_on_rank(size: int, rounds: int, path: Path) -> None:
    entries = [
        Contender(name, *_SAVERS[name], run=save, prepare=partial(_remove_stock, path))
        for name, save in _savers(size, path, None).items()
    ]
    for entry in entries[:-1]:
        # Warm up imports, threads, pools and connections.
        entry.run()
    few = min(rounds, _STOCK_ROUNDS)
    own = measure_alternately(entries, few, lambda _sample: None, ready=dist.barrier)
    if rounds > few:
        later = measure_alternately(
            entries[:-1], rounds - few, lambda _sample: None, ready=dist.barrier
        )
        own += [{**sample, "round": sample["round"] + few} for sample in later]
    for sample in own:
        del sample["read_bytes"]
    merged = ranks.merge(own)
    if dist.get_rank() == 0:
        (path / "samples.json").write_text(json.dumps(merged))


def _memory_on_rank(size: int, name: str, path: Path) -> None:
    # Warm up imports and connections, of torch's code too.
    small = {"weight": torch.zeros(1 << 10)}
    torch_ckpt.save(small, path / "small", format="safetensors")
    dcp_save(small, checkpoint_id=path / "small-stock")
    _remove_stock(path)
    before, peak = measure_growth(_savers(size, path, _BUDGET)[name])
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, peak - before)
    if dist.get_rank() == 0:
        # The memory that ranks share counts in each of them.
        (path / "memory.json").write_text(json.dumps(max(of_ranks)))


def _loaders(path: Path) -> list[Contender]:
    files = sorted(path.glob("*.safetensors"))
    target = {
        name: torch.zeros_like(value)
        for file in files
        for name, value in safetensors.torch.load_file(file).items()
    }

    def by_library() -> None:
        for file in files:
            for name, value in safetensors.torch.load_file(file).items():
                target[name].copy_(value)

    def load(verify: bool) -> None:
        options = torch_ckpt.ReadOptions(verify=verify)
        torch_ckpt.load(target, path, no_dist=True, options=options)

    warm = partial(pagecache.warm, files)
    entries = [
        Contender("load_file", "load_file and copy_", "peer", by_library, warm),
        Contender("ours_call", "torch_ckpt.load", "ours", lambda: load(True), warm),
        Contender(
            "ours_unverified", "torch_ckpt.load, verify=False", "ours", lambda: load(False), warm
        ),
    ]
    for entry in entries:
        entry.run()
    return entries
