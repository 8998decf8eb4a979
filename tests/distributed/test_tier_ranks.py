"""Local tiers of ranks that stand for a host with a disk each."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.cases import Launch, StateDict, mesh_1d, tensor_of
from tests.distributed.launcher import on, on_ranks
from tests.support import assert_equal
from torch_ckpt import CheckpointError, CheckpointManager, ReadOptions
from torch_ckpt.checkpoint import directory
from torch_ckpt.manager import LocalTier
from torch_ckpt.steps import (
    tier,
    tier_copy,
    tier_files,
    tier_peers,
    tier_sharing,
    tier_target,
)
from torch_ckpt.steps.tier_target import TierTarget

ROWS = 60


def disk_of(launch: Launch, rank: int) -> Path:
    return launch.path(f"disk {rank}")


@contextmanager
def manager(
    launch: Launch, disk: int | None = None, peers: int = 0, **options: Any
) -> Iterator[CheckpointManager]:
    """Creates a manager whose ranks have a disk each.

    Args:
        disk: number of this rank's disk; None: the rank.
        peers: see :class:`LocalTier`.
    """
    number = launch.rank if disk is None else disk
    tier = LocalTier(disk_of(launch, number), peers=peers)
    mounts = mock.patch.object(directory, "_mounts", return_value=f"host {number}")
    with mounts, mock.patch.object(tier_copy, "_PAUSE_SECONDS", 0.01):
        made = CheckpointManager(launch.path("root"), local=tier, preemption=None, **options)
        with made:
            yield made


def state_of(launch: Launch, step: int) -> StateDict:
    mesh = mesh_1d(launch)
    rows = tensor_of(f"rows {step}", ROWS, 7).nan_to_num()
    return {
        "rows": distribute_tensor(rows, mesh, [Shard(0)]),
        "replicated": torch.full((5,), float(step)),
    }


def save(launch: Launch, made: CheckpointManager, *steps: int) -> None:
    for step in steps:
        made.save(step, state_of(launch, step))
        made.wait_until_finished()


def assert_restores(
    launch: Launch, made: CheckpointManager, step: int, *, values: int | None = None
) -> None:
    state = {name: torch.zeros_like(value) for name, value in state_of(launch, 0).items()}
    assert made.restore(state) == step
    expected = state_of(launch, step if values is None else values)
    assert_equal(local_values(state), local_values(expected))


def local_values(state: StateDict) -> StateDict:
    return {name: value.to_local() if name == "rows" else value for name, value in state.items()}


@contextmanager
def without_copies() -> Iterator[None]:
    """Makes all copies to the root fail."""

    def fail(*_arguments: Any) -> None:
        raise OSError(5, "the root cannot be reached")

    with (
        mock.patch.object(tier_copy._Copy, "copy", fail),
        mock.patch("torch_ckpt.manager.manager.CLOSE_SECONDS", 0.0),
    ):
        yield


@contextmanager
def failing_completion(fails: bool) -> Iterator[None]:
    """Makes the completion of saves on this rank's host fail."""

    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    if not fails:
        yield
        return
    with mock.patch.object(TierTarget, "publish_on_host", fail):
        yield


def publish_a_step(launch: Launch) -> None:
    with manager(launch) as made:
        save(launch, made, 1)
        made.wait_until_finished(published=True)


def save_on_two_hosts(launch: Launch) -> None:
    """Saves a step whose files are on the disks of two hosts each, and not beneath the root."""
    with without_copies(), manager(launch, peers=1) as made:
        save(launch, made, 1)
        with suppress(CheckpointError):  # the copy to the root fails
            made.wait_until_finished(published=True)
    dist.barrier()


def lose_a_disk(launch: Launch) -> None:
    """Removes the disk of rank 1."""
    dist.barrier()
    if launch.rank == 1:
        shutil.rmtree(disk_of(launch, 1))


@on(2, 4)
def case_each_disk_has_the_files_of_its_host_and_the_root_has_all(launch: Launch) -> None:
    with manager(launch) as made:
        save(launch, made, 1)
        made.wait_until_finished(published=True)
        assert made.all_steps() == [1]
    [local] = disk_of(launch, launch.rank).glob("*/0000000001")
    assert {path.name.split("_")[2] for path in local.glob("*.distcp")} == {str(launch.rank)}
    dist.barrier()
    with CheckpointManager(launch.path("root"), read_only=True, preemption=None) as reader:
        assert_restores(launch, reader, 1)


