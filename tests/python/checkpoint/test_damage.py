"""Damage of all kinds and malicious metadata are refused by name."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import random
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import torch_ckpt
from tests.metadata import read_metadata
from tests.support import (
    StateDict,
    assert_equal,
    cause_of,
    data_files,
    emptied,
    f32,
    flip_bit,
    load,
    place_of,
    random_tensor,
    save,
    save_with,
    stock_load,
    stock_save,
)
from torch_ckpt import _core
from torch_ckpt.errors import CheckpointError, Corrupt, Unsafe


class Tagged(torch.Tensor):
    """Subclass without additional state."""


# --- damage --------------------------------------------------------------------------------------

DAMAGE_STATE = {
    "weight": f32(40, 30),
    "large": f32(600, 500),
    "transposed": f32(17, 13).t(),
    "half": random_tensor((77,), torch.bfloat16),
    "eighth": random_tensor((77,), torch.float8_e4m3fn),
    "scalar": torch.tensor(3.5),
    "conj": random_tensor((5, 4), torch.complex64).conj(),
    "step": 7,
    "lr": 0.001,
    "note": "the quick brown fox",
}


@pytest.mark.parametrize("name", ["weight", "large", "transposed", "half", "conj", "eighth"])
@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_damaged_payload_is_named_with_tensor_and_file(
    tmp_path: Path, name: str, saver: Callable[..., Metadata]
) -> None:
    saver(DAMAGE_STATE, tmp_path, thread_count=1)
    # Older torch does not return the locations of stored items.
    place = place_of(read_metadata(tmp_path), name)
    data = (tmp_path / place.relative_path).read_bytes()
    record = data[place.offset : place.offset + place.length]
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        payload = archive.read("archive/data/0")
    position = place.offset + record.index(payload) + len(payload) // 2
    flip_bit(tmp_path / place.relative_path, position, 3)
    with pytest.raises(dcp.CheckpointException) as error:
        load(emptied(DAMAGE_STATE), tmp_path)
    cause = cause_of(error.value)
    assert isinstance(cause, Corrupt)
    text = str(cause)
    assert text.startswith(f"{name}: ")
    # The record, or its block.
    (reported,) = re.findall(rf"{place.relative_path} at byte (\d+): ", text)
    assert place.offset <= int(reported) <= position
    assert "the bytes are damaged: their CRC-32 is 0x" in text
    assert "\n" not in text


def test_a_damaged_object_is_named_with_its_file(tmp_path: Path) -> None:
    metadata = save(DAMAGE_STATE, tmp_path, thread_count=1)
    place = place_of(metadata, "note")
    file = tmp_path / place.relative_path
    flip_bit(file, file.read_bytes().index(b"quick brown"), 0)
    with pytest.raises(dcp.CheckpointException, match=r"note: .*__0_0.distcp.*damaged") as error:
        load(emptied(DAMAGE_STATE), tmp_path)
    assert isinstance(cause_of(error.value), Corrupt)


def error_of_load(state: StateDict, path: Path) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as error:
        load(emptied(state), path)
    cause = cause_of(error.value)
    assert "\n" not in str(cause), "one sentence"
    return cause


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


@pytest.mark.parametrize("kind", ["zeros", "noise", "text"])
def test_a_foreign_data_file_is_detected(tmp_path: Path, kind: str) -> None:
    state = {"weight": f32(40, 30), "bias": f32(3)}
    save(state, tmp_path, thread_count=1)
    (file,) = data_files(tmp_path)
    size = file.stat().st_size
    content = {"zeros": bytes(size), "noise": random.Random(0).randbytes(size), "text": b"x" * size}
    file.write_bytes(content[kind])
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, Corrupt)
    assert str(file) in str(cause)


def test_a_compressed_record_is_refused_by_name(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30)}
    metadata = save(state, tmp_path, thread_count=1)
    place = place_of(metadata, "weight")
    file = tmp_path / place.relative_path
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(file) as archive,
        zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as compressed,
    ):
        for name in archive.namelist():
            compressed.writestr(name, archive.read(name))
    file.write_bytes(stream.getvalue())
    place.length = len(stream.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "is compressed" in str(error_of_load(state, tmp_path))


def test_a_fifo_in_place_of_a_data_file_is_refused_without_waiting(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30)}
    save(state, tmp_path, thread_count=1)
    (tmp_path / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "__0_0.distcp")
    cause = error_of_load(state, tmp_path)
    assert "__0_0.distcp: not a regular file" in str(cause)
    assert "weight" in str(cause)


def test_a_directory_in_place_of_a_data_file_is_refused(tmp_path: Path) -> None:
    state = {"weight": f32(40, 30)}
    save(state, tmp_path, thread_count=1)
    (tmp_path / "__0_0.distcp").unlink()
    (tmp_path / "__0_0.distcp").mkdir()
    assert "__0_0.distcp: not a regular file" in str(error_of_load(state, tmp_path))


# --- metadata that is damaged or means harm ------------------------------------------------------


def error_of_metadata(path: Path) -> BaseException:
    """Returns the reader's exception. ``dcp.load`` would try another file and wrap both errors."""
    with pytest.raises(dcp.CheckpointException):
        load({"a": 1}, path)
    with pytest.raises((CheckpointError, OSError)) as error:
        torch_ckpt.FileSystemReader(path).read_metadata()
    assert "\n" not in str(error.value), "one sentence"
    return error.value


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"not a pickle", pickle.dumps({"a": 1})[:-3], pickle.dumps([1])],
    ids=["empty", "zeros", "text", "cut short", "a list"],
)
def test_a_file_that_is_not_metadata_is_refused(tmp_path: Path, content: bytes) -> None:
    save({"weight": f32(3)}, tmp_path)
    (tmp_path / ".metadata").write_bytes(content)
    cause = error_of_metadata(tmp_path)
    assert isinstance(cause, Corrupt)
    assert str(tmp_path / ".metadata") in str(cause)


