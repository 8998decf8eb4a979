"""Which steps are kept.

1. Only complete steps are looked at.
2. The newest one is kept, and pinned ones are.
3. Each other is kept if any rule wants it. Without a rule all are kept.
4. The best steps are compared by numbers. Until ``keep_best`` steps have one, that rule keeps all
   steps, so that a metric of another name, or one that comes late, deletes nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from torch_ckpt._base.formatting import some_of
from torch_ckpt._base.options import require_choice
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
            that metric, or with NaN, are worse than all others: this rule keeps them until
            ``keep_best`` steps have a number, and not any more then.
        best_metric: the metric's name, or a function of a step's metrics that rates it; its
            ``KeyError`` is a metric that the step does not have.
        best_mode: "min" or "max": what is best.
        should_keep: a function of a step that keeps it where it returns true.

    Raises:
        ValueError: a number is not positive, or ``keep_best`` is given without ``best_metric``.
        TypeError: a value is not a number, or a number of steps is not an integer.
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
        require_choice("best_mode", self.best_mode, ("min", "max"))
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
        rated = [(sign * self._rate(step.metrics), step) for step in steps if step.complete]
        rated = [(value, step) for value, step in rated if not math.isnan(value)]
        return [step for _, step in sorted(rated, key=lambda pair: (pair[0], -pair[1].step))]

    def waits_for(self, steps: Iterable[StepInfo]) -> str:
        """Why ``keep_best`` cannot be applied yet; "" where it can, or nothing depends on it."""
        complete = [step for step in steps if step.complete]
        if self.keep_best is None:
            return ""
        rated = len(self.best_first(complete))
        if rated >= self.keep_best or rated == len(complete):
            return ""
        return (
            f"{len(complete) - rated} of {len(complete)} steps have no number for "
            f"{self._metric}: keep_best={self.keep_best} keeps all steps until "
            f"{self.keep_best} have one"
        )

    def lacks_metric(
        self, metrics: Mapping[str, float], others: Iterable[Mapping[str, float]]
    ) -> str | None:
        """Why the metrics of a step cannot be those that ``keep_best`` compares.

        Args:
            metrics: of a step, or of several steps together.
            others: of the steps that are there.

        Returns:
            None where the metric is known: one of all these has a number for it, and other steps
            may go without. "" where nothing is wrong yet, as with NaN.
        """
        if self.keep_best is None:
            return None
        rating, missing = self._rated(metrics)
        if any(not math.isnan(each) for each in (rating, *map(self._rate, others))):
            return None
        if missing is None or (callable(self.best_metric) and not metrics):
            return ""
        given = f"given are {some_of(sorted(map(repr, metrics)))}" if metrics else "none are given"
        near = get_close_matches(missing, metrics, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"there is no metric {missing!r}, by which the best steps are kept ({given}){hint}"

    @property
    def _metric(self) -> str:
        return str(getattr(self.best_metric, "__name__", self.best_metric))

    def _rate(self, metrics: Mapping[str, float]) -> float:
        return self._rated(metrics)[0]

    def _rated(self, metrics: Mapping[str, float]) -> tuple[float, str | None]:
        """The number to compare by, NaN where there is none; and the metric that is missing, if
        one is."""
        if not callable(self.best_metric):
            name = self.best_metric or ""
            return metrics.get(name, math.nan), None if name in metrics else name
        if not metrics:
            return math.nan, self._metric
        try:
            rating = self.best_metric(dict(metrics))
        except KeyError as error:
            # It may be made of several, of which a step may have none.
            return math.nan, str(error.args[0]) if error.args else self._metric
        try:
            return float(rating), None
        except OverflowError:
            # Python's integers have no bound.
            return math.inf if rating > 0 else -math.inf, None

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
            best = self.best_first(complete)
            reason = f"best {self.keep_best} by {self._metric}"
            keep(best[: self.keep_best], reason)
            if len(best) < self.keep_best:
                keep((step for step in complete if step not in best), f"{reason}: too few have it")
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
