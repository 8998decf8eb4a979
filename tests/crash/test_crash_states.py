"""States that a crash can leave on the disk during saves: the writes of real saves up to a moment,
without some of the writes that no flush covers, or with a torn one.

Each state has the complete old or new checkpoint; after the save was reported, the new one. The
same states of stock torch are counted.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.block_log import (
    CrashState,
    Log,
    States,
    Write,
    prefixes,
    recorded,
    reordered,
    skip_without_recorder,
)
from tests.crash.disks import KINDS, Disk, Workshop, skip_without, workshop
from tests.crash.savers import (
    WAYS,
    Savers,
    commit_of,
    engine_of,
    is_managed,
    is_model,
    load_outcome,
    mark,
    publication_outcome,
    restore_outcome,
    save,
    save_only,
    savers,
    whole_state,
)
from tests.crash.tally import SEED, TORTURE, Tally
from tests.fault_hooks import at_fault_points, before
from torch_ckpt import CheckpointManager

pytestmark = pytest.mark.full

NOTHING = 0

#: Step of an unrelated checkpoint, whose directory is exchanged with the save's directory.
OTHER = 31

#: Step to save after a crash, in every SAVED_AGAIN-th state, because leftovers must not prevent it.
NEXT = 9
SAVED_AGAIN = 4

#: States of each scenario. A full run has all prefixes, and random states: half of FULL_STATES, or
#: more if all states together are fewer than FULL_STATES.
DEFAULT_STATES = 12
FULL_STATES = 160

#: Limit for all states of a scenario.
LONGEST_SECONDS = 1200


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Tally:
    tally = Tally("crash_states", "crash states", "checked", "violations", in_full=False)
    return tally.joined(request.config)


@pytest.fixture(scope="module")
def shop() -> Iterator[Workshop]:
    with workshop() as shop:
        yield shop


# The files of steps 1 and 12 have different layouts.
_NAMES = {
    (NOTHING, 1): "first save",
    (1, 2): "overwrite",
    (1, 12): "overwrite, other layout",
    (1, 2, 3): "two overwrites",
}


@dataclass(frozen=True)
class Scenario:
    """Saves whose disk is recorded.

    Attributes:
        steps: the step that exists before, or NOTHING, and then the steps to save in order.
        ranks: number of ranks that save together.
        synced: the writer's ``sync_files``.
        exchanged_before: a fault point of the save. Before the save first reaches it, its directory
            is exchanged with an unrelated checkpoint's directory.
    """

    kind: str
    way: str
    steps: tuple[int, ...]
    ranks: int = 1
    synced: bool = True
    exchanged_before: str = ""

    @property
    def place(self) -> str:
        """The checkpoint's directory on the disk. The first save creates its parents, too."""
        return "a/b/ck" if self.steps[0] == NOTHING else "ck"

    def __str__(self) -> str:
        ranks = "2 ranks" if self.ranks == 2 else "1 rank"
        synced = "" if self.synced else ", sync_files=False"
        exchanged = f", exchanged before {self.exchanged_before}" if self.exchanged_before else ""
        return f"{self.kind}, {self.way}, {_NAMES[self.steps]}, {ranks}{synced}{exchanged}"


# --- recording -----------------------------------------------------------------------------------


def save_and_mark(rank: int, way: str, step: int, path: Path, options: dict[str, Any]) -> None:
    """Saves. Marks the begin of the save, its commit, and its report."""
    published = commit_of(way, path)
    last: dict[int, str] = {}  # the last relevant operation of a thread

    def observe(operation: str, where: str) -> None:
        thread = threading.get_ident()
        is_published = operation == "rename" and published.fullmatch(os.path.basename(where))
        if is_published or (thread in last and operation == "fsync_directory"):
            last[thread] = operation
        elif last.get(thread) == "fsync_directory":
            # The first operation of this thread after its last fsync. Other threads, such as the
            # one that renews the run's lease, may do something before that fsync.
            del last[thread]
            mark(f"committed {step}")

    if rank == 0:
        mark(f"began {step}")
    with at_fault_points(observe):
        save(way, step, path, rank, **options)
    if rank == 0:
        mark(f"reported {step}")


def save_during_exchange(
    rank: int, way: str, step: int, path: Path, options: dict[str, Any], operation: str
) -> None:
    """Saves, and exchanges the directory before the save first reaches the operation."""
    if rank > 0:
        return save_and_mark(rank, way, step, path, options)
    with before(operation, lambda: exchange(path, path.with_name("other")), f"{path}*"):
        save_and_mark(rank, way, step, path, options)


