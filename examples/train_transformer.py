"""Trains a small decoder-only transformer with FSDP2, saves checkpoints with torch_ckpt, resumes.

An ordinary training script, started by torchrun. It needs no GPU and no data set:

    torchrun --standalone --nproc-per-node 2 examples/train_transformer.py \\
        --checkpoints checkpoints --save-every 10
    torchrun --standalone --nproc-per-node 3 examples/train_transformer.py \\
        --resume checkpoints/step_0000000010

Only ``save_checkpoint`` and ``load_checkpoint`` use torch_ckpt: they pass its storage writer and
reader to torch.distributed.checkpoint.

Note [Losses that can be compared]
A run that resumed after a crash is correct if its losses equal the losses of a run that never
crashed, also on another number of ranks. Hence:
- the batch of a step depends only on the step's number and is split over all ranks, so every number
  of ranks that divides it trains on the same batch;
- there is no dropout, because its random numbers would depend on the split over ranks;
- everything is float64. Then runs on different numbers of ranks differ only by the order of
  floating-point additions, about 1e-15 of a value for each addition.
"""

import argparse
import json
import pydoc_data.topics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from torch_ckpt import FileSystemReader, FileSystemWriter


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer. The default has 1.7 million parameters."""

    vocabulary: int = 256  # one token is one byte of text
    context: int = 128  # tokens
    width: int = 256
    heads: int = 8
    layers: int = 2


class Block(nn.Module):
    """One layer: causal self-attention, then a feed-forward network, each around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    """A decoder-only language model: tokens of shape (batch, length) in, logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def training_text() -> str:
    """Returns real English text that every CPython contains: the topics of ``help()``."""
    return "\n".join(pydoc_data.topics.topics.values())


def global_batch(text: Tensor, step: int, samples: int, context: int, seed: int) -> Tensor:
    """Returns the tokens of one step, (samples, context + 1), equal on every rank of every run."""
    generator = torch.Generator().manual_seed(seed + step)
    starts = torch.randint(len(text) - context, (samples,), generator=generator)
    return text[starts[:, None] + torch.arange(context + 1)].long()


def build(config: ModelConfig, seed: int) -> tuple[Transformer, torch.optim.AdamW]:
    """Builds the model, sharded over all ranks by FSDP2, and its optimizer.

    Every rank draws the same initial weights and keeps its shard, so the initial weights do not
    depend on the number of ranks.
    """
    torch.manual_seed(seed)
    model = Transformer(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def checkpoint_name(step: int) -> str:
    """Returns the directory name of a step's checkpoint; names sort as steps do."""
    return f"step_{step:010d}"


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Collects the state from which a run can resume: sharded tensors and replicated values."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "step": step,
        "rng": torch.get_rng_state(),
    }


def save_checkpoint(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    """Saves the state after `step` steps into `directory`; collective.

    Raises CheckpointException if a rank failed; then `directory` has no checkpoint.
    """
    dcp.save(
        training_state(model, optimizer, step),
        checkpoint_id=directory,
        storage_writer=FileSystemWriter(directory, progress=True),
    )


def load_checkpoint(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads a checkpoint into the model and the optimizer and returns its step; collective.

    Any number of ranks may have saved the checkpoint: each rank reads the parts of its shards.
    Raises CheckpointException if a rank could not read its part.
    """
    state = training_state(model, optimizer, step=0)
    dcp.load(state, checkpoint_id=directory, storage_reader=FileSystemReader(directory))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    torch.set_rng_state(state["rng"])
    return int(state["step"])


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    text: Tensor,
    steps: range,
    samples: int,
    context: int,
    seed: int,
) -> Iterator[tuple[int, float]]:
    """Trains step by step; yields (number of steps done, loss over the global batch)."""
    share = samples // dist.get_world_size()
    mine = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    for step in steps:
        batch = global_batch(text, step, samples, context, seed)[mine]
        logits = model(batch[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # FSDP averages over ranks; with equal shares this is the batch's mean
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        yield step + 1, mean.item()


def log_loss(log: TextIO, step: int, loss: float) -> None:
    """Appends one JSON line and flushes it, so that a killed run keeps its lines."""
    # json writes the shortest decimal that reads back as an equal float64.
    log.write(json.dumps({"step": step, "loss": loss}) + "\n")
    log.flush()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a small transformer; start with torchrun.")
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument(
        "--checkpoints", type=Path, help="save beneath this directory (default: do not save)"
    )
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--resume", type=Path, help="resume from this checkpoint directory")
    parser.add_argument(
        "--losses", type=Path, help="append each step's loss to this file (JSON lines)"
    )
    parser.add_argument("--batch", type=int, default=12, help="samples in a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.save_every < 1:
        parser.error("--save-every must be at least 1")
    return arguments


def main() -> None:
    """Runs one rank."""
    arguments = parse_arguments()
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if arguments.batch % ranks != 0:
        raise SystemExit(f"--batch {arguments.batch} cannot be split evenly over {ranks} ranks")

    config = ModelConfig()
    model, optimizer = build(config, arguments.seed)
    first = 0
    if arguments.resume is not None:
        first = load_checkpoint(arguments.resume, model, optimizer)
        if rank == 0:
            print(f"resumed {arguments.resume.name} on {ranks} rank(s)", flush=True)

    text = torch.frombuffer(bytearray(training_text().encode()), dtype=torch.uint8)
    log = arguments.losses.open("a") if arguments.losses is not None and rank == 0 else None
    for step, loss in train(
        model,
        optimizer,
        text=text,
        steps=range(first, arguments.steps),
        samples=arguments.batch,
        context=config.context,
        seed=arguments.seed,
    ):
        if log is not None:
            log_loss(log, step, loss)
        if rank == 0 and (step % 10 == 0 or step in (first + 1, arguments.steps)):
            print(f"step {step:4d}  loss {loss:.4f}", flush=True)
        if arguments.checkpoints is not None and step % arguments.save_every == 0:
            begin = time.perf_counter()
            save_checkpoint(arguments.checkpoints / checkpoint_name(step), model, optimizer, step)
            if rank == 0:
                seconds = time.perf_counter() - begin
                print(f"saved {checkpoint_name(step)} in {seconds:.2f} s", flush=True)
    if log is not None:
        log.close()
    # Gloo's thread releases the tensor of the last all_reduce some time after the wait for it, and
    # takes the GIL to do so. If Python is shutting down by then, the process aborts (seen with
    # torch 2.15). A barrier waits without the GIL and has no tensor.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
