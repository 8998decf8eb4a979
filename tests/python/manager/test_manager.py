"""Tests of CheckpointManager in one process: saves, restores, and refused calls."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from errno import EACCES, EIO, EROFS
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ckpt
from tests.fault_hooks import failing
from tests.forked import in_fork, run_script
from tests.gates import LIMIT, Gate
from tests.managers import (
    Make,
    Training,
    finish,
    manager_of,
    restored,
    run_of,
    state_of,
    train,
    training_of,
)
from tests.support import assert_equal, data_files, no_warnings, save
from torch_ckpt import CheckpointError, CheckpointManager, Retention, RootInUse
from torch_ckpt.manager import AutoInterval, Preemption, SaveOptions
from torch_ckpt.saving import handle
from torch_ckpt.steps import open_steps
from torch_ckpt.steps.root_lease import LEASE_NAME

# --- saving and restoring -------------------------------------------------------------------------


def test_the_ten_line_loop_resumes_at_its_last_step(root: Path) -> None:
    first_steps = []
    for until in (5, 12):
        with CheckpointManager(root, interval=4, preemption=None) as made:
            training = Training()
            first = made.restore(training.state)
            first_steps.append(first)
            assert_equal(training.values(), training_of(first).values())
            train(made, range(first + 1, until + 1), training)
            assert not made.should_stop
    assert first_steps == [0, 4]
    with CheckpointManager(root, read_only=True) as made:
        assert made.all_steps() == [4, 8, 12]
        entries = made.metadata(12).state_dict_metadata
        assert list(entries["model.weight"].size) == [3, 4]
        assert restored(made) == 12


def test_steps_can_be_listed_before_the_first_save(make: Make) -> None:
    made = make(keep=Retention(keep_best=1, best_metric="loss"))
    assert (made.all_steps(), made.steps()) == ([], [])
    assert (made.latest_step(), made.best_step()) == (None, None)
    assert not made.is_saving
    made.wait_until_finished()
    made.check_for_errors()
    made.wait_until_staged()
    for ask in (made.metrics, made.metadata, made.verify):
        with pytest.raises(FileNotFoundError):
            ask(1)


def test_the_arguments_may_change_as_soon_as_save_returns(make: Make, held_commits: Gate) -> None:
    made, training = make(), training_of(2)
    metrics, notes = {"loss": 1.0}, {"seen": [1], "n": {}}
    assert made.save(2, training.state, metrics=metrics, notes=notes)
    training.step()
    metrics["loss"] = 2.0
    notes["seen"].append(2)
    notes["n"]["m"] = threading.Lock()
    held_commits.open()
    made.wait_until_finished()
    [info] = made.steps()
    assert (info.metrics, info.notes) == ({"loss": 1.0}, {"seen": [1], "n": {}})
    assert made.metrics(2) == {"loss": 1.0}
    assert restored(made) == 2


TEN_DIGITS = "step must be between 0 and 9999999999"
LOSS = r"metrics\['loss'\] "


@pytest.mark.parametrize(
    ("step", "of", "error", "text"),
    [
        (-1, {}, ValueError, TEN_DIGITS),
        (10**10, {}, ValueError, TEN_DIGITS),
        (1.0, {}, TypeError, "step must be an int, got 1.0"),
        (7, {"metrics": {"loss": "low"}}, ValueError, LOSS + "must be a number: .*'low'"),
        (7, {"metrics": {"loss": [1]}}, TypeError, LOSS + "must be a number"),
        (
            7,
            {"metrics": {"loss": 10**400}},
            ValueError,
            LOSS + "is an integer too large for a float",
        ),
        (7, {"notes": {"a": 1, "set": {1}}}, TypeError, r"notes\['set'\] must be a JSON value"),
        (7, {"metrics": [0.5]}, TypeError, "metrics must be a dict such as .*, got a list"),
        ({"model": 1}, {}, TypeError, "^step must be an int, got dict$"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_steps_metrics_and_notes_are_refused_and_nothing_is_saved(
    make: Make, step: Any, of: dict[str, Any], error: type[Exception], text: str
) -> None:
    made = make(interval=7)
    # Invalid steps are refused even if no save is due.
    with pytest.raises(error, match=text):
        made.save(step, training_of(1).state, **of)
    assert made.steps() == []
    assert train(made, [14]) == [14]
    assert restored(made) == 14


@pytest.mark.parametrize(
    "state", [torch.nn.Linear(1, 1), None, [1]], ids=["module", "none", "list"]
)
def test_a_state_that_is_no_dict_is_refused_even_if_nothing_is_saved_or_restored(
    make: Make, state: Any
) -> None:
    made = make(interval=7)
    text = f"the state must be a dict, got {type(state).__name__}"
    for call in (lambda: made.save(1, state), lambda: made.restore(state)):
        with pytest.raises(TypeError, match=text):
            call()
    assert made.all_steps() == []


@pytest.mark.parametrize("step", ["1", 1.0])
def test_a_step_to_restore_must_be_an_integer(make: Make, step: Any) -> None:
    made = make()
    train(made, [1])
    with pytest.raises(TypeError, match=f"step must be an int, got {step!r}"):
        made.restore(training_of(1).state, step)


def test_a_single_checkpoint_is_no_root(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path / "c")
    before = sorted((tmp_path / "c").iterdir())
    for read_only in (False, True):
        with pytest.raises(CheckpointError, match=f"{tmp_path}/c is a single checkpoint, not the"):
            CheckpointManager(tmp_path / "c", read_only=read_only)
    assert sorted((tmp_path / "c").iterdir()) == before


@pytest.mark.parametrize("step", [numpy.int64(1), torch.tensor(1)], ids=["numpy", "tensor"])
def test_a_step_may_be_any_integer_and_a_metric_a_tensor(make: Make, step: Any) -> None:
    made = make()
    loss: Any = torch.tensor(0.5)
    assert made.save(step, training_of(1).state, metrics={"loss": loss})
    made.wait_until_finished()
    assert made.all_steps() == [1]
    assert type(made.last_step) is int
    assert made.metrics(1) == {"loss": 0.5}


def test_a_module_instead_of_a_state_is_refused(make: Make) -> None:
    made = make()
    train(made, [1])
    calls: list[Callable[[Any], Any]] = [lambda state: made.save(2, state), made.restore]
    for call in calls:
        with pytest.raises(TypeError, match=r"got Linear\. Pass \{'model': \.\.\.\}"):
            call(torch.nn.Linear(2, 2))
    assert made.all_steps() == [1]


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


def test_synchronous_saves_are_complete_when_save_returns(make: Make) -> None:
    made = make(saves=SaveOptions(async_saves=False))
    train(made, [1])
    assert not made.is_saving
    assert made.all_steps() == [1]


@pytest.mark.parametrize("how", ["guarded", "waits"])
def test_with_overlapped_staging_a_guarded_or_waiting_step_may_follow(make: Make, how: str) -> None:
    made, training = make(saves=SaveOptions(staging="overlapped")), training_of(1)
    made.save(1, training.state)
    if how == "guarded":
        made.guard(training.optimizer)
    else:
        made.wait_until_staged()
    training.step()
    made.wait_until_finished()
    assert restored(made) == 1


def test_writer_options_reach_the_writer(make: Make, root: Path) -> None:
    made = make(write=torch_ckpt.WriteOptions(thread_count=1, single_file_per_rank=False))
    train(made, [1])
    made.wait_until_finished()
    assert len(data_files(root / "0000000001")) > 3


def test_replicas_are_not_compared_in_one_process(make: Make) -> None:
    with no_warnings():
        made = make(saves=SaveOptions(check_replicas="error", check_replicas_every=1))
        train(made, [1, 2])
        made.wait_until_finished()
    assert made.all_steps() == [1, 2]


# --- the end of a manager -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, KeyError("of training")], ids=["end", "exception"])
def test_the_end_of_the_block_waits_for_the_save(
    make: Make, held_commits: Gate, error: Exception | None
) -> None:
    made = make()

    def run() -> None:
        with made:
            train(made, [1])
            assert made.all_steps() == []
            held_commits.open()
            if error is not None:
                raise error

    with pytest.raises(KeyError, match="of training") if error else nullcontext():
        run()
    assert made.all_steps() == [1]


def assert_refused(made: CheckpointManager, reason: str) -> None:
    for work in (
        lambda: made.save(2, training_of(2).state),
        lambda: made.pin(1),
        lambda: made.unpin(1),
        lambda: made.delete(1),
    ):
        with pytest.raises(ValueError, match=f"cannot .*: the manager is {reason}"):
            work()


def test_a_closed_manager_refuses_to_save_and_may_be_closed_again(make: Make) -> None:
    made = make()
    train(made, [1])
    made.close()
    made.close()
    assert_refused(made, "closed")
    assert restored(made) == 1


def test_an_interpreter_that_exits_without_close_finishes_the_save_silently(root: Path) -> None:
    program = (
        "import sys, torch, torch_ckpt\n"
        "made = torch_ckpt.CheckpointManager(sys.argv[1], keep=1)\n"
        "for step in (1, 2): made.save(step, {'w': torch.ones(1000)})\n"
    )
    run = run_script(program, root)
    assert (run.returncode, run.stderr) == (0, "")
    assert CheckpointManager(root, read_only=True).latest_step() == 2


def test_a_dropped_manager_restores_signal_handlers_and_warns(root: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    made = CheckpointManager(root, preemption=Preemption(signals=(signal.SIGUSR1,)))
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


def test_a_forked_child_does_not_wait_for_its_parents_save(make: Make, held_commits: Gate) -> None:
    made = make()
    train(made, [1])
    held_commits.wait()
    in_fork(made.close)
    held_commits.open()


# --- read_only ------------------------------------------------------------------------------------


def test_a_read_only_manager_changes_nothing(make: Make, root: Path) -> None:
    run_of(make, [1])
    left = root / "0000000009.tmp-0a1b2c3d"
    left.mkdir()
    before = signal.getsignal(signal.SIGTERM)
    made = CheckpointManager(root, read_only=True, keep=1)
    assert left.exists()
    assert signal.getsignal(signal.SIGTERM) is before
    assert_refused(made, "read-only")
    assert restored(made) == 1
    assert made.verify(1).ok
    assert not made.should_stop
    made.close()


def test_a_read_only_manager_restores_an_earlier_step_without_advice_to_writers(
    make: Make, root: Path
) -> None:
    run_of(make, [1, 2, 3])
    with CheckpointManager(root, read_only=True) as made, no_warnings():
        assert restored(made, 2) == 2


# --- invalid options ------------------------------------------------------------------------------


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"on_save_error": "ignore"}, ValueError, "on_save_error must be one of"),
    ({"interval": 0}, ValueError, "interval must be positive, got 0"),
    ({"interval": AutoInterval}, ValueError, "interval must be .* an AutoInterval"),
    ({"keep": 0}, ValueError, "keep_last must be positive"),
    ({"keep": "3"}, TypeError, r"keep must be a number or a torch_ckpt\.Retention, got '3'"),
    ({"preemption": ()}, TypeError, r"preemption must be a torch_ckpt\.manager\.Preemption, got"),
    ({"saves": {}}, TypeError, r"saves must be a torch_ckpt\.manager\.SaveOptions, got {}"),
    ({"write": {}}, TypeError, r"write must be a torch_ckpt\.WriteOptions, got {}"),
    ({"read": None}, TypeError, r"read must be a torch_ckpt\.ReadOptions, got None"),
    (
        {"keep_lst": 3},
        TypeError,
        r"^CheckpointManager\(\) got an unexpected keyword argument 'keep_lst'; did you mean "
        "'keep_last'",
    ),
    ({"tread_count": 3}, TypeError, "did you mean 'thread_count'"),
    ({"signals": ()}, TypeError, "got an unexpected keyword argument 'signals'"),
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
    assert '"released"' in (root / LEASE_NAME).read_text()
    filling.unlink()
    train(made, [2])
    made.wait_until_finished()
    assert '"held"' in (root / LEASE_NAME).read_text()
    assert made.all_steps() == [1, 2]
    made.close()


# --- the last step --------------------------------------------------------------------------------


def unsaved(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "was not saved" in r.getMessage()]


@pytest.mark.parametrize(
    ("interval", "steps", "texts"),
    [
        (
            4,
            range(1, 7),
            [
                "the last step, 6, was not saved",
                "a restart would continue from step 4",
                "save(step, state, force=True)",
            ],
        ),
        (10, [1, 2], ["this run has saved no step"]),
    ],
    ids=["after a save", "without any save"],
)
def test_an_unsaved_last_step_is_named_at_the_end(
    root: Path, caplog: pytest.LogCaptureFixture, interval: int, steps: Any, texts: list[str]
) -> None:
    with manager_of(root, interval=interval) as made:
        train(made, steps)
    [line] = unsaved(caplog)
    assert all(text in line for text in texts)


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


# --- process groups -------------------------------------------------------------------------------


@contextmanager
def ranks_of_a_run(size: int) -> Iterator[None]:
    """Makes a process group whose other ranks do not exist."""
    store = FakeStore() if size > 1 else dist.HashStore()
    dist.init_process_group("fake", rank=0, world_size=size, store=store)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_manager_is_refused_after_its_group_was_destroyed(tmp_path: Path) -> None:
    with ranks_of_a_run(2):
        made = CheckpointManager(tmp_path, read_only=True)
        dist.destroy_process_group()
        with pytest.raises(
            RuntimeError, match=r"group of the manager's 2 ranks has been destroyed"
        ):
            made.restore(state_of(0))
    with ranks_of_a_run(2), pytest.raises(RuntimeError, match="has been destroyed"):
        made.restore(state_of(0))
    made.close()


def test_a_manager_made_before_its_group_is_refused_while_the_group_exists(tmp_path: Path) -> None:
    text = r"created before init_process_group\(\)"
    with manager_of(tmp_path) as made:
        with ranks_of_a_run(2), pytest.raises(RuntimeError, match=text):
            made.save(1, state_of(1))
        assert made.save(1, state_of(1))


def test_a_group_of_one_rank_may_be_made_and_destroyed(tmp_path: Path) -> None:
    with ranks_of_a_run(1), manager_of(tmp_path) as made:
        dist.destroy_process_group()
        assert made.save(1, state_of(1))


def test_a_root_that_another_run_removes_meanwhile_is_not_taken_for_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    is_directory = os.path.isdir

    def is_directory_after_removal(path: Any) -> bool:
        if os.fspath(path) == str(root) and is_directory(root):
            root.rmdir()
        return is_directory(path)

    monkeypatch.setattr(os.path, "isdir", is_directory_after_removal)
    with CheckpointManager(root, preemption=None) as manager:
        assert manager.steps() == []


def test_the_steps_that_a_manager_was_given_keep_their_own_lease(root: Path) -> None:
    steps = open_steps(root)
    with manager_of(steps) as made:
        made.save(1, state_of(1))
        with manager_of(steps, read_only=True):
            pass
        made.save(2, state_of(2))
        made.wait_until_finished()
        (root / ".lease").unlink()
        with pytest.raises(RootInUse):
            made._store.delete(1)
    assert steps.delete(1)
    assert [info.step for info in steps.entries()] == [2]


def test_a_parent_of_a_link_is_the_parent_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "other" / "inner")
    root = f"{tmp_path}/link/../run"
    with manager_of(root) as made:
        made.save(1, state_of(1))
    assert sorted(path.name for path in (tmp_path / "other" / "run").glob("0*")) == ["0000000001"]
    state = state_of(0)
    torch_ckpt.load(state, root)
    assert_equal(state, state_of(1))


def test_an_object_that_cannot_be_guarded_is_refused_and_the_manager_closes(root: Path) -> None:
    class Scheduler:
        pass

    scheduler = Scheduler()
    with manager_of(root) as made:
        made.guard(scheduler)  # type: ignore[arg-type]
        with pytest.raises(AttributeError, match="param_groups"):
            made.save(1, state_of(1))
    assert made.all_steps() == [1]


def test_an_interrupt_of_the_wait_for_the_copy_does_not_lose_the_save(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = CheckpointManager(root, preemption=None)
    with monkeypatch.context() as patch:
        patch.setattr(handle, "wait_until_done", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            made.save(1, state_of(1))
    assert made.is_saving or made.last_step == 1
    made.close()
    assert made.last_step == 1
    assert made.all_steps() == [1]


def test_later_steps_that_cannot_be_listed_are_a_warning(make: Make, root: Path) -> None:
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    with (
        mock.patch.object(made._store, "entries", side_effect=OSError(5, "I/O error")),
        pytest.warns(UserWarning, match="the steps after step 0 could not be listed: .*I/O error"),
    ):
        made.save(1, state_of(1), overwrite=True)
    made.wait_until_finished()
    assert made.last_step == 1


def test_a_step_whose_save_has_failed_may_be_overwritten_by_a_retry(root: Path) -> None:
    with manager_of(root, on_save_error="warn_and_continue") as made:
        with failing("fsync_directory", EIO, root):
            made.save(1, state_of(1))
            made.wait_until_finished()
        assert made.all_steps() == [1], "its durability is uncertain"
        assert made.save(1, state_of(1), overwrite=True)
        made.wait_until_finished()
        assert made.last_step == 1
