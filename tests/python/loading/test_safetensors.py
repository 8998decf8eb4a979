"""Loads of safetensors files: of the safetensors library, of transformers, and with checksums."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.commands import Run
from tests.loads import LOADERS, MIB, load, mismatch, refusal
from tests.safetensors_files import (
    BLOCK_BYTES,
    CHECKSUMS,
    SAFE_DTYPES,
    header_of,
    write_checksums,
    write_shards,
)
from tests.support import (
    assert_equal,
    f32,
    flip_bit,
    process_memory,
    random_tensor,
    reset_peak_memory,
    zeros,
)
from torch_ckpt import CheckpointError, Corrupt, Unsafe, _core

STATE = {
    **{
        f"of {name}": random_tensor((3, 4), dtype)
        for name, dtype in safetensors.torch._TYPES.items()
    },
    "large": f32(1000, 700),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "\u00e9 \U0001f600": f32(2),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Makes a file that the safetensors library writes."""
    (tmp_path / "hf").mkdir()
    safetensors.torch.save_file(STATE, tmp_path / "hf/model.safetensors", {"format": "pt"})
    return tmp_path / "hf/model.safetensors"


def zeros_of(tensor: torch.Tensor) -> torch.Tensor:
    return zeros(tuple(tensor.shape), tensor.dtype)


