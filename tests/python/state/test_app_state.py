"""The saved state of a program, which resumes without a difference."""

from __future__ import annotations

import copy
import io
import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

from benchmarks.ranks import mesh_without_peers
from tests.forked import in_fresh_process
from tests.programs import (
    OPTIMIZERS,
    State,
    kept,
    model,
    outcome,
    program,
    read_targets,
    restore,
    save,
    train,
)
from tests.support import assert_equal, cause_of, pairwise
from torch_ckpt import CheckpointError, LoadMismatch, PerRank, RNGState
from torch_ckpt.state.states import BeforeSave, States

pytestmark = pytest.mark.usefixtures("without_warnings")


# --- resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "before", "trained"), pairwise(itertools.product(OPTIMIZERS, [0, 3], [0, 2]))
)
def test_training_continues_bit_for_bit_after_a_save_and_after_a_restore(
    tmp_path: Path, name: str, before: int, trained: int
) -> None:
    through = program(OPTIMIZERS[name])
    train(through, before + 3)
    interrupted = program(OPTIMIZERS[name])
    train(interrupted, before)
    read_targets(interrupted)
    save(interrupted, tmp_path)
    train(interrupted, 3)
    assert_equal(outcome(interrupted), outcome(through))
    resumed = program(OPTIMIZERS[name], seed=1)
    train(resumed, trained)
    restore(resumed, tmp_path)
    train(resumed, 3)
    assert_equal(outcome(resumed), outcome(through))


def _resume(path: Path, steps: int) -> bytes:
    state = program(OPTIMIZERS["AdamW"], seed=1)
    restore(state, path)
    train(state, steps)
    result = io.BytesIO()
    torch.save(outcome(state), result)
    return result.getvalue()


def test_training_resumes_bit_for_bit_in_a_fresh_process(tmp_path: Path) -> None:
    interrupted = program(OPTIMIZERS["AdamW"])
    train(interrupted, 3)
    save(interrupted, tmp_path)
    resumed = in_fresh_process(_resume, tmp_path, 3)
    train(interrupted, 3)
    assert_equal(torch.load(io.BytesIO(resumed), weights_only=False), outcome(interrupted))


def test_a_part_that_is_not_loaded_is_unchanged(tmp_path: Path) -> None:
    saved = program(OPTIMIZERS["AdamW"])
    train(saved, 3)
    del saved["rng"]
    save(saved, tmp_path)
    other = program(OPTIMIZERS["AdamW"], seed=1)
    train(other, 1)
    del other["rng"]
    before = copy.deepcopy({k: other[k].state_dict() for k in ("optimizer", "scheduler")})
    restore(other, tmp_path, names=["model.*"])
    assert_equal(other["model"].state_dict(), saved["model"].state_dict())
    assert_equal({k: other[k].state_dict() for k in before}, before)
    assert other["steps"] == 1


# --- names ---------------------------------------------------------------------------------------


def _compiled() -> nn.Module:
    with warnings.catch_warnings():
        # The compiler of torch 2.11 uses functions that torch 2.11 deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.compile(model())  # type: ignore[return-value]


def _tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize("make", [model, _compiled, _tied])
def test_names_are_those_of_torch(make: Callable[[], nn.Module]) -> None:
    module = make()
    optimizer = torch.optim.AdamW(module.parameters())
    found = States({"model": module, "optimizer": optimizer}).saved()
    of_module, of_optimizer = get_state_dict(module, optimizer)
    assert set(found["model"]) == set(of_module)
    assert set(found["optimizer"]["state"]) == set(of_optimizer["state"])


def test_a_compiled_model_and_a_plain_one_load_the_state_of_each_other(tmp_path: Path) -> None:
    plain, compiled = model(), _compiled()
    kept({"model": compiled}, tmp_path / "compiled", {"model": plain})
    assert_equal(list(plain.state_dict().values()), list(compiled.state_dict().values()))
    other = _compiled()
    kept({"model": plain}, tmp_path / "plain", {"model": other})
    assert_equal(list(other.state_dict().values()), list(plain.state_dict().values()))


def test_modules_of_fsdp1_are_refused() -> None:
    refused = pytest.raises(
        CheckpointError, match=r"^model: .*FSDP1. is not supported. Use fully_shard"
    )
    with mesh_without_peers(2, 0), refused:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sharded = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
        States({"model": sharded}).saved()


class _WithExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("extra", "fresh"),
    [
        ({"scales": [1.0, torch.ones(2)]}, None),
        (torch.arange(5, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)),
    ],
    ids=["structure", "length"],
)
def test_a_modules_extra_state_can_change_its_structure(
    tmp_path: Path, extra: Any, fresh: Any
) -> None:
    saved = _WithExtraState(extra)
    restored = kept({"model": saved}, tmp_path, {"model": _WithExtraState(fresh)})
    assert_equal(restored["model"].extra, extra)


def test_a_module_on_the_meta_device_is_refused() -> None:
    module = nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match=r"^model: .*weight is on the meta .*to_empty"):
        read_targets({"model": module})


# --- each rank's own -----------------------------------------------------------------------------


