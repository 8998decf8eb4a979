"""What Megatron-core and nvidia-resiliency-ext do with our classes; run under torchrun by
test_peers.py.

As cases.py. "Ours" is what ``install()`` puts into their modules, or single classes of ours that a
case puts there; "theirs" is the released code of these packages.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import no_cuda
from tests.distributed import cases
from tests.distributed.cases import Launch, StateDict
from tests.support import (
    assert_equal,
    assert_tables_match,
    data_files,
    files_limited_to,
    random_tensor,
)
from torch_ckpt.megatron import install, uninstall
from torch_ckpt.metadata import checksum_tables, read_metadata

# Their code takes a GPU for granted; it is imported within the cases. Here and not below, since the
# processes that it spawns import this module again, under the second name. Never where pytest
# imports it: other tests need torch.cuda as it is.
if __name__ in ("__main__", "__mp_main__"):
    no_cuda.pretend()

#: Their save strategy's own numbers of files, and a hint that some names begin with.
LAYOUTS = [(1, None), (2, None), (4, None), (2, "optimizer"), (4, "optimizer")]

#: Of their queue: a process for each save, or one for all of them.
FORKED, SPAWNED = False, True


def strategies(module: str) -> Any:
    return import_module(f"megatron.core.dist_checkpointing.strategies.{module}")


def nvrx(module: str) -> Any:
    return import_module(f"nvidia_resiliency_ext.checkpointing.async_ckpt.{module}")


@contextmanager
def installed(**options: Any) -> Iterator[None]:
    assert install(**options)
    try:
        yield
    finally:
        uninstall()


@contextmanager
def instead(module: Any, name: str, ours: Any) -> Iterator[None]:
    """A single name that is ours."""
    with mock.patch.object(module, name, ours):
        yield


# --- states ---------------------------------------------------------------------------------------


def megatron_state(launch: Launch, seed: int) -> StateDict:
    """A state of ShardedTensors and ShardedObjects; every value depends on the seed."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank, size = launch.rank, launch.size

    def tensor(name: str, dtype: torch.dtype, *shape: int, of: int = rank) -> torch.Tensor:
        return random_tensor(shape, dtype, seed=seed * 1000 + sum(name.encode()) + of)

    def sharded(
        name: str, dtype: torch.dtype, *shape: int, axis: int = 0, layers: int = 0
    ) -> ShardedTensor:
        data = tensor(name, dtype, *shape)
        offset = (axis, rank, size)
        return ShardedTensor.from_rank_offsets(name, data, offset, prepend_axis_num=layers)

    replicated = tensor("model.replicated", torch.float32, 5, 3, of=0)
    view = tensor("model.view", torch.float32, 40, 30)[10:20]
    return {
        "rows": sharded("model.rows", torch.float32, 6, 5),
        "columns": sharded("model.columns", torch.bfloat16, 4, 7, axis=1),
        "layer": sharded("model.layers.weight", torch.float32, 3, 4, layers=1),
        "large": sharded("optimizer.state.exp_avg.rows", torch.float32, 300, 701),
        "small": sharded("optimizer.state.step", torch.int64, 1),
        "view": ShardedTensor.from_rank_offsets("model.view", view, (0, rank, size)),
        "replicated": ShardedTensor.from_rank_offsets(
            "model.replicated", replicated, replica_id=rank
        ),
        "object": ShardedObject("model.extra", {"seed": seed, "rank": rank}, (size,), (rank,)),
        "random state": ShardedObject("rng", [view[0].clone(), seed], (size,), (rank,)),
        "iteration": seed,
    }


def plain(state: StateDict) -> StateDict:
    """What Megatron's load returns for a state."""
    return {name: getattr(value, "data", value) for name, value in state.items()}


def emptied(state: StateDict) -> StateDict:
    """The same, to be loaded into."""
    from megatron.core.dist_checkpointing import ShardedTensor

    for value in state.values():
        if isinstance(value, ShardedTensor):
            value.data = torch.zeros_like(value.data)
        elif hasattr(value, "data"):
            value.data = None
    return {name: value for name, value in state.items() if name != "iteration"}


