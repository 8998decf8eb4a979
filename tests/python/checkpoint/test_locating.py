"""Paths of a checkpoint: its directory, a step of a run, the root of a run."""

from __future__ import annotations

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
from torch_ckpt import CheckpointError
from torch_ckpt.checkpoint import locating
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.locating import open_checkpoint
from torch_ckpt.checkpoint.step_names import MARKER_NAME
from torch_ckpt.inspection.diff import diff
from torch_ckpt.inspection.explain import explain
from torch_ckpt.inspection.listing import examine
from torch_ckpt.inspection.show import show
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
    opened = open_checkpoint(path)
    with closing(opened.directory):
        assert opened.path == opened.directory.path
        return Path(opened.path).name


@pytest.mark.parametrize("load", [loaded, loaded_by_dcp])
def test_a_load_accepts_a_step_and_a_root_for_its_newest_step(
    root: Path, load: Callable[[Path], float]
) -> None:
    assert (load(root / "3"), load(root / "40"), load(root)) == (3.0, 40.0, 40.0)


def test_a_reused_reader_finds_the_newest_step_again(root: Path) -> None:
    reader = torch_ckpt.FileSystemReader(root)
    state = {"w": torch.zeros(5, 3)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    saved(LocalSteps(root), 41, 41.0)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["w"][0, 0] == 41.0


@pytest.mark.parametrize("name", ["40", ""])
def test_each_function_that_reads_a_checkpoint_accepts_steps_and_roots(
    root: Path, tmp_path: Path, name: str
) -> None:
    step, path = str(root / "0000000040"), root / name
    LocalSteps(root).set_pinned(40, True)
    report = torch_ckpt.verify(path)
    # The markers of a step belong to it.
    assert (report.checkpoint, report.unreferenced) == (step, [])
    assert show(path).checkpoint == step
    assert diff(path, root / "40").a == step
    assert explain(path).checkpoint == step
    assert examine(path).path == step
    assert torch_ckpt.preflight({"w": torch.zeros(5, 3)}, path).loaded == ["w"]
    torch_ckpt.convert(path, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["w"][0, 0] == 40.0


def test_a_step_without_its_marker_is_not_the_newest_one(root: Path) -> None:
    (root / "0000000040" / MARKER_NAME).unlink()
    assert found(root) == "0000000003"


def test_the_error_for_a_root_without_a_complete_step_names_its_steps(root: Path) -> None:
    for step in ("0000000003", "0000000040"):
        (root / step / MARKER_NAME).unlink()
    match = (
        rf"no step is complete: 0000000003, 0000000040 lack {MARKER_NAME}.* pass its directory, "
        f"such as {root}/0000000040"
    )
    with pytest.raises(FileNotFoundError, match=match):
        open_checkpoint(root)
    assert found(root / "40") == "0000000040"


def test_a_step_is_found_in_a_working_directory(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    assert found(Path("3")) == "0000000003"
    assert found(Path(".")) == "0000000040"


def test_a_directory_with_the_exact_name_is_not_replaced_by_a_step(tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path / "0000000007")
    save({"t": torch.ones(3)}, tmp_path / "7")
    assert found(tmp_path / "7") == "7"


@pytest.mark.parametrize("name", ["40", ""])
def test_an_open_step_is_not_deleted(root: Path, name: str) -> None:
    with closing(open_checkpoint(root / name).directory):
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


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_newest_step_that_is_deleted_as_it_is_opened_is_replaced_by_the_previous_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def open_directory(path: Any) -> OpenDirectory:
        opened = OpenDirectory(path)
        if str(path).endswith("0000000040"):
            LocalSteps(root).delete(40)
            if when == "before":
                return OpenDirectory(path)
        return opened

    monkeypatch.setattr(locating, "OpenDirectory", open_directory)
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
    file = tmp_path / "model.pt"
    torch.save({"t": torch.ones(3)}, file)
    assert refusal(file) == f"{file} is not a directory but a torch.save file; convert it {convert}"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/pytorch_model.bin").touch()
    contains = f"it contains torch.save files; convert one of them {convert}"
    assert refusal(tmp_path / "hf") == f"{tmp_path}/hf is not a checkpoint: {contains}"


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("run/41", FileNotFoundError, "no such step; the newest step is 40"),
        (
            "run/0000000040/.metadata",
            CheckpointError,
            "but a file of the checkpoint {}/run/0000000040; pass that",
        ),
        ("notes", CheckpointError, "is not a directory; pass a checkpoint directory"),
    ],
)
def test_the_error_for_another_path_names_the_nearest_checkpoint(
    root: Path, tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "notes").write_text("x")
    with pytest.raises(error, match=message.format(tmp_path)):
        open_checkpoint(tmp_path / name)
