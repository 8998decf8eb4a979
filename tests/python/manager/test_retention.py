"""Tests of Retention: each rule, and all rules against a simple model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_ckpt.manager.retention import Retention
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


def kept(rules: Retention, steps: list[StepInfo], protected: set[int] | None = None) -> list[int]:
    """Returns the complete steps that stay."""
    gone = rules.to_delete(steps, protected or set())
    return [step.step for step in steps if step.complete and step.step not in gone]


# --- one rule ------------------------------------------------------------------------------------


def test_without_a_rule_all_steps_stay() -> None:
    assert Retention().to_delete(steps_of(*range(100))) == []


def test_best_metric_without_keep_best_is_no_rule() -> None:
    assert Retention(best_metric="loss").to_delete(rated(1, 2, 3)) == []


def test_the_last_steps_stay() -> None:
    assert kept(Retention(keep_last=3), steps_of(1, 5, 9, 12, 30)) == [9, 12, 30]


def test_keep_last_may_exceed_the_number_of_steps() -> None:
    assert Retention(keep_last=9).to_delete(steps_of(1, 2)) == []


def test_multiples_and_the_newest_stay() -> None:
    assert kept(Retention(keep_every=10), steps_of(0, 5, 10, 15, 20, 25)) == [0, 10, 20, 25]


def test_one_step_in_so_many_hours_stays() -> None:
    times = [0.0, 0.9, 1.0, 1.5, 2.1, 2.2]
    steps = [info(n, saved_at=100 + t * HOUR) for n, t in enumerate(times)]
    assert kept(Retention(keep_every_hours=1), steps) == [0, 2, 4, 5]


def test_a_step_without_a_time_stays_and_affects_no_other() -> None:
    steps = [info(1, saved_at=0.0), info(2), info(3, saved_at=0.5 * HOUR), info(4, saved_at=HOUR)]
    assert kept(Retention(keep_every_hours=1), [*steps, info(5)]) == [1, 2, 4, 5]


def test_the_best_steps_and_the_newest_stay() -> None:
    assert kept(Retention(keep_best=2, best_metric="loss"), rated(3, 1, 4, 2, 9)) == [2, 4, 5]


def test_the_largest_may_be_the_best() -> None:
    rules = Retention(keep_best=2, best_metric="loss", best_mode="max")
    assert kept(rules, rated(3, 1, 4, 2, 0)) == [1, 3, 5]


def test_the_newer_of_two_equal_steps_is_better() -> None:
    for mode in ("min", "max"):
        rules = Retention(keep_best=1, best_metric="loss", best_mode=mode)
        assert [step.step for step in rules.best_first(rated(1, 1, 1))] == [3, 2, 1]


def test_steps_without_the_metric_or_with_nan_are_not_among_the_best() -> None:
    rules = Retention(keep_best=2, best_metric="loss")
    assert kept(rules, rated(math.nan, None, 7, math.inf, math.nan)) == [3, 4, 5]


def test_all_steps_stay_until_enough_have_the_metric() -> None:
    rules = Retention(keep_best=3, best_metric="loss")
    assert kept(rules, rated(math.nan, None, 7, math.inf, math.nan)) == [1, 2, 3, 4, 5]
    why = rules.waits_for(rated(None, None, 7, 8, None))
    assert "3 of 5 steps have no number for the metric loss" in why


@pytest.mark.parametrize("losses", [(), (1.0,), (1.0, None, 2.0)])
def test_keep_best_applies_if_enough_steps_or_all_have_the_metric(losses: Any) -> None:
    assert Retention(keep_best=2, best_metric="loss").waits_for(rated(*losses)) == ""


def test_a_misspelled_metric_is_named_with_the_nearest() -> None:
    rules = Retention(keep_best=2, best_metric="eval_los")
    problem = rules.lacks_metric({"eval_loss": 1.0, "epoch": 2.0}, [{"eval_loss": 3.0}])
    assert problem == (
        "the metric 'eval_los', which keep_best compares, is missing (got 'epoch', "
        "'eval_loss'); did you mean 'eval_loss'?"
    )


@pytest.mark.parametrize(
    ("metrics", "others", "expected"),
    [
        ({"loss": 1.0}, [], None),
        ({}, [{"loss": 1.0}], None),
        ({"loss": math.nan}, [{}], ""),
    ],
    ids=["given", "there", "NaN"],
)
def test_a_metric_is_known_if_any_step_has_a_number(
    metrics: Any, others: Any, expected: str | None
) -> None:
    rules = Retention(keep_best=2, best_metric="loss")
    assert rules.lacks_metric(metrics, others) == expected


def test_a_metric_that_a_function_lacks_is_named() -> None:
    rules = Retention(keep_best=2, best_metric=lambda metrics: -metrics["acuracy"])
    assert rules.lacks_metric({}, []) == ""
    assert "did you mean 'accuracy'" in (rules.lacks_metric({"accuracy": 1.0}, []) or "")
    assert rules.lacks_metric({"acuracy": 1.0}, []) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_function_may_return_an_integer_too_large_for_a_float(sign: int) -> None:
    rules = Retention(keep_best=1, best_metric=lambda m: sign * 10**400 if m["a"] else 0)
    steps = [info(1, metrics={"a": 1.0}), info(2, metrics={"a": 0.0}), info(3, metrics={"a": 0.0})]
    assert kept(rules, steps) == ([3] if sign > 0 else [1, 3])


def test_a_function_may_rate_steps() -> None:
    steps = [
        info(1, metrics={"a": 1.0, "b": 5.0}),
        info(2, metrics={"a": 2.0, "b": 0.0}),
        info(3, metrics={"a": 9.0, "b": 9.0}),
    ]
    rules = Retention(keep_best=1, best_metric=lambda metrics: metrics["a"] + metrics["b"])
    assert kept(rules, steps) == [2, 3]


def test_a_function_is_not_called_for_steps_without_metrics() -> None:
    rules = Retention(keep_best=2, best_metric=lambda metrics: 1 / len(metrics))
    assert [step.step for step in rules.best_first(rated(1, None))] == [1]


def test_a_step_that_lacks_a_metric_of_the_function_is_not_a_best_one() -> None:
    steps = [info(1, metrics={"a": 1.0}), info(2, metrics={"b": 1.0}), info(3)]
    rules = Retention(keep_best=1, best_metric=lambda metrics: metrics["a"])
    assert kept(rules, steps) == [1, 3]


def test_a_function_may_keep_steps() -> None:
    rules = Retention(should_keep=lambda step: bool(step.notes.get("keep")))
    steps = [info(1, notes={"keep": True}), info(2), info(3)]
    assert kept(rules, steps) == [1, 3]


def test_pinned_and_protected_steps_stay() -> None:
    steps = [info(1), info(2, pinned=True), info(3), info(4)]
    assert kept(Retention(keep_last=1), steps, {3}) == [2, 3, 4]


def test_pinned_steps_count_among_the_last_ones() -> None:
    steps = [info(1), info(2), info(3, pinned=True), info(4)]
    assert kept(Retention(keep_last=2), steps) == [3, 4]


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
    assert rules.to_delete(steps, {9}) == [2, 4, 6, 8]


def test_leftovers_are_neither_kept_nor_deleted_nor_counted() -> None:
    steps = [info(1), info(2), info(3, state="unfinished"), info(4, state="deleted")]
    assert Retention(keep_last=1).to_delete(steps) == [1]


def test_a_complete_step_is_not_taken_for_a_leftover_of_its_number() -> None:
    steps = [info(1), info(2), info(2, state="deleted"), info(3), info(3, state="unfinished")]
    assert Retention(keep_last=2).to_delete(steps) == [1]


def test_the_order_of_the_steps_does_not_matter() -> None:
    assert kept(Retention(keep_last=2), steps_of(9, 1, 5)) == [9, 5]


# --- invalid rules -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keep_last", "keep_every", "keep_every_hours", "keep_best"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_numbers_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive, got {value}"):
        Retention(best_metric="loss", **{name: value})


@pytest.mark.parametrize("name", ["keep_last", "keep_every", "keep_best"])
def test_numbers_of_steps_must_be_integers(name: str) -> None:
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        Retention(best_metric="loss", **{name: 2.5})


def test_keep_best_needs_a_metric() -> None:
    with pytest.raises(ValueError, match="keep_best needs a metric"):
        Retention(keep_best=1)


def test_best_mode_must_be_valid() -> None:
    with pytest.raises(ValueError, match="best_mode must be"):
        Retention(best_mode="largest")


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


def model(steps: list[StepInfo], rules: dict[str, Any], mode: str, protected: set[int]) -> set[int]:
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
            or one in protected
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
    protected=st.sets(st.integers(0, 60), max_size=3),
    shuffle=st.randoms(use_true_random=False),
)
def test_deletions_match_those_of_a_simple_model(
    of: dict[int, Any], rules: dict[str, Any], mode: str, protected: set[int], shuffle: Any
) -> None:
    steps = [
        info(
            number,
            state=state,
            saved_at=None if time is None else time * HOUR / 2,
            metrics={} if loss is None else {"loss": loss},
            pinned=pinned,
        )
        for number, (state, time, loss, pinned) in of.items()
    ]
    shuffle.shuffle(steps)
    given_rules = {
        name: _KEEPERS[value] if name == "should_keep" else value for name, value in rules.items()
    }
    found = Retention(**given_rules, best_metric="loss", best_mode=mode).to_delete(steps, protected)
    assert found == sorted(model(steps, rules, mode, protected))


_NAMES = ["loss", "los", "Loss", "eval_loss"]


@given(
    metric=st.sampled_from(_NAMES),
    of_steps=st.lists(
        st.dictionaries(st.sampled_from(_NAMES), st.sampled_from([0.0, 1.0, 1.0, 2.0, math.nan])),
        max_size=8,
    ),
    best=st.integers(1, 3),
    mode=st.sampled_from(["min", "max"]),
    by_function=st.booleans(),
)
def test_no_step_is_deleted_by_a_metric_before_enough_steps_have_it(
    metric: str, of_steps: list[dict[str, float]], best: int, mode: str, by_function: bool
) -> None:
    by: Any = (lambda metrics: metrics[metric]) if by_function else metric
    rules = Retention(keep_best=best, best_metric=by, best_mode=mode)
    steps = [info(number, metrics=metrics) for number, metrics in enumerate(of_steps)]
    numbers = {n: m[metric] for n, m in enumerate(of_steps) if not math.isnan(m.get(metric, NAN))}
    gone = rules.to_delete(steps)
    if len(numbers) < best:
        assert gone == []
        return
    # The steps that stay are the best ones, the newer of equal ones, and the newest.
    sign = 1 if mode == "min" else -1
    ranked = sorted(numbers, key=lambda n: (sign * numbers[n], -n))
    assert set(gone) == set(range(len(steps))) - set(ranked[:best]) - {len(steps) - 1}
