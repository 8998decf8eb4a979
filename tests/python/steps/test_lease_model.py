"""Random schedules of two or three runs that take, renew, lose and release the lease on one root,
checked against the promises of docs/manager.md.

The runs perform the real operations of the lease (lease_protocol.py), one call of the store at a
time. Between any two calls, a run can be suspended, woken or killed, and a user can remove the
lease. A failed test prints the seed; ``python -m tests.python.steps.test_lease_model SEED`` repeats
the schedule. Each mutant breaks one rule of the protocol, and must be found.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from torch_ckpt import RootInUse
from torch_ckpt.checkpoint.lineage import by_lineage
from torch_ckpt.steps.lease_protocol import LeaseRecord, Operation, RunLease, StoredRecord, perform
from torch_ckpt.steps.step_store import StepInfo

#: Seconds without a heartbeat after which a run is dead.
EXPIRY = 60.0

#: Number of schedules in a test run.
SCHEDULES = int(os.environ.get("TORCH_CKPT_SCHEDULES", "10000"))

#: Number of turns in a schedule.
TURNS = 70

#: A sequence of turns: what a run does until another run may act.
Turns = Generator[None, None, None]


class Violation(Exception):
    """A promise that a schedule breaks."""


class Root:
    """A root: the record of the lease, and the steps with the epochs of their runs."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 1e6
        self.stored: StoredRecord | None = None
        self.beat_at = 0.0
        self.runs: dict[str, Run] = {}
        self.steps: dict[int, Run] = {}
        self.takers: list[Run] = []
        self.is_removed = False  # a user has removed the lease since the last run took it
        self.versions = 0
        # Whether other runs can see that a process has ended.
        self.shows_ends = chance.random() < 0.5

    def newest_epoch(self) -> int:
        return max((run.epoch for run in self.steps.values()), default=0)


class Store:
    """The store of a root as one run uses it (see ``LeaseStore``)."""

    def __init__(self, root: Root, run: Run) -> None:
        self.root, self.run = root, run

    def read(self) -> StoredRecord | None:
        found = self.root.stored
        self.run.found_dead = (
            found is None
            or not found.record.is_held
            or self.root.now - self.root.beat_at > EXPIRY
            or self.root.runs[found.record.run].is_dead
        )
        return found

    def compare_and_swap(
        self, expected: StoredRecord | None, record: LeaseRecord
    ) -> StoredRecord | None:
        root, found = self.root, self.root.stored
        if not self.matches(expected, found):
            return None
        if found is not None and found.record == record:
            root.beat_at = root.now
            root.stored = found._replace(heartbeat=root.now)
            return root.stored
        root.versions += 1
        root.stored = StoredRecord(record, root.versions, root.now)
        root.beat_at = root.now
        if record.is_held:
            self.run.has_taken(found)
        else:
            self.run.has_released = True
        return root.stored

    def matches(self, expected: StoredRecord | None, found: StoredRecord | None) -> bool:
        return (found and found.version) == (expected and expected.version)

    def is_alive(self, found: StoredRecord) -> bool | None:
        return not self.root.runs[found.record.run].is_dead if self.root.shows_ends else None

    def age(self, found: StoredRecord) -> float | None:
        return self.root.now - float(found.heartbeat)


