"""Megatron's writer: its files and their contents."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.async_saves import (
    Caller,
    DecentralizedPlanner,
    assert_checkpoint,
    here,
    is_committed,
    names_in,
    open_in_python,
    plan_save,
    planned,
    save,
    small_state,
    state_of,
)
from tests.fault_hooks import calling
from tests.gates import Gate, in_thread
from tests.support import (
    assert_equal,
    data_files,
    emptied,
    random_tensor,
    stock_load,
    stock_save,
)
from torch_ckpt.megatron import FileSystemWriterAsync, save_state_dict_async_finalize

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


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
def test_each_thread_with_items_writes_one_file(
    tmp_path: Path, threads: int, count: int, names: list[str]
) -> None:
    state = small_state(count=count)
    save(state, tmp_path / "c", thread_count=threads)
    assert names_in(tmp_path / "c") == names
    assert_checkpoint(tmp_path / "c", state)


def items_of(metadata: Any) -> dict[str, set[str]]:
    """Returns the names of the items in each file."""
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
def test_items_with_the_hint_are_in_separate_files(
    tmp_path: Path, threads: int, files: dict[str, set[str]], by_engine: bool
) -> None:
    opened = {} if by_engine else {"open_file": open_in_python}
    metadata = save(
        dict(HINTED), tmp_path / "c", thread_count=threads, separation_hint="optim", **opened
    )
    assert items_of(metadata) == {f"{name}.distcp": items for name, items in files.items()}
    assert_checkpoint(tmp_path / "c", dict(HINTED))
    # A hint without items makes no file.
    save(small_state(), tmp_path / "d", thread_count=2, separation_hint="optim", **opened)
    assert all(name.startswith("__0_") for name in names_in(tmp_path / "d"))


def test_a_hint_with_one_thread_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="thread_count >= 2"):
        FileSystemWriterAsync(tmp_path, thread_count=1, separation_hint="optim")


@pytest.mark.parametrize("planner", [dcp.DefaultSavePlanner, DecentralizedPlanner])
def test_a_single_file_is_identical_to_the_file_of_stock_torch(
    tmp_path: Path, planner: Any
) -> None:
    stock_save(state_of(), tmp_path / "stock", thread_count=1)
    save(state_of(), tmp_path / "ours", thread_count=1, planner=planner())
    [stock], [ours] = data_files(tmp_path / "stock"), data_files(tmp_path / "ours")
    assert stock.name == ours.name
    assert stock.read_bytes() == ours.read_bytes()


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine", "python"])
def test_each_item_has_a_file_without_single_file_per_rank(tmp_path: Path, by_engine: bool) -> None:
    opened = {} if by_engine else {"open_file": open_in_python}
    metadata = save(small_state(), tmp_path / "c", single_file_per_rank=False, **opened)
    assert names_in(tmp_path / "c") == [f"__0_{n}.distcp" for n in range(4)]
    assert sorted(map(len, items_of(metadata).values())) == [1, 1, 1, 1]
    assert_checkpoint(tmp_path / "c", small_state())


def test_results_are_grouped_by_file_number(tmp_path: Path) -> None:
    # The large items are placed first, although the small ones are first in the plan.
    state = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(5000), "d": torch.ones(900)}
    planned = plan_save(state, tmp_path / "c", thread_count=3)
    here(planned.writer)
    for number, of_file in planned.arguments[2].get().items():
        assert {result.storage_data.relative_path for result in of_file} == {f"__0_{number}.distcp"}


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


def test_changes_after_staging_do_not_reach_the_checkpoint(tmp_path: Path) -> None:
    state = state_of()
    planned = plan_save(state, tmp_path / "c")
    planned.stage()
    with torch.no_grad():
        for part in state["model"], state["optimizer"]:
            for value in part.values():
                if isinstance(value, torch.Tensor) and value.numel():
                    value.untyped_storage().fill_(7)
    state["optimizer"]["step"] = -1
    planned.run()
    planned.finalize()
    assert_checkpoint(tmp_path / "c", state_of())


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


class Gated(torch.Tensor):
    """A tensor whose copy waits for a gate."""

    gate: Any = None

    def detach(self) -> Any:
        type(self).gate()
        return super().detach()


def test_a_source_changed_by_another_thread_during_a_copy_in_python_fails_the_save(
    tmp_path: Path, gate: Gate
) -> None:
    state = small_state() | {"z": torch.ones(3).as_subclass(Gated)}
    planned = plan_save(state, tmp_path / "c", open_file=open_in_python)
    Gated.gate = gate
    try:
        with in_thread(lambda: here(planned.writer)):
            gate.wait()
            state["t2"].add_(1)
            gate.open()
    finally:
        Gated.gate = None
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


@pytest.mark.parametrize("by_engine", [True, False], ids=["engine", "python"])
def test_quantized_tensor_subclasses_are_saved_dequantized(tmp_path: Path, by_engine: bool) -> None:
    data = torch.arange(12, dtype=torch.int8).view(3, 4)
    opened = {} if by_engine else {"open_file": open_in_python}
    save({"q": Quantized(data), "t": torch.ones(2)}, tmp_path / "c", **opened)
    assert_checkpoint(tmp_path / "c", {"q": data.float() * 0.5, "t": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_torchs_own_quantized_tensors_are_saved_unchanged(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.1, 0, torch.qint8)
    save({"q": quantized}, tmp_path / "ours", thread_count=1)
    stock_save({"q": quantized}, tmp_path / "stock", thread_count=1)
    [ours], [stock] = data_files(tmp_path / "ours"), data_files(tmp_path / "stock")
    assert ours.read_bytes() == stock.read_bytes()


@pytest.mark.usefixtures("default_group")
def test_dtensors_are_saved_by_shard(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = random_tensor((8, 5), torch.float32).nan_to_num()
    save({"d": distribute_tensor(whole, mesh, [Shard(0)])}, tmp_path / "c")
    dist.destroy_process_group()
    assert_checkpoint(tmp_path / "c", {"d": whole})


def test_objects_are_saved_as_stock_torch_saves_them(tmp_path: Path, caller: Caller) -> None:
    state = {"of another class": Fraction(1, 3), "t": torch.ones(3)}
    save(state, tmp_path / "c", caller)
    loaded = emptied(state)
    stock_load(loaded, tmp_path / "c")
    assert_equal(loaded, state)


def test_an_object_that_cannot_be_pickled_fails_the_save(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="cannot pickle"):
        save({"lock": threading.Lock()}, tmp_path / "c")


def test_the_metadata_is_equal_to_that_of_stock_torch(tmp_path: Path) -> None:
    ours = save(state_of(), tmp_path / "ours", thread_count=1)
    stock = stock_save(state_of(), tmp_path / "stock", thread_count=1)
    read = dcp.FileSystemReader(tmp_path / "ours").read_metadata()
    assert list(read.state_dict_metadata) == list(stock.state_dict_metadata)
    assert read.planner_data == stock.planner_data
    assert read.storage_data == stock.storage_data == ours.storage_data


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


def test_a_plan_restores_the_threshold_of_the_garbage_collector(
    tmp_path: Path,
) -> None:
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
