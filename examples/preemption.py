"""Preemption: a notice to any rank makes all of them save the same step and end.

    torchrun --nproc-per-node 2 examples/preemption.py; echo $?
    kill -TERM {process id of any rank, or of torchrun}

The ranks agree on a step, save it and exit with 75 (EX_TEMPFAIL: try again), by which a scheduler
tells a run to start again from one that is done. A batch script with Slurm, with a
task for each rank:

    #SBATCH --signal=TERM@120 --requeue
    export MASTER_ADDR=$(scontrol show hostnames | head -1) MASTER_PORT=29500
    srun bash -c '
        export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
        exec python examples/preemption.py' || { [ $? -eq 75 ] && scontrol requeue $SLURM_JOB_ID; }

A notice may also be a file that somebody makes: --notice FILE.
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
    parser = argparse.ArgumentParser(description="Train until told to stop; run me by torchrun.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--checkpoints", default="build/preemption")
    parser.add_argument("--notice", help="a file whose appearance is a notice, too")
    arguments = parser.parse_args()

    # Rank 0 tells what is restored and saved.
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
        keep_last=2,
        preemption_file=arguments.notice,
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
            manager.save(step + 1, state)  # saves also where it has been agreed to stop
            if manager.should_stop:
                break
        stopped = manager.should_stop
    # The manager is closed: what it saved is durable.
    if stopped and dist.get_rank() == 0:
        print(f"stopped after step {step + 1}", flush=True)
    # Ranks that end at once may take each other's connections down.
    dist.barrier()
    dist.destroy_process_group()
    return TRY_AGAIN if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
