"""Saves and loads on several ranks by DCP and by torch_ckpt's functions: failures, saves without
collectives, and torch's async_save."""

from __future__ import annotations

import datetime
import errno
import io
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
import torch_ckpt.saving.target as target_module
from tests.distributed.cases import (
    OURS,
    PATIENCE_SECONDS,
    STOCK,
    Launch,
    StateDict,
    assert_everything,
    assert_full_tensors,
    assert_is_full_disk,
    assert_only_used,
    dtensors,
    everything,
    everything_emptied,
    failure_of,
    full_disk_on,
    load,
    mesh_1d,
    pairs,
    rank_local_state,
    save,
    tensor_of,
    zeroed,
)
from tests.distributed.launcher import on, on_ranks
from tests.metadata import read_metadata
from tests.support import assert_equal, assert_tables_match, data_files
from torch_ckpt.errors import NotCommitted

# --- without collectives --------------------------------------------------------------------------


def case_without_collectives_each_rank_overwrites_only_its_own_files(launch: Launch) -> None:
    for path, writer, reader in pairs(launch):
        for step in range(3):
            save(rank_local_state(launch, step), path, writer, use_collectives=False)
            dist.barrier()
            names = {file.name for file in path.iterdir() if file.suffix != ".distcp"}
            assert names == {f"__{rank}.metadata" for rank in range(launch.size)}
            loaded = {"own": torch.zeros(6, 4), "rank": -1, "step": -1}
            load(loaded, path, reader)
            assert_equal(loaded, rank_local_state(launch, step))
            dist.barrier()
        if writer is OURS[0]:
            metadata = read_metadata(path, name=f"__{launch.rank}.metadata")
            assert_tables_match(path, metadata)


def assert_loads(path: Path, name: str) -> None:
    loaded = {"t": torch.zeros(8)}
    load(loaded, path)
    assert_equal(loaded["t"], tensor_of(name, 8))


def case_a_checkpoint_with_collectives_replaces_one_without_and_not_conversely(
    launch: Launch,
) -> None:
    path = launch.path()
    save(rank_local_state(launch, 1), path, use_collectives=False)
    dist.barrier()
    metadata = save({"t": tensor_of("t", 8)}, path)
    dist.barrier()
    assert_only_used(path, metadata)
    assert_loads(path, "t")
    # Loading would prefer the older one.
    with pytest.raises(FileExistsError):
        save(rank_local_state(launch, 1), path, use_collectives=False)
    dist.barrier()
    assert_loads(path, "t")


# --- failures -------------------------------------------------------------------------------------


class FailingOn(dcp.DefaultSavePlanner):
    """Planner that fails on one rank while values are written."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == self.rank:
            raise OSError(errno.EIO, "on purpose", "somewhere")
        return super().resolve_data(write_item)


@on(2, 4)
def case_an_error_on_one_rank_fails_all_and_keeps_the_old_checkpoint(launch: Launch) -> None:
    path = launch.path()
    for rank in range(launch.size):
        state = dict(dtensors(mesh_1d(launch)))
        with full_disk_on(rank):
            causes = failure_of(launch, save, state, path)
        assert_is_full_disk(causes, rank, path)
        assert not (path / ".metadata").exists()
    # The next save removes all files of the failed one.
    metadata = save(dict(dtensors(mesh_1d(launch))), path)
    dist.barrier()
    assert_only_used(path, metadata)
    dist.barrier()
    for rank in range(launch.size):
        state = {name: tensor + 1 for name, tensor in dtensors(mesh_1d(launch)).items()}
        with full_disk_on(rank):
            causes = failure_of(launch, save, state, path)
        assert_is_full_disk(causes, rank, path)
        causes = failure_of(launch, save, state, path, planner=FailingOn(rank))
        assert set(causes) == {rank}
        assert isinstance(causes[rank], OSError)
        assert causes[rank].errno == errno.EIO
        for reader in (OURS[1], STOCK[1]):
            loaded = zeroed(dtensors(mesh_1d(launch)))
            load(loaded, path, reader)
            assert_full_tensors(loaded)
        dist.barrier()


def case_a_failed_commit_fails_all_ranks(launch: Launch) -> None:
    path = launch.path()
    if launch.rank == 0:
        (path / ".metadata").mkdir(parents=True)
    dist.barrier()
    causes = failure_of(launch, lambda: save({"t": tensor_of("t", 4)}, path))
    assert set(causes) == {0}
    assert isinstance(causes[0], NotCommitted)
    assert causes[0].errno == errno.EISDIR


@contextmanager
def exchanged_before_rank_1_opens(
    launch: Launch, path: Path, other: Path, name: str
) -> Iterator[None]:
    """Makes rank 1 open ``path`` while the directory ``other`` has that name, after rank 0."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    lease, opened = target_module.DirectoryLease, target_module.OpenDirectory

    def leased(*arguments: Any) -> Any:
        made = lease(*arguments)
        store.set("leased", "")
        return made

    def opened_late(given: Path) -> Any:
        store.wait(["leased"], datetime.timedelta(seconds=PATIENCE_SECONDS))
        aside = path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        found = opened(given)
        path.rename(other)
        aside.rename(path)
        return found

    with pytest.MonkeyPatch.context() as patch:
        if launch.rank == 0:
            patch.setattr(target_module, "DirectoryLease", leased)
        if launch.rank == 1:
            patch.setattr(target_module, "OpenDirectory", opened_late)
        yield


