"""Tests of a manager's reports: events, on_commit, the log, TensorBoard, the progress bar."""

from __future__ import annotations

import io
import itertools
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.gates import LIMIT, eventually
from tests.managers import (
    Make,
    damage,
    finish,
    kinds,
    manager_of,
    of_kind,
    restored,
    run_of,
    state_of,
    train,
    training_of,
)
from tests.support import Terminal, cause_of
from torch_ckpt import OnCommitFailed
from torch_ckpt.events import Event, TensorBoard
from torch_ckpt.manager import SaveOptions
from torch_ckpt.steps.root_lease import LEASE_NAME


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


@pytest.mark.parametrize(
    ("kinds_that_fail", "error"),
    [
        ({"saving", "saved", "deleted"}, KeyError()),
        ({"saved"}, SystemExit(3)),
        ({"saved"}, CheckpointException("test", {})),
    ],
)
def test_an_exception_in_on_event_is_logged_and_fails_no_save(
    kinds_that_fail: set[str],
    error: BaseException,
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(event: Event) -> None:
        if event.kind in kinds_that_fail:
            raise error

    made = make(keep=1, on_event=fail)
    train(made, [1, 2])
    finish(made)
    for kind in kinds_that_fail:
        assert f"could not report the event {kind}" in caplog.text
    assert made.all_steps() == [2]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *itertools.product(
            ["saving", "saved", "deleted"], ["wait_until_finished", "close", "restore", "pin"]
        ),
        ("on_commit", "wait_until_finished"),
    ],
)
def test_on_event_and_on_commit_may_call_the_manager(
    kind: str, how: str, make: Make, root: Path
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "wait_until_finished": lambda: made.wait_until_finished(LIMIT),
        "close": lambda: made.close(),
        "restore": lambda: made.restore(training_of(1).state),
        "pin": lambda: made.all_steps() and made.pin(made.all_steps()[-1]),
    }
    called = threading.Event()

    def call(_step: int = 0) -> None:
        # Call once only: the calls cause events of their own.
        if not called.is_set():
            called.set()
            calls[how]()

    if kind == "on_commit":
        made = make(keep=1, saves=SaveOptions(on_commit=call))
    else:
        made = make(keep=1, on_event=of_kind(kind, call))
    try:
        train(made, [1, 2])
    except ValueError as error:
        assert how == "close"
        assert re.search("the manager (is|was) closed", str(error))  # noqa: PT017
    made.wait_until_finished(LIMIT)
    made._deletions.wait_until_idle(LIMIT)
    assert called.wait(LIMIT)
    if how == "close":
        # A save that was running is complete, and has released the lease.
        assert made.all_steps()
        eventually(lambda: b'"released"' in (root / LEASE_NAME).read_bytes())


def test_tensorboard_gets_the_cost_of_saves(make: Make) -> None:
    scalars: list[tuple[str, float, int]] = []

    class Board:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars.append((name, value, step))

    made = make(on_event=TensorBoard(Board()))
    train(made, [3])
    made.wait_until_finished()
    restored(made)
    assert {(name, step) for name, _value, step in scalars} == {
        ("checkpoint/blocked_seconds", 3),
        ("checkpoint/background_seconds", 3),
        ("checkpoint/training_seconds_between_saves", 3),
        ("checkpoint/bytes", 3),
        ("checkpoint/restored_seconds", 3),
    }
    assert all(value >= 0 for _name, value, _step in scalars)


class _Refusing:
    """A writer that raises the name of the first scalar."""

    def add_scalar(self, name: str, value: float, step: int) -> None:
        raise AssertionError(name)


def test_tensorboard_gets_only_the_events_of_rank_0() -> None:
    board = TensorBoard(_Refusing())
    board(Event("restored", 3, rank=1, seconds=1.0))
    board(Event("deleted", 3, rank=0))
    with pytest.raises(AssertionError, match="restored_seconds"):
        board(Event("restored", 3, rank=0, seconds=1.0))


def test_a_tensorboard_directory_without_the_package_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ckpt.events.find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"pip install 'torch_ckpt\[tensorboard\]'"):
        TensorBoard(tmp_path / "board")


