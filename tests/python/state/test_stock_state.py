"""States of programs, saved by the manager and restored by stock torch, and vice versa."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.optim import lr_scheduler

import torch_ckpt
from tests.programs import restore
from tests.support import assert_equal, cause_of, stock_load, stock_restore, stock_save
from torch_ckpt import CheckpointError, LoadMismatch
from torch_ckpt.state.states import States

State = dict[str, Any]

BOTH_SHAPES = pytest.mark.parametrize("flatten", [False, True], ids=["nested", "flattened"])


pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")


def program(steps: int, rate: float = 0.1, **options: Any) -> State:
    """Makes two groups of AdamW with their own options, a scheduler, and counters."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    weights, biases = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "lr": rate / 2}]
    optimizer = torch.optim.AdamW(groups, lr=rate, **options)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    train_state = {"step": steps, "losses": [0.5] * steps, "tokens": torch.tensor(steps)}
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "train_state": train_state,
    }


def values(state: State) -> State:
    parts = {key: state[key].state_dict() for key in ("model", "optimizer", "scheduler")}
    return {**parts, "train_state": state["train_state"]}


def save_by_stock(state: State, path: Path, *, flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    stock_save({**state, "model": model, "optimizer": optimizer}, path)


def mismatch(state: State, path: Path) -> torch_ckpt.LoadReport:
    with pytest.raises(dcp.CheckpointException) as caught:
        restore(state, path)
    error = cause_of(caught.value)
    assert isinstance(error, LoadMismatch)
    return error.report


# --- what stock torch has saved ------------------------------------------------------------------


@BOTH_SHAPES
def test_a_complete_program_saved_by_stock_torch_is_restored(tmp_path: Path, flatten: bool) -> None:
    saved, fresh = program(3, rate=0.7), program(0)
    save_by_stock(saved, tmp_path, flatten=flatten)
    report = restore(fresh, tmp_path)
    assert_equal(values(fresh), values(saved))
    assert report.unexpected == []


@BOTH_SHAPES
def test_a_parameter_without_a_gradient_has_no_state_in_a_stock_checkpoint_nor_after_it(
    tmp_path: Path, flatten: bool
) -> None:
    def parts() -> State:
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    saved, fresh = parts(), parts()
    saved["model"]["used"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    save_by_stock(saved, tmp_path, flatten=flatten)
    restore(fresh, tmp_path)
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


@BOTH_SHAPES
def test_a_tensor_learning_rate_is_restored_from_stock(tmp_path: Path, flatten: bool) -> None:
    saved, fresh = program(1, rate=0.75), program(0)
    tensors = [torch.tensor(0.0), torch.tensor(0.0)]
    for group, tensor in zip(fresh["optimizer"].param_groups, tensors, strict=True):
        group["lr"] = tensor
    save_by_stock(saved, tmp_path, flatten=flatten)
    restore(fresh, tmp_path)
    assert [tensor.item() for tensor in tensors] == [0.75, 0.375]
    groups = fresh["optimizer"].param_groups
    assert all(group["lr"] is tensor for group, tensor in zip(groups, tensors, strict=True))


def test_parameters_of_one_group_with_different_stock_options_are_refused(tmp_path: Path) -> None:
    save_by_stock(program(1), tmp_path, flatten=True)
    fresh = program(0)
    one_group = torch.optim.AdamW(fresh["model"].parameters())
    with pytest.raises(
        CheckpointError, match=r"optimizer: .*not belong to the same group in the checkpoint"
    ):
        restore({"model": fresh["model"], "optimizer": one_group}, tmp_path)


@BOTH_SHAPES
def test_missing_state_of_an_optimizer_in_a_stock_checkpoint_is_named(
    tmp_path: Path, flatten: bool
) -> None:
    saved, fresh = program(1), program(0, amsgrad=True)
    save_by_stock(saved, tmp_path, flatten=flatten)
    assert mismatch(fresh, tmp_path).missing == [
        f"optimizer.state.{number}.{kind}.max_exp_avg_sq"
        for kind in ("weight", "bias")
        for number in (0, 1)
    ]


@pytest.mark.parametrize("number", ["9999999999", "one"])
def test_groups_whose_numbers_are_not_consecutive_are_refused(tmp_path: Path, number: str) -> None:
    stored = States(program(1)).saved()
    groups = dict(enumerate(stored["optimizer"]["param_groups"]))
    stored["optimizer"]["param_groups"] = {"0": groups[0], number: groups[1]}
    torch_ckpt.save(stored, tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"groups are numbered 0, {number} instead of from 0 to 1"
    ):
        restore(program(0), tmp_path)


def test_what_a_stock_checkpoint_lacks_is_missing(tmp_path: Path) -> None:
    saved, fresh = program(1), program(0)
    stock_save({"model": saved["model"].state_dict(), "train_state": {"step": 3}}, tmp_path)
    fresh["train_state"] = {"step": 0, "nested": {"best": 1.0}}
    del fresh["scheduler"]
    assert mismatch(fresh, tmp_path).missing == [
        "optimizer.param_groups",
        "train_state.nested.best",
    ]


# --- the way back --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
def test_stock_torch_restores_a_program_saved_by_the_manager(tmp_path: Path, steps: int) -> None:
    saved, fresh = program(steps, rate=0.7), program(0)
    torch_ckpt.save(saved, tmp_path)
    stock_restore(fresh["model"], fresh["optimizer"], tmp_path)
    assert_equal(fresh["model"].state_dict(), saved["model"].state_dict())
    found, expected = (state["optimizer"].state_dict() for state in (fresh, saved))
    assert_equal(found["param_groups"], expected["param_groups"])
    if steps:
        assert_equal(found["state"], expected["state"])


def test_the_names_of_an_optimizer_are_those_of_stock_and_one_more(tmp_path: Path) -> None:
    saved = program(1)
    state = {key: saved[key] for key in ("model", "optimizer")}
    ours = torch_ckpt.save(state, tmp_path / "a").metadata()
    stock = stock_save(
        {"optimizer": get_optimizer_state_dict(saved["model"], saved["optimizer"])}, tmp_path / "b"
    )
    names = {n for n in ours.state_dict_metadata if n.startswith("optimizer.")}
    assert names == {*stock.state_dict_metadata, "optimizer.without_state"}


class _Odd(torch.optim.Optimizer):
    """Optimizer with options and states of many types."""

    def __init__(self, parameters: Any, odd: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "odd": odd})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["window"] = {1: torch.ones(2) * state["count"], "rest": [None, {}]}


@pytest.mark.parametrize("odd", [{}, {1: 0.5}, [{"a": 1}], (torch.ones(2), 1), None, "text"])
def test_options_and_states_of_any_type_are_restored_unchanged(tmp_path: Path, odd: Any) -> None:
    def parts(steps: int, odd: Any) -> State:
        layer = nn.Linear(2, 2)
        optimizer = _Odd(layer.parameters(), odd)
        for _ in range(steps):
            optimizer.step()
        return {"model": layer, "optimizer": optimizer}

    saved, fresh = parts(2, odd), parts(0, "another")
    torch_ckpt.save(saved, tmp_path)
    restore(fresh, tmp_path)
    assert_equal(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


class _Foreign:
    """Class that is not allow-listed."""


def test_an_option_that_cannot_be_loaded_is_named_with_its_full_key() -> None:
    layer = nn.Linear(2, 2)
    state = {"model": layer, "optimizer": _Odd(layer.parameters(), {"a": _Foreign()})}
    with pytest.warns(UserWarning, match=r"optimizer\.param_groups\.0\.odd.*Foreign"):
        States(state).saved()


def test_an_option_that_the_checkpoint_lacks_is_unchanged(tmp_path: Path) -> None:
    saved, fresh = program(1), program(0)
    torch_ckpt.save(saved, tmp_path)
    for group in fresh["optimizer"].param_groups:
        group["of_a_newer_version"] = 5
    restore(fresh, tmp_path)
    groups = fresh["optimizer"].param_groups
    assert [group["of_a_newer_version"] for group in groups] == [5, 5]


# --- values of which stock torch stores nothing, or only the leaves -------------------------------


class Extra(nn.Linear):
    """A layer with extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRA = pytest.mark.parametrize(
    ("extra", "fresh"),
    [
        ({"scale": 2.0, "history": torch.arange(3.0)}, {"scale": 0.0, "history": torch.zeros(3)}),
        (torch.arange(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)),
        ("a text", ""),
        ([torch.ones(2), 3], [torch.zeros(2), 0]),
    ],
    ids=["dict", "tensor", "text", "list"],
)


@EXTRA
def test_extra_state_saved_by_stock_torch_is_restored(
    tmp_path: Path, extra: Any, fresh: Any
) -> None:
    stock_save({"model": nn.Sequential(Extra(extra)).state_dict()}, tmp_path)
    model = nn.Sequential(Extra(fresh))
    assert torch_ckpt.preflight({"model": model}, tmp_path).fits
    torch_ckpt.load({"model": model}, tmp_path)
    assert_equal(model[0].extra, extra)


def test_a_buffer_whose_name_ends_like_extra_state_is_a_tensor(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("decoder_extra_state", torch.ones(3))
    torch_ckpt.save({"model": model}, tmp_path)
    state = {"model": {"decoder_extra_state": torch.zeros(3)}}
    stock_load(state, tmp_path)
    assert_equal(state["model"]["decoder_extra_state"], torch.ones(3))


def test_a_value_with_an_empty_state_needs_nothing_in_the_checkpoint(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler(enabled=False)
    stock_save({"model": nn.Linear(2, 2).state_dict(), "scaler": scaler.state_dict()}, tmp_path)
    report = torch_ckpt.load({"model": nn.Linear(2, 2), "scaler": scaler}, tmp_path)
    assert isinstance(report, torch_ckpt.LoadReport)
    assert report.missing == []


@BOTH_SHAPES
def test_an_optimizer_that_stock_torch_saved_before_its_first_step_is_restored(
    tmp_path: Path, flatten: bool
) -> None:
    saved = program(0, rate=0.7)
    state = {**saved, "model": saved["model"].state_dict()}
    if flatten:
        names = {"0.weight": 0, "0.bias": 1, "1.weight": 0, "1.bias": 1}
        groups = saved["optimizer"].state_dict()["param_groups"]
        options = {
            f"param_groups.{name}.{option}": value
            for name, number in names.items()
            for option, value in groups[number].items()
            if option != "params"
        }
        stock_save({**state, "optimizer": options}, tmp_path)
    else:
        stock_save({**state, "optimizer": saved["optimizer"].state_dict()}, tmp_path)
    fresh = program(0)
    restore(fresh, tmp_path)
    assert fresh["optimizer"].state_dict()["state"] == {}
    assert [group["lr"] for group in fresh["optimizer"].param_groups] == [0.7, 0.35]


def test_a_value_that_a_checkpoint_of_torch_ckpt_lacks_is_missing_even_if_its_state_is_empty(
    tmp_path: Path,
) -> None:
    scaler = torch.amp.GradScaler(enabled=False)
    torch_ckpt.save({"scaler": scaler}, tmp_path)
    with pytest.raises(LoadMismatch, match=r"scaller\._objects"):
        torch_ckpt.load({"scaller": scaler}, tmp_path)
