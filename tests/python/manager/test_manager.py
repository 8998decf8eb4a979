"""Tests of CheckpointManager in one process: saves, restores, and refused calls."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from errno import EACCES, EROFS
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.fault_hooks import failing
from tests.forked import run_script
from tests.gates import LIMIT, Gate
from tests.managers import (
    Make,
    Training,
    finish,
    manager_of,
    restored,
    run_of,
    train,
    training_of,
)
from tests.support import assert_equal, data_files
from torch_ckpt import CheckpointManager
from torch_ckpt.steps.root_lease import LEASE_NAME

# --- saving and restoring -------------------------------------------------------------------------


def test_the_ten_line_loop_resumes_at_its_last_step(root: Path) -> None:
    first_steps = []
    for until in (5, 12):
        with CheckpointManager(root, interval=4, preemption_signals=()) as made:
            training = Training()
            first = made.restore(training.state)
            first_steps.append(first)
            assert_equal(training.values(), training_of(first).values())
            train(made, range(first + 1, until + 1), training)
            assert not made.should_stop
    assert first_steps == [0, 4]
    with CheckpointManager(root, read_only=True) as made:
        assert made.all_steps() == [4, 8, 12]
        assert restored(made) == 12


def test_restoring_from_an_empty_root_leaves_the_state_unchanged(make: Make) -> None:
    training = training_of(3)
    assert make().restore(training.state) == 0
    assert_equal(training.values(), training_of(3).values())


def test_steps_can_be_listed_before_the_first_save(make: Make) -> None:
    made = make(keep_best=1, best_metric="loss")
    assert (made.all_steps(), made.steps(), made.latest_step(), made.best_step()) == (
        [],
        [],
        None,
        None,
    )
    assert not made.is_saving
    made.wait_until_finished()
    made.check_for_errors()
    made.wait_until_staged()
    for ask in (made.metrics, made.metadata, made.verify):
        with pytest.raises(FileNotFoundError):
            ask(1)


def test_the_state_may_change_as_soon_as_save_returns(make: Make, held_commits: Gate) -> None:
    made, training = make(), training_of(2)
    assert made.save(2, training.state)
    training.step()
    held_commits.open()
    made.wait_until_finished()
    assert restored(made) == 2


def test_metrics_and_notes_may_change_as_soon_as_save_returns(
    make: Make, held_commits: Gate
) -> None:
    made = make()
    metrics, notes = {"loss": 1.0}, {"seen": [1], "n": {}}
    made.save(1, training_of(1).state, metrics=metrics, notes=notes)
    metrics["loss"] = 2.0
    notes["seen"].append(2)
    notes["n"]["m"] = threading.Lock()
    held_commits.open()
    made.wait_until_finished()
    [info] = made.steps()
    assert (info.metrics, info.notes) == ({"loss": 1.0}, {"seen": [1], "n": {}})
    assert made.metrics(1) == {"loss": 1.0}


def test_metrics_may_be_tensors(make: Make) -> None:
    made = make()
    made.save(1, training_of(1).state, metrics={"loss": torch.tensor(0.5)})  # type: ignore[dict-item]
    made.wait_until_finished()
    assert made.metrics(1) == {"loss": 0.5}


@pytest.mark.parametrize(
    ("of", "error", "text"),
    [
        ({"metrics": {"loss": "low"}}, ValueError, r"metrics\['loss'\] must be a number: .*'low'"),
        ({"metrics": {"loss": [1]}}, TypeError, r"metrics\['loss'\] must be a number"),
        ({"notes": {"a": 1, "set": {1}}}, TypeError, r"notes\['set'\] must be a JSON value"),
    ],
)
def test_invalid_metrics_and_notes_are_refused_and_nothing_is_saved(
    make: Make, of: dict[str, Any], error: type[Exception], text: str
) -> None:
    made = make()
    with pytest.raises(error, match=text):
        made.save(1, training_of(1).state, **of)
    assert made.steps() == []
    assert train(made, [2]) == [2]
    assert restored(made) == 2


@pytest.mark.parametrize("step", [-1, 10**10])
def test_invalid_steps_are_refused_even_if_no_save_is_due(make: Make, step: int) -> None:
    with pytest.raises(ValueError, match="step must be between 0 and 9999999999"):
        make(interval=7).save(step, training_of(1).state)


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_a_step_that_is_not_an_integer_is_refused(make: Make, step: Any) -> None:
    with pytest.raises(TypeError, match=f"step must be an int, got {step!r}"):
        make().save(step, training_of(1).state)


@pytest.mark.parametrize("step", [numpy.int64(1), torch.tensor(1)], ids=["numpy", "tensor"])
def test_a_step_may_be_any_integer_type(make: Make, step: Any) -> None:
    made = make()
    assert made.save(step, training_of(1).state)
    made.wait_until_finished()
    assert made.all_steps() == [1]
    assert type(made.last_step) is int


def test_a_module_instead_of_a_state_is_refused(make: Make) -> None:
    made = make()
    train(made, [1])
    calls: list[Callable[[Any], Any]] = [lambda state: made.save(2, state), made.restore]
    for call in calls:
        with pytest.raises(TypeError, match=r'a dict such as \{"model": model\}, got a Linear'):
            call(torch.nn.Linear(2, 2))
    assert made.all_steps() == [1]


def test_metadata_has_names_and_shapes_without_reading_values(make: Make) -> None:
    made = make()
    train(made, [1])
    made.wait_until_finished()
    entries = made.metadata(1).state_dict_metadata
    assert list(entries["model.weight"].size) == [3, 4]


def test_a_non_strict_restore_reports_the_unchanged_names(make: Make) -> None:
    made = make()
    assert made.restore_report is None
    made.save(1, {"a": {"x": torch.ones(2), "y": torch.ones(2)}, "n": 3})
    state = {"a": {"x": torch.zeros(2), "z": torch.zeros(2)}, "n": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert made.restore(state, strict=False) == 1
    report = made.restore_report
    assert report is not None
    assert "a.x" in report.loaded
    assert report.missing == ["a.z"]
    assert_equal(state["a"], {"x": torch.ones(2), "z": torch.zeros(2)})


def test_a_part_of_the_state_can_be_restored(make: Make) -> None:
    made = make()
    train(made, [1, 2])
    training = training_of(1)
    assert made.restore(training.state, names=["model.*"]) == 2
    for found, expected in zip(
        training.model.parameters(), training_of(2).model.parameters(), strict=True
    ):
        assert_equal(found.detach(), expected.detach())
    assert training.state["epoch"] == 1


def test_hooks_run_before_each_save_until_they_are_removed(make: Make) -> None:
    made = make()
    calls: list[int] = []
    handle = made.before_save(lambda: calls.append(1))
    train(made, [1, 2])
    handle.remove()
    train(made, [3])
    assert len(calls) == 2


def test_synchronous_saves_are_complete_when_save_returns(make: Make) -> None:
    made = make(async_saves=False)
    train(made, [1])
    assert not made.is_saving
    assert made.all_steps() == [1]


def test_with_overlapped_staging_a_guarded_step_may_follow(make: Make) -> None:
    made, training = make(staging="overlapped"), training_of(1)
    made.save(1, training.state)
    made.guard(training.optimizer)
    training.step()
    made.wait_until_finished()
    assert restored(made) == 1


def test_with_overlapped_staging_the_state_may_change_once_staged(make: Make) -> None:
    made, training = make(staging="overlapped"), training_of(1)
    made.save(1, training.state)
    made.wait_until_staged()
    training.step()
    made.wait_until_finished()
    assert restored(made) == 1


def test_writer_options_reach_the_writer(make: Make, root: Path) -> None:
    made = make(thread_count=1, single_file_per_rank=False)
    train(made, [1])
    made.wait_until_finished()
    assert len(data_files(root / "0000000001")) > 3


def test_replicas_are_not_compared_in_one_process(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = make(check_replicas="error", check_replicas_every=1)
        train(made, [1, 2])
        made.wait_until_finished()
    assert made.all_steps() == [1, 2]


# --- the end of a manager -------------------------------------------------------------------------


def test_leaving_the_block_waits_for_the_save(root: Path, held_commits: Gate) -> None:
    with CheckpointManager(root, preemption_signals=()) as made:
        train(made, [1])
        assert made.all_steps() == []
        held_commits.open()
    assert made.all_steps() == [1]


def test_the_exception_that_left_the_block_is_raised_and_the_save_ends(
    make: Make, held_commits: Gate
) -> None:
    def end(made: CheckpointManager) -> None:
        train(made, [1])
        held_commits.open()
        raise KeyError("of training")

    made = make()
    with pytest.raises(KeyError, match="of training"), made:
        end(made)
    assert made.all_steps() == [1]


def test_a_closed_manager_refuses_to_save_and_may_be_closed_again(make: Make) -> None:
    made = make()
    train(made, [1])
    made.close()
    made.close()
    for work in (
        lambda: made.save(2, training_of(2).state),
        lambda: made.pin(1),
        lambda: made.delete(1),
    ):
        with pytest.raises(ValueError, match=r"cannot .*: the manager is closed"):
            work()
    assert restored(made) == 1


def test_an_interpreter_that_exits_without_close_finishes_the_save_silently(root: Path) -> None:
    program = (
        "import sys, torch, torch_ckpt\n"
        "made = torch_ckpt.CheckpointManager(sys.argv[1], keep_last=1)\n"
        "for step in (1, 2): made.save(step, {'w': torch.ones(1000)})\n"
    )
    run = run_script(program, root)
    assert (run.returncode, run.stderr) == (0, "")
    assert CheckpointManager(root, read_only=True).latest_step() == 2


def test_a_dropped_manager_restores_signal_handlers_and_warns(root: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    made = CheckpointManager(root, preemption_signals=(signal.SIGUSR1,))
    train(made, [1])
    finish(made)
    # The save's thread holds the manager a moment longer, and only the main thread may restore the
    # signal handlers.
    for thread in threading.enumerate():
        if thread.name == "torch_ckpt save":
            thread.join(LIMIT)
    assert signal.getsignal(signal.SIGUSR1) is not before
    held_only_here = [made]
    del made

    def drop() -> None:
        held_only_here.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="was deleted without close"):
        drop()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_forked_child_does_not_wait_for_the_save_of_its_parent(
    make: Make, held_commits: Gate
) -> None:
    made = make()
    train(made, [1])
    held_commits.wait()
    with warnings.catch_warnings():
        # Since Python 3.12, os.fork() warns of other threads. This test needs them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT))
        made.close()
        os._exit(7)
    _pid, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    held_commits.open()


# --- read_only ------------------------------------------------------------------------------------


def test_a_read_only_manager_changes_nothing(make: Make, root: Path) -> None:
    run_of(make, [1])
    left = root / "0000000009.tmp-0a1b2c3d"
    left.mkdir()
    before = signal.getsignal(signal.SIGTERM)
    made = CheckpointManager(root, read_only=True, keep_last=1)
    assert left.exists()
    assert signal.getsignal(signal.SIGTERM) is before
    for work in (
        lambda: made.save(2, training_of(2).state),
        lambda: made.pin(1),
        lambda: made.unpin(1),
        lambda: made.delete(1),
    ):
        with pytest.raises(ValueError, match=r"cannot .*: the manager is read-only"):
            work()
    assert restored(made) == 1
    assert made.verify(1).ok
    assert not made.should_stop
    made.close()


# --- invalid options ------------------------------------------------------------------------------


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"if_busy": "drop"}, ValueError, "if_busy must be one of 'wait', 'skip', got 'drop'"),
    ({"check_replicas": True}, ValueError, "check_replicas must be one of"),
    ({"check_replicas_every": 0}, ValueError, "check_replicas_every must be at least 1, got 0"),
    ({"on_save_error": "ignore"}, ValueError, "on_save_error must be one of"),
    ({"staging": "lazy"}, ValueError, "staging must be one of"),
    ({"interval": 0}, ValueError, "interval must be positive, got 0"),
    ({"interval": "auto", "max_overhead": 1.5}, ValueError, "max_overhead must be between"),
    ({"interval": "auto", "mtbf_hours": 0}, ValueError, "must be positive, got 0 s"),
    ({"keep_last": 0}, ValueError, "keep_last must be positive"),
    ({"keep_last": 1.5}, TypeError, "cannot be interpreted as an integer"),
    ({"keep_best": 1}, ValueError, "keep_best needs a metric"),
    (
        {"keep_lst": 3},
        TypeError,
        r"^CheckpointManager\(\) got an unexpected keyword argument 'keep_lst'; "
        "did you mean 'keep_last'",
    ),
    ({"tread_count": 3}, TypeError, "did you mean 'thread_count'"),
    (
        {"keep_every_hours": timedelta(hours=2)},
        TypeError,
        "must be a number of hours, got",
    ),
    ({"keep_last": "3"}, TypeError, "keep_last must be a number, got '3'"),
    ({"thread_count": 0}, ValueError, "thread_count must be at least 1"),
    ({"overwrite": True}, TypeError, "overwrite"),
    ({"staging_dir": "/nowhere"}, ValueError, "staging_dir is for remote roots"),
    (
        {"load_options": {"alow_pickle": True}},
        TypeError,
        "load_options has an unknown option 'alow_pickle'; did you mean 'allow_pickle'",
    ),
    ({"load_options": ["allow_pickle"]}, TypeError, "load_options must be a dict of options"),
    (
        {"preemption_signals": ["SIGTERM"]},
        TypeError,
        r"preemption_signals must be a list of signal numbers such as \[signal.SIGTERM\], "
        "but one element is 'SIGTERM'",
    ),
    ({"preemption_signals": "SIGTERM"}, TypeError, "must be a list of signal numbers"),
    ({"preemption_signals": signal.SIGTERM}, TypeError, "must be a list of signal numbers"),
    ({"preemption_signals": [signal.SIGKILL]}, ValueError, "SIGKILL.* is not a signal that"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_invalid_options_are_refused_by_the_constructor(
    root: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error, match=text):
        CheckpointManager(root, **options)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not root.exists()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_root_that_is_a_file_is_refused_by_the_constructor(root: Path, read_only: bool) -> None:
    root.write_text("mine")
    with pytest.raises(NotADirectoryError, match="the root must be the directory") as caught:
        CheckpointManager(root, read_only=read_only)
    assert caught.value.filename == str(root)
    assert root.read_text() == "mine"


@pytest.mark.parametrize("error", [EACCES, EROFS])
def test_an_unwritable_root_is_refused_by_the_constructor(root: Path, error: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with failing("mkdir", error), pytest.raises(OSError, match="pass read_only=True") as caught:
        CheckpointManager(root)
    assert (caught.value.errno, caught.value.filename) == (error, str(root))
    assert signal.getsignal(signal.SIGTERM) is before


def test_on_a_full_disk_a_manager_restores_and_the_first_save_takes_the_lease(
    make: Make, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = small_disk / "run"
    with make(root) as made:
        train(made, [1])
    filling = small_disk / "filling"
    disk = os.statvfs(small_disk)
    filling.write_bytes(bytes(disk.f_bavail * disk.f_frsize))
    made = make(root)
    assert "The first save will try again" in caplog.text
    assert restored(made) == 1
    assert not (root / LEASE_NAME).exists()
    filling.unlink()
    train(made, [2])
    made.wait_until_finished()
    assert (root / LEASE_NAME).exists()
    assert made.all_steps() == [1, 2]
    made.close()


# --- the last step --------------------------------------------------------------------------------


def unsaved(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "was not saved" in r.getMessage()]


def test_an_unsaved_last_step_is_named_at_the_end(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(root, interval=4) as made:
        train(made, range(1, 7))
    [line] = unsaved(caplog)
    assert "the last step, 6, was not saved" in line
    assert "a restart would continue from step 4" in line
    assert "save(step, state, force=True)" in line


def test_a_run_without_any_save_is_warned_at_its_end(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(root, interval=10) as made:
        train(made, [1, 2])
    [line] = unsaved(caplog)
    assert "this run has saved no step" in line


def test_nothing_is_logged_at_the_end_if_the_last_step_was_saved_or_restored(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(root, interval=4) as made:
        training = Training()
        train(made, range(1, 7), training)
        assert made.save(6, training.state, force=True)
    with manager_of(root, interval=4) as made:
        assert restored(made) == 6
    with manager_of(root, interval=4):
        pass
    assert unsaved(caplog) == []
