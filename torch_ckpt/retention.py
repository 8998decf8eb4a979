"""Which steps are kept.

1. Only complete steps are looked at.
2. The newest one is kept, and pinned ones are.
3. Each other is kept if any rule wants it. Without a rule all are kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from torch_ckpt.steps import StepInfo


@dataclass(frozen=True)
class Retention:
    """Rules for which steps to keep. They add up: a step is kept if any of them wants it.

    Args:
        keep_last: so many of the newest.
        keep_every: those whose number is a multiple of it.
        keep_every_hours: from the oldest on, each that was saved so many hours or more after the
            last one that this rule has kept. Steps that do not say when they were saved are kept.
        keep_best: so many of the best by ``best_metric``; of equal ones the newer. Steps without
            that metric, or with NaN, are worse than all others and not kept by this rule.
        best_metric: the metric's name, or a function of a step's metrics that rates it; its
            ``KeyError`` is a metric that the step does not have.
        best_mode: "min" or "max": what is best.
        should_keep: a function of a step that keeps it where it returns true.

    Raises:
        ValueError: a number is not positive, or ``keep_best`` is given without ``best_metric``.
        TypeError: a number is none, as a ``timedelta``, or a number of steps is no integer.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_every_hours: float | None = None
    keep_best: int | None = None
    best_metric: str | Callable[[dict[str, float]], float] | None = None
    best_mode: str = "min"
    should_keep: Callable[[StepInfo], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_every_hours", "keep_best"):
            value = getattr(self, name)
            try:
                is_wrong = value is not None and not value > 0
            except TypeError:
                kind = "a number of hours" if name == "keep_every_hours" else "a number"
                raise TypeError(f"{name} must be {kind}, got {value!r}") from None
            if is_wrong:
                raise ValueError(f"{name} must be positive, got {value}")
            if value is not None and name != "keep_every_hours":
                operator.index(value)
        if self.best_mode not in ("min", "max"):
            raise ValueError(f'best_mode must be "min" or "max", got {self.best_mode!r}')
        if self.keep_best is not None and self.best_metric is None:
            raise ValueError("keep_best needs best_metric, the name of the metric to compare")

    @property
    def keeps_all(self) -> bool:
        """Whether there is no rule."""
        rules = (self.keep_last, self.keep_every, self.keep_every_hours, self.keep_best)
        return self.should_keep is None and all(rule is None for rule in rules)

    def best_first(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """The complete steps that have the metric, from the best to the worst."""
        sign = 1.0 if self.best_mode == "min" else -1.0
        rated = [(sign * self._rate(step), step) for step in steps if step.complete]
        rated = [(value, step) for value, step in rated if not math.isnan(value)]
        return [step for _, step in sorted(rated, key=lambda pair: (pair[0], -pair[1].step))]

    def _rate(self, step: StepInfo) -> float:
        if callable(self.best_metric):
            # It may be made of several, of which a step may have none.
            with suppress(KeyError):
                return float(self.best_metric(step.metrics)) if step.metrics else math.nan
            return math.nan
        return step.metrics.get(self.best_metric or "", math.nan)

    def reasons(self, steps: Iterable[StepInfo]) -> dict[int, list[str]]:
        """Why each of the complete steps is kept, in ascending order; no reason: it is not."""
        complete = sorted((step for step in steps if step.complete), key=lambda step: step.step)
        found: dict[int, list[str]] = {step.step: [] for step in complete}

        def keep(kept: Iterable[StepInfo], reason: str) -> None:
            for step in kept:
                found[step.step].append(reason)

        keep(complete[-1:], "the newest")
        keep((step for step in complete if step.pinned), "pinned")
        if self.keeps_all:
            keep(complete, "no rule")
        if self.keep_last is not None:
            keep(complete[-self.keep_last :], f"last {self.keep_last}")
        if self.keep_every is not None:
            every = self.keep_every
            keep((step for step in complete if step.step % every == 0), f"every {every} steps")
        if self.keep_every_hours is not None:
            keep(_apart(complete, self.keep_every_hours), f"every {self.keep_every_hours:g} h")
        if self.keep_best is not None:
            best = self.best_first(complete)[: self.keep_best]
            by = getattr(self.best_metric, "__name__", self.best_metric)
            keep(best, f"best {self.keep_best} by {by}")
        if self.should_keep is not None:
            keep(filter(self.should_keep, complete), "should_keep")
        return found

    def to_delete(self, steps: Iterable[StepInfo], protected: Collection[int] = ()) -> list[int]:
        """The complete steps that go, in ascending order.

        Args:
            protected: steps that stay, whatever the rules say.
        """
        reasons = self.reasons(steps)
        return [step for step, why in reasons.items() if not why and step not in protected]


def _apart(steps: list[StepInfo], hours: float) -> Iterable[StepInfo]:
    last = -math.inf
    for step in steps:
        if step.saved_at is None:
            yield step
        # Also where the clock went back: it says nothing of how far apart they are.
        elif not 0 <= step.saved_at - last < hours * 3600:
            last = step.saved_at
            yield step
