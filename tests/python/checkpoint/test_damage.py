"""Damage is refused by name, and no load returns other values, whichever byte is changed.

tests/attacks has checkpoints that mean harm.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.loads import LOADERS, dcp_load, load, refusal
from tests.metadata import read_metadata
from tests.support import (
    StateDict,
    assert_equal,
    bytes_of,
    cause_of,
    data_files,
    emptied,
    f32,
    flip_bit,
    place_of,
    random_tensor,
    save,
    save_with,
    stock_load,
    stock_save,
)
from torch_ckpt import CheckpointError, Corrupt
from torch_ckpt.checkpoint.metadata import checksum_tables, encode_metadata

BLOCK = 64 << 10

STATE: StateDict = {
    "small": f32(40, 3),
    "blocks": f32(400, 250, seed=1),
    "many blocks": random_tensor((700, 250), torch.int32, seed=2),
    "transposed": random_tensor((200, 300), torch.int16, seed=3).t(),
    "half": random_tensor((77,), torch.bfloat16),
    "eighth": random_tensor((77,), torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "conj": random_tensor((5, 4), torch.complex64).conj(),
    "note": "the quick brown fox " * 20,
    "long note": "jumps over the lazy dog " * 6000,
    "step": 7,
}


def sentence(work: Callable[[], Any], kind: type[BaseException] = Corrupt) -> str:
    """Returns the message with which a load must fail for a cause of this kind; it has one line."""
    cause = refusal(work)
    assert isinstance(cause, kind)
    assert "\n" not in str(cause)
    return str(cause)


def publish(path: Path, metadata: Metadata) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def payload_position(path: Path, name: str, at: int) -> int:
    """Returns the position of byte ``at`` of a tensor's payload in the only data file."""
    (file,) = data_files(path)
    # Older torch does not return the locations of stored items.
    place = place_of(read_metadata(path), name)
    payload = torch.empty(0, dtype=torch.uint8).set_(STATE[name].untyped_storage())
    return file.read_bytes().index(payload.numpy().tobytes(), place.offset) + at


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours")
    save(STATE, path, thread_count=1)
    return path


@pytest.fixture(scope="module")
def stocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stocks")
    stock_save(STATE, path, thread_count=1)
    return path


@pytest.fixture
def our_copy(ours: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ours, tmp_path / "copy"))


# --- bit flips -----------------------------------------------------------------------------------


def undetected(
    path: Path,
    tries: int,
    names: list[str],
    is_right: Callable[[random.Random], bool],
    refusal: type[BaseException] = Corrupt,
) -> list[Any]:
    """Flips bits in records of these names, one at a time. Returns those for which ``is_right``
    neither raised a refusal nor returned True."""
    (file,) = data_files(path)
    metadata, choice = read_metadata(path), random.Random(tries)
    missed = []
    for _ in range(tries):
        name, bit = choice.choice(names), choice.randrange(8)
        stored = place_of(metadata, name)
        byte = choice.randrange(stored.length)
        flip_bit(file, stored.offset + byte, bit)
        try:
            found = is_right(choice)
        except dcp.CheckpointException as error:
            found = isinstance(cause_of(error), refusal)
        if not found:
            missed.append((name, byte, bit))
        flip_bit(file, stored.offset + byte, bit)
    return missed


def test_a_full_load_detects_every_flipped_bit(ours: Path) -> None:
    target = emptied(STATE)

    def returns(_choice: random.Random) -> bool:
        load(target, ours)
        return False

    assert undetected(ours, 400, sorted(STATE), returns) == []
    load(target, ours)
    assert_equal(target, STATE)


