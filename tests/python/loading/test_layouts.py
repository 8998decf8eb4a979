"""Loads into layouts and dtypes other than the stored ones."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.loads import LOADERS, SAVERS, Boxes, dcp_load, load, refusal, save
from tests.support import DTYPES, StateDict, bytes_of, random_tensor, zeros
from torch_ckpt import _C
from torch_ckpt.checkpoint.dtypes import loses_precision
from torch_ckpt.checkpoint.source import Source


def permuted(choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Copies the values into memory with another order of dimensions."""
    order = choice.sample(range(tensor.dim()), tensor.dim())
    back = sorted(range(tensor.dim()), key=lambda dim: order[dim])
    return tensor.permute(order).contiguous().permute(back)


def negated(_choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return (-tensor)._neg_view()


def conjugated(_choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj().resolve_conj().conj()


def gapped(choice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Copies the values into memory with gaps between them."""
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
def test_random_boxes_and_full_tensors_are_read_from_any_layout_into_any_other(
    tmp_path: Path, seed: int, large: bool
) -> None:
    choice = random.Random(seed)
    torch.manual_seed(seed)
    values, state, boxes, offsets, full, expected = {}, {}, {}, {}, {}, {}
    for number in range(3 if large else 12):
        dims = choice.randint(1 if large else 0, 4)
        longest = [0, 400_000, 600, 75, 26][dims] if large else 9
        shape = [choice.randint(max(1, longest // 2), longest) for _ in range(dims)]
        dtype, wider = choice.choice(
            [(torch.float32, torch.float64), (torch.complex64, torch.complex128)]
        )
        stored, wanted = choice.choice(LAYOUTS), choice.choice(LAYOUTS)
        lengths = [choice.randint(1, size) for size in shape]
        begin = [choice.randint(0, s - n) for s, n in zip(shape, lengths, strict=True)]
        name = f"{number}: {dtype} {stored.__name__} to {wanted.__name__}, {lengths} of {shape}"
        values[name] = torch.randn(shape, dtype=dtype)
        state[name] = stored(choice, values[name])
        boxes[name] = wanted(choice, torch.zeros(lengths, dtype=dtype))
        offsets[name] = tuple(begin)
        box = tuple(slice(b, b + n) for b, n in zip(begin, lengths, strict=True))
        expected[name] = values[name][box]
        full[name] = wanted(choice, torch.zeros(shape, dtype=choice.choice([dtype, wider])))
    choice.choice(SAVERS)(state, tmp_path)
    dcp_load(boxes, tmp_path, planner=Boxes(offsets))
    load(full, tmp_path)
    wrong = [name for name in boxes if not torch.equal(boxes[name], expected[name])]
    wrong += [name for name in full if not torch.equal(full[name], values[name].to(full[name]))]
    assert not wrong, f"seed {seed}"


def knows(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Returns True if torch's copy_ supports the conversion."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            zeros((1,), wanted).copy_(zeros((1,), stored))
        except (RuntimeError, TypeError):
            return False
    return True


def source_for(stored: torch.dtype, wanted: torch.dtype, count: int) -> torch.Tensor:
    """Makes random bytes, but no numbers for which torch's own integer conversions disagree."""
    tensor = random_tensor((count,), stored, seed=1)
    has_integers = not (wanted.is_floating_point or wanted.is_complex)
    if not has_integers or not (stored.is_floating_point or stored.is_complex):
        return tensor
    numbers = torch.rand(count, generator=torch.Generator().manual_seed(2)) * 100
    return numbers.to(stored) if knows(torch.float32, stored) else tensor


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bit for bit, except that all NaNs are equal."""
    if bytes_of(one) == bytes_of(other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    nan = one.isnan()
    if not torch.equal(nan, other.isnan()):
        return False
    if one.is_complex():
        # Which of the two parts is NaN may differ if torch has no arithmetic for the dtype.
        return torch.equal(one[~nan], other[~nan])
    return bytes_of(items_of(one)[~nan]) == bytes_of(items_of(other)[~nan])


def items_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of each element."""
    return tensor.reshape(-1, 1).contiguous().view(torch.uint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_every_conversion_equals_that_of_copy(tmp_path: Path, stored: torch.dtype) -> None:
    state, targets, expected = {}, {}, {}
    choice = random.Random(stored.itemsize)
    for wanted in DTYPES:
        if not knows(stored, wanted):
            continue
        # Below and above the size from which a record is read separately.
        counts = (211, 300_000 // stored.itemsize)
        for count, step in zip(counts, choice.sample((1, 2), 2), strict=True):
            name = f"{wanted} {count} {'strided' if step == 2 else 'dense'}"
            state[name] = source_for(stored, wanted, count)
            targets[name] = zeros((count * step,), wanted)[::step]
            expected[name] = zeros((count,), wanted).copy_(state[name])
    save(state, tmp_path)
    load(targets, tmp_path)
    wrong = [name for name in targets if not same_values(targets[name], expected[name])]
    assert not wrong


UNKNOWN = [(a, b) for a in DTYPES for b in DTYPES if not knows(a, b)]


@pytest.mark.parametrize("loader", LOADERS)
def test_an_unsupported_conversion_is_one_error_that_names_the_tensor(
    tmp_path: Path, loader: Any
) -> None:
    assert UNKNOWN
    save({f"of {dtype}": random_tensor((6,), dtype) for dtype, _ in UNKNOWN}, tmp_path)
    for source, target in UNKNOWN:
        state = {f"of {source}": zeros((6,), target)}
        cause = refusal(lambda state=state: loader(state, tmp_path))
        assert type(cause) is ValueError
        pair = f"{source} to {target}".replace("torch.", "")
        assert str(cause) == f"of {source}: torch cannot convert {pair}"


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("narrowed", [{"narrow": torch.bfloat16, "whole": torch.int64}, {}])
def test_one_warning_names_only_the_narrowed_tensors(
    tmp_path: Path, loader: Any, narrowed: dict[str, torch.dtype]
) -> None:
    save({name: torch.ones(3) for name in ("narrow", "wide", "same", "whole")}, tmp_path)
    wanted = narrowed | {"wide": torch.float64, "same": torch.float32}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader({name: zeros((3,), dtype) for name, dtype in wanted.items()}, tmp_path)
    messages = [str(w.message) for w in caught if "less precision or range" in str(w.message)]
    assert len(messages) == bool(narrowed)
    for message in messages:
        assert "narrow (torch.float32 to torch.bfloat16)" in message
        assert "whole (torch.float32 to torch.int64)" in message
        assert "wide" not in message
        assert "same" not in message


def test_the_warning_counts_the_names_beyond_its_limit(tmp_path: Path) -> None:
    save({f"t{i}": torch.ones(3) for i in range(20)}, tmp_path)
    with pytest.warns(UserWarning, match=r"t0 \(torch.float32 to torch.float16\).* and 12 more"):
        load({f"t{i}": torch.zeros(3).half() for i in range(20)}, tmp_path)


def test_a_load_does_not_warn_of_an_earlier_failed_one(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)

    def load_with_it(state: StateDict) -> None:
        dcp.load(state, storage_reader=reader, no_dist=True)

    failing = mock.patch.object(Source, "read_bytes", side_effect=OSError)
    unknown = mock.patch.object(_C.TensorReads, "load", return_value=[0])
    with failing, unknown, pytest.raises(dcp.CheckpointException):
        load_with_it({"a": torch.zeros(3).half()})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_with_it({"b": torch.zeros(3)})
    assert not [one for one in caught if "loading converts" in str(one.message)]


def test_a_second_load_by_one_reader_warns_of_its_own_conversions(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)
    for name, other in ("ab", "ba"):
        with pytest.warns(UserWarning, match=f" {name} ") as caught:
            dcp.load({name: torch.zeros(3).half()}, storage_reader=reader, no_dist=True)
        assert not any(f" {other} (" in str(w.message) for w in caught)


LOSSLESS = """
float32>float32 float32>float64 bfloat16>float32 float8_e4m3fn>float16 float8_e8m0fnu>float32
int32>float64 int8>bfloat16 uint8>bfloat16 uint8>int16 bool>uint8 bool>float16 float32>complex64
complex64>complex128
"""

LOSSY = """
float64>float32 float32>bfloat16 bfloat16>float16 float16>bfloat16 float8_e5m2>float8_e4m3fn
float8_e4m3fn>float8_e5m2 float8_e5m2fnuz>float8_e5m2 float8_e4m3fn>int64 float32>int64
int64>float64 int32>float32 int16>bfloat16 int16>float16 int64>int32 uint8>int8 int8>uint8
uint64>int64 int64>uint64 bool>float8_e8m0fnu uint8>bool complex64>float64 float64>complex64
complex128>complex64 complex64>complex32
"""


@pytest.mark.parametrize(
    ("conversion", "loses"),
    [(pair, loses) for loses, pairs in enumerate((LOSSLESS, LOSSY)) for pair in pairs.split()],
)
def test_precision_is_lost_if_the_target_cannot_represent_all_values(
    conversion: str, loses: int
) -> None:
    stored, wanted = (getattr(torch, name) for name in conversion.split(">"))
    assert loses_precision(stored, wanted) is bool(loses)


EIGHT_BITS = [dtype for dtype in DTYPES if dtype.itemsize == 1 and knows(dtype, torch.float32)]


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=str)
def test_lossless_conversions_return_the_same_values(stored: torch.dtype) -> None:
    every = torch.arange(2 if stored == torch.bool else 256, dtype=torch.uint8).view(stored)
    every = every[every.float().isfinite()]
    kept = [
        wanted
        for wanted in DTYPES
        if knows(stored, wanted) and knows(wanted, stored) and not loses_precision(stored, wanted)
    ]
    back = {wanted: zeros(every.shape, wanted).copy_(every).to(stored) for wanted in kept}
    # Compared as numbers: some dtypes have no negative zero.
    lossy = [wanted for wanted in kept if not torch.equal(back[wanted].float(), every.float())]
    assert stored in kept
    assert not lossy
