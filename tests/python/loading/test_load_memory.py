"""Memory of a load: the limit, estimates, and objects that are deleted before others are read."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import torch_ckpt
from tests.forked import in_fresh_process
from tests.loads import MIB, load, mismatch, refusal, save
from tests.support import (
    StateDict,
    assert_equal,
    data_files,
    emptied,
    f32,
    process_memory,
    random_tensor,
    reset_peak_memory,
)
from torch_ckpt import LoadMismatch
from torch_ckpt.loading.report import ReadMemory

# --- memory --------------------------------------------------------------------------------------

PLAIN_BYTES = 100 * MIB

ROWS, COLUMNS = 25600, 1024


def memory_of_a_load(path: Path, limit: int, free: bool) -> tuple[int, ReadMemory, bool]:
    """Loads a state. Returns the bytes beyond the targets, the estimate, and whether all values
    match."""
    warnings.simplefilter("ignore")
    state = {
        "plain": torch.ones(ROWS, COLUMNS),
        "transposed": torch.ones(COLUMNS, ROWS).t(),
        "with gaps": torch.ones(ROWS, COLUMNS + 8)[:, 3:-5],
        "converted": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16),
    }
    torch_ckpt.load({"small": torch.ones(3)}, path, names=["small"])
    estimate = torch_ckpt.estimate_read_memory(
        state, path, options=torch_ckpt.ReadOptions(max_inflight_bytes=limit)
    )
    reset_peak_memory()
    before = process_memory("VmRSS")
    torch_ckpt.load(
        state, path, options=torch_ckpt.ReadOptions(max_inflight_bytes=limit), free_before_read=free
    )
    growth = process_memory("VmHWM") - before
    right = all(torch.equal(t, torch.full_like(t, i)) for i, t in enumerate(state.values(), 2))
    return growth, estimate, right


@pytest.fixture(scope="module")
def three_hundred_mib(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("memory")
    names = ["plain", "transposed", "with gaps", "converted"]
    state = {name: torch.full((ROWS, COLUMNS), float(i)) for i, name in enumerate(names, 2)}
    save(state | {"small": torch.ones(3)}, path)
    yield path
    for file in data_files(path):
        file.unlink()


@pytest.mark.parametrize(
    ("limit", "free"),
    [(MIB, False), (64 * MIB, False), (MIB, True)],
    ids=["1 MiB", "64 MiB", "1 MiB, freeing"],
)
def test_a_load_holds_no_more_than_its_limit_beyond_the_targets(
    three_hundred_mib: Path, limit: int, free: bool
) -> None:
    growth, estimate, right = in_fresh_process(memory_of_a_load, three_hundred_mib, limit, free)
    assert right
    # Allowance for stacks of threads, the plan and the allocator's arenas.
    allowance = 8 * MIB
    assert growth <= limit + allowance
    assert growth <= estimate.beyond_targets_bytes + allowance
    assert estimate.beyond_targets_bytes <= limit
    assert estimate.target_bytes == 3 * PLAIN_BYTES + PLAIN_BYTES // 2


def test_an_object_above_the_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    save({"note": "x" * (3 * MIB)}, tmp_path)
    cause = refusal(lambda: load({"note": ""}, tmp_path, max_inflight_bytes=2 * MIB))
    assert type(cause) is ValueError
    needed = torch_ckpt.estimate_read_memory({"note": ""}, tmp_path).stored_bytes
    assert str(cause).startswith(f"note: reading it needs {needed} bytes of memory at once, ")
    assert f"max_inflight_bytes={2 * MIB}" in str(cause)


def test_the_estimate_is_of_the_states_bytes(tmp_path: Path) -> None:
    save({"a": torch.ones(1000, 30), "b": torch.ones(100), "c": "text"}, tmp_path)
    state = {"a": torch.zeros(1000, 30).half(), "b": torch.zeros(100), "c": ""}
    estimate = torch_ckpt.estimate_read_memory(state, tmp_path)
    note = torch_ckpt.estimate_read_memory(state, tmp_path, names=["c"])
    assert estimate.target_bytes == 1000 * 30 * 2 + 100 * 4
    assert estimate.stored_bytes == 1000 * 30 * 4 + 100 * 4 + note.stored_bytes
    assert note.target_bytes == 0
    with pytest.raises(LoadMismatch, match="1 with a different shape"):
        torch_ckpt.estimate_read_memory({"b": torch.zeros(4)}, tmp_path)


@pytest.mark.parametrize("count", [1, 10])
def test_objects_load_at_the_smallest_limit_and_not_below(tmp_path: Path, count: int) -> None:
    state = {f"note {i}": "x" * (2_000_000 + i) for i in range(count)}
    save(state, tmp_path)
    least = torch_ckpt.estimate_read_memory(emptied(state), tmp_path).least_inflight_bytes
    loaded = emptied(state)
    load(loaded, tmp_path, max_inflight_bytes=least)
    assert loaded == state
    cause = refusal(lambda: load(emptied(state), tmp_path, max_inflight_bytes=least - 1))
    assert "reading it needs" in str(cause)


@pytest.mark.filterwarnings("ignore:loading converts")
@pytest.mark.parametrize("target", [torch.zeros(700, 600).t(), torch.zeros(600, 700).half()])
def test_tensors_load_at_the_smallest_limit(tmp_path: Path, target: torch.Tensor) -> None:
    save({"t": torch.ones(600, 700)}, tmp_path)
    least = torch_ckpt.estimate_read_memory({"t": target}, tmp_path).least_inflight_bytes
    load({"t": target}, tmp_path, max_inflight_bytes=least)
    assert torch.equal(target, torch.ones_like(target))


def test_estimates_and_comparisons_open_no_data_file(tmp_path: Path) -> None:
    state = {"t": torch.ones(600, 700), "note": "text"}
    save(state, tmp_path)
    for file in data_files(tmp_path):
        file.unlink()
    assert torch_ckpt.preflight(emptied(state), tmp_path).fits
    assert torch_ckpt.estimate_read_memory(emptied(state), tmp_path).stored_bytes > 600 * 700 * 4


def test_meta_tensors_are_checked_and_stay_meta_tensors(tmp_path: Path) -> None:
    save({"model": {"t": torch.ones(600, 700)}}, tmp_path)
    state = {"model": {"t": torch.empty(600, 700, device="meta")}}
    assert torch_ckpt.preflight(state, tmp_path).fits
    estimate = torch_ckpt.estimate_read_memory(state, tmp_path)
    assert estimate == torch_ckpt.estimate_read_memory(emptied(state), tmp_path)
    assert state["model"]["t"].is_meta


@pytest.mark.parametrize("free", [False, True])
def test_meta_tensors_are_materialized_when_they_are_loaded(tmp_path: Path, free: bool) -> None:
    save({"model": {"a": torch.ones(3), "b": torch.ones(3)}, "c": torch.ones(3)}, tmp_path)

    def on_meta() -> StateDict:
        tensors = {name: torch.empty(3, device="meta") for name in ("a", "b", "other")}
        return {"model": tensors, "c": torch.empty(3, device="meta")}

    state = on_meta()
    mismatch(lambda: load(state, tmp_path, free_before_read=free))
    assert all(tensor.is_meta for tensor in (*state["model"].values(), state["c"]))
    load(state, tmp_path, free_before_read=free, names=["model.a"])
    assert state["model"]["a"].tolist() == [1, 1, 1]
    assert all(state["model"][name].is_meta for name in ("b", "other"))
    assert state["c"].is_meta
    load(state, tmp_path, free_before_read=free, strict=False)
    assert state["model"]["b"].tolist() == state["c"].tolist() == [1, 1, 1]
    assert state["model"]["other"].is_meta
    grown = {"model": {"a": torch.empty(5, device="meta")}}
    load(grown, tmp_path, free_before_read=free, zero_fill=True)
    assert grown["model"]["a"].tolist() == [1, 1, 1, 0, 0]


# --- free_before_read ----------------------------------------------------------------------------


def test_values_are_loaded_after_freeing(tmp_path: Path) -> None:
    state = {
        "a": random_tensor((700, 500), torch.float32),
        "b": {"c": random_tensor((70,), torch.int64), "d": random_tensor((3, 4), torch.float16)},
        "e": torch.tensor(3),
        "f": torch.empty(0, 3),
        "g": "text",
    }
    save(state, tmp_path)
    loaded = emptied(state)
    load(loaded, tmp_path, free_before_read=True)
    assert_equal(loaded, state)


def test_tensors_that_share_memory_with_another_process_are_loaded_in_place(tmp_path: Path) -> None:
    target = torch.zeros(300, 400).share_memory_()
    other = torch.from_numpy(numpy.ones((3, 4), dtype=numpy.float32))
    values = {"shared": f32(300, 400), "of numpy": f32(3, 4, seed=1)}
    save(values, tmp_path)
    address = target.data_ptr()
    load({"shared": target, "of numpy": other}, tmp_path, free_before_read=True)
    assert_equal({"shared": target.clone(), "of numpy": other}, values)
    assert target.data_ptr() == address
    assert target.is_shared()


def test_memory_outside_of_overlapping_targets_is_kept(tmp_path: Path) -> None:
    # The targets together have as many bytes as the storage. malloc maps that many separately.
    full = torch.full((10 << 20,), 7.0)
    quarter = len(full) // 4
    targets = {"a": full[: 2 * quarter], "b": full[quarter : 3 * quarter]}
    save({"m": {name: torch.ones(2 * quarter) for name in targets}}, tmp_path)
    load({"m": targets}, tmp_path, free_before_read=True)
    assert (full[: 3 * quarter] == 1).all()
    assert (full[3 * quarter :] == 7).all()


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    tensor = random_tensor((30, 4), torch.float32)
    save({"model": {"a": tensor, "b": tensor}}, tmp_path)
    tied = torch.ones(30, 4)
    state = {"model": {"a": tied, "b": tied}}
    load(state, tmp_path, free_before_read=True)
    assert state["model"]["a"] is state["model"]["b"] is tied
    assert_equal(tied, tensor)


class Counted:
    """Counts its instances."""

    alive = 0
    most = 0

    def __new__(cls) -> Counted:
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls)

    def __del__(self) -> None:
        Counted.alive -= 1


def counted_state() -> StateDict:
    return {
        "top": Counted(),
        "nested": {"a": Counted(), "list": [Counted(), torch.ones(2)]},
        "stateful": Wrapped(Counted()),
    }


class Wrapped:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> StateDict:
        return {"value": self.value, "weight": torch.ones(2)}

    def load_state_dict(self, state: StateDict) -> None:
        self.value = state["value"]


def test_objects_are_released_before_their_replacements_are_made(tmp_path: Path) -> None:
    save(counted_state(), tmp_path)
    gc.collect()
    assert Counted.alive == 0
    state = counted_state()
    held, Counted.most = Counted.alive, 0
    # A Stateful may keep references to its values. It is not made to release them.
    load(state, tmp_path, free_before_read=True, allow_pickle=True)
    assert Counted.most <= held + 1
    assert Counted.alive == held
    Counted.most = 0
    load({"top": state["top"]}, tmp_path, free_before_read=False, allow_pickle=True)
    assert Counted.most == held + 1
    del state["stateful"]
    held, Counted.most = Counted.alive, 0
    load(state, tmp_path, free_before_read=True, allow_pickle=True)
    assert Counted.most == held
    assert type(state["top"]) is Counted


class Watch:
    """Counts the maximum number of some tensors that existed at the same time."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        self.alive = [one for one in self.alive if one() is not None] + [weakref.ref(tensor)]
        self.most = max(self.most, len(self.alive))
        return tensor


