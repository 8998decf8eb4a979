"""Managers of which a rank dies or stops during a save: the other ranks start no further save that
would wait for the rank, until it resumes."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.silent_ranks import (
    PATIENCE_SECONDS,
    TIMEOUT,
    Silence,
    falls_silent,
    given_up_after,
    is_victim,
    join_group,
    outcome_of,
)
from tests.fault_hooks import at_fault_points, before
from tests.ranks import ranks
from torch_ckpt import CheckpointManager

#: Number of due saves after which the ranks must have met again.
MOST_STEPS = 200


def state_of(step: int) -> dict[str, Any]:
    return {f"of rank {dist.get_rank()}": torch.full((100,), step)}


def run_rank(results: Connection, root: Path, silence: Silence) -> None:
    join_group()
    # Connects and imports before the case, whose time limit is too short for this.
    with CheckpointManager(root, preemption=None, timeout=PATIENCE_SECONDS) as warm:
        warm.save(1, state_of(1))
    begun: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "background save begins":
            begun.append(os.path.basename(path).partition(".")[0])

    made = CheckpointManager(root, preemption=None, timeout=TIMEOUT)
    made.restore(state_of(0))
    with at_fault_points(note):
        if is_victim(silence):
            with before("files are written", falls_silent(results, silence)):
                made.save(2, state_of(2))
                made._saver.wait()
        else:
            made.save(2, state_of(2))
        outcomes = [outcome_of(lambda n=n: made.save(n, state_of(n))) for n in (3, 4)]  # type: ignore[misc]
        results.send((begun, outcomes, made.save_errors))
        if silence.how == "stopped":
            results.send(resume(made))
    results.recv()
    os._exit(0)


def resume(made: CheckpointManager) -> bool:
    """Saves until the ranks have met again. Returns True if the step of that save is complete."""
    for step in range(5, MOST_STEPS):
        if outcome_of(lambda step=step: made.save(step, state_of(step))) is None:  # type: ignore[misc]
            made.wait_until_finished()
            return made.latest_step() == step
    return False


@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_rank_was_killed_in_a_save_no_further_save_waits_for_it(
    tmp_path: Path, victim: int
) -> None:
    with ranks(2, run_rank, tmp_path / "run", Silence("killed", victim)) as group:
        assert group.answer(victim) == "dies"
        begun, outcomes, errors = group.answer(1 - victim)
    assert_fails_at_once(victim, begun, outcomes)
    assert errors == 2


@pytest.mark.parametrize("victim", [0, 1])
def test_saves_start_again_once_a_stopped_rank_has_resumed(tmp_path: Path, victim: int) -> None:
    with ranks(2, run_rank, tmp_path / "run", Silence("stopped", victim)) as group:
        assert group.answer(victim) == "dies"
        begun, outcomes, _errors = group.answer(1 - victim)
        assert_fails_at_once(victim, begun, outcomes)
        group.children[victim].signal(signal.SIGCONT)
        # The rank learns that it was declared dead.
        assert group.answer(victim)[0] == ["0000000002"]
        assert [group.answer(rank) for rank in range(2)] == [True, True]


def assert_fails_at_once(victim: int, begun: list[str], outcomes: list[Any]) -> None:
    """Checks that the saves of steps 3 and 4 have failed without being started."""
    assert begun == ["0000000002"]
    (first_failed, first, _seconds), (later_failed, later, _later_seconds) = outcomes
    assert first_failed == later_failed == [victim]
    assert f"rank {victim} {given_up_after(victim)} during 'write'" in first
    assert f"rank {victim} sent no heartbeat for" in later
    assert "during 'rejoin'" in later
