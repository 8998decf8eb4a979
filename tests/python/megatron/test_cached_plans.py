"""Plans that are cached between saves: the checkpoints are the same, and changes are reported."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from tests.async_saves import (
    DecentralizedPlanner,
    assert_checkpoint,
    finish,
    here,
    small_state,
    state_of,
)
from tests.fault_hooks import at_fault_points, failing
from tests.gates import eventually
from tests.support import StateDict, data_files
from torch_ckpt.checkpoint.lease import remove_leftovers
from torch_ckpt.megatron import (
    CachedMetadataFileSystemReader,
    FileSystemWriterAsync,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")

for_each_planner = pytest.mark.parametrize(
    "planner", [dcp.DefaultSavePlanner, DecentralizedPlanner]
)


class Site:
    """The state that Megatron keeps between saves.

    Attributes:
        cached: ``cached_ckpt_structure`` for the next plan.
        metadata: the last metadata that a plan has made.
        loaded: the plans of all ranks in the loaded checkpoint.
    """

    def __init__(self, planner: Callable[[], dcp.SavePlanner]) -> None:
        self.planner = planner
        self.cached: tuple[SavePlan | None, SavePlan | None, bool] = (None, None, False)
        self.metadata: Metadata | None = None
        self.loaded: list[SavePlan] | None = None

    def plan(self, state: StateDict, path: Path) -> tuple[Any, bool]:
        """Returns the arguments of the finalize function, and True if the plans are the loaded
        ones."""
        finalizing, central, local, is_as_cached, is_as_loaded = save_state_dict_async_plan(
            state,
            FileSystemWriterAsync(path, thread_count=2),
            None,
            0,
            planner=self.planner(),
            cached_ckpt_structure=self.cached,
            loaded_all_plans=self.loaded,
        )
        self.cached = central, local, is_as_cached
        writer, metadata, wrapper = finalizing
        self.metadata = metadata or self.metadata
        return (writer, self.metadata, wrapper), is_as_loaded

    def save(self, state: StateDict, path: Path) -> None:
        finalizing, _ = self.plan(state, path)
        finish(finalizing)


def with_valid_plan(planner: Callable[[], dcp.SavePlanner], path: Path) -> Site:
    """Returns a site that has saved two equal states into the directory."""
    site = Site(planner)
    for seed in range(2):
        assert not site.cached[2]
        site.save(small_state(seed), path)
    assert site.cached[2]
    return site


# --- plans of the previous save ------------------------------------------------------------------


@for_each_planner
@pytest.mark.parametrize("into", ["one directory", "many"])
def test_saves_with_a_cached_plan_contain_their_own_values(
    tmp_path: Path, planner: Any, into: str
) -> None:
    site = Site(planner)
    for seed in range(5):
        path = tmp_path / ("c" if into == "one directory" else f"c{seed}")
        site.save(state_of(seed), path)
        assert_checkpoint(path, state_of(seed))
        assert len(data_files(path)) == 2
    assert site.cached[2]


@for_each_planner
def test_a_valid_plan_is_not_exchanged_and_makes_no_metadata(tmp_path: Path, planner: Any) -> None:
    site = with_valid_plan(planner, tmp_path / "c")
    metadata, site.metadata = site.metadata, None
    for at in ("d", "e"):
        with at_fault_points(refuse_exchange):
            (writer, made, wrapper), _ = site.plan(small_state(2), tmp_path / at)
        assert site.cached[2]
        assert made is None
        here(writer)
        if at == "d":
            save_state_dict_async_finalize(writer, metadata, wrapper)
            assert_checkpoint(tmp_path / "d", small_state(2))
            continue
        text = "pass the metadata of the save whose plan is reused"
        with pytest.raises(CheckpointException, match=text):
            save_state_dict_async_finalize(writer, None, wrapper)
        assert os.listdir(tmp_path / "e") == []


def refuse_exchange(operation: str, _path: str) -> None:
    assert operation != "plan of all ranks"


CHANGES: dict[str, tuple[Callable[[StateDict], Any], str]] = {
    "another name": (lambda state: state.update(more=torch.ones(2)), "more"),
    "a name less": (lambda state: state.pop("t1"), "t1"),
    "another shape": (
        lambda state: state.update(t2=torch.ones(3, 8)),
        "shapes, dtypes, offsets or nesting",
    ),
    "another dtype": (lambda state: state.update(t2=state["t2"].double()), "shapes, dtypes"),
    "an object": (lambda state: state.update(t2="text"), "t2"),
}


@pytest.mark.parametrize("change", CHANGES)
@for_each_planner
def test_a_state_that_differs_from_the_valid_plan_fails_the_save_and_is_named(
    tmp_path: Path, planner: Any, change: str
) -> None:
    site = with_valid_plan(planner, tmp_path / "c")
    change_state, message = CHANGES[change]
    state = small_state(2)
    change_state(state)
    # The plan does not raise, because it exchanges nothing with other ranks.
    finalizing, _ = site.plan(state, tmp_path / "c")
    here(finalizing[0])
    with pytest.raises(CheckpointException, match=message) as error:
        save_state_dict_async_finalize(*finalizing)
    assert "the state dict has changed since the cached plan was made" in str(error.value)
    assert_checkpoint(tmp_path / "c", small_state(1))


def test_a_changed_nesting_of_the_same_names_fails_a_save_with_a_valid_plan(tmp_path: Path) -> None:
    # The flat names are the same, but loading needs the nesting.
    site = Site(dcp.DefaultSavePlanner)
    for seed in range(2):
        site.save({"a": [small_state(seed)["t1"]]}, tmp_path / "c")
    finalizing, _ = site.plan({"a": {"0": small_state(2)["t1"]}}, tmp_path / "c")
    here(finalizing[0])
    with pytest.raises(CheckpointException, match="nesting of the same names"):
        save_state_dict_async_finalize(*finalizing)


@for_each_planner
def test_strides_may_change_although_the_plan_is_valid(tmp_path: Path, planner: Any) -> None:
    site = with_valid_plan(planner, tmp_path / "c")
    state = small_state(2)
    state["t1"] = state["t1"].t().contiguous().t()
    site.save(state, tmp_path / "c")
    assert_checkpoint(tmp_path / "c", small_state(2))


def test_two_valid_plans_for_two_paths_of_one_directory_use_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = with_valid_plan(DecentralizedPlanner, tmp_path / "before")
    # Both choose their file names before either has created a file.
    one, _ = site.plan(small_state(2), tmp_path / "c")
    other, _ = site.plan(small_state(3), Path("c"))
    assert one[0].prefix != other[0].prefix
    for finalizing, seed in ((one, 2), (other, 3)):
        finish(finalizing)
        assert_checkpoint(tmp_path / "c", small_state(seed))


def test_a_torch_planner_with_its_own_plan_cache_works(tmp_path: Path) -> None:
    for seed in range(4):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        finalizing, *_ = save_state_dict_async_plan(
            small_state(seed), FileSystemWriterAsync(tmp_path / f"c{seed}"), planner=planner
        )
        finish(finalizing)
        assert_checkpoint(tmp_path / f"c{seed}", small_state(seed))


# --- plans of a loaded checkpoint ----------------------------------------------------------------


def restarted(path: Path) -> Site:
    """Returns a site that has loaded a checkpoint."""
    site = Site(DecentralizedPlanner)
    site.metadata = CachedMetadataFileSystemReader(path).read_metadata()
    site.loaded = site.metadata.all_local_plans  # type: ignore[attr-defined]
    return site


def test_plans_and_metadata_of_a_loaded_checkpoint_are_reused(tmp_path: Path) -> None:
    Site(DecentralizedPlanner).save(state_of(), tmp_path / "c0")
    site = restarted(tmp_path / "c0")
    for seed in range(1, 5):
        finalizing, is_as_loaded = site.plan(state_of(seed), tmp_path / f"c{seed}")
        assert is_as_loaded is (seed < 3)  # then the plans of two saves are equal
        finish(finalizing)
        assert_checkpoint(tmp_path / f"c{seed}", state_of(seed))
    assert_checkpoint(tmp_path / "c0", state_of())
    # The metadata that a save has written works as well.
    _, is_as_loaded = restarted(tmp_path / "c1").plan(state_of(2), tmp_path / "c2")
    assert is_as_loaded


@pytest.mark.parametrize("change", [*CHANGES, "another number of ranks", "another planner"])
def test_plans_that_differ_from_the_loaded_ones_make_new_metadata(
    tmp_path: Path, change: str
) -> None:
    Site(DecentralizedPlanner).save(small_state(0), tmp_path / "c0")
    site = restarted(tmp_path / "c0")
    state = small_state(1)
    if change in CHANGES:
        CHANGES[change][0](state)
    elif change == "another planner":
        site.planner = dcp.DefaultSavePlanner  # makes the plan of all ranks on the coordinator
    else:
        assert site.loaded is not None
        site.loaded = site.loaded * 2
    loaded = site.metadata
    finalizing, is_as_loaded = site.plan(state, tmp_path / "c1")
    assert not is_as_loaded
    assert finalizing[1] is not loaded
    finish(finalizing)
    assert_checkpoint(tmp_path / "c1", state)


# --- failures ------------------------------------------------------------------------------------


def planner_failing(method: str) -> dcp.SavePlanner:
    """Returns a planner with a method that raises."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError(f"{method} fails")

    planner = DecentralizedPlanner()
    setattr(planner, method, fail)
    return planner


