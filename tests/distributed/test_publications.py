"""Versions that several ranks publish."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ckpt
from tests.distributed.cases import Launch, StateDict, failure_of, mesh_1d, tensor_of
from tests.distributed.launcher import on, on_ranks, takes_several
from tests.fault_hooks import failing
from tests.support import assert_equal
from torch_ckpt.publication.publish import async_publish

pytestmark = pytest.mark.full

#: Small enough for several files.
SHARD_BYTES = 30_000


def complete(factor: int = 1) -> StateDict:
    """Returns the model of one process. ``factor`` changes only "trained"."""
    return {
        "frozen": tensor_of("frozen", 80, 90),
        "trained": tensor_of("trained", 64, 66) * factor,
        "bias": tensor_of("bias", 66),
    }


def sharded(launch: Launch, factor: int = 1) -> StateDict:
    mesh, state = mesh_1d(launch), complete(factor)
    return {
        "frozen": distribute_tensor(state["frozen"], mesh, [Shard(0)]),
        "trained": distribute_tensor(state["trained"], mesh, [Shard(1)]),
        "bias": distribute_tensor(state["bias"], mesh, [Replicate()]),
    }


def assert_version(launch: Launch, root: Path, number: int, factor: int) -> None:
    if launch.rank == 0:
        assert os.readlink(root / "latest") == f"{number:010d}"
        loaded = {name: torch.zeros_like(value) for name, value in complete().items()}
        torch_ckpt.load(loaded, root, no_dist=True)
        assert_equal(loaded, complete(factor))
    dist.barrier()


@on(4)
def case_a_version_is_published_by_all_ranks_with_a_delta(launch: Launch) -> None:
    root = launch.path("policy")
    for number, factor in enumerate((1, 3)):
        version = torch_ckpt.publish(
            sharded(launch, factor),
            root,
            delta=True,
            format=torch_ckpt.Safetensors(max_shard_size=SHARD_BYTES),
        )
        assert version == (number, str(root / f"{number:010d}"))
        assert_version(launch, root, number, factor)
    if launch.rank == 0:
        inodes = [(root / f"{n:010d}" / "model-00001-of-00002.safetensors").stat() for n in (0, 1)]
        assert inodes[0].st_ino == inodes[1].st_ino, "the frozen tensor is stored once"
        state = complete()
        torch_ckpt.apply_delta(root / "latest", state)
        assert_equal(state, complete(3))


def case_a_version_is_published_in_the_background(launch: Launch) -> None:
    root = launch.path("policy")
    handles = [
        async_publish(sharded(launch, factor), root, version=10 * factor, delta=True)
        for factor in (1, 2)
    ]
    for handle in handles:
        handle.result()
    assert_version(launch, root, 20, 2)


@takes_several
def case_a_failure_on_one_rank_publishes_nothing(launch: Launch) -> None:
    root = launch.path("policy")
    torch_ckpt.publish(sharded(launch), root)
    for rank, call in ((1, "fsync"), (0, "pwrite"), (0, "rename")):
        with failing(call, errno.EIO) if launch.rank == rank else nullcontext():
            causes = failure_of(launch, torch_ckpt.publish, sharded(launch, 2), root, version=5)
        assert list(causes) == [rank], call
        assert_version(launch, root, 0, 1)


@takes_several
def case_ranks_with_different_versions_are_refused(launch: Launch) -> None:
    root = launch.path("policy")
    causes = failure_of(launch, torch_ckpt.publish, sharded(launch), root, version=5 + launch.rank)
    assert "ranks save different checkpoints" in str(causes[0])
    assert os.listdir(root) == []


class FailingOnce:
    """A value whose first ``state_dict`` fails."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> StateDict:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("not yet")
        return {"x": torch.ones(2)}

    def load_state_dict(self, state: StateDict) -> None:
        raise NotImplementedError


@takes_several
def case_ranks_export_the_same_steps_after_a_save_failed_on_one_rank(launch: Launch) -> None:
    model = torch.nn.Linear(3, 2)
    export = torch_ckpt.Export(launch.path("exports"), every=4)
    failing_value = FailingOnce()
    with torch_ckpt.CheckpointManager(
        launch.path("steps"), interval=4, export=export, on_save_error="warn_and_continue"
    ) as manager:
        for step in range(1, 14):
            state: StateDict = {"model": model}
            if launch.rank == 1 and step == 8:
                state["value"] = failing_value
            manager.save(step, state)
            manager.wait_until_finished()
        assert manager.save_errors == 1
    dist.barrier()
    assert manager.all_steps() == [4, 12]
    # The third export may start after the last step.
    versions = [name for name in os.listdir(launch.path("exports")) if name != "latest"]
    assert sorted(map(int, versions))[:2] == [5, 9]


def case_a_file_that_one_rank_cannot_copy_fails_the_publication_on_all(launch: Launch) -> None:
    copied = [] if launch.rank == 0 else [launch.path("absent.json")]
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        torch_ckpt.publish(
            sharded(launch, 1),
            launch.path("policy"),
            format=torch_ckpt.Safetensors(copied=copied),
        )


test_on_ranks = on_ranks(globals())
