"""Ranks that are killed or stopped in each phase of a save, a load or a restore. The other ranks
name the rank in time. A failed save publishes nothing, and after a restart the ranks save into the
same directory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
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
    join_group,
    outcome_of,
    outcomes_of,
    play_in_groups,
)
from tests.fault_hooks import before
from tests.gates import eventually
from tests.metadata import read_metadata
from tests.ranks import ranks
from tests.support import assert_equal, emptied, stock_load

#: The step that is loaded.
STEP = 3


@dataclass(frozen=True)
class Death:
    """One case.

    Attributes:
        how: "killed" or "stopped".
        phase: the moment; see ``PHASES`` and ``run_rank``.
        victim: the rank; 0 is the coordinator.
        by: "save", "async_save", "load" or "restore".
        step: the step in which the other ranks notice it; "" if the save succeeds without the
            victim.
    """

    how: str
    phase: str
    victim: int
    by: str
    step: str

    def __str__(self) -> str:
        return f"rank {self.victim} {self.how} while {self.phase} in {self.by}"


WAITING = "waiting for the commit"

#: The step that fails on the other ranks, by operation, phase and victim.
PHASES: dict[str, dict[str, tuple[str | None, ...]]] = {
    "save": {
        "planning": ("plan", "plan"),
        "writing": ("write", "write"),
        "having written": ("write", "write"),
        "committing": ("write", None),
        WAITING: (None, ""),
    },
    "load": {
        "planning": ("plan", "plan"),
        "reading": ("load", "load"),
        "taking": ("finish", "finish"),
    },
    # manager.restore calls a state's own methods in separate steps.
    "restore": {"reading": ("load", "load")},
}
PHASES["async_save"] = PHASES["save"]

CASES = [
    Death(how, phase, victim, by, step)
    for by, phases in PHASES.items()
    for how in ("killed", "stopped")
    for phase, steps in phases.items()
    for victim, step in enumerate(steps)
    if step is not None
    if by != "async_save" or how == "killed" or phase == "having written"
]
SAVES = [death for death in CASES if death.by.endswith("save")]

#: Fault points at which a rank dies, by phase: the operation and the path.
FAULT_POINTS = {
    "writing": ("pwrite", "*.distcp"),
    "having written": ("files are written", ""),
    "committing": ("open", "*/.metadata.tmp-*"),
    WAITING: ("wait for ranks", "write"),
    "reading": ("open", "*.distcp"),
}


class Dying:
    """``Stateful`` that dies when its state is read, or in the phase "taking" when it is loaded."""

    def __init__(self, phase: str, die: Callable[[], None]) -> None:
        self._acts = {phase: die}

    def state_dict(self) -> dict[str, Any]:
        self._acts.get("planning", bool)()
        return {"t": torch.zeros(10)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._acts.get("taking", bool)()


def state_of(rank: int, seed: int) -> dict[str, Any]:
    numbers = torch.arange(100_000, dtype=torch.int32)
    return {f"of rank {rank}": numbers + 10 * seed + rank, "seed": seed}


def stored() -> dict[str, Any]:
    """Makes the state that is loaded."""
    return {"t": torch.ones(1000), "s": {"t": torch.ones(10)}}


def act(by: str, path: Path, seed: int, timeout: float, **dying: Dying) -> None:
    """Saves the state of this rank and seed, or loads."""
    if by == "load":
        torch_ckpt.load(stored() | dying, path / f"{STEP:010d}", timeout=timeout)
    elif by == "restore":
        with torch_ckpt.CheckpointManager(path, timeout=timeout, read_only=True) as manager:
            manager.restore(stored() | dying)
    elif by == "async_save":
        state = state_of(dist.get_rank(), seed) | dying
        torch_ckpt.async_save(state, path, timeout=timeout).result(PATIENCE_SECONDS)
    else:
        torch_ckpt.save(state_of(dist.get_rank(), seed) | dying, path, timeout=timeout)


def run_rank(results: Connection, path: Path, seed: int, *deaths: Death) -> None:
    """Runs one rank: acts, and sends None, or the failed ranks, the text and the seconds. Then
    saves the next state, if the process lives and the ranks are to save again."""
    join_group()
    store = dist.distributed_c10d._get_default_store()
    by = deaths[0].by if deaths else "save"
    # Connects and imports before the case, whose time limit is too short for this.
    is_save = by.endswith("save")
    act(by, path.with_name(f"{path.name}-warm") if is_save else path, 0, PATIENCE_SECONDS)

    def let_commit(die: Callable[[], None]) -> None:
        store.set("victim waits", "")
        die()

    with ExitStack() as armed:
        dying: dict[str, Dying] = {}
        for death in deaths:
            die = falls_silent(results, death)
            if is_victim(death) and death.phase not in FAULT_POINTS:
                dying = {"s": Dying(death.phase, die)}
            elif is_victim(death):
                fall = partial(let_commit, die) if death.phase == WAITING else die
                operation, where = FAULT_POINTS[death.phase]
                armed.enter_context(before(operation, fall, where))
            elif death.phase == WAITING:
                # Otherwise the commit might be over before the victim waits for it.
                wait = partial(eventually, lambda: store.check(["victim waits"]))
                operation, where = FAULT_POINTS["committing"]
                armed.enter_context(before(operation, wait, where))
        results.send(outcome_of(lambda: act(by, path, seed, TIMEOUT, **dying)))
    if results.recv() == "again":
        act(by, path, seed + 1, PATIENCE_SECONDS)
        results.send(None)
        results.recv()
    os._exit(0)


def play(workdir: Path, death: Death) -> Found:
    """Plays one case. If the victim of a save survives, both ranks then save again."""
    path = workdir / str(death) if death in SAVES else workdir / "run"
    with ranks(2, run_rank, path, 1, death) as group:
        found = outcomes_of(group, path, death)
        if death.how == "stopped" and death in SAVES:
            found.names_later = os.listdir(path)
            for child in group.children:
                child.connection.send("again")
            assert [group.answer(rank) for rank in range(2)] == [None, None]
        return found


def assert_saved(path: Path, size: int) -> None:
    """Checks that the directory has the second state of all ranks."""
    for rank in range(size):
        expected = state_of(rank, 2)
        loaded = emptied(expected)
        stock_load(loaded, path)
        assert_equal(loaded, expected)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deaths")


@pytest.fixture(scope="module")
def played(workdir: Path) -> Iterator[dict[Death, Future[Found]]]:
    """Plays all cases: saves in separate directories, loads from one checkpoint."""
    with torch_ckpt.CheckpointManager(workdir / "run", timeout=PATIENCE_SECONDS) as manager:
        manager.save(STEP, stored())
    with play_in_groups(CASES, partial(play, workdir)) as found:
        yield found


@pytest.mark.parametrize("death", [d for d in CASES if d.step], ids=str)
def test_a_silent_rank_fails_the_call_by_name_and_nothing_is_published(
    played: dict[Death, Future[Found]], death: Death
) -> None:
    found = played[death].result()
    failed, text, seconds = found.outcomes[1 - death.victim]
    assert failed == [death.victim]
    silence = given_up_after(death.victim)
    reason = f"rank {death.victim} {silence} during '{death.step}'"
    if death.phase == "committing":
        reason = f"rank 0, the coordinator, received the values of 'write', but then {silence}"
    assert reason in text
    assert seconds < PATIENCE_SECONDS / 2
    assert not found.published


@pytest.mark.parametrize("death", [d for d in CASES if d.step and d.how == "stopped"], ids=str)
def test_a_rank_that_continues_after_it_was_declared_dead_fails(
    played: dict[Death, Future[Found]], death: Death
) -> None:
    found = played[death].result()
    mine = found.outcomes[death.victim]
    if death.phase == "committing":
        # The rank had decided before it was stopped: it has committed what it had promised to
        # commit.
        assert mine is None
        return
    assert mine[0] == [death.victim]
    assert not found.published_later
    assert not [name for name in found.names_later if name.startswith(f"__{death.victim}_")]


@pytest.mark.parametrize("death", [d for d in CASES if not d.step], ids=str)
def test_a_rank_that_falls_silent_after_its_part_does_not_fail_the_save(
    played: dict[Death, Future[Found]], death: Death
) -> None:
    found = played[death].result()
    assert found.published
    assert set(found.outcomes.values()) == {None}


@pytest.mark.parametrize("death", SAVES, ids=str)
def test_the_ranks_save_into_the_same_directory_afterwards(
    played: dict[Death, Future[Found]], workdir: Path, death: Death
) -> None:
    played[death].result()
    path = workdir / str(death)
    if death.how == "killed":
        save_again(path, 2)
    assert_saved(path, 2)
    named = {info.relative_path for info in read_metadata(path).storage_data.values()}
    assert set(os.listdir(path)) == named | {".metadata"}


def save_again(path: Path, size: int) -> None:
    """Saves the second state with restarted ranks."""
    with ranks(size, run_rank, path, 2) as group:
        assert [group.answer(rank) for rank in range(size)] == [None] * size


PAIRS = [
    (Death("killed", first, victims[0], by, ""), Death("killed", second, victims[1], by, ""))
    for by in ("save", "async_save")
    for victims in ((0, 2), (1, 3))
    for first, second in (("planning", "planning"), ("writing", "planning"), ("writing", "writing"))
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}, {pair[1]}")
def test_two_killed_ranks_of_four_fail_the_save_and_a_restart_saves(
    tmp_path: Path, pair: tuple[Death, Death]
) -> None:
    path = tmp_path / "step"
    victims = {death.victim for death in pair}
    with ranks(4, run_rank, path, 1, *pair) as group:
        for rank in {0, 1, 2, 3} - victims:
            failed, text, seconds = group.answer(rank)
            assert failed
            assert victims.issuperset(failed), text
            assert seconds < PATIENCE_SECONDS
        assert not (path / ".metadata").exists()
    save_again(path, 4)
    assert_saved(path, 4)


def test_a_rank_that_continues_after_a_restart_keeps_the_new_checkpoint_complete(
    tmp_path: Path,
) -> None:
    path = tmp_path / "step"
    death = Death("stopped", "having written", 1, "save", "write")
    with ranks(2, run_rank, path, 1, death) as stopped:
        assert stopped.answer(1) == "dies"
        assert stopped.answer(0)[0] == [1]
        save_again(path, 2)
        stopped.children[1].signal(signal.SIGCONT)
        # It removes only the files that it has written.
        assert stopped.answer(1)[0] == [1]
    assert_saved(path, 2)