def nvrx_state(launch: Launch, seed: int) -> StateDict:
    """A state of DTensors, of tensors that all ranks have, and of objects."""
    state: StateDict = dict(cases.dtensors(cases.mesh_1d(launch)))
    for tensor in state.values():
        tensor.to_local().mul_(seed)
    state["optimizer.of all ranks"] = random_tensor((50, 30), torch.float32, seed=seed)
    state["numbers"] = {"seed": seed, "list": [1, 2, seed]}
    return state


# --- saves and loads, as Megatron's training has them ---------------------------------------------


def directory(launch: Launch, *names: str) -> Path:
    """An empty one; Megatron makes it before it saves."""
    path = launch.path(*names)
    if launch.rank == 0:
        path.mkdir(parents=True)
    dist.barrier()
    return path


def request_for(launch: Launch, path: Path, seed: int, strategy: Any = None) -> Any:
    """Megatron-core's own request to save a state."""
    from megatron.core import dist_checkpointing

    return dist_checkpointing.save(
        megatron_state(launch, seed), str(path), strategy, async_sharded_save=True
    )


def save_through(queue: Any, request: Any) -> None:
    """To the end: by the queue, which then is closed."""
    queue.schedule_async_request(request)
    assert queue.get_num_unfinalized_calls() == 1
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()


def save_strategy(threads: int = 2, hint: str | None = None, cached: bool = False) -> Any:
    return strategies("torch").TorchDistSaveShardedStrategy(
        "torch_dist", 1, thread_count=threads, separation_hint=hint, cached_metadata=cached
    )


def assert_loads(launch: Launch, path: Path, seed: int) -> None:
    """Fails unless Megatron-core's load finds the state that was saved."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(emptied(megatron_state(launch, seed)), str(path))
    expected = plain(megatron_state(launch, seed))
    for name, value in expected.items():
        assert_equal(loaded[name], value, name)


def assert_is_ours(launch: Launch, path: Path) -> None:
    """Fails unless our writer has written all of it: nobody else's keeps checksums."""
    if launch.rank == 0:
        assert_tables_match(path, read_metadata(path))


def nvrx_request(launch: Launch, writer: Any, seed: int, **options: Any) -> Any:
    """The request that nvrx's documentation shows, by the functions that are in its modules."""
    saver = nvrx("state_dict_saver")
    planner = dcp.DefaultSavePlanner()
    saved = saver.save_state_dict_async_plan(
        nvrx_state(launch, seed), writer, None, 0, planner=planner, **options
    )
    save, preload, arguments = writer.get_save_function_and_args()
    finalize = partial(saver.save_state_dict_async_finalize, *saved)
    return nvrx("core").AsyncRequest(save, arguments, [finalize], preload_fn=preload)


def assert_loads_by_torch(launch: Launch, path: Path, seed: int) -> None:
    loaded = nvrx_state(launch, 0)
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(path))
    expected = nvrx_state(launch, seed)
    for name, value in expected.items():
        if hasattr(value, "to_local"):
            assert_equal(loaded[name].to_local(), value.to_local(), name)
        else:
            assert_equal(loaded[name], value, name)


def children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


def records(path: Path) -> dict[Any, tuple[str, bytes]]:
    """Of every item: the side that its file is on, and its bytes."""
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
    """Fails unless all data files have the same names, and the same bytes.

    With several buckets on a side, ours distributes items by all that it writes and theirs by the
    tensors alone: then every item has the same bytes on the same side.
    """
    if launch.rank != 0:
        return
    assert [file.name for file in data_files(ours)] == [file.name for file in data_files(theirs)]
    if buckets == 1:
        for one, other in zip(data_files(ours), data_files(theirs), strict=True):
            assert one.read_bytes() == other.read_bytes(), one.name
    else:
        assert records(ours) == records(theirs)


# --- Megatron-core, with all of ours --------------------------------------------------------------


def case_megatron_saves_through_our_writer_and_queue(launch: Launch) -> None:
    path = directory(launch)
    before = children()
    with installed():
        request = request_for(launch, path, seed=1)
        queue = strategies("async_utils").AsyncCallsQueue()
        assert queue.schedule_async_request(request) == 0
        assert not (path / ".metadata").exists()
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        queue.close()
    # Neither a worker nor a manager of queues.
    assert children() == before
    assert_is_ours(launch, path)
    assert (path / "metadata.json").exists()


