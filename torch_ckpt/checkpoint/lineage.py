"""Orders the steps of several runs, and decides which step is the newest.

Each step has the epoch of the run that saved it (steps/lease_protocol.py). If each run continues
from the steps of the run before it, the epochs do not decrease from step to step. If they do, two
runs have trained from one step: a run was taken over and continued, or training was rewound. The
steps of the lower epoch that are not before those of the higher epoch then belong to an abandoned
lineage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from torch_ckpt._base.formatting import some_of


class SavedStep(Protocol):
    """A complete step; see :class:`torch_ckpt.steps.StepInfo`."""

    @property
    def step(self) -> int: ...

    @property
    def epoch(self) -> int | None: ...

    @property
    def run(self) -> str: ...


S = TypeVar("S", bound=SavedStep)


def newest_of(steps: Iterable[S]) -> S | None:
    """Returns the newest of complete steps: the newest step of the highest epoch. A restore begins
    with this step. Returns None if there are no steps."""
    current, _abandoned = by_lineage(steps)
    return current[0] if current else None


def by_lineage(steps: Iterable[S]) -> tuple[list[S], list[S]]:
    """Divides complete steps into steps of the current lineage and steps of abandoned lineages.

    The newest step of the current lineage is the newest step of the highest epoch. A step without
    an epoch counts as a step of the highest epoch: a user has made the directory a step.

    Returns:
        Both lists, newest step first.
    """
    steps = list(steps)
    highest = max((info.epoch or 0 for info in steps), default=0)

    def epoch_and_step(info: S) -> tuple[int, int]:
        return highest if info.epoch is None else info.epoch, info.step

    current: list[S] = []
    abandoned: list[S] = []
    for info in sorted(steps, key=epoch_and_step, reverse=True):
        is_before = not current or info.step < current[-1].step
        (current if is_before else abandoned).append(info)
    return current, sorted(abandoned, key=lambda info: info.step, reverse=True)


def describe_mixture(current: list[S], abandoned: list[S]) -> str:
    """Describes the runs whose steps do not follow each other, and their steps. Returns an empty
    text if there are none. Args: see :func:`by_lineage`."""
    if not abandoned:
        return ""
    oldest = min(info.step for info in abandoned)
    numbers = {info.step for info in abandoned}
    runs: dict[tuple[int | None, str], list[int]] = {}
    for info in sorted(abandoned + current, key=lambda info: info.step):
        if info.step in numbers or info.step > oldest or info is current[0]:
            runs.setdefault((info.epoch, info.run), []).append(info.step)
    texts = [
        f"{run or 'an unknown process'} (epoch {'unknown' if epoch is None else epoch}) saved "
        f"step{'s' if len(steps) > 1 else ''} {some_of(list(map(str, steps)))}"
        for (epoch, run), steps in sorted(runs.items(), key=lambda each: each[0][0] or 0)
    ]
    return (
        f"the steps of several runs are mixed: {'; '.join(texts)}. Either a run was taken over and "
        f"saved steps afterwards, or training was rewound. The newest step of the highest epoch, "
        f"{current[0].step}, counts as the newest step. To use another step, pass its number. "
        "Delete the steps that you do not need."
    )
