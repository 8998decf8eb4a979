"""Both ways with stock torch: its files and ours, its arguments, its tools, old checkpoints."""

from __future__ import annotations

import contextlib
import copyreg
import gc
import io
import itertools
import os
import pickle
import re
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torch_ckpt
from tests.support import (
    DTYPES,
    NO_CHECKPOINT,
    StateDict,
    assert_equal,
    cause_of,
    data_files,
    emptied,
    load,
    pairwise,
    place_of,
    random_tensor,
    record_of,
    save,
    save_with,
    stock_load,
    stock_save,
    zeros,
)

Saver = Callable[..., Metadata]
Loader = Callable[..., None]


def f32(*shape: int, seed: int = 0) -> torch.Tensor:
    return random_tensor(shape, torch.float32, seed)


def state_of(seed: int = 0) -> StateDict:
    """Nested dicts and lists of tensors and objects."""
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


PAIRS: list[tuple[Saver, Loader]] = [(save, stock_load), (stock_save, load), (save, load)]


@pytest.mark.parametrize(
    ("pair", "thread_count", "single_file_per_rank"),
    pairwise(itertools.product(PAIRS, [1, 2, 3, 4], [True, False])),
)
def test_what_one_saves_the_other_loads(
    tmp_path: Path, pair: tuple[Saver, Loader], thread_count: int, single_file_per_rank: bool
) -> None:
    saver, loader = pair
    state = state_of()
    options = {"thread_count": thread_count, "single_file_per_rank": single_file_per_rank}
    saver(state, tmp_path, **options)
    loaded = emptied(state)
    loader(loaded, tmp_path)
    assert_equal(loaded, state)


class Counter:
    """Has its state handled by torch, through its two methods."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.history = torch.full((3,), float(value))

    def state_dict(self) -> StateDict:
        return {"value": self.value, "history": self.history}

    def load_state_dict(self, state: StateDict) -> None:
        self.value, self.history = state["value"], state["history"]


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_stateful_objects_make_the_round_trip(tmp_path: Path, saver: Saver, loader: Loader) -> None:
    saver({"counter": Counter(7), "weight": f32(2)}, tmp_path)
    counter = Counter(0)
    loader({"counter": counter, "weight": f32(2)}, tmp_path)
    assert counter.value == 7
    assert torch.equal(counter.history, torch.full((3,), 7.0))


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_a_model_and_its_optimizer_make_the_round_trip(
    tmp_path: Path, saver: Saver, loader: Loader
) -> None:
    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(1)
    other_model, other_optimizer = trained(2)
    saver({"model": model, "optimizer": optimizer}, tmp_path)
    loader({"model": other_model, "optimizer": other_optimizer}, tmp_path)
    assert_equal(dict(other_model.state_dict()), dict(model.state_dict()))
    assert_equal(other_optimizer.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("state", [{}, {"a": {}}, {"a": []}, {"a": 1}], ids=str)
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_a_state_without_tensors_makes_the_round_trip(
    tmp_path: Path, state: StateDict, saver: Saver, loader: Loader
) -> None:
    saver(state, tmp_path)
    loaded = emptied(state)
    loader(loaded, tmp_path)
    assert loaded == state


# --- checkpoints of older torch ------------------------------------------------------------------


def rewrite_metadata(directory: Path, reducers: dict[type, Callable[[Any], Any]]) -> None:
    """Pickles the metadata again, with other forms of some of its classes."""
    file = directory / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    with file.open("wb") as stream:
        pickler = pickle.Pickler(stream, protocol=2)
        pickler.dispatch_table = copyreg.dispatch_table | reducers
        pickler.dump(metadata)


def rewrite_record(directory: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Replaces one record of a checkpoint by a changed one at the end of its file."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    place = place_of(metadata, name)
    file = directory / place.relative_path
    data = file.read_bytes()
    record = change(data[place.offset : place.offset + place.length])
    file.write_bytes(data + record)
    place.offset, place.length = len(data), len(record)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def entries_of(record: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        return {n.removeprefix("archive/"): archive.read(n) for n in archive.namelist()}


def written_by_old_torch(record: bytes) -> bytes:
    """As torch 1.6 wrote it: no byteorder, .format_version or .storage_alignment."""
    entries = entries_of(record)
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for name in ("data.pkl", "data/0"):
        writer.write_record(name, entries[name], len(entries[name]))
    writer.write_end_of_file()
    return stream.getvalue()


def written_by_python(record: bytes) -> bytes:
    """A zip of another writer: sizes in the local headers, no alignment, no zip64 records."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries_of(record).items():
            archive.writestr(f"other/{name}", data)
    return stream.getvalue()


