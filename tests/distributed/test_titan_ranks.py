"""torchtitan's components on two ranks with FSDP2, saved by torch_ckpt's checkpointer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.cases import Launch, mesh_1d
from tests.distributed.launcher import on_ranks
from tests.support import assert_equal

pytestmark = pytest.mark.full


def trainer(kind: str, launch: Launch, folder: str, **config: Any) -> Any:
    """Returns a trainer whose model is sharded, unless ``make_model`` makes another one."""
    from torchtitan.components.checkpointer import CheckpointManager as Stock

    from tests.titan import Trainer
    from torch_ckpt.integrations.torchtitan import TorchCkptManager as Ours

    def shard(model: nn.Module) -> None:
        for layer in model:
            fully_shard(layer, mesh=mesh_1d(launch))
        fully_shard(model, mesh=mesh_1d(launch))

    sharded = {"shard": shard, "rank": launch.rank, "ranks": launch.size}
    options = config if "make_model" in config else sharded | config
    return Trainer({"stock": Stock, "ours": Ours}[kind], launch.path(folder), **options)


def case_a_resumed_run_ends_like_one_that_torchtitan_saves(launch: Launch) -> None:
    expected = trainer("stock", launch, "stock")
    expected.train()
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        trainer("ours", launch, mode, async_mode=mode).train(6)
        resumed = trainer("ours", launch, mode, seed=1, async_mode=mode)
        assert resumed.checkpointer.load()
        assert resumed.step == 6
        resumed.train()
        assert_equal(resumed.state(), expected.state())


def case_each_stage_of_a_pipeline_restores_its_own_part(launch: Launch) -> None:
    class Stage(nn.Module):
        """The model of a rank, whose names no other rank has."""

        def __init__(self) -> None:
            super().__init__()
            layers = {str(launch.rank): nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))}
            self.layers = nn.ModuleDict(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[str(launch.rank)](x)

    stage = {"make_model": Stage, "ranks": 1, "rank": 0}
    expected = trainer("stock", launch, "stock", **stage)
    expected.train()
    for kind in ("ours", "stock"):
        trainer(kind, launch, f"of {kind}", **stage).train(4)
        resumed = trainer("ours", launch, f"of {kind}", seed=1, **stage)
        assert resumed.checkpointer.load()
        assert resumed.step == 4
        resumed.train()
        assert_equal(resumed.state(), expected.state())


def case_an_error_of_one_ranks_state_is_raised_on_all_ranks(launch: Launch) -> None:
    trainer("ours", launch, "run").train(2)
    fresh = trainer("ours", launch, "run")
    if launch.rank == 1:
        fresh.optimizers.state_dict = lambda: 1 // 0
    with pytest.raises((ZeroDivisionError, RuntimeError), match="division"):
        fresh.checkpointer.load()
    fresh.checkpointer.close()


def case_each_continues_the_run_of_the_other(launch: Launch) -> None:
    expected = trainer("stock", launch, "stock")
    expected.train()
    trainer("stock", launch, "both").train(4)
    ours = trainer("ours", launch, "both", seed=1)
    assert ours.checkpointer.load()
    ours.train(8)
    path = str(launch.path("both", "0000000008"))
    config = {"initial_load_path": path, "initial_load_model_only": False}
    stock = trainer("stock", launch, "new", seed=2, **config)
    assert stock.checkpointer.load()
    stock.train()
    assert_equal(stock.state(), expected.state())


def skipped(_case: str) -> str:
    return "" if importlib.util.find_spec("torchtitan") else "no torchtitan"


test_on_ranks = on_ranks(globals(), thorough=(), skipped=skipped)
