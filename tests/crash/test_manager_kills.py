"""A training run under a CheckpointManager is killed, at random moments and before every one of its
system calls, and started again.

What a start restores is one complete step, bit for bit; no step is lost whose save was reported,
unless newer ones have taken its place; and nothing else is left beneath the root.
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
    told,
    train,
    train_again,
)
from tests.crash.savers import TIMEOUT_SECONDS, Savers, savers
from tests.crash.tally import SEED, TORTURE, Tally
from tests.interposed import KINDS, Order, Server
from tests.sweeps import points
from torch_ckpt._base.formatting import plural

pytestmark = [
    pytest.mark.timeout(3600 if TORTURE else 300),
    pytest.mark.filterwarnings("ignore:step .* was restored, and the root has later steps"),
]

#: By the number of ranks.
KILLS = {1: 90, 2: 80, 4: 60} if TORTURE else {1: 10, 2: 9, 4: 6}

#: Where a start is killed, out of eight times how often, and after how many seconds at most.
PHASES = {"makes its manager": (1, 0.01), "restores": (2, 0.04), "trains": (5, 0.4)}

#: In one of so many kills a rank dies before the others, by so many seconds at most.
ALONE, AHEAD_SECONDS = 3, 0.2

#: By what they are, calls before which a run is killed, and before how many of them; all in full.
CALLS: dict[str, tuple[Sequence[str], int]] = {"rename": (("rename",), 100), "call": (KINDS, 12)}

#: In one of so many starts an older step is restored.
BACK = 5


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    missed = "with a committed step lost, a damaged one or a leftover"
    return Tally("manager_kills", "checkpoint manager", "kills", missed).joined(request.config)


# --- random moments ------------------------------------------------------------------------------


class Chain:
    """Starts of one training run, each killed but the last."""

    def __init__(self, ranks: int, workdir: Path, tally: Tally) -> None:
        self.promises = Promises()
        self.violations: list[str] = []
        self._ranks = ranks
        self._root = workdir / "runs" / "root"
        self._workdir = workdir
        self._tally = tally
        # By start, when it was killed; those that have not been judged.
        self._killed: dict[int, str] = {}
        self._number = 0

    def start_and_kill(self) -> None:
        """One start, killed at a random moment; what it had found is judged."""
        chance = self._next()
        [phase] = chance.choices(list(PHASES), [often for often, _ in PHASES.values()])
        after = chance.uniform(0, PHASES[phase][1])
        order = chance.sample(range(self._ranks), self._ranks)
        ahead = chance.uniform(0, AHEAD_SECONDS)
        alone = chance.randrange(ALONE) == 0 and self._ranks > 1
        with savers(self._ranks) as group:
            self._begin(group, None, chance)
            _let_come(group, phase)
            _let_run(group, after)
            if alone:
                dead = order.pop(0)
                os.kill(group.pids[dead], signal.SIGKILL)
                _let_run(group, ahead, dead=dead)
            for rank in order:
                os.kill(group.pids[rank], signal.SIGKILL)
        first = f", rank {dead} first" if alone else ""
        self._judge(f"when it {phase}, after {after * 1000:.1f} ms{first}")

    def start_and_end(self) -> None:
        """One start that is left alone, and saves."""
        with savers(self._ranks) as group:
            self._begin(group, KEPT + 1, self._next())
            _let_come(group, "trains")
            assert [group.end(rank) for rank in range(self._ranks)] == [""] * self._ranks
        self._judge(None)
        names = self._names()
        self.violations += self.promises.look_at(names)
        # One that was restored stays beside the last ones.
        if len(names) > KEPT + 1:
            self.violations.append(f"in the end too many steps are left: {names}")

    def _names(self) -> list[str]:
        return names_beneath(self._root)

    def _next(self) -> random.Random:
        """Begins a start. What is chosen for it depends on the seed and its number alone, except
        what is there to go back to."""
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
        logs = self._workdir / f"told-{self._number}"
        group.begin(train, self._root, logs, self._number, back_to, steps, options)

    def _judge(self, killed: str | None) -> None:
        """Judges the kills before, if the last start came so far as to look."""
        by_rank = [told(self._workdir / f"told-{self._number}-{r}") for r in range(self._ranks)]
        wrong = self.promises.broken(self._number, by_rank)
        if wrong or all(map(_found, by_rank)):
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


def _found(notes: list[Note]) -> bool:
    return any(note[0] == "found" for note in notes)


def _let_come(group: Savers, phase: str) -> None:
    """Returns when rank 0 comes to a phase."""
    came = _let_run(group, TIMEOUT_SECONDS, phase=phase)
    assert came, f"rank 0 hangs before it {phase}"


def _let_run(
    group: Savers, seconds: float, *, phase: str | None = None, dead: int | None = None
) -> bool:
    """Lets ranks go on for some time, in which none may end, unless one is dead.

    Returns:
        Whether rank 0 has come to the phase; that ends it, too.
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
def test_no_kill_loses_a_step_that_was_reported_as_saved(
    ranks: int, tmp_path: Path, tally: Tally
) -> None:
    chain = Chain(ranks, tmp_path, tally)
    for _ in range(KILLS[ranks]):
        chain.start_and_kill()
    chain.start_and_end()
    assert not chain.violations, f"with TORCH_CKPT_SEED={SEED}:\n" + "\n".join(chain.violations)


