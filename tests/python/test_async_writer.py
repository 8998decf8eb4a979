"""Megatron's writer over the engine: right wherever its functions run, and its failures told."""

from __future__ import annotations

import errno
import gc
import io
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from tests.async_saves import (
    Caller,
    DecentralizedPlanner,
    Gate,
    Worker,
    eventually,
    here,
    in_fork,
    in_fork_after_preload,
    in_thread,
    is_committed,
    planned,
    request_of,
    save,
    save_to,
    small_state,
    state_of,
)
from tests.faults.disks import failing_disk
from tests.interposed import Order, Server
from tests.support import (
    StateDict,
    assert_equal,
    assert_tables_match,
    cause_of,
    data_files,
    emptied,
    files_limited_to,
    load,
    random_tensor,
    save_with,
    stock_load,
    stock_save,
)
from torch_ckpt import Background, CheckpointError, megatron, write_tasks
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    FileSystemWriterAsync,
    get_write_results_queue,
    save_state_dict_async_finalize,
)
from torch_ckpt.staged import NotBegun, Stage
from torch_ckpt.write_tasks import EngineWrite, WriteTask

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker()
    yield started
    started.close()


@pytest.fixture(params=["here", "fork after preload", "fork", "spawned worker"])
def caller(request: pytest.FixtureRequest) -> Caller:
    if request.param == "spawned worker":
        spawned: Worker = request.getfixturevalue("worker")
        return spawned
    return {"here": here, "fork after preload": in_fork_after_preload, "fork": in_fork}[
        request.param
    ]


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def held_after_staging(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Saves have staged, and do not end until it is opened."""
    copied = EngineWrite.sources_copied

    def copied_and_held(self: EngineWrite) -> None:
        copied(self)
        gate()

    monkeypatch.setattr(EngineWrite, "sources_copied", copied_and_held)
    return gate


def names_in(path: Path) -> list[str]:
    return [file.name for file in data_files(path)]


def assert_checkpoint(path: Path, state: StateDict) -> None:
    """Fails where the checkpoint is not the state's, to us or to stock torch."""
    for loader in (load, stock_load):
        loaded = emptied(state)
        loader(loaded, path)
        assert_equal(loaded, state)


def open_in_python(path: str, mode: str) -> Any:
    return open(path, mode)


def read_metadata(path: Path) -> Metadata:
    return torch_ckpt.FileSystemReader(path).read_metadata()


def failure_of(writer: FileSystemWriterAsync) -> BaseException:
    """What ``retrieve_write_results`` returns in the place of results."""
    outcome = writer.retrieve_write_results()
    assert isinstance(outcome, tuple), outcome
    assert isinstance(outcome[0], RuntimeError)
    return outcome[0]


# --- where it runs -------------------------------------------------------------------------------


def test_a_save_is_right_wherever_its_functions_run(tmp_path: Path, caller: Caller) -> None:
    save(state_of(), tmp_path / "c", caller, thread_count=2)
    assert_checkpoint(tmp_path / "c", state_of())
    assert_tables_match(tmp_path / "c", read_metadata(tmp_path / "c"))


def test_it_is_right_after_the_process_has_saved(tmp_path: Path, caller: Caller) -> None:
    # The engine's threads and memory are there by then, and are not in a child.
    torch_ckpt.save(state_of(1), tmp_path / "before")
    torch_ckpt.async_save(state_of(2), tmp_path / "in background").result()
    save(state_of(), tmp_path / "c", caller)
    save(state_of(3), tmp_path / "after")
    assert_checkpoint(tmp_path / "c", state_of())
    assert_checkpoint(tmp_path / "after", state_of(3))


def test_it_replaces_a_checkpoint(tmp_path: Path, caller: Caller) -> None:
    for seed in (1, 2):
        save(state_of(seed), tmp_path / "c", caller, thread_count=2)
    assert_checkpoint(tmp_path / "c", state_of(2))
    # One for each file of the second save: those of the first one have gone.
    assert len(names_in(tmp_path / "c")) == 2


@pytest.mark.filterwarnings("ignore:an unused file could not be removed")
def test_errors_of_the_engine_arrive_from_wherever_it_runs(tmp_path: Path, caller: Caller) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=1)
    finalizing = planned(small_state(), writer)
    # Where the file is to be, nothing else may be.
    (tmp_path / "c" / "__0_0.distcp").mkdir()
    caller(writer)
    with pytest.raises(CheckpointException) as error:
        save_state_dict_async_finalize(*finalizing)
    assert "__0_0.distcp" in str(cause_of(error.value))
    assert not is_committed(tmp_path / "c")


