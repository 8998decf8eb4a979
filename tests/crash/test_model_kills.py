"""Kills of a save of safetensors files before each of its system calls, which leave the old or the
new directory."""

from __future__ import annotations

from pathlib import Path

from tests.crash.test_kills import killed
from tests.interposed import Server
from tests.sweeps import (
    NEXT,
    SAFETENSORS,
    SWEEPING,
    Bench,
    Scenario,
    found_in,
    save_safetensors,
    scenarios,
)

pytestmark = SWEEPING


@scenarios(SAFETENSORS, SAFETENSORS[-1])
def test_a_killed_save_leaves_the_old_directory_or_the_new_one(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    for call, path in killed(server, bench, scenario, 40):
        # A directory without all its files would load as none of these.
        assert found_in(path) in (scenario.before, "new"), call
        assert path.exists() == (found_in(path) != "none"), call
        next_save_removes_leftovers(path)


def next_save_removes_leftovers(path: Path) -> None:
    save_safetensors(str(path), NEXT, 4)
    assert found_in(path) == "next"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
