"""Saves of steps beneath URLs that fail, are killed, or replace a step."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed.checkpoint as dcp

from tests.forked import run_script
from tests.object_server import BUCKET, Fault, ObjectServer, Request
from tests.object_steps import (
    ATTEMPT,
    DENIED,
    PATIENCE,
    calling,
    failing,
    kinds_of,
    loaded,
    make_old,
    names_of,
    save,
    state_of,
    which,
)
from tests.support import assert_equal, cause_of, start_step
from torch_ckpt.errors import DurabilityUncertain, NotCommitted
from torch_ckpt.options import WriteOptions
from torch_ckpt.steps import MARKER_NAME
from torch_ckpt.steps.object_steps import ObjectSteps

#: Limits for a server that does not answer, in seconds.
SHORT_LIMITS = {
    "retry_seconds": 0.5,
    "config_kwargs": {"connect_timeout": 0.5, "read_timeout": 0.5},
}

TWO_FILES = WriteOptions(thread_count=2)


def test_a_failed_upload_is_named_and_leaves_no_objects(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    s3.fault = failing("put", "_1.distcp")
    with pytest.raises(dcp.CheckpointException) as caught:
        save(s3_steps, 1, state_of(), TWO_FILES)
    cause = cause_of(caught.value)
    assert isinstance(cause, PermissionError)
    assert cause.filename.startswith(f"{s3_steps.root}/0000000001/__0_")
    s3.fault = lambda _request: None
    assert names_of(s3_steps) == []


def test_a_failed_background_upload_is_raised_by_the_handle(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    s3.fault = failing("put", ".distcp")
    handle = start_step(s3_steps, 1, state_of())
    with pytest.raises(dcp.CheckpointException, match="AccessDenied"):
        handle.result(PATIENCE)
    assert s3.objects == {}


@pytest.mark.parametrize("part", [".metadata", MARKER_NAME])
def test_a_failed_commit_leaves_no_objects(
    s3_steps: ObjectSteps, s3: ObjectServer, part: str
) -> None:
    s3.fault = failing("put", part)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(s3_steps, 1, state_of())
    assert isinstance(cause_of(caught.value), NotCommitted)
    assert s3.objects == {}


def test_a_marker_whose_request_has_an_unknown_outcome_is_kept(
    s3: ObjectServer,
) -> None:
    steps = ObjectSteps(f"s3://{BUCKET}/run", s3.options | SHORT_LIMITS)
    s3.fault = failing("put", MARKER_NAME, Fault("stall", after=True))
    with pytest.raises(dcp.CheckpointException) as caught:
        save(steps, 1, state_of(1))
    assert isinstance(cause_of(caught.value), DurabilityUncertain)
    s3.fault = lambda _request: None
    assert_equal(loaded(steps, 1), state_of(1))


def test_a_server_that_never_answers_ends_a_save_within_the_limits(s3: ObjectServer) -> None:
    steps = ObjectSteps(f"s3://{BUCKET}/run", s3.options | SHORT_LIMITS)
    save(steps, 1, state_of(1))
    s3.fault = lambda _request: Fault("stall")
    begun = time.monotonic()
    with pytest.raises(dcp.CheckpointException, match="did not answer in time") as caught:
        save(steps, 2, state_of(2))
    assert time.monotonic() - begun < 60
    cause = cause_of(caught.value)
    assert isinstance(cause, TimeoutError)
    assert cause.filename.startswith(f"{steps.root}/0000000002/")
    s3.fault = lambda _request: None
    assert kinds_of(steps)[1] == "complete"


def test_a_server_that_is_away_for_a_while_fails_no_save(s3: ObjectServer) -> None:
    steps = ObjectSteps(f"s3://{BUCKET}/run", s3.options)
    away = iter(range(5))
    s3.fault = lambda _request: None if next(away, None) is None else Fault("reset")
    save(steps, 1, state_of(1))
    assert which(steps) == "old"


def test_objects_that_vanish_before_the_commit_fail_the_save(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    def sweep_by_another_job(request: Request) -> None:
        if request.kind == "list":
            for name in [name for name in s3.objects if name.endswith("_0.distcp")]:
                del s3.objects[name]

    s3.fault = calling(sweep_by_another_job)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(s3_steps, 1, state_of())
    assert "no longer exist" in str(cause_of(caught.value))
    s3.fault = lambda _request: None
    assert kinds_of(s3_steps) == {}


def test_a_step_that_another_job_deletes_during_the_save_is_not_committed(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 1, state_of(1))

    def delete_by_another_job(request: Request) -> None:
        if request.kind == "put" and request.key.endswith(".distcp"):
            s3_steps._store.put("0000000001/deleted", (), 0)

    s3.fault = calling(delete_by_another_job)
    with pytest.raises(dcp.CheckpointException) as caught:
        save(s3_steps, 1, state_of(2), may_replace=True)
    assert "no other job saves, deletes or sweeps" in str(cause_of(caught.value))
    assert isinstance(cause_of(caught.value), NotCommitted)


def test_training_continues_while_a_step_is_uploaded(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    uploading, go_on = threading.Event(), threading.Event()

    def wait(request: Request) -> None:
        if request.kind == "put" and request.key.endswith(".distcp"):
            uploading.set()
            assert go_on.wait(PATIENCE)

    state = state_of(1)
    s3.fault = wait
    handle = start_step(s3_steps, 1, state)
    assert uploading.wait(PATIENCE)
    state["model"]["large"].zero_()
    assert not handle.done()
    assert kinds_of(s3_steps) == {}
    go_on.set()
    handle.result(PATIENCE)
    assert_equal(loaded(s3_steps, 1), state_of(1))


def test_a_dropped_target_releases_its_step(steps: ObjectSteps) -> None:
    target = steps.target(1, TWO_FILES, attempt=ATTEMPT)
    target.open(0, 1)
    assert not steps.delete(1)
    del target
    gc.collect()
    assert steps.delete(1)


def test_a_complete_step_is_replaced_only_on_request_and_stays_pinned(steps: ObjectSteps) -> None:
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


def test_a_save_removes_what_interrupted_saves_of_the_step_have_left(steps: ObjectSteps) -> None:
    steps._store.put("0000000001/__0_0123abcd_0.distcp", [memoryview(b"x")], 1)
    save(steps, 1, state_of(2))
    assert "0000000001/__0_0123abcd_0.distcp" not in names_of(steps)
    assert_equal(loaded(steps, 1), state_of(2))


def test_during_each_request_of_a_replacing_save_a_load_gets_one_save(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 1, state_of(1))
    seen: list[str] = []
    s3.fault = calling(lambda _request: seen.append(which(s3_steps)))
    save(s3_steps, 1, state_of(2), may_replace=True)
    order = [now for now, last in zip(seen, [None, *seen], strict=False) if now != last]
    assert order == ["old", "new"]


def replaced(
    steps: ObjectSteps, s3: ObjectServer, fault: Callable[[int], Fault | None]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Saves step 1, and then replaces it while the requests with some numbers have a fault.

    Returns:
        The objects before the replacing save, and the kind and key of each of its requests.
    """
    steps.delete(1)
    save(steps, 1, state_of(1), marker=lambda: {"metrics": {"loss": 0.5}})
    before = names_of(steps)
    made: list[tuple[str, str]] = []

    def fail(request: Request) -> Fault | None:
        made.append((request.kind, request.key.rpartition("/")[2]))
        return fault(len(made))

    s3.fault = fail
    with contextlib.suppress(dcp.CheckpointException):
        save(steps, 1, state_of(2), may_replace=True)
    s3.fault = lambda _request: None
    return before, made


