"""Options of the reader: all combinations load the same values, and read no more than needed."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from benchmarks.limits import direct_io_works
from benchmarks.measure import bytes_read
from tests.support import assert_equal, data_files, emptied, f32, load, pairwise, save
from torch_ckpt._base.progress import Progress

OPTIONS_STATE = {
    "large": f32(1500, 700),
    "transposed": f32(600, 700).t(),
    **{f"small {i}": f32(i + 1, 33, seed=i) for i in range(50)},
    "step": 7,
    "note": "x" * 5000,
}


@pytest.mark.parametrize(
    ("thread_count", "direct_io", "verify", "is_cached"),
    pairwise(itertools.product([1, 2, 8], [True, False, "auto"], [True, False], [True, False])),
)
def test_every_pair_of_options_loads_the_same_values_from_the_page_cache_and_the_disk(
    tmp_path: Path, thread_count: int, direct_io: bool | str, verify: bool, is_cached: bool
) -> None:
    if direct_io is True and not direct_io_works(tmp_path):
        pytest.skip("this file system has no direct I/O")
    save(OPTIONS_STATE, tmp_path, sync_files=not is_cached)
    for file in [] if is_cached else data_files(tmp_path):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    loaded = emptied(OPTIONS_STATE)
    load(loaded, tmp_path, thread_count=thread_count, direct_io=direct_io, verify=verify)
    assert_equal(loaded, OPTIONS_STATE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"thread_count": 0}, "thread_count must be at least 1, got 0"),
        ({"max_inflight_bytes": 5}, "max_inflight_bytes must be at least 1048576, got 5"),
        ({"direct_io": 1.5}, "direct_io must be True, False or"),
    ],
    ids=str,
)
def test_the_reader_refuses_invalid_options(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        torch_ckpt.FileSystemReader(tmp_path, **options)


def test_progress_of_a_load_reaches_the_total(tmp_path: Path) -> None:
    save(OPTIONS_STATE, tmp_path)
    seen: list[Progress] = []
    load(emptied(OPTIONS_STATE), tmp_path, progress=seen.append)
    done = [progress.bytes_done for progress in seen]
    tensors = (value for value in OPTIONS_STATE.values() if isinstance(value, torch.Tensor))
    assert done == sorted(done)
    assert done[-1] == seen[-1].bytes_planned == sum(tensor.nbytes for tensor in tensors)


def test_a_progress_function_runs_outside_inference_mode(tmp_path: Path) -> None:
    def note(_progress: Progress) -> None:
        modes.append(torch.is_inference_mode_enabled())

    modes: list[bool] = []
    save(OPTIONS_STATE, tmp_path)
    load(emptied(OPTIONS_STATE), tmp_path, progress=note)
    assert set(modes) == {False}


def test_control_c_ends_a_load(tmp_path: Path) -> None:
    def interrupt(_progress: Progress) -> None:
        signal.raise_signal(signal.SIGINT)

    save(OPTIONS_STATE, tmp_path)
    with pytest.raises((KeyboardInterrupt, dcp.CheckpointException)) as error:
        load(emptied(OPTIONS_STATE), tmp_path, progress=interrupt)
    assert "KeyboardInterrupt" in error.exconly()


def test_a_full_load_reads_nothing_twice(tmp_path: Path) -> None:
    save(OPTIONS_STATE, tmp_path, sync_files=False)
    loaded = emptied(OPTIONS_STATE)
    stored = sum(file.stat().st_size for file in tmp_path.iterdir())
    before = bytes_read()
    load(loaded, tmp_path, direct_io=False)
    # The archive of the transposed tensor is read once more.
    assert bytes_read() - before <= 1.05 * stored
