"""Damage: no load returns other values, whichever byte of a checkpoint is changed."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.metadata import read_metadata
from tests.support import (
    StateDict,
    assert_equal,
    cause_of,
    data_files,
    emptied,
    place_of,
    random_tensor,
    stock_save,
)
from torch_ckpt.checkpoint.metadata import checksum_tables, encode_metadata
from torch_ckpt.errors import Corrupt

BLOCK = 64 << 10

STATE: StateDict = {
    "small": random_tensor((40, 3), torch.float32),
    "blocks": random_tensor((400, 250), torch.float32, seed=1),
    "many blocks": random_tensor((700, 250), torch.int32, seed=2),
    "transposed": random_tensor((200, 300), torch.int16, seed=3).t(),
    "scalar": torch.tensor(3.5),
    "note": "the quick brown fox " * 20,
    "long note": "jumps over the lazy dog " * 6000,
    "step": 7,
}


def save(state: StateDict, path: Path, **options: Any) -> None:
    torch_ckpt.save(state, path, no_dist=True, sync_files=False, **options)


def load(state: StateDict, path: Path, **options: Any) -> None:
    torch_ckpt.load(state, path, no_dist=True, **options)


def dcp_load(state: StateDict, path: Path, **options: Any) -> None:
    reader = torch_ckpt.FileSystemReader(path, **options)
    dcp.load(state, storage_reader=reader, no_dist=True)


LOADERS = [load, dcp_load]


def refusal(work: Callable[[], Any]) -> BaseException:
    """Returns the cause of the CheckpointException that the load must raise; it is one sentence."""
    with pytest.raises(dcp.CheckpointException) as error:
        work()
    cause = cause_of(error.value)
    assert "\n" not in str(cause)
    return cause


class Damage:
    """Flips bits of a checkpoint in one file, one at a time."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        (self.file,) = data_files(path)
        self.metadata = read_metadata(path)
        self.choice = random.Random(seed)

    def place(self, names: list[str], begin: float = 0, end: float = 1) -> tuple[str, int, int]:
        """Chooses a byte of the file and a bit of it, in a part of a record of one of these
        names."""
        name = self.choice.choice(names)
        stored = place_of(self.metadata, name)
        first, last = int(begin * stored.length), int(end * stored.length)
        return name, stored.offset + self.choice.randrange(first, last), self.choice.randrange(8)

    def flip(self, byte: int, bit: int) -> None:
        with self.file.open("r+b") as stream:
            stream.seek(byte)
            (value,) = stream.read(1)
            stream.seek(byte)
            stream.write(bytes([value ^ (1 << bit)]))

    def undetected(self, tries: int, place: Callable[[], Any], attempt: Callable[[], bool]) -> Any:
        """Returns the flipped bits that ``attempt`` did not detect."""
        missed = []
        for _ in range(tries):
            name, byte, bit = place()
            self.flip(byte, bit)
            if not attempt():
                missed.append((name, byte - place_of(self.metadata, name).offset, bit))
            self.flip(byte, bit)
        return missed


def is_refused(work: Callable[[], Any]) -> bool:
    try:
        work()
    except dcp.CheckpointException as error:
        return isinstance(cause_of(error), Corrupt)
    return False


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


# --- bit flips -----------------------------------------------------------------------------------


def test_a_full_load_detects_every_flipped_bit(ours: Path) -> None:
    damage, names = Damage(ours, seed=1), sorted(STATE)
    target = emptied(STATE)
    missed = damage.undetected(
        400, lambda: damage.place(names), lambda: is_refused(lambda: load(target, ours))
    )
    assert missed == []
    load(target, ours)
    assert_equal(target, STATE)


