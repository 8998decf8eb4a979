"""torch_ckpt.async_save: the checkpoint has the snapshot of the state, or the save fails by
name."""

from __future__ import annotations

import gc
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import torch_ckpt
from tests.background_saves import (
    STAGINGS,
    OwnMapping,
    assert_checkpoint,
    contents,
    copied,
    everything,
    large,
    pool_bytes,
    spoil,
    step,
    trained,
    unwritable,
)
from tests.fault_hooks import before
from tests.gates import LIMIT, Gate
from tests.support import DTYPES, StateDict, assert_equal, cause_of, random_tensor
from torch_ckpt import Background, CheckpointError, SourceChanged
from torch_ckpt.options import CHUNK_BYTES

# torch warns of every checkpoint that is replaced.
pytestmark = [
    pytest.mark.usefixtures("no_save_left"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 1}, {"single_file_per_rank": False}], ids=str
)
def test_data_files_and_metadata_equal_those_of_save(
    tmp_path: Path, staging: str, options: StateDict
) -> None:
    state = everything() | {"large": large()}
    state["dtypes"] = {str(dtype): random_tensor((7, 3), dtype) for dtype in DTYPES}
    write = torch_ckpt.WriteOptions(**options)
    saved = torch_ckpt.save(state, tmp_path / "saved", options=write).metadata()
    handle = torch_ckpt.async_save(state, tmp_path / "async", staging=staging, options=write)
    returned = handle.result().metadata()
    assert contents(tmp_path / "async") == contents(tmp_path / "saved")
    assert returned.state_dict_metadata == saved.state_dict_metadata
    assert list(returned.state_dict_metadata) == list(saved.state_dict_metadata)
    assert returned.planner_data == saved.planner_data
    assert returned.storage_data == saved.storage_data


@pytest.mark.parametrize("staging", STAGINGS)
def test_changes_after_staging_do_not_reach_the_checkpoint(tmp_path: Path, staging: str) -> None:
    state = everything() | {"large": large()}
    # The third chunk of the large tensor is written an eighth of a second after its staging.
    slow = Background(max_bytes_per_second=64 << 20)
    handle = torch_ckpt.async_save(
        state, tmp_path / "c", staging=staging, options=torch_ckpt.WriteOptions(background=slow)
    )
    handle.wait_staged()
    spoil(state)
    handle.result()
    assert_checkpoint(tmp_path / "c", everything() | {"large": large()})


def change_containers(state: StateDict) -> None:
    del state["model"]["weight"]
    state["model"]["more"] = torch.ones(3)
    state["optimizer"]["step"] = 13
    state["optimizer"]["state"].pop()
    state["history"][2][1]["deep"] = "changed"
    state["counts"]["a"] += 1
    state["settings"].names.append("c")
    state["new"] = 1


def assign_data(state: StateDict) -> None:
    state["model"]["weight"].data = torch.zeros(5)


@pytest.mark.parametrize("change", [change_containers, dict.clear, assign_data])
def test_containers_and_data_can_change_right_after_an_overlapped_call(
    tmp_path: Path, held: Gate, change: Callable[[StateDict], None]
) -> None:
    state = everything()
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    change(state)
    # Tensors that nothing else refers to are freed.
    gc.collect()
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", everything())


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
    with pytest.raises(CheckpointError, match=r"^s: .* on rank 0: division"):
        torch_ckpt.async_save({"s": stateful}, tmp_path / "c")
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


@pytest.mark.parametrize("kind", [OwnMapping, lambda **items: MappingProxyType(items)])
def test_any_mapping_is_saved_and_unchanged(
    tmp_path: Path, kind: Callable[..., Mapping[str, Any]]
) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    # The second one cannot be copied.
    mapping = kind(p=parameter)
    torch_ckpt.async_save({"m": mapping}, tmp_path / "c").result()
    assert mapping["p"] is parameter
    assert_checkpoint(tmp_path / "c", {"m": {"p": torch.ones(3)}})


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
    torch_ckpt.load(loaded, tmp_path / "c", options=torch_ckpt.ReadOptions(allow_pickle=True))
    assert_equal(loaded, {"pair": Pair(torch.ones(3), 1)})


def test_tensors_without_versions_are_saved(tmp_path: Path) -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    torch_ckpt.async_save({"t": tensor}, tmp_path / "c").result()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


# --- changes that come too early -----------------------------------------------------------------


#: Makes a state and the change of it that comes too early.
Changing = Callable[[], tuple[StateDict, Callable[[], object]]]


def in_a_view(change: Callable[[torch.Tensor, torch.Tensor], object]) -> Changing:
    def make() -> tuple[StateDict, Callable[[], object]]:
        base = torch.zeros(4, 6)
        state = {"model": {"w": base[1:3], "other": torch.zeros(3)}}
        return state, lambda: change(state["model"]["w"], base)

    return make


def in_containers() -> tuple[StateDict, Callable[[], object]]:
    tensors = [torch.zeros(2) for _ in range(3)]
    state = {
        "list": [1, [tensors[0]]],
        "tuple": (tensors[1], 2),
        "mapping": OrderedDict(t=tensors[2]),
        "unchanged": torch.zeros(2),
    }
    return state, lambda: torch._foreach_add_(tensors, 1)


