"""Checksum tables in the metadata, for every function that saves."""

from __future__ import annotations

import copy
import pickle
import warnings
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


def by_save(values: StateDict, path: Path) -> None:
    torch_ckpt.save(values, path, no_dist=True)


def by_async_save(values: StateDict, path: Path) -> None:
    torch_ckpt.async_save(values, path, no_dist=True).result()


def by_dcp_save(values: StateDict, path: Path) -> None:
    save(values, path)


def by_dcp_save_of_a_file_for_each_item(values: StateDict, path: Path) -> None:
    save(values, path, single_file_per_rank=False)


def by_dcp_async_save(values: StateDict, path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(path)
    future: Any = dcp.async_save(values, storage_writer=writer, no_dist=True)
    future.result()


def without_collectives(values: StateDict, path: Path) -> None:
    writer = torch_ckpt.FileSystemWriter(path)
    dcp.save(values, storage_writer=writer, no_dist=True, use_collectives=False)


SAVERS: list[Callable[[StateDict, Path], None]] = [
    by_save,
    by_async_save,
    by_dcp_save,
    by_dcp_save_of_a_file_for_each_item,
    by_dcp_async_save,
    without_collectives,
]


def metadata_of(path: Path) -> Metadata:
    (file,) = path.glob("*.metadata")
    return read_metadata(path, name=file.name)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.__name__)
def test_every_byte_of_a_checkpoint_has_a_checksum(tmp_path: Path, saver: Any) -> None:
    saver(state(), tmp_path)
    assert_tables_match(tmp_path, metadata_of(tmp_path))


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.__name__)
def test_only_the_attribute_differs_from_torchs_metadata(tmp_path: Path, saver: Any) -> None:
    saver(state(), tmp_path / "ours")
    stock_save(state(), tmp_path / "stock")
    ours, stock = metadata_of(tmp_path / "ours"), read_metadata(tmp_path / "stock")
    assert set(vars(ours)) == set(vars(stock)) | {"torch_ckpt"}
    for info in ours.storage_data.values():
        assert set(vars(info)) <= {"relative_path", "offset", "length", "transform_descriptors"}


@pytest.mark.parametrize("saver", SAVERS, ids=lambda saver: saver.__name__)
def test_a_save_that_replaces_another_has_its_own_tables(tmp_path: Path, saver: Any) -> None:
    for seed in range(3):
        saver(state(seed), tmp_path)
        assert_tables_match(tmp_path, metadata_of(tmp_path))


def test_a_state_without_items_has_no_tables(tmp_path: Path) -> None:
    by_dcp_save({}, tmp_path)
    assert checksum_tables(metadata_of(tmp_path)) == {}


def test_a_small_tensor_adds_sixteen_bytes(tmp_path: Path) -> None:
    save({str(i): torch.ones(256) for i in range(1000)}, tmp_path, thread_count=1)
    (table,) = checksum_tables(metadata_of(tmp_path)).values()
    assert len(table) == 4 + 4 + 16 * 1000 + 4


def test_only_payloads_of_several_blocks_and_bytes_have_blocks(tmp_path: Path) -> None:
    save(state(), tmp_path, thread_count=1)
    metadata = metadata_of(tmp_path)
    (table,) = checksum_tables(metadata).values()
    sums = parsed_table(table)
    blocks = {name: len(sums[place_of(metadata, name).offset][2]) for name in ("small", "empty")}
    assert blocks == {"small": 0, "empty": 0}
    for name, count in [("one block", 0), ("two blocks", 2), ("object.note", 7)]:
        assert len(sums[place_of(metadata, name).offset][2]) == count, name


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


def test_a_stock_save_with_a_cached_plan_after_ours_has_no_tables(
    tmp_path: Path,
) -> None:
    def planner() -> dcp.DefaultSavePlanner:
        return dcp.DefaultSavePlanner(enable_plan_caching=True)

    save_with(torch_ckpt.FileSystemWriter(tmp_path / "ours"), state(), planner=planner())
    save_with(dcp.FileSystemWriter(tmp_path / "stock"), state(1), planner=planner())
    assert_tables_match(tmp_path / "ours", metadata_of(tmp_path / "ours"))
    assert not hasattr(metadata_of(tmp_path / "stock"), "torch_ckpt")


# --- in the metadata -----------------------------------------------------------------------------


def some_metadata() -> Metadata:
    return Metadata({}, {}, {})


def test_tables_pass_the_allow_list() -> None:
    encoded = encode_metadata(with_checksum_tables(some_metadata(), {"a": b"table"}))
    assert checksum_tables(decode_metadata(encoded, "here")) == {"a": b"table"}


def test_tables_replace_others_in_a_copy() -> None:
    first = with_checksum_tables(some_metadata(), {"a": b"1"})
    assert checksum_tables(with_checksum_tables(first, {"b": b"2"})) == {"b": b"2"}
    assert checksum_tables(with_checksum_tables(first, {})) == {}
    assert checksum_tables(first) == {"a": b"1"}


def test_metadata_with_tables_can_be_copied_and_pickled() -> None:
    metadata = with_checksum_tables(some_metadata(), {"a": b"1"})
    for other in (copy.deepcopy(metadata), pickle.loads(pickle.dumps(metadata))):
        assert checksum_tables(other) == {"a": b"1"}


def test_metadata_of_other_writers_has_no_tables(tmp_path: Path) -> None:
    stock_save({"a": torch.ones(3)}, tmp_path)
    assert checksum_tables(read_metadata(tmp_path)) == {}


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
    metadata = some_metadata()
    metadata.torch_ckpt = malformed  # type: ignore[attr-defined]
    assert checksum_tables(metadata) == {}
