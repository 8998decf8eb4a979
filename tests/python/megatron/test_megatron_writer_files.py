"""Megatron's writer: its files and their contents, and arguments that it refuses."""

from __future__ import annotations

import gc
import io
import os
import threading
import weakref
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException

from tests.async_saves import (
    DecentralizedPlanner,
    assert_checkpoint,
    here,
    is_committed,
    names_in,
    plan_save,
    planned,
    save,
    small_state,
    state_of,
)
from tests.fault_hooks import calling
from tests.gates import Gate, in_thread
from tests.support import StateDict, data_files, stock_save
from torch_ckpt import megatron, nvrx
from torch_ckpt.megatron import FileSystemWriterAsync, save_state_dict_async_finalize

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.mark.parametrize("count", [1, 3, 4])
def test_each_thread_with_items_writes_one_file(tmp_path: Path, count: int) -> None:
    state = small_state(count=count)
    save(state, tmp_path / "c", thread_count=4)
    assert names_in(tmp_path / "c") == [f"__0_{n}.distcp" for n in range(count)]
    assert_checkpoint(tmp_path / "c", state)


def items_of(metadata: Any) -> dict[str, set[str]]:
    """Returns the names of the items in each file."""
    found: dict[str, set[str]] = {}
    for index, info in metadata.storage_data.items():
        found.setdefault(info.relative_path, set()).add(index.fqn)
    return found


