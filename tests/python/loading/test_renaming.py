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
from torch_ckpt.loading.renaming import Rename, new_names, new_path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RENAMES: dict[str, Any] = {
    "mapping": {"encoder.*": "model.encoder.*", "step": "count"},
    "pairs": [("encoder.*", "model.encoder.*"), ("step", "count"), ("*.w", "*.never")],
    "function": lambda name: "count" if name == "step" else f"model.{name}",
}


def saved(path: Path) -> None:
    save({"encoder": {"w": torch.arange(4.0), "b": torch.ones(2)}, "step": 5}, path)


def fresh() -> dict[str, Any]:
    return {"model": {"encoder": {"w": torch.zeros(4), "b": torch.zeros(2)}}, "count": 0}


def refused(path: Path, rename: Rename, match: str) -> None:
    state = fresh()
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load(state, path, rename=rename)
    error = cause_of(caught.value)
    assert isinstance(error, ValueError)
    assert match in str(error)
    assert_equal(state, fresh())


@pytest.mark.parametrize("free", [False, True], ids=["", "free_before_read"])
@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_renamed_values_are_loaded(tmp_path: Path, rename: Any, free: bool) -> None:
    saved(tmp_path)
    state = fresh()
    report = torch_ckpt.load(state, tmp_path, rename=rename, free_before_read=free)
    assert state["count"] == 5
    assert_equal(state["model"], {"encoder": {"w": torch.arange(4.0), "b": torch.ones(2)}})
    assert report is not None
    assert sorted(report.loaded) == ["count", "model.encoder.b", "model.encoder.w"]


@pytest.mark.parametrize("option", ["zero_fill", "allow_shape_mismatch"])
def test_a_generator_of_pairs_renames_zero_filled_values(tmp_path: Path, option: str) -> None:
    saved(tmp_path)
    state = {"model": {"encoder": {"w": torch.ones(6)}}}
    pairs = zip(["encoder.*", "step"], ["model.encoder.*", "count"], strict=True)
    torch_ckpt.load(state, tmp_path, rename=pairs, **{option: True})
    assert_equal(state["model"]["encoder"]["w"], torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 0.0]))


def test_preflight_and_the_estimate_have_the_new_names(tmp_path: Path) -> None:
    saved(tmp_path)
    rename = RENAMES["mapping"]
    assert torch_ckpt.preflight(fresh(), tmp_path, rename=rename).unexpected == []
    assert torch_ckpt.preflight(fresh(), tmp_path).missing == [
        "model.encoder.w",
        "model.encoder.b",
        "count",
    ]
    memory = torch_ckpt.estimate_read_memory(fresh(), tmp_path, rename=rename)
    assert memory.target_bytes == 24


def test_names_selects_from_the_new_names(tmp_path: Path) -> None:
    saved(tmp_path)
    state = fresh()
    torch_ckpt.load(state, tmp_path, rename={"encoder.*": "model.encoder.*"}, names=["model.*"])
    assert_equal(state["model"]["encoder"]["w"], torch.arange(4.0))
    assert state["count"] == 0


def test_a_pattern_without_a_match_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    rename = {**RENAMES["mapping"], "enc.*": "x.*"}
    refused(tmp_path, rename, "no name matches 'enc.*'; the names are encoder.w, encoder.b, step")


def test_a_function_that_renames_nothing_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    refused(tmp_path, lambda name: name, "does not change any name")


@pytest.mark.parametrize("rename", [{"*.w": "*.b"}, lambda _: "encoder.b", {"encoder.w": "step"}])
def test_two_names_that_become_one_are_refused(tmp_path: Path, rename: Rename) -> None:
    saved(tmp_path)
    refused(tmp_path, rename, "both encoder.")


@pytest.mark.parametrize(
    ("rename", "match"),
    [
        ({"encoder.*": "model"}, "the old and the new name must have equally many"),
        ({"step": 3}, "must consist of pairs of str"),
        (lambda _: None, "must return a str for each name, got None for encoder.w"),
    ],
)
def test_a_rename_of_another_form_is_refused(tmp_path: Path, rename: Any, match: str) -> None:
    saved(tmp_path)
    refused(tmp_path, rename, match)


def test_the_first_matching_pair_is_used() -> None:
    pairs = [("a.*", "first.*"), ("*.b", "second.*")]
    assert new_names(["a.b", "c.b", "d"], pairs) == {
        "a.b": "first.b",
        "c.b": "second.c",
        "d": "d",
    }


def test_stars_stand_for_the_text_that_stars_at_their_positions_match() -> None:
    assert new_names(["h.3.attn.w"], {"h.*.attn.*": "layers.*.a.*"}) == {
        "h.3.attn.w": "layers.3.a.w"
    }


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        (("model", "0.weight"), "0.weight", ("0.weight",)),
        (("model", "0.weight"), "net.0.weight", ("net", "0.weight")),
        (
            ("optimizer", "param_groups", 0, "lr"),
            "o.param_groups.0.lr",
            ("o", "param_groups", 0, "lr"),
        ),
        (("a", 0, "b"), "0.b", ("0.b",)),
        (("a", "b"), "c.d", ("c.d",)),
        (("a", "b"), "a.b", ("a", "b")),
    ],
)
def test_the_path_of_a_renamed_value_keeps_the_end_of_its_name(
    path: Any, name: str, expected: Any
) -> None:
    assert new_path(path, ".".join(map(str, path)), name) == expected


def test_a_path_that_does_not_spell_its_name_is_not_kept() -> None:
    assert new_path(("list", 7), "other.7", "new.7") == ("new.7",)


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


def test_rename_and_a_planner_exclude_each_other(tmp_path: Path) -> None:
    saved(tmp_path)
    planner = dcp.DefaultLoadPlanner()
    with pytest.raises(ValueError, match="rename and free_before_read do not work with a planner"):
        torch_ckpt.load(fresh(), tmp_path, planner=planner, rename=RENAMES["mapping"])
