"""Saves to URLs that fail, are killed, or replace a step."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.forked import run_script
from tests.remote_steps import (
    ATTEMPT,
    PATIENCE,
    fail_at,
    kinds_of,
    loaded,
    names_of,
    save,
    state_of,
    which,
)
from tests.remote_stores import BUCKET, Hooked, hooked, hooked_url
from tests.support import assert_equal, cause_of, start_step
from torch_ckpt.errors import NotCommitted
from torch_ckpt.loading.by_planner import SourceReader
from torch_ckpt.options import WriteOptions
from torch_ckpt.ranks.group import SINGLE_RANK
from torch_ckpt.saving.handle import save as save_to
from torch_ckpt.steps import MARKER_NAME, MOST_MARKER_BYTES
from torch_ckpt.steps.remote import LEFTOVER_SECONDS, RemoteSteps
from torch_ckpt.steps.remote_reader import RemoteSource

TWO_FILES = WriteOptions(thread_count=2)


def test_a_failed_upload_is_named_and_leaves_no_files(flaky: RemoteSteps, staging: Path) -> None:
    with fail_at("upload", "_1.distcp"), pytest.raises(dcp.CheckpointException) as caught:
        save(flaky, 1, state_of(), TWO_FILES)
    cause = cause_of(caught.value)
    assert isinstance(cause, PermissionError)
    assert cause.filename.startswith(f"{flaky.root}/0000000001/__0_")
    assert "denied" in str(cause)
    assert names_of(flaky) == []
    assert list(staging.iterdir()) == []


def test_a_failed_background_upload_is_raised_by_the_handle(flaky: RemoteSteps) -> None:
    with fail_at("upload", ".distcp", ValueError("no such key")):
        handle = start_step(flaky, 1, state_of())
        with pytest.raises(dcp.CheckpointException, match="ValueError: no such key"):
            handle.result(PATIENCE)
    assert names_of(flaky) == []


@pytest.mark.parametrize("part", [".metadata", MARKER_NAME])
def test_a_failed_commit_leaves_no_files(flaky: RemoteSteps, part: str) -> None:
    with fail_at("write", part), pytest.raises(dcp.CheckpointException) as caught:
        save(flaky, 1, state_of())
    assert isinstance(cause_of(caught.value), NotCommitted)
    assert names_of(flaky) == []


def test_a_marker_written_by_a_failed_request_is_removed(unanswered: RemoteSteps) -> None:
    with pytest.raises(dcp.CheckpointException):
        save(unanswered, 1, state_of())
    assert names_of(unanswered) == []


def test_files_that_vanish_before_the_marker_fail_the_save(flaky: RemoteSteps) -> None:
    listed: list[str] = []

    def sweep_by_another_job(kind: str, path: str) -> None:
        # The save lists the files first when it starts.
        if kind == "list":
            listed.append(path)
        if len(listed) == 2 and kind == "list":
            [name] = [n for n in Hooked.store if path in n and n.endswith("_0.distcp")]
            del Hooked.store[name]

    with hooked(sweep_by_another_job), pytest.raises(dcp.CheckpointException) as caught:
        save(flaky, 1, state_of())
    assert "no longer exist" in str(cause_of(caught.value))
    assert kinds_of(flaky) == {}


def test_uploaded_bytes_are_heartbeats_of_a_save(flaky: RemoteSteps) -> None:
    target = flaky.target(1, TWO_FILES, attempt=ATTEMPT)
    counts: list[int] = []
    with hooked(
        lambda kind, _path: counts.append(target.bytes_moved) if kind == "upload" else None
    ):
        save_to(state_of(), lambda: target, SINGLE_RANK)
    assert len(counts) == 2
    assert counts[0] < counts[1] < target.bytes_moved


def test_training_continues_while_a_step_is_uploaded(flaky: RemoteSteps) -> None:
    uploading, go_on = threading.Event(), threading.Event()

    def wait(kind: str, _path: str) -> None:
        if kind == "upload":
            uploading.set()
            assert go_on.wait(PATIENCE)

    state = state_of(1)
    with hooked(wait):
        handle = start_step(flaky, 1, state)
        assert uploading.wait(PATIENCE)
        state["model"]["large"].zero_()
        assert not handle.done()
        assert kinds_of(flaky) == {}
        go_on.set()
        handle.result(PATIENCE)
    assert_equal(loaded(flaky, 1), state_of(1))


def test_a_staging_directory_without_space_is_named(small_disk: Path) -> None:
    steps = RemoteSteps(hooked_url(), small_disk)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(steps, 1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)})
    cause = cause_of(caught.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert str(cause.filename).startswith(str(small_disk))


KILLED = """
import os, signal, sys
import torch
from fsspec.implementations.local import LocalFileSystem
from tests.support import save_step
from torch_ckpt.steps.remote import RemoteSteps