@pytest.mark.parametrize("dumps", [pickle.dumps, ForkingPickler.dumps], ids=["pickle", "forking"])
def test_what_is_to_run_elsewhere_can_be_pickled(
    tmp_path: Path, dumps: Callable[[Any], Any]
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", progress=print)
    finalizing = planned(state_of(), writer)
    function, preload, arguments = pickle.loads(dumps(writer.get_save_function_and_args()))
    arguments[1] = preload()
    function(*arguments)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", state_of())


def test_the_save_function_stages_what_was_not_preloaded(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state_of(), writer)
    function, _preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    function(*arguments)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", state_of())


@pytest.mark.parametrize("preloaded", [True, False])
def test_the_tasks_may_be_given_in_a_list(tmp_path: Path, preloaded: bool) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(small_state(), writer)
    function, _, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert writer.write_buckets is not None
    arguments[1] = writer.write_buckets
    if preloaded:
        arguments[1] = FileSystemWriterAsync.preload_tensors(writer.write_buckets, True)
    function(*arguments)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", small_state())


def test_an_empty_list_of_tasks_gives_no_results(tmp_path: Path) -> None:
    got: queue.Queue[Any] = queue.Queue()
    staged = FileSystemWriterAsync.preload_tensors([], True)
    FileSystemWriterAsync.write_preloaded_data_multithread([], False, 0, staged, got)
    assert got.get_nowait() == {}


def test_tasks_of_several_writers_are_refused(tmp_path: Path) -> None:
    tasks = []
    for name in "ab":
        writer = FileSystemWriterAsync(tmp_path / name)
        planned(small_state(), writer)
        tasks += writer.write_buckets or []
    with pytest.raises(ValueError, match="write_buckets of one writer are one task"):
        FileSystemWriterAsync.preload_tensors(tasks)


@pytest.mark.parametrize("options", [{}, {"open_file": open_in_python}])
def test_what_is_staged_twice_is_staged_once(tmp_path: Path, options: StateDict) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", **options)
    finalizing = planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    first = preload()
    arguments[1] = preload()
    assert arguments[1] is first
    function(*arguments)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", small_state())


def test_a_save_function_that_runs_twice_writes_once(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", open_file=open_in_python)
    finalizing = planned(small_state(), writer)
    here(writer)
    here(writer)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", small_state())


def test_what_was_staged_before_is_cancelled_by_who_stages_it_again(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    _, preload, _ = writer.get_save_function_and_args()
    assert preload is not None
    first = preload()
    with Stage() as stage:
        preload()
    assert stage.writes == [first]


def test_a_staged_task_that_is_sent_elsewhere_is_told_to_have_no_values(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    preload()
    arguments[1] = pickle.loads(pickle.dumps(preload))()
    function(*arguments)
    assert "were let go of when they were staged" in str(failure_of(writer))


def test_what_another_process_has_written_is_not_removed_when_it_is_cancelled_there(
    tmp_path: Path,
) -> None:
    # Whether somebody has committed it is known here only.
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    arguments[1] = pickle.loads(pickle.dumps(preload))()
    function(*arguments)
    arguments[1].cancel()
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", small_state())


def test_a_task_that_cannot_be_staged_is_told_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError("no memory for copies")

    monkeypatch.setattr(WriteTask, "stage", fail)
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    function, _preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    function(*arguments)
    assert "Worker failure: no memory for copies" in str(failure_of(writer))


def test_results_go_to_the_queue_that_the_caller_gives(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=2)
    planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    own = multiprocessing.Manager().Queue()
    function(arguments[0], preload(), own)
    outcome = own.get(timeout=60)
    assert sorted(outcome) == [0, 1]
    assert all(isinstance(one, WriteResult) for results in outcome.values() for one in results)
    assert own.empty()


def test_a_child_that_was_forked_while_its_parent_writes_gets_the_outcome(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state_of(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert preload is not None
    arguments[1] = preload()
    held_after_staging.wait()
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    held_after_staging.open()
    child.join(60)
    assert child.exitcode == 0
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", state_of())


def test_a_forked_child_saves_while_a_save_of_its_parent_is_under_way(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "of the parent")
    finalizing = planned(state_of(1), writer)
    with in_thread(lambda: here(writer)):
        held_after_staging.wait()
        of_child = FileSystemWriterAsync(tmp_path / "of the child")
        its_finalizing = planned(state_of(2), of_child)

        def work() -> None:
            # There nobody would open it.
            held_after_staging.open()
            here(of_child)

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join(60)
        assert child.exitcode == 0
        save_state_dict_async_finalize(*its_finalizing)
        held_after_staging.open()
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "of the parent", state_of(1))
    assert_checkpoint(tmp_path / "of the child", state_of(2))


def test_the_queue_that_megatron_asks_for_is_one_for_all_modes() -> None:
    made = get_write_results_queue()
    assert get_write_results_queue(mp_mode="fork") is made
    assert pickle.loads(pickle.dumps(made)) is made
    assert megatron._results_queue is None


def test_two_threads_may_stage_at_once(tmp_path: Path) -> None:
    met = threading.Barrier(2)

    def work(seed: int) -> None:
        met.wait(60)
        save(state_of(seed), tmp_path / f"c{seed}", thread_count=2)

    with in_thread(lambda: work(1)), in_thread(lambda: work(2)):
        pass
    for seed in (1, 2):
        assert_checkpoint(tmp_path / f"c{seed}", state_of(seed))


def test_a_child_that_was_forked_after_its_parents_end_has_the_outcome(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state_of(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert preload is not None
    arguments[1] = preload()
    arguments[1].outcome(None)
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(60)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", state_of())


def test_a_save_leaves_no_descriptor(tmp_path: Path, caller: Caller) -> None:
    save(small_state(), tmp_path / "first", caller)
    gc.collect()
    before = set(os.listdir("/proc/self/fd"))
    save(small_state(), tmp_path / "second", caller)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before


def test_several_children_may_wait_for_one_outcome(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=2)
    planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert preload is not None
    arguments[1] = preload()
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=function, args=arguments) for _ in range(2)]
    for child in children:
        child.start()
    held_after_staging.open()
    for child in children:
        child.join(60)
    first = writer.retrieve_write_results()
    assert isinstance(first, list)
    assert [result.index for result in first] == [
        result.index for result in writer.retrieve_write_results()
    ]


def test_a_child_of_a_parent_that_has_no_channel_is_told(
    tmp_path: Path, held_after_staging: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_tasks, "_channel", lambda: None)
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    arguments[1] = preload()
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert "no descriptors for a channel" in str(failure_of(writer))
    # In the parent the save is as well as ever.
    held_after_staging.open()
    function(*arguments)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", small_state())


def test_a_child_is_told_that_the_parent_who_writes_has_died(tmp_path: Path) -> None:
    # A process that stages, forks a child to wait for it, and is killed while it writes.
    results = get_write_results_queue()
    reading, writing = os.pipe()
    # Here, since the threads with which torch fills it are not in a child.
    state = {"large": torch.zeros(3 << 20)}
    parent = os.fork()
    if parent == 0:
        # The second chunk's turn to be written comes in months.
        slow = Background(max_bytes_per_second=1)
        writer = FileSystemWriterAsync(tmp_path / "c", background=slow)
        planned(state, writer)
        function, preload, _arguments = writer.get_save_function_and_args()
        staged = preload()  # type: ignore[misc]
        if os.fork() == 0:
            os.read(reading, 1)
            function(0, staged, results)  # type: ignore[misc]
            os._exit(0)
        os.kill(os.getpid(), 9)
    os.waitpid(parent, 0)
    os.write(writing, b"!")
    outcome = results.get(timeout=60)
    os.close(reading)
    os.close(writing)
    assert isinstance(outcome, CheckpointError)
    assert f"process {parent} has died when 0 files were done" in str(outcome)
    assert str(tmp_path / "c") in str(outcome)


@pytest.mark.parametrize("is_staged", [True, False], ids=["temporal", "persistent"])
def test_a_worker_that_is_killed_before_its_result_is_named(
    tmp_path: Path, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert preload is not None
    if is_staged:
        arguments[1] = preload()
    monkeypatch.setattr(EngineWrite, "outcome", lambda *_: os.kill(os.getpid(), 9))
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    child.start()
    child.join(60)
    error = str(failure_of(writer))
    assert error.startswith(f"Worker failure: process {child.pid} has ended before it sent its")
    assert "rank 0, files __0_* in" in error


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "count", "names"),
    [
        (1, 4, ["__0_0.distcp"]),
        (2, 4, ["__0_0.distcp", "__0_1.distcp"]),
        (4, 4, [f"__0_{n}.distcp" for n in range(4)]),
        (4, 3, [f"__0_{n}.distcp" for n in range(3)]),
        (4, 1, ["__0_0.distcp"]),
    ],
)
def test_there_is_a_file_for_each_thread_that_has_something(
    tmp_path: Path, threads: int, count: int, names: list[str]
) -> None:
    state = small_state(count=count)
    save(state, tmp_path / "c", thread_count=threads)
    assert names_in(tmp_path / "c") == names
    assert_checkpoint(tmp_path / "c", state)


def items_of(metadata: Any) -> dict[str, set[str]]:
    """By file the names of what it holds."""
    found: dict[str, set[str]] = {}
    for index, info in metadata.storage_data.items():
        found.setdefault(info.relative_path, set()).add(index.fqn)
    return found


HINTED = {
    f"{side}.{n}": torch.full((64, 64), float(n)) for side in ("model", "optim") for n in "01"
}


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine", "python"])
@pytest.mark.parametrize(
    ("threads", "files"),
    [
        (2, {"__0_0": {"model.0", "model.1"}, "optim__0_1": {"optim.0", "optim.1"}}),
        (
            4,
            {
                "__0_0": {"model.0"},
                "__0_1": {"model.1"},
                "optim__0_2": {"optim.0"},
                "optim__0_3": {"optim.1"},
            },
        ),
    ],
)
def test_what_the_hint_names_is_in_files_of_its_own(
    tmp_path: Path, threads: int, files: dict[str, set[str]], by_engine: bool
) -> None:
    opened = {} if by_engine else {"open_file": open_in_python}
    metadata = save(
        dict(HINTED), tmp_path / "c", thread_count=threads, separation_hint="optim", **opened
    )
    assert items_of(metadata) == {f"{name}.distcp": items for name, items in files.items()}
    assert_checkpoint(tmp_path / "c", dict(HINTED))


def test_a_hint_that_names_nothing_makes_no_file(tmp_path: Path) -> None:
    save(small_state(), tmp_path / "c", thread_count=2, separation_hint="optim")
    assert names_in(tmp_path / "c") == ["__0_0.distcp"]


def test_a_hint_with_one_thread_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="thread_count >= 2"):
        FileSystemWriterAsync(tmp_path, thread_count=1, separation_hint="optim")


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DecentralizedPlanner])
def test_one_files_bytes_are_those_of_stock_torch(tmp_path: Path, planner: Any) -> None:
    stock_save(state_of(), tmp_path / "stock", thread_count=1)
    save(state_of(), tmp_path / "ours", thread_count=1, planner=planner())
    [stock], [ours] = data_files(tmp_path / "stock"), data_files(tmp_path / "ours")
    assert stock.name == ours.name
    assert stock.read_bytes() == ours.read_bytes()


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine", "python"])
def test_each_item_has_a_file_where_that_is_asked_for(tmp_path: Path, by_engine: bool) -> None:
    opened = {} if by_engine else {"open_file": open_in_python}
    metadata = save(small_state(), tmp_path / "c", single_file_per_rank=False, **opened)
    assert names_in(tmp_path / "c") == [f"__0_{n}.distcp" for n in range(4)]
    assert sorted(map(len, items_of(metadata).values())) == [1, 1, 1, 1]
    assert_checkpoint(tmp_path / "c", small_state())


def test_results_are_by_the_number_of_their_file(tmp_path: Path) -> None:
    # The large one comes first in its file's size, the small ones first in the plan.
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(5000), "d": torch.ones(900)}
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=3)
    planned(state, writer)
    here(writer)
    assert writer.results_queue is not None
    for number, of_file in writer.results_queue.get().items():
        assert {result.storage_data.relative_path for result in of_file} == {f"__0_{number}.distcp"}


