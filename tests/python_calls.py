"""Counts the Python functions of torch_ckpt that a save and a load enter on rank 0 of two ranks.

    python -m tests.python_calls [--list] [--out FILE]

The state has 20 DTensors, a tensor and a number. Each operation runs once before it is counted, so
imports and caches are not part of it. The count is the number of distinct functions on all threads,
without comprehensions, lambdas, module bodies and heartbeats.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from benchmarks import fresh_process
from torch_ckpt.ranks import exchange

_PACKAGE = f"{Path(torch_ckpt.__file__).parent}{os.sep}"
_RANKS = 2
# Heartbeats enter functions of their own. With these numbers, no operation lasts until the first
# heartbeat, however slow the machine is.
_HEARTBEAT_SECONDS = 3600.0
_TIMEOUT_SECONDS = 10 * _HEARTBEAT_SECONDS


class Recorder:
    """Records the code of each function of torch_ckpt that a thread enters while it is active."""

    def __init__(self) -> None:
        self.active = False
        self._entered: set[CodeType] = set()
        # Threads that start later inherit the hook.
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.active and event == "call":
            self._entered.add(frame.f_code)

    def functions(self, operation: Callable[[], object]) -> list[str]:
        """Runs an operation and returns the functions that it entered, sorted."""
        self._entered.clear()
        dist.barrier()
        self.active = True
        try:
            operation()
        finally:
            self.active = False
        dist.barrier()
        return sorted(
            # co_qualname exists since Python 3.11.
            f"{code.co_filename.removeprefix(_PACKAGE)}:{code.co_qualname}"  # type: ignore[attr-defined]
            for code in self._entered
            if code.co_filename.startswith(_PACKAGE) and not code.co_name.startswith("<")
        )


def state_with(names: list[str]) -> dict[str, Any]:
    """Builds a state of one DTensor for each name, a tensor and a number."""
    mesh = init_device_mesh("cpu", (_RANKS,))
    state: dict[str, Any] = {
        name: distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]) for name in names
    }
    return state | {"tensor": torch.ones(4), "step": 1}


def count_on_rank(directory: str) -> dict[str, list[str]]:
    """Counts each operation in this process, a rank of two."""
    root = Path(directory)
    recorder = Recorder()
    exchange._HEARTBEAT_SECONDS = _HEARTBEAT_SECONDS
    dist.init_process_group("gloo")
    names = [f"layer{number}.weight" for number in range(20)]
    state, renamed = state_with(names), state_with([*names[1:], "renamed.weight"])

    def save(values: dict[str, Any], path: Path) -> None:
        torch_ckpt.save(values, path, timeout=_TIMEOUT_SECONDS)

    def save_in_background(path: Path) -> None:
        torch_ckpt.async_save(state, path, timeout=_TIMEOUT_SECONDS).committed.result()
        # After the commit, the save's thread still closes the exchange.
        for thread in threading.enumerate():
            if thread.name == "torch_ckpt save":
                thread.join()

    def load(path: Path) -> None:
        torch_ckpt.load(state, path, timeout=_TIMEOUT_SECONDS)

    save(renamed, root / "a")
    save(state, root / "b")
    save_in_background(root / "c")
    load(root / "c")
    found = {
        "save, unchanged plan": recorder.functions(lambda: save(state, root / "d")),
        "save, new name": recorder.functions(lambda: save(renamed, root / "e")),
        "async_save": recorder.functions(lambda: save_in_background(root / "f")),
        "load": recorder.functions(lambda: load(root / "f")),
    }
    dist.destroy_process_group()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts two ranks and prints the counts of rank 0, or writes them with the names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the names of the functions")
    parser.add_argument("--out", type=Path, help="JSON file for the names of the functions")
    options = parser.parse_args(arguments)
    root = tempfile.mkdtemp()
    try:
        found = fresh_process.run_ranks(count_on_rank, root, world=_RANKS)[0]
    finally:
        shutil.rmtree(root)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    for operation, functions in found.items():
        print(f"{len(functions):4d}  {operation}")
        if options.list:
            print("".join(f"      {name}\n" for name in functions), end="")


if __name__ == "__main__":
    # Not the function of __main__, which a rank could not import.
    from tests.python_calls import main as run

    run()
