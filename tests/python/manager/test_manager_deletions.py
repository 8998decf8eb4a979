"""Tests of the steps that a manager keeps and deletes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from errno import EIO
from pathlib import Path

import pytest
import torch

from tests.fault_hooks import before, failing, held
from tests.forked import in_fork
from tests.local_steps import listed, saved
from tests.managers import (
    Make,
    Training,
    damage,
    finish,
    kinds,
    run_of,
    train,
)
from torch_ckpt import CheckpointError, Retention
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.events import Event
from torch_ckpt.manager.deletions import Deletions
from torch_ckpt.steps import LocalSteps


def test_the_best_steps_stay(make: Make) -> None:
    made = make(keep=Retention(keep_best=2, best_metric="loss"))
    training = Training()
    for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 5.0], 1):
        train(made, [step], training, metrics={"loss": loss})
    finish(made)
    assert made.all_steps() == [2, 4, 5]
    assert made.best_step() == 2


def test_a_pinned_step_stays_until_it_is_unpinned(make: Make) -> None:
    made = make(keep=1)
    training = Training()
    train(made, [1], training)
    made.wait_until_finished()
    made.pin(1)
    train(made, [2, 3], training)
    finish(made)
    assert made.all_steps() == [1, 3]
    assert [info.pinned for info in made.steps()] == [True, False]
    made.unpin(1)
    train(made, [4], training)
    finish(made)
    assert made.all_steps() == [4]


def test_the_step_that_was_verified_last_stays_unless_it_is_damaged(make: Make, root: Path) -> None:
    made = make(keep=1, interval=100)
    run_of(make, range(1, 4))
    damage(root, 2)
    assert made.verify(1).ok
    assert not made.verify(2).ok
    train(made, [4], force=True)
    finish(made)
    assert made.all_steps() == [1, 4]


def test_a_failed_deletion_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = make(keep=1)
    with failing("rmtree", EIO), caplog.at_level(logging.WARNING, "torch_ckpt"):
        train(made, [1, 2])
        finish(made)
    assert "step 1 could not be deleted" in caplog.text
    assert made.all_steps() == [2]


def test_a_step_can_be_deleted_explicitly(make: Make, root: Path) -> None:
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    with closing(OpenDirectory(root / "0000000001")) as reader:
        assert reader.share()
        with pytest.raises(CheckpointError, match=r"step 1 of .* is being saved or loaded"):
            made.delete(1)
    made.delete(1)
    made.delete(1)
    assert made.all_steps() == [2]


def test_a_save_without_enough_space_waits_for_deletions(make: Make, small_disk: Path) -> None:
    made = make(small_disk / "run", keep=1)
    state = {"x": torch.ones(3 << 18)}
    with held("rmtree") as gate:
        made.save(1, state)
        made.save(2, state)
        made.wait_until_finished()
        gate.wait()
        with before("wait for deletions", gate.open):
            made.save(3, state)
            made.wait_until_finished()
    finish(made)
    assert made.all_steps() == [3]


def test_a_run_on_a_full_disk_deletes_what_no_rule_keeps(make: Make, small_disk: Path) -> None:
    root = small_disk / "run"
    state = {"x": torch.zeros(1 << 19)}
    with make(root) as made:
        for step in (1, 2, 3):
            made.save(step, state)
    made = make(root, keep=1)
    assert made.restore(state) == 3
    made.save(4, state)
    finish(made)
    # Step 3 stays because the restore has verified it.
    assert made.all_steps() == [3, 4]
    made.close()


def test_leftovers_of_a_crash_are_removed_at_the_start_and_named(make: Make, root: Path) -> None:
    left = root / "0000000003.tmp-0a1b2c3d"
    left.mkdir(parents=True)
    (root / "notes.txt").touch()
    events: list[Event] = []
    finish(make(on_event=events.append))
    assert not left.exists()
    assert (root / "notes.txt").exists()
    assert kinds(events) == ["leftovers"]
    assert left.name in events[0].message


def test_leftovers_that_cannot_be_removed_do_not_stop_training(
    make: Make, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "0000000003.tmp-0a1b2c3d").mkdir(parents=True)
    with failing("rmtree", EIO):
        made = make()
        assert train(made, [1]) == [1]
        finish(made)
    assert "a leftover could not be removed" in caplog.text
    assert made.all_steps() == [1]


# --- the deleting thread, without a manager -------------------------------------------------------


ONE = [(1, "complete")]
TWO = [(2, "complete")]


def steps(root: Path) -> LocalSteps:
    """Makes a root with two steps."""
    store = LocalSteps(root)
    for step in (1, 2):
        saved(store, step)
    return store


@pytest.fixture
def store(tmp_path: Path) -> LocalSteps:
    return steps(tmp_path)


def deletions(
    store: LocalSteps, report: Callable[[Event], object] = lambda _event: None
) -> Deletions:
    def forward(event: Event) -> None:
        report(event)

    return Deletions(store, Retention(keep_last=1), forward)


@contextmanager
def read_elsewhere(store: LocalSteps) -> Iterator[None]:
    with closing(OpenDirectory(store.path_of(1))) as reader:
        assert reader.share()
        yield


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["here", "in another process"])
def test_a_step_being_read_stays_until_a_later_save(store: LocalSteps, is_elsewhere: bool) -> None:
    made = deletions(store)
    with read_elsewhere(store) if is_elsewhere else made.reading(1):
        made.after_commit(2)
        made.wait_until_idle()
        assert listed(store) == ONE + TWO
    made.after_commit(2)
    made.close()
    assert listed(store) == TWO


def test_a_callback_of_a_deletion_runs_further_work_at_once(store: LocalSteps) -> None:
    seen: list[list[tuple[int, str]]] = []
    made = deletions(store, lambda _event: made.run_in_order(lambda: seen.append(listed(store))))
    made.after_commit(2)
    made.close()
    assert seen == [TWO]


def test_a_callback_of_another_managers_deletion_waits_for_the_thread(tmp_path: Path) -> None:
    one, other = steps(tmp_path / "one"), steps(tmp_path / "other")
    seen: list[list[tuple[int, str]]] = []
    here = deletions(one)
    here.after_commit(2)
    elsewhere = deletions(other, lambda _event: here.run_in_order(lambda: seen.append(listed(one))))
    elsewhere.after_commit(2)
    elsewhere.close()
    here.close()
    assert seen == [TWO]


def test_a_step_that_is_pinned_during_the_deletions_stays(tmp_path: Path) -> None:
    store = steps(tmp_path)
    saved(store, 3)
    made = deletions(store, lambda _event: store.set_pinned(2, True))
    made.after_commit(3)
    made.close()
    assert listed(store) == [(2, "complete"), (3, "complete")]


def test_after_a_rewind_no_step_is_passed_until_training_reaches_it(store: LocalSteps) -> None:
    made = deletions(store)
    made.after_commit(1)
    made.after_commit(2)
    made.wait_until_idle()
    saved(store, 1)
    made.rewound(0)
    made.repeat()
    made.close()
    assert listed(store) == ONE + TWO


def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent(store: LocalSteps) -> None:
    made = deletions(store)
    made.wait_until_idle()
    in_fork(lambda: made.run_in_order(lambda: store.delete(1)))
    assert listed(store) == TWO
    made.close()
