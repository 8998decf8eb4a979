"""Measures publications of versions: deltas, their application, and the stall of async exports.

    python -m benchmarks.publication --size 2GB --rounds 5 --out FILE

1. Each round changes 1, 3 and 100 percent of the elements of a bfloat16 state, and publishes the
   version with and without a delta. It applies the delta to a copy of the base, and copies the
   tensors with Tensor.copy_ for comparison.
2. Each round calls async_save, and async_publish with and without a delta. The stall is the time
   until the call returns.

Prints the medians over the rounds of the seconds, of the CPU seconds and of the ratios within a
round, and the bytes of the deltas.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torch_ckpt
from torch_ckpt.publication.publish import async_publish

from . import machine
from .measure import alternate, time_once
from .run import parse_size

#: Rows and columns of each tensor, in bfloat16: 32 MiB.
SHAPE = (4096, 4096)

#: Changed elements, in percent.
CHANGES = (1, 3, 100)

State = dict[str, torch.Tensor]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the figures; returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=parse_size("2GB"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    path = (options.dir / "publication").resolve()
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        state = _state(options.size)
        deltas = {
            str(percent): _deltas(state, percent, options.rounds, path) for percent in CHANGES
        }
        stalls = _stalls(state, options.rounds, path)
    finally:
        shutil.rmtree(path)
    found = {
        "bytes": options.size,
        "deltas": deltas,
        "stalls": stalls,
        "machine": dataclasses.asdict(machine.describe(options.dir)),
    }
    _print(found)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _state(size: int) -> State:
    torch.manual_seed(0)
    count = max(1, size // (SHAPE[0] * SHAPE[1] * 2))
    return {
        f"model.layers.{number}.weight": torch.empty(SHAPE, dtype=torch.bfloat16).uniform_(1, 2)
        for number in range(count)
    }


def _changed(state: State, percent: int) -> State:
    changed = {}
    for name, value in state.items():
        if percent == 100:
            changed[name] = value + 1
            continue
        chosen = torch.rand(SHAPE) < percent / 100
        changed[name] = torch.where(chosen, value + 1, value)
    return changed


def _deltas(state: State, percent: int, rounds: int, path: Path) -> dict[str, Any]:
    """Publishes versions that differ from a base, and applies their deltas."""
    version = _changed(state, percent)
    target = {name: torch.empty_like(value) for name, value in state.items()}
    root = path / "policy"
    size = 0

    def publish(delta: bool) -> None:
        shutil.rmtree(root / "0000000001", ignore_errors=True)
        torch_ckpt.publish(version, root, version=1, delta=delta, no_dist=True)

    def reset() -> None:
        for name, value in state.items():
            target[name].copy_(value)

    def copy() -> None:
        for name, value in version.items():
            target[name].copy_(value)

    contenders: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "publish": (lambda: None, lambda: publish(False)),
        "publish with a delta": (lambda: None, lambda: publish(True)),
        "copy all tensors": (reset, copy),
        "apply the delta": (reset, lambda: torch_ckpt.apply_delta(root / "latest", target)),
    }
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    torch_ckpt.publish(state, root, version=0, no_dist=True)
    publish(True)
    try:
        for round_, _position, name in alternate(list(contenders), rounds + 1):
            if name == "apply the delta" and not (root / "latest" / "torch_ckpt.delta").exists():
                publish(True)
            prepare, run = contenders[name]
            prepare()
            sample = time_once(run)
            if round_ > 0:  # the first round warms up
                samples[name].append(list(sample))
            if name == "apply the delta":
                assert all(torch.equal(target[key], version[key]) for key in version)
            delta = root / "0000000001" / "torch_ckpt.delta"
            size = delta.stat().st_size if delta.exists() else size
    finally:
        shutil.rmtree(root)
    return {"delta_bytes": size, "samples": samples}


def _stalls(state: State, rounds: int, path: Path) -> dict[str, list[list[float]]]:
    """Times the calls of background saves."""
    calls: dict[str, Callable[[], torch_ckpt.AsyncSave]] = {
        "async_save": lambda: torch_ckpt.async_save(
            state, path / "checkpoint", no_dist=True, warn_unchanged=False
        ),
        "async_publish": lambda: async_publish(state, path / "exports", keep=2, no_dist=True),
        "async_publish with a delta": lambda: async_publish(
            state, path / "exports", keep=2, delta=True, no_dist=True
        ),
    }
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    handles: list[torch_ckpt.AsyncSave] = []
    for round_, _position, name in alternate(list(calls), rounds + 1):
        sample = time_once(lambda name=name: handles.append(calls[name]()))  # type: ignore[misc]
        handles.pop().result()
        if round_ > 0:
            samples[name].append(list(sample))
    return samples


def _print(found: dict[str, Any]) -> None:
    for percent, deltas in found["deltas"].items():
        share = 100 * deltas["delta_bytes"] / found["bytes"]
        print(f"{percent} % changed: a delta of {deltas['delta_bytes']:,} bytes, {share:.2f} %")
        _print_samples(deltas["samples"])
    print("time in the call")
    _print_samples(found["stalls"])


def _print_samples(samples: dict[str, list[list[float]]]) -> None:
    for name, rounds in samples.items():
        first = samples["copy all tensors" if name == "apply the delta" else next(iter(samples))]
        wall, cpu = (statistics.median(one[i] for one in rounds) for i in (0, 1))
        ratio = statistics.median(one[0] / of[0] for one, of in zip(rounds, first, strict=True))
        print(f"  {name:28} {wall:7.3f} s  {cpu:7.3f} CPU s  {ratio:6.2f}")


if __name__ == "__main__":
    main()