def case_what_megatron_saves_through_ours_is_loaded_by_ours_by_theirs_and_by_torch(
    launch: Launch,
) -> None:
    path = directory(launch)
    with installed():
        save_through(strategies("async_utils").AsyncCallsQueue(), request_for(launch, path, 2))
        assert_loads(launch, path, seed=2)
    assert_loads(launch, path, seed=2)
    assert_rows_load_by_torch(launch, path, seed=2)


def assert_rows_load_by_torch(launch: Launch, path: Path, seed: int) -> None:
    """Whole tensors of all ranks, and this rank's object."""
    key = f"model.extra/shard_{launch.rank}_{launch.size}"
    state: StateDict = {"model.rows": torch.zeros(6 * launch.size, 5), key: None}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    expected = megatron_state(launch, seed)
    rows = state["model.rows"][6 * launch.rank : 6 * (launch.rank + 1)]
    assert_equal(rows, expected["rows"].data)
    assert_equal(state[key], [expected["object"].data])


def case_megatron_saves_in_step_through_ours(launch: Launch) -> None:
    """Its synchronous save, which executes the request in place."""
    from megatron.core import dist_checkpointing

    path = directory(launch)
    with installed():
        dist_checkpointing.save(megatron_state(launch, 3), str(path))
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed=3)


def case_megatron_saves_twice_before_it_finalizes(launch: Launch) -> None:
    paths = [directory(launch, str(number)) for number in range(2)]
    with installed():
        queue = strategies("async_utils").AsyncCallsQueue()
        for seed, path in enumerate(paths):
            queue.schedule_async_request(request_for(launch, path, seed))
        assert queue.get_num_unfinalized_calls() == 2
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
        queue.close()
    for seed, path in enumerate(paths):
        assert_loads(launch, path, seed)


def case_polls_without_waiting_end_every_save_at_the_same_one(launch: Launch) -> None:
    """As a training loop polls, once in each step, with a collective of its own in between."""
    path = directory(launch)
    with installed():
        queue = strategies("async_utils").AsyncCallsQueue()
        queue.schedule_async_request(request_for(launch, path, seed=4))
        for _step in itertools.count():
            finalized = queue.maybe_finalize_async_calls(blocking=False)
            everywhere: list[Any] = [None] * launch.size
            dist.all_gather_object(everywhere, finalized)
            assert everywhere == [finalized] * launch.size
            if finalized:
                break
        queue.close()
    assert_loads(launch, path, seed=4)


def case_four_megatron_saves_of_one_structure_are_planned_together_twice(launch: Launch) -> None:
    """The second is compared with the first, and from then on nothing is exchanged."""
    planner = strategies("torch").MCoreSavePlanner
    planned = []

    def create_global_plan(self: Any, plans: Any) -> Any:
        planned.append(len(plans))
        return dcp.DefaultSavePlanner.create_global_plan(self, plans)

    with installed(), instead(planner, "create_global_plan", create_global_plan):
        strategy = save_strategy(cached=True)
        queue = strategies("async_utils").AsyncCallsQueue()
        reused = []
        for seed in range(4):
            path = directory(launch, str(seed))
            queue.schedule_async_request(request_for(launch, path, seed, strategy))
            queue.maybe_finalize_async_calls(blocking=True)
            reused.append(strategy.validated_cache_reuse)
            assert_is_ours(launch, path)
            assert_loads(launch, path, seed)
        queue.close()
    assert planned == ([launch.size] * 2 if launch.rank == 0 else [])
    assert reused == [False, True, True, True]


