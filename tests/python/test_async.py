"""torch_ckpt.async_save: a snapshot of everything, told errors, an orderly end; and torch's own."""

from __future__ import annotations

import errno
import gc
import json
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import wait as wait_for_futures
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

import torch_ckpt
from tests import under_strace
from tests.support import (
    DTYPES,
    StateDict,
    assert_equal,
    bytes_of,
    cause_of,
    data_files,
    emptied,
    files_limited_to,
    random_tensor,
    stock_load,
)
from torch_ckpt import (
    AsyncSave,
    Background,
    CheckpointError,
    OnCommitFailed,
    SourceChanged,
    snapshot,
)
from torch_ckpt.coordination import Ranks
from torch_ckpt.progress import Progress
from torch_ckpt.snapshot import Job
from torch_ckpt.writer import CHUNK_BYTES

STAGINGS = ["blocking", "overlapped"]

#: No wait here is meant to be long, in seconds. What waits so long has failed.
LIMIT = 60.0

# Every checkpoint that is replaced makes torch say so.
pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


@pytest.fixture(autouse=True)
def no_save_before() -> Iterator[None]:
    """Each test begins as a process does, and leaves nothing to the next one."""
    runtime: Any = snapshot._runtime
    runtime.__init__()
    yield
    if runtime.thread is not None:
        runtime.thread.join(LIMIT)
    runtime.__init__()


class Gate:
    """Stops a thread that calls it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._opened.wait(LIMIT), "nobody has opened the gate"

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


@pytest.fixture
def held(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Saves do nothing beyond the call itself until it is opened."""
    run = Job.run

    def run_later(self: Job, save: Callable[[Job], Metadata]) -> None:
        gate()
        run(self, save)

    monkeypatch.setattr(Job, "run", run_later)
    return gate


def eventually(condition: Callable[[], bool]) -> None:
    """For what other threads do in their own time and tell nobody."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        os.sched_yield()


def large(seed: int = 0, chunks: int = 3) -> torch.Tensor:
    """So many chunks of staging memory."""
    return random_tensor((chunks, CHUNK_BYTES), torch.uint8, seed)


def unwritable(tmp_path: Path) -> Path:
    """Where not even root can save."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "checkpoint"


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in data_files(path)}


def is_committed(path: Path) -> bool:
    return (path / ".metadata").exists()


def assert_checkpoint(path: Path, state: StateDict) -> None:
    """Fails where the checkpoint is not the state's, to us or to stock torch."""
    # Some have an object of a class of their own.
    trusting = partial(torch_ckpt.load, allow_pickle=True)
    for loader in (trusting, stock_load):
        loaded = emptied(state)
        loader(loaded, path)
        assert_equal(loaded, state)


# --- what is saved -------------------------------------------------------------------------------


@dataclass
class Settings:
    """An object that pickles and can change."""

    rate: float = 0.5
    names: list[str] = field(default_factory=lambda: ["a", "b"])


def everything() -> StateDict:
    """One of everything that a state dict may hold; the same at each call."""
    complex_numbers = random_tensor((6, 4), torch.complex64, seed=6).nan_to_num()
    weight = torch.nn.Parameter(random_tensor((33, 17), torch.float32, seed=1))
    return {
        "model": OrderedDict(
            weight=weight,
            tied=weight,
            not_a_leaf=weight * 2,
            transposed=random_tensor((6, 9), torch.bfloat16, seed=3).t(),
            view=random_tensor((40,), torch.int64, seed=4)[7:29:3],
            expanded=torch.arange(5).expand(3, 5),
            overlapping=torch.arange(9).as_strided((3, 3), (2, 1)),
            scalar=torch.tensor(3.5),
            empty=torch.empty(0, 4),
            conjugated=complex_numbers.conj(),
            negated=complex_numbers.conj().imag,
        ),
        "optimizer": {
            "lr": 0.1,
            "betas": (0.9, 0.95),
            "step": 12,
            "state": [{"moment": random_tensor((9,), torch.float64, seed=i)} for i in (7, 8)],
        },
        "history": [random_tensor((3,), torch.float16, seed=5), "text", [1, {"deep": None}]],
        "pair": (random_tensor((11,), torch.int8, seed=9), 7),
        "counts": Counter(a=1, b=2),
        "settings": Settings(),
        "bytes": b"\0\1",
    }


def spoil(value: Any) -> None:
    """Changes all that a caller may change of a state, in place."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        storage.copy_(random_tensor((storage.size(),), torch.uint8, seed=99).untyped_storage())
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value.clear()
    elif isinstance(value, list | tuple):
        for item in value:
            spoil(item)
        if isinstance(value, list):
            value.append("spoilt")
    elif isinstance(value, Settings):
        value.rate = -1.0
        value.names.append("spoilt")


@pytest.mark.parametrize("staging", STAGINGS)
def test_everything_comes_back(tmp_path: Path, staging: str) -> None:
    torch_ckpt.async_save(everything(), tmp_path / "c", staging=staging).result()
    assert_checkpoint(tmp_path / "c", everything())


def test_every_dtype_comes_back(tmp_path: Path) -> None:
    state = {str(dtype): random_tensor((7, 3), dtype) for dtype in DTYPES}
    torch_ckpt.async_save(state, tmp_path / "c").result()
    loaded = emptied(state)
    torch_ckpt.load(loaded, tmp_path / "c")
    assert_equal(loaded, state)


@pytest.mark.parametrize("staging", STAGINGS)
def test_the_data_files_are_those_of_save(tmp_path: Path, staging: str) -> None:
    state = everything() | {"large": large()}
    torch_ckpt.save(state, tmp_path / "saved")
    torch_ckpt.async_save(state, tmp_path / "async", staging=staging).result()
    assert contents(tmp_path / "async") == contents(tmp_path / "saved")


def test_the_metadata_is_that_of_save(tmp_path: Path) -> None:
    saved = torch_ckpt.save(everything(), tmp_path / "saved")
    returned = torch_ckpt.async_save(everything(), tmp_path / "async").result()
    assert returned.state_dict_metadata == saved.state_dict_metadata
    assert list(returned.state_dict_metadata) == list(saved.state_dict_metadata)
    assert returned.planner_data == saved.planner_data
    assert returned.storage_data == saved.storage_data


@pytest.mark.parametrize("options", [{"thread_count": 1}, {"single_file_per_rank": False}], ids=str)
def test_options_of_the_writer_are_heard(tmp_path: Path, options: StateDict) -> None:
    state = everything()
    torch_ckpt.save(state, tmp_path / "saved", **options)
    torch_ckpt.async_save(state, tmp_path / "async", **options).result()
    assert contents(tmp_path / "async") == contents(tmp_path / "saved")


def test_a_writer_of_the_callers_own_is_used_for_many_saves(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "first", thread_count=1)
    for name in ("first", "second"):
        torch_ckpt.async_save({"t": large()}, tmp_path / name, storage_writer=writer).result()
        assert [file.name for file in data_files(tmp_path / name)] == ["__0_0.distcp"]
    assert writer.max_host_bytes is None


def test_the_callers_writer_may_be_used_elsewhere_meanwhile(tmp_path: Path, held: Gate) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "c")
    state = {"t": torch.ones(3)}
    handle = torch_ckpt.async_save(state, storage_writer=writer, staging="overlapped")
    writer.reset(tmp_path / "other")
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", state)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("staging", STAGINGS)
def test_changes_after_staged_do_not_reach_the_checkpoint(tmp_path: Path, staging: str) -> None:
    state = everything() | {"large": large()}
    # The third of the large one's chunks is written an eighth of a second after it was staged.
    slow = Background(max_bytes_per_second=64 << 20)
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging=staging, background=slow)
    handle.wait_staged()
    spoil(state)
    handle.result()
    assert_checkpoint(tmp_path / "c", everything() | {"large": large()})


def test_containers_may_change_right_after_an_overlapped_call(tmp_path: Path, held: Gate) -> None:
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


def test_tensors_may_be_freed_right_after_an_overlapped_call(tmp_path: Path, held: Gate) -> None:
    state = everything()
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    del state
    gc.collect()
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", everything())


def test_data_may_be_assigned_anew_right_after_an_overlapped_call(
    tmp_path: Path, held: Gate
) -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    handle = torch_ckpt.async_save({"p": parameter}, tmp_path / "c", staging="overlapped")
    parameter.data = torch.zeros(5)
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", {"p": torch.ones(5)})


class Counting:
    """A Stateful that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.weight = torch.full((4,), 7.0)

    def state_dict(self) -> StateDict:
        self.asked += 1
        return {"asked": self.asked, "weight": self.weight}

    def load_state_dict(self, state: StateDict) -> None:
        self.asked, self.weight = state["asked"], state["weight"]