def in_twelve() -> tuple[StateDict, Callable[[], object]]:
    state = {f"t{i}": torch.zeros(2) for i in range(12)}
    return state, lambda: torch._foreach_add_(list(state.values()), 1)


def in_a_buffer() -> tuple[StateDict, Callable[[], object]]:
    model = torch.nn.BatchNorm1d(4)
    return {"model": model}, lambda: model(torch.ones(2, 4))


def by_a_fused_step() -> tuple[StateDict, Callable[[], object]]:
    model, optimizer = trained(torch.optim.Adam, fused=True)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    return state, lambda: step(model, optimizer)


OF_VIEWS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "in place": lambda tensor, base: tensor.add_(1),
    "by index": lambda tensor, base: tensor.__setitem__((0, 0), 1),
    "from another": lambda tensor, base: tensor.copy_(torch.ones(2, 6)),
    "by a view of it": lambda tensor, base: tensor[0].fill_(1),
    "by what it is a view of": lambda tensor, base: base.mul_(2),
    "by an operation on many": lambda tensor, base: torch._foreach_add_([tensor], 1),
}
TOO_EARLY: dict[str, tuple[Changing, str]] = {
    **{name: (in_a_view(change), "model.w") for name, change in OF_VIEWS.items()},
    "in lists, tuples and mappings": (in_containers, "list.1.0, mapping.t, tuple.0"),
    "more than ten": (in_twelve, "t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and more"),
    # The kernel does not increment the versions of the averages.
    "in a buffer by a forward pass": (in_a_buffer, "model.num_batches_tracked"),
    # It does not increment the versions of parameters and moments.
    "by a fused step": (by_a_fused_step, "optim.state.0.step, optim.state.1.step"),
}


@pytest.mark.parametrize("change", TOO_EARLY)
def test_tensors_changed_before_their_copy_fail_the_save_by_name(
    tmp_path: Path, held: Gate, change: str
) -> None:
    make, names = TOO_EARLY[change]
    state, act = make()
    torch_ckpt.save({"t": large(1)}, tmp_path / "c")
    before = sorted((tmp_path / "c").iterdir())
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    act()
    held.open()
    with pytest.raises(CheckpointException) as error:
        handle.result()
    cause = cause_of(error.value)
    assert isinstance(cause, SourceChanged)
    assert str(cause).startswith(f"{names}: changed before the save had copied it")
    assert "Buffers, such as the statistics of BatchNorm, change in the forward pass" in str(cause)
    assert sorted((tmp_path / "c").iterdir()) == before
    assert_checkpoint(tmp_path / "c", {"t": large(1)})


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
            options=torch_ckpt.WriteOptions(thread_count=1, max_host_bytes=2 * CHUNK_BYTES),
        )
        with pytest.raises(CheckpointException, match="last: changed"):
            handle.result()


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


# --- torch's async_save with the writer, which stages the state ----------------------------------


def test_a_staged_copy_shares_no_memory_with_the_state_and_keeps_strides(tmp_path: Path) -> None:
    state = everything()
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage(state)
    assert staged["model"]["transposed"].stride() == (1, 9)
    spoil(state)
    assert_equal(staged, everything())


def test_staging_does_not_change_the_state(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    mapping = OwnMapping(p=parameter)
    torch_ckpt.FileSystemWriter(tmp_path).stage({"m": mapping, "o": OrderedDict(p=parameter)})
    assert mapping["p"] is parameter


@pytest.mark.usefixtures("empty_pool")
def test_the_memory_of_a_staged_copy_returns_to_the_pool(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    kept = []
    for _ in range(3):
        staged = writer.stage({"a": large(), "b": [large()]})
        assert pool_bytes() == 0
        del staged["a"]
        assert pool_bytes() == 0
        del staged
        kept.append(pool_bytes())
    assert kept == [2 * 3 * CHUNK_BYTES] * 3


@pytest.mark.parametrize("by", ["storage_writer", "async_stager"])
def test_torchs_async_save_saves_a_snapshot(tmp_path: Path, by: str) -> None:
    state = everything() | {"large": large()}
    slow = Background(max_bytes_per_second=64 << 20)
    writer = torch_ckpt.FileSystemWriter(tmp_path / "c", background=slow)
    options: StateDict = {"storage_writer": writer}
    if by == "async_stager":
        options["async_stager"] = torch_ckpt.FileSystemWriter(tmp_path / "stager")
    future: Any = dcp_async_save(state, no_dist=True, **options)
    spoil(state)
    future.result()
    assert_checkpoint(tmp_path / "c", everything() | {"large": large()})


def test_torchs_async_save_raises_the_error_of_the_save(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(unwritable(tmp_path))
    future: Any = dcp_async_save({"t": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException):
        future.result()


def test_the_writer_pickles_after_staging(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "c", background=Background(nice=3))
    writer.stage(everything())
    copy = pickle.loads(pickle.dumps(writer))
    dcp_save({"t": torch.ones(3)}, storage_writer=copy, no_dist=True)
    assert copy.options.background == Background(nice=3)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})
