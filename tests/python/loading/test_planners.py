"""Planners of users, and data that is read or written by torch's code: extensions, file systems."""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

import torch_ckpt
from tests.failed_saves import FailingAt, StopsBeforeCommit
from tests.support import (
    assert_equal,
    cause_of,
    data_files,
    emptied,
    f32,
    load,
    nested_state,
    place_of,
    record_of,
    save,
    save_with,
    zeros,
)

# --- plan caching --------------------------------------------------------------------------------


@pytest.fixture
def _fresh_plan_cache() -> Iterator[None]:
    """Clears torch's cached plans, which are class attributes."""
    caches = [
        getattr(SavePlanner, name) for name in vars(SavePlanner) if name.startswith("_cached_")
    ]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


def caching_planner() -> dcp.DefaultSavePlanner:
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


@pytest.mark.usefixtures("_fresh_plan_cache")
def test_a_cached_plan_is_replaced_when_the_state_changes(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    states = [
        nested_state(0),
        nested_state(1) | {"more": f32(3)},
        nested_state(2) | {"more": f32(3)},
    ]
    for step, state in enumerate(states):
        path = tmp_path / str(step)
        save_with(writer, state, planner=caching_planner(), checkpoint_id=path)
        loaded = emptied(state)
        load(loaded, path)
        assert_equal(loaded, state)


# --- planners of the user's own ------------------------------------------------------------------


class _Noting(dcp.DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__()
        self.resolved: list[str] = []
        self.thread = threading.get_ident()

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert threading.get_ident() == self.thread
        self.resolved.append(write_item.index.fqn)
        return super().resolve_data(write_item)


def test_a_save_planner_is_asked_once_for_each_item_on_the_calling_thread(tmp_path: Path) -> None:
    planner = _Noting()
    writer = torch_ckpt.FileSystemWriter(tmp_path, thread_count=3)
    metadata = save_with(writer, nested_state(), planner=planner)
    assert sorted(planner.resolved) == sorted(metadata.state_dict_metadata)


class _Halving(dcp.DefaultSavePlanner):
    """Changes the stored values, through the hook that torch documents."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        object = super().transform_object(write_item, object)
        return object / 2 if isinstance(object, torch.Tensor) else object


def test_the_tensors_that_a_save_planner_returns_are_stored(tmp_path: Path) -> None:
    save_with(torch_ckpt.FileSystemWriter(tmp_path), {"a": f32(5)}, planner=_Halving())
    loaded = {"a": torch.zeros(5)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["a"], f32(5) / 2)


class _Renaming(dcp.DefaultSavePlanner):
    def lookup_object(self, index: Any) -> Any:
        return self.state_dict["other"]


def test_the_objects_that_a_save_planner_looks_up_are_stored(tmp_path: Path) -> None:
    state = {"a": f32(5), "other": f32(5, seed=1)}
    save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=_Renaming())
    loaded = {"a": torch.zeros(5)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["a"], f32(5, seed=1))


@pytest.mark.parametrize("flatten", [True, False])
def test_a_state_dict_can_be_kept_unflattened(tmp_path: Path, flatten: bool) -> None:
    state = {"flat": f32(5), "nested": {"a": 1, "b": [2, 3]}}
    save_planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=save_planner)
    loaded = {"flat": torch.zeros(5), "nested": {"a": 0, "b": [0, 0]}}
    by_stock = {"flat": torch.zeros(5), "nested": {"a": 0, "b": [0, 0]}}
    load(loaded, tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=flatten))
    stock_reader = dcp.FileSystemReader(tmp_path)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=flatten)
    dcp.load(by_stock, storage_reader=stock_reader, planner=planner, no_dist=True)
    assert_equal(loaded["flat"], state["flat"])
    # Without flattening, torch's planner does not return loaded objects.
    assert_equal(loaded, by_stock)


# --- through Python: extensions and other file systems -------------------------------------------


class _Flipped(io.RawIOBase):
    """Stream that inverts every byte."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw = raw

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.raw.write(bytes(255 - byte for byte in memoryview(data).cast("B")))
        return memoryview(data).nbytes

    def readinto(self, buffer: Any) -> int:
        data = self.raw.read(len(buffer))
        buffer[: len(data)] = bytes(255 - byte for byte in data)
        return len(data)

    def flush(self) -> None:
        self.raw.flush()


class Flip(StreamTransformExtension):
    @staticmethod
    def registry_name() -> str:
        return "test.flip"

    @staticmethod
    def from_descriptor(version: str) -> Flip:
        return Flip()

    def get_descriptor(self) -> str:
        return "test.flip/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Flipped(output)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return _Flipped(input)  # type: ignore[return-value]


def flip_registry() -> ExtensionRegistry:
    registry = ExtensionRegistry()
    registry.register(Flip)
    return registry


@pytest.mark.parametrize("free_before_read", [False, True])
def test_our_load_reads_data_stored_by_extensions(tmp_path: Path, free_before_read: bool) -> None:
    state = {"a": f32(5), "b": f32(3), "c": 7}
    save(state, tmp_path, _extensions=[Flip()])
    loaded = emptied(state)
    reader = torch_ckpt.FileSystemReader(tmp_path, _extension_registry=flip_registry())
    torch_ckpt.load(loaded, storage_reader=reader, free_before_read=free_before_read, no_dist=True)
    assert_equal(loaded, state)


def test_data_stored_by_extensions_is_not_read_through_a_link(tmp_path: Path) -> None:
    state = {"a": f32(5), "b": f32(3), "c": 7}
    save(state, tmp_path / "checkpoint", thread_count=1, _extensions=[Flip()])
    (file,) = data_files(tmp_path / "checkpoint")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    reader = torch_ckpt.FileSystemReader(
        tmp_path / "checkpoint", _extension_registry=flip_registry()
    )
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(emptied(state), storage_reader=reader, no_dist=True)
    assert isinstance(cause_of(error.value), torch_ckpt.Unsafe)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_stream_extensions_transform_the_stored_bytes(tmp_path: Path, thread_count: int) -> None:
    state = {"a": f32(5), "b": f32(3), "c": 7}
    metadata = save(state, tmp_path, thread_count=thread_count, _extensions=[Flip()])
    place = place_of(metadata, "a")
    assert place.transform_descriptors == ["test.flip/1"]
    data = (tmp_path / place.relative_path).read_bytes()
    stored = data[place.offset : place.offset + place.length]
    assert bytes(255 - byte for byte in stored) == record_of(f32(5))


@pytest.mark.parametrize("writer", [torch_ckpt.FileSystemWriter, dcp.FileSystemWriter])
@pytest.mark.parametrize("reader", [torch_ckpt.FileSystemReader, dcp.FileSystemReader])
def test_stream_extensions_make_the_round_trip(tmp_path: Path, writer: Any, reader: Any) -> None:
    state = {"a": f32(5), "b": 7}
    save_with(writer(tmp_path, _extensions=[Flip()]), state)
    loaded = emptied(state)
    storage_reader = reader(tmp_path, _extension_registry=flip_registry())
    dcp.load(loaded, storage_reader=storage_reader, no_dist=True)
    assert_equal(loaded, state)


def test_extensions_keep_the_old_checkpoint_while_overwriting(tmp_path: Path) -> None:
    save(nested_state(0), tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(StopsBeforeCommit(tmp_path, _extensions=[Flip()]), nested_state(1))
    loaded = emptied(nested_state())
    load(loaded, tmp_path)
    assert_equal(loaded, nested_state(0))


def in_memory_classes() -> tuple[Any, Any]:
    pytest.importorskip("fsspec")
    try:
        from torch.distributed.checkpoint.fsspec_filesystem import _FileSystem
    except ImportError:  # older torch
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as _FileSystem

    class Writer(torch_ckpt.FileSystemWriter):
        def __init__(self, path: str, **options: Any) -> None:
            super().__init__(path, **options)
            self.fs = _FileSystem()
            self.path = self.fs.init_path(path)

    class Reader(torch_ckpt.FileSystemReader):
        def __init__(self, path: str, **options: Any) -> None:
            super().__init__(path, **options)
            self.fs = _FileSystem()
            self.path = self.fs.init_path(path)

    return Writer, Reader


@pytest.mark.filterwarnings("ignore:fsync not supported")
@pytest.mark.parametrize("thread_count", [1, 3])
def test_another_file_system_is_written_and_read_through_torchs_code(thread_count: int) -> None:
    writer, reader = in_memory_classes()
    path = f"memory://checkpoint-{thread_count}"
    save_with(writer(path, thread_count=thread_count, sync_files=False), nested_state())
    loaded = emptied(nested_state())
    dcp.load(loaded, storage_reader=reader(path), no_dist=True)
    assert_equal(loaded, nested_state())
    loaded = emptied(nested_state())
    assert torch_ckpt.load(loaded, storage_reader=reader(path), no_dist=True) is None
    assert_equal(loaded, nested_state())
    for option in ({"strict": False}, {"names": ["a"]}, {"free_before_read": True}):
        with pytest.raises(ValueError, match="a file system that is not local"):
            torch_ckpt.load(loaded, storage_reader=reader(path), no_dist=True, **option)


def test_values_that_are_freed_before_reading_cannot_be_read_once(
    tmp_path: Path,
) -> None:
    save(nested_state(), tmp_path)
    with pytest.raises(ValueError, match="either free_before_read or read_once"):
        torch_ckpt.load(nested_state(), tmp_path, free_before_read=True, read_once=True)


def test_a_failure_of_another_file_system_fails_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer, _reader = in_memory_classes()
    from fsspec.implementations.memory import MemoryFile

    def full(self: Any, data: Any) -> int:
        raise OSError(28, "No space left on device")

    # A file system of fsspec: only such a one can be made full here.
    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(dcp.CheckpointException, match="No space left"):
        save_with(writer("memory://full", thread_count=4, sync_files=False), nested_state())


def test_torchs_own_classes_are_unchanged() -> None:
    from torch.distributed.checkpoint import filesystem, hf_storage

    assert dcp.FileSystemWriter is filesystem.FileSystemWriter
    assert dcp.FileSystemWriter.__module__ == filesystem.__name__
    assert not issubclass(dcp.FileSystemWriter, torch_ckpt.FileSystemWriter)
    assert issubclass(hf_storage.HuggingFaceStorageWriter, filesystem.FileSystemWriter)
    assert not issubclass(hf_storage.HuggingFaceStorageWriter, torch_ckpt.FileSystemWriter)


def test_hugging_face_storage_works_with_torch_ckpt_imported(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = {"a": f32(5, 3), "b": f32(2)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 1})
    save_with(writer, state)
    loaded = {name: zeros(tuple(t.shape), t.dtype) for name, t in state.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_equal(loaded, state)


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_is_restored(tmp_path: Path, fails: bool) -> None:
    # Failures of earlier tests may still keep the collector relaxed.
    gc.collect()
    before = gc.isenabled(), gc.get_threshold()
    state = nested_state()
    planner = FailingAt("epoch" if fails else "no such name")
    with contextlib.suppress(dcp.CheckpointException):
        save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=planner)
    with contextlib.suppress(dcp.CheckpointException):
        load({"epoch": 0, ("missing" if fails else "name"): 0}, tmp_path)
    gc.collect()
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_failed_loads_let_the_collector_free_their_garbage(tmp_path: Path) -> None:
    gc.collect()
    before = gc.get_threshold()
    save(nested_state(), tmp_path)
    for _ in range(2):
        with contextlib.suppress(dcp.CheckpointException):
            load({"epoch": 0, "missing": 0}, tmp_path)
    # The second load found that the first had failed.
    assert gc.get_threshold() == before


def test_the_next_collection_frees_what_a_failed_load_has_left(tmp_path: Path) -> None:
    gc.collect()
    before = gc.get_threshold()
    save(nested_state(), tmp_path)
    with contextlib.suppress(dcp.CheckpointException):
        load({"epoch": 0, "missing": 0}, tmp_path)
    assert gc.get_threshold() != before
    gc.collect(0)
    assert gc.get_threshold() == before


def test_importing_torch_ckpt_changes_no_settings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        __import__("torch_ckpt")
    assert torch.serialization.get_crc32_options()
