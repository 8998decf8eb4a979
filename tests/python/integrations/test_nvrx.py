"""nvidia-resiliency-ext's interfaces: rules of its cache, its asynchronous torch.save, its
queues."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tests.async_saves import (
    DecentralizedPlanner,
    assert_priorities,
    finish,
    priorities_of_writers,
    small_state,
    state_of,
)
from tests.forked import forked
from tests.gates import LIMIT, Gate
from tests.support import StateDict, assert_equal, cause_of, data_files, emptied, load
from torch_ckpt import megatron, nvrx
from torch_ckpt.nvrx import (
    AsyncCallsQueue,
    AsyncRequest,
    CachedMetadataFileSystemReader,
    CheckpointMetadataCache,
    FileSystemWriterAsync,
    TorchAsyncCheckpoint,
    abort_nvrx_checkpoint,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


def plan(name: str) -> SavePlan:
    return SavePlan([], storage_data=_StoragePrefix(name))


# --- the cache's rules ---------------------------------------------------------------------------


def test_two_equal_plans_make_the_cache_valid_and_another_one_invalidates_it() -> None:
    cache = CheckpointMetadataCache()
    assert cache.get_cache_metadata() == (None, None, False, None)
    status = [cache.get_metadata_caching_status()]
    for name in ("a", "a", "a", "b", "b"):
        cache.set_cache_metadata(plan(name), plan(name), False)
        status.append(cache.get_metadata_caching_status())
    assert status == [(valid, False) for valid in (False, False, True, True, False, True)]
    assert cache.get_cache_metadata() == (plan("b"), plan("b"), True, None)


@pytest.mark.parametrize("all_ranks", [True, False])
def test_the_result_of_all_ranks_overrides_this_ranks_comparison(all_ranks: bool) -> None:
    cache = CheckpointMetadataCache()
    cache.set_cache_metadata(plan("a"), plan("a"), False)
    cache.set_cache_metadata(plan("a"), plan("a"), False, all_ranks)
    assert cache.get_metadata_caching_status() == (all_ranks, False)


def test_loaded_plans_of_all_ranks_are_dropped_once_a_rank_has_another_plan() -> None:
    cache = CheckpointMetadataCache()
    metadata = Metadata({})
    metadata.all_local_plans = [plan("a")]  # type: ignore[attr-defined]
    cache.set_cached_global_metadata(metadata)
    assert cache.get_cache_metadata()[3] == [plan("a")]
    cache.set_cache_metadata(plan("a"), plan("a"), True)
    assert cache.get_metadata_caching_status() == (False, True)
    assert cache.get_cache_metadata()[3] == [plan("a")]
    cache.set_cache_metadata(plan("b"), plan("b"), False)
    assert cache.get_metadata_caching_status() == (False, False)
    assert cache.get_cache_metadata()[3] is None
    cache.set_cached_global_metadata(metadata)
    assert cache.get_cache_metadata()[3] == [plan("a")]
    cache.set_cached_global_metadata(Metadata({}))
    assert cache.get_cache_metadata()[3] is None


KEPT, MADE = Metadata({}), Metadata({})


@pytest.mark.parametrize(
    ("rank", "as_cached", "as_loaded", "made", "expected"),
    [
        (0, True, False, None, KEPT),
        (0, False, True, None, KEPT),
        (0, False, False, None, None),
        (1, True, False, None, None),
        (0, True, False, MADE, MADE),
        (1, False, False, MADE, MADE),
    ],
)
def test_the_coordinator_gets_the_kept_metadata_if_it_is_valid(
    rank: int, as_cached: bool, as_loaded: bool, made: Any, expected: Any
) -> None:
    cache = CheckpointMetadataCache()
    cache.set_cached_global_metadata(KEPT)
    cache.set_cache_metadata(plan("a"), plan("a"), as_loaded, as_cached)
    finalizing: Any = ("writer", made, "wrapper")
    writer, metadata, wrapper = cache.prepare_save_state_dict_ret(rank, 0, finalizing)
    assert (writer, wrapper) == ("writer", "wrapper")
    assert metadata is expected
    assert cache.cached_global_metadata is (made or KEPT)


@forked
def test_the_process_has_one_cache() -> None:
    assert nvrx.get_metadata_caching_status() is None
    nvrx.init_checkpoint_metadata_cache()
    made = nvrx._checkpoint_metadata_cache
    assert made is not None
    assert nvrx.get_metadata_caching_status() == (False, False)
    nvrx.init_checkpoint_metadata_cache(KEPT)
    assert nvrx._checkpoint_metadata_cache is made
    assert made.cached_global_metadata is KEPT


# --- saves with the cache ------------------------------------------------------------------------


class Counting(DecentralizedPlanner):
    """Counts the global plans of a class."""

    made = 0

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        type(self).made += 1
        return super().create_global_plan(all_plans)


@pytest.fixture(autouse=True)
def _no_plans_yet() -> None:
    Counting.made = 0


def save(state: StateDict, path: Path, planner: Any = None, **options: Any) -> None:
    finalizing = save_state_dict_async_plan(
        state, FileSystemWriterAsync(path), planner=planner, **options
    )
    finish(finalizing)
    loaded = emptied(state)
    load(loaded, path)
    assert_equal(loaded, state)


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DecentralizedPlanner])
def test_saves_with_the_cache_have_their_own_values(tmp_path: Path, planner: Any) -> None:
    cache = CheckpointMetadataCache()
    status = []
    for seed in range(4):
        save(state_of(seed), tmp_path / "c", planner(), enable_cache=True, metadata_cache=cache)
        status.append(cache.get_metadata_caching_status()[0])
    assert status == [False, True, True, True]


@forked
def test_the_processs_cache_is_the_default(tmp_path: Path) -> None:
    nvrx.init_checkpoint_metadata_cache()
    for seed in range(4):
        save(small_state(seed), tmp_path / "c", Counting(), enable_cache=True)
    assert nvrx.get_metadata_caching_status() == (True, False)
    assert Counting.made == 2


@pytest.mark.parametrize("options", [{}, {"enable_cache": True}], ids=["not enabled", "no cache"])
@forked
def test_without_a_cache_every_save_is_planned(tmp_path: Path, options: StateDict) -> None:
    if not options:
        nvrx.init_checkpoint_metadata_cache()
    for seed in range(3):
        save(small_state(seed), tmp_path / "c", Counting(), **options)
    assert Counting.made == 3


@forked
def test_a_restarted_run_saves_by_the_loaded_plans(tmp_path: Path) -> None:
    save(small_state(), tmp_path / "before", Counting())
    nvrx.init_checkpoint_metadata_cache(
        CachedMetadataFileSystemReader(tmp_path / "before").read_metadata()
    )
    for seed in range(1, 4):
        save(small_state(seed), tmp_path / f"c{seed}", Counting(), enable_cache=True)
    assert Counting.made == 1
    # The plans of two saves have been equal by now.
    assert nvrx.get_metadata_caching_status() == (True, False)


def test_a_state_that_changes_after_a_restart_is_planned_again(tmp_path: Path) -> None:
    save(small_state(), tmp_path / "before", Counting())
    cache = CheckpointMetadataCache()
    cache.set_cached_global_metadata(
        CachedMetadataFileSystemReader(tmp_path / "before").read_metadata()
    )
    for seed in range(1, 5):
        state = small_state(seed, count=5)
        save(state, tmp_path / f"c{seed}", Counting(), enable_cache=True, metadata_cache=cache)
    assert Counting.made == 1 + 2


# --- writer --------------------------------------------------------------------------------------


def test_the_writer_accepts_its_options(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(
        tmp_path / "c",
        separation_hint="optim",
        thread_count=2,
        open_file=open,
        is_multiproc_io=True,
        use_cached_data_structure=True,
        use_cpu_shm_for_gpu_tensors=True,
    )
    finish(save_state_dict_async_plan(small_state(), writer))
    assert [file.name for file in data_files(tmp_path / "c")] == ["__0_0.distcp"]
    FileSystemWriterAsync.cleanup_tensor_caches()


@pytest.mark.parametrize(
    "before", [[], [False], [False, open]], ids=["four arguments", "0.4", "0.7"]
)
@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
def test_the_function_of_processes_accepts_their_arguments(
    tmp_path: Path, before: list[Any], by_name: bool
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = save_state_dict_async_plan(small_state(), writer)
    _, preload, (rank, _, results) = writer.get_save_function_and_args()
    assert preload is not None
    rest = {"rank": rank, "write_buckets": preload(), "global_results_queue": results}
    arguments = [] if by_name else list(rest.values())
    FileSystemWriterAsync.write_preloaded_data_multiproc(
        [writer.transforms], *before, *arguments, **(rest if by_name else {})
    )
    save_state_dict_async_finalize(*finalizing)
    loaded = emptied(small_state())
    load(loaded, tmp_path / "c")
    assert_equal(loaded, small_state())


def test_a_failure_is_raised_as_by_theirs(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    save_state_dict_async_plan(small_state(), writer)
    assert writer.results_queue is not None
    writer.results_queue.put(OSError(5, "Input/output error"))
    with pytest.raises(RuntimeError, match=r"^Worker failure: .*Input/output error"):
        writer.retrieve_write_results()


# --- queues --------------------------------------------------------------------------------------


def assert_priorities_of_queue(calls_queue: Any, path: Path, gate: Gate, expected: int) -> None:
    """Checks the priorities of the threads that write a save of a queue."""
    finalizing = save_state_dict_async_plan(small_state(), FileSystemWriterAsync(path))
    function, preload, arguments = finalizing[0].get_save_function_and_args()
    finalize = [lambda: save_state_dict_async_finalize(*finalizing)]
    with priorities_of_writers(gate) as priorities:
        calls_queue.schedule_async_request(
            AsyncRequest(function, arguments, finalize, preload_fn=preload)
        )
        gate.open()
        calls_queue.close()
    assert_priorities(priorities, expected, is_idle=False)


@forked
def test_priorities_of_the_warm_up_are_used(tmp_path: Path, gate: Gate) -> None:
    calls_queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
    AsyncCallsQueue.warmup_persistent_caller(
        0, cpu_priority=3, io_priority=2, cpu_shm_mode=True, otel_bootstrap=None
    )
    # The warm-up is separate from Megatron's.
    assert megatron.AsyncCallsQueue._default_background is None
    assert_priorities_of_queue(calls_queue, tmp_path / "c", gate, 3)


@forked
def test_priorities_of_a_queue_are_its_own(tmp_path: Path, gate: Gate) -> None:
    AsyncCallsQueue.warmup_persistent_caller(0, cpu_priority=3)
    calls_queue = AsyncCallsQueue(cpu_priority=5, io_priority=1, sigterm_timeout=3, is_daemon=False)
    assert_priorities_of_queue(calls_queue, tmp_path / "c", gate, 5)


def test_instances_are_the_referenced_queues_of_this_kind() -> None:
    before = AsyncCallsQueue.get_instances()
    mine = AsyncCallsQueue()
    of_megatron = megatron.AsyncCallsQueue()
    now = AsyncCallsQueue.get_instances()
    assert mine in now
    assert of_megatron not in now
    assert len(now) == len(before) + 1


def test_all_queues_are_aborted_together(gate: Gate) -> None:
    queues = [AsyncCallsQueue() for _ in range(2)]
    for one in queues:
        one.schedule_async_request(AsyncRequest(gate, (), [lambda: pytest.fail("finalized")]))
    abort_nvrx_checkpoint()
    assert [one.get_num_unfinalized_calls() for one in queues] == [0, 0]
    gate.open()
    for one in queues:
        assert one.maybe_finalize_async_calls(blocking=True) == []


# --- torch.save ----------------------------------------------------------------------------------


def test_an_asynchronous_torch_save_saves_a_snapshot(tmp_path: Path) -> None:
    checkpoint = TorchAsyncCheckpoint()
    state = state_of()
    checkpoint.async_save(state, tmp_path / "file.pt")
    with torch.no_grad():
        state["model"]["weight"].zero_()
    state["optimizer"]["step"] = -1
    state["model"].clear()
    checkpoint.finalize_async_save(blocking=True)
    checkpoint.close()
    assert_equal(torch.load(tmp_path / "file.pt"), state_of())


@pytest.mark.parametrize(
    "state", [torch.arange(5), [torch.ones(2), "text"], 7], ids=["t", "l", "i"]
)
def test_any_object_can_be_saved(tmp_path: Path, state: Any) -> None:
    checkpoint = TorchAsyncCheckpoint(persistent_queue=False)
    checkpoint.async_save(state, tmp_path / "file.pt")
    checkpoint.close()
    assert_equal(torch.load(tmp_path / "file.pt"), state)


def test_arguments_are_those_of_torch_save() -> None:
    checkpoint = TorchAsyncCheckpoint()
    old, new = io.BytesIO(), io.BytesIO()
    tensor = torch.ones(3)
    checkpoint.async_save({"t": tensor}, old, _use_new_zipfile_serialization=False)
    checkpoint.async_save({"t": tensor}, f=new)
    checkpoint.close()
    assert new.getvalue().startswith(b"PK")
    assert not old.getvalue().startswith(b"PK")


def test_several_saves_are_finalized_in_order(tmp_path: Path) -> None:
    checkpoint = TorchAsyncCheckpoint()
    for number in range(3):
        checkpoint.async_save({"n": number}, tmp_path / "file.pt")
    checkpoint.finalize_async_save(blocking=True, terminate=True)
    assert torch.load(tmp_path / "file.pt") == {"n": 2}


def test_the_error_of_a_torch_save_is_raised_when_it_is_finalized(tmp_path: Path) -> None:
    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"n": 1}, tmp_path / "not there" / "file.pt")
    with pytest.raises(CheckpointException) as error:
        checkpoint.finalize_async_save(blocking=True)
    assert "not there" in str(cause_of(error.value))


def test_a_close_with_abort_does_not_wait(gate: Gate) -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            gate()
            return super().write(data)

    checkpoint = TorchAsyncCheckpoint()
    checkpoint.async_save({"n": 1}, Slow())
    gate.wait()
    done = threading.Event()

    def close() -> None:
        checkpoint.close(abort=True)
        done.set()

    threading.Thread(target=close, daemon=True).start()
    assert done.wait(LIMIT)
    gate.open()


def test_the_synchronous_save_is_torchs() -> None:
    assert TorchAsyncCheckpoint().save is torch.save