def with_more_entries(record: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/.first", b"x")
        for name, data in entries_of(record).items():
            archive.writestr(f"archive/{name}", data)
        archive.writestr("archive/.last", b"y" * 1000)
    return stream.getvalue()


def in_other_order(record: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        entries = entries_of(record)
        # torch.load wants a local header first, of whatever entry.
        for name in ("version", "data/0", "byteorder", "data.pkl"):
            archive.writestr(f"archive/{name}", entries[name])
    return stream.getvalue()


def of_a_big_endian_machine(record: bytes) -> bytes:
    entries = entries_of(record)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        payload = entries["data/0"]
        swapped = b"".join(payload[i : i + 4][::-1] for i in range(0, len(payload), 4))
        entries |= {"byteorder": b"big", "data/0": swapped}
        for name, data in entries.items():
            archive.writestr(f"archive/{name}", data)
    return stream.getvalue()


@pytest.mark.parametrize(
    "change",
    [
        written_by_old_torch,
        written_by_python,
        with_more_entries,
        in_other_order,
        of_a_big_endian_machine,
    ],
)
@pytest.mark.parametrize("shape", [(30, 7), (700, 700)], ids=["small", "large"])
def test_records_of_other_writers_are_loaded(
    tmp_path: Path, change: Callable[[bytes], bytes], shape: tuple[int, ...]
) -> None:
    state = {"weight": f32(*shape), "other": f32(3)}
    stock_save(state, tmp_path)
    rewrite_record(tmp_path, "weight", change)
    by_stock, by_us = emptied(state), emptied(state)
    stock_load(by_stock, tmp_path)
    load(by_us, tmp_path)
    assert_equal(by_stock, state)
    assert_equal(by_us, state)


@pytest.fixture
def _no_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


@pytest.mark.usefixtures("_no_checksums")
@pytest.mark.parametrize("shape", [(30, 7), (700, 700)], ids=["small", "large"])
def test_records_without_checksums_are_loaded(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = {"weight": f32(*shape)}
    stock_save(state, tmp_path)
    with zipfile.ZipFile(data_files(tmp_path)[0]) as archive:
        assert archive.getinfo("archive/data/0").CRC == 0
    loaded = emptied(state)
    load(loaded, tmp_path)
    assert_equal(loaded, state)


@pytest.mark.parametrize("alignment", [64, 4096])
def test_records_with_other_alignments_are_loaded(tmp_path: Path, alignment: int) -> None:
    from torch.utils.serialization import config

    state = state_of()
    with config.patch({"save.storage_alignment": alignment}):
        stock_save(state, tmp_path)
    loaded = emptied(state)
    load(loaded, tmp_path)
    assert_equal(loaded, state)


def test_tensor_properties_of_five_fields_are_read(tmp_path: Path) -> None:
    stock_save(state_of(), tmp_path)
    rewrite_metadata(
        tmp_path,
        {
            TensorProperties: lambda p: (
                copyreg.__newobj__,
                (TensorProperties,),
                p.__getstate__()[:5],
            )
        },
    )
    loaded = emptied(state_of())
    load(loaded, tmp_path)
    assert_equal(loaded, state_of())


def test_storage_infos_of_three_fields_are_read(tmp_path: Path) -> None:
    stock_save(state_of(), tmp_path)
    rewrite_metadata(
        tmp_path,
        {
            _StorageInfo: lambda info: (
                copyreg.__newobj__,
                (_StorageInfo,),
                {
                    "relative_path": info.relative_path,
                    "offset": info.offset,
                    "length": info.length,
                },
            )
        },
    )
    loaded = emptied(state_of())
    load(loaded, tmp_path)
    assert_equal(loaded, state_of())


@pytest.mark.parametrize("attribute", ["storage_meta", "version"])
def test_metadata_from_before_an_attribute_existed_is_read(tmp_path: Path, attribute: str) -> None:
    stock_save(state_of(), tmp_path)

    def without(metadata: Metadata) -> Any:
        state = {k: v for k, v in vars(metadata).items() if k != attribute}
        return copyreg.__newobj__, (Metadata,), state

    rewrite_metadata(tmp_path, {Metadata: without})
    loaded = emptied(state_of())
    load(loaded, tmp_path)
    assert_equal(loaded, state_of())


# --- the metadata that we write ------------------------------------------------------------------


class _Noter(pickle.Unpickler):
    """Notes the names of all that a pickle imports."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[str] = set()

    def find_class(self, module_name: str, global_name: str) -> Any:
        self.names.add(f"{module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def test_the_metadata_names_stock_classes_only(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    noter = _Noter((tmp_path / ".metadata").read_bytes())
    noter.load()
    assert f"{Metadata.__module__}.Metadata" in noter.names
    strangers = {n for n in noter.names if not n.startswith(("torch.", "collections."))}
    assert not strangers


def test_the_metadata_holds_no_path_objects(tmp_path: Path) -> None:
    save(state_of(), tmp_path)
    assert b"pathlib" not in (tmp_path / ".metadata").read_bytes()


class _OldProperties:
    """Unpacks five fields, as torch before 2.15."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state


class _OldTorch(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name == "TensorProperties":
            return _OldProperties
        return super().find_class(module_name, global_name)


def test_the_metadata_is_read_by_torch_that_knows_five_tensor_properties(tmp_path: Path) -> None:
    save({"weight": f32(3, 2).requires_grad_()}, tmp_path)
    metadata = _OldTorch(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    properties = metadata.state_dict_metadata["weight"].properties
    assert properties.dtype == torch.float32
    assert properties.requires_grad


def comparable(metadata: Metadata) -> dict[str, Any]:
    """What must be equal in the metadata of two saves of one state."""
    return {
        "tensors": {
            name: (stored.size, stored.chunks, stored.properties.__getstate__()[:5])
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        },
        "bytes": {
            name
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, BytesStorageMetadata)
        },
        "order": list(metadata.state_dict_metadata),
        "paths": metadata.planner_data,
        "storage": metadata.storage_data,
        "version": metadata.version,
        "id": str(metadata.storage_meta.checkpoint_id).rsplit("/", 1)[0],
    }


def test_the_metadata_says_what_stock_metadata_says(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "ours", thread_count=1)
    stock_save(state_of(), tmp_path / "stock", thread_count=1)
    ours = pickle.loads((tmp_path / "ours" / ".metadata").read_bytes())
    stock = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    assert comparable(ours) == comparable(stock)


def test_the_metadata_is_what_save_returned(tmp_path: Path) -> None:
    returned = save(state_of(), tmp_path)
    read = torch_ckpt.FileSystemReader(tmp_path).read_metadata()
    assert comparable(read) == comparable(returned)


def test_the_metadata_tells_which_save_and_which_load_it_was(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    save_with(writer, {"a": 1})
    reader = torch_ckpt.FileSystemReader(tmp_path)
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert meta.save_id == writer.save_id
    assert meta.load_id == reader.load_id
    assert meta.checkpoint_id == str(tmp_path)


# --- torch's own tools ---------------------------------------------------------------------------


def test_torch_converts_our_checkpoint_to_a_torch_save_file(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "checkpoint")
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "file.pt")
    assert_equal(torch.load(tmp_path / "file.pt", weights_only=False), state_of())


def test_we_load_what_torch_converted_from_a_torch_save_file(tmp_path: Path) -> None:
    torch.save(state_of(), tmp_path / "file.pt")
    torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "checkpoint")
    loaded = emptied(state_of())
    load(loaded, tmp_path / "checkpoint")
    assert_equal(loaded, state_of())


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("saver", [save, stock_save])
def test_chosen_keys_are_loaded_without_a_state_dict(tmp_path: Path, saver: Saver) -> None:
    state = state_of()
    saver(state, tmp_path)
    loaded = _load_state_dict_from_keys(
        {"model", "epoch"}, storage_reader=torch_ckpt.FileSystemReader(tmp_path)
    )
    assert_equal(loaded, {"model": state["model"], "epoch": state["epoch"]})


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_all_keys_are_loaded_with_an_overriding_checkpoint_id(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "there")
    reader = torch_ckpt.FileSystemReader(tmp_path / "elsewhere")
    loaded = _load_state_dict_from_keys(checkpoint_id=tmp_path / "there", storage_reader=reader)
    assert_equal(loaded, state_of())


# --- the arguments of torch's classes ------------------------------------------------------------


def test_the_writer_takes_torchs_arguments_by_position(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path, False, False, 3, 5_000_000, True, False, None)
    assert isinstance(writer, dcp.FileSystemWriter)
    assert not writer.single_file_per_rank
    assert not writer.sync_files
    assert writer.thread_count == 3
    assert writer.per_thread_copy_ahead == 5_000_000
    assert writer.cache_staged_state_dict
    assert not writer.overwrite


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"thread_count": 0}, "thread_count must be at least 1, got 0"),
        ({"thread_count": 2, "separation_hint": "a\\b"}, "separation_hint begins file names"),
        ({"thread_count": 1, "separation_hint": "x"}, "separation_hint needs thread_count >= 2"),
        ({"direct_io": "maybe"}, "direct_io must be True, False or \"auto\", got 'maybe'"),
        ({"max_host_bytes": 100}, "max_host_bytes must be at least 4096, got 100"),
    ],
    ids=str,
)
def test_the_writer_refuses_options_that_make_no_sense(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        torch_ckpt.FileSystemWriter(tmp_path, **options)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_may_be_a_string_or_a_path(tmp_path: Path, kind: type) -> None:
    save({"a": f32(3)}, kind(tmp_path / "new" / "deep"))
    loaded = {"a": torch.zeros(3)}
    load(loaded, kind(tmp_path / "new" / "deep"))
    assert_equal(loaded["a"], f32(3))


@pytest.mark.parametrize("kind", [str, Path])
def test_checkpoint_id_overrides_the_path(tmp_path: Path, kind: type) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path / "first")
    save_with(writer, {"a": f32(3)}, checkpoint_id=kind(tmp_path / "second"))
    assert not (tmp_path / "first").exists()
    reader = torch_ckpt.FileSystemReader(tmp_path / "first")
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=kind(tmp_path / "second"), storage_reader=reader, no_dist=True)
    assert_equal(loaded["a"], f32(3))


