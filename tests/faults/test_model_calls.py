"""A save of safetensors files in which one system call fails, for each of its calls."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.faults.test_every_call import failing, is_above
from tests.interposed import Call, Order, Run, Server
from tests.sweeps import (
    NEW,
    NEXT,
    SAFETENSORS,
    SWEEPING,
    Bench,
    Scenario,
    found_in,
    points,
    save_safetensors,
    scenarios,
)

pytestmark = SWEEPING


def may_succeed(run: Run, call: Call, path: Path) -> bool:
    """Returns True if a save may succeed although this call failed."""
    done = run.calls[: run.calls.index(call)]
    is_published = any(c.kind == "rename" and c.path == str(path) and not c.errno for c in done)
    # Entries of the parent directory are directories. Files in the old directory are only read.
    is_read = Path(call.path).parent in (path.parent, path) or is_above(call.path, path)
    return (
        is_published  # what remains is to remove the old directory, which the next save does
        or call.kind in ("flock", "sync_file_range")
        or (call.kind == "close" and is_read)
        or (call.kind in ("stat", "mkdir") and Path(call.path).is_dir())
        or (call.kind == "open" and call.errno == errno.EACCES and is_above(call.path, path))
    )


@scenarios(SAFETENSORS, SAFETENSORS[-1])
def test_a_save_with_a_failed_call_fails_and_keeps_the_old_directory(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    with bench.directory(scenario) as (tree, path):
        kinds = failing(0, 0).kinds
        sound = server.run(Order(kinds=kinds), tree, save_safetensors, str(path), NEW, 4)
        assert sound.error is None
        assert found_in(path) == "new"
    for number in points(sound.numbered, 40, "model faults", scenario):
        with bench.directory(scenario) as (tree, path):
            run = server.run(failing(0, number), tree, save_safetensors, str(path), NEW, 4)
            if run.hit is None:
                assert number > 1
                return
            found = found_in(path)
            if run.error is None:
                assert found == "new", run.hit
                assert may_succeed(run, run.hit, path), run.hit
            else:
                assert found in (scenario.before, "new"), run.hit
            save_safetensors(str(path), NEXT, 4)
            assert found_in(path) == "next", run.hit
            left = sorted(entry.name for entry in path.parent.iterdir())
            assert left == [path.name], run.hit
