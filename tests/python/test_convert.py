"""``convert``: what arrives, what is refused, what is left behind, and how much memory it takes."""

import argparse
import errno
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import torch_ckpt
from tests.support import (
    DTYPES,
    assert_equal,
    emptied,
    files_limited_to,
    flip_bit,
    random_tensor,
    record_of,
    save,
    stock_load,
    stock_save,
)
from torch_ckpt import cli
from torch_ckpt.converting import ConvertReport, convert
from torch_ckpt.directory import OpenDirectory
from torch_ckpt.safetensors_format import DTYPES as SAFETENSORS_DTYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.* support is experimental"),
]

STATE = {
    "model": {
        "weight": random_tensor((7, 5), torch.float32),
        "bias": random_tensor((7,), torch.bfloat16),
    },
    "optimizer": {
        "state": [{"step": torch.tensor(3.0), "m": random_tensor((7, 5), torch.float64)}]
    },
    "none": torch.empty(0, 4),
    "epoch": 12,
    "rng": (torch.arange(5, dtype=torch.uint8), "text"),
}

TENSORS = {"b": random_tensor((2, 3), torch.float16), "a.b": torch.ones(4), "c": torch.tensor(True)}


class Foreign:
    """A type that nobody has declared safe."""


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refused(
    directory: Path, error: type[Exception], match: str, *names: str, **options: Any
) -> None:
    """Converts and expects the error; nothing may have changed in the directory."""
    before = names_in(directory)
    with pytest.raises(error, match=match):
        convert(directory / names[0], directory / names[1], **options)
    assert names_in(directory) == before


# --- what arrives --------------------------------------------------------------------------------


def test_a_checkpoint_becomes_a_torch_save_file_of_the_same_nested_dicts(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    report = convert(tmp_path / "ckpt", tmp_path / "model.pt")
    assert_equal(loaded(tmp_path / "model.pt"), STATE)
    assert (report.tensors, report.objects, report.notes) == (5, 2, [])
    assert report.bytes == 7 * 5 * 4 + 7 * 2 + 4 + 7 * 5 * 8


def test_a_torch_save_file_becomes_a_checkpoint_that_stock_torch_loads(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "ckpt")
    state = emptied(STATE)
    stock_load(state, tmp_path / "ckpt")
    assert_equal(state, STATE)
    assert torch_ckpt.verify(tmp_path / "ckpt").ok


def test_a_converted_file_passes_the_check_of_its_archive(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "model.pt")
    assert zipfile.ZipFile(tmp_path / "model.pt").testzip() is None


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


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES.values(), ids=str)
def test_every_dtype_of_safetensors_survives_them_and_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    state = {"t": random_tensor((3, 4), dtype), "e": random_tensor((0, 4), dtype)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["e", "t"]
    convert(tmp_path / "m.safetensors", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.pt")
    assert_equal({name: loaded(tmp_path / "b.pt")[name] for name in ("t", "e")}, state)


NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)
CODES = [
    SAFETENSORS_DTYPES[code] for code in ("F32", "BF16", "I64", "U8", "F8_E4M3", "C64", "BOOL")
]
MODELS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(CODES), st.lists(st.integers(0, 4), max_size=3)),
    max_size=6,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(model=MODELS, wave=st.integers(1, 200))
def test_the_safetensors_library_reads_what_is_written(
    tmp_path: Path, model: dict[str, Any], wave: int
) -> None:
    state = {name: random_tensor(tuple(shape), dtype) for name, (dtype, shape) in model.items()}
    torch.save(state, tmp_path / "a.pt")
    target = tmp_path / "m.safetensors"
    convert(tmp_path / "a.pt", target, overwrite=True, max_host_bytes=wave)
    read = safetensors.torch.load_file(target)
    assert_equal({name: read[name] for name in state}, state)
    assert len(read) == len(state)


def test_what_the_safetensors_library_writes_is_read(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "m.safetensors", {"format": "pt", "by": "us"})
    report = convert(tmp_path / "m.safetensors", tmp_path / "m.pt")
    read = loaded(tmp_path / "m.pt")
    assert_equal({name: read[name] for name in TENSORS}, TENSORS)
    assert report.notes == ["metadata of the safetensors file, which has no place here: by, format"]


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


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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