class Run:
    """A run, which saves and deletes steps until it ends."""

    def __init__(self, root: Root, number: int, *, takeover: bool) -> None:
        self.root, self.number, self.takeover = root, number, takeover
        self.is_dead = self.has_ended = self.is_suspended = False
        self.found_dead = self.has_released = False
        self.store = STORE(root, self)
        self.lease = LEASE(
            "/run",
            LeaseRecord(0, str(number), True, {"pid": number, "host": "h"}),
            expiry=EXPIRY,
            newest_epoch=root.newest_epoch,
            clock=lambda: root.now,
        )
        root.runs[str(number)] = self
        self.epoch = 0
        self.threads: list[Turns] = [self.work()]

    def act(self) -> None:
        """Makes one call of the store in one of the threads."""
        thread = self.root.chance.choice(self.threads)
        try:
            next(thread)
        except StopIteration:
            self.threads.remove(thread)
            self.has_ended = not self.threads

    # --- threads ---------------------------------------------------------------------------------

    def work(self) -> Turns:
        while True:
            try:
                if (yield from self.perform(self.lease.try_take(self.store, self.takeover))):
                    break
            except RootInUse:
                return
            yield
        if self.root.takers[-1] is self and self.epoch <= self.root.newest_epoch():
            raise Violation(f"epoch {self.epoch} of run {self.number} is not new")
        self.threads.append(self.renew())
        for _ in range(self.root.chance.randint(0, 5)):
            try:
                if self.root.chance.random() < 0.3:
                    yield from self.change(self.delete)
                else:
                    yield from self.change(self.save)
            except RootInUse as error:
                self.require_named(str(error))
                # Training continues, and tries to save again.
            yield
        del self.threads[1:]
        if self.root.chance.random() < 0.5:
            self.threads.append(self.delete_late())
        yield from self.perform(self.lease.release())

    def delete_late(self) -> Turns:
        """Performs a deletion that was queued before the manager was closed or deleted."""
        try:
            yield from self.change(self.delete)
        except RootInUse as error:
            self.require_named(str(error))

    def renew(self) -> Turns:
        while (yield from self.perform(self.lease.renew())):
            yield

    def change(self, rename: Callable[[], None]) -> Turns:
        """Changes a step, as a save or a deletion does: checks the lease, writes files, and checks
        it again in the same turn as the rename."""
        yield from self.perform(self.lease.require())
        yield
        yield from self.perform(self.lease.require())
        yield
        self.require_at_rename()
        rename()

    def require_at_rename(self) -> None:
        """Compares the lease as csrc/directory/step.cpp does under the lock on the root."""
        taken, found = self.lease.taken, self.root.stored
        if taken is None or found is None or found.version != taken.version:
            perform(self.lease.require(), self.store)
            raise RootInUse("the lease has changed")

    def perform(self, operation: Operation[Any]) -> Generator[None, None, Any]:
        result: StoredRecord | None = None
        try:
            call = next(operation)
            while True:
                yield
                result = call(self.store)
                call = operation.send(result)
        except StopIteration as end:
            return end.value

    # --- promises --------------------------------------------------------------------------------

    def has_taken(self, found: StoredRecord | None) -> None:
        taken = self.root.stored
        assert taken is not None
        self.epoch = taken.record.epoch
        if found is not None and self.epoch <= found.record.epoch:
            raise Violation(f"epoch {self.epoch} of run {self.number} is not new")
        is_own = found is not None and found.record.run == str(self.number)
        if is_own and not self.has_released:
            return
        if not self.takeover and not self.found_dead:
            raise Violation(f"run {self.number} has taken the lease of a live run")
        if self in self.root.takers:
            raise Violation(f"run {self.number} has taken the lease twice")
        self.root.takers.append(self)
        self.root.is_removed = False

    def must_hold(self, action: str) -> None:
        if self.has_released:
            raise Violation(f"run {self.number} {action} a step after it has released the lease")
        if self.root.takers[-1] is not self or self.root.is_removed:
            raise Violation(
                f"run {self.number} {action} a step after run {self.root.takers[-1].number} had "
                "taken the lease, or after it was removed"
            )

    def save(self) -> None:
        self.must_hold("saves")
        self.root.steps[self.root.chance.randint(1, 9)] = self

    def delete(self) -> None:
        self.must_hold("deletes")
        if self.root.steps:
            del self.root.steps[self.root.chance.choice(list(self.root.steps))]

    def require_named(self, message: str) -> None:
        is_holder = self.root.takers[-1] is self and not self.root.is_removed
        if is_holder and not self.has_released:
            raise Violation(f"run {self.number} was refused, but holds the lease: {message}")
        named = [self.number]
        if self.root.stored is None and not self.root.is_removed:
            raise Violation("the lease has vanished")
        if self.root.stored is not None:
            named.append(int(self.root.stored.record.run))
        for number in named:
            if f"process {number} on host h" not in message:
                raise Violation(f"the error does not name run {number}: {message}")


