"""Trains a small model parallelized like Megatron's, with background saves through the queue.

    torchrun --standalone --nproc-per-node 4 examples/megatron_training.py
    torchrun --standalone --nproc-per-node 4 examples/megatron_training.py --kill-after 5
    torchrun --standalone --nproc-per-node 4 examples/megatron_training.py    # resumes

Two ranks split every layer (tensor parallel). The pairs of ranks train on different data (data
parallel) and shard the optimizer's state. Every N steps a save is planned, staged and scheduled.
Each step polls the queue, which commits a save when all ranks have written it. Needs no GPU and no
data.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.autograd.function import Function
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_ckpt.megatron import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

WIDTH, HIDDEN, BATCH = 64, 256, 16


class SumOfGradients(Function):
    """Sums the gradients of all ranks, before a layer that is split by columns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOfParts(Function):
    """Sums the outputs of all ranks, after a layer that is split by rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Block:
    """Two layers on a mesh of (tensor parallel, data parallel) ranks, and Adam.

    The ranks of a tensor parallel group split each weight. The ranks of a data parallel group have
    equal weights; each updates a share of the rows, keeps Adam's moments of these rows, and gathers
    the other rows.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.tensor_group, self.data_group = mesh.get_group("tensor"), mesh.get_group("data")
        parts, part = mesh.size(0), mesh.get_local_rank("tensor")
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        down = torch.randn(WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        # The dimension in which each weight is split.
        self.split = {"up": 0, "down": 1}
        self.weights = {
            "up": up.chunk(parts, 0)[part].clone().requires_grad_(),
            "down": down.chunk(parts, 1)[part].clone().requires_grad_(),
        }
        self.moments = {
            name: [torch.zeros_like(self.share_of(weight)) for _ in range(2)]
            for name, weight in self.weights.items()
        }

    def share_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the rows that this rank updates."""
        return tensor.detach().chunk(self.mesh.size(1), 0)[self.mesh.get_local_rank("data")]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        hidden = SumOfGradients.apply(x, self.tensor_group) @ self.weights["up"].T
        output = SumOfParts.apply(torch.tanh(hidden) @ self.weights["down"].T, self.tensor_group)
        return (output - x.flip(1)).square().mean()

    def train_one_step(self, step: int) -> float:
        """Returns the mean loss over the data parallel ranks."""
        data = self.mesh.get_local_rank("data")
        generator = torch.Generator().manual_seed(1000 * step + data)
        loss = self.loss(torch.randn(BATCH, WIDTH, generator=generator))
        loss.backward()
        for name, weight in self.weights.items():
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=self.data_group)
            share = self.share_of(weight)
            gradient = self.share_of(weight.grad) / self.mesh.size(1)
            mean, square = self.moments[name]
            mean.lerp_(gradient, 0.1)
            square.lerp_(gradient.square(), 0.01)
            corrected = mean / (1 - 0.9**step)
            share.sub_(0.01 * corrected / ((square / (1 - 0.99**step)).sqrt() + 1e-8))
            shares = [torch.empty_like(share) for _ in range(self.mesh.size(1))]
            dist.all_gather(shares, share.clone(), group=self.data_group)
            weight.detach().copy_(torch.cat(shares))
            weight.grad = None
        total = loss.detach()
        dist.all_reduce(total, group=self.data_group)
        return total.item() / self.mesh.size(1)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save: DTensors that share memory with the weights and moments."""
        state: dict[str, Any] = {}
        for name, weight in self.weights.items():
            split = Shard(self.split[name])
            state[f"model.{name}"] = self.part(weight.detach(), [split, Replicate()])
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), self.moments[name], strict=True):
                state[f"optimizer.{kind}.{name}"] = self.part(moment, [split, Shard(0)])
        return state

    def part(self, local: torch.Tensor, placements: list[Any]) -> DTensor:
        return DTensor.from_local(local, self.mesh, placements, run_check=False)