def test_one_writer_and_one_reader_serve_many_checkpoints(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    reader = torch_ckpt.FileSystemReader(tmp_path)
    for step in range(4):
        save_with(writer, state_of(step), checkpoint_id=tmp_path / str(step))
    for step in reversed(range(4)):
        loaded = emptied(state_of())
        dcp.load(loaded, checkpoint_id=tmp_path / str(step), storage_reader=reader, no_dist=True)
        assert_equal(loaded, state_of(step))


def test_one_writer_saves_to_one_path_again_and_again(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    for step in range(4):
        save_with(writer, state_of(step))
        loaded = emptied(state_of())
        load(loaded, tmp_path)
        assert_equal(loaded, state_of(step))


def test_the_methods_that_torch_calls_need_no_reset(tmp_path: Path) -> None:
    # As torch's deprecated save_state_dict and other frameworks do.
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"a": f32(3)}, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    loaded = {"a": torch.zeros(3)}
    stock_load(loaded, tmp_path)
    assert_equal(loaded["a"], f32(3))


@pytest.mark.parametrize(
    ("checkpoint_id", "valid"),
    [("new/dir", True), (Path("new"), True), ("/", False), ("s3://bucket/x", False)],
    ids=str,
)
@pytest.mark.parametrize("kind", [torch_ckpt.FileSystemWriter, torch_ckpt.FileSystemReader])
def test_checkpoint_ids_are_valid_where_torchs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, checkpoint_id: Any, valid: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    assert kind.validate_checkpoint_id(checkpoint_id) is valid
    assert kind.__mro__[1].validate_checkpoint_id(checkpoint_id) is valid


def test_a_relative_path_is_taken_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a": f32(3)}, "checkpoint")
    monkeypatch.chdir("/")
    loaded = {"a": torch.zeros(3)}
    load(loaded, tmp_path / "checkpoint")
    assert_equal(loaded["a"], f32(3))


def test_saving_into_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save({"a": f32(3)}, ".")
    loaded = {"a": torch.zeros(3)}
    load(loaded, ".")
    assert_equal(loaded["a"], f32(3))


def test_a_save_without_fsync_is_the_same_checkpoint(tmp_path: Path) -> None:
    save(state_of(), tmp_path / "a", sync_files=True)
    save(state_of(), tmp_path / "b", sync_files=False)
    a, b = data_files(tmp_path / "a"), data_files(tmp_path / "b")
    assert [file.read_bytes() for file in a] == [file.read_bytes() for file in b]


@pytest.mark.parametrize("thread_count", [1, 2, 3, 4])
def test_thread_count_is_the_number_of_files(tmp_path: Path, thread_count: int) -> None:
    save({f"t{i}": f32(100) for i in range(8)}, tmp_path, thread_count=thread_count)
    names = [file.name for file in data_files(tmp_path)]
    assert names == [f"__0_{i}.distcp" for i in range(thread_count)]


def test_files_are_balanced_by_size(tmp_path: Path) -> None:
    sizes = [100, 1, 50, 1, 49, 1, 99, 1]
    state = {f"t{i}": f32(1000 * size) for i, size in enumerate(sizes)}
    save(state, tmp_path, thread_count=2)
    small, large = sorted(file.stat().st_size for file in data_files(tmp_path))
    assert large - small < 20_000


def test_a_separation_hint_gives_its_items_files_of_their_own(tmp_path: Path) -> None:
    state = {
        "optimizer": {f"m{i}": f32(10) for i in range(3)},
        "model": {f"w{i}": f32(10) for i in range(3)},
        "epoch": 1,
    }
    metadata = save(state, tmp_path, thread_count=2, separation_hint="optimizer")
    of_item = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
    optimizer_files = {file for name, file in of_item.items() if name.startswith("optimizer.")}
    other_files = {file for name, file in of_item.items() if not name.startswith("optimizer.")}
    assert not optimizer_files & other_files
    assert all(file.startswith("optimizer__0_") for file in optimizer_files)
    assert all(file.startswith("__0_") for file in other_files)
    for loader in (load, stock_load):
        loaded = emptied(state)
        loader(loaded, tmp_path)
        assert_equal(loaded, state)


def test_a_separation_hint_begins_the_names_of_files_of_one_item_too(tmp_path: Path) -> None:
    state: StateDict = {"optimizer.a": torch.ones(2), "model.a": torch.ones(3), "optimizer.b": 1}
    options = {"single_file_per_rank": False, "separation_hint": "optimizer", "thread_count": 2}
    metadata = save(state, tmp_path, **options)
    files = {name: place_of(metadata, name).relative_path for name in state}
    assert files["model.a"] == "__0_0.distcp"
    assert {files["optimizer.a"], files["optimizer.b"]} == {
        "optimizer__0_1.distcp",
        "optimizer__0_2.distcp",
    }


def test_a_separation_hint_that_nothing_matches_changes_no_content(tmp_path: Path) -> None:
    save(state_of(), tmp_path, thread_count=2, separation_hint="nobody")
    loaded = emptied(state_of())
    stock_load(loaded, tmp_path)
    assert_equal(loaded, state_of())


# --- overwriting ---------------------------------------------------------------------------------


class Refused(Exception):
    """Raised on purpose."""


class _FailingAt(dcp.DefaultSavePlanner):
    """Refuses to give one item's data."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.index.fqn == self.name:
            raise Refused(self.name)
        return super().resolve_data(write_item)


def test_overwriting_warns_of_nothing(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    dcp.save({"a": 1}, storage_writer=writer, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # That there is one process is told at each save.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({"a": 1}, storage_writer=writer, no_dist=True)


def test_overwriting_can_be_forbidden(tmp_path: Path) -> None:
    save(state_of(0), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(dcp.CheckpointException, match="Checkpoint already exists"):
        save(state_of(1), tmp_path, overwrite=False)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("first_saver", [save, stock_save])
def test_overwriting_keeps_the_old_checkpoint_until_the_new_one_is_complete(
    tmp_path: Path, first_saver: Saver
) -> None:
    first_saver(state_of(0), tmp_path)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(torch_ckpt.FileSystemWriter(tmp_path), state_of(1), planner=_FailingAt("epoch"))
    assert sorted(os.listdir(tmp_path)) == before
    loaded = emptied(state_of())
    stock_load(loaded, tmp_path)
    assert_equal(loaded, state_of(0))


class _StopsBeforeCommit(torch_ckpt.FileSystemWriter):
    """Dies when all data is written and nothing committed."""

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        raise Refused("finish")


@pytest.mark.parametrize("first_saver", [save, stock_save])
def test_data_files_of_an_uncommitted_save_do_not_touch_the_old_checkpoint(
    tmp_path: Path, first_saver: Saver
) -> None:
    first_saver(state_of(0), tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(_StopsBeforeCommit(tmp_path), state_of(1))
    for loader in (load, stock_load):
        loaded = emptied(state_of())
        loader(loaded, tmp_path)
        assert_equal(loaded, state_of(0))


@pytest.mark.parametrize("first_saver", [save, stock_save])
def test_the_old_files_are_gone_after_the_new_checkpoint_is_committed(
    tmp_path: Path, first_saver: Saver
) -> None:
    first_saver(state_of(0), tmp_path, single_file_per_rank=False)
    metadata = save(state_of(1), tmp_path, thread_count=2)
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {file.name for file in tmp_path.iterdir()} == used | {".metadata"}


def test_left_overs_of_an_uncommitted_save_are_gone_after_the_next(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(_StopsBeforeCommit(tmp_path, thread_count=4), state_of(1))
    assert data_files(tmp_path)
    save(state_of(2), tmp_path, thread_count=2)
    assert len(data_files(tmp_path)) == 2
    loaded = emptied(state_of())
    stock_load(loaded, tmp_path)
    assert_equal(loaded, state_of(2))


def test_files_that_are_not_ours_survive_overwriting(tmp_path: Path) -> None:
    names = ["notes.txt", "model.distcp", "__0_0.distcp.bak", "tokenizer.json"]
    for name in names:
        (tmp_path / name).write_text("keep")
    save(state_of(0), tmp_path)
    save(state_of(1), tmp_path)
    assert all((tmp_path / name).read_text() == "keep" for name in names)


def test_a_directory_without_a_commit_holds_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(_StopsBeforeCommit(tmp_path), state_of(1))
    with pytest.raises(dcp.CheckpointException, match=NO_CHECKPOINT):
        load(emptied(state_of()), tmp_path)


def test_nothing_temporary_is_left_after_a_save(tmp_path: Path) -> None:
    metadata = save(state_of(), tmp_path)
    used = {info.relative_path for info in metadata.storage_data.values()}
    assert {file.name for file in tmp_path.iterdir()} == used | {".metadata"}


# --- plan caching --------------------------------------------------------------------------------


@pytest.fixture
def _fresh_plan_cache() -> Iterator[None]:
    """torch keeps cached plans in class attributes."""
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
@pytest.mark.parametrize("same_path", [True, False])
def test_saves_with_a_cached_plan_hold_their_own_values(tmp_path: Path, same_path: bool) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    for step in range(3):
        path = tmp_path if same_path else tmp_path / str(step)
        save_with(writer, state_of(step), planner=caching_planner(), checkpoint_id=path)
        for loader in (load, stock_load):
            loaded = emptied(state_of())
            loader(loaded, path)
            assert_equal(loaded, state_of(step))


@pytest.mark.usefixtures("_fresh_plan_cache")
def test_a_cached_plan_is_replaced_when_the_state_changes(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    states = [state_of(0), state_of(1) | {"more": f32(3)}, state_of(2) | {"more": f32(3)}]
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
    metadata = save_with(writer, state_of(), planner=planner)
    assert sorted(planner.resolved) == sorted(metadata.state_dict_metadata)


class _Halving(dcp.DefaultSavePlanner):
    """Changes what is stored, through the hook that torch documents for it."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        object = super().transform_object(write_item, object)
        return object / 2 if isinstance(object, torch.Tensor) else object


def test_what_a_save_planner_makes_of_a_tensor_is_stored(tmp_path: Path) -> None:
    save_with(torch_ckpt.FileSystemWriter(tmp_path), {"a": f32(5)}, planner=_Halving())
    loaded = {"a": torch.zeros(5)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["a"], f32(5) / 2)


class _Renaming(dcp.DefaultSavePlanner):
    def lookup_object(self, index: Any) -> Any:
        return self.state_dict["other"]


def test_what_a_save_planner_looks_up_is_stored(tmp_path: Path) -> None:
    state = {"a": f32(5), "other": f32(5, seed=1)}
    save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=_Renaming())
    loaded = {"a": torch.zeros(5)}
    load(loaded, tmp_path)
    assert torch.equal(loaded["a"], f32(5, seed=1))