@on(2)
def case_a_step_on_the_disks_is_restored_without_the_root(launch: Launch) -> None:
    with without_copies(), manager(launch) as made:
        save(launch, made, 1, 2)
    dist.barrier()
    with without_copies(), manager(launch) as made:
        assert_restores(launch, made, 2)
    dist.barrier()
    assert not launch.path("root", "0000000002").exists()


@on(2)
def case_a_replaced_host_reads_its_files_from_the_root(launch: Launch) -> None:
    publish_a_step(launch)
    lose_a_disk(launch)
    with manager(launch) as made:
        assert_restores(launch, made, 1)


@on(2)
def case_a_step_that_lost_files_with_a_host_is_not_restored(launch: Launch) -> None:
    publish_a_step(launch)
    with without_copies(), manager(launch) as made:
        assert_restores(launch, made, 1)
        save(launch, made, 2)
    lose_a_disk(launch)
    with manager(launch) as made:
        assert_restores(launch, made, 1)


@on(2, 3)
def case_hosts_with_other_disks_read_their_files_from_each_other(launch: Launch) -> None:
    with without_copies(), manager(launch) as made:
        save(launch, made, 1)
    dist.barrier()
    with without_copies(), manager(launch, disk=(launch.rank + 1) % launch.size) as made:
        assert_restores(launch, made, 1)
    assert not launch.path("root", "0000000001").exists()


