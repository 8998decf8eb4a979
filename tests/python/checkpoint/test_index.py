"""The index of a checkpoint has the contents of valid metadata; tests/attacks has the invalid."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_ckpt
from tests.metadata import read_metadata
from tests.support import DTYPES, cause_of, load, save, stock_save, zeros
from torch_ckpt import Corrupt, _core
from torch_ckpt.checkpoint.files import is_inside_checkpoint
from torch_ckpt.checkpoint.index import StoredShard, decode_index
from torch_ckpt.checkpoint.metadata import checksum_tables, encode_metadata, index_of

STATE: dict[str, Any] = {
    **{str(dtype): zeros((2, 3), dtype) for dtype in DTYPES},
    "weight": torch.arange(12.0).reshape(3, 4),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 5),
    "nested": {"list": [torch.ones(2), torch.ones(3), {"deep": torch.ones(1)}], "text": "a"},
    "step": 3,
}


def shard_of(stored: ChunkStorageMetadata | None, info: _StorageInfo | None) -> StoredShard:
    """Returns the index's description of a shard, or of an object for None."""
    box = (tuple(stored.offsets), tuple(stored.sizes)) if stored else ((), ())
    place = (info.relative_path, info.offset, info.length) if info else (None, 0, 0)
    return (*box, *place, False)


def assert_equals_metadata(index: _core.CheckpointIndex, metadata: Metadata) -> None:
    assert index.names() == list(metadata.state_dict_metadata)
    assert index.tables() == checksum_tables(metadata)
    for name, stored in metadata.state_dict_metadata.items():
        assert name in index
        if isinstance(stored, TensorStorageMetadata):
            dtype = str(stored.properties.dtype).removeprefix("torch.")
            assert index.tensor(name) == (dtype, tuple(stored.size))
            assert index.shards(name) == [
                shard_of(chunk, metadata.storage_data.get(MetadataIndex(name, chunk.offsets)))
                for chunk in stored.chunks
            ]
        else:
            assert index.tensor(name) is None
            info = metadata.storage_data.get(MetadataIndex(name))
            assert index.shards(name) == [shard_of(None, info)]
    assert index.undescribed_records() == []
    assert set(index.files()) == {i.relative_path for i in metadata.storage_data.values()}


@pytest.mark.parametrize("saver", [save, stock_save])
def test_the_index_equals_the_metadata_of_a_save(tmp_path: Path, saver: Any) -> None:
    saver(STATE, tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    assert_equals_metadata(decode_index(data, "here"), read_metadata(tmp_path))


def random_metadata(choice: random.Random) -> Metadata:
    """Makes metadata of tensors in rows, and of objects, over several files."""
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number in range(choice.randint(0, 30)):
        name = choice.choice(["é.", "a", "layers.", ""]) + str(number)
        file, begin = f"__{choice.randint(0, 3)}_0.distcp", number * 10**6
        if choice.random() < 0.3:
            stored[name] = BytesStorageMetadata()
            if choice.random() < 0.9:
                places[MetadataIndex(name)] = _StorageInfo(file, begin, choice.randint(0, 500))
            continue
        rows, columns = choice.randint(0, 40), choice.randint(1, 9)
        cuts = sorted({0, rows, *(choice.randint(0, rows) for _ in range(choice.randint(0, 9)))})
        chunks = [
            ChunkStorageMetadata(torch.Size([a, 0]), torch.Size([b - a, columns]))
            for a, b in pairwise(cuts)
        ]
        properties = TensorProperties(dtype=choice.choice([torch.float32, torch.int8]))
        stored[name] = TensorStorageMetadata(properties, torch.Size([rows, columns]), chunks)
        for place, chunk in enumerate(chunks):
            where = _StorageInfo(file, begin + place * 1000, 900)
            places[MetadataIndex(name, chunk.offsets, place)] = where
    order = list(places)
    choice.shuffle(order)
    return Metadata(stored, {}, {index: places[index] for index in order})


@pytest.mark.parametrize("seed", range(40))
def test_the_index_equals_random_metadata(seed: int) -> None:
    metadata = random_metadata(random.Random(seed))
    index = decode_index(encode_metadata(metadata), "here")
    assert_equals_metadata(index, metadata)
    assert_equals_metadata(index_of(metadata, "here"), metadata)


def test_a_record_without_a_description_is_listed() -> None:
    info = _StorageInfo("__0_0.distcp", 0, 900)
    index = index_of(Metadata({}, {}, {MetadataIndex("lost"): info}), "here")
    assert index.undescribed_records() == [("lost", shard_of(None, info))]


def test_an_invalid_value_of_a_trusted_writer_is_refused() -> None:
    class Other:
        pass

    metadata = Metadata({"a": Other()})  # type: ignore[dict-item]
    with pytest.raises(Corrupt, match=r"^here: the metadata contains unsupported values"):
        index_of(metadata, "here")


# --- accepted and refused ------------------------------------------------------------------------


@pytest.fixture
def metadata(tmp_path: Path) -> Metadata:
    save(STATE, tmp_path)
    return read_metadata(tmp_path)


def with_unused_attributes(metadata: Metadata) -> None:
    # Megatron stores plans in them, and newer versions of torch may have more fields.
    metadata.all_local_plans = [1, 2]  # type: ignore[attr-defined]
    metadata.version = "9.0"
    for info in metadata.storage_data.values():
        info.checksum = "unknown"


def with_a_location_of_no_item(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("other")] = _StorageInfo("other.distcp", 0, 10)


def with_an_item_without_a_location(metadata: Metadata) -> None:
    # A load of an omitted item is refused by name; the others can be loaded.
    metadata.state_dict_metadata["lost"] = BytesStorageMetadata()


def with_properties_of_older_torch(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].properties = OldProperties(dtype=torch.float32)


def without_storage_data(metadata: Metadata) -> None:
    metadata.storage_data = None


def with_many_empty_shards(metadata: Metadata) -> None:
    # Ranks without rows of a tensor.
    nothing = ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([0, 4]))
    metadata.state_dict_metadata["weight"].chunks += [nothing, nothing]


