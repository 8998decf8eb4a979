"""Saves in Hugging Face's layout by ranks on several hosts, to a file system that they share.

Each rank stands for a host: no rank sees the mounts of another rank, and no file system is local.
tests/cluster has hosts with a shared file system.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from tests.distributed.cases import Launch, StateDict, failure_of, mesh_1d, tensor_of
from tests.distributed.launcher import on, on_ranks
from tests.distributed.test_model_url_ranks import SHARD_BYTES, contents, sharded
from tests.support import assert_equal
from torch_ckpt import _core
from torch_ckpt.checkpoint import directory
from torch_ckpt.checkpoint.shared_directory import View
from torch_ckpt.huggingface import assembly
from torch_ckpt.ranks import streams


@contextmanager
def on_hosts(launch: Launch, assembled: list[str] | None = None) -> Iterator[None]:
    """Makes each rank a host of its own. Adds the names of the files that this rank assembles."""
    real = assembly.DirectoryFiles.put

    def put(files: assembly.DirectoryFiles, name: str, *arguments: Any) -> None:
        if assembled is not None:
            assembled.append(name)
        real(files, name, *arguments)

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(directory, "_mounts", return_value=f"host {launch.rank}")
        )
        stack.enter_context(mock.patch.object(_core.Directory, "is_local", False))
        stack.enter_context(mock.patch.object(assembly.DirectoryFiles, "put", put))
        yield


def save(state: StateDict, path: Path, timeout: float = 60.0, **format: Any) -> None:
    torch_ckpt.save(state, path, format=torch_ckpt.Safetensors(**format), timeout=timeout)


def assert_same_bytes(launch: Launch, state: StateDict, **format: Any) -> None:
    """Checks that hosts write what ranks of one host write."""
    save(state, launch.path("one host"), **format)
    with on_hosts(launch):
        save(state, launch.path("hosts"), **format)
    dist.barrier()
    if launch.rank == 0:
        assert contents(launch.path("hosts")) == contents(launch.path("one host"))
        assert torch_ckpt.verify(launch.path("hosts")).ok
    dist.barrier()


@on(2, 4)
def case_hosts_write_the_same_file_as_one_host(launch: Launch) -> None:
    assert_same_bytes(launch, sharded(launch))


@on(2, 4)
def case_hosts_write_the_same_files_as_one_host(launch: Launch) -> None:
    assert_same_bytes(launch, sharded(launch), dtype="bf16", max_shard_size=SHARD_BYTES)


@on(2)
def case_only_one_host_writes_a_file_with_columns_of_several(launch: Launch) -> None:
    columns = distribute_tensor(tensor_of("t", 100, 70), mesh_1d(launch), [Shard(1)])
    assembled: list[str] = []
    with on_hosts(launch, assembled):
        save({"columns": columns}, launch.path("model"))
    assert assembled == ([] if launch.rank else ["model.safetensors"])


@on(2)
def case_only_one_host_writes_a_file_with_rows_of_several(launch: Launch) -> None:
    rows = distribute_tensor(torch.zeros(4, 1 << 16), mesh_1d(launch), [Shard(0)])
    assembled: list[str] = []
    with on_hosts(launch, assembled):
        save({"rows": rows}, launch.path("model"))
    assert assembled == ([] if launch.rank else ["model.safetensors"])


@on(2)
def case_hosts_write_their_rows_to_a_file_that_takes_parallel_writes(launch: Launch) -> None:
    rows = distribute_tensor(torch.zeros(4, 1 << 16), mesh_1d(launch), [Shard(0)])
    assembled: list[str] = []
    with on_hosts(launch, assembled), mock.patch.object(View, "takes_parallel_writes", True):
        save({"rows": rows}, launch.path("model"))
    assert assembled == []


@on(2)
def case_a_file_with_tensors_of_one_host_is_written_by_this_host(launch: Launch) -> None:
    rows = distribute_tensor(torch.zeros(4, 1 << 16), mesh_1d(launch), [Shard(0)])
    own = torch.zeros(1 << 18)
    assembled: list[str] = []
    with on_hosts(launch, assembled):
        state = {"a": rows} | ({"b": own, "c": own + 1} if launch.rank == 1 else {})
        save(state, launch.path("model"), max_shard_size=1 << 20)
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert assembled == (names[1:] if launch.rank else names[:1])


@on(2)
def case_a_version_is_assembled(launch: Launch) -> None:
    columns = distribute_tensor(tensor_of("t", 100, 70), mesh_1d(launch), [Shard(1)])
    with on_hosts(launch):
        version = torch_ckpt.publish({"columns": columns}, launch.path("versions"))
    target = {"columns": torch.zeros(100, 70)}
    torch_ckpt.load(target, version.path, no_dist=True)
    assert_equal(target, {"columns": tensor_of("t", 100, 70)})


@on(2)
def case_a_failed_assembly_leaves_no_directory(launch: Launch) -> None:
    columns = distribute_tensor(tensor_of("t", 100, 70), mesh_1d(launch), [Shard(1)])

    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with on_hosts(launch), mock.patch.object(assembly.DirectoryFiles, "put", fail):
        errors = failure_of(launch, save, {"columns": columns}, launch.path("model"))
    assert {rank: str(error) for rank, error in errors.items()} == {
        0: "[Errno 28] No space left on device"
    }
    dist.barrier()
    assert list(launch.path().glob(".model*")) == []
    assert not launch.path("model").exists()


@on(2)
def case_the_error_of_a_rank_that_cannot_connect_names_the_addresses(launch: Launch) -> None:
    columns = distribute_tensor(tensor_of("t", 100, 70), mesh_1d(launch), [Shard(1)])
    unreachable = mock.patch.object(streams, "_addresses", return_value=["127.0.0.2"])
    closed = mock.patch.object(streams.socket, "has_dualstack_ipv6", return_value=False)
    with on_hosts(launch), unreachable, closed, ExitStack() as stack:
        if launch.rank == 1:
            refused = ConnectionRefusedError(111, "Connection refused")
            stack.enter_context(
                mock.patch.object(streams.socket, "create_connection", side_effect=refused)
            )
        errors = failure_of(launch, save, {"columns": columns}, launch.path("model"), timeout=6.0)
    assert "rank 1 cannot connect to rank 0" in str(errors[1])
    assert "127.0.0.2: Connection refused" in str(errors[1])


@on(2)
def case_a_rank_whose_disk_does_not_answer_is_declared_dead(launch: Launch) -> None:
    columns = distribute_tensor(tensor_of("t", 100, 70), mesh_1d(launch), [Shard(1)])
    store = _get_default_store()

    def hang(*_arguments: Any) -> None:
        store.wait(["rank 1 has failed"])
        raise OSError(5, "Input/output error")

    with (
        on_hosts(launch),
        mock.patch.object(assembly.DirectoryFiles, "put", hang),
        pytest.raises(CheckpointException) as caught,
    ):
        save({"columns": columns}, launch.path("model"), timeout=3.0)
    if launch.rank == 1:
        assert "rank 0" in str(caught.value)
        store.set("rank 1 has failed", "")


test_on_ranks = on_ranks(globals())