class Copying:
    """Stateful whose state dict is a copy, as if its parameters were on another device."""

    def __init__(self, value: float, watch: Watch) -> None:
        self.weight = torch.full((100,), value)
        self.watch = watch

    def state_dict(self) -> StateDict:
        return {"weight": self.watch.see(self.weight.clone())}

    def load_state_dict(self, state: StateDict) -> None:
        self.weight.copy_(state["weight"])


def test_copies_of_one_key_at_a_time_exist(tmp_path: Path) -> None:
    save({f"k{i}": Copying(i, Watch()) for i in range(5)}, tmp_path)
    watch = Watch()
    state = {f"k{i}": Copying(7, watch) for i in range(5)}
    gc.disable()  # The copies must be freed without the garbage collector.
    try:
        load(state, tmp_path, free_before_read=True)
    finally:
        gc.enable()
    assert [one.weight[0].item() for one in state.values()] == [0, 1, 2, 3, 4]
    assert watch.most == 1


@pytest.mark.parametrize("way", ["negated", "conjugated"])
def test_reading_through_copies_returns_their_memory(tmp_path: Path, way: str) -> None:
    # malloc would keep the memory of many small copies, beyond every limit.
    assert in_fresh_process(memory_that_loads_keep, tmp_path, way) < 8 * MIB


