"""Released code of Megatron-core and nvidia-resiliency-ext, mixed with torch_ckpt's, if
available."""

from __future__ import annotations

import io
import shutil
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension

from benchmarks import no_cuda
from tests.distributed import cases
from tests.distributed.cases import Launch, StateDict
from tests.distributed.launcher import on, on_ranks
from tests.distributed.peers import (
    assert_is_ours,
    assert_loads,
    children,
    directory,
    emptied,
    installed,
    loaded,
    request_for,
    request_of,
    run_in,
    save_strategy,
    save_through,
    sharded,
    strategies,
    their_queue,
    why_skipped,
)
from tests.metadata import read_metadata
from tests.support import assert_equal, data_files, files_limited_to, random_tensor
from torch_ckpt.checkpoint.metadata import checksum_tables

pytestmark = pytest.mark.full

IMPORTED = ["tests.distributed.peers_imported"]

# A process that a rank spawns imports this file again under this name.
if __name__ == "__mp_main__":
    no_cuda.pretend()

#: Numbers of files of their save strategies, and a separation hint.
LAYOUTS = [(1, None), (2, None), (4, None), (2, "optimizer"), (4, "optimizer")]


def nvrx(module: str) -> Any:
    return import_module(f"nvidia_resiliency_ext.checkpointing.async_ckpt.{module}")


#: Modules with the queues.
QUEUES = {strategies: "async_utils", nvrx: "core"}


class Flip(StreamTransformExtension):
    """Transform that flips every written bit."""

    @staticmethod
    def from_descriptor(version: str) -> Flip:
        return Flip()

    @staticmethod
    def registry_name() -> str:
        return "stream.flip"

    def get_descriptor(self) -> str:
        return "stream.flip"

    def transform_to(self, output: Any) -> Any:
        return Flipped(output)

    def transform_from(self, input: Any) -> Any:
        raise NotImplementedError


class Flipped(io.BytesIO):
    """Stream that passes its contents on when it is closed."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            self._output.write(flipped(self.getvalue()))
        super().close()


def flipped(data: bytes) -> bytes:
    return bytes(byte ^ 255 for byte in data)


# --- states ---------------------------------------------------------------------------------------


def nvrx_state(launch: Launch, seed: int) -> StateDict:
    """Makes a state of DTensors, of replicated tensors, and of objects."""
    state: StateDict = dict(cases.dtensors(cases.mesh_1d(launch)))
    for tensor in state.values():
        tensor.to_local().mul_(seed)
    state["optimizer.of all ranks"] = random_tensor((50, 30), torch.float32, seed=seed)
    state["numbers"] = {"seed": seed, "list": [1, 2, seed]}
    return state


# --- saves and loads, as Megatron's training has them ---------------------------------------------


def nvrx_request(launch: Launch, writer: Any, seed: int, **options: Any) -> Any:
    """Makes the request in nvrx's documentation, by the functions that are in its modules."""
    saver = nvrx("state_dict_saver")
    planner = dcp.DefaultSavePlanner()
    saved = saver.save_state_dict_async_plan(
        nvrx_state(launch, seed), writer, None, 0, planner=planner, **options
    )
    save, preload, arguments = writer.get_save_function_and_args()
    finalize = partial(saver.save_state_dict_async_finalize, *saved)
    return nvrx("core").AsyncRequest(save, arguments, [finalize], preload_fn=preload)


def assert_loads_by_torch(launch: Launch, path: Path, seed: int) -> None:
    def local(state: StateDict) -> StateDict:
        return {
            name: getattr(value, "to_local", lambda v=value: v)() for name, value in state.items()
        }

    found = nvrx_state(launch, 0)
    dcp.load(found, storage_reader=dcp.FileSystemReader(path))
    assert_equal(local(found), local(nvrx_state(launch, seed)))


