"""Tests of the steps that a manager saves or refuses, and of waiting for saves."""

from __future__ import annotations

import itertools
import math
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.fault_hooks import before
from tests.gates import LIMIT, Gate, eventually
from tests.managers import (
    LATER,
    Make,
    Training,
    finish,
    manager_of,
    restored,
    run_of,
    state_of,
    train,
    training_of,
    until_stopped,
)
from torch_ckpt import CheckpointManager, Retention
from torch_ckpt.manager import AutoInterval, Preemption, SaveOptions

# --- which steps ----------------------------------------------------------------------------------


def test_last_step_is_the_step_saved_or_restored_last(make: Make, held_commits: Gate) -> None:
    made = make()
    train(made, [1])
    assert made.last_step is None
    held_commits.open()
    made.wait_until_finished()
    assert made.last_step == 1
    train(made, [2])
    made.wait_until_finished()
    assert made.last_step == 2
    assert restored(made, 1) == 1
    assert made.last_step == 1


def test_steps_are_saved_by_the_interval_by_choice_and_by_force(make: Make) -> None:
    made, training = make(interval=3, saves=SaveOptions(save_on_steps=[4])), Training()
    assert train(made, range(1, 8), training) == [3, 4, 6]
    assert train(made, [8], training, force=True) == [8]
    assert restored(made) == 8


def test_auto_saves_at_once_then_by_cost(make: Make, tmp_path: Path, held_commits: Gate) -> None:
    seldom, training = make(tmp_path / "seldom", interval="auto"), Training()
    # The next steps do not wait for the first save.
    assert train(seldom, [1, 2, 3], training) == [1]
    assert seldom.is_saving
    held_commits.open()
    seldom.wait_until_finished()
    assert train(seldom, range(4, 20), training) == []
    # Let saves cost nearly all of the time, so that they are frequent.
    often = make(tmp_path / "often", interval=AutoInterval(max_overhead=0.99, mtbf_hours=1e-9))
    assert train(often, [1], training) == [1]
    often.wait_until_finished()
    steps = itertools.count(2)
    eventually(lambda: bool(train(often, [next(steps)], training)))


def test_a_step_is_saved_again_only_by_force(make: Make) -> None:
    made, training = make(), training_of(1)
    assert made.save(1, training.state, notes={"n": 1})
    assert not made.save(1, training.state)
    assert made.save(1, training.state, notes={"n": 2}, force=True)
    made.wait_until_finished()
    assert [info.notes for info in made.steps()] == [{"n": 2}]


def test_the_restored_step_is_saved_again_only_by_force(make: Make) -> None:
    run_of(make, [1, 2])
    made, training = make(), Training()
    assert made.restore(training.state) == 2
    assert not made.save(2, training.state)
    assert made.save(2, training.state, force=True)
    assert restored(made) == 2
    assert train(made, [3], training) == [3]


# --- waiting --------------------------------------------------------------------------------------


def test_a_save_waits_for_the_running_one(make: Make, held_commits: Gate) -> None:
    made, training = make(), Training()
    train(made, [1], training)
    with before("wait for a save", held_commits.open):
        assert train(made, [2], training) == [2]
    made.wait_until_finished()
    assert made.all_steps() == [1, 2]


def test_after_a_timeout_of_a_wait_the_save_continues(make: Make, held_commits: Gate) -> None:
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


def save_all(root: Path, steps: Any, **options: Any) -> None:
    """Runs a training to its end."""
    with manager_of(root, **options) as made:
        for step in steps:
            made.save(step, state_of(step))


def newest_value(root: Path) -> float:
    """Reads the value in the newest step."""
    state = state_of(0)
    with manager_of(root, read_only=True) as made:
        made.restore(state)
    return float(state["x"][0])


# --- a forgotten restore() -----------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("interval", [1, 100], ids=["due", "not due"])
def test_the_first_save_reports_a_missing_restore(tmp_path: Path, step: int, interval: int) -> None:
    save_all(tmp_path, [1, 2, 3])
    with manager_of(tmp_path, interval=interval) as made:
        for force in (False, True):
            with pytest.raises(FileExistsError, match=r"steps up to 3\. Call restore\(\) before"):
                made.save(step, state_of(0), force=force)
        assert made.all_steps() == [1, 2, 3]
        assert made.restore(state_of(0)) == 3
        assert made.save(4, state_of(4), force=True)
    assert newest_value(tmp_path) == 4


