"""Changes of the target of a manager's root, before each of the system calls of its save.

The root is exchanged with the root of another run, or the directory of the new step with a step of
the other run. The steps of the other run do not change, and a reported step exists.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.crash.managed import names_beneath
from tests.faults.saves import ATTEMPT, replace_step
from tests.interposed import Order, Run, Server
from tests.support import cause_of
from tests.sweeps import (
    NEW,
    NEXT,
    OLD,
    SWEEPING,
    TORTURE,
    Bench,
    Counts,
    found_in,
    points,
    state_of,
)
from torch_ckpt.errors import NotCommitted, RootInUse
from torch_ckpt.steps import LocalSteps
from torch_ckpt.steps.root_lease import LEASE_NAME

pytestmark = [*SWEEPING, pytest.mark.full]

COUNTS = Counts("changed roots", "points", "saved", "not saved")

#: The step that is replaced.
STEP = "0000000002"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a root with two steps, and the root of another run."""
    workdir = tmp_path_factory.mktemp("older")
    for name, seed in (("root", OLD), ("other", NEXT)):
        with torch_ckpt.CheckpointManager(workdir / name, preemption=None) as manager:
            for step in (1, 2):
                manager.save(step, state_of(seed))
                manager.wait_until_finished()
    return workdir


class Ground:
    """A tree with the root of a manager and the root of another run."""

    def __init__(self, tree: Path, older: Path, what: str) -> None:
        shutil.copytree(older, tree)
        self.tree = tree
        self.root, self.other = tree / "root", tree / "other"
        self.inodes = os.stat(self.root).st_ino, os.stat(self.other).st_ino
        paths = (
            (self.root, self.other)
            if what == "root"
            else (self.root / f"{STEP}.tmp-{ATTEMPT}", self.other / STEP)
        )
        self.order = Order("exchange", paths=(str(paths[0]), str(paths[1])))

    def path_of(self, inode: int) -> Path:
        """Returns the present path of a root."""
        return next(path for path in (self.root, self.other) if os.stat(path).st_ino == inode)

    def contents(self) -> dict[int, dict[str, bytes]]:
        """Returns the files of each directory that has more than a lease, by its inode."""
        return {
            os.stat(directory).st_ino: {name: Path(directory, name).read_bytes() for name in names}
            for directory, _, names in os.walk(self.tree)
            if set(names) - {LEASE_NAME}
        }


def entry_of(run: Run) -> int:
    """Returns the number of the call that opens the directory of the new step."""
    return next(
        call.number for call in run.of("open") if call.path.endswith(f"{STEP}.tmp-{ATTEMPT}")
    )


@pytest.mark.parametrize("what", ["root", "attempt"])
def test_a_step_is_saved_in_one_root_when_the_path_changes(
    server: Server, bench: Bench, older: Path, what: str
) -> None:
    def run_save(ground: Ground, order: Order) -> Run:
        return server.run(order, ground.tree, replace_step, str(ground.root), NEW)

    ground = Ground(bench.workdir / f"sound {what}", older, what)
    sound = run_save(ground, Order())
    assert sound.error is None
    assert steps_in(ground.root) == [2], "the sweep sees no deletion"
    # Changes before this call have the same effect as a wrong path.
    entry = entry_of(sound)
    for number in points(sound.numbered - entry, 1000 if TORTURE else 6, "changed roots", what):
        ground = Ground(bench.workdir / f"{what} {number}", older, what)
        own, other = ground.inodes
        before = ground.contents()
        theirs = [os.stat(ground.other / f"{step:010d}").st_ino for step in (1, 2)]
        run = run_save(ground, replace(ground.order, first=entry + number))
        if run.numbered < entry + number:
            assert number > (sound.numbered - entry) // 2
            break
        if run.hit is None:
            # The directory of the new step was already renamed.
            shutil.rmtree(ground.tree)
            continue
        after = ground.contents()
        assert names_beneath(ground.path_of(other)) == ["0000000001", STEP], run.hit
        assert all(after.get(inode) == before[inode] for inode in theirs), run.hit
        if run.error is None:
            COUNTS.add(what, "points", "saved")
            assert steps_in(ground.path_of(own)) in ([1, 2], [2]), run.hit
            assert found_in(ground.path_of(own) / STEP) == "new", run.hit
        else:
            COUNTS.add(what, "points", "not saved")
            if isinstance(run.error, RootInUse):
                # At the path of the root, the manager finds the lease of the other root.
                assert what == "root", run.hit
                cause: BaseException = run.error
            else:
                assert isinstance(run.error, dcp.CheckpointException), (run.hit, run.error)
                cause = cause_of(run.error)
                assert isinstance(cause, NotCommitted), (run.hit, cause)
            assert str(ground.root) in str(cause)
            assert steps_in(ground.path_of(own)) == [1, 2], run.hit
            # The files of the save were deleted, wherever its directory is now.
            assert after == before, run.hit
        shutil.rmtree(ground.tree)


def steps_in(root: Path) -> list[int]:
    return [info.step for info in LocalSteps(root).entries(leftovers=False)]
