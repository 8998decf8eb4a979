"""Parameter groups of optimizers that differ from the groups in the checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import torch_ckpt
from tests.support import assert_equal, cause_of, stock_load, stock_save
from torch_ckpt import CheckpointError, LoadMismatch
from torch_ckpt.state.parameter_groups import pair_groups

State = dict[str, Any]

#: Names of the parameters, by the letters that stand for them in a grouping such as "ab c".
PARAMETERS = {"a": "0.weight", "b": "0.bias", "c": "1.weight", "d": "1.bias"}

pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")


def program(grouping: str, seed: int = 0, *, trained: bool = False, rate: float = 0.1) -> State:
    """Makes a program whose optimizer has one group for each word; "-" is an empty group.

    Each group has a learning rate of its own.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[PARAMETERS[letter]] for letter in word.strip("-")], "lr": rate * number}
        for number, word in enumerate(grouping.split(), 1)
    ]
    optimizer = torch.optim.AdamW(groups)
    if trained:
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def rates(state: State) -> list[float]:
    return [group["lr"] for group in state["optimizer"].param_groups]


def save_nested(state: State, path: Path) -> None:
    optimizer = get_optimizer_state_dict(state["model"], state["optimizer"])
    stock_save({"model": state["model"], "optimizer": optimizer}, path)


def save_flattened(state: State, path: Path) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    optimizer = get_optimizer_state_dict(state["model"], state["optimizer"], options=options)
    stock_save({"model": state["model"], "optimizer": optimizer}, path)


#: The layouts of a checkpoint that store groups.
LAYOUTS: dict[str, Callable[[State, Path], Any]] = {
    "torch_ckpt": torch_ckpt.save,
    "get_state_dict": save_nested,
    "Optimizer.state_dict": stock_save,
}

#: The saved grouping, and a grouping to which its options cannot be assigned.
DIFFERENT = {
    "split": ("abcd", "ab cd"),
    "merged": ("ab cd", "abcd"),
    "moved": ("ab cd", "a bcd"),
    "exchanged": ("abc d", "abd c"),
    "an empty group more": ("abcd", "abcd -"),
    "an empty group less": ("abcd -", "abcd"),
    "several empty groups moved": ("abcd - -", "- abcd -"),
}


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        (layout, case)
        for layout in LAYOUTS
        for case in DIFFERENT
        # Numbers do not identify parameters in groups of the same sizes.
        if (layout, case) != ("Optimizer.state_dict", "exchanged")
    ],
)
def test_another_grouping_is_refused_before_anything_changes(
    tmp_path: Path, layout: str, case: str
) -> None:
    before, after = DIFFERENT[case]
    LAYOUTS[layout](program(before, trained=True), tmp_path)
    fresh = program(after, seed=1)
    expected = {key: value.state_dict() for key, value in program(after, seed=1).items()}
    for strict in (True, False):
        with pytest.raises(dcp.CheckpointException) as caught:
            torch_ckpt.load(fresh, tmp_path, strict=strict)
        error = cause_of(caught.value)
        assert isinstance(error, LoadMismatch)
        assert "In the checkpoint, group 0 has 0.weight, 0.bias" in str(error)
        assert f"group {len(after.split()) - 1}" in str(error).partition("Now, ")[2]
        assert_equal({key: value.state_dict() for key, value in fresh.items()}, expected)


@pytest.mark.parametrize("case", ["split", "merged", "moved", "an empty group more"])
def test_stock_torch_refuses_the_same_groupings(tmp_path: Path, case: str) -> None:
    before, after = DIFFERENT[case]
    stock_save(program(before, trained=True), tmp_path)
    with pytest.raises((dcp.CheckpointException, ValueError)):
        stock_load(program(after, seed=1, trained=True), tmp_path)


