"""A training run under a CheckpointManager that may be killed at any time, and the steps that must
exist when it starts again.

Each rank of a run logs events to a file, one line for each, such as each step whose save was
reported. The file shows what happened before the run was killed.
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
from torch_ckpt.steps.root_lease import LEASE_NAME

#: The manager's ``keep_last``.
KEPT = 2

Note = list[Any]


# --- states --------------------------------------------------------------------------------------


def state_of(step: int, run: int, rank: int) -> dict[str, Any]:
    """Returns the state of a run after a step. Every part differs between steps, runs and ranks."""
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
    """Compares a state with the state that its step and run must have.

    Returns:
        The difference; empty if there is none.
    """

    def plain(state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "model": dict(state["model"].state_dict()), "own": state["own"].value}

    try:
        assert_equal(plain(state), plain(state_of(state["step"], state["run"], rank)))
    except AssertionError as error:
        return str(error)
    return ""


def names_beneath(root: Path) -> list[str]:
    """Returns the names in a root, without the files of the lease of a running or killed run."""
    names = os.listdir(root) if root.exists() else []
    return sorted(name for name in names if not name.startswith(LEASE_NAME))


# --- a run ---------------------------------------------------------------------------------------


class Run:
    """One start of a training run on one rank, until it ends or is killed.

    Args:
        log: file for the notes of this rank.
        number: number of the start, which is part of all saved values.
        staging, thread_count: options of the saves.
    """

    def __init__(
        self,
        rank: int,
        root: Path,
        log: Path,
        number: int,
        *,
        staging: str = "blocking",
        thread_count: int | None = None,
    ) -> None:
        self.rank = rank
        self.number = number
        self._root = root
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.manager = torch_ckpt.CheckpointManager(
            root,
            keep=KEPT,
            preemption=None,
            on_event=lambda event: self.note(event.kind, event.step),
            saves=torch_ckpt.manager.SaveOptions(staging=staging),
            write=torch_ckpt.WriteOptions(thread_count=thread_count),
        )
        self.state = state_of(0, number, rank)

    def note(self, *note: Any) -> None:
        """Logs an event."""
        os.write(self._log, f"{json.dumps(note)}\n".encode())

    def restore(self, step: int | None = None) -> int:
        """Restores a step. Logs the step, its run, and the difference from the saved state."""
        done = self.manager.restore(self.state, step)
        # Leftovers have been deleted by now.
        if step is None and self.rank == 0:
            self.note("names", names_beneath(self._root))
        found = [done, self.state["run"]] if done else [0, None]
        wrong = difference(self.state, self.rank)
        if done != self.state["step"]:
            wrong = f"restore() returned {done}, but the state has step {self.state['step']}"
        self.note("found", *found, wrong)
        if dist.is_initialized():
            # No rank may save before rank 0 has listed the names.
            dist.barrier()
        return done

    def save(self, step: int) -> None:
        """Saves the state after a step."""
        self.state = state_of(step, self.number, self.rank)
        self.note("begins", step)
        self.manager.save(step, self.state)
        # The state has been copied and may change.
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
    """Runs the training for some steps, or until it is killed.

    Args:
        logs: prefix of the paths of the ranks' logs.
        number: number of the start.
        back_to: step to restore instead of the newest one; None: the newest one.
        steps: number of steps; None: no limit.
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
    """Runs the training on one rank from the step before the newest, if there is one. This replaces
    the newest step, and deletes it in the end."""
    run = Run(0, Path(root), Path(log), number)
    done = run.restore()
    for step in run.manager.all_steps()[-2:-1]:
        done = run.restore(step)
    for step in range(done + 1, done + 4):
        run.save(step)
    run.close()


# --- expected steps ------------------------------------------------------------------------------


def read_notes(log: Path) -> list[Note]:
    """Returns the logged events of a rank."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Promises:
    """The steps that may or must be in a root, by the logs of its runs.

    Attributes:
        unreported: steps that the last run began to save but did not report.
        reported: number of reported saves.
        lost: reported steps that are missing without enough newer ones.
    """

    def __init__(self) -> None:
        self.unreported: list[int] = []
        self.reported = 0
        self.lost: list[int] = []
        # The runs from which each step may be: the last run that reported it, and runs that were
        # killed while they saved it.
        self._runs: dict[int, set[int]] = {}
        self._certain: set[int] = set()

    def check_names(self, names: list[str]) -> Iterator[str]:
        """Yields what is wrong with the names in the root after leftovers were deleted."""
        leftovers = [name for name in names if not name.isdecimal()]
        if leftovers:
            yield f"leftovers in the root: {', '.join(leftovers)}"
        there = {int(name) for name in names if name.isdecimal()}
        for step in sorted(there - self._runs.keys()):
            yield f"step {step} exists, but no run has saved it"
        for step in sorted(self._certain - there):
            if sum(other > step for other in there) < KEPT:
                self.lost.append(step)
                yield f"step {step} was reported as saved, but is lost; there are {sorted(there)}"
        self._runs = {step: self._runs.get(step, set()) for step in sorted(there)}
        self._certain = there

    def check_run(self, number: int, by_rank: Sequence[list[Note]]) -> list[str]:
        """Returns what is wrong with the steps that a run found at its start. Then records its
        saves.

        Args:
            number: number of the run.
            by_rank: the logged events of each rank.
        """
        wrong = []
        names = next((note[1] for note in by_rank[0] if note[0] == "names"), None)
        if names is not None:
            wrong += self.check_names(names)
        for rank, notes in enumerate(by_rank):
            found = [note[1:] for note in notes if note[0] == "found"]
            for place, (step, run, difference) in enumerate(found):
                if place == 0 and not self._may_be_newest(step):
                    there = {one: sorted(self._runs[one]) for one in sorted(self._certain)}
                    wrong.append(
                        f"rank {rank} restored step {step}, which is not the newest of the newest "
                        f"run; the runs of the steps are {there}"
                    )
                if difference:
                    wrong.append(f"rank {rank}: step {step} is damaged: {difference}")
                elif step and run not in self._runs.get(step, ()):
                    of = self._runs.get(step)
                    wrong.append(f"rank {rank} restored step {step} of run {run} instead of {of}")
                elif step:
                    # The other ranks must find the same run.
                    self._runs[step] = {run}
        self._record_saves(number, by_rank)
        return wrong

    def _may_be_newest(self, step: int) -> bool:
        """True if a step may be the newest one of the newest run. A run that rewound the training
        may be killed before it has deleted the later steps."""
        newest = max(((min(self._runs[one]), one) for one in self._certain), default=(0, 0))
        return (max(self._runs.get(step, {0})), step) >= newest

    def _record_saves(self, number: int, by_rank: Sequence[list[Note]]) -> None:
        reported = {note[1] for notes in by_rank for note in notes if note[0] == "saved"}
        begun = {note[1] for notes in by_rank for note in notes if note[0] == "begins"}
        for step in sorted(reported):
            self._runs[step] = {number}
        self._certain |= reported
        self.reported += len(reported)
        self.unreported = sorted(begun - reported)
        for step in self.unreported:
            self._runs.setdefault(step, set()).add(number)
