"""Checksum tables in the metadata, for every function that saves."""

from __future__ import annotations

import copy
import pickle
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.metadata import read_metadata
from tests.support import (
    StateDict,
    assert_tables_match,
    parsed_table,
    place_of,
    random_tensor,
    save,
    save_with,
    stock_save,
)
from torch_ckpt import _core
from torch_ckpt.checkpoint.metadata import (
    checksum_tables,
    decode_metadata,
    encode_metadata,
    with_checksum_tables,
)

BLOCK = 16 << 10


def state(seed: int = 0) -> StateDict:
    return {
        "small": random_tensor((10, 3), torch.float32, seed),
        "one block": random_tensor((BLOCK,), torch.uint8, seed),
        "two blocks": random_tensor((BLOCK + 1,), torch.uint8, seed),
        "many blocks": random_tensor((700, 501), torch.float64, seed),
        "transposed": random_tensor((300, 200), torch.float32, seed).t(),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(3.0),
        "object": {"step": seed, "note": "x" * 100_000},
    }


# --- ways to save --------------------------------------------------------------------------------


Writer = torch_ckpt.FileSystemWriter


SAVERS: dict[str, Callable[[StateDict, Path], object]] = {
    "save": lambda values, path: torch_ckpt.save(values, path, no_dist=True),
    "async_save": lambda values, path: torch_ckpt.async_save(values, path, no_dist=True).result(),
    "dcp.save": save,
    "a file for each item": lambda values, path: save(values, path, single_file_per_rank=False),
    "dcp.async_save": lambda values, path: dcp.async_save(
        values, storage_writer=Writer(path), no_dist=True
    ).result(),
    "without collectives": lambda values, path: dcp.save(
        values, storage_writer=Writer(path), no_dist=True, use_collectives=False
    ),
}


def metadata_of(path: Path) -> Metadata:
    (file,) = path.glob("*.metadata")
    return read_metadata(path, name=file.name)


@pytest.mark.parametrize("saver", SAVERS.values(), ids=SAVERS)
def test_every_byte_has_a_checksum_in_the_only_attribute_that_torchs_metadata_lacks(
    tmp_path: Path, saver: Any
) -> None:
    for seed in range(3):  # each save replaces the one before
        saver(state(seed), tmp_path / "ours")
        assert_tables_match(tmp_path / "ours", metadata_of(tmp_path / "ours"))
    stock_save(state(), tmp_path / "stock")
    ours, stock = metadata_of(tmp_path / "ours"), read_metadata(tmp_path / "stock")
    assert checksum_tables(stock) == {}
    assert set(vars(ours)) == set(vars(stock)) | {"torch_ckpt"}
    for info in ours.storage_data.values():
        assert set(vars(info)) <= {"relative_path", "offset", "length", "transform_descriptors"}


def test_a_state_without_items_has_no_tables(tmp_path: Path) -> None:
    save({}, tmp_path)
    assert checksum_tables(metadata_of(tmp_path)) == {}


def test_only_payloads_of_several_blocks_and_bytes_have_blocks(tmp_path: Path) -> None:
    save(state(), tmp_path, thread_count=1)
    metadata = metadata_of(tmp_path)
    (table,) = checksum_tables(metadata).values()
    sums = parsed_table(table)
    expected = {"small": 0, "empty": 0, "one block": 0, "two blocks": 2, "object.note": 7}
    found = {name: len(sums[place_of(metadata, name).offset][2]) for name in expected}
    assert found == expected


class Unchanged(StreamTransformExtension):
    """Extension without effect, which keeps the engine from writing."""

    @staticmethod
    def from_descriptor(version: str) -> Unchanged:
        return Unchanged()

    @staticmethod
    def registry_name() -> str:
        return "test.unchanged"

    def get_descriptor(self) -> str:
        return "test.unchanged"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return output

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return input


def test_data_that_torch_writes_has_no_tables(tmp_path: Path) -> None:
    save(state(), tmp_path, _extensions=[Unchanged()])
    assert not hasattr(metadata_of(tmp_path), "torch_ckpt")


def test_a_stock_save_with_a_cached_plan_after_ours_has_no_tables(tmp_path: Path) -> None:
    def planner() -> dcp.DefaultSavePlanner:
        return dcp.DefaultSavePlanner(enable_plan_caching=True)

    save_with(torch_ckpt.FileSystemWriter(tmp_path / "ours"), state(), planner=planner())
    save_with(dcp.FileSystemWriter(tmp_path / "stock"), state(1), planner=planner())
    assert_tables_match(tmp_path / "ours", metadata_of(tmp_path / "ours"))
    assert not hasattr(metadata_of(tmp_path / "stock"), "torch_ckpt")


# --- in the metadata -----------------------------------------------------------------------------


def test_tables_replace_others_in_a_copy_and_survive_copies_and_pickles() -> None:
    first = with_checksum_tables(Metadata({}, {}, {}), {"a": b"1"})
    assert checksum_tables(with_checksum_tables(first, {"b": b"2"})) == {"b": b"2"}
    assert checksum_tables(with_checksum_tables(first, {})) == {}
    decoded = decode_metadata(encode_metadata(first), "here")
    for other in (first, decoded, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert checksum_tables(other) == {"a": b"1"}


def test_a_checksum_of_the_engine_equals_that_of_zlib_and_refuses_gaps() -> None:
    data = random.Random(1).randbytes(100_003)
    assert _core.crc32(data) == zlib.crc32(data)
    assert _core.crc32(data[777:], _core.crc32(memoryview(data)[:777])) == zlib.crc32(data)
    with pytest.raises(BufferError):
        _core.crc32(memoryview(bytes(8))[::2])


@pytest.mark.parametrize(
    "malformed",
    [
        None,
        [],
        {},
        {"version": 1},
        {"version": 2, "checksums": {"a": b"1"}},
        {"checksums": {"a": b"1"}},
        {"version": 1, "checksums": [("a", b"1")]},
        {"version": 1, "checksums": {"a": "1"}},
        {"version": 1, "checksums": {1: b"1"}},
        {"version": 1, "checksums": {"a": b"1", "b": None}},
    ],
    ids=repr,
)
def test_malformed_tables_are_ignored(malformed: Any) -> None:
    metadata = Metadata({}, {}, {})
    metadata.torch_ckpt = malformed  # type: ignore[attr-defined]
    assert checksum_tables(metadata) == {}