def test_the_manager_and_preflight_refuse_another_grouping(tmp_path: Path) -> None:
    before, after = DIFFERENT["split"]
    with torch_ckpt.CheckpointManager(tmp_path) as manager:
        manager.save(1, program(before, trained=True))
        manager.wait_until_finished()
        fresh = program(after)
        with pytest.raises(dcp.CheckpointException, match="grouped differently"):
            manager.restore(fresh)
        report = torch_ckpt.preflight(fresh, tmp_path / "0000000001")
    assert not report.fits
    assert "Now, group 0 has 0.weight, 0.bias; group 1 has" in report.refused[0]
    assert rates(fresh) == rates(program(after))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selected_options_need_the_lists_of_parameters(tmp_path: Path, layout: str) -> None:
    saved, fresh = program("ab cd", trained=True), program("cd ab", seed=1, rate=0.5)
    if layout == "Optimizer.state_dict":  # which identifies parameters by their numbers
        fresh = program("ab cd", seed=1, rate=0.5)
    LAYOUTS[layout](saved, tmp_path)
    before = rates(fresh)
    for names in (["optimizer.param_groups.*.lr"], ["optimizer.param_groups.1.*"]):
        with pytest.raises(dcp.CheckpointException) as caught:
            torch_ckpt.load(fresh, tmp_path, names=names)
        assert "Add 'optimizer.param_groups.*.params' to names=" in str(caught.value)
        assert "is empty" not in str(caught.value)
        assert rates(fresh) == before
    names = ["optimizer.param_groups.*.lr", "optimizer.param_groups.*.params"]
    torch_ckpt.load(fresh, tmp_path, names=names)
    expected = [0.1, 0.2] if layout == "Optimizer.state_dict" else [0.2, 0.1]
    assert rates(fresh) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_error_names_an_option_that_restores_the_states_and_keeps_the_groups(
    tmp_path: Path, layout: str
) -> None:
    saved, fresh = program("abcd", trained=True), program("ab cd", seed=1, rate=0.5)
    LAYOUTS[layout](saved, tmp_path)
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load(fresh, tmp_path)
    _, _, option = str(caught.value).partition("names=")
    torch_ckpt.load(fresh, tmp_path, names=eval(option.partition("\n")[0]))
    assert rates(fresh) == [0.5, 1.0]
    found, expected = (state["optimizer"].state_dict()["state"] for state in (fresh, saved))
    assert_equal(found, expected)


