"""The lease on a root beneath a URL: an object that one run at a time holds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.object_server import BUCKET, Fault, ObjectServer, Request
from tests.object_steps import PATIENCE, put, read, save, state_of
from torch_ckpt import CheckpointManager, RootInUse, _core
from torch_ckpt.steps.lease_object import LeaseObject
from torch_ckpt.steps.lease_protocol import LEASE_NAME, LeaseRecord, RunLease, perform
from torch_ckpt.steps.object_steps import ObjectSteps
from torch_ckpt.steps.root_lease import ObservedLease, RootLease, Times

#: Short intervals, for runs of another host.
SHORT = Times(renew=0.05, expiry=0.5, poll=0.02)

ELSEWHERE = {**_core.own_process(), "host": "elsewhere", "boot": "another", "began_at": 1.0}


def run_of(lease: LeaseObject, process: dict[str, Any], name: str) -> RunLease:
    return RunLease(
        lease.root,
        LeaseRecord(0, name, True, process),
        expiry=SHORT.expiry,
        newest_epoch=lease.newest_epoch,
    )


def taken_elsewhere(steps: ObjectSteps) -> RunLease:
    """Takes the lease as a run of another host."""
    lease = steps.lease_store()
    run = run_of(lease, ELSEWHERE, "run of another host")
    assert perform(run.try_take(lease, False), lease)
    return run


def test_a_second_run_is_refused_while_the_first_renews_its_lease(steps: ObjectSteps) -> None:
    first, lease = taken_elsewhere(steps), steps.lease_store()
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(SHORT.renew):
            perform(first.renew(), lease)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with pytest.raises(RootInUse, match="on host elsewhere"):
            RootLease(steps.lease_store(), times=SHORT).take()
    finally:
        ended.set()
        thread.join()


def test_a_run_that_does_not_renew_its_lease_is_followed_by_another(steps: ObjectSteps) -> None:
    first, lease = taken_elsewhere(steps), steps.lease_store()
    second = RootLease(steps.lease_store(), times=SHORT)
    second.take()
    assert second.marker()["epoch"] == 2
    with pytest.raises(RootInUse, match="has taken over this root"):
        perform(first.require(), lease)
    second.release()


def test_the_epoch_of_a_run_is_above_those_of_all_markers(steps: ObjectSteps) -> None:
    save(steps, 1, state_of(), marker=lambda: {"epoch": 7})
    lease = RootLease(steps.lease_store())
    lease.take()
    assert lease.marker()["epoch"] == 8
    lease.release()


def test_of_runs_that_start_at_once_one_takes_the_lease(steps: ObjectSteps) -> None:
    count = 8
    together = threading.Barrier(count)
    results: list[bool | None] = []

    def start(number: int) -> None:
        lease = steps.lease_store()
        run = run_of(lease, ELSEWHERE, f"run {number}")
        together.wait(PATIENCE)
        # A loser does not know yet whether the winner is alive.
        results.append(perform(run.try_take(lease, False), lease))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(bool, results)) == [False] * (count - 1) + [True]


HOLDER = """
import json, sys, threading
from torch_ckpt import CheckpointManager, WriteOptions
write = WriteOptions(storage_options=json.loads(sys.argv[2]))
manager = CheckpointManager(sys.argv[1], write=write, preemption=None)
print(flush=True)
threading.Event().wait()
"""


def test_a_killed_run_of_this_host_is_followed_at_once(s3: ObjectServer) -> None:
    root, write = f"s3://{BUCKET}/run", torch_ckpt.WriteOptions(storage_options=s3.options)
    arguments = [sys.executable, "-c", HOLDER, root, json.dumps(s3.options)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(RootInUse, match=f"process {process.pid} on host"):
            CheckpointManager(root, write=write)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
    with CheckpointManager(root, write=write) as manager:
        manager.save(1, {"t": torch.ones(3)})
    assert ObjectSteps(root, s3.options).entries()[0].epoch == 2


def test_a_run_that_was_taken_over_neither_saves_nor_deletes(steps: ObjectSteps) -> None:
    with CheckpointManager(steps, preemption=None) as manager:
        manager.save(1, {"t": torch.ones(3)})
        manager.wait_until_finished()
        lease = steps.lease_store()
        other = run_of(lease, ELSEWHERE, "other")
        assert perform(other.try_take(lease, True), lease)
        with pytest.raises(RootInUse, match="on host elsewhere"):
            manager.delete(1)
        with pytest.raises(Exception, match="has taken over this root"):
            manager.save(2, {"t": torch.ones(3)})
        assert manager.all_steps() == [1]


def test_a_command_deletes_nothing_once_another_run_has_taken_the_lease(
    steps: ObjectSteps,
) -> None:
    save(steps, 1, state_of())
    first = taken_elsewhere(steps)
    lease = steps.lease_store()
    steps.lease = ObservedLease(lease)
    perform(first.renew(), lease)
    steps.lease.require()
    assert perform(run_of(lease, ELSEWHERE, "other").try_take(lease, True), lease)
    with pytest.raises(RootInUse, match="has changed since the steps were listed"):
        steps.delete(1)
    assert [entry.complete for entry in steps.entries()] == [True]


def test_a_released_lease_is_taken_by_the_next_run(steps: ObjectSteps) -> None:
    for epoch in (1, 2, 3):
        lease = RootLease(steps.lease_store())
        lease.take()
        assert lease.marker()["epoch"] == epoch
        lease.release()


def _with(**changes: Any) -> bytes:
    good = {"epoch": 1, "run": "r", "state": "held", "process": {}, "beat": "b"}
    return json.dumps({**good, **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"[" * 4000,
        _with(epoch=True),
        _with(epoch=0),
        _with(state="free"),
        _with(process=[]),
        _with(process={"host": ["x"]}),
        _with(more=1),
    ],
    ids=range(9),
)
def test_an_object_that_is_no_lease_is_refused_by_name(steps: ObjectSteps, data: bytes) -> None:
    put(steps, LEASE_NAME, data)
    with pytest.raises(OSError, match="is no lease of torch_ckpt") as caught:
        RootLease(steps.lease_store()).take()
    assert f"{steps.root}/{LEASE_NAME}" in str(caught.value)
    assert read(steps, LEASE_NAME) == data


def test_a_lease_that_is_too_large_is_not_read(steps: ObjectSteps) -> None:
    put(steps, LEASE_NAME, _with(run="x" * (4 << 10)))
    with pytest.raises(OSError, match="more than 4096"):
        RootLease(steps.lease_store()).take()


def test_a_lease_is_kept_over_a_renewal_that_fails(s3_steps: ObjectSteps, s3: ObjectServer) -> None:
    renewed = threading.Event()
    failures: list[Request] = []

    def fail_once(request: Request) -> Fault | None:
        if request.kind != "put":
            return None
        if failures:
            renewed.set()
            return None
        failures.append(request)
        return Fault("status", 403, "<Error><Code>AccessDenied</Code></Error>")

    lease = RootLease(s3_steps.lease_store(), times=replace(SHORT, expiry=60))
    lease.take()
    s3.fault = fail_once
    assert renewed.wait(PATIENCE)
    lease.require()
    lease.release()
