"""A manager that saves to the disk of its host first, and then copies to the root."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from contextlib import closing, suppress
from errno import EIO, ENOSPC
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torch_ckpt
from tests.fault_hooks import at_fault_points, failing, held
from tests.object_server import BUCKET, ObjectServer
from torch_ckpt import CheckpointError, CheckpointManager, ReadOptions, WriteOptions
from torch_ckpt.events import Event
from torch_ckpt.manager import LocalTier, SaveOptions
from torch_ckpt.steps import LocalSteps, open_steps, tier_copy, tier_target
from torch_ckpt.steps.host_step import PUBLISHED_NAME
from torch_ckpt.steps.tier_files import PathFiles, TierSource
from torch_ckpt.training import save_checkpoint

#: A path of the copies beneath the root.
COPIED = "*/root/*.distcp.*.part"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_copy, "_PAUSE_SECONDS", 0.01)


def manager_of(root: Any, disk: Path, keep: int = 2, **options: Any) -> CheckpointManager:
    tier = LocalTier(disk, keep=keep)
    return CheckpointManager(root, interval=1, local=tier, preemption=None, **options)


def state_of(step: int) -> dict[str, Any]:
    return {"t": torch.arange(100.0) + step, "u": torch.full((3,), float(step)), "step": step}


def save(manager: CheckpointManager, *steps: int, published: bool = True) -> None:
    for step in steps:
        manager.save(step, state_of(step))
        manager.wait_until_finished(published=published)


def restored(manager: CheckpointManager) -> int:
    """Restores, and checks the values. Returns the step."""
    state: dict[str, Any] = {"t": torch.zeros(100), "u": torch.zeros(3), "step": -1}
    step = manager.restore(state)
    if step:
        assert torch.equal(state["t"], state_of(step)["t"])
        assert torch.equal(state["u"], state_of(step)["u"])
        assert state["step"] == step
    return step


def on_disk(disk: Path) -> list[str]:
    """Returns the names of the directories on the disk."""
    return sorted(path.name for path in disk.glob("*/*"))


def data_of(step: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in step.iterdir()
        if path.suffix in (".distcp", ".metadata") or path.name == ".metadata"
    }


def close_without_copies(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_ckpt.manager.manager.CLOSE_SECONDS", 0.0)
    manager.close()


def test_a_step_on_the_disk_is_copied_to_the_root(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1)
    [local] = disk.glob("*/0000000001")
    assert data_of(local) == data_of(root / "0000000001")
    loaded = {"t": torch.zeros(100)}
    torch_ckpt.load(loaded, root / "0000000001")
    assert torch.equal(loaded["t"], state_of(1)["t"])


def test_a_save_does_not_wait_for_the_copy(root: Path, disk: Path) -> None:
    events: list[str] = []
    saves = SaveOptions(
        on_local_commit=lambda step: events.append(f"local {step}"),
        on_commit=lambda step: events.append(f"root {step}"),
    )
    with (
        held("pwrite", COPIED) as gate,
        manager_of(root, disk, saves=saves) as manager,
    ):
        save(manager, 1, published=False)
        gate.wait()
        assert events == ["local 1"]
        assert manager.all_steps() == []
        gate.open()
        manager.wait_until_finished(published=True)
        assert manager.all_steps() == [1]
    assert events == ["local 1", "root 1"]


def test_a_wait_for_the_copy_ends_at_its_timeout(root: Path, disk: Path) -> None:
    with held("pwrite", COPIED) as gate, manager_of(root, disk) as manager:
        save(manager, 1, published=False)
        with pytest.raises(TimeoutError, match=r"not all steps were complete beneath"):
            manager.wait_until_finished(0.01, published=True)
        gate.open()


def test_the_marker_of_the_root_has_the_metrics_of_the_save(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        manager.save(1, state_of(1), metrics={"loss": 0.5}, notes={"run": "a"})
        manager.wait_until_finished(published=True)
        [info] = manager.steps()
    assert (info.metrics, info.notes, info.epoch) == ({"loss": 0.5}, {"run": "a"}, 1)
    assert info.bytes > 0


def test_a_step_that_only_the_disk_has_is_restored_and_copied_later(
    root: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing("pwrite", EIO, COPIED):
        manager = manager_of(root, disk)
        save(manager, 1, 2, published=False)
        close_without_copies(manager, monkeypatch)
    assert not (root / "0000000002").exists()
    with manager_of(root, disk) as manager:
        assert restored(manager) == 2
        manager.wait_until_finished(published=True)
        assert manager.all_steps() == [1, 2]


def test_a_failed_copy_is_reported_and_tried_again(root: Path, disk: Path) -> None:
    failures = iter([EIO])
    with (
        at_fault_points(
            lambda operation, path: (
                next(failures, 0) if operation == "pwrite" and fnmatch(path, COPIED) else 0
            )
        ),
        manager_of(root, disk) as manager,
    ):
        manager.save(1, state_of(1))
        with suppress(CheckpointError):
            manager.wait_until_finished(published=True)
        manager.wait_until_finished(published=True)
        assert manager.all_steps() == [1]


def test_a_restarted_copy_continues_with_the_files_that_are_missing(
    root: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WriteOptions(thread_count=2)
    copied: list[str] = []

    def copy(operation: str, path: str) -> int:
        if operation != "pwrite" or not fnmatch(path, COPIED):
            return 0
        copied.append(os.path.basename(path).partition(".distcp")[0])
        return EIO if len(copied) >= 2 and not may_copy else 0

    may_copy = False
    with at_fault_points(copy):
        manager = manager_of(root, disk, write=write)
        save(manager, 1, published=False)
        with pytest.raises(CheckpointError, match="could not be copied"):
            manager.wait_until_finished(published=True)
        close_without_copies(manager, monkeypatch)
        first, second = copied[0], copied[1]
        copied.clear()
        may_copy = True
        with manager_of(root, disk, write=write) as manager:
            assert restored(manager) == 1
            manager.wait_until_finished(published=True)
    assert first not in copied
    assert second in copied


def test_a_host_whose_disk_was_replaced_restores_from_the_root(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1)
    with manager_of(root, disk.with_name("new disk")) as manager:
        assert restored(manager) == 1
        save(manager, 2)


def test_a_restore_reads_the_disk(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1)
    for path in (root / "0000000001").glob("*.distcp"):
        path.unlink()
    with manager_of(root, disk) as manager:
        assert restored(manager) == 1


def test_a_damaged_file_on_the_disk_is_not_copied(
    root: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with failing("pwrite", EIO, COPIED):
        manager = manager_of(root, disk)
        save(manager, 1, 2, published=False)
        close_without_copies(manager, monkeypatch)
    [path] = disk.glob("*/0000000001/*.distcp")
    path.write_bytes(bytes(path.stat().st_size))
    with manager_of(root, disk) as manager:
        assert restored(manager) == 2
        manager.wait_until_finished(published=True)
        assert manager.all_steps() == [2]
    assert "Step 1 is not copied" in caplog.text
    assert path.exists()


def test_a_damaged_file_on_the_disk_is_read_from_the_root(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1)
    [path] = disk.glob("*/0000000001/*.distcp")
    path.write_bytes(bytes(path.stat().st_size))
    with manager_of(root, disk) as manager, pytest.warns(UserWarning, match="reading other copies"):
        assert restored(manager) == 1


def test_the_disk_keeps_the_newest_steps_that_are_in_the_root(root: Path, disk: Path) -> None:
    with manager_of(root, disk, keep=1) as manager:
        save(manager, 1, 2, 3)
    assert on_disk(disk) == ["0000000003"]


def test_the_disk_keeps_steps_that_are_not_in_the_root(
    root: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing("pwrite", EIO, COPIED):
        manager = manager_of(root, disk, keep=1)
        save(manager, 1, 2, 3, published=False)
        close_without_copies(manager, monkeypatch)
    assert on_disk(disk) == ["0000000001", "0000000002", "0000000003"]


def test_a_full_disk_makes_the_save_go_to_the_root(
    root: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_target, "free_bytes", lambda _path: 0)
    with manager_of(root, disk) as manager:
        with pytest.warns(UserWarning, match="All ranks save this step to the root"):
            save(manager, 1)
        assert manager.all_steps() == [1]
    assert on_disk(disk) == []


def test_a_failed_save_leaves_nothing_on_the_disk(root: Path, disk: Path) -> None:
    with manager_of(root, disk, on_save_error="warn_and_continue") as manager:
        with failing("pwrite", ENOSPC, "*/disk/*"):
            save(manager, 1)
        assert manager.save_errors == 1
        save(manager, 2)
    assert on_disk(disk) == ["0000000002"]


def test_a_step_is_kept_if_its_callback_fails(root: Path, disk: Path) -> None:
    def fail(_step: int) -> None:
        raise RuntimeError("no")

    saves = SaveOptions(on_local_commit=fail)
    with manager_of(root, disk, saves=saves, on_save_error="warn_and_continue") as manager:
        save(manager, 1)
        assert manager.all_steps() == [1]
    assert on_disk(disk) == ["0000000001"]


def test_a_step_that_is_saved_again_is_replaced_in_the_root(root: Path, disk: Path) -> None:
    with failing("pwrite", EIO, COPIED):
        manager = manager_of(root, disk)
        save(manager, 5, published=False)
        with pytest.raises(CheckpointError, match="could not be copied"):
            manager.wait_until_finished(published=True)
    with manager:
        manager.save(5, state_of(6), force=True)
        manager.wait_until_finished(published=True)
    with manager_of(root, disk) as manager:
        state = {"t": torch.zeros(100), "u": torch.zeros(3), "step": -1}
        assert manager.restore(state) == 5
        assert state["step"] == 6
        manager.wait_until_finished(published=True)
    assert on_disk(disk) == []


def test_a_step_that_was_deleted_from_the_root_is_not_restored(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1, 2)
    shutil.rmtree(root / "0000000002")
    with manager_of(root, disk) as manager:
        assert restored(manager) == 1
        manager.wait_until_finished(published=True)
        assert manager.all_steps() == [1]


def test_a_step_that_the_manager_deletes_is_deleted_from_the_disk(root: Path, disk: Path) -> None:
    with held("pwrite", COPIED) as gate, manager_of(root, disk) as manager:
        save(manager, 1, published=False)
        gate.wait()
        manager.delete(1)
        gate.open()
        with suppress(CheckpointError):  # the copy fails
            manager.wait_until_finished(published=True)
        manager.wait_until_finished(published=True)
        assert manager.all_steps() == []
        assert restored(manager) == 0
    assert on_disk(disk) == []


def test_a_step_whose_publication_was_not_noted_is_published_once(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1)
    [note] = disk.glob("*/0000000001/.published")
    note.unlink()
    copied: list[str] = []

    def record(operation: str, path: str) -> int:
        copied.extend([path] if operation == "pwrite" and fnmatch(path, COPIED) else [])
        return 0

    with at_fault_points(record), manager_of(root, disk) as manager:
        assert restored(manager) == 1
        manager.wait_until_finished(published=True)
    assert note.exists()
    assert copied == []


def test_a_copy_deletes_no_step_that_training_has_not_reached_again(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1, 2, 3)
    [note] = disk.glob("*/0000000003/.published")
    note.unlink()
    tier = LocalTier(disk)
    with CheckpointManager(root, interval=1, keep=5, local=tier, preemption=None) as manager:
        with pytest.warns(UserWarning, match="there are later steps"):
            manager.restore(state_of(0), step=2)
        manager.wait_until_finished(published=True)
        assert note.exists()
    assert (root / "0000000003").exists()


def test_a_step_that_is_trained_again_replaces_the_abandoned_one(root: Path, disk: Path) -> None:
    tier = LocalTier(disk, keep=2)
    with CheckpointManager(root, interval=1, keep=5, local=tier, preemption=None) as manager:
        save(manager, 1, 2, 3, 4, 5)
    with CheckpointManager(root, interval=1, keep=5, local=tier, preemption=None) as manager:
        with pytest.warns(UserWarning, match="there are later steps"):
            manager.restore(state_of(0), step=2)
        manager.save(3, state_of(30))
        manager.wait_until_finished(published=True)
        with mock.patch.object(tier_copy.Copier, "notify"):
            manager.save(4, state_of(40))
            manager.wait_until_finished()
            manager.pin(1)  # waits for the deletions after the save
        assert "0000000004" in on_disk(disk)
    with manager_of(root, disk) as manager:
        state = state_of(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the abandoned step 5
            assert manager.restore(state) == 4
        assert state["step"] == 40


def test_a_save_that_vanishes_from_the_disk_is_not_reported_as_published(
    root: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing("pwrite", EIO, COPIED):
        manager = manager_of(root, disk)
        save(manager, 1, published=False)
        with pytest.raises(CheckpointError, match="could not be copied"):
            manager.wait_until_finished(published=True)
        shutil.rmtree(next(disk.glob("*/0000000001")))
    with pytest.raises(CheckpointError, match=r"steps \[1\] could not be copied"):
        manager.wait_until_finished(published=True)
    close_without_copies(manager, monkeypatch)


def test_a_callback_of_a_copy_does_not_wait_for_the_copy(root: Path, disk: Path) -> None:
    called: list[int] = []

    def wait(step: int) -> None:
        with suppress(CheckpointError):  # this copy has not ended
            manager.wait_until_finished(published=True)
        called.append(step)

    with manager_of(root, disk, saves=SaveOptions(on_commit=wait)) as manager:
        save(manager, 1)
    assert called == [1]


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_directory_that_other_users_can_use_is_refused(root: Path, disk: Path, mode: int) -> None:
    path = Path(LocalTier(disk).directory_of(str(root)))
    path.mkdir(parents=True)
    path.chmod(mode)
    with pytest.raises(CheckpointError, match="other users can use it"):
        manager_of(root, disk)


def test_a_link_in_place_of_the_directory_is_refused(root: Path, disk: Path) -> None:
    path = Path(LocalTier(disk).directory_of(str(root)))
    path.parent.mkdir()
    path.symlink_to(root.parent, target_is_directory=True)
    with pytest.raises(NotADirectoryError):
        manager_of(root, disk)


def test_steps_are_copied_to_a_url(disk: Path) -> None:
    pytest.importorskip("obstore")
    with ObjectServer().running() as server:
        write = WriteOptions(storage_options=server.options)
        url = f"s3://{BUCKET}/run"
        with manager_of(url, disk, write=write) as manager:
            save(manager, 1, 2)
            assert manager.all_steps() == [1, 2]
        with manager_of(url, disk.with_name("new disk"), write=write) as manager:
            assert restored(manager) == 2


def test_options_out_of_range_are_refused(disk: Path) -> None:
    with pytest.raises(ValueError, match="keep"):
        LocalTier(disk, keep=0)
    with pytest.raises(ValueError, match="peers"):
        LocalTier(disk, peers=-1)
    with pytest.raises(ValueError, match="bytes_per_second must be positive"):
        LocalTier(disk, bytes_per_second=0)


def test_a_save_that_is_published_before_it_is_reported_counts_as_published(
    root: Path, disk: Path
) -> None:
    copied = threading.Event()

    def copy_first(event: Event) -> None:
        if event.kind == "saved" and event.step == 2:
            manager._tier._copier.notify()  # type: ignore[union-attr]
            assert copied.wait(30)

    with manager_of(
        root, disk, on_event=copy_first, saves=SaveOptions(on_commit=lambda _step: None)
    ) as manager:
        save(manager, 1)
        with at_fault_points(lambda *_point: copied.set() if is_noted(disk, 2) else None):
            save(manager, 2)


def is_noted(disk: Path, step: int) -> bool:
    """True if a step on the disk is noted as complete beneath the root."""
    return any(disk.glob(f"*/{step:010d}/{PUBLISHED_NAME}"))


def test_an_error_names_the_step_beneath_the_root(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1)
        save_checkpoint(root, 2, state_of(2))
        manager.save(2, state_of(2))
        with pytest.raises(FileExistsError) as caught:
            manager.wait_until_finished()
    assert caught.value.filename == str(root / "0000000002")


def test_leftovers_on_the_disk_that_cannot_be_removed_do_not_stop_training(
    root: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        mock.patch.object(LocalSteps, "sweep", side_effect=OSError(EIO, "I/O error")),
        manager_of(root, disk) as manager,
    ):
        save(manager, 1)
    assert "leftovers of interrupted saves could not be removed" in caplog.text


def test_an_interrupt_of_close_releases_the_lease(
    root: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_of(root, disk)
    with monkeypatch.context() as patch:
        patch.setattr(tier_copy.Copier, "wait", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            manager.close()
    left = open_steps(root).lease_store().read()
    assert left is None or not left.record.is_held


def test_a_manager_that_is_dropped_ends_its_copies(root: Path, disk: Path) -> None:
    with held("pwrite", COPIED) as gate:
        manager = manager_of(root, disk)
        save(manager, 1, published=False)
        gate.wait()
        [thread] = [t for t in threading.enumerate() if t.name == "torch_ckpt copies"]
        with pytest.warns(ResourceWarning, match="was deleted without close"):
            del manager
    thread.join(30)
    assert not thread.is_alive()


def test_a_disk_that_has_lost_the_step_since_it_was_listed_is_not_read(
    root: Path, disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(root, preemption=None) as manager:
        manager.save(1, state_of(1))
    step = str(root / "0000000001")
    places = [partial(PathFiles, str(disk / "lost")), partial(PathFiles, step)]
    with closing(TierSource(step, places, ReadOptions())) as source:
        source.open()
        assert source.index is not None
        assert sorted(source.index.names()) == ["step", "t", "u"]
    assert "another host or the root may have the files" in caplog.text


def test_a_pin_is_set_beneath_the_root(root: Path, disk: Path) -> None:
    with manager_of(root, disk) as manager:
        save(manager, 1)
        manager.pin(1)
        assert (root / "0000000001" / "pinned").exists()
        manager.unpin(1)
        assert not (root / "0000000001" / "pinned").exists()