#: The saved grouping, another order of its groups, and their learning rates.
REORDERED = {
    "two groups": ("ab cd", "cd ab", [0.2, 0.1]),
    "an empty group": ("abcd -", "- abcd", [0.2, 0.1]),
    "an empty group between others": ("ab - cd", "cd - ab", [0.3, 0.2, 0.1]),
    "several empty groups in place": ("ab - -", "ab - -", [0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        *(("torch_ckpt", case) for case in REORDERED),
        # get_state_dict refuses several empty groups.
        *(("get_state_dict", case) for case in REORDERED if "several" not in case),
    ],
)
def test_groups_in_another_order_get_their_own_options(
    tmp_path: Path, layout: str, case: str
) -> None:
    before, after, expected = REORDERED[case]
    LAYOUTS[layout](program(before, trained=True), tmp_path)
    fresh = program(after, seed=1, rate=0.5)
    torch_ckpt.load(fresh, tmp_path)
    assert rates(fresh) == pytest.approx(expected)


def named(*groups: tuple[str | None, str]) -> list[State]:
    return [
        {"params": list(members)} | ({} if name is None else {"name": name})
        for name, members in groups
    ]


@pytest.mark.parametrize(
    ("stored", "current", "expected"),
    [
        (
            [("body", "ab"), ("head", ""), ("tail", "")],
            [("tail", ""), ("head", ""), ("body", "ab")],
            [2, 1, 0],
        ),
        ([("body", "ab"), ("head", "c")], [("head", ""), ("body", "ab")], [1, 0]),
        ([("body", "ab"), ("head", "c")], [("body", "ab")], [0]),
    ],
    ids=["several are empty", "one has lost its parameters", "one was removed"],
)
def test_names_identify_groups_without_parameters(
    stored: Any, current: Any, expected: list[int]
) -> None:
    assert pair_groups(named(*stored), named(*current), exact=False) == expected


@pytest.mark.parametrize(
    ("stored", "current"),
    [
        ([("body", "ab"), ("head", "")], [("tail", ""), ("body", "ab")]),
        (
            [("body", "ab"), ("head", ""), ("head", "")],
            [("head", ""), ("head", ""), ("body", "ab")],
        ),
        ([(None, "ab"), (None, "c")], [(None, "ab"), (None, "")]),
        ([(None, "ab"), (None, "bc")], [(None, "a"), (None, "bc")]),
    ],
    ids=["another name", "equal names", "lost parameters and no name", "a parameter in two groups"],
)
def test_ambiguous_groups_are_refused(stored: Any, current: Any) -> None:
    with pytest.raises(CheckpointError, match=r"In the checkpoint, group 0 .*Now, group 0 "):
        pair_groups(named(*stored), named(*current), exact=False)


def test_numbered_parameters_must_all_exist(tmp_path: Path) -> None:
    stock_save({"optimizer": program("abcd", trained=True)["optimizer"]}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"group 0 has 0, 1, 2 and 1 more\. Now"):
        torch_ckpt.load({"optimizer": program("abc")["optimizer"]}, tmp_path)


def test_options_by_parameter_are_restored_into_any_groups_with_equal_options(
    tmp_path: Path,
) -> None:
    save_flattened(program("abcd", trained=True, rate=0.7), tmp_path)
    fresh = program("ab cd", seed=1)
    with pytest.warns(UserWarning, match="group 0 and group 1, so both get the same lr"):
        torch_ckpt.load(fresh, tmp_path)
    assert rates(fresh) == [0.7, 0.7]
    with warnings.catch_warnings():
        torch_ckpt.load(fresh, tmp_path)


def test_options_by_parameter_must_exist_for_each_parameter(tmp_path: Path) -> None:
    save_flattened(program("ab", trained=True), tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"no options for 1\.weight, 1\.bias"):
        torch_ckpt.load(program("abcd"), tmp_path, strict=False)


def test_a_renamed_optimizer_keeps_its_groups(tmp_path: Path) -> None:
    saved = program("ab cd", trained=True)
    model = nn.ModuleDict({"inner": saved["model"]})
    torch_ckpt.save({"model": model, "optimizer": saved["optimizer"]}, tmp_path)
    fresh = program("cd ab", seed=1, rate=0.5)
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load(fresh, tmp_path)
    rename = cause_of(caught.value).report.rename  # type: ignore[attr-defined]
    assert f"pass rename={rename}" in str(caught.value)
    torch_ckpt.load(fresh, tmp_path, rename=rename)
    assert rates(fresh) == pytest.approx([0.2, 0.1])
    assert_equal(fresh["model"].state_dict(), saved["model"].state_dict())


@pytest.mark.parametrize("names", [None, ["model.*", "optimizer.state.*"]], ids=["all", "states"])
def test_a_renamed_parameter_without_state_gets_none(
    tmp_path: Path, names: list[str] | None
) -> None:
    def parts(inner: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(2, 2)
        optimizer = torch.optim.NAdam(model.parameters())
        return {"model": nn.ModuleDict({"inner": model}) if inner else model, "o": optimizer}

    saved = parts(inner=True)
    torch_ckpt.save({"model": saved["model"], "optimizer": saved["o"]}, tmp_path)
    fresh = parts(inner=False)
    rename = {"model.inner.*": "model.*", "optimizer.state.inner.*": "optimizer.state.*"}
    torch_ckpt.load(
        {"model": fresh["model"], "optimizer": fresh["o"]}, tmp_path, rename=rename, names=names
    )
    assert not fresh["o"].state
