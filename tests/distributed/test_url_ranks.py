"""One checkpoint beneath a URL, saved and loaded by two ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.distributed.cases import (
    Launch,
    assert_full_tensors,
    dtensors,
    failure_of,
    mesh_1d,
    zeroed,
)
from tests.distributed.launcher import on_ranks
from tests.distributed.megatron_training import PLANNERS, Site
from torch_ckpt.errors import NotCommitted
from torch_ckpt.stores import ObjectStore


def url_of(launch: Launch) -> str:
    return f"file://{launch.path('c')}"


def names(launch: Launch) -> set[str]:
    return {path.name for path in launch.path("c").glob("*")}


def by_async_save(state: dict[str, Any], url: str) -> None:
    torch_ckpt.async_save(state, url).result(60)


def by_dcp(state: dict[str, Any], url: str) -> None:
    writer = torch_ckpt.FileSystemWriter(url)
    try:
        dcp.save(state, storage_writer=writer)
    finally:
        writer.abandon()  # ends a save that has failed


def by_megatron(state: dict[str, Any], url: str) -> None:
    Site(dcp.DefaultSavePlanner).request(state, url).execute_sync()


SAVES: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "save": torch_ckpt.save,
    "async_save": by_async_save,
    "dcp.save": by_dcp,
    "megatron": by_megatron,
}


def load_by_dcp(state: dict[str, Any], url: str) -> None:
    dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(url))


def case_sharded_tensors_are_loaded_as_they_were_saved(launch: Launch) -> None:
    state = dtensors(mesh_1d(launch))
    for save in SAVES.values():
        save(state, url_of(launch))
        for load in (torch_ckpt.load, load_by_dcp):
            loaded = zeroed(state)
            load(loaded, url_of(launch))
            assert_full_tensors(loaded)


def case_stock_torch_reads_the_files(launch: Launch) -> None:
    state = dtensors(mesh_1d(launch))
    torch_ckpt.save(state, url_of(launch))
    loaded = zeroed(state)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(launch.path("c")))
    assert_full_tensors(loaded)


def case_each_save_replaces_the_files_of_the_one_before(launch: Launch) -> None:
    state = dtensors(mesh_1d(launch))
    earlier: set[str] = set()
    for save in SAVES.values():
        save(state, url_of(launch))
        dist.barrier()
        now = names(launch)
        assert ".metadata" in now
        assert not (now & earlier) - {".metadata"}
        earlier = now
        dist.barrier()


def fails(launch: Launch, method: str, error: OSError, rank: int) -> Any:
    """Makes a call of stores fail on one rank."""
    if launch.rank != rank:
        return mock.MagicMock()
    return mock.patch.object(ObjectStore, method, side_effect=error)


def assert_nothing_remains(launch: Launch, before: set[str]) -> None:
    dist.barrier()
    assert names(launch) == before
    dist.barrier()


def case_a_failed_upload_of_one_rank_leaves_no_file_of_any_rank(launch: Launch) -> None:
    state = dtensors(mesh_1d(launch))
    torch_ckpt.save(state, url_of(launch))
    before = names(launch)
    for save in SAVES.values():
        with fails(launch, "put", PermissionError(13, "upload failed: denied", "url"), rank=1):
            causes = failure_of(launch, partial(save, state, url_of(launch)))
        assert "denied" in str(causes[1])
        assert_nothing_remains(launch, before)
    loaded = zeroed(state)
    torch_ckpt.load(loaded, url_of(launch))
    assert_full_tensors(loaded)


def case_a_failed_commit_leaves_no_file_of_any_rank(launch: Launch) -> None:
    state = dtensors(mesh_1d(launch))
    for save in SAVES.values():
        denied = PermissionError(13, "create failed: denied", "url")
        with fails(launch, "put_if_absent", denied, rank=0):
            causes = failure_of(launch, partial(save, state, url_of(launch)))
        assert isinstance(causes[0], NotCommitted)
        assert_nothing_remains(launch, set())


def case_a_commit_with_an_unknown_outcome_deletes_no_file(launch: Launch) -> None:
    state = dtensors(mesh_1d(launch))
    silent = TimeoutError(110, "create failed: no answer", "url")
    with fails(launch, "put_if_absent", silent, rank=0):
        causes = failure_of(launch, partial(torch_ckpt.save, state, url_of(launch)))
    assert isinstance(causes[0], torch_ckpt.errors.DurabilityUncertain)
    assert any(name.startswith("__1_") for name in names(launch))


def case_saves_by_a_cached_plan_keep_the_files_of_all_ranks(launch: Launch) -> None:
    state = dtensors(mesh_1d(launch))
    for planner in PLANNERS:
        site = Site(planner, caching=True)
        for _ in range(4):
            site.request(state, url_of(launch)).execute_sync()
            # Nothing refers to the writers.
            gc.collect()
            dist.barrier()
            loaded = zeroed(state)
            torch_ckpt.load(loaded, url_of(launch))
            assert_full_tensors(loaded)
        assert site.is_as_cached
        before = names(launch)
        dist.barrier()
        denied = PermissionError(13, "replace failed: denied", "url")
        with fails(launch, "exchange", denied, rank=0):
            causes = failure_of(launch, site.request(state, url_of(launch)).execute_sync)
        assert isinstance(causes[0], NotCommitted)
        assert_nothing_remains(launch, before)


test_url = on_ranks(globals())
