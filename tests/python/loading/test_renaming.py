"""Loads from checkpoints whose names differ from those of the state dict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import torch_ckpt
from tests.support import assert_equal, cause_of, save
from torch_ckpt.loading.renaming import new_names, new_path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RENAMES: dict[str, Any] = {
    "mapping": {"encoder.*": "model.encoder.*", "step": "count"},
    "pairs": [("encoder.*", "model.encoder.*"), ("step", "count"), ("*.w", "*.never")],
    "function": lambda name: "count" if name == "step" else f"model.{name}",
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Saves a state under other names than the state of fresh() has."""
    save({"encoder": {"w": torch.arange(4.0), "b": torch.ones(2)}, "step": 5}, tmp_path)
    return tmp_path


def fresh() -> dict[str, Any]:
    return {"model": {"encoder": {"w": torch.zeros(4), "b": torch.zeros(2)}}, "count": 0}


@pytest.mark.parametrize("free", [False, True], ids=["in place", "free_before_read"])
@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_renamed_values_are_loaded(saved: Path, rename: Any, free: bool) -> None:
    state = fresh()
    report = torch_ckpt.load(state, saved, rename=rename, free_before_read=free)
    assert state["count"] == 5
    assert_equal(state["model"], {"encoder": {"w": torch.arange(4.0), "b": torch.ones(2)}})
    assert report is not None
    assert sorted(report.loaded) == ["count", "model.encoder.b", "model.encoder.w"]


@pytest.mark.parametrize("option", ["zero_fill", "allow_shape_mismatch"])
def test_a_generator_of_pairs_renames_zero_filled_values(saved: Path, option: str) -> None:
    state = {"model": {"encoder": {"w": torch.ones(6)}}}
    pairs = zip(["encoder.*", "step"], ["model.encoder.*", "count"], strict=True)
    options = torch_ckpt.ReadOptions(**{option: True})
    torch_ckpt.load(state, saved, rename=pairs, options=options)
    assert_equal(state["model"]["encoder"]["w"], torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 0.0]))


def test_preflight_and_the_estimate_have_the_new_names(saved: Path) -> None:
    rename = RENAMES["mapping"]
    assert torch_ckpt.preflight(fresh(), saved, rename=rename).unexpected == []
    assert torch_ckpt.preflight(fresh(), saved).missing == [
        "model.encoder.w",
        "model.encoder.b",
        "count",
    ]
    memory = torch_ckpt.estimate_read_memory(fresh(), saved, rename=rename)
    assert memory.target_bytes == 24


def test_names_selects_from_the_new_names(saved: Path) -> None:
    state = fresh()
    torch_ckpt.load(state, saved, rename={"encoder.*": "model.encoder.*"}, names=["model.*"])
    assert_equal(state["model"]["encoder"]["w"], torch.arange(4.0))
    assert state["count"] == 0


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (
            {**RENAMES["mapping"], "enc.*": "x.*"},
            "no name matches 'enc.*'; the names are encoder.w, encoder.b, step",
        ),
        (lambda name: name, "does not change any name"),
        ({"*.w": "*.b"}, "both encoder."),
        (lambda _: "encoder.b", "both encoder."),
        ({"encoder.w": "step"}, "both encoder."),
        ({"encoder.*": "model"}, "the old and the new name must have equally many"),
        ({"step": 3}, "must consist of pairs of str"),
        (lambda _: None, "must return a str for each name, got None for encoder.w"),
    ],
    ids=[
        "a pattern without a match",
        "no name changes",
        *[f"two names become one by {way}" for way in ("a pattern", "a function", "a pair")],
        "other stars",
        "no text",
        "a function that returns no text",
    ],
)
def test_a_rename_that_cannot_be_applied_is_refused(saved: Path, rename: Any, message: str) -> None:
    state = fresh()
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load(state, saved, rename=rename)
    error = cause_of(caught.value)
    assert isinstance(error, ValueError)
    assert message in str(error)
    assert_equal(state, fresh())


@pytest.mark.parametrize(
    ("names", "rename", "expected"),
    [
        (
            ["a.b", "c.b", "d"],
            [("a.*", "first.*"), ("*.b", "second.*")],
            {"a.b": "first.b", "c.b": "second.c", "d": "d"},
        ),
        (["h.3.attn.w"], {"h.*.attn.*": "layers.*.a.*"}, {"h.3.attn.w": "layers.3.a.w"}),
    ],
    ids=["the first pair that matches", "stars by their positions"],
)
def test_a_name_is_renamed_by_the_first_pair_that_matches(
    names: list[str], rename: Any, expected: dict[str, str]
) -> None:
    assert new_names(names, rename) == expected


