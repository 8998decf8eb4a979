"""Paths on the command line: each command finds the same checkpoint, and says the same."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
import torch

import torch_ckpt
from tests.support import save
from torch_ckpt import cli
from torch_ckpt.cli.locating import checkpoint_at
from torch_ckpt.errors import CheckpointError
from torch_ckpt.steps import LocalSteps


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with steps 3 and 40."""
    root = tmp_path_factory.mktemp("run")
    for step in (3, 40):
        marker = {"saved_at": time.time(), "metrics": {}}
        writer = LocalSteps(root).writer(step, attempt="0123abcd", marker=lambda m=marker: m)
        torch_ckpt.save({"t": torch.ones(5)}, storage_writer=writer, no_dist=True)
    return root


COMMANDS = {
    "ls": ["ls", "PATH"],
    "show": ["show", "PATH"],
    "verify": ["verify", "PATH"],
    "diff": ["diff", "PATH", "PATH"],
}


def said(capsys: pytest.CaptureFixture[str], command: str, path: object, code: int) -> str:
    """What a command with the path says, and nothing else."""
    arguments = [str(path) if word == "PATH" else word for word in COMMANDS[command]]
    assert cli.main(arguments) == code
    output = capsys.readouterr()
    if code == 0:
        assert output.err == ""
        return output.out
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.removeprefix("torch-ckpt: ").rstrip("\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_takes_a_step_by_its_number(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert said(capsys, command, root / "40", 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_suggests_the_newest_step_of_a_root(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert said(capsys, command, root, 2) == (
        f"{root} is not a checkpoint but the root of a run, whose newest step is 40: "
        f"name it as {root}/40"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_tells_what_is_missing_from_what_is_not_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert said(capsys, command, tmp_path / "no", 2) == f"{tmp_path / 'no'}: it does not exist"
    assert said(capsys, command, tmp_path, 2) == (
        f"{tmp_path} is not a checkpoint: there is no .metadata in it, which a save writes last"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_convert_for_a_file_of_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    torch.save({"t": torch.ones(3)}, tmp_path / "model.pt")
    assert said(capsys, command, tmp_path / "model.pt", 2) == (
        f"{tmp_path / 'model.pt'} is not a directory but a file of torch.save: torch-ckpt convert "
        "makes a checkpoint of it"
    )


def test_a_step_that_is_not_there_is_told_with_the_newest_one(root: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such step; the newest one is 40"):
        checkpoint_at(root / "41")


def test_a_step_is_found_in_the_working_directory_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    assert checkpoint_at("3/") == "0000000003"


def test_a_directory_of_that_very_name_is_not_taken_for_a_step(root: Path, tmp_path: Path) -> None:
    save({"t": torch.ones(3)}, tmp_path / "0000000007")
    save({"t": torch.ones(3)}, tmp_path / "7")
    assert checkpoint_at(tmp_path / "7") == str(tmp_path / "7")


def test_safetensors_are_told_whether_a_file_or_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(CheckpointError, match="not a directory but a safetensors file: torch-ckpt"):
        checkpoint_at(file)
    with pytest.raises(CheckpointError, match="a directory of safetensors files: torch-ckpt conve"):
        checkpoint_at(tmp_path)
    assert checkpoint_at(file, other_formats=True) == str(file)
    assert checkpoint_at(tmp_path, other_formats=True) == str(tmp_path)


def test_a_file_of_a_checkpoint_is_told_as_one(root: Path) -> None:
    step = root / "0000000040"
    with pytest.raises(CheckpointError, match=f"but a file of the checkpoint {step}$"):
        checkpoint_at(step / ".metadata")


def test_another_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    with pytest.raises(CheckpointError, match="is not a directory, and a checkpoint is one"):
        checkpoint_at(tmp_path / "notes")


def test_convert_takes_a_step_by_its_number(root: Path, tmp_path: Path) -> None:
    assert cli.main(["convert", str(root / "40"), str(tmp_path / "model.pt")]) == 0
    assert torch.load(tmp_path / "model.pt")["t"].tolist() == [1.0] * 5
