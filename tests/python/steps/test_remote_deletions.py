"""Deletions and sweeps of steps at URLs, and steps that must be kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.fault_hooks import before
from tests.remote_steps import (
    PATIENCE,
    fail_at,
    failing_at_the_end,
    kinds_of,
    loaded,
    make_old,
    names_of,
    save,
    state_of,
)
from tests.remote_stores import hooked, hooked_url
from tests.support import assert_equal
from torch_ckpt.steps import MARKER_NAME
from torch_ckpt.steps.busy import busy
from torch_ckpt.steps.remote import RemoteSteps
from torch_ckpt.training import load_checkpoint_if_it_exists, save_checkpoint


def test_an_interrupted_deletion_is_completed_by_the_sweep(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    with fail_at("remove", ".distcp"), pytest.raises(PermissionError):
        flaky.delete(1)
    assert kinds_of(flaky) == {1: "deleted"}
    assert flaky.sweep() == ["0000000001"]
    assert names_of(flaky) == []


def test_a_leftover_that_cannot_be_removed_does_not_stop_the_sweep(
    flaky: RemoteSteps, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(flaky, step, state_of())
        with fail_at("remove", ".distcp"), pytest.raises(PermissionError):
            flaky.delete(step)
    with fail_at("remove", "0000000001"):
        assert flaky.sweep() == ["0000000002"]
    assert "0000000001" in caplog.text
    assert kinds_of(flaky) == {1: "deleted"}


def test_a_sweep_of_deletions_keeps_the_files_of_a_killed_save(flaky: RemoteSteps) -> None:
    flaky._files.write("0000000001/__0_0.distcp", b"x")
    make_old(flaky)
    assert flaky.sweep(deleted_only=True) == []
    assert flaky.sweep() == ["0000000001"]


def test_leftovers_are_listed_only_on_request(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    flaky._files.write("0000000002/__0_0.distcp", b"x")
    assert [entry.step for entry in flaky.entries(leftovers=False)] == [1]


def test_a_deletion_interrupted_before_the_marker_is_still_one(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    with fail_at("remove", MARKER_NAME), pytest.raises(PermissionError):
        flaky.delete(1)
    assert kinds_of(flaky) == {1: "deleted"}


def test_a_step_is_saved_over_an_interrupted_deletion(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(1))
    with fail_at("remove", ".distcp"), pytest.raises(PermissionError):
        flaky.delete(1)
    save(flaky, 1, state_of(2))
    assert_equal(loaded(flaky, 1), state_of(2))


def test_a_step_that_this_process_saves_is_neither_swept_nor_deleted(flaky: RemoteSteps) -> None:
    found: list[Any] = []

    def look(kind: str, path: str) -> None:
        if kind == "write" and path.endswith(MARKER_NAME):
            make_old(flaky)
            found.extend([kinds_of(flaky), flaky.sweep(), flaky.delete(1)])

    with hooked(look):
        save(flaky, 1, state_of())
    assert found == [{1: "unfinished"}, [], False]
    assert_equal(loaded(flaky, 1), state_of())


def test_a_step_that_this_process_loads_is_not_deleted(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    found: list[bool] = []

    def look(kind: str, path: str) -> None:
        if kind == "read" and path.endswith(".distcp"):
            found.append(flaky.delete(1))

    with hooked(look):
        loaded(flaky, 1)
    assert found
    assert not any(found)


def test_a_failed_save_leaves_its_step_free(flaky: RemoteSteps) -> None:
    with fail_at("upload", ".distcp"), pytest.raises(dcp.CheckpointException):
        save(flaky, 1, state_of())
    assert f"{flaky.root}/0000000001" not in busy


def test_other_directories_stay(flaky: RemoteSteps) -> None:
    flaky._files.write("logs/0000000001", b"x")
    flaky._files.write("1/.metadata", b"x")
    make_old(flaky)
    assert (flaky.entries(), flaky.sweep()) == ([], [])
    assert names_of(flaky) == ["1/.metadata", "logs/0000000001"]


def test_brackets_in_the_name_of_a_root_are_not_a_pattern(steps: RemoteSteps) -> None:
    plain, bracketed = RemoteSteps(f"{steps.root}/a1"), RemoteSteps(f"{steps.root}/a[1]")
    save(plain, 1, state_of(1))
    save(bracketed, 1, state_of(2))
    save(bracketed, 1, state_of(3), overwrite=True)
    assert_equal(loaded(bracketed, 1), state_of(3))
    assert bracketed.delete(1)
    assert names_of(bracketed) == []
    assert_equal(loaded(plain, 1), state_of(1))


@pytest.mark.parametrize("part", ["run", "0000000001"])
def test_a_failed_listing_is_an_error_and_not_empty(staging: Path, part: str) -> None:
    steps = RemoteSteps(hooked_url().replace("hooked", "walked"), staging)
    save(steps, 1, state_of())
    with hooked(failing_at_the_end("list", part)), pytest.raises(PermissionError) as caught:
        steps.entries()
    assert caught.value.filename == steps.root
    assert kinds_of(steps) == {1: "complete"}


def test_a_load_from_an_unlistable_root_fails_and_does_not_report_an_empty_one(
    staging: Path,
) -> None:
    root = hooked_url().replace("hooked", "walked")
    save_checkpoint(root, 7, {"t": torch.ones(3)})
    with hooked(failing_at_the_end("list", "run")), pytest.raises(PermissionError):
        load_checkpoint_if_it_exists(root, {"t": torch.zeros(3)})


def test_a_sweep_keeps_a_step_completed_since_the_listing(
    flaky: RemoteSteps, staging: Path
) -> None:
    flaky._files.write("0000000001/__0_0.distcp", b"x")
    make_old(flaky)
    elsewhere = RemoteSteps(hooked_url(), staging)
    save(elsewhere, 1, state_of(1))

    def then_saved_by_another_process(kind: str, path: str) -> None:
        if kind == "list" and path.endswith("0000000001"):
            for name in names_of(elsewhere):
                flaky._files.write(name, elsewhere._files.read(name))

    with hooked(then_saved_by_another_process):
        assert flaky.sweep() == []
    assert_equal(loaded(flaky, 1), state_of(1))


@pytest.mark.parametrize("way", ["delete", "sweep"])
def test_a_save_waits_for_the_removal_of_its_step(flaky: RemoteSteps, way: str) -> None:
    save(flaky, 1, state_of(1))
    if way == "sweep":
        flaky._files.write("0000000001/deleted", b"")
    saver = threading.Thread(target=save, args=(flaky, 1, state_of(2)), kwargs={"overwrite": True})
    waits = threading.Event()

    def save_meanwhile(kind: str, _path: str) -> None:
        if kind == "remove" and saver.ident is None:
            saver.start()
            assert waits.wait(PATIENCE)

    with before("wait for the removal of a step", waits.set), hooked(save_meanwhile):
        if way == "delete":
            assert flaky.delete(1)
        else:
            assert flaky.sweep() == ["0000000001"]
        saver.join(PATIENCE)
    assert_equal(loaded(flaky, 1), state_of(2))