class Rows(torch.Tensor):
    """Tensor of which a load fills some rows, as of a sharded tensor."""

    rows: torch.Tensor
    first: int

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        return [dcp.ChunkStorageMetadata(torch.Size((self.first, 0)), self.rows.size())]

    def __get_tensor_shard__(self, _index: Any) -> torch.Tensor:
        return self.rows


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("name", ["blocks", "many blocks", "transposed", "small"])
def test_a_load_of_rows_detects_every_flipped_bit_or_is_correct(
    ours: Path, loader: Any, name: str
) -> None:
    tensor = STATE[name]
    rows = tensor.size(0)

    def has_right_rows(choice: random.Random) -> bool:
        count = choice.randint(1, rows // 2)
        shard = torch.zeros_like(tensor).as_subclass(Rows)
        shard.first = choice.randrange(rows - count + 1)
        shard.rows = torch.zeros((count, tensor.size(1)), dtype=tensor.dtype)
        loader({name: shard}, ours)
        return bytes_of(shard.rows) == bytes_of(tensor[shard.first : shard.first + count])

    assert undetected(ours, 100, [name], has_right_rows) == []


def test_damaged_stock_checkpoints_are_refused_or_loaded_correctly(stocks: Path) -> None:
    def is_right(_choice: random.Random) -> bool:
        target = emptied(STATE)
        load(target, stocks)
        assert_equal(target, STATE)
        return True

    assert undetected(stocks, 200, sorted(STATE), is_right, BaseException) == []


# --- the error -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("at", [0, BLOCK, 3 * BLOCK + 17])
def test_the_error_for_a_damaged_block_has_details(our_copy: Path, loader: Any, at: int) -> None:
    (file,) = data_files(our_copy)
    position = payload_position(our_copy, "blocks", at)
    flip_bit(file, position, 3)
    text = sentence(lambda: loader(emptied(STATE), our_copy))
    assert text.startswith("blocks: ")
    assert f"{file} at byte {position - at % BLOCK}: " in text
    assert len(set(re.findall("0x[0-9a-f]+", text))) == 2


@pytest.mark.parametrize("name", ["small", "many blocks", "transposed", "half", "conj", "eighth"])
@pytest.mark.parametrize("source", ["ours", "stocks"])
def test_a_damaged_payload_is_named_with_tensor_and_file(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, source: str
) -> None:
    path = shutil.copytree(request.getfixturevalue(source), tmp_path / "copy")
    (file,) = data_files(path)
    position = payload_position(path, name, STATE[name].nbytes // 2)
    flip_bit(file, position, 3)
    text = sentence(lambda: load(emptied(STATE), path))
    assert text.startswith(f"{name}: ")
    # The record, or its block.
    (reported,) = re.findall(rf"{file.name} at byte (\d+): ", text)
    assert place_of(read_metadata(path), name).offset <= int(reported) <= position
    assert "the bytes are damaged: their CRC-32 is 0x" in text


def test_a_damaged_object_is_named_with_its_file(our_copy: Path) -> None:
    (file,) = data_files(our_copy)
    flip_bit(file, file.read_bytes().index(b"quick brown"), 0)
    text = sentence(lambda: load(emptied(STATE), our_copy))
    assert re.search(r"note: .*__0_0.distcp.*damaged", text)


@pytest.mark.parametrize("loader", LOADERS)
def test_damage_is_loaded_without_verification(our_copy: Path, loader: Any) -> None:
    flip_bit(data_files(our_copy)[0], payload_position(our_copy, "blocks", 5), 3)
    target = torch.zeros(400, 250)
    loader({"blocks": target}, our_copy, verify=False)
    different = target.view(torch.uint8) != STATE["blocks"].view(torch.uint8)
    assert different.sum() == 1


# --- files that are not what they were -----------------------------------------------------------


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Makes a checkpoint, and returns its two files with one tensor each."""
    path = tmp_path / "two files"
    state = {name: random_tensor((300, 200), torch.float32, i) for i, name in enumerate("ab")}
    save(state, path, thread_count=2)
    one, two = data_files(path)
    return path, one, two


def blank() -> StateDict:
    return {name: torch.zeros(300, 200) for name in "ab"}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("cut", [0, 1, 5000, -1], ids=lambda cut: f"{cut} bytes")
def test_a_truncated_file_is_named(two_files: Any, loader: Any, cut: int) -> None:
    path, one, _two = two_files
    size = cut % one.stat().st_size
    os.truncate(one, size)
    text = sentence(lambda: loader(blank(), path))
    assert text.startswith(("a: ", "b: "))
    assert str(one) in text
    assert f"but the file ends at byte {size}" in text


@pytest.mark.parametrize(
    "content",
    [bytes, random.Random(0).randbytes, lambda size: b"x" * size],
    ids=["zeros", "noise", "text"],
)
def test_a_foreign_data_file_is_detected(our_copy: Path, content: Callable[[int], bytes]) -> None:
    (file,) = data_files(our_copy)
    file.write_bytes(content(file.stat().st_size))
    assert str(file) in sentence(lambda: dcp_load(emptied(STATE), our_copy))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_missing_file_is_named(two_files: Any, loader: Any) -> None:
    path, _one, two = two_files
    two.unlink()
    cause = refusal(lambda: loader(blank(), path))
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == str(two)
    assert str(cause).count(str(two)) == 1
    assert "(a)" in str(cause) or "(b)" in str(cause)


# --- checksum tables -----------------------------------------------------------------------------


def flip_in_tables(path: Path) -> None:
    metadata: Any = read_metadata(path)
    tables = checksum_tables(metadata)
    metadata.torch_ckpt["checksums"] = {
        file: table[:20] + bytes([table[20] ^ 1]) + table[21:] for file, table in tables.items()
    }
    (path / ".metadata").write_bytes(encode_metadata(metadata))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_damaged_table_is_an_error_that_names_the_file_unless_nothing_is_verified(
    two_files: Any, loader: Any
) -> None:
    path, one, two = two_files
    flip_in_tables(path)
    text = sentence(lambda: loader(blank(), path))
    assert str(one) in text or str(two) in text
    assert "the metadata's checksums for this file are damaged" in text
    state = blank()
    loader(state, path, verify=False)
    assert_equal(state["b"], random_tensor((300, 200), torch.float32, 1))


# --- the metadata --------------------------------------------------------------------------------


class Casting(dcp.DefaultSavePlanner):
    """Stores another dtype than its plan and the metadata have."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object).to(torch.bfloat16)


@pytest.mark.parametrize("shape", [(40, 30), (700, 500)], ids=["small", "large"])
def test_a_record_of_another_dtype_than_the_metadata_is_converted_as_by_stock(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    save_with(torch_ckpt.FileSystemWriter(tmp_path), {"weight": tensor}, planner=Casting())
    for loader in (load, stock_load):
        state = {"weight": torch.zeros(shape)}
        loader(state, tmp_path)
        assert_equal(state["weight"], tensor.bfloat16().float())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offset", 2**40, ""),
        ("offset", 2**63, "the metadata has an invalid location"),
        ("length", 2**34, ""),
        ("length", 2**50, "a record of 1125899906842624 bytes"),
        ("length", 1.5, "the metadata has an invalid location"),
    ],
)
def test_an_object_with_an_impossible_location_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    metadata = save({"step": 1}, tmp_path)
    setattr(place_of(metadata, "step"), field, value)
    publish(tmp_path, metadata)
    text = sentence(lambda: load({"step": 0}, tmp_path), CheckpointError)
    assert text.startswith("step: ")
    assert message in text


def test_metadata_without_a_location_for_an_item_is_refused(tmp_path: Path) -> None:
    # Stock torch publishes such metadata if one of its writing threads fails.
    state = {"weight": f32(3), "bias": f32(2)}
    metadata = save(state, tmp_path)
    (bias,) = (index for index in metadata.storage_data if index.fqn == "bias")
    del metadata.storage_data[bias]
    publish(tmp_path, metadata)
    text = sentence(lambda: load(emptied(state), tmp_path))
    assert text.startswith("bias: ")
    assert "incomplete" in text


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda file: file.write_bytes(b""), Corrupt, ""),
        (lambda file: file.write_bytes(b"\0" * 100), Corrupt, ""),
        (lambda file: file.write_bytes(b"not a pickle"), Corrupt, ""),
        (lambda file: file.write_bytes(pickle.dumps({"a": 1})[:-3]), Corrupt, ""),
        (lambda file: file.write_bytes(pickle.dumps([1])), Corrupt, ""),
        (os.mkfifo, CheckpointError, " is not a regular file"),
        (Path.mkdir, IsADirectoryError, ""),
    ],
    ids=["empty", "zeros", "text", "cut short", "a list", "a FIFO", "a directory"],
)
def test_anything_else_in_place_of_the_metadata_is_refused(
    tmp_path: Path, make: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    make(tmp_path / ".metadata")
    with pytest.raises(dcp.CheckpointException):
        dcp_load({"a": 1}, tmp_path)
    # dcp.load tries another file and wraps both errors.
    with pytest.raises(error) as caught:
        torch_ckpt.FileSystemReader(tmp_path).read_metadata()
    assert f"{tmp_path}/.metadata{message}" in str(caught.value)
    assert "\n" not in str(caught.value), "one sentence"


class Tagged(torch.Tensor):
    """Subclass without additional state."""


def test_metadata_of_a_trusted_writer_may_name_other_classes(tmp_path: Path) -> None:
    metadata = save({"weight": f32(3)}, tmp_path)
    metadata.planner_data["more"] = Tagged
    publish(tmp_path, metadata)
    state = {"weight": torch.zeros(3)}
    load(state, tmp_path, allow_pickle=True)
    assert_equal(state["weight"], f32(3))
