"""Measures saves in Hugging Face's layout by several ranks, and loads of such a directory.

    python -m benchmarks.huggingface --ranks 4 --size 2GB --rounds 5 --out FILE

1. Each round saves the same tensors as a checkpoint, sharded by rows; as safetensors files, sharded
   by rows and by columns; and by torch's HuggingFaceStorageWriter with consolidation, sharded by
   rows.
2. For each kind of save, fresh ranks save once, with a memory budget of 64 MiB per rank in
   torch_ckpt, and measure the memory that the save needs beyond the state.
3. Each round loads the directory in one process from the page cache: with safetensors' load_file
   and Tensor.copy_, and with torch_ckpt.load, verified and not.

Prints the medians over the rounds of the seconds (of the slowest rank), of the CPU seconds of all
ranks and of the ratios to the first contender of each group, and the growth of the resident size in
the rank in which it is largest. The memory that ranks share counts in each of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ckpt

from . import machine, pagecache, ranks
from .measure import alternate, time_once
from .memory import measure_growth
from .run import parse_size

#: Rows and columns of each tensor, in bfloat16: 32 MiB.
SHAPE = (4096, 4096)

State = dict[str, Any]

STOCK = "torch's writer, consolidated"

#: max_host_bytes of the saves whose memory is measured.
BUDGET = 64 << 20


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the figures; returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", type=parse_size, default=parse_size("2GB"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stock-rounds", type=int, default=2, help="torch's writer is slow")
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    path = (options.dir / "huggingface").resolve()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        work = partial(_save_on_rank, options.size, options.rounds, options.stock_rounds, path)
        ranks.run(options.ranks, work)
        saves = json.loads((path / "saves.json").read_text())
        memory = {}
        for name in saves:
            ranks.run(options.ranks, partial(_memory_on_rank, options.size, name, path))
            memory[name] = json.loads((path / "memory.json").read_text())
            shutil.rmtree(path / "stock", ignore_errors=True)
        loads = _loads(path / "rows", options.rounds)
    finally:
        shutil.rmtree(path)
    for title, samples in (("saves", saves), ("loads", loads)):
        print(title)
        _print(samples)
    print("memory beyond the state, in the rank in which it is largest")
    for name, growth in memory.items():
        print(f"  {name:<32} {growth / (1 << 20):8.0f} MiB")
    found = {
        "bytes": options.size,
        "ranks": options.ranks,
        "saves": saves,
        "memory": memory,
        "memory_budget": BUDGET,
        "loads": loads,
        "machine": dataclasses.asdict(machine.describe(options.dir)),
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _print(samples: dict[str, list[list[float]]]) -> None:
    first = next(iter(samples.values()))
    for name, rounds in samples.items():
        wall, cpu = (statistics.median(one[i] for one in rounds) for i in (0, 1))
        ratio = statistics.median(
            one[0] / base[0] for one, base in zip(rounds, first, strict=False)
        )
        print(f"  {name:34} {wall:7.3f} s  {cpu:7.3f} CPU s  {ratio:6.2f} of the first")


def _sharded(size: int, dim: int) -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    state: State = {}
    for number in range(max(1, size // (SHAPE[0] * SHAPE[1] * 2))):
        whole = torch.empty(SHAPE, dtype=torch.bfloat16).uniform_()
        shard: DTensor = distribute_tensor(whole, mesh, [Shard(dim)])
        state[f"model.layers.{number}.weight"] = shard
    return state


def _savers(size: int, path: Path, budget: int | None) -> dict[str, Callable[[], object]]:
    warnings.simplefilter("ignore")
    rows, columns = (_sharded(size, dim) for dim in (0, 1))
    names = {name: 1 for name in rows}

    def by_us(state: State, name: str, **options: Any) -> Callable[[], object]:
        return lambda: torch_ckpt.save(
            state, path / name, options=torch_ckpt.WriteOptions(max_host_bytes=budget), **options
        )

    def by_stock() -> None:
        writer = HuggingFaceStorageWriter(
            str(path / "stock"),
            fqn_to_index_mapping=names,
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp_save(rows, storage_writer=writer)

    return {
        "checkpoint": by_us(rows, "checkpoint"),
        "safetensors, row shards": by_us(rows, "rows", format="safetensors"),
        "safetensors, column shards": by_us(columns, "columns", format="safetensors"),
        STOCK: by_stock,
    }


def _memory_on_rank(size: int, name: str, path: Path) -> None:
    save = _savers(size, path, BUDGET)[name]
    # Warm up imports and connections, of torch's code too.
    torch_ckpt.save(_sharded(1 << 20, 0), path / "small", format="safetensors")
    dcp_save(_sharded(1 << 20, 0), checkpoint_id=path / "small-stock")
    before, peak = measure_growth(save)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, peak - before)
    if dist.get_rank() == 0:
        (path / "memory.json").write_text(json.dumps(max(of_ranks)))


def _save_on_rank(size: int, rounds: int, stock_rounds: int, path: Path) -> None:
    savers = _savers(size, path, None)
    samples: dict[str, list[list[float]]] = {name: [] for name in savers}
    for save in [*savers.values()][:-1]:
        # Warm up imports, threads, pools and connections.
        save()
    for round_, _position, name in alternate(list(savers), rounds):
        if name == STOCK:
            if round_ >= stock_rounds:
                continue
            _remove(path / "stock")
        wall, cpu = time_once(savers[name], dist.barrier)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (wall, cpu))
        walls, cpus = zip(*of_ranks, strict=True)
        samples[name].append([max(walls), sum(cpus)])
    if dist.get_rank() == 0:
        (path / "saves.json").write_text(json.dumps(samples))


def _remove(path: Path) -> None:
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()


def _loads(path: Path, rounds: int) -> dict[str, list[list[float]]]:
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

    loaders: dict[str, Callable[[], object]] = {
        "load_file and copy_": by_library,
        "torch_ckpt.load": lambda: torch_ckpt.load(target, path, no_dist=True),
        "torch_ckpt.load, verify=False": lambda: torch_ckpt.load(
            target, path, no_dist=True, options=torch_ckpt.ReadOptions(verify=False)
        ),
    }
    samples: dict[str, list[list[float]]] = {name: [] for name in loaders}
    for load in loaders.values():
        load()
    for _round, _position, name in alternate(list(loaders), rounds):
        pagecache.warm(files)
        samples[name].append(list(time_once(loaders[name])))
    return samples


if __name__ == "__main__":
    main()
