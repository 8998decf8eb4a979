"""Short training runs on ranks, from the start to the end of their interpreters; run by
test_training_runs.py.

Each run restores the previous one, trains some steps under a CheckpointManager that saves every
step, and ends as programs do: the manager is closed or not, the process group destroyed or not.
"""

from __future__ import annotations

import faulthandler
import itertools
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import torch_ckpt
from tests.ranks import WHERE_SIGNAL

#: Steps of one run.
STEPS = 4

#: Seconds after which a rank is declared dead. Longer than a test waits for a run.
TIMEOUT = 600.0


class Ending(NamedTuple):
    """Describes how a run uses and ends a manager.

    Attributes:
        asynchronous: saves run in the background.
        closes: the manager is closed.
        destroys: the process group is destroyed.
        rank_0_hosts_store: the store ends with rank 0.
    """

    asynchronous: bool
    closes: bool
    destroys: bool
    rank_0_hosts_store: bool

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items())


ENDINGS = [Ending(*choice) for choice in itertools.product([True, False], repeat=4)]


class Loader:
    """Counter of the samples of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.samples = 0

    def next(self) -> torch.Tensor:
        self.samples += 1 + self.rank
        return torch.full((2, 8), float(self.samples))

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples, "of rank": self.rank, f"only {self.rank}": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["of rank"] == self.rank
        self.samples = state["samples"]


def train(_: Connection | None, root: Path, ending: Ending) -> None:
    """Runs one rank."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = Loader(rank)
    state = {"model": model, "optimizer": optimizer, "loader": torch_ckpt.PerRank(loader)}
    manager = torch_ckpt.CheckpointManager(
        root,
        keep=2,
        saves=torch_ckpt.manager.SaveOptions(async_saves=ending.asynchronous),
        timeout=TIMEOUT,
    )
    start = manager.restore(state)
    assert loader.samples == start * (1 + rank), (loader.samples, start)
    for step in range(start, start + STEPS):
        model(loader.next()).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        manager.save(step + 1, state)
    if ending.closes:
        manager.close()
    # Without this barrier gloo's thread sometimes aborts while Python exits (torch 2.15).
    dist.barrier()
    if ending.destroys:
        dist.destroy_process_group()


def main(root: str, ending: str) -> None:
    """Runs one rank in an interpreter of its own."""
    faulthandler.enable()
    faulthandler.register(WHERE_SIGNAL)
    train(None, Path(root), ENDINGS[int(ending)])


if __name__ == "__main__":
    main(*sys.argv[1:])