class Planner(dcp.DefaultSavePlanner):
    """Each rank plans independently which items it writes, as Megatron's planner does."""

    can_run_decentralized_global_plan = True

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        rank, size = dist.get_rank(), dist.get_world_size()

        def is_mine(name: str) -> bool:
            value = self.state_dict[name]
            if isinstance(value, DTensor):
                # The first replica writes.
                coordinate = value.device_mesh.get_coordinate() or ()
                pairs = zip(value.placements, coordinate, strict=True)
                return all(index == 0 for placement, index in pairs if placement.is_replicate())
            return zlib.crc32(name.encode()) % size == rank

        items = [item for item in plan.items if is_mine(item.index.fqn)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


class Checkpoints:
    """Saves each step into its own directory; the file latest.json names the newest step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.queue = AsyncCallsQueue(persistent=True)
        # Plans of the last save. If the plan did not change, the ranks do not exchange it again.
        self.central: SavePlan | None = None
        self.local: SavePlan | None = None
        self.is_as_cached = False
        self.metadata: Any = None
        self.loaded_plans: list[SavePlan] | None = None

    def load(self, block: Block) -> int:
        """Loads the newest checkpoint and returns its step; returns 0 if there is none."""
        latest = self.directory / "latest.json"
        if not latest.exists():
            return 0
        step: int = json.loads(latest.read_text())["step"]
        reader = CachedMetadataFileSystemReader(self.directory / f"step_{step}")
        state = block.state_dict() | {"step": 0}
        dcp.load(state, storage_reader=reader)  # into the block's own tensors
        self.metadata = reader.read_metadata()
        self.loaded_plans = self.metadata.all_local_plans
        assert state["step"] == step
        return step

    def save(self, block: Block, step: int) -> None:
        """Schedules a save. The block may change after the call."""
        writer = FileSystemWriterAsync(self.directory / f"step_{step}", thread_count=2)
        finalizing, self.central, self.local, self.is_as_cached, is_as_loaded = (
            save_state_dict_async_plan(
                block.state_dict() | {"step": step},
                writer,
                planner=Planner(),
                cached_ckpt_structure=(self.central, self.local, self.is_as_cached),
                loaded_all_plans=self.loaded_plans,
            )
        )
        writer, metadata, wrapper = finalizing
        if dist.get_rank() == 0:
            # None means that the metadata of the last save or load is still valid.
            self.metadata = metadata = metadata or self.metadata
        function, preload, arguments = writer.get_save_function_and_args()
        commit = partial(save_state_dict_async_finalize, writer, metadata, wrapper)
        request = AsyncRequest(function, arguments, [commit], preload_fn=preload)
        plan = "with the plan of the loaded checkpoint" if is_as_loaded else "with a new plan"
        plan = "with the plan of the last save" if self.is_as_cached else plan
        request.add_finalize_fn(partial(self.mark_as_latest, step, plan))
        self.queue.schedule_async_request(request)

    def mark_as_latest(self, step: int, plan: str) -> None:
        if dist.get_rank() == 0:
            temporary = self.directory / "latest.json.part"
            temporary.write_text(json.dumps({"step": step}))
            os.replace(temporary, self.directory / "latest.json")
            print(f"step {step:3d}  saved {plan}", flush=True)


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="Train and save like Megatron.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument(
        "--kill-after", type=int, default=0, help="kill the last rank after this step"
    )
    parser.add_argument("--checkpoints", type=Path, default=Path("build/megatron_training"))
    parser.add_argument("--losses", type=Path, help="append each step's loss to this file")
    parser.add_argument("--remove", action="store_true", help="remove the checkpoints at the end")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    if size % 2:
        raise SystemExit(f"the number of ranks must be even, got {size}")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("tensor", "data"))
    block, checkpoints = Block(mesh), Checkpoints(arguments.checkpoints)
    resumed_at = checkpoints.load(block)
    is_first = dist.get_rank() == 0
    if is_first and resumed_at:
        print(f"resumes after step {resumed_at}", flush=True)
    for step in range(resumed_at + 1, arguments.steps + 1):
        loss = block.train_one_step(step)
        if is_first:
            print(f"step {step:3d}  loss {loss:.6f}", flush=True)
            if arguments.losses is not None:
                with arguments.losses.open("a") as log:
                    log.write(json.dumps({"step": step, "loss": loss}) + "\n")
        if step % arguments.save_every == 0:
            checkpoints.save(block, step)
        checkpoints.queue.maybe_finalize_async_calls()
        if step == arguments.kill_after and dist.get_rank() == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.queue.close()
    dist.barrier()
    dist.destroy_process_group()
    if is_first and arguments.remove:
        shutil.rmtree(arguments.checkpoints, ignore_errors=True)


if __name__ == "__main__":
    main()
