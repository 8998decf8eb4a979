"""Loads from URLs: they fetch ranges of bytes, and refuse damaged data."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

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
from torch_ckpt.loading.load import load
from torch_ckpt.options import WriteOptions
from torch_ckpt.steps import MARKER_NAME
from torch_ckpt.steps.remote import RemoteSteps
from torch_ckpt.steps.remote_files import _callback
from torch_ckpt.steps.remote_reader import RemoteSource


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


class Part(NamedTuple):
    """A stored tensor, and the part that is loaded."""

    tensor: torch.Tensor
    offsets: list[int]
    lengths: list[int]

    @property
    def values(self) -> torch.Tensor:
        part = self.tensor
        for dim, place in enumerate(zip(self.offsets, self.lengths, strict=True)):
            part = part.narrow(dim, *place)
        return part


def random_of(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random_tensor(sizes, dtype, seed=sum(sizes))


def only_file(steps: RemoteSteps) -> str:
    [name] = [n for n in names_of(steps) if n.endswith(".distcp")]
    return name


PARTS = {
    "rows": Part(random_of(4096, 512), [1024, 0], [1024, 512]),
    "the last rows": Part(random_of(4096, 512), [4000, 0], [96, 512]),
    "one element": Part(random_of(4096, 512), [2222, 333], [1, 1]),
    "nothing": Part(random_of(4096, 512), [100, 0], [0, 512]),
    "narrow columns": Part(random_of(1024, 2048), [0, 512], [1024, 256]),
    "wide columns": Part(random_of(8, 1 << 18), [0, 1 << 16], [8, 1 << 16]),
    "a box": Part(random_of(4, 64, 8192), [1, 16, 100], [2, 32, 5000]),
    "bytes": Part(random_of(4 << 20, dtype=torch.uint8), [12345], [54321]),
    "transposed": Part(random_of(2048, 1024).t(), [100, 0], [50, 2048]),
    "channels last": Part(
        random_of(64, 32, 32, 32).to(memory_format=torch.channels_last),
        [8, 0, 0, 0],
        [8, 32, 32, 32],
    ),
    "conjugated": Part(random_of(1024, 512, dtype=torch.complex64).conj(), [7, 0], [30, 512]),
}


def read_part(steps: RemoteSteps, name: str, part: Part) -> torch.Tensor:
    source = RemoteSource(steps._files.below("0000000001"), None)
    source.open()
    metadata = source.metadata()
    info = metadata.storage_data[MetadataIndex(name, [0] * part.tensor.dim())]
    stored = metadata.state_dict_metadata[name]
    target = torch.zeros(part.lengths, dtype=part.tensor.dtype)
    reads = _C.TensorReads()
    place = (info.relative_path, info.offset, info.length)
    kind = (stored.properties.dtype, stored.size)
    reads.add(name, *place, *kind, part.offsets, part.lengths, target)
    source.read_tensors(reads)
    source.close()
    return target


@pytest.fixture(scope="module")
def ours() -> RemoteSteps:
    steps = RemoteSteps(f"hooked://{uuid.uuid4().hex}/ours")
    save(steps, 1, {name: part.tensor for name, part in PARTS.items()})
    return steps


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> RemoteSteps:
    """Writes the tensors by torch's writer, without checksums of blocks."""
    steps = RemoteSteps(f"hooked://{uuid.uuid4().hex}/stock")
    path = tmp_path_factory.mktemp("stock")
    state = {name: part.tensor for name, part in PARTS.items()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    for file in path.iterdir():
        steps._files.write(f"0000000001/{file.name}", file.read_bytes())
    steps._files.write(f"0000000001/{MARKER_NAME}", b"{}")
    return steps


#: Parts that few blocks cover.
NARROW = {"rows", "the last rows", "one element", "wide columns", "bytes"}


@pytest.mark.parametrize("writer", ["ours", "stock"])
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_record_is_loaded_with_its_values_and_fetches_few_blocks(
    request: pytest.FixtureRequest, writer: str, name: str
) -> None:
    steps, part = request.getfixturevalue(writer), PARTS[name]
    Hooked.reads.clear()
    found = read_part(steps, name, part)
    assert_equal(found, part.values.resolve_conj().contiguous())
    if name in NARROW:
        # The ends of the record twice, and the bytes between them and the part; blocks of 16 KiB.
        assert part.values.nbytes <= bytes_read() < part.values.nbytes + (400 << 10)


def test_a_damaged_part_is_refused_with_the_url(flaky: RemoteSteps) -> None:
    part = Part(random_of(2048, 1024), [1024, 0], [512, 1024])
    save(flaky, 1, {"t": part.tensor}, write=WriteOptions(thread_count=1))
    name = only_file(flaky)
    data = bytearray(flaky._files.read(name))
    data[5 << 20] ^= 1
    flaky._files.write(name, bytes(data))
    with pytest.raises(Corrupt, match=f"{flaky.root}/0000000001/__0_"):
        read_part(flaky, "t", part)


def test_a_load_in_waves_gets_all_and_frees_its_files(flaky: RemoteSteps, staging: Path) -> None:
    layers = {f"layer {n}": random_tensor((1 << 19,), torch.uint8, n) for n in range(16)}
    save(flaky, 1, layers)
    most = 0

    def look(kind: str, _path: str) -> None:
        nonlocal most
        files = [file for file in staging.rglob("*") if file.is_file()]
        most = max(most, sum(file.stat().st_blocks * 512 for file in files))

    target = {name: torch.zeros(1 << 19, dtype=torch.uint8) for name in layers}
    with hooked(look):
        load(
            target,
            lambda: RemoteSource(
                flaky._files.below("0000000001"), str(staging), fetched_bytes=1 << 20
            ),
            no_dist=True,
        )
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


def truncate(steps: RemoteSteps, name: str) -> None:
    steps._files.write(name, steps._files.read(name)[:-100])


def remove(steps: RemoteSteps, name: str) -> None:
    steps._files.remove([name])


def lead_outside(steps: RemoteSteps, _name: str) -> None:
    metadata = steps.metadata(1)
    for info in metadata.storage_data.values():
        info.relative_path = "../../elsewhere.distcp"
    steps._files.write("0000000001/.metadata", encode_metadata(metadata))


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda *_: fail_at("read", ".distcp"), PermissionError),
        (truncate, Corrupt),
        (remove, FileNotFoundError),
        (lead_outside, Unsafe),
    ],
    ids=["failed request", "truncated file", "missing file", "metadata of files elsewhere"],
)
def test_a_step_that_cannot_be_read_fails_the_load_with_the_url(
    flaky: RemoteSteps, staging: Path, spoil: Callable[..., Any], kind: type[Exception]
) -> None:
    save(flaky, 1, state_of(), write=WriteOptions(thread_count=1))
    name = only_file(flaky)
    with spoil(flaky, name) or nullcontext(), pytest.raises(dcp.CheckpointException) as caught:
        loaded(flaky, 1)
    cause = cause_of(caught.value)
    assert isinstance(cause, kind)
    if isinstance(cause, OSError):
        assert cause.filename == f"{flaky.root}/{name}"
    assert list(staging.iterdir()) == []


