"""Leases of a root, held by runs that live, have died, or are on another machine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fault_hooks import failing
from tests.forked import Answering
from tests.gates import Gate, eventually
from tests.managers import manager_of, state_of
from tests.support import cause_of
from torch_ckpt import CheckpointManager, RootInUse
from torch_ckpt.steps.root_lease import LEASE_NAME, Lease, Times


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
def child_of(work: Callable[[], Any]) -> Iterator[Child]:
    child = Child(work)
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def run_in_a_child(root: Path, *, takeover: bool = False) -> Iterator[Child]:
    """Starts another run, which holds the lease."""
    with child_of(Lease(os.fspath(root), takeover=takeover).require) as child:
        assert child.answer() == "done"
        yield child


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


def dead(root: Path) -> Path:
    """Writes the lease of a dead process of this machine, whose number another process has."""
    return record(root, **of_this_machine(), pid=os.getppid(), start="1")


def has_ended(pid: int) -> bool:
    """Returns True if a process has ended, even if its exit status was not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


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


def test_a_lock_inherited_by_children_of_a_dead_run_does_not_block(root: Path) -> None:
    with open(dead(root)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with leased(root):
            pass


def test_only_one_process_takes_over_a_dead_lease(root: Path) -> None:
    dead(root)
    with ExitStack() as stack:
        work = Lease(os.fspath(root)).require
        children = [stack.enter_context(child_of(work)) for _ in range(4)]
        results = [child.answer() for child in children]
    assert sorted(one.partition(":")[0] for one in results) == ["RootInUse"] * 3 + ["done"]


def test_the_last_manager_of_a_process_that_is_closed_leaves_no_lease(root: Path) -> None:
    with manager_of(root) as made:
        with manager_of(root):
            pass
        assert os.listdir(root) == [LEASE_NAME]
        assert "RootInUse" in tried_elsewhere(root)
        made.save(1, state_of(1))
    assert os.listdir(root) == ["0000000001"]
    assert tried_elsewhere(root) == "done"


def test_a_run_without_saves_leaves_no_root(root: Path) -> None:
    with manager_of(root):
        pass
    assert not root.exists()


def tried_elsewhere(root: Path) -> str:
    """Returns the outcome of another process that requests the lease."""
    with child_of(Lease(os.fspath(root)).require) as child:
        return str(child.answer())


def test_a_read_only_manager_takes_no_lease(root: Path) -> None:
    with run_in_a_child(root), manager_of(root, read_only=True) as made:
        assert made.all_steps() == []


def test_a_forked_child_neither_holds_nor_releases_the_lease_of_its_parent(root: Path) -> None:
    made = Lease(os.fspath(root))
    made.require()

    def in_child() -> str:
        made.release()
        try:
            Lease(os.fspath(root)).require()
        except RootInUse:
            return "refused"
        return "taken"

    with child_of(in_child) as child:
        assert child.answer() == "refused"
        made.require()
        made.release()
        # The child continues to run and holds no lock.
        assert tried_elsewhere(root) == "done"


def test_a_forked_child_cannot_save_to_the_root_of_its_parent(root: Path) -> None:
    with leased(root) as made, child_of(made.require) as child:
        assert "is a forked child of process" in child.answer()


def test_after_a_takeover_the_other_run_cannot_save(root: Path) -> None:
    with manager_of(root) as first:
        first.save(1, state_of(1))
        first.wait_until_finished()
        with run_in_a_child(root, takeover=True) as child:
            with pytest.raises(RootInUse, match=rf"process {child.pid} on .* has taken over"):
                first.save(2, state_of(2))
            assert first.all_steps() == [1]
            with pytest.raises(RootInUse):
                first.delete(1)


def test_a_running_save_is_not_committed_after_a_takeover(root: Path, held_commits: Gate) -> None:
    with manager_of(root) as first:
        first.save(1, state_of(1))
        held_commits.wait()
        with run_in_a_child(root, takeover=True):
            held_commits.open()
            with pytest.raises(Exception, match="has taken over") as caught:
                first.wait_until_finished()
            assert isinstance(cause_of(caught.value), RootInUse)
            assert first.all_steps() == []


def test_a_lease_of_another_machine_is_taken_after_a_wait_if_it_is_not_touched(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(root)
    with leased(root, times=Times(expiry=0.05, poll=0.01)):
        pass
    assert "has a lease held by process 123 on host elsewhere" in caplog.text


def test_the_lock_decides_at_once_for_another_container_of_this_machine(root: Path) -> None:
    record(root, boot=of_this_machine()["boot"], pids="pid:[1]")
    with leased(root):
        pass


def test_a_root_on_a_read_only_disk_is_refused_unless_read_only(small_disk: Path) -> None:
    root = small_disk / "run"
    with manager_of(root) as made:
        made.save(1, state_of(1))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(OSError, match=r"Read-only file system.*or pass read_only=True"):
        CheckpointManager(root, preemption_signals=())
    with manager_of(root, read_only=True) as made:
        assert made.restore(state_of(0)) == 1
