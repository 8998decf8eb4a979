"""Saves in Hugging Face's layout beneath a URL, by several ranks.

``file://`` URLs are stores, so the objects can be compared with the files of a local save.
"""

from __future__ import annotations

import importlib.util
import re
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
from tests.distributed.cases import (
    Launch,
    StateDict,
    dtensors,
    dtensors_2d,
    failure_of,
    mesh_1d,
    mesh_2d,
    tensor_of,
)
from tests.distributed.launcher import on, on_ranks
from tests.object_server import BUCKET, ObjectServer
from tests.support import assert_equal
from torch_ckpt.errors import DurabilityUncertain, NotCommitted
from torch_ckpt.huggingface import assembly
from torch_ckpt.ranks import streams
from torch_ckpt.stores import ObjectStore

#: Small enough for several files.
SHARD_BYTES = 30_000


def url_of(launch: Launch) -> str:
    return f"file://{launch.path('url')}"


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*")}


def save(state: StateDict, path: Any, **format: Any) -> None:
    torch_ckpt.save(state, path, format=torch_ckpt.Safetensors(**format))


def assert_same_bytes(launch: Launch, state: StateDict, **format: Any) -> None:
    """Checks that a save to a URL stores what a local save writes."""
    save(state, launch.path("local"), **format)
    save(state, url_of(launch), **format)
    dist.barrier()
    if launch.rank == 0:
        assert contents(launch.path("url")) == contents(launch.path("local"))
        assert torch_ckpt.verify(launch.path("url")).ok
    dist.barrier()


def sharded(launch: Launch) -> StateDict:
    """Returns a state with shards of any kind, which several ranks have."""
    mesh = mesh_1d(launch)
    state: StateDict = {f"1d {name}": value for name, value in dtensors(mesh).items()}
    if launch.size > 1:
        mesh2 = mesh_2d(launch)
        state |= {f"2d {name}": value for name, value in dtensors_2d(mesh2).items()}
        blocks = distribute_tensor(tensor_of("b", 37, 26, 5), mesh2, [Shard(2), Shard(0)])
        state["blocks"] = blocks
    bytes = distribute_tensor(torch.arange(1001, dtype=torch.int8), mesh, [Shard(0)])
    doubles = distribute_tensor(tensor_of("d", 63, 41).double(), mesh, [Shard(1)])
    state |= {"bytes": bytes, "doubles": doubles, "plain": tensor_of("plain", 11)}
    return state | {"empty": torch.empty(0, 3), "scalar": torch.tensor(3.5)}


@on(1, 2, 4)
def case_shards_are_stored_as_in_one_local_file(launch: Launch) -> None:
    assert_same_bytes(launch, sharded(launch))


@on(1, 2, 4)
def case_shards_are_stored_as_in_several_local_files(launch: Launch) -> None:
    assert_same_bytes(launch, sharded(launch), max_shard_size=SHARD_BYTES)


@on(1, 2, 4)
def case_shards_are_stored_with_another_dtype(launch: Launch) -> None:
    assert_same_bytes(launch, sharded(launch), dtype="bf16", max_shard_size=SHARD_BYTES)


def case_a_file_of_one_rank_needs_no_temporary_object(launch: Launch) -> None:
    state = {f"of rank {launch.rank}": tensor_of("t", 100, 70)}
    put, names = ObjectStore.put, []

    def noting(store: ObjectStore, name: str, *args: Any) -> Any:
        names.append(name)
        return put(store, name, *args)

    with mock.patch.object(ObjectStore, "put", noting):
        save(state, url_of(launch), max_shard_size=SHARD_BYTES)
    assert names == [f"model-0000{launch.rank + 1}-of-00002.safetensors"]


@on(2)
def case_a_file_of_many_parts_is_assembled_within_the_memory_limit(launch: Launch) -> None:
    parts = torch.arange(5 << 21, dtype=torch.int64)  # 80 MiB
    state = {
        "rows": distribute_tensor(parts.view(5, -1), mesh_1d(launch), [Shard(0)]),
        "columns": distribute_tensor(parts.view(-1, 10), mesh_1d(launch), [Shard(1)]),
    }
    save(state, launch.path("local"))
    options = torch_ckpt.WriteOptions(max_host_bytes=64 << 20)
    memory = mock.Mock(wraps=assembly.memory_for_io)
    with mock.patch.object(assembly, "memory_for_io", memory):
        torch_ckpt.save(state, url_of(launch), format="safetensors", options=options)
    # Rank 0 assembles the only file, with windows of 16 MiB in half of the memory.
    window = mock.call(16 << 20)
    assert memory.mock_calls == ([] if launch.rank else [window, window])
    dist.barrier()
    assert contents(launch.path("url")) == contents(launch.path("local"))


def model(launch: Launch, name: str) -> StateDict:
    """Returns tensors for two files, one of which has parts of all ranks."""
    mesh = mesh_1d(launch)
    return {
        "columns": distribute_tensor(tensor_of(name, 80, 81), mesh, [Shard(1)]),
        "replicated": distribute_tensor(tensor_of(name, 90, 80), mesh, [Replicate()]),
    }


def values(launch: Launch) -> StateDict:
    """Returns the tensors of the model that the index names."""
    state = {"columns": torch.zeros(80, 81), "replicated": torch.zeros(90, 80)}
    torch_ckpt.load(state, launch.path("url"), no_dist=True)
    return state


