"""Writes the samples of tests/compat with the installed version of torch_ckpt.

    python -m tests.compat.make_samples

Run this for each release that changes a format, and commit the new folder. Never change or delete
an existing folder: test_samples.py asserts that each release can still be read.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import torch_ckpt
from benchmarks import ranks
from tests.compat.values import model, sharded, state

SAMPLES = Path(__file__).parent / "samples"


def write_samples(folder: Path) -> None:
    """Writes one sample of each kind into a new folder."""
    folder.mkdir(parents=True)
    torch_ckpt.save(state(), folder / "checkpoint", options=torch_ckpt.WriteOptions(thread_count=2))
    writer = torch_ckpt.FileSystemWriter(folder / "dcp")
    dcp.save(model(1), storage_writer=writer, no_dist=True)
    torch_ckpt.save(model(1), folder / "safetensors", format="safetensors")
    with torch_ckpt.CheckpointManager(folder / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"model": model(step)})
    torch_ckpt.publish(model(1), folder / "versions", 1)
    torch_ckpt.publish(model(2), folder / "versions", 2, delta=True)
    ranks.run(2, partial(_save_shards, folder))


def _save_shards(folder: Path) -> None:
    shards = sharded(init_device_mesh("cpu", (2,)))
    torch_ckpt.save(shards, folder / "ranks")
    torch_ckpt.save(shards, folder / "ranks_safetensors", format="safetensors")


if __name__ == "__main__":
    write_samples(SAMPLES / torch_ckpt.__version__)
