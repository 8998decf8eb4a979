"""Values that a load with strict=False leaves unchanged."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import torch_ckpt
from tests.support import assert_equal, no_warnings, stock_load, stock_save

each_way = pytest.mark.parametrize("freeing", [False, True], ids=["", "freeing"])


class Counter:
    """A Stateful value."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"model": {"a": torch.ones(2), "b": torch.ones(3)}, "epoch": 7, "counter": {"n": 3}}
    torch_ckpt.save(state, tmp_path / "c")
    return tmp_path / "c"


def load(state: dict[str, Any], path: Path, freeing: bool, **options: Any) -> torch_ckpt.LoadReport:
    report = torch_ckpt.load(state, path, strict=False, free_before_read=freeing, **options)
    assert report is not None
    return report


@each_way
def test_skipped_values_are_named_in_a_warning_and_counted_in_the_log(
    saved: Path, freeing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"model": {"a": torch.zeros(2), "b": torch.zeros(4), "new": torch.zeros(1)}, "other": 5}
    with (
        caplog.at_level(logging.INFO, "torch_ckpt"),
        pytest.warns(UserWarning, match="strict=False") as caught,
    ):
        report = load(state, saved, freeing)
    (warning,) = [str(w.message) for w in caught if "strict=False" in str(w.message)]
    for part in ("model.new (missing)", "other (missing)", "model.b (stored [3], wanted [4])"):
        assert part in warning
        assert part in report.skipped
    assert caught[0].filename == __file__
    assert "1 names match, 3 skipped" in caplog.text
    assert (state["model"]["a"] == 1).all()  # type: ignore[index]
    assert state["other"] == 5


@each_way
def test_nothing_is_logged_if_everything_fits(saved: Path, freeing: bool) -> None:
    with no_warnings():
        assert load({"model": {"a": torch.zeros(2)}, "epoch": 0}, saved, freeing).skipped == []


@each_way
@pytest.mark.parametrize("kind", [dict, Counter])
def test_a_state_without_any_match_is_refused(saved: Path, freeing: bool, kind: type) -> None:
    model = torch.zeros(2)
    state = {"model": {"a": model}, "optimizer": kind(a=torch.zeros(2), n=1)}
    with pytest.raises(torch_ckpt.LoadMismatch, match="no value of optimizer can be") as caught:
        load(state, saved, freeing)
    assert caught.value.report.absent == ["optimizer"]
    assert (model == 0).all()


@pytest.mark.parametrize(
    ("state", "subject"),
    [
        ({"model": {"a": torch.zeros(9)}, "epoch": 0}, "model"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "the state dict"),
    ],
    ids=["no fitting shape", "a flat state dict"],
)
def test_a_state_of_which_nothing_can_be_loaded_is_refused(
    saved: Path, state: dict[str, Any], subject: str
) -> None:
    with pytest.raises(torch_ckpt.LoadMismatch, match=f"no value of {subject} can be loaded"):
        load(state, saved, False)


@each_way
def test_none_is_replaced_by_the_stored_tensor_or_object(saved: Path, freeing: bool) -> None:
    state: dict[str, Any] = {"model": {"a": torch.zeros(2), "b": None}, "epoch": None}
    report = load(state, saved, freeing)
    assert sorted(report.loaded) == ["epoch", "model.a", "model.b"]
    assert state["epoch"] == 7
    assert state["model"]["b"].shape == (3,)


