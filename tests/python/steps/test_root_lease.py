"""Leases of a root, held by runs that live, have died, or are on another machine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fault_hooks import at_fault_points, before, failing
from tests.forked import Answering
from tests.gates import Gate, eventually
from tests.managers import manager_of, state_of
from tests.support import cause_of
from torch_ckpt import CheckpointManager, RootInUse
from torch_ckpt.steps.root_lease import LEASE_NAME, Lease, Times

#: Age of a lease whose run is declared dead, in seconds.
LONG_AGO = 1000.0


class Child(Answering):
    """Forked process that runs a function, sends its result, and stays until it is killed."""

    def __init__(self, work: Callable[[], Any]) -> None:
        def run(send: Callable[[Any], None]) -> None:
            try:
                result = str(work() or "done")
            except BaseException as error:
                result = f"{type(error).__name__}: {error}"
            send(result)
            signal.pause()

        super().__init__(run)


@contextmanager
def run_in_a_child(root: Path) -> Iterator[Child]:
    """Starts another run, which holds the lease."""
    child = Child(Lease(os.fspath(root)).require)
    try:
        assert child.answer() == "done"
        yield child
    finally:
        child.kill()


@contextmanager
def leased(root: Path, **options: Any) -> Iterator[Lease]:
    made = Lease(os.fspath(root), **options)
    try:
        made.require()
        yield made
    finally:
        made.release()


def record(root: Path, **fields: Any) -> Path:
    """Writes the lease of another process; by default one of another machine."""
    root.mkdir(exist_ok=True)
    path = root / LEASE_NAME
    path.write_text(json.dumps({"host": "elsewhere", "pid": 123, "start": "7", **fields}))
    return path


def of_this_machine() -> dict[str, str]:
    return {
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pids": os.readlink("/proc/self/ns/pid"),
    }


def has_ended(pid: int) -> bool:
    """Returns True if a process has ended, even if its exit status was not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def touch_long_ago(path: Path) -> None:
    os.utime(path, (time.time() - LONG_AGO,) * 2)


# --- on one machine ------------------------------------------------------------------------------


def test_a_second_run_is_refused_while_the_first_is_alive_and_names_it(root: Path) -> None:
    with run_in_a_child(root) as child:
        with pytest.raises(RootInUse, match=rf"writing to this root: process {child.pid} on host "):
            CheckpointManager(root, preemption_signals=())
        assert (root / LEASE_NAME).exists()


def test_the_lease_of_a_dead_run_does_not_block(root: Path) -> None:
    with run_in_a_child(root) as child:
        # Its exit status has not been collected: it is still in the process table.
        child.kill()
        eventually(lambda: has_ended(child.pid))
        with leased(root):
            pass


@pytest.mark.parametrize("has_lease", [False, True])
def test_temporary_files_of_a_run_killed_while_taking_the_lease_are_removed(
    root: Path, has_lease: bool
) -> None:
    root.mkdir(exist_ok=True)
    if has_lease:
        touch_long_ago(record(root))
    (root / f"{LEASE_NAME}.5f0c19ab").write_text("{}")
    with leased(root):
        assert os.listdir(root) == [LEASE_NAME]


def test_a_lease_emptied_by_a_machine_crash_is_taken_at_once(root: Path) -> None:
    root.mkdir(exist_ok=True)
    (root / LEASE_NAME).touch()
    reached: list[str] = []
    with at_fault_points(lambda operation, _path: reached.append(operation)), leased(root):
        assert "wait for a lease" not in reached


def test_a_lease_is_removed_if_its_thread_cannot_start(root: Path) -> None:
    root.mkdir(exist_ok=True)
    with (
        failing("pthread_create", errno.EAGAIN),
        pytest.raises(OSError, match="the system refused to start a thread"),
    ):
        Lease(os.fspath(root)).require()
    assert os.listdir(root) == []
    with leased(root):
        assert os.listdir(root) == [LEASE_NAME]


def test_a_process_with_the_pid_of_a_dead_one_does_not_block(root: Path) -> None:
    record(root, **of_this_machine(), pid=os.getppid(), start="1")
    with leased(root):
        pass