def case_a_structure_that_changes_behind_megatrons_cache_fails_the_save(launch: Launch) -> None:
    from megatron.core.dist_checkpointing import ShardedTensor

    with installed():
        strategy = save_strategy(cached=True)
        queue = strategies("async_utils").AsyncCallsQueue()
        for number in range(2):
            path = directory(launch, str(number))
            queue.schedule_async_request(request_for(launch, path, 1, strategy))
            queue.maybe_finalize_async_calls(blocking=True)
        path = directory(launch, "changed")
        data = torch.zeros(3, 2)
        state = {"new": ShardedTensor.from_rank_offsets("new", data, (0, launch.rank, launch.size))}
        queue.schedule_async_request(strategy.async_save(state, path))
        error = failure_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        queue.close()
    if launch.rank == 0:
        assert list(error.failures) == list(range(launch.size))
        assert "the state dict is not the one of the cached plan" in str(error.failures[0][0])
    assert not (path / ".metadata").exists()


def case_a_run_that_resumes_reuses_the_metadata_that_it_has_loaded(launch: Launch) -> None:
    """Its training does this after a restart: the plans in the metadata are those of its state."""
    from megatron.core import dist_checkpointing

    before, after = directory(launch, "before"), directory(launch, "after")
    with installed():
        queue = strategies("async_utils").AsyncCallsQueue()
        queue.schedule_async_request(request_for(launch, before, 5, save_strategy(cached=True)))
        queue.maybe_finalize_async_calls(blocking=True)
        loading = strategies("torch").TorchDistLoadShardedStrategy()
        dist_checkpointing.load(emptied(megatron_state(launch, 5)), str(before), loading)
        saving = save_strategy(cached=True)
        saving.cached_global_metadata = loading.cached_global_metadata
        queue.schedule_async_request(request_for(launch, after, 6, saving))
        queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        assert saving.validated_loaded_metadata_reuse
        assert_loads(launch, after, seed=6)
    assert_is_ours(launch, after)


def case_a_write_that_fails_on_one_rank_fails_megatrons_save_on_all(launch: Launch) -> None:
    path = directory(launch)
    with installed():
        queue = strategies("async_utils").AsyncCallsQueue()
        request = request_for(launch, path, seed=7)
        with files_limited_to(1000 if launch.rank == launch.size - 1 else 1 << 30):
            queue.schedule_async_request(request)
            error = failure_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        queue.close()
    assert_names_the_file(launch, error, path)
    assert not (path / ".metadata").exists()


def failure_of(work: Callable[[], object]) -> dcp.CheckpointException:
    """The CheckpointException that ``work`` must raise."""
    try:
        work()
    except dcp.CheckpointException as error:
        return error
    raise AssertionError("no CheckpointException was raised")


def assert_names_the_file(launch: Launch, error: dcp.CheckpointException, path: Path) -> None:
    """On the coordinator, where Megatron has the details."""
    last = launch.size - 1
    if launch.rank == 0:
        assert list(error.failures) == [last]
        assert f"{path}/__{last}_" in str(error.failures[last][0])


def case_options_of_install_reach_megatrons_saves_and_loads(launch: Launch) -> None:
    path = directory(launch)
    with installed(writer={"thread_count": 3}, reader={"thread_count": 1}):
        save_through(strategies("async_utils").AsyncCallsQueue(), request_for(launch, path, 8))
        assert len(list(path.glob(f"__{launch.rank}_*.distcp"))) == 3
        assert_loads(launch, path, seed=8)


