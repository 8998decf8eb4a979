"""Leases on network file systems, where locks may not exclude other hosts."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.fault_hooks import at_fault_points, before
from torch_ckpt import _core
from torch_ckpt.steps import lease_file
from torch_ckpt.steps.lease_file import LeaseFile
from torch_ckpt.steps.lease_protocol import LeaseRecord, RunLease, perform

ELSEWHERE = {"host": "elsewhere", "boot": "other", "pids": "1", "pid": 1, "start": 1}


@pytest.fixture(autouse=True)
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every directory one of a network file system that hides the locks of other hosts."""
    monkeypatch.setattr(_core.Directory, "is_local", False)
    monkeypatch.setattr(lease_file, "locked", lambda *_arguments: nullcontext())
    monkeypatch.setattr(lease_file, "_PAUSE_SECONDS", 0.001)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def record(run: str, epoch: int = 1, *, is_held: bool = True) -> LeaseRecord:
    return LeaseRecord(epoch, run, is_held, ELSEWHERE)


def claims(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob(".lease.epoch-*"))


def claim(root: Path, epoch: int, seconds_ago: float = 0.0) -> None:
    path = root / f".lease.epoch-{epoch}"
    path.touch()
    now = path.stat().st_mtime - seconds_ago
    os.utime(path, (now, now))


def test_only_one_of_many_runs_takes_the_first_lease(root: Path) -> None:
    everyone = threading.Barrier(8)
    taken: list[Any] = []

    def take(number: int) -> None:
        store = LeaseFile(str(root))
        everyone.wait()
        stored = store.compare_and_swap(None, record(f"run {number}"))
        if stored is not None:
            taken.append(stored)

    threads = [threading.Thread(target=take, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = LeaseFile(str(root)).read()
    assert [stored.record for stored in taken] == [found and found.record]


def test_a_run_does_not_replace_a_record_that_its_host_does_not_see_yet(root: Path) -> None:
    store = LeaseFile(str(root))
    held = store.compare_and_swap(None, record("first"))
    hidden = (root / ".lease").rename(root / "hidden")
    with before("readdir", lambda: hidden.rename(root / ".lease")):
        found = LeaseFile(str(root)).read()
    assert found == held


def test_a_record_that_a_user_has_removed_is_missing_after_a_while(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_file, "_STALE_SECONDS", 0.01)
    claim(root, 3)
    assert LeaseFile(str(root)).read() is None


def test_a_run_waits_while_another_run_takes_the_lease(root: Path) -> None:
    claim(root, 1)
    assert LeaseFile(str(root)).compare_and_swap(None, record("second")) is None
    assert claims(root) == [".lease.epoch-1"]


def test_an_abandoned_claim_is_passed_by(root: Path) -> None:
    claim(root, 1, seconds_ago=100.0)
    store = LeaseFile(str(root))
    lease = RunLease(str(root), record("second", 0), expiry=60, newest_epoch=store.newest_epoch)
    assert perform(lease.try_take(store, takeover=False), store)
    assert lease.taken is not None
    assert lease.taken.record.epoch == 2


def test_a_run_that_finds_another_record_removes_its_claim(root: Path) -> None:
    store = LeaseFile(str(root))
    first = store.compare_and_swap(None, record("first"))
    assert store.compare_and_swap(first, record("first", is_held=False)) is not None
    assert store.compare_and_swap(first, record("second", 2)) is None
    assert claims(root) == [".lease.epoch-1"]


def test_a_failed_rename_removes_the_claim(root: Path) -> None:
    with (
        at_fault_points(lambda operation, _path: errno.EIO if operation == "rename" else 0),
        pytest.raises(OSError, match="Input/output error"),
    ):
        LeaseFile(str(root)).compare_and_swap(None, record("first"))
    assert claims(root) == []


def test_only_the_last_two_claims_are_kept(root: Path) -> None:
    store, held = LeaseFile(str(root)), None
    for epoch in range(1, 5):
        held = store.compare_and_swap(held, record(f"run {epoch}", epoch))
        assert held is not None
    assert claims(root) == [".lease.epoch-3", ".lease.epoch-4"]


def test_a_local_root_has_no_claims(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core.Directory, "is_local", True)
    assert LeaseFile(str(root)).compare_and_swap(None, record("first")) is not None
    assert claims(root) == []
