"""save, async_save and load of a program's values: modules, optimizers, schedulers and others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import lr_scheduler

import torch_ckpt
from tests.support import assert_equal, cause_of, pairwise, stock_save
from torch_ckpt import LoadMismatch, RNGState

State = dict[str, Any]
Call = Callable[[State, Path], Any]


pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")


def program(steps: int, *, unused: bool = False, **options: Any) -> State:
    torch.manual_seed(steps)
    layers = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}
    model = nn.ModuleDict(layers | ({"unused": nn.Linear(2, 2)} if unused else {}))
    first, second, *others = model.parameters()
    groups = [{"params": [first, second]}, {"params": others, "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups, **options)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model["b"](model["a"](torch.randn(5, 3))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "train": {"losses": {"best": float(steps)}, "mean": torch.tensor(float(steps))},
        "step": steps,
    }


def outcome(state: State) -> State:
    parts = {k: state[k].state_dict() for k in ("model", "optimizer", "scheduler")}
    return {**state, **parts}


def step_of(root: Path) -> Path:
    return root / "0000000001"


def by_manager(state: State, root: Path) -> None:
    with torch_ckpt.CheckpointManager(root) as manager:
        manager.save(1, state, force=True)


def as_step(save: Call) -> Call:
    """Makes a function that saves a step of a manager."""

    def save_step(state: State, root: Path) -> None:
        save(state, step_of(root))
        (step_of(root) / "write_completed").touch()

    return save_step


def by_get_state_dict(state: State, path: Path) -> None:
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    stock_save({**state, "model": model, "optimizer": optimizer}, path)


def restored_by_manager(state: State, root: Path) -> None:
    with torch_ckpt.CheckpointManager(root) as manager:
        assert manager.restore(state) == 1


SAVES: dict[str, Call] = {
    "save": as_step(torch_ckpt.save),
    "async_save": as_step(lambda state, path: torch_ckpt.async_save(state, path).result()),
    "manager": by_manager,
}
# The layouts of dcp.save: with get_state_dict, and without, as of torch_ckpt.save before optimizers
# had names.
STOCK_SAVES: dict[str, Call] = {
    "names by stock": as_step(by_get_state_dict),
    "numbers by stock": as_step(stock_save),
}
LOADS: dict[str, Call] = {
    "load": lambda state, root: torch_ckpt.load(state, step_of(root)),
    "freeing": lambda state, root: torch_ckpt.load(state, step_of(root), free_before_read=True),
    "manager": restored_by_manager,
}


@pytest.mark.parametrize(
    ("save", "load", "steps", "unused"),
    [
        *pairwise(itertools.product(SAVES, LOADS, [0, 3], [True, False])),
        *itertools.product(STOCK_SAVES, LOADS, [3], [True, False]),
    ],
)
def test_a_program_is_restored_into_a_fresh_one(
    tmp_path: Path, save: str, load: str, steps: int, unused: bool
) -> None:
    saved, fresh = program(steps, unused=unused), program(0 if steps else 1, unused=unused)
    nested, mean = fresh["train"]["losses"], fresh["train"]["mean"]
    (SAVES | STOCK_SAVES)[save](saved, tmp_path)
    LOADS[load](fresh, tmp_path)
    assert_equal(outcome(fresh), outcome(saved))
    assert fresh["train"]["mean"] is mean
    assert load == "manager" or fresh["train"]["losses"] is nested


def test_a_tensor_learning_rate_is_restored_with_numbered_parameters(tmp_path: Path) -> None:
    saved, fresh = (program(n, lr=torch.tensor(r), foreach=False) for n, r in ((3, 0.5), (0, 0.0)))
    rate = fresh["optimizer"].param_groups[0]["lr"]
    stock_save({"model": saved["model"], "optimizer": saved["optimizer"]}, tmp_path)
    torch_ckpt.load({"model": fresh["model"], "optimizer": fresh["optimizer"]}, tmp_path)
    assert rate == saved["optimizer"].param_groups[0]["lr"]
    assert fresh["optimizer"].param_groups[0]["lr"] is rate


def test_numbers_that_name_other_parameters_are_refused(tmp_path: Path) -> None:
    def parts() -> State:
        model = nn.ParameterList(torch.ones(2) * n for n in range(2))
        return {"model": model, "optimizer": torch.optim.AdamW(reversed(list(model)))}

    saved = parts()
    for parameter in saved["model"]:
        parameter.grad = parameter.detach()
    saved["optimizer"].step()
    stock_save(saved, tmp_path)
    with pytest.raises(
        dcp.CheckpointException, match="have numbers as names, in a different order"
    ):
        torch_ckpt.load(parts(), tmp_path)


# --- nothing is left out silently ----------------------------------------------------------------


class Lazy:
    """Has no state until its first use."""

    def __init__(self, state: State) -> None:
        self.state = state

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


@pytest.mark.parametrize("save", [torch_ckpt.save, stock_save])
def test_a_value_without_state_is_restored_completely(tmp_path: Path, save: Call) -> None:
    fresh = Lazy({})
    save({"value": Lazy({"count": 3, "nested": {"a": [1]}})}, tmp_path)
    torch_ckpt.load({"value": fresh}, tmp_path)
    assert fresh.state == {"count": 3, "nested": {"a": [1]}}


@pytest.mark.parametrize("freeing", [False, True])
def test_an_empty_dict_that_has_values_in_the_checkpoint_is_refused(
    tmp_path: Path, freeing: bool
) -> None:
    saved, fresh = program(1), program(0)
    torch_ckpt.save({"optimizer": saved["optimizer"].state_dict()}, tmp_path)
    state = {"optimizer": fresh["optimizer"].state_dict()}
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load(state, tmp_path, free_before_read=freeing)
    cause = cause_of(caught.value)
    assert isinstance(cause, LoadMismatch)
    assert str(cause).startswith(
        "optimizer.state is an empty dict, but the checkpoint has optimizer"
    )


def test_an_empty_dict_is_allowed_if_names_are_selected(tmp_path: Path) -> None:
    torch_ckpt.save({"a": {"b": 1}, "step": 3}, tmp_path)
    state: State = {"a": {}, "step": 0}
    torch_ckpt.load(state, tmp_path, names=["step"])
    assert state == {"a": {}, "step": 3}


def test_an_optimizer_without_state_is_refused_with_a_planner(tmp_path: Path) -> None:
    torch_ckpt.save({"optimizer": program(1)["optimizer"]}, tmp_path)
    with pytest.raises(
        ValueError,
        match=r"this optimizer has no state yet.*dcp\.load, which.*get_optimizer_state_dict",
    ):
        torch_ckpt.load(
            {"optimizer": program(0)["optimizer"]}, tmp_path, planner=dcp.DefaultLoadPlanner()
        )


# --- other values --------------------------------------------------------------------------------


def test_random_number_generators_are_saved_per_rank(tmp_path: Path) -> None:
    metadata = torch_ckpt.save({"rng": RNGState()}, tmp_path).metadata()
    drawn = torch.rand(3)
    torch_ckpt.load({"rng": RNGState()}, tmp_path)
    assert set(metadata.state_dict_metadata) == {"rng.rank0"}
    assert torch.equal(torch.rand(3), drawn)


def test_preflight_takes_a_module_on_the_meta_device(tmp_path: Path) -> None:
    torch_ckpt.save({"model": nn.Linear(2, 2)}, tmp_path)
    assert torch_ckpt.preflight({"model": nn.Linear(2, 2, device="meta")}, tmp_path).fits