@pytest.mark.parametrize("flatten", [True, False])
def test_a_state_dict_may_be_kept_unflattened(tmp_path: Path, flatten: bool) -> None:
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
    # Unflattened, torch's planner keeps loaded objects to itself.
    assert_equal(loaded, by_stock)


# --- through Python: extensions and other file systems -------------------------------------------


class _Flipped(io.RawIOBase):
    """Inverts every byte on its way through."""

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
def test_our_own_load_reads_what_extensions_have_stored(
    tmp_path: Path, free_before_read: bool
) -> None:
    state = {"a": f32(5), "b": f32(3), "c": 7}
    save(state, tmp_path, _extensions=[Flip()])
    loaded = emptied(state)
    reader = torch_ckpt.FileSystemReader(tmp_path, _extension_registry=flip_registry())
    torch_ckpt.load(loaded, storage_reader=reader, free_before_read=free_before_read, no_dist=True)
    assert_equal(loaded, state)


def test_what_extensions_have_stored_is_not_read_through_a_link(tmp_path: Path) -> None:
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
def test_stream_extensions_transform_what_is_stored(tmp_path: Path, thread_count: int) -> None:
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
    save(state_of(0), tmp_path)
    with pytest.raises(dcp.CheckpointException, match="Refused"):
        save_with(_StopsBeforeCommit(tmp_path, _extensions=[Flip()]), state_of(1))
    loaded = emptied(state_of())
    load(loaded, tmp_path)
    assert_equal(loaded, state_of(0))


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
    save_with(writer(path, thread_count=thread_count, sync_files=False), state_of())
    loaded = emptied(state_of())
    dcp.load(loaded, storage_reader=reader(path), no_dist=True)
    assert_equal(loaded, state_of())
    loaded = emptied(state_of())
    assert torch_ckpt.load(loaded, storage_reader=reader(path), no_dist=True) is None
    assert_equal(loaded, state_of())
    for option in ({"strict": False}, {"names": ["a"]}, {"free_before_read": True}):
        with pytest.raises(ValueError, match="a file system that is not local"):
            torch_ckpt.load(loaded, storage_reader=reader(path), no_dist=True, **option)


