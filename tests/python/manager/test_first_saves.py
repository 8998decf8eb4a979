"""Tests of the first save of a manager: a forgotten restore, rewound training, a missing metric."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.managers import LATER, Training, finish, manager_of, state_of, until_stopped


def run_of(root: Path, steps: Any, **options: Any) -> None:
    """Runs a training to its end."""
    with manager_of(root, **options) as made:
        for step in steps:
            made.save(step, state_of(step))


def restored(root: Path) -> float:
    """Reads the value in the newest step."""
    state = state_of(0)
    with manager_of(root, read_only=True) as made:
        made.restore(state)
    return float(state["x"][0])


# --- a forgotten restore() -----------------------------------------------------------------------


@pytest.mark.parametrize("step", [2, 3])
def test_the_first_save_reports_a_forgotten_restore(tmp_path: Path, step: int) -> None:
    run_of(tmp_path, [1, 2, 3])
    with manager_of(tmp_path) as made:
        for force in (False, True):
            with pytest.raises(FileExistsError, match=r"steps up to 3\. Call restore\(\) before"):
                made.save(step, state_of(0), force=force)
        assert made.all_steps() == [1, 2, 3]
        assert made.restore(state_of(0)) == 3
        assert made.save(4, state_of(4))
    assert restored(tmp_path) == 4


def test_a_forgotten_restore_is_reported_even_if_no_save_is_due(tmp_path: Path) -> None:
    run_of(tmp_path, [1, 2, 3])
    with manager_of(tmp_path, interval=100) as made, pytest.raises(FileExistsError):
        made.save(1, state_of(1))


def test_a_run_may_continue_after_the_existing_steps(tmp_path: Path) -> None:
    run_of(tmp_path, [1, 2, 3])
    run_of(tmp_path, [4, 5])
    with manager_of(tmp_path, read_only=True) as made:
        assert made.all_steps() == [1, 2, 3, 4, 5]


def test_the_first_save_may_overwrite_existing_steps_on_request(tmp_path: Path) -> None:
    run_of(tmp_path, [1, 2, 3])
    with manager_of(tmp_path) as made:
        with pytest.warns(UserWarning, match=LATER):
            made.save(2, state_of(20), overwrite=True)
        made.save(3, state_of(30))
    assert restored(tmp_path) == 30


# --- steps that decrease -------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 100], ids=["saved", "not saved"])
def test_a_step_that_decreases_is_refused(tmp_path: Path, interval: int) -> None:
    with manager_of(tmp_path, interval=interval) as made:
        made.save(5, state_of(5))
        with pytest.raises(ValueError, match=r"step 4 .* after step 5: steps must not decrease"):
            made.save(4, state_of(4))
        made.save(6, state_of(6))
        with pytest.raises(ValueError, match="step 5 cannot be saved after step 6"):
            made.save(5, state_of(5))


def test_a_step_before_the_restored_one_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path, [1, 2, 3])
    with manager_of(tmp_path) as made:
        made.restore(state_of(0))
        with pytest.raises(ValueError, match="step 2 cannot be saved after step 3"):
            made.save(2, state_of(2))


def test_a_step_may_be_repeated(tmp_path: Path) -> None:
    with manager_of(tmp_path) as made:
        assert made.save(5, state_of(5))
        assert not made.save(5, state_of(5))


def test_after_restoring_an_earlier_step_its_successors_are_saved_again(tmp_path: Path) -> None:
    with manager_of(tmp_path) as made:
        for step in (1, 2, 3):
            made.save(step, state_of(step))
        with pytest.warns(UserWarning, match=LATER):
            made.restore(state_of(0), 1)
        assert made.save(2, state_of(20))
        assert made.save(3, state_of(30))
    assert restored(tmp_path) == 30


def test_stale_steps_stay_until_training_replaces_or_passes_them(
    tmp_path: Path,
) -> None:
    with manager_of(tmp_path, keep_last=4) as made:
        for step in (40, 50, 60, 70):
            made.save(step, state_of(step))
        with pytest.warns(UserWarning, match=r"from step 45, .*later steps \(\[50, 60, 70\]\)"):
            made.save(45, state_of(450), overwrite=True)
        finish(made)
        assert made.all_steps() == [40, 45, 50, 60, 70]
        made.save(50, state_of(500))
        finish(made)
        assert made.all_steps() == [40, 45, 50, 60, 70]
        made.save(65, state_of(650))
        finish(made)
        assert made.all_steps() == [40, 45, 50, 65, 70]
        state = state_of(0)
        made.restore(state, 50)
        assert float(state["x"][0]) == 500


def test_overwrite_without_newer_steps_is_a_normal_save(tmp_path: Path) -> None:
    with manager_of(tmp_path) as made:
        for step in (1, 2):
            made.save(step, state_of(step), overwrite=True)
    assert restored(tmp_path) == 2


# --- the metric of the best steps ----------------------------------------------------------------

BEST = {"keep_best": 2, "best_metric": "eval_los"}


@pytest.mark.parametrize("metrics", [{"eval_loss": 1.0}, None], ids=["misspelled", "not given"])
def test_the_first_save_without_the_metric_is_refused(tmp_path: Path, metrics: Any) -> None:
    with manager_of(tmp_path, **BEST) as made:
        with pytest.raises(ValueError, match=r"the metric 'eval_los'.* is missing") as caught:
            made.save(1, state_of(1), metrics=metrics)
        assert ("did you mean 'eval_loss'" in str(caught.value)) == (metrics is not None)
        assert made.steps() == []
        assert made.save(1, state_of(1), metrics={"eval_los": 1.0})


def test_nan_means_that_a_step_has_no_value_yet(tmp_path: Path) -> None:
    with manager_of(tmp_path, **BEST) as made:
        made.save(1, state_of(1), metrics={"eval_los": math.nan})
        # No step has a number yet, so the name may still be misspelled.
        with pytest.raises(ValueError, match="did you mean 'eval_loss'"):
            made.save(2, state_of(2), metrics={"eval_loss": 2.0})


def test_a_step_may_lack_a_metric_that_another_step_has(tmp_path: Path) -> None:
    with manager_of(tmp_path, **BEST) as made:
        made.save(1, state_of(1), metrics={"eval_los": 1.0})
        assert made.save(2, state_of(2))
    with manager_of(tmp_path, **BEST) as made:
        made.restore(state_of(0))
        assert made.save(3, state_of(3))


def test_steps_without_a_number_stay_until_enough_have_one_and_one_warning_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path, **BEST) as made:
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
    with manager_of(tmp_path, interval=10**6, preemption_signals=(signal.SIGUSR1,), **BEST) as made:
        signal.raise_signal(signal.SIGUSR1)
        stopped = until_stopped(made, 1, Training())
    assert "the metric 'eval_los', which keep_best compares, is missing" in caplog.text
    with manager_of(tmp_path, read_only=True) as made:
        assert made.all_steps() == [stopped]


def test_an_integer_too_large_for_a_float_is_refused_and_named(tmp_path: Path) -> None:
    with manager_of(tmp_path) as made:
        with pytest.raises(
            ValueError, match=r"metrics\['loss'\] is an integer too large for a float"
        ):
            made.save(1, state_of(1), metrics={"loss": 10**400})
        assert made.steps() == []
