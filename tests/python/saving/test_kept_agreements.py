"""Plans that are reused, and changes that prevent reuse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import at_fault_points
from tests.forked import answer_of, forked
from torch_ckpt.ranks.meeting import Meeting
from torch_ckpt.saving.session import PlanCache

StateDict = dict[str, Any]


@pytest.fixture(autouse=True)
def no_plan_yet() -> Iterator[None]:
    PlanCache._of.pop(Meeting.of(None, no_dist=True), None)
    yield
    PlanCache._of.pop(Meeting.of(None, no_dist=True), None)


class Plans:
    """Counts the plans that the coordinator makes. The next one fails with ``error``."""

    made = 0
    error = 0

    def __call__(self, operation: str, _path: str) -> int:
        if operation != "plan of all ranks":
            return 0
        self.made += 1
        error, self.error = self.error, 0
        return error


@pytest.fixture
def plans() -> Iterator[Plans]:
    counting = Plans()
    with at_fault_points(counting):
        yield counting


def state(step: int) -> StateDict:
    return {
        "model": {"w": torch.full((4, 3), float(step)), "b": torch.zeros(0)},
        "step": step,
        "notes": ["a", {"of": step}],
    }


def save(path: Path, values: StateDict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_ckpt.async_save(values, path).result()


def assert_holds(path: Path, values: StateDict) -> None:
    found = state(-1) | {key: None for key in values if key not in state(0)}
    found["model"] = {name: torch.full_like(t, -1) for name, t in values["model"].items()}
    torch_ckpt.load(found, path)
    for name, tensor in values["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert {k: v for k, v in found.items() if k != "model"} == {
        k: v for k, v in values.items() if k != "model"
    }


def test_an_unchanged_structure_is_planned_once(tmp_path: Path, plans: Plans) -> None:
    for step in range(4):
        save(tmp_path / str(step), state(step))
    assert plans.made == 1
    for step in range(4):
        assert_holds(tmp_path / str(step), state(step))


@forked
def test_a_forked_child_makes_its_own_plan(tmp_path: Path) -> None:
    save(tmp_path / "parent", state(0))

    def plans_of_child() -> int:
        counting = Plans()
        with at_fault_points(counting):
            save(tmp_path / "child", state(1))
        return counting.made

    assert answer_of(plans_of_child) == 1
    assert_holds(tmp_path / "child", state(1))


def with_another_tensor(values: StateDict) -> StateDict:
    values["model"]["more"] = torch.ones(2)
    return values


def with_another_shape(values: StateDict) -> StateDict:
    values["model"]["w"] = torch.ones(3, 4)
    return values


def with_another_dtype(values: StateDict) -> StateDict:
    values["model"]["w"] = values["model"]["w"].to(torch.int32)
    return values


def with_another_object(values: StateDict) -> StateDict:
    values["epoch"] = 3
    return values


def without_a_tensor(values: StateDict) -> StateDict:
    del values["model"]["b"]
    return values


def in_another_order(values: StateDict) -> StateDict:
    values["model"] = dict(reversed(values["model"].items()))
    return values


@pytest.mark.parametrize(
    "change",
    [
        with_another_tensor,
        with_another_shape,
        with_another_dtype,
        with_another_object,
        without_a_tensor,
        in_another_order,
    ],
)
def test_a_changed_structure_is_planned_anew(tmp_path: Path, plans: Plans, change: Any) -> None:
    save(tmp_path / "before", state(1))
    save(tmp_path / "after", change(state(2)))
    assert plans.made == 2
    assert_holds(tmp_path / "after", change(state(2)))


def test_the_metadata_of_an_earlier_save_is_not_changed_by_a_later_one(tmp_path: Path) -> None:
    first = torch_ckpt.async_save(state(1), tmp_path / "first").result()
    places = dict(first.storage_data)
    names = list(first.state_dict_metadata)
    torch_ckpt.async_save(state(2), tmp_path / "second").result()
    assert first.storage_data == places
    assert list(first.state_dict_metadata) == names


def test_a_rank_that_missed_an_answer_gets_a_new_plan(tmp_path: Path, plans: Plans) -> None:
    save(tmp_path / "before", state(1))
    PlanCache.of(Meeting.of(None, no_dist=True)).number += 1
    save(tmp_path / "after", state(2))
    assert plans.made == 2
    assert_holds(tmp_path / "after", state(2))


def test_a_failed_plan_is_not_kept(tmp_path: Path, plans: Plans) -> None:
    plans.error = EIO
    with pytest.raises(CheckpointException, match="plan of all ranks"):
        save(tmp_path / "failed", state(1))
    save(tmp_path / "whole", state(2))
    assert plans.made == 2
    assert_holds(tmp_path / "whole", state(2))