@pytest.mark.parametrize("name", ["blocks", "many blocks", "transposed", "small"])
def test_a_load_of_rows_detects_every_flipped_bit_or_is_correct(ours: Path, name: str) -> None:
    damage = Damage(ours, seed=2)
    tensor = STATE[name]
    rows = tensor.size(0)

    def attempt(first: int, count: int) -> Callable[[], bool]:
        target = torch.zeros((count, tensor.size(1)), dtype=tensor.dtype)
        shard = Shard(target, tensor.shape, first)

        def is_refused_or_right() -> bool:
            if is_refused(lambda: load({name: shard}, ours)):
                return True
            return torch.equal(
                target.view(torch.uint8),
                tensor[first : first + count].contiguous().view(torch.uint8),
            )

        return is_refused_or_right

    missed = []
    for _ in range(100):
        count = damage.choice.randint(1, rows // 2)
        first = damage.choice.randrange(rows - count + 1)
        missed += damage.undetected(1, lambda: damage.place([name]), attempt(first, count))
    assert missed == []


@pytest.mark.parametrize("name", ["blocks", "many blocks"])
def test_every_flipped_bit_in_the_loaded_rows_is_an_error(ours: Path, name: str) -> None:
    damage = Damage(ours, seed=3)
    tensor = STATE[name]
    rows = tensor.size(0)
    target = torch.zeros((rows // 2, tensor.size(1)), dtype=tensor.dtype)
    shard = Shard(target, tensor.shape, rows // 4)
    missed = damage.undetected(
        100,
        lambda: damage.place([name], 0.27, 0.73),
        lambda: is_refused(lambda: load({name: shard}, ours)),
    )
    assert missed == []


def test_every_flipped_bit_of_an_object_is_detected(ours: Path) -> None:
    damage, names = Damage(ours, seed=4), ["note", "long note", "step"]
    missed = damage.undetected(
        150,
        lambda: damage.place(names),
        lambda: is_refused(lambda: load(dict.fromkeys(names), ours)),
    )
    assert missed == []


def test_damaged_stock_checkpoints_are_refused_or_loaded_correctly(stocks: Path) -> None:
    damage, names = Damage(stocks, seed=5), sorted(STATE)

    def is_refused_or_right() -> bool:
        target = emptied(STATE)
        try:
            load(target, stocks)
        except dcp.CheckpointException:
            return True
        try:
            assert_equal(target, STATE)
        except AssertionError:
            return False
        return True

    assert damage.undetected(200, lambda: damage.place(names), is_refused_or_right) == []


class Shard(torch.Tensor):
    """Rows of a tensor, declared to torch's planners as by a sharded tensor."""

    rows: torch.Tensor
    whole: torch.Size
    first: int

    @staticmethod
    def __new__(cls, rows: torch.Tensor, whole: torch.Size, first: int) -> Shard:
        made = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=rows.dtype)
        made.rows, made.whole, made.first = rows, whole, first
        return made

    def __create_write_items__(self, fqn: str, object: Any) -> Any:
        raise NotImplementedError

    def __create_chunk_list__(self) -> list[dcp.ChunkStorageMetadata]:
        offsets = torch.Size((self.first,) + (0,) * (self.rows.dim() - 1))
        return [dcp.ChunkStorageMetadata(offsets, self.rows.size())]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.rows

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any) -> Any:
        raise NotImplementedError(str(function))


# --- errors --------------------------------------------------------------------------------------


def payload_position(path: Path, name: str, at: int) -> int:
    """Returns the position of byte ``at`` of a tensor's payload in the only data file."""
    (file,) = data_files(path)
    place = place_of(read_metadata(path), name)
    payload = STATE[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return file.read_bytes().index(payload, place.offset) + at


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("at", [0, BLOCK, 3 * BLOCK + 17])
def test_the_error_for_a_damaged_block_has_all_details(
    tmp_path: Path, ours: Path, loader: Any, at: int
) -> None:
    shutil.copytree(ours, tmp_path / "c")
    position = payload_position(ours, "blocks", at)
    Damage(tmp_path / "c", 0).flip(position, 3)
    cause = refusal(lambda: loader(emptied(STATE), tmp_path / "c"))
    assert isinstance(cause, Corrupt)
    begin = position - at % BLOCK
    (file,) = data_files(tmp_path / "c")
    assert str(cause).startswith("blocks: ")
    assert f"{file} at byte {begin}: " in str(cause)
    found = [word for word in str(cause).replace(",", " ").split() if word.startswith("0x")]
    assert len(set(found)) == 2


@pytest.mark.parametrize("loader", LOADERS)
def test_damage_is_loaded_without_verification(tmp_path: Path, ours: Path, loader: Any) -> None:
    shutil.copytree(ours, tmp_path / "c")
    Damage(tmp_path / "c", 0).flip(payload_position(ours, "blocks", 5), 3)
    target = torch.zeros(400, 250)
    loader({"blocks": target}, tmp_path / "c", verify=False)
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
@pytest.mark.parametrize("keep", [0, 1, 5000, -1], ids=lambda keep: f"{keep} bytes")
def test_a_truncated_file_is_named(two_files: Any, loader: Any, keep: int) -> None:
    path, one, _two = two_files
    size = keep if keep >= 0 else one.stat().st_size + keep
    os.truncate(one, size)
    cause = refusal(lambda: loader(blank(), path))
    assert isinstance(cause, Corrupt)
    assert str(cause).startswith(("a: ", "b: "))
    assert str(one) in str(cause)
    assert f"but the file ends at byte {size}" in str(cause)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_missing_file_is_named(two_files: Any, loader: Any) -> None:
    path, _one, two = two_files
    two.unlink()
    cause = refusal(lambda: loader(blank(), path))
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == str(two)
    assert str(cause).count(str(two)) == 1
    assert "(a)" in str(cause) or "(b)" in str(cause)


def swap(one: Path, two: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


@pytest.mark.parametrize("loader", LOADERS)
def test_swapped_files_are_detected_although_each_is_intact(two_files: Any, loader: Any) -> None:
    path, one, two = two_files
    swap(one, two)
    cause = refusal(lambda: loader(blank(), path))
    assert isinstance(cause, Corrupt)
    assert str(cause).startswith(("a: ", "b: "))
    assert str(one) in str(cause) or str(two) in str(cause)


def test_a_file_of_another_save_is_detected(two_files: Any, tmp_path: Path) -> None:
    path, one, _two = two_files
    other = {name: random_tensor((300, 200), torch.float32, 7) for name in "ab"}
    save(other, tmp_path / "other", thread_count=2)
    shutil.copy(data_files(tmp_path / "other")[0], one)
    assert isinstance(refusal(lambda: load(blank(), path)), Corrupt)


# --- checksum tables -----------------------------------------------------------------------------


def rewrite_tables(path: Path, change: Callable[[bytes], bytes]) -> None:
    metadata: Any = read_metadata(path)
    tables = checksum_tables(metadata)
    metadata.torch_ckpt = {
        "version": 1,
        "checksums": {file: change(table) for file, table in tables.items()},
    }
    (path / ".metadata").write_bytes(encode_metadata(metadata))


def flipped(table: bytes) -> bytes:
    return table[:20] + bytes([table[20] ^ 1]) + table[21:]


@pytest.mark.parametrize(
    "change",
    [flipped, lambda table: table[:-5], lambda table: b"XXXX" + table[4:], lambda table: b"?"],
    ids=["flipped", "short", "magic", "tiny"],
)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_damaged_table_is_an_error_that_names_the_file(
    two_files: Any, loader: Any, change: Any
) -> None:
    path, one, two = two_files
    rewrite_tables(path, change)
    cause = refusal(lambda: loader(blank(), path))
    assert isinstance(cause, Corrupt)
    assert str(one) in str(cause) or str(two) in str(cause)
    assert "the metadata's checksums for this file are damaged" in str(cause)


def test_a_damaged_table_does_not_matter_without_verification(two_files: Any) -> None:
    path, _one, _two = two_files
    rewrite_tables(path, flipped)
    state = blank()
    load(state, path, verify=False)
    assert_equal(state["b"], random_tensor((300, 200), torch.float32, 1))


@pytest.mark.parametrize("name", ["blocks", "many blocks", "transposed", "small"])
@pytest.mark.parametrize("loader", LOADERS)
def test_rows_of_checkpoints_without_tables_are_loaded(
    stocks: Path, loader: Any, name: str
) -> None:
    tensor = STATE[name]
    target = torch.zeros((7, tensor.size(1)), dtype=tensor.dtype)
    loader({name: Shard(target, tensor.shape, 11)}, stocks)
    assert_equal(target, tensor[11:18].contiguous())