def case_ranks_with_different_directories_at_one_path_publish_nothing(launch: Launch) -> None:
    path, other = launch.path("step"), launch.path("other")
    state = {f"t{launch.rank}": tensor_of("t", 40)}
    for directory in (path, other):
        torch_ckpt.save(state, directory)
    dist.barrier()

    def contents() -> dict[Path, bytes]:
        found = {file: file.read_bytes() for file in launch.path().glob("*/*")}
        dist.barrier()
        return found

    for saving in (save, torch_ckpt.save):
        before = contents()
        with exchanged_before_rank_1_opens(launch, path, other, saving.__module__):
            causes = failure_of(launch, saving, state, path)
        assert isinstance(causes.pop(0), NotCommitted)
        assert not causes
        after = contents()
        assert {file: after.get(file) for file in before} == before
        if saving is torch_ckpt.save:
            # DCP does not notify a rank whose writing succeeded of the failure of another rank.
            assert after == before


def finished(response: Any) -> Any:
    """Returns the result of an async_save; torch returns a future, or two."""
    future: Future[Any] = getattr(response, "upload_completion", response)
    return future.result(timeout=PATIENCE_SECONDS)


class _WatchedStager(torch_ckpt.FileSystemWriter):
    """Stager that reports how many bytes of kept memory each save has been staged into."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.taken: list[int] = []

    def stage(self, state_dict: StateDict) -> StateDict:
        before = torch_ckpt._core.pool_bytes()
        staged = super().stage(state_dict)
        self.taken.append(before - torch_ckpt._core.pool_bytes())
        return staged


def async_saves(launch: Launch, kind: AsyncCheckpointerType) -> None:
    mesh = mesh_1d(launch)
    writer = _WatchedStager(launch.path())
    for step in range(3):
        path = launch.path(str(step))
        full = tensor_of("t", 13, 5) + step
        state = {"t": distribute_tensor(full, mesh, [Shard(0)]), "plain": full, "step": step}
        response = dcp.async_save(
            state, checkpoint_id=path, storage_writer=writer, async_checkpointer_type=kind
        )
        # The state is staged, so the source may change.
        state["t"].to_local().fill_(-1)
        finished(response)
        dist.barrier()
        for reader in (OURS[1], STOCK[1]):
            loaded = {"t": torch.zeros(13, 5), "plain": torch.zeros(13, 5), "step": -1}
            load(loaded, path, reader)
            assert loaded["step"] == step
            assert_equal(loaded["t"], full)
        dist.barrier()
    # Memory of the first save is reused by the others.
    staged = full.nbytes + state["t"].to_local().nbytes
    assert min(writer.taken[1:]) >= staged, writer.taken


def case_async_saves_in_a_thread(launch: Launch) -> None:
    async_saves(launch, AsyncCheckpointerType.THREAD)


@on(2, only=True)
def case_async_saves_in_a_process(launch: Launch) -> None:
    async_saves(launch, AsyncCheckpointerType.PROCESS)


def case_a_failed_async_save_raises_its_error(launch: Launch) -> None:
    path = launch.path()

    def saving() -> None:
        writer = torch_ckpt.FileSystemWriter(path)
        finished(dcp.async_save(dict(dtensors(mesh_1d(launch))), storage_writer=writer))

    with full_disk_on(1):
        causes = failure_of(launch, saving)
    assert_is_full_disk(causes, 1, path)
    assert not (path / ".metadata").exists()


def case_a_scalar_dtensor_on_one_rank_is_saved_in_the_background(launch: Launch) -> None:
    mesh, path = DeviceMesh("cpu", [1]), launch.path()
    state = {"t": distribute_tensor(torch.tensor(3.5), mesh, [Replicate()])}
    torch_ckpt.async_save(state, path).result(60)
    dist.barrier()
    for reader in (OURS[1], STOCK[1]):
        loaded = {"t": torch.zeros(())}
        load(loaded, path, reader)
        assert_equal(loaded["t"], torch.tensor(3.5))


# --- torch_ckpt.save and torch_ckpt.load ----------------------------------------------------------


@on(2, 4)
def case_torch_ckpt_save_and_load_do_what_dcp_does(launch: Launch) -> None:
    save_by_dcp, load_by_dcp = partial(save, writer=STOCK[0]), partial(load, reader=STOCK[1])
    for number, (saving, loading) in enumerate(
        (
            (torch_ckpt.save, torch_ckpt.load),
            (torch_ckpt.save, load_by_dcp),
            (save_by_dcp, torch_ckpt.load),
        )
    ):
        path = launch.path(str(number))
        saving(everything(launch), path)
        state = everything_emptied(launch)
        loading(state, path)
        assert_everything(launch, state)


@on(2, 4)
def case_replicated_tensors_are_written_once_and_by_all_ranks(launch: Launch) -> None:
    path, mesh, count = launch.path(), mesh_1d(launch), 8
    state: StateDict = {f"t{i}": tensor_of(f"t{i}", 100, 100) for i in range(count)}
    for i in range(count):
        state[f"d{i}"] = distribute_tensor(tensor_of(f"d{i}", 100, 100), mesh, [Replicate()])
    metadata = torch_ckpt.save(state, path).metadata()
    assert len(metadata.storage_data) == 2 * count
    writers = {info.relative_path.split("_")[2] for info in metadata.storage_data.values()}
    assert writers == {str(rank) for rank in range(launch.size)}
    stored = sum(file.stat().st_size for file in data_files(path))
    assert stored < 1.1 * 2 * count * 100 * 100 * 4


test_on_ranks = on_ranks(globals())
