"""Reinforcement learning: a sharded policy trains and publishes its weights; a worker follows.

    torchrun --standalone --nproc-per-node 2 examples/rl_publication.py
    python examples/rl_publication.py --worker

The trainer publishes a version every few steps, with the elements that have changed since the
version before. If it is started again, it continues from the newest version. The root may be a URL,
beneath which versions have no deltas. The worker, a process
of its own as in an inference server, loads the newest version, and then applies deltas in place. If
it has missed a version, it loads the newest one completely. Needs no GPU and no data, and takes
some seconds.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ckpt
from torch_ckpt.publication.publish import async_publish
from torch_ckpt.steps import open_steps


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8)).bfloat16()


def train(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    policy = build()
    fully_shard(policy, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    published = open_steps(arguments.root).entries(leftovers=False)
    first = published[-1].step if published else 0
    # All ranks have listed the versions before one of them publishes another.
    dist.barrier()
    if published:
        torch_ckpt.load(policy.state_dict(), published[-1].path)
    publication = None
    for step in range(first + 1, arguments.steps + 1):
        states = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (policy(states).float() - states.float()[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % arguments.publish_every == 0:
            if publication is not None:
                publication.result()
            # Training continues as soon as the weights are copied.
            publication = async_publish(
                get_model_state_dict(policy),
                arguments.root,
                version=step,
                delta="://" not in arguments.root,
                keep=3,
            )
    if publication is not None:
        publication.result()
    if dist.get_rank() == 0:
        print(f"trained from step {first} to step {arguments.steps}")
    dist.destroy_process_group()


def work(arguments: argparse.Namespace) -> None:
    weights = build().state_dict()
    version = 0
    while version < arguments.steps:
        found = open_steps(arguments.root).entries(leftovers=False)
        if not found or found[-1].step == version:
            time.sleep(0.05)
            continue
        newest = found[-1]
        try:
            torch_ckpt.apply_delta(newest.path, weights)
            how = "applied a delta"
        except (torch_ckpt.CheckpointError, FileNotFoundError, ValueError):
            # The weights are not the base of the delta, and are unchanged; or there is no delta.
            torch_ckpt.load(weights, newest.path, no_dist=True)
            how = "loaded all weights"
        version = newest.step
        total = sum(value.double().sum().item() for value in weights.values())
        print(f"version {version}: {how}, sum {total:.6f}", flush=True)
        # ... roll out episodes with the new weights ...


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish a policy, or follow it.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--publish-every", type=int, default=10)
    parser.add_argument("--root", default="build/policy")
    parser.add_argument("--worker", action="store_true")
    arguments = parser.parse_args()
    (work if arguments.worker else train)(arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