def test_a_failing_file_system_of_another_kind_fails_the_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer, _reader = in_memory_classes()
    from fsspec.implementations.memory import MemoryFile

    def full(self: Any, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MemoryFile, "write", full)
    with pytest.raises(dcp.CheckpointException, match="No space left"):
        save_with(writer("memory://full", thread_count=4, sync_files=False), state_of())


def test_torchs_own_classes_stay_as_they_are() -> None:
    from torch.distributed.checkpoint import filesystem, hf_storage

    assert dcp.FileSystemWriter is filesystem.FileSystemWriter
    assert dcp.FileSystemWriter.__module__ == filesystem.__name__
    assert not issubclass(dcp.FileSystemWriter, torch_ckpt.FileSystemWriter)
    assert issubclass(hf_storage.HuggingFaceStorageWriter, filesystem.FileSystemWriter)
    assert not issubclass(hf_storage.HuggingFaceStorageWriter, torch_ckpt.FileSystemWriter)


def test_hugging_face_storage_works_beside_ours(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = {"a": f32(5, 3), "b": f32(2)}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), fqn_to_index_mapping={"a": 1, "b": 1})
    save_with(writer, state)
    loaded = {name: zeros(tuple(t.shape), t.dtype) for name, t in state.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path))
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    assert_equal(loaded, state)


