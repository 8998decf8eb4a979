"""``convert`` refuses objects, damaged files, and values that a format cannot hold."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from torch.utils.serialization import config

import torch_ckpt
from tests.commands import Run
from tests.conversions import STATE, TENSORS, Foreign, loaded, names_in, refused
from tests.safetensors_files import SAFE_DTYPES
from tests.support import (
    DTYPES,
    assert_equal,
    flip_bit,
    random_tensor,
    save,
    stock_save,
)
from torch_ckpt import CheckpointError, Corrupt, Unsafe, convert


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


ONE = torch.ones(1)

#: The message: name of the source, its contents, name of the target, and the error.
REFUSALS: dict[str, tuple[str, Any, str, type[Exception]]] = {
    "these values are not tensors: epoch, rng": ("ckpt", STATE, "m.safetensors", CheckpointError),
    "are both torch.save": ("a.pt", TENSORS, "b.pth", CheckpointError),
    "is neither a safetensors file": ("a.pt", b"no model at all", "b", CheckpointError),
    "no committed checkpoint": ("d", None, "m.pt", FileNotFoundError),
    "allow_pickle=True": ("a.pt", {"a": ONE, "b": Foreign()}, "ckpt", Unsafe),
    "b: the object in": ("ckpt", {"b": Foreign()}, "m.pt", Unsafe),
    "UTF-8 names": ("ckpt", {"\ud800": ONE}, "m.safetensors", CheckpointError),
    "not valid JSON": ("a.safetensors", {"a": "\ud800"}, "m.pt", Corrupt),
    "reserve this name": ("ckpt", {"__metadata__": ONE}, "m.safetensors", CheckpointError),
    "two values have the same name": (
        *("a.pt", {"a.b": ONE, "a": {"b": ONE}}, "ckpt", CheckpointError),
    ),
    "contains a list": ("a.pt", [ONE], "ckpt", CheckpointError),
    "a: .*65 dimensions": ("a.pt", {"a": torch.ones((1,) * 65)}, "m.safetensors", CheckpointError),
}


def write(path: Path, contents: Any) -> None:
    """Writes bytes, a directory (None), safetensors metadata, a torch.save file or a checkpoint."""
    if isinstance(contents, bytes):
        path.write_bytes(contents)
    elif contents is None:
        path.mkdir()
    elif path.suffix == ".safetensors":
        path.write_bytes(header(__metadata__=contents))
    elif path.suffix == ".pt":
        torch.save(contents, path)
    else:
        save(contents, path)


@pytest.mark.parametrize("match", REFUSALS)
def test_a_model_that_cannot_be_converted_is_refused(tmp_path: Path, match: str) -> None:
    source, contents, target, error = REFUSALS[match]
    write(tmp_path / source, contents)
    refused(tmp_path, error, match, source, target)


@pytest.mark.parametrize(
    ("source", "tensor", "message"),
    [
        ("a.pt", torch.ones(1000), "data of t does not match its checksum"),
        ("a.pt", torch.ones(1000)[:10], "data of t does not match its checksum"),
        ("ckpt", torch.ones(1000), "t"),
    ],
    ids=["a torch.save file", "a torch.save file, outside of a view", "a checkpoint"],
)
def test_flipped_bits_are_found(
    tmp_path: Path, source: str, tensor: torch.Tensor, message: str
) -> None:
    write(tmp_path / source, {"t": tensor})
    pattern = torch.ones(4).numpy().tobytes()
    files = [tmp_path / source, *(tmp_path / source).glob("*.distcp")]
    (file,) = (f for f in files if f.is_file() and pattern in f.read_bytes())
    flip_bit(file, file.read_bytes().index(pattern) + 2000, 3)
    target = "m.safetensors" if source == "a.pt" else "m.pt"
    refused(tmp_path, Corrupt, message, source, target)


def test_tensors_only_leaves_objects_out_and_notes_them(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    report = convert(tmp_path / "ckpt", tmp_path / "m.safetensors", tensors_only=True)
    assert report.notes == ["left out because they are not tensors: epoch, rng"]
    assert "model.weight" in safetensors.torch.load_file(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype not in SAFE_DTYPES.values()], ids=str
)
def test_a_dtype_that_safetensors_lacks_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"layer": {"t": random_tensor((2,), dtype)}}, tmp_path / "a.pt")
    name = str(dtype).removeprefix("torch.")
    match = rf"layer\.t: safetensors files cannot hold a tensor of dtype {name}"
    refused(tmp_path, CheckpointError, match, "a.pt", "m.safetensors")


@pytest.mark.parametrize("source", ["a.pt", "a"])
def test_allow_pickle_converts_objects_of_any_type(tmp_path: Path, source: str) -> None:
    state = {"a": torch.ones(1), "b": Foreign()}
    torch.save(state, tmp_path / "a.pt")
    save(state, tmp_path / "a")
    target = tmp_path / ("ckpt" if source == "a.pt" else "m.pt")
    report = convert(tmp_path / source, target, allow_pickle=True)
    assert (report.tensors, report.objects) == (1, 1)


def entry(begin: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DEFECTS = {
    "a gap": header(a=entry(0, 2), b=entry(3, 4)) + bytes(4),
    "an overlap": header(a=entry(0, 3), b=entry(2, 4)) + bytes(4),
    "a tail": header(a=entry(0, 2)) + bytes(4),
    "cut off": header(a=entry(0, 4)) + bytes(3),
    "a cut off header": header(a=entry(0, 4))[:-5],
    "a huge header": (1 << 62).to_bytes(8, "little") + b"{}",
    "another shape": header(a=entry(0, 4, shape=[5])) + bytes(4),
    "a negative size": header(a=entry(0, 4, shape=[-2, -2])) + bytes(4),
    "a fraction": header(a=entry(0, 4, shape=[4.0])) + bytes(4),
    "an unknown dtype": header(a=entry(0, 4, "Q9")) + bytes(4),
    "offsets the other way": header(a=entry(4, 0, shape=[0])) + bytes(4),
    "an entry that is none": header(a=7),
    "a key twice": header(a=entry(0, 1), b={"dtype": "U8"}).replace(b'"b"', b'"a"') + b"\0",
    "half a surrogate pair": header(**{"\ud800": entry(0, 1)}) + bytes(1),
    "no JSON": b"\x08" + bytes(7) + b"{nothing" + bytes(8),
    "metadata that is no text": header(__metadata__={"a": 1}),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_that_the_safetensors_library_finds_are_found(tmp_path: Path, defect: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(DEFECTS[defect])
    with pytest.raises(SafetensorError), safe_open(tmp_path / "m.safetensors", framework="pt"):
        pass
    match = "is not a valid safetensors file"
    refused(tmp_path, Corrupt, match, "m.safetensors", "m.pt")


class Subclass(torch.Tensor):
    """A subclass of Tensor, whose elements may have another meaning."""


@pytest.mark.parametrize(
    "value",
    [torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.ones(3).as_subclass(Subclass)],
    ids=["sparse", "meta", "a subclass"],
)
def test_tensors_that_are_not_plain_are_refused(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"t": value}, tmp_path / "a.pt")
    refused(tmp_path, CheckpointError, "a.pt", "a.pt", "ckpt", allow_pickle=True)


def rewritten(path: Path, compression: int = zipfile.ZIP_STORED, **contents: bytes) -> None:
    """Rewrites an archive with other contents for entries, by the last part of their names."""
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in entries:
            new.writestr(name, contents.get(name.rpartition("/")[2], data))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"compression": zipfile.ZIP_DEFLATED}, Corrupt, "is compressed"),
        ({"byteorder": b"big"}, CheckpointError, "big-endian"),
    ],
)
def test_an_archive_of_another_kind_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", **options)
    refused(tmp_path, error, match, "a.pt", "ckpt")


def test_a_file_without_checksums_is_converted(tmp_path: Path) -> None:
    with config.patch({"save.compute_crc32": False}):
        torch.save(STATE, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.pt")
    assert_equal(loaded(tmp_path / "b.pt"), STATE)


def damaged(data: st.DataObject, file: Path) -> bytes:
    """Returns the contents of a file with a few flipped bits."""
    contents = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3), "flips")):
        at = data.draw(st.integers(0, len(contents) - 1), "at")
        contents[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    return bytes(contents)


@given(data=st.data())
def test_a_damaged_torch_save_file_is_refused_or_converted_correctly(
    tmp_path: Path, data: st.DataObject
) -> None:
    state = {"t": torch.arange(30.0), "n": 7, "v": torch.arange(9)[2:5]}
    torch.save(state, tmp_path / "sound.pt")
    contents = damaged(data, tmp_path / "sound.pt")
    sizes = st.one_of(st.just(len(contents)), st.integers(0, len(contents)))
    (tmp_path / "a.pt").write_bytes(contents[: data.draw(sizes, "length")])
    try:
        convert(tmp_path / "a.pt", tmp_path / "ckpt", overwrite=True)
    except CheckpointError:
        return
    convert(tmp_path / "ckpt", tmp_path / "b.pt", overwrite=True)
    assert_equal(loaded(tmp_path / "b.pt"), state)


@given(data=st.data(), target=st.sampled_from(["m.pt", "ckpt"]))
def test_a_damaged_safetensors_file_is_converted_or_refused(
    tmp_path: Path, data: st.DataObject, target: str
) -> None:
    # The format has no checksums, so damage may change names and values, but nothing else.
    safetensors.torch.save_file(TENSORS, tmp_path / "sound.safetensors", {"format": "pt"})
    contents = damaged(data, tmp_path / "sound.safetensors")
    (tmp_path / "a.safetensors").write_bytes(contents)
    try:
        report = convert(tmp_path / "a.safetensors", tmp_path / target, overwrite=True)
    except CheckpointError:
        return
    assert report.tensors == len(TENSORS)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"a": ONE}, ["--max-shard-size", "5GB"], "torch-ckpt: max_shard_size writes a directory"),
        ({"a": 1}, [], "--tensors-only"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    tmp_path: Path, run: Run, values: Any, options: list[str], message: str
) -> None:
    torch.save(values, tmp_path / "a.pt")
    assert message in run.refused(
        "convert", tmp_path / "a.pt", tmp_path / "m.safetensors", *options
    )


def checkpoint_with_paths(directory: Path, paths: Any) -> None:
    """Writes a checkpoint of two tensors, a and b, with the given planner data in its metadata."""
    metadata = stock_save({"a": torch.ones(1), "b": torch.zeros(1)}, directory)
    metadata.planner_data = paths
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("path", [None, "text", 5, (), ([],), ["a"], (True,)])
def test_a_missing_or_invalid_path_is_replaced_by_the_flat_name(tmp_path: Path, path: Any) -> None:
    paths = None if path is None else {"a": path, "b": ("x", "b")}
    checkpoint_with_paths(tmp_path / "ckpt", paths)
    convert(tmp_path / "ckpt", tmp_path / "m.pt")
    b = {"b": torch.zeros(1)}
    assert_equal(loaded(tmp_path / "m.pt"), {"a": torch.ones(1), **({"x": b} if paths else b)})


def test_paths_that_contradict_each_other_are_corrupt(tmp_path: Path) -> None:
    checkpoint_with_paths(tmp_path / "ckpt", {"a": ("x",), "b": ("x", "y")})
    refused(tmp_path, Corrupt, "b: its path", "ckpt", "m.pt")


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 10**6}], ids=["file", "directory"])
def test_a_header_that_is_too_long_is_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    # JSON needs six bytes for each of these characters. Readers accept 100 MB.
    names = ["\x01" * (64000 + n) for n in range(270)]
    torch.save(dict.fromkeys(names, torch.ones(1)), tmp_path / "a.pt")
    target = tmp_path / ("hf" if options else "m.safetensors")
    written: list[torch_ckpt._base.progress.Progress] = []
    with pytest.raises(CheckpointError, match="header of the safetensors file"):
        convert(tmp_path / "a.pt", target, progress=written.append, **options)
    assert written == []
    assert names_in(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("target", ["ckpt", "b.pt"])
def test_tensors_hidden_in_an_object_are_refused(tmp_path: Path, target: str) -> None:
    torch.save({"model": torch.nn.Linear(2, 2), "t": ONE}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: model is an object with tensors"):
        convert(tmp_path / "a.pt", tmp_path / target, select=["model"], allow_pickle=True)
