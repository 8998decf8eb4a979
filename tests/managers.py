"""Trainings under a CheckpointManager for tests, and the fixtures that tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from errno import EROFS
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fault_hooks import failing, held
from tests.gates import Gate
from tests.support import assert_equal, data_files, flip_bit
from torch_ckpt import CheckpointManager
from torch_ckpt.events import Event

Make = Callable[..., CheckpointManager]

#: Parts of warnings.
LATER = "but there are later steps"
PASSED = "; (falling back to step|no step is left)"
UNMARKED = "not restoring directories without write_completed"

#: Part of the error of a save that the fixture ``broken`` fails.
BROKEN = "rename failed: Read-only file system"


class Training:
    """A model, its optimizer and a number, whose values identify the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "epoch": 0}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.state["epoch"] += 1

    def values(self) -> dict[str, Any]:
        """Copies the trained values."""
        momenta = [state.get("momentum_buffer") for state in self.optimizer.state.values()]
        tensors = [*self.model.parameters(), *momenta]
        return {
            "tensors": [tensor.detach().clone() for tensor in tensors],
            "epoch": self.state["epoch"],
        }


def training_of(number: int) -> Training:
    """Makes a training after so many steps."""
    made = Training()
    for _ in range(number):
        made.step()
    return made


def state_of(step: int) -> dict[str, Any]:
    """Makes a small state that identifies the step, for tests without a model."""
    return {"x": torch.full((3,), float(step))}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@contextmanager
def manager_of(root: Path, **options: Any) -> Iterator[CheckpointManager]:
    """Makes a manager, without preemption signals by default."""
    with CheckpointManager(root, **{"preemption": None, **options}) as made:
        yield made


@pytest.fixture
def make(root: Path) -> Iterator[Make]:
    """Makes managers that are closed after the test, without preemption signals by default."""
    made: list[CheckpointManager] = []

    def make_one(path: Path = root, **options: Any) -> CheckpointManager:
        one = CheckpointManager(path, **{"preemption": None, **options})
        made.append(one)
        return one

    yield make_one
    for one in made:
        one.__exit__(AssertionError, AssertionError(), None)


@pytest.fixture
def held_commits() -> Iterator[Gate]:
    """Holds commits until the gate is opened."""
    with held("rename", "*/.metadata") as gate:
        yield gate


@pytest.fixture
def broken() -> Iterator[Callable[[], None]]:
    """Makes the marker of saves unwritable until it is called."""
    with ExitStack() as stack:
        stack.enter_context(failing("rename", EROFS, "*/write_completed"))
        yield stack.close


def train(
    made: CheckpointManager, numbers: Any, training: Training | None = None, **options: Any
) -> list[int]:
    """Runs steps, and returns those that were saved."""
    training = training or training_of(numbers[0] - 1)
    found = []
    for number in numbers:
        training.step()
        if made.save(number, training.state, **options):
            found.append(number)
    return found


def run_of(make: Make, numbers: Any) -> None:
    """Runs a training to its end."""
    with make() as made:
        train(made, numbers)


def until_stopped(made: CheckpointManager, first: int, training: Training) -> int:
    """Runs steps until ``should_stop`` is true, and returns the last step."""
    for step in range(first, first + 100_000):
        training.step()
        made.save(step, training.state)
        if made.should_stop:
            return step
    raise AssertionError("should_stop was never true")


def finish(made: CheckpointManager) -> None:
    """Waits for the running save and deletions."""
    made.wait_until_finished()
    made._deletions.wait_until_idle()


def restored(made: CheckpointManager, step: int | None = None) -> int:
    """Restores a step, and checks that the state belongs to the returned step."""
    training = training_of(1)
    found = made.restore(training.state, step)
    assert_equal(training.values(), training_of(found or 1).values())
    return found


def damage(root: Path, step: int) -> None:
    for file in data_files(root / f"{step:010d}"):
        flip_bit(file, file.stat().st_size // 2, 3)


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def of_kind(kind: str, work: Callable[[], object]) -> Callable[[Event], None]:
    """Makes an ``on_event`` callback that acts on events of one kind."""
    return lambda event: work() and None if event.kind == kind else None
