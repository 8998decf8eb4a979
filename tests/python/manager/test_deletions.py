"""Tests of the background deletions of rank 0, without a manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.python.cli.test_cli_steps import save_step, steps_of
from torch_ckpt.events import Event
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.retention import Retention
from torch_ckpt.steps import LocalSteps


def deletions(root: Path, report: Callable[[Event], object] = lambda _event: None) -> Deletions:
    def forward(event: Event) -> None:
        report(event)

    return Deletions(LocalSteps(root), Retention(keep_last=1), forward)


def test_steps_that_no_rule_keeps_are_deleted_after_a_commit(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path, step)
    made = deletions(tmp_path)
    made.after_commit(3, lambda: None)
    made.close()
    assert steps_of(tmp_path) == [3]


@pytest.mark.parametrize("error", [OSError("the store is gone"), RuntimeError("it is over")])
def test_keys_that_cannot_be_removed_are_logged_and_block_no_deletion(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)

    def forget() -> None:
        raise error

    made = deletions(tmp_path)
    made.after_commit(2, forget)
    made.close()
    assert steps_of(tmp_path) == [2]
    assert str(error) in caplog.text


def test_a_step_that_is_being_read_stays_until_a_later_save(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    made = deletions(tmp_path)
    with made.reading(1):
        made.after_commit(2, lambda: None)
        made.wait_until_idle()
    assert steps_of(tmp_path) == [1, 2]
    made.after_commit(2, lambda: None)
    made.close()
    assert steps_of(tmp_path) == [2]


def test_a_callback_of_a_deletion_runs_further_work_at_once(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path, step)
    seen: list[list[int]] = []
    made = deletions(
        tmp_path, lambda _event: made.run_in_order(lambda: seen.append(steps_of(tmp_path)))
    )
    made.after_commit(2, lambda: None)
    made.close()
    assert seen == [[2]]


def test_a_callback_of_another_managers_deletion_waits_for_the_deleting_thread(
    tmp_path: Path,
) -> None:
    for root in ("a", "b"):
        for step in (1, 2):
            save_step(tmp_path / root, step)
    seen: list[list[int]] = []
    here = deletions(tmp_path / "a")
    here.after_commit(2, lambda: None)
    elsewhere = deletions(
        tmp_path / "b",
        lambda _event: here.run_in_order(lambda: seen.append(steps_of(tmp_path / "a"))),
    )
    elsewhere.after_commit(2, lambda: None)
    elsewhere.close()
    here.close()
    assert seen == [[2]]
