"""Round trips with current and older stock torch, and with its tools."""

from __future__ import annotations

import copyreg
import io
import itertools
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.utils.serialization import config

import torch_ckpt
from tests.support import (
    StateDict,
    assert_equal,
    data_files,
    emptied,
    f32,
    load,
    nested_state,
    pairwise,
    place_of,
    save,
    save_with,
    stock_load,
    stock_save,
)

Saver = Callable[..., Metadata]
Loader = Callable[..., None]


PAIRS: list[tuple[Saver, Loader]] = [(save, stock_load), (stock_save, load), (save, load)]


@pytest.mark.parametrize(
    ("pair", "thread_count", "single_file_per_rank"),
    pairwise(itertools.product(PAIRS, [1, 2, 3, 4], [True, False])),
)
def test_each_of_ours_and_stock_loads_the_saves_of_the_other(
    tmp_path: Path, pair: tuple[Saver, Loader], thread_count: int, single_file_per_rank: bool
) -> None:
    saver, loader = pair
    state = nested_state()
    options = {"thread_count": thread_count, "single_file_per_rank": single_file_per_rank}
    saver(state, tmp_path, **options)
    loaded = emptied(state)
    loader(loaded, tmp_path)
    assert_equal(loaded, state)


class Counter:
    """Stateful that torch saves and loads through its two methods."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.history = torch.full((3,), float(value))

    def state_dict(self) -> StateDict:
        return {"value": self.value, "history": self.history}

    def load_state_dict(self, state: StateDict) -> None:
        self.value, self.history = state["value"], state["history"]


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_stateful_objects_make_the_round_trip(tmp_path: Path, saver: Saver, loader: Loader) -> None:
    model, other = torch.nn.BatchNorm1d(8), torch.nn.BatchNorm1d(8)
    model(torch.randn(5, 8))
    saver({"counter": Counter(7), "model": model, "weight": f32(2)}, tmp_path)
    counter = Counter(0)
    loader({"counter": counter, "model": other, "weight": f32(2)}, tmp_path)
    assert counter.value == 7
    assert torch.equal(counter.history, torch.full((3,), 7.0))
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


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
    """Pickles the metadata again, with other versions of some of its classes."""
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
    """Makes a record like torch 1.6: no byteorder, .format_version or .storage_alignment."""
    entries = entries_of(record)
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for name in ("data.pkl", "data/0"):
        writer.write_record(name, entries[name], len(entries[name]))
    writer.write_end_of_file()
    return stream.getvalue()


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return stream.getvalue()


def in_folder(name: str, entries: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{name}/{entry}": data for entry, data in entries.items()}


def written_by_python(record: bytes) -> bytes:
    """Makes a zip of another writer: sizes in local headers, no alignment, no zip64 records."""
    return zipped(in_folder("other", entries_of(record)))


def with_more_entries(record: bytes) -> bytes:
    entries = {".first": b"x", **entries_of(record), ".last": b"y" * 1000}
    return zipped(in_folder("archive", entries))


def in_other_order(record: bytes) -> bytes:
    entries = entries_of(record)
    # torch.load requires a local header first, of any entry.
    order = ("version", "data/0", "byteorder", "data.pkl")
    return zipped(in_folder("archive", {name: entries[name] for name in order}))


def of_a_big_endian_machine(record: bytes) -> bytes:
    entries = entries_of(record)
    payload = entries["data/0"]
    swapped = b"".join(payload[i : i + 4][::-1] for i in range(0, len(payload), 4))
    return zipped(in_folder("archive", entries | {"byteorder": b"big", "data/0": swapped}))


def compressed(record: bytes) -> bytes:
    return zipped(in_folder("archive", entries_of(record)), zipfile.ZIP_DEFLATED)


@pytest.mark.parametrize(
    "change",
    [
        *(written_by_old_torch, written_by_python, with_more_entries, in_other_order),
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
    for loader in (stock_load, load):
        loaded = emptied(state)
        loader(loaded, tmp_path)
        assert_equal(loaded, state)


def test_a_compressed_record_is_refused_by_name(tmp_path: Path) -> None:
    save({"weight": f32(40, 30)}, tmp_path)
    rewrite_record(tmp_path, "weight", compressed)
    with pytest.raises(dcp.CheckpointException, match=r"weight: .*is compressed"):
        load({"weight": torch.zeros(40, 30)}, tmp_path)


@pytest.mark.parametrize(
    "option",
    [("compute_crc32", False), ("storage_alignment", 64), ("storage_alignment", 4096)],
    ids=str,
)
def test_records_with_other_options_are_loaded(tmp_path: Path, option: tuple[str, Any]) -> None:
    name, value = option
    state = nested_state() | {"large": f32(700, 700)}
    with config.patch({f"save.{name}": value}):
        stock_save(state, tmp_path)
    with zipfile.ZipFile(data_files(tmp_path)[0]) as archive:
        assert (archive.getinfo("archive/data/0").CRC == 0) is (name == "compute_crc32")
    loaded = emptied(state)
    load(loaded, tmp_path)
    assert_equal(loaded, state)


def properties_of_five_fields(properties: TensorProperties) -> Any:
    return copyreg.__newobj__, (TensorProperties,), properties.__getstate__()[:5]


def info_of_three_fields(info: _StorageInfo) -> Any:
    fields = ("relative_path", "offset", "length")
    return copyreg.__newobj__, (_StorageInfo,), {name: getattr(info, name) for name in fields}


def metadata_without(attribute: str) -> Callable[[Metadata], Any]:
    def reduced(metadata: Metadata) -> Any:
        state = {name: value for name, value in vars(metadata).items() if name != attribute}
        return copyreg.__newobj__, (Metadata,), state

    return reduced


@pytest.mark.parametrize(
    ("kind", "reduced"),
    [
        (TensorProperties, properties_of_five_fields),
        (_StorageInfo, info_of_three_fields),
        (Metadata, metadata_without("storage_meta")),
        (Metadata, metadata_without("version")),
    ],
    ids=["properties of 5 fields", "locations of 3 fields", "no storage_meta", "no version"],
)
def test_metadata_from_before_a_field_was_added_is_read(
    tmp_path: Path, kind: type, reduced: Callable[[Any], Any]
) -> None:
    stock_save(nested_state(), tmp_path)
    rewrite_metadata(tmp_path, {kind: reduced})
    loaded = emptied(nested_state())
    load(loaded, tmp_path)
    assert_equal(loaded, nested_state())


# --- the metadata that we write ------------------------------------------------------------------


class _Reader(pickle.Unpickler):
    """Records the names of all that a pickle imports, and replaces some of it."""

    def __init__(self, path: Path, **replaced: Any) -> None:
        super().__init__(io.BytesIO((path / ".metadata").read_bytes()))
        self.names: set[str] = set()
        self.replaced = replaced

    def find_class(self, module_name: str, global_name: str) -> Any:
        self.names.add(f"{module_name}.{global_name}")
        found = super().find_class(module_name, global_name)
        return self.replaced.get(global_name, found)


def test_the_metadata_names_only_stock_classes(tmp_path: Path) -> None:
    save(nested_state(), tmp_path)
    reader = _Reader(tmp_path)
    reader.load()
    assert f"{Metadata.__module__}.Metadata" in reader.names
    assert not {n for n in reader.names if not n.startswith(("torch.", "collections."))}


class _OldProperties:
    """Unpacks five fields, like torch before 2.15."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state


