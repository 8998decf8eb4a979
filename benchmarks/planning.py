"""What the coordinator of a save does for many ranks, in one process and without the ranks.

    python -m benchmarks.planning --ranks 1024 --tensors 300 --stock --out FILE

Each simulated rank has the same names: DTensors of 16 KiB a rank, sharded by rows over all ranks.
The templates, the plan, the answers and the metadata are those of ``torch_ckpt.save``; nothing is
written, and nothing travels. ``--stock`` plans the same with torch's planner. Prints seconds and
bytes of each part, the median of some rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor, Shard

from torch_ckpt import _C
from torch_ckpt.checkpoint.flat_state import flat_state
from torch_ckpt.checkpoint.metadata import decode_index, sealed

from . import machine, ranks

T = TypeVar("T")

ROWS, COLUMNS = 64, 64
_RECORD_BYTES = 17_536  # about what one of these tensors takes in a file


def state_of(rank: int, world: int, tensors: int) -> dict[str, Any]:
    """What a rank has."""
    with ranks.mesh_without_peers(world, rank) as mesh:
        local = torch.zeros(ROWS, COLUMNS)
        return {
            f"model.layers.{number}.weight": DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False
            )
            for number in range(tensors)
        }


class Simulation:
    """The ranks' templates, and what the coordinator makes of them.

    Args:
        world: simulated ranks.
        tensors: of each rank.
        stock: plan with torch's planner, too.
    """

    def __init__(self, world: int, tensors: int, stock: bool) -> None:
        self.templates: list[bytes] = []
        self.local_plans: list[SavePlan] = []
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}
        for rank in range(world):
            state = state_of(rank, world, tensors)
            with ranks.mesh_without_peers(world, rank):
                template = partial(_template, state)
                self.templates.append(self._timed("template, each rank", template))
                if stock:
                    local_plan = partial(_local_plan, state)
                    self.local_plans.append(self._timed("stock: local plan, each rank", local_plan))
        self.bytes["template, each rank"] = len(self.templates[0])

    def run(self) -> None:
        """One save as the coordinator sees it, and one that reads its metadata."""
        plan = self._timed("plan", lambda: _C.GlobalPlan(self.templates))
        answers = self._timed(
            "answers", lambda: [plan.owned(rank) for rank in range(len(self.templates))]
        )
        places = [
            [
                (f"__{rank}_0.distcp", number * _RECORD_BYTES, _RECORD_BYTES, 0)
                for number in range(len(rows))
            ]
            for rank, rows in enumerate(answers)
        ]
        data = self._timed(
            "metadata", lambda: sealed(plan.encode(places, {}, None, [], "1.0.0", ""))
        )
        self.bytes["metadata"] = len(data)
        index = self._timed("reading the metadata", lambda: decode_index(data, "simulation"))
        assert len(index) == len(plan.paths())
        if self.local_plans:
            planner = DefaultSavePlanner()
            self._timed("stock: plan", lambda: planner.create_global_plan(self.local_plans))

    def medians(self) -> dict[str, float]:
        """Seconds of each part."""
        return {part: statistics.median(seconds) for part, seconds in self.seconds.items()}

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        gc.disable()
        try:
            begin = time.perf_counter()
            made = work()
            self.seconds.setdefault(part, []).append(time.perf_counter() - begin)
            return made
        finally:
            gc.enable()


def _template(state: dict[str, Any]) -> bytes:
    return _C.template_of(flat_state(state))


def _local_plan(state: dict[str, Any]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints the parts, and returns what is written to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300, help="of each rank (default 300)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stock", action="store_true", help="torch's planner, too")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    simulation = Simulation(options.ranks, options.tensors, options.stock)
    for _ in range(options.rounds):
        simulation.run()
    found = {
        "ranks": options.ranks,
        "tensors": options.tensors,
        "rounds": options.rounds,
        "seconds": simulation.medians(),
        "bytes": simulation.bytes,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "machine": dataclasses.asdict(machine.describe(Path.cwd())),
    }
    print(f"{options.ranks} ranks with {options.tensors} DTensors each")
    for part, seconds in simulation.medians().items():
        size = simulation.bytes.get(part)
        print(f"{part:30} {1000 * seconds:10.2f} ms" + (f" {size:12,} bytes" if size else ""))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
