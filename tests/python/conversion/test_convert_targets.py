"""``convert``: the files that remain after a failure, and its use of memory."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from tests.conversions import loaded, names_in, refused
from tests.fault_hooks import at_fault_points, failing
from tests.forked import run_script
from tests.support import assert_equal, files_limited_to, save
from torch_ckpt import Corrupt, convert
from torch_ckpt.errors import DurabilityUncertain

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
    """Reads the tensors of a converted model in any format."""
    if path.suffix == ".pt":
        return float(loaded(path)["t0"][0])
    copy = path.parent / "copy.pt"
    convert(path, copy, overwrite=True)
    value = float(loaded(copy)["t0"][0])
    copy.unlink()
    return value


@pytest.mark.parametrize("target", ["m.safetensors", "m.pt", "hf"])
def test_a_target_whose_last_fsync_fails_exists_and_durability_is_uncertain(
    tmp_path: Path, target: str
) -> None:
    source = source_for(tmp_path, target)
    match = f"{target} is complete, but may be lost in a power cut"
    with (
        failing("fsync_directory", errno.EIO, tmp_path),
        pytest.raises(DurabilityUncertain, match=match),
    ):
        convert(source, tmp_path / target, **TARGETS[target])
    assert first_value(tmp_path / target) == 1.0


@pytest.mark.parametrize("target", TARGETS)
def test_an_existing_target_is_replaced_only_on_request(tmp_path: Path, target: str) -> None:
    options = TARGETS[target]
    convert(source_for(tmp_path, target), tmp_path / target, **options)
    before = names_in(tmp_path)
    source = source_for(tmp_path, target, 2.0)
    refused(tmp_path, FileExistsError, "already exists", source.name, target, **options)
    assert first_value(tmp_path / target) == 1.0
    convert(source, tmp_path / target, overwrite=True, **options)
    assert names_in(tmp_path) == before
    assert first_value(tmp_path / target) == 2.0


@pytest.mark.parametrize("target", TARGETS)
def test_an_interruption_keeps_an_old_target_and_no_new_one(tmp_path: Path, target: str) -> None:
    source = source_for(tmp_path, target)

    def interrupt(_progress: torch_ckpt._base.progress.Progress) -> None:
        raise KeyboardInterrupt

    options = {"max_host_bytes": 400, **TARGETS[target]}
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / target, progress=interrupt, **options)
    assert names_in(tmp_path) == [source.name]

    convert(source, tmp_path / target, **options)
    before = names_in(tmp_path)
    source = source_for(tmp_path, target, 2.0)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / target, overwrite=True, progress=interrupt, **options)
    assert names_in(tmp_path) == before
    assert first_value(tmp_path / target) == 1.0


@pytest.mark.parametrize(
    ("target", "failure", "error"),
    [
        *((target, "size limit", "File too large") for target in TARGETS),
        *((target, "fsync", "Input/output error") for target in ("m.pt", "m.safetensors", "hf")),
    ],
)
def test_a_target_that_cannot_be_written_durably_is_not_published_and_its_file_is_named(
    tmp_path: Path, target: str, failure: str, error: str
) -> None:
    source = source_for(tmp_path, target)
    failed = failing("fsync", errno.EIO) if failure == "fsync" else files_limited_to(200)
    with failed, pytest.raises(OSError, match=error) as caught:
        convert(source, tmp_path / target, **TARGETS[target])
    assert str(tmp_path) in str(caught.value.filename)
    assert names_in(tmp_path) == [source.name]


def test_other_files_of_a_directory_are_never_replaced(tmp_path: Path) -> None:
    source = source_for(tmp_path, "hf")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/thesis.tex").write_text("the only copy")
    match = "the directory contains a file that this save would not write"
    options = {"overwrite": True, "max_shard_size": 100}
    refused(tmp_path, FileExistsError, match, source.name, "hf", **options)
    assert names_in(tmp_path / "hf") == ["thesis.tex"]
    (tmp_path / "hf/thesis.tex").unlink()
    convert(source, tmp_path / "hf", max_shard_size=100)
    assert "model.safetensors.index.json" in names_in(tmp_path / "hf")


@pytest.mark.parametrize(("overwrite", "is_there"), [(False, False), (True, False), (False, True)])
def test_a_directory_that_another_process_creates_or_fills_is_kept(
    tmp_path: Path, overwrite: bool, is_there: bool
) -> None:
    source = source_for(tmp_path, "hf")
    target = tmp_path / "hf"
    if is_there:
        target.mkdir()

    def hook(operation: str, path: str) -> int:
        if (operation, path) == ("rename", str(target)):
            target.mkdir(exist_ok=True)
            (target / "model.safetensors").write_text("somebody's")
        return 0

    with (
        at_fault_points(hook),
        pytest.raises(FileExistsError, match="another process has created it meanwhile"),
    ):
        convert(source, target, overwrite=overwrite, max_shard_size=100)
    assert names_in(tmp_path) == sorted([source.name, "hf"])
    assert (target / "model.safetensors").read_text() == "somebody's"


def test_files_added_to_a_replaced_directory_are_kept(tmp_path: Path) -> None:
    source = source_for(tmp_path, "hf")
    target = tmp_path / "hf"
    convert(source, target, max_shard_size=100)

    def put_before_the_rename(operation: str, path: str) -> int:
        if operation == "rename" and path == str(target):
            (target / "thesis.tex").write_text("the only copy")
        return 0

    with (
        at_fault_points(put_before_the_rename),
        pytest.warns(match="was replaced, but its former contents remain"),
    ):
        convert(source, target, overwrite=True, max_shard_size=100)
    (kept,) = tmp_path.glob(".hf.former-*/thesis.tex")
    assert kept.read_text() == "the only copy"
    assert len(names_in(kept.parent)) == 1 + len(names_in(target))


@pytest.mark.parametrize("source", ["a.pt", "a.safetensors", "ckpt"])
@pytest.mark.parametrize("target", ["m.pt", "m.safetensors", "hf", "copy"])
def test_a_source_that_is_truncated_during_a_conversion_is_corrupt(
    tmp_path: Path, source: str, target: str
) -> None:
    state = {f"t{n}": torch.full((1 << 18,), float(n)) for n in range(4)}
    if source == "ckpt":
        save(state, tmp_path / source)
    else:
        torch.save(state, tmp_path / "a.pt")
        if source != "a.pt":
            convert(tmp_path / "a.pt", tmp_path / source)
    before = names_in(tmp_path)

    def truncate(_progress: torch_ckpt._base.progress.Progress) -> None:
        files = [tmp_path / source, *(tmp_path / source).glob("*.distcp")]
        for file in files:
            if file.is_file():
                os.truncate(file, 1000)

    # The name changes, so that a conversion to the same format is allowed.
    options: dict[str, Any] = {"max_host_bytes": 1, "rename": {"t0": "z"}}
    options |= TARGETS.get(target, {})
    with pytest.raises(Corrupt):
        convert(tmp_path / source, tmp_path / target, progress=truncate, **options)
    assert names_in(tmp_path) == before


CHAIN = """
import os
import sys
import zipfile
from pathlib import Path
import torch
import torch_ckpt
from torch_ckpt.conversion.convert import convert

def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10

def step(source, target, **options):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    convert(source, target, max_host_bytes=32 << 20, **options)
    print(target, peak() - before)

os.chdir(sys.argv[1])
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
    state = {f"t{n}": torch.full((4 << 20,), float(n)) for n in range(12)}
    torch.save(state, tmp_path / "model.pt")
    run = run_script(CHAIN, tmp_path)
    assert run.returncode == 0, run.stderr
    peaks = {target: int(count) for target, count in map(str.split, run.stdout.splitlines())}
    assert list(peaks) == ["ckpt", "model.safetensors", "hf", "ckpt2", "again.pt"]
    # 192 MiB in tensors of 16 MiB. Two are held at once, beside the buffers of reader and writer.
    assert max(peaks.values()) < 96 << 20, peaks
    read = loaded(tmp_path / "again.pt")
    assert_equal({name: read[name] for name in state}, state)