def test_a_replacing_save_of_which_all_requests_fail_from_one_on_leaves_no_mixture(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    outcomes = []
    for first in range(1, 50):
        _before, made = replaced(
            s3_steps, s3, lambda number, first=first: DENIED if number >= first else None
        )
        outcomes.append(which(s3_steps))
        if len(made) < first:
            break
    order = [now for now, last in zip(outcomes, [None, *outcomes], strict=False) if now != last]
    assert order == ["old", "new"]
    assert len(outcomes) < 49


def test_a_replacing_save_with_one_refused_request_keeps_the_old_step(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    failed: list[tuple[str, str]] = []
    for one in range(1, 50):
        before, made = replaced(
            s3_steps, s3, lambda number, one=one: DENIED if number == one else None
        )
        if which(s3_steps) == "new":
            break
        failed.append(made[one - 1])
        assert s3_steps.entries()[0].metrics == {"loss": 0.5}
        assert names_of(s3_steps) == before
    assert failed[-2:] == [("put", ".metadata"), ("put", MARKER_NAME)]


@pytest.mark.parametrize("is_carried_out", [False, True])
def test_a_replacing_save_repeats_each_request_whose_connection_is_lost(
    s3_steps: ObjectSteps, s3: ObjectServer, is_carried_out: bool
) -> None:
    lost = Fault("reset", after=is_carried_out)
    _before, made = replaced(s3_steps, s3, lambda _number: None)
    for one in range(1, len(made) + 1):
        replaced(s3_steps, s3, lambda number, one=one: lost if number == one else None)
        assert which(s3_steps) == "new", made[one - 1]
        assert s3_steps.entries()[0].metrics == {}


KILLED = """
import json, sys
from tests.object_steps import save, state_of
from torch_ckpt.steps.object_steps import ObjectSteps
steps = ObjectSteps(sys.argv[1], json.loads(sys.argv[2]))
print(flush=True)
save(steps, 1, state_of(2), may_replace=True)
"""


def killed_at(s3: ObjectServer, chooses: Callable[[Request], bool], fault: Fault) -> int:
    """Saves step 1 in a process that is killed during the request that a function chooses."""
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, f"s3://{BUCKET}/run", json.dumps(s3.options)],
        stdout=subprocess.PIPE,
    ) as process:

        def kill(request: Request) -> Fault | None:
            if not chooses(request):
                return None
            os.kill(process.pid, signal.SIGKILL)
            return fault

        s3.fault = kill
        try:
            return process.wait(PATIENCE)
        finally:
            process.kill()
            s3.fault = lambda _request: None


