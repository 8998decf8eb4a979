"""Tests of the objects that hold the options of a manager, and of former keywords."""

from __future__ import annotations

import inspect
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import torch_ckpt
from torch_ckpt import CheckpointManager, Retention
from torch_ckpt.manager import Preemption, SaveOptions
from torch_ckpt.steps import open_steps

WRONG: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    (SaveOptions, {"if_busy": "drop"}, ValueError, "if_busy must be one of 'wait', 'skip'"),
    (SaveOptions, {"check_replicas": True}, ValueError, "check_replicas must be one of"),
    (SaveOptions, {"check_replicas_every": 0}, ValueError, "check_replicas_every must be at least"),
    (SaveOptions, {"staging": "lazy"}, ValueError, "staging must be one of"),
    (Retention, {"keep_every_hours": timedelta(hours=2)}, TypeError, "must be a number of hours"),
    (Retention, {"keep_last": "3"}, TypeError, "keep_last must be a number, got '3'"),
    (
        Preemption,
        {"signals": ["SIGTERM"]},
        TypeError,
        r"signals must be a list of signal numbers such as \[signal.SIGTERM\], "
        "but one element is 'SIGTERM'",
    ),
    (Preemption, {"signals": "SIGTERM"}, TypeError, "must be a list of signal numbers"),
    (Preemption, {"signals": signal.SIGTERM}, TypeError, "must be a list of signal numbers"),
    (Preemption, {"signals": [signal.SIGKILL]}, ValueError, "SIGKILL.* is not a signal that"),
]


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"), WRONG, ids=lambda value: str(value)[:40]
)
def test_invalid_options_are_refused_by_their_object(
    kind: type, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kind(**options)


def test_a_manager_accepts_opened_steps_as_its_root(tmp_path: Path) -> None:
    steps = open_steps(tmp_path)
    with CheckpointManager(steps, preemption=None) as manager:
        manager.save(1, {"x": 1})
    assert [info.step for info in steps.entries()] == [1]


# --- former keywords ------------------------------------------------------------------------------

#: Former keywords, and the options that the error names.
FORMER = {
    "max_overhead": "interval=torch_ckpt.manager.AutoInterval(max_overhead=...)",
    "keep_last": "keep=torch_ckpt.Retention(keep_last=...)",
    "should_keep": "keep=torch_ckpt.Retention(should_keep=...)",
    "if_busy": "saves=torch_ckpt.manager.SaveOptions(if_busy=...)",
    "on_commit": "saves=torch_ckpt.manager.SaveOptions(on_commit=...)",
    "preemption_signals": "preemption=torch_ckpt.manager.Preemption(signals=...)",
    "preemption_deadline": "preemption=torch_ckpt.manager.Preemption(deadline=...)",
    "tensorboard": "on_event=torch_ckpt.events.TensorBoard(writer=...)",
    "overwrite": "write=torch_ckpt.WriteOptions(overwrite=...)",
    "allow_pickle": "read=torch_ckpt.ReadOptions(allow_pickle=...)",
    "load_options": "read=torch_ckpt.ReadOptions(...)",
    "thread_count": "write=torch_ckpt.WriteOptions(thread_count=...) or "
    "read=torch_ckpt.ReadOptions(thread_count=...)",
}


@pytest.mark.parametrize("keyword", FORMER)
def test_a_former_keyword_is_refused_with_the_object_that_has_the_option(
    root: Path, keyword: str
) -> None:
    with pytest.raises(TypeError) as caught:
        CheckpointManager(root, **{keyword: None})
    assert str(caught.value) == (
        f"CheckpointManager() does not accept {keyword!r} as a keyword. Pass it in an object: "
        f"{FORMER[keyword]}"
    )
    assert not root.exists()


def test_each_option_that_an_error_names_exists() -> None:
    for argument in {part for text in FORMER.values() for part in text.split(" or ")}:
        name, _, call = argument.partition("=")
        kind, _, keyword = call.partition("(")
        keyword = keyword.removesuffix("...)").removesuffix("=")
        found: Any = torch_ckpt
        for attribute in kind.split(".")[1:]:
            found = getattr(found, attribute)
        assert keyword.removeprefix("root, ") in ("", *inspect.signature(found).parameters)
        assert name in inspect.signature(CheckpointManager).parameters


def test_a_manager_has_at_most_fifteen_parameters() -> None:
    # The last one only catches former keywords.
    *parameters, removed = inspect.signature(CheckpointManager).parameters.values()
    assert removed.kind is inspect.Parameter.VAR_KEYWORD
    assert len(parameters) <= 15