def test_a_fifo_in_place_of_the_metadata_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".metadata")
    assert ".metadata is not a regular file" in str(error_of_metadata(tmp_path))


def test_a_directory_in_place_of_the_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").mkdir()
    assert isinstance(error_of_metadata(tmp_path), IsADirectoryError)


def test_metadata_truncated_at_any_byte_is_refused(tmp_path: Path) -> None:
    save({"weight": f32(3), "step": 1}, tmp_path)
    file = tmp_path / ".metadata"
    content = file.read_bytes()
    # A file that lacks exactly the seal is a file of stock torch.
    for size in set(range(0, len(content), 7)) - {len(content) - len(_core.seal_of(b""))}:
        file.write_bytes(content[:size])
        with pytest.raises(Corrupt):
            torch_ckpt.FileSystemReader(tmp_path).read_metadata()


class Runs:
    """Object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


ATTACKS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda mark: Runs(os.system, f"touch {mark}"),
    "eval": lambda mark: Runs(eval, f"open({str(mark)!r}, 'w')"),
    "open": lambda mark: Runs(open, str(mark), "w"),
    "getattr": lambda mark: Runs(getattr, "", "format"),
    "subprocess": lambda mark: Runs(subprocess.run, ["touch", str(mark)]),
    "torch.load": lambda mark: Runs(torch.load, str(mark)),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_metadata_that_would_run_code_is_refused(
    tmp_path: Path, attack: str, protocol: int
) -> None:
    save({"weight": f32(3)}, tmp_path)
    mark = tmp_path / "mark"
    content = pickle.dumps(ATTACKS[attack](mark), protocol)
    (tmp_path / ".metadata").write_bytes(content)
    cause = error_of_metadata(tmp_path)
    assert isinstance(cause, Unsafe)
    assert str(tmp_path / ".metadata") in str(cause)
    assert re.search("not (on the allow-list for|allowed in) metadata", str(cause))
    assert not mark.exists()


def test_an_attack_inside_valid_metadata_is_refused(tmp_path: Path) -> None:
    metadata = save({"weight": f32(3)}, tmp_path)
    mark = tmp_path / "mark"
    metadata.planner_data = {"weight": Runs(os.system, f"touch {mark}")}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert isinstance(error_of_metadata(tmp_path), Unsafe)
    assert not mark.exists()


def test_metadata_of_a_trusted_writer_may_name_other_classes(tmp_path: Path) -> None:
    metadata = save({"weight": f32(3)}, tmp_path)
    metadata.planner_data["more"] = Tagged
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {"weight": torch.zeros(3)}
    load(state, tmp_path, allow_pickle=True)
    assert_equal(state["weight"], f32(3))


@pytest.mark.parametrize(
    "path", ["../outside", "/etc/passwd", "a/../../outside", "..", "", ".", "a\0b"], ids=repr
)
@pytest.mark.parametrize("name", ["weight", "step"])
def test_a_data_file_outside_the_checkpoint_is_refused(
    tmp_path: Path, path: str, name: str
) -> None:
    state = {"weight": f32(3), "step": 1}
    metadata = save(state, tmp_path / "checkpoint", thread_count=1)
    data = data_files(tmp_path / "checkpoint")[0].read_bytes()
    (tmp_path / "outside").write_bytes(data)
    place_of(metadata, name).relative_path = path
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(metadata))
    cause = error_of_load(state, tmp_path / "checkpoint")
    assert isinstance(cause, Unsafe)
    assert str(cause).startswith(f"{name}: ")
    assert repr(path) in str(cause)


def test_a_data_file_in_a_folder_of_the_checkpoint_is_read(tmp_path: Path) -> None:
    state = {"weight": f32(3), "step": 1}
    metadata = save(state, tmp_path, thread_count=1)
    (tmp_path / "rank0").mkdir()
    data_files(tmp_path)[0].rename(tmp_path / "rank0" / "data")
    for info in metadata.storage_data.values():
        info.relative_path = "rank0/data"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    loaded = emptied(state)
    load(loaded, tmp_path)
    assert_equal(loaded, state)


@pytest.mark.parametrize("name", ["weight", "step"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("offset", -1),
        ("offset", 2**40),
        ("offset", 2**63),
        ("offset", 2**64 - 1),
        ("offset", 2**70),
        ("offset", "0"),
        ("length", -1),
        ("length", 2**34),
        ("length", 2**64 - 1),
        ("length", 2**70),
        ("length", 1.5),
        ("relative_path", 3),
    ],
    ids=str,
)
def test_metadata_with_impossible_locations_is_refused_by_name(
    tmp_path: Path, name: str, field: str, value: Any
) -> None:
    state = {"weight": f32(3), "step": 1}
    metadata = save(state, tmp_path, thread_count=1)
    setattr(place_of(metadata, name), field, value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, CheckpointError)
    assert str(cause).startswith(f"{name}: ")


def test_metadata_that_would_exhaust_the_memory_is_refused_by_name(tmp_path: Path) -> None:
    metadata = save({"step": 1}, tmp_path, thread_count=1)
    place_of(metadata, "step").length = 2**50
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.CheckpointException, match="a record of 1125899906842624 bytes"):
        load({"step": 0}, tmp_path)


@pytest.mark.parametrize("sizes", [(2**62,), (2**31, 2**31, 2**31), (4,), (3, 1)], ids=str)
def test_metadata_with_impossible_sizes_is_refused(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    state = {"weight": f32(3)}
    metadata = save(state, tmp_path, thread_count=1)
    stored = metadata.state_dict_metadata["weight"]
    (chunk,) = stored.chunks
    stored.chunks = [dataclasses.replace(chunk, sizes=torch.Size(sizes))]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(dcp.CheckpointException):
        load(emptied(state), tmp_path)


def test_metadata_without_a_location_for_an_item_is_refused(tmp_path: Path) -> None:
    # Stock torch publishes such metadata if one of its writing threads fails.
    state = {"weight": f32(3), "bias": f32(2)}
    metadata = save(state, tmp_path)
    metadata.storage_data = {
        index: info for index, info in metadata.storage_data.items() if index.fqn != "bias"
    }
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    cause = error_of_load(state, tmp_path)
    assert isinstance(cause, Corrupt)
    assert str(cause).startswith("bias: ")
    assert "incomplete" in str(cause)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    cause = error_of_metadata(tmp_path / "nothing")
    assert isinstance(cause, FileNotFoundError)
    assert cause.filename == str(tmp_path / "nothing")
    assert "no committed checkpoint" in str(cause)


def test_errors_of_a_load_can_be_pickled(tmp_path: Path) -> None:
    # They are sent to other ranks.
    save({"weight": f32(3)}, tmp_path, thread_count=1)
    data_files(tmp_path)[0].unlink()
    cause = error_of_load({"weight": f32(3)}, tmp_path)
    copy = pickle.loads(pickle.dumps(cause))
    assert type(copy) is type(cause)
    assert (copy.errno, copy.filename) == (cause.errno, cause.filename)
