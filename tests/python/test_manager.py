"""CheckpointManager in one process: each method and each option."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from errno import EIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.async_saves import LIMIT, Gate
from tests.support import assert_equal, cause_of, data_files, flip_bit
from torch_ckpt import (
    CheckpointManager,
    free_space,
    intervals,
    manager,
    multihost,
    snapshot,
    steps,
    writer,
)
from torch_ckpt.directory import OpenDirectory
from torch_ckpt.errors import CheckpointError, LoadMismatch, NotCommitted, SourceChanged
from torch_ckpt.events import Event
from torch_ckpt.multihost.preemption import current_watch
from torch_ckpt.steps import MARKER_NAME

Make = Callable[..., CheckpointManager]

#: Of warnings.
LATER = "and there are later ones"
PASSED = "the one before is restored"
UNMARKED = "not restored, since there is no write_completed in them"


class Training:
    """A model, its optimizer and a number, whose values tell the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "epoch": 0,
        }

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.state["epoch"] += 1

    def values(self) -> dict[str, Any]:
        """All that was trained, as it is now."""
        momenta = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        tensors = [*self.model.parameters(), *momenta]
        return {
            "tensors": [tensor.detach().clone() for tensor in tensors],
            "epoch": self.state["epoch"],
        }


def training_of(number: int) -> Training:
    """After so many steps."""
    made = Training()
    for _ in range(number):
        made.step()
    return made


