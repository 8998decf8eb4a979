"""The headers of safetensors files, and the files beside them, are hostile.

The attacker has provided the files, and wants a load to crash, to use much memory, or to read other
files of the machine.
"""

from __future__ import annotations

import json
import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.attacks.support import MOST_MEMORY
from tests.safetensors_files import CHECKSUMS, write_checksums, write_shards
from tests.support import assert_equal, cause_of
from torch_ckpt import CheckpointError, Corrupt, Unsafe, cli

WEIGHT = torch.arange(12.0).reshape(3, 4)


def file_of(header: bytes | str, data: bytes = b"", length: int | None = None) -> bytes:
    """Returns the contents of a file. ``length`` is the stated length of the header."""
    text = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin: int = 0, end: int = 48, shape: Any = (3, 4), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def header(**entries: Any) -> str:
    return json.dumps({"weight": entry(), **entries})


DATA = WEIGHT.numpy().tobytes()

MILLION = 1_000_000

FILES: dict[str, Callable[[], bytes]] = {
    "a length of 2^64 - 1": lambda: file_of(header(), DATA, (1 << 64) - 1),
    "a length beyond the file": lambda: file_of(header(), DATA, 1000),
    "a length of 0": lambda: file_of(header(), DATA, 0),
    "a header of 200 MB": lambda: file_of(b" " * 200 * MILLION, DATA),
    "a header of 90 MB of spaces": lambda: file_of(b" " * 90 * MILLION, DATA),
    "no header": lambda: b"",
    "a key twice": lambda: file_of(f'{{"weight":{json.dumps(entry())},{header()[1:]}', DATA),
    "overlapping tensors": lambda: file_of(header(b=entry(0, 48)), DATA),
    "many tensors with the same data": lambda: file_of(
        header(**{str(n): entry() for n in range(100_000)}), DATA
    ),
    "a gap": lambda: file_of(header(b=entry(50, 98)), DATA * 3),
    "an unused end": lambda: file_of(header(), DATA + b"x"),
    "a missing end": lambda: file_of(header(), DATA[:-1]),
    "a size that overflows": lambda: file_of(header(weight=entry(shape=[1 << 62, 1 << 62, 12]))),
    "a product that wraps to 48": lambda: file_of(
        header(weight=entry(shape=[(1 << 62) + 3, 4])), DATA
    ),
    "a size beyond 64 bits": lambda: file_of(header(weight=entry(shape=[10**30])), DATA),
    "a negative size": lambda: file_of(header(weight=entry(shape=[-3, -4])), DATA),
    "a size of 1e2": lambda: file_of(header().replace("[3, 4]", "[1e2]"), DATA),
    "65 dimensions": lambda: file_of(header(weight=entry(shape=[1] * 64 + [12])), DATA),
    "a million dimensions": lambda: file_of(header(weight=entry(shape=[1] * MILLION)), DATA),
    "a million nested lists": lambda: file_of(
        header(weight=0).replace("0", "[" * MILLION + "]" * MILLION), DATA
    ),
    "a million nested objects": lambda: file_of(b'{"weight":' * MILLION, DATA),
    "ten million empty entries": lambda: file_of("{" + ",".join(['"":{}'] * 10 * MILLION) + "}"),
    "ten million metadata keys": lambda: file_of(
        '{"__metadata__":{' + ",".join(['"":""'] * 10 * MILLION) + "}}"
    ),
    "a name that is not UTF-8": lambda: file_of(
        header().encode().replace(b"weight", b"w\xff"), DATA
    ),
    "half a surrogate pair": lambda: file_of(header().replace("weight", "\\ud800"), DATA),
    "an encoded surrogate": lambda: file_of(
        header().encode().replace(b"weight", b"\xed\xa0\x80"), DATA
    ),
    "a long name": lambda: file_of(header(**{"n" * MILLION: entry(48, 48, [0])}), DATA),
    "an unknown dtype": lambda: file_of(header(weight=entry(dtype="F128")), DATA),
    "metadata that is a list": lambda: file_of(header(__metadata__=[]), DATA),
    "an archive of torch.save": lambda: b"PK\3\4" + bytes(100),
}


