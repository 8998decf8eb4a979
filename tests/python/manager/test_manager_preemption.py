"""Tests of a manager with preemption notices, by signal or file."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gates import LIMIT, Gate
from tests.managers import (
    Make,
    Training,
    finish,
    manager_of,
    restored,
    state_of,
    train,
    until_stopped,
)
from torch_ckpt import CheckpointManager, multihost
from torch_ckpt.events import Event
from torch_ckpt.manager import Preemption, SaveOptions
from torch_ckpt.multihost.preemption import current_watch


@pytest.mark.parametrize("by", ["signal", "file"])
def test_a_notice_saves_and_stops(make: Make, tmp_path: Path, by: str) -> None:
    file = tmp_path / "stop"
    events: list[Event] = []
    made = make(
        interval=10**6,
        preemption=Preemption(signals=(signal.SIGUSR1,), file=file),
        on_event=events.append,
    )
    training = Training()
    assert train(made, [1, 2], training) == []
    assert not made.should_stop
    if by == "signal":
        os.kill(os.getpid(), signal.SIGUSR1)
    else:
        file.touch()
    stopped = until_stopped(made, 3, training)
    if by == "signal":
        assert stopped <= 4
    finish(made)
    assert made.all_steps() == [stopped]
    assert restored(made) == stopped
    [event] = [event for event in events if event.kind == "preempted"]
    assert event.step == stopped
    assert f"{'SIGUSR1' if by == 'signal' else file} on rank 0" in event.message


def test_a_due_step_is_saved_once_at_the_stop(make: Make) -> None:
    events: list[Event] = []
    made = make(preemption=Preemption(signals=(signal.SIGUSR1,)), on_event=events.append)
    os.kill(os.getpid(), signal.SIGUSR1)
    stopped = until_stopped(made, 1, Training())
    made.wait_until_finished()
    assert [event.step for event in events if event.kind == "saved"] == [*range(1, stopped + 1)]


def test_with_a_deadline_save_waits_for_the_last_save_and_logs_its_time(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(interval=10**6, preemption=Preemption(signals=(signal.SIGUSR1,), deadline=90))
    os.kill(os.getpid(), signal.SIGUSR1)
    with caplog.at_level(logging.INFO, "torch_ckpt"):
        stopped = until_stopped(made, 1, Training())
    assert not made.is_saving
    assert made.all_steps() == [stopped]
    text = f"saving step {stopped} before preemption (deadline: 90 s); this is the first"
    assert text in caplog.text


def test_too_short_a_deadline_is_a_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    made = make(interval=10**6, preemption=Preemption(signals=(signal.SIGUSR1,), deadline=1e-9))
    training = Training()
    train(made, [1], training, force=True)
    made.wait_until_finished()
    os.kill(os.getpid(), signal.SIGUSR1)
    with caplog.at_level(logging.WARNING, "torch_ckpt"):
        until_stopped(made, 2, training)
    assert "before preemption (deadline: 0 s); the previous save took" in caplog.text


def test_a_skipping_manager_saves_at_the_stop_while_busy(make: Make, held_commits: Gate) -> None:
    made = make(saves=SaveOptions(if_busy="skip"), preemption=Preemption(signals=(signal.SIGUSR1,)))
    training = Training()
    train(made, [1], training)
    os.kill(os.getpid(), signal.SIGUSR1)
    held_commits.wait()
    held_commits.open()
    stopped = until_stopped(made, 2, training)
    made.wait_until_finished()
    assert made.latest_step() == stopped


def test_outside_the_main_thread_signals_are_not_watched_and_refused_if_given(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        explicit = pool.submit(
            CheckpointManager, root, preemption=Preemption(signals=(signal.SIGTERM,))
        )
        with pytest.raises(ValueError, match="signals can be watched only from the main thread"):
            explicit.result(LIMIT)
        with pool.submit(CheckpointManager, root).result(LIMIT) as made:
            assert train(made, [1]) == [1]
            assert signal.getsignal(signal.SIGTERM) is before


def test_notices_that_the_existing_watch_lacks_are_named(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(preemption=Preemption(signals=(signal.SIGUSR1,)))
    make(tmp_path / "other", preemption=Preemption(signals=(signal.SIGUSR1,)))
    assert "already" not in caplog.text
    make(tmp_path / "third", preemption=Preemption(file=tmp_path / "stop"))
    assert "already has a watch for other notices" in caplog.text


def test_each_of_several_managers_stops_at_its_next_step(make: Make, tmp_path: Path) -> None:
    often = make(preemption=Preemption(signals=(signal.SIGUSR1,)))
    seldom = make(tmp_path / "other", preemption=Preemption(signals=(signal.SIGUSR1,)))
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
    notices = Preemption(signals=(signal.SIGUSR1,))
    one = make(tmp_path / "one", preemption=notices)
    other = make(tmp_path / "other", preemption=notices)
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
        made = make(interval=10**6, preemption=Preemption(signals=(signal.SIGUSR2,)))
        os.kill(os.getpid(), signal.SIGUSR1)
        step = 1
        while not multihost.reached_preemption_sync_point(step):
            step += 1
        # The program has reached the stop first.
        made.save(step + 1, Training().state)
        assert made.should_stop
        finish(made)
        assert made.all_steps() == [step + 1]
        made.close()
        assert current_watch(None) is watch


_NEVER_ASKS = """
import sys, torch, torch_ckpt
preemption = torch_ckpt.manager.Preemption(file="-")
with torch_ckpt.CheckpointManager(sys.argv[1], interval=10**6, preemption=preemption) as manager:
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
