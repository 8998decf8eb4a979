"""Valid metadata; tests/attacks has the invalid."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

import torch_ckpt
from tests.metadata import read_metadata
from tests.support import save
from torch_ckpt import Corrupt
from torch_ckpt.checkpoint.files import lies_beneath
from torch_ckpt.checkpoint.metadata import index_of

STATE: dict[str, Any] = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "empty": torch.empty(0, 5),
    "scalar": torch.tensor(3),
    "nested": {"list": [torch.ones(2), torch.ones(3)], "text": "a"},
    "step": 3,
}


@pytest.fixture
def metadata(tmp_path: Path) -> Metadata:
    save(STATE, tmp_path)
    return read_metadata(tmp_path)


def test_unused_attributes_are_ignored(metadata: Metadata) -> None:
    # Megatron stores plans in them, and newer versions of torch may have more fields.
    metadata.all_local_plans = [1, 2]  # type: ignore[attr-defined]
    metadata.version = "9.0"
    for info in metadata.storage_data.values():
        info.checksum = "unknown"
    index_of(metadata, "here")


def test_locations_without_a_description_are_ignored(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("other")] = _StorageInfo("other.distcp", 0, 10)
    index_of(metadata, "here")


def test_a_description_without_a_location_passes(metadata: Metadata) -> None:
    # A load of an omitted item is refused by name; the others can be loaded.
    metadata.state_dict_metadata["lost"] = BytesStorageMetadata()
    index_of(metadata, "here")


def test_properties_of_older_torch_pass(metadata: Metadata) -> None:
    stored = metadata.state_dict_metadata["weight"]
    stored.properties = OldProperties(dtype=torch.float32)
    index_of(metadata, "here")


def test_no_storage_data_passes(metadata: Metadata) -> None:
    metadata.storage_data = None
    index_of(metadata, "here")


def test_empty_shards_may_be_many(metadata: Metadata) -> None:
    # Ranks without rows of a tensor.
    stored = metadata.state_dict_metadata["weight"]
    nothing = ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([0, 4]))
    stored.chunks = [*stored.chunks, nothing, nothing]
    index_of(metadata, "here")


@pytest.mark.parametrize("kept", [{"weight": ["of", "its", "own"]}, [], 3, "a"], ids=str)
def test_a_planner_may_store_any_values(metadata: Metadata, kept: Any) -> None:
    metadata.planner_data = kept
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


@pytest.mark.parametrize("part", ["properties", "size", "chunks"])
def test_an_incomplete_description_is_refused(metadata: Metadata, part: str) -> None:
    stored = copy.copy(metadata.state_dict_metadata["weight"])
    delattr(stored, part)
    metadata.state_dict_metadata["weight"] = stored
    with pytest.raises(Corrupt, match=r"^weight: "):
        index_of(metadata, "here")


@pytest.mark.parametrize("part", ["offsets", "sizes"])
def test_an_incomplete_shard_is_refused(metadata: Metadata, part: str) -> None:
    stored = metadata.state_dict_metadata["weight"]
    chunk = copy.copy(stored.chunks[0])
    delattr(chunk, part)
    stored = dataclasses.replace(stored, chunks=[chunk])
    metadata.state_dict_metadata["weight"] = stored
    with pytest.raises(Corrupt, match=r"^weight: "):
        index_of(metadata, "here")


def test_a_trusted_writers_metadata_is_checked(tmp_path: Path) -> None:
    # The disk is not trusted.
    metadata = save(STATE, tmp_path)
    next(iter(metadata.storage_data.values())).offset = -1
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(Corrupt):
        torch_ckpt.FileSystemReader(tmp_path, allow_pickle=True).read_metadata()


@pytest.mark.parametrize("file", ["a", "a.b", "a/b", "./a", "a//b", "..a", "a..", ".a", "é" * 2000])
def test_clean_paths_are_beneath_the_directory(file: str) -> None:
    assert lies_beneath(file)


@pytest.mark.parametrize(
    "file", ["", ".", "..", "/", "/a", "../a", "a/..", "a/../b", "a\0", "a\\b", "a" * 5000, 3, None]
)
def test_other_paths_are_not_beneath_the_directory(file: Any) -> None:
    assert not lies_beneath(file)


def test_two_tensors_may_not_share_their_list_of_shards(metadata: Metadata) -> None:
    # Many names with one long list would make little metadata expensive.
    size, half = torch.Size([4]), torch.Size([2])
    shards = [ChunkStorageMetadata(torch.Size([begin]), half) for begin in (0, 2)]
    for name in ("nested.list.0", "nested.list.1"):
        metadata.state_dict_metadata[name].size = size
        metadata.state_dict_metadata[name].chunks = list(shards)
    index_of(metadata, "here")
    for name in ("nested.list.0", "nested.list.1"):
        metadata.state_dict_metadata[name].chunks = shards
    with pytest.raises(
        Corrupt,
        match=r"nested.list.1: .* list of shards in the metadata with another tensor \(here\)",
    ):
        index_of(metadata, "here")


def test_the_number_of_transforms_of_a_record_is_limited(metadata: Metadata) -> None:
    info = next(iter(metadata.storage_data.values()))
    info.transform_descriptors = ["zlib"] * 64
    index_of(metadata, "here")
    info.transform_descriptors = ["zlib"] * 65
    with pytest.raises(Corrupt, match="65 transforms; the maximum is 64"):
        index_of(metadata, "here")


def test_the_reason_is_in_the_error_of_dcp_load(tmp_path: Path) -> None:
    # torch tries another file after any failure, and up to 2.14 drops the reason.
    metadata = save({"step": 3}, tmp_path)
    next(iter(metadata.storage_data.values())).offset = -1
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    reader = torch_ckpt.FileSystemReader(tmp_path)
    with pytest.raises(torch.distributed.checkpoint.CheckpointException) as error:
        torch.distributed.checkpoint.load({"step": 0}, storage_reader=reader, no_dist=True)
    ((cause, _trace),) = error.value.failures.values()
    assert isinstance(cause, Corrupt)


def test_a_reader_that_has_refused_one_checkpoint_reads_another(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(b"damaged")
    reader = torch_ckpt.FileSystemReader(tmp_path / "bad")
    with pytest.raises(Corrupt):
        reader.read_metadata()
    state = {"step": 0}
    torch.distributed.checkpoint.load(
        state, storage_reader=reader, checkpoint_id=tmp_path / "good", no_dist=True
    )
    assert state == {"step": 3}
