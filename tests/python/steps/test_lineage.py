"""Orders of steps of several runs, and their restores."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.managers import damage, finish, manager_of, state_of
from tests.support import no_warnings
from torch_ckpt import CheckpointError, Retention
from torch_ckpt.checkpoint.lineage import by_lineage, describe_mixture
from torch_ckpt.cli.steps import collect, delete
from torch_ckpt.steps import LocalSteps, StepInfo
from torch_ckpt.training import load_checkpoint_if_it_exists


def infos(*steps: tuple[int, int | None]) -> list[StepInfo]:
    """Makes steps of numbers and epochs."""
    return [
        StepInfo(step, f"{step:010d}", "complete", epoch=epoch, run=f"process {epoch}")
        for step, epoch in steps
    ]


@pytest.mark.parametrize(
    ("steps", "current", "abandoned"),
    [
        ([], [], []),
        ([(1, 0), (2, 0), (3, 1), (4, 5)], [4, 3, 2, 1], []),
        # A run that was taken over has written later.
        ([(1, 1), (2, 2), (3, 2), (4, 1)], [3, 2, 1], [4]),
        ([(1, 1), (2, 1), (3, 2), (4, 1), (5, 1)], [3, 2, 1], [5, 4]),
        # Three lineages.
        ([(1, 1), (2, 3), (3, 2), (4, 1)], [2, 1], [4, 3]),
        # A user has made a checkpoint a step.
        ([(1, 1), (2, 2), (3, None)], [3, 2, 1], []),
        ([(1, None), (2, 2)], [2, 1], []),
        ([(2, None)], [2], []),
    ],
)
def test_the_newest_step_of_the_highest_epoch_comes_first(
    steps: list[tuple[int, int | None]], current: list[int], abandoned: list[int]
) -> None:
    found = by_lineage(infos(*steps))
    assert [[info.step for info in each] for each in found] == [current, abandoned]


def test_a_mixture_is_described_with_the_runs_and_their_steps() -> None:
    assert describe_mixture(*by_lineage(infos((1, 1), (2, 2)))) == ""
    text = describe_mixture(*by_lineage(infos((1, 1), (2, 2), (3, 2), (4, 1), (5, 1))))
    assert "process 1 (epoch 1) saved steps 4, 5; process 2 (epoch 2) saved step 3." in text
    assert "The newest step of the highest epoch, 3, counts as the newest step" in text


class Incomparable(StepInfo):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("thousands of steps must not be compared with each other")

    __hash__ = None  # type: ignore[assignment]


def test_a_mixture_is_described_without_comparing_all_its_steps_with_each_other() -> None:
    steps = [
        Incomparable(step, f"{step:010d}", "complete", epoch=1 if step > 1 else 2)
        for step in range(1, 4)
    ]
    assert "(epoch 1) saved steps 2, 3" in describe_mixture(*by_lineage(steps))


def of_epoch(root: Path, step: int, epoch: int | None, run: str = "") -> None:
    """Rewrites the marker of a step."""
    path = root / f"{step:010d}" / "write_completed"
    marker: dict[str, Any] = json.loads(path.read_bytes())
    del marker["epoch"], marker["run"]
    path.write_text(json.dumps(marker if epoch is None else marker | {"epoch": epoch, "run": run}))


@pytest.fixture
def mixed(root: Path) -> Path:
    """Steps 1 to 5, of which a run that was taken over has written 4 and 5."""
    with manager_of(root) as made:
        for step in range(1, 6):
            made.save(step, state_of(step))
    for step, epoch in ((1, 1), (2, 2), (3, 2), (4, 1), (5, 1)):
        of_epoch(root, step, epoch, f"process {epoch} on host h")
    return root


def test_a_restore_of_mixed_runs_takes_the_newest_step_of_the_highest_epoch_and_warns_once(
    mixed: Path,
) -> None:
    with manager_of(mixed) as made:
        state = state_of(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert made.restore(state) == 3
        assert torch.equal(state["x"], state_of(3)["x"])
        [text] = [str(each.message) for each in caught]
        assert "process 1 on host h (epoch 1) saved steps 4, 5" in text
        assert "process 2 on host h (epoch 2) saved step 3" in text
        # The steps of the other run are stale, and are replaced.
        assert made.save(4, state)
    with manager_of(mixed) as made, pytest.warns(UserWarning, match=r"\(epoch 1\) saved step 5"):
        assert made.restore(state_of(0)) == 4


def test_each_function_that_finds_the_newest_step_finds_the_one_of_the_highest_epoch(
    mixed: Path,
) -> None:
    found: dict[str, int | None] = {}
    with manager_of(mixed, read_only=True) as made:
        found["latest_step"] = made.latest_step()
        found["wait_for_new_step"] = made.wait_for_new_step()
    state = state_of(0)
    torch_ckpt.load(state, mixed, no_dist=True)
    found["load"] = int(state["x"][0])
    with pytest.raises(dcp.CheckpointException, match="the newest step is 3"):
        torch_ckpt.load(state, mixed / "7", no_dist=True)
    with pytest.warns(UserWarning, match=r"process 1 on host h \(epoch 1\) saved steps 4, 5"):
        found["load_checkpoint_if_it_exists"] = load_checkpoint_if_it_exists(mixed, state_of(0))
    reasons = Retention(keep_every=100).reasons(LocalSteps(mixed).entries())
    [found["Retention"]] = [step for step, why in reasons.items() if why]
    with pytest.raises(CheckpointError, match="step 3 is the newest step"):
        delete(LocalSteps(mixed), [3])
    with pytest.raises(FileNotFoundError, match="the newest step is 3"):
        delete(LocalSteps(mixed), [7])
    assert set(found.values()) == {3}, found


def test_the_rules_do_not_count_abandoned_steps_as_last_steps(mixed: Path) -> None:
    report = collect(LocalSteps(mixed), Retention(keep_last=2))
    assert report.kept == {2: ["last 2"], 3: ["the newest", "last 2"]}
    with manager_of(mixed) as made, no_warnings():
        assert made.restore(state_of(0)) == 3


def test_an_evaluation_that_waits_sees_the_step_of_a_run_that_has_rewound_training(
    mixed: Path,
) -> None:
    with manager_of(mixed, read_only=True) as made:
        # Steps 4 and 5 are abandoned.
        assert made.wait_for_new_step(5, timeout=0) == 3
        assert made.wait_for_new_step(3, timeout=0) is None
        assert made.wait_for_new_step(2, timeout=0) == 3
        assert made.wait_for_new_step(6, timeout=0) is None


def test_an_abandoned_step_before_the_newest_one_displaces_no_other(root: Path) -> None:
    with manager_of(root) as made:
        for step in (1, 2, 3, 5):
            made.save(step, state_of(step))
    for step, epoch in ((1, 1), (2, 2), (3, 1), (5, 2)):
        of_epoch(root, step, epoch)
    # Run 2 has continued from step 1, and has passed step 3 of run 1.
    with manager_of(root, keep=3) as made:
        with pytest.warns(UserWarning, match="the steps of several runs are mixed"):
            assert made.restore(state_of(0)) == 5
        made.save(6, state_of(6))
        finish(made)
        assert made.all_steps() == [2, 5, 6]


@pytest.mark.filterwarnings("ignore:.*the steps of several runs are mixed")
def test_a_damaged_step_falls_back_along_its_lineage_and_then_to_the_abandoned_one(
    mixed: Path,
) -> None:
    for step in (3, 2, 1):
        damage(mixed, step)
        with manager_of(mixed) as made, pytest.warns(UserWarning, match="falling back to step"):
            assert made.restore(state_of(0)) == {3: 2, 2: 1, 1: 5}[step]


def test_a_step_can_be_chosen_from_mixed_runs_without_a_warning_of_the_mixture(
    mixed: Path,
) -> None:
    with manager_of(mixed) as made, no_warnings():
        assert made.restore(state_of(0), 5) == 5


def test_the_unfinished_step_of_a_superseded_run_is_not_completed(root: Path) -> None:
    with manager_of(root) as made:
        for step in (1, 2, 3):
            made.save(step, state_of(step))
    of_epoch(root, 2, 2)
    of_epoch(root, 3, 1)
    (root / "0000000003").rename(root / "0000000003.tmp-0a1b2c3d")
    with manager_of(root) as made:
        assert made.restore(state_of(0)) == 2
        assert [info.step for info in made.steps()] == [1, 2]
