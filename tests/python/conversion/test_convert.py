"""``convert``: values that arrive in the target, sharded targets, and the command."""

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import torch_ckpt
from tests.commands import Run
from tests.conversions import STATE, TENSORS, loaded, names_in, refused
from tests.python.inspection.test_diff import shards
from tests.safetensors_files import SAFE_DTYPES
from tests.support import (
    DTYPES,
    assert_equal,
    emptied,
    random_tensor,
    save,
    stock_load,
    stock_save,
)
from torch_ckpt import CheckpointError, Corrupt, Unsafe, convert
from torch_ckpt.cli import arguments


@pytest.mark.parametrize("saver", [save, stock_save])
def test_a_checkpoint_becomes_a_torch_save_file_of_nested_dicts(tmp_path: Path, saver: Any) -> None:
    saver(STATE, tmp_path / "ckpt")
    report = convert(tmp_path / "ckpt", tmp_path / "model.pt")
    assert_equal(loaded(tmp_path / "model.pt"), STATE)
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None
    assert (report.tensors, report.objects, report.notes) == (5, 2, [])
    assert report.bytes == 7 * 5 * 4 + 7 * 2 + 4 + 7 * 5 * 8


def test_a_torch_save_file_becomes_a_checkpoint_that_stock_torch_loads(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "ckpt")
    state = emptied(STATE)
    stock_load(state, tmp_path / "ckpt")
    assert_equal(state, STATE)
    assert torch_ckpt.verify(tmp_path / "ckpt").ok


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 4)], ids=str)
def test_every_dtype_survives_torch_save_to_a_checkpoint_and_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    state = {"t": random_tensor(shape, dtype)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.pt")
    assert_equal(loaded(tmp_path / "b.pt"), state)


@pytest.mark.parametrize("dtype", SAFE_DTYPES.values(), ids=str)
def test_every_dtype_of_safetensors_survives_both_ways(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"t": random_tensor((3, 4), dtype), "e": random_tensor((0, 4), dtype)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["e", "t"]
    convert(tmp_path / "m.safetensors", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.pt")
    assert_equal({name: loaded(tmp_path / "b.pt")[name] for name in ("t", "e")}, state)


few = settings(max_examples=40)

NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)

CODES = [SAFE_DTYPES[code] for code in ("F32", "BF16", "I64", "U8", "F8_E4M3", "C64", "BOOL")]

MODELS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(CODES), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


@few
@given(model=MODELS, wave=st.integers(1, 200))
def test_the_safetensors_library_reads_a_converted_file(
    tmp_path: Path, model: dict[str, Any], wave: int
) -> None:
    state = {name: random_tensor(tuple(shape), dtype) for name, (dtype, shape) in model.items()}
    torch.save(state, tmp_path / "a.pt")
    target = tmp_path / "m.safetensors"
    convert(tmp_path / "a.pt", target, overwrite=True, max_host_bytes=wave)
    read = safetensors.torch.load_file(target)
    assert_equal({name: read[name] for name in state}, state)
    assert len(read) == len(state)


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "m.safetensors", {"format": "pt", "by": "us"})
    report = convert(tmp_path / "m.safetensors", tmp_path / "m.pt")
    read = loaded(tmp_path / "m.pt")
    assert_equal({name: read[name] for name in TENSORS}, TENSORS)
    assert report.notes == ["left out the metadata of the safetensors file: by, format"]


KEYS = st.text("abc", min_size=1, max_size=2)

VALUES = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.booleans(),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.ones(shape)),
)

TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=8,
)


@few
@given(state=st.dictionaries(KEYS, TREES, min_size=1, max_size=3))
def test_nested_dicts_and_lists_survive_a_checkpoint(tmp_path: Path, state: Any) -> None:
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt", overwrite=True, max_host_bytes=20)
    convert(tmp_path / "ckpt", tmp_path / "b.pt", overwrite=True)
    assert_equal(loaded(tmp_path / "b.pt"), state)


def test_views_of_all_kinds_arrive_by_value(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "part": base[1:3],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.arange(3).expand(4, 3),
        "conjugated": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "m.safetensors")
    read = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert_equal({name: read[name] for name in state}, {n: t.detach() for n, t in state.items()})


def test_shards_of_a_tensor_are_joined(tmp_path: Path) -> None:
    tensor = random_tensor((5, 4), torch.float32)
    boxes = [((0, 0), (2, 4)), ((2, 0), (3, 1)), ((2, 1), (3, 3))]
    shards(tmp_path / "ckpt", "t", tensor, boxes)
    convert(tmp_path / "ckpt", tmp_path / "m.pt")
    assert_equal(loaded(tmp_path / "m.pt"), {"t": tensor})


def test_tensors_that_share_memory_are_noted_and_both_arrive(tmp_path: Path) -> None:
    weight = random_tensor((4, 4), torch.float32)
    torch.save({"embedding": weight, "head": weight}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "m.safetensors")
    note = "tensors share memory in the source, but not in the target: embedding, head"
    assert report.notes == [note]
    read = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert_equal([read["embedding"], read["head"]], [weight, weight])


