"""What a load may be asked for: other layouts and dtypes, little memory, a part, room to grow."""

from __future__ import annotations

import gc
import itertools
import pickle
import random
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import torch_ckpt
from tests.fresh import forget_peak_of_memory, in_fresh_process, memory_of_process
from tests.support import (
    DTYPES,
    StateDict,
    assert_equal,
    bytes_of,
    cause_of,
    data_files,
    emptied,
    pairwise,
    random_tensor,
    stock_save,
    zeros,
)
from torch_ckpt import _C
from torch_ckpt.cover import Box, gap_in
from torch_ckpt.errors import CheckpointError, Corrupt, LoadMismatch
from torch_ckpt.growth import GrowingSize
from torch_ckpt.loading import ReadMemory
from torch_ckpt.metadata import encode_metadata, read_metadata
from torch_ckpt.precision import loses_precision

Shape = tuple[int, ...]

MIB = 1 << 20


def save(state: StateDict, path: Path) -> None:
    torch_ckpt.save(state, path, no_dist=True, sync_files=False)


def load(state: StateDict, path: Path, **options: Any) -> Any:
    return torch_ckpt.load(state, path, no_dist=True, **options)


def dcp_load(
    state: StateDict, path: Path, planner: dcp.LoadPlanner | None = None, **options: Any
) -> None:
    reader = torch_ckpt.FileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


LOADERS = [load, dcp_load]
SAVERS = [save, stock_save]


def refusal(work: Callable[[], Any]) -> BaseException:
    """The cause of the CheckpointException that it must raise."""
    with pytest.raises(dcp.CheckpointException) as error:
        work()
    return cause_of(error.value)


def mismatch(work: Callable[[], Any]) -> LoadMismatch:
    cause = refusal(work)
    assert isinstance(cause, LoadMismatch)
    return cause


# --- any part, any layout ------------------------------------------------------------------------


