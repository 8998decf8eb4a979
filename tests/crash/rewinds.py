"""Runs that tests kill, and that continue from the last step or from an older one.

A start restores one save of one step, bit for bit: the save that was reported last, or the save
that was killed.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tests.forked import Child
from torch_ckpt import CheckpointManager

#: Number of steps that a run saves.
STEPS = 4


class Save(NamedTuple):
    """A step, and the number that all values of its state have."""

    step: int
    value: int


def state_of(value: int) -> dict[str, Any]:
    return {
        **{name: torch.full((300, 100), float(value)) for name in ("first", "second")},
        "value": value,
    }


def value_in(state: dict[str, Any]) -> int:
    """Returns the number of a state. All its values must have it."""
    value = int(state["value"])
    for name in ("first", "second"):
        assert torch.equal(state[name], state_of(value)[name]), (name, value)
    return value


def train(
    manager: CheckpointManager,
    connection: Connection,
    run: int,
    back: int,
    wait: Callable[[int], None],
) -> None:
    """Restores a step, and saves some. Sends each restored and each reported save.

    Args:
        run: number of the run, which makes the values of its saves unique.
        back: how many steps to go back.
        wait: waits for the save of a step.
    """
    steps = manager.all_steps()
    state = state_of(0)
    chosen = steps[max(0, len(steps) - 1 - back)] if back and steps else None
    start = manager.restore(state, step=chosen)
    connection.send(("restored", chosen, Save(start, value_in(state))))
    for step in range(start + 1, start + 1 + STEPS):
        save = Save(step, 1000 * run + step)
        manager.save(step, state_of(save.value))
        wait(step)
        connection.send(("saved", chosen, save))


def kill_runs(
    kills: int,
    chance: random.Random,
    back_in: int,
    start: Callable[[int, int], tuple[Child, str]],
) -> None:
    """Starts runs until some of them have been killed, and checks what each of them restores.

    Args:
        kills: number of runs that must be killed.
        chance: the random numbers.
        back_in: in one of so many starts, an older step is restored, so that its successors are
            replaced.
        start: starts a run from its number and the number of steps to go back. Returns the run,
            and a description for messages.
    """
    # The saves that the next start may restore.
    allowed = {Save(0, 0)}
    killed = run = 0
    while killed < kills:
        run += 1
        back = chance.randint(1, 2) if chance.randrange(back_in) == 0 else 0
        child, place = start(run, back)
        try:
            while True:
                kind, chosen, save = child.receive()
                if kind == "restored":
                    assert chosen is not None or save in allowed, (place, save, allowed)
                    if chosen is None:
                        allowed = {save}
                    save = Save(save.step, 1000 * run + save.step)
                else:
                    allowed = {save}
                # The save that follows may be committed before it is reported.
                allowed.add(Save(save.step + 1, 1000 * run + save.step + 1))
        except EOFError:
            code = child.wait()
        finally:
            child.kill()
        assert code in (0, -signal.SIGKILL), place
        killed += code != 0