STORE: type[Store] = Store
LEASE: type[RunLease] = RunLease


def play(seed: int) -> None:
    """Plays one schedule.

    Raises:
        Violation: a promise is broken.
    """
    chance = random.Random(seed)
    root = Root(chance)
    size = chance.choice((2, 2, 3))
    runs = [Run(root, 1, takeover=False)]
    for turn in range(TURNS):
        root.now += chance.choice((1.0, 1.0, 8.0))
        if len(runs) < size and chance.random() < 0.1:
            runs.append(Run(root, len(runs) + 1, takeover=chance.random() < 0.4))
        event = chance.random()
        able = [run for run in runs if not run.has_ended and not run.is_dead]
        if not able:
            if len(runs) == size:
                break
            continue
        run = chance.choice(able)
        if event < 0.04:
            run.is_suspended = True
        elif event < 0.06:
            run.is_dead = True
        elif event < 0.08:
            root.now += EXPIRY
        elif event < 0.09 and turn > 10:
            root.stored, root.is_removed = None, True
        elif event < 0.2:
            run.is_suspended = False
        elif not run.is_suspended:
            run.act()
    end(root, runs)


def end(root: Root, runs: list[Run]) -> None:
    """Wakes all runs, lets them end, and requires that a new run can take the lease."""
    for run in runs:
        for _ in range(1000):
            if run.is_dead or run.has_ended:
                break
            run.act()
        run.is_dead = True
    last = Run(root, len(runs) + 1, takeover=False)
    for _ in range(20):
        root.now += EXPIRY
        if not last.has_ended:
            last.act()
    if last not in root.takers:
        raise Violation("no new run can take the lease")
    infos = [
        StepInfo(step, f"{step:010d}", "complete", epoch=run.epoch)
        for step, run in root.steps.items()
    ]
    current, _abandoned = by_lineage(infos)
    if infos and current[0].epoch != max(info.epoch or 0 for info in infos):
        raise Violation(f"a restore would not choose the newest run: {infos}")


def find_violation(schedules: int, first: int = 1) -> tuple[int, Violation] | None:
    """Returns the first seed that breaks a promise, and the promise."""
    for seed in range(first, first + schedules):
        try:
            play(seed)
        except Violation as error:
            return seed, error
    return None


def test_a_run_that_has_lost_the_lease_changes_nothing_in_any_schedule() -> None:
    assert find_violation(SCHEDULES) is None


# --- mutants -------------------------------------------------------------------------------------


class ReleaseRemovesTheLease(Store):
    """The lease vanishes at the end of a run, as in version 0.1."""

    def compare_and_swap(
        self, expected: StoredRecord | None, record: LeaseRecord
    ) -> StoredRecord | None:
        done = super().compare_and_swap(expected, record)
        if done is not None and not record.is_held:
            self.root.stored = None
        return done


class SwapsWithoutComparing(Store):
    def matches(self, expected: StoredRecord | None, found: StoredRecord | None) -> bool:
        return True


class MissingIsMine(RunLease):
    """A run that finds no lease continues, as in version 0.1."""

    def require(self) -> Operation[None]:
        found = yield lambda store: store.read()
        if found is not None and not self._owns(found):
            yield from super().require()


class ReleasedIsMine(RunLease):
    """A run continues once the run that has taken the lease over has ended."""

    def _owns(self, found: StoredRecord) -> bool:
        return super()._owns(found) or not found.record.is_held


class HeldIsMine(RunLease):
    """A run does not compare the run in the record."""

    def _owns(self, found: StoredRecord) -> bool:
        return found.record.is_held