def with_planner_data(value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(metadata, "planner_data", value)


def with_many_transforms(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zlib"] * 64


@pytest.mark.parametrize(
    "change",
    [
        *(with_unused_attributes, with_a_location_of_no_item, with_an_item_without_a_location),
        *(with_properties_of_older_torch, without_storage_data, with_many_empty_shards),
        *map(with_planner_data, ({"weight": ["of", "its", "own"]}, [], 3, "a")),
        with_many_transforms,
    ],
)
def test_valid_metadata_passes(metadata: Metadata, change: Callable[[Metadata], None]) -> None:
    change(metadata)
    index_of(metadata, "here")


def test_errors_name_the_entry_and_the_file(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"] = 3  # type: ignore[assignment]
    with pytest.raises(
        Corrupt, match=r"^weight: .* describe a tensor or an object, but is an int \(here\)$"
    ):
        index_of(metadata, "here")


WRONG: dict[str, Any] = {
    "state_dict_metadata": [None, [], "a", {1: BytesStorageMetadata()}],
    "storage_data": [[], 3, {"weight": 1}, {MetadataIndex("a"): None}],
    "storage_meta": [3, "a", {}],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f in WRONG for v in WRONG[f]], ids=str)
def test_a_field_of_another_type_is_refused(metadata: Metadata, field: str, value: Any) -> None:
    setattr(metadata, field, value)
    with pytest.raises(Corrupt):
        index_of(metadata, "here")


@pytest.mark.parametrize("part", ["properties", "size", "chunks", "offsets", "sizes"])
def test_an_incomplete_description_is_refused(metadata: Metadata, part: str) -> None:
    stored = copy.deepcopy(metadata.state_dict_metadata["weight"])
    delattr(stored.chunks[0] if part in ("offsets", "sizes") else stored, part)
    metadata.state_dict_metadata["weight"] = stored
    with pytest.raises(Corrupt, match=r"^weight: "):
        index_of(metadata, "here")


def test_metadata_of_a_trusted_writer_is_checked_by_dcp_load_too(tmp_path: Path) -> None:
    # The disk is not trusted. torch tries another file after any failure, and up to 2.14 drops the
    # reason.
    metadata = save({"step": 3}, tmp_path)
    next(iter(metadata.storage_data.values())).offset = -1
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException) as error:
        load({"step": 0}, tmp_path, allow_pickle=True)
    assert isinstance(cause_of(error.value), Corrupt)


CLEAN = ["a", "a.b", "a/b", "./a", "a//b", "..a", "a..", ".a", "é" * 2000]
OTHERS = ["", ".", "..", "/", "/a", "../a", "a/..", "a/../b", "a\0", "a\\b", "a" * 5000, 3, None]


@pytest.mark.parametrize("file", CLEAN + OTHERS)
def test_only_clean_paths_are_beneath_the_directory(file: Any) -> None:
    assert is_inside_checkpoint(file) is (file in CLEAN)


def test_two_tensors_may_not_share_their_list_of_shards(metadata: Metadata) -> None:
    # Many names with one long list would make little metadata expensive.
    half = torch.Size([2])
    shards = [ChunkStorageMetadata(torch.Size([begin]), half) for begin in (0, 2)]
    stored = [metadata.state_dict_metadata[f"nested.list.{number}"] for number in (0, 1)]
    for tensor in stored:
        tensor.size, tensor.chunks = torch.Size([4]), list(shards)
    index_of(metadata, "here")
    for tensor in stored:
        tensor.chunks = shards
    message = r"nested.list.1: .* list of shards in the metadata with another tensor \(here\)"
    with pytest.raises(Corrupt, match=message):
        index_of(metadata, "here")


def test_the_number_of_transforms_of_a_record_is_limited(metadata: Metadata) -> None:
    with_many_transforms(metadata)
    next(iter(metadata.storage_data.values())).transform_descriptors += ["zlib"]
    with pytest.raises(Corrupt, match="65 transforms; the maximum is 64"):
        index_of(metadata, "here")


def test_a_reader_that_has_refused_one_checkpoint_reads_another(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(b"damaged")
    reader = torch_ckpt.FileSystemReader(tmp_path / "bad")
    with pytest.raises(Corrupt):
        reader.read_metadata()
    state = {"step": 0}
    dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / "good", no_dist=True)
    assert state == {"step": 3}
