"""Ranks that are killed or stopped in each phase of a load or a restore. The other ranks name the
rank in time."""

from __future__ import annotations

import datetime
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_ckpt
from tests.distributed.silent_ranks import (
    PATIENCE_SECONDS,
    TIMEOUT,
    Found,
    falls_silent,
    given_up_after,
    is_victim,
    outcome_of,
    outcomes_of,
    play_in_groups,
)
from tests.fault_hooks import before
from tests.ranks import ranks

STEP = 3

#: The step that fails on the other ranks, by phase.
STEPS = {"comparing": "plan", "reading": "load", "taking": "finish"}


@dataclass(frozen=True)
class Death:
    """One case.

    Attributes:
        how: "killed" or "stopped".
        phase: a key of ``STEPS``.
        victim: the rank; 0 is the coordinator.
        by: "load" or "restore".
    """

    how: str
    phase: str
    victim: int
    by: str

    def __str__(self) -> str:
        return f"rank {self.victim} {self.how} while {self.phase} in {self.by}"


# manager.restore calls a state's own methods in separate steps.
CASES = [
    Death(how, phase, victim, by)
    for by, phases in (("load", list(STEPS)), ("restore", ["reading"]))
    for phase in phases
    for how in ("killed", "stopped")
    for victim in (0, 1)
]


class Dying:
    """``Stateful`` that dies in one of its methods."""

    def __init__(self, phase: str, die: Callable[[], None]) -> None:
        self._acts = {phase: die}
        self._value = torch.zeros(10)

    def state_dict(self) -> dict[str, Any]:
        self._acts.get("comparing", lambda: None)()
        return {"t": self._value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._acts.get("taking", lambda: None)()


def state() -> dict[str, Any]:
    return {"t": torch.ones(1000), "s": {"t": torch.ones(10)}}


def save(root: Path) -> None:
    with torch_ckpt.CheckpointManager(root, timeout=PATIENCE_SECONDS) as manager:
        manager.save(STEP, state())


def load(root: Path, by: str, timeout: float, dying: Any = None) -> None:
    target = state() | ({} if dying is None else {"s": dying})
    if by == "restore":
        with torch_ckpt.CheckpointManager(root, timeout=timeout, read_only=True) as manager:
            manager.restore(target)
    else:
        torch_ckpt.load(target, root / f"{STEP:010d}", timeout=timeout)


def run_rank(results: Connection, root: Path, death: Death) -> None:
    """Runs one rank: loads, and sends the outcome."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    # Connects and imports before the case, whose time limit is too short for this.
    load(root, death.by, PATIENCE_SECONDS)
    with ExitStack() as stack:
        dying = None
        if is_victim(death):
            die = falls_silent(results, death)
            if death.phase == "reading":
                stack.enter_context(before("open", die, "*.distcp"))
            else:
                dying = Dying(death.phase, die)
        results.send(outcome_of(lambda: load(root, death.by, TIMEOUT, dying)))
        results.recv()  # the group may end
        os._exit(0)


def play(root: Path, death: Death) -> Found:
    with ranks(2, run_rank, root, death) as group:
        return outcomes_of(group, root, death)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Death, Future[Found]]]:
    """Plays all cases, from one checkpoint."""
    root = tmp_path_factory.mktemp("deaths")
    save(root)
    with play_in_groups(CASES, lambda death: play(root, death)) as found:
        yield found


@pytest.mark.parametrize("death", CASES, ids=str)
def test_a_silent_rank_fails_the_load_by_name_in_time(
    played: dict[Death, Future[Found]], death: Death
) -> None:
    silent, text, seconds = played[death].result().outcomes[1 - death.victim]
    assert silent == [death.victim]
    assert f"{given_up_after(death.victim)} during '{STEPS[death.phase]}'" in text
    assert seconds < PATIENCE_SECONDS / 2


@pytest.mark.parametrize("death", [d for d in CASES if d.how == "stopped"], ids=str)
def test_a_rank_that_continues_after_it_was_declared_dead_fails(
    played: dict[Death, Future[Found]], death: Death
) -> None:
    silent, _text, _seconds = played[death].result().outcomes[death.victim]
    assert silent == [death.victim]
