"""Paths of a checkpoint: its directory, a step of a run, the root of a run."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from tests.fault_hooks import at_fault_points
from tests.local_steps import saved
from tests.support import cause_of, save
from torch_ckpt.checkpoint import locating
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.step_names import MARKER_NAME
from torch_ckpt.errors import CheckpointError
from torch_ckpt.inspection.explain import explain
from torch_ckpt.inspection.listing import examine
from torch_ckpt.steps import LocalSteps


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Makes the root of a run with steps 3 and 40. The value of each step is its number."""
    for step in (3, 40):
        saved(LocalSteps(tmp_path / "run"), step, float(step))
    return tmp_path / "run"


def loaded(path: Path) -> float:
    state = {"w": torch.zeros(5, 3)}
    torch_ckpt.load(state, path, no_dist=True)
    return float(state["w"][0, 0])


def loaded_by_dcp(path: Path) -> float:
    state = {"w": torch.zeros(5, 3)}
    dcp.load(state, storage_reader=torch_ckpt.FileSystemReader(path), no_dist=True)
    return float(state["w"][0, 0])


def found(path: Path) -> str:
    with closing(open_checkpoint(path)) as directory:
        return Path(directory.path).name


@pytest.mark.parametrize("load", [loaded, loaded_by_dcp])
def test_a_load_accepts_a_step_and_a_root_for_its_newest_step(
    root: Path, load: Callable[[Path], float]
) -> None:
    assert load(root / "3") == 3.0
    assert load(root / "40") == 40.0
    assert load(root) == 40.0


def test_a_reused_reader_finds_the_newest_step_again(root: Path) -> None:
    reader = torch_ckpt.FileSystemReader(root)
    state = {"w": torch.zeros(5, 3)}
    torch_ckpt.load(state, storage_reader=reader, no_dist=True)
    saved(LocalSteps(root), 41, 41.0)
    torch_ckpt.load(state, storage_reader=reader, no_dist=True)
    assert state["w"][0, 0] == 41.0


@pytest.mark.parametrize("name", ["40", ""])
def test_each_function_that_reads_a_checkpoint_accepts_steps_and_roots(
    root: Path, name: str
) -> None:
    step, path = str(root / "0000000040"), root / name
    assert torch_ckpt.verify(path).checkpoint == step
    assert torch_ckpt.show(path).checkpoint == step
    assert torch_ckpt.diff(path, root / "40").a == step
    assert explain(path).checkpoint == step
    assert examine(path).path == step
    assert torch_ckpt.preflight({"w": torch.zeros(5, 3)}, path).loaded == ["w"]


def test_a_step_without_its_marker_is_not_the_newest_one(root: Path) -> None:
    (root / "0000000040" / MARKER_NAME).unlink()
    assert found(root) == "0000000003"


def test_a_step_is_found_in_the_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    assert found(Path("3")) == "0000000003"
    assert found(Path(".")) == "0000000040"


def test_a_directory_with_the_exact_name_is_not_replaced_by_a_step(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path / "0000000007")
    save({"t": torch.ones(3)}, tmp_path / "7")
    assert found(tmp_path / "7") == "7"


def test_the_error_for_an_absent_step_names_the_newest_one(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such step; the newest step is 40"):
        open_checkpoint(root / "41")


@pytest.mark.parametrize("name", ["40", ""])
def test_an_open_step_is_not_deleted(root: Path, name: str) -> None:
    with closing(open_checkpoint(root / name)):
        assert not LocalSteps(root).delete(40)
    assert LocalSteps(root).delete(40)


def test_the_step_that_a_load_of_a_root_reads_is_not_deleted(root: Path) -> None:
    deleted = []

    def delete(operation: str, path: str) -> None:
        if operation == "decode metadata" or operation == "pread":
            deleted.append(LocalSteps(root).delete(40))

    with at_fault_points(delete):
        assert loaded(root) == 40.0
    assert deleted
    assert not any(deleted)


def test_a_newest_step_that_is_deleted_before_it_is_opened_is_replaced_by_the_previous_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_late(path: Any) -> OpenDirectory:
        if str(path).endswith("0000000040"):
            LocalSteps(root).delete(40)
        return OpenDirectory(path)

    monkeypatch.setattr(locating, "OpenDirectory", open_late)
    assert found(root) == "0000000003"


def test_a_newest_step_that_is_deleted_while_it_is_opened_is_replaced_by_the_previous_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_early(path: Any) -> OpenDirectory:
        opened = OpenDirectory(path)
        if str(path).endswith("0000000040"):
            LocalSteps(root).delete(40)
        return opened

    monkeypatch.setattr(locating, "OpenDirectory", open_early)
    assert found(root) == "0000000003"


# --- other formats -------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(dcp.CheckpointException) as caught:
        torch_ckpt.load({"t": torch.zeros(3)}, path, no_dist=True)
    cause = cause_of(caught.value)
    assert isinstance(cause, CheckpointError)
    return str(cause)


def test_a_load_of_another_format_names_convert(tmp_path: Path) -> None:
    convert = "to a checkpoint with torch-ckpt convert (torch_ckpt.convert)"
    file, hf = tmp_path / "model.safetensors", tmp_path / "hf"
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    but = f"{file} is not a directory but"
    assert refusal(file) == f"{but} a safetensors file; convert it {convert}"
    torch.save({"t": torch.ones(3)}, tmp_path / "model.pt")
    assert refusal(tmp_path / "model.pt").endswith(f"but a torch.save file; convert it {convert}")
    hf.mkdir()
    (hf / "pytorch_model.bin").touch()
    assert refusal(hf) == (
        f"{hf} is not a checkpoint: it contains torch.save files; convert one of them {convert}"
    )
    (hf / "model.safetensors").touch()
    assert refusal(hf) == (
        f"{hf} is not a checkpoint: it contains safetensors files; convert it {convert}"
    )


def test_the_error_for_a_file_of_a_checkpoint_names_the_checkpoint(root: Path) -> None:
    step = root / "0000000040"
    with pytest.raises(CheckpointError, match=f"but a file of the checkpoint {step}; pass that"):
        open_checkpoint(step / ".metadata")


def test_another_file_is_refused_as_it_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    with pytest.raises(CheckpointError, match="is not a directory; pass a checkpoint directory"):
        open_checkpoint(tmp_path / "notes")