def records(path: Path) -> dict[Any, tuple[str, bytes]]:
    """Returns for each item the side of its file, and its bytes."""
    places = read_metadata(path).storage_data
    files = {file.name: file.read_bytes() for file in data_files(path)}
    return {
        index: (
            info.relative_path.partition("__")[0],
            files[info.relative_path][info.offset : info.offset + info.length],
        )
        for index, info in places.items()
    }


def assert_same_files(launch: Launch, ours: Path, theirs: Path, buckets: int) -> None:
    """Checks that all data files have the same names and the same bytes.

    With several buckets on a side, ours distributes items by all bytes and theirs by those of
    tensors. Then only each item's side and bytes are compared.
    """
    if launch.rank != 0:
        return
    assert [file.name for file in data_files(ours)] == [file.name for file in data_files(theirs)]
    if buckets == 1:
        for one, other in zip(data_files(ours), data_files(theirs), strict=True):
            assert one.read_bytes() == other.read_bytes(), one.name
    else:
        assert records(ours) == records(theirs)


# --- Megatron-core, some of it ours ---------------------------------------------------------------


def our_writer() -> Any:
    """Puts torch_ckpt's writer into Megatron-core's own strategy, plan, finalize and queues."""
    from torch_ckpt import megatron

    return mock.patch.object(
        strategies("torch"), "FileSystemWriterAsync", megatron.FileSystemWriterAsync
    )


def save_by_their_queue(launch: Launch, queue: Any) -> None:
    paths = [directory(launch, str(seed)) for seed in range(2)]
    for seed, path in enumerate(paths):
        with our_writer():
            request = request_for(launch, path, seed)
        run_in(queue, request)
    for seed, path in enumerate(paths):
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed)


#: Kinds of their queue: a process for each save, or one for all.
FORKED, SPAWNED = False, True

# Starting a process that imports Megatron takes longer than its work.
_spawned: list[Any] = []


def spawned_queue() -> Any:
    """Megatron-core's own queue with its process, shared by all cases."""
    if not _spawned:
        _spawned.append(their_queue(persistent=SPAWNED))
    return _spawned[0]


def case_our_writer_writes_in_a_process_that_megatron_forks(launch: Launch) -> None:
    queue = their_queue(persistent=FORKED)
    save_by_their_queue(launch, queue)
    queue.close()


@on(2, only=True)
def case_our_writer_writes_in_a_process_that_megatron_spawns(launch: Launch) -> None:
    save_by_their_queue(launch, spawned_queue())


def case_our_writer_overwrites_a_checkpoint_by_megatrons_plan(launch: Launch) -> None:
    """Ranks choose new file names independently."""
    path = directory(launch)
    for seed in (1, 2):
        with our_writer():
            request_for(launch, path, seed).execute_sync()
        assert_loads(launch, path, seed)
        dist.barrier()
    if launch.rank == 0:
        named = {info.relative_path for info in read_metadata(path).storage_data.values()}
        assert {file.name for file in data_files(path)} == named


def case_four_saves_of_our_writer_use_one_plan_of_theirs(launch: Launch) -> None:
    strategy = save_strategy(cached=True)
    for seed in range(4):
        path = directory(launch, str(seed))
        with our_writer():
            request_for(launch, path, seed, strategy).execute_sync()
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed)
    assert strategy.validated_cache_reuse


def case_a_write_that_fails_in_a_forked_process_fails_megatrons_save(launch: Launch) -> None:
    path = directory(launch)
    queue = their_queue(persistent=FORKED)
    with our_writer():
        request = request_for(launch, path, seed=2)
    with files_limited_to(1000 if launch.rank == launch.size - 1 else 1 << 30):
        queue.schedule_async_request(request)
    with pytest.raises(dcp.CheckpointException) as error:
        queue.maybe_finalize_async_calls(blocking=True)
    # In Megatron, the coordinator has the details.
    if launch.rank == 0:
        last, failures = launch.size - 1, error.value.failures
        assert list(failures) == [last]
        assert f"{path}/__{last}_" in str(failures[last][0])
    assert not (path / ".metadata").exists()