def until_the_marker(self, path, data):
    if path.endswith("/write_completed"):
        os.kill(os.getpid(), signal.SIGKILL)
    with open(path, "wb") as file:
        file.write(data)

LocalFileSystem.pipe_file = until_the_marker
save_step(RemoteSteps(*sys.argv[1:]), 2, {"t": torch.arange(9)})
"""


@pytest.fixture(scope="module")
def left_by_a_killed_save(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a root in which the save of step 2 was killed before its marker."""
    place = tmp_path_factory.mktemp("killed")
    assert run_script(KILLED, f"file://{place}/run", place).returncode == -signal.SIGKILL
    return place / "run"


@pytest.fixture
def killed(left_by_a_killed_save: Path, tmp_path: Path, staging: Path) -> RemoteSteps:
    shutil.copytree(left_by_a_killed_save, tmp_path / "run")
    return RemoteSteps(f"file://{tmp_path}/run", staging)


def test_a_save_killed_before_its_marker_leaves_no_step(killed: RemoteSteps) -> None:
    save(killed, 1, state_of())
    assert kinds_of(killed) == {1: "complete", 2: "unfinished"}
    with pytest.raises(dcp.CheckpointException, match=f"{MARKER_NAME} is missing"):
        killed.load(2, {"t": torch.zeros(9)}, no_dist=True)


def test_leftovers_of_a_killed_save_are_swept_once_old(killed: RemoteSteps, tmp_path: Path) -> None:
    save(killed, 1, state_of())
    assert killed.sweep() == []
    for file in (tmp_path / "run").rglob("*"):
        os.utime(file, (0, time.time() - LEFTOVER_SECONDS - 1))
    assert killed.sweep() == ["0000000002"]
    assert kinds_of(killed) == {1: "complete"}


def test_a_save_replaces_the_leftovers_of_a_killed_one(killed: RemoteSteps) -> None:
    before = set(names_of(killed))
    save(killed, 2, state_of(5))
    assert_equal(loaded(killed, 2), state_of(5))
    assert before & set(names_of(killed)) == {"0000000002/.metadata"}


AT_EXIT = """
import json, sys, fsspec, torch
from tests.support import start_step
from torch_ckpt.steps.remote import RemoteSteps
fsspec.config.conf["s3"] = json.loads(sys.argv[2])
handle = start_step(RemoteSteps(sys.argv[1]), 1, {"t": torch.arange(9)})
"""


def test_the_interpreter_waits_for_the_upload_at_exit(s3: dict[str, str]) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    run = run_script(AT_EXIT, url, json.dumps(s3))
    assert run.returncode == 0, run.stderr
    names = fsspec.filesystem("s3", **s3).find(url)
    assert any(name.endswith(f"/0000000001/{MARKER_NAME}") for name in names)


def test_a_dropped_target_releases_its_step_and_files(flaky: RemoteSteps, staging: Path) -> None:
    target = flaky.target(1, TWO_FILES, attempt=ATTEMPT)
    target.open(0, 1)
    assert list(staging.iterdir()) != []
    del target
    gc.collect()
    assert list(staging.iterdir()) == []
    assert flaky.delete(1)