@pytest.mark.parametrize(
    "files",
    [
        {"__0_0": {"model.0", "model.1"}, "optim__0_1": {"optim.0", "optim.1"}},
        {
            "__0_0": {"model.0"},
            "__0_1": {"model.1"},
            "optim__0_2": {"optim.0"},
            "optim__0_3": {"optim.1"},
        },
    ],
    ids=["2 threads", "4 threads"],
)
def test_items_with_the_hint_are_in_separate_files(
    tmp_path: Path, files: dict[str, set[str]]
) -> None:
    state = {
        f"{side}.{n}": torch.full((64, 64), float(n)) for side in ("model", "optim") for n in "01"
    }
    options: StateDict = {"thread_count": len(files), "separation_hint": "optim"}
    metadata = save(dict(state), tmp_path / "c", **options)
    assert items_of(metadata) == {f"{name}.distcp": items for name, items in files.items()}
    assert_checkpoint(tmp_path / "c", state)
    # A hint without items makes no file.
    save(small_state(), tmp_path / "d", **options)
    assert names_in(tmp_path / "d") == [f"__0_{n}.distcp" for n in range(len(files) // 2)]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DecentralizedPlanner])
def test_a_single_file_and_its_metadata_are_identical_to_those_of_stock_torch(
    tmp_path: Path, planner: Any
) -> None:
    # Also torch's own quantized tensors, which are not dequantized.
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.1, 0, torch.qint8)
    states = {"q": quantized}, state_of() | {"of another class": Fraction(1, 3)}
    for number, state in enumerate(states):
        path = tmp_path / str(number)
        of_stock = stock_save(state, path / "stock", thread_count=1)
        metadata = save(state, path / "ours", thread_count=1, planner=planner())
        [stock], [ours] = data_files(path / "stock"), data_files(path / "ours")
        assert stock.name == ours.name
        assert stock.read_bytes() == ours.read_bytes()
        read = dcp.FileSystemReader(path / "ours").read_metadata()
        assert list(read.state_dict_metadata) == list(of_stock.state_dict_metadata)
        assert read.planner_data == of_stock.planner_data
        assert read.storage_data == of_stock.storage_data == metadata.storage_data


def test_each_item_has_a_file_without_single_file_per_rank(tmp_path: Path) -> None:
    metadata = save(small_state(), tmp_path / "c", single_file_per_rank=False)
    assert names_in(tmp_path / "c") == [f"__0_{n}.distcp" for n in range(4)]
    assert sorted(map(len, items_of(metadata).values())) == [1, 1, 1, 1]
    assert_checkpoint(tmp_path / "c", small_state())


def test_a_rank_without_items_has_no_functions(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(tmp_path / "c")
    finalizing = planned({}, writer)
    assert writer.get_save_function_and_args() == (None, None, [])
    assert not writer.has_data_to_write
    assert writer.results_queue is None
    assert writer.retrieve_write_results() == []
    save_state_dict_async_finalize(*finalizing)
    assert names_in(tmp_path / "c") == []
    assert is_committed(tmp_path / "c")


def test_the_writer_has_the_attributes_that_callers_read(tmp_path: Path) -> None:
    writer = FileSystemWriterAsync(str(tmp_path / "c"), thread_count=3, separation_hint="optim")
    assert writer.write_buckets is None
    planned(small_state(), writer)
    assert writer.has_data_to_write
    assert writer.write_buckets
    assert writer.checkpoint_dir == str(tmp_path / "c") == writer.checkpoint_id
    assert (writer.thread_count, writer.separation_hint, writer.use_msc) == (3, "optim", False)
    assert writer.can_run_decentralized_global_plan


# --- contents ------------------------------------------------------------------------------------


def test_sources_are_released_when_they_are_staged(
    tmp_path: Path, held_after_staging: Gate
) -> None:
    state = {"t": torch.ones(1000)}
    source = weakref.ref(state["t"])
    planned = plan_save(state, tmp_path / "c")
    planned.stage()
    del state["t"]
    assert source() is None


@pytest.mark.parametrize("moment", ["engine has begun", "sources are copied"])
def test_a_source_changed_by_another_thread_during_staging_fails_the_save(
    tmp_path: Path, gate: Gate, moment: str
) -> None:
    state = small_state()
    planned = plan_save(state, tmp_path / "c")
    with calling({moment: gate}), in_thread(lambda: here(planned.writer)):
        gate.wait()
        state["t2"].add_(1)
        gate.open()
    with pytest.raises(CheckpointException, match="changed before the save had copied it"):
        planned.finalize()
    assert os.listdir(tmp_path / "c") == []


class Quantized(torch.Tensor):
    """Quantized tensor like TransformerEngine's, whose dtype is that of its dequantized values."""

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
        assert func is torch.ops.aten.is_pinned.default, func  # called by a plan
        return False


def test_quantized_tensor_subclasses_are_saved_dequantized(tmp_path: Path) -> None:
    data = torch.arange(12, dtype=torch.int8).view(3, 4)
    save({"q": Quantized(data), "t": torch.ones(2)}, tmp_path / "c")
    assert_checkpoint(tmp_path / "c", {"q": data.float() * 0.5, "t": torch.ones(2)})


def test_an_object_that_cannot_be_pickled_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="cannot pickle"):
        save({"lock": threading.Lock()}, tmp_path / "c")


def test_the_garbage_collector_may_run_during_a_save(tmp_path: Path, gate: Gate) -> None:
    state = state_of()
    planned = plan_save(state, tmp_path / "c")
    with calling({"engine has begun": gate}), in_thread(lambda: here(planned.writer)):
        gate.wait()
        # The engine has begun to read tensors that only the save still references.
        state.clear()
        gc.collect()
        gate.open()
    planned.finalize()
    assert_checkpoint(tmp_path / "c", state_of())


def test_a_plan_restores_the_threshold_of_the_garbage_collector(tmp_path: Path) -> None:
    before = gc.get_threshold()
    planned(state_of(), FileSystemWriterAsync(tmp_path / "c"))
    assert gc.get_threshold() == before

    class Failing(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            raise ValueError("finish_plan")

    failed = planned(state_of(), FileSystemWriterAsync(tmp_path / "d"), Failing())
    assert gc.get_threshold() == before
    with pytest.raises(CheckpointException, match="finish_plan"):
        save_state_dict_async_finalize(*failed)


# --- what the engine cannot write ----------------------------------------------------------------


class Flip(StreamTransformExtension):
    """Transform that is never applied."""

    @staticmethod
    def from_descriptor(version: str) -> Flip:
        return Flip()

    @staticmethod
    def registry_name() -> str:
        return "stream.flip"

    def get_descriptor(self) -> str:
        return "stream.flip"

    def transform_to(self, output: Any) -> Any:
        raise NotImplementedError

    def transform_from(self, input: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("module", "original"),
    [
        (megatron, "megatron.core.dist_checkpointing.strategies.filesystem_async"),
        (nvrx, "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"),
    ],
    ids=["Megatron-core", "nvrx"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"use_msc": True},
        {"open_file": io.open_code},
        {"_extensions": [Flip()]},
    ],
    ids=["use_msc", "open_file", "transforms"],
)
def test_what_the_engine_cannot_write_is_refused_with_the_name_of_the_original_class(
    tmp_path: Path, options: StateDict, module: Any, original: str
) -> None:
    with pytest.raises(ValueError, match=f"use {original}.FileSystemWriterAsync"):
        module.FileSystemWriterAsync(tmp_path, **options)