def test_an_optimizer_of_another_class_is_refused_before_the_model_changes(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    adamw = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    adamw.step()
    torch_ckpt.save({"model": model, "optimizer": adamw}, tmp_path)
    fresh = torch.nn.Linear(2, 2)
    before = fresh.weight.detach().clone()
    for options in ({"momentum": 0.9}, {}):
        state = {"model": fresh, "optimizer": torch.optim.SGD(fresh.parameters(), **options)}
        with pytest.raises(torch_ckpt.LoadMismatch) as caught:
            load(state, tmp_path, False)
        has = "momentum_buffer" if options else "no state"
        assert (
            "optimizer: another class of optimizer was saved, or the same class with other "
            "options: for weight, bias, the checkpoint has exp_avg, exp_avg_sq, step, and SGD has "
            f"{has}" in str(caught.value)
        )
        assert torch.equal(fresh.weight, before)
        option = str(caught.value).partition("leave it out with names=")[2].partition("\n")[0]
        assert load(state, tmp_path, False, names=eval(option)).fits
        assert torch.equal(fresh.weight, model.weight)
        with torch.no_grad():
            fresh.weight.copy_(before)


@pytest.mark.parametrize("layout", ["torch_ckpt", "get_state_dict", "flattened", "stock"])
@pytest.mark.parametrize("saved", ["SGD", "AdamW"])
def test_options_of_another_class_are_refused_without_any_stored_state(
    tmp_path: Path, layout: str, saved: str
) -> None:
    classes: dict[str, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
    model = torch.nn.Linear(2, 2)
    optimizer = classes.pop(saved)(model.parameters(), lr=0.5)
    (other,) = classes.values()
    fresh = torch.nn.Linear(2, 2)
    before = fresh.weight.detach().clone()
    state = {"model": fresh, "optimizer": other(fresh.parameters(), lr=0.25)}
    groups = copy.deepcopy(state["optimizer"].param_groups)
    if layout == "torch_ckpt":
        torch_ckpt.save({"model": model, "optimizer": optimizer}, tmp_path)
    elif layout == "stock":
        stock_save({"model": model, "optimizer": optimizer}, tmp_path)
        with pytest.raises((dcp.CheckpointException, KeyError)):
            stock_load({"model": torch.nn.Linear(2, 2), "optimizer": state["optimizer"]}, tmp_path)
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
        stored = get_optimizer_state_dict(model, optimizer, options=options)
        stock_save({"model": model, "optimizer": stored}, tmp_path)
    with pytest.raises(torch_ckpt.LoadMismatch, match="another class of optimizer") as caught:
        load(state, tmp_path, False)
    assert torch.equal(fresh.weight, before)
    assert_equal(state["optimizer"].param_groups, groups)
    option = str(caught.value).partition("leave it out with names=")[2].partition("\n")[0]
    assert load(state, tmp_path, False, names=eval(option)).fits


def test_options_of_a_scheduler_do_not_mark_another_class(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.75, 10, cycle_momentum=False)
    state: dict[str, Any] = {"optimizer": optimizer.state_dict()}
    del state["optimizer"]["param_groups"][0]["foreach"]  # as an older torch saves it
    stock_save(state, tmp_path)
    fresh = torch.optim.SGD(model.parameters(), lr=0.25)
    torch_ckpt.load({"model": model, "optimizer": fresh}, tmp_path, names=["optimizer.*"])
    assert fresh.param_groups[0]["max_lr"] == 0.75


def test_a_state_that_was_not_selected_may_be_missing(saved: Path) -> None:
    state = {"model": {"a": torch.zeros(2)}, "optimizer": {"a": torch.zeros(2)}}
    assert load(state, saved, False, names=["model.*"]).fits
    assert (state["model"]["a"] == 1).all()


def test_a_manager_warns_and_refuses_as_load_does(tmp_path: Path) -> None:
    model, larger = torch.nn.Linear(2, 2), torch.nn.Linear(3, 2)
    with torch_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": model}, force=True)
    with torch_ckpt.CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match=r"model\.weight \(stored \[2, 2\], wanted \[2, 3\]\)"):
            assert manager.restore({"model": larger}, strict=False) == 1
        with pytest.raises(torch_ckpt.LoadMismatch, match="no value of ema can be loaded"):
            manager.restore({"model": model, "ema": torch.nn.Linear(2, 2)}, strict=False)
