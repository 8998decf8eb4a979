"""Records of our writer equal those of torch byte for byte."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_ckpt
from benchmarks.limits import direct_io_works
from tests.support import (
    DTYPES,
    bytes_of,
    data_files,
    load,
    random_tensor,
    record_of,
    save,
    stock_save,
)

COMPLEX = [torch.complex64, torch.complex128]


def stored(tensor: torch.Tensor, directory: Path) -> bytes:
    """Returns the bytes that our writer stores for one tensor."""
    save({"tensor": tensor}, directory, thread_count=1, sync_files=False)
    (file,) = data_files(directory)
    return file.read_bytes()


def f32(*shape: int) -> torch.Tensor:
    return random_tensor(shape, torch.float32)


def c64(*shape: int) -> torch.Tensor:
    return random_tensor(shape, torch.complex64)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "0-d": lambda: f32(),
    "one element": lambda: f32(1),
    "empty": lambda: f32(0),
    "empty in the middle": lambda: f32(2, 0, 3),
    "empty and transposed": lambda: f32(3, 0).t(),
    "empty view of a full storage": lambda: f32(4)[2:2],
    "empty expanded": lambda: f32(0).expand(3, 0),
    "five dimensions": lambda: f32(2, 1, 3, 1, 2),
    "transposed": lambda: f32(3, 5).t(),
    "transposed, with ones": lambda: f32(3, 1, 5).transpose(0, 2),
    "permuted": lambda: f32(2, 3, 4).permute(2, 0, 1),
    "channels_last": lambda: f32(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: f32(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
    "first rows": lambda: f32(6, 4)[:2],
    "one column": lambda: f32(6, 4)[:, 2],
    "one element of many": lambda: f32(6, 4)[3, 2],
    "every second row": lambda: f32(6, 4)[::2],
    "transposed part": lambda: f32(6, 4)[1:4, 1:3].t(),
    "channels_last part": lambda: f32(2, 4, 3, 5).to(memory_format=torch.channels_last)[:, 1:3],
    "diagonal": lambda: f32(5, 5).diagonal(),
    "expanded": lambda: f32(1, 3).expand(4, 3),
    "expanded 0-d": lambda: f32().expand(4),
    "overlapping windows": lambda: f32(10).unfold(0, 4, 2),
    "overlapping in a storage of its size": lambda: f32(4).as_strided((2, 2), (1, 1)),
    "overlapping, offset": lambda: f32(9).as_strided((3, 3), (2, 1), 1),
    "permutation by strides": lambda: f32(6).as_strided((3, 2), (1, 3)),
    "gaps in a storage of its size": lambda: f32(4).as_strided((2, 2), (0, 3)),
    "offset in a storage of its size": lambda: f32(4).as_strided((2, 2), (0, 1), 2),
    "as_strided 0-d": lambda: f32(4).as_strided((), (), 3),
    "odd strides of ones": lambda: f32(4).as_strided((1, 4), (7, 1)),
    "conj": lambda: c64(3, 2).conj(),
    "conj of a part": lambda: c64(4, 2)[1:3].conj(),
    "conj 0-d": lambda: c64().conj(),
    "conj empty": lambda: c64(0).conj(),
    "conj expanded": lambda: c64(1, 2).conj().expand(3, 2),
    "neg": lambda: f32(3, 2)._neg_view(),
    "imaginary part of a conj": lambda: c64(3, 2).conj().imag,
    "real part of a conj": lambda: c64(3, 2).conj().real,
    "conj and neg": lambda: c64(3, 2).conj()._neg_view(),
    "conj without a storage class": lambda: random_tensor((3, 2), torch.complex32).conj(),
    "Parameter": lambda: torch.nn.Parameter(f32(3, 2)),
    "Parameter over a part": lambda: torch.nn.Parameter(f32(6, 2)[2:4]),
    "requires_grad": lambda: f32(3, 2).requires_grad_(),
    "result of a function": lambda: f32(3, 2).requires_grad_().exp(),
    "inference": lambda: torch.inference_mode()(f32)(3, 2),
    "seen as another dtype": lambda: f32(4, 2).view(torch.int16)[:, 1:],
    "larger than a chunk": lambda: f32(1100, 1100),
    "larger than a chunk, transposed part": lambda: f32(1100, 1200)[:, 50:1150].t(),
    "larger than a chunk, every second": lambda: f32(2200, 1100)[:, ::2],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (1, 3, 2)], ids=str)
def test_a_record_equals_torchs_for_every_dtype(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = random_tensor(shape, dtype)
    assert stored(tensor, tmp_path) == record_of(tensor)
    if tensor.dim() == 2:
        assert stored(tensor[1:2], tmp_path) == record_of(tensor[1:2])


@pytest.mark.parametrize("name", ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"])
def test_torch_ckpt_saves_the_dtypes_that_dcp_cannot(tmp_path: Path, name: str) -> None:
    tensor = random_tensor((3, 5), getattr(torch, name))
    torch_ckpt.save(
        {"tensor": tensor}, tmp_path, no_dist=True, options=torch_ckpt.WriteOptions(thread_count=1)
    )
    assert data_files(tmp_path)[0].read_bytes() == record_of(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_equals_torchs_for_every_layout(tmp_path: Path, layout: str) -> None:
    tensor = LAYOUTS[layout]()
    assert stored(tensor, tmp_path) == record_of(tensor)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 65535, 65536])
def test_a_record_equals_torchs_for_all_widths_of_pickled_numbers(
    tmp_path: Path, count: int
) -> None:
    tensor = random_tensor((count,), torch.uint8)
    assert stored(tensor, tmp_path) == record_of(tensor)


MIXED_STATE = {
    "weight": f32(30, 7),
    "step": 12,
    "half": random_tensor((5,), torch.bfloat16),
    "nested": {"bytes": random_tensor((33,), torch.uint8), "list": [f32(2), "text", f32(3, 3).t()]},
    "none": None,
    "view": f32(9, 9)[2:5, 3:],
    "empty": f32(0, 2),
    "a name that is not in the record: ü" + "n" * 300: torch.tensor(1.5),
}


@pytest.mark.parametrize("options", [{"thread_count": 1}, {"single_file_per_rank": False}], ids=str)
def test_complete_files_equal_torchs(tmp_path: Path, options: dict[str, Any]) -> None:
    save(MIXED_STATE, tmp_path / "ours", **options)
    stock_save(MIXED_STATE, tmp_path / "stock", **options)
    ours, stock = data_files(tmp_path / "ours"), data_files(tmp_path / "stock")
    assert [file.name for file in ours] == [file.name for file in stock]
    assert [file.read_bytes() for file in ours] == [file.read_bytes() for file in stock]


@pytest.mark.parametrize("direct_io", [True, False, "auto"])
def test_direct_io_does_not_change_the_file(tmp_path: Path, direct_io: bool | str) -> None:
    if direct_io is True and not direct_io_works(tmp_path):
        pytest.skip("this file system has no direct I/O")
    state = {"large": f32(1000, 1000), "small": f32(3)}
    save(state, tmp_path, thread_count=1, direct_io=direct_io)
    expected = record_of(state["large"]) + record_of(state["small"])
    assert data_files(tmp_path)[0].read_bytes() == expected


# --- any chain of views --------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Makes a tensor of any dtype and shape under a chain of views."""
    # Complex tensors have the most kinds of views.
    dtype = draw(st.sampled_from(DTYPES) | st.sampled_from(COMPLEX))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = random_tensor(shape, dtype, seed=draw(st.integers(0, 100)))
    for _ in range(draw(st.integers(0, 5))):
        views = VIEWS + OF_A_DIMENSION * (tensor.dim() > 0) + OF_COMPLEX * (tensor.dtype in COMPLEX)
        tensor = draw(st.sampled_from(views))(draw, tensor)
    return tensor