def assert_stopped(path: Path, *kinds: type[BaseException]) -> None:
    """Asserts that each way to read the path refuses it in one sentence, with little memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = {"weight": torch.full((3, 4), -1.0)}
    for load in (
        lambda: torch_ckpt.load(state, path, no_dist=True),
        lambda: dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(path), no_dist=True),
    ):
        with pytest.raises(dcp.CheckpointException) as error:
            load()
        cause = cause_of(error.value)
        assert isinstance(cause, kinds), f"{type(cause).__name__}: {cause}"
        assert len(str(cause)) < 2000
    assert_equal(state["weight"], torch.full((3, 4), -1.0))
    for command in ("ls", "verify", "show"):
        assert cli.main([command, str(path)]) == 2
    with pytest.raises(kinds):
        torch_ckpt.convert(path, path.parent / "converted.pt")
    assert not (path.parent / "converted.pt").exists()
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    assert used < MOST_MEMORY, f"{used} bytes of memory"


@pytest.mark.parametrize("attack", FILES)
def test_a_hostile_header_is_refused(tmp_path: Path, attack: str) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(FILES[attack]())
    assert_stopped(tmp_path / "hf", Corrupt)


def test_a_file_with_any_byte_changed_is_loaded_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": WEIGHT, "b": torch.ones(2)}, path, {"k": "v"})
    sound = path.read_bytes()
    outcomes = set()
    for at in range(len(sound) - WEIGHT.nbytes - 8):
        for value in {0, 0x22, 0x30, 0x7D, 0xFF, sound[at] ^ 1, sound[at] ^ 0x80}:
            path.write_bytes(sound[:at] + bytes([value]) + sound[at + 1 :])
            try:
                torch_ckpt.load({"weight": torch.zeros(3, 4)}, path, no_dist=True)
                outcomes.add("loaded")
            except dcp.CheckpointException as error:
                cause = cause_of(error)
                assert isinstance(cause, CheckpointError), f"{at} {value}: {cause!r}"
                outcomes.add(type(cause).__name__)
    assert {"loaded", "Corrupt", "LoadMismatch"} <= outcomes


INDEXES: dict[str, tuple[str, type[Exception]]] = {
    "a parent directory": ('{"weight_map":{"weight":"../x.safetensors"}}', Unsafe),
    "an absolute path": ('{"weight_map":{"weight":"/etc/passwd"}}', Unsafe),
    "a zero byte": ('{"weight_map":{"weight":"x\\u0000"}}', Unsafe),
    "a million nested lists": ('{"x":' + "[" * MILLION, Corrupt),
    "ten million numbers": ('{"x":[' + "1," * 10 * MILLION + "1]}", Corrupt),
    "a file twice": ('{"weight_map":{"weight":"x.safetensors","b":"./x.safetensors"}}', Corrupt),
    "half a surrogate pair": ('{"weight_map":{"\\ud800":"x.safetensors"}}', Corrupt),
    "a number": ('{"weight_map":{"weight":1}}', Corrupt),
}


@pytest.mark.parametrize("attack", INDEXES)
def test_a_hostile_index_is_refused(tmp_path: Path, attack: str) -> None:
    text, kind = INDEXES[attack]
    (tmp_path / "hf").mkdir()
    for place in ("x.safetensors", "hf/x.safetensors"):
        safetensors.torch.save_file({"weight": WEIGHT}, tmp_path / place)
    (tmp_path / "hf/model.safetensors.index.json").write_text(text)
    assert_stopped(tmp_path / "hf", kind)


def linked_file(directory: Path) -> None:
    (directory / "model-00001-of-00002.safetensors").rename(directory.parent / "x")
    (directory / "model-00001-of-00002.safetensors").symlink_to(directory.parent / "x")


def linked_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").rename(directory.parent / "x")
    (directory / "model.safetensors.index.json").symlink_to(directory.parent / "x")


def linked_checksums(directory: Path) -> None:
    (directory / CHECKSUMS).rename(directory.parent / "x")
    (directory / CHECKSUMS).symlink_to(directory.parent / "x")


@pytest.mark.parametrize("attack", [linked_file, linked_index, linked_checksums])
def test_a_link_is_not_followed(tmp_path: Path, attack: Callable[[Path], None]) -> None:
    write_checksums(write_shards(tmp_path / "hf", {"weight": WEIGHT}, {"b": torch.ones(2)}))
    attack(tmp_path / "hf")
    assert_stopped(tmp_path / "hf", Unsafe)


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    os.mkfifo(tmp_path / "hf/model.safetensors")
    with pytest.raises(dcp.CheckpointException):
        torch_ckpt.load({"weight": torch.zeros(3, 4)}, tmp_path / "hf", no_dist=True)


def test_a_file_that_is_truncated_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": WEIGHT}, path)
    reader = torch_ckpt.FileSystemReader(path)

    class Truncating(dcp.DefaultLoadPlanner):
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_planner(*args, **kwargs)
            os.truncate(path, path.stat().st_size - 1)

    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(
            {"weight": torch.zeros(3, 4)}, storage_reader=reader, planner=Truncating(), no_dist=True
        )
    assert isinstance(cause_of(error.value), Corrupt)