def of(name: str) -> StateDict:
    """Returns the complete tensors of a model."""
    return {"columns": tensor_of(name, 80, 81), "replicated": tensor_of(name, 90, 80)}


def assert_is(launch: Launch, name: str) -> None:
    assert_equal(values(launch), of(name))


def case_a_save_replaces_the_objects_of_the_one_before(launch: Launch) -> None:
    for name in ("first", "second", "third"):
        save(model(launch, name), url_of(launch), max_shard_size=SHARD_BYTES)
        dist.barrier()
        assert_is(launch, name)
        assert torch_ckpt.verify(launch.path("url")).ok
        assert len(contents(launch.path("url"))) == 4
        dist.barrier()


def fails(launch: Launch, method: str, error: OSError, rank: int, name: str) -> Any:
    """Makes a call of stores fail on one rank for names in which the pattern ``name`` occurs."""
    call = getattr(ObjectStore, method)

    def failing(store: ObjectStore, given: str, *args: Any) -> Any:
        if launch.rank == rank and re.search(name, "".join(given)):
            raise error
        return call(store, given, *args)

    return mock.patch.object(ObjectStore, method, failing)


def assert_keeps_the_model(launch: Launch, method: str, name: str, rank: int) -> BaseException:
    """Checks that a failed save leaves the objects that were there. Returns the failure's cause."""
    save(model(launch, "first"), url_of(launch), max_shard_size=SHARD_BYTES)
    dist.barrier()
    before = contents(launch.path("url"))
    dist.barrier()
    denied = PermissionError(13, "request failed: denied", "url")
    with fails(launch, method, denied, rank, name):
        causes = failure_of(
            launch, save, model(launch, "second"), url_of(launch), max_shard_size=SHARD_BYTES
        )
    dist.barrier()
    assert contents(launch.path("url")) == before
    assert_is(launch, "first")
    return causes[rank]


def assert_lost_connection_keeps_the_model(launch: Launch, rank: int, call: str) -> None:
    save(model(launch, "first"), url_of(launch), max_shard_size=SHARD_BYTES)
    dist.barrier()
    before = contents(launch.path("url"))
    dist.barrier()

    def fail(*_arguments: Any) -> None:
        raise OSError(101, "Network is unreachable")

    with ExitStack() as stack:
        if launch.rank == rank:
            stack.enter_context(mock.patch.object(streams.Connection, call, fail))
        causes = failure_of(
            launch, save, model(launch, "second"), url_of(launch), max_shard_size=SHARD_BYTES
        )
    assert {rank: str(cause) for rank, cause in causes.items()} == {
        rank: "[Errno 101] Network is unreachable"
    }
    dist.barrier()
    assert contents(launch.path("url")) == before
    assert_is(launch, "first")


def case_a_sender_that_fails_keeps_the_model(launch: Launch) -> None:
    assert_lost_connection_keeps_the_model(launch, 1, "send")


def case_a_receiver_that_fails_keeps_the_model(launch: Launch) -> None:
    assert_lost_connection_keeps_the_model(launch, 0, "receive")


def case_a_failed_upload_of_a_file_keeps_the_model(launch: Launch) -> None:
    cause = assert_keeps_the_model(launch, "put", "^model-.*-00001-of-00002", rank=0)
    assert "denied" in str(cause)


def case_a_failed_commit_keeps_the_model(launch: Launch) -> None:
    cause = assert_keeps_the_model(launch, "swap", "index.json", rank=0)
    assert isinstance(cause, NotCommitted)


def case_a_commit_with_an_unknown_outcome_deletes_nothing(launch: Launch) -> None:
    silent = TimeoutError(110, "create failed: no answer", "url")
    with fails(launch, "put_if_absent", silent, 0, "index.json"):
        causes = failure_of(
            launch, save, model(launch, "x"), url_of(launch), max_shard_size=SHARD_BYTES
        )
    assert isinstance(causes[0], DurabilityUncertain)
    dist.barrier()
    assert "model-00002-of-00002.safetensors" in contents(launch.path("url"))


def case_a_version_is_published_by_all_ranks(launch: Launch) -> None:
    with ObjectServer().running() if launch.rank == 0 else nullcontext() as server:
        given = [None if server is None else server.options]
        dist.broadcast_object_list(given)
        options = torch_ckpt.WriteOptions(storage_options=given[0])
        format = torch_ckpt.Safetensors(max_shard_size=SHARD_BYTES)
        url = f"s3://{BUCKET}/policy"
        for number, name in ((0, "first"), (1, "second")):
            version = torch_ckpt.publish(model(launch, name), url, format=format, options=options)
            assert version == (number, f"{url}/{number:010d}")
        dist.barrier()
        if server is not None:
            torch_ckpt.save(of("second"), launch.path("local"), format=format, no_dist=True)
            local = contents(launch.path("local"))
            for name in local.keys() - {"torch_ckpt.checksums"}:  # has the marker's checksum
                assert server.objects[f"policy/0000000001/{name}"].data == local[name]
            assert server.objects["policy/latest"].data == b"0000000001"
            assert not server.uploads
        dist.barrier()


def needs_obstore(case: str) -> str:
    is_here = importlib.util.find_spec("obstore") is not None
    return "obstore is missing" if case.startswith("a_version") and not is_here else ""


test_on_ranks = on_ranks(globals(), skipped=needs_obstore)
