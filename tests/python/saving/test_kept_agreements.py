"""Plans that are reused, and changes that prevent reuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from errno import EIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import at_fault_points
from tests.forked import answer_of, forked
from tests.support import assert_equal, emptied
from torch_ckpt import _core
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.saving.agreed_plan import AgreedPlan

StateDict = dict[str, Any]


@pytest.fixture(autouse=True)
def no_plan_yet() -> Iterator[None]:
    AgreedPlan._of.pop(RankGroup.of(None, no_dist=True), None)
    yield
    AgreedPlan._of.pop(RankGroup.of(None, no_dist=True), None)


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
    found = emptied(values)
    torch_ckpt.load(found, path)
    assert_equal(found, values)


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


CHANGES: dict[str, Callable[[StateDict], Any]] = {
    "another tensor": lambda values: values["model"].update(more=torch.ones(2)),
    "another shape": lambda values: values["model"].update(w=torch.ones(3, 4)),
    "another dtype": lambda values: values["model"].update(w=torch.ones(4, 3, dtype=torch.int32)),
    "gradients": lambda values: values["model"]["w"].requires_grad_(),
    "another object": lambda values: values.update(epoch=3),
    "an object for a tensor": lambda values: values["model"].update(b=2),
    "a tensor for an object": lambda values: values.update(step=torch.ones(1)),
    "a tensor less": lambda values: values["model"].pop("b"),
    "another order": lambda values: values["model"].update(w=values["model"].pop("w")),
    "another way to a name": lambda values: values.update({"model.b": values["model"].pop("b")}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_planned_anew(tmp_path: Path, plans: Plans, change: str) -> None:
    save(tmp_path / "before", state(1))
    changed = state(2)
    CHANGES[change](changed)
    save(tmp_path / "after", changed)
    assert plans.made == 2
    assert_holds(tmp_path / "after", changed)


def test_ranks_send_their_parts_again_if_the_coordinator_has_another_plan(
    tmp_path: Path, plans: Plans
) -> None:
    save(tmp_path / "before", state(1))
    AgreedPlan.of(RankGroup.of(None, no_dist=True)).coordinator = _core.SaveCoordinator()
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