def case_ranks_with_nothing_to_write_take_part_in_megatrons_save(launch: Launch) -> None:
    def state() -> StateDict:
        data = random_tensor((5, 3), torch.float32)
        return {"t": sharded("t", data, replica_id=launch.rank)}

    for name, ours in (("all of ours", installed), ("our writer", our_writer)):
        path = directory(launch, name)
        with ours():
            request = request_of(state(), path)
            assert (request.async_fn is None) == (launch.rank != 0)
            save_through(their_queue(), request)
            assert_equal(loaded(emptied(state()), path)["t"], state()["t"].data)


def case_an_installed_writer_with_transforms_is_megatrons_own(launch: Launch) -> None:
    """Its save is planned and finalized by Megatron-core's functions, and runs in our queue."""
    path = directory(launch)
    with installed():
        writer = strategies("filesystem_async").FileSystemWriterAsync(path, _extensions=[Flip()])
        assert_saves_flipped(launch, path, writer, strategies)


def assert_saves_flipped(launch: Launch, path: Path, writer: Any, package: Any) -> None:
    """Saves through a writer with the transform, by the functions and the queue that are installed
    in a package."""
    state = {f"t{launch.rank}": random_tensor((50, 3), torch.float32, seed=launch.rank)}
    saver, queues = package("state_dict_saver"), package(QUEUES[package])
    planned = saver.save_state_dict_async_plan(
        state, writer, None, 0, planner=dcp.DefaultSavePlanner()
    )
    # Megatron-core returns the plans, too.
    finalizing = planned[0] if isinstance(planned[0], tuple) else planned
    save, preload, arguments = writer.get_save_function_and_args()
    finalize = partial(saver.save_state_dict_async_finalize, *finalizing)
    save_through(
        queues.AsyncCallsQueue(),
        queues.AsyncRequest(save, arguments, [finalize], preload_fn=preload),
    )
    if launch.rank == 0:
        metadata = read_metadata(path)
        assert checksum_tables(metadata) == {}
        for index, info in metadata.storage_data.items():
            data = (path / info.relative_path).read_bytes()[info.offset :][: info.length]
            expected = random_tensor((50, 3), torch.float32, seed=int(index.fqn[1:]))
            assert_equal(torch.load(io.BytesIO(flipped(data))), expected)
            assert info.transform_descriptors == ["stream.flip"]


def case_a_save_that_runs_during_install_is_finalized(launch: Launch) -> None:
    path = directory(launch)
    queue = their_queue(persistent=FORKED)
    queue.schedule_async_request(request_for(launch, path, seed=4))
    with installed():
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        assert_loads(launch, path, seed=4)


def case_a_queue_from_before_install_accepts_later_requests(launch: Launch) -> None:
    path = directory(launch)
    queue = their_queue(persistent=FORKED)
    with installed():
        save_through(queue, request_for(launch, path, seed=5))
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed=5)


@on(2, only=True)
def case_a_process_spawned_before_install_accepts_later_requests(launch: Launch) -> None:
    """Nothing is installed in that process."""
    path = directory(launch)
    queue = spawned_queue()
    with installed():
        run_in(queue, request_for(launch, path, seed=6))
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed=6)


@on(2, only=True)
def case_a_write_that_fails_in_a_spawned_process_fails_megatrons_save(launch: Launch) -> None:
    """The process then runs the next request."""
    path, gone = directory(launch, "path"), directory(launch, "gone")
    queue = spawned_queue()
    with our_writer():
        request = request_for(launch, gone, seed=7)
        dist.barrier()
        if launch.rank == 0:
            shutil.rmtree(gone)
        dist.barrier()
        with pytest.raises(dcp.CheckpointException) as error:
            run_in(queue, request)
        if launch.rank == 0:
            assert list(error.value.failures) == list(range(launch.size))
            assert str(gone) in str(error.value.failures[0][0])
        run_in(queue, request_for(launch, path, seed=8))
    assert_loads(launch, path, seed=8)