def any_dim(draw: st.DrawFn, tensor: torch.Tensor) -> tuple[int, int]:
    """Chooses a dimension, and returns its number and its size."""
    dim = draw(st.integers(0, tensor.dim() - 1))
    return dim, tensor.size(dim)


def narrowed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dim, size = any_dim(draw, tensor)
    start = draw(st.integers(0, size))
    return tensor.narrow(dim, start, draw(st.integers(0, size - start)))


def stepped(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    index = [slice(None)] * any_dim(draw, tensor)[0]
    return tensor[(*index, slice(None, None, draw(st.integers(2, 3))))]


def selected(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    dim, size = any_dim(draw, tensor)
    return tensor.select(dim, draw(st.integers(0, size - 1))) if size else tensor


def permuted(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


def expanded(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    sizes = [draw(st.integers(0, 4)) if size == 1 else size for size in tensor.shape]
    if draw(st.booleans()):
        sizes.insert(0, draw(st.integers(0, 3)))
    return tensor.expand(sizes)


def unsqueezed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(draw(st.integers(0, tensor.dim())))


def restrided(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Applies any geometry within the storage: overlapping, with gaps, in any order."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(0, 6)) for _ in sizes]
    held = tensor.untyped_storage().nbytes() // tensor.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    if 0 in sizes:
        reach = -1
    if reach >= held:
        return tensor
    return tensor.as_strided(sizes, strides, draw(st.integers(0, held - reach - 1)))


def conjugated(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj()


def negated(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor._neg_view() if tensor.dtype in (torch.float32, *COMPLEX) else tensor


def one_of_two_parts(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return draw(st.sampled_from([tensor.real, tensor.imag]))


def copied(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


OF_A_DIMENSION = [narrowed, stepped, selected]
OF_COMPLEX = [conjugated, one_of_two_parts]
VIEWS = [permuted, expanded, unsqueezed, restrided, negated, copied]


@settings(max_examples=500)
@given(tensors())
def test_a_record_equals_torchs_after_any_chain_of_views(tensor: torch.Tensor) -> None:
    expected = record_of(tensor)
    with tempfile.TemporaryDirectory() as directory:
        assert stored(tensor, Path(directory)) == expected


@settings(max_examples=150)
@given(st.lists(tensors(), max_size=6))
def test_a_tensor_is_loaded_after_any_chain_of_views(values: list[torch.Tensor]) -> None:
    state = {f"tensor {i}": value for i, value in enumerate(values)}
    loaded = {
        name: random_tensor(tuple(value.shape), value.dtype, seed=1)
        for name, value in state.items()
    }
    with tempfile.TemporaryDirectory() as directory:
        save(state, directory, sync_files=False)
        load(loaded, directory)
    for name, value in state.items():
        assert bytes_of(loaded[name]) == bytes_of(value), name


# --- beyond 32 bits ------------------------------------------------------------------------------


def available_bytes(path: Path) -> int:
    """Returns the bytes that are available both in memory and on the disk."""
    memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory, shutil.disk_usage(path).free)


class Ends(io.RawIOBase):
    """File that keeps only its size, and the bytes at both ends."""

    KEPT = 1 << 20

    def __init__(self) -> None:
        self.size, self.first, self.last = 0, b"", b""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.size += len(view)
        self.first += bytes(view[: self.KEPT - len(self.first)])
        self.last = (self.last + bytes(view[-self.KEPT :]))[-self.KEPT :]
        return len(view)


@pytest.mark.large
@pytest.mark.full
@pytest.mark.alone
def test_a_record_equals_torchs_beyond_four_gib(scratch: Path) -> None:
    if available_bytes(scratch) < 6 << 30:
        pytest.skip("needs 6 GiB of memory and of disk")
    # Untouched zeros use no memory. A few marks verify the positions of the bytes.
    tensor = torch.zeros(2**32 + 7, dtype=torch.uint8)
    marks = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 6]
    tensor[marks] = torch.arange(1, len(marks) + 1, dtype=torch.uint8)
    save({"tensor": tensor}, scratch / "ours", thread_count=1, sync_files=False)
    ends = Ends()
    torch.save(tensor, ends)
    (file,) = data_files(scratch / "ours")
    assert file.stat().st_size == ends.size
    with file.open("rb") as stream:
        assert stream.read(Ends.KEPT) == ends.first
        stream.seek(-Ends.KEPT, os.SEEK_END)
        # With the archive's directory, which has a CRC-32 of all elements.
        assert stream.read() == ends.last
    part = {"tensor": torch.zeros(2**32 + 7, dtype=torch.uint8)}
    load(part, scratch / "ours")
    assert part["tensor"].nonzero().flatten().tolist() == marks
