"""Trains a small model with background saves: by stock DCP, and by torch_ckpt's two stagings.

    python examples/async_training.py --save all
    torchrun --standalone --nproc-per-node 2 examples/async_training.py --save overlapped

Prints the duration of each step, the time that each save blocked training, and the time until each
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
    """Builds a stack of layers and its optimizer; several ranks shard them by FSDP2."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Save:
    """A running save.

    Attributes:
        call_s: seconds in the call that started the save.
        durable_s: seconds from the call until the save was durable; 0 while it is running.
    """

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
        self.started_at = time.perf_counter()
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
                # The state is copied while the next forward and backward passes run. The next
                # optimizer step, which changes the state, first waits for the end of the copy.
                self.handle.guard(optimizer)
            self.done = self.handle.committed
        self.call_s = time.perf_counter() - self.started_at
        self.done.add_done_callback(self._note_end)

    def stall_s(self) -> float:
        """Returns the seconds for which the save blocked training: in the call and in the guard."""
        return self.handle.metrics().blocked_s if self.handle is not None else self.call_s

    def _note_end(self, _: Future[Any]) -> None:
        self.durable_s = time.perf_counter() - self.started_at


def train(mode: str, arguments: argparse.Namespace, *, verbose: bool) -> str:
    """Trains with saves of one mode; returns a line that summarizes them."""
    # Stock DCP coordinates a save in a thread, over a process group that training must not use.
    # torch_ckpt needs no process group.
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
                saves[-1].done.result()  # raises the error of the save before, which ended long ago
            parts = get_state_dict(model, optimizer)
            state = {"model": parts[0], "optimizer": parts[1], "step": step}
            path = arguments.checkpoints / mode / f"step_{step}"
            saves.append(Save(mode, state, path, optimizer, group))
            line += f"   save started, {saves[-1].call_s * 1e3:.1f} ms in the call"
        if verbose:
            print(line, flush=True)
    if saves:
        saves[-1].done.result()
    stalls = ", ".join(f"{save.stall_s() * 1e3:.1f}" for save in saves)
    after = [f"{s * 1e3:.0f}" for s in steps[arguments.save_every :: arguments.save_every]]
    durable = ", ".join(f"{save.durable_s:.2f}" for save in saves)
    return (
        f"{mode + ':':11s} blocked training for {stalls} ms; durable after {durable} s; "
        f"the step after a save {', '.join(after)} ms, "
        f"the median step {statistics.median(steps) * 1e3:.0f} ms"
    )


def main() -> None:
    """Runs one process."""
    parser = argparse.ArgumentParser(description="Save in the background in up to three modes.")
    parser.add_argument("--save", choices=[*MODES, "all"], default="all")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--save-every", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024, help="width of the eight layers")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/async_training"))
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints at the end")
    arguments = parser.parse_args()
    # Stock DCP warns at each save of a single process.
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
