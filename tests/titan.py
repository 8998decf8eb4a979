"""A small trainer of torchtitan's components, which calls a checkpointer as torchtitan's does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

#: The last step of a run.
STEPS = 10


class Data(IterableDataset):  # type: ignore[type-arg]
    """Numbers from 1; the state is the last number."""

    def __init__(self) -> None:
        self.last = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.last += 1
            yield torch.full((4,), float(self.last))

    def state_dict(self) -> dict[str, int]:
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.last = state["last"]


class Adapter:
    """Adds a prefix to the names of a model in Hugging Face's format."""

    fqn_to_index_mapping = None
    hf_assets_path = ""

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in state.items()}


def local_parts(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state.items()}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


class Trainer:
    """A trainer with a checkpointer.

    Args:
        kind: class of the checkpointer.
        folder: its folder.
        seed: of the weights.
        make_model: makes the model.
        shard: shards the model.
        rank, ranks: of the data.
        config: further settings of the checkpointer.
    """

    def __init__(
        self,
        kind: Any,
        folder: Path | str,
        seed: int = 0,
        *,
        make_model: Callable[[], nn.Module] = two_layers,
        shard: Callable[[nn.Module], object] = lambda _model: None,
        rank: int = 0,
        ranks: int = 1,
        **config: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.step = self.ntokens_seen = 0
        self.model = make_model()
        shard(self.model)
        adamw = default_adamw(lr=0.1)
        adamw.implementation = "for-loop"
        self.optimizers = adamw.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2, total_steps=STEPS)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=STEPS)
        self.loader = ParallelAwareDataloader(
            Data(), dp_rank=rank, dp_world_size=ranks, batch_size=2
        )
        settings = {"enable": True, "interval": 2, "last_save_model_only": False} | config
        self.checkpointer = kind.Config(folder=str(folder), **settings).build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=Adapter(),
            base_folder="",
        )

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int = STEPS) -> None:
        """Trains to a step, and closes the checkpointer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torchdata
            batches = iter(self.loader)
        while self.step < steps:
            self.step += 1
            self.optimizers.zero_grad()
            self.model(next(batches)).square().mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.ntokens_seen += 8
            self.checkpointer.save(self.step, last_step=self.step == STEPS)
        self.checkpointer.maybe_wait_for_saving()
        self.checkpointer.close()

    def state(self) -> dict[str, Any]:
        """Returns this rank's part of the complete state."""
        return {
            "model": local_parts(self.model.state_dict()),
            "optimizer": local_parts(self.optimizers.state_dict()),
            "lr_scheduler": self.schedulers.state_dict(),
            "dataloader": self.loader.state_dict(),
            "train_state": self.state_dict(),
        }
