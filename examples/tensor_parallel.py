"""Tensor parallelism with FSDP2: save in one layout, resume in another.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --tensor 2 --steps 100
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --tensor 1 --steps 200

The ranks form a mesh (data, tensor). In the first run each matrix is split over both ranks, by
columns or by rows. In the second run FSDP2 shards each matrix by rows. A checkpoint stores tensors
by name and location, so nothing is converted in between.
"""

import argparse
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_ckpt

SAMPLES = 48  # in a step, over all groups of ranks that hold a complete model together


class Block(nn.Module):
    """A feed-forward network around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with TP and FSDP2; start with torchrun.")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that split each matrix")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", default="build/tensor_parallel")
    arguments = parser.parse_args()

    # Show the log lines of rank 0 about restores and saves.
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("torch_ckpt").setLevel(logging.INFO)
    dist.init_process_group()
    if dist.get_world_size() % arguments.tensor:
        raise SystemExit(
            f"{dist.get_world_size()} ranks cannot be split into groups of {arguments.tensor}"
        )
    shape = (dist.get_world_size() // arguments.tensor, arguments.tensor)
    if SAMPLES % shape[0]:
        raise SystemExit(f"{SAMPLES} samples cannot be split over {shape[0]} groups of ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))

    torch.manual_seed(0)  # every rank draws the same weights and keeps its part of them
    model = nn.Sequential(*(Block(32) for _ in range(3))).to(device)
    for block in model:
        parallelize_module(
            block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = {"model": model, "optimizer": optimizer}
    with torch_ckpt.CheckpointManager(
        arguments.checkpoints, interval=arguments.save_every, keep=2
    ) as manager:
        first = manager.restore(state)
        if dist.get_rank() == 0:
            print(f"starts at step {first}", flush=True)
        for step in range(first, arguments.steps):
            samples = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(step))
            inputs = samples.chunk(shape[0])[mesh.get_local_rank("data")].to(device)
            loss = nn.functional.mse_loss(model(inputs), inputs.sin())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % arguments.save_every == 0 and dist.get_rank() == 0:
                print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
            manager.save(step + 1, state)
            if manager.should_stop:
                break
    # Without a barrier, a rank that exits first may close connections that others still use.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
