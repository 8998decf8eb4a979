"""save_checkpoint and load_checkpoint_if_it_exists, in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.remote_stores import hooked_url
from tests.support import assert_equal, cause_of, data_files, random_tensor
from torch_ckpt.errors import LoadMismatch
from torch_ckpt.reader import FileSystemReader
from torch_ckpt.steps import open_steps
from torch_ckpt.training import load_checkpoint_if_it_exists, save_checkpoint


@pytest.fixture(params=["local", "remote"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        # That a step is skipped is to be seen where it is expected only.
        warnings.filterwarnings("error", message="skipped")
        yield str(tmp_path / "run") if request.param == "local" else hooked_url()


def state_of(seed: int) -> dict[str, Any]:
    return {"w": random_tensor((5, 3), torch.float32, seed), "seed": seed}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(5, 3), "seed": -1}


def test_the_newest_step_is_loaded(directory: str) -> None:
    for step in (9, 100, 10):
        save_checkpoint(directory, step, state_of(step))
    state = blank()
    assert load_checkpoint_if_it_exists(directory, state) == 100
    assert_equal(state, state_of(100))


def test_where_nothing_is_the_state_stays_and_the_step_is_0(directory: str) -> None:
    state = blank()
    assert load_checkpoint_if_it_exists(directory, state) == 0
    assert_equal(state, blank())


def test_a_complete_step_is_refused(directory: str) -> None:
    save_checkpoint(directory, 1, state_of(1))
    with pytest.raises(FileExistsError, match="there and complete"):
        save_checkpoint(directory, 1, state_of(2))
    state = blank()
    load_checkpoint_if_it_exists(directory, state)
    assert_equal(state, state_of(1))


def test_a_complete_step_is_replaced_when_told_to(directory: str) -> None:
    save_checkpoint(directory, 1, state_of(1))
    save_checkpoint(directory, 1, state_of(2), overwrite=True)
    state = blank()
    assert load_checkpoint_if_it_exists(directory, state) == 1
    assert_equal(state, state_of(2))


def test_a_state_that_does_not_fit_is_refused(directory: str) -> None:
    save_checkpoint(directory, 1, state_of(1))
    with pytest.raises(dcp.CheckpointException) as caught:
        load_checkpoint_if_it_exists(directory, {"w": torch.zeros(3, 5)})
    assert isinstance(cause_of(caught.value), LoadMismatch)


def test_an_incomplete_step_is_skipped_and_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    (tmp_path / "0000000002").mkdir()
    with pytest.warns(UserWarning, match="skipped.*0000000002"):
        assert load_checkpoint_if_it_exists(tmp_path, blank()) == 1


def test_the_warning_of_a_leftover_comes_after_the_load(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    (tmp_path / "0000000002").mkdir()
    state = blank()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="skipped")
        with pytest.raises(UserWarning, match="skipped"):
            load_checkpoint_if_it_exists(tmp_path, state)
    assert_equal(state, state_of(1))


def test_what_a_save_that_died_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / "0000000001.tmp-0123abcd"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"x")
    save_checkpoint(tmp_path, 1, state_of(1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["0000000001"]


def test_options_reach_the_writer_and_the_reader(directory: str) -> None:
    save_checkpoint(directory, 1, state_of(1), single_file_per_rank=False)
    files = {info.relative_path for info in open_steps(directory).metadata(1).storage_data.values()}
    assert len(files) == 2
    state = blank()
    load_checkpoint_if_it_exists(directory, state, names=["w"], thread_count=1)
    assert_equal(state, {"w": state_of(1)["w"], "seed": -1})


def test_max_io_threads_bounds_the_files_that_are_written(tmp_path: Path) -> None:
    state = {str(i): torch.ones(4) for i in range(4)}
    save_checkpoint(tmp_path, 1, state, max_io_threads=1)
    save_checkpoint(tmp_path, 2, state, max_io_threads=2)
    assert [len(data_files(tmp_path / f"000000000{step}")) for step in (1, 2)] == [1, 2]


def test_max_io_threads_reaches_the_reader(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(directory, 1, state_of(1))
    counts: list[int] = []
    read = FileSystemReader.read_metadata

    def recorded(self: FileSystemReader, *args: Any, **kwargs: Any) -> Any:
        counts.append(self.thread_count)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemReader, "read_metadata", recorded)
    load_checkpoint_if_it_exists(directory, blank(), max_io_threads=3)
    assert counts == [3]


def test_max_io_threads_beside_thread_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass one of them"):
        save_checkpoint(tmp_path, 1, state_of(1), max_io_threads=1, thread_count=2)