def test_shards_of_a_tensor_are_put_together(tmp_path: Path) -> None:
    tensor = random_tensor((5, 4), torch.float32)
    boxes = [((0, 0), (2, 4)), ((2, 0), (3, 1)), ((2, 1), (3, 3))]
    directory = tmp_path / "ckpt"
    directory.mkdir()
    places, chunks = {}, []
    for number, (begin, sizes) in enumerate(boxes):
        part = tensor[begin[0] : begin[0] + sizes[0], begin[1] : begin[1] + sizes[1]].clone()
        record = record_of(part)
        (directory / f"__{number}_0.distcp").write_bytes(record)
        chunks.append(ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes)))
        index = MetadataIndex("t", torch.Size(begin))
        places[index] = _StorageInfo(f"__{number}_0.distcp", 0, len(record))
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), tensor.size(), chunks)
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata({"t": entry}, storage_data=places)))
    convert(directory, tmp_path / "m.pt")
    assert_equal(loaded(tmp_path / "m.pt"), {"t": tensor})


def test_tensors_that_share_memory_are_noted_and_both_arrive(tmp_path: Path) -> None:
    weight = random_tensor((4, 4), torch.float32)
    torch.save({"embedding": weight, "head": weight}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "m.safetensors")
    assert report.notes == ["share memory in the source, and no more: embedding, head"]
    read = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert_equal([read["embedding"], read["head"]], [weight, weight])


def test_what_a_checkpoint_cannot_say_is_noted(tmp_path: Path) -> None:
    torch.save({"state": {0: torch.ones(1)}, "nothing": {}}, tmp_path / "a.pt")
    report = convert(tmp_path / "a.pt", tmp_path / "ckpt")
    assert report.notes == [
        "empty dicts, which have no name: nothing",
        "keys that are no texts become texts: state.0",
    ]


# --- sharded safetensors -------------------------------------------------------------------------


def test_shards_hold_no_more_than_asked_for_and_the_index_names_every_tensor(
    tmp_path: Path,
) -> None:
    state = {f"layer.{n}": random_tensor((10,), torch.float32, n) for n in range(5)}
    save(state, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "hf", max_shard_size=100)
    assert names_in(tmp_path / "hf") == [
        *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 200}
    for name, tensor in state.items():
        read = safetensors.torch.load_file(tmp_path / "hf" / index["weight_map"][name])
        assert_equal(read[name], tensor)


def test_a_directory_with_an_index_is_read_whole(tmp_path: Path) -> None:
    state = {f"layer.{n}": random_tensor((10,), torch.float32, n) for n in range(5)}
    save(state, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "hf", max_shard_size=50)
    convert(tmp_path / "hf", tmp_path / "m.pt")
    assert_equal(loaded(tmp_path / "m.pt"), state)


def test_one_file_of_all_needs_no_index(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "hf", max_shard_size=10**6)
    assert names_in(tmp_path / "hf") == ["model.safetensors"]
    convert(tmp_path / "hf", tmp_path / "ckpt")
    assert torch_ckpt.verify(tmp_path / "ckpt").ok


def sharded(tmp_path: Path, weight_map: Any) -> None:
    """A directory with one file of the tensor "a" and an index of the caller's."""
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "hf/x.safetensors")
    index = tmp_path / "hf/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_that_names_a_file_elsewhere_is_unsafe(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": "../x.safetensors"})
    refused(tmp_path, torch_ckpt.Unsafe, "no file in the checkpoint's directory", "hf", "m.pt")