def test_a_stateful_is_asked_once_and_in_the_call(tmp_path: Path, held: Gate) -> None:
    stateful = Counting()
    handle = torch_ckpt.async_save({"s": stateful}, tmp_path / "c", staging="overlapped")
    assert stateful.asked == 1
    held.open()
    handle.result()
    assert stateful.asked == 1
    assert_checkpoint(tmp_path / "c", {"s": {"asked": 1, "weight": torch.full((4,), 7.0)}})


def test_what_a_stateful_raises_is_raised_by_the_call_alone(tmp_path: Path) -> None:
    stateful = Counting()
    stateful.state_dict = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(ZeroDivisionError):
        torch_ckpt.async_save({"s": stateful}, tmp_path / "c")
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


def trained(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> tuple[Any, Any]:
    """A model that has been trained one step, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    made = optimizer(model.parameters(), lr=0.1, **options)
    step(model, made)
    return model, made


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 8)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]


def copied(state: StateDict) -> StateDict:
    """A copy of a model's state."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def test_models_and_optimizers_resume_where_they_were(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.AdamW)
    state = {"model": model, "optimizer": optimizer.state_dict()}
    torch_ckpt.async_save(state, tmp_path / "c").result()
    step(model, optimizer)
    other, its_optimizer = trained(torch.optim.AdamW)
    step(other, its_optimizer)
    state = {"model": other, "optimizer": its_optimizer.state_dict()}
    torch_ckpt.load(state, tmp_path / "c")
    its_optimizer.load_state_dict(state["optimizer"])
    step(other, its_optimizer)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


class OwnMapping(MutableMapping[str, Any]):
    """A mapping of somebody's own, of which copy.copy() makes one with the same items."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def test_the_callers_own_mapping_stays_as_it_is(tmp_path: Path) -> None:
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


def test_objects_that_hold_tensors_are_copied_in_the_call(tmp_path: Path, held: Gate) -> None:
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


def test_an_empty_state_is_a_checkpoint(tmp_path: Path) -> None:
    torch_ckpt.async_save({}, tmp_path / "c").result()
    torch_ckpt.load({}, tmp_path / "c")
    assert data_files(tmp_path / "c") == []


STRUCTURES: dict[str, StateDict] = {
    "first": {"a": torch.ones(3), "b": {"c": torch.zeros(2, 2), "n": 1}},
    "other values": {"a": torch.zeros(3), "b": {"c": torch.ones(2, 2), "n": "text"}},
    "another shape": {"a": torch.ones(4), "b": {"c": torch.zeros(2, 2), "n": 1}},
    "another dtype": {"a": torch.ones(3), "b": {"c": torch.zeros(2, 2).long(), "n": 1}},
    "another order": {"b": {"n": 1, "c": torch.zeros(2, 2)}, "a": torch.ones(3)},
    "a tensor less": {"b": {"c": torch.zeros(2, 2), "n": 1}},
    "an object more": {"a": torch.ones(3), "b": {"c": torch.zeros(2, 2), "n": 1}, "o": "object"},
    "a tensor for an object": {"a": torch.ones(3), "b": {"c": 2, "n": torch.ones(1)}},
    "another way to a name": {"a": torch.ones(3), "b.c": torch.zeros(2, 2), "b.n": 1},
    "with gradients": {"a": torch.ones(3).requires_grad_(), "b": {"c": torch.zeros(2, 2), "n": 1}},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_save_knows_nothing_of_the_structure_before(tmp_path: Path, name: str) -> None:
    for number, before in enumerate((STRUCTURES["first"], STRUCTURES[name], STRUCTURES["first"])):
        path = tmp_path / f"{name}-{number}"
        ours = torch_ckpt.async_save(before, path, warn_unchanged=False).result()
        assert_checkpoint(path, before)
        saved = torch_ckpt.save(before, tmp_path / f"saved-{number}")
        assert ours.state_dict_metadata == saved.state_dict_metadata
        assert ours.planner_data == saved.planner_data


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
def test_a_tensor_changed_before_it_was_copied_fails_the_save_by_its_name(
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
    with pytest.raises(CheckpointException, match=r"list\.1\.0, tuple\.0, mapping\.t: changed"):
        handle.result()


def test_of_many_changed_tensors_ten_are_named(tmp_path: Path, held: Gate) -> None:
    state = {f"t{i}": torch.zeros(2) for i in range(12)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    for tensor in state.values():
        tensor.add_(1)
    held.open()
    with pytest.raises(CheckpointException, match=r"t8, t9 and more: changed"):
        handle.result()


def test_a_change_while_the_call_waits_is_noticed_as_well(tmp_path: Path, held: Gate) -> None:
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


def test_a_change_amid_the_copying_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = large(1), large(2)
    started = Job.started

    def start_and_change(self: Job, save: torch_ckpt._C.Save) -> None:
        started(self, save)
        eventually(lambda: self.progress().bytes_staged > 0)
        last.add_(1)

    monkeypatch.setattr(Job, "started", start_and_change)
    handle = torch_ckpt.async_save(
        {"first": first, "last": last},
        tmp_path / "c",
        staging="overlapped",
        thread_count=1,
        max_host_bytes=2 * CHUNK_BYTES,
        background=Background(max_bytes_per_second=64 << 20),
    )
    with pytest.raises(CheckpointException, match="last: changed"):
        handle.result()


def test_a_save_that_is_changed_too_early_leaves_no_file(tmp_path: Path, held: Gate) -> None:
    tensor = large()
    handle = torch_ckpt.async_save({"t": tensor}, tmp_path / "c", staging="overlapped")
    tensor.add_(1)
    held.open()
    with pytest.raises(CheckpointException):
        handle.result()
    assert list((tmp_path / "c").iterdir()) == []


def test_a_save_that_is_changed_too_early_keeps_the_old_checkpoint(
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


def test_reading_and_gradients_are_no_changes(tmp_path: Path, held: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    expected = copied(model.state_dict())
    handle = torch_ckpt.async_save(model.state_dict(), tmp_path / "c", staging="overlapped")
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    model.requires_grad_(False)
    held.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", expected)


def test_buffers_that_a_forward_pass_updates_are_noticed(tmp_path: Path, held: Gate) -> None:
    model = torch.nn.BatchNorm1d(4)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    model(torch.ones(2, 4))
    held.open()
    # By the counter alone: the kernel does not count up the versions of what it averages.
    with pytest.raises(CheckpointException, match=r"model\.num_batches_tracked: changed"):
        handle.result()


def test_of_fused_optimizers_the_step_is_noticed(tmp_path: Path, held: Gate) -> None:
    model, optimizer = trained(torch.optim.Adam, fused=True)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    step(model, optimizer)
    held.open()
    with pytest.raises(CheckpointException) as error:
        handle.result()
    # Not the parameters and moments: fused steps do not count their versions up.
    assert str(cause_of(error.value)).startswith(
        "optim.state.0.step, optim.state.1.step: changed before"
    )


# --- guarded optimizers --------------------------------------------------------------------------


@pytest.fixture
def opened_by_a_step(held: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Saves begin when a guarded optimizer's step begins: where that does not wait, it is late."""
    hold_back = Job.hold_back

    def open_and_hold_back(self: Job) -> None:
        held.open()
        hold_back(self)

    monkeypatch.setattr(Job, "hold_back", open_and_hold_back)
    return held


OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], StateDict]] = {
    "SGD": (torch.optim.SGD, {}),
    "Adam": (torch.optim.Adam, {"foreach": True}),
    "fused Adam": (torch.optim.Adam, {"fused": True}),
    "LBFGS": (torch.optim.LBFGS, {"max_iter": 2}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_guarded_step_waits_until_staged(
    tmp_path: Path, opened_by_a_step: Gate, kind: str
) -> None:
    optimizer_type, options = OPTIMIZERS[kind]
    model, optimizer = trained(optimizer_type, **options)
    expected = copied(model.state_dict())
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    handle.guard(optimizer)
    step(model, optimizer)
    handle.result()
    assert_checkpoint(tmp_path / "c", {"model": expected})
    assert not torch.equal(model.weight, expected["weight"])


def test_a_guarded_step_waits_no_longer_than_staged(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save(
        {"model": model}, tmp_path / "c", staging="overlapped", write_done=gate
    )
    handle.guard(optimizer)
    step(model, optimizer)
    assert not handle.done()
    gate.open()
    handle.result()


def test_one_hook_guards_an_optimizer_through_many_saves(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    expected = []
    for number in range(5):
        expected.append(copied(model.state_dict()))
        state = {"model": model, "number": number}
        handle = torch_ckpt.async_save(state, tmp_path / str(number), staging="overlapped")
        handle.guard(optimizer)
        step(model, optimizer)
        step(model, optimizer)
    handle.result()
    for number, weights in enumerate(expected):
        assert_checkpoint(tmp_path / str(number), {"model": weights, "number": number})
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_one_save_guards_many_optimizers(tmp_path: Path, opened_by_a_step: Gate) -> None:
    models = [trained(torch.optim.SGD) for _ in range(2)]
    state = {str(number): model for number, (model, _) in enumerate(models)}
    expected = {name: copied(model.state_dict()) for name, model in state.items()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped")
    for _, optimizer in models:
        handle.guard(optimizer)
    for model, optimizer in models:
        step(model, optimizer)
    handle.result()
    assert_checkpoint(tmp_path / "c", expected)


def test_a_failing_save_holds_no_step_back(tmp_path: Path, opened_by_a_step: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, unwritable(tmp_path), staging="overlapped")
    handle.guard(optimizer)
    step(model, optimizer)
    # And the step has not told its error.
    with pytest.raises(CheckpointException):
        handle.result()


def test_a_failed_save_holds_no_step_back(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, unwritable(tmp_path), staging="overlapped")
    wait_for_futures([handle.committed])
    handle.guard(optimizer)
    step(model, optimizer)
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()


def test_a_guarded_optimizer_pickles(tmp_path: Path) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c")
    handle.guard(optimizer)
    handle.result()
    pickle.loads(pickle.dumps(optimizer))


# --- memory --------------------------------------------------------------------------------------


def pool_bytes() -> int:
    return torch_ckpt._C.pool_bytes()


@pytest.fixture
def empty_pool() -> Iterator[None]:
    torch_ckpt._C.trim_pool(0)
    yield
    torch_ckpt._C.trim_pool(0)


@pytest.mark.usefixtures("empty_pool")
@pytest.mark.parametrize("budget", [4096, CHUNK_BYTES // 2, 2 * CHUNK_BYTES + 1])
def test_a_state_above_the_budget_goes_in_waves(tmp_path: Path, budget: int) -> None:
    chunks = 5 if budget > CHUNK_BYTES else 1
    state = {"a": large(1, chunks), "b": large(2, chunks), "more": everything()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", max_host_bytes=budget)
    # What is staged and not written is in memory.
    assert handle.progress().bytes_done >= handle.metrics().bytes - budget
    handle.result()
    assert pool_bytes() <= budget
    assert_checkpoint(tmp_path / "c", state)


def test_no_more_than_the_budget_is_staged_at_once(tmp_path: Path) -> None:
    budget = 2 * CHUNK_BYTES
    ahead = []

    def look(progress: Progress) -> None:
        ahead.append(progress.bytes_staged - progress.bytes_done)

    torch_ckpt.async_save(
        {"t": large(chunks=6)},
        tmp_path / "c",
        max_host_bytes=budget,
        progress=look,
        background=Background(max_bytes_per_second=64 << 20),
    ).result()
    assert len(ahead) > 1
    assert max(ahead) <= budget


def fill_pool(path: Path, state: StateDict) -> int:
    """Saves until the pool has memory for all of a state in one file; how much that is."""
    size: int = sum(tensor.nbytes for tensor in state.values())
    # The file is a little larger than its tensors are.
    expected = (size // CHUNK_BYTES + 1) * CHUNK_BYTES

    def save() -> bool:
        # What a save does not wait for is made while it lasts, if somebody comes to it.
        torch_ckpt.async_save(state, path, thread_count=1).result()
        torch_ckpt._C.join_executor()
        return pool_bytes() == expected

    eventually(save)
    return expected


@pytest.mark.usefixtures("empty_pool")
def test_the_memory_is_kept_from_save_to_save(tmp_path: Path) -> None:
    state = {"t": large()}
    kept = fill_pool(tmp_path / "first", state)
    for name in ("second", "third"):
        torch_ckpt.async_save(state, tmp_path / name, thread_count=1).result()
        assert pool_bytes() == kept


@pytest.mark.usefixtures("empty_pool")
def test_a_synchronous_save_leaves_the_memory_to_the_next_one(tmp_path: Path) -> None:
    state = {"t": large()}
    kept = fill_pool(tmp_path / "first", state)
    torch_ckpt.save(state, tmp_path / "second", thread_count=1)
    assert pool_bytes() == kept


@pytest.mark.usefixtures("empty_pool")
def test_a_smaller_budget_frees_what_is_above_it(tmp_path: Path) -> None:
    state = {"t": large()}
    fill_pool(tmp_path / "first", state)
    torch_ckpt.async_save(state, tmp_path / "second", max_host_bytes=CHUNK_BYTES).result()
    assert pool_bytes() <= CHUNK_BYTES


@pytest.mark.usefixtures("empty_pool")
def test_trim_pool_frees_the_memory(tmp_path: Path) -> None:
    fill_pool(tmp_path / "c", {"t": large()})
    for kept in (2 * CHUNK_BYTES, 0):
        torch_ckpt.trim_pool(kept)
        assert pool_bytes() == kept


_kept = {"t": large()}


def _save_with_kept_memory(directory: str | Path, trim: bool) -> None:
    if trim:
        torch_ckpt.trim_pool(0)
    fill_pool(Path(directory) / "c", _kept)


@pytest.mark.parametrize("trim", [False, True])
def test_the_second_save_allocates_nothing(tmp_path: Path, trim: bool) -> None:
    # The first one is what under_strace does before it looks.
    outcome = under_strace.run(_save_with_kept_memory, tmp_path, trim, trace="mmap")
    assert outcome.error is None
    maps = [call.arguments for call in outcome.calls if "MAP_ANONYMOUS" in call.arguments]
    sizes = [int(arguments.split(", ")[1]) for arguments in maps if "MAP_STACK" not in arguments]
    chunks = [size for size in sizes if CHUNK_BYTES <= size < 2 * CHUNK_BYTES]
    # Where the memory was freed before, it is seen to be made.
    assert bool(chunks) == trim


def memory_of(tensor: torch.Tensor) -> Any:
    """Knows whether it has been freed, and does not keep it."""
    reference: Any = StorageWeakRef
    return reference(tensor.untyped_storage())


def test_sources_are_let_go_of_when_they_are_staged(tmp_path: Path, gate: Gate) -> None:
    tensors = [torch.ones(1000) for _ in range(3)]
    memory = [memory_of(tensor) for tensor in tensors]
    state = {"t": tensors[0], "nested": [{"u": tensors[1]}], "pair": (tensors[2], 1)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped", write_done=gate)
    del state, tensors
    assert gate.reached.wait(LIMIT)
    assert [each.expired() for each in memory] == [True] * 3
    gate.open()
    handle.result()


def test_sources_stay_until_they_are_staged(tmp_path: Path, held: Gate) -> None:
    tensor = torch.ones(1000)
    storage = memory_of(tensor)
    handle = torch_ckpt.async_save({"t": tensor}, tmp_path / "c", staging="overlapped")
    del tensor
    assert not storage.expired()
    held.open()
    handle.result()
    assert storage.expired()


def assert_lets_go(save: Callable[[torch.Tensor], AsyncSave]) -> None:
    """Fails where a failed save, whose error somebody holds, keeps a source alive."""
    tensor = torch.ones(1_000_000)
    storage = memory_of(tensor)
    handle = save(tensor)
    error = handle.committed.exception()
    del tensor
    assert error is not None
    assert storage.expired()


def test_a_save_that_fails_in_planning_lets_go_of_its_sources(tmp_path: Path) -> None:
    assert_lets_go(lambda tensor: torch_ckpt.async_save({"t": tensor}, unwritable(tmp_path)))


def test_a_save_that_fails_in_writing_lets_go_of_its_sources(tmp_path: Path) -> None:
    with files_limited_to(1_000_000):
        assert_lets_go(lambda tensor: torch_ckpt.async_save({"t": tensor}, tmp_path / "c"))


def test_a_save_that_is_changed_too_early_lets_go_of_its_sources(
    tmp_path: Path, held: Gate
) -> None:
    def save_and_change(tensor: torch.Tensor) -> AsyncSave:
        handle = torch_ckpt.async_save({"t": tensor}, tmp_path / "c", staging="overlapped")
        tensor.add_(1)
        held.open()
        return handle

    assert_lets_go(save_and_change)


# --- the life of a save --------------------------------------------------------------------------


def test_a_blocking_call_returns_staged(tmp_path: Path, gate: Gate) -> None:
    handle = torch_ckpt.async_save({"t": large()}, tmp_path / "c", write_done=gate)
    assert handle.staged.done()
    assert not handle.done()
    gate.open()
    handle.result()


def test_an_overlapped_call_returns_before(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": large()}, tmp_path / "c", staging="overlapped")
    assert not handle.staged.done()
    held.open()
    handle.wait_staged()
    assert handle.staged.done()
    handle.result()
    assert handle.done()
    assert handle.committed.done()


def test_waiting_in_vain_is_a_timeout_and_the_save_goes_on(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", staging="overlapped")
    with pytest.raises(TimeoutError, match=r"c was not staged within 0\.01 s; it goes on"):
        handle.wait_staged(0.01)
    with pytest.raises(TimeoutError, match=r"c was not committed within 0\.01 s; it goes on"):
        handle.result(0.01)
    held.open()
    handle.result(LIMIT)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_the_result_may_be_asked_for_again(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    metadata = handle.result()
    assert handle.result() is metadata
    assert handle.committed.result() is metadata


def test_the_futures_cannot_be_cancelled(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", staging="overlapped")
    assert not handle.staged.cancel()
    assert not handle.committed.cancel()
    held.open()
    handle.result()


def test_the_futures_call_back(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", staging="overlapped")
    called = threading.Event()
    handle.committed.add_done_callback(lambda future: called.set())
    assert called.wait(LIMIT)
    handle.result()


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": large(), "n": 1}, tmp_path / "c")
    handle.result()
    size = sum(file.stat().st_size for file in data_files(tmp_path / "c"))
    assert handle.progress() == Progress(size, size, size)


@pytest.fixture
def opened_by_waiting(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """It opens when somebody waits for a save; who does not wait finds it shut."""
    make_room = snapshot._Runtime.make_room

    def open_and_make_room(self: snapshot._Runtime, if_busy: str, ranks: Ranks) -> None:
        if self.job is not None:
            gate.open()
        make_room(self, if_busy, ranks)

    monkeypatch.setattr(snapshot._Runtime, "make_room", open_and_make_room)
    return gate


def test_a_second_save_waits_for_the_first(tmp_path: Path, opened_by_waiting: Gate) -> None:
    first = torch_ckpt.async_save(
        {"t": torch.ones(3)}, tmp_path / "first", write_done=opened_by_waiting
    )
    second = torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "second")
    assert first.done()
    second.result()
    assert_checkpoint(tmp_path / "first", {"t": torch.ones(3)})
    assert_checkpoint(tmp_path / "second", {"t": torch.zeros(3)})


def test_a_synchronous_save_waits_for_the_one_under_way(
    tmp_path: Path, opened_by_waiting: Gate
) -> None:
    first = torch_ckpt.async_save(
        {"t": torch.ones(3)}, tmp_path / "c", write_done=opened_by_waiting
    )
    torch_ckpt.save({"t": torch.zeros(3)}, tmp_path / "c")
    assert first.done()
    assert_checkpoint(tmp_path / "c", {"t": torch.zeros(3)})


def test_a_second_save_may_refuse_to_wait(tmp_path: Path, gate: Gate) -> None:
    first = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "first", write_done=gate)
    with pytest.raises(CheckpointError, match=r"the save to .*first has not ended yet"):
        torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "second", if_busy="raise")
    gate.open()
    first.result()
    assert_checkpoint(tmp_path / "first", {"t": torch.ones(3)})
    assert not (tmp_path / "second").exists()


def test_who_refuses_to_wait_saves_where_nothing_is_under_way(tmp_path: Path) -> None:
    for name in ("first", "second"):
        torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / name, if_busy="raise").result()


def test_saves_of_many_threads_are_made_one_by_one(tmp_path: Path) -> None:
    def save(number: int) -> None:
        torch_ckpt.async_save({"t": large(number)}, tmp_path / str(number), max_host_bytes=1 << 20)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the handle of the save")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch_ckpt.save({}, tmp_path / "last")
    for number in range(4):
        assert_checkpoint(tmp_path / str(number), {"t": large(number)})


SEEN: dict[str, Callable[[AsyncSave], object]] = {
    "result": lambda handle: handle.result(),
    "wait_staged": lambda handle: handle.wait_staged(),
    "staged.result": lambda handle: handle.staged.result(),
    "committed.result": lambda handle: handle.committed.result(),
}


@pytest.mark.parametrize("way", SEEN)
@pytest.mark.parametrize("staging", STAGINGS)
def test_an_error_that_was_raised_is_told_nowhere_else(
    tmp_path: Path, way: str, staging: str
) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path), staging=staging)
    with pytest.raises(CheckpointException):
        SEEN[way](handle)
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


@pytest.mark.parametrize("name", ["staged", "committed"])
def test_an_error_that_was_looked_at_is_told_nowhere_else(tmp_path: Path, name: str) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    assert isinstance(getattr(handle, name).exception(), CheckpointException)
    torch_ckpt.check_for_errors()


def test_an_unseen_error_is_raised_by_the_next_call_and_once(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    with pytest.raises(CheckpointException):
        torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()
    assert handle.done()


def test_an_unseen_error_is_raised_by_check_for_errors_and_once(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    wait_for_futures([handle.committed])
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()
    torch_ckpt.check_for_errors()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()


def test_a_synchronous_save_leaves_an_unseen_error_unseen(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()
    assert handle.done()


def test_errors_that_wait_are_raised_one_by_one(tmp_path: Path) -> None:
    first = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
    wait_for_futures([first.committed])
    with pytest.raises(CheckpointException) as error:
        torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "file" / "second")
    second = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "file" / "second")
    with pytest.raises(CheckpointException) as other:
        second.result()
    assert error.value is first.committed.exception()
    assert error.value is not other.value


def test_check_for_errors_does_not_wait(tmp_path: Path, gate: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", write_done=gate)
    torch_ckpt.check_for_errors()
    assert not handle.done()
    gate.open()
    handle.result()


def test_a_failed_system_call_is_an_oserror_with_the_file(tmp_path: Path) -> None:
    path = unwritable(tmp_path)
    with pytest.raises(CheckpointException) as error:
        torch_ckpt.async_save({"t": torch.ones(3)}, path).result()
    cause = cause_of(error.value)
    assert isinstance(cause, OSError)
    assert str(cause.filename) == str(path.parent)


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_full_disk_is_enospc_and_leaves_nothing(small_disk: Path, staging: str) -> None:
    handle = torch_ckpt.async_save({"t": large()}, small_disk / "c", staging=staging)
    with pytest.raises(CheckpointException) as error:
        handle.result()
    cause = cause_of(error.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert str(cause.filename).startswith(str(small_disk / "c"))
    assert list((small_disk / "c").iterdir()) == []


def test_a_failed_save_keeps_the_old_checkpoint_and_the_next_one_replaces_it(
    tmp_path: Path,
) -> None:
    torch_ckpt.async_save({"t": large(1)}, tmp_path / "c").result()
    before = sorted((tmp_path / "c").iterdir())
    with files_limited_to(CHUNK_BYTES), pytest.raises(CheckpointException):
        torch_ckpt.async_save({"t": large(2)}, tmp_path / "c").result()
    assert sorted((tmp_path / "c").iterdir()) == before
    assert_checkpoint(tmp_path / "c", {"t": large(1)})
    torch_ckpt.async_save({"t": large(3)}, tmp_path / "c").result()
    assert_checkpoint(tmp_path / "c", {"t": large(3)})


def test_an_object_that_does_not_pickle_fails_the_save(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3), "o": lambda: 1}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="pickle"):
        handle.result()
    assert list((tmp_path / "c").iterdir()) == []


def test_an_existing_checkpoint_may_be_protected(tmp_path: Path) -> None:
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()
    with pytest.raises(CheckpointException, match="already exists"):
        torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "c", overwrite=False).result()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_a_handle_dropped_before_the_end_warns(tmp_path: Path, gate: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", write_done=gate)
    committed = handle.committed
    with pytest.warns(UserWarning, match="the handle of the save to .*c was dropped"):
        del handle
    gate.open()
    committed.result(LIMIT)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_the_error_of_a_dropped_handle_is_told(tmp_path: Path, held: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path), staging="overlapped")
    committed = handle.committed
    with pytest.warns(UserWarning, match="dropped"):
        del handle
    held.open()
    wait_for_futures([committed])
    with pytest.raises(CheckpointException):
        torch_ckpt.check_for_errors()


def test_a_handle_dropped_after_the_end_does_not_warn(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    handle.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del handle


# --- hooks ---------------------------------------------------------------------------------------


def test_write_done_is_called_beside_training_and_before_the_commit(tmp_path: Path) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def look() -> None:
        thread = threading.current_thread().name
        seen.append((thread, contents(tmp_path / "c") == saved, is_committed(tmp_path / "c")))

    torch_ckpt.save({"t": large()}, tmp_path / "saved")
    saved = contents(tmp_path / "saved")
    torch_ckpt.async_save({"t": large()}, tmp_path / "c", write_done=look).result()
    assert seen == [("torch_ckpt save", True, False)]


def test_what_write_done_raises_fails_the_save(tmp_path: Path) -> None:
    def refuse() -> None:
        raise PermissionError("not today")

    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c").result()
    before = sorted((tmp_path / "c").iterdir())
    handle = torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "c", write_done=refuse)
    with pytest.raises(CheckpointException, match="not today") as error:
        handle.result()
    assert isinstance(cause_of(error.value), PermissionError)
    handle.wait_staged()
    assert sorted((tmp_path / "c").iterdir()) == before
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_on_commit_is_called_with_the_metadata_after_the_commit(tmp_path: Path, held: Gate) -> None:
    seen: list[tuple[Metadata, bool, bool]] = []

    def look(metadata: Metadata) -> None:
        seen.append((metadata, is_committed(tmp_path / "c"), handle.done()))

    state = {"t": torch.ones(3)}
    handle = torch_ckpt.async_save(state, tmp_path / "c", staging="overlapped", on_commit=look)
    held.open()
    metadata = handle.result()
    assert seen == [(metadata, True, False)]


@pytest.mark.parametrize("error", [OSError, CheckpointException])
def test_what_on_commit_raises_says_that_the_checkpoint_is_committed(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fail(_: Metadata) -> None:
        raise error("upload", {}) if error is CheckpointException else error("upload")

    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", on_commit=fail)
    with pytest.raises(OnCommitFailed, match=r"the checkpoint in .*c is committed") as caught:
        handle.result()
    assert isinstance(cause_of(caught.value).__cause__, error)
    torch_ckpt.check_for_errors()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_on_commit_is_not_called_for_a_failed_save(tmp_path: Path) -> None:
    called: list[Metadata] = []
    handle = torch_ckpt.async_save(
        {"t": torch.ones(3)}, unwritable(tmp_path), on_commit=called.append
    )
    with pytest.raises(CheckpointException):
        handle.result()
    assert called == []


@pytest.mark.parametrize("hook", ["write_done", "on_commit"])
@pytest.mark.parametrize("save", [torch_ckpt.save, torch_ckpt.async_save])
def test_a_save_from_a_hook_is_refused_since_it_would_wait_for_itself(
    tmp_path: Path, hook: str, save: Callable[..., object]
) -> None:
    def save_more(*_: Metadata) -> None:
        save({"t": torch.ones(3)}, tmp_path / "more")

    handle = torch_ckpt.async_save({}, tmp_path / "c", **{hook: save_more})  # type: ignore[arg-type]
    with pytest.raises((CheckpointError, CheckpointException), match="cannot save"):
        handle.result(LIMIT)


def test_a_callback_of_the_future_may_save(tmp_path: Path) -> None:
    saved = threading.Event()

    def save_more(_: object) -> None:
        torch_ckpt.save({"t": torch.ones(3)}, tmp_path / "more")
        saved.set()

    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    handle.committed.add_done_callback(save_more)
    assert saved.wait(LIMIT)
    handle.result()


# --- the end of the interpreter ------------------------------------------------------------------


def run_script(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script in an interpreter of its own to its end."""
    command = [sys.executable, "-W", "ignore", "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


LEAVES_EARLY = """
import atexit, sys, threading, torch, torch_ckpt
leaving = threading.Event()
atexit.register(leaving.set)  # which is before what has been registered before
handle = torch_ckpt.async_save({"t": torch.arange(9)}, sys.argv[1], write_done=leaving.wait)
print("done" if handle.done() else "under way")
"""


def test_leaving_the_interpreter_waits_for_the_save(tmp_path: Path) -> None:
    done = run_script(LEAVES_EARLY, tmp_path / "c")
    assert (done.returncode, done.stdout, done.stderr) == (0, "under way\n", "")
    assert_checkpoint(tmp_path / "c", {"t": torch.arange(9)})


LEAVES_AN_ERROR = """
import sys, torch, torch_ckpt
handle = torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1])
"""


def test_leaving_the_interpreter_logs_an_unseen_error(tmp_path: Path) -> None:
    path = unwritable(tmp_path)
    done = run_script(LEAVES_AN_ERROR, path)
    assert done.returncode == 0
    assert f"the save to {path} failed: " in done.stderr
    assert "File exists" in done.stderr


LEAVES_A_SAVE_THAT_HANGS = """
import sys, threading, torch, torch_ckpt
torch_ckpt.snapshot.EXIT_LIMIT_SECONDS = 0.05
reached = threading.Event()
def hang():
    reached.set()
    threading.Event().wait()
handle = torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1], write_done=hang)
# A thread that comes back from the engine while the interpreter ends would end the process.
reached.wait()
"""


def test_leaving_the_interpreter_waits_no_longer_than_the_limit(tmp_path: Path) -> None:
    done = run_script(LEAVES_A_SAVE_THAT_HANGS, tmp_path / "c")
    assert done.returncode == 0
    assert f"the save to {tmp_path / 'c'} has not ended within" in done.stderr
    assert not is_committed(tmp_path / "c")


SEES_AN_ERROR = """
import sys, torch, torch_ckpt
from torch.distributed.checkpoint.api import CheckpointException
try:
    torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1]).result()
except CheckpointException:
    print("seen")
"""


def test_an_error_that_was_seen_is_not_logged_at_the_end(tmp_path: Path) -> None:
    done = run_script(SEES_AN_ERROR, unwritable(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "seen\n", "")


# --- forks and signals ---------------------------------------------------------------------------


def in_fork(work: Callable[[], object]) -> int:
    """The exit code of a forked child that does the work: 0 where it raised nothing."""
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Since Python 3.12: that there are threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(int(LIMIT))
            work()
            code = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("way", SEEN)
def test_a_forked_child_has_no_part_in_the_save(tmp_path: Path, gate: Gate, way: str) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", write_done=gate)

    def ask() -> None:
        with pytest.raises(CheckpointError, match="the process that forked this one"):
            SEEN[way](handle)
        torch_ckpt.check_for_errors()

    assert in_fork(ask) == 0
    gate.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_a_forked_child_can_save_itself(tmp_path: Path, gate: Gate) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "parent", write_done=gate)

    def save() -> None:
        torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "child").result()

    assert in_fork(save) == 0
    gate.open()
    handle.result()
    assert_checkpoint(tmp_path / "child", {"t": torch.zeros(3)})


def test_a_guarded_step_of_a_forked_child_does_not_wait(tmp_path: Path, held: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    handle.guard(optimizer)
    assert in_fork(optimizer.step) == 0
    held.open()
    handle.result()


def test_a_forked_child_knows_of_a_save_that_has_ended(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c")
    handle.result()
    assert in_fork(handle.result) == 0


LEAVES_IN_A_FORK = """
import os, sys, threading, torch, torch_ckpt
opened, reached = threading.Event(), threading.Event()
def hold():
    reached.set()
    opened.wait()
handle = torch_ckpt.async_save({"t": torch.ones(3)}, sys.argv[1], write_done=hold)
reached.wait()
child = os.fork()
if child == 0:
    sys.exit(7)
_, status = os.waitpid(child, 0)
opened.set()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_leaves_without_waiting(tmp_path: Path) -> None:
    done = run_script(LEAVES_IN_A_FORK, tmp_path / "c")
    assert (done.returncode, done.stderr) == (7, "")
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_workers_of_a_data_loader_start_during_a_save(tmp_path: Path, gate: Gate) -> None:
    state = {"t": large()}
    handle = torch_ckpt.async_save(state, tmp_path / "c", write_done=gate)
    loader: Any = DataLoader(list(range(8)), num_workers=2, timeout=LIMIT)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert [int(batch) for batch in loader] == list(range(8))
    gate.open()
    handle.result()
    assert_checkpoint(tmp_path / "c", state)


_context = multiprocessing.get_context("forkserver")


def in_child(work: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """A child that does ``work(connection, *arguments)``, and its connection."""
    ours, theirs = _context.Pipe()
    child = _context.Process(target=work, args=(theirs, *arguments))
    child.start()
    theirs.close()
    return child, ours


def answer_of(work: Callable[..., None], *arguments: Any) -> Any:
    """What ``work`` sends from a child."""
    child, connection = in_child(work, *arguments)
    assert connection.poll(LIMIT), "the child hangs"
    answer = connection.recv()
    child.join(LIMIT)
    return answer


def _save_until_killed(connection: Connection, path: Path, moment: str) -> None:
    warnings.simplefilter("ignore")
    state = {"a": large(3), "b": large(4)}
    if moment == "writing":
        slow = Background(max_bytes_per_second=CHUNK_BYTES)
        handle = torch_ckpt.async_save(state, path, background=slow)
        eventually(lambda: handle.progress().bytes_done > 0)
    else:
        hold = Gate()
        handle = torch_ckpt.async_save(state, path, write_done=hold)
        assert hold.reached.wait(LIMIT)
    connection.send("under way")
    threading.Event().wait()


def save_and_terminate(path: Path, moment: str) -> None:
    child, connection = in_child(_save_until_killed, path, moment)
    assert connection.poll(LIMIT), "the child hangs"
    assert connection.recv() == "under way"
    child.terminate()
    child.join(LIMIT)
    assert child.exitcode == -signal.SIGTERM


@pytest.mark.parametrize("moment", ["writing", "written"])
def test_sigterm_during_a_save_leaves_no_checkpoint(tmp_path: Path, moment: str) -> None:
    save_and_terminate(tmp_path / "c", moment)
    assert not is_committed(tmp_path / "c")
    with pytest.raises(CheckpointException):
        torch_ckpt.load({"a": large(), "b": large()}, tmp_path / "c")


@pytest.mark.parametrize("moment", ["writing", "written"])
def test_sigterm_during_a_save_keeps_the_old_checkpoint(tmp_path: Path, moment: str) -> None:
    old = {"a": large(1), "b": large(2)}
    torch_ckpt.save(old, tmp_path / "c")
    save_and_terminate(tmp_path / "c", moment)
    assert_checkpoint(tmp_path / "c", old)


def test_the_save_after_a_killed_one_clears_up(tmp_path: Path) -> None:
    save_and_terminate(tmp_path / "c", "written")
    left = contents(tmp_path / "c").keys()
    state = {"t": torch.ones(3)}
    torch_ckpt.async_save(state, tmp_path / "c").result()
    assert left
    assert not left & contents(tmp_path / "c").keys()
    assert_checkpoint(tmp_path / "c", state)


# --- metrics and traces --------------------------------------------------------------------------


@pytest.mark.parametrize("staging", STAGINGS)
def test_the_metrics_tell_what_the_save_took(tmp_path: Path, staging: str) -> None:
    begun = time.perf_counter()
    handle = torch_ckpt.async_save({"t": large()}, tmp_path / "c", staging=staging)
    returned = time.perf_counter() - begun
    handle.result()
    took = time.perf_counter() - begun
    metrics = handle.metrics()
    assert (metrics.path, metrics.rank) == (str(tmp_path / "c"), 0)
    assert metrics.bytes == sum(file.stat().st_size for file in data_files(tmp_path / "c"))
    assert 0 < metrics.blocked_s <= returned
    assert 0 < metrics.planning_s < metrics.written_s < metrics.total_s <= took
    assert 0 < metrics.staging_s < metrics.written_s
    assert 0 < metrics.commit_s <= metrics.total_s - metrics.written_s
    assert min(metrics.checksum_s, metrics.write_s, metrics.fsync_s) > 0
    assert 0 < metrics.python_s < took
    assert metrics.interval_s == 0


def test_the_interval_is_the_time_since_the_last_call(tmp_path: Path) -> None:
    begun = time.perf_counter()
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "first").result()
    handle = torch_ckpt.async_save({"t": torch.zeros(3)}, tmp_path / "second")
    took = time.perf_counter() - begun
    handle.result()
    assert 0 < handle.metrics().interval_s < took


def test_waits_for_staged_count_as_blocked(tmp_path: Path, opened_by_a_step: Gate) -> None:
    model, optimizer = trained(torch.optim.SGD)
    handle = torch_ckpt.async_save({"model": model}, tmp_path / "c", staging="overlapped")
    handle.guard(optimizer)
    before = handle.metrics().blocked_s
    step(model, optimizer)
    guarded = handle.metrics().blocked_s
    handle.wait_staged()
    assert before < guarded < handle.metrics().blocked_s
    handle.result()


def test_a_finished_save_is_one_log_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        # Overlapped, where the caller's part ends before the save begins.
        handle = torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", staging="overlapped")
        handle.result()
    records: list[Any] = [r for r in caplog.records if r.name == "torch_ckpt"]
    assert [record.levelname for record in records] == ["INFO"]
    assert re.match(rf"saved 0\.000 GB to {tmp_path}/c on rank 0 in ", records[0].getMessage())
    assert records[0].metrics == vars(handle.metrics())


def test_a_failed_save_is_no_log_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torch_ckpt"):
        handle = torch_ckpt.async_save({"t": torch.ones(3)}, unwritable(tmp_path))
        with pytest.raises(CheckpointException):
            handle.result()
    assert [r for r in caplog.records if r.name == "torch_ckpt"] == []


def test_a_trace_is_what_chrome_shows(tmp_path: Path) -> None:
    state = {"t": large(), "u": large()}
    options: dict[str, Any] = {"staging": "overlapped", "trace": tmp_path / "trace.json"}
    handle = torch_ckpt.async_save(state, tmp_path / "c", **options)
    handle.result()
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {"plan", "stage", "checksum", "write", "fsync", "commit", "blocked"} == {
        span["name"] for span in spans
    }
    total = handle.metrics().total_s * 1e6
    assert all(0 <= span["ts"] <= span["ts"] + span["dur"] <= total + 1 for span in spans)
    lanes = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert {"python", "caller", "sources 0", "sources 1", "disk 0", "disk 1"} == set(lanes.values())
    assert {span["tid"] for span in spans} == set(lanes)


def test_a_failed_save_has_a_trace_as_well(tmp_path: Path) -> None:
    handle = torch_ckpt.async_save({}, unwritable(tmp_path), trace=tmp_path / "trace.json")
    with pytest.raises(CheckpointException):
        handle.result()
    json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize("trace", ["missing/trace.json", "nul\0", 7])
def test_a_trace_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trace: Any
) -> None:
    if isinstance(trace, str):
        trace = str(tmp_path / trace)
    torch_ckpt.async_save({"t": torch.ones(3)}, tmp_path / "c", trace=trace).result()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "the trace could not be written" in caplog.text


# --- states that do not change -------------------------------------------------------------------


def training(step: int, model: float, optim: float = 0.0) -> StateDict:
    return {
        "model": {"w": torch.full((3, 3), model), "b": torch.full((3,), model)},
        "optim": {"moment": torch.full((3, 3), optim), "step": torch.tensor(step)},
    }


def warnings_of(tmp_path: Path, states: list[StateDict], **options: Any) -> list[str]:
    """What saves of these states, one after the other, warn of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number, state in enumerate(states):
            torch_ckpt.async_save(state, tmp_path / f"c{number}", **options).result()
    return [text for w in caught if "bit for bit" in (text := str(w.message))]


def test_weights_that_stay_while_steps_are_counted_are_named(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, [training(1, 1.0, 1.0), training(2, 1.0, 2.0)])
    assert warning.startswith(f"{tmp_path}/c1: model.w, model.b are bit for bit what the last")
    assert "although optim.step has changed" in warning


def test_of_many_tensors_that_stay_five_are_named(tmp_path: Path) -> None:
    states = [{"m": {f"t{i}": torch.ones(3) for i in range(8)}, "step": n} for n in (1, 2)]
    (warning,) = warnings_of(tmp_path, states)
    assert "m.t3, m.t4 and 3 more are bit for bit" in warning


def test_a_number_that_is_no_tensor_counts_steps_as_well(tmp_path: Path) -> None:
    (warning,) = warnings_of(tmp_path, [{"m": [torch.ones(3)], "step": n} for n in (1, 2)])
    assert "although step has changed" in warning


UNSUSPICIOUS = {
    "they change": [training(1, 1.0, 1.0), training(2, 2.0, 2.0)],
    "one of a group changes": [
        {"m": {"a": torch.ones(3), "b": torch.full((3,), float(n))}, "step": n} for n in (1, 2)
    ],
    "nothing changes": [training(1, 1.0), training(1, 1.0)],
    "a tensor is new": [training(1, 1.0), training(2, 1.0) | {"more": torch.ones(2)}],
    "a name is another": [{"m": [torch.ones(3)], "s": 1}, {"n": [torch.ones(3)], "s": 2}],
}


@pytest.mark.parametrize("case", UNSUSPICIOUS)
def test_there_is_no_warning_where(tmp_path: Path, case: str) -> None:
    assert warnings_of(tmp_path, UNSUSPICIOUS[case]) == []


def test_the_warning_can_be_silenced(tmp_path: Path) -> None:
    states = [training(1, 1.0), training(2, 1.0)]
    assert warnings_of(tmp_path, states, warn_unchanged=False) == []


def test_a_frozen_group_is_named_once(tmp_path: Path) -> None:
    states = [training(n, 1.0, float(n)) for n in range(4)]
    assert len(warnings_of(tmp_path, states)) == 1


def test_each_group_is_named_once(tmp_path: Path) -> None:
    states = [training(1, 1.0, 1.0), training(2, 1.0, 2.0), training(3, 1.0, 2.0)]
    first, second = warnings_of(tmp_path, states)
    assert "model.w" in first
    assert "model.w" not in second
    assert "optim.moment" in second


def test_a_warning_turned_into_an_error_says_that_the_checkpoint_is_committed(
    tmp_path: Path,
) -> None:
    torch_ckpt.async_save(training(1, 1.0), tmp_path / "c1").result()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*bit for bit")
        handle = torch_ckpt.async_save(training(2, 1.0), tmp_path / "c2")
        with pytest.raises(CheckpointError, match=r"bit for bit .*c2 is committed$"):
            handle.result()
    assert_checkpoint(tmp_path / "c2", training(2, 1.0))


# --- beside training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nice": 20}, "nice must be from 0 to 19, got 20"),
        ({"nice": -1}, "nice must be from 0 to 19, got -1"),
        ({"threads": -1}, "threads must not be negative, got -1"),
        ({"max_bytes_per_second": -1}, "max_bytes_per_second must not be negative, got -1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Background(**options)


def nice_of_threads() -> dict[int, int]:
    """By thread id."""
    threads: list[str] = []
    # One that ends meanwhile may hide another one from the listing.
    while threads != (again := sorted(os.listdir("/proc/self/task"))):
        threads = again
    found = {}
    for thread in threads:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            status = Path(f"/proc/self/task/{thread}/stat").read_text()
            # The name, in parentheses, may hold anything. "nice" is the 19th field.
            found[int(thread)] = int(status.rpartition(")")[2].split()[19 - 3])
    return found


def _threads_beside(connection: Connection, path: Path, kind: str, own_nice: int) -> None:
    """Sends how much nicer than the process how many threads of a save are; and I/O classes."""
    warnings.simplefilter("ignore")
    os.nice(own_nice)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    background = Background(nice=7, threads=3, max_bytes_per_second=32 << 20)
    writer = torch_ckpt.FileSystemWriter(path, background=background)
    state = {"t": large(chunks=4)}
    if kind == "save":
        torch_ckpt.save(state, storage_writer=writer)
    elif kind == "async_save":
        torch_ckpt.async_save(state, storage_writer=writer).result()
    else:
        future: Any = dcp_async_save(state, storage_writer=writer, no_dist=True)
        future.result()
    # The engine's threads outlive the save.
    nicer = {thread: nice - own for thread, nice in nice_of_threads().items() if nice > own}
    classes = set()
    if shutil.which("ionice"):
        for thread in nicer:
            asked = subprocess.run(["ionice", "-p", str(thread)], capture_output=True, text=True)
            classes.add(asked.stdout.strip())
    connection.send((sorted(nicer.values()), classes))


def test_the_threads_of_a_synchronous_save_are_as_nice_as_the_process(tmp_path: Path) -> None:
    nicer, _ = answer_of(_threads_beside, tmp_path / "c", "save", 0)
    assert nicer == []


@pytest.mark.parametrize("kind", ["async_save", "dcp.async_save"])
def test_the_threads_of_a_background_save_are_quiet(tmp_path: Path, kind: str) -> None:
    nicer, classes = answer_of(_threads_beside, tmp_path / "c", kind, 0)
    assert nicer == [7, 7, 7]
    assert classes <= {"idle"}


@pytest.mark.parametrize(("own_nice", "nicer_by"), [(4, [3, 3, 3]), (9, [])])
def test_a_process_that_is_nice_itself_is_not_made_less_so(
    tmp_path: Path, own_nice: int, nicer_by: list[int]
) -> None:
    nicer, _ = answer_of(_threads_beside, tmp_path / "c", "async_save", own_nice)
    assert nicer == nicer_by


def test_the_bandwidth_is_limited(tmp_path: Path) -> None:
    limit = 32 << 20
    handle = torch_ckpt.async_save(
        {"t": large(chunks=4)},
        tmp_path / "c",
        thread_count=1,
        background=Background(max_bytes_per_second=limit),
    )
    handle.result()
    # The last write begins when those before it have had their time.
    at_least = (handle.metrics().bytes - CHUNK_BYTES) / limit
    assert handle.metrics().written_s >= at_least


# --- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"staging": "later"}, "staging must be one of 'blocking', 'overlapped', got 'later'"),
        ({"if_busy": "skip"}, "if_busy must be one of 'wait', 'raise', got 'skip'"),
        ({"checkpoint_id": None}, "pass a checkpoint_id or a FileSystemWriter"),
        ({"thread_count": 0}, "thread_count must be at least 1"),
        ({"max_host_bytes": 1}, "max_host_bytes must be at least 4096"),
        ({"storage_writer": "mine"}, "expected a torch_ckpt.FileSystemWriter, got str"),
        ({"storage_writer": "mine", "thread_count": 2}, "belong to the FileSystemWriter"),
        ({"_extensions": [object()]}, "use dcp.async_save with this writer"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_contradicting_options_are_one_sentence(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    arguments = {"checkpoint_id": tmp_path / "c"} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_ckpt.async_save({}, **arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_nobody_has_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="stagign"):
        torch_ckpt.async_save({}, tmp_path / "c", stagign="blocking")


# --- torch's own async_save ----------------------------------------------------------------------


def test_the_writer_is_an_async_stager(tmp_path: Path) -> None:
    assert isinstance(torch_ckpt.FileSystemWriter(tmp_path), AsyncStager)


def test_a_staged_copy_is_the_state(tmp_path: Path) -> None:
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage(everything())
    assert_equal(staged, everything())
    assert type(staged["model"]) is OrderedDict
    assert type(staged["counts"]) is Counter


def test_a_staged_copy_keeps_the_strides_of_dense_tensors(tmp_path: Path) -> None:
    tensor = random_tensor((4, 6), torch.float32).t()
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage({"t": tensor})
    assert staged["t"].stride() == (1, 6)


def test_a_staged_copy_shares_nothing_with_the_state(tmp_path: Path) -> None:
    state = everything()
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage(state)
    spoil(state)
    assert_equal(staged, everything())


def test_staging_leaves_the_state_as_it_is(tmp_path: Path) -> None:
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
def test_torchs_own_async_save_saves_what_was_there_at_the_call(tmp_path: Path, by: str) -> None:
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


def test_torchs_own_async_save_raises_what_failed(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(unwritable(tmp_path))
    future: Any = dcp_async_save({"t": torch.ones(3)}, storage_writer=writer, no_dist=True)
    with pytest.raises(CheckpointException):
        future.result()


def test_the_writer_pickles_after_staging(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "c", background=Background(nice=3))
    writer.stage(everything())
    copy = pickle.loads(pickle.dumps(writer))
    dcp_save({"t": torch.ones(3)}, storage_writer=copy, no_dist=True)
    assert copy.background == Background(nice=3)
    assert_checkpoint(tmp_path / "c", {"t": torch.ones(3)})


def test_bytes_of_staged_tensors_are_those_of_the_sources(tmp_path: Path) -> None:
    state = {str(dtype): random_tensor((7, 3), dtype) for dtype in DTYPES}
    staged = torch_ckpt.FileSystemWriter(tmp_path).stage(state)
    assert [bytes_of(t) for t in staged.values()] == [bytes_of(t) for t in state.values()]