def test_a_run_may_continue_after_the_existing_steps(tmp_path: Path) -> None:
    save_all(tmp_path, [1, 2, 3])
    save_all(tmp_path, [4, 5])
    with manager_of(tmp_path, read_only=True) as made:
        assert made.all_steps() == [1, 2, 3, 4, 5]


def test_a_save_may_overwrite_existing_steps_on_request(tmp_path: Path) -> None:
    with manager_of(tmp_path) as made:
        for step in (1, 2, 3):
            made.save(step, state_of(step), overwrite=True)
    assert newest_value(tmp_path) == 3
    with manager_of(tmp_path) as made:
        with pytest.warns(UserWarning, match=LATER):
            made.save(2, state_of(20), overwrite=True)
        made.save(3, state_of(30))
    assert newest_value(tmp_path) == 30


# --- steps that decrease -------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 100], ids=["saved", "not saved"])
def test_a_step_that_decreases_is_refused(tmp_path: Path, interval: int) -> None:
    save_all(tmp_path, [1, 2, 3])
    with manager_of(tmp_path, interval=interval) as made:
        made.restore(state_of(0))
        with pytest.raises(ValueError, match="step 2 cannot be saved after step 3"):
            made.save(2, state_of(2))
        made.save(5, state_of(5))
        with pytest.raises(ValueError, match=r"step 4 .* after step 5: steps must not decrease"):
            made.save(4, state_of(4))


def test_stale_steps_stay_until_training_replaces_or_passes_them(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep=4) as made:
        for step in (40, 50, 60, 70):
            made.save(step, state_of(step))
        with pytest.warns(UserWarning, match=r"from step 45, .*later steps \(\[50, 60, 70\]\)"):
            made.save(45, state_of(450), overwrite=True)
        for step, stay in (
            (45, [40, 45, 50, 60, 70]),
            (50, [40, 45, 50, 60, 70]),
            (65, [40, 45, 50, 65, 70]),
        ):
            made.save(step, state_of(step * 10))
            finish(made)
            assert made.all_steps() == stay
        state = state_of(0)
        made.restore(state, 50)
        assert float(state["x"][0]) == 500


# --- the metric of the best steps ----------------------------------------------------------------

BEST = Retention(keep_best=2, best_metric="eval_los")


@pytest.mark.parametrize("metrics", [{"eval_loss": 1.0}, None], ids=["misspelled", "not given"])
def test_the_first_save_without_the_metric_is_refused(tmp_path: Path, metrics: Any) -> None:
    with manager_of(tmp_path, keep=BEST) as made:
        with pytest.raises(ValueError, match=r"the metric 'eval_los'.* is missing") as caught:
            made.save(1, state_of(1), metrics=metrics)
        assert ("did you mean 'eval_loss'" in str(caught.value)) == (metrics is not None)
        assert made.steps() == []
        assert made.save(1, state_of(1), metrics={"eval_los": 1.0})


def test_a_step_may_lack_the_metric_once_another_step_has_a_number(tmp_path: Path) -> None:
    with manager_of(tmp_path, keep=BEST) as made:
        made.save(1, state_of(1), metrics={"eval_los": math.nan})
        # No step has a number yet, so the name may still be misspelled.
        with pytest.raises(ValueError, match="did you mean 'eval_loss'"):
            made.save(2, state_of(2), metrics={"eval_loss": 2.0})
        made.save(2, state_of(2), metrics={"eval_los": 1.0})
        assert made.save(3, state_of(3))
    with manager_of(tmp_path, keep=BEST) as made:
        made.restore(state_of(0))
        assert made.save(4, state_of(4))


def test_steps_without_a_number_stay_until_enough_have_one_and_one_warning_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path, keep=BEST) as made:
        for step, loss in enumerate([math.nan, math.nan, 3.0, None], 1):
            made.save(step, state_of(step), metrics={} if loss is None else {"eval_los": loss})
            finish(made)
        assert made.all_steps() == [1, 2, 3, 4]
        made.save(5, state_of(5), metrics={"eval_los": 4.0})
        finish(made)
        assert made.all_steps() == [3, 5]
    assert caplog.text.count("have no number for the metric eval_los") == 1


def test_the_save_before_preemption_works_without_the_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(
        tmp_path, interval=10**6, preemption=Preemption(signals=(signal.SIGUSR1,)), keep=BEST
    ) as made:
        signal.raise_signal(signal.SIGUSR1)
        stopped = until_stopped(made, 1, Training())
    assert "the metric 'eval_los', which keep_best compares, is missing" in caplog.text
    with manager_of(tmp_path, read_only=True) as made:
        assert made.all_steps() == [stopped]
