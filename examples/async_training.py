"""Trains a small model and saves it meanwhile: with stock DCP, and with torch_ckpt's two ways.

    python examples/async_training.py --save all
    torchrun --standalone --nproc-per-node 2 examples/async_training.py --save overlapped

Prints how long each step took, how long training stood still for each save, and after how long the
save was durable. Needs no GPU and no data, and takes some seconds.
"""

import argparse
import shutil
import statistics
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ckpt

MODES = ("stock", "blocking", "overlapped")


def build(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A stack of layers and its optimizer; sharded by FSDP2 where there are several processes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Save:
    """One save under way, in one of the three ways."""

    def __init__(
        self,
        mode: str,
        state: dict[str, Any],
        path: Path,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.durable_s = 0.0
        self.handle: torch_ckpt.AsyncSave | None = None
        self.begun = time.perf_counter()
        if mode == "stock":
            self.done: Future[Any] = dcp.async_save(
                state,
                storage_writer=dcp.FileSystemWriter(path),
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
        else:
            self.handle = torch_ckpt.async_save(state, path, staging=mode)
            if mode == "overlapped":
                # The state is copied while the next forward and backward run. The next step of the
                # optimizer, which changes it, first waits for what is left of that.
                self.handle.guard(optimizer)
            self.done = self.handle.committed
        self.call_s = time.perf_counter() - self.begun
        self.done.add_done_callback(self._note_end)

    def stall_s(self) -> float:
        """How long training stood still: in the call and, where it overlaps, in the guard."""
        return self.handle.metrics().blocked_s if self.handle is not None else self.call_s

    def _note_end(self, _: Future[Any]) -> None:
        self.durable_s = time.perf_counter() - self.begun


def train(mode: str, arguments: argparse.Namespace, *, verbose: bool) -> str:
    """Trains with saves of one kind; returns what there is to say about them, in a line."""
    # Stock DCP coordinates a save over a process group, in a thread: it needs one that training
    # does not use. torch_ckpt uses none.
    group = dist.new_group(backend="gloo") if dist.is_initialized() and mode == "stock" else None
    model, optimizer = build(arguments.width)
    saves: list[Save] = []
    steps: list[float] = []
    for step in range(1, arguments.steps + 1):
        begun = time.perf_counter()
        model(torch.randn(16, arguments.width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - begun)
        line = f"  step {step:3d}  {steps[-1] * 1e3:6.1f} ms"
        if step % arguments.save_every == 0:
            if saves:
                saves[-1].done.result()  # raises where it failed; it has ended long since
            parts = get_state_dict(model, optimizer)
            state = {"model": parts[0], "optimizer": parts[1], "step": step}
            path = arguments.checkpoints / mode / f"step_{step}"
            saves.append(Save(mode, state, path, optimizer, group))
            line += f"   save begun, {saves[-1].call_s * 1e3:.1f} ms in the call"
        if verbose:
            print(line, flush=True)
    if saves:
        saves[-1].done.result()
    stalls = ", ".join(f"{save.stall_s() * 1e3:.1f}" for save in saves)
    after = [f"{s * 1e3:.0f}" for s in steps[arguments.save_every :: arguments.save_every]]
    durable = ", ".join(f"{save.durable_s:.2f}" for save in saves)
    return (
        f"{mode + ':':11s} stood still for {stalls} ms; durable after {durable} s; the step after "
        f"a save {', '.join(after)} ms, the median step {statistics.median(steps) * 1e3:.0f} ms"
    )


def main() -> None:
    """Runs one process."""
    parser = argparse.ArgumentParser(description="Save beside training, in up to three ways.")
    parser.add_argument("--save", choices=[*MODES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="of the layers, eight of them")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/async_training"))
    parser.add_argument("--keep", action="store_true", help="do not remove them at the end")
    arguments = parser.parse_args()
    # What stock DCP says at each save of a process alone.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    verbose = not dist.is_initialized() or dist.get_rank() == 0
    lines = []
    for mode in MODES if arguments.save == "all" else [arguments.save]:
        if verbose:
            print(f"{mode}:", flush=True)
        lines.append(train(mode, arguments, verbose=verbose))
    if verbose:
        print("\n".join(["", *lines]), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if verbose and not arguments.keep:
        shutil.rmtree(arguments.checkpoints, ignore_errors=True)


if __name__ == "__main__":
    main()
