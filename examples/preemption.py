"""Preemption: after a notice to any rank, all ranks save the same step and exit.

    torchrun --nproc-per-node 2 examples/preemption.py; echo $?
    kill -TERM {process id of any rank, or of torchrun}

The ranks agree on a step, save it and exit with code 75 (EX_TEMPFAIL: try again). A finished run
exits with 0, so a scheduler can restart only the preempted one. A batch script for Slurm, with one
task for each rank:

    #SBATCH --signal=TERM@120 --requeue
    export MASTER_ADDR=$(scontrol show hostnames | head -1) MASTER_PORT=29500
    srun bash -c '
        export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
        exec python examples/preemption.py' || { [ $? -eq 75 ] && scontrol requeue $SLURM_JOB_ID; }

With --notice FILE, the appearance of this file is a notice, too.
"""

import argparse
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_ckpt

TRY_AGAIN = 75


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train until a preemption notice; start with torchrun."
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--checkpoints", default="build/preemption")
    parser.add_argument("--notice", help="a file whose appearance is a notice, too")
    arguments = parser.parse_args()

    # Show the log lines of rank 0 about restores and saves.
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("torch_ckpt").setLevel(logging.INFO)
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(32, 32).to(device))
    optimizer = torch.optim.AdamW(model.parameters())

    state = {"model": model, "optimizer": optimizer}
    with torch_ckpt.CheckpointManager(
        arguments.checkpoints,
        interval=arguments.save_every,
        keep=2,
        preemption=torch_ckpt.manager.Preemption(file=arguments.notice),
    ) as manager:
        first = step = manager.restore(state)
        if dist.get_rank() == 0:
            print(f"starts at step {first}", flush=True)
        for step in range(first, arguments.steps):
            seed = step * dist.get_world_size() + dist.get_rank()
            inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).to(device)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), inputs)
            loss.backward()
            optimizer.step()
            if (step + 1) % arguments.save_every == 0 and dist.get_rank() == 0:
                print(f"step {step + 1:4d}  loss {loss.item():.4f}", flush=True)
            manager.save(step + 1, state)  # also saves the step on which all ranks agreed to stop
            if manager.should_stop:
                break
        stopped = manager.should_stop
    # The manager is closed, so its saves are durable.
    if stopped and dist.get_rank() == 0:
        print(f"stopped after step {step + 1}", flush=True)
    # Without a barrier, a rank that exits first may close connections that others still use.
    dist.barrier()
    dist.destroy_process_group()
    return TRY_AGAIN if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