AT_EXIT = """
import json, sys, torch
from tests.support import start_step
from torch_ckpt.steps import open_steps
handle = start_step(open_steps(sys.argv[1], storage_options=json.loads(sys.argv[2])), 1,
                    {"t": torch.arange(9)})
"""


@pytest.mark.parametrize("kind", ["obstore", "fsspec"])
def test_the_interpreter_waits_for_the_upload_at_exit(s3: ObjectServer, kind: str) -> None:
    url, options = f"s3://{BUCKET}/run", json.dumps(s3.options)
    script = AT_EXIT
    if kind == "fsspec":
        pytest.importorskip("s3fs")
        script = "import sys; sys.modules['obstore'] = None\n" + AT_EXIT
    s3.pause = 0.2
    run = run_script(script, url, options)
    assert run.returncode == 0, run.stderr
    assert f"run/0000000001/{MARKER_NAME}" in s3.objects


SAVING = """
import json, sys, torch_ckpt
from tests.object_steps import state_of
write = torch_ckpt.WriteOptions(storage_options=json.loads(sys.argv[2]))
print(flush=True)
handle = torch_ckpt.async_save(state_of(1), sys.argv[1], options=write)
handle.result()
"""


def test_sigterm_ends_a_process_whose_server_does_not_answer(s3: ObjectServer) -> None:
    stalled = threading.Event()

    def stall(_request: Request) -> Fault:
        stalled.set()
        return Fault("stall")

    s3.fault = stall
    with subprocess.Popen(
        [sys.executable, "-c", SAVING, f"s3://{BUCKET}/run/1", json.dumps(s3.options)]
    ) as process:
        assert stalled.wait(PATIENCE)
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM


def is_marker(request: Request) -> bool:
    return request.kind == "put" and request.key.endswith(MARKER_NAME)


def test_a_save_killed_before_its_marker_leaves_no_step_and_is_saved_again(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    assert killed_at(s3, is_marker, Fault("reset")) == -signal.SIGKILL
    assert kinds_of(s3_steps) == {1: "unfinished"}
    with pytest.raises(dcp.CheckpointException, match=f"{MARKER_NAME} is missing"):
        loaded(s3_steps, 1)
    left = set(names_of(s3_steps))
    save(s3_steps, 1, state_of(5))
    assert_equal(loaded(s3_steps, 1), state_of(5))
    assert left & set(names_of(s3_steps)) == {"0000000001/.metadata"}


def test_a_replacing_save_killed_before_its_marker_leaves_the_new_values(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 1, state_of(1))
    assert killed_at(s3, is_marker, Fault("reset")) == -signal.SIGKILL
    assert which(s3_steps) == "new"
    make_old(s3)
    assert s3_steps.sweep() == []


def test_a_replacing_save_killed_before_its_metadata_leaves_the_old_values(
    s3_steps: ObjectSteps, s3: ObjectServer
) -> None:
    save(s3_steps, 1, state_of(1))

    def is_metadata(request: Request) -> bool:
        return request.kind == "put" and request.key.endswith(".metadata")

    assert killed_at(s3, is_metadata, Fault("reset")) == -signal.SIGKILL
    assert which(s3_steps) == "old"
