"""Paths on the command line: every command finds the same checkpoint or prints the same error."""

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


def output_of(capsys: pytest.CaptureFixture[str], command: str, path: object, code: int) -> str:
    """Runs a command on the path; returns the output, or the error without its prefix."""
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
def test_each_command_accepts_a_step_number(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert output_of(capsys, command, root / "40", 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_uses_the_newest_step_of_a_root(
    root: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert output_of(capsys, command, root, 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_distinguishes_a_missing_directory_from_missing_metadata(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    lacking = "no committed checkpoint: there is no"
    assert output_of(capsys, command, tmp_path / "no", 2) == (
        f"{tmp_path / 'no'}: {lacking} such directory"
    )
    assert (
        output_of(capsys, command, tmp_path, 2)
        == f"{tmp_path}: {lacking} .metadata in the directory"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_refuses_an_empty_path(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([word if word != "PATH" else "" for word in COMMANDS[command]])
    assert "must be a path, got an empty string" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_recommends_convert_for_another_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    torch.save({"t": torch.ones(3)}, tmp_path / "model.pt")
    assert output_of(capsys, command, tmp_path / "model.pt", 2) == (
        f"{tmp_path / 'model.pt'} is not a directory but a torch.save file; convert it to a "
        "checkpoint with torch-ckpt convert (torch_ckpt.convert)"
    )


def test_verify_does_not_list_the_markers_of_a_step(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalSteps(root).set_pinned(3, True)
    assert "unreferenced" not in output_of(capsys, "verify", root / "3", 0)
    assert torch_ckpt.verify(root / "3").unreferenced == []


@pytest.mark.parametrize("source", ["40", ""])
def test_convert_accepts_a_step_number_or_a_root(root: Path, tmp_path: Path, source: str) -> None:
    assert cli.main(["convert", str(root / source), str(tmp_path / "model.pt")]) == 0
    assert torch.load(tmp_path / "model.pt")["t"].tolist() == [1.0] * 5
