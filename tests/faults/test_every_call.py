"""Every system call of a save fails once: the save says so, and the old checkpoint stays.

The calls are those that concern the checkpoint's tree, on all threads, in the order in which they
come; see ../interposed.py. Stock torch goes through the same, counted and not asserted.
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
    unnamed_in,
)
from torch_ckpt.errors import DurabilityUncertain, NotCommitted

pytestmark = SWEEPING

#: Errors that calls of a kind may fail with, the likeliest first.
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
    """The ``first``-th call fails, with the ``round_``-th error that fits it."""
    errors = {kind: fit[round_] for kind, fit in FITTING.items() if round_ < len(fit)}
    return Order("fail", first, kinds=tuple(errors), errors=errors)


def swept(
    server: Server, bench: Bench, scenario: Scenario, round_: int, wanted: int
) -> Iterator[tuple[Run, Call, Path, set[str]]]:
    """Runs of one scenario, one for each call that fails; and what was in its directory before."""
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
    """Why a save may succeed although this call of it has failed; None where it may not."""
    before = run.calls[: run.calls.index(call)]
    is_directory = os.path.isdir(call.path)
    was_made = any(c.kind == "mkdir" and c.path == call.path and c.errno == 0 for c in before)
    if call.kind == "stat" and is_directory:
        return "whether a directory is there mkdir says, too"
    if call.kind == "stat" and ".metadata.tmp-" in call.path:
        return "which file it is would be asked only if its rename failed"
    if call.kind == "mkdir" and (was_made or scenario.overwrites):
        return "torch makes the directory once more, and looks whether it is there"
    if call.kind == "close" and is_directory:
        return "it was open for reading, and its fsync has succeeded"
    if call.kind == "open" and call.errno == errno.EACCES and is_above(call.path, path):
        return "a directory that may not be opened was not made by us, so it is durable"
    if call.kind == "flock":
        return "some file systems have no locks, and a checkpoint needs none"
    if call.kind == "sync_file_range":
        return "it only makes the disk begin earlier; what fails then fsync says"
    if call.kind in CLEANING and is_durable(before, path):
        return "what no metadata names is removed by the next save, and a warning says so"
    return None


def is_above(directory: str, path: Path) -> bool:
    return Path(os.path.realpath(directory)) in path.parents


#: What is done after the commit, to files that no metadata names any more.
CLEANING = ("opendir", "dup", "stat", "open", "read", "close", "unlink")


def is_durable(calls: list[Call], path: Path) -> bool:
    """Whether the metadata has been renamed, and the directory fsynced after that."""
    done = [(call.kind, call.path) for call in calls if call.errno == 0]
    published = ("rename", str(path / ".metadata"))
    return published in done and ("fsync", str(path)) in done[done.index(published) :]


def violation(
    scenario: Scenario, run: Run, call: Call, path: Path, before: set[str], found: str
) -> str | None:
    """What is wrong after a save one of whose calls has failed; None where all is well."""
    if run.error is None:
        if found != "new":
            return f"success was reported, and the directory loads as {found}"
        if reason_for_success(scenario, run, call, path) is None:
            return "success was reported, and there is no reason why it might be"
        # Where no locks are left nobody knows whether another save's files are among them.
        if unnamed_in(path) and call.kind not in (*CLEANING, "flock"):
            return f"{sorted(unnamed_in(path))} are left"
        return None
    if not isinstance(run.error, dcp.CheckpointException):
        return f"{run.error!r} was raised and no CheckpointException"
    cause = cause_of(run.error)
    if not isinstance(cause, OSError | NotCommitted | DurabilityUncertain):
        return f"{cause!r} is the cause"
    if cause.errno != call.errno:
        return f"{cause!r} has another errno"
    if str(path.parent.parent) not in str(cause):
        return f"{cause!r} names no path"
    visible = isinstance(cause, DurabilityUncertain)
    if visible and call.kind == "rename":
        # Here it was not carried out, which nobody could know.
        return None if found == scenario.before else f"it has changed what loads to {found}"
    if found != ("new" if visible else scenario.before):
        return f"{cause!r} was reported, and the directory loads as {found}"
    if visible and unnamed_in(path) - before:
        return f"{cause!r} was reported, and these are left: {sorted(unnamed_in(path) - before)}"
    if not visible and names_in(path) != before:
        return f"{cause!r} was reported, and new or gone are {sorted(names_in(path) ^ before)}"
    return None


def violation_afterwards(path: Path) -> str | None:
    """What is wrong with the next save into the directory; None where all is well."""
    save_alone(str(path), NEXT, 4)
    found = found_in(path)
    if found != "next":
        return f"after the next save the directory loads as {found}"
    return f"{sorted(unnamed_in(path))} stay for ever" if unnamed_in(path) else None


def outcome_of(scenario: Scenario, run: Run, found: str) -> str:
    """The column that a run counts in."""
    if run.error is None:
        return "harmless" if found == "new" else "silent"
    return "reported" if found in (scenario.before, "new") else LOST


THOROUGH = Scenario("torch_ckpt.save", 1, True)


@pytest.mark.parametrize("scenario", OURS, ids=str)
def test_a_save_one_of_whose_calls_fails_says_so_or_is_complete(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    violations = []
    for round_ in range(MOST_ERRORS if TORTURE else 1):
        wanted = 1000 if scenario == THOROUGH else 5
        for run, call, path, before in swept(server, bench, scenario, round_, wanted):
            found = found_in(path)
            wrong = violation(scenario, run, call, path, before, found)
            wrong = wrong or violation_afterwards(path)
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


# --- calls that come back early, and calls that a file system may not have -----------------------

#: Calls that a signal may interrupt. mkdir, rename and unlink are none of them.
INTERRUPTED = ("open", "read", "write", "fallocate", "ftruncate", "close", "flock")


#: How a call is made is the engine's own affair, whoever called it.
SOME = [
    Scenario("torch_ckpt.save", 1, True),
    Scenario("torch_ckpt.save direct_io=False", 4, True),
    Scenario("async_save", 4, True),
]
SOME = OURS if TORTURE else SOME


@pytest.mark.parametrize("scenario", SOME, ids=str)
def test_a_call_that_is_interrupted_is_made_again(
    server: Server, bench: Bench, scenario: Scenario
) -> None:
    errors = dict.fromkeys(INTERRUPTED, errno.EINTR)
    early(server, bench, scenario, Order("fail", kinds=INTERRUPTED, errors=errors), "interrupted")


@pytest.mark.parametrize("scenario", SOME, ids=str)
@pytest.mark.parametrize("count", [0, 1000, 1], ids=["half", "1000 bytes", "1 byte"])
def test_a_transfer_that_comes_back_early_is_continued(
    server: Server, bench: Bench, scenario: Scenario, count: int
) -> None:
    order = Order("short", kinds=("read", "write"), count=count)
    early(server, bench, scenario, order, "short")


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("count", [4096, 64 << 10, 70_000])
def test_transfers_that_all_come_back_early_are_continued(
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


def early(server: Server, bench: Bench, scenario: Scenario, order: Order, column: str) -> None:
    """Fails unless the save is complete whichever of the calls meets the order."""
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


EARLY = Counts("early", "interrupted", "short")  # of which none may fail

#: What file systems without a call answer.
NOT_THERE = {
    "fallocate": (errno.EOPNOTSUPP, errno.ENOSYS),
    "flock": (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL),
    "sync_file_range": (errno.ENOSYS, errno.EINVAL),
}


@pytest.mark.parametrize(
    ("kind", "answer"), [(kind, answer) for kind, of in NOT_THERE.items() for answer in of]
)
def test_a_file_system_may_be_without_some_calls(
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
        # Without locks a save cannot tell the old checkpoint's files from another save's.
        assert kind == "flock" or not unnamed_in(path)


def test_an_interrupted_fsync_is_reported_and_not_repeated(server: Server, bench: Bench) -> None:
    # What it had written by then nobody knows.
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


@pytest.mark.parametrize("scenario", STOCK, ids=str)
def test_stock_torch_goes_through_the_same(
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
