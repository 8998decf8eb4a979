"""Paths on the command line: each command finds the same checkpoint, and says the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt import cli
from torch_ckpt.steps import LocalSteps


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of a run with steps 3 and 40."""
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
def test_each_command_takes_the_newest_step_of_a_root(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert said(capsys, command, root, 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_tells_what_is_missing_from_what_is_not_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    lacking = "no committed checkpoint: there is no"
    assert said(capsys, command, tmp_path / "no", 2) == (
        f"{tmp_path / 'no'}: {lacking} such directory"
    )
    assert said(capsys, command, tmp_path, 2) == f"{tmp_path}: {lacking} .metadata in the directory"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_an_empty_argument(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([word if word != "PATH" else "" for word in COMMANDS[command]])
    assert "must name a path, got an empty text" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_names_convert_for_a_file_of_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    torch.save({"t": torch.ones(3)}, tmp_path / "model.pt")
    assert said(capsys, command, tmp_path / "model.pt", 2) == (
        f"{tmp_path / 'model.pt'} is not a directory but a file of torch.save: torch-ckpt convert "
        "(torch_ckpt.convert) makes a checkpoint of it"
    )


def test_verify_does_not_list_the_files_that_mark_a_step(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalSteps(root).set_pinned(3, True)
    assert "unreferenced" not in said(capsys, "verify", root / "3", 0)
    assert torch_ckpt.verify(root / "3").unreferenced == []


@pytest.mark.parametrize("source", ["40", ""])
def test_convert_takes_a_step_by_its_number_or_its_root(
    root: Path, tmp_path: Path, source: str
) -> None:
    assert cli.main(["convert", str(root / source), str(tmp_path / "model.pt")]) == 0
    assert torch.load(tmp_path / "model.pt")["t"].tolist() == [1.0] * 5