@pytest.mark.parametrize(
    ("path", "old", "name", "expected"),
    [
        (("model", "0.weight"), "model.0.weight", "0.weight", ("0.weight",)),
        (("model", "0.weight"), "model.0.weight", "net.0.weight", ("net", "0.weight")),
        (("o", "groups", 0, "lr"), "o.groups.0.lr", "p.groups.0.lr", ("p", "groups", 0, "lr")),
        (("a", 0, "b"), "a.0.b", "0.b", ("0.b",)),
        (("a", "b"), "a.b", "c.d", ("c.d",)),
        (("a", "b"), "a.b", "a.b", ("a", "b")),
        # A path that does not spell its name is not kept.
        (("list", 7), "other.7", "new.7", ("new.7",)),
    ],
)
def test_the_path_of_a_renamed_value_keeps_the_end_of_its_name(
    path: Any, old: str, name: str, expected: Any
) -> None:
    assert new_path(path, old, name) == expected


def test_a_manager_restores_a_model_with_other_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    old = nn.ModuleDict({"body": nn.Linear(2, 3)})
    new = nn.ModuleDict({"backbone": nn.ModuleDict({"body": nn.Linear(2, 3)})})
    with torch_ckpt.CheckpointManager(tmp_path, interval=1) as manager:
        manager.save(1, {"model": old})
        manager.wait_until_finished()
        rename = {"model.body.*": "model.backbone.body.*"}
        assert manager.restore({"model": new}, rename=rename) == 1
    assert_equal(list(new.state_dict().values()), list(old.state_dict().values()))


#: The stored values, the values of the state, and the suggested renaming.
SUGGESTED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str] | None]] = {
    "DDP": (
        {"model": {"module.a.w": 1, "module.b": 2}, "step": 3},
        {"model": {"a.w": 0, "b": 0}, "step": 0},
        {"model.module.*": "model.*"},
    ),
    "torch.compile in the state": (
        {"model": {"a.w": 1, "b": 2}},
        {"model": {"_orig_mod.a.w": 0, "_orig_mod.b": 0}},
        {"model.*": "model._orig_mod.*"},
    ),
    "no key": (
        {"a.w": 1, "b": 2},
        {"model": {"a.w": 0, "b": 0}},
        {"*": "model.*"},
    ),
    "no key beside names that fit": (
        {"a.w": 1, "b": 2, "optimizer": {"lr": 3}, "step": 4},
        {"model": {"a.w": 0, "b": 0}, "optimizer": {"lr": 0}, "step": 0},
        {"optimizer.*": "optimizer.*", "step": "step", "*": "model.*"},
    ),
    "a prefix for two keys": (
        {"model": {"inner.a": 1}, "optimizer": {"state": {"inner.a": {"m": 2}}}},
        {"model": {"a": 0}, "optimizer": {"state": {"a": {"m": 0}}}},
        {"model.inner.*": "model.*", "optimizer.state.inner.*": "optimizer.state.*"},
    ),
    "other names": ({"model": {"x": 1, "y": 2}}, {"model": {"a": 0, "b": 0}}, None),
    "a part of the names": (
        {"model": {"module.a": 1, "module.b": 2}},
        {"model": {"a": 0, "b": 0, "c": 0}},
        None,
    ),
}


@pytest.mark.parametrize("case", SUGGESTED)
def test_a_rename_that_makes_all_names_fit_is_suggested(tmp_path: Path, case: str) -> None:
    stored, state, expected = SUGGESTED[case]
    save(stored, tmp_path)
    assert torch_ckpt.preflight(state, tmp_path).rename == expected
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load(state, tmp_path)
    assert ("differ only by prefixes: pass rename=" in str(caught.value)) == bool(expected)
    if expected:
        assert f"pass rename={expected}" in str(caught.value)
        assert torch_ckpt.load(state, tmp_path, rename=expected).fits  # type: ignore[union-attr]


def test_the_warning_of_skipped_names_suggests_a_rename(tmp_path: Path) -> None:
    save({"model": {"module.a": 1}, "step": 2}, tmp_path)
    with pytest.warns(match=r"model.a \(missing\). Pass rename=\{'model.module.\*': 'model.\*'\}"):
        torch_ckpt.load({"model.a": 0, "step": 0}, tmp_path, strict=False)


def test_rename_and_a_planner_exclude_each_other(saved: Path) -> None:
    planner = dcp.DefaultLoadPlanner()
    with pytest.raises(ValueError, match="rename and free_before_read do not work with a planner"):
        torch_ckpt.load(fresh(), saved, planner=planner, rename=RENAMES["mapping"])
