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

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from tests.distributed.cases import Launch, StateDict, failure_of, mesh_1d, tensor_of
from tests.distributed.launcher import on, on_ranks
from tests.distributed.test_model_url_ranks import SHARD_BYTES, contents, sharded
from tests.support import assert_equal
from torch_ckpt import _core
from torch_ckpt.checkpoint import directory
from torch_ckpt.huggingface import model_target


@contextmanager
def on_hosts(launch: Launch, assembled: list[str] | None = None) -> Iterator[None]:
    """Makes each rank a host of its own. Adds the names of the files that this rank assembles."""
    real = model_target.assemble

    def assemble(files: Any, file: _core.FileAssembly, *arguments: Any) -> None:
        if assembled is not None:
            assembled.append(file.name)
        real(files, file, *arguments)

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(directory, "_mounts", return_value=f"host {launch.rank}")
        )
        stack.enter_context(mock.patch.object(_core.Directory, "is_local", False))
        stack.enter_context(mock.patch.object(model_target, "assemble", assemble))
        yield


def save(state: StateDict, path: Path, **format: Any) -> None:
    torch_ckpt.save(state, path, format=torch_ckpt.Safetensors(**format))


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
def case_hosts_write_their_rows_to_the_file(launch: Launch) -> None:
    rows = distribute_tensor(torch.zeros(4, 1 << 16), mesh_1d(launch), [Shard(0)])
    assembled: list[str] = []
    with on_hosts(launch, assembled):
        save({"rows": rows}, launch.path("model"))
    assert assembled == []


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

    with on_hosts(launch), mock.patch.object(model_target, "assemble", fail):
        errors = failure_of(launch, save, {"columns": columns}, launch.path("model"))
    assert {rank: str(error) for rank, error in errors.items()} == {
        0: "[Errno 28] No space left on device"
    }
    dist.barrier()
    assert list(launch.path().glob(".model*")) == []
    assert not launch.path("model").exists()


test_on_ranks = on_ranks(globals())
