"""Trains a small model in Megatron's shape and saves it beside the training, through the queue.

    torchrun --standalone --nproc-per-node 4 examples/megatron_training.py
    torchrun --standalone --nproc-per-node 4 examples/megatron_training.py --kill-after 5
    torchrun --standalone --nproc-per-node 4 examples/megatron_training.py    # goes on

Two ranks split every layer (tensor parallel); as many pairs as there are see different data (data
parallel) and share the optimizer's state. Every N steps a save is planned, staged and scheduled;
each step polls the queue, and what all ranks have written is committed. Needs no GPU and no data.
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
    """Before a layer that is split by columns: each rank has a part of the gradient."""

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
    """Behind a layer that is split by rows: each rank has a part of the output."""

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

    Every rank has its part of a weight, and of that part, by rows, its share of Adam's moments:
    what data parallel ranks have in common each of them updates in part, and they tell each other.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.tensor_group, self.data_group = mesh.get_group("tensor"), mesh.get_group("data")
        parts, part = mesh.size(0), mesh.get_local_rank("tensor")
        generator = torch.Generator().manual_seed(0)
        up = torch.randn(HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
        down = torch.randn(WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
        # The dimension that each weight is split in.
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
        """The rows that this rank updates."""
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
        """What is saved: tensors that know which part of a whole they are. No copies."""
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
    """Each rank finds out by itself what it writes, as Megatron's planner does."""

    can_run_decentralized_global_plan = True

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        rank, size = dist.get_rank(), dist.get_world_size()

        def is_mine(name: str) -> bool:
            value = self.state_dict[name]
            if isinstance(value, DTensor):
                # Of replicas the first one.
                here = value.device_mesh.get_coordinate() or ()
                places = zip(value.placements, here, strict=True)
                return all(place == 0 for kind, place in places if kind.is_replicate())
            return zlib.crc32(name.encode()) % size == rank

        items = [item for item in plan.items if is_mine(item.index.fqn)]
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_decentralized_global_plan(self, local_plan: SavePlan) -> SavePlan:
        return local_plan


class Checkpoints:
    """Saves into a directory for each step; a file beside them says which was the last one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.queue = AsyncCallsQueue(persistent=True)
        # Plans of the save before. Two that were equal are not exchanged again.
        self.central: SavePlan | None = None
        self.local: SavePlan | None = None
        self.is_as_cached = False
        self.metadata: Any = None
        self.loaded_plans: list[SavePlan] | None = None

    def load(self, block: Block) -> int:
        """Loads the last checkpoint, if there is one; its step, or 0."""
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
        """Returns when the block may change."""
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
            # None: that of the save before, or of the checkpoint that was loaded, is still right.
            self.metadata = metadata = metadata or self.metadata
        function, preload, arguments = writer.get_save_function_and_args()
        commit = partial(save_state_dict_async_finalize, writer, metadata, wrapper)
        request = AsyncRequest(function, arguments, [commit], preload_fn=preload)
        how = "as in the checkpoint that was loaded" if is_as_loaded else "anew"
        how = "as the one before" if self.is_as_cached else how
        request.add_finalize_fn(partial(self.say_latest, step, how))
        self.queue.schedule_async_request(request)

    def say_latest(self, step: int, how: str) -> None:
        if dist.get_rank() == 0:
            part = self.directory / "latest.json.part"
            part.write_text(json.dumps({"step": step}))
            os.replace(part, self.directory / "latest.json")
            print(f"step {step:3d}  is saved, planned {how}", flush=True)


def main() -> None:
    """Runs one rank."""
    parser = argparse.ArgumentParser(description="Train and save in Megatron's shape.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--kill-after", type=int, default=0, help="kill a rank after this step")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/megatron_training"))
    parser.add_argument("--losses", type=Path, help="append each step's loss to this file")
    parser.add_argument("--remove", action="store_true", help="remove the checkpoints at the end")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    if size % 2:
        raise SystemExit(f"an even number of ranks is needed, there are {size}")
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("tensor", "data"))
    block, checkpoints = Block(mesh), Checkpoints(arguments.checkpoints)
    begun = checkpoints.load(block)
    is_first = dist.get_rank() == 0
    if is_first and begun:
        print(f"goes on after step {begun}", flush=True)
    for step in range(begun + 1, arguments.steps + 1):
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