def test_an_index_that_names_a_tensor_which_is_not_there_is_corrupt(tmp_path: Path) -> None:
    sharded(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    refused(
        tmp_path, torch_ckpt.Corrupt, "b: the index has it in x.safe.*, and no file", "hf", "m.pt"
    )


def test_a_tensor_that_the_index_does_not_name_is_corrupt(tmp_path: Path) -> None:
    sharded(tmp_path, {})
    (tmp_path / "hf/y.safetensors").write_bytes((tmp_path / "hf/x.safetensors").read_bytes())
    index = tmp_path / "hf/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "y.safetensors"}}))
    refused(tmp_path, torch_ckpt.Corrupt, "the index has it in", "hf", "m.pt")


def test_an_index_without_a_map_is_corrupt(tmp_path: Path) -> None:
    sharded(tmp_path, ["a"])
    refused(tmp_path, torch_ckpt.Corrupt, "is not an index", "hf", "m.pt")


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    for name in "ab":
        safetensors.torch.save_file({name: torch.ones(1)}, tmp_path / f"hf/{name}.safetensors")
    refused(tmp_path, torch_ckpt.CheckpointError, "2 safetensors files and 0 ind", "hf", "m.pt")


# --- what is refused -----------------------------------------------------------------------------


def test_objects_are_refused_by_name_in_safetensors(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    error = torch_ckpt.CheckpointError
    refused(tmp_path, error, "these are none: epoch, rng", "ckpt", "m.safetensors")


def test_tensors_only_leaves_objects_out_and_says_so(tmp_path: Path) -> None:
    save(STATE, tmp_path / "ckpt")
    report = convert(tmp_path / "ckpt", tmp_path / "m.safetensors", tensors_only=True)
    assert report.notes == ["left out, since they are no tensors: epoch, rng"]
    assert "model.weight" in safetensors.torch.load_file(tmp_path / "m.safetensors")


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DTYPES if dtype not in SAFETENSORS_DTYPES.values()], ids=str
)
def test_a_dtype_that_safetensors_do_not_have_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.save({"layer": {"t": random_tensor((2,), dtype)}}, tmp_path / "a.pt")
    match = rf"layer\.t \({dtype}\)"
    refused(tmp_path, torch_ckpt.CheckpointError, match, "a.pt", "m.safetensors")


def test_one_format_to_itself_is_refused(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    refused(tmp_path, torch_ckpt.CheckpointError, "are both torch.save", "a.pt", "b.pth")


def test_other_files_are_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"no model at all")
    refused(tmp_path, torch_ckpt.CheckpointError, "is neither a safetensors file", "a.pt", "b")


def test_a_directory_without_a_checkpoint_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    refused(tmp_path, FileNotFoundError, "no committed checkpoint", "d", "m.pt")


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Foreign()}, tmp_path / "a.pt")
    refused(tmp_path, torch_ckpt.Unsafe, "allow_pickle=True", "a.pt", "ckpt")


def test_an_object_of_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    save({"b": Foreign()}, tmp_path / "ckpt")
    refused(tmp_path, torch_ckpt.Unsafe, "b: the object in", "ckpt", "m.pt")


@pytest.mark.parametrize("source", ["a.pt", "a"])
def test_allow_pickle_takes_objects_of_any_type_over(tmp_path: Path, source: str) -> None:
    state = {"a": torch.ones(1), "b": Foreign()}
    torch.save(state, tmp_path / "a.pt")
    save(state, tmp_path / "a")
    target = tmp_path / ("ckpt" if source == "a.pt" else "m.pt")
    report = convert(tmp_path / source, target, allow_pickle=True)
    assert (report.tensors, report.objects) == (1, 1)


def test_a_flipped_bit_of_a_torch_save_file_is_found(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(1000)}, tmp_path / "a.pt")
    begin = (tmp_path / "a.pt").read_bytes().index(torch.ones(4).numpy().tobytes())
    flip_bit(tmp_path / "a.pt", begin + 2000, 3)
    refused(tmp_path, torch_ckpt.Corrupt, "t: .*other bytes", "a.pt", "m.safetensors")


def test_a_flipped_bit_outside_of_a_view_is_found(tmp_path: Path) -> None:
    torch.save({"t": torch.ones(1000)[:10]}, tmp_path / "a.pt")
    begin = (tmp_path / "a.pt").read_bytes().index(torch.ones(4).numpy().tobytes())
    flip_bit(tmp_path / "a.pt", begin + 2000, 3)
    refused(tmp_path, torch_ckpt.Corrupt, "t: .*other bytes", "a.pt", "m.safetensors")