def case_megatron_spreads_replicas_over_its_ranks_and_loads_them_so(launch: Launch) -> None:
    """Its fully parallel strategies: ranks write and read for each other."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    def state() -> StateDict:
        replicas = {f"t{i}": random_tensor((50, 3), torch.float32, seed=i) for i in range(8)}
        return {
            name: ShardedTensor.from_rank_offsets(name, data, replica_id=launch.rank)
            for name, data in replicas.items()
        }

    path = directory(launch)
    parallel = strategies("fully_parallel")
    with installed():
        saving = parallel.FullyParallelSaveStrategyWrapper(save_strategy(threads=1))
        request = dist_checkpointing.save(state(), str(path), saving, async_sharded_save=True)
        save_through(strategies("async_utils").AsyncCallsQueue(), request)
        assert [file.name for file in data_files(path)] == [
            f"__{rank}_0.distcp" for rank in range(launch.size)
        ]
        loading = parallel.FullyParallelLoadStrategyWrapper(
            strategies("torch").TorchDistLoadShardedStrategy(), exchange_algo="gather_object"
        )
        loaded = dist_checkpointing.load(emptied(state()), str(path), loading)
    for name, expected in plain(state()).items():
        assert_equal(loaded[name], expected, name)


def case_megatron_saves_over_an_older_checkpoint(launch: Launch) -> None:
    path = directory(launch)
    with installed():
        for seed in (1, 2):
            request = request_for(launch, path, seed)
            save_through(strategies("async_utils").AsyncCallsQueue(), request)
            assert_loads(launch, path, seed)
            dist.barrier()
    assert_holds_only_what_its_metadata_names(launch, path)


def assert_holds_only_what_its_metadata_names(launch: Launch, path: Path) -> None:
    if launch.rank == 0:
        places = read_metadata(path).storage_data.values()
        named = {info.relative_path for info in places}
        assert {file.name for file in data_files(path)} == named


def case_objects_of_megatrons_training_load_without_running_a_pickle(launch: Launch) -> None:
    """What it stores beside tensors, and types of its own, which it declares to be safe."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.rerun_state_machine import RerunMode

    def state(*values: object) -> StateDict:
        names = ("rng_state", "extra_state", "rerun_state_machine_state")
        return {
            name: ShardedObject(name, value, (launch.size,), (launch.rank,))
            for name, value in zip(names, values, strict=True)
        }

    rng = {
        "random_rng_state": random.Random(launch.rank).getstate(),
        "np_rng_state": numpy.random.RandomState(launch.rank).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(launch.rank).get_state(),
    }
    path = directory(launch)
    with installed():
        saved = state([rng], io.BytesIO(b"of the layer"), {"mode": RerunMode.VALIDATE_RESULTS})
        request = dist_checkpointing.save(saved, str(path), async_sharded_save=True)
        save_through(strategies("async_utils").AsyncCallsQueue(), request)
        loaded = dist_checkpointing.load(state(None, None, None), str(path))
    ((kind, keys, *rest),) = (of.pop("np_rng_state") for of in loaded["rng_state"])
    expected_kind, expected_keys, *expected_rest = rng.pop("np_rng_state")
    assert (kind, rest) == (expected_kind, expected_rest)
    assert numpy.array_equal(keys, expected_keys)
    assert_equal(loaded["rng_state"], [rng])
    assert loaded["extra_state"].getvalue() == b"of the layer"
    assert loaded["rerun_state_machine_state"] == {"mode": RerunMode.VALIDATE_RESULTS}


def case_megatron_loads_rows_as_columns(launch: Launch) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    path = directory(launch)
    whole = random_tensor((12, 8), torch.float32, seed=1)
    shards = [whole.chunk(launch.size, dim)[launch.rank].contiguous() for dim in (0, 1)]

    def state(dim: int, data: torch.Tensor) -> StateDict:
        place = (dim, launch.rank, launch.size)
        return {"t": ShardedTensor.from_rank_offsets("t", data, place)}

    with installed():
        request = dist_checkpointing.save(state(0, shards[0]), str(path), async_sharded_save=True)
        save_through(strategies("async_utils").AsyncCallsQueue(), request)
        loaded = dist_checkpointing.load(state(1, torch.zeros_like(shards[1])), str(path))
    assert_equal(loaded["t"], shards[1])


