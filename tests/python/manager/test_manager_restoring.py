"""Tests of the step that a manager restores: a requested one, the newest intact one, or none."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EACCES
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.fault_hooks import before, failing
from tests.managers import (
    LATER,
    PASSED,
    UNMARKED,
    Make,
    Training,
    damage,
    finish,
    restored,
    run_of,
    train,
    training_of,
)
from tests.support import assert_equal, cause_of, data_files, flip_bit, no_warnings
from torch_ckpt import CheckpointError, CheckpointManager, LoadMismatch, Unsafe
from torch_ckpt.checkpoint import safe_types
from torch_ckpt.events import Event
from torch_ckpt.ranks.exchange import Exchange
from torch_ckpt.steps import MARKER_NAME

# --- what the ranks exchange ----------------------------------------------------------------------


def test_a_restore_makes_the_exchanges_of_a_load_and_one_for_the_step(make: Make) -> None:
    made = make()
    train(made, [1])
    finish(made)
    state = training_of(0).state
    with exchanged() as of_restore:
        assert made.restore(state) == 1
    with exchanged() as of_load:
        torch_ckpt.load(state, made.steps()[0].path)
    assert of_load == ["plan", "load", "finish"]
    assert of_restore == ["rendezvous", *of_load]


def test_a_save_makes_the_exchanges_of_an_async_save(make: Make, tmp_path: Path) -> None:
    made = make()
    train(made, [1])
    finish(made)
    state = training_of(0).state
    with exchanged() as of_manager:
        made.save(2, state)
        finish(made)
    with exchanged() as of_save:
        torch_ckpt.async_save(state, tmp_path / "saved").result()
    assert of_manager == of_save == ["plan", "write"]


@contextmanager
def exchanged() -> Iterator[list[str]]:
    """Block whose exchanges between ranks are recorded, by the names of their steps."""
    steps: list[str] = []
    exchange = Exchange.exchange

    def record(ranks: Exchange, step: str, *args: Any) -> Any:
        steps.append(step)
        return exchange(ranks, step, *args)

    with mock.patch.object(Exchange, "exchange", record):
        yield steps


# --- rewinding ------------------------------------------------------------------------------------


def test_any_step_can_be_restored_by_number_with_a_warning_of_later_ones(make: Make) -> None:
    made = make()
    train(made, range(1, 5))
    with no_warnings():
        assert restored(made, 4) == 4
    text = r"step 2 was restored, but there are later steps \(\[3, 4"
    with pytest.warns(UserWarning, match=text):
        assert restored(made, 2) == 2


def test_after_a_rewind_later_steps_are_replaced(make: Make) -> None:
    made = make()
    training = Training()
    train(made, range(1, 5), training)
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, 2)
    for step in (3, 4):
        assert made.save(step, training.state, notes={"again": True})
    made.wait_until_finished()
    assert made.all_steps() == [1, 2, 3, 4]
    assert [info.notes.get("again", False) for info in made.steps()] == [False, False, True, True]
    assert made.restore(training.state) == 4
    assert training.state["epoch"] == 2


def test_stale_steps_displace_no_new_ones_and_are_deleted_once_passed(make: Make) -> None:
    run_of(make, [40, 50, 60])
    events: list[Event] = []
    made = make(keep=2, on_event=events.append)
    training = Training()
    with pytest.warns(UserWarning, match=LATER):
        made.restore(training.state, 40)
    # Step 40 stays because the restore has verified it.
    for step, stay in (
        (54, [40, 54, 60]),
        (56, [40, 54, 56, 60]),
        (58, [40, 56, 58, 60]),
        (63, [40, 58, 63]),
    ):
        made.save(step, training.state)
        finish(made)
        assert made.all_steps() == stay
    stale = [event for event in events if "it is stale" in event.message]
    assert [event.step for event in stale] == [50, 60]


def test_a_missing_step_is_refused_and_the_existing_ones_are_named(make: Make) -> None:
    made = make()
    with pytest.raises(FileNotFoundError, match="step 7 does not exist; no step is complete"):
        restored(made, 7)
    train(made, [1, 2])
    text = r"7 does not exist; the complete steps are \[1, 2\]"
    with pytest.raises(FileNotFoundError, match=text):
        restored(made, 7)


# --- damaged steps --------------------------------------------------------------------------------


#: Damages one file of a step: its data file or .metadata.
DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped bit": ("*.distcp", lambda file: flip_bit(file, file.stat().st_size // 2, 3)),
    "a short file": ("*.distcp", lambda file: os.truncate(file, file.stat().st_size // 2)),
    "an empty file": ("*.distcp", lambda file: os.truncate(file, 0)),
    "a missing file": ("*.distcp", Path.unlink),
    "no metadata": (".metadata", Path.unlink),
    "short metadata": (".metadata", lambda file: os.truncate(file, 40)),
    "empty metadata": (".metadata", lambda file: os.truncate(file, 0)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_step_is_skipped(make: Make, root: Path, kind: str) -> None:
    run_of(make, range(1, 4))
    events: list[Event] = []
    made = make(on_event=events.append)
    name, spoil = DAMAGES[kind]
    for file in (root / "0000000003").glob(name):
        spoil(file)
    with pytest.warns(UserWarning, match=r"step 3: rank 0: .*; falling back to step 2"):
        assert restored(made) == 2
    assert [(event.kind, event.step) for event in events] == [("damaged", 3), ("restored", 2)]


def saved(make: Make) -> CheckpointManager:
    """Makes a manager that has saved two steps."""
    made = make()
    train(made, [1, 2])
    made.wait_until_finished()
    return made


def test_a_requested_step_that_is_damaged_is_an_error(make: Make, root: Path) -> None:
    made = saved(make)
    damage(root, 2)
    with pytest.raises(CheckpointException):
        restored(made, 2)


@pytest.mark.parametrize("read_only", [False, True])
def test_if_all_steps_are_damaged_each_is_tried_once_and_the_restore_fails(
    make: Make, root: Path, read_only: bool
) -> None:
    saved(make).close()
    made = make(read_only=read_only)
    damage(root, 1)
    damage(root, 2)
    with (
        pytest.warns(UserWarning, match=PASSED) as caught,
        pytest.raises(CheckpointError, match=r"no step in .* can be loaded.* step 2: .*; step 1: "),
    ):
        restored(made)
    assert len(caught) == 2


def test_a_mismatch_is_an_error_and_not_damage(make: Make) -> None:
    with pytest.raises(CheckpointException) as caught:
        saved(make).restore({"model": torch.nn.Linear(5, 3)})
    assert isinstance(cause_of(caught.value), LoadMismatch)


def test_an_unreadable_step_is_an_error_and_not_damage(make: Make, root: Path) -> None:
    made = saved(make)
    with (
        failing("open_directory", EACCES, root / "0000000002"),
        pytest.raises(CheckpointException) as caught,
    ):
        restored(made)
    assert isinstance(cause_of(caught.value), PermissionError)


def test_a_step_that_needs_an_uninstalled_numpy_is_an_error_and_not_damage(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    for step in (1, 2):
        made.save(step, {"counts": numpy.arange(3)})
        made.wait_until_finished()
    safe_types._numpy_names.cache_clear()
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(CheckpointException) as caught:
        made.restore({"counts": None})
    assert "numpy is not installed" in str(cause_of(caught.value))


# --- steps without a marker -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "They were saved or copied without this file"),
        ("memory://", "They are still being saved"),
    ],
    ids=["directory", "URL"],
)
def test_a_step_without_a_marker_is_named_and_not_restored(
    make: Make, tmp_path: Path, url: str, reason: str
) -> None:
    root: Any = f"{url}{tmp_path}/run"
    made = make(root)
    train(made, [1, 2])
    made.wait_until_finished()
    if url:
        made._store._store.delete([f"0000000002/{MARKER_NAME}"])  # type: ignore[attr-defined]
    else:
        Path(root, "0000000002", MARKER_NAME).unlink()
    with pytest.warns(UserWarning, match=UNMARKED) as caught:
        assert restored(made) == 1
    [warning] = caught
    assert f"{made._store.root}/0000000002. {reason}" in str(warning.message)
    assert [info.state for info in made.steps()] == ["complete", "unfinished"]


def test_a_checkpoint_without_a_marker_becomes_a_step_by_one(make: Make, root: Path) -> None:
    torch_ckpt.save({"n": torch.ones(3)}, root / "0000000100", no_dist=True)
    state = {"n": torch.zeros(3)}
    with pytest.warns(UserWarning, match=UNMARKED) as caught:
        assert make().restore(state) == 0
    [warning] = caught
    assert warning.filename == __file__
    (root / "0000000100" / MARKER_NAME).touch()
    assert make().restore(state) == 100
    assert_equal(state["n"], torch.ones(3))


def test_many_checkpoints_without_markers_are_counted(make: Make, root: Path) -> None:
    for step in range(10):
        (root / f"{step:010d}").mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"0000000007 and 2 more\. They were saved"):
        make().restore({})


def test_leftovers_of_a_crash_are_not_named_by_a_restore(make: Make, root: Path) -> None:
    made = make()
    train(made, [1])
    made.wait_until_finished()
    (root / "0000000002.tmp-0123abcd").mkdir()
    with no_warnings():
        assert restored(made) == 1


def test_a_requested_step_without_a_marker_is_refused_by_its_name(make: Make, root: Path) -> None:
    (root / "0000000002").mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match=f"step 2 has no {MARKER_NAME}; no step is complete"
    ):
        make().restore({}, 2)


# --- another run saves during the restore ---------------------------------------------------------


def test_a_step_deleted_after_the_listing_is_replaced_by_the_next(make: Make, root: Path) -> None:
    run_of(make, [1])
    reader = make(read_only=True)

    def save_the_next_one() -> None:
        with make(keep=1) as writer:
            writer.restore(Training().state)
            writer.save(2, training_of(2).state)
            finish(writer)
            writer.delete(1)

    with no_warnings(), before("open_directory", save_the_next_one, root / "0000000001"):
        assert restored(reader) == 2
    assert reader.all_steps() == [2]


# --- options that can be read only once -----------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"names": ["model.*"]},
        {"rename": [("model.*", "model.*"), ("optimizer.*", "optimizer.*")], "strict": False},
    ],
    ids=["names", "rename"],
)
def test_an_iterator_option_is_used_for_every_step_tried(
    make: Make, root: Path, options: dict[str, Any]
) -> None:
    run_of(make, [1, 2])
    for file in data_files(root / "0000000002"):
        file.unlink()
    wanted = training_of(1).values()["tensors"]
    options = {k: iter(v) if isinstance(v, list) else v for k, v in options.items()}
    training = training_of(3)
    with pytest.warns(UserWarning, match=PASSED):
        assert make(read_only=True).restore(training.state, **options) == 1
    assert_equal(training.values()["tensors"][:2], wanted[:2])


def test_an_object_that_needs_allow_pickle_is_an_error_that_names_the_option(make: Make) -> None:
    made = make()
    with pytest.warns(UserWarning, match="an object was saved that a load will refuse"):
        made.save(1, {"own": Own()})
    made.wait_until_finished()
    with pytest.raises(Unsafe, match=r"pass ReadOptions\(allow_pickle=True\)"):
        made.restore({"own": Own()})


class Own:
    """Class that is not allow-listed."""
