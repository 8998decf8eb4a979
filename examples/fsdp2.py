"""FSDP2: save on some number of ranks, resume on any other.

    torchrun --nproc-per-node 4 examples/fsdp2.py --steps 100
    torchrun --nproc-per-node 2 examples/fsdp2.py --steps 200

The second command resumes where the first one ended: each rank reads the rows of its shards. The
samples of a step depend only on the step and are split over all ranks. So the losses on two ranks
differ from those on four only by the order of floating-point additions.
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

import torch_ckpt

SAMPLES = 48  # in a step, over all ranks


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of a step's samples: inputs (n, 32) and targets (n, 1)."""
    inputs = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(step))
    mine = inputs.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    return mine, mine.sin().sum(1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with FSDP2; start with torchrun.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", default="build/fsdp2")
    arguments = parser.parse_args()

    # Show the log lines of rank 0 about restores and saves.
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("torch_ckpt").setLevel(logging.INFO)
    dist.init_process_group()
    if SAMPLES % dist.get_world_size():
        raise SystemExit(f"{SAMPLES} samples cannot be split over {dist.get_world_size()} ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)  # every rank draws the same weights and keeps its shard of them
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
    model.append(nn.Linear(128, 1))
    model.to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    state = {"model": model, "optimizer": optimizer}
    with torch_ckpt.CheckpointManager(
        arguments.checkpoints, interval=arguments.save_every, keep=2
    ) as manager:
        first = manager.restore(state)
        if dist.get_rank() == 0:
            print(f"starts at step {first}", flush=True)
        for step in range(first, arguments.steps):
            inputs, targets = batch_of(step, device)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # FSDP averages over ranks: the mean of equal parts
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
