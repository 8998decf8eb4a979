"""Failures of each system call of a save: the save reports them, and the old checkpoint stays.

The calls are those on the checkpoint's tree, of all threads, in their order; see ../interposed.py.
The same failures of stock torch are counted, without assertions.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from tests.interposed import KINDS, Call, Order, Run, Server
from tests.support import cause_of
from tests.sweeps import (
    NEW,
    NEXT,
    OURS,
    SAVES,
    STOCK,
    SWEEPING,
    TORTURE,
    Bench,
    Counts,
    Scenario,
    found_in,
    names_in,
    points,
    save_alone,
    save_through_page_cache,
    scenarios,
    unnamed_in,
)
from torch_ckpt.errors import DurabilityUncertain, NotCommitted

pytestmark = SWEEPING

#: Errors of each kind of call, the most likely first.
FITTING = {
    "open": (errno.EMFILE, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "sync_file_range": (errno.EIO, errno.ENOSPC),
    "syncfs": (errno.EIO,),
    "fallocate": (errno.ENOSPC, errno.EDQUOT, errno.EIO),
    "ftruncate": (errno.EIO, errno.EDQUOT),
    "rename": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS),
    "link": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS),
    "unlink": (errno.EIO, errno.EACCES, errno.EROFS),
    "rmdir": (errno.EIO, errno.EACCES),
    "mkdir": (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO),
    "close": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "flock": (errno.ENOLCK,),
    "stat": (errno.EIO, errno.EACCES),
    "opendir": (errno.EMFILE, errno.EACCES, errno.EIO),
    "dup": (errno.EMFILE,),
}
assert set(FITTING) == set(KINDS)
MOST_ERRORS = max(map(len, FITTING.values()))

LOST = "reported, nothing left to load"
COUNTS = Counts(
    *("faults", "points", "reported", "harmless"),
    *("silent", LOST, "violations"),
)


def failing(round_: int, first: int) -> Order:
    """Returns an order that fails call ``first`` with error ``round_`` of its kind."""
    errors = {kind: fit[round_] for kind, fit in FITTING.items() if round_ < len(fit)}
    return Order("fail", first, kinds=tuple(errors), errors=errors)


def swept(
    server: Server, bench: Bench, scenario: Scenario, round_: int, wanted: int
) -> Iterator[tuple[Run, Call, Path, set[str]]]:
    """Yields a run of a scenario for each failed call, with the names in its directory before."""
    with bench.directory(scenario) as (tree, path):
        sound = server.run(
            Order(kinds=failing(round_, 0).kinds),
            tree,
            SAVES[scenario.how],
            str(path),
            NEW,
            scenario.threads,
        )
        assert sound.error is None
    for number in points(sound.numbered, wanted, "faults", scenario, round_):
        with bench.directory(scenario) as (tree, path):
            before = names_in(path)
            order = failing(round_, number)
            run = server.run(order, tree, SAVES[scenario.how], str(path), NEW, scenario.threads)
            hit = run.hit
            if hit is None:
                assert number > 1
                return
            yield run, hit, path, before


# --- torch_ckpt ----------------------------------------------------------------------------------


def reason_for_success(scenario: Scenario, run: Run, call: Call, path: Path) -> str | None:
    """Returns the reason why a save may succeed although this call failed; None if it may not."""
    before = run.calls[: run.calls.index(call)]
    is_directory = os.path.isdir(call.path)
    was_made = any(c.kind == "mkdir" and c.path == call.path and c.errno == 0 for c in before)
    if call.kind == "stat" and is_directory:
        return "mkdir shows as well whether a directory exists"
    if call.kind == "stat" and ".metadata.tmp-" in call.path:
        return "the identity of the file is needed only if its rename fails"
    if call.kind == "mkdir" and (was_made or scenario.overwrites):
        return "torch creates the directory again, and checks that it exists"
    if call.kind == "close" and is_directory:
        return "the directory was open for reading, and its fsync succeeded"
    if call.kind == "open" and call.errno == errno.EACCES and is_above(call.path, path):
        return "the save did not create a directory that it may not open, so it is durable"
    if call.kind == "flock":
        return "some file systems have no locks, and a save works without them"
    if call.kind == "sync_file_range":
        return "the call only starts the writeback earlier; fsync reports errors"
    if call.kind in CLEANING and is_durable(before, path):
        return "the next save removes unnamed files, and a warning reports them"
    return None


def is_above(directory: str, path: Path) -> bool:
    return Path(os.path.realpath(directory)) in path.parents


#: Calls after the commit, on files that no metadata names any more.
CLEANING = ("opendir", "dup", "stat", "open", "read", "close", "unlink")


def is_durable(calls: list[Call], path: Path) -> bool:
    """Returns True if the metadata was renamed and the directory fsynced after that."""
    done = [(call.kind, call.path) for call in calls if call.errno == 0]
    published = ("rename", str(path / ".metadata"))
    return published in done and ("fsync", str(path)) in done[done.index(published) :]


def violation(
    scenario: Scenario, run: Run, call: Call, path: Path, before: set[str], found: str
) -> str | None:
    """Returns what is wrong after a save with a failed call; None if nothing is."""
    if run.error is None:
        if found != "new":
            return f"success was reported, but the directory loads as {found}"
        if reason_for_success(scenario, run, call, path) is None:
            return "success was reported without a reason why it may be"
        # Without locks, the files may belong to another save.
        if unnamed_in(path) and call.kind not in (*CLEANING, "flock"):
            return f"{sorted(unnamed_in(path))} are left"
        return None
    if not isinstance(run.error, dcp.CheckpointException):
        return f"{run.error!r} was raised instead of a CheckpointException"
    cause = cause_of(run.error)
    if not isinstance(cause, OSError | NotCommitted | DurabilityUncertain):
        return f"{cause!r} is the cause"
    if cause.errno != call.errno:
        return f"{cause!r} has another errno"
    if str(path.parent.parent) not in str(cause):
        return f"{cause!r} names no path"
    visible = isinstance(cause, DurabilityUncertain)
    if visible and call.kind == "rename":
        # The rename did not happen, but the save cannot know that.
        return None if found == scenario.before else f"the directory loads as {found}"
    if found != ("new" if visible else scenario.before):
        return f"{cause!r} was reported, but the directory loads as {found}"
    if visible and unnamed_in(path) - before:
        return f"{cause!r} was reported, and these are left: {sorted(unnamed_in(path) - before)}"
    if not visible and names_in(path) != before:
        return f"{cause!r} was reported, but these changed: {sorted(names_in(path) ^ before)}"
    return None


def save_again(path: Path) -> str | None:
    """Saves again into the directory. Returns what is wrong then; None if nothing is."""
    save_alone(str(path), NEXT, 4)
    found = found_in(path)
    if found != "next":
        return f"after the next save the directory loads as {found}"
    return f"{sorted(unnamed_in(path))} are never deleted" if unnamed_in(path) else None


def outcome_of(scenario: Scenario, run: Run, found: str) -> str:
    """Returns the column in which a run is counted."""
    if run.error is None:
        return "harmless" if found == "new" else "silent"
    return "reported" if found in (scenario.before, "new") else LOST


THOROUGH = Scenario("torch_ckpt.save", 1, True)


@scenarios(OURS, THOROUGH)
def test_a_save_with_a_failed_call_reports_it_or_is_complete(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    violations = []
    for round_ in range(MOST_ERRORS if TORTURE else 1):
        wanted = 1000 if scenario == THOROUGH else 5
        for run, call, path, before in swept(server, bench, scenario, round_, wanted):
            found = found_in(path)
            wrong = violation(scenario, run, call, path, before, found)
            wrong = wrong or save_again(path)
            COUNTS.add(scenario.how, "points", outcome_of(scenario, run, found))
            if wrong:
                COUNTS.add(scenario.how, "violations")
                COUNTS.note(f"{scenario}: {call}: {wrong}")
                violations.append(f"{call}\n    {wrong}")
    assert not violations, "\n".join([str(scenario), *violations])


def test_new_parents_are_fsynced_before_the_commit(server: Server, bench: Bench) -> None:
    with bench.directory(Scenario("torch_ckpt.save", 1, False)) as (tree, path):
        run = server.run(Order(), tree, save_alone, str(path), NEW, 1)
    done = [(call.kind, call.path) for call in run.calls if call.errno == 0]
    before = done[: done.index(("rename", str(path / ".metadata")))]
    assert {("fsync", str(made)) for made in (tree, path.parent, path)} <= set(before)


# --- interrupted and short calls, and calls that a file system lacks -----------------------------

#: Calls that a signal may interrupt; mkdir, rename and unlink are not interrupted.
INTERRUPTED = ("open", "read", "write", "fallocate", "ftruncate", "close", "flock")


#: A few scenarios suffice, because the engine makes all calls in the same way.
SOME = [
    Scenario("torch_ckpt.save", 1, True),
    Scenario("torch_ckpt.save direct_io=False", 4, True),
    Scenario("async_save", 4, True),
]
SOME = OURS if TORTURE else SOME


@scenarios(SOME, THOROUGH)
def test_an_interrupted_call_is_repeated(server: Server, bench: Bench, scenario: Scenario) -> None:
    errors = dict.fromkeys(INTERRUPTED, errno.EINTR)
    assert_complete(
        server, bench, scenario, Order("fail", kinds=INTERRUPTED, errors=errors), "interrupted"
    )


@scenarios(SOME, THOROUGH)
@pytest.mark.parametrize("count", [0, 1000, 1], ids=["half", "1000 bytes", "1 byte"])
def test_a_short_transfer_is_continued(
    server: Server, bench: Bench, scenario: Scenario, count: int
) -> None:
    order = Order("short", kinds=("read", "write"), count=count)
    assert_complete(server, bench, scenario, order, "short")


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("count", [4096, 64 << 10, 70_000])
def test_a_save_with_only_short_transfers_is_complete(
    server: Server, bench: Bench, threads: int, count: int
) -> None:
    scenario = Scenario("torch_ckpt.save", threads, False)
    order = Order("short", 1, times=10_000, kinds=("read", "write"), count=count)
    with bench.directory(scenario) as (tree, path):
        run = server.run(order, tree, SAVES[scenario.how], str(path), NEW, threads)
        assert run.error is None
        data = [call for call in run.of("write") if call.path.endswith(".distcp")]
        assert len(data) >= sum(call.result for call in data) // count
        assert {call.action for call in data} == {"short"}
        assert found_in(path) == "new"


def assert_complete(
    server: Server, bench: Bench, scenario: Scenario, order: Order, column: str
) -> None:
    """Asserts that the save is complete, whichever call the order hits."""
    with bench.directory(scenario) as (tree, path):
        run = server.run(order, tree, SAVES[scenario.how], str(path), NEW, scenario.threads)
        assert run.error is None
    wanted = 2 if column == "short" else 4
    for number in points(run.numbered, wanted, column, order.count, scenario):
        with bench.directory(scenario) as (tree, path):
            at = replace(order, first=number)
            run = server.run(at, tree, SAVES[scenario.how], str(path), NEW, scenario.threads)
            if run.hit is None:
                return
            EARLY.add(scenario.how, column)
            assert run.error is None, run.hit
            assert found_in(path) == "new", run.hit
            assert not unnamed_in(path), run.hit


EARLY = Counts("early", "interrupted", "short")  # no failure is allowed

#: Errors of file systems that lack a call.
UNSUPPORTED = {
    "fallocate": (errno.EOPNOTSUPP, errno.ENOSYS),
    "flock": (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL),
    "sync_file_range": (errno.ENOSYS, errno.EINVAL),
}


@pytest.mark.parametrize(
    ("kind", "answer"), [(kind, answer) for kind, of in UNSUPPORTED.items() for answer in of]
)
def test_a_save_works_on_a_file_system_that_lacks_a_call(
    server: Server, bench: Bench, kind: str, answer: int
) -> None:
    scenario = Scenario("torch_ckpt.save", 4, True)
    order = Order("fail", 1, times=1000, kinds=(kind,), errors={kind: answer})
    with bench.directory(scenario) as (tree, path):
        run = server.run(order, tree, save_through_page_cache, str(path), NEW, 4)
        if run.hit is None:
            pytest.skip(f"a save makes no {kind}")
        assert run.error is None
        assert found_in(path) == "new"
        # Without locks, a save cannot distinguish the old checkpoint's files from another save's.
        assert kind == "flock" or not unnamed_in(path)


def test_an_interrupted_fsync_is_reported_and_not_repeated(server: Server, bench: Bench) -> None:
    # It is unknown which data an interrupted fsync has written.
    scenario = Scenario("torch_ckpt.save", 1, True)
    order = Order("fail", kinds=("fsync",), errors={"fsync": errno.EINTR})
    for number in range(1, 100):
        with bench.directory(scenario) as (tree, path):
            run = server.run(
                replace(order, first=number), tree, SAVES[scenario.how], str(path), NEW, 1
            )
            if run.hit is None:
                assert number > 4
                return
            assert isinstance(run.error, dcp.CheckpointException), run.hit
            assert run.of("fsync")[-1] == run.hit


# --- stock torch ---------------------------------------------------------------------------------


@pytest.mark.torture
@pytest.mark.parametrize("scenario", STOCK, ids=str)
def test_failed_calls_of_stock_torch_are_counted(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    for round_ in range(MOST_ERRORS if TORTURE else 1):
        for run, call, path, _before in swept(server, bench, scenario, round_, 5):
            found = found_in(path, stock=True)
            row = f"{scenario.how}, thread_count={scenario.threads}"
            outcome = outcome_of(scenario, run, found)
            COUNTS.add(row, "points", outcome)
            if outcome in ("silent", LOST):
                COUNTS.note(f"{row}: {outcome}: {call}: {found}")
