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
from torch_ckpt._base.cycle_collector import RelaxedGc
from torch_ckpt.checkpoint import source

# --- plan caching --------------------------------------------------------------------------------


@pytest.fixture
def _fresh_plan_cache() -> Iterator[None]:
    """Clears torch's cached plans, which are class attributes."""

    def clear() -> None:
        for name in vars(SavePlanner):
            if name.startswith("_cached_"):
                getattr(SavePlanner, name).clear()

    clear()
    yield
    clear()


@pytest.mark.usefixtures("_fresh_plan_cache")
def test_a_cached_plan_is_replaced_when_the_state_changes(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    for step in range(3):
        state = nested_state(step) | ({"more": f32(3)} if step else {})
        path = tmp_path / str(step)
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        save_with(writer, state, planner=planner, checkpoint_id=path)
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


class _Renaming(dcp.DefaultSavePlanner):
    def lookup_object(self, index: Any) -> Any:
        return self.state_dict["other"]


@pytest.mark.parametrize(
    ("planner", "stored"),
    [(_Halving, f32(5) / 2), (_Renaming, f32(5, seed=1))],
    ids=["transformed", "looked up"],
)
def test_the_objects_that_a_save_planner_returns_are_stored(
    tmp_path: Path, planner: type[dcp.SavePlanner], stored: torch.Tensor
) -> None:
    state = {"a": f32(5), "other": f32(5, seed=1)}
    save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=planner())
    loaded = {"a": torch.zeros(5)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["a"], stored)


@pytest.mark.parametrize("flatten", [True, False])
def test_a_state_dict_can_be_kept_unflattened(tmp_path: Path, flatten: bool) -> None:
    state = {"flat": f32(5), "nested": {"a": 1, "b": [2, 3]}}
    save_planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=save_planner)
    loaded, by_stock = ({"flat": torch.zeros(5), "nested": {"a": 0, "b": [0, 0]}} for _ in range(2))
    load(loaded, tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=flatten))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=flatten)
    dcp.load(by_stock, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert_equal(loaded["flat"], state["flat"])
    # Without flattening, torch's planner does not return loaded objects.
    assert_equal(loaded, by_stock)


# --- through Python: extensions and other file systems -------------------------------------------


def flipped(data: bytes) -> bytes:
    return bytes(255 - byte for byte in data)


class Flip(StreamTransformExtension):
    """Stores every byte inverted."""

    @staticmethod
    def registry_name() -> str:
        return "test.flip"

    @staticmethod
    def from_descriptor(version: str) -> Flip:
        return Flip()

    def get_descriptor(self) -> str:
        return "test.flip/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Stream(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    output.write(flipped(self.getvalue()))
                super().close()

        return Stream()

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(flipped(input.read()))


def flipping_reader(path: Path, reader: Any = torch_ckpt.FileSystemReader) -> Any:
    registry = ExtensionRegistry()
    registry.register(Flip)
    return reader(path, _extension_registry=registry)


EXTENDED = {"a": f32(5), "b": f32(3), "c": 7}


@pytest.mark.parametrize("free_before_read", [False, True])
def test_our_load_reads_data_stored_by_extensions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_before_read: bool
) -> None:
    save(EXTENDED, tmp_path, _extensions=[Flip()])
    loaded = emptied(EXTENDED)
    with pytest.raises(dcp.CheckpointException, match=r"test\.flip"):
        torch_ckpt.load(loaded, tmp_path)
    # As if torch had the extension.
    known = ExtensionRegistry()
    known.register(Flip)
    monkeypatch.setattr(source, "ExtensionRegistry", lambda: known)
    torch_ckpt.load(loaded, tmp_path, free_before_read=free_before_read)
    assert_equal(loaded, EXTENDED)


def test_data_stored_by_extensions_is_not_read_through_a_link(tmp_path: Path) -> None:
    save(EXTENDED, tmp_path / "checkpoint", thread_count=1, _extensions=[Flip()])
    (file,) = data_files(tmp_path / "checkpoint")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    reader = flipping_reader(tmp_path / "checkpoint")
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(emptied(EXTENDED), storage_reader=reader, no_dist=True)
    assert isinstance(cause_of(error.value), torch_ckpt.Unsafe)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_stream_extensions_transform_the_stored_bytes(tmp_path: Path, thread_count: int) -> None:
    metadata = save(EXTENDED, tmp_path, thread_count=thread_count, _extensions=[Flip()])
    place = place_of(metadata, "a")
    assert place.transform_descriptors == ["test.flip/1"]
    data = (tmp_path / place.relative_path).read_bytes()
    assert flipped(data[place.offset : place.offset + place.length]) == record_of(f32(5))