# --- every call ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def managed_server(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("example") / "told"
    started = Server(shim, [(train_again, (str(log), 1))])
    yield started
    started.close()


@dataclass(frozen=True)
class Before:
    """What an earlier run has left, and what a later one will sweep."""

    workdir: Path

    def __post_init__(self) -> None:
        first = Run(0, self.workdir / "root", self.workdir / "told", 1)
        for step in (1, 2, 3):
            first.save(step)
        first.close()
        complete = self.workdir / "root" / "0000000002"
        for leftover in ("0000000001.deleted-01234567", "0000000004.tmp-89abcdef"):
            shutil.copytree(complete, complete.with_name(leftover))
        (complete.with_name(leftover) / "write_completed").unlink()

    @contextmanager
    def copied(self, number: int) -> Iterator[tuple[Path, Path, Promises]]:
        """A tree with a root of its own in it, a log, and what is promised of the root."""
        tree = self.workdir / f"tree-{number}"
        shutil.copytree(self.workdir / "root", tree / "root")
        promises = Promises()
        assert promises.broken(1, [told(self.workdir / "told")]) == []
        yield tree, self.workdir / f"told-{number}", promises
        shutil.rmtree(tree)


@pytest.mark.parametrize("what", CALLS)
def test_no_kill_before_a_system_call_loses_a_step_that_was_reported_as_saved(
    managed_server: Server, tmp_path: Path, tally: Tally, what: str
) -> None:
    kinds, wanted = CALLS[what]
    before = Before(tmp_path)
    with before.copied(0) as (tree, log, promises):
        order = Order(kinds=kinds)
        sound = managed_server.run(order, tree, train_again, str(tree / "root"), str(log), 2)
        assert sound.error is None
        assert promises.broken(2, [told(log)]) == []
        assert promises.reported == 6
    violations = []
    for number in points(sound.numbered, wanted, "managed", what):
        with before.copied(number) as (tree, log, promises):
            root = tree / "root"
            order = Order("kill", number, kinds=kinds)
            run = managed_server.run(order, tree, train_again, str(root), str(log), 2)
            if run.hit is None:
                # Threads take turns in another order each time.
                assert number > 1
                break
            assert run.killed
            wrong = promises.broken(2, [told(log)]) + wrong_afterwards(root, log, promises)
            tally.add("torch_ckpt", not wrong, test=f"before a {what}", outcome=run.hit.kind)
            violations += [f"killed before {run.hit}: {line}" for line in wrong]
    assert not violations, f"with TORCH_CKPT_SEED={SEED}:\n" + "\n".join(violations)


def wrong_afterwards(root: Path, log: Path, promises: Promises) -> list[str]:
    """What is wrong with what the next run finds, and with what it leaves."""
    log = log.with_name(f"{log.name}-next")
    run = Run(0, root, log, 3)
    run.save(run.restore() + 1)
    run.close()
    return promises.broken(3, [told(log)]) + list(promises.look_at(names_beneath(root)))
