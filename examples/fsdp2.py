"""FSDP2: every rank has a shard; saved by some number of ranks, resumed by any other.

    torchrun --nproc-per-node 4 examples/fsdp2.py --steps 100
    torchrun --nproc-per-node 2 examples/fsdp2.py --steps 200

The second command goes on where the first one ended: each rank reads the rows that its shards need.
A step's samples depend on the step alone and are split over the ranks there are, so that the run on
fewer ranks is the same but for the order in which floating-point numbers are added.
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

SAMPLES = 48  # of a step, over all ranks


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's part of a step's samples: inputs (n, 32) and targets (n, 1)."""
    inputs = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(step))
    mine = inputs.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    return mine, mine.sin().sum(1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with FSDP2; run me by torchrun.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", default="build/fsdp2")
    arguments = parser.parse_args()

    # Rank 0 tells what is restored and saved.
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
        arguments.checkpoints, interval=arguments.save_every, keep_last=2
    ) as manager:
        first = manager.restore(state)
        if dist.get_rank() == 0:
            print(f"starts at step {first}", flush=True)
        for step in range(first, arguments.steps):
            inputs, targets = batch_of(step, device)
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # FSDP averages over ranks: equal parts make that the mean of the step
            optimizer.step()
            if (step + 1) % arguments.save_every == 0 and dist.get_rank() == 0:
                print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
            manager.save(step + 1, state)
            if manager.should_stop:
                break
    # Ranks that end at once may take each other's connections down.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
