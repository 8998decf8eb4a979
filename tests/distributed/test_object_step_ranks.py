"""Steps beneath URLs, saved and loaded by two ranks on an S3 server, and a rank that falls silent
in a save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.distributed.cases import (
    PATIENCE_SECONDS,
    Launch,
    assert_full_tensors,
    dtensors,
    failure_of,
    mesh_1d,
    tensor_of,
    zeroed,
)
from tests.distributed.launcher import on_ranks
from tests.distributed.loads import changed_after_rank_0_looked
from tests.distributed.silent_ranks import (
    TIMEOUT,
    Silence,
    falls_silent,
    is_victim,
    join_group,
    outcome_of,
    outcomes_of,
)
from tests.object_server import BUCKET, ObjectServer
from tests.ranks import ranks
from tests.support import assert_equal, save_step
from torch_ckpt import CheckpointManager, ReadOptions, WriteOptions
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.multihost import RanksDisagree
from torch_ckpt.steps.object_steps import ObjectSteps
from torch_ckpt.stores import ObjectStore
from torch_ckpt.training import load_checkpoint_if_it_exists, save_checkpoint

pytestmark = pytest.mark.full

_VARIABLES = {
    "key": "AWS_ACCESS_KEY_ID",
    "secret": "AWS_SECRET_ACCESS_KEY",
    "endpoint_url": "AWS_ENDPOINT_URL",
}


def url_of(launch: Launch) -> str:
    """Returns the URL of a root of this case, which is empty at the start."""
    return f"s3://{BUCKET}/{launch.size}-ranks/{launch.case}"


def steps_of(launch: Launch) -> ObjectSteps:
    return ObjectSteps(url_of(launch))


def save(steps: ObjectSteps, step: int, state: dict[str, Any], **options: Any) -> None:
    save_step(steps, step, state, no_dist=False, timeout=PATIENCE_SECONDS, **options)


def objects_of(launch: Launch) -> list[str]:
    """Lists the objects of this case on the server."""
    return sorted(entry.name for entry in steps_of(launch)._store.list())


def patched(method: str, made: Callable[[Any], Any]) -> Any:
    """Replaces a request during a block by what ``made`` returns for it."""
    return mock.patch.object(ObjectStore, method, made(getattr(ObjectStore, method)))


def failing(method: str) -> Any:
    """Fails requests for data files on rank 1 during a block."""

    def made(before: Any) -> Any:
        def fail(self: ObjectStore, name: str, *args: Any) -> Any:
            if dist.get_rank() == 1 and name.endswith(".distcp"):
                raise PermissionError(13, "denied", self.url_of(name))
            return before(self, name, *args)

        return fail

    return patched(method, made)


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yields the sizes of the requests of this rank for data files."""
    fetched: list[int] = []

    def made(before: Any) -> Any:
        def read(self: ObjectStore, name: str, *place: Any) -> memoryview:
            data: memoryview = before(self, name, *place)
            if name.endswith(".distcp"):
                fetched.append(len(data))
            return data

        return read

    with patched("read_range", made):
        yield fetched


# --- steps ---------------------------------------------------------------------------------------


def case_shards_of_rows_are_loaded_as_columns_and_as_full_tensors(launch: Launch) -> None:
    steps, mesh = steps_of(launch), mesh_1d(launch)
    full = tensor_of("t", 1000, 901)
    save(steps, 1, {"t": distribute_tensor(full, mesh, [Shard(0)])})
    columns = torch.zeros_like(distribute_tensor(full, mesh, [Shard(1)]))
    steps.load(1, {"t": columns})
    assert_equal(columns.full_tensor(), full)
    target = torch.zeros(1000, 901)
    steps.load(1, {"t": target})
    assert_equal(target, full)


def case_each_rank_fetches_about_its_share(launch: Launch) -> None:
    steps, mesh = steps_of(launch), mesh_1d(launch)
    full = tensor_of("t", 4096, 1024)
    # One record, of which each rank needs some rows.
    save(steps, 1, {"t": distribute_tensor(full, mesh, [Replicate()])})
    target = torch.zeros_like(distribute_tensor(full, mesh, [Shard(0)]))
    with counted() as fetched:
        steps.load(1, {"t": target})
    assert_equal(target.full_tensor(), full)
    part = full.nbytes // launch.size
    assert part <= sum(fetched) < 1.1 * part