def test_nothing_to_write_is_nothing_to_run(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned({}, writer)
    assert writer.get_save_function_and_args() == (None, None, [])
    assert not writer.has_data_to_write
    assert writer.results_queue is None
    assert writer.retrieve_write_results() == []
    save_state_dict_async_finalize(*finalizing)
    assert names_in(tmp_path / "c") == []
    assert is_committed(tmp_path / "c")


def test_what_others_look_at_is_there(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(str(tmp_path / "c"), thread_count=3, separation_hint="optim")
    assert writer.write_buckets is None
    planned(small_state(), writer)
    assert writer.has_data_to_write
    assert writer.write_buckets
    assert writer.checkpoint_dir == str(tmp_path / "c") == writer.checkpoint_id
    assert (writer.thread_count, writer.separation_hint, writer.use_msc) == (3, "optim", False)
    assert writer.can_run_decentralized_global_plan


# --- results -------------------------------------------------------------------------------------


def test_results_are_those_of_all_items(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    here(writer)
    results = writer.retrieve_write_results()
    assert isinstance(results, list)
    assert {result.index for result in results} == {
        MetadataIndex(f"t{n}", [0, 0], 0) for n in range(4)
    }
    size = sum(file.stat().st_size for file in data_files(tmp_path / "c"))
    assert sum(result.size_in_bytes for result in results) == size


def test_a_failure_of_the_worker_is_returned_with_its_cause(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    assert writer.results_queue is not None
    writer.results_queue.put(OSError(errno.EIO, "Input/output error", "/the/file"))
    error = failure_of(writer)
    assert str(error).startswith("Worker failure: [Errno 5] Input/output error: '/the/file'")
    assert "rank 0, files __0_* in" in str(error)


def test_a_worker_that_has_put_nothing_is_told(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    assert "results_queue should not be empty" in str(failure_of(writer))


@pytest.mark.parametrize("kept", [0, 3])
def test_results_that_are_not_all_are_told(tmp_path: Path, kept: int) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=1)
    planned(small_state(), writer)
    here(writer)
    assert writer.results_queue is not None
    writer.results_queue.put({0: writer.results_queue.get()[0][:kept]})
    assert f"Incomplete worker results (expected 4, got {kept})" in str(failure_of(writer))


@pytest.mark.parametrize("preloaded", [True, False])
def test_each_bucket_may_be_written_by_itself(tmp_path: Path, preloaded: bool) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=2)
    planned(small_state(), writer)
    buckets: Any = writer.write_buckets
    if preloaded:
        buckets = FileSystemWriterAsync.preload_tensors(buckets, True)
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()
    for number, bucket in enumerate(buckets):
        count.put(number)
        FileSystemWriterAsync.write_preloaded_data(
            [writer.transforms],
            local_proc_idx=number,
            write_bucket=bucket,
            results_queue=results,
            count_queue=count,
            use_fsync=True,
        )
    count.join()
    written = [result for _ in buckets for result in results.get_nowait()[1]]
    assert sorted(result.index.fqn for result in written) == ["t0", "t1", "t2", "t3"]


def test_a_bucket_that_cannot_be_written_is_told_with_its_number(tmp_path: Path) -> None:
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()
    count.put(5)
    bucket = NotBegun(OSError(errno.EIO, "Input/output error"))
    FileSystemWriterAsync.write_preloaded_data([], 5, bucket, results, count, True)
    count.join()
    number, error = results.get_nowait()
    assert number == 5
    assert isinstance(error, OSError)


def test_results_are_there_once(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(small_state(), writer)
    here(writer)
    assert isinstance(writer.retrieve_write_results(), list)
    assert "should not be empty" in str(failure_of(writer))


def test_a_writer_may_raise_instead(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", on_failure="raise")
    finalizing = planned(small_state(), writer)
    with pytest.raises(RuntimeError, match="should not be empty"):
        writer.retrieve_write_results()
    assert writer.results_queue is not None
    cause = OSError(errno.EIO, "Input/output error")
    writer.results_queue.put(cause)
    with pytest.raises(RuntimeError, match="Worker failure") as error:
        writer.retrieve_write_results()
    assert error.value.__cause__ is cause
    with pytest.raises(CheckpointException):
        save_state_dict_async_finalize(*finalizing)


def test_a_wrong_way_to_fail_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_failure"):
        FileSystemWriterAsync(tmp_path, on_failure="ignore")


# --- what is saved -------------------------------------------------------------------------------


def test_changes_after_staging_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    state = state_of()
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state, writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    arguments[1] = preload()
    with torch.no_grad():
        for part in state["model"], state["optimizer"]:
            for value in part.values():
                if isinstance(value, torch.Tensor) and value.numel():
                    value.untyped_storage().fill_(7)
    state["optimizer"]["step"] = -1
    function(*arguments)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", state_of())


def test_sources_are_let_go_of_when_they_are_staged(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    state = {"t": torch.ones(1000)}
    source = weakref.ref(state["t"])
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state, writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert preload is not None
    arguments[1] = preload()
    del state["t"]
    assert source() is None
    del finalizing, function


@pytest.mark.parametrize("how", ["started", "sources_copied"])
def test_a_source_that_another_thread_changes_while_it_is_staged_fails_the_save(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    method = getattr(EngineWrite, how)

    def held(self: EngineWrite, *args: Any) -> None:
        gate()
        method(self, *args)

    monkeypatch.setattr(EngineWrite, how, held)
    state = small_state()
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state, writer)
    with in_thread(lambda: here(writer)):
        gate.wait()
        state["t2"].add_(1)
        gate.open()
    with pytest.raises(CheckpointException) as error:
        save_state_dict_async_finalize(*finalizing)
    assert "tensors were written to while they were staged" in str(cause_of(error.value))
    assert names_in(tmp_path / "c") == []
    assert not is_committed(tmp_path / "c")


class Gated(torch.Tensor):
    """A tensor whose copying waits."""

    gate: Any = None

    def detach(self) -> Any:
        type(self).gate()
        return super().detach()


def test_a_source_that_another_thread_changes_while_python_copies_fails_the_save(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = small_state() | {"z": torch.ones(3).as_subclass(Gated)}
    writer = FileSystemWriterAsync(tmp_path / "c", open_file=open_in_python)
    finalizing = planned(state, writer)
    monkeypatch.setattr(Gated, "gate", gate)
    with in_thread(lambda: here(writer)):
        gate.wait()
        state["t2"].add_(1)
        gate.open()
    with pytest.raises(CheckpointException, match="tensors were written to while"):
        save_state_dict_async_finalize(*finalizing)
    assert os.listdir(tmp_path / "c") == []


class Quantized(torch.Tensor):
    """In the manner of TransformerEngine's: a dtype that it has not, and a method that makes it."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def dequantize(self) -> torch.Tensor:
        return self._data.to(torch.float32) * 0.5

    def detach(self) -> Any:
        return Quantized(self._data)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.is_pinned.default, func  # which a plan asks
        return False


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine", "python"])
def test_quantized_tensors_of_others_are_saved_as_what_they_stand_for(
    tmp_path: Path, by_engine: bool
) -> None:
    data = torch.arange(12, dtype=torch.int8).view(3, 4)
    opened = {} if by_engine else {"open_file": open_in_python}
    save({"q": Quantized(data), "t": torch.ones(2)}, tmp_path / "c", **opened)
    assert_checkpoint(tmp_path / "c", {"q": data.float() * 0.5, "t": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_torchs_own_quantized_tensors_stay_what_they_are(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.1, 0, torch.qint8)
    save({"q": quantized}, tmp_path / "ours", thread_count=1)
    stock_save({"q": quantized}, tmp_path / "stock", thread_count=1)
    [ours], [stock] = data_files(tmp_path / "ours"), data_files(tmp_path / "stock")
    assert ours.read_bytes() == stock.read_bytes()


def test_dtensors_are_saved_by_shard(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = random_tensor((8, 5), torch.float32).nan_to_num()
        save({"d": distribute_tensor(whole, mesh, [Shard(0)])}, tmp_path / "c")
    finally:
        dist.destroy_process_group()
    assert_checkpoint(tmp_path / "c", {"d": whole})


class Settings:
    """An object that pickles, of a class of somebody's own."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and other.rate == self.rate

    __hash__ = None  # type: ignore[assignment]


def test_objects_are_saved_as_stock_torch_saves_them(tmp_path: Path, caller: Caller) -> None:
    state = {"settings": Settings(0.5), "t": torch.ones(3)}
    save(state, tmp_path / "c", caller)
    loaded = emptied(state)
    stock_load(loaded, tmp_path / "c")
    assert_equal(loaded, state)


def test_what_cannot_be_pickled_fails_the_plan(tmp_path: Path) -> None:
    finalizing = planned({"lock": threading.Lock()}, FileSystemWriterAsync(tmp_path / "c"))
    here(finalizing[0])
    with pytest.raises(CheckpointException, match="cannot pickle"):
        save_state_dict_async_finalize(*finalizing)


def test_the_metadata_is_stock_torchs(tmp_path: Path) -> None:
    ours = save(state_of(), tmp_path / "ours", thread_count=1)
    stock = stock_save(state_of(), tmp_path / "stock", thread_count=1)
    read = dcp.FileSystemReader(tmp_path / "ours").read_metadata()
    assert list(read.state_dict_metadata) == list(stock.state_dict_metadata)
    assert read.planner_data == stock.planner_data
    assert read.storage_data == stock.storage_data == ours.storage_data


def test_the_garbage_collector_may_run_amid_a_save(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = EngineWrite.started

    def held(self: EngineWrite, engine_save: Any) -> None:
        started(self, engine_save)
        gate()

    monkeypatch.setattr(EngineWrite, "started", held)
    state = state_of()
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state, writer)
    with in_thread(lambda: here(writer)):
        gate.wait()
        # The engine has begun to read tensors that nobody else holds any more.
        state.clear()
        gc.collect()
        gate.open()
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", state_of())


def test_the_garbage_collectors_threshold_is_as_before_after_each_end_of_a_plan(
    tmp_path: Path,
) -> None:
    before = gc.get_threshold()
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state_of(), writer)
    assert gc.get_threshold() == before
    here(writer)
    save_state_dict_async_finalize(*finalizing)

    class Failing(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            raise ValueError("finish_plan")

    failed = planned(state_of(), FileSystemWriterAsync(tmp_path / "d"), Failing())
    assert gc.get_threshold() == before
    with pytest.raises(CheckpointException, match="finish_plan"):
        save_state_dict_async_finalize(*failed)


# --- through Python ------------------------------------------------------------------------------


class Flip(StreamTransformExtension):
    """Flips every bit of what is written."""

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
    """Passes on what it holds when it is closed."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def close(self) -> None:
        if not self.closed:
            self._output.write(flipped(self.getvalue()))
        super().close()


def flipped(data: bytes) -> bytes:
    return bytes(byte ^ 255 for byte in data)


def test_a_transform_is_applied_to_every_record(tmp_path: Path, caller: Caller) -> None:
    metadata = save(small_state(), tmp_path / "c", caller, thread_count=2, _extensions=[Flip()])
    assert len(names_in(tmp_path / "c")) == 2
    for index, info in metadata.storage_data.items():
        data = (tmp_path / "c" / info.relative_path).read_bytes()
        record = flipped(data[info.offset :][: info.length])
        assert_equal(torch.load(io.BytesIO(record)), small_state()[index.fqn])
        assert info.transform_descriptors == ["stream.flip"]


def test_files_are_opened_by_the_function_that_is_given(tmp_path: Path, caller: Caller) -> None:
    save(state_of(), tmp_path / "c", caller, thread_count=2, open_file=open_in_python)
    assert_checkpoint(tmp_path / "c", state_of())


def test_the_function_that_opens_gets_path_and_mode(tmp_path: Path) -> None:
    calls = []

    def opening(path: str, mode: str) -> Any:
        calls.append((path, mode))
        return open(path, mode)

    save(small_state(), tmp_path / "c", thread_count=2, open_file=opening)
    assert sorted(calls) == [(str(tmp_path / "c" / f"__0_{n}.distcp"), "wb") for n in range(2)]


def test_python_threads_write_at_once(tmp_path: Path) -> None:
    # Each waits for the others to have opened their files.
    met = threading.Barrier(4)

    def opening(path: str, mode: str) -> Any:
        met.wait(60)
        return open(path, mode)

    save(small_state(), tmp_path / "c", thread_count=4, open_file=opening)
    assert_checkpoint(tmp_path / "c", small_state())


@pytest.mark.parametrize("number", range(4))
def test_the_error_of_any_python_thread_fails_the_save_and_leaves_no_file(
    tmp_path: Path, number: int
) -> None:
    def opening(path: str, mode: str) -> Any:
        if path.endswith(f"_{number}.distcp"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return open(path, mode)

    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=4, open_file=opening)
    finalizing = planned(small_state(), writer)
    here(writer)
    assert names_in(tmp_path / "c") == []
    with pytest.raises(CheckpointException, match=rf"Permission denied.*__0_{number}\.distcp"):
        save_state_dict_async_finalize(*finalizing)
    assert not is_committed(tmp_path / "c")


@pytest.mark.parametrize("threads", [1, 4])
def test_a_write_that_fails_in_python_leaves_no_file(tmp_path: Path, threads: int) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=threads, open_file=open_in_python)
    finalizing = planned(small_state(), writer)
    with files_limited_to(1000):
        here(writer)
    with pytest.raises(CheckpointException, match="File too large"):
        save_state_dict_async_finalize(*finalizing)
    assert os.listdir(tmp_path / "c") == []


def test_python_writing_can_be_cancelled(tmp_path: Path, gate: Gate) -> None:
    def opening(path: str, mode: str) -> Any:
        gate()
        return open(path, mode)

    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=2, open_file=opening)
    planned(small_state(), writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    arguments[1] = staged = preload()
    with in_thread(lambda: function(*arguments)):
        gate.wait()
        staged.cancel()
        gate.open()
    assert "aborted" in str(failure_of(writer))
    assert names_in(tmp_path / "c") == []


# --- through multistorageclient ------------------------------------------------------------------


class FakeStore:
    """The part of the package multistorageclient that is used, over a dictionary."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.synced: set[str] = set()
        self.made: list[str] = []
        self.fails: str | None = None
        self.os = self

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.made.append(path)

    def open(self, path: str, mode: str) -> Any:
        if self.fails is not None and self.fails in path:
            raise ConnectionError(f"{path}: the store does not answer")
        store = self

        class Stream(io.BytesIO):
            def fsync(self) -> None:
                store.synced.add(path)

            def close(self) -> None:
                store.objects[path] = self.getvalue()
                super().close()

        return Stream()


@pytest.fixture
def msc(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    store = FakeStore()
    module: Any = types.ModuleType("multistorageclient")
    module.open, module.os = store.open, store
    monkeypatch.setitem(sys.modules, "multistorageclient", module)
    return store


def test_an_object_store_gets_files_and_metadata(msc: FakeStore, tmp_path: Path) -> None:
    save(state_of(), "msc://bucket/c", thread_count=2, use_msc=True)
    assert sorted(msc.objects) == [
        f"msc://bucket/c/{name}" for name in (".metadata", "__0_0.distcp", "__0_1.distcp")
    ]
    assert msc.synced == {f"msc://bucket/c/__0_{n}.distcp" for n in range(2)}
    assert set(msc.made) == {"msc://bucket/c"}
    for path, data in msc.objects.items():
        (tmp_path / os.path.basename(path)).write_bytes(data)
    assert_checkpoint(tmp_path, state_of())


def test_the_metadata_in_an_object_store_has_torchs_version(msc: FakeStore, tmp_path: Path) -> None:
    save(small_state(), "msc://bucket/c", use_msc=True)
    stock_save(small_state(), tmp_path / "stock")
    stock = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    ours = pickle.loads(msc.objects["msc://bucket/c/.metadata"])
    assert getattr(ours, "version", None) == getattr(stock, "version", None)


def test_an_error_of_the_object_store_fails_the_save(msc: FakeStore) -> None:
    msc.fails = "__0_1"
    with pytest.raises(CheckpointException, match="the store does not answer"):
        save(state_of(), "msc://bucket/c", thread_count=2, use_msc=True)
    assert "msc://bucket/c/.metadata" not in msc.objects


def test_nothing_is_made_here_for_an_object_store(
    msc: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(small_state(), "msc://bucket/c", use_msc=True)
    assert os.listdir(tmp_path) == []


def test_paths_of_object_stores_are_valid() -> None:
    assert FileSystemWriterAsync.validate_checkpoint_id("msc://bucket/c")


def test_without_the_package_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "multistorageclient", None)
    with pytest.raises(CheckpointError, match="multi-storage-client"):
        FileSystemWriterAsync(tmp_path, use_msc=True)


# --- failures of the system ----------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_a_full_disk_fails_the_save_with_errno_and_path(small_disk: Path, threads: int) -> None:
    # Of four tensors of 3 MiB two have room.
    state = {f"t{n}": random_tensor((3 << 20,), torch.uint8, n) for n in range(4)}
    path = small_disk / "c"
    writer = FileSystemWriterAsync(path, thread_count=threads)
    finalizing = planned(state, writer)
    here(writer)
    assert os.listdir(path) == []
    with pytest.raises(CheckpointException) as error:
        save_state_dict_async_finalize(*finalizing)
    assert os.strerror(errno.ENOSPC) in str(cause_of(error.value))
    assert f"{path}/__0_" in str(cause_of(error.value))
    save(small_state(), path, thread_count=threads)
    assert_checkpoint(path, small_state())


@pytest.mark.parametrize("kind", ["open", "write", "fsync"])
@pytest.mark.parametrize("number", [1, 4])
def test_one_call_that_fails_in_one_of_four_files_fails_the_whole(
    server: Server, tmp_path: Path, kind: str, number: int
) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    path = root / "c"
    path.mkdir()
    counted = server.run(Order(kinds=[kind]), root, save_to, str(path), 4)
    assert counted.error is None, counted.error
    data = [call.number for call in counted.of(kind) if call.path.endswith(".distcp")]
    assert len(data) >= 4
    wanted = data[number - 1]
    for file in path.iterdir():
        file.unlink()
    order = Order("fail", wanted, kinds=[kind], errors={kind: errno.EIO})
    run = server.run(order, root, save_to, str(path), 4)
    assert run.hit is not None
    assert isinstance(run.error, CheckpointException), (run.hit, run.error)
    text = str(cause_of(run.error))
    assert "Errno 5" in text
    assert str(path) in text
    assert os.listdir(path) == []


def test_a_disk_that_fails_while_it_is_written_fails_the_save(tmp_path: Path) -> None:
    with failing_disk(tmp_path) as disk:
        save(small_state(1), disk.path / "c", thread_count=2)
        writer = FileSystemWriterAsync(disk.path / "c", thread_count=2)
        finalizing = planned(small_state(2), writer)
        with disk.failing():
            here(writer)
            error = failure_of(writer)
            assert "Errno 5" in str(error)
        writer.abandon()
        del finalizing
        loaded = emptied(small_state())
        load(loaded, disk.path / "c")
        assert_equal(loaded, small_state(1))


# --- several saves -------------------------------------------------------------------------------


def begun(state: StateDict, path: Path, **options: Any) -> tuple[Any, Callable[[], None]]:
    """A save that is staged; what finalizes it, and its function."""
    writer = FileSystemWriterAsync(path, **options)
    finalizing = planned(state, writer)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    arguments[1] = preload()
    return finalizing, lambda: function(*arguments)


def test_two_saves_may_be_under_way_into_two_directories(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    saves = [begun(state_of(seed), tmp_path / f"c{seed}") for seed in (1, 2)]
    held_after_staging.open()
    for finalizing, run in saves:
        run()
        save_state_dict_async_finalize(*finalizing)
    for seed in (1, 2):
        assert_checkpoint(tmp_path / f"c{seed}", state_of(seed))


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DecentralizedPlanner])
def test_of_two_saves_into_one_directory_the_last_to_commit_wins(
    tmp_path: Path, held_after_staging: Gate, first: int, planner: Any
) -> None:
    path = tmp_path / "c"
    saves = {}
    for seed in (1, 2):
        writer = FileSystemWriterAsync(path, thread_count=2)
        finalizing = planned(state_of(seed), writer, planner())
        function, preload, arguments = writer.get_save_function_and_args()
        arguments[1] = preload()  # type: ignore[misc]
        saves[seed] = finalizing, function, arguments
    held_after_staging.open()
    for _finalizing, function, arguments in saves.values():
        function(*arguments)
    last = 3 - first
    for seed in (first, last):
        save_state_dict_async_finalize(*saves[seed][0])
        assert_checkpoint(path, state_of(seed))
    # The files of who was replaced have gone, once nobody else was there.
    assert len(names_in(path)) == 2


def test_saves_by_two_names_of_one_directory_do_not_meet(
    tmp_path: Path, held_after_staging: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, run_one = begun(state_of(1), tmp_path / "c", thread_count=1)
    other, run_other = begun(state_of(2), Path("c"), thread_count=1)
    held_after_staging.open()
    run_one()
    run_other()
    save_state_dict_async_finalize(*one)
    save_state_dict_async_finalize(*other)
    assert_checkpoint(tmp_path / "c", state_of(2))


def test_a_save_that_fails_leaves_the_other_one_alone(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    path = tmp_path / "c"
    good, run_good = begun(state_of(1), path)
    bad, run_bad = begun(state_of(2), path)
    held_after_staging.open()
    run_good()
    run_bad()
    assert bad[0].results_queue.get() is not None
    bad[0].results_queue.put(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(CheckpointException):
        save_state_dict_async_finalize(*bad)
    save_state_dict_async_finalize(*good)
    assert_checkpoint(path, state_of(1))
    assert len(names_in(path)) == len({i.relative_path for i in good[1].storage_data.values()})


def test_a_writer_may_be_used_again(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=2)
    for seed in (1, 2, 3):
        finalizing = planned(state_of(seed), writer)
        here(writer)
        save_state_dict_async_finalize(*finalizing)
        assert_checkpoint(tmp_path / "c", state_of(seed))
        assert len(names_in(tmp_path / "c")) == 2


def test_a_writer_may_be_used_again_after_a_failure(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned(state_of(1), writer)
    with files_limited_to(1000):
        here(writer)
    with pytest.raises(CheckpointException, match="File too large"):
        save_state_dict_async_finalize(*finalizing)
    finalizing = planned(state_of(2), writer)
    here(writer)
    save_state_dict_async_finalize(*finalizing)
    assert_checkpoint(tmp_path / "c", state_of(2))


def test_results_of_an_earlier_use_do_not_count(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(state_of(1), writer)
    here(writer)
    planned(state_of(2), writer)
    assert "should not be empty" in str(failure_of(writer))


def test_a_finished_writer_that_somebody_keeps_gives_the_next_one_no_tag(tmp_path: Path) -> None:
    kept = []
    for seed in (1, 2):
        for name in os.listdir(tmp_path):
            os.unlink(tmp_path / name)
        writer = FileSystemWriterAsync(tmp_path)
        kept.append(planned(small_state(seed), writer))
        here(writer)
        save_state_dict_async_finalize(*kept[-1])
        assert names_in(tmp_path) == ["__0_0.distcp", "__0_1.distcp"][: writer.thread_count]
    assert_checkpoint(tmp_path, small_state(2))


@pytest.mark.parametrize("options", [{}, {"open_file": open_in_python}], ids=["engine", "python"])
def test_a_finished_writer_needs_no_collector(
    tmp_path: Path, options: StateDict, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    gc.disable()
    try:
        writer = FileSystemWriterAsync(tmp_path / "c", **options)
        finalizing = planned(small_state(), writer)
        queue_of_calls = AsyncCallsQueue()
        queue_of_calls.schedule_async_request(request_of(finalizing))
        queue_of_calls.close()
        gone = weakref.ref(writer)
        del writer, finalizing
        assert gone() is None
    finally:
        gc.enable()


def test_a_save_that_is_never_committed_leaves_no_file(tmp_path: Path) -> None:
    def run() -> None:
        writer = FileSystemWriterAsync(tmp_path / "c")
        planned(state_of(), writer)
        here(writer)
        assert names_in(tmp_path / "c")

    run()
    gc.collect()
    eventually(lambda: names_in(tmp_path / "c") == [])


@pytest.mark.parametrize("options", [{}, {"thread_count": 1}, {"open_file": open_in_python}])
def test_with_dcp_save_it_is_a_writer_as_any(tmp_path: Path, options: StateDict) -> None:
    save_with(FileSystemWriterAsync(tmp_path / "c", **options), state_of())
    assert_checkpoint(tmp_path / "c", state_of())


def test_there_is_one_item_for_each_save(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(state_of(), writer)
    here(writer)
    assert writer.results_queue is not None
    writer.results_queue.get()
    with pytest.raises(queue.Empty):
        writer.results_queue.get_nowait()
