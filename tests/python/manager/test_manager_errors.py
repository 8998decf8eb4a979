"""Tests of failed saves of a manager: when their errors are raised, and how training continues."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable
from errno import EROFS
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import failing, held
from tests.gates import LIMIT
from tests.managers import (
    BROKEN,
    Make,
    Training,
    kinds,
    of_kind,
    restored,
    train,
    training_of,
)
from tests.support import cause_of
from torch_ckpt import CheckpointError, CheckpointManager, SourceChanged
from torch_ckpt.errors import NotCommitted, RootInUse
from torch_ckpt.events import Event
from torch_ckpt.manager import Preemption, SaveOptions


def test_a_save_that_fails_after_a_takeover_names_the_run_that_has_the_root(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    monkeypatch.setattr(made._store, "patience", 0.0)

    def require() -> None:
        raise RootInUse("process 7 has taken over this root")

    with held("files are written") as gate:
        train(made, [1], Training())
        gate.wait()
        # The other run has swept the directory of the save.
        [unfinished] = tmp_path.glob("**/*.tmp-*")
        shutil.rmtree(unfinished)
        monkeypatch.setattr(made._saver.run.lease, "require", require)
        gate.open()
        with pytest.raises(RootInUse, match="process 7 has taken over this root"):
            made.wait_until_finished()
    monkeypatch.undo()


@pytest.mark.parametrize("how", ["save", "wait_until_finished", "check_for_errors", "close"])
def test_a_save_error_is_raised_once(make: Make, broken: Callable[[], None], how: str) -> None:
    made, training = make(), Training()
    train_until_it_has_failed(made, training)
    broken()
    asks: dict[str, Callable[[], Any]] = {
        "save": lambda: train(made, [2], training),
        "wait_until_finished": made.wait_until_finished,
        "check_for_errors": made.check_for_errors,
        "close": made.close,
    }
    with pytest.raises(CheckpointException, match=BROKEN) as caught:
        asks[how]()
    assert isinstance(cause_of(caught.value), NotCommitted)
    made.check_for_errors()
    made.wait_until_finished()
    torch_ckpt.check_for_errors()
    if how != "close":
        assert train(made, [3], training) == [3]
        made.wait_until_finished()
        # The save that raises the error of the previous one has started anyway.
        assert made.all_steps() == ([2, 3] if how == "save" else [3])
    made.close()
    assert made.save_errors == 1


def train_until_it_has_failed(made: CheckpointManager, training: Training) -> None:
    """Saves step 1 with the fixture ``broken``, and waits until its save has failed."""
    train(made, [1], training)
    pending = made._saver.pending
    assert pending is not None
    assert pending.ended.wait(LIMIT)


def test_training_may_continue_after_failed_saves(
    make: Make, broken: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    events: list[Event] = []
    made = make(on_save_error="warn_and_continue", on_event=events.append)
    training = Training()
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        train(made, [1, 2], training)
        made.wait_until_finished()
    assert (made.save_errors, made.last_step) == (2, None)
    assert "step 1 could not be saved: rank 0: NotCommitted: " in caplog.text
    assert kinds(events) == ["saving", "save_failed"] * 2
    assert BROKEN in events[1].message
    broken()
    train(made, [3], training)
    made.close()
    assert made.save_errors == 2
    assert made.all_steps() == [3]


def test_an_unreadable_state_raises_at_once(make: Make) -> None:
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


def test_training_may_continue_after_an_unreadable_state(make: Make) -> None:
    made = make(on_save_error="warn_and_continue")
    handle = made.before_save(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert train(made, [1]) == []
    assert made.save_errors == 1
    handle.remove()
    assert train(made, [2]) == [2]
    assert restored(made) == 2


def test_a_state_that_changes_too_early_fails_its_save(make: Make) -> None:
    made, training = make(saves=SaveOptions(staging="overlapped")), training_of(1)
    with held("mkdir", "*.tmp-*") as gate:
        made.save(1, training.state)
        training.step()
        gate.open()
        with pytest.raises(CheckpointException) as caught:
            made.wait_until_finished()
    assert isinstance(cause_of(caught.value), SourceChanged)
    assert made.steps() == []


def test_a_failed_save_before_a_stop_keeps_the_stop(make: Make, broken: Callable[[], None]) -> None:
    with make(preemption=Preemption(signals=(signal.SIGUSR1,))) as made:
        training = Training()
        train_until_it_has_failed(made, training)
        broken()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(CheckpointException):
            train(made, range(2, 1000), training)
        assert made.should_stop
        made.wait_until_finished()
        assert made.all_steps() == [2]


def test_the_error_of_a_save_does_not_hide_the_exception_that_left_the_block(
    make: Make, broken: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    def end(made: CheckpointManager) -> None:
        train(made, [1])
        raise KeyError("of training")

    made = make()
    with pytest.raises(KeyError, match="of training"), made:
        end(made)
    assert BROKEN in caplog.text


def test_a_keyboard_interrupt_in_a_save_is_not_hidden_by_an_earlier_error(
    make: Make, broken: Callable[[], None]
) -> None:
    made = make()
    train(made, [1])
    with pytest.raises(CheckpointException):
        made.wait_until_finished()
    train(made, [2])

    def interrupt() -> None:
        raise KeyboardInterrupt

    made.before_save(interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(made, [3])


def test_one_manager_does_not_raise_the_error_of_another(make: Make, tmp_path: Path) -> None:
    other = make(tmp_path / "other")

    def save_other() -> None:
        # This save finds the failed save of the first manager, which has not raised its error yet.
        train(other, [1])
        other.wait_until_finished()

    one = make(tmp_path / "one", on_event=of_kind("saving", save_other))
    with failing("rename", EROFS, tmp_path / "one/*/write_completed"):
        train(one, [1])
        assert (other.save_errors, other.all_steps()) == (0, [1])
        with pytest.raises(CheckpointException, match=BROKEN):
            one.wait_until_finished()