def emptied(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: zeros_of(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("loader", LOADERS)
def test_each_dtype_and_shape_of_the_safetensors_library_is_loaded(
    file: Path, loader: Callable[..., Any]
) -> None:
    for path in (file, file.parent):
        state = emptied(STATE)
        loader(state, path)
        assert_equal(state, STATE)


@pytest.mark.parametrize("loader", LOADERS)
def test_the_files_of_an_index_are_loaded(tmp_path: Path, loader: Callable[..., Any]) -> None:
    shards = [{f"{n}.{i}": f32(30, 40, seed=n + i) for i in range(3)} for n in range(4)]
    write_shards(tmp_path / "hf", *shards)
    whole = {name: tensor for shard in shards for name, tensor in shard.items()}
    state = emptied(whole)
    loader(state, tmp_path / "hf")
    assert_equal(state, whole)


def test_a_model_that_transformers_saved_is_loaded(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    model, target = (transformers.GPT2LMHeadModel(config) for _ in range(2))
    for size in ("1GB", "20KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        # The files lack the weight that is tied to the embedding.
        report = load(target.state_dict(), tmp_path / size)
        assert "lm_head.weight" in report.loaded
        assert report.missing == []
        assert_equal(target.state_dict(), model.state_dict())
    assert len(list((tmp_path / "20KB").glob("*.safetensors"))) > 1


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_missing_tensor_in_the_memory_of_a_loaded_one_counts_as_loaded(
    tmp_path: Path, device: str
) -> None:
    model = _Tied()
    stored = {"embedding.weight": model.embedding.weight.detach()}
    torch_ckpt.save(stored, tmp_path / "c", format="safetensors")
    with torch.device(device):
        target = _Tied().state_dict()
    report = load(target, tmp_path / "c", strict="dtypes")
    assert report.loaded == ["embedding.weight", "head.weight"]
    assert_equal(target, model.state_dict())
    assert target["head.weight"].data_ptr() == target["embedding.weight"].data_ptr()


def test_a_missing_part_of_a_loaded_tensor_is_missing(tmp_path: Path) -> None:
    torch_ckpt.save({"a": torch.ones(4)}, tmp_path / "c", format="safetensors")
    whole = torch.zeros(4)
    state = {
        "a": whole,
        "part": whole[:2],
        "same": whole.view(4),
        "integers": whole.view(torch.int32),
    }
    with pytest.warns(match="strict=False: part .missing., integers .missing."):
        report = load(state, tmp_path / "c", strict=False)
    assert report.loaded == ["a", "same"]


def test_a_module_is_loaded_with_a_prefix_for_its_names(tmp_path: Path) -> None:
    stored, model = (torch.nn.Sequential(torch.nn.Linear(3, 4)) for _ in range(2))
    safetensors.torch.save_file(stored.state_dict(), tmp_path / "model.safetensors")
    assert load({"model": model}, tmp_path, rename={"*": "model.*"}).fits
    assert_equal(model.state_dict(), stored.state_dict())


def test_a_load_converts_renames_selects_and_reports(file: Path) -> None:
    state = {"model": {"w": torch.zeros(1000, 700, dtype=torch.float64), "s": torch.zeros(())}}
    rename = {"large": "model.w", "scalar": "model.s"}
    report = load(state, file.parent, names=["*.w"], rename=rename, strict=False)
    assert_equal(state["model"]["w"], STATE["large"].double())
    assert (report.loaded, float(state["model"]["s"])) == (["model.w"], 0.0)
    assert "empty" in report.unexpected


def test_a_preflight_and_an_estimate_read_only_the_headers(file: Path) -> None:
    assert torch_ckpt.preflight({"scalar": torch.tensor(0), "step": 3}, file).missing == ["step"]
    memory = torch_ckpt.estimate_read_memory({"large": torch.zeros(1000, 700)}, file)
    assert memory.target_bytes == STATE["large"].nbytes


def test_values_that_safetensors_files_lack_are_missing(file: Path) -> None:
    error = mismatch(lambda: load({"scalar": torch.tensor(0), "step": 3}, file))
    assert error.report.missing == ["step"]
    error = mismatch(lambda: load({"large": torch.zeros(1000, 701)}, file))
    assert [name for name, *_sizes in error.report.shapes] == ["large"]


def test_torchs_metadata_describes_the_tensors(file: Path) -> None:
    metadata = torch_ckpt.FileSystemReader(file).read_metadata()
    assert metadata.state_dict_metadata.keys() == STATE.keys()
    assert metadata.state_dict_metadata["large"].size == torch.Size((1000, 700))
    (index,) = (index for index in metadata.storage_data if index.fqn == "large")
    assert metadata.storage_data[index].relative_path == "model.safetensors"
    assert metadata.storage_data[index].length == STATE["large"].nbytes


def test_metadata_that_was_read_before_the_load_does_not_change_the_load(file: Path) -> None:
    class Reader(torch_ckpt.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata = super().read_metadata(*args, **kwargs)
            assert metadata.state_dict_metadata
            return metadata

    state = {"large": torch.zeros(1000, 700)}
    dcp.load(state, storage_reader=Reader(file), no_dist=True)
    assert_equal(state["large"], STATE["large"])


def test_a_load_stays_within_its_memory_limit(tmp_path: Path) -> None:
    tensor = torch.arange(16.0 * MIB)
    safetensors.torch.save_file({"t": tensor}, tmp_path / "m.safetensors")
    state = {"t": torch.zeros(tensor.shape, dtype=torch.float64)}
    load(state, tmp_path, max_inflight_bytes=MIB)
    state["t"].zero_()
    before = process_memory("VmRSS")
    reset_peak_memory()
    load(state, tmp_path, max_inflight_bytes=4 * MIB, thread_count=2)
    assert process_memory("VmHWM") - before < 16 * MIB
    assert_equal(state["t"], tensor.double())


# --- checksums -----------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", LOADERS)
def test_a_damaged_block_is_found_with_checksums(file: Path, loader: Callable[..., Any]) -> None:
    write_checksums([file])
    loader(emptied(STATE), file.parent)
    assert torch_ckpt.verify(file.parent).ok
    contents = file.read_bytes()
    header, begin = header_of(contents)
    at = begin + header["large"]["data_offsets"][0] + 5 * BLOCK_BYTES + 77
    flip_bit(file, at, 3)
    cause = refusal(lambda: loader({"large": torch.zeros(1000, 700)}, file.parent))
    assert isinstance(cause, Corrupt)
    assert str(cause).startswith("large: ")
    assert str(file) in str(cause)
    loader(emptied(STATE), file.parent, verify=False)
    # The other tensors are intact.
    loader({"of F32": torch.zeros(3, 4)}, file.parent)
    (damage,) = torch_ckpt.verify(file.parent).damaged
    assert (damage.name, damage.bytes, damage.offset) == ("large", BLOCK_BYTES, at - 77)


def test_saved_checksums_have_the_documented_layout_and_find_every_kind_of_damage(
    tmp_path: Path,
) -> None:
    path = tmp_path / "model"
    torch_ckpt.save(STATE, path, format="safetensors", no_dist=True)
    saved = (path / CHECKSUMS).read_bytes()
    file = path / "model.safetensors"
    write_checksums([file])
    assert (path / CHECKSUMS).read_bytes() == saved
    report = torch_ckpt.verify(path)
    assert report.ok
    assert report.unverifiable == []
    flip_bit(file, file.stat().st_size - 1, 0)
    (damage,) = torch_ckpt.verify(path).damaged
    cause = refusal(lambda: load({damage.name: zeros_of(STATE[str(damage.name)])}, path))
    assert isinstance(cause, Corrupt)
    assert "delete torch_ckpt.checksums" in str(cause)


def test_checksums_of_a_file_that_another_program_has_changed_are_ignored(file: Path) -> None:
    write_checksums([file])
    changed = {**STATE, "large": STATE["large"] + 1, "new": torch.ones(1)}
    safetensors.torch.save_file(changed, file)
    state = emptied(changed)
    with pytest.warns() as caught:
        load(state, file.parent)
    (text,) = (str(warning.message) for warning in caught)
    assert "another program has changed files" in text
    assert text.endswith("model.safetensors")
    assert_equal(state, changed)


# --- refusals ------------------------------------------------------------------------------------


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "hf", {"a": f32(2)}, {"b": f32(2)})
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    cause = refusal(lambda: load({"a": torch.zeros(2)}, tmp_path / "hf"))
    assert type(cause) is CheckpointError
    assert "contains 2 safetensors files and 0 indexes. Pass the path of one file" in str(cause)
    state = {"b": torch.zeros(2)}
    load(state, files[1])
    assert_equal(state["b"], f32(2))


def test_one_of_several_indexes_is_chosen_by_its_path(tmp_path: Path) -> None:
    write_shards(tmp_path / "hf", {"a": f32(2)}, {"b": f32(2)})
    index = tmp_path / "hf/model.safetensors.index.json"
    (tmp_path / "hf/model.fp16.safetensors.index.json").write_text('{"weight_map":{}}')
    cause = refusal(lambda: load({"a": torch.zeros(2)}, tmp_path / "hf"))
    assert "contains 2 safetensors files and 2 indexes" in str(cause)
    state = {"a": torch.zeros(2), "b": torch.zeros(2)}
    load(state, index)
    assert_equal(state, {"a": f32(2), "b": f32(2)})


def test_an_index_that_names_a_missing_file_is_corrupt(tmp_path: Path) -> None:
    files = write_shards(tmp_path / "hf", {"a": f32(2)}, {"b": f32(2)})
    files[1].unlink()
    cause = refusal(lambda: load({"a": torch.zeros(2)}, tmp_path / "hf"))
    assert isinstance(cause, Corrupt)
    assert str(cause).endswith(f"the index names {files[1].name}, which does not exist")


def test_a_link_in_a_directory_is_refused_and_a_link_of_the_caller_is_followed(
    file: Path, tmp_path: Path
) -> None:
    (tmp_path / "linked").mkdir()
    link = tmp_path / "linked/model.safetensors"
    link.symlink_to(file)
    assert isinstance(refusal(lambda: load(emptied(STATE), link.parent)), Unsafe)
    state = emptied(STATE)
    load(state, link)
    assert_equal(state, STATE)


def test_a_checkpoint_takes_precedence_over_safetensors_files(tmp_path: Path) -> None:
    torch_ckpt.save({"t": torch.ones(2)}, tmp_path, no_dist=True)
    safetensors.torch.save_file({"t": torch.zeros(2)}, tmp_path / "m.safetensors")
    state = {"t": torch.full((2,), 5.0)}
    load(state, tmp_path)
    assert_equal(state["t"], torch.ones(2))


# --- the header ----------------------------------------------------------------------------------


def test_the_engines_headers_are_read_by_the_safetensors_library(tmp_path: Path) -> None:
    specs = [(n, str(t.dtype).removeprefix("torch."), t.shape) for n, t in STATE.items()]
    header = _core.encode_safetensors_header(specs, {"by": "\u00e9\n"}, alignment=4096)
    assert len(header) % 4096 == 0
    data = bytes(sum(tensor.nbytes for tensor in STATE.values()))
    (tmp_path / "m.safetensors").write_bytes(header + data)
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"by": "\u00e9\n"}
        assert {n: tuple(opened.get_tensor(n).shape) for n in opened.offset_keys()} == {
            name: tuple(tensor.shape) for name, tensor in STATE.items()
        }


@pytest.mark.parametrize("name", SAFE_DTYPES)
def test_the_engine_knows_each_dtype_of_the_safetensors_library(name: str) -> None:
    dtype = SAFE_DTYPES[name]
    header = _core.encode_safetensors_header(
        [("t", str(dtype).removeprefix("torch."), (2, 3))], {}, alignment=8
    )
    parsed = json.loads(header[8:])["t"]
    assert parsed["dtype"] == name
    assert parsed["data_offsets"] == [0, math.prod((2, 3)) * dtype.itemsize]


# --- commands ------------------------------------------------------------------------------------


def test_the_commands_accept_a_file_and_a_directory(file: Path, run: Run) -> None:
    for path in (file, file.parent):
        assert "large" in run("ls", path)
        assert "model.safetensors" in run("ls", path, "--files")
        assert "float32 [1000, 700]" in run("show", path, "large")
        assert "some records lack checksums" in run("verify", path)
        assert "no damage found" in run("verify", path)
    assert "identical" in run("diff", file, file.parent) or run("diff", file, file.parent)
    write_checksums([file])
    assert "not verifiable" not in run("verify", file.parent)
