"""A manager, ``save`` and stock torch store plain values in one layout, which all of them load."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.programs import State
from tests.support import assert_equal, cause_of, stock_load, stock_save
from torch_ckpt import LoadMismatch

pytestmark = pytest.mark.filterwarnings("error", "ignore:torch.distributed is disabled")

Save = Callable[[State, Path], Path]
Load = Callable[[State, Path], None]


# --- ways to save and to load ---------------------------------------------------------------------


def by_manager(state: State, root: Path) -> Path:
    with torch_ckpt.CheckpointManager(root / "run") as manager:
        manager.save(3, state)
        manager.wait_until_finished()
        return Path(manager.steps()[0].path)


def by_save(state: State, root: Path) -> Path:
    torch_ckpt.save(state, root / "saved")
    return root / "saved"


def by_async_checkpoint(state: State, root: Path) -> Path:
    checkpoint = torch_ckpt.AsyncCheckpoint(**state)
    checkpoint.write(root / "written")
    checkpoint.sync()
    return root / "written"


def by_stock(state: State, root: Path) -> Path:
    stock_save(state, root / "stock")
    return root / "stock"


def restore_by_manager(state: State, step: Path) -> None:
    options = torch_ckpt.ReadOptions(allow_pickle=True)
    with torch_ckpt.CheckpointManager(step.parent, read=options) as manager:
        assert manager.restore(state) == 3


def load_by_load(state: State, path: Path) -> None:
    torch_ckpt.load(state, path, options=torch_ckpt.ReadOptions(allow_pickle=True))


PAIRS = [(by_manager, restore_by_manager), (by_save, load_by_load), (by_stock, stock_load)]
#: The last pair is stock torch, whose outcome the others must have.
CROSSED = [*PAIRS, (by_manager, stock_load), (by_manager, load_by_load), (by_stock, load_by_load)]


def plain(seed: float) -> State:
    return {
        "steps": int(seed),
        "nothing": None,
        "losses": [seed, 0.25],
        "pair": (seed, "two"),
        "tensor": torch.full((3,), seed),
        "nested": {"tensor": torch.full((2,), seed), "d": {"a": int(seed)}, "name": str(seed)},
        "ordered": OrderedDict(b=torch.full((1,), seed), a=int(seed)),
        "list": [torch.full((2,), seed), int(seed), {"x": seed}],
    }


def metadata_of(path: Path) -> Metadata:
    return dcp.FileSystemReader(path).read_metadata()


# --- plain values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("saves", [by_manager, by_save, by_async_checkpoint])
def test_plain_values_have_the_names_and_paths_of_stock(tmp_path: Path, saves: Save) -> None:
    found, expected = (
        metadata_of(saves(plain(1), tmp_path)),
        metadata_of(by_stock(plain(1), tmp_path)),
    )
    assert found.planner_data is not None
    assert expected.planner_data is not None
    counter = {"save_counter"} if saves is by_async_checkpoint else set()
    assert found.planner_data.keys() == expected.planner_data.keys() | counter
    for name, path in expected.planner_data.items():
        assert found.planner_data[name] == path
        assert type(found.state_dict_metadata[name]) is type(expected.state_dict_metadata[name])


@pytest.mark.parametrize(("saves", "loads"), CROSSED)
def test_plain_values_are_filled_in_place(tmp_path: Path, saves: Save, loads: Load) -> None:
    path = saves(plain(1), tmp_path)
    state = plain(5)
    nested, ordered, tensors = (
        state["nested"],
        state["ordered"],
        [state["tensor"], state["list"][0]],
    )
    loads(state, path)
    assert_equal(state, plain(1))
    assert state["nested"] is nested
    assert state["ordered"] is ordered
    assert state["tensor"] is tensors[0]
    assert state["list"][0] is tensors[1]


@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_a_name_that_the_checkpoint_lacks_is_refused(
    tmp_path: Path, saves: Save, loads: Load
) -> None:
    path = saves({"plain": {"a": 1}}, tmp_path)
    state: State = {"plain": {"a": 0, "b": 0}}
    with pytest.raises(CheckpointException) as caught:
        loads(state, path)
    assert "Missing key in checkpoint state_dict: plain.b." in str(cause_of(caught.value))
    if loads is not stock_load:
        error = cause_of(caught.value)
        assert isinstance(error, LoadMismatch)
        assert error.report.missing == ["plain.b"]
        assert state == {"plain": {"a": 0, "b": 0}}


def test_a_name_that_the_state_lacks_is_restored_by_a_manager_and_reported_by_load(
    tmp_path: Path,
) -> None:
    path = by_manager({"plain": {"a": 1, "b": 2}, "other": 3}, tmp_path)
    state: State = {"plain": {"a": 0}}
    report = torch_ckpt.load(state, path)
    assert isinstance(report, torch_ckpt.LoadReport)
    assert report.unexpected == ["plain.b", "other"]
    assert state == {"plain": {"a": 1}}
    restore_by_manager(state, path)
    assert state == {"plain": {"a": 1, "b": 2}}


# --- objects --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:an object was saved that a load will refuse")
@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_an_object_with_a_state_within_a_dict_is_pickled(
    tmp_path: Path, saves: Save, loads: Load
) -> None:
    saved = nn.Linear(2, 2)
    path = saves({"nested": {"model": saved, "n": 1}}, tmp_path)
    state: State = {"nested": {"model": nn.Linear(2, 2), "n": 0}}
    loads(state, path)
    assert state["nested"]["n"] == 1
    assert_equal(state["nested"]["model"].state_dict(), saved.state_dict())


@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_tied_tensors_stay_tied(tmp_path: Path, saves: Save, loads: Load) -> None:
    def tied(value: float) -> State:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        nn.init.constant_(model[0].weight, value)
        tensor = torch.full((2,), value)
        return {"model": model, "averages": {"one": tensor, "other": tensor}}

    path = saves(tied(1.0), tmp_path)
    state = tied(5.0)
    loads(state, path)
    assert_equal(state["model"].state_dict(), tied(1.0)["model"].state_dict())
    assert_equal(state["averages"], tied(1.0)["averages"])
    assert state["model"][1].weight is state["model"][0].weight
    assert state["averages"]["one"] is state["averages"]["other"]


@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_schedulers_and_integers_are_restored(tmp_path: Path, saves: Save, loads: Load) -> None:
    def program(steps: int) -> State:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        return {"scheduler": scheduler, "steps": steps}

    saved, state = program(5), program(1)
    expected = copy.deepcopy(saved["scheduler"].state_dict())
    loads(state, saves(saved, tmp_path))
    assert_equal(state["scheduler"].state_dict(), expected)
    assert state["steps"] == 5
    assert type(state["steps"]) is int