class Boxes(dcp.DefaultLoadPlanner):
    """Fills each target with the box at an offset of the stored tensor of its name."""

    def __init__(self, offsets: dict[str, Shape]) -> None:
        super().__init__()
        self.offsets = offsets

    def create_local_plan(self) -> LoadPlan:
        plan = LoadPlan([])
        for name, offsets in self.offsets.items():
            target = self.state_dict[name]
            whole = self.metadata.state_dict_metadata[name]
            (stored,) = dcp.planner_helpers.create_read_items_for_chunk_list(
                name, whole, [dcp.ChunkStorageMetadata(torch.Size(offsets), target.size())]
            )
            plan.items.append(stored)
        return plan

    def lookup_tensor(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.state_dict[index.fqn]
        return found


def permuted(choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the dimensions in another order in memory."""
    order = choice.sample(range(tensor.dim()), tensor.dim())
    back = sorted(range(tensor.dim()), key=lambda dim: order[dim])
    return tensor.permute(order).contiguous().permute(back)


def negated(_choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return (-tensor)._neg_view()


def conjugated(_choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj().resolve_conj().conj()


def gapped(choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other memory between them."""
    if tensor.dim() == 0:
        return tensor
    dim, step = choice.randrange(tensor.dim()), choice.randint(2, 3)
    sizes = list(tensor.shape)
    sizes[dim] *= step
    view = torch.full(sizes, 7, dtype=tensor.dtype)[(slice(None),) * dim + (slice(0, None, step),)]
    return view.copy_(tensor)


def as_it_is(_choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


LAYOUTS = [as_it_is, permuted, negated, conjugated, gapped]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("seed", range(12))
def test_random_boxes_are_read_from_any_layout_into_any_other(
    tmp_path: Path, seed: int, large: bool
) -> None:
    choice = random.Random(seed)
    torch.manual_seed(seed)
    state, expected, targets, offsets = {}, {}, {}, {}
    for number in range(3 if large else 12):
        dims = choice.randint(1, 4)
        longest = {1: 400_000, 2: 600, 3: 75, 4: 26}[dims] if large else 9
        shape = [choice.randint(max(1, longest // 2), longest) for _ in range(dims)]
        dtype = choice.choice([torch.float32, torch.complex64])
        tensor = torch.randn(shape, dtype=dtype)
        stored, wanted = choice.choice(LAYOUTS), choice.choice(LAYOUTS)
        lengths = [choice.randint(1, size) for size in shape]
        begin = [choice.randint(0, s - n) for s, n in zip(shape, lengths, strict=True)]
        name = f"{number}: {dtype} {stored.__name__} to {wanted.__name__}, {lengths} of {shape}"
        state[name] = stored(choice, tensor)
        targets[name] = wanted(choice, torch.zeros(lengths, dtype=choice.choice([dtype] * 3)))
        offsets[name] = tuple(begin)
        box = tuple(slice(b, b + n) for b, n in zip(begin, lengths, strict=True))
        expected[name] = tensor[box]
    choice.choice(SAVERS)(state, tmp_path)
    dcp_load(targets, tmp_path, planner=Boxes(offsets))
    wrong = [name for name in targets if not torch.equal(targets[name], expected[name])]
    assert not wrong, f"seed {seed}"


@pytest.mark.parametrize(
    ("stored", "wanted", "saver", "dtype"),
    pairwise(itertools.product(LAYOUTS, LAYOUTS, SAVERS, [torch.complex64, torch.complex128])),
)
def test_whole_tensors_are_read_from_any_layout_into_any_other(
    tmp_path: Path, saver: Any, stored: Any, wanted: Any, dtype: torch.dtype
) -> None:
    choice = random.Random(0)
    torch.manual_seed(0)
    values = {
        "small": torch.randn(7, 5, 3, dtype=torch.complex64),
        "large": torch.randn(150, 40, 10, dtype=torch.complex64),
        "scalar": torch.randn((), dtype=torch.complex64),
    }
    saver({name: stored(choice, tensor) for name, tensor in values.items()}, tmp_path)
    targets = {
        name: wanted(choice, torch.zeros_like(tensor, dtype=dtype))
        for name, tensor in values.items()
    }
    load(targets, tmp_path)
    wrong = [name for name in values if not torch.equal(targets[name], values[name].to(dtype))]
    assert not wrong


# --- dtypes --------------------------------------------------------------------------------------


def knows(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch's copy_ does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            zeros((1,), wanted).copy_(zeros((1,), stored))
        except (RuntimeError, TypeError):
            return False
    return True


def source_for(stored: torch.dtype, wanted: torch.dtype, count: int) -> torch.Tensor:
    """Random bytes; but torch itself is not of one mind on numbers that no integer can hold."""
    tensor = random_tensor((count,), stored, seed=1)
    has_integers = not (wanted.is_floating_point or wanted.is_complex)
    if not has_integers or not (stored.is_floating_point or stored.is_complex):
        return tensor
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(2)) * 100
    return numbers.to(stored) if knows(torch.float32, stored) else tensor


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, but a NaN is a NaN."""
    if bytes_of(one) == bytes_of(other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return False
    if one.is_complex():
        # Which of the two parts is one may differ where torch has no arithmetic for the dtype.
        return torch.equal(one[~nan], other[~nan])
    return bytes_of(items_of(one)[~nan]) == bytes_of(items_of(other)[~nan])


def items_of(tensor: torch.Tensor) -> torch.Tensor:
    """A row of bytes for each element."""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_every_conversion_is_that_of_copy(tmp_path: Path, stored: torch.dtype) -> None:
    state, targets, expected = {}, {}, {}
    for wanted in DTYPES:
        if not knows(stored, wanted):
            continue
        # Above and below the size of a record that is read by itself.
        for count in (211, 300_000 // stored.itemsize):
            for kind in ("dense", "strided"):
                name = f"{wanted} {count} {kind}"
                state[name] = source_for(stored, wanted, count)
                step = 2 if kind == "strided" else 1
                targets[name] = zeros((count * step,), wanted)[::step]
                expected[name] = zeros((count,), wanted).copy_(state[name])
    save(state, tmp_path)
    load(targets, tmp_path)
    wrong = [name for name in targets if not same_values(targets[name], expected[name])]
    assert not wrong


UNKNOWN = [(a, b) for a in DTYPES for b in DTYPES if not knows(a, b)]


def test_there_are_conversions_that_torch_does_not_know() -> None:
    assert UNKNOWN


@pytest.mark.parametrize("loader", LOADERS)
def test_an_unknown_conversion_is_one_error_that_names_the_tensor(
    tmp_path: Path, loader: Any
) -> None:
    stored = list(dict.fromkeys(pair[0] for pair in UNKNOWN))
    save({f"of {dtype}": random_tensor((6,), dtype) for dtype in stored}, tmp_path)
    for source, target in UNKNOWN:
        state = {f"of {source}": zeros((6,), target)}
        cause = refusal(lambda state=state: loader(state, tmp_path))
        assert type(cause) is ValueError
        pair = f"from {source} to {target}".replace("torch.", "")
        assert str(cause) == f"of {source}: torch has no conversion {pair}"


@pytest.mark.parametrize("loader", LOADERS)
def test_one_warning_names_what_is_narrowed_and_nothing_else(tmp_path: Path, loader: Any) -> None:
    save({name: torch.ones(3) for name in ("narrow", "wide", "same", "whole")}, tmp_path)
    state = {
        "narrow": torch.zeros(3, dtype=torch.bfloat16),
        "wide": torch.zeros(3, dtype=torch.float64),
        "same": torch.zeros(3),
        "whole": torch.zeros(3, dtype=torch.int64),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader(state, tmp_path)
    said = [str(w.message) for w in caught if "hold less" in str(w.message)]
    assert len(said) == 1
    assert "narrow (torch.float32 to torch.bfloat16)" in said[0]
    assert "whole (torch.float32 to torch.int64)" in said[0]
    assert "wide" not in said[0]
    assert "same" not in said[0]


def test_the_warning_counts_what_it_has_no_room_for(tmp_path: Path) -> None:
    save({f"t{i}": torch.ones(3) for i in range(20)}, tmp_path)
    with pytest.warns(UserWarning, match=r"t0 \(torch.float32 to torch.float16\).* and 12 more"):
        load({f"t{i}": torch.zeros(3).half() for i in range(20)}, tmp_path)


@pytest.mark.parametrize("ours", [True, False])
def test_a_load_does_not_warn_of_one_that_failed_before(tmp_path: Path, ours: bool) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)

    def load_with_it(state: StateDict) -> None:
        if ours:
            load(state, tmp_path, storage_reader=reader)
        else:
            dcp.load(state, storage_reader=reader, no_dist=True)

    failing = mock.patch.object(reader, "_read_with_torch", side_effect=OSError)
    unknown = mock.patch.object(_C, "load_tensors", return_value=[0])
    with failing, unknown, pytest.raises(dcp.CheckpointException):
        load_with_it({"a": torch.zeros(3).half()})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="loading converts")
        load_with_it({"b": torch.zeros(3)})


@pytest.mark.parametrize("loader", LOADERS)
def test_widening_warns_of_nothing(tmp_path: Path, loader: Any) -> None:
    save({"t": torch.ones(3), "i": torch.ones(3, dtype=torch.int8)}, tmp_path)
    state = {"t": torch.zeros(3).double(), "i": torch.zeros(3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader(state, tmp_path)
    assert not [w for w in caught if "hold less" in str(w.message)]


def test_a_second_load_by_one_reader_warns_again_of_its_own(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)
    for name, other in ("ab", "ba"):
        with pytest.warns(UserWarning, match=f" {name} ") as caught:
            load({name: torch.zeros(3).half()}, tmp_path, storage_reader=reader)
        assert not any(f" {other} (" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("stored", "wanted", "loses"),
    [
        (torch.float32, torch.float32, False),
        (torch.float32, torch.float64, False),
        (torch.float64, torch.float32, True),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.bfloat16, torch.float16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.float16, False),
        (torch.float8_e5m2, torch.float8_e4m3fn, True),
        (torch.float8_e4m3fn, torch.float8_e5m2, True),
        (torch.float8_e5m2fnuz, torch.float8_e5m2, True),
        (torch.float8_e4m3fn, torch.int64, True),
        (torch.float8_e8m0fnu, torch.float32, False),
        (torch.float32, torch.int64, True),
        (torch.int64, torch.float64, True),
        (torch.int32, torch.float64, False),
        (torch.int32, torch.float32, True),
        (torch.int8, torch.bfloat16, False),
        (torch.uint8, torch.bfloat16, False),
        (torch.int16, torch.bfloat16, True),
        (torch.int16, torch.float16, True),
        (torch.int64, torch.int32, True),
        (torch.uint8, torch.int8, True),
        (torch.int8, torch.uint8, True),
        (torch.uint8, torch.int16, False),
        (torch.uint64, torch.int64, True),
        (torch.int64, torch.uint64, True),
        (torch.bool, torch.uint8, False),
        (torch.bool, torch.float16, False),
        (torch.bool, torch.float8_e8m0fnu, True),
        (torch.uint8, torch.bool, True),
        (torch.complex64, torch.float64, True),
        (torch.float32, torch.complex64, False),
        (torch.float64, torch.complex64, True),
        (torch.complex64, torch.complex128, False),
        (torch.complex128, torch.complex64, True),
        (torch.complex64, torch.complex32, True),
    ],
    ids=str,
)
def test_precision_is_lost_where_the_target_cannot_hold_all_values(
    stored: torch.dtype, wanted: torch.dtype, loses: bool
) -> None:
    assert loses_precision(stored, wanted) is loses


EIGHT_BITS = [dtype for dtype in DTYPES if dtype.itemsize == 1 and knows(dtype, torch.float32)]


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
def test_what_is_said_to_lose_nothing_comes_back(stored: torch.dtype) -> None:
    every = torch.arange(2 if stored == torch.bool else 256, dtype=torch.uint8).view(stored)
    every = every[every.float().isfinite()]
    kept = [
        wanted
        for wanted in DTYPES
        if knows(stored, wanted) and knows(wanted, stored) and not loses_precision(stored, wanted)
    ]
    back = {wanted: zeros(every.shape, wanted).copy_(every).to(stored) for wanted in kept}
    # Not bit by bit: some dtypes have no negative zero.
    lossy = [wanted for wanted in kept if not torch.equal(back[wanted].float(), every.float())]
    assert stored in kept
    assert not lossy


# --- memory --------------------------------------------------------------------------------------

PLAIN_BYTES = 100 * MIB

ROWS, COLUMNS = 25600, 1024


def memory_of_a_load(path: Path, limit: int) -> tuple[int, ReadMemory, bool]:
    """Bytes beyond its targets, what the estimate was, and whether all values are right."""
    warnings.simplefilter("ignore")
    state = {
        "plain": torch.ones(ROWS, COLUMNS),
        "transposed": torch.ones(COLUMNS, ROWS).t(),
        "with gaps": torch.ones(ROWS, COLUMNS + 8)[:, 3:-5],
        "converted": torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16),
    }
    torch_ckpt.load({"small": torch.ones(3)}, path, names=["small"])
    estimate = torch_ckpt.estimate_read_memory(state, path, max_inflight_bytes=limit)
    forget_peak_of_memory()
    before = memory_of_process("VmRSS")
    torch_ckpt.load(state, path, max_inflight_bytes=limit)
    growth = memory_of_process("VmHWM") - before
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


@pytest.mark.parametrize("limit", [MIB, 64 * MIB], ids=["1 MiB", "64 MiB"])
def test_a_load_holds_no_more_than_its_limit_beyond_the_targets(
    three_hundred_mib: Path, limit: int
) -> None:
    growth, estimate, right = in_fresh_process(memory_of_a_load, three_hundred_mib, limit)
    assert right
    # Threads' stacks, the plan and the allocator's arenas.
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
    assert str(cause).startswith(f"note: reading it takes {needed} bytes at once, ")
    assert f"max_inflight_bytes={2 * MIB}" in str(cause)


def test_the_estimate_is_of_the_states_bytes(tmp_path: Path) -> None:
    save({"a": torch.ones(1000, 30), "b": torch.ones(100), "c": "text"}, tmp_path)
    state = {"a": torch.zeros(1000, 30).half(), "b": torch.zeros(100), "c": ""}
    estimate = torch_ckpt.estimate_read_memory(state, tmp_path)
    note = torch_ckpt.estimate_read_memory(state, tmp_path, names=["c"])
    assert estimate.target_bytes == 1000 * 30 * 2 + 100 * 4
    assert estimate.stored_bytes == 1000 * 30 * 4 + 100 * 4 + note.stored_bytes
    assert note.target_bytes == 0


@pytest.mark.parametrize("count", [1, 10])
def test_objects_load_at_the_least_limit_and_not_below(tmp_path: Path, count: int) -> None:
    state = {f"note {i}": "x" * (2_000_000 + i) for i in range(count)}
    save(state, tmp_path)
    least = torch_ckpt.estimate_read_memory(emptied(state), tmp_path).least_inflight_bytes
    loaded = emptied(state)
    load(loaded, tmp_path, max_inflight_bytes=least)
    assert loaded == state
    cause = refusal(lambda: load(emptied(state), tmp_path, max_inflight_bytes=least - 1))
    assert "reading it takes" in str(cause)


@pytest.mark.filterwarnings("ignore:loading converts")
@pytest.mark.parametrize("target", [torch.zeros(700, 600).t(), torch.zeros(600, 700).half()])
def test_tensors_load_at_the_least_limit(tmp_path: Path, target: torch.Tensor) -> None:
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


def test_meta_tensors_are_looked_at_and_stay_meta_tensors(tmp_path: Path) -> None:
    save({"model": {"t": torch.ones(600, 700)}}, tmp_path)
    state = {"model": {"t": torch.empty(600, 700, device="meta")}}
    assert torch_ckpt.preflight(state, tmp_path).fits
    estimate = torch_ckpt.estimate_read_memory(state, tmp_path)
    assert estimate == torch_ckpt.estimate_read_memory(emptied_on_cpu(state), tmp_path)
    assert state["model"]["t"].is_meta


@pytest.mark.parametrize("free", [False, True])
def test_meta_tensors_get_memory_where_they_are_loaded(tmp_path: Path, free: bool) -> None:
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


def emptied_on_cpu(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: emptied_on_cpu(value) for key, value in state.items()}
    return torch.zeros(state.shape)


def test_an_estimate_of_what_does_not_fit_says_so(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path)
    with pytest.raises(LoadMismatch, match="1 of another shape"):
        torch_ckpt.estimate_read_memory({"t": torch.zeros(4)}, tmp_path)


# --- zero_fill -----------------------------------------------------------------------------------

GROWTHS: list[tuple[Shape, Shape]] = [
    ((), ()),
    ((3,), (5,)),
    ((3,), (3,)),
    ((0,), (4,)),
    ((3, 4), (5, 4)),
    ((3, 4), (3, 9)),
    ((3, 4), (6, 8)),
    ((2, 3, 4), (4, 5, 6)),
    ((300, 200), (500, 333)),
]


@pytest.mark.parametrize(
    ("growth", "loader", "saver"), pairwise(itertools.product(GROWTHS, LOADERS, SAVERS))
)
def test_a_larger_target_is_filled_up_with_zeros(
    tmp_path: Path, growth: tuple[Shape, Shape], loader: Any, saver: Any
) -> None:
    stored, wanted = growth
    tensor = random_tensor(stored, torch.int32)
    saver({"t": tensor}, tmp_path)
    target = torch.full(wanted, 7, dtype=torch.int32)
    loader({"t": target}, tmp_path, zero_fill=True)
    expected = torch.zeros(wanted, dtype=torch.int32)
    expected[tuple(slice(0, size) for size in stored)] = tensor
    assert_equal(target, expected)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "wanted", [torch.full((6, 4), 7.0).t(), torch.full((4, 12), 7.0)[:, ::2]], ids=["t", "strided"]
)
def test_a_larger_target_may_be_strided_and_of_another_dtype(
    tmp_path: Path, loader: Any, wanted: torch.Tensor
) -> None:
    save({"t": torch.ones(2, 3, dtype=torch.int16)}, tmp_path)
    target = wanted.clone(memory_format=torch.preserve_format)
    loader({"t": target}, tmp_path, zero_fill=True)
    expected = torch.zeros(4, 6)
    expected[:2, :3] = 1
    assert torch.equal(target, expected)


@pytest.mark.parametrize("loader", LOADERS)
def test_inference_tensors_are_filled_and_filled_up(tmp_path: Path, loader: Any) -> None:
    save({"t": torch.ones(3, 4), "q": quantized(4)}, tmp_path)
    with torch.inference_mode():
        state = {"t": torch.full((5, 4), 7.0), "q": quantized(4, end=2)}
    assert state["t"].is_inference()
    loader(state, tmp_path, zero_fill=True)
    assert (state["t"][:3] == 1).all()
    assert (state["t"][3:] == 0).all()
    assert torch.equal(state["q"].dequantize(), quantized(4).dequantize())


def quantized(rows: int, end: float = 3) -> torch.Tensor:
    """Only torch reads it."""
    values = torch.linspace(-3, end, rows * 6).reshape(rows, 6)
    return torch.quantize_per_tensor(values, 0.05, 3, torch.quint8)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_record_of_another_shape_is_damage(tmp_path: Path, loader: Any) -> None:
    """Of what only torch reads; the engine compares what it reads itself."""
    save({"t": quantized(4)}, tmp_path)

    def change(stored: Any) -> None:
        stored.size = torch.Size((8, 6))
        stored.chunks = [dcp.metadata.ChunkStorageMetadata(torch.Size((0, 0)), stored.size)]

    change_metadata(tmp_path, change)
    for cause in (
        refusal(lambda: loader({"t": quantized(8)}, tmp_path)),
        refusal(
            lambda: dcp_load({"t": quantized(2)}, tmp_path, planner=Boxes({"t": (5, 0)})),
        ),
    ):
        assert type(cause) is Corrupt
        assert str(cause).startswith("t: the record in ")
        assert "holds a Tensor of [4, 6], the metadata says a tensor of [8, 6]" in str(cause)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("wanted", [(2, 4), (9, 3), (3,), (3, 4, 1)], ids=str)
def test_a_smaller_target_and_one_of_other_dimensions_are_refused(
    tmp_path: Path, loader: Any, wanted: Shape
) -> None:
    save({"the tensor": torch.ones(3, 4)}, tmp_path)
    target = torch.full(wanted, 7.0)
    cause = refusal(lambda: loader({"the tensor": target}, tmp_path, zero_fill=True))
    assert "the tensor" in str(cause)
    assert (target == 7).all()


@pytest.mark.parametrize(
    ("wanted", "loader", "saver"),
    pairwise(
        itertools.product([(2, 4), (3, 1), (0, 4), (2, 6), (5, 2), (6, 6), (3, 4)], LOADERS, SAVERS)
    ),
)
def test_the_region_that_both_have_is_loaded_where_shapes_may_differ(
    tmp_path: Path, loader: Any, saver: Any, wanted: Shape
) -> None:
    tensor = random_tensor((3, 4), torch.int32)
    saver({"t": tensor}, tmp_path)
    target = torch.full(wanted, 7, dtype=torch.int32)
    loader({"t": target}, tmp_path, allow_shape_mismatch=True)
    expected = torch.zeros(wanted, dtype=torch.int32)
    expected[:3, :4] = tensor[: wanted[0], : wanted[1]]
    assert_equal(target, expected)


@pytest.mark.parametrize("loader", LOADERS)
def test_other_dimensions_are_refused_where_shapes_may_differ(tmp_path: Path, loader: Any) -> None:
    save({"the tensor": torch.ones(3, 4)}, tmp_path)
    target = torch.full((3,), 7.0)
    cause = refusal(lambda: loader({"the tensor": target}, tmp_path, allow_shape_mismatch=True))
    assert "the tensor" in str(cause)
    assert (target == 7).all()


def test_what_is_cut_off_is_reported(tmp_path: Path) -> None:
    save({"t": torch.ones(3, 3), "u": torch.ones(3, 3)}, tmp_path)
    state = {"t": torch.ones(2, 3), "u": torch.ones(2, 4)}
    report = torch_ckpt.preflight(state, tmp_path, allow_shape_mismatch=True)
    assert report.fits
    assert [name for name, _stored, _wanted in report.truncated] == ["t", "u"]
    assert [name for name, _stored, _wanted in report.grown] == ["u"]
    assert "2 smaller than stored:\n  t: stored [3, 3], wanted [2, 3]" in str(report)


def test_a_shard_that_is_lost_is_found_where_shapes_may_differ(tmp_path: Path) -> None:
    save({"t": torch.ones(4)}, tmp_path)

    def change(stored: Any) -> None:
        stored.size = torch.Size((8,))

    change_metadata(tmp_path, change)
    cause = refusal(lambda: load({"t": torch.zeros(6)}, tmp_path, allow_shape_mismatch=True))
    assert type(cause) is Corrupt


@pytest.mark.parametrize("loader", LOADERS)
def test_a_larger_target_is_refused_where_zeros_were_not_asked_for(
    tmp_path: Path, loader: Any
) -> None:
    save({"the tensor": torch.ones(3, 4)}, tmp_path)
    target = torch.full((5, 4), 7.0)
    assert "the tensor" in str(refusal(lambda: loader({"the tensor": target}, tmp_path)))
    assert (target == 7).all()


def test_what_is_filled_up_is_reported(tmp_path: Path) -> None:
    save({"t": torch.ones(3), "u": torch.ones(3)}, tmp_path)
    state = {"t": torch.ones(5), "u": torch.zeros(3)}
    report = torch_ckpt.preflight(state, tmp_path, zero_fill=True)
    assert report.fits
    assert report.grown == [("t", torch.Size([3]), torch.Size([5]))]
    assert "t: stored [3], wanted [5]" in str(report)
    assert (state["t"] == 1).all()


def test_only_chosen_names_are_filled_up(tmp_path: Path) -> None:
    save({"t": torch.ones(3), "u": torch.ones(3)}, tmp_path)
    state = {"t": torch.full((5,), 7.0), "u": torch.full((5,), 7.0)}
    load(state, tmp_path, zero_fill=True, names=["t"])
    assert state["t"].tolist() == [1, 1, 1, 0, 0]
    assert state["u"].tolist() == [7] * 5


@pytest.mark.parametrize("free", [False, True])
def test_nothing_is_zeroed_where_the_state_does_not_fit(tmp_path: Path, free: bool) -> None:
    save({"t": torch.ones(3), "u": torch.ones(3)}, tmp_path)
    state = {"t": torch.full((5,), 7.0), "u": torch.full((2,), 7.0)}
    mismatch(lambda: load(state, tmp_path, zero_fill=True, free_before_read=free))
    assert state["t"].tolist() == [7] * 5


def test_values_and_zeros_are_there_after_freeing_too(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path)
    state = {"t": torch.full((5,), 7.0)}
    load(state, tmp_path, zero_fill=True, free_before_read=True)
    assert state["t"].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saver", SAVERS)
def test_names_that_are_no_utf8_are_loaded(
    tmp_path: Path, saver: Callable[..., object], loader: Callable[..., object]
) -> None:
    saver({"a\udc80": torch.ones(3), "b\udc80": [1, "text"], "\u00e9": torch.ones(2)}, tmp_path)
    state: StateDict = {"a\udc80": torch.zeros(3), "b\udc80": [0, ""], "\u00e9": torch.zeros(2)}
    loader(state, tmp_path)
    assert state["a\udc80"].tolist() == [1, 1, 1]
    assert state["b\udc80"] == [1, "text"]
    assert state["\u00e9"].tolist() == [1, 1]


# --- metadata that does not cover a tensor -------------------------------------------------------


def change_metadata(path: Path, change: Callable[[Any], None]) -> None:
    metadata = read_metadata(path)
    change(metadata.state_dict_metadata["t"])
    (path / ".metadata").write_bytes(encode_metadata(metadata))


@pytest.fixture
def one_rank_mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()


UNCOVERED = [
    (None, None, "has shards with 0 of the 12 elements"),
    ((2, 4), (0, 0), "has shards with 8 of the 12 elements"),
    ((3, 4), (1, 0), "a shard of [3, 4] at [1, 0], which is outside of the tensor of [3, 4]"),
    ((4, 4), (0, 0), "a shard of [4, 4] at [0, 0], which is outside"),
    ((3, 4), (-1, 0), "a shard's offset of -1"),
    ((12,), (0,), "a shard of [12] at [0], which is outside"),
]


@pytest.mark.parametrize(
    ("uncovered", "sharded", "zero_fill"),
    pairwise(itertools.product(UNCOVERED, [False, True], [False, True])),
)
def test_metadata_that_does_not_cover_a_tensor_is_damage(
    tmp_path: Path,
    one_rank_mesh: DeviceMesh,
    uncovered: tuple[Shape | None, Shape, str],
    sharded: bool,
    zero_fill: bool,
) -> None:
    sizes, offsets, says = uncovered
    path = tmp_path / "checkpoint"
    save({"t": torch.ones(3, 4)}, path)

    def change(stored: Any) -> None:
        stored.chunks = []
        if sizes is not None:
            chunk = dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            stored.chunks = [chunk]

    change_metadata(path, change)
    target = torch.full((5, 4) if zero_fill else (3, 4), 7.0)
    state = {"t": distribute_tensor(target, one_rank_mesh, [Shard(0)]) if sharded else target}
    cause = refusal(lambda: load(state, path, zero_fill=zero_fill))
    assert type(cause) is Corrupt
    assert str(cause).startswith("t: the metadata has ")
    assert says in str(cause)
    assert (target == 7).all()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("loader", [load, dcp_load])
def test_a_shard_that_is_there_twice_does_not_stand_for_one_that_is_missing(
    tmp_path: Path, one_rank_mesh: DeviceMesh, sharded: bool, loader: Callable[..., object]
) -> None:
    path = tmp_path / "checkpoint"
    mine = distribute_tensor(torch.ones(4, 3), one_rank_mesh, [Shard(0)])
    save({"t": mine}, path)
    metadata = read_metadata(path)
    # As many elements as there are, and none of the last row.
    places = [((0, 0), (3, 2)), ((0, 1), (3, 2))]
    metadata.state_dict_metadata["t"].chunks = [
        dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        for offsets, sizes in places
    ]
    (path / ".metadata").write_bytes(encode_metadata(metadata))
    target = torch.full((4, 3), 7.0)
    state = {"t": distribute_tensor(target, one_rank_mesh, [Shard(0)]) if sharded else target}
    cause = refusal(lambda: loader(state, path))
    assert type(cause) is Corrupt
    assert str(cause).startswith(
        "t: the metadata has shards that overlap, and none with element [3, 0]"
    )
    assert (target == 7).all()


class TestGapIn:
    @staticmethod
    def boxes_of(whole: tuple[int, ...], generator: random.Random) -> list[Box]:
        """Cuts a box in two, over and over."""
        boxes = [((0,) * len(whole), whole)]
        for _ in range(generator.randrange(8)):
            offsets, sizes = boxes.pop(generator.randrange(len(boxes)))
            dim = generator.randrange(len(whole))
            at = generator.randint(0, sizes[dim])
            for begin, length in ((0, at), (at, sizes[dim] - at)):
                moved = (*offsets[:dim], offsets[dim] + begin, *offsets[dim + 1 :])
                boxes.append((moved, (*sizes[:dim], length, *sizes[dim + 1 :])))
        generator.shuffle(boxes)
        return boxes

    @pytest.mark.parametrize("seed", range(40))
    def test_it_is_what_marking_each_element_finds(self, seed: int) -> None:
        generator = random.Random(seed)
        whole = tuple(generator.randint(1, 5) for _ in range(generator.randint(1, 3)))
        boxes = self.boxes_of(whole, generator)
        assert gap_in(whole, boxes) is None
        # One in the place of another, so that there are overlaps and often a gap.
        boxes[generator.randrange(len(boxes))] = boxes[generator.randrange(len(boxes))]
        seen = torch.zeros(whole, dtype=torch.bool)
        for offsets, sizes in boxes:
            seen[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] = True
        missing = (~seen).nonzero().tolist()
        assert gap_in(whole, boxes) == (missing[0] if missing else None)

    def test_boxes_that_are_the_whole_twice_have_no_gap(self) -> None:
        assert gap_in((2, 3), [((0, 0), (2, 3))] * 2) is None
        assert gap_in((), [((), ())] * 2) is None

    def test_more_cut_dimensions_than_corners_are_counted_for_are_looked_at(self) -> None:
        whole = (2,) * 8
        boxes = [(place, (1,) * 8) for place in itertools.product((0, 1), repeat=8)]
        assert gap_in(whole, boxes) is None
        assert gap_in(whole, boxes[:-1]) == [1] * 8


class TestGrowingSize:
    def test_it_equals_what_has_room_for_it(self) -> None:
        size = GrowingSize((3, 4))
        assert size == (3, 4)
        assert size == torch.Size([5, 4])
        assert not size != torch.Size([5, 4])  # noqa: SIM202

    @pytest.mark.parametrize("other", [(2, 9), (9, 3), (3,), (3, 4, 5), (), [3, 4], None, 3])
    def test_it_differs_from_all_else(self, other: object) -> None:
        assert GrowingSize((3, 4)) != other
        assert not GrowingSize((3, 4)) == other  # noqa: SIM201

    def test_that_of_a_scalar_equals_only_itself(self) -> None:
        assert GrowingSize(()) == ()
        assert GrowingSize(()) != (1,)

    def test_it_is_hashed_and_pickled_as_what_it_is(self) -> None:
        size = GrowingSize((3, 4))
        assert hash(size) == hash((3, 4))
        back = pickle.loads(pickle.dumps(size))
        assert type(back) is GrowingSize
        assert tuple(back) == (3, 4)
        assert size.numel() == 12


# --- what fits and what does not -----------------------------------------------------------------

STORED: StateDict = {
    "model": {"weight": torch.ones(3, 2), "bias": torch.ones(2), "list": [torch.ones(1), 5]},
    "step": 3,
    "extra": torch.ones(1),
}


def misfit() -> StateDict:
    """Differs from STORED in every way."""
    return {
        "model": {
            "weight": torch.full((3, 3), 7.0),
            "bias": "no tensor",
            "list": [torch.full((1,), 7.0, dtype=torch.float16), 7],
        },
        "absent": torch.full((2,), 7.0),
        "step": 7,
    }


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    save(STORED, path)
    return path


def assert_untouched(state: StateDict) -> None:
    assert_equal(state, misfit())


def assert_says_all_that_differs(report: torch_ckpt.LoadReport) -> None:
    assert not report.fits
    assert report.missing == ["absent"]
    assert report.unexpected == ["extra"]
    assert report.shapes == [("model.weight", torch.Size([3, 2]), torch.Size([3, 3]))]
    assert report.kinds == [("model.bias", "a tensor", "a str")]
    assert report.dtypes == [("model.list.0", torch.float32, torch.float16)]
    assert report.narrowed == ["model.list.0"]
    assert sorted(report.loaded) == ["model.list.0", "model.list.1", "step"]


@pytest.mark.parametrize("free", [False, True])
def test_all_that_differs_is_in_one_message_and_nothing_is_changed(
    stored: Path, free: bool
) -> None:
    state = misfit()
    cause = mismatch(lambda: load(state, stored, free_before_read=free))
    assert_says_all_that_differs(cause.report)
    for said in (
        "1 missing in the checkpoint:\n  absent",
        "1 of another shape:\n  model.weight: stored [3, 2], wanted [3, 3]",
        "1 of another kind:\n  model.bias: stored a tensor, wanted a str",
        "1 only in the checkpoint:\n  extra",
        "1 of another dtype:\n  model.list.0: stored torch.float32, wanted torch.float16",
    ):
        assert said in str(cause)
    assert_untouched(state)


@pytest.mark.parametrize("free", [False, True])
def test_a_stored_object_does_not_take_the_place_of_a_tensor(stored: Path, free: bool) -> None:
    state = {"step": torch.full((2,), 7.0)}
    cause = mismatch(lambda: load(state, stored, free_before_read=free))
    assert cause.report.kinds == [("step", "an object", "a Tensor")]
    assert cause.report.loaded == []
    assert state["step"].tolist() == [7, 7]
    counter = {"step": torch.tensor(7)}
    load(counter, stored, free_before_read=free)
    assert counter["step"] == STORED["step"]


def test_preflight_says_the_same_and_changes_nothing(stored: Path) -> None:
    state = misfit()
    assert_says_all_that_differs(torch_ckpt.preflight(state, stored))
    assert_untouched(state)


def test_a_mismatch_is_pickled_with_its_report(stored: Path) -> None:
    cause = mismatch(lambda: load(misfit(), stored))
    back = pickle.loads(pickle.dumps(cause))
    assert type(back) is LoadMismatch
    assert back.report == cause.report
    assert str(back) == str(cause)


@pytest.mark.filterwarnings("ignore:loading converts")
@pytest.mark.parametrize("free", [False, True])
def test_what_fits_is_loaded_and_the_rest_is_left_where_that_is_asked_for(
    stored: Path, free: bool
) -> None:
    state, expected = misfit(), misfit()
    report = load(state, stored, strict=False, free_before_read=free)
    assert_says_all_that_differs(report)
    expected["model"]["list"] = [torch.ones(1, dtype=torch.float16), 5]
    expected["step"] = 3
    assert_equal(state, expected)


def test_a_load_of_all_reports_all_as_loaded(stored: Path) -> None:
    state = emptied(STORED)
    report = load(state, stored)
    assert report.fits
    assert sorted(report.loaded) == sorted(torch_ckpt.preflight(state, stored).loaded)
    assert report.unexpected == []
    assert_equal(state, STORED)


@pytest.mark.parametrize("free", [False, True])
def test_a_state_of_nothing_finds_all_of_a_checkpoint_unexpected(stored: Path, free: bool) -> None:
    report = load({}, stored, free_before_read=free)
    assert report.fits
    assert report.loaded == []
    assert sorted(report.unexpected) == sorted(torch_ckpt.preflight({}, stored).unexpected)
    assert len(report.unexpected) == 6


@pytest.mark.parametrize("free", [False, True])
def test_a_state_of_nothing_needs_a_checkpoint(tmp_path: Path, free: bool) -> None:
    cause = refusal(lambda: load({}, tmp_path, free_before_read=free))
    assert isinstance(cause, FileNotFoundError)


def test_a_message_about_many_names_counts_the_rest(stored: Path) -> None:
    cause = mismatch(lambda: load({f"absent {i:02}": 0 for i in range(30)}, stored))
    assert "30 missing in the checkpoint:" in str(cause)
    assert "absent 07" in str(cause)
    assert "absent 08" not in str(cause)
    assert "and 22 more" in str(cause)
    assert len(cause.report.missing) == 30


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(
    ("names", "loaded"),
    [
        (["model.*"], {"model.weight", "model.bias", "model.list.0", "model.list.1"}),
        (["step"], {"step"}),
        (["*.weight", "s*"], {"model.weight", "step"}),
        (iter(["extra"]), {"extra"}),
        (lambda name: name.endswith("bias"), {"model.bias"}),
        (lambda name: False, set()),
    ],
    ids=str,
)
def test_only_chosen_names_are_loaded(
    stored: Path, names: Any, loaded: set[str], free: bool
) -> None:
    if hasattr(names, "__next__"):
        names = list(names) if free else iter(["extra"])
    state = emptied(STORED)
    report = load(state, stored, names=names, free_before_read=free)
    assert set(report.loaded) == loaded
    assert torch.equal(state["model"]["weight"], torch.ones(3, 2)) == ("model.weight" in loaded)
    assert torch.equal(state["model"]["bias"], torch.ones(2)) == ("model.bias" in loaded)
    assert (state["step"] == 3) == ("step" in loaded)
    assert torch.equal(state["extra"], torch.ones(1)) == ("extra" in loaded)


def test_names_that_are_not_chosen_need_not_fit(stored: Path) -> None:
    state = misfit()
    load(state, stored, names=["step"])
    assert state["step"] == 3


@pytest.mark.parametrize("free", [False, True])
def test_patterns_that_match_nothing_are_named(stored: Path, free: bool) -> None:
    state = emptied(STORED)
    names = ["step", "modle.*", "b*"]
    cause = refusal(lambda: load(state, stored, names=names, free_before_read=free))
    assert type(cause) is ValueError
    assert str(cause) == "no name in the state dict matches 'modle.*', 'b*'"
    assert state["step"] is None


@pytest.mark.parametrize("ask", [load, torch_ckpt.preflight, torch_ckpt.estimate_read_memory])
def test_a_plain_string_of_names_is_refused(stored: Path, ask: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a list of patterns, got the string 'model\.\*'"):
        ask(emptied(STORED), stored, names="model.*")


@pytest.mark.parametrize(
    "options", [{"strict": False}, {"names": ["a"]}, {"free_before_read": True}], ids=str
)
def test_a_planner_does_not_go_with_the_options_of_our_own(stored: Path, options: Any) -> None:
    with pytest.raises(ValueError, match="do not go with a planner"):
        load({}, stored, planner=dcp.DefaultLoadPlanner(), **options)


def test_a_load_by_a_planner_has_no_report(stored: Path) -> None:
    state = emptied(STORED)
    assert load(state, stored, planner=dcp.DefaultLoadPlanner()) is None
    assert_equal(state, STORED)


class Holder:
    """A Stateful that counts how often it was told."""

    def __init__(self, value: float) -> None:
        self.weight = torch.full((4,), value)
        self.nested = {"count": int(value)}
        self.told = 0

    def state_dict(self) -> StateDict:
        return {"weight": self.weight, "nested": self.nested}

    def load_state_dict(self, state: StateDict) -> None:
        self.weight, self.nested = state["weight"], state["nested"]
        self.told += 1


@pytest.mark.parametrize("free", [False, True])
def test_stateful_values_are_told_once(tmp_path: Path, free: bool) -> None:
    save({"a": Holder(1), "b": Holder(2)}, tmp_path)
    a, b = Holder(7), Holder(7)
    state = {"a": a, "b": b}
    load(state, tmp_path, free_before_read=free)
    assert (state["a"], state["b"]) == (a, b)
    assert (a.told, b.told) == (1, 1)
    assert b.weight.tolist() == [2] * 4
    assert b.nested == {"count": 2}


@pytest.mark.parametrize("free", [False, True])
def test_stateful_values_of_which_no_name_is_chosen_are_not_told(
    tmp_path: Path, free: bool
) -> None:
    save({"a": Holder(1), "b": Holder(2)}, tmp_path)
    a, b = Holder(7), Holder(7)
    load({"a": a, "b": b}, tmp_path, names=["b.nested.*"], free_before_read=free)
    assert (a.told, b.told) == (0, 1)
    assert b.weight.tolist() == [7] * 4
    assert b.nested == {"count": 2}


def test_stateful_values_are_not_told_of_what_does_not_fit(tmp_path: Path) -> None:
    save({"a": Holder(1)}, tmp_path)
    a = Holder(7)
    mismatch(lambda: load({"a": a, "b": torch.zeros(1)}, tmp_path))
    assert a.told == 0
    assert a.weight.tolist() == [7] * 4


@pytest.fixture
def of_torch_2_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, StateDict]:
    """A checkpoint of which a dict without tensors is one item, as torch 2.3 saved it."""
    state = {
        "options": {"lr": 0.1, "betas": (0.9, 0.95)},
        "model": {"weight": torch.ones(3, 2), "note": "text"},
    }
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    stock_save(state, tmp_path)
    monkeypatch.setattr(_version, "_derived_version", None)
    return tmp_path, state


@pytest.mark.parametrize("free", [False, True])
def test_checkpoints_with_the_names_of_torch_2_3_are_loaded(
    of_torch_2_3: tuple[Path, StateDict], free: bool
) -> None:
    path, state = of_torch_2_3
    report = torch_ckpt.preflight(emptied(state), path)
    assert sorted(report.loaded) == ["model.note", "model.weight", "options"]
    loaded = emptied(state)
    assert load(loaded, path, free_before_read=free).fits
    assert_equal(loaded, state)


@pytest.mark.parametrize("ask", [torch_ckpt.preflight, torch_ckpt.estimate_read_memory])
def test_asking_about_no_checkpoint_is_an_error_of_its_own(tmp_path: Path, ask: Any) -> None:
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        ask({}, tmp_path)


# --- free_before_read ----------------------------------------------------------------------------


def test_values_are_right_after_freeing(tmp_path: Path) -> None:
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


class Freed:
    """Notes the storages whose memory is given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: set[int] = set()
        resize = torch.UntypedStorage.resize_

        def noting(storage: torch.UntypedStorage, size: int) -> Any:
            if size == 0:
                self.addresses.add(storage._cdata)
            return resize(storage, size)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", noting)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.addresses


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> Freed:
    return Freed(monkeypatch)


def check_freeing(path: Path, freed: Freed, targets: StateDict, whether: bool) -> None:
    values = {name: random_tensor(t.shape, t.dtype) for name, t in targets.items()}
    save(values, path)
    load(targets, path, free_before_read=True)
    assert_equal({n: t.detach() for n, t in targets.items()}, values)
    assert {name: targets[name] in freed for name in targets} == dict.fromkeys(targets, whether)


def test_memory_that_is_read_wholly_is_given_back_first(tmp_path: Path, freed: Freed) -> None:
    targets = {"t": torch.ones(30, 4), "p": torch.nn.Parameter(torch.ones(9))}
    check_freeing(tmp_path, freed, targets, True)


def test_a_transposed_target_is_given_back(tmp_path: Path, freed: Freed) -> None:
    check_freeing(tmp_path, freed, {"t": torch.ones(30, 4).t()}, True)


def test_views_that_cover_their_storage_are_given_back(tmp_path: Path, freed: Freed) -> None:
    whole = torch.ones(10, 4)
    values = {"m": {"a": random_tensor((5, 4), torch.float32), "b": torch.full((5, 4), 2.0)}}
    save(values, tmp_path)
    load({"m": {"a": whole[:5], "b": whole[5:]}}, tmp_path, free_before_read=True)
    assert_equal(whole, torch.cat([values["m"]["a"], values["m"]["b"]]))
    assert whole in freed


def test_a_view_of_a_larger_storage_is_not_given_back(tmp_path: Path, freed: Freed) -> None:
    whole = torch.full((10, 4), 7.0)
    check_freeing(tmp_path, freed, {"t": whole[2:5]}, False)
    assert (whole[5:] == 7).all()


def test_memory_shared_with_numpy_is_not_given_back(tmp_path: Path, freed: Freed) -> None:
    array = numpy.ones((30, 4), dtype=numpy.float32)
    target = torch.from_numpy(array)
    check_freeing(tmp_path, freed, {"t": target}, False)
    assert array.tobytes() == bytes_of(target)


def test_tied_tensors_stay_tied(tmp_path: Path, freed: Freed) -> None:
    tensor = random_tensor((30, 4), torch.float32)
    save({"model": {"a": tensor, "b": tensor}}, tmp_path)
    tied = torch.ones(30, 4)
    state = {"model": {"a": tied, "b": tied}}
    load(state, tmp_path, free_before_read=True)
    assert state["model"]["a"] is state["model"]["b"] is tied
    assert_equal(tied, tensor)
    assert tied in freed


class Counted:
    """Counts the instances there are."""

    alive = 0
    most = 0

    def __init__(self) -> None:
        self.content = 1
        self._count()

    def __setstate__(self, state: StateDict) -> None:
        self.__dict__.update(state)
        self._count()

    def _count(self) -> None:
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

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


def test_objects_are_let_go_of_before_their_replacements_are_made(tmp_path: Path) -> None:
    save(counted_state(), tmp_path)
    gc.collect()
    assert Counted.alive == 0
    state = counted_state()
    held, Counted.most = Counted.alive, 0
    # Who holds on to its value itself, as a Stateful may, is not made to let go.
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
    """How many of some tensors there were at most at a time."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        self.alive = [one for one in self.alive if one() is not None] + [weakref.ref(tensor)]
        self.most = max(self.most, len(self.alive))
        return tensor


class Copying:
    """A Stateful whose state dict is a copy, as of parameters that lie elsewhere."""

    def __init__(self, value: float, watch: Watch) -> None:
        self.weight = torch.full((100,), value)
        self.watch = watch

    def state_dict(self) -> StateDict:
        return {"weight": self.watch.see(self.weight.clone())}

    def load_state_dict(self, state: StateDict) -> None:
        self.weight.copy_(state["weight"])


def test_copies_of_one_key_are_there_at_a_time(tmp_path: Path) -> None:
    save({f"k{i}": Copying(i, Watch()) for i in range(5)}, tmp_path)
    watch = Watch()
    state = {f"k{i}": Copying(7, watch) for i in range(5)}
    gc.disable()  # It must not take the collector to be rid of them.
    try:
        load(state, tmp_path, free_before_read=True)
    finally:
        gc.enable()
    assert [one.weight[0].item() for one in state.values()] == [0, 1, 2, 3, 4]
    assert watch.most == 1


# --- planners of the caller's own ----------------------------------------------------------------


class Noting(dcp.DefaultLoadPlanner):
    """Notes its hooks' calls, and receives tensors elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.planned: list[str] = []
        self.threads: set[int] = set()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.planned = [item.dest_index.fqn for item in new_plan.items]
        return super().finish_plan(new_plan)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self._note("resolve", read_item)
        return torch.empty(read_item.lengths, dtype=torch.float16)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._note("commit", read_item)
        super().resolve_tensor(read_item).copy_(tensor)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self._note("bytes", read_item)
        super().load_bytes(read_item, value)

    def _note(self, hook: str, item: ReadItem) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((hook, item.dest_index.fqn))


@pytest.mark.filterwarnings("ignore:loading converts")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("limit", [MIB + 5000, 1 << 30], ids=["little memory", "much memory"])
def test_hooks_are_called_in_pairs_in_order_and_here(
    tmp_path: Path, loader: Any, limit: int
) -> None:
    state: StateDict = {f"t{i}": torch.full((i * 100, 7), float(i)) for i in range(5)}
    state |= {"large": torch.full((300, 700), 9.0), "step": 3}
    save(state, tmp_path)
    planner = Noting()
    grown = {name: torch.full((600, 701), 7.0) for name in state if name != "step"}
    loaded: StateDict = grown | {"step": 0}
    loader(loaded, tmp_path, planner=planner, zero_fill=True, max_inflight_bytes=limit)
    assert planner.threads == {threading.get_ident()}
    pairs = {name: [("resolve", name), ("commit", name)] for name in state}
    pairs["step"] = [("bytes", "step")]
    assert planner.calls == [call for name in planner.planned for call in pairs[name]]
    assert set(planner.planned) == {name for name in state if name != "t0"}
    assert loaded["step"] == 3
    for name, tensor in grown.items():
        expected = torch.zeros(600, 701)
        expected[: state[name].size(0), : state[name].size(1)] = state[name]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("loader", LOADERS)
def test_a_planners_conversion_warns_once(tmp_path: Path, loader: Any) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    with pytest.warns(UserWarning, match="loading converts") as caught:
        loader({"a": torch.zeros(3), "b": torch.zeros(3)}, tmp_path, planner=Noting())
    (said,) = [str(w.message) for w in caught if "loading converts" in str(w.message)]
    assert "a (torch.float32 to torch.float16)" in said
    assert "b (torch.float32 to torch.float16)" in said


class WithoutStateDict(dcp.LoadPlanner):
    """As much of a planner as torch asks for."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, *args: Any) -> None:
        self.inner = dcp.DefaultLoadPlanner()
        self.inner.set_up_planner(state_dict, metadata, True)

    def create_local_plan(self) -> LoadPlan:
        return self.inner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.inner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.inner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize("loader", LOADERS)
def test_a_planner_without_a_state_dict_loads_but_cannot_have_zeros(
    tmp_path: Path, loader: Any
) -> None:
    save({"t": torch.ones(3)}, tmp_path)
    state = {"t": torch.zeros(3)}
    loader(state, tmp_path, planner=WithoutStateDict())
    assert (state["t"] == 1).all()
    cause = refusal(lambda: loader(state, tmp_path, planner=WithoutStateDict(), zero_fill=True))
    assert type(cause) is CheckpointError
    assert str(cause) == "zero_fill needs a planner with a state_dict, as torch's planners have"


class Failing(dcp.DefaultLoadPlanner):
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        raise Corrupt(f"planner's own: {read_item.dest_index.fqn}")


def test_what_a_hook_raises_fails_the_load(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path)
    cause = refusal(lambda: load({"t": torch.zeros(3)}, tmp_path, planner=Failing()))
    assert str(cause) == "planner's own: t"


@pytest.mark.parametrize("way", ["negated", "conjugated"])
def test_what_is_read_by_way_of_a_copy_gives_its_memory_back(tmp_path: Path, way: str) -> None:
    # The memory of many small copies would stay with malloc, beyond every limit.
    assert in_fresh_process(memory_that_loads_keep, tmp_path, way) < 8 * MIB


def memory_that_loads_keep(path: Path, way: str) -> int:
    warnings.simplefilter("ignore")
    real = torch.ones(3000, 4000)
    target = torch.complex(real, real).conj() if way == "conjugated" else real._neg_view()
    torch_ckpt.save({"t": target.clone()}, path)
    torch_ckpt.load({"t": target}, path, max_inflight_bytes=2 * MIB)
    before = memory_of_process("VmRSS")
    for _ in range(3):
        torch_ckpt.load({"t": target}, path, max_inflight_bytes=2 * MIB)
    return memory_of_process("VmRSS") - before