def test_a_complete_step_is_replaced_only_on_request_and_stays_pinned(steps: RemoteSteps) -> None:
    save(steps, 1, state_of(1))
    with pytest.raises(dcp.CheckpointException) as caught:
        save(steps, 1, state_of(2))
    assert isinstance(cause_of(caught.value), FileExistsError)
    assert_equal(loaded(steps, 1), state_of(1))
    steps.set_pinned(1, True)
    before = {name for name in names_of(steps) if name.endswith(".distcp")}
    save(steps, 1, state_of(2), may_replace=True)
    assert_equal(loaded(steps, 1), state_of(2))
    assert not before & set(names_of(steps))
    assert [entry.pinned for entry in steps.entries()] == [True]


def test_during_each_request_of_a_replacing_save_a_load_gets_one_save(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(1))
    seen: list[str] = []
    looking: list[bool] = []

    def look(_kind: str, _path: str) -> None:
        if not looking:
            looking.append(True)
            seen.append(which(flaky))
            looking.clear()

    with hooked(look):
        save(flaky, 1, state_of(2), may_replace=True)
    order = [now for now, last in zip(seen, [None, *seen], strict=False) if now != last]
    assert order == ["old", "none", "new"]


def replaced(
    flaky: RemoteSteps, has_failed: Callable[[int], bool]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Saves step 1, and then replaces it while the requests with some numbers fail.

    Returns:
        The files before the replacing save, and the kind and file name of each of its requests.
    """
    flaky.delete(1)
    save(flaky, 1, state_of(1), marker=lambda: {"metrics": {"loss": 0.5}})
    before = names_of(flaky)
    made: list[tuple[str, str]] = []

    def fail(kind: str, path: str) -> None:
        made.append((kind, path.rpartition("/")[2]))
        if has_failed(len(made)):
            raise ConnectionResetError(errno.ECONNRESET, "gone")

    with hooked(fail), contextlib.suppress(dcp.CheckpointException):
        save(flaky, 1, state_of(2), may_replace=True)
    return before, made


def test_a_replacing_save_that_fails_at_any_request_leaves_no_mixture(flaky: RemoteSteps) -> None:
    outcomes = []
    for first in range(1, 50):
        _before, made = replaced(flaky, lambda number, first=first: number >= first)
        outcomes.append(which(flaky))
        if len(made) < first:
            break
    assert outcomes[0] == "old"
    assert "none" in outcomes
    assert outcomes[-1] == "new"
    assert len(outcomes) < 49


def test_a_replacing_save_with_one_failed_request_keeps_the_old_step(flaky: RemoteSteps) -> None:
    failed: list[tuple[str, str]] = []
    for one in range(1, 50):
        before, made = replaced(flaky, lambda number, one=one: number == one)
        if which(flaky) == "new":
            break
        failed.append(made[one - 1])
        assert which(flaky) == "old", made
        assert flaky.entries()[0].metrics == {"loss": 0.5}
        assert names_of(flaky) == before
    assert failed[-2:] == [("write", ".metadata"), ("write", MARKER_NAME)]


def test_a_new_marker_written_by_a_failed_request_is_replaced_by_the_old_step(
    flaky: RemoteSteps, unanswered: RemoteSteps
) -> None:
    save(flaky, 1, state_of(1))
    with pytest.raises(dcp.CheckpointException) as caught:
        save(unanswered, 1, state_of(2), may_replace=True)
    assert isinstance(cause_of(caught.value), NotCommitted)
    assert which(flaky) == "old"


def test_a_marker_that_is_too_long_is_not_read_and_counts_as_empty(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of())
    document = b'{"metrics": {"loss": 0.5}}'
    flaky._files.write(f"0000000001/{MARKER_NAME}", document.ljust(MOST_MARKER_BYTES + 1))
    Hooked.reads.clear()
    [entry] = flaky.entries()
    assert (entry.complete, entry.metrics) == (True, {})
    assert Hooked.reads == []


def test_a_dropped_reader_leaves_no_staged_files(flaky: RemoteSteps, staging: Path) -> None:
    save(flaky, 1, {"t": torch.arange(9)})
    reader = SourceReader(RemoteSource(flaky._files.below("0000000001"), str(staging)))
    target = {"t": torch.zeros(9, dtype=torch.int64)}
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target["t"].tolist() == list(range(9))
    del reader
    gc.collect()
    assert list(staging.iterdir()) == []