def test_random_numbers_continue_after_a_restore(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.rand()]

    save({"rng": RNGState()}, tmp_path)
    drawn = draw()
    restore({"rng": RNGState()}, tmp_path)
    assert draw() == drawn


def test_a_per_rank_value_can_change_its_structure(tmp_path: Path) -> None:
    value = {"position": 3, "buffer": [torch.arange(3)]}
    restored = kept({"own": PerRank(value)}, tmp_path, {"own": PerRank(None)})
    assert_equal(restored["own"].value, value)


def test_a_per_rank_tensor_is_filled_in_place(tmp_path: Path) -> None:
    tensor = torch.zeros(2)
    kept({"own": PerRank(torch.ones(2))}, tmp_path, {"own": PerRank(tensor)})
    assert_equal(tensor, torch.ones(2))


@pytest.mark.parametrize("current", [torch.zeros(3), torch.zeros(2, dtype=torch.int64), None])
def test_a_per_rank_tensor_replaces_one_of_another_shape_or_dtype(
    tmp_path: Path, current: Any
) -> None:
    restored = kept({"own": PerRank(torch.ones(2))}, tmp_path, {"own": PerRank(current)})
    assert_equal(restored["own"].value, torch.ones(2))


class StatefulDataLoader:
    """Has the name of torchdata's class."""

    position = 0

    def state_dict(self) -> State:
        return {"position": self.position} if self.position else {}

    def load_state_dict(self, state: State) -> None:
        self.position = state["position"]


def test_a_torchdata_loader_is_saved_per_rank(tmp_path: Path) -> None:
    loader = StatefulDataLoader()
    loader.position = 7
    assert set(States({"loader": loader}).saved()["loader"]) == {"rank0"}
    restored = kept({"loader": loader}, tmp_path, {"loader": StatefulDataLoader()})
    assert restored["loader"].position == 7


def test_a_rank_without_a_saved_value_keeps_its_current_one(tmp_path: Path) -> None:
    save({"own": PerRank(1), "other": PerRank(2), "steps": 3}, tmp_path)
    state: State = {"own": PerRank(10), "other": PerRank(20), "steps": 0}
    warns = pytest.warns(UserWarning, match="other, own: the checkpoint has no state for rank 4")
    with mesh_without_peers(5, 4), warns as caught:
        restore(state, tmp_path, no_dist=True)
    assert len(caught) == 1
    assert (state["own"].value, state["other"].value, state["steps"]) == (10, 20, 3)


def test_a_per_rank_value_that_the_checkpoint_lacks_on_all_ranks_is_missing(tmp_path: Path) -> None:
    save({"loader": PerRank({"position": 7})}, tmp_path)
    with pytest.raises(CheckpointException) as caught:
        restore({"renamed": PerRank({"position": 0})}, tmp_path)
    error = cause_of(caught.value)
    assert isinstance(error, LoadMismatch)
    assert error.report.missing == ["renamed.rank0"]


@pytest.mark.parametrize("rank", [0, 4])
def test_a_per_rank_value_that_is_not_loaded_is_unchanged_without_a_warning(
    tmp_path: Path, rank: int
) -> None:
    save({"own": PerRank(1), "steps": 3}, tmp_path)
    state: State = {"own": PerRank(10), "steps": 0}
    with mesh_without_peers(5, rank):
        restore(state, tmp_path, names=["steps"], no_dist=True)
    assert (state["own"].value, state["steps"]) == (10, 3)


def test_missing_values_are_unchanged_by_a_load_that_is_not_strict(tmp_path: Path) -> None:
    save({"steps": 3}, tmp_path)
    state: State = {"own": PerRank(10), "best": 0.5, "steps": 0}
    with pytest.warns(UserWarning, match="skipped because of strict=False: .*best"):
        restore(state, tmp_path, strict=False)
    assert (state["own"].value, state["best"], state["steps"]) == (10, 0.5, 3)


# --- hooks ---------------------------------------------------------------------------------------


def test_hooks_run_before_a_save_reads_the_state_until_they_are_removed() -> None:
    hooks = BeforeSave()
    state: State = {"steps": 0}
    removed = hooks.add(lambda: state.clear())
    hooks.add(lambda: state.update(steps=state["steps"] + 1))
    removed.remove()
    read_targets(state)
    assert state == {"steps": 0}
    assert hooks.read(state) == {"steps": 1}


class _Embedding(nn.Embedding):
    """Module that buffers new rows until a checkpoint is made."""

    def before_checkpoint(self) -> None:
        nn.init.constant_(self.weight, 7)


def test_before_checkpoint_of_nested_modules_is_called() -> None:
    module = nn.Sequential(nn.Linear(2, 2), _Embedding(3, 2))
    found = States({"model": module}).saved()
    assert_equal(found["model"]["1.weight"], torch.full((3, 2), 7.0))


def test_a_hook_that_fails_names_the_value() -> None:
    class Broken:
        def before_checkpoint(self) -> None:
            raise OSError("no space")

    with pytest.raises(CheckpointError, match=r"^cache: before_checkpoint\(\) failed.*no space"):
        States({"cache": Broken()}).saved()
