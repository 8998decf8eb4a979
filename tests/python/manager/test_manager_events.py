"""Tests of a manager's reports: events, the log, TensorBoard, the progress bar."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.gates import LIMIT
from tests.managers import (
    BROKEN,
    Make,
    finish,
    kinds,
    of_kind,
    restored,
    run_of,
    train,
    training_of,
)
from tests.support import Terminal
from torch_ckpt.events import Event


def test_events_report_each_action(make: Make) -> None:
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
    assert BROKEN in events[1].message


def test_a_failing_event_callback_fails_no_save(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: Event) -> None:
        raise KeyError(event.kind)

    made = make(on_event=fail)
    train(made, [1, 2])
    made.wait_until_finished()
    assert made.all_steps() == [1, 2]
    assert "could not report the event saved" in caplog.text


@pytest.mark.parametrize("error", [SystemExit(3), CheckpointException("test", {}), KeyError()])
def test_an_exception_in_on_event_is_logged(
    error: BaseException, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    made = make(keep_last=1, on_event=of_kind("saved", fail))
    train(made, [1, 2])
    finish(made)
    assert "could not report the event saved" in caplog.text
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
        # Call once only: the calls cause events of their own.
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
    made._deletions.wait_until_idle(LIMIT)
    assert called.wait(LIMIT)


def test_the_log_has_a_line_for_each_event(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch_ckpt"):
        made = make()
        train(made, [1])
        made.wait_until_finished()
    events = [record.event for record in caplog.records if hasattr(record, "event")]
    assert kinds(events) == ["saved"]


def test_tensorboard_gets_the_cost_of_saves(make: Make) -> None:
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


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "log"])
def test_progress_is_a_bar_on_terminals_and_absent_from_logs(
    make: Make, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    run_of(make, [1])
    assert ("100% of" in stream.getvalue()) == stream.isatty()
