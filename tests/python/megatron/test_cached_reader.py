"""The reader that caches decoded metadata, as long as the file does not change."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests import async_saves
from tests.fault_hooks import at_fault_points
from tests.support import (
    NO_CHECKPOINT,
    assert_equal,
    emptied,
    flip_bit,
    load,
    open_descriptors,
    save,
)
from torch_ckpt import Corrupt
from torch_ckpt.megatron import CachedMetadataFileSystemReader

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")


@pytest.fixture(autouse=True)
def decoded() -> Iterator[list[str]]:
    """Paths of the metadata files decoded during a test. The cache is empty before and after."""
    files: list[str] = []

    def note(operation: str, path: str) -> None:
        if operation == "decode metadata":
            files.append(path)

    CachedMetadataFileSystemReader.clear_metadata_cache()
    with at_fault_points(note):
        yield files
    CachedMetadataFileSystemReader.clear_metadata_cache()


def state(seed: int = 0) -> Any:
    return async_saves.small_state(seed) | {"name": f"seed {seed}"}


def checkpoint(path: Path, seed: int = 0) -> Path:
    save(state(seed), path)
    return path


def load_cached(path: str | Path, **options: Any) -> Any:
    loaded = emptied(state())
    dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(path, **options), no_dist=True)
    return loaded


def test_metadata_is_decoded_once_for_all_readers_and_paths_of_a_directory(
    tmp_path: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    decoded.clear()
    for name in ("c", f"{tmp_path}/c", tmp_path / "c", "./c/"):
        assert_equal(load_cached(name), state())
    assert decoded == [str(tmp_path / "c" / ".metadata")]


def test_a_replaced_deleted_or_damaged_checkpoint_is_not_read_from_the_cache(
    tmp_path: Path, decoded: list[str]
) -> None:
    path = checkpoint(tmp_path / "c")
    load_cached(path)
    checkpoint(path, seed=1)
    decoded.clear()
    for _ in range(2):
        assert_equal(load_cached(path), state(1))
    assert len(decoded) == 1
    flip_bit(path / ".metadata", byte=40, bit=3)
    with pytest.raises(Corrupt):
        CachedMetadataFileSystemReader(path).read_metadata()
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointException, match=NO_CHECKPOINT):
        load_cached(path)


def test_the_last_two_checkpoints_are_cached(tmp_path: Path, decoded: list[str]) -> None:
    paths = [checkpoint(tmp_path / name, seed) for seed, name in enumerate("abc")]
    for path in paths:
        load_cached(path)
    decoded.clear()
    for path in (paths[2], paths[1], paths[2]):
        load_cached(path)
    assert decoded == []
    assert_equal(load_cached(paths[0]), state(0))
    assert decoded == [str(paths[0] / ".metadata")]


@pytest.mark.parametrize("clears_all", [True, False])
def test_clearing_the_cache_removes_one_or_all_checkpoints(
    tmp_path: Path, decoded: list[str], clears_all: bool
) -> None:
    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other", 1)
    load_cached(one)
    load_cached(other)
    decoded.clear()
    CachedMetadataFileSystemReader.clear_metadata_cache(None if clears_all else one)
    load_cached(other)
    load_cached(one)
    expected = [other, one] if clears_all else [one]
    assert decoded == [str(path / ".metadata") for path in expected]


@pytest.mark.parametrize(
    "options", [{"cache_metadata": False}, {"allow_pickle": True}, {"zero_fill": True}], ids=str
)
def test_the_cache_is_neither_read_nor_filled_with(
    tmp_path: Path, decoded: list[str], options: Any
) -> None:
    path = checkpoint(tmp_path / "c")
    load_cached(path)
    decoded.clear()
    for _ in range(2):
        assert_equal(load_cached(path, **options), state())
    assert len(decoded) == 2
    CachedMetadataFileSystemReader.clear_metadata_cache()
    load_cached(path, **options)
    decoded.clear()
    load_cached(path)
    assert len(decoded) == 1


def test_the_second_positional_argument_disables_the_cache(
    tmp_path: Path, decoded: list[str]
) -> None:
    path = checkpoint(tmp_path / "c")
    decoded.clear()
    for use_cache, expected in ((True, 1), (True, 1), (False, 2), (False, 3)):
        metadata = CachedMetadataFileSystemReader(path, use_cache).read_metadata()
        assert metadata.state_dict_metadata  # decoded on first access
        assert len(decoded) == expected


def test_metadata_beneath_a_url_is_cached_until_it_is_cleared(decoded: list[str]) -> None:
    pytest.importorskip("fsspec")
    url = f"memory://{uuid.uuid4().hex}/c"
    async_saves.save(state(), url)
    decoded.clear()
    for name in (url, f"{url}/"):
        assert_equal(load_cached(name), state())
    assert decoded == [f"{url}/.metadata"]
    CachedMetadataFileSystemReader.clear_metadata_cache(f"{url}/")
    assert_equal(load_cached(url), state())
    assert len(decoded) == 2


def test_each_load_has_its_own_copy_of_the_metadata_and_load_id(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    for _ in range(2):
        reader = CachedMetadataFileSystemReader(path)
        metadata = reader.read_metadata()
        meta = metadata.storage_meta
        assert metadata.storage_data
        assert meta is not None
        assert (meta.checkpoint_id, meta.load_id) == (str(path), reader.load_id)
        # These changes do not reach the cache.
        metadata.storage_data = {}
        meta.checkpoint_id = "elsewhere"


def test_a_save_that_reuses_cached_metadata_does_not_change_the_cache(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    metadata = CachedMetadataFileSystemReader(path).read_metadata()
    writer = async_saves.FileSystemWriterAsync(tmp_path / "d")
    finalizing = async_saves.planned(state(1), writer)
    async_saves.here(writer)
    async_saves.save_state_dict_async_finalize(writer, metadata, finalizing[2])
    assert_equal(load_cached(path), state())
    loaded = emptied(state())
    load(loaded, tmp_path / "d")
    assert_equal(loaded, state(1))


def test_part_of_a_checkpoint_loads_from_cached_metadata(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    load_cached(path)
    loaded = {"t1": torch.zeros(100, 8)}
    dcp.load(loaded, storage_reader=CachedMetadataFileSystemReader(path), no_dist=True)
    assert_equal(loaded, {"t1": state()["t1"]})


def test_a_cached_load_leaves_no_descriptor_open(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c")
    load_cached(path)
    before = open_descriptors()
    load_cached(path)
    assert open_descriptors() <= before
