"""Leases of a root, held by runs that live, have died, or are on another machine, in real
processes. test_lease_model.py runs random schedules of the protocol."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.fault_hooks import before, failing, held
from tests.forked import Answering
from tests.gates import Gate, eventually
from tests.managers import BROKEN, manager_of, state_of
from tests.support import cause_of
from torch_ckpt import CheckpointManager, RootInUse, _core
from torch_ckpt.steps import LocalSteps, lease_file
from torch_ckpt.steps.lease_file import LeaseFile
from torch_ckpt.steps.root_lease import LEASE_NAME, ObservedLease, RootLease, Times


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
    with child_of(RootLease(LeaseFile(os.fspath(root)), takeover=takeover).require) as child:
        assert child.answer() == "done"
        yield child


@contextmanager
def leased(root: Path, **options: Any) -> Iterator[RootLease]:
    made = RootLease(LeaseFile(os.fspath(root)), **options)
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


def document_of(root: Path) -> dict[str, Any]:
    """Reads the lease."""
    document: dict[str, Any] = json.loads((root / LEASE_NAME).read_bytes())
    return document


def state_of_lease_or_none(root: Path) -> str | None:
    return state_of_lease(root) if (root / LEASE_NAME).exists() else None


@contextmanager
def open_directory(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def state_of_lease(root: Path) -> str:
    return str(document_of(root)["state"])


def contents(root: Path) -> dict[str, bytes]:
    """Reads all files of the steps."""
    files = (path for path in root.glob(f"{'[0-9]' * 10}/*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def process_state(pid: int) -> str:
    """Returns the state of a process in /proc: "T" if it is stopped, "Z" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def stop_here() -> None:
    """Stops this process before the calling thread takes another step.

    If the signal were sent to the process, the calling thread would continue for a moment.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


@contextmanager
def killed_at_the_end(child: Answering) -> Iterator[Answering]:
    try:
        yield child
    finally:
        child.kill()


def test_a_second_run_is_refused_while_the_first_is_alive_and_names_it(root: Path) -> None:
    with run_in_a_child(root) as child:
        with pytest.raises(RootInUse, match=rf"writing to this root: process {child.pid} on host "):
            CheckpointManager(root, preemption=None)
        assert (root / LEASE_NAME).exists()


def test_the_lease_of_a_dead_run_does_not_block(root: Path) -> None:
    with run_in_a_child(root) as child:
        # Its exit status has not been collected: it is still in the process table.
        child.kill()
        eventually(lambda: process_state(child.pid) == "Z")
        with leased(root):
            pass


def test_a_lease_is_released_if_its_thread_cannot_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.mkdir(exist_ok=True)
    with monkeypatch.context() as patch:
        error = RuntimeError("can't start new thread")
        patch.setattr(threading.Thread, "start", Mock(side_effect=error))
        with pytest.raises(OSError, match="the system refused to start a thread"):
            RootLease(LeaseFile(os.fspath(root))).require()
    assert state_of_lease(root) == "released"
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
        work = RootLease(LeaseFile(os.fspath(root))).require
        children = [stack.enter_context(child_of(work)) for _ in range(4)]
        results = [child.answer() for child in children]
    assert sorted(one.partition(":")[0] for one in results) == ["RootInUse"] * 3 + ["done"]


def test_the_last_manager_of_a_process_that_is_closed_releases_the_lease(root: Path) -> None:
    with manager_of(root) as made:
        with manager_of(root):
            pass
        assert os.listdir(root) == [LEASE_NAME]
        assert state_of_lease(root) == "held"
        assert "RootInUse" in tried_elsewhere(root)
        made.save(1, state_of(1))
    assert sorted(os.listdir(root)) == [LEASE_NAME, "0000000001"]
    assert state_of_lease(root) == "released"
    assert tried_elsewhere(root) == "done"


def test_a_run_without_saves_leaves_no_root(root: Path) -> None:
    with manager_of(root):
        pass
    assert not root.exists()


def tried_elsewhere(root: Path) -> str:
    """Returns the outcome of another process that requests the lease."""
    with child_of(RootLease(LeaseFile(os.fspath(root))).require) as child:
        return str(child.answer())


def test_a_read_only_manager_takes_no_lease(root: Path) -> None:
    with run_in_a_child(root), manager_of(root, read_only=True) as made:
        assert made.all_steps() == []


def test_a_forked_child_neither_holds_nor_releases_the_lease_of_its_parent(root: Path) -> None:
    made = RootLease(LeaseFile(os.fspath(root)))
    made.require()

    def in_child() -> str:
        made.release()
        try:
            RootLease(LeaseFile(os.fspath(root))).require()
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


@contextmanager
def saving_in_a_child(root: Path, steps: list[int], *, takeover: bool = True) -> Iterator[Child]:
    """Starts another run, which restores, saves some steps and ends; the process stays."""

    def work() -> None:
        with manager_of(root, takeover=takeover) as made:
            state = state_of(0)
            made.restore(state)
            state["x"].fill_(-1)
            for step in steps:
                made.save(step, state)

    with child_of(work) as child:
        assert child.answer() == "done"
        yield child


def test_after_a_takeover_the_other_run_changes_nothing(root: Path) -> None:
    with manager_of(root, keep=1) as first:
        first.save(1, state_of(1))
        first.wait_until_finished()
        with run_in_a_child(root, takeover=True) as child:
            with pytest.raises(RootInUse, match=rf"process {child.pid} on .* has taken over"):
                first.save(2, state_of(2))
            for change in (first.delete, first.pin, first.unpin):
                with pytest.raises(RootInUse):
                    change(1)
            assert first.all_steps() == [1]
            (root / "0000000009.tmp-0a1b2c3d").mkdir()
            with pytest.raises(RootInUse, match=rf"process {child.pid} on"):
                first._store.sweep()
            assert (root / "0000000009.tmp-0a1b2c3d").exists()


def test_a_run_that_was_taken_over_changes_nothing_after_the_other_run_has_ended(
    root: Path,
) -> None:
    with manager_of(root, keep=1, on_save_error="warn_and_continue") as first:
        first.save(1, state_of(1))
        first.wait_until_finished()
        with saving_in_a_child(root, [2, 3]) as child:
            unchanged = contents(root)
            text = (
                rf"process {child.pid} on host .* \(epoch 2\) has taken over this root from "
                rf"process {os.getpid()} on host .* \(epoch 1\) and has ended since"
            )
            for step in (2, 3, 4):
                with pytest.raises(RootInUse, match=text):
                    first._lease.require()
                assert not first.save(step, state_of(step))
            assert first.save_errors == 3
            with pytest.raises(RootInUse, match=text):
                first.delete(2)
            first._deletions.after_commit(4)
            first._deletions.wait_until_idle()
            assert contents(root) == unchanged
    assert state_of_lease(root) == "released"
    assert document_of(root)["epoch"] == 2


def test_a_suspended_run_that_wakes_after_its_successor_has_ended_changes_nothing(
    root: Path,
) -> None:
    def work(send: Callable[[Any], None]) -> None:
        with manager_of(root, on_save_error="warn_and_continue") as made:
            made.save(1, state_of(1))
            made.wait_until_finished()
            # The lease was checked before the files of the step were written.
            with before("rename", stop_here, "*/0000000002.tmp-*/write_completed"):
                made.save(2, state_of(2))
                made.wait_until_finished()
            send((made.save_errors, made.all_steps()))
            signal.pause()

    with killed_at_the_end(Answering(work)) as child:
        eventually(lambda: process_state(child.pid) == "T")
        with saving_in_a_child(root, [2, 3]):
            before_waking = contents(root)
            os.kill(child.pid, signal.SIGCONT)
            assert child.answer() == (1, [1, 2, 3])
            after = contents(root)
    assert after == before_waking


def test_a_run_that_is_suspended_during_a_rename_cannot_be_taken_over(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(send: Callable[[Any], None]) -> None:
        with manager_of(root) as made:
            with before("rename", stop_here, "*/0000000001"):
                made.save(1, state_of(1))
                made.wait_until_finished()
            send(made.all_steps())
            signal.pause()

    monkeypatch.setattr(lease_file, "_LOCK_SECONDS", 0.01)
    with killed_at_the_end(Answering(work)) as child:
        eventually(lambda: process_state(child.pid) == "T")
        with pytest.raises(RootInUse, match="another process has held the lock on this root"):
            RootLease(LeaseFile(os.fspath(root)), takeover=True).require()
        os.kill(child.pid, signal.SIGCONT)
        assert child.answer() == [1]


def test_a_run_whose_lease_was_removed_saves_nothing(root: Path) -> None:
    with manager_of(root, on_save_error="warn_and_continue") as made:
        made.save(1, state_of(1))
        made.wait_until_finished()
        (root / LEASE_NAME).unlink()
        assert not made.save(2, state_of(2))
        assert made.save_errors == 1
        text = rf"the lease of this run, process {os.getpid()} on .* is missing"
        with pytest.raises(RootInUse, match=text):
            made.delete(1)
        assert made.all_steps() == [1]
    assert not (root / LEASE_NAME).exists()


def test_epochs_increase_with_each_run_even_if_the_lease_is_removed(root: Path) -> None:
    for epoch in (1, 2, 3, 4):
        with manager_of(root) as made:
            made.restore(state_of(0))
            made.save(epoch, state_of(epoch))
        assert document_of(root)["epoch"] == epoch
        if epoch > 1:
            (root / LEASE_NAME).unlink()
    entries = LocalSteps(root).entries()
    assert [info.epoch for info in entries] == [1, 2, 3, 4]
    assert all(info.run.startswith(f"process {os.getpid()} on host ") for info in entries)


# --- released leases ------------------------------------------------------------------------------


def test_a_released_lease_is_not_taken_again(root: Path) -> None:
    lease = RootLease(LeaseFile(os.fspath(root)))
    (root / "0000000001").mkdir(parents=True)
    lease.require()
    held = lease.expected()
    lease.release()
    with pytest.raises(RootInUse, match="has been closed or deleted"):
        lease.require()
    assert lease.expected() == held
    assert (state_of_lease(root), document_of(root)["epoch"]) == ("released", 1)


def test_a_deletion_that_was_queued_before_the_manager_was_deleted_changes_nothing(
    root: Path,
) -> None:
    with manager_of(root) as first:
        for step in (1, 2, 3):
            first.save(step, state_of(step))
    made = [CheckpointManager(root, preemption=None, keep=1)]
    deletions, store = made[0]._deletions, made[0]._store
    with held("rmtree") as gate:
        made[0].save(4, state_of(4))
        made[0].wait_until_finished()
        # The deletion of step 1 is running.
        gate.wait()
        # The thread of the save keeps the manager alive.
        for thread in threading.enumerate():
            if thread.name == "torch_ckpt save":
                thread.join()
        with pytest.warns(ResourceWarning, match="was deleted without close"):
            made.clear()
        gate.open()
        deletions.close()
    assert [info.step for info in store.entries(leftovers=False)] == [2, 3, 4]
    assert (state_of_lease(root), document_of(root)["epoch"]) == ("released", 2)
    assert tried_elsewhere(root) == "done"


def test_threads_that_take_the_lease_at_once_share_it(root: Path) -> None:
    lease = RootLease(LeaseFile(os.fspath(root)))
    with held("fsync", f"{root}/{LEASE_NAME}.*") as gate:
        threads = [threading.Thread(target=lease.require) for _ in range(3)]
        for thread in threads:
            thread.start()
        gate.wait()
        gate.open()
        for thread in threads:
            thread.join()
    lease.release()
    assert state_of_lease_or_none(root) != "held"


def test_a_lease_that_is_taken_while_it_is_released_is_released_again(root: Path) -> None:
    (root / "0000000001").mkdir(parents=True)
    lease, errors = RootLease(LeaseFile(os.fspath(root))), []

    def require() -> None:
        try:
            lease.require()
        except RootInUse as error:
            errors.append(str(error))

    with held("fsync", f"{root}/{LEASE_NAME}.*") as gate:
        thread = threading.Thread(target=require)
        thread.start()
        gate.wait()
        lease.release()
        gate.open()
        thread.join()
    assert "has been closed or deleted" in errors[0]
    assert state_of_lease(root) == "released"


def test_a_manager_whose_root_is_locked_by_a_stopped_process_is_closed_and_raises_its_own_error(
    root: Path, broken: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    root_lock = _core.RootLock

    def waiting(directory: Any, seconds: float) -> Any:
        waits.append(seconds)
        return root_lock(directory, 0.0)

    made = CheckpointManager(root, preemption=None)
    made.save(1, state_of(1))
    monkeypatch.setattr(_core, "RootLock", waiting)
    with open_directory(root) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(CheckpointException, match=BROKEN):
            made.close()
    # Only the release waits.
    assert [seconds > 0 for seconds in waits] == [True, False]


# --- version 0.1 ----------------------------------------------------------------------------------


def parsed_by_version_0_1(data: bytes) -> dict[str, str]:
    """Parses a lease as version 0.1: an object with nested values is not a lease."""
    document = json.loads(data)
    is_flat = not any(isinstance(value, dict | list) for value in document.values())
    return {name: str(value) for name, value in document.items()} if is_flat else {}


def test_version_0_1_sees_that_a_lease_is_held_and_not_a_released_one(root: Path) -> None:
    root.mkdir()
    with leased(root):
        found = parsed_by_version_0_1((root / LEASE_NAME).read_bytes())
        own = {**of_this_machine(), "pid": str(os.getpid())}
        assert {name: found[name] for name in own} == own
        assert int(found["start"]) > 0
        assert float(found["began_at"]) > 1e9
        with open(root / LEASE_NAME) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert parsed_by_version_0_1((root / LEASE_NAME).read_bytes()) == {}


def test_a_live_run_of_version_0_1_is_not_disturbed_and_named(root: Path) -> None:
    with child_of(bool) as child:
        assert child.answer() == "done"
        start = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        record(root, **of_this_machine(), pid=child.pid, start=start, began_at=1e9)
        with pytest.raises(RootInUse, match=rf"process {child.pid} on .*, since Sun Sep  9"):
            RootLease(LeaseFile(os.fspath(root))).require()
        with leased(root, takeover=True):
            assert document_of(root)["epoch"] == 1


def test_steps_of_version_0_1_have_epoch_0(root: Path) -> None:
    step = root / "0000000001"
    step.mkdir(parents=True)
    (step / "write_completed").write_text('{"step": 1, "torch_ckpt": "0.1.0"}')
    (root / "0000000002").mkdir()
    (root / "0000000002" / "write_completed").touch()
    assert [info.epoch for info in LocalSteps(root).entries()] == [0, None]


@pytest.mark.parametrize(
    "damaged",
    [b"", b"[1]", b"\xff", b"{" * 100_000, b'{"host', b"{}", b'{"pid": 1e999, "host": 7}', b"1"],
)
def test_anything_but_a_record_is_replaced_at_once(root: Path, damaged: bytes) -> None:
    root.mkdir()
    (root / LEASE_NAME).write_bytes(damaged)
    with leased(root, times=Times(expiry=-1.0)):
        assert state_of_lease(root) == "held"


@pytest.mark.parametrize("fields", [{"pid": 1}, {"pid": "none"}, {"pid": 1, "start": None}, {}])
def test_a_record_without_a_process_of_this_machine_is_replaced_at_once(
    root: Path, fields: dict[str, Any]
) -> None:
    record(root, **{**of_this_machine(), "pid": None, "start": "1", **fields})
    with leased(root):
        pass


# --- forks and failures ---------------------------------------------------------------------------


def test_a_fork_does_not_wait_for_a_thread_that_takes_a_lease(root: Path) -> None:
    with held("fsync", f"{root}/{LEASE_NAME}.*") as gate:
        lease = RootLease(LeaseFile(os.fspath(root)))
        thread = threading.Thread(target=lease.require)
        thread.start()
        gate.wait()
        # The child takes a lease of its own, although a lock of its parent was held.
        with child_of(RootLease(LeaseFile(os.fspath(root.with_name("other")))).require) as child:
            assert child.answer() == "done"
        gate.open()
        thread.join()
    lease.release()


def test_a_call_that_fails_leaves_the_lease_of_the_other_run_and_no_temporary_file(
    root: Path,
) -> None:
    (root / "0000000001").mkdir(parents=True)
    with leased(root):
        pass
    leftover = root / f"{LEASE_NAME}.5f0c19ab"
    leftover.write_text("of a killed process")
    os.utime(leftover, (0, 0))
    released = (root / LEASE_NAME).read_bytes()
    for operation in ("open", "pwrite", "fsync", "rename", "flock"):
        with failing(operation, errno.EIO), pytest.raises(OSError, match=os.strerror(errno.EIO)):
            RootLease(LeaseFile(os.fspath(root))).require()
        assert (root / LEASE_NAME).read_bytes() == released
    assert sorted(os.listdir(root)) == [LEASE_NAME, "0000000001"]


def test_a_run_keeps_a_temporary_file_that_another_run_may_be_about_to_lock(root: Path) -> None:
    root.mkdir()
    created = root / f"{LEASE_NAME}.5f0c19ab"
    created.touch()
    with leased(root):
        assert created.exists()


def test_a_run_keeps_an_old_temporary_file_that_another_run_has_locked(root: Path) -> None:
    root.mkdir()
    locked = root / f"{LEASE_NAME}.5f0c19ab"
    with open(locked, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(locked, (0, 0))
        with leased(root):
            assert locked.exists()


def test_a_lease_is_renewed_until_it_is_released(root: Path) -> None:
    with leased(root, times=Times(renew=0.001)):
        os.utime(root / LEASE_NAME, (0, 0))
        eventually(lambda: (root / LEASE_NAME).stat().st_mtime > 0)


def test_a_lease_is_no_longer_renewed_after_a_takeover(root: Path) -> None:
    with leased(root, times=Times(renew=0.001)), run_in_a_child(root, takeover=True):
        eventually(
            lambda: all(thread.name != "torch_ckpt lease" for thread in threading.enumerate())
        )


def test_a_lease_of_another_host_that_is_renewed_between_two_tries_is_alive(root: Path) -> None:
    path = record(root)
    with before("wait for a lease", partial(os.utime, path, (1e9, 1e9))):
        os.utime(path, (2e9, 2e9))
        with pytest.raises(RootInUse, match="process 123 on host elsewhere"):
            RootLease(LeaseFile(os.fspath(root)), times=Times(poll=0.001)).require()


def test_a_locked_lease_of_another_host_is_alive(root: Path) -> None:
    with open(record(root)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RootInUse, match="process 123 on host elsewhere"):
            RootLease(LeaseFile(os.fspath(root)), times=Times(expiry=-1.0)).require()


# --- commands -------------------------------------------------------------------------------------


def test_a_command_stops_deleting_steps_if_another_run_takes_the_lease(root: Path) -> None:
    with manager_of(root) as made:
        for step in (1, 2, 3):
            made.save(step, state_of(step))
    store = LocalSteps(root)
    store.lease = ObservedLease(LeaseFile(os.fspath(root)))
    assert store.delete(1)
    with leased(root):
        text = rf"the lease on this root has changed .* process {os.getpid()} on host"
        with pytest.raises(RootInUse, match=text):
            store.delete(2)
        with pytest.raises(RootInUse, match=text):
            store.sweep()
    assert [info.step for info in store.entries()] == [2, 3]


def test_a_command_deletes_steps_of_a_running_run(root: Path) -> None:
    with manager_of(root) as made:
        for step in (1, 2):
            made.save(step, state_of(step))
        made.wait_until_finished()
        store = LocalSteps(root)
        store.lease = ObservedLease(LeaseFile(os.fspath(root)))
        assert store.delete(1)
        assert made.all_steps() == [2]


# --- takeovers ------------------------------------------------------------------------------------


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
        CheckpointManager(root, preemption=None)
    with manager_of(root, read_only=True) as made:
        assert made.restore(state_of(0)) == 1