class TakesAReleasedLeaseAgain(RunLease):
    """A run that has released the lease takes it again for a queued deletion."""

    def require(self) -> Operation[None]:
        found = yield lambda store: store.read()
        assert self.taken is not None
        if found is not None and found.record == replace(self.taken.record, is_held=False):
            held = self.taken.record
            self.taken = yield lambda store: store.compare_and_swap(found, held)
        yield from super().require()


class KeepsAReleasedLease(RunLease):
    """A run that has released the lease changes steps as before."""

    def _owns(self, found: StoredRecord) -> bool:
        return self.taken is not None and found.record.run == self.taken.record.run


class RenewRestoresTheLease(RunLease):
    def renew(self) -> Operation[bool]:
        found = yield lambda store: store.read()
        taken = self.taken
        assert taken is not None
        yield lambda store: store.compare_and_swap(found, taken.record)
        return True


class ReleaseOfAnyLease(RunLease):
    def release(self) -> Operation[bool]:
        found = yield lambda store: store.read()
        if found is not None:
            released = replace(found.record, is_held=False)
            yield lambda store: store.compare_and_swap(found, released)
        return True


class SilenceIsDeath(RunLease):
    """A run of which nothing is known is declared dead at once."""

    def _is_alive(self, store: Any, found: StoredRecord) -> bool | None:
        return store.is_alive(found) or False


class NoRunDies(RunLease):
    def _is_alive(self, store: Any, found: StoredRecord) -> bool | None:
        return store.is_alive(found) is not False or None


class EpochOfTheLeaseOnly(RunLease):
    """The epoch begins anew once a user has removed the lease."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "newest_epoch": lambda: 0})


class EpochOfTheMarkersOnly(RunLease):
    def try_take(self, store: Any, takeover: bool) -> Operation[bool]:
        operation = super().try_take(store, takeover)
        result: StoredRecord | None = None
        try:
            call = next(operation)
            while True:
                result = yield call
                if result is not None:
                    result = result._replace(record=replace(result.record, epoch=0))
                call = operation.send(result)
        except StopIteration as end:
            return bool(end.value)


class NoCheckAtTheRename(Run):
    """The lease is only checked before the files are written and before the commit."""

    def require_at_rename(self) -> None:
        pass


class NoCheckBeforeADeletion(Run):
    def change(self, rename: Callable[[], None]) -> Turns:
        if rename == self.delete:
            yield
            self.delete()
        else:
            yield from super().change(rename)


class VagueErrors(RunLease):
    def require(self) -> Operation[None]:
        try:
            yield from super().require()
        except RootInUse:
            raise RootInUse("the lease is lost") from None


MUTANTS: dict[str, list[type]] = {
    "Store": [ReleaseRemovesTheLease, SwapsWithoutComparing],
    "RunLease": [
        MissingIsMine,
        ReleasedIsMine,
        HeldIsMine,
        TakesAReleasedLeaseAgain,
        KeepsAReleasedLease,
        RenewRestoresTheLease,
        ReleaseOfAnyLease,
        SilenceIsDeath,
        NoRunDies,
        EpochOfTheLeaseOnly,
        EpochOfTheMarkersOnly,
        VagueErrors,
    ],
    "Run": [NoCheckAtTheRename, NoCheckBeforeADeletion],
}


def mutants() -> Iterator[Any]:
    names = {"Store": "STORE", "RunLease": "LEASE", "Run": "Run"}
    for owner, classes in MUTANTS.items():
        for each in classes:
            yield pytest.param(names[owner], each, id=each.__name__)


@pytest.mark.parametrize(("name", "mutant"), [*mutants()])
def test_a_mutant_of_the_lease_breaks_a_promise(
    name: str, mutant: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), name, mutant)
    assert find_violation(SCHEDULES) is not None


if __name__ == "__main__":
    begun = time.monotonic()
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    print(find_violation(number, int(sys.argv[1])) or "no violation")
    print(f"{number / (time.monotonic() - begun):.0f} schedules a second")