def test_verify_and_load_without_space_for_staging_are_refused_before_a_download(
    flaky: RemoteSteps, small_disk: Path
) -> None:
    state = {"t": torch.zeros(9 << 20, dtype=torch.uint8)}
    save(flaky, 1, state)
    steps = RemoteSteps(flaky.root, small_disk)
    Hooked.reads.clear()
    with pytest.raises(OSError, match="pass another staging_dir") as refused:
        steps.verify(1)
    assert refused.value.errno == errno.ENOSPC
    assert Hooked.reads == []
    with pytest.raises(dcp.CheckpointException, match="pass another staging_dir") as caught:
        steps.load(1, state, no_dist=True)
    cause = cause_of(caught.value)
    assert isinstance(cause, OSError)
    assert cause.errno == errno.ENOSPC
    assert str(cause.filename).startswith(str(small_disk))


def test_uploads_reported_as_totals_are_counted_once() -> None:
    counts: list[int] = []
    callback = _callback(counts.append)
    callback.absolute_update(10)
    callback.relative_update(5)
    callback.absolute_update(20)
    assert counts == [10, 5, 5]


def test_a_staging_directory_of_unknown_free_space_is_tried(ram_disk: Path) -> None:
    steps = RemoteSteps(hooked_url(), ram_disk)
    save(steps, 1, state_of())
    assert steps.verify(1).ok
    assert_equal(loaded(steps, 1), state_of())


def test_a_short_answer_fails_the_load(flaky: RemoteSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    save(flaky, 1, state_of())
    read_all = Hooked.cat_file

    def short(self: Hooked, path: str, *args: Any, **kwargs: Any) -> bytes:
        data = read_all(self, path, *args, **kwargs)
        return data[:-1] if path.endswith(".distcp") else data

    monkeypatch.setattr(Hooked, "cat_file", short)
    with pytest.raises(dcp.CheckpointException, match="requested bytes"):
        loaded(flaky, 1)
