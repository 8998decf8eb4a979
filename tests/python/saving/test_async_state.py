"""torch_ckpt.async_save: the checkpoint has the snapshot of the state, or the save fails by
name."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

import torch_ckpt
from tests.background_saves import (
    STAGINGS,
    OwnMapping,
    assert_checkpoint,
    contents,
    copied,
    everything,
    large,
    spoil,
    step,
    trained,
)
from tests.fault_hooks import before
from tests.gates import LIMIT, Gate
from tests.support import (
    DTYPES,
    StateDict,
    assert_equal,
    cause_of,
    data_files,
    emptied,
    random_tensor,
)
from torch_ckpt import Background, SourceChanged
from torch_ckpt.saving.background import CHUNK_BYTES

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


@pytest.mark.parametrize("staging", STAGINGS)
def test_every_kind_of_value_is_loaded_as_saved(tmp_path: Path, staging: str) -> None:
    torch_ckpt.async_save(everything(), tmp_path / "c", staging=staging).result()
    assert_checkpoint(tmp_path / "c", everything())


def test_every_dtype_makes_the_round_trip(tmp_path: Path) -> None:
    state = {str(dtype): random_tensor((7, 3), dtype) for dtype in DTYPES}
    torch_ckpt.async_save(state, tmp_path / "c").result()
    loaded = emptied(state)
    torch_ckpt.load(loaded, tmp_path / "c")
    assert_equal(loaded, state)


@pytest.mark.parametrize("staging", STAGINGS)
def test_the_data_files_equal_those_of_save(tmp_path: Path, staging: str) -> None:
    state = everything() | {"large": large()}
    torch_ckpt.save(state, tmp_path / "saved")
    torch_ckpt.async_save(state, tmp_path / "async", staging=staging).result()
    assert contents(tmp_path / "async") == contents(tmp_path / "saved")


def test_the_metadata_equals_that_of_save(tmp_path: Path) -> None:
    saved = torch_ckpt.save(everything(), tmp_path / "saved")
    returned = torch_ckpt.async_save(everything(), tmp_path / "async").result()
    assert returned.state_dict_metadata == saved.state_dict_metadata
    assert list(returned.state_dict_metadata) == list(saved.state_dict_metadata)
    assert returned.planner_data == saved.planner_data
    assert returned.storage_data == saved.storage_data


@pytest.mark.parametrize("options", [{"thread_count": 1}, {"single_file_per_rank": False}], ids=str)
def test_options_of_the_writer_are_used(tmp_path: Path, options: StateDict) -> None:
    state = everything()
    torch_ckpt.save(state, tmp_path / "saved", **options)
    torch_ckpt.async_save(state, tmp_path / "async", **options).result()
    assert contents(tmp_path / "async") == contents(tmp_path / "saved")


def test_one_writer_can_be_used_for_many_saves(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "first", thread_count=1)
    for name in ("first", "second"):
        torch_ckpt.async_save({"t": large()}, tmp_path / name, storage_writer=writer).result()
        assert [file.name for file in data_files(tmp_path / name)] == ["__0_0.distcp"]
    assert writer.max_host_bytes is None


def test_the_callers_writer_can_be_used_during_the_save(tmp_path: Path, held: Gate) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "c")
    state = {"t": torch.ones(3)}
    handle = torch_ckpt.async_save(state, storage_writer=writer, staging="overlapped")
    writer.reset(tmp_path / "other")
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", state)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("staging", STAGINGS)
def test_changes_after_staging_do_not_reach_the_checkpoint(tmp_path: Path, staging: str) -> None:
    state = everything() | {"large": large()}
    # The third chunk of the large tensor is written an eighth of a second after its staging.
    slow = Background(max_bytes_per_second=64 << 20)
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging=staging, background=slow)
    handle.wait_staged()
    spoil(state)
    handle.result()
    assert_checkpoint(tmp_path / "c", everything() | {"large": large()})


def test_containers_can_change_right_after_an_overlapped_call(tmp_path: Path, held: Gate) -> None:
    state = everything()
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    del state["model"]["weight"]
    state["model"]["more"] = torch.ones(3)
    state["optimizer"]["step"] = 13
    state["optimizer"]["state"].pop()
    state["history"][2][1]["deep"] = "changed"
    state["counts"]["a"] += 1
    state["settings"].names.append("c")
    state["new"] = 1
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", everything())


def test_tensors_can_be_freed_right_after_an_overlapped_call(tmp_path: Path, held: Gate) -> None:
    state = everything()
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    del state
    gc.collect()
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", everything())


def test_data_can_be_assigned_right_after_an_overlapped_call(tmp_path: Path, held: Gate) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    handle = torch_ckpt.async_save({"p": parameter}, tmp_path / "c", staging="overlapped")
    parameter.data = torch.zeros(5)
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", {"p": torch.ones(5)})


class Counting:
    """Stateful that counts the calls of its methods."""

    def __init__(self) -> None:
        self.asked = 0
        self.weight = torch.full((4,), 7.0)

    def state_dict(self) -> StateDict:
        self.asked += 1
        return {"asked": self.asked, "weight": self.weight}

    def load_state_dict(self, state: StateDict) -> None:
        self.asked, self.weight = state["asked"], state["weight"]


def test_a_stateful_is_read_once_during_the_call(tmp_path: Path, held: Gate) -> None:
    stateful = Counting()
    handle = torch_ckpt.async_save({"s": stateful}, tmp_path / "c", staging="overlapped")
    assert stateful.asked == 1
    held.open()
    handle.result()
    assert stateful.asked == 1
    loaded = Counting()
    loaded.weight = torch.zeros(4)
    torch_ckpt.load({"s": loaded}, tmp_path / "c")
    assert loaded.asked == 1
    assert_equal(loaded.weight, torch.full((4,), 7.0))


def test_an_exception_of_a_stateful_is_raised_only_by_the_call(tmp_path: Path) -> None:
    stateful = Counting()
    stateful.state_dict = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(ZeroDivisionError):
        torch_ckpt.async_save({"s": stateful}, tmp_path / "c")
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


def test_the_callers_mapping_is_unchanged(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    mapping = OwnMapping(p=parameter)
    torch_ckpt.async_save({"m": mapping}, tmp_path / "c").result()
    assert mapping["p"] is parameter
    assert_checkpoint(tmp_path / "c", {"m": {"p": torch.ones(3)}})


def test_a_mapping_that_cannot_be_copied_is_saved(tmp_path: Path) -> None:
    mapping = MappingProxyType({"t": torch.ones(3)})
    torch_ckpt.async_save({"m": mapping}, tmp_path / "c").result()
    assert_checkpoint(tmp_path / "c", {"m": {"t": torch.ones(3)}})


class Pair(NamedTuple):
    tensor: torch.Tensor
    number: int


def test_objects_that_hold_tensors_are_copied_during_the_call(tmp_path: Path, held: Gate) -> None:
    pair = Pair(torch.ones(3), 1)
    handle = torch_ckpt.async_save({"pair": pair}, tmp_path / "c", staging="overlapped")
    pair.tensor.zero_()
    held.open()
    handle.result()
    loaded: StateDict = {"pair": None}
    torch_ckpt.load(loaded, tmp_path / "c", allow_pickle=True)
    assert_equal(loaded, {"pair": Pair(torch.ones(3), 1)})


def test_tensors_without_versions_are_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    torch_ckpt.async_save({"t": tensor}, tmp_path / "c").result()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_an_empty_state_can_be_saved_and_loaded(tmp_path: Path) -> None:
    torch_ckpt.async_save({}, tmp_path / "c").result()
    torch_ckpt.load({}, tmp_path / "c")
    assert data_files(tmp_path / "c") == []


# --- changes that come too early -----------------------------------------------------------------


def with_a_view() -> tuple[StateDict, torch.Tensor]:
    base = torch.zeros(4, 6)
    return {"model": {"w": base[1:3], "other": torch.zeros(3)}}, base


TOO_EARLY: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "in place": lambda tensor, base: tensor.add_(1),
    "by index": lambda tensor, base: tensor.__setitem__((0, 0), 1),
    "from another": lambda tensor, base: tensor.copy_(torch.ones(2, 6)),
    "by a view of it": lambda tensor, base: tensor[0].fill_(1),
    "by what it is a view of": lambda tensor, base: base.mul_(2),
    "by an operation on many": lambda tensor, base: torch._foreach_add_([tensor], 1),
}


@pytest.mark.parametrize("change", TOO_EARLY)
def test_a_tensor_changed_before_its_copy_fails_the_save_by_name(
    tmp_path: Path, held: Gate, change: str
) -> None:
    state, base = with_a_view()
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    TOO_EARLY[change](state["model"]["w"], base)
    held.open()
    with pytest.raises(CheckpointException) as error:
        handle.result()
    cause = cause_of(error.value)
    assert isinstance(cause, SourceChanged)
    assert str(cause).startswith("model.w: changed before the save had copied it")


def test_tensors_in_lists_tuples_and_mappings_are_named(tmp_path: Path, held: Gate) -> None:
    state = {
        "list": [1, [torch.zeros(2)]],
        "tuple": (torch.zeros(2), 2),
        "mapping": OrderedDict(t=torch.zeros(2)),
        "unchanged": torch.zeros(2),
    }
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    for tensor in (state["list"][1][0], state["tuple"][0], state["mapping"]["t"]):  # type: ignore[index]
        tensor.add_(1)
    held.open()
    with pytest.raises(CheckpointException, match=r"list\.1\.0, mapping\.t, tuple\.0: changed"):
        handle.result()


def test_ten_of_many_changed_tensors_are_named(tmp_path: Path, held: Gate) -> None:
    state = {f"t{i}": torch.zeros(2) for i in range(12)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    for tensor in state.values():
        tensor.add_(1)
    held.open()
    with pytest.raises(CheckpointException, match=r"t8, t9 and more: changed"):
        handle.result()


def test_a_change_while_the_call_waits_is_detected(tmp_path: Path, held: Gate) -> None:
    tensor = torch.zeros(3)

    def change() -> None:
        assert held.reached.wait(LIMIT)
        tensor.add_(1)
        held.open()

    changing = threading.Thread(target=change)
    changing.start()
    handle = torch_ckpt.async_save({"t": tensor}, tmp_path / "c", staging="blocking")
    changing.join()
    with pytest.raises(CheckpointException, match="t: changed"):
        handle.result()


def test_a_change_during_the_copy_is_detected(tmp_path: Path) -> None:
    first, last = large(1), large(2)
    # At most two of six chunks have been copied when the first one is written.
    with before("pwrite", lambda: last.add_(1)):
        handle = torch_ckpt.async_save(
            {"first": first, "last": last},
            tmp_path / "c",
            staging="overlapped",
            thread_count=1,
            max_host_bytes=2 * CHUNK_BYTES,
        )
        with pytest.raises(CheckpointException, match="last: changed"):
            handle.result()


def test_a_save_whose_source_changed_too_early_keeps_the_old_checkpoint(
    tmp_path: Path, held: Gate
) -> None:
    torch_ckpt.save({"t": large(1)}, tmp_path / "c")
    before = sorted((tmp_path / "c").iterdir())
    tensor = large(2)
    handle = torch_ckpt.async_save({"t": tensor}, tmp_path / "c", staging="overlapped")
    tensor.add_(1)
    held.open()
    with pytest.raises(CheckpointException, match="t: changed"):
        handle.result()
    assert sorted((tmp_path / "c").iterdir()) == before
    assert_checkpoint(tmp_path / "c", {"t": large(1)})


def test_reads_and_gradients_are_not_changes(tmp_path: Path, held: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    expected = copied(model.state_dict())
    handle = torch_ckpt.async_save(model.state_dict(), tmp_path / "c", staging="overlapped")
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    model.requires_grad_(False)
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", expected)


def test_buffers_that_a_forward_pass_updates_are_detected(tmp_path: Path, held: Gate) -> None:
    model = torch.nn.BatchNorm1d(4)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    model(torch.ones(2, 4))
    held.open()
    # Only by the counter: the kernel does not increment the versions of the averages.
    with pytest.raises(CheckpointException, match=r"model\.num_batches_tracked: changed"):
        handle.result()


def test_the_step_of_fused_optimizers_is_detected(tmp_path: Path, held: Gate) -> None:
    model, optimizer = trained(torch.optim.Adam, fused=True)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    step(model, optimizer)
    held.open()
    with pytest.raises(CheckpointException) as error:
        handle.result()
    # Fused steps do not increment the versions of parameters and moments.
    assert str(cause_of(error.value)).startswith(
        "optim.state.0.step, optim.state.1.step: changed before"
    )
