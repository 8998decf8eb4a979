"""Kills of a save before each of its system calls, which leave the old or the new checkpoint.

The calls are those on the checkpoint's tree, of all threads, in their order; see ../interposed.py.
The same kills of stock torch are counted, without assertions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interposed import Call, Order, Server
from tests.sweeps import (
    NEW,
    NEXT,
    OURS,
    SAVES,
    STOCK,
    SWEEPING,
    Bench,
    Counts,
    Scenario,
    found_in,
    points,
    save_alone,
    scenarios,
    unnamed_in,
)

pytestmark = SWEEPING

COUNTS = Counts(
    "kills", "points", "none", "old", "new", "a mix", "unreadable", "lost", "violations"
)


def killed(
    server: Server, bench: Bench, scenario: Scenario, wanted: int
) -> Iterator[tuple[Call, Path]]:
    """Yields each call before which a save was killed, and its directory."""
    work, threads = SAVES[scenario.how], scenario.threads
    with bench.directory(scenario) as (tree, path):
        sound = server.run(Order(), tree, work, str(path), NEW, threads)
        assert sound.error is None
    for number in points(sound.numbered, wanted, "kills", scenario):
        with bench.directory(scenario) as (tree, path):
            run = server.run(Order("kill", number), tree, work, str(path), NEW, threads)
            if run.hit is None:
                assert number > 1
                assert not run.killed
                return
            assert run.killed
            yield run.hit, path


def column_of(scenario: Scenario, found: str) -> str:
    """Returns the column for the outcome in the directory of a killed save."""
    if found == "none" and scenario.overwrites:
        return "lost"
    return found.partition(":")[0]


THOROUGH = Scenario("torch_ckpt.save", 1, True)


@scenarios(OURS, THOROUGH)
def test_a_killed_save_leaves_the_old_checkpoint_or_the_new_one(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    violations = []
    wanted = 1000 if scenario == THOROUGH else 5
    for call, path in killed(server, bench, scenario, wanted):
        found = found_in(path)
        COUNTS.add(scenario.how, "points", column_of(scenario, found))
        wrong = None if found in (scenario.before, "new") else f"the directory loads as {found}"
        wrong = wrong or save_again(path)
        if wrong:
            COUNTS.add(scenario.how, "violations")
            COUNTS.note(f"{scenario}: killed before {call}: {wrong}")
            violations.append(f"killed before {call}\n    {wrong}")
    assert not violations, "\n".join([str(scenario), *violations])


def save_again(path: Path) -> str | None:
    """Saves again into the directory. Returns what is wrong then; None if nothing is."""
    save_alone(str(path), NEXT, 4)
    found = found_in(path)
    if found != "next":
        return f"after the next save the directory loads as {found}"
    left = unnamed_in(path)
    return f"{sorted(left)} of the killed save are never deleted" if left else None


@pytest.mark.torture
@pytest.mark.parametrize("scenario", STOCK, ids=str)
def test_stock_torch_is_killed_at_the_same_points(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    for call, path in killed(server, bench, scenario, 5):
        row = f"{scenario.how}, thread_count={scenario.threads}"
        column = column_of(scenario, found_in(path, stock=True))
        COUNTS.add(row, "points", column)
        if column in ("a mix", "unreadable", "lost"):
            COUNTS.note(f"{row}: {column}: killed before {call}")
