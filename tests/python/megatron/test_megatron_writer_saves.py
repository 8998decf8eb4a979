"""Megatron's writer: failed system calls, several saves, and reused writers."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_saves import (
    DecentralizedPlanner,
    assert_checkpoint,
    failure_of,
    finish,
    here,
    names_in,
    plan_save,
    planned,
    request_of,
    save_to,
    small_state,
    state_of,
)
from tests.gates import Gate, eventually
from tests.interposed import Order, Server
from tests.support import cause_of, files_limited_to
from torch_ckpt.megatron import (
    AsyncCallsQueue,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.mark.parametrize("kind", ["open", "write", "fsync"])
@pytest.mark.parametrize("number", [1, 4])
def test_one_failed_call_in_one_of_four_files_fails_the_save(
    server: Server, tmp_path: Path, kind: str, number: int
) -> None:
    path = tmp_path / "c"
    path.mkdir()
    counted = server.run(Order(kinds=[kind]), tmp_path, save_to, str(path), 4)
    assert counted.error is None, counted.error
    data = [call.number for call in counted.of(kind) if call.path.endswith(".distcp")]
    assert len(data) >= 4
    for file in path.iterdir():
        file.unlink()
    order = Order("fail", data[number - 1], kinds=[kind], errors={kind: errno.EIO})
    run = server.run(order, tmp_path, save_to, str(path), 4)
    assert run.hit is not None
    assert isinstance(run.error, CheckpointException), (run.hit, run.error)
    text = str(cause_of(run.error))
    assert "Errno 5" in text
    assert str(path) in text
    assert os.listdir(path) == []


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DecentralizedPlanner])
def test_of_two_saves_into_one_directory_the_last_to_commit_wins(
    tmp_path: Path, held_after_staging: Gate, first: int, planner: Any
) -> None:
    path = tmp_path / "c"
    saves = {}
    for seed in (1, 2):
        saves[seed] = plan_save(state_of(seed), path, planner(), thread_count=2)
        saves[seed].stage()
    held_after_staging.open()
    for one in saves.values():
        one.run()
    last = 3 - first
    for seed in (first, last):
        saves[seed].finalize()
        assert_checkpoint(path, state_of(seed))
    # The files of the replaced save were deleted by the last commit.
    assert len(names_in(path)) == 2


def test_saves_to_two_paths_of_one_directory_use_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = tmp_path / "c", Path("c")
    saves = [plan_save(state_of(seed), path, thread_count=1) for seed, path in enumerate(paths)]
    for one in saves:
        one.run()
    for one in saves:
        one.finalize()
    assert_checkpoint(tmp_path / "c", state_of(1))


def test_a_failed_save_does_not_affect_another_save_into_the_directory(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    path = tmp_path / "c"
    good, bad = plan_save(state_of(1), path), plan_save(state_of(2), path)
    good.stage()
    bad.stage()
    held_after_staging.open()
    good.run()
    bad.run()
    results = bad.arguments[2]
    assert results.get() is not None
    results.put(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(CheckpointException):
        bad.finalize()
    good.finalize()
    assert_checkpoint(path, state_of(1))
    places = good.finalizing[1].storage_data.values()
    assert len(names_in(path)) == len({info.relative_path for info in places})


def test_a_writer_can_be_reused_even_after_a_failure(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c", thread_count=2)
    for seed in (1, 2, 3):
        if seed == 2:
            finalizing = planned(state_of(), writer)
            with files_limited_to(1000):
                here(writer)
            with pytest.raises(CheckpointException, match="File too large"):
                save_state_dict_async_finalize(*finalizing)
        finish(planned(state_of(seed), writer))
        assert_checkpoint(tmp_path / "c", state_of(seed))
        assert len(names_in(tmp_path / "c")) == 2


def test_results_of_an_earlier_save_are_discarded(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    planned(state_of(1), writer)
    here(writer)
    planned(state_of(2), writer)
    assert "should not be empty" in str(failure_of(writer))


def test_a_referenced_writer_that_has_finished_does_not_give_the_next_one_a_tag(
    tmp_path: Path,
) -> None:
    kept = []
    for seed in (1, 2):
        for name in os.listdir(tmp_path):
            os.unlink(tmp_path / name)
        writer = FileSystemWriterAsync(tmp_path)
        kept.append(planned(small_state(seed), writer))
        here(writer)
        save_state_dict_async_finalize(*kept[-1])
        assert names_in(tmp_path) == ["__0_0.distcp"]
    assert_checkpoint(tmp_path, small_state(2))


def test_a_finished_writer_is_deleted_without_the_garbage_collector(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        writer = FileSystemWriterAsync(tmp_path / "c")
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