def case_megatron_loads_another_shape_where_that_is_allowed(launch: Launch) -> None:
    """As its vocabulary is padded for other numbers of ranks."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    path = directory(launch)

    def state(rows: int, value: float, **options: Any) -> StateDict:
        data = torch.full((rows, 3), value)
        return {"t": ShardedTensor.from_rank_offsets("t", data, replica_id=launch.rank, **options)}

    def loaded(rows: int) -> torch.Tensor:
        wanted = state(rows, 7.0, allow_shape_mismatch=True)
        tensor: torch.Tensor = dist_checkpointing.load(wanted, str(path))["t"]
        return tensor

    with installed():
        request = dist_checkpointing.save(state(6, 1.0), str(path), async_sharded_save=True)
        save_through(strategies("async_utils").AsyncCallsQueue(), request)
        larger, smaller = loaded(8), loaded(4)
    assert_equal(smaller, torch.full((4, 3), 1.0))
    assert_equal(larger[:6], torch.full((6, 3), 1.0))
    # What is not stored its own strategy fills, with either reader.
    assert_equal(larger, loaded(8))


def case_install_changes_only_what_it_tells_and_uninstall_changes_it_back(launch: Launch) -> None:
    for module in ("base", "torch"):
        strategies(module)

    def values() -> dict[str, object]:
        return {
            f"{title}.{name}": value
            for title, module in list(sys.modules.items())
            if title.partition(".")[0] in ("megatron", "nvidia_resiliency_ext")
            for name, value in vars(module).items()
        }

    # It imports what it looks into.
    with installed():
        pass
    before = values()
    told = {line.partition(" -> ")[0] for line in install()}
    after = values()
    assert {name for name, value in after.items() if value is not before[name]} == told
    package = "megatron.core.dist_checkpointing"
    assert f"{package}.strategies.torch.FileSystemWriterAsync" in told
    assert f"{package}.strategies.filesystem_async._get_write_results_queue" in told
    assert f"{package}.strategies.base.async_calls" in told
    assert f"{package}.serialization.AsyncRequest" in told
    uninstall()
    assert all(value is before[name] for name, value in values().items())


def case_uninstall_brings_back_megatrons_own(launch: Launch) -> None:
    with installed():
        pass
    path = directory(launch)
    save_through(strategies("async_utils").AsyncCallsQueue(), request_for(launch, path, 9))
    if launch.rank == 0:
        assert checksum_tables(read_metadata(path)) == {}
    with installed():
        assert_loads(launch, path, seed=9)


# --- Megatron-core, some of it ours ---------------------------------------------------------------


def our_writer() -> Any:
    """Within: Megatron-core's own strategy, plan, finalize and queues, and our writer."""
    from torch_ckpt import megatron

    return instead(strategies("torch"), "FileSystemWriterAsync", megatron.FileSystemWriterAsync)


def save_by_their_queue(launch: Launch, queue: Any) -> None:
    paths = [directory(launch, str(seed)) for seed in range(2)]
    for seed, path in enumerate(paths):
        with our_writer():
            queue.schedule_async_request(request_for(launch, path, seed))
        queue.maybe_finalize_async_calls(blocking=True)
    for seed, path in enumerate(paths):
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed)


# Starting a process that imports Megatron takes longer than all that it then does.
_spawned: list[Any] = []


def spawned_queue() -> Any:
    """Megatron-core's own queue with its process, the same for all cases."""
    if not _spawned:
        _spawned.append(strategies("async_utils").AsyncCallsQueue(persistent=SPAWNED))
    return _spawned[0]


def close_spawned_queue(launch: Launch) -> None:
    for queue in _spawned:
        queue.close()


def case_our_writer_writes_in_a_process_that_megatron_forks(launch: Launch) -> None:
    queue = strategies("async_utils").AsyncCallsQueue(persistent=FORKED)
    save_by_their_queue(launch, queue)
    queue.close()


def case_our_writer_writes_in_a_process_that_megatron_spawns(launch: Launch) -> None:
    save_by_their_queue(launch, spawned_queue())


def case_our_writer_writes_where_megatron_executes_its_request_at_once(launch: Launch) -> None:
    path = directory(launch)
    with our_writer():
        request_for(launch, path, seed=1).execute_sync()
    assert_is_ours(launch, path)
    assert_loads(launch, path, seed=1)


def case_our_writer_writes_over_an_older_checkpoint_by_megatrons_plan(launch: Launch) -> None:
    """Ranks then choose new names of files by themselves."""
    path = directory(launch)
    for seed in (1, 2):
        with our_writer():
            request_for(launch, path, seed).execute_sync()
        assert_loads(launch, path, seed)
        dist.barrier()
    assert_holds_only_what_its_metadata_names(launch, path)


def case_their_plan_is_made_once_for_four_saves_of_our_writer(launch: Launch) -> None:
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
    queue = strategies("async_utils").AsyncCallsQueue(persistent=FORKED)
    with our_writer():
        request = request_for(launch, path, seed=2)
    with files_limited_to(1000 if launch.rank == launch.size - 1 else 1 << 30):
        queue.schedule_async_request(request)
    error = failure_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
    assert_names_the_file(launch, error, path)
    assert not (path / ".metadata").exists()