@on(4)
def case_a_host_that_has_every_other_disk_restores_all_ranks(launch: Launch) -> None:
    # Ranks 0 and 1 have saved on disk 0, ranks 2 and 3 on disk 1.
    with without_copies(), manager(launch, disk=launch.rank // 2) as made:
        save(launch, made, 1)
    dist.barrier()
    with without_copies(), manager(launch, disk=launch.rank % 2) as made:
        assert_restores(launch, made, 1)


@on(3)
def case_a_step_with_copies_on_other_hosts_survives_the_loss_of_a_host(launch: Launch) -> None:
    save_on_two_hosts(launch)
    assert files_on_disk(launch, 1) == {launch.rank, (launch.rank - 1) % 3}
    lose_a_disk(launch)
    with without_copies(), manager(launch, peers=1) as made:
        assert_restores(launch, made, 1)


@on(3)
def case_only_files_that_no_host_has_are_read_from_the_root(launch: Launch) -> None:
    publish_a_step(launch)
    lose_a_disk(launch)
    read: set[str] = set()

    def recorded(path: str, options: ReadOptions) -> Any:
        files = tier_files.files_at(path, options)
        records = mock.Mock(wraps=files)
        records.read = lambda name, *place: (read.add(name), files.read(name, *place))[1]
        return records

    with mock.patch.object(tier, "files_at", recorded), manager(launch) as made:
        assert_restores(launch, made, 1)
    owners = {int(name.split("_")[2]) for name in read if name.endswith(".distcp")}
    assert owners <= {1}
    assert owners == {1} or launch.rank != 1


@on(2)
def case_a_damaged_file_is_read_from_the_other_host(launch: Launch) -> None:
    save_on_two_hosts(launch)
    for path in disk_of(launch, launch.rank).glob(f"*/0000000001/__{launch.rank}_*.distcp"):
        path.write_bytes(bytes(path.stat().st_size))
    dist.barrier()
    with without_copies(), manager(launch, peers=1) as made, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*reading other copies of the files")
        assert_restores(launch, made, 1)


def files_on_disk(launch: Launch, step: int) -> set[int]:
    """Returns the ranks of whose files of a step there are copies on the disk of this rank's
    host."""
    [local] = disk_of(launch, launch.rank).glob(f"*/{step:010}")
    return {int(path.name.split("_")[2]) for path in local.glob("*.distcp")}


@on(2)
def case_all_steps_are_copied_to_other_hosts_although_copies_to_the_root_fail(
    launch: Launch,
) -> None:
    with without_copies(), manager(launch, peers=1) as made:
        save(launch, made, 1, 2)
        with suppress(CheckpointError):  # the copy to the root fails
            made.wait_until_finished(published=True)
    dist.barrier()
    assert [files_on_disk(launch, step) for step in (1, 2)] == [{0, 1}, {0, 1}]


@contextmanager
def noted_copies() -> Iterator[list[tuple[str, int]]]:
    """Block in which the copies to other hosts and to the root are noted, in their order."""
    noted: list[tuple[str, int]] = []
    share, copy = tier_copy.Copier._share, tier_copy._Copy.copy

    def note_share(self: Any, plan: Any, save: Any, exchange: Any) -> None:
        noted.append(("other host", save[0]))
        share(self, plan, save, exchange)

    def note_copy(self: Any, *arguments: Any) -> Any:
        noted.append(("root", self.step))
        return copy(self, *arguments)

    with (
        mock.patch.object(tier_copy.Copier, "_share", note_share),
        mock.patch.object(tier_copy._Copy, "copy", note_copy),
    ):
        yield noted


def save_without_copies(launch: Launch, *steps: int) -> None:
    """Saves steps that are neither on several disks nor beneath the root."""
    with without_copies(), manager(launch) as made:
        save(launch, made, *steps)
    dist.barrier()


@on(2)
def case_a_step_reaches_the_root_between_copies_to_other_hosts(launch: Launch) -> None:
    save_without_copies(launch, 1, 2, 3)
    with (
        mock.patch.object(tier_copy, "_MOST_SHARED", 1),
        noted_copies() as noted,
        manager(launch, peers=1) as made,
    ):
        assert_restores(launch, made, 3)
        made.wait_until_finished(published=True)
    assert noted == [("other host", 3), ("root", 1), ("other host", 2), ("root", 2), ("root", 3)]


@on(2)
def case_a_failed_copy_to_another_host_is_tried_again_after_a_copy_to_the_root(
    launch: Launch,
) -> None:
    save_without_copies(launch, 1, 2)
    copy_to = tier_sharing.Sharing._copy_to

    def fail_until_a_copy(self: Any, found: Any) -> None:
        if ("root", 1) not in noted:
            raise OSError(5, "the host does not answer")
        copy_to(self, found)

    with (
        noted_copies() as noted,
        mock.patch.object(tier_sharing.Sharing, "_copy_to", fail_until_a_copy),
        manager(launch, peers=1) as made,
    ):
        assert_restores(launch, made, 2)
        made.wait_until_finished(published=True)
    assert noted == [("other host", 2), ("root", 1), ("other host", 2), ("root", 2)]
    assert files_on_disk(launch, 2) == {0, 1}


@on(2)
def case_a_step_that_lost_files_with_a_host_stays_on_the_other_disk(launch: Launch) -> None:
    with without_copies(), manager(launch) as made:
        save(launch, made, 1)
    lose_a_disk(launch)
    dist.barrier()
    with manager(launch) as made:
        assert made.restore(state_of(launch, 0)) == 0
        save(launch, made, 2)
        made.wait_until_finished(published=True)
        save(launch, made, 3)
        made.wait_until_finished(published=True)
    dist.barrier()
    # The disk with the files may come back.
    on_disk = {int(path.name) for path in disk_of(launch, launch.rank).glob("*/0*")}
    assert on_disk == ({2, 3} if launch.rank else {1, 2, 3})


@on(2)
def case_a_copy_to_another_host_that_fails_does_not_stop_the_copy_to_the_root(
    launch: Launch,
) -> None:
    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch.object(tier_peers.PeerFiles, "read", fail), manager(launch, peers=1) as made:
        save(launch, made, 1)
        made.wait_until_finished(published=True)
        assert made.all_steps() == [1]


@on(2)
def case_an_older_save_of_a_step_on_a_disk_is_not_restored(launch: Launch) -> None:
    publish_a_step(launch)
    dist.barrier()
    # Other hosts train the step again.
    with manager(launch, disk=launch.rank + 2) as made:
        assert_restores(launch, made, 1)
        made.save(1, state_of(launch, 7), force=True)
        made.wait_until_finished(published=True)
    dist.barrier()
    with manager(launch) as made:
        assert_restores(launch, made, 1, values=7)


@on(2)
def case_a_step_goes_to_the_root_if_one_host_has_too_little_space_for_its_part(
    launch: Launch,
) -> None:
    state = {f"of rank {launch.rank}": torch.ones(1_000 if launch.rank == 0 else 10_000)}
    with (
        mock.patch.object(tier_target, "free_bytes", return_value=30_000),
        warnings.catch_warnings(),
        manager(launch) as made,
    ):
        warnings.simplefilter("ignore")  # of rank 0
        made.save(1, state)
        made.wait_until_finished()
        assert made.all_steps() == [1]
    assert list(disk_of(launch, launch.rank).glob("*/0000000001")) == []


@on(2)
def case_a_save_that_fails_on_one_host_is_on_no_disk(launch: Launch) -> None:
    with manager(launch, on_save_error="warn_and_continue") as made:
        with failing_completion(launch.rank == 1):
            save(launch, made, 1)
        assert made.save_errors == 1
        dist.barrier()
        assert list(disk_of(launch, launch.rank).glob("*/0000000001")) == []
        save(launch, made, 2)


test_on_ranks = on_ranks(globals())
