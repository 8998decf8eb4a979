"""DistributedDataParallel: train, save, resume where the last run ended.

    torchrun --nproc-per-node 2 examples/ddp.py

Kill it and start it again: it resumes, and ends with the weights of a run that was never killed.
The state includes each rank's random number generators, on which dropout depends. On GPUs (NCCL)
the script runs one rank on each.
"""

import argparse
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_ckpt


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of a step's samples: inputs (16, 32) and targets (16, 1)."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    inputs = torch.randn(16, 32, generator=generator).to(device)
    return inputs, inputs.sin().sum(1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with DDP; start with torchrun.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", default="build/ddp")
    arguments = parser.parse_args()

    # Show the log lines of rank 0 about restores and saves.
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("torch_ckpt").setLevel(logging.INFO)
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)

    torch.manual_seed(dist.get_rank())  # DDP gives all ranks the weights of rank 0
    net = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)

    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": torch_ckpt.RNGState(),
    }
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
            loss.backward()
            optimizer.step()
            scheduler.step()
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