@pytest.mark.parametrize("fails", [False, True])
def test_pythons_garbage_collector_is_left_as_it_was(tmp_path: Path, fails: bool) -> None:
    # What failed in earlier tests may still keep the collector relaxed.
    gc.collect()
    before = gc.isenabled(), gc.get_threshold()
    state = state_of()
    planner = _FailingAt("epoch" if fails else "no such name")
    with contextlib.suppress(dcp.CheckpointException):
        save_with(torch_ckpt.FileSystemWriter(tmp_path), state, planner=planner)
    with contextlib.suppress(dcp.CheckpointException):
        load({"epoch": 0, ("missing" if fails else "name"): 0}, tmp_path)
    gc.collect()
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_failed_loads_do_not_keep_the_collector_from_what_they_leave(tmp_path: Path) -> None:
    gc.collect()
    before = gc.get_threshold()
    save(state_of(), tmp_path)
    for _ in range(2):
        with contextlib.suppress(dcp.CheckpointException):
            load({"epoch": 0, "missing": 0}, tmp_path)
    # The second found that the first had failed.
    assert gc.get_threshold() == before


def test_the_collectors_next_run_ends_what_a_failed_load_has_left(tmp_path: Path) -> None:
    gc.collect()
    before = gc.get_threshold()
    save(state_of(), tmp_path)
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
