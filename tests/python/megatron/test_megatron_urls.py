"""Megatron's writer beneath URLs: its objects, commits, aborts and credentials."""

from __future__ import annotations

import gc
import pickle
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.async_calls import wait_for_end
from tests.async_saves import (
    Caller,
    DecentralizedPlanner,
    assert_checkpoint,
    finish,
    in_child,
    names_in,
    plan_save,
    planned,
    request_of,
    save,
    small_state,
    state_of,
)
from tests.fault_hooks import calling
from tests.gates import Gate, eventually, in_thread
from tests.support import assert_equal, cause_of, emptied
from torch_ckpt.errors import NotCommitted
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    save_state_dict_async_plan,
)
from torch_ckpt.stores import ObjectStore, open_store

pytest.importorskip("fsspec")


@pytest.fixture
def url() -> str:
    """URL of an empty store in this process's memory."""
    return f"memory://{uuid.uuid4().hex}/run/100"


def objects_in(url: str) -> set[str]:
    return {entry.name for entry in open_store(url).list()}


def assert_stored(url: str, seed: int) -> None:
    """Checks that torch_ckpt and the cached reader load a state, and that no other object is
    stored."""
    loaded = emptied(small_state())
    torch_ckpt.load(loaded, url)
    assert_equal(loaded, small_state(seed))
    loaded = emptied(small_state())
    reader = CachedMetadataFileSystemReader(url)
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_equal(loaded, small_state(seed))
    infos = reader.read_metadata().storage_data.values()
    assert objects_in(url) == {info.relative_path for info in infos} | {".metadata"}


def test_saves_in_any_process_are_correct_and_replace_the_previous_one(
    tmp_path: Path, caller: Caller
) -> None:
    # The memory of another process is not visible in this one.
    for seed in (1, 2):
        save(state_of(seed), f"file://{tmp_path}/c", caller, thread_count=2)
    assert_checkpoint(tmp_path / "c", state_of(2))
    assert len(names_in(tmp_path / "c")) == 2


def test_a_queue_saves_a_snapshot(calls_queue: AsyncCallsQueue, url: str) -> None:
    for seed in (1, 2):
        state = small_state(seed)
        writer = FileSystemWriterAsync(url, thread_count=2, separation_hint="t1")
        calls_queue.schedule_async_request(request_of(planned(state, writer)))
        for tensor in state.values():
            tensor.zero_()
        assert calls_queue.maybe_finalize_async_calls(blocking=True) == [seed - 1]
        assert_stored(url, seed)


def test_dcp_save_accepts_the_writer(url: str) -> None:
    for seed in (1, 2):
        writer = FileSystemWriterAsync(url)
        dcp.save(small_state(seed), storage_writer=writer, no_dist=True)
        assert_stored(url, seed)


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DecentralizedPlanner])
def test_saves_by_a_cached_plan_use_new_names(url: str, planner: Any) -> None:
    cached: Any = (None, None, False)
    metadata, seen = None, set()
    for seed in range(4):
        (writer, made, wrapper), central, local, is_as_cached, _ = save_state_dict_async_plan(
            small_state(seed),
            FileSystemWriterAsync(url),
            planner=planner(),
            cached_ckpt_structure=cached,
        )
        metadata, cached = made or metadata, (central, local, is_as_cached)
        finish((writer, metadata, wrapper))
        assert_stored(url, seed)
        names = objects_in(url) - {".metadata"}
        assert names.isdisjoint(seen)
        seen |= names
    assert cached[2]


def test_a_writer_can_be_reused(url: str) -> None:
    writer = FileSystemWriterAsync(url)
    for seed in (1, 2):
        finish(planned(small_state(seed), writer))
        assert_stored(url, seed)


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_upload_leaves_the_earlier_checkpoint_and_no_other_object(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small_state(1), url)
    put = ObjectStore.put

    def refuse(store: ObjectStore, name: str, *rest: Any) -> Any:
        if name.endswith("_3.distcp"):
            raise PermissionError(13, "upload failed: denied", store.url_of(name))
        return put(store, name, *rest)

    monkeypatch.setattr(ObjectStore, "put", refuse)
    with pytest.raises(CheckpointException, match=r"Worker failure: .*denied.*_3\.distcp"):
        save(small_state(2), url, thread_count=4)
    assert_stored(url, 1)


