"""A training run under a CheckpointManager that may be killed at any moment, and what must be there
when it starts again.

A run tells what it does in a file for each rank, a line for each event, so that what was told
before it was killed is known. A step that is reported as saved is in there.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_ckpt
from tests.crash.savers import mark
from tests.support import assert_equal
from torch_ckpt.steps.lease import LEASE_NAME

#: The manager's ``keep_last``.
KEPT = 2

Note = list[Any]


# --- what is saved -------------------------------------------------------------------------------


def state_of(step: int, run: int, rank: int) -> dict[str, Any]:
    """What a run has after a step. No part of it is like that of another step, run or rank."""
    base = 1000 * run + step
    model = nn.Linear(40, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(base)
    return {
        "model": model,
        # Large enough for direct I/O.
        "shared": torch.arange(300 << 10, dtype=torch.int32) + base,
        f"of rank {rank}": torch.arange(7 << 10) + (base << 8) + rank,
        "own": torch_ckpt.PerRank([base, rank]),
        "step": step,
        "run": run,
    }


def difference(state: dict[str, Any], rank: int) -> str:
    """Where a state is not that of the step and run which it says; empty where it is."""

    def plain(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "model": dict(state["model"].state_dict()), "own": state["own"].value}

    try:
        assert_equal(plain(state), plain(state_of(state["step"], state["run"], rank)))
    except AssertionError as error:
        return str(error)
    return ""


def names_beneath(root: Path) -> list[str]:
    """What is there, but for the lease of a run that lives or was killed."""
    names = os.listdir(root) if root.exists() else []
    return sorted(name for name in names if name != LEASE_NAME)


# --- a run ---------------------------------------------------------------------------------------


class Run:
    """A start of a training run on one rank, up to its end or its death.

    Args:
        number: of the start; it is in all that is saved.
        options: of the manager.
    """

    def __init__(self, rank: int, root: Path, log: Path, number: int, **options: Any) -> None:
        self.rank = rank
        self.number = number
        self._root = root
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.manager = torch_ckpt.CheckpointManager(
            root,
            keep_last=KEPT,
            preemption_signals=(),
            on_event=lambda event: self.note(event.kind, event.step),
            **options,
        )
        self.state = state_of(0, number, rank)

    def note(self, *note: Any) -> None:
        """Tells something."""
        os.write(self._log, f"{json.dumps(note)}\n".encode())

    def restore(self, step: int | None = None) -> int:
        """Restores, and tells what was found, and where it is not what it says."""
        done = self.manager.restore(self.state, step)
        # The sweep has ended by now.
        if step is None and self.rank == 0:
            self.note("names", names_beneath(self._root))
        found = [done, self.state["run"]] if done else [0, None]
        wrong = difference(self.state, self.rank)
        if done != self.state["step"]:
            wrong = f"restore() returned {done}, and the state is of step {self.state['step']}"
        self.note("found", *found, wrong)
        if dist.is_initialized():
            # None saves before rank 0 has looked.
            dist.barrier()
        return done

    def save(self, step: int) -> None:
        """Saves what the run has after a step."""
        self.state = state_of(step, self.number, self.rank)
        self.note("begins", step)
        self.manager.save(step, self.state)
        # What is saved has been copied.
        self.manager.wait_until_staged()
        for value in self.state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()

    def close(self) -> None:
        """Ends the run."""
        self.manager.close()
        os.close(self._log)


def train(
    rank: int,
    root: Path,
    logs: Path,
    number: int,
    back_to: int | None,
    steps: int | None,
    options: dict[str, Any],
) -> None:
    """A run of a number of steps, or until it is killed.

    Args:
        logs: beginning of the paths of what the ranks tell.
        number: of the start.
        back_to: a step that is restored instead of the newest one, and trained on.
    """
    if rank == 0:
        mark("makes its manager")
    run = Run(rank, root, Path(f"{logs}-{rank}"), number, **options)
    if rank == 0:
        mark("restores")
    done = run.restore()
    if back_to is not None:
        done = run.restore(back_to)
    if rank == 0:
        mark("trains")
    for step in itertools.islice(itertools.count(done + 1), steps):
        run.save(step)
    run.close()


def train_again(root: str, log: str, number: int) -> None:
    """A run of one rank that goes back by a step, where there is one to go back to: it replaces the
    newest one, and deletes it in the end."""
    run = Run(0, Path(root), Path(log), number)
    done = run.restore()
    for step in run.manager.all_steps()[-2:-1]:
        done = run.restore(step)
    for step in range(done + 1, done + 4):
        run.save(step)
    run.close()


# --- what must be there --------------------------------------------------------------------------


def told(log: Path) -> list[Note]:
    """What a rank has told."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Promises:
    """What may be beneath a root after what runs have told.

    Attributes:
        under_way: steps that the last run had begun to save, and not reported.
        reported: how many saves have been reported.
        lost: steps that have gone although they were reported, and too few newer ones are there.
    """

    def __init__(self) -> None:
        self.under_way: list[int] = []
        self.reported = 0
        self.lost: list[int] = []
        # By step, the runs of which it may be: the last that has reported it, and those that were
        # killed when they saved it.
        self._runs: dict[int, set[int]] = {}
        self._certain: set[int] = set()

    def look_at(self, names: list[str]) -> Iterator[str]:
        """What is wrong with what is beneath the root, once the leftovers have been swept."""
        leftovers = [name for name in names if not name.isdecimal()]
        if leftovers:
            yield f"left beneath the root: {', '.join(leftovers)}"
        there = {int(name) for name in names if name.isdecimal()}
        for step in sorted(there - self._runs.keys()):
            yield f"step {step} is there, and nobody has saved it"
        for step in sorted(self._certain - there):
            if sum(other > step for other in there) < KEPT:
                self.lost.append(step)
                yield f"step {step} was reported as saved, and is lost; there are {sorted(there)}"
        self._runs = {step: self._runs.get(step, set()) for step in sorted(there)}
        self._certain = there

    def broken(self, number: int, by_rank: Sequence[list[Note]]) -> list[str]:
        """What is wrong with what a run has found at its start; then takes what it has done.

        Args:
            number: of the run.
            by_rank: what it has told.
        """
        wrong = []
        names = next((note[1] for note in by_rank[0] if note[0] == "names"), None)
        if names is not None:
            wrong += self.look_at(names)
        for rank, notes in enumerate(by_rank):
            found = [note[1:] for note in notes if note[0] == "found"]
            for place, (step, run, difference) in enumerate(found):
                # Without the names, of what was under way nothing is known.
                newest = max(self._certain, default=0)
                if place == 0 and (step < newest or (names is not None and step != newest)):
                    wrong.append(f"rank {rank} restored step {step}, and the newest is {newest}")
                if difference:
                    wrong.append(f"rank {rank}: step {step} is damaged: {difference}")
                elif step and run not in self._runs.get(step, ()):
                    of = self._runs.get(step)
                    wrong.append(f"rank {rank} restored step {step} of run {run} instead of {of}")
                elif step:
                    # The other ranks must find the same.
                    self._runs[step] = {run}
        self._take(number, by_rank)
        return wrong

    def _take(self, number: int, by_rank: Sequence[list[Note]]) -> None:
        reported = {note[1] for notes in by_rank for note in notes if note[0] == "saved"}
        begun = {note[1] for notes in by_rank for note in notes if note[0] == "begins"}
        for step in sorted(reported):
            self._runs[step] = {number}
        self._certain |= reported
        self.reported += len(reported)
        self.under_way = sorted(begun - reported)
        for step in self.under_way:
            self._runs.setdefault(step, set()).add(number)
