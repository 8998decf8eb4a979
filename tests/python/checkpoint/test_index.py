"""The index of a checkpoint has the contents of its metadata."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.metadata import read_metadata
from tests.support import DTYPES, save, stock_save, zeros
from torch_ckpt import Corrupt, _core
from torch_ckpt.checkpoint.index import decode_index
from torch_ckpt.checkpoint.metadata import checksum_tables, encode_metadata, index_of

STATE: dict[str, Any] = {
    **{str(dtype): zeros((2, 3), dtype) for dtype in DTYPES},
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 5),
    "nested": {"list": [torch.ones(2), {"deep": torch.ones(1)}], "text": "a"},
    "step": 3,
}


def shard_of(stored: ChunkStorageMetadata | None, info: _StorageInfo | None) -> _core.StoredShard:
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
    assert index.strays() == []
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


def test_a_record_without_a_description_is_listed_as_stray() -> None:
    info = _StorageInfo("__0_0.distcp", 0, 900)
    index = index_of(Metadata({}, {}, {MetadataIndex("lost"): info}), "here")
    assert index.strays() == [("lost", shard_of(None, info))]


@pytest.mark.parametrize(
    ("rows", "gap"),
    [((0, 2, 3), None), ((0, 3), None), ((0, 1, 2), [2, 0]), ((), [0, 0])],
)
def test_a_tensor_that_its_shards_do_not_cover_is_named(
    rows: tuple[int, ...], gap: list[int] | None
) -> None:
    chunks = [
        ChunkStorageMetadata(torch.Size([a, 0]), torch.Size([b - a, 4])) for a, b in pairwise(rows)
    ]
    properties = TensorProperties(dtype=torch.float32)
    stored = TensorStorageMetadata(properties, torch.Size([3, 4]), chunks)
    index = index_of(Metadata({"w": stored, "step": BytesStorageMetadata()}), "here")
    assert index.uncovered() == ({} if gap is None else {"w": gap})


def test_a_new_name_replaces_the_old_one(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path)
    index = decode_index((tmp_path / ".metadata").read_bytes(), "here")
    renamed = index.renamed(["c", "a"])
    assert renamed.names() == ["c", "a"]
    assert renamed.tensor("a") == ("float32", (3,))
    assert "b" not in renamed
    assert index.names() == ["a", "b"]


def test_an_invalid_value_of_a_trusted_writer_is_refused() -> None:
    class Other:
        pass

    metadata = Metadata({"a": Other()})  # type: ignore[dict-item]
    with pytest.raises(Corrupt, match=r"^here: the metadata contains unsupported values"):
        index_of(metadata, "here")