def test_the_second_of_two_saves_at_once_is_not_committed(url: str) -> None:
    first, second = (plan_save(small_state(seed), url) for seed in (1, 2))
    for one in (first, second):
        one.run()
    first.finalize()
    with pytest.raises(CheckpointException) as error:
        second.finalize()
    assert isinstance(cause_of(error.value), NotCommitted)
    assert_stored(url, 1)


def test_a_save_that_is_never_committed_leaves_no_object(url: str) -> None:
    def run() -> None:
        abandoned = plan_save(small_state(), url)
        abandoned.stage().outcome()
        assert objects_in(url)

    run()
    gc.collect()
    eventually(lambda: objects_in(url) == set())


def test_a_rank_that_has_handed_over_its_results_drops_its_writer_but_keeps_its_objects(
    url: str,
) -> None:
    # This rank does not commit, and knows no tag of the coordinator, as with a cached plan.
    writer = FileSystemWriterAsync(url)
    writer.set_up_storage_writer(False)
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(small_state(), is_coordinator=False)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plan = planner.finish_plan(writer.prepare_decentralized_global_plan(plan))
    writer.prepare_write_data(plan, planner)
    function, preload, arguments = writer.get_save_function_and_args()
    assert function is not None
    assert preload is not None
    function(arguments[0], preload(), arguments[2])
    results = writer.retrieve_write_results()
    assert isinstance(results, list)
    names = {result.storage_data.relative_path for result in results}
    del writer, function, preload, arguments
    gc.collect()
    assert objects_in(url) == names


@pytest.mark.parametrize("phase", ["engine has begun", "files are written", "end"])
def test_an_abort_in_any_phase_leaves_no_object_although_the_plan_is_referenced(
    calls_queue: AsyncCallsQueue, url: str, gate: Gate, phase: str
) -> None:
    held = request_of(planned(small_state(), FileSystemWriterAsync(url)))
    with (
        calling({phase: gate}),
        in_thread(lambda: calls_queue.schedule_async_request(held) and None),
    ):
        if phase == "end":
            eventually(lambda: calls_queue.get_num_unfinalized_calls() == 1)
            wait_for_end(calls_queue)
            assert objects_in(url)
        else:
            gate.wait()
        calls_queue.close(abort=True)
        gate.open()
    eventually(lambda: objects_in(url) == set())
    again = planned(small_state(5), FileSystemWriterAsync(url))
    calls_queue.schedule_async_request(request_of(again))
    calls_queue.close()
    assert_stored(url, 5)


def test_a_forked_child_that_drops_the_writer_keeps_the_objects(tmp_path: Path) -> None:
    planned = plan_save(small_state(), f"file://{tmp_path}/c")
    planned.stage().outcome()
    in_child(planned.writer.abandon)
    planned.run()
    planned.finalize()
    assert_checkpoint(tmp_path / "c", small_state())


# --- credentials ----------------------------------------------------------------------------------


def test_a_task_with_credentials_is_not_pickled(url: str) -> None:
    planned = plan_save(small_state(), url, storage_options={"secret": "hidden"})
    for part in (planned.preload, planned.arguments):
        with pytest.raises(TypeError, match="never pickled") as error:
            pickle.dumps(part)
        assert "hidden" not in str(error.value)


def test_a_child_forked_after_staging_needs_no_credentials(url: str) -> None:
    planned = plan_save(small_state(), url, storage_options={"secret": "hidden"})
    planned.stage()
    in_child(planned.function, *planned.arguments)
    planned.finalize()
    assert_stored(url, 0)
