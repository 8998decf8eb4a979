"""Tests of Retention: each rule, and all rules against a simple model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ckpt import Retention
from torch_ckpt.steps import StepInfo

HOUR = 3600.0
NAN = math.nan


def info(step: int, **fields: Any) -> StepInfo:
    return StepInfo(step, f"/run/{step:010d}", **{"state": "complete", **fields})


def steps_of(*numbers: int) -> list[StepInfo]:
    return [info(number) for number in numbers]


def rated(*values: float | None) -> list[StepInfo]:
    """Makes steps 1, 2, ... with these losses; None: without a loss."""
    return [
        info(number, metrics={} if value is None else {"loss": value})
        for number, value in enumerate(values, 1)
    ]


# --- rules ---------------------------------------------------------------------------------------

BEST = {"keep_best": 2, "best_metric": "loss"}

#: Rules, steps, and the steps that stay, by the name of the case.
KEPT: dict[str, tuple[dict[str, Any], list[StepInfo], list[int]]] = {
    "no rule keeps all steps": ({}, steps_of(*range(100)), [*range(100)]),
    "the last steps stay": ({"keep_last": 3}, steps_of(1, 5, 9, 12, 30), [9, 12, 30]),
    "multiples and the newest stay": (
        {"keep_every": 10},
        steps_of(0, 5, 10, 15, 20, 25),
        [0, 10, 20, 25],
    ),
    "one step per hour stays": (
        {"keep_every_hours": 1},
        [info(n, saved_at=100 + t * HOUR) for n, t in enumerate((0.0, 0.9, 1.0, 1.5, 2.1, 2.2))],
        [0, 2, 4, 5],
    ),
    "the best steps and the newest stay": (BEST, rated(3, 1, 4, 2, 9), [2, 4, 5]),
    "steps without a number for the metric are not among the best": (
        BEST,
        rated(NAN, None, 7, math.inf, NAN),
        [3, 4, 5],
    ),
    "all steps stay until enough have the metric": (
        {**BEST, "keep_best": 3},
        rated(NAN, None, 7, math.inf, NAN),
        [1, 2, 3, 4, 5],
    ),
    "a function rates steps": (
        {"keep_best": 1, "best_metric": lambda metrics: metrics["a"] + metrics["b"]},
        [
            info(1, metrics={"a": 1.0, "b": 5.0}),
            info(2, metrics={"a": 2.0, "b": 0.0}),
            info(3, metrics={"a": 9.0, "b": 9.0}),
        ],
        [2, 3],
    ),
    "a rating too large for a float is the worst": (
        {"keep_best": 1, "best_metric": lambda metrics: 10**400 if metrics["a"] else 0},
        [info(n, metrics={"a": float(n == 1)}) for n in (1, 2, 3)],
        [3],
    ),
    "a negative rating too large for a float is the best": (
        {"keep_best": 1, "best_metric": lambda metrics: -(10**400) if metrics["a"] else 0},
        [info(n, metrics={"a": float(n == 1)}) for n in (1, 2, 3)],
        [1, 3],
    ),
    "abandoned steps are neither the newest nor among the last": (
        {"keep_last": 2},
        [info(n, epoch=epoch) for n, epoch in ((10, 1), (15, 2), (20, 1), (25, 2), (30, 1))],
        [15, 25],
    ),
    "an abandoned step stays by the other rules": (
        {"keep_every": 20},
        [info(n, epoch=epoch) for n, epoch in ((10, 1), (15, 2), (20, 1), (30, 1))],
        [15, 20],
    ),
    "a complete step is not taken for a leftover of its number": (
        {"keep_last": 2},
        [info(1), info(2), info(2, state="deleted"), info(3), info(3, state="unfinished")],
        [2, 3],
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_the_rules_keep_these_steps(case: str) -> None:
    rules, steps, expected = KEPT[case]
    gone = Retention(**rules).to_delete(steps)
    assert [step.step for step in steps if step.complete and step.step not in gone] == expected


def test_rules_add_up() -> None:
    steps = [
        info(n, metrics={"loss": abs(n - 7)}, saved_at=n * HOUR, notes={"n": n})
        for n in range(1, 13)
    ]
    rules = Retention(
        keep_last=2,
        keep_every=5,
        keep_every_hours=6,
        keep_best=1,
        best_metric="loss",
        should_keep=lambda step: step.notes["n"] == 3,
    )
    assert rules.reasons(steps) == {
        1: ["every 6 h"],
        2: [],
        3: ["should_keep"],
        4: [],
        5: ["every 5 steps"],
        6: [],
        7: ["every 6 h", "best 1 by loss"],
        8: [],
        9: [],
        10: ["every 5 steps"],
        11: ["last 2"],
        12: ["the newest", "last 2"],
    }
    assert rules.to_delete(steps) == [2, 4, 6, 8, 9]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_newer_of_two_equal_steps_is_better(mode: str) -> None:
    rules = Retention(keep_best=1, best_metric="loss", best_mode=mode)
    assert [step.step for step in rules.best_first(rated(1, 1, 1))] == [3, 2, 1]


def test_a_function_is_not_called_for_steps_without_metrics() -> None:
    rules = Retention(keep_best=2, best_metric=lambda metrics: 1 / len(metrics))
    assert [step.step for step in rules.best_first(rated(1, None))] == [1]


# --- a metric that steps lack --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("best", "losses", "expected"),
    [
        (2, (), ""),
        (2, (1.0,), ""),
        (2, (1.0, None, 2.0), ""),
        (3, (None, None, 7, 8, None), "3 of 5 steps have no number for the metric loss"),
    ],
)
def test_keep_best_waits_until_enough_have_the_metric(
    best: int, losses: Any, expected: str
) -> None:
    why = Retention(keep_best=best, best_metric="loss").waits_for(rated(*losses))
    assert expected in why
    assert bool(expected) == bool(why)


@pytest.mark.parametrize(
    ("best_metric", "metrics", "others", "expected"),
    [
        ("loss", {"loss": 1.0}, [], None),
        ("loss", {}, [{"loss": 1.0}], None),
        ("loss", {"loss": NAN}, [{}], ""),
        (lambda metrics: -metrics["acuracy"], {}, [], ""),
        (lambda metrics: -metrics["acuracy"], {"acuracy": 1.0}, [], None),
        (
            lambda metrics: -metrics["acuracy"],
            {"accuracy": 1.0},
            [],
            "the metric 'acuracy', which keep_best compares, is missing (got 'accuracy'); did you "
            "mean 'accuracy'?",
        ),
        (
            "eval_los",
            {"eval_loss": 1.0, "epoch": 2.0},
            [{"eval_loss": 3.0}],
            "the metric 'eval_los', which keep_best compares, is missing (got 'epoch', "
            "'eval_loss'); did you mean 'eval_loss'?",
        ),
    ],
)
def test_a_missing_metric_is_named_with_the_nearest_name(
    best_metric: Any, metrics: Any, others: Any, expected: str | None
) -> None:
    rules = Retention(keep_best=2, best_metric=best_metric)
    assert rules.lacks_metric(metrics, others) == expected


# --- invalid rules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        *(
            ({name: value}, ValueError, f"{name} must be positive, got {value}")
            for name in ("keep_last", "keep_every", "keep_every_hours", "keep_best")
            for value in (0, -1, NAN)
        ),
        *(
            ({name: 2.5}, TypeError, "'float' object cannot be interpreted as an integer")
            for name in ("keep_last", "keep_every", "keep_best")
        ),
        ({"keep_best": 1, "best_metric": None}, ValueError, "keep_best needs a metric"),
        ({"best_mode": "largest"}, ValueError, "best_mode must be"),
    ],
    ids=str,
)
def test_other_rules_are_refused(rules: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Retention(**{"best_metric": "loss", **rules})


# --- comparison with a simple model --------------------------------------------------------------

_METRICS = st.one_of(
    st.none(), st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf]), st.floats()
)

_STEPS = st.dictionaries(
    st.integers(0, 60),
    st.tuples(
        st.sampled_from(["complete", "complete", "complete", "unfinished", "deleted"]),
        st.one_of(st.none(), st.integers(0, 40)),  # in half hours
        _METRICS,
        st.booleans(),
    ),
    max_size=20,
)

_RULES = st.fixed_dictionaries(
    {},
    optional={
        "keep_last": st.integers(1, 6),
        "keep_every": st.integers(1, 12),
        "keep_every_hours": st.sampled_from([0.5, 1.0, 2.5, 6.0]),
        "keep_best": st.integers(1, 5),
        "should_keep": st.sampled_from(["odd", "none"]),
    },
)

_KEEPERS: dict[str, Callable[[StepInfo], bool]] = {
    "odd": lambda step: step.step % 2 == 1,
    "none": lambda step: False,
}


def model(steps: list[StepInfo], rules: dict[str, Any], mode: str) -> set[int]:
    """Returns the steps to delete, by checking for each step whether any rule keeps it."""
    complete = {step.step: step for step in steps if step.state == "complete"}

    def newer(one: int) -> int:
        return sum(other > one for other in complete)

    def hours_keep(one: int) -> bool:
        if complete[one].saved_at is None:
            return True
        last = None
        for number in sorted(complete):
            time = complete[number].saved_at
            if time is None:
                continue
            # Includes times before the last one: the clock was set back.
            if last is None or not last <= time < last + rules["keep_every_hours"] * HOUR:
                last = time
                if number == one:
                    return True
        return False

    losses = [step.metrics.get("loss", math.nan) for step in complete.values()]
    with_a_number = sum(not math.isnan(loss) for loss in losses)

    def better(one: int) -> float:
        mine = complete[one].metrics.get("loss", math.nan)
        if math.isnan(mine):
            return math.inf if with_a_number >= rules.get("keep_best", 0) else 0
        count = 0
        for number, other in complete.items():
            theirs = other.metrics.get("loss", math.nan)
            wins = theirs < mine if mode == "min" else theirs > mine
            count += wins or (theirs == mine and number > one)
        return count

    def stays(one: int) -> bool:
        return (
            not rules
            or newer(one) == 0
            or complete[one].pinned
            or newer(one) < rules.get("keep_last", 0)
            or ("keep_every" in rules and one % rules["keep_every"] == 0)
            or ("keep_every_hours" in rules and hours_keep(one))
            or better(one) < rules.get("keep_best", 0)
            or (rules.get("should_keep") == "odd" and one % 2 == 1)
        )

    return {one for one in complete if not stays(one)}


@given(
    of=_STEPS,
    rules=_RULES,
    mode=st.sampled_from(["min", "max"]),
    by_function=st.booleans(),
    shuffle=st.randoms(use_true_random=False),
)
def test_deletions_match_those_of_a_simple_model(
    of: dict[int, Any],
    rules: dict[str, Any],
    mode: str,
    by_function: bool,
    shuffle: Any,
) -> None:
    steps = [
        info(
            number,
            state=state,
            saved_at=None if time is None else time * HOUR / 2,
            metrics={"los": 1.0} if loss is None else {"loss": loss},
            pinned=pinned,
        )
        for number, (state, time, loss, pinned) in of.items()
    ]
    shuffle.shuffle(steps)
    given_rules = {
        name: _KEEPERS[value] if name == "should_keep" else value for name, value in rules.items()
    }
    metric: Any = (lambda metrics: metrics["loss"]) if by_function else "loss"
    found = Retention(**given_rules, best_metric=metric, best_mode=mode).to_delete(steps)
    assert found == sorted(model(steps, rules, mode))
