"""A trainer like torchtitan's: a config, a parallelized model, stateful parts, a loop.

    torchrun --nproc-per-node 2 examples/titan_loop.py --checkpoint.folder build/titan \\
        --checkpoint.interval 50 --checkpoint.async_mode overlapped

One dict holds the state of the run: model, optimizer, LR schedule, data loader and counters, each
with state_dict and load_state_dict. The manager saves and restores this dict.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_ckpt


@dataclass(frozen=True)
class CheckpointConfig:
    """When and how to save."""

    folder: str = "build/titan_loop"
    interval: int = 50  # steps
    async_mode: str = field(
        default="async", metadata={"choices": ("disabled", "async", "overlapped")}
    )
    keep_latest_k: int = 3
    load_step: int = -1  # -1: the newest

    def manager(self) -> torch_ckpt.CheckpointManager:
        return torch_ckpt.CheckpointManager(
            self.folder,
            interval=self.interval,
            keep=self.keep_latest_k,
            saves=torch_ckpt.manager.SaveOptions(
                async_saves=self.async_mode != "disabled",
                staging="overlapped" if self.async_mode == "overlapped" else "blocking",
            ),
        )


class Block(nn.Module):
    """Causal self-attention, then a feed-forward network, each around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.silu(self.up(self.mlp_norm(x))))


class Loader:
    """Yields batches of tokens, (samples, length + 1), from this rank's part of an endless text."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self.samples, self.length, self.vocabulary = samples, length, vocabulary
        self.position = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            seed = self.position * dist.get_world_size() + dist.get_rank()
            starts = torch.randint(
                self.vocabulary, (self.samples, 1), generator=torch.Generator().manual_seed(seed)
            )
            self.position += 1
            yield (starts + torch.arange(self.length + 1) ** 2) % self.vocabulary

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@dataclass
class TrainState:
    """Counters of the training loop."""

    step: int = 0
    tokens_seen: int = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Trainer:
    """Model, optimizer, schedule, data loader and counters of this rank."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.steps, self.device = steps, device
        vocabulary, width = 256, 64
        torch.manual_seed(0)  # every rank draws the same weights and keeps its shard of them
        blocks = [Block(width, heads=4) for _ in range(2)]
        self.model = nn.Sequential(
            nn.Embedding(vocabulary, width),
            *blocks,
            nn.RMSNorm(width),
            nn.Linear(width, vocabulary),
        ).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in self.model[1:-2]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min((step + 1) / 10, 1 - step / (2 * steps))
        )
        self.loader = Loader(samples=4, length=32, vocabulary=vocabulary)
        self.counts = TrainState()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "lr_scheduler": self.schedule,
            "dataloader": torch_ckpt.PerRank(self.loader),
            "train_state": self.counts,
        }

    def train_step(self, tokens: Tensor) -> Tensor:
        tokens = tokens.to(self.device)
        self.optimizer.zero_grad()
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.counts.step += 1
        self.counts.tokens_seen += tokens[:, 1:].numel() * dist.get_world_size()
        return loss.detach()

    def train(self, config: CheckpointConfig) -> None:
        state, batches = self.state(), iter(self.loader)
        with config.manager() as manager:
            manager.restore(state, step=None if config.load_step < 0 else config.load_step)
            if dist.get_rank() == 0:
                print(f"starts at step {self.counts.step}", flush=True)
            while self.counts.step < self.steps and not manager.should_stop:
                loss = self.train_step(next(batches))
                if manager.save(self.counts.step, state):
                    # The state must not change while it is copied: the next step waits.
                    manager.guard(self.optimizer)
                if self.counts.step % 10 == 0 and dist.get_rank() == 0:
                    print(f"step {self.counts.step:4d}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train like torchtitan; start with torchrun.")
    parser.add_argument("--steps", type=int, default=200)
    for option in fields(CheckpointConfig):
        parser.add_argument(
            f"--checkpoint.{option.name}",
            type=type(option.default),
            default=option.default,
            choices=option.metadata.get("choices"),
        )
    arguments = vars(parser.parse_args())
    config = CheckpointConfig(
        **{
            option.name: arguments[f"checkpoint.{option.name}"]
            for option in fields(CheckpointConfig)
        }
    )

    # Show the log lines of rank 0 about restores and saves.
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("torch_ckpt").setLevel(logging.INFO)
    dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    Trainer(arguments["steps"], device).train(config)
    # Without a barrier, a rank that exits first may close connections that others still use.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