@pytest.mark.parametrize("writer", [torch_ckpt.FileSystemWriter, dcp.FileSystemWriter])
@pytest.mark.parametrize("reader", [torch_ckpt.FileSystemReader, dcp.FileSystemReader])
def test_stream_extensions_make_the_round_trip(tmp_path: Path, writer: Any, reader: Any) -> None:
    save_with(writer(tmp_path, _extensions=[Flip()]), EXTENDED)
    loaded = emptied(EXTENDED)
    dcp.load(loaded, storage_reader=flipping_reader(tmp_path, reader), no_dist=True)
    assert_equal(loaded, EXTENDED)


def test_extensions_keep_the_old_checkpoint_while_overwriting(tmp_path: Path) -> None:
    save(nested_state(0), tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(StopsBeforeCommit(tmp_path, _extensions=[Flip()]), nested_state(1))
    loaded = emptied(nested_state())
    load(loaded, tmp_path)
    assert_equal(loaded, nested_state(0))


def in_memory_classes() -> tuple[Any, Any]:
    """Returns a writer and a reader of a file system of fsspec."""
    pytest.importorskip("fsspec")
    try:
        from torch.distributed.checkpoint.fsspec_filesystem import _FileSystem
    except ImportError:  # older torch
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as _FileSystem

    def derived(base: Any) -> Any:
        class InMemory(base):  # type: ignore[misc]
            def __init__(self, path: str, **options: Any) -> None:
                super().__init__(path, **options)
                self.fs = _FileSystem()
                self.path = self.fs.init_path(path)

        return InMemory

    return derived(torch_ckpt.FileSystemWriter), derived(torch_ckpt.FileSystemReader)


@pytest.mark.filterwarnings("ignore:fsync not supported")
@pytest.mark.parametrize("thread_count", [1, 3])
def test_another_file_system_is_written_and_read_through_torchs_code(thread_count: int) -> None:
    writer, reader = in_memory_classes()
    path = f"memory://checkpoint-{thread_count}"
    save_with(writer(path, thread_count=thread_count, sync_files=False), nested_state())
    loaded = emptied(nested_state())
    dcp.load(loaded, storage_reader=reader(path), no_dist=True)
    assert_equal(loaded, nested_state())


def test_values_that_are_freed_before_reading_cannot_be_read_once(tmp_path: Path) -> None:
    save(nested_state(), tmp_path)
    with pytest.raises(ValueError, match="either free_before_read or read_once"):
        torch_ckpt.load(
            nested_state(),
            tmp_path,
            free_before_read=True,
            options=torch_ckpt.ReadOptions(read_once=True),
        )


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


def collector() -> tuple[object, ...]:
    return gc.isenabled(), *gc.get_threshold()


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_is_restored(tmp_path: Path, fails: bool) -> None:
    # Failures of earlier tests may still keep the collector relaxed.
    gc.collect()
    before = collector()
    state = nested_state()
    planner = FailingAt("epoch" if fails else "no such name")
    with contextlib.suppress(dcp.CheckpointException):
        save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=planner)
    with contextlib.suppress(dcp.CheckpointException):
        load({"epoch": 0, ("missing" if fails else "name"): 0}, tmp_path)
    gc.collect()
    assert collector() == before


def test_a_threshold_of_the_garbage_collector_that_other_code_sets_is_kept() -> None:
    gc.collect()
    before = gc.get_threshold()
    try:
        RelaxedGc.begin()
        gc.set_threshold(123, 45, 6)
        RelaxedGc.end()
        assert gc.get_threshold() == (123, 45, 6)
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("next_call", ["load", "collection"])
def test_the_next_load_or_collection_frees_what_a_failed_load_has_left(
    tmp_path: Path, next_call: str
) -> None:
    gc.collect()
    before = collector()
    save(nested_state(), tmp_path)

    def fail() -> None:
        with contextlib.suppress(dcp.CheckpointException):
            load({"epoch": 0, "missing": 0}, tmp_path)

    fail()
    assert collector() != before
    if next_call == "load":
        fail()
    else:
        gc.collect(0)
    assert collector() == before


def test_importing_torch_ckpt_changes_no_settings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        __import__("torch_ckpt")
    assert torch.serialization.get_crc32_options()