def memory_that_loads_keep(path: Path, way: str) -> int:
    warnings.simplefilter("ignore")
    real = torch.ones(3000, 4000)
    target = torch.complex(real, real).conj() if way == "conjugated" else real._neg_view()
    torch_ckpt.save({"t": target.clone()}, path)
    torch_ckpt.load({"t": target}, path, options=torch_ckpt.ReadOptions(max_inflight_bytes=2 * MIB))
    before = process_memory("VmRSS")
    for _ in range(3):
        torch_ckpt.load(
            {"t": target}, path, options=torch_ckpt.ReadOptions(max_inflight_bytes=2 * MIB)
        )
    return process_memory("VmRSS") - before


@pytest.mark.parametrize("free", [False, True])
def test_one_stored_name_fills_all_names_of_tied_tensors(tmp_path: Path, free: bool) -> None:
    weight = torch.arange(6.0)
    save({"embed": weight, "other": torch.ones(1)}, tmp_path)
    tied = torch.zeros(6)
    report = torch_ckpt.load(
        {"embed": tied, "head": tied, "other": torch.zeros(1)}, tmp_path, free_before_read=free
    )
    assert isinstance(report, torch_ckpt.LoadReport)
    assert sorted(report.loaded) == ["embed", "head", "other"]
    assert torch.equal(tied, weight)
