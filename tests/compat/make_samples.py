"""Writes the samples of tests/compat with the installed version of torch_ckpt.

    python -m tests.compat.make_samples

Run this for each release that changes a format, and commit the new folder. Never change or delete
an existing folder: test_samples.py asserts that each release can still be read.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.compat.values import model, state

SAMPLES = Path(__file__).parent / "samples"


def write_samples(folder: Path) -> None:
    """Writes one sample of each kind into a new folder."""
    folder.mkdir(parents=True)
    torch_ckpt.save(state(), folder / "checkpoint", thread_count=2)
    writer = torch_ckpt.FileSystemWriter(folder / "dcp")
    dcp.save(model(1), storage_writer=writer, no_dist=True)
    torch_ckpt.save(model(1), folder / "safetensors", format="safetensors")
    with torch_ckpt.CheckpointManager(folder / "run") as manager:
        for step in (1, 2):
            manager.save(step, {"model": model(step)})
    torch_ckpt.publish(model(1), folder / "versions", 1)
    torch_ckpt.publish(model(2), folder / "versions", 2, delta=True)


if __name__ == "__main__":
    write_samples(SAMPLES / torch_ckpt.__version__)
