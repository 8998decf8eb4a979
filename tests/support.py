"""Helpers of several test files: records as torch writes them, states, comparisons."""

from __future__ import annotations

import inspect
import io
import itertools
import os
import resource
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import torch_ckpt
from torch_ckpt import WriteOptions
from torch_ckpt.checkpoint.metadata import checksum_tables
from torch_ckpt.options import DEFAULT_OPTIONS
from torch_ckpt.ranks.group import RankGroup
from torch_ckpt.saving import handle
from torch_ckpt.steps import StepStore

StateDict = dict[str, Any]

#: Error of dcp.load for a directory without a checkpoint. Older torch drops the reader's reason.
NO_CHECKPOINT = (
    "no committed checkpoint"
    if "global metadata read failed" in inspect.getsource(state_dict_loader)
    else "metadata is None"
)

# torch.save has no storage class of its own for the second half ("v3" records).
_NAMES = """
float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128
uint16 uint32 uint64 complex32 bcomplex32 float8_e4m3fn float8_e4m3fnuz float8_e5m2
float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
"""

#: The dtypes of this torch that DCP can save. It cannot determine the size of the others.
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]


def open_descriptors() -> set[tuple[str, str]]:
    """Returns the number of each open descriptor of this process, and the file it refers to.

    Compare two results with ``<=``: threads of earlier tests may still be closing descriptors.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        # The listing has a descriptor too, which is closed when the listing ends.
        with suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def pairwise(cases: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Selects cases so that each pair of values that occurs in one case occurs in a selected case.

    For tests whose defects show with two values, whatever the others are. Values must be hashable.
    """
    left = [(case, set(itertools.combinations(enumerate(case), 2))) for case in cases]
    wanted = set().union(*(pairs for _, pairs in left))
    chosen = []
    while wanted:
        case, pairs = max(left, key=lambda one: len(one[1] & wanted))
        chosen.append(case)
        wanted -= pairs
    return chosen


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Makes a contiguous tensor of random bytes (random truth values for bool)."""
    count = torch.Size(shape).numel()
    random = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    size = (count * dtype.itemsize,)
    data = torch.randint(0, limit, size, dtype=torch.uint8, generator=random)
    return data.view(dtype).view(shape)


def f32(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_tensor(shape, torch.float32, seed)


def nested_state(seed: int = 0) -> StateDict:
    """Makes nested dicts and lists of tensors and objects."""
    return {
        "model": {
            "weight": f32(30, 7, seed=seed),
            "bias": random_tensor((7,), torch.bfloat16, seed),
            "transposed": f32(4, 6, seed=seed + 1).t(),
            "part": f32(9, 9, seed=seed + 2)[2:5, 3:],
        },
        "optimizer": {"steps": [torch.tensor(float(seed)), torch.tensor(2.0)], "lr": 1e-3 + seed},
        "epoch": seed,
        "name": f"run {seed}",
        "nothing": None,
        "empty": torch.empty(0, 3),
        "every dtype": {str(dtype): random_tensor((5,), dtype, seed) for dtype in DTYPES},
    }


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes zeros of any dtype; torch.zeros does not support every dtype."""
    count = torch.Size(shape).numel()
    return torch.zeros(count * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)


#: Identifies the run that saves a step in a test.
ATTEMPT = "0a1b2c3d"


def save_step(
    store: StepStore,
    step: int,
    state: StateDict,
    write: WriteOptions = DEFAULT_OPTIONS,
    *,
    no_dist: bool = True,
    timeout: float = 60.0,
    **options: Any,
) -> None:
    """Saves a step. options: of the store's ``target``."""
    target = store.target(step, write, **{"attempt": ATTEMPT, **options})
    handle.save(state, lambda: target, RankGroup.of(None, no_dist), timeout=timeout)


def start_step(
    store: StepStore,
    step: int,
    state: StateDict,
    *,
    no_dist: bool = True,
    timeout: float = 60.0,
    **options: Any,
) -> torch_ckpt.AsyncSave:
    """Saves a step in the background. options: of the store's ``target``."""
    target = store.target(step, DEFAULT_OPTIONS, **{"attempt": ATTEMPT, **options})
    return handle.start(state, lambda: target, RankGroup.of(None, no_dist), timeout=timeout)


def record_of(tensor: torch.Tensor) -> bytes:
    """Makes the record that DCP's writer stores: a clone if the storage is larger."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().size() != tensor.nbytes:
        tensor = tensor.clone()
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def save(state: StateDict, path: str | Path, **options: Any) -> Metadata:
    """``dcp.save`` with torch_ckpt's writer, replacing a checkpoint without a warning."""
    return save_with(torch_ckpt.FileSystemWriter(path, **options), state)


def stock_save(state: StateDict, path: str | Path, **options: Any) -> Metadata:
    """``dcp.save`` with torch's writer. Returns the stored metadata."""
    save_with(dcp.FileSystemWriter(path, **options), state)
    # The result of dcp.save has no storage_data with an older torch.
    return dcp.FileSystemReader(path).read_metadata()


def save_with(writer: dcp.StorageWriter, state: StateDict, **options: Any) -> Metadata:
    """``dcp.save`` without a process group, and without the warning that a checkpoint is
    replaced."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        return dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(
    state: StateDict, path: str | Path, *, planner: dcp.LoadPlanner | None = None, **options: Any
) -> None:
    """``dcp.load`` with torch_ckpt's reader."""
    reader = torch_ckpt.FileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)


