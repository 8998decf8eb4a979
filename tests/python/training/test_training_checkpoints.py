"""save_checkpoint and load_checkpoint_if_it_exists, in one process."""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.core import url_to_fs

import torch_ckpt
from tests.support import assert_equal, cause_of, data_files, no_warnings, random_tensor
from torch_ckpt import CheckpointError, CheckpointManager, LoadMismatch
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.steps import open_steps
from torch_ckpt.training import load_checkpoint_if_it_exists, save_checkpoint

pytestmark = pytest.mark.usefixtures("without_warnings")


@pytest.fixture(params=["local", "remote"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "local" else memory_url()


def memory_url() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def state_of(seed: int) -> dict[str, Any]:
    return {"w": random_tensor((5, 3), torch.float32, seed), "seed": seed}


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(5, 3), "seed": -1}


def program(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "steps": 0}


def trained(seed: int) -> dict[str, Any]:
    state = program(seed)
    state["model"](torch.ones(4)).sum().backward()
    state["optimizer"].step()
    return {**state, "steps": 1}


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Replaces the model and the optimizer by their tensors."""
    parts = {key: state[key].state_dict() for key in ("model", "optimizer")}
    return {**state, **parts}


def test_the_newest_step_is_loaded_and_without_a_step_the_state_is_unchanged(
    directory: str,
) -> None:
    state = blank()
    assert load_checkpoint_if_it_exists(directory, state) == 0
    assert_equal(state, blank())
    for step in (9, 100, 10):
        save_checkpoint(directory, step, state_of(step))
    assert load_checkpoint_if_it_exists(directory, state) == 100
    assert_equal(state, state_of(100))


def test_a_directory_with_a_trailing_slash_is_the_same_directory(directory: str) -> None:
    save_checkpoint(f"{directory}/", 3, state_of(3))
    save_checkpoint(directory, 4, state_of(4))
    state = blank()
    assert load_checkpoint_if_it_exists(f"{directory}/", state) == 4
    assert_equal(state, state_of(4))


def test_a_manager_and_the_functions_continue_from_each_others_steps(directory: str) -> None:
    with CheckpointManager(directory, preemption=None) as manager:
        manager.save(10, state_of(10))
    for step in (20, 30):
        save_checkpoint(directory, step, state_of(step))
    state = blank()
    with CheckpointManager(directory, preemption=None) as manager:
        with no_warnings():
            assert manager.restore(state) == 30
        assert_equal(state, state_of(30))
        manager.save(40, state_of(40))
    assert load_checkpoint_if_it_exists(directory, state) == 40
    assert_equal(state, state_of(40))


def test_steps_of_the_functions_belong_to_a_run_that_has_saved_no_step(
    tmp_path: Path,
) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, step, state_of(step))
    with CheckpointManager(tmp_path, preemption=None) as manager:
        manager.restore(blank())
        # The run holds the lease with epoch 1, and its first step is of that epoch, too.
        save_checkpoint(tmp_path, 30, state_of(30))
    assert [info.epoch for info in open_steps(tmp_path).entries()] == [0, 0, 1]


def test_a_root_of_a_manager_that_is_copied_to_a_url_is_continued_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, preemption=None) as manager:
        manager.save(10, state_of(10))
    url = memory_url()
    file_system, path = url_to_fs(url)
    file_system.put(str(tmp_path / "0000000010"), f"{path}/0000000010", recursive=True)
    with CheckpointManager(url, preemption=None) as manager:
        assert manager.restore(blank()) == 10
        manager.save(20, state_of(20))
        manager.save(30, state_of(30))
    save_checkpoint(url, 40, state_of(40))
    assert [info.epoch for info in open_steps(url).entries()] == [1, 2, 2, 2]
    with CheckpointManager(url, read_only=True) as manager, no_warnings():
        assert manager.restore(blank()) == 40


def test_a_complete_step_is_replaced_only_with_overwrite(directory: str) -> None:
    save_checkpoint(directory, 1, state_of(1))
    with pytest.raises(FileExistsError, match="already exists and is complete"):
        save_checkpoint(directory, 1, state_of(2))
    state = blank()
    assert load_checkpoint_if_it_exists(directory, state) == 1
    assert_equal(state, state_of(1))
    save_checkpoint(directory, 1, state_of(2), overwrite=True)
    assert load_checkpoint_if_it_exists(directory, state) == 1
    assert_equal(state, state_of(2))


def test_a_state_that_does_not_fit_is_refused(directory: str) -> None:
    save_checkpoint(directory, 1, state_of(1))
    with pytest.raises(dcp.CheckpointException) as caught:
        load_checkpoint_if_it_exists(directory, {"w": torch.zeros(3, 5)})
    assert isinstance(cause_of(caught.value), LoadMismatch)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.int64),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.int64, torch.int32),
        (torch.uint8, torch.float32),
        (torch.bool, torch.uint8),
        (torch.float32, torch.complex64),
        (torch.float32, torch.float64),
        (torch.uint8, torch.int16),
    ],
    ids=str,
)
def test_another_dtype_is_refused_by_name(
    directory: str, stored: torch.dtype, wanted: torch.dtype
) -> None:
    save_checkpoint(directory, 1, {"t": torch.ones(3), "w": torch.ones(3, dtype=stored)})
    state = {"t": torch.zeros(3), "w": torch.zeros(3, dtype=wanted)}
    for free_before_read in (False, True):
        with pytest.raises(dcp.CheckpointException) as caught:
            load_checkpoint_if_it_exists(directory, state, free_before_read=free_before_read)
        mismatch = cause_of(caught.value)
        assert isinstance(mismatch, LoadMismatch)
        assert f"1 with a different dtype:\n  w: stored {stored}, wanted {wanted}" in str(mismatch)
        assert_equal(state, {"t": torch.zeros(3), "w": torch.zeros(3, dtype=wanted)})


def test_every_conversion_without_strict_is_named_once(directory: str) -> None:
    stored = {
        "narrow": torch.full((3,), 1.5),
        "wide": torch.full((3,), 0.1),
        "kind": torch.ones(3, dtype=torch.uint8),
        "same": torch.ones(3),
    }
    save_checkpoint(directory, 1, stored)
    state = {
        "narrow": torch.zeros(3, dtype=torch.int64),
        "wide": torch.zeros(3, dtype=torch.float64),
        "kind": torch.zeros(3),
        "same": torch.zeros(3),
    }
    with pytest.warns(UserWarning, match="dtypes") as caught:
        load_checkpoint_if_it_exists(directory, state, strict=False)
    messages = [str(w.message) for w in caught]
    assert messages == [
        "loading converts tensors to dtypes with less precision or range than the stored "
        "dtypes: narrow (torch.float32 to torch.int64)",
        "converted tensors to the dtypes of the state: "
        "wide (from torch.float32 to torch.float64), "
        "kind (from torch.uint8 to torch.float32)",
    ]
    assert_equal(state, {name: stored[name].to(state[name].dtype) for name in state})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("0000000002", "not restoring directories without write_completed: .*0000000002"),
        ("0000000002.tmp-0123abcd", "skipped steps .*incomplete: .*0000000002.tmp-0123abcd"),
    ],
)
def test_an_incomplete_step_is_skipped_and_named(tmp_path: Path, name: str, text: str) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    (tmp_path / name).mkdir()
    with pytest.warns(UserWarning, match=text) as caught:
        assert load_checkpoint_if_it_exists(tmp_path, blank()) == 1
    assert [warning.filename for warning in caught] == [__file__]
    # Other ranks wait for this rank, so a warning is never an exception.
    state = blank()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_checkpoint_if_it_exists(tmp_path, state) == 1
    assert_equal(state, state_of(1))


def test_a_damaged_step_is_skipped_and_named(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, state_of(step))
    [file] = data_files(tmp_path / "0000000002")
    file.write_bytes(file.read_bytes()[:-40])
    # The objects that are freed before a read cannot be read from another step.
    with pytest.raises(CheckpointError, match="0000000002"):
        load_checkpoint_if_it_exists(tmp_path, blank(), free_before_read=True)
    state = blank()
    with pytest.warns(UserWarning, match="step 2: .*; falling back to step 1"):
        assert load_checkpoint_if_it_exists(tmp_path, state) == 1
    assert_equal(state, state_of(1))


def test_a_single_checkpoint_is_not_taken_for_a_run_without_steps(tmp_path: Path) -> None:
    torch_ckpt.save(state_of(1), tmp_path / "one")
    with pytest.raises(CheckpointError, match="is a single checkpoint, not the root of a run"):
        load_checkpoint_if_it_exists(tmp_path / "one", blank())


def test_the_next_save_removes_leftovers_of_an_interrupted_save(tmp_path: Path) -> None:
    leftover = tmp_path / "0000000001.tmp-0123abcd"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"x")
    save_checkpoint(tmp_path, 1, state_of(1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["0000000001"]


def save_with_manager(directory: str, step: int, state: dict[str, Any]) -> None:
    with CheckpointManager(directory) as manager:
        manager.save(step, state, force=True)


def restore_with_manager(directory: str, state: dict[str, Any]) -> int | None:
    with CheckpointManager(directory, read_only=True) as manager:
        return manager.restore(state)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (save_checkpoint, load_checkpoint_if_it_exists),
        (save_checkpoint, restore_with_manager),
        (save_with_manager, load_checkpoint_if_it_exists),
    ],
    ids=["alone", "loaded by the manager", "saved by the manager"],
)
def test_a_fresh_optimizer_gets_its_state(directory: str, save: Any, load: Any) -> None:
    saved, fresh = trained(1), program(2)
    save(directory, 1, saved)
    assert load(directory, fresh) == 1
    assert_equal(plain(fresh), plain(saved))


def test_the_state_dict_of_an_optimizer_without_state_is_refused(directory: str) -> None:
    save_checkpoint(directory, 1, {"optimizer": trained(1)["optimizer"].state_dict()})
    state = {"optimizer": program(2)["optimizer"].state_dict()}
    with pytest.raises(
        CheckpointError, match=r"6 of .*\n.*optimizer\.state\.0\.step: stored a tensor"
    ):
        load_checkpoint_if_it_exists(directory, state)


def test_names_that_the_state_lacks_are_named(directory: str) -> None:
    save_checkpoint(directory, 1, trained(1))
    state = {"model": program(2)["model"]}
    with pytest.warns(UserWarning, match=r"not in the state.*: optimizer\.param_groups\.0\.a"):
        load_checkpoint_if_it_exists(directory, state)


def test_names_excluded_by_the_names_option_cause_no_warning(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, state_of(1))
    with no_warnings():
        load_checkpoint_if_it_exists(tmp_path, {"w": torch.zeros(5, 3)}, names=["w"])


def test_options_reach_the_writer_and_the_reader(directory: str) -> None:
    save_checkpoint(
        directory, 1, state_of(1), options=torch_ckpt.WriteOptions(single_file_per_rank=False)
    )
    files = {info.relative_path for info in open_steps(directory).metadata(1).storage_data.values()}
    assert len(files) == 2
    state = blank()
    load_checkpoint_if_it_exists(
        directory, state, names=["w"], options=torch_ckpt.ReadOptions(thread_count=1)
    )
    assert_equal(state, {"w": state_of(1)["w"], "seed": -1})


def test_max_io_threads_reaches_the_writer_and_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    read = Source.open

    def recorded(self: Source, *args: Any, **kwargs: Any) -> Any:
        counts.append(self.options.thread_count)
        return read(self, *args, **kwargs)

    # The source is created within the call, so its arguments are visible only here.
    monkeypatch.setattr(Source, "open", recorded)
    state = {str(i): torch.ones(4) for i in range(4)}
    for number in (1, 2):
        save_checkpoint(tmp_path, number, state, max_io_threads=number)
        assert len(data_files(tmp_path / f"000000000{number}")) == number
        load_checkpoint_if_it_exists(tmp_path, state, max_io_threads=number)
    assert counts == [1, 2]


def test_max_io_threads_with_thread_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass one of them"):
        save_checkpoint(
            tmp_path,
            1,
            state_of(1),
            max_io_threads=1,
            options=torch_ckpt.WriteOptions(thread_count=2),
        )