def case_with_read_once_the_ranks_fetch_each_byte_once(launch: Launch) -> None:
    steps = steps_of(launch)
    state = {f"t{n}": tensor_of(f"t{n}", 512, 1024) for n in range(8)}
    save(steps, 1, state)
    target = {name: torch.zeros(512, 1024) for name in state}
    with counted() as fetched:
        steps.load(1, target, options=ReadOptions(read_once=True))
    assert_equal(target, state)
    total = torch.tensor(sum(fetched))
    dist.all_reduce(total)
    wanted = sum(tensor.nbytes for tensor in state.values())
    assert wanted <= int(total) < 1.1 * wanted


def case_with_read_once_one_rank_reads_the_metadata(launch: Launch) -> None:
    steps = steps_of(launch)
    save(steps, 1, {"t": tensor_of("t", 30)})
    reads: list[str] = []

    def made(before: Any) -> Any:
        def read(self: ObjectStore, name: str, *args: Any) -> Any:
            reads.append(name)
            return before(self, name, *args)

        return read

    target = {"t": torch.zeros(30)}
    with patched("read", made):
        steps.load(1, target, options=ReadOptions(read_once=True))
    assert_equal(target["t"], tensor_of("t", 30))
    assert reads.count(".metadata") == (launch.rank == 0)


def case_metadata_that_no_rank_can_read_fails_a_load_with_read_once_on_all(
    launch: Launch,
) -> None:
    steps = steps_of(launch)
    save(steps, 1, {"t": torch.ones(3)})
    if launch.rank == 0:
        steps._store.delete(["0000000001/.metadata"])
    dist.barrier()
    read_once = ReadOptions(read_once=True)
    causes = failure_of(launch, steps.load, 1, {"t": torch.zeros(3)}, options=read_once)
    assert isinstance(causes[0], FileNotFoundError)
    assert ".metadata" in str(causes[0])


def case_an_upload_that_fails_on_one_rank_fails_the_save_on_all(launch: Launch) -> None:
    steps, mesh = steps_of(launch), mesh_1d(launch)
    with failing("put"):
        causes = failure_of(launch, lambda: save(steps, 1, dtensors(mesh)))
    assert list(causes) == [1]
    assert isinstance(causes[1], PermissionError)
    assert causes[1].filename.startswith(f"{url_of(launch)}/0000000001/__1_")
    dist.barrier()
    assert objects_of(launch) == []


def case_a_request_that_fails_on_one_rank_fails_the_load_on_all(launch: Launch) -> None:
    steps, mesh = steps_of(launch), mesh_1d(launch)
    save(steps, 1, dtensors(mesh))
    with failing("read_range"):
        causes = failure_of(launch, lambda: steps.load(1, zeroed(dtensors(mesh))))
    assert list(causes) == [1]


def case_a_step_replaced_between_the_reads_of_two_ranks_is_loaded_by_no_rank(
    launch: Launch,
) -> None:
    steps = steps_of(launch)
    save(steps, 1, {"t": torch.ones(3)})
    target = {"t": torch.zeros(3)}

    def replace() -> None:
        steps = ObjectSteps(url_of(launch))
        save_step(steps, 1, {"t": torch.full((3,), 2.0)}, may_replace=True)

    with changed_after_rank_0_looked(launch, Source, "looked", replace):
        causes = failure_of(launch, steps.load, 1, target)
    assert "the checkpoint was replaced or a newer step was saved" in str(causes[0])
    assert url_of(launch) in str(causes[0])
    assert target["t"].tolist() == [0, 0, 0]


def case_ranks_that_save_at_different_roots_raise(launch: Launch) -> None:
    steps = ObjectSteps(f"{url_of(launch)}/{launch.rank}")
    causes = failure_of(launch, lambda: save(steps, 1, {"t": torch.ones(3)}))
    assert "ranks save different checkpoints" in str(causes[0])
    assert objects_of(launch) == []


