"""Kills and restarts of a training run under a CheckpointManager, at random moments and before each
of its system calls.

A start restores one complete step, bit for bit. No step whose save was reported is lost, unless
newer steps have replaced it, and the root has no leftovers.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from tests.crash.managed import (
    KEPT,
    Note,
    Promises,
    Run,
    names_beneath,
    read_notes,
    train,
    train_again,
)
from tests.crash.savers import TIMEOUT_SECONDS, Savers, savers
from tests.crash.tally import SEED, TORTURE, Tally
from tests.interposed import KINDS, Order, Server
from tests.sweeps import points
from torch_ckpt._base.formatting import plural

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600 if TORTURE else 300),
    pytest.mark.filterwarnings("ignore:step .* was restored, but there are later steps"),
]

#: Number of kills by the number of ranks.
KILLS = {1: 90, 2: 80, 4: 60} if TORTURE else {1: 10, 2: 9, 4: 6}

#: Phases in which a start is killed, with their weights and the longest delays in seconds.
PHASES = {"makes its manager": (1, 0.01), "restores": (2, 0.04), "trains": (5, 0.4)}

#: In one of FIRST_ONE kills a rank is killed before the others, by AHEAD_SECONDS at most.
FIRST_ONE, AHEAD_SECONDS = 3, 0.2

#: System calls before which a run is killed, and the number of kills; a full run tries all.
CALLS: dict[str, tuple[Sequence[str], int]] = {"rename": (("rename",), 100), "call": (KINDS, 12)}

#: In one of BACK starts an older step is restored.
BACK = 5


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    missed = "with a committed step lost, a damaged one or a leftover"
    return Tally("manager_kills", "checkpoint manager", "kills", missed).joined(request.config)


# --- random moments ------------------------------------------------------------------------------


class Chain:
    """Starts of one training run. All but the last are killed."""

    def __init__(self, ranks: int, workdir: Path, tally: Tally) -> None:
        self.promises = Promises()
        self.violations: list[str] = []
        self._ranks = ranks
        self._root = workdir / "runs" / "root"
        self._workdir = workdir
        self._tally = tally
        # When each start was killed, for kills that have not been judged.
        self._killed: dict[int, str] = {}
        self._number = 0

    def start_and_kill(self) -> None:
        """Starts the run, kills it at a random moment, and judges the steps that it found."""
        chance = self._next()
        [phase] = chance.choices(list(PHASES), [often for often, _ in PHASES.values()])
        after = chance.uniform(0, PHASES[phase][1])
        order = chance.sample(range(self._ranks), self._ranks)
        ahead = chance.uniform(0, AHEAD_SECONDS)
        has_first = chance.randrange(FIRST_ONE) == 0 and self._ranks > 1
        with savers(self._ranks) as group:
            self._begin(group, None, chance)
            _wait_for_phase(group, phase)
            _run_for(group, after)
            if has_first:
                dead = order.pop(0)
                os.kill(group.pids[dead], signal.SIGKILL)
                _run_for(group, ahead, dead=dead)
            for rank in order:
                os.kill(group.pids[rank], signal.SIGKILL)
        first = f", rank {dead} first" if has_first else ""
        self._judge(f"when it {phase}, after {after * 1000:.1f} ms{first}")

    def start_and_end(self) -> None:
        """Starts the run without a kill, and lets it save."""
        with savers(self._ranks) as group:
            self._begin(group, KEPT + 1, self._next())
            _wait_for_phase(group, "trains")
            assert [group.end(rank) for rank in range(self._ranks)] == [""] * self._ranks
        self._judge(None)
        names = self._names()
        self.violations += self.promises.check_names(names)
        # A restored step is kept in addition to the last ones.
        if len(names) > KEPT + 1:
            self.violations.append(f"too many steps are left in the end: {names}")

    def _names(self) -> list[str]:
        return names_beneath(self._root)

    def _next(self) -> random.Random:
        """Returns a random generator for the next start.

        Its choices depend only on the seed and the number of the start, except for the step to
        restore, which must exist.
        """
        self._number += 1
        return random.Random(f"{SEED} {self._ranks} {self._number}")

    def _begin(self, group: Savers, steps: int | None, chance: random.Random) -> None:
        options = {
            "staging": chance.choice(["blocking", "blocking", "overlapped"]),
            "thread_count": chance.choice([1, 2]),
        }
        back_to = None
        complete = [name for name in self._names() if name.isdecimal()]
        if steps is None and chance.randrange(BACK) == 0 and len(complete) > 1:
            back_to = int(chance.choice(complete[:-1]))
        logs = self._workdir / f"log-{self._number}"
        group.begin(train, self._root, logs, self._number, back_to, steps, options)

    def _judge(self, killed: str | None) -> None:
        """Judges the previous kills, if the last start got as far as its restore on all ranks."""
        logs = [self._workdir / f"log-{self._number}-{rank}" for rank in range(self._ranks)]
        by_rank = [read_notes(log) for log in logs]
        wrong = self.promises.check_run(self._number, by_rank)
        if wrong or all(map(_has_found, by_rank)):
            for when in self._killed.values():
                self._tally.add(
                    "torch_ckpt",
                    not wrong,
                    test=f"random moments, {plural(self._ranks, 'rank')}",
                    outcome=when.partition(",")[0],
                    moment=when,
                )
            before = " and ".join(f"start {n}, killed {when}" for n, when in self._killed.items())
            self.violations += [f"after {before}: {what}" for what in wrong]
            self._killed.clear()
        if killed is not None:
            self._killed[self._number] = killed


def _has_found(notes: list[Note]) -> bool:
    return any(note[0] == "found" for note in notes)


def _wait_for_phase(group: Savers, phase: str) -> None:
    """Waits until rank 0 reaches a phase."""
    came = _run_for(group, TIMEOUT_SECONDS, phase=phase)
    assert came, f"rank 0 hangs before it {phase}"


def _run_for(
    group: Savers, seconds: float, *, phase: str | None = None, dead: int | None = None
) -> bool:
    """Lets the ranks run for some time, or until rank 0 reaches a phase.

    No rank may end unless one is dead.

    Returns:
        True if rank 0 has reached the phase.
    """
    until = time.monotonic() + seconds
    going_on = {group.connection(rank): rank for rank in range(group.size) if rank != dead}
    while (left := until - time.monotonic()) > 0:
        for connection in wait(list(going_on), left):
            assert isinstance(connection, Connection)
            try:
                kind, text = connection.recv()
            except EOFError:
                kind, text = "end", "it died"
            if kind == "mark":
                connection.send(None)
                if text == phase:
                    return True
            else:
                rank = going_on.pop(connection)
                assert dead is not None, f"rank {rank} failed: {text}"
    return False


@pytest.mark.parametrize("ranks", KILLS)
def test_no_kill_loses_a_reported_step(ranks: int, tmp_path: Path, tally: Tally) -> None:
    chain = Chain(ranks, tmp_path, tally)
    for _ in range(KILLS[ranks]):
        chain.start_and_kill()
    chain.start_and_end()
    assert not chain.violations, f"with TORCH_CKPT_SEED={SEED}:\n" + "\n".join(chain.violations)


# --- every call ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def managed_server(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("example") / "log"
    started = Server(shim, [(train_again, (str(log), 1))])
    yield started
    started.close()


@dataclass(frozen=True)
class EarlierRun:
    """A root with the steps of an earlier run, and leftovers that a later run deletes."""

    workdir: Path

    def __post_init__(self) -> None:
        first = Run(0, self.workdir / "root", self.workdir / "log", 1)
        for step in (1, 2, 3):
            first.save(step)
        first.close()
        complete = self.workdir / "root" / "0000000002"
        for leftover in ("0000000001.deleted-01234567", "0000000004.tmp-89abcdef"):
            shutil.copytree(complete, complete.with_name(leftover))
        (complete.with_name(leftover) / "write_completed").unlink()

    @contextmanager
    def copied(self, number: int) -> Iterator[tuple[Path, Path, Promises]]:
        """Copies the root into a new tree. Yields the tree, the path of a log, and the promises."""
        tree = self.workdir / f"tree-{number}"
        shutil.copytree(self.workdir / "root", tree / "root")
        promises = Promises()
        assert promises.check_run(1, [read_notes(self.workdir / "log")]) == []
        yield tree, self.workdir / f"log-{number}", promises
        shutil.rmtree(tree)


@pytest.mark.parametrize("what", CALLS)
def test_no_kill_before_a_system_call_loses_a_reported_step(
    managed_server: Server, tmp_path: Path, tally: Tally, what: str
) -> None:
    kinds, wanted = CALLS[what]
    before = EarlierRun(tmp_path)
    with before.copied(0) as (tree, log, promises):
        order = Order(kinds=kinds)
        sound = managed_server.run(order, tree, train_again, str(tree / "root"), str(log), 2)
        assert sound.error is None
        assert promises.check_run(2, [read_notes(log)]) == []
        assert promises.reported == 6
    violations = []
    for number in points(sound.numbered, wanted, "managed", what):
        with before.copied(number) as (tree, log, promises):
            root = tree / "root"
            order = Order("kill", number, kinds=kinds)
            run = managed_server.run(order, tree, train_again, str(root), str(log), 2)
            if run.hit is None:
                # The number of calls varies with the order in which threads run.
                assert number > 1
                break
            assert run.killed
            wrong = promises.check_run(2, [read_notes(log)])
            wrong += run_again(root, log, promises)
            tally.add("torch_ckpt", not wrong, test=f"before a {what}", outcome=run.hit.kind)
            violations += [f"killed before {run.hit}: {line}" for line in wrong]
    assert not violations, f"with TORCH_CKPT_SEED={SEED}:\n" + "\n".join(violations)


def run_again(root: Path, log: Path, promises: Promises) -> list[str]:
    """Runs the training again. Returns what is wrong with the steps that it finds and leaves."""
    log = log.with_name(f"{log.name}-next")
    run = Run(0, root, log, 3)
    run.save(run.restore() + 1)
    run.close()
    wrong = promises.check_run(3, [read_notes(log)])
    return wrong + list(promises.check_names(names_beneath(root)))
