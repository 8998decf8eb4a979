"""Loads from URLs: they fetch ranges of bytes, and refuse damaged data."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.remote_steps import (
    fail_at,
    loaded,
    names_of,
    save,
    state_of,
)
from tests.remote_stores import Hooked, hooked, hooked_url
from tests.support import assert_equal, cause_of, random_tensor
from torch_ckpt import _C
from torch_ckpt.checkpoint.metadata import encode_metadata
from torch_ckpt.errors import Corrupt, Unsafe
from torch_ckpt.steps import MARKER_NAME
from torch_ckpt.steps.remote import RemoteSteps
from torch_ckpt.steps.remote_files import _callback
from torch_ckpt.steps.remote_reader import RemoteReader


def bytes_read(part: str = ".distcp") -> int:
    return sum(count for path, count in Hooked.reads if part in path)


def test_loading_a_quarter_of_the_names_fetches_a_quarter_of_the_bytes(flaky: RemoteSteps) -> None:
    layers = {f"layer {n}": random_tensor((1 << 20,), torch.uint8, n) for n in range(16)}
    save(flaky, 1, layers)
    Hooked.reads.clear()
    target = {name: torch.zeros(1 << 20, dtype=torch.uint8) for name in layers}
    flaky.load(1, target, no_dist=True, names=["layer 1", "layer 5", "layer 7", "layer 15"])
    wanted = 4 << 20
    assert wanted <= bytes_read() < 1.1 * wanted
    assert_equal(target["layer 7"], layers["layer 7"])
    assert not target["layer 6"].any()


class Shape:
    """A stored tensor, and the part that is loaded."""

    def __init__(self, tensor: torch.Tensor, offsets: list[int], lengths: list[int]) -> None:
        self.tensor, self.offsets, self.lengths = tensor, offsets, lengths

    @property
    def part(self) -> torch.Tensor:
        part = self.tensor
        for dim, place in enumerate(zip(self.offsets, self.lengths, strict=True)):
            part = part.narrow(dim, *place)
        return part


def random_shape(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random_tensor(sizes, dtype, seed=sum(sizes))


PARTS = {
    "rows": Shape(random_shape(4096, 512), [1024, 0], [1024, 512]),
    "the last rows": Shape(random_shape(4096, 512), [4000, 0], [96, 512]),
    "one element": Shape(random_shape(4096, 512), [2222, 333], [1, 1]),
    "nothing": Shape(random_shape(4096, 512), [100, 0], [0, 512]),
    "narrow columns": Shape(random_shape(1024, 2048), [0, 512], [1024, 256]),
    "wide columns": Shape(random_shape(8, 1 << 18), [0, 1 << 16], [8, 1 << 16]),
    "a box": Shape(random_shape(4, 64, 8192), [1, 16, 100], [2, 32, 5000]),
    "bytes": Shape(random_shape(4 << 20, dtype=torch.uint8), [12345], [54321]),
    "transposed": Shape(random_shape(2048, 1024).t(), [100, 0], [50, 2048]),
    "channels last": Shape(
        random_shape(64, 32, 32, 32).to(memory_format=torch.channels_last),
        [8, 0, 0, 0],
        [8, 32, 32, 32],
    ),
    "conjugated": Shape(random_shape(1024, 512, dtype=torch.complex64).conj(), [7, 0], [30, 512]),
}


def read_part(steps: RemoteSteps, name: str, shape: Shape, **options: Any) -> torch.Tensor:
    reader = RemoteReader(steps._files.below("0000000001"), None, **options)
    metadata = reader.read_metadata()
    reader.set_up_for_load(0, metadata)
    info = metadata.storage_data[MetadataIndex(name, [0] * shape.tensor.dim())]
    stored = metadata.state_dict_metadata[name]
    target = torch.zeros(shape.lengths, dtype=shape.tensor.dtype)
    reads = _C.TensorReads()
    reads.add(
        name,
        info.relative_path,
        info.offset,
        info.length,
        stored.properties.dtype,
        stored.size,
        shape.offsets,
        shape.lengths,
        target,
    )
    reader.read_tensors(reads)
    reader.release()
    return target


@pytest.fixture(scope="module")
def ours() -> RemoteSteps:
    steps = RemoteSteps(f"hooked://{uuid.uuid4().hex}/ours")
    save(steps, 1, {name: shape.tensor for name, shape in PARTS.items()})
    return steps


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> RemoteSteps:
    """Writes the tensor by torch's writer, without checksums of blocks."""
    steps = RemoteSteps(f"hooked://{uuid.uuid4().hex}/stock")
    path = tmp_path_factory.mktemp("stock")
    state = {name: shape.tensor for name, shape in PARTS.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    for file in path.iterdir():
        steps._files.write(f"0000000001/{file.name}", file.read_bytes())
    steps._files.write(f"0000000001/{MARKER_NAME}", b"{}")
    return steps


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_record_is_loaded_with_its_values(
    request: pytest.FixtureRequest, writer: str, name: str
) -> None:
    found = read_part(request.getfixturevalue(writer), name, PARTS[name])
    assert_equal(found, PARTS[name].part.resolve_conj().contiguous())


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", ["rows", "the last rows", "one element", "wide columns", "bytes"])
def test_a_part_of_a_record_fetches_its_bytes_and_few_blocks(
    request: pytest.FixtureRequest, writer: str, name: str
) -> None:
    steps = request.getfixturevalue(writer)
    Hooked.reads.clear()
    read_part(steps, name, PARTS[name])
    wanted = PARTS[name].part.nbytes
    # The ends of the record twice, and the bytes between them and the part; blocks of 16 KiB.
    assert wanted <= bytes_read() < wanted + (400 << 10)


def test_a_damaged_part_is_refused_with_the_url(flaky: RemoteSteps) -> None:
    save(flaky, 1, {"t": random_shape(2048, 1024)}, thread_count=1)
    [name] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    data = bytearray(flaky._files.read(name))
    data[5 << 20] ^= 1
    flaky._files.write(name, bytes(data))
    part = Shape(random_shape(2048, 1024), [1024, 0], [512, 1024])
    with pytest.raises(Corrupt, match=f"{flaky.root}/0000000001/__0_"):
        read_part(flaky, "t", part)


def test_a_load_in_small_waves_gets_all_values_and_frees_its_files(
    flaky: RemoteSteps, staging: Path
) -> None:
    layers = {f"layer {n}": random_tensor((1 << 19,), torch.uint8, n) for n in range(16)}
    save(flaky, 1, layers)
    most = 0

    def look(kind: str, _path: str) -> None:
        nonlocal most
        files = [file for file in staging.rglob("*") if file.is_file()]
        most = max(most, sum(file.stat().st_blocks * 512 for file in files))

    target = {name: torch.zeros(1 << 19, dtype=torch.uint8) for name in layers}
    with hooked(look):
        flaky.load(1, target, no_dist=True, wave_bytes=1 << 20)
    assert_equal(target, layers)
    assert most < 2 << 20


def test_values_are_converted_by_the_load(flaky: RemoteSteps) -> None:
    save(flaky, 1, {"t": torch.arange(1 << 18, dtype=torch.float32)})
    target = {"t": torch.zeros(1 << 18, dtype=torch.float64)}
    flaky.load(1, target, no_dist=True)
    assert_equal(target["t"], torch.arange(1 << 18, dtype=torch.float64))


def test_a_load_with_free_before_read_gets_all_values(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(6))
    assert_equal(loaded(flaky, 1, free_before_read=True), state_of(6))


def test_a_failed_request_fails_the_load_with_the_url(flaky: RemoteSteps, staging: Path) -> None:
    save(flaky, 1, state_of())
    with fail_at("read", ".distcp"), pytest.raises(dcp.CheckpointException) as caught:
        loaded(flaky, 1)
    cause = cause_of(caught.value)
    assert isinstance(cause, PermissionError)
    assert cause.filename.startswith(f"{flaky.root}/0000000001/__0_")
    assert list(staging.iterdir()) == []


def test_verify_without_space_for_staging_downloads_nothing(
    flaky: RemoteSteps, small_disk: Path
) -> None:
    save(flaky, 1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)})
    Hooked.reads.clear()
    with pytest.raises(OSError, match="pass another staging_dir") as caught:
        RemoteSteps(flaky.root, small_disk).verify(1)
    assert caught.value.errno == errno.ENOSPC
    assert Hooked.reads == []