def exchange(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def record(shop: Workshop, scenario: Scenario) -> Log:
    disk = shop.disk(scenario.kind)
    first, *saved = scenario.steps
    with savers(scenario.ranks) as group:
        if first != NOTHING:
            disk.mount()
            there = {scenario.place: first}
            if scenario.exchanged_before:
                there["other"] = OTHER
            for place, step in there.items():
                errors = group.do(save_only, scenario.way, step, disk.point / place, {})
                assert errors == [""] * scenario.ranks
            disk.unmount()
        with recorded(disk) as log:
            for step in saved:
                _save_recorded(group, scenario, step, disk, log)
            # Also record the late writes of data that is still in memory.
            disk.sync()
    return log


def _save_recorded(group: Savers, scenario: Scenario, step: int, disk: Disk, log: Log) -> None:
    path = disk.point / scenario.place
    options = {} if scenario.synced else {"sync_files": False}
    work, *more = (
        (save_during_exchange, scenario.exchanged_before)
        if scenario.exchanged_before
        else (save_and_mark,)
    )
    errors = group.do(work, scenario.way, step, path, options, *more, marked=log.mark)
    if f"reported {step}" in log.marks:
        assert errors == [""] * scenario.ranks
    else:
        assert scenario.exchanged_before, errors
        assert all("NotCommitted" in error for error in errors), errors


# --- judging -------------------------------------------------------------------------------------


def allowed_outcomes(scenario: Scenario, log: Log, position: int) -> set[str]:
    """Returns the allowed outcomes of a load after a crash at a moment.

    After the commit it is only the new step: the save removes the old files before it is reported.
    A save that reports that it did not commit allows no new step.
    """
    settled = scenario.steps[0]
    begun: set[int] = set()
    for step in scenario.steps[1:]:
        done = log.marks.get(f"committed {step}", log.marks.get(f"reported {step}"))
        if done is None:
            continue
        if position >= done:
            settled = step
            begun.clear()
        elif position >= log.marks[f"began {step}"]:
            begun.add(step)
    return {"nothing" if step == NOTHING else f"step {step}" for step in {settled, *begun}}


def chosen_states(log: Log, chance: random.Random) -> list[CrashState]:
    every = prefixes(log)
    if TORTURE:
        return every + reordered(log, max(FULL_STATES // 2, FULL_STATES - len(every)), chance)
    some = sorted(chance.sample(every, min(DEFAULT_STATES // 3, len(every))), key=_moment)
    return some + reordered(log, DEFAULT_STATES - len(some), chance)


def _moment(state: CrashState) -> int:
    return state.position


class Sweep:
    """Some crash states of a scenario, and their violations."""

    def __init__(self, shop: Workshop, tally: Tally, scenario: Scenario) -> None:
        self.checked = 0
        self.violations: list[str] = []
        self._scenario = scenario
        self._disk = Disk(scenario.kind, shop.place / "state.img", shop.place / "state")
        log = record(shop, scenario)
        states = States(log)
        for state in chosen_states(log, random.Random(SEED + zlib.crc32(str(scenario).encode()))):
            states.make(state, self._disk.image)
            allowed = allowed_outcomes(scenario, log, state.position)
            found = self._find_outcome()
            right = found in allowed if scenario.synced else found != "mixture"
            if not right:
                wanted = " or ".join(sorted(allowed))
                self.violations.append(f"{state}: {found} instead of {wanted}")
            tally.add(
                engine_of(scenario.way),
                right if scenario.synced else None,
                test=f"{scenario}, {'reordered' if state.lost or state.torn else 'prefix'}",
                state=str(state),
                outcome=found,
                allowed=sorted(allowed),
            )
            self.checked += 1
        states.close()
        self._disk.image.unlink()
        log.image.unlink()

    def raise_violations(self) -> None:
        assert not self.violations, (
            f"{len(self.violations)} of {self.checked} states, with TORCH_CKPT_SEED={SEED}:\n"
            + "\n".join(self.violations[:20])
        )

    def _find_outcome(self) -> str:
        """Returns the outcome of a load, before and after another save."""
        scenario, path = self._scenario, self._disk.point / self._scenario.place
        engine = engine_of(scenario.way)
        steps = [step for step in scenario.steps if step != NOTHING]
        self._disk.mount()
        try:
            if is_managed(scenario.way):
                return self._find_managed_outcome(path, steps)
            if scenario.exchanged_before:
                return self._find_exchanged_outcome(engine, steps)
            found = self._outcome(path, steps)
            if engine == "torch_ckpt" and scenario.synced and self.checked % SAVED_AGAIN == 0:
                # A version must be newer than the others.
                last = max(steps) * 10 if scenario.way == "publish" else NEXT
                save_again = WAYS[scenario.way if is_model(scenario.way) else "torch_ckpt.save"]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    save_again(whole_state(last, scenario.ranks), path)
                after = self._outcome(path, [last])
                if after != f"step {last}":
                    found += f", and after the next save {after}"
            return found
        finally:
            self._disk.unmount()

    def _outcome(self, path: Path, steps: list[int]) -> str:
        way, ranks = self._scenario.way, self._scenario.ranks
        if way == "publish":
            return publication_outcome(path, steps, ranks)
        return load_outcome(path, engine_of(way), steps, ranks)

    def _find_exchanged_outcome(self, engine: str, steps: list[int]) -> str:
        """Returns the outcome for the save's directory, or both if the other one has changed."""
        paths = [path for path in self._disk.point.iterdir() if path.name != "lost+found"]
        found = [
            load_outcome(path, engine, [*steps, OTHER], self._scenario.ranks) for path in paths
        ]
        if found.count(f"step {OTHER}") != 1 or len(found) != 2:
            return " and ".join(sorted(found))
        found.remove(f"step {OTHER}")
        return found[0]

    def _find_managed_outcome(self, root: Path, steps: list[int]) -> str:
        ranks = self._scenario.ranks
        found = restore_outcome(root, steps, ranks)
        if self.checked % SAVED_AGAIN == 0:
            last = max(steps) * 10
            with CheckpointManager(root, keep=1, preemption=None) as manager:
                manager.save(last, dict(whole_state(last, ranks)))
            after = restore_outcome(root, [last], ranks)
            if after != f"step {last}":
                found += f", and after the next save {after}"
        return found


OURS = [
    Scenario("ext4", "torch_ckpt.save", (1, 12)),
    Scenario("ext4", "torch_ckpt.async_save", (0, 1)),
    Scenario("ext4", "dcp.save", (1, 2, 3)),
    Scenario("ext4", "torch_ckpt.async_save", (1, 2), ranks=2),
    Scenario("xfs", "dcp.save", (1, 2)),
    Scenario("xfs", "torch_ckpt.save", (0, 1)),
    Scenario("ext4", "CheckpointManager", (1, 12)),
    Scenario("xfs", "CheckpointManager, one step", (1, 2), ranks=2),
    Scenario("ext4", "safetensors", (1, 12)),
    Scenario("xfs", "safetensors", (0, 1), ranks=2),
    Scenario("ext4", "publish", (1, 2)),
    Scenario("ext4", "torch_ckpt.save", (1, 12), exchanged_before="rename"),
    Scenario("ext4", "dcp.save", (1, 2), ranks=2, exchanged_before="pwrite"),
]
OURS_IN_FULL = [
    Scenario("ext4", "torch_ckpt.save", (1, 2)),
    Scenario("ext4", "torch_ckpt.save", (0, 1)),
    Scenario("ext4", "torch_ckpt.async_save", (1, 2)),
    Scenario("ext4", "dcp.async_save", (1, 2)),
    Scenario("ext4", "dcp.save", (1, 2), ranks=2),
    Scenario("xfs", "torch_ckpt.save", (1, 12)),
    Scenario("xfs", "torch_ckpt.save", (1, 2, 3)),
    Scenario("xfs", "torch_ckpt.async_save", (1, 2), ranks=2),
    Scenario("ext4", "safetensors", (0, 1)),
    Scenario("xfs", "safetensors", (1, 2, 3), ranks=2),
    Scenario("ext4", "publish", (0, 1), ranks=2),
    Scenario("xfs", "publish", (1, 2, 3)),
    Scenario("ext4", "CheckpointManager", (0, 1), ranks=2),
    Scenario("xfs", "CheckpointManager", (1, 2, 3)),
    Scenario("ext4", "CheckpointManager, one step", (1, 2, 3)),
    Scenario("xfs", "torch_ckpt.save", (1, 2), exchanged_before="fsync_directory"),
    Scenario("ext4", "torch_ckpt.async_save", (1, 2), exchanged_before="rename"),
    Scenario("xfs", "torch_ckpt.async_save", (1, 12), ranks=2, exchanged_before="unlink"),
    Scenario("xfs", "dcp.save", (1, 2), exchanged_before="rename"),
]
# Stock torch is only counted; one scenario suffices to show that the states are realistic.
STOCK = [
    Scenario("ext4", "stock dcp.save", (1, 12)),
]
STOCK_IN_FULL = [
    Scenario("xfs", "stock dcp.save", (1, 2)),
    Scenario("ext4", "stock dcp.save", (1, 2)),
    Scenario("xfs", "stock dcp.save", (1, 12)),
    Scenario("ext4", "stock dcp.save", (0, 1)),
    Scenario("ext4", "stock dcp.save", (1, 2, 3)),
    Scenario("ext4", "stock dcp.async_save", (1, 2)),
    Scenario("xfs", "stock dcp.save", (0, 1)),
]


UNSYNCED = [
    Scenario("ext4", "torch_ckpt.save", (1, 12), synced=False),
]
UNSYNCED_IN_FULL = [
    Scenario("ext4", "torch_ckpt.save", (0, 1), synced=False),
    Scenario("xfs", "torch_ckpt.save", (1, 12), synced=False),
    Scenario("xfs", "torch_ckpt.save", (0, 1), synced=False),
]


def _all(some: list[Scenario], more: list[Scenario]) -> Any:
    scenarios = some + more if TORTURE else some
    return pytest.mark.parametrize("scenario", scenarios, ids=str)


@pytest.mark.timeout(LONGEST_SECONDS)
@_all(OURS, OURS_IN_FULL)
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_checkpoint(
    shop: Workshop, tally: Tally, scenario: Scenario
) -> None:
    skip_without(scenario.kind)
    skip_without_recorder()
    Sweep(shop, tally, scenario).raise_violations()


@pytest.mark.timeout(LONGEST_SECONDS)
@_all(UNSYNCED, UNSYNCED_IN_FULL)
def test_without_sync_files_no_crash_leaves_a_loadable_mixture(
    shop: Workshop, tally: Tally, scenario: Scenario
) -> None:
    skip_without(scenario.kind)
    skip_without_recorder()
    Sweep(shop, tally, scenario).raise_violations()


@pytest.mark.torture
@pytest.mark.timeout(LONGEST_SECONDS)
@_all(STOCK, STOCK_IN_FULL)
def test_crash_states_of_stock_torch_are_counted(
    shop: Workshop, tally: Tally, scenario: Scenario
) -> None:
    skip_without(scenario.kind)
    skip_without_recorder()
    assert Sweep(shop, tally, scenario).checked > 0


# --- the recorded disk ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_all_writes_are_recorded(shop: Workshop, kind: str) -> None:
    skip_without(kind)
    skip_without_recorder()
    disk = shop.disk(kind)
    contents = random.Random(SEED).randbytes(700_000)
    with recorded(disk) as log:
        (disk.point / "file").write_bytes(contents)
    states = States(log)
    after = Disk(kind, shop.place / "after.img", shop.place / "after")
    states.make(CrashState(len(log.events)), after.image)
    states.close()
    after.mount()
    assert (after.point / "file").read_bytes() == contents
    after.unmount()


def test_a_state_has_all_flushed_writes_and_some_later_ones(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"." * 4096)
    log = _log_of(image, (0, b"a" * 512), None, (512, b"b" * 1024), (2048, b"c" * 512))
    states = States(log)
    state = tmp_path / "state"
    states.make(CrashState(4, frozenset({3}), (2, frozenset({1}))), state)
    states.close()
    assert state.read_bytes() == b"a" * 512 + b"." * 512 + b"b" * 512 + b"." * (4096 - 1536)


def test_reordered_states_lose_only_writes_that_no_flush_covers(tmp_path: Path) -> None:
    log = _log_of(tmp_path, (0, b"a" * 512), None, (512, b"b" * 1024), (2048, b"c" * 512), None)
    states = reordered(log, 50, random.Random(SEED))
    touched = [(state.position, number) for state in states for number in _touched(state)]
    assert {number for _, number in touched} == {0, 2, 3}
    assert all(number > 1 for position, number in touched if position > 1)


def _log_of(image: Path, *events: tuple[int, bytes] | None) -> Log:
    return Log(image, 512, [Write(*event) if event else None for event in events])


def _touched(state: CrashState) -> set[int]:
    return {*state.lost, state.torn[0]} if state.torn else set(state.lost)
