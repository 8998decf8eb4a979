"""Real ranks send the messages that the simulation of many ranks counts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import torch_ckpt
from benchmarks import planning
from tests.distributed.cases import PATIENCE_SECONDS, Launch
from tests.distributed.launcher import on, on_ranks
from tests.forked import REPOSITORY

pytestmark = pytest.mark.full

TENSORS = 3


@on(2, 16)
def case_messages_of_a_save_match_the_simulation(launch: Launch) -> None:
    mesh = init_device_mesh("cpu", (launch.size,))
    state = {
        f"model.layers.{number}.weight": DTensor.from_local(
            torch.zeros(planning.ROWS, planning.COLUMNS), mesh, [Shard(0)], run_check=False
        )
        for number in range(TENSORS)
    }
    sent = {}
    for kind in ("first", "unchanged"):
        handle = torch_ckpt.async_save(state, launch.path(kind), check_replicas="off")
        handle.result(PATIENCE_SECONDS)
        of_rank = torch.tensor([handle.metrics().messages, handle.metrics().message_bytes])
        dist.all_reduce(of_rank)
        sent[kind] = of_rank.tolist()
    if launch.rank != 0:
        return
    out = launch.path("simulation.json")
    command = [sys.executable, "-m", "benchmarks.run", "planning", "--rounds", "1"]
    command += ["--ranks", str(launch.size), "--tensors", str(TENSORS), "--out", str(out)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    simulated = json.loads(out.read_text())
    for kind, (messages, size) in sent.items():
        # One rank posts the shared template. None does if its owner is rank 0, which reads it.
        fewest = simulated["messages"][kind] - (1 if kind == "first" else 0)
        assert fewest <= messages <= simulated["messages"][kind]
        # Paths and checksum tables have other lengths in the simulation.
        assert 0.5 < size / simulated["bytes"][f"{kind}: messages"] < 2, (kind, size)


test_on_ranks = on_ranks(globals())
