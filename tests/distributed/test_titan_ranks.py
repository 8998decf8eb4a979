"""torchtitan's components on two ranks with FSDP2, saved by torch_ckpt's checkpointer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.cases import Launch, mesh_1d
from tests.distributed.launcher import on_ranks
from tests.support import assert_equal

pytestmark = pytest.mark.full


def trainer(kind: str, launch: Launch, folder: str, **config: Any) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager as Stock

    from tests.titan import Trainer
    from torch_ckpt.integrations.torchtitan import TorchCkptManager as Ours

    def shard(model: nn.Module) -> None:
        for layer in model:
            fully_shard(layer, mesh=mesh_1d(launch))
        fully_shard(model, mesh=mesh_1d(launch))

    return Trainer(
        {"stock": Stock, "ours": Ours}[kind],
        launch.path(folder),
        shard=shard,
        rank=launch.rank,
        ranks=launch.size,
        **config,
    )


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
