"""Tests of a manager's notices: on_commit, the log, signals, destroyed process groups."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.gates import LIMIT
from tests.managers import damage, finish, manager_of, state_of
from tests.support import cause_of
from torch_ckpt import CheckpointManager, OnCommitFailed

# --- on_commit -----------------------------------------------------------------------------------


def test_on_commit_is_called_with_the_step_once_it_is_complete(tmp_path: Path) -> None:
    found: list[tuple[int, list[int], int | None]] = []
    with manager_of(
        tmp_path, on_commit=lambda step: found.append((step, made.all_steps(), made.last_step))
    ) as made:
        for step in (1, 2):
            made.save(step, state_of(step))
    assert found == [(1, [1], None), (2, [1, 2], 1)]


def test_an_exception_in_on_commit_is_raised_by_the_next_save_and_the_step_stays(
    tmp_path: Path,
) -> None:
    def fail(step: int) -> None:
        raise OSError(f"no network for step {step}")

    with manager_of(tmp_path, on_commit=fail, keep_last=1) as made:
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


def test_training_may_continue_if_on_commit_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(step: int) -> None:
        raise OSError("no network")

    with manager_of(tmp_path, on_commit=fail, on_save_error="warn_and_continue") as made:
        for step in (1, 2):
            assert made.save(step, state_of(step))
    assert made.save_errors == 2
    assert "no network" in caplog.text
    assert "could not be saved" not in caplog.text


def test_on_commit_may_call_methods_that_wait(tmp_path: Path) -> None:
    called = threading.Event()

    def wait(step: int) -> None:
        made.wait_until_finished(LIMIT)
        called.set()

    with manager_of(tmp_path, on_commit=wait) as made:
        made.save(1, state_of(1))
        assert called.wait(LIMIT)


# --- the log -------------------------------------------------------------------------------------


def test_each_save_and_restore_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert caplog.records[0].metrics["bytes"] > 0  # type: ignore[attr-defined]


def damaged_run(root: Path) -> None:
    with manager_of(root) as made:
        for step in (1, 2, 3):
            made.save(step, state_of(step))
    for step in (2, 3):
        damage(root, step)


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
    monkeypatch.setattr("torch_ckpt.manager.reporters._is_restore_shown", False)
    damaged_run(tmp_path)
    capsys.readouterr()
    with own_logger() as logger, manager_of(tmp_path) as made:
        if configured == "a handler":
            logger.addHandler(logging.NullHandler())
        if configured == "a level":
            logger.setLevel(logging.ERROR)
        assert made.restore(state_of(0)) == 1
        shown = f"torch_ckpt: restored step 1 from {tmp_path} in "
        printed = capsys.readouterr().err
        assert (shown in printed) == (configured == "nothing")
        assert ("after skipping 2 damaged steps" in printed) == (configured == "nothing")
        made.restore(state_of(0))
    assert "restored step" not in capsys.readouterr().err


def test_a_restore_is_an_info_record_if_logging_is_configured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_ckpt.manager.reporters._is_restore_shown", False)
    caplog.set_level(logging.INFO, "torch_ckpt")
    with manager_of(tmp_path) as made:
        made.save(1, state_of(1))
        made.restore(state_of(0))
    restored = [record for record in caplog.records if record.message.startswith("restored")]
    assert [record.levelno for record in restored] == [logging.INFO]


# --- signals -------------------------------------------------------------------------------------

_NEVER_ASKS = """
import sys, torch, torch_ckpt
with torch_ckpt.CheckpointManager(sys.argv[1], interval=10**6, preemption_file="-") as manager:
    print("begun", flush=True)
    step = 0
    while True:
        step += 1
        manager.save(step, {"x": torch.ones(3)})
"""


def test_a_second_signal_ends_a_program_that_ignores_should_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", _NEVER_ASKS, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGTERM)
            line = ""
            while "the training loop does not read should_stop" not in line:
                line = process.stderr.readline()
                assert line
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT) == -signal.SIGTERM
        finally:
            process.kill()
    with manager_of(tmp_path, read_only=True) as made:
        assert len(made.all_steps()) == 1


def test_a_loop_that_reads_should_stop_may_continue_and_be_notified_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, interval=100) as made:
        for step in (1, 2):
            made.save(step, state_of(step))
            assert not made.should_stop
        signal.raise_signal(signal.SIGTERM)
        assert made.save(3, state_of(3))
        assert made.should_stop
        made.save(4, state_of(4))
        signal.raise_signal(signal.SIGTERM)
        assert made.save(5, state_of(5))


# --- process groups ------------------------------------------------------------------------------


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


def test_a_manager_made_before_its_group_is_refused(tmp_path: Path) -> None:
    with manager_of(tmp_path) as made:
        with (
            ranks_of_a_run(2),
            pytest.raises(RuntimeError, match=r"created before init_process_group\(\)"),
        ):
            made.save(1, state_of(1))
        assert made.save(1, state_of(1))


def test_a_group_of_one_rank_may_be_made_and_destroyed(tmp_path: Path) -> None:
    with ranks_of_a_run(1), manager_of(tmp_path) as made:
        dist.destroy_process_group()
        assert made.save(1, state_of(1))