def case_ranks_with_nothing_to_write_take_part_in_megatrons_save(launch: Launch) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    def state() -> StateDict:
        data = random_tensor((5, 3), torch.float32)
        return {"t": ShardedTensor.from_rank_offsets("t", data, replica_id=launch.rank)}

    def save_and_load(path: Path) -> None:
        request = dist_checkpointing.save(state(), str(path), async_sharded_save=True)
        assert (request.async_fn is None) == (launch.rank != 0)
        save_through(strategies("async_utils").AsyncCallsQueue(), request)
        loaded = dist_checkpointing.load(emptied(state()), str(path))
        assert_equal(loaded["t"], state()["t"].data)

    with installed():
        save_and_load(directory(launch, "all of ours"))
    with our_writer():
        save_and_load(directory(launch, "our writer"))


def case_megatrons_writer_writes_through_our_queue(launch: Launch) -> None:
    from torch_ckpt import megatron

    path = directory(launch)
    save_through(megatron.AsyncCallsQueue(), request_for(launch, path, seed=3))
    assert_loads(launch, path, seed=3)


def case_a_save_that_is_under_way_at_install_is_finalized(launch: Launch) -> None:
    path = directory(launch)
    queue = strategies("async_utils").AsyncCallsQueue(persistent=FORKED)
    queue.schedule_async_request(request_for(launch, path, seed=4))
    with installed():
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        assert_loads(launch, path, seed=4)


def case_a_queue_from_before_install_takes_requests_from_after(launch: Launch) -> None:
    path = directory(launch)
    queue = strategies("async_utils").AsyncCallsQueue(persistent=FORKED)
    with installed():
        save_through(queue, request_for(launch, path, seed=5))
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed=5)


def case_a_process_that_was_spawned_before_install_takes_requests_from_after(
    launch: Launch,
) -> None:
    """In that process nothing is installed."""
    path = directory(launch)
    queue = spawned_queue()
    with installed():
        queue.schedule_async_request(request_for(launch, path, seed=6))
        queue.maybe_finalize_async_calls(blocking=True)
        assert_is_ours(launch, path)
        assert_loads(launch, path, seed=6)


def case_a_write_that_fails_in_a_spawned_process_fails_megatrons_save(launch: Launch) -> None:
    """And the process takes the next one."""
    path, gone = directory(launch, "path"), directory(launch, "gone")
    queue = spawned_queue()
    with our_writer():
        request = request_for(launch, gone, seed=7)
        dist.barrier()
        if launch.rank == 0:
            shutil.rmtree(gone)
        dist.barrier()
        queue.schedule_async_request(request)
        error = failure_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
        if launch.rank == 0:
            assert list(error.failures) == list(range(launch.size))
            assert str(gone) in str(error.failures[0][0])
        queue.schedule_async_request(request_for(launch, path, seed=8))
        queue.maybe_finalize_async_calls(blocking=True)
    assert_loads(launch, path, seed=8)


