"""Measures the coordinator of a save for many ranks, in one process that simulates the ranks.

    python -m benchmarks.run planning --ranks 1024 --tensors 300 --out FILE

All simulated ranks have DTensors of the same names, sharded by rows over all ranks, with 16 KiB of
each on a rank. States, messages, plan and metadata are made as by ``torch_ckpt.save``, step by step
in one thread, over a store in this process. Nothing is written. A second save of the unchanged
state reuses the plan. Prints median seconds and bytes of each part, and the number of messages of
all ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.tensor import DTensor, Shard

from torch_ckpt import _core
from torch_ckpt.checkpoint.directory import DirectoryIdentity, OpenDirectory
from torch_ckpt.checkpoint.index import decode_index
from torch_ckpt.ranks.exchange import Answers, Exchange
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.ranks.store import StoreThread
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.run import Message, Reply
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import Opened
from torch_ckpt.saving.write import Written

from . import machine, ranks
from .memory import measure_growth

T = TypeVar("T")

ROWS, COLUMNS = 64, 64
# Approximate bytes of a tensor's record, and of its part of the file's checksum table.
_RECORD_BYTES = 17_536
_SUMS_BYTES = 30
_FILES = 2


def build_state(rank: int, world: int, tensors: int) -> dict[str, Any]:
    """Makes the state of a rank."""
    with ranks.mesh_without_peers(world, rank) as mesh:
        local = torch.zeros(ROWS, COLUMNS)
        return {
            f"model.layers.{number}.weight": DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False
            )
            for number in range(tensors)
        }


class Simulation:
    """Simulates saves of many ranks.

    Args:
        world: number of simulated ranks.
        tensors: number of tensors on each rank.

    Attributes:
        messages: number of messages of all ranks in a save, by kind of save.
        bytes: sizes of the messages and of the metadata.
    """

    def __init__(self, world: int, tensors: int) -> None:
        self.world = world
        self.states: list[SaveState] = []
        self.seconds: dict[str, list[float]] = {}
        self.bytes: dict[str, int] = {}
        self.messages: dict[str, int] = {}
        self._store = HashStore()
        self._store_thread = StoreThread()
        self._directory = DirectoryIdentity.of(OpenDirectory(os.curdir))
        self._saves = 0
        for rank in range(world):
            state = build_state(rank, world, tensors)
            with ranks.mesh_without_peers(world, rank):
                walk = partial(_planned_state, state)
                self.states.append(self._timed("state, each rank", walk))

    def run(self) -> None:
        """Saves, decodes the metadata, and saves the unchanged state again."""
        plans = [AgreedPlan() for _ in range(self.world)]
        data = self._save("first", plans)
        self.bytes["metadata"] = len(data)
        index = self._timed("reading the metadata", lambda: decode_index(data, "simulation"))
        again = decode_index(self._save("unchanged", plans), "simulation")
        assert len(again) == len(index)

    def measure_memory(self) -> dict[str, int]:
        """Returns the growth of this process in each part, in bytes.

        The growth includes the messages of all ranks.
        """
        plans = [AgreedPlan() for _ in range(self.world)]
        made: list[bytes] = []
        works: dict[str, Callable[[], Any]] = {
            "first": lambda: made.append(self._save("first", plans)),
            "reading the metadata": lambda: decode_index(made[0], "simulation"),
            "unchanged": lambda: self._save("unchanged", plans),
        }
        found = {}
        for what, work in works.items():
            before, peak = measure_growth(work)
            found[what] = peak - before
        return found

    def medians(self) -> dict[str, float]:
        """Returns the median seconds of each part."""
        return {part: statistics.median(seconds) for part, seconds in self.seconds.items()}

    def _save(self, kind: str, plans: list[AgreedPlan]) -> bytes:
        """Does the steps of SaveRun for one rank after another; returns the metadata."""
        self._saves += 1
        prefix = f"save/{self._saves}"
        groups = [
            RankGroup(self._store, rank, self.world, "", self._store_thread)
            for rank in range(self.world)
        ]
        exchanges = [Exchange(group, prefix) for group in groups]
        coordinator, plan = exchanges[0], plans[0]
        opened = Opened(self._directory)

        def make_message(rank: int) -> Message:
            template, message = plans[rank].own.message(self.states[rank].structure, None)
            shared = None if template is None else exchanges[rank].share(template)
            return Message(shared, message, opened)

        def make_replies() -> Answers[Reply]:
            shared = coordinator.shared
            parts = [
                (None if one.template is None else shared(one.template), one.plan)
                for one in messages
            ]
            replies = plan.coordinator.assign(parts)
            assert replies
            made: dict[bytes, Reply] = {}
            return Answers(made.setdefault(reply, Reply(reply, b"1")) for reply in replies)

        def write(rank: int) -> Written:
            return self._simulate_write(rank, plans[rank])

        def gather(step: str, value_of: Callable[[int], Any]) -> list[Any]:
            for one in exchanges:
                one._begin(step)
                one._store = self._store
            for rank in range(1, self.world):
                exchanges[rank]._post(value_of(rank))
            mine = value_of(0)
            values = timed(f"{step}s gathered", lambda: coordinator._collect(mine))
            assert isinstance(values, list)
            return values

        def timed(part: str, work: Callable[[], T]) -> T:
            return self._timed(f"{kind}: {part}", work)

        messages = gather("plan", make_message)
        replies = timed("planned", make_replies)
        timed("answered", lambda: coordinator._answer(replies))
        for rank in range(self.world):
            reply = replies[0] if rank == 0 else exchanges[rank]._receive()
            assert reply.plan is not None
            plans[rank].own.accept(self.states[rank].structure, reply.plan)
        timed("described, beside the writing", plan.coordinator.describe)
        results = gather("result", write)
        meta = StorageMeta(checkpoint_id="simulation", save_id=str(self._saves))
        data = timed("metadata", lambda: plan.encode(results, meta))
        coordinator._answer(data.seal)
        for rank in range(1, self.world):
            exchanges[rank]._receive()
        for one in reversed(exchanges):
            one.close()
        self.messages[kind] = sum(one.sent[0] for one in exchanges)
        self.bytes[f"{kind}: messages"] = sum(one.sent[1] for one in exchanges)
        return bytes(data)

    def _simulate_write(self, rank: int, plan: AgreedPlan) -> Written:
        count = len(plan.own.items) // 4
        files = []
        for file in range(_FILES):
            items = [
                (item, _RECORD_BYTES * number, _RECORD_BYTES, item + self._saves)
                for number, item in enumerate(range(file, count, _FILES))
            ]
            name = f"__{rank}_{self._saves}_{file}.distcp"
            files.append((name, os.urandom(_SUMS_BYTES * len(items)), items))
        return Written(_core.WrittenFiles(files), self._directory)

    def _timed(self, part: str, work: Callable[[], T]) -> T:
        gc.disable()
        try:
            begin = time.perf_counter()
            made = work()
            self.seconds.setdefault(part, []).append(time.perf_counter() - begin)
            return made
        finally:
            gc.enable()


def _planned_state(state_dict: dict[str, Any]) -> SaveState:
    """Does the work of one rank before it sends its message."""
    state = SaveState(state_dict)
    state.plan()
    return state


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Prints and returns the content of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=300, help="of each rank (default 300)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(arguments)
    simulation = Simulation(options.ranks, options.tensors)
    for _ in range(options.rounds):
        simulation.run()
    found = {
        "ranks": options.ranks,
        "tensors": options.tensors,
        "rounds": options.rounds,
        "seconds": simulation.medians(),
        "bytes": simulation.bytes,
        "messages": simulation.messages,
        "growth_bytes": simulation.measure_memory(),
        "machine": dataclasses.asdict(machine.describe(Path.cwd())),
    }
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    return found