def stock_load(state: StateDict, path: str | Path) -> None:
    """``dcp.load`` with torch's reader."""
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


def assert_checkpoint(path: Path, state: StateDict, loader: Callable[..., None] = load) -> None:
    """Checks that torch_ckpt and stock torch load ``state`` from the checkpoint."""
    for of in (loader, stock_load):
        loaded = emptied(state)
        of(loaded, path)
        assert_equal(loaded, state)


def stock_restore(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Restores model and optimizer by torch's reader, ``get_state_dict`` and ``set_state_dict``."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    stock_load({"model": of_model, "optimizer": of_optimizer}, path)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def process_memory(field: str) -> int:
    """Returns bytes of this process as the kernel counts them: "VmRSS" now, "VmHWM" at peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def reset_peak_memory() -> None:
    """Resets the peak that "VmHWM" reports."""
    Path("/proc/self/clear_refs").write_text("5")


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


@contextmanager
def no_warnings() -> Iterator[None]:
    """Block that must cause no warning. A filter "error" cannot show this, because torch_ckpt logs
    a warning that a filter turns into an error."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    assert [str(warning.message) for warning in caught] == []


@contextmanager
def files_limited_to(count: int) -> Iterator[None]:
    """Fails every write of this process beyond ``count`` bytes of a file, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def cause_of(error: dcp.CheckpointException) -> BaseException:
    """Returns the error of the only rank that failed."""
    ((cause, _traceback),) = error.failures.values()
    return cause


def data_files(path: str | Path) -> list[Path]:
    """Lists the data files of a checkpoint, by name."""
    return sorted(Path(path).glob("*.distcp"))


def flip_bit(file: Path, byte: int, bit: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(byte)
        (value,) = stream.read(1)
        stream.seek(byte)
        stream.write(bytes([value ^ (1 << bit)]))


def place_of(metadata: Metadata, name: str) -> _StorageInfo:
    """Returns the location of the only stored item of a name."""
    (place,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    return place


#: Envelope CRC-32, size of a block in bytes (0: no blocks), CRC-32 of each block.
RecordSums = tuple[int, int, list[int]]


def parsed_table(table: bytes) -> dict[int, RecordSums]:
    """Parses a checksum table by the grammar in docs/format.md. Returns the entries by offset."""
    magic, count = struct.unpack_from("<4sI", table)
    assert magic == b"TCS1"
    (seal,) = struct.unpack("<I", table[-4:])
    assert seal == zlib.crc32(table[:-4])
    crcs = [crc for (crc,) in struct.iter_unpack("<I", table[8 + 16 * count : -4])]
    found: dict[int, RecordSums] = {}
    for offset, envelope, packed in struct.iter_unpack("<QII", table[8 : 8 + 16 * count]):
        log2, blocks = packed & 0x7F, packed >> 8
        found[offset] = (envelope, 1 << log2 if log2 else 0, crcs[:blocks])
        del crcs[:blocks]
    assert crcs == []
    assert sorted(found) == list(found)
    return found


def assert_tables_match(path: str | Path, metadata: Metadata) -> None:
    """Checks the metadata's checksums against zlib for all bytes in the checkpoint."""
    tables = {name: parsed_table(table) for name, table in checksum_tables(metadata).items()}
    assert set(tables) == {info.relative_path for info in metadata.storage_data.values()}
    for index, info in metadata.storage_data.items():
        if info.length == 0:
            continue
        with open(Path(path) / info.relative_path, "rb") as file:
            file.seek(info.offset)
            record = file.read(info.length)
        begin, end = 0, len(record)
        if not isinstance(metadata.state_dict_metadata[index.fqn], BytesStorageMetadata):
            entry = zipfile.ZipFile(io.BytesIO(record)).getinfo("archive/data/0")
            lengths = struct.unpack_from("<HH", record, entry.header_offset + 26)
            begin = entry.header_offset + 30 + sum(lengths)
            end = begin + entry.file_size
        envelope, block, crcs = tables[info.relative_path].pop(info.offset)
        assert envelope == zlib.crc32(record[:begin] + record[end:]), index
        payload = record[begin:end]
        if block == 0:
            assert begin > 0, index
            assert len(payload) <= 16 << 10, index
        else:
            pieces = [payload[at : at + block] for at in range(0, len(payload), block)]
            assert crcs == [zlib.crc32(piece) for piece in pieces], index
    assert all(left == {} for left in tables.values())


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns a tensor's elements in logical order, with NaNs and padding bits."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = plain.clone(memory_format=torch.contiguous_format)
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_equal(actual: Any, expected: Any, name: str = "state") -> None:
    """Fails with the path if two states differ in a bit, dtype, shape or type."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{name}: {type(actual)}"
        assert actual.dtype == expected.dtype, name
        assert actual.shape == expected.shape, name
        assert bytes_of(actual) == bytes_of(expected), f"{name} differs"
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), name
        for key in expected:
            assert_equal(actual[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), name
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(one, other, f"{name}.{i}")
    else:
        assert actual == expected, name


def emptied(state: Any) -> Any:
    """Makes the structure of a state without its values: zeroed tensors, None for other values."""
    if isinstance(state, torch.Tensor):
        return zeros(state.shape, state.dtype)
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(emptied(value) for value in state)
    return None