def test_a_lock_inherited_by_children_of_a_dead_run_does_not_block(root: Path) -> None:
    with open(record(root, **of_this_machine(), pid=os.getppid(), start="1")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with leased(root):
            pass


def test_only_one_process_takes_over_a_dead_lease(root: Path) -> None:
    record(root, **of_this_machine(), pid=os.getppid(), start="1")
    children = [Child(Lease(os.fspath(root)).require) for _ in range(4)]
    try:
        results = [child.answer() for child in children]
    finally:
        for child in children:
            child.kill()
    assert sorted(one.partition(":")[0] for one in results) == ["RootInUse"] * 3 + ["done"]


def test_a_closed_run_leaves_no_lease(root: Path) -> None:
    with manager_of(root) as made:
        assert os.listdir(root) == [LEASE_NAME]
        made.save(1, state_of(1))
    assert os.listdir(root) == ["0000000001"]


def test_a_run_without_saves_leaves_no_root(root: Path) -> None:
    with manager_of(root):
        pass
    assert not root.exists()


def test_managers_of_one_process_share_the_lease_until_the_last_is_closed(root: Path) -> None:
    with leased(root):
        with leased(root), manager_of(root):
            pass
        assert "RootInUse" in tried_elsewhere(root)
    assert tried_elsewhere(root) == "done"


def tried_elsewhere(root: Path) -> str:
    """Returns the outcome of another process that requests the lease."""
    child = Child(Lease(os.fspath(root)).require)
    try:
        return child.answer()
    finally:
        child.kill()


def test_a_read_only_manager_takes_no_lease(root: Path) -> None:
    with (
        run_in_a_child(root),
        manager_of(root, read_only=True) as made,
    ):
        assert made.all_steps() == []


# --- forks ---------------------------------------------------------------------------------------


def test_a_forked_child_neither_holds_nor_releases_the_lease_of_its_parent(root: Path) -> None:
    made = Lease(os.fspath(root))
    made.require()

    def in_child() -> str:
        made.release()
        again = Lease(os.fspath(root))
        try:
            again.require()
        except RootInUse:
            return "refused"
        return "taken"

    child = Child(in_child)
    try:
        assert child.answer() == "refused"
        made.require()
        made.release()
        # The child continues to run and holds no lock.
        assert tried_elsewhere(root) == "done"
    finally:
        child.kill()


def test_a_forked_child_cannot_save_to_the_root_of_its_parent(root: Path) -> None:
    with leased(root) as made:
        child = Child(made.require)
        try:
            assert "is a forked child of process" in child.answer()
        finally:
            child.kill()


# --- taking over ---------------------------------------------------------------------------------


def test_after_a_takeover_the_other_run_cannot_save(root: Path) -> None:
    with manager_of(root) as first:
        first.save(1, state_of(1))
        first.wait_until_finished()
        child = Child(Lease(os.fspath(root), takeover=True).require)
        try:
            assert child.answer() == "done"
            with pytest.raises(RootInUse, match=rf"process {child.pid} on .* has taken over"):
                first.save(2, state_of(2))
            assert first.all_steps() == [1]
            with pytest.raises(RootInUse):
                first.delete(1)
        finally:
            child.kill()


def test_a_running_save_is_not_committed_after_a_takeover(root: Path, held_commits: Gate) -> None:
    with manager_of(root) as first:
        first.save(1, state_of(1))
        held_commits.wait()
        child = Child(Lease(os.fspath(root), takeover=True).require)
        try:
            assert child.answer() == "done"
            held_commits.open()
            with pytest.raises(Exception, match="has taken over") as caught:
                first.wait_until_finished()
            assert isinstance(cause_of(caught.value), RootInUse)
            assert first.all_steps() == []
        finally:
            child.kill()


def test_a_lease_taken_over_is_not_removed_by_its_former_holder(root: Path) -> None:
    with leased(root):
        child = Child(Lease(os.fspath(root), takeover=True).require)
        assert child.answer() == "done"
    try:
        assert "RootInUse" in tried_elsewhere(root)
    finally:
        child.kill()


# --- on several machines -------------------------------------------------------------------------


def test_a_lease_of_another_machine_that_is_not_touched_is_taken(root: Path) -> None:
    touch_long_ago(record(root))
    with leased(root):
        pass


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b"{" * 100_000])
def test_an_unparsable_lease_that_is_not_touched_is_taken(root: Path, content: bytes) -> None:
    path = record(root)
    path.write_bytes(content)
    touch_long_ago(path)
    with leased(root):
        pass


def test_a_lease_of_another_machine_is_taken_after_a_wait_if_it_is_not_touched(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(root)
    with leased(root, times=Times(expiry=0.05, poll=0.01)):
        pass
    assert "has a lease held by process 123 on host elsewhere" in caplog.text


def test_a_run_on_another_machine_that_touches_its_lease_is_alive(root: Path) -> None:
    path = record(root)
    with (
        before("wait for a lease", lambda: os.utime(path, (1e9, time.time() + 5))),
        pytest.raises(RootInUse, match="process 123 on host elsewhere"),
    ):
        Lease(os.fspath(root), times=Times(poll=0.01)).require()


def test_a_run_on_another_machine_with_a_visible_lock_is_alive(root: Path) -> None:
    path = record(root)
    touch_long_ago(path)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RootInUse, match="process 123 on host elsewhere"):
            Lease(os.fspath(root)).require()


def test_the_lock_decides_at_once_for_another_container_of_this_machine(root: Path) -> None:
    record(root, boot=of_this_machine()["boot"], pids="pid:[1]")
    with leased(root):
        pass


def test_a_lease_is_touched_while_its_run_is_alive(root: Path) -> None:
    with leased(root, times=Times(renew=0.01)):
        path = root / LEASE_NAME
        touch_long_ago(path)
        eventually(lambda: path.stat().st_mtime > time.time() - LONG_AGO / 2)


# --- leases that cannot be taken -----------------------------------------------------------------


def test_a_root_on_a_read_only_disk_is_refused_unless_read_only(
    small_disk: Path,
) -> None:
    root = small_disk / "run"
    with manager_of(root) as made:
        made.save(1, state_of(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=r"Read-only file system.*or pass read_only=True"):
        CheckpointManager(root, preemption_signals=())
    with manager_of(root, read_only=True) as made:
        assert made.restore(state_of(0)) == 1


def test_a_failed_constructor_holds_no_lease(root: Path) -> None:
    with pytest.raises(ValueError, match="interval"):
        CheckpointManager(root, preemption_signals=(), interval=-1)
    assert not root.exists()
