"""Measures saves and loads of the same bytes in tensors of different sizes, in one process.

    python -m benchmarks.tensor_sizes --tensor-bytes 64KB 12MB --out FILE

For each size of a tensor, each round writes the bytes to the disk without torch_ckpt, and saves
them; reads the files from the disk without torch_ckpt, and loads them; copies the tensors in
memory, and loads them from the page cache. Prints the medians over the rounds of the seconds, the
CPU seconds and the ratios of a limit's time to torch_ckpt's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import torch_ckpt

from . import limits, machine, pagecache
from .measure import time_once
from .run import parse_size

_COPY_THREADS = 2


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the figures; returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("2GB"))
    parser.add_argument("--tensor-bytes", type=parse_size, nargs="+", default=[64 << 10, 12 << 20])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    path = options.dir / "tensor_sizes"
    options.dir.mkdir(parents=True, exist_ok=True)
    results = []
    for tensor_bytes in options.tensor_bytes:
        rounds = _measure(options.size, tensor_bytes, options.rounds, path)
        medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        count = options.size // tensor_bytes
        print(f"{count:,} tensors of {tensor_bytes:,} bytes")
        for name, value in medians.items():
            print(f"  {name:48} {value:8.3f}")
        results.append({"tensor_bytes": tensor_bytes, "medians": medians, "rounds": rounds})
    found = {
        "bytes": options.size,
        "results": results,
        "machine": dataclasses.asdict(machine.describe(options.dir)),
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _measure(size: int, tensor_bytes: int, rounds: int, path: Path) -> list[dict[str, float]]:
    state = {
        f"model.layers.{number}.weight": torch.rand(tensor_bytes // 4)
        for number in range(size // tensor_bytes)
    }
    target = {name: torch.zeros_like(value) for name, value in state.items()}
    raw = limits.RawWriter()
    direct = limits.direct_io_works(path.parent)
    shape = limits.WriteShape(4, 2 if direct else 1, direct=direct)
    reader = limits.RawReader(limits.ReadShape(4, 4 << 20, direct=direct))
    found = []
    # The first round allocates the memory for copies, and is not counted.
    for _ in range(rounds + 1):
        figures: dict[str, float] = {}
        add = partial(_add, figures)
        shutil.rmtree(path, ignore_errors=True)
        add("raw write", lambda: raw.write(path, size, shape))
        shutil.rmtree(path)
        add("save", lambda: torch_ckpt.save(state, path), limit="raw write")
        files = sorted(path.glob("*.distcp"))
        pagecache.evict(files)
        add("raw read", partial(reader.read, files))
        pagecache.evict(files)
        add("cold load", lambda: torch_ckpt.load(target, path), limit="raw read")
        pagecache.warm(files)
        add("memcpy", lambda: limits.copy_memory(state, target, _COPY_THREADS))
        add("warm load", lambda: torch_ckpt.load(target, path), limit="memcpy")
        found.append(figures)
    assert all(torch.equal(target[name], value) for name, value in state.items())
    shutil.rmtree(path)
    return found[1:]


def _add(
    figures: dict[str, float], name: str, run: Callable[[], object], limit: str | None = None
) -> None:
    figures[name], figures[f"{name}, CPU"] = time_once(run)
    if limit is not None:
        figures[f"{limit} / {name}"] = figures[limit] / figures[name]


if __name__ == "__main__":
    main()