def test_torch_that_has_five_tensor_properties_reads_the_metadata(tmp_path: Path) -> None:
    save({"weight": f32(3, 2).requires_grad_()}, tmp_path)
    metadata = _Reader(tmp_path, TensorProperties=_OldProperties).load()
    properties = metadata.state_dict_metadata["weight"].properties
    assert properties.dtype == torch.float32
    assert properties.requires_grad


def comparable(metadata: Metadata) -> dict[str, Any]:
    """Selects what must be equal in the metadata of two saves of one state."""
    stored = metadata.state_dict_metadata
    return {
        "tensors": {
            name: (tensor.size, tensor.chunks, tensor.properties.__getstate__()[:5])
            for name, tensor in stored.items()
            if isinstance(tensor, TensorStorageMetadata)
        },
        "bytes": {name for name in stored if isinstance(stored[name], BytesStorageMetadata)},
        "order": list(stored),
        "paths": metadata.planner_data,
        "storage": metadata.storage_data,
        "version": metadata.version,
        "id": str(metadata.storage_meta.checkpoint_id).rsplit("/", 1)[0],
    }


def test_the_metadata_equals_stock_metadata_and_the_result_of_save(tmp_path: Path) -> None:
    returned = save(nested_state(), tmp_path / "ours", thread_count=1)
    stock_save(nested_state(), tmp_path / "stock", thread_count=1)
    ours = pickle.loads((tmp_path / "ours" / ".metadata").read_bytes())
    stock = pickle.loads((tmp_path / "stock" / ".metadata").read_bytes())
    read = torch_ckpt.FileSystemReader(tmp_path / "ours").read_metadata()
    assert comparable(ours) == comparable(stock) == comparable(returned) == comparable(read)


def test_the_metadata_identifies_the_save_and_the_load(tmp_path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(tmp_path)
    save_with(writer, {"a": 1})
    reader = torch_ckpt.FileSystemReader(tmp_path)
    meta = reader.read_metadata().storage_meta
    assert meta is not None
    assert meta.save_id == writer.save_id
    assert meta.load_id == reader.load_id
    assert meta.checkpoint_id == str(tmp_path)


# --- torch's own tools ---------------------------------------------------------------------------


def test_torch_converts_our_checkpoint_and_we_load_what_torch_converted(tmp_path: Path) -> None:
    save(nested_state(), tmp_path / "ours")
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "file.pt")
    assert_equal(torch.load(tmp_path / "file.pt", weights_only=False), nested_state())
    torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "converted")
    loaded = emptied(nested_state())
    load(loaded, tmp_path / "converted")
    assert_equal(loaded, nested_state())


@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
@pytest.mark.parametrize("saver", [save, stock_save])
def test_keys_are_loaded_without_a_state_dict(tmp_path: Path, saver: Saver) -> None:
    state = nested_state()
    saver(state, tmp_path / "there")
    reader = torch_ckpt.FileSystemReader(tmp_path / "there")
    loaded = _load_state_dict_from_keys({"model", "epoch"}, storage_reader=reader)
    assert_equal(loaded, {"model": state["model"], "epoch": state["epoch"]})
    reader = torch_ckpt.FileSystemReader(tmp_path / "elsewhere")
    loaded = _load_state_dict_from_keys(checkpoint_id=tmp_path / "there", storage_reader=reader)
    assert_equal(loaded, state)
