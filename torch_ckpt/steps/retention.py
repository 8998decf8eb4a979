"""Rules for the steps to keep.

1. The rules apply to complete steps only.
2. The newest step and pinned steps are always kept. If the steps of several runs are mixed, the
   newest step is the newest one of the highest epoch (checkpoint/lineage.py). ``keep_last`` then
   does not count the steps of abandoned lineages.
3. Every other step is kept if any rule keeps it. Without rules all steps are kept.
4. ``keep_best`` compares the values of a metric. Until ``keep_best`` steps have a number as its
   value, the rule keeps all steps: a misspelled or delayed metric must not delete anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import SupportsIndex

from torch_ckpt._base.checks import require_choice
from torch_ckpt._base.formatting import some_of
from torch_ckpt.checkpoint.lineage import by_lineage
from torch_ckpt.steps import StepInfo


@dataclass(frozen=True)
class Retention:
    """Rules for the steps to keep. A step is kept if any rule keeps it.

    The newest step, from which a run would resume, and pinned steps are always kept. Without rules
    all steps are kept.

    Args:
        keep_last: number of newest steps to keep, without steps of abandoned lineages.
        keep_every: keep the steps whose number is a multiple of this number.
        keep_every_hours: keep one step per this many hours. Starting from the oldest step, the rule
            keeps each step that was saved at least this long after the last step that it keeps.
            Steps without a known time are kept.
        keep_best: number of best steps to keep, by ``best_metric``; newer steps win ties. A step
            without that metric, or with the value NaN, ranks last. The rule keeps such a step only
            until ``keep_best`` steps have a number.
        best_metric: name of a metric, or a function that computes a number from the dict of a
            step's metrics. If the function raises ``KeyError``, the step counts as a step without
            the metric.
        best_mode: "min" if the smallest number is best, "max" if the largest is.
        should_keep: a function that receives a :class:`torch_ckpt.steps.StepInfo` and returns true
            to keep the step.

    Raises:
        ValueError: a number is not positive, or ``keep_best`` is given without ``best_metric``.
        TypeError: a value is not a number, or a number of steps is not an integer.

    Example::

        rules = Retention(keep_last=3, keep_best=1, best_metric="loss")
        print(rules.to_delete(open_steps("checkpoints").entries()))
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
            raise ValueError("keep_best needs a metric to compare. Pass its name as best_metric.")

    @classmethod
    def of(cls, keep: SupportsIndex | Retention | None) -> Retention:
        """Returns the rules for an option ``keep``: a number of newest steps, or rules. None keeps
        all steps.

        Raises:
            TypeError: ``keep`` is neither.
            ValueError: the number is not positive.
        """
        if isinstance(keep, Retention):
            return keep
        if keep is None:
            return cls()
        if not isinstance(keep, SupportsIndex) or isinstance(keep, bool):
            raise TypeError(f"keep must be a number or a torch_ckpt.Retention, got {keep!r}")
        return cls(keep_last=operator.index(keep))

    @property
    def keeps_all(self) -> bool:
        """True if there is no rule."""
        rules = (self.keep_last, self.keep_every, self.keep_every_hours, self.keep_best)
        return self.should_keep is None and all(rule is None for rule in rules)

    def best_first(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Returns the complete steps that have a number for the metric, from best to worst."""
        sign = 1.0 if self.best_mode == "min" else -1.0
        rated = [(sign * self._rate(step.metrics), step) for step in steps if step.complete]
        rated = [(value, step) for value, step in rated if not math.isnan(value)]
        return [step for _, step in sorted(rated, key=lambda pair: (pair[0], -pair[1].step))]

    def waits_for(self, steps: Iterable[StepInfo]) -> str:
        """Explains why ``keep_best`` cannot be applied yet. Returns "" if it can be applied, or if
        all steps have a number."""
        complete = [step for step in steps if step.complete]
        if self.keep_best is None:
            return ""
        rated = len(self.best_first(complete))
        if rated >= self.keep_best or rated == len(complete):
            return ""
        return (
            f"{len(complete) - rated} of {len(complete)} steps have no number for the metric "
            f"{self._metric}, so keep_best={self.keep_best} keeps all steps until "
            f"{self.keep_best} have one"
        )

    def lacks_metric(
        self, metrics: Mapping[str, float], others: Iterable[Mapping[str, float]]
    ) -> str | None:
        """Checks whether any step has the metric that ``keep_best`` compares.

        Args:
            metrics: metrics of one step, or the combined metrics of several steps.
            others: metrics of each existing step.

        Returns:
            None if at least one of these steps has a number for the metric; the others may then
            lack it. "" if nothing is wrong yet, for example if the value is NaN. Otherwise, a
            description of the problem.
        """
        if self.keep_best is None:
            return None
        rating, missing = self._rated(metrics)
        if any(not math.isnan(each) for each in (rating, *map(self._rate, others))):
            return None
        if missing is None or (callable(self.best_metric) and not metrics):
            return ""
        given = f"got {some_of(sorted(map(repr, metrics)))}" if metrics else "got no metrics"
        near = get_close_matches(missing, metrics, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"the metric {missing!r}, which keep_best compares, is missing ({given}){hint}"

    @property
    def _metric(self) -> str:
        return str(getattr(self.best_metric, "__name__", self.best_metric))

    def _rate(self, metrics: Mapping[str, float]) -> float:
        return self._rated(metrics)[0]

    def _rated(self, metrics: Mapping[str, float]) -> tuple[float, str | None]:
        """Returns the number to compare, or NaN and the name of the missing metric."""
        if not callable(self.best_metric):
            name = self.best_metric or ""
            return metrics.get(name, math.nan), None if name in metrics else name
        if not metrics:
            return math.nan, self._metric
        try:
            rating = self.best_metric(dict(metrics))
        except KeyError as error:
            # The function may combine several metrics, and a step may lack any of them.
            return math.nan, str(error.args[0]) if error.args else self._metric
        try:
            return float(rating), None
        except OverflowError:
            # The rating is an integer that is too large for a float.
            return math.inf if rating > 0 else -math.inf, None

    def reasons(self, steps: Iterable[StepInfo]) -> dict[int, list[str]]:
        """Returns the reasons to keep each complete step, in ascending order of steps. A step with
        no reasons is not kept."""
        complete = sorted((step for step in steps if step.complete), key=lambda step: step.step)
        found: dict[int, list[str]] = {step.step: [] for step in complete}

        def keep(kept: Iterable[StepInfo], reason: str) -> None:
            for step in kept:
                found[step.step].append(reason)

        current, _abandoned = by_lineage(complete)
        keep(current[:1], "the newest")
        keep((step for step in complete if step.pinned), "pinned")
        if self.keeps_all:
            keep(complete, "no rule")
        if self.keep_last is not None:
            keep(current[: self.keep_last], f"last {self.keep_last}")
        if self.keep_every is not None:
            every = self.keep_every
            keep((step for step in complete if step.step % every == 0), f"every {every} steps")
        if self.keep_every_hours is not None:
            keep(_spaced(complete, self.keep_every_hours), f"every {self.keep_every_hours:g} h")
        if self.keep_best is not None:
            best = self.best_first(complete)
            reason = f"best {self.keep_best} by {self._metric}"
            keep(best[: self.keep_best], reason)
            if len(best) < self.keep_best:
                others = (step for step in complete if step not in best)
                keep(others, f"{reason}: too few steps have it")
        if self.should_keep is not None:
            keep(filter(self.should_keep, complete), "should_keep")
        return found

    def to_delete(self, steps: Iterable[StepInfo]) -> list[int]:
        """Returns the complete steps to delete, in ascending order."""
        return [step for step, why in self.reasons(steps).items() if not why]


def _spaced(steps: list[StepInfo], hours: float) -> Iterable[StepInfo]:
    """Yields steps that were saved at intervals of at least this many hours."""
    last = -math.inf
    for step in steps:
        if step.saved_at is None:
            yield step
        # Also keep a step with an earlier time: the clock was set back, so the gap is unknown.
        elif not 0 <= step.saved_at - last < hours * 3600:
            last = step.saved_at
            yield step