def test_uploads_reported_as_totals_are_counted_once() -> None:
    counts: list[int] = []
    callback = _callback(counts.append)
    callback.absolute_update(10)
    callback.relative_update(5)
    callback.absolute_update(20)
    assert counts == [10, 5, 5]


def test_a_load_without_space_for_staging_is_refused(flaky: RemoteSteps, small_disk: Path) -> None:
    save(flaky, 1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)})
    steps = RemoteSteps(flaky.root, small_disk)
    with pytest.raises(dcp.CheckpointException, match="pass another staging_dir") as caught:
        steps.load(1, {"t": torch.zeros(9 << 20, dtype=torch.uint8)}, no_dist=True)
    cause = cause_of(caught.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert str(cause.filename).startswith(str(small_disk))


def test_a_staging_directory_of_unknown_free_space_is_tried(ram_disk: Path) -> None:
    steps = RemoteSteps(hooked_url(), ram_disk)
    save(steps, 1, state_of())
    assert steps.verify(1).ok
    assert_equal(loaded(steps, 1), state_of())


def test_a_short_response_fails_the_load(
    flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(flaky, 1, state_of())
    read_all = Hooked.cat_file

    def short(self: Hooked, path: str, *args: Any, **kwargs: Any) -> bytes:
        data = read_all(self, path, *args, **kwargs)
        return data[:-1] if path.endswith(".distcp") else data

    monkeypatch.setattr(Hooked, "cat_file", short)
    with pytest.raises(dcp.CheckpointException, match="requested bytes"):
        loaded(flaky, 1)


def test_a_truncated_file_is_refused(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(), thread_count=1)
    [name] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    flaky._files.write(name, flaky._files.read(name)[:-100])
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(flaky, 1)
    assert isinstance(cause_of(caught.value), Corrupt)


def test_a_missing_file_is_named(flaky: RemoteSteps) -> None:
    save(flaky, 1, state_of(), thread_count=1)
    [name] = [n for n in names_of(flaky) if n.endswith(".distcp")]
    flaky._files.remove([name])
    with pytest.raises(dcp.CheckpointException) as caught:
        loaded(flaky, 1)
    cause = cause_of(caught.value)
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == f"{flaky.root}/{name}"


def test_metadata_that_names_a_file_outside_the_step_is_refused(
    flaky: RemoteSteps, staging: Path
) -> None:
    save(flaky, 1, {"t": torch.arange(9)})
    metadata = flaky.metadata(1)
    [info] = metadata.storage_data.values()
    info.relative_path = "../../elsewhere.distcp"
    flaky._files.write("0000000001/.metadata", encode_metadata(metadata))
    with pytest.raises(dcp.CheckpointException) as caught:
        flaky.load(1, {"t": torch.zeros(9)}, no_dist=True)
    assert isinstance(cause_of(caught.value), Unsafe)
    assert list(staging.iterdir()) == []