def test_a_flipped_bit_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    save({"t": torch.ones(1000)}, tmp_path / "ckpt")
    (file,) = (f for f in (tmp_path / "ckpt").glob("*.distcp") if f.stat().st_size)
    flip_bit(file, file.read_bytes().index(torch.ones(4).numpy().tobytes()) + 2000, 3)
    refused(tmp_path, torch_ckpt.Corrupt, "t", "ckpt", "m.pt")


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


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
    "a key twice": b"\x4c"
    + bytes(7)
    + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
    + b'"a":{"dtype":"U8"}}   '
    + b"\0",
    "half a surrogate pair": header(**{"\ud800": entry(0, 1)}) + bytes(1),
    "no JSON": b"\x08" + bytes(7) + b"{nothing" + bytes(8),
    "metadata that is no text": header(__metadata__={"a": 1}),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_a_safetensors_file_is_found_as_by_its_library(
    tmp_path: Path, defect: str
) -> None:
    (tmp_path / "m.safetensors").write_bytes(DEFECTS[defect])
    with pytest.raises(SafetensorError), safe_open(tmp_path / "m.safetensors", framework="pt"):
        pass
    match = "is not a valid safetensors file"
    refused(tmp_path, torch_ckpt.Corrupt, match, "m.safetensors", "m.pt")


class Subclass(torch.Tensor):
    """A tensor that may mean something else."""


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.ones(3).as_subclass(Subclass),
    ],
    ids=["sparse", "meta", "a subclass"],
)
def test_tensors_that_are_not_plain_are_refused(tmp_path: Path, value: torch.Tensor) -> None:
    torch.save({"t": value}, tmp_path / "a.pt")
    options = {"allow_pickle": True}
    refused(tmp_path, torch_ckpt.CheckpointError, "a.pt", "a.pt", "ckpt", **options)


def test_names_that_safetensors_cannot_say_are_refused(tmp_path: Path) -> None:
    save({"\ud800": torch.ones(1)}, tmp_path / "ckpt")
    refused(tmp_path, torch_ckpt.CheckpointError, "UTF-8 only", "ckpt", "m.safetensors")


def test_the_name_that_safetensors_use_themselves_is_refused(tmp_path: Path) -> None:
    save({"__metadata__": torch.ones(1)}, tmp_path / "ckpt")
    refused(tmp_path, torch_ckpt.CheckpointError, "for themselves", "ckpt", "m.safetensors")


def test_two_values_of_one_flat_name_are_refused(tmp_path: Path) -> None:
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, tmp_path / "a.pt")
    refused(tmp_path, torch_ckpt.CheckpointError, "two values have one name", "a.pt", "ckpt")


def test_a_file_that_holds_no_dict_is_refused(tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "a.pt")
    refused(tmp_path, torch_ckpt.CheckpointError, "holds a list", "a.pt", "ckpt")


def rewritten(path: Path, compression: int = zipfile.ZIP_STORED, **contents: bytes) -> None:
    """The archive with other contents of some entries, by the last part of their names."""
    with zipfile.ZipFile(path) as old:
        entries = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in entries:
            new.writestr(name, contents.get(name.rpartition("/")[2], data))


def test_an_archive_that_was_packed_again_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", zipfile.ZIP_DEFLATED)
    refused(tmp_path, torch_ckpt.Corrupt, "is compressed", "a.pt", "ckpt")


def test_a_file_of_a_big_endian_machine_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    rewritten(tmp_path / "a.pt", byteorder=b"big")
    refused(tmp_path, torch_ckpt.CheckpointError, "big-endian", "a.pt", "ckpt")


def test_a_file_without_checksums_is_converted(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "b.pt")
    assert_equal(loaded(tmp_path / "b.pt"), STATE)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_torch_save_file_is_refused_or_gives_what_was_saved(
    tmp_path: Path, data: st.DataObject
) -> None:
    state = {"t": torch.arange(30.0), "n": 7, "v": torch.arange(9)[2:5]}
    torch.save(state, tmp_path / "sound.pt")
    damaged = bytearray((tmp_path / "sound.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 3), "flips")):
        at = data.draw(st.integers(0, len(damaged) - 1), "at")
        damaged[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))), "length")
    (tmp_path / "a.pt").write_bytes(damaged[:cut])
    try:
        convert(tmp_path / "a.pt", tmp_path / "ckpt", overwrite=True)
    except torch_ckpt.CheckpointError:
        return
    convert(tmp_path / "ckpt", tmp_path / "b.pt", overwrite=True)
    assert_equal(loaded(tmp_path / "b.pt"), state)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), target=st.sampled_from(["m.pt", "ckpt"]))
