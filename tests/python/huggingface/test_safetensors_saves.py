"""Saves in Hugging Face's layout by one process, read by the libraries that define it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import torch_ckpt
from tests.forked import forked
from tests.safetensors_files import SAFE_DTYPES
from tests.support import StateDict, assert_equal, cause_of, random_tensor
from torch_ckpt import _C, Safetensors, WriteOptions, _core


def save(state: StateDict, path: Path, write: WriteOptions | None = None, **options: Any) -> None:
    """Saves a state. options: of :class:`Safetensors`."""
    torch_ckpt.save(
        state,
        path,
        format=Safetensors(**options),
        options=write or WriteOptions(),
        no_dist=True,
    )


def cause_of_refusal(
    state: StateDict, path: Path, write: WriteOptions | None = None, **options: Any
) -> BaseException:
    with pytest.raises(dcp.CheckpointException) as caught:
        save(state, path, write, **options)
    return cause_of(caught.value)


def files_in(path: Path) -> StateDict:
    """Reads all files in a directory with the safetensors library."""
    state: StateDict = {}
    for file in sorted(path.glob("*.safetensors")):
        state |= safetensors.torch.load_file(file)
    return state


STATE = {
    "embed.weight": random_tensor((300, 70), torch.float32, 1),
    "mask": torch.arange(10) % 3 == 0,
    "transposed": random_tensor((50, 20), torch.bfloat16, 2).t(),
    "every other": random_tensor((40, 6), torch.float32, 3)[::2, 1::2],
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
    "steps": torch.arange(9),
}


def test_files_have_the_values_of_the_state_dict(tmp_path: Path) -> None:
    save(STATE, tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]
    assert sorted(os.listdir(tmp_path / "model")) == ["model.safetensors", "torch_ckpt.checksums"]
    assert_equal(dict(sorted(files_in(tmp_path / "model").items())), dict(sorted(STATE.items())))


def test_nested_dicts_get_names_with_dots(tmp_path: Path) -> None:
    save({"model": {"layers": [{"w": torch.ones(2)}]}}, tmp_path / "model")
    assert [*files_in(tmp_path / "model")] == ["model.layers.0.w"]


@pytest.mark.parametrize("name", SAFE_DTYPES)
def test_every_dtype_of_the_format_is_stored_bit_for_bit(tmp_path: Path, name: str) -> None:
    dtype = SAFE_DTYPES[name]
    # Any bits are a valid value, except for a bool.
    bits = torch.tensor([[0, 1], [1, 0]]) if name == "BOOL" else random_tensor((6, 16), torch.uint8)
    value = bits.bool() if name == "BOOL" else bits.view(dtype)
    save({"t": value}, tmp_path / "model")
    loaded = torch.zeros_like(value)
    torch_ckpt.load({"t": loaded}, tmp_path / "model", no_dist=True)
    assert torch.equal(loaded.view(torch.uint8), value.view(torch.uint8))
    with safetensors.safe_open(tmp_path / "model" / "model.safetensors", "pt") as opened:
        assert opened.get_slice("t").get_dtype() == name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "float8_e4m3fn", torch.float32])
def test_floating_point_tensors_are_stored_with_the_dtype(tmp_path: Path, dtype: Any) -> None:
    save(STATE, tmp_path / "model", dtype=dtype)
    stored = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, dtype)
    stored = getattr(torch, stored) if isinstance(stored, str) else stored
    expected = {
        name: value.to(stored) if value.is_floating_point() else value
        for name, value in STATE.items()
    }
    for name, value in files_in(tmp_path / "model").items():
        assert value.dtype == expected[name].dtype
        # The bits of a NaN are unspecified.
        both = (tensor.double().nan_to_num(nan=-1.0) for tensor in (value, expected[name]))
        assert torch.equal(*both), name


def test_names_are_changed_by_patterns(tmp_path: Path) -> None:
    save({"model": {"a": torch.ones(1), "b": torch.zeros(2)}}, tmp_path / "m",
         rename={"model.*": "transformer.*"})  # fmt: skip
    assert [*files_in(tmp_path / "m")] == ["transformer.a", "transformer.b"]


def test_two_tensors_may_not_get_the_same_name(tmp_path: Path) -> None:
    state = {"a.w": torch.ones(1), "b.w": torch.ones(1)}
    cause = cause_of_refusal(state, tmp_path / "m", rename=lambda name: name[2:])
    assert isinstance(cause, ValueError)
    assert os.listdir(tmp_path) == []


def test_a_value_that_is_not_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    cause = cause_of_refusal({"w": torch.ones(1), "step": 3}, tmp_path / "m")
    assert str(cause).startswith("step: safetensors files hold only tensors")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        (torch.sparse_coo_tensor([[0]], [1.0], (2,)), "safetensors files cannot hold"),
        (torch.ones(1, device="meta"), "meta device"),
    ],
)
def test_a_tensor_that_the_format_cannot_hold_is_refused_by_name(
    tmp_path: Path, tensor: torch.Tensor, reason: str
) -> None:
    cause = cause_of_refusal({"w": tensor}, tmp_path / "m")
    assert "w" in str(cause)
    assert reason in str(cause)
    assert os.listdir(tmp_path) == []


def test_files_are_copied_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    config = {"model_type": "unheard of", "torch_dtype": "float32"}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    save({"w": torch.ones(2)}, tmp_path / "m", dtype="bf16", config=tmp_path / "base",
         copied=[tmp_path / "base" / "tokenizer.json"])  # fmt: skip
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    # All of these files belong to the directory, so the next save may replace it.
    save({"w": torch.zeros(2)}, tmp_path / "m")
    assert_equal(files_in(tmp_path / "m"), {"w": torch.zeros(2)})
    assert not (tmp_path / "m" / "tokenizer.json").exists()


def test_files_of_the_same_name_are_refused(tmp_path: Path) -> None:
    for directory in ("a", "b"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "vocab.txt").write_text("")
    copied = [tmp_path / directory / "vocab.txt" for directory in ("a", "b")]
    with pytest.raises(torch_ckpt.CheckpointError, match=r"two files to copy are named vocab\.txt"):
        save({"w": torch.ones(1)}, tmp_path / "m", copied=copied)


@pytest.mark.parametrize("name", ["model.safetensors", "torch_ckpt.checksums"])
def test_a_file_that_the_save_writes_itself_is_not_copied(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(torch_ckpt.CheckpointError, match="the save writes a file named"):
        save({"w": torch.ones(1)}, tmp_path / "m", copied=[tmp_path / name])


@pytest.mark.parametrize("metadata", [{"a": "\udcff"}, {"a": 3}, {3: "a"}])
def test_metadata_that_readers_refuse_is_refused(metadata: Any) -> None:
    with pytest.raises(ValueError, match="metadata must map Unicode strings"):
        Safetensors(metadata=metadata)


def test_a_size_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes"):
        Safetensors(max_shard_size="5GB")  # type: ignore[arg-type]


def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cause = cause_of_refusal({"w": torch.ones(2)}, Path())
    assert "in which the program runs" in str(cause)


@forked
def test_saves_in_both_formats_find_unchanged_tensors(tmp_path: Path) -> None:
    state: StateDict = {"model": {"w": torch.ones(2)}}

    def save_in_both(step: int) -> None:
        for values, format in ((state | {"step": step}, "checkpoint"), (state, "safetensors")):
            path = tmp_path / str(len(values))
            torch_ckpt.async_save(values, path, format=format, no_dist=True).result()

    save_in_both(0)
    with pytest.warns(UserWarning, match="model"):
        save_in_both(1)


def test_a_directory_is_replaced_only_if_it_may_be(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "m")
    cause = cause_of_refusal({"w": torch.zeros(2)}, tmp_path / "m", WriteOptions(overwrite=False))
    assert isinstance(cause, FileExistsError)
    assert_equal(files_in(tmp_path / "m"), {"w": torch.ones(2)})


def test_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "m", no_dist=True)
    assert isinstance(cause_of_refusal({"w": torch.zeros(2)}, tmp_path / "m"), FileExistsError)


def test_a_background_save_stores_the_values_of_the_call(tmp_path: Path) -> None:
    state = {"w": torch.ones(1000)}
    handle = torch_ckpt.async_save(state, tmp_path / "m", format="safetensors", no_dist=True)
    state["w"].zero_()
    metadata = handle.result().metadata()
    assert_equal(files_in(tmp_path / "m"), {"w": torch.ones(1000)})
    assert metadata.state_dict_metadata["w"].size == torch.Size([1000])


def test_the_metadata_of_the_save_has_the_names_in_the_files(tmp_path: Path) -> None:
    saved = torch_ckpt.save(
        {"w1": torch.ones(3), "w2": torch.zeros(2, 2)},
        tmp_path / "m",
        format=Safetensors(rename={"w*": "weight*"}),
    )
    assert_equal(files_in(tmp_path / "m"), {"weight1": torch.ones(3), "weight2": torch.zeros(2, 2)})
    assert sorted(saved.metadata().state_dict_metadata) == ["weight1", "weight2"]


def test_a_planner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a planner can only save in the format"):
        torch_ckpt.save({}, tmp_path / "m", format="safetensors", planner=dcp.DefaultSavePlanner())
    assert os.listdir(tmp_path) == []


def test_stock_torch_reads_the_directory(tmp_path: Path) -> None:
    state = {"a": random_tensor((30, 7), torch.float32, 1), "b": random_tensor((9,), torch.int64)}
    save(state, tmp_path / "m", max_shard_size=500)
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(tmp_path / "m")), no_dist=True)
    assert_equal(loaded, state)


def test_the_checksums_detect_a_flipped_bit(tmp_path: Path) -> None:
    state = {"w": random_tensor((100_000,), torch.float32)}
    save(state, tmp_path / "m")
    assert torch_ckpt.verify(tmp_path / "m").ok
    file = tmp_path / "m" / "model.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1000] ^= 1
    file.write_bytes(contents)
    assert not torch_ckpt.verify(tmp_path / "m").ok


@pytest.mark.parametrize("parts", [1, 3])
def test_a_save_needs_as_many_parts_as_places(tmp_path: Path, parts: int) -> None:
    tensors = [(name, "float32", [4]) for name in ("a", "b")]
    layout = _core.SafetensorsLayout.of_tensors(tensors, None, 1 << 20, [])
    [places] = layout.places_of_parts([[(0, [0], [4]), (1, [0], [4])]], [b""])
    sources = _C.SaveSources()
    sources.set_places(places)

    def save_parts() -> None:
        for _ in range(parts):
            sources.add_part("a", torch.ones(4), [4], [0], None)
        _C.Save().start(
            _core.Directory(tmp_path),
            "",
            sources,
            buckets=1,
            max_host_bytes=0,
            direct_io="auto",
            sync=False,
        )

    with pytest.raises(RuntimeError, match=f"the coordinator has sent 2 places for {parts} parts"):
        save_parts()
    assert os.listdir(tmp_path) == []


def test_a_single_file_to_copy_is_refused() -> None:
    with pytest.raises(TypeError, match=r"copied must be a list of files, got 'tokenizer\.json'"):
        torch_ckpt.Safetensors(copied="tokenizer.json")  # type: ignore[arg-type]