@pytest.mark.parametrize("method", ["set_up_planner", "create_local_plan", "create_global_plan"])
def test_a_planner_error_before_the_exchange_ends_fails_the_plan(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointException, match=f"{method} fails"):
        Site(lambda: planner_failing(method)).plan(small_state(0), tmp_path / "c")
    # remove_leftovers() would return None if the failed plan still held the directory.
    assert remove_leftovers(tmp_path / "c") == []


@pytest.mark.parametrize("method", ["finish_plan", "resolve_data"])
def test_a_planner_error_after_the_exchange_is_raised_by_finalize(
    tmp_path: Path, method: str
) -> None:
    finalizing, _ = Site(lambda: planner_failing(method)).plan(small_state(0), tmp_path / "c")
    assert finalizing[0].get_save_function_and_args() == (None, None, [])
    with pytest.raises(CheckpointException, match=f"Worker failure: {method} fails"):
        save_state_dict_async_finalize(*finalizing)
    assert os.listdir(tmp_path / "c") == []


def test_a_failed_commit_raises_and_leaves_no_file(tmp_path: Path) -> None:
    site = Site(DecentralizedPlanner)
    finalizing, _ = site.plan(small_state(0), tmp_path / "c")
    here(finalizing[0])
    with (
        failing("rename", ENOSPC, tmp_path / "c" / ".metadata"),
        pytest.raises(CheckpointException, match=r"rename .*No space left"),
    ):
        save_state_dict_async_finalize(*finalizing)
    assert os.listdir(tmp_path / "c") == []


def test_a_dropped_plan_releases_the_directory(tmp_path: Path) -> None:
    Site(DecentralizedPlanner).plan(small_state(0), tmp_path / "c")
    eventually(lambda: gc.collect() >= 0 and remove_leftovers(tmp_path / "c") == [])


def test_a_writer_of_another_class_is_refused(tmp_path: Path) -> None:
    writer: Any = dcp.FileSystemWriter(tmp_path / "c")
    with pytest.raises(TypeError, match="cannot save through a FileSystemWriter; pass"):
        save_state_dict_async_plan(small_state(0), writer)
