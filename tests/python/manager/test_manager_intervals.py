"""Tests of the steps that a manager saves, and of waiting for saves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from tests.fault_hooks import before
from tests.gates import LIMIT, Gate, eventually
from tests.managers import (
    LATER,
    Make,
    Training,
    finish,
    restored,
    run_of,
    train,
    training_of,
)
from torch_ckpt import CheckpointManager

# --- which steps ----------------------------------------------------------------------------------


def test_last_step_is_the_step_saved_or_restored_last(make: Make) -> None:
    made = make()
    assert made.last_step is None
    train(made, [1, 2])
    made.wait_until_finished()
    assert made.last_step == 2
    assert restored(made, 1) == 1
    assert made.last_step == 1


def test_a_step_counts_as_saved_once_its_save_has_ended(make: Make, held_commits: Gate) -> None:
    made = make()
    train(made, [1])
    assert made.last_step is None
    held_commits.open()
    made.wait_until_finished()
    assert made.last_step == 1


def test_a_step_whose_save_has_failed_does_not_count_as_saved(
    make: Make, broken: Callable[[], None]
) -> None:
    made = make(on_save_error="warn_and_continue")
    train(made, [1])
    made.wait_until_finished()
    assert made.save_errors == 1
    assert made.last_step is None


def test_steps_are_saved_by_the_interval_and_by_choice(make: Make) -> None:
    assert train(make(interval=3, save_on_steps=[4]), range(1, 8)) == [3, 4, 6]


def test_a_function_of_the_step_as_interval(make: Make) -> None:
    assert train(make(interval=lambda step: step in (2, 5)), range(1, 8)) == [2, 5]


@pytest.mark.parametrize(
    ("apart", "saves"), [(timedelta(microseconds=1), 2), (timedelta(days=9), 0)]
)
def test_a_timedelta_as_interval(make: Make, apart: timedelta, saves: int) -> None:
    # The second step begins a block, whose length depends on the time between the two steps.
    assert len(train(make(interval=apart), [1, 2])) == saves


def test_time_based_saves_continue_after_a_rewind(make: Make) -> None:
    made, training = make(interval=timedelta(microseconds=1)), Training()
    assert len(train(made, range(1, 200), training)) > 2
    first, last = made.all_steps()[0], made.all_steps()[-1]
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, first)
    # Blocks must start again. Otherwise no block would start before training passes the old steps.
    assert train(made, range(first + 1, last), training)


def test_auto_saves_at_once_and_then_by_measured_cost(make: Make, tmp_path: Path) -> None:
    seldom, training = make(tmp_path / "seldom", interval="auto"), Training()
    assert train(seldom, [1], training) == [1]
    seldom.wait_until_finished()
    assert train(seldom, range(2, 20), training) == []
    # Let saves cost nearly all of the time, so that they are frequent.
    often = make(tmp_path / "often", interval="auto", max_overhead=0.99, mtbf_hours=1e-9)
    assert train(often, [1], training) == [1]
    often.wait_until_finished()
    steps = itertools.count(2)
    eventually(lambda: bool(train(often, [next(steps)], training)))


def test_auto_does_not_wait_for_its_first_save(make: Make, held_commits: Gate) -> None:
    made, training = make(interval="auto"), Training()
    assert train(made, [1, 2, 3], training) == [1]
    assert made.is_saving


def test_force_saves_even_if_no_save_is_due(make: Make) -> None:
    made = make(interval=100)
    assert train(made, [1, 2]) == []
    assert train(made, [3], force=True) == [3]
    assert restored(made) == 3


def test_a_step_is_saved_once(make: Make) -> None:
    made, training = make(), training_of(1)
    assert made.save(1, training.state)
    assert not made.save(1, training.state)


def test_a_step_is_saved_again_by_force(make: Make) -> None:
    made, training = make(), training_of(1)
    made.save(1, training.state, notes={"n": 1})
    assert made.save(1, training.state, notes={"n": 2}, force=True)
    made.wait_until_finished()
    assert [info.notes for info in made.steps()] == [{"n": 2}]


def test_the_restored_step_is_not_saved_again(make: Make) -> None:
    run_of(make, [1, 2])
    made = make()
    assert restored(made) == 2
    assert not made.save(2, training_of(2).state)
    assert made.save(3, training_of(3).state)


def test_the_restored_step_may_be_saved_by_force(make: Make) -> None:
    run_of(make, [1, 2])
    made = make()
    training = Training()
    made.restore(training.state)
    assert made.save(2, training.state, force=True)
    made.wait_until_finished()
    assert restored(made) == 2


# --- waiting --------------------------------------------------------------------------------------


def test_a_save_waits_for_the_running_one(make: Make, held_commits: Gate) -> None:
    made, training = make(), Training()
    train(made, [1], training)
    with before("wait for a save", held_commits.open):
        assert train(made, [2], training) == [2]
    made.wait_until_finished()
    assert made.all_steps() == [1, 2]


def test_a_save_is_skipped_while_another_is_running(make: Make, held_commits: Gate) -> None:
    made, training = make(if_busy="skip", save_on_steps=[5]), Training()
    assert train(made, [1, 2, 3], training) == [1]
    assert made.is_saving
    held_commits.open()
    made.wait_until_finished()
    assert not made.is_saving
    assert train(made, [4], training) == [4]
    made.wait_until_finished()
    assert made.all_steps() == [1, 4]


def test_waiting_too_long_is_a_timeout_and_the_save_continues(
    make: Make, held_commits: Gate
) -> None:
    made = make()
    train(made, [1])
    with pytest.raises(TimeoutError, match=r"the save of step 1 did not end within 0\.01 s"):
        made.wait_until_finished(0.01)
    held_commits.open()
    made.wait_until_finished(LIMIT)
    assert made.all_steps() == [1]


def test_restore_waits_for_the_running_save(make: Make, held_commits: Gate) -> None:
    made = make()
    train(made, [1])
    with before("wait for a save", held_commits.open):
        assert restored(made) == 1


def test_wait_for_new_step_returns_a_new_step(make: Make, root: Path) -> None:
    evaluator = CheckpointManager(root, read_only=True)
    made, training = make(), Training()
    assert evaluator.wait_for_new_step(timeout=0.0) is None
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(evaluator.wait_for_new_step, timeout=LIMIT, poll_seconds=0.001)
        train(made, [1], training)
        assert waiting.result(LIMIT) == 1
        waiting = pool.submit(evaluator.wait_for_new_step, 1, timeout=LIMIT, poll_seconds=0.001)
        train(made, [2], training)
        assert waiting.result(LIMIT) == 2
    assert evaluator.wait_for_new_step(2, timeout=0.01, poll_seconds=0.001) is None


# --- two managers ---------------------------------------------------------------------------------


def test_two_managers_take_turns(make: Make, tmp_path: Path) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other", interval=2)
    training = Training()
    for step in range(1, 5):
        training.step()
        one.save(step, training.state)
        other.save(step, training.state)
    finish(one)
    finish(other)
    assert (one.all_steps(), other.all_steps()) == ([1, 2, 3, 4], [2, 4])
    assert [restored(one), restored(other)] == [4, 4]