def test_tensorboard_may_be_a_directory(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = make(on_event=TensorBoard(tmp_path / "board"))
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


def test_on_commit_is_called_with_the_step_once_it_is_complete(tmp_path: Path) -> None:
    found: list[tuple[int, list[int], int | None]] = []
    with manager_of(
        tmp_path,
        saves=SaveOptions(
            on_commit=lambda step: found.append((step, made.all_steps(), made.last_step))
        ),
    ) as made:
        for step in (1, 2):
            made.save(step, state_of(step))
    assert found == [(1, [1], None), (2, [1, 2], 1)]


def test_an_exception_in_on_commit_is_raised_later_and_the_step_stays(tmp_path: Path) -> None:
    def fail(step: int) -> None:
        raise OSError(f"no network for step {step}")

    with manager_of(tmp_path, saves=SaveOptions(on_commit=fail), keep=1) as made:
        made.save(1, state_of(1))
        with pytest.raises(OnCommitFailed, match="no network for step 1") as caught:
            made.wait_until_finished()
        assert isinstance(cause_of(caught.value), OnCommitFailed)
        assert (made.last_step, made.all_steps(), made.save_errors) == (1, [1], 1)
        # The step is saved, so it is not saved again.
        assert not made.save(1, state_of(1))
        made.save(2, state_of(2))
        with pytest.raises(OnCommitFailed):
            made.wait_until_finished()
        finish(made)
        assert made.all_steps() == [2]


def test_a_failed_on_commit_may_be_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(step: int) -> None:
        raise OSError("no network")

    with manager_of(
        tmp_path, saves=SaveOptions(on_commit=fail), on_save_error="warn_and_continue"
    ) as made:
        for step in (1, 2):
            assert made.save(step, state_of(step))
    assert made.save_errors == 2
    assert "no network" in caplog.text
    assert "could not be saved" not in caplog.text


def test_each_save_and_restore_is_one_info_record_with_its_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ckpt.events._is_restore_shown", False)
    caplog.set_level(logging.INFO, "torch_ckpt")
    with manager_of(tmp_path) as made:
        for step in (1, 2):
            made.save(step, state_of(step))
        made.wait_until_finished()
        made.restore(state_of(0))
    lines = [record.message.partition(":")[0] for record in caplog.records]
    assert lines[:2] == ["step 1 is saved", "step 2 is saved"]
    assert len(lines) == 3
    assert lines[2].startswith(f"restored step 2 from {tmp_path} in ")
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 3
    of_save = caplog.records[0]
    assert of_save.event.kind == "saved"  # type: ignore[attr-defined]
    assert of_save.metrics["bytes"] > 0  # type: ignore[attr-defined]


@contextmanager
def own_logger() -> Iterator[logging.Logger]:
    """Restores the logger of a program that has not configured logging; pytest configures the
    root logger."""
    logger = logging.getLogger("torch_ckpt")
    handlers, level = logger.handlers[:], logger.level
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = False
    try:
        yield logger
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = True


@pytest.mark.filterwarnings("ignore:.*falling back to step")
@pytest.mark.parametrize("configured", ["nothing", "a handler", "a level"])
def test_the_first_restore_is_shown_unless_logging_is_configured(
    tmp_path: Path,
    configured: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch_ckpt.events._is_restore_shown", False)
    with manager_of(tmp_path) as made:
        for step in (1, 2, 3):
            made.save(step, state_of(step))
    for step in (2, 3):
        damage(tmp_path, step)
    capsys.readouterr()
    with own_logger() as logger, manager_of(tmp_path) as made:
        if configured == "a handler":
            logger.addHandler(logging.NullHandler())
        if configured == "a level":
            logger.setLevel(logging.ERROR)
        assert made.restore(state_of(0)) == 1
        printed = capsys.readouterr().err
        for shown in (
            f"torch_ckpt: restored step 1 from {tmp_path} in ",
            "skipping 2 damaged steps",
        ):
            assert (shown in printed) == (configured == "nothing")
        made.restore(state_of(0))
    assert "restored step" not in capsys.readouterr().err