def case_files_are_named_and_filled_as_megatrons(launch: Launch) -> None:
    for threads, hint in LAYOUTS:
        ours, theirs = (directory(launch, f"{whose} {threads} {hint}") for whose in ("o", "t"))
        request_for(launch, theirs, 1, save_strategy(threads, hint)).execute_sync()
        with our_writer():
            request_for(launch, ours, 1, save_strategy(threads, hint)).execute_sync()
        assert_same_files(launch, ours, theirs, threads // 2 if hint else threads)


# --- nvidia-resiliency-ext ------------------------------------------------------------------------


def case_nvrx_saves_through_our_writer_and_queue(launch: Launch) -> None:
    path = launch.path()
    before = children()
    with installed():
        writer = nvrx("filesystem_async").FileSystemWriterAsync(path, thread_count=2)
        save_through(nvrx("core").AsyncCallsQueue(), nvrx_request(launch, writer, seed=1))
    assert children() == before
    assert_is_ours(launch, path)
    assert_loads_by_torch(launch, path, seed=1)


def case_four_nvrx_saves_of_one_structure_reuse_its_plan(launch: Launch) -> None:
    with installed():
        saver = nvrx("state_dict_saver")
        saver.init_checkpoint_metadata_cache()
        queue = nvrx("core").AsyncCallsQueue()
        statuses = []
        for seed in range(1, 5):
            path = launch.path(str(seed))
            writer = nvrx("filesystem_async").FileSystemWriterAsync(path, thread_count=2)
            queue.schedule_async_request(nvrx_request(launch, writer, seed, enable_cache=True))
            queue.maybe_finalize_async_calls(blocking=True)
            statuses.append(saver.get_metadata_caching_status()[0])
            assert_is_ours(launch, path)
            assert_loads_by_torch(launch, path, seed)
        queue.close()
    assert statuses == [False, True, True, True]


def save_by_nvrxs_queue(launch: Launch, persistent: bool) -> None:
    from torch_ckpt import nvrx as ours

    queue = nvrx("core").AsyncCallsQueue(persistent=persistent)
    for seed in (1, 2):
        path = launch.path(str(seed))
        writer = ours.FileSystemWriterAsync(path, thread_count=2)
        queue.schedule_async_request(nvrx_request(launch, writer, seed))
        queue.maybe_finalize_async_calls(blocking=True)
        assert_is_ours(launch, path)
        assert_loads_by_torch(launch, path, seed)
    queue.close()


def case_our_writer_writes_in_a_process_that_nvrx_forks(launch: Launch) -> None:
    save_by_nvrxs_queue(launch, FORKED)


def case_our_writer_writes_in_a_process_that_nvrx_spawns(launch: Launch) -> None:
    save_by_nvrxs_queue(launch, SPAWNED)


def case_our_writer_writes_where_nvrx_executes_its_request_at_once(launch: Launch) -> None:
    from torch_ckpt import nvrx as ours

    path = launch.path()
    nvrx_request(launch, ours.FileSystemWriterAsync(path), seed=1).execute_sync()
    assert_is_ours(launch, path)
    assert_loads_by_torch(launch, path, seed=1)


def case_nvrxs_writer_writes_through_our_queue(launch: Launch) -> None:
    from torch_ckpt import nvrx as ours

    path = launch.path()
    writer = nvrx("filesystem_async").FileSystemWriterAsync(path, thread_count=2)
    save_through(ours.AsyncCallsQueue(), nvrx_request(launch, writer, seed=1))
    assert_loads_by_torch(launch, path, seed=1)


def case_files_are_named_and_filled_as_nvrxs(launch: Launch) -> None:
    from torch_ckpt import nvrx as ours

    for threads, hint in LAYOUTS:
        paths = []
        for whose in (ours, nvrx("filesystem_async")):
            path = launch.path(f"{whose.__name__} {threads} {hint}")
            writer = whose.FileSystemWriterAsync(path, thread_count=threads, separation_hint=hint)
            nvrx_request(launch, writer, seed=1).execute_sync()
            paths.append(path)
        assert_same_files(launch, *paths, threads // 2 if hint else threads)


def case_torch_save_in_the_background_has_the_bytes_of_torch_save(launch: Launch) -> None:
    path = directory(launch) / f"{launch.rank}.pt"
    state = {"t": random_tensor((100, 30), torch.float32, seed=launch.rank), "step": 3}
    with installed():
        checkpoint = nvrx("torch_ckpt").TorchAsyncCheckpoint()
        checkpoint.async_save(state, path)
        checkpoint.finalize_async_save(blocking=True, no_dist=True, terminate=True)
    assert_equal(torch.load(path), state)


# --- running them ---------------------------------------------------------------------------------

CASES: dict[str, Callable[[Launch], None]] = {
    name.removeprefix("case_"): function
    for name, function in list(globals().items())
    if name.startswith("case_")
}

#: Without Megatron-core; all others need it.
OF_NVRX = [name for name in CASES if "nvrx" in name or "torch_save" in name]

#: Those that start a process with torch in it for each rank; one number of ranks is enough.
SLOW = {name for name in CASES if "spawn" in name}


if __name__ == "__main__":
    cases.main(Path(sys.argv[2]), Path(sys.argv[1]), sys.argv[3:], CASES, close_spawned_queue)