def restored(made: CheckpointManager, step: int | None = None) -> int:
    """The number of steps that were done by the state that is restored; its step is the same."""
    training = training_of(1)
    found = made.restore(training.state, step)
    assert_equal(training.values(), training_of(found or 1).values())
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def make(root: Path) -> Iterator[Make]:
    """Makes managers that end with the test; without watching signals, by default."""
    made: list[CheckpointManager] = []

    def make_one(path: Path = root, **options: Any) -> CheckpointManager:
        one = CheckpointManager(path, **{"preemption_signals": (), **options})
        made.append(one)
        return one

    yield make_one
    for one in made:
        one.__exit__(AssertionError, AssertionError(), None)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def held(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Saves do not commit until it is opened."""
    commit = steps._StepWriter.commit

    def commit_later(self: Any, data: bytes, files: set[str]) -> None:
        gate()
        commit(self, data, files)

    monkeypatch.setattr(steps._StepWriter, "commit", commit_later)
    return gate


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The marker of saves cannot be written, until it is called."""
    write_marker = steps.write_marker

    def fail(directory: str, *_: object) -> None:
        raise OSError(EIO, "the disk is broken", str(directory))

    monkeypatch.setattr(steps, "write_marker", fail)
    return lambda: monkeypatch.setattr(steps, "write_marker", write_marker)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For when to save alone."""

    class Time:
        monotonic = Clock()
        sleep = staticmethod(lambda seconds: None)

    monkeypatch.setattr(intervals, "time", Time)
    return Time.monotonic


def train(
    made: CheckpointManager, numbers: Any, training: Training | None = None, **options: Any
) -> list[int]:
    """The steps at which it saved."""
    training = training or training_of(numbers[0] - 1)
    found = []
    for number in numbers:
        training.step()
        if made.save(number, training.state, **options):
            found.append(number)
    return found


def run_of(make: Make, numbers: Any) -> None:
    """A run that has ended."""
    with make() as made:
        train(made, numbers)


def finish(made: CheckpointManager) -> None:
    """Waits for the save and the deletions under way."""
    made.wait_until_finished()
    made._deletions.settle()


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def damage(root: Path, step: int) -> None:
    for file in data_files(root / f"{step:010d}"):
        flip_bit(file, file.stat().st_size // 2, 3)


def of_kind(kind: str, work: Callable[[], object]) -> Callable[[Event], None]:
    """An ``on_event`` that does something at the events of one kind."""
    return lambda event: work() and None if event.kind == kind else None


# --- what reviews have found ---------------------------------------------------------------------


def test_the_restored_step_may_be_saved_by_force(make: Make) -> None:
    run_of(make, [1, 2])
    made = make()
    training = Training()
    made.restore(training.state)
    assert made.save(2, training.state, force=True)
    made.wait_until_finished()
    assert restored(made) == 2


def test_steps_of_before_training_went_back_go_when_it_has_passed_them(make: Make) -> None:
    run_of(make, [40, 50, 60])
    events: list[Event] = []
    made = make(keep_last=2, on_event=events.append)
    training = Training()
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, 40)
    made.save(56, training.state)
    finish(made)
    assert made.all_steps() == [40, 56, 60]
    for step in (58, 63):
        made.save(step, training.state)
        finish(made)
    # 40 was verified by the restore.
    assert made.all_steps() == [40, 58, 63]
    went_back = [event for event in events if "before training went back" in event.message]
    assert [event.step for event in went_back] == [50, 60]


def test_a_replaced_step_is_no_more_one_of_before(make: Make) -> None:
    run_of(make, [1, 2, 3])
    made = make(keep_last=2)
    training = training_of(1)
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, 1)
    train(made, [2, 3], training)
    finish(made)
    assert made.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("error", [SystemExit(3), CheckpointException("test", {}), KeyError()])
def test_what_on_event_raises_goes_to_the_log(
    error: BaseException, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    made = make(keep_last=1, on_event=of_kind("saved", fail))
    train(made, [1, 2])
    finish(made)
    assert "an event (saved) could not be passed on" in caplog.text
    assert made.all_steps() == [2]


@pytest.mark.parametrize("kind", ["saving", "saved", "deleted"])
@pytest.mark.parametrize("how", ["wait_until_finished", "close", "restore", "pin"])
def test_on_event_may_call_the_manager(kind: str, how: str, make: Make) -> None:
    calls: dict[str, Callable[[], object]] = {
        "wait_until_finished": lambda: made.wait_until_finished(),
        "close": lambda: made.close(),
        "restore": lambda: made.restore(training_of(1).state),
        "pin": lambda: made.all_steps() and made.pin(made.all_steps()[-1]),
    }
    called = threading.Event()

    def call() -> None:
        # Only the first one: what it does has events of its own.
        if not called.is_set():
            called.set()
            calls[how]()

    made = make(keep_last=1, on_event=of_kind(kind, call))
    try:
        train(made, [1, 2])
    except ValueError as error:
        assert how == "close"
        assert "the manager is closed" in str(error)  # noqa: PT017
    made.wait_until_finished(LIMIT)
    made._deletions.settle(LIMIT)
    assert called.wait(LIMIT)


def test_control_c_amid_a_save_is_not_hidden_by_an_earlier_error(
    make: Make, broken: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    train(made, [1])
    made._wait_quietly()
    broken()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manager, "async_save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(made, [2])


def test_a_manager_that_is_dropped_gives_its_signals_back_and_says_so(root: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    made = CheckpointManager(root, preemption_signals=(signal.SIGUSR1,))
    train(made, [1])
    finish(made)
    # The thread has the manager for a moment longer, and only the main thread may give back.
    for thread in threading.enumerate():
        if thread.name == "torch_ckpt save":
            thread.join(LIMIT)
    assert signal.getsignal(signal.SIGUSR1) is not before
    held_only_here = [made]
    del made

    def drop() -> None:
        held_only_here.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="was dropped without close"):
        drop()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_notices_that_nobody_waits_for_are_named(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(preemption_signals=(signal.SIGUSR1,))
    make(tmp_path / "other", preemption_signals=(signal.SIGUSR1,))
    assert "already" not in caplog.text
    make(tmp_path / "third", preemption_file=tmp_path / "stop")
    assert "is watched for other notices than these already" in caplog.text


def test_of_several_managers_each_stops_at_its_next_step(make: Make, tmp_path: Path) -> None:
    often = make(preemption_signals=(signal.SIGUSR1,))
    seldom = make(tmp_path / "other", preemption_signals=(signal.SIGUSR1,))
    training = Training()
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = {}
    for step in range(1, 100_000):
        often.save(step, training.state, force=False)
        if often.should_stop:
            stopped.setdefault("often", step)
        if step % 10 == 0:
            seldom.save(step, training.state)
            if seldom.should_stop:
                stopped["seldom"] = step
                break
    assert stopped["often"] <= stopped["seldom"] < stopped["often"] + 10


def test_a_forked_child_does_not_wait_for_the_save_of_its_parent(make: Make, held: Gate) -> None:
    made = make()
    train(made, [1])
    held.wait()
    with warnings.catch_warnings():
        # Since Python 3.12: that there are threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT))
        made.close()
        os._exit(7)
    _pid, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    held.open()


# --- saving and restoring ------------------------------------------------------------------------


def test_the_ten_lines_go_on_where_they_have_stopped(root: Path) -> None:
    begun = []
    for until in (5, 12):
        with CheckpointManager(root, interval=4, preemption_signals=()) as made:
            training = Training()
            first = made.restore(training.state)
            begun.append(first)
            assert_equal(training.values(), training_of(first).values())
            train(made, range(first + 1, until + 1), training)
            assert not made.should_stop
    assert begun == [0, 4]
    with CheckpointManager(root, read_only=True) as made:
        assert made.all_steps() == [4, 8, 12]
        assert restored(made) == 12


def test_restoring_where_nothing_is_leaves_the_state_alone(make: Make) -> None:
    training = training_of(3)
    assert make().restore(training.state) == 0
    assert_equal(training.values(), training_of(3).values())


def test_what_there_is_can_be_asked_before_any_save(make: Make) -> None:
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


def test_the_state_may_change_as_soon_as_save_returns(make: Make, held: Gate) -> None:
    made, training = make(), training_of(2)
    assert made.save(2, training.state)
    training.step()
    held.open()
    made.wait_until_finished()
    assert restored(made) == 2


def test_metrics_and_notes_may_change_as_soon_as_save_returns(make: Make, held: Gate) -> None:
    made = make()
    metrics, notes = {"loss": 1.0}, {"seen": [1], "n": {}}
    made.save(1, training_of(1).state, metrics=metrics, notes=notes)
    metrics["loss"] = 2.0
    notes["seen"].append(2)
    notes["n"]["m"] = threading.Lock()
    held.open()
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
        ({"notes": {"a": 1, "set": {1}}}, TypeError, r"notes\['set'\] must be what JSON knows"),
    ],
)
def test_wrong_metrics_and_notes_are_refused_and_nothing_is_saved(
    make: Make, of: dict[str, Any], error: type[Exception], text: str
) -> None:
    made = make()
    with pytest.raises(error, match=text):
        made.save(1, training_of(1).state, **of)
    assert made.steps() == []
    assert train(made, [2]) == [2]
    assert restored(made) == 2


@pytest.mark.parametrize("step", [-1, 10**10])
def test_wrong_steps_are_refused_even_where_it_is_not_time(make: Make, step: int) -> None:
    with pytest.raises(ValueError, match="a step must be from 0 to 9999999999"):
        make(interval=7).save(step, training_of(1).state)


@pytest.mark.parametrize("step", [1.0, "1", None])
def test_a_step_that_is_no_integer_is_refused(make: Make, step: Any) -> None:
    with pytest.raises(TypeError, match=f"a step must be an int, got {step!r}"):
        make().save(step, training_of(1).state)


@pytest.mark.parametrize("step", [numpy.int64(1), torch.tensor(1)], ids=["numpy", "tensor"])
def test_a_step_may_be_any_integer(make: Make, step: Any) -> None:
    made = make()
    assert made.save(step, training_of(1).state)
    made.wait_until_finished()
    assert made.all_steps() == [1]
    assert type(made.last_step) is int


def test_a_module_in_the_place_of_a_state_is_refused(make: Make) -> None:
    made = make()
    train(made, [1])
    calls: list[Callable[[Any], Any]] = [lambda state: made.save(2, state), made.restore]
    for call in calls:
        with pytest.raises(TypeError, match=r'a dict, as \{"model": model\}, got a Linear'):
            call(torch.nn.Linear(2, 2))
    assert made.all_steps() == [1]


def test_metadata_tells_names_and_shapes_without_reading(make: Make) -> None:
    made = make()
    train(made, [1])
    made.wait_until_finished()
    entries = made.metadata(1).state_dict_metadata
    assert list(entries["model.weight"].size) == [3, 4]


def test_a_restore_that_is_not_strict_tells_what_it_has_left(make: Make) -> None:
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


def test_a_part_can_be_restored(make: Make) -> None:
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


# --- when ----------------------------------------------------------------------------------------


def test_the_last_step_is_the_one_that_was_saved_or_restored_last(make: Make) -> None:
    made = make()
    assert made.last_step is None
    train(made, [1, 2])
    made.wait_until_finished()
    assert made.last_step == 2
    assert restored(made, 1) == 1
    assert made.last_step == 1


def test_a_step_counts_as_saved_when_its_save_has_ended(make: Make, held: Gate) -> None:
    made = make()
    train(made, [1])
    assert made.last_step is None
    held.open()
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


def test_a_function_says_when_to_save(make: Make) -> None:
    assert train(make(interval=lambda step: step in (2, 5)), range(1, 8)) == [2, 5]


def test_a_time_apart_says_when_to_save(make: Make, clock: Clock) -> None:
    made, training = make(interval=timedelta(minutes=1)), Training()
    found = []
    for step in range(1, 10):
        clock.now += 25
        found += train(made, [step], training)
    assert found == [3, 6, 9]


def test_auto_saves_at_once_and_then_by_what_it_cost(make: Make, clock: Clock) -> None:
    made, training = make(interval="auto", mtbf_hours=1), Training()
    assert train(made, [1], training) == [1]
    made.wait_until_finished()
    auto = made._schedule.auto
    assert auto is not None
    seconds = auto.seconds
    assert seconds > 0
    clock.now += seconds * 0.9
    assert train(made, [2], training) == []
    clock.now += seconds * 0.1 + 1
    assert train(made, [3], training) == [3]


def test_auto_does_not_wait_for_its_first_save(make: Make, held: Gate, clock: Clock) -> None:
    made, training = make(interval="auto"), Training()
    assert train(made, [1, 2, 3], training) == [1]
    assert made.is_saving


def test_force_saves_in_any_case(make: Make) -> None:
    made = make(interval=100)
    assert train(made, [1, 2]) == []
    assert train(made, [3], force=True) == [3]
    assert restored(made) == 3


def test_a_step_is_saved_once(make: Make) -> None:
    made, training = make(), training_of(1)
    assert made.save(1, training.state)
    assert not made.save(1, training.state)


def test_a_step_is_saved_again_where_forced_to(make: Make) -> None:
    made, training = make(), training_of(1)
    made.save(1, training.state, notes={"n": 1})
    assert made.save(1, training.state, notes={"n": 2}, force=True)
    made.wait_until_finished()
    assert [info.notes for info in made.steps()] == [{"n": 2}]


def test_the_step_that_was_restored_is_not_saved_again(make: Make) -> None:
    run_of(make, [1, 2])
    made = make()
    assert restored(made) == 2
    assert not made.save(2, training_of(2).state)
    assert made.save(3, training_of(3).state)


def test_a_busy_save_is_waited_for(
    make: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch, held: Gate
) -> None:
    made, training = make(), Training()
    train(made, [1], training)
    wait = made._wait_quietly

    def open_and_wait() -> None:
        held.open()
        wait()

    monkeypatch.setattr(made, "_wait_quietly", open_and_wait)
    assert train(made, [2], training) == [2]
    made.wait_until_finished()
    assert made.all_steps() == [1, 2]


def test_a_save_is_skipped_while_one_is_under_way(make: Make, held: Gate) -> None:
    made, training = make(if_busy="skip", save_on_steps=[5]), Training()
    assert train(made, [1, 2, 3], training) == [1]
    assert made.is_saving
    held.open()
    made.wait_until_finished()
    assert not made.is_saving
    assert train(made, [4], training) == [4]
    made.wait_until_finished()
    assert made.all_steps() == [1, 4]


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


# --- waiting -------------------------------------------------------------------------------------


def test_waiting_in_vain_is_a_timeout_and_the_save_goes_on(make: Make, held: Gate) -> None:
    made = make()
    train(made, [1])
    with pytest.raises(TimeoutError, match=r"the save of step 1 has not ended in 0\.01 s"):
        made.wait_until_finished(0.01)
    held.open()
    made.wait_until_finished(LIMIT)
    assert made.all_steps() == [1]


def test_leaving_the_block_waits_for_the_save(root: Path, held: Gate) -> None:
    with CheckpointManager(root, preemption_signals=()) as made:
        train(made, [1])
        assert made.all_steps() == []
        held.open()
    assert made.all_steps() == [1]


def test_restore_waits_for_the_save_under_way(
    make: Make, held: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    train(made, [1])
    wait = made._wait_quietly

    def open_and_wait() -> None:
        held.open()
        wait()

    monkeypatch.setattr(made, "_wait_quietly", open_and_wait)
    assert restored(made) == 1


def test_a_new_step_is_waited_for(make: Make, root: Path) -> None:
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


# --- going back ----------------------------------------------------------------------------------


def test_any_step_can_be_restored_by_number(make: Make) -> None:
    made = make()
    train(made, range(1, 5))
    with pytest.warns(UserWarning, match=r"step 2 is restored, and there are later ones \(\[3, 4"):
        assert restored(made, 2) == 2


def test_the_newest_step_is_restored_by_number_without_a_warning(make: Make) -> None:
    made = make()
    train(made, [1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(made, 2) == 2


def test_after_going_back_later_steps_are_replaced(make: Make) -> None:
    made = make()
    training = Training()
    train(made, range(1, 5), training)
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, 2)
    for step in (3, 4):
        assert made.save(step, training.state, notes={"again": True})
    made.wait_until_finished()
    assert [(info.step, info.notes) for info in made.steps()] == [
        (1, {}),
        (2, {}),
        (3, {"again": True}),
        (4, {"again": True}),
    ]


def test_after_going_back_the_steps_of_before_do_not_drive_new_ones_out(make: Make) -> None:
    made = make(interval=10, keep_last=2)
    training = Training()
    train(made, range(1, 61), training)
    finish(made)
    assert made.all_steps() == [50, 60]
    made = make(keep_last=2)
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, 50)
    for step in (51, 52, 53):
        made.save(step, training.state)
    finish(made)
    # 50 is what was verified last; 60 waits to be replaced.
    assert made.all_steps() == [50, 52, 53, 60]


def test_time_based_saves_go_on_after_going_back(make: Make, clock: Clock) -> None:
    made = make(interval=timedelta(seconds=10))
    training = training_of(1)
    for step in range(1, 30_001):
        clock.now += 0.001
        made.save(step, training.state)
    first = made.all_steps()[0]
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, first)
    saved = 0
    for step in range(first + 1, first + 11_000):
        clock.now += 0.001
        saved += made.save(step, training.state)
    assert saved >= 1


def test_a_step_that_is_not_there_is_refused_and_those_that_are_are_named(make: Make) -> None:
    made = make()
    with pytest.raises(FileNotFoundError, match="step 7 is not there; complete are none"):
        restored(made, 7)
    train(made, [1, 2])
    with pytest.raises(FileNotFoundError, match=r"step 7 is not there; complete are \[1, 2\]"):
        restored(made, 7)


# --- damaged steps -------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit": lambda path: [
        flip_bit(file, file.stat().st_size // 2, 3) for file in data_files(path)
    ],
    "a short file": lambda path: [
        os.truncate(file, file.stat().st_size // 2) for file in data_files(path)
    ],
    "an empty file": lambda path: [os.truncate(file, 0) for file in data_files(path)],
    "a missing file": lambda path: [file.unlink() for file in data_files(path)],
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "short metadata": lambda path: os.truncate(path / ".metadata", 40),
    "empty metadata": lambda path: os.truncate(path / ".metadata", 0),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_step_is_passed_over(make: Make, root: Path, kind: str) -> None:
    run_of(make, range(1, 4))
    events: list[Event] = []
    made = make(on_event=events.append)
    DAMAGES[kind](root / "0000000003")
    with pytest.warns(UserWarning, match=r"step 3: rank 0: .*; the one before is restored"):
        assert restored(made) == 2
    assert [(event.kind, event.step) for event in events] == [("damaged", 3), ("restored", 2)]


def test_several_damaged_steps_are_passed_over(make: Make, root: Path) -> None:
    made = make()
    train(made, range(1, 5))
    made.wait_until_finished()
    for step in (2, 3, 4):
        damage(root, step)
    with pytest.warns(UserWarning, match=PASSED) as caught:
        assert restored(made) == 1
    assert len(caught) == 3


def test_a_damaged_step_that_was_asked_for_is_an_error(make: Make, root: Path) -> None:
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    damage(root, 2)
    with pytest.raises(CheckpointException):
        restored(made, 2)


def test_where_all_steps_are_damaged_training_does_not_begin_anew(make: Make, root: Path) -> None:
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    damage(root, 1)
    damage(root, 2)
    with (
        pytest.warns(UserWarning, match=PASSED),
        pytest.raises(CheckpointError, match=r"none of the steps in .* step 2: .*; step 1: "),
    ):
        restored(made)


def test_a_state_that_does_not_fit_is_an_error_and_no_damage(make: Make) -> None:
    made = make()
    train(made, [1, 2])
    state = {"model": torch.nn.Linear(5, 3)}
    with pytest.raises(CheckpointException) as caught:
        made.restore(state)
    assert isinstance(cause_of(caught.value), LoadMismatch)


def test_a_step_that_may_not_be_read_is_an_error_and_no_damage(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    denied = CheckpointException("load", {0: (PermissionError(13, "no"), None)})  # type: ignore[dict-item]

    def deny(*_: object, **__: object) -> None:
        raise denied

    monkeypatch.setattr(made._store, "load", deny)
    with pytest.raises(CheckpointException) as caught:
        restored(made)
    assert caught.value is denied


def test_unfinished_steps_are_not_restored(make: Make, root: Path) -> None:
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    (root / "0000000002" / MARKER_NAME).unlink()
    with pytest.warns(UserWarning, match=UNMARKED):
        assert restored(made) == 1
    assert [info.state for info in made.steps()] == ["complete", "unfinished"]


def test_a_checkpoint_without_a_marker_is_named_and_stays(make: Make, root: Path) -> None:
    torch_ckpt.save({"n": torch.ones(3)}, root / "0000000100", no_dist=True)
    state = {"n": torch.zeros(3)}
    with pytest.warns(UserWarning, match=UNMARKED) as caught:
        assert make().restore(state) == 0
    [warning] = caught
    assert f"{root}/0000000100: they were saved or copied without it" in str(warning.message)
    assert warning.filename == __file__
    (root / "0000000100" / MARKER_NAME).touch()
    assert make().restore(state) == 100
    assert_equal(state["n"], torch.ones(3))


def test_a_checkpoint_without_a_marker_beneath_a_url_is_named(make: Make, tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}/run"
    made = make(root)
    train(made, [1, 2])
    made.wait_until_finished()
    made._store._files.remove([f"0000000002/{MARKER_NAME}"])  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match=UNMARKED) as caught:
        assert restored(made) == 1
    [warning] = caught
    assert f"{root}/0000000002: they are being saved" in str(warning.message)


def test_many_checkpoints_without_markers_are_counted(make: Make, root: Path) -> None:
    for step in range(10):
        (root / f"{step:010d}").mkdir(parents=True)
    with pytest.warns(UserWarning, match="0000000007 and 2 more: they were saved"):
        make().restore({})


def test_what_a_crash_has_left_is_not_named_when_a_step_is_restored(make: Make, root: Path) -> None:
    made = make()
    train(made, [1])
    made.wait_until_finished()
    (root / "0000000002.tmp-0123abcd").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restored(made) == 1


def test_a_step_that_is_asked_for_and_has_no_marker_says_so(make: Make, root: Path) -> None:
    (root / "0000000002").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=f"step 2 has no {MARKER_NAME}; complete are none"):
        make().restore({}, 2)


# --- errors of saves -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["save", "wait_until_finished", "check_for_errors", "close"])
def test_the_error_of_a_save_is_raised_once(
    make: Make, broken: Callable[[], None], how: str
) -> None:
    made, training = make(), Training()
    train(made, [1], training)
    pending = made._pending
    assert pending is not None
    assert pending.ended.wait(LIMIT)
    broken()
    asks: dict[str, Callable[[], Any]] = {
        "save": lambda: train(made, [2], training),
        "wait_until_finished": made.wait_until_finished,
        "check_for_errors": made.check_for_errors,
        "close": made.close,
    }
    with pytest.raises(CheckpointException, match="the disk is broken") as caught:
        asks[how]()
    assert isinstance(cause_of(caught.value), NotCommitted)
    made.check_for_errors()
    made.wait_until_finished()
    torch_ckpt.check_for_errors()
    if how != "close":
        assert train(made, [3], training) == [3]
        made.wait_until_finished()
        # The save that tells of the one before has begun all the same.
        assert made.all_steps() == ([2, 3] if how == "save" else [3])
    made.close()
    assert made.save_errors == 1


def test_training_may_go_on_without_the_saves_that_fail(
    make: Make, broken: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    made, training = make(on_save_error="warn_and_continue"), Training()
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        train(made, [1, 2], training)
        made.wait_until_finished()
    assert made.save_errors == 2
    assert "step 1 could not be saved: rank 0: NotCommitted: " in caplog.text
    broken()
    train(made, [3], training)
    made.close()
    assert made.save_errors == 2
    assert made.all_steps() == [3]


def test_a_state_that_cannot_be_read_raises_at_once(make: Make) -> None:
    class Bad:
        def state_dict(self) -> Any:
            raise RuntimeError("no state today")

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    made = make()
    with pytest.raises(CheckpointError, match=r"loader: .* no state today"):
        made.save(1, {"loader": Bad()})
    assert train(made, [1]) == [1]
    assert restored(made) == 1


def test_training_may_go_on_without_a_state_that_cannot_be_read(make: Make) -> None:
    made = make(on_save_error="warn_and_continue")
    handle = made.before_save(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert train(made, [1]) == []
    assert made.save_errors == 1
    handle.remove()
    assert train(made, [2]) == [2]
    assert restored(made) == 2


def test_a_state_that_changes_too_early_fails_its_save(
    make: Make, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, training = make(staging="overlapped"), training_of(1)
    run = snapshot.Job.run

    def run_later(self: snapshot.Job, save: Any) -> None:
        gate()
        run(self, save)

    monkeypatch.setattr(snapshot.Job, "run", run_later)
    made.save(1, training.state)
    training.step()
    gate.open()
    with pytest.raises(CheckpointException) as caught:
        made.wait_until_finished()
    assert isinstance(cause_of(caught.value), SourceChanged)
    assert made.steps() == []


def test_a_failed_save_before_the_stop_does_not_lose_the_stop(
    make: Make, broken: Callable[[], None]
) -> None:
    with make(preemption_signals=(signal.SIGUSR1,)) as made:
        training = Training()
        train(made, [1], training)
        assert made._pending is not None
        assert made._pending.ended.wait(LIMIT)
        broken()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(CheckpointException):
            train(made, range(2, 1000), training)
        assert made.should_stop
        made.wait_until_finished()
        assert made.all_steps() == [2]


def test_what_ended_the_block_is_raised_and_the_save_ends(make: Make, held: Gate) -> None:
    def end(made: CheckpointManager) -> None:
        train(made, [1])
        held.open()
        raise KeyError("of training")

    made = make()
    with pytest.raises(KeyError, match="of training"), made:
        end(made)
    assert made.all_steps() == [1]


def test_an_error_of_a_save_does_not_hide_what_ended_the_block(
    make: Make, broken: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    def end(made: CheckpointManager) -> None:
        train(made, [1])
        raise KeyError("of training")

    made = make()
    with pytest.raises(KeyError, match="of training"), made:
        end(made)
    assert "the disk is broken" in caplog.text


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
        with pytest.raises(ValueError, match="the manager is closed: it cannot"):
            work()
    assert restored(made) == 1


def test_an_interpreter_that_ends_without_close_saves_and_is_quiet(root: Path) -> None:
    program = (
        "import sys, torch, torch_ckpt\n"
        "made = torch_ckpt.CheckpointManager(sys.argv[1], keep_last=1)\n"
        "for step in (1, 2): made.save(step, {'w': torch.ones(1000)})\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(root)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=Path(__file__).parents[2],
        check=True,
    )
    assert run.stderr == ""
    assert CheckpointManager(root, read_only=True).latest_step() == 2


# --- what is kept --------------------------------------------------------------------------------


def test_steps_that_no_rule_keeps_go_in_the_background(make: Make) -> None:
    events: list[Event] = []
    made = make(keep_last=2, keep_every=4, on_event=events.append)
    train(made, range(1, 11))
    finish(made)
    assert made.all_steps() == [4, 8, 9, 10]
    assert [event.step for event in events if event.kind == "deleted"] == [1, 2, 3, 5, 6, 7]


def test_without_a_rule_nothing_goes(make: Make) -> None:
    made = make()
    train(made, range(1, 8))
    finish(made)
    assert made.all_steps() == [*range(1, 8)]


def test_the_best_steps_stay(make: Make) -> None:
    made = make(keep_best=2, best_metric="loss")
    training = Training()
    for step, loss in enumerate([3.0, 1.0, float("nan"), 2.0, 5.0], 1):
        train(made, [step], training, metrics={"loss": loss})
    finish(made)
    assert made.all_steps() == [2, 4, 5]
    assert made.best_step() == 2


def test_a_pinned_step_stays_until_it_is_not(make: Make) -> None:
    made = make(keep_last=1)
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


def test_a_step_that_is_not_there_cannot_be_pinned(make: Make) -> None:
    with pytest.raises(FileNotFoundError, match="there is no complete step to pin"):
        make().pin(3)


def test_the_step_that_was_restored_stays(make: Make) -> None:
    run_of(make, [1, 2])
    made = make(keep_last=1)
    restored(made)
    train(made, [3, 4])
    finish(made)
    assert made.all_steps() == [2, 4]


def test_the_step_that_was_verified_last_stays_unless_it_is_damaged(make: Make, root: Path) -> None:
    made = make(keep_last=1, interval=100)
    run_of(make, range(1, 4))
    damage(root, 2)
    assert made.verify(1).ok
    assert not made.verify(2).ok
    train(made, [4], force=True)
    finish(made)
    assert made.all_steps() == [1, 4]


def test_a_step_that_somebody_reads_stays_until_a_later_save(make: Make, root: Path) -> None:
    made = make(keep_last=1)
    training = Training()
    train(made, [1], training)
    made.wait_until_finished()
    with closing(OpenDirectory(root / "0000000001")) as reader:
        assert reader.share()
        train(made, [2], training)
        finish(made)
        assert made.all_steps() == [1, 2]
    train(made, [3], training)
    finish(made)
    assert made.all_steps() == [3]


def test_a_deletion_that_fails_is_logged_and_training_goes_on(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(keep_last=1)

    def fail(path: str) -> None:
        raise OSError(EIO, "no", path)

    monkeypatch.setattr(steps.shutil, "rmtree", fail)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        train(made, [1, 2])
        finish(made)
    assert "step 1 could not be deleted" in caplog.text
    assert made.all_steps() == [2]


def test_a_step_can_be_deleted_by_hand(make: Make, root: Path) -> None:
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    with closing(OpenDirectory(root / "0000000001")) as reader:
        assert reader.share()
        with pytest.raises(CheckpointError, match="step 1 is being saved or loaded"):
            made.delete(1)
    made.delete(1)
    made.delete(1)
    assert made.all_steps() == [2]


def test_a_full_disk_fails_the_save_after_its_deletions_have_been_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(keep_last=1)
    waited: list[None] = []
    end = made._deletions.settle

    def settle(timeout: float | None = None) -> None:
        waited.append(None)
        end()

    monkeypatch.setattr(made._deletions, "settle", settle)

    class Full:
        f_blocks, f_frsize, f_bavail = 100, 1, 10

    monkeypatch.setattr(free_space.os, "statvfs", lambda path: Full)
    train(made, [1])
    with pytest.raises(CheckpointException, match="keep fewer steps, or make room"):
        made.wait_until_finished()
    assert waited
    assert made.steps() == []


def test_leftovers_of_a_crash_go_at_the_start_and_are_named(
    make: Make, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = root / "0000000003.tmp-0a1b2c3d"
    left.mkdir(parents=True)
    foreign = root / "notes.txt"
    foreign.touch()
    events: list[Event] = []
    finish(make(on_event=events.append))
    assert not left.exists()
    assert foreign.exists()
    assert kinds(events) == ["leftovers"]
    assert left.name in events[0].message


def test_leftovers_that_cannot_be_removed_do_not_stop_training(
    make: Make, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "0000000003.tmp-0a1b2c3d").mkdir(parents=True)

    def fail(path: str) -> None:
        raise OSError(EIO, "no", path)

    monkeypatch.setattr(steps.shutil, "rmtree", fail)
    made = make()
    assert train(made, [1]) == [1]
    finish(made)
    assert "a leftover could not be removed" in caplog.text
    assert made.all_steps() == [1]


# --- two managers --------------------------------------------------------------------------------


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


def test_the_error_of_one_manager_is_not_the_others(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make(tmp_path / "one"), make(tmp_path / "other")
    write_marker = steps.write_marker

    def fail_in_one(directory: OpenDirectory, *rest: Any) -> None:
        if str(tmp_path / "one") in directory.path:
            raise OSError(EIO, "the disk is broken", str(directory))
        write_marker(directory, *rest)

    monkeypatch.setattr(steps, "write_marker", fail_in_one)
    # As if its own callback came late, after the other one's save has found that it has failed.
    held = threading.Event()
    ended = one._ended

    def late(*args: Any) -> None:
        assert held.wait(LIMIT)
        ended(*args)

    monkeypatch.setattr(one, "_ended", late)
    train(one, [1])
    try:
        train(other, [1])
        other.wait_until_finished()
    finally:
        held.set()
    assert other.save_errors == 0
    with pytest.raises(CheckpointException, match="the disk is broken"):
        one.wait_until_finished()


def test_two_managers_share_a_watch_until_both_are_closed(make: Make, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = {"preemption_signals": (signal.SIGUSR1,)}
    one, other = make(tmp_path / "one", **signals), make(tmp_path / "other", **signals)
    one.close()
    training = Training()
    train(other, [1], training)
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = until_told(other, 2, training)
    other.wait_until_finished()
    assert other.latest_step() == stopped
    other.close()
    assert signal.getsignal(signal.SIGUSR1) is before
    assert current_watch(None) is None


def test_a_watch_of_the_program_is_used_and_left_open(make: Make) -> None:
    with multihost.watch_for_preemption((signal.SIGUSR1,), poll_seconds=0.01) as watch:
        made = make(preemption_signals=(signal.SIGUSR2,))
        made.close()
        assert current_watch(None) is watch


# --- preemption ----------------------------------------------------------------------------------


def until_told(made: CheckpointManager, first: int, training: Training) -> int:
    """The step at which training is told to stop."""
    for step in range(first, first + 100_000):
        training.step()
        made.save(step, training.state)
        if made.should_stop:
            return step
    raise AssertionError("nobody was told")


def test_a_signal_saves_and_stops(make: Make) -> None:
    events: list[Event] = []
    made = make(interval=10**6, preemption_signals=(signal.SIGUSR1,), on_event=events.append)
    training = Training()
    assert train(made, [1, 2], training) == []
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = until_told(made, 3, training)
    assert stopped <= 4
    finish(made)
    assert made.all_steps() == [stopped]
    assert restored(made) == stopped
    [event] = [event for event in events if event.kind == "preempted"]
    assert event.step == stopped
    assert "SIGUSR1 on rank 0" in event.message


def test_a_file_saves_and_stops(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "stop"
    made = make(interval=10**6, preemption_file=file)
    training = Training()
    train(made, [1, 2], training)
    assert not made.should_stop
    file.touch()
    stopped = until_told(made, 3, training)
    made.wait_until_finished()
    assert made.all_steps() == [stopped]


def test_a_step_that_is_saved_anyway_is_saved_once_at_the_stop(make: Make) -> None:
    events: list[Event] = []
    made = make(preemption_signals=(signal.SIGUSR1,), on_event=events.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = until_told(made, 1, Training())
    made.wait_until_finished()
    assert [event.step for event in events if event.kind == "saved"] == [*range(1, stopped + 1)]


def test_with_a_deadline_the_last_save_is_waited_for_and_its_time_logged(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(interval=10**6, preemption_signals=(signal.SIGUSR1,), preemption_deadline=90)
    os.kill(os.getpid(), signal.SIGUSR1)
    with caplog.at_level(logging.INFO, "torch_ckpt"):
        stopped = until_told(made, 1, Training())
    assert not made.is_saving
    assert made.all_steps() == [stopped]
    assert f"step {stopped} is saved before the end, 90 s from the notice: it is the first" in (
        caplog.text
    )


def test_a_deadline_that_is_too_short_is_a_warning(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(interval=10**6, preemption_signals=(signal.SIGUSR1,), preemption_deadline=1e-9)
    training = Training()
    train(made, [1], training, force=True)
    made.wait_until_finished()
    os.kill(os.getpid(), signal.SIGUSR1)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        until_told(made, 2, training)
    assert "from the notice: the last one took" in caplog.text


def test_a_skipping_manager_saves_at_the_stop_though_it_is_busy(make: Make, held: Gate) -> None:
    made = make(if_busy="skip", preemption_signals=(signal.SIGUSR1,))
    training = Training()
    train(made, [1], training)
    os.kill(os.getpid(), signal.SIGUSR1)
    held.wait()
    held.open()
    stopped = until_told(made, 2, training)
    made.wait_until_finished()
    assert made.latest_step() == stopped


def test_signals_are_as_they_were_after_the_block(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(root):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_that_are_asked_for_are_refused_outside_the_main_thread(root: Path) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ValueError, match="signals can be watched from the main thread only"),
    ):
        pool.submit(CheckpointManager, root, preemption_signals=(signal.SIGTERM,)).result(LIMIT)


def test_outside_the_main_thread_no_signal_is_watched_by_default(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        ThreadPoolExecutor(1) as pool,
        pool.submit(CheckpointManager, root).result(LIMIT) as made,
    ):
        assert train(made, [1]) == [1]
        assert signal.getsignal(signal.SIGTERM) is before


# --- looking on ----------------------------------------------------------------------------------


def test_events_tell_what_was_done(make: Make) -> None:
    events: list[Event] = []
    made = make(on_event=events.append)
    train(made, [1])
    made.wait_until_finished()
    restored(made)
    assert kinds(events) == ["saving", "saved", "restored"]
    saving, saved, of_restore = events
    assert [event.step for event in events] == [1, 1, 1]
    assert [event.rank for event in events] == [0, 0, 0]
    assert 0 < saving.seconds <= saved.seconds + 1
    assert saved.metrics is not None
    assert saved.bytes == saved.metrics.bytes > 0
    assert of_restore.seconds > 0
    assert all(f"step {event.step}" in event.message for event in events)


def test_a_failed_save_is_an_event(make: Make, broken: Callable[[], None]) -> None:
    events: list[Event] = []
    made = make(on_event=events.append, on_save_error="warn_and_continue")
    train(made, [1])
    made.wait_until_finished()
    assert kinds(events) == ["saving", "save_failed"]
    assert "the disk is broken" in events[1].message


def test_a_function_that_fails_on_an_event_fails_no_save(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise KeyError(event.kind)

    made = make(on_event=fail)
    train(made, [1, 2])
    made.wait_until_finished()
    assert made.all_steps() == [1, 2]
    assert "an event (saved) could not be passed on" in caplog.text


def test_the_log_has_a_line_for_each_event(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_ckpt"):
        made = make()
        train(made, [1])
        made.wait_until_finished()
    events = [record.event for record in caplog.records if hasattr(record, "event")]
    assert kinds(events) == ["saved"]


def test_tensorboard_gets_what_saves_cost(make: Make) -> None:
    class Board:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

    board = Board()
    made = make(tensorboard=board)
    train(made, [3])
    made.wait_until_finished()
    restored(made)
    assert {(name, step) for name, _value, step in board.scalars} == {
        ("checkpoint/blocked_seconds", 3),
        ("checkpoint/background_seconds", 3),
        ("checkpoint/training_seconds_between_saves", 3),
        ("checkpoint/bytes", 3),
        ("checkpoint/restored_seconds", 3),
    }
    assert all(value >= 0 for _name, value, _step in board.scalars)


def test_tensorboard_may_be_a_directory(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = make(tensorboard=tmp_path / "board")
    train(made, [3])
    made.close()
    found = EventAccumulator(str(tmp_path / "board")).Reload()
    [scalar] = found.Scalars("checkpoint/bytes")
    assert scalar.step == 3
    assert scalar.value > 0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_there_is_a_bar_on_terminals_and_none_in_logs(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    given: list[Any] = []
    made_by = writer.FileSystemWriter.__init__

    def note(self: Any, *args: Any, **options: Any) -> None:
        given.append(options["progress"])
        made_by(self, *args, **options)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(writer.FileSystemWriter, "__init__", note)
    run_of(make, [1])
    assert set(given) == {is_terminal}


def test_replicas_are_not_compared_in_one_process(make: Make) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = make(check_replicas="error", check_replicas_every=1)
        train(made, [1, 2])
        made.wait_until_finished()
    assert made.all_steps() == [1, 2]


# --- read_only -----------------------------------------------------------------------------------


def test_who_only_reads_changes_nothing(make: Make, root: Path) -> None:
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
        with pytest.raises(ValueError, match="the manager is read_only: it cannot"):
            work()
    assert restored(made) == 1
    assert made.verify(1).ok
    assert not made.should_stop
    made.close()


# --- wrong options -------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"if_busy": "drop"}, ValueError, "if_busy must be one of 'wait', 'skip', got 'drop'"),
    ({"check_replicas": True}, ValueError, "check_replicas must be one of"),
    ({"check_replicas_every": 0}, ValueError, "check_replicas_every must be at least 1, got 0"),
    ({"on_save_error": "ignore"}, ValueError, "on_save_error must be one of"),
    ({"staging": "lazy"}, ValueError, "staging must be one of"),
    ({"interval": 0}, ValueError, "interval must be positive, got 0"),
    ({"interval": "auto", "max_overhead": 1.5}, ValueError, "max_overhead must be between"),
    ({"interval": "auto", "mtbf_hours": 0}, ValueError, "mtbf_hours must be positive, got 0"),
    ({"keep_last": 0}, ValueError, "keep_last must be positive"),
    ({"keep_last": 1.5}, TypeError, "cannot be interpreted as an integer"),
    ({"keep_best": 1}, ValueError, "keep_best needs best_metric"),
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
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_options_are_refused_when_it_is_made(
    root: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error, match=text):
        CheckpointManager(root, **options)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not root.exists()