def test_values_that_a_checkpoint_cannot_hold_are_noted(tmp_path: Path) -> None:
    torch.save({"state": {0: torch.ones(1)}, "nothing": {}}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "ckpt")
    assert report.notes == [
        "left out empty dicts: nothing",
        "converted keys to strings: state.0",
    ]


def test_a_directory_of_safetensors_files_has_the_checksums_of_a_save(tmp_path: Path) -> None:
    state = TENSORS | {"empty": torch.zeros(0, 3), "scalar": torch.tensor(1.5)}
    # Blocks of checksums have 16 KiB up to 16 MiB, and 32 KiB then.
    for name, count in (("blocks", (16 << 20) - 1), ("larger blocks", (16 << 20) + 1)):
        state[name] = random_tensor((count,), torch.uint8)
    (tmp_path / "config.json").write_text("{}")
    config = tmp_path / "config.json"
    save(state, tmp_path / "ckpt")
    options: dict[str, Any] = {"config": config, "max_shard_size": 100}
    # Waves of a few bytes write parts of one file several times.
    report = convert(tmp_path / "ckpt", tmp_path / "hf", max_host_bytes=50, **options)
    torch_ckpt.save(state, tmp_path / "saved", format=torch_ckpt.Safetensors(**options))
    written = names_in(tmp_path / "hf")
    assert "torch_ckpt.checksums" in written
    assert written == names_in(tmp_path / "saved") == sorted(Path(f).name for f in report.files)
    for name in written:
        ours = (tmp_path / "hf" / name).read_bytes()
        assert ours == (tmp_path / "saved" / name).read_bytes(), name
    verified = torch_ckpt.verify(tmp_path / "hf")
    assert (verified.ok, verified.unverifiable) == (True, [])


def test_strided_tensors_become_contiguous_in_a_directory_of_files(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {"t": base.t(), "step": base[:, ::2], "expanded": base[:1].expand(3, 6)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "hf", max_shard_size=10**6)
    read = safetensors.torch.load_file(tmp_path / "hf/model.safetensors")
    for name, value in state.items():
        assert_equal(read[name], value.contiguous())


def test_shards_respect_the_limit_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    state = {f"layer.{n}": random_tensor((10,), torch.float32, n) for n in range(5)}
    save(state, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "hf", max_shard_size=100)
    assert names_in(tmp_path / "hf") == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
        "torch_ckpt.checksums",
    ]
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    for name, tensor in state.items():
        read = safetensors.torch.load_file(tmp_path / "hf" / index["weight_map"][name])
        assert_equal(read[name], tensor)
    convert(tmp_path / "hf", tmp_path / "m.pt")
    assert_equal(loaded(tmp_path / "m.pt"), state)


def test_a_directory_with_a_single_file_needs_no_index(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "hf", max_shard_size=10**6)
    assert names_in(tmp_path / "hf") == ["model.safetensors", "torch_ckpt.checksums"]
    convert(tmp_path / "hf", tmp_path / "ckpt")
    assert torch_ckpt.verify(tmp_path / "ckpt").ok


INDEXES: dict[str, tuple[Any, type[Exception]]] = {
    "x.safetensors: the name is not a relative path": ({"a": "../x.safetensors"}, Unsafe),
    "assigns b to x.safe.*, but no file contains": (dict.fromkeys("ab", "x.safetensors"), Corrupt),
    "the index assigns b to y": ({"b": "y.safetensors"}, Corrupt),
    "is not a valid index": (["a"], Corrupt),
    "2 safetensors files and 0 ind": (None, CheckpointError),
}


@pytest.mark.parametrize("match", INDEXES)
def test_several_files_without_a_matching_index_are_refused(tmp_path: Path, match: str) -> None:
    weight_map, error = INDEXES[match]
    (tmp_path / "hf").mkdir()
    for name in "xy":
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / f"hf/{name}.safetensors")
    if weight_map is not None:
        index = tmp_path / "hf/model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, error, match, "hf", "m.pt")


def test_the_command_converts_and_prints_a_summary(tmp_path: Path, run: Run) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    (line,) = run("convert", tmp_path / "a.pt", tmp_path / "m.safetensors").splitlines()
    assert line.startswith(f"converted {tmp_path}/a.pt (torch.save) to {tmp_path}/m.safetensors")
    assert "3 tensors, 29 B" in line


def test_the_command_gives_json(tmp_path: Path, run: Run) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    document = run.json("convert", tmp_path / "a.pt", tmp_path / "hf", "--max-shard-size", "1kB")
    names = ["model.safetensors", "torch_ckpt.checksums"]
    assert document["files"] == [str(tmp_path / "hf" / name) for name in names]
    assert (document["source_format"], document["target_format"]) == ("torch", "safetensors")


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("800", 800), ("2k", 2000)]
)
def test_sizes_are_read_in_the_usual_units(text: str, count: int) -> None:
    assert arguments._size(1)(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "1e9", "5 bytes"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        arguments._size(1)(text)
