"""Tests of a manager with preemption notices, by signal or file."""

from __future__ import annotations

import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gates import LIMIT, Gate
from tests.managers import (
    Make,
    Training,
    finish,
    restored,
    train,
    until_stopped,
)
from torch_ckpt import CheckpointManager, multihost
from torch_ckpt.events import Event
from torch_ckpt.multihost.preemption import current_watch


def test_a_signal_saves_and_stops(make: Make) -> None:
    events: list[Event] = []
    made = make(interval=10**6, preemption_signals=(signal.SIGUSR1,), on_event=events.append)
    training = Training()
    assert train(made, [1, 2], training) == []
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = until_stopped(made, 3, training)
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
    stopped = until_stopped(made, 3, training)
    made.wait_until_finished()
    assert made.all_steps() == [stopped]


def test_a_due_step_is_saved_once_at_the_stop(make: Make) -> None:
    events: list[Event] = []
    made = make(preemption_signals=(signal.SIGUSR1,), on_event=events.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = until_stopped(made, 1, Training())
    made.wait_until_finished()
    assert [event.step for event in events if event.kind == "saved"] == [*range(1, stopped + 1)]


def test_with_a_deadline_save_waits_for_the_last_save_and_logs_its_time(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(interval=10**6, preemption_signals=(signal.SIGUSR1,), preemption_deadline=90)
    os.kill(os.getpid(), signal.SIGUSR1)
    with caplog.at_level(logging.INFO, "torch_ckpt"):
        stopped = until_stopped(made, 1, Training())
    assert not made.is_saving
    assert made.all_steps() == [stopped]
    assert (
        f"saving step {stopped} before preemption (preemption_deadline: 90 s); this is the first"
        in (caplog.text)
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
        until_stopped(made, 2, training)
    assert "before preemption (preemption_deadline: 0 s); the previous save took" in caplog.text


def test_a_skipping_manager_saves_at_the_stop_even_while_another_save_runs(
    make: Make, held_commits: Gate
) -> None:
    made = make(if_busy="skip", preemption_signals=(signal.SIGUSR1,))
    training = Training()
    train(made, [1], training)
    os.kill(os.getpid(), signal.SIGUSR1)
    held_commits.wait()
    held_commits.open()
    stopped = until_stopped(made, 2, training)
    made.wait_until_finished()
    assert made.latest_step() == stopped


def test_signal_handlers_are_restored_after_the_block(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(root):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) is before


def test_explicit_signals_are_refused_outside_the_main_thread(root: Path) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(ValueError, match="signals can be watched only from the main thread"),
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


# --- several managers -----------------------------------------------------------------------------


def test_notices_that_the_existing_watch_lacks_are_named(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(preemption_signals=(signal.SIGUSR1,))
    make(tmp_path / "other", preemption_signals=(signal.SIGUSR1,))
    assert "already" not in caplog.text
    make(tmp_path / "third", preemption_file=tmp_path / "stop")
    assert "already has a watch for other notices" in caplog.text


def test_each_of_several_managers_stops_at_its_next_step(make: Make, tmp_path: Path) -> None:
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


def test_two_managers_share_a_watch_until_both_are_closed(make: Make, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = {"preemption_signals": (signal.SIGUSR1,)}
    one, other = make(tmp_path / "one", **signals), make(tmp_path / "other", **signals)
    one.close()
    training = Training()
    train(other, [1], training)
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = until_stopped(other, 2, training)
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


def test_a_manager_stops_at_its_next_step_after_the_program_has_reached_the_stop(
    make: Make,
) -> None:
    with multihost.watch_for_preemption((signal.SIGUSR1,), poll_seconds=0.01):
        made = make(interval=10**6, preemption_signals=(signal.SIGUSR1,))
        os.kill(os.getpid(), signal.SIGUSR1)
        step = 1
        while not multihost.reached_preemption_sync_point(step):
            step += 1
        made.save(step + 1, Training().state)
        assert made.should_stop
        finish(made)
        assert made.all_steps() == [step + 1]
        made.close()