def case_a_manager_of_all_ranks_keeps_and_restores_steps_and_holds_the_lease(
    launch: Launch,
) -> None:
    mesh = mesh_1d(launch)
    with CheckpointManager(url_of(launch), keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": dtensors(mesh)})
        manager.wait_until_finished()
        state = {"model": zeroed(dtensors(mesh))}
        assert manager.restore(state) == 3
        assert_full_tensors(state["model"])
        found = steps_of(launch).lease_store().read()
        assert found is not None
        assert (found.record.epoch, found.record.is_held) == (1, True)
        dist.barrier()
    dist.barrier()
    assert [info.step for info in steps_of(launch).entries()] == [2, 3]


# --- torch_ckpt.training -------------------------------------------------------------------------


def case_the_newest_complete_checkpoint_is_loaded_if_there_is_one(launch: Launch) -> None:
    state: dict[str, Any] = {"t": torch.ones(3), "note": "mine"}
    assert load_checkpoint_if_it_exists(url_of(launch), state) == 0
    assert_equal(state, {"t": torch.ones(3), "note": "mine"})
    mesh = mesh_1d(launch)
    save_checkpoint(url_of(launch), 9, {"t": distribute_tensor(torch.ones(5), mesh, [Shard(0)])})
    newest = distribute_tensor(tensor_of("t", 5), mesh, [Shard(0)])
    save_checkpoint(url_of(launch), 10, {"t": newest})
    if launch.rank == 0:
        steps_of(launch)._store.put("0000000011/.metadata", (), 0)
    dist.barrier()
    state = {"t": torch.zeros_like(newest)}
    assert load_checkpoint_if_it_exists(url_of(launch), state) == 10
    assert_equal(state["t"].full_tensor(), tensor_of("t", 5))


def case_a_root_that_one_rank_cannot_open_fails_the_call_on_all(launch: Launch) -> None:
    root = url_of(launch) if launch.rank == 0 else "nowhere://run"
    expected = RuntimeError if launch.rank == 0 else ValueError
    options = {"timeout": PATIENCE_SECONDS}
    with pytest.raises(expected, match="nowhere://run"):
        save_checkpoint(root, 1, {"t": torch.ones(3)}, **options)
    with pytest.raises(expected, match="nowhere://run"):
        load_checkpoint_if_it_exists(root, {"t": torch.ones(3)}, **options)


def case_ranks_that_save_different_steps_raise(launch: Launch) -> None:
    with pytest.raises(RanksDisagree, match="save_checkpoint of step 1"):
        save_checkpoint(url_of(launch), launch.rank, {"t": torch.ones(3)})
    assert objects_of(launch) == []


@pytest.fixture(scope="module", autouse=True)
def object_store() -> Iterator[None]:
    pytest.importorskip("obstore")
    with ObjectServer().running() as server, pytest.MonkeyPatch.context() as patch:
        for name, variable in _VARIABLES.items():
            patch.setenv(variable, server.options[name])
        yield


test_on_ranks = on_ranks(globals())


# --- a rank that falls silent --------------------------------------------------------------------


def upload(connection: Connection, workdir: Path, silence: Silence) -> None:
    """Saves on one rank. The victim falls silent after its first of two uploads.

    Sends the outcome and the files of the step.
    """
    join_group()
    steps = ObjectSteps(f"file://{workdir}/run")
    state = {f"{n} of rank {dist.get_rank()}": torch.arange(1000) for n in range(2)}
    # Connects to the store, which may take longer than the timeout of a silent rank.
    two_files = WriteOptions(thread_count=2)
    save(steps, 1, state, write=two_files)

    first = threading.Lock()

    def made(before: Any) -> Any:
        def interrupted(self: ObjectStore, *args: Any) -> None:
            before(self, *args)
            if first.acquire(blocking=False):
                falls_silent(connection, silence)()

        return interrupted if is_victim(silence) else before

    with patched("put", made):
        outcome = outcome_of(
            lambda: save_step(steps, 2, state, two_files, no_dist=False, timeout=TIMEOUT)
        )
    names = [entry.name for entry in steps._store.list(f"{2:010d}")]
    connection.send((*(outcome or ()), names))
    connection.recv()  # The test ends the ranks.


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_rank_that_falls_silent_in_its_upload_is_named_and_leaves_no_file(
    tmp_path: Path, how: str
) -> None:
    silence = Silence(how, 1)
    with ranks(2, upload, tmp_path, silence) as group:
        found = outcomes_of(group, tmp_path, silence).outcomes
    failed, text, _seconds, names = found[0]
    assert failed == [1]
    assert f"rank 1 sent no heartbeat for {TIMEOUT:g} s during 'write'" in text
    assert names == []
    if how == "stopped":
        assert found[1][0] == [1]
    assert list(tmp_path.glob("run/0000000002/*")) == []
