"""Megatron's writer: its functions in any process, their results, and their errors."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

import torch_ckpt
from tests.async_saves import (
    Caller,
    assert_checkpoint,
    here,
    in_child,
    is_committed,
    names_in,
    plan_save,
    planned,
    read_metadata,
    save,
    small_state,
    state_of,
)
from tests.fault_hooks import at_fault_points, calling
from tests.gates import Gate, in_thread
from tests.support import assert_tables_match, cause_of, data_files, open_descriptors
from torch_ckpt import Background, CheckpointError, megatron
from torch_ckpt.megatron import (
    FileSystemWriterAsync,
    get_write_results_queue,
    save_state_dict_async_finalize,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def test_saves_in_any_process_are_correct_and_replace_the_previous_one(
    tmp_path: Path, caller: Caller
) -> None:
    # The engine's threads and memory then exist in this process, but not in a child.
    torch_ckpt.save(state_of(1), tmp_path / "before")
    torch_ckpt.async_save(state_of(2), tmp_path / "in background").result()
    for seed in (1, 2):
        save(state_of(seed), tmp_path / "c", caller, thread_count=2)
    save(state_of(3), tmp_path / "after")
    assert_checkpoint(tmp_path / "c", state_of(2))
    assert_tables_match(tmp_path / "c", read_metadata(tmp_path / "c"))
    # The files of the first save were deleted.
    assert len(names_in(tmp_path / "c")) == 2
    assert_checkpoint(tmp_path / "after", state_of(3))


@pytest.mark.filterwarnings("ignore:an unused file could not be removed")
def test_errors_of_the_engine_arrive_from_any_process(tmp_path: Path, caller: Caller) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=1)
    finalizing = planned(small_state(), writer)
    # A directory with the file's name.
    (tmp_path / "c" / "__0_0.distcp").mkdir()
    caller(writer)
    with pytest.raises(CheckpointException) as error:
        save_state_dict_async_finalize(*finalizing)
    assert "__0_0.distcp" in str(cause_of(error.value))
    assert not is_committed(tmp_path / "c")


def test_the_functions_of_a_save_can_be_pickled(tmp_path: Path) -> None:
    planned = plan_save(state_of(), tmp_path / "c", progress=print)
    functions = planned.writer.get_save_function_and_args()
    function, preload, arguments = pickle.loads(pickle.dumps(functions))
    arguments[1] = preload()
    function(*arguments)
    planned.finalize()
    assert_checkpoint(tmp_path / "c", state_of())


@pytest.mark.parametrize("gets", ["task", "buckets", "preloaded buckets"])
def test_the_save_function_accepts_what_was_not_staged_by_its_preload_function(
    tmp_path: Path, gets: str
) -> None:
    planned = plan_save(small_state(), tmp_path / "c")
    buckets = planned.writer.write_buckets
    assert buckets is not None
    if gets == "buckets":
        planned.arguments[1] = buckets
    elif gets == "preloaded buckets":
        planned.arguments[1] = FileSystemWriterAsync.preload_tensors(buckets, True)
    planned.run()
    planned.finalize()
    assert_checkpoint(tmp_path / "c", small_state())


def test_an_empty_list_of_tasks_gives_no_results() -> None:
    got: queue.Queue[Any] = queue.Queue()
    staged = FileSystemWriterAsync.preload_tensors([], True)
    FileSystemWriterAsync.write_preloaded_data_multithread([], False, 0, staged, got)
    assert got.get_nowait() == {}


def test_several_tasks_at_once_are_refused(tmp_path: Path) -> None:
    one, other = (plan_save(small_state(), tmp_path / name) for name in "ab")
    one.arguments[1] = one.arguments[1] + other.arguments[1]
    with pytest.raises(ValueError, match="cannot stage 2 write tasks at once"):
        FileSystemWriterAsync.preload_tensors(one.arguments[1])
    one.run()
    assert "Worker failure: cannot stage 2 write tasks at once" in one.failure()


def test_a_task_that_is_staged_and_run_twice_is_written_once(tmp_path: Path) -> None:
    planned = plan_save(small_state(), tmp_path / "c")
    first = planned.stage()
    assert planned.stage() is first
    planned.run()
    planned.run()
    planned.finalize()
    assert_checkpoint(tmp_path / "c", small_state())


def test_a_task_pickled_after_staging_reports_that_it_has_no_values(tmp_path: Path) -> None:
    planned = plan_save(small_state(), tmp_path / "c")
    planned.stage()
    planned.preload = pickle.loads(pickle.dumps(planned.preload))
    planned.stage()
    planned.run()
    assert "the values were released when another process" in planned.failure()


def test_a_cancel_in_a_worker_process_keeps_the_files_it_has_written(tmp_path: Path) -> None:
    # Only this process knows whether the save was committed.
    planned = plan_save(small_state(), tmp_path / "c")
    planned.preload = pickle.loads(pickle.dumps(planned.preload))
    staged = planned.stage()
    planned.run()
    staged.cancel()
    planned.finalize()
    assert_checkpoint(tmp_path / "c", small_state())


def test_children_forked_while_their_parent_writes_or_later_get_the_outcome(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    planned = plan_save(state_of(), tmp_path / "c")
    staged = planned.stage()
    held_after_staging.wait()
    children = [planned.child() for _ in range(2)]
    for child in children:
        child.start()
    held_after_staging.open()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    staged.outcome()
    in_child(planned.function, *planned.arguments)
    first, second = (planned.writer.retrieve_write_results() for _ in children)
    assert isinstance(first, list)
    assert [result.index for result in first] == [result.index for result in second]
    planned.finalize()
    assert_checkpoint(tmp_path / "c", state_of())


def test_a_forked_child_saves_during_a_save_of_its_parent(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    of_parent = plan_save(state_of(1), tmp_path / "of the parent")
    with in_thread(lambda: here(of_parent.writer)):
        held_after_staging.wait()
        of_child = plan_save(state_of(2), tmp_path / "of the child")

        def work() -> None:
            # The parent opens its own copy of the gate only.
            held_after_staging.open()
            here(of_child.writer)

        in_child(work)
        of_child.finalize()
        held_after_staging.open()
    of_parent.finalize()
    assert_checkpoint(tmp_path / "of the parent", state_of(1))
    assert_checkpoint(tmp_path / "of the child", state_of(2))


def test_get_write_results_queue_returns_one_queue_for_all_modes() -> None:
    made = get_write_results_queue()
    assert get_write_results_queue(mp_mode="fork") is made
    assert pickle.loads(pickle.dumps(made)) is made
    assert megatron._results_queue is None


def test_two_threads_can_stage_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        barrier.wait(60)
        save(state_of(seed), tmp_path / f"c{seed}", thread_count=2)

    with in_thread(lambda: work(1)), in_thread(lambda: work(2)):
        pass
    for seed in (1, 2):
        assert_checkpoint(tmp_path / f"c{seed}", state_of(seed))


def test_a_save_leaves_no_descriptor_open(tmp_path: Path, caller: Caller) -> None:
    save(small_state(), tmp_path / "first", caller)
    gc.collect()
    before = open_descriptors()
    save(small_state(), tmp_path / "second", caller)
    gc.collect()
    assert open_descriptors() <= before


def test_a_child_of_a_parent_without_a_channel_gets_an_error(tmp_path: Path, gate: Gate) -> None:
    planned = plan_save(small_state(), tmp_path / "c")
    is_staged = False

    def hook(operation: str, path: str) -> int:
        if operation == "memfd_create" and not is_staged:
            return errno.EMFILE
        if operation == "fsync" and path.endswith(".distcp"):
            gate()
        return 0

    with at_fault_points(hook):
        planned.stage()
        is_staged = True
        in_child(planned.function, *planned.arguments)
        assert "few file descriptors for a channel" in planned.failure()
        # The save of the parent is not affected.
        gate.open()
        planned.run()
    planned.finalize()
    assert_checkpoint(tmp_path / "c", small_state())


def test_a_child_gets_an_error_if_the_writing_parent_dies(tmp_path: Path) -> None:
    # A process stages a save, forks a child that waits for the outcome, and is killed while it
    # writes.
    results = get_write_results_queue()
    reading, writing = os.pipe()
    # Created before the fork: torch fills it with threads that a child does not have.
    state = {"large": torch.zeros(3 << 20)}
    parent = os.fork()
    if parent == 0:
        # At this rate the second chunk is written after months.
        slow = Background(max_bytes_per_second=1)
        planned = plan_save(state, tmp_path / "c", background=slow)
        planned.stage()
        if os.fork() == 0:
            os.read(reading, 1)
            planned.arguments[2] = results
            planned.run()
            os._exit(0)
        os.kill(os.getpid(), 9)
    os.waitpid(parent, 0)
    os.write(writing, b"!")
    outcome = results.get(timeout=60)
    os.close(reading)
    os.close(writing)
    assert isinstance(outcome, CheckpointError)
    assert f"process {parent} died after sending the results of 0 files" in str(outcome)
    assert str(tmp_path / "c") in str(outcome)


@pytest.mark.parametrize("is_staged", [True, False], ids=["temporal", "persistent"])
def test_the_error_for_a_killed_worker_names_its_process(tmp_path: Path, is_staged: bool) -> None:
    planned = plan_save(small_state(), tmp_path / "c")
    if is_staged:
        planned.stage()
    with calling({"wait for the outcome": lambda: os.kill(os.getpid(), signal.SIGKILL)}):
        child = planned.child()
        child.start()
        child.join(60)
    error = planned.failure()
    assert error.startswith(f"Worker failure: process {child.pid} exited before sending its")
    assert "rank 0, files __0_* in" in error


# --- results -------------------------------------------------------------------------------------


def test_results_cover_all_items_and_are_returned_once(tmp_path: Path) -> None:
    planned = plan_save(small_state(), tmp_path / "c", thread_count=2)
    planned.arguments[2] = own = multiprocessing.Manager().Queue()
    planned.stage()
    planned.run()
    outcome = own.get(timeout=60)
    assert own.empty()
    assert planned.writer.results_queue is not None
    planned.writer.results_queue.put(outcome)
    results = planned.writer.retrieve_write_results()
    assert isinstance(results, list)
    assert {result.index for result in results} == {
        MetadataIndex(f"t{n}", [0, 0], 0) for n in range(4)
    }
    size = sum(file.stat().st_size for file in data_files(tmp_path / "c"))
    assert sum(result.size_in_bytes for result in results) == size
    assert "should not be empty" in planned.failure()
    planned.writer.results_queue.put({0: outcome[0]})
    assert "Incomplete worker results (expected 4, got 2)" in planned.failure()


def test_results_are_grouped_by_file_number(tmp_path: Path) -> None:
    # The large items are placed first, although the small ones are first in the plan.
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(5000), "d": torch.ones(900)}
    planned = plan_save(state, tmp_path / "c", thread_count=3)
    here(planned.writer)
    outcome = planned.arguments[2].get()
    assert sorted(outcome) == [0, 1, 2]
    for number, of_file in outcome.items():
        assert {result.storage_data.relative_path for result in of_file} == {f"__0_{number}.distcp"}


ERROR = OSError(errno.EIO, "Input/output error", "/the/file")


@pytest.mark.parametrize(
    ("put", "message"),
    [
        ([], "results_queue should not be empty"),
        ([ERROR], "Worker failure: [Errno 5] Input/output error: '/the/file'"),
        ([{}], "Incomplete worker results (expected 4, got 0)"),
    ],
    ids=["nothing", "an error", "no results"],
)
def test_a_failure_is_returned_or_raised_with_its_cause_rank_and_files(
    tmp_path: Path, put: list[Any], message: str
) -> None:
    for on_failure in ("return", "raise"):
        planned = plan_save(small_state(), tmp_path / on_failure, on_failure=on_failure)
        for item in put:
            planned.arguments[2].put(item)
        if on_failure == "return":
            error = planned.failure()
        else:
            with pytest.raises(RuntimeError) as raised:
                planned.writer.retrieve_write_results()
            assert raised.value.__cause__ is (ERROR if ERROR in put else None)
            error = str(raised.value)
            with pytest.raises(CheckpointException):
                planned.finalize()
        assert error.startswith(message)
        assert "rank 0, files __0_* in" in error


def test_a_wrong_value_of_on_failure_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_failure"):
        FileSystemWriterAsync(tmp_path, on_failure="ignore")


def write_separately(writer: FileSystemWriterAsync, buckets: Any, first: int = 0) -> list[Any]:
    """Writes each bucket by a call of its own. Returns what each call puts."""
    results: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()
    for number, bucket in enumerate(buckets, first):
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
    return [results.get_nowait() for _ in buckets]


@pytest.mark.parametrize("preloaded", [True, False])
def test_each_bucket_can_be_written_separately(tmp_path: Path, preloaded: bool) -> None:
    writer = plan_save(small_state(), tmp_path / "c", thread_count=2).writer
    buckets: Any = writer.write_buckets
    if preloaded:
        buckets = FileSystemWriterAsync.preload_tensors(buckets, True)
    written = [result for _, of_bucket in write_separately(writer, buckets) for result in of_bucket]
    assert sorted(result.index.fqn for result in written) == ["t0", "t1", "t2", "t3"]


def test_the_error_of_a_bucket_has_its_number(tmp_path: Path) -> None:
    writer = plan_save(small_state(), tmp_path / "c").writer
    buckets = pickle.loads(pickle.dumps(writer.write_buckets))
    (tmp_path / "c").rename(tmp_path / "gone")
    [(number, error)] = write_separately(writer, buckets, first=5)
    assert number == 5
    assert isinstance(error, OSError)