def test_a_damaged_safetensors_file_is_converted_or_refused(
    tmp_path: Path, data: st.DataObject, target: str
) -> None:
    # Without checksums, other names and values may come of it; but nothing else.
    safetensors.torch.save_file(TENSORS, tmp_path / "sound.safetensors", {"format": "pt"})
    damaged = bytearray((tmp_path / "sound.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 3), "flips")):
        at = data.draw(st.integers(0, len(damaged) - 1), "at")
        damaged[at] ^= 1 << data.draw(st.integers(0, 7), "bit")
    (tmp_path / "a.safetensors").write_bytes(damaged)
    try:
        report = convert(tmp_path / "a.safetensors", tmp_path / target, overwrite=True)
    except torch_ckpt.CheckpointError:
        return
    assert report.tensors == len(TENSORS)


@pytest.mark.parametrize("target", ["m.safetensors", "m.pt", "hf"])
def test_a_target_whose_last_fsync_fails_is_there_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ckpt")
    sync = OpenDirectory.sync

    def fail(self: OpenDirectory) -> None:
        if self.path == str(tmp_path):
            raise OSError(errno.EIO, "Input/output error", self.path)
        sync(self)

    monkeypatch.setattr(OpenDirectory, "sync", fail)
    options: dict[str, Any] = {"max_shard_size": 100} if target == "hf" else {}
    with pytest.raises(torch_ckpt.DurabilityUncertain, match=f"{target} is there and complete"):
        convert(tmp_path / "ckpt", tmp_path / target, **options)
    monkeypatch.undo()
    suffix = ".safetensors" if target == "m.pt" else ".pt"
    convert(tmp_path / target, tmp_path / f"again{suffix}")
    again = tmp_path / f"again{suffix}"
    found = loaded(again) if suffix == ".pt" else safetensors.torch.load_file(again)
    assert_equal(found, {"a": torch.ones(3)})


def test_options_that_contradict_each_other_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    arguments = [str(tmp_path / "a.pt"), str(tmp_path / "m.safetensors"), "--max-shard-size", "5GB"]
    assert cli.main(["convert", *arguments]) == 2
    assert capsys.readouterr().err.startswith("torch-ckpt: max_shard_size makes a directory")


def checkpoint_with_paths(directory: Path, paths: Any) -> None:
    """A checkpoint of two tensors, a and b, whose metadata says what the planner kept."""
    metadata = stock_save({"a": torch.ones(1), "b": torch.zeros(1)}, directory)
    metadata.planner_data = paths
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_checkpoint_without_paths_gives_flat_names(tmp_path: Path) -> None:
    checkpoint_with_paths(tmp_path / "ckpt", None)
    convert(tmp_path / "ckpt", tmp_path / "m.pt")
    assert_equal(loaded(tmp_path / "m.pt"), {"a": torch.ones(1), "b": torch.zeros(1)})


def test_paths_that_contradict_each_other_are_corrupt(tmp_path: Path) -> None:
    checkpoint_with_paths(tmp_path / "ckpt", {"a": ("x",), "b": ("x", "y")})
    refused(tmp_path, torch_ckpt.Corrupt, "b: its path", "ckpt", "m.pt")


@pytest.mark.parametrize("path", ["text", 5, (), ([],), ["a"], (True,)])
def test_what_is_no_path_gives_a_flat_name(tmp_path: Path, path: Any) -> None:
    checkpoint_with_paths(tmp_path / "ckpt", {"a": path, "b": ("x", "b")})
    convert(tmp_path / "ckpt", tmp_path / "m.pt")
    assert_equal(loaded(tmp_path / "m.pt"), {"a": torch.ones(1), "x": {"b": torch.zeros(1)}})


def test_metadata_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    header = rb'{"__metadata__":{"a":"\ud800"}}'
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(tmp_path, torch_ckpt.Corrupt, "not Unicode", "a.safetensors", "m.safetensors")


def test_more_dimensions_than_safetensors_have_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones((1,) * 65)}, tmp_path / "a.pt")
    refused(tmp_path, torch_ckpt.CheckpointError, "a: .*65 dimensions", "a.pt", "m.safetensors")


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 1}], ids=["file", "directory"])
def test_a_header_that_is_too_long_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    torch.save({"a": torch.ones(1), "b" * 300: torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.setattr("torch_ckpt.safetensors_format._MOST_HEADER_BYTES", 300)
    read: list[str] = []
    monkeypatch.setattr(
        "torch_ckpt.convert_sources.TorchSource.read", lambda _self, names: read.extend(names)
    )
    target = tmp_path / ("hf" if options else "m.safetensors")
    with pytest.raises(torch_ckpt.CheckpointError, match="header of a safetensors file"):
        convert(tmp_path / "a.pt", target, **options)
    assert read == []
    assert os.listdir(tmp_path) == ["a.pt"]


# --- what is left behind -------------------------------------------------------------------------

TARGETS: dict[str, dict[str, Any]] = {
    "m.pt": {},
    "m.safetensors": {},
    "ckpt": {},
    "hf": {"max_shard_size": 100},
}


def source_for(tmp_path: Path, target: str, value: float = 1.0) -> Path:
    state = {f"t{n}": torch.full((100,), value) for n in range(4)}
    if target.endswith(".pt"):
        save(state, tmp_path / "source")
        return tmp_path / "source"
    torch.save(state, tmp_path / "source.pt")
    return tmp_path / "source.pt"


def first_value(path: Path) -> float:
    """Of a converted model, in whatever format."""
    if path.suffix == ".pt":
        return float(loaded(path)["t0"][0])
    copy = path.parent / "copy.pt"
    convert(path, copy, overwrite=True)
    value = float(loaded(copy)["t0"][0])
    copy.unlink()
    return value


@pytest.mark.parametrize("target", TARGETS)
def test_an_existing_target_stays(tmp_path: Path, target: str) -> None:
    source = source_for(tmp_path, target)
    convert(source, tmp_path / target, **TARGETS[target])
    match = "is there already"
    refused(tmp_path, FileExistsError, match, source.name, target, **TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
def test_overwrite_replaces_the_target(tmp_path: Path, target: str) -> None:
    convert(source_for(tmp_path, target), tmp_path / target, **TARGETS[target])
    before = names_in(tmp_path)
    source = source_for(tmp_path, target, 2.0)
    convert(source, tmp_path / target, overwrite=True, **TARGETS[target])
    assert names_in(tmp_path) == before
    assert first_value(tmp_path / target) == 2.0


@pytest.mark.parametrize("target", TARGETS)
def test_an_interruption_leaves_nothing_of_a_new_target(tmp_path: Path, target: str) -> None:
    source = source_for(tmp_path, target)

    def interrupt(_progress: torch_ckpt.progress.Progress) -> None:
        raise KeyboardInterrupt

    options = {"max_host_bytes": 400, "progress": interrupt, **TARGETS[target]}
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / target, **options)
    assert names_in(tmp_path) == [source.name]


@pytest.mark.parametrize("target", TARGETS)
def test_an_interruption_leaves_the_old_target(tmp_path: Path, target: str) -> None:
    convert(source_for(tmp_path, target), tmp_path / target, **TARGETS[target])
    before = names_in(tmp_path)
    source = source_for(tmp_path, target, 2.0)

    def interrupt(_progress: torch_ckpt.progress.Progress) -> None:
        raise KeyboardInterrupt

    options = {"max_host_bytes": 400, "progress": interrupt, **TARGETS[target]}
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / target, overwrite=True, **options)
    assert names_in(tmp_path) == before
    assert first_value(tmp_path / target) == 1.0


@pytest.mark.parametrize("target", TARGETS)
def test_a_file_that_may_not_grow_is_an_error_of_that_file(tmp_path: Path, target: str) -> None:
    source = source_for(tmp_path, target)
    with files_limited_to(200), pytest.raises(OSError, match="File too large") as caught:
        convert(source, tmp_path / target, **TARGETS[target])
    assert str(tmp_path) in str(caught.value.filename)
    assert names_in(tmp_path) == [source.name]


@pytest.mark.parametrize("target", ["m.pt", "m.safetensors", "hf"])
def test_what_could_not_be_made_durable_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    source = source_for(tmp_path, target)

    def failing(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error") as caught:
        convert(source, tmp_path / target, **TARGETS[target])
    assert str(tmp_path) in str(caught.value.filename)
    assert names_in(tmp_path) == [source.name]


def test_other_files_of_a_directory_are_never_replaced(tmp_path: Path) -> None:
    source = source_for(tmp_path, "hf")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/thesis.tex").write_text("the only copy")
    match = "is a directory with other files"
    options = {"overwrite": True, "max_shard_size": 100}
    refused(tmp_path, FileExistsError, match, source.name, "hf", **options)
    assert names_in(tmp_path / "hf") == ["thesis.tex"]


# --- memory --------------------------------------------------------------------------------------

CHAIN = """
import sys
import zipfile
from pathlib import Path
import torch
import torch_ckpt
from torch_ckpt.converting import convert

def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10

def step(source, target, **options):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    convert(source, target, max_host_bytes=32 << 20, **options)
    print(target, peak() - before)

# Threads and libraries come with the first of all loads and saves.
torch.save({"t": torch.ones(1 << 20)}, "small.pt")
convert("small.pt", "small")
convert("small", "small.safetensors")
step("model.pt", "ckpt")
step("ckpt", "model.safetensors")
step("model.safetensors", "hf", max_shard_size=100 << 20)
step("hf", "ckpt2")
step("ckpt2", "again.pt")
"""


def test_the_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    state = {f"t{n}": torch.full((4 << 20,), float(n)) for n in range(24)}
    torch.save(state, tmp_path / "model.pt")
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    out = subprocess.run(
        [sys.executable, "-c", CHAIN],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    peaks = {target: int(count) for target, count in map(str.split, out.splitlines())}
    assert list(peaks) == ["ckpt", "model.safetensors", "hf", "ckpt2", "again.pt"]
    # 384 MiB in tensors of 16 MiB; two are held at once, and what reading and writing take.
    assert max(peaks.values()) < 96 << 20, peaks
    read = loaded(tmp_path / "again.pt")
    assert_equal({name: read[name] for name in state}, state)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_converts_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    assert cli.main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "m.safetensors")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path}/a.pt (torch.save) is now {tmp_path}/m.safetensors")
    assert "3 tensors, 29 B" in line


def test_the_command_gives_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(TENSORS, tmp_path / "a.pt")
    size = ["--max-shard-size", "1kB"]
    assert cli.main(["convert", "--json", str(tmp_path / "a.pt"), str(tmp_path / "hf"), *size]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == [str(tmp_path / "hf/model.safetensors")]
    assert (document["source_format"], document["target_format"]) == ("torch", "safetensors")


def test_the_command_refuses_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": 1}, tmp_path / "a.pt")
    assert cli.main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "m.safetensors")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "--tensors-only" in error


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("800", 800), ("2k", 2000)]
)
def test_sizes_are_read_in_the_usual_units(text: str, count: int) -> None:
    assert cli._bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "1e9", "5 bytes"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        cli._bytes(text)


def test_a_report_escapes_what_a_terminal_would_act_on(tmp_path: Path) -> None:
    report = ConvertReport("\x1b[2J", "b", "dcp", "torch", ["b"])
    assert all(line.isprintable() for line in report.lines())


def test_stock_checkpoints_are_converted_as_ours(tmp_path: Path) -> None:
    stock_save(STATE, tmp_path / "ckpt")
    convert(tmp_path / "ckpt", tmp_path / "m.pt")
    assert_equal(loaded(tmp_path / "m.pt"), STATE)