def case_files_have_megatrons_names_and_contents(launch: Launch) -> None:
    for threads, hint in LAYOUTS:
        ours, theirs = (directory(launch, f"{whose} {threads} {hint}") for whose in ("o", "t"))
        request_for(launch, theirs, 1, save_strategy(threads, hint)).execute_sync()
        with our_writer():
            request_for(launch, ours, 1, save_strategy(threads, hint)).execute_sync()
        assert_same_files(launch, ours, theirs, threads // 2 if hint else threads)


# --- nvidia-resiliency-ext ------------------------------------------------------------------------


def case_four_nvrx_saves_of_one_structure_through_our_writer_and_queue_reuse_its_plan(
    launch: Launch,
) -> None:
    before = children()
    with installed():
        saver = nvrx("state_dict_saver")
        saver.init_checkpoint_metadata_cache()
        queue = nvrx("core").AsyncCallsQueue()
        statuses = []
        for seed in range(1, 5):
            path = launch.path(str(seed))
            writer = nvrx("filesystem_async").FileSystemWriterAsync(path, thread_count=2)
            run_in(queue, nvrx_request(launch, writer, seed, enable_cache=True))
            statuses.append(saver.get_metadata_caching_status()[0])
            assert_is_ours(launch, path)
            assert_loads_by_torch(launch, path, seed)
        queue.close()
    assert statuses == [False, True, True, True]
    # A manager process of an earlier case may have ended.
    assert children() <= before


def save_by_nvrxs_queue(launch: Launch, persistent: bool) -> None:
    from torch_ckpt import nvrx as ours

    queue = nvrx("core").AsyncCallsQueue(persistent=persistent)
    for seed in (1, 2):
        path = launch.path(str(seed))
        writer = ours.FileSystemWriterAsync(path, thread_count=2)
        run_in(queue, nvrx_request(launch, writer, seed))
        assert_is_ours(launch, path)
        assert_loads_by_torch(launch, path, seed)
    queue.close()


def case_our_writer_writes_in_a_process_that_nvrx_forks(launch: Launch) -> None:
    save_by_nvrxs_queue(launch, FORKED)


@on(2, only=True)
def case_our_writer_writes_in_a_process_that_nvrx_spawns(launch: Launch) -> None:
    save_by_nvrxs_queue(launch, SPAWNED)


def case_an_installed_writer_with_transforms_is_nvrxs_own(launch: Launch) -> None:
    path = directory(launch)
    with installed():
        writer = nvrx("filesystem_async").FileSystemWriterAsync(path, _extensions=[Flip()])
        assert_saves_flipped(launch, path, writer, nvrx)


def case_files_have_nvrxs_names_and_contents(launch: Launch) -> None:
    from torch_ckpt import nvrx as ours

    for threads, hint in LAYOUTS:
        paths = []
        for whose in (ours, nvrx("filesystem_async")):
            path = launch.path(f"{whose.__name__} {threads} {hint}")
            writer = whose.FileSystemWriterAsync(path, thread_count=threads, separation_hint=hint)
            nvrx_request(launch, writer, seed=1).execute_sync()
            paths.append(path)
        assert_same_files(launch, *paths, threads // 2 if hint else threads)


def case_the_background_torch_save_writes_the_bytes_of_torch_save(launch: Launch) -> None:
    path = directory(launch) / f"{launch.rank}.pt"
    state = {"t": random_tensor((100, 30), torch.float32, seed=launch.rank), "step": 3}
    with installed():
        checkpoint = nvrx("torch_ckpt").TorchAsyncCheckpoint()
        checkpoint.async_save(state, path)
        checkpoint.finalize_async_save(blocking=True, no_dist=True, terminate=True)
    assert_equal(torch.load(path), state)


def at_end() -> None:
    for queue in _spawned:
        queue.close()


test_on_ranks = on_ranks(globals(), (1, 2, 4), why_skipped)
