"""Paths on the command line: every command finds the same checkpoint or prints the same error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import torch_ckpt
from tests.commands import Run
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
    "explain": ["explain", "PATH"],
    "diff": ["diff", "PATH", "PATH"],
}


def on_path(command: str, path: object) -> list[object]:
    return [path if word == "PATH" else word for word in COMMANDS[command]]


@pytest.mark.parametrize("step", ["40", ""], ids=["step", "newest"])
@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_accepts_a_step_number_or_a_root(
    root: Path, run: Run, command: str, step: str
) -> None:
    assert run(*on_path(command, root / step))
    assert run.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_prints_the_same_error(tmp_path: Path, run: Run, command: str) -> None:
    (tmp_path / "empty").mkdir()
    torch.save({"t": torch.ones(3)}, tmp_path / "model.pt")
    lacking = "no committed checkpoint: there is no"
    for path, error in (
        (tmp_path / "no", f"{lacking} such directory"),
        (tmp_path / "empty", f"{lacking} .metadata in the directory"),
    ):
        assert run.refused(*on_path(command, path)) == f"torch-ckpt: {path}: {error}\n"
    assert run.refused(*on_path(command, tmp_path / "model.pt")) == (
        f"torch-ckpt: {tmp_path / 'model.pt'} is not a directory but a torch.save file; convert it "
        "to a checkpoint with torch-ckpt convert (torch_ckpt.convert)\n"
    )
    assert "must be a path, got an empty string" in run(*on_path(command, ""), code=2)


def test_verify_does_not_list_the_markers_of_a_step(root: Path, run: Run) -> None:
    LocalSteps(root).set_pinned(3, True)
    assert "unreferenced" not in run("verify", root / "3")
    assert torch_ckpt.verify(root / "3").unreferenced == []


@pytest.mark.parametrize("source", ["40", ""])
def test_convert_accepts_a_step_number_or_a_root(
    root: Path, tmp_path: Path, run: Run, source: str
) -> None:
    run("convert", root / source, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt")["t"].tolist() == [1.0] * 5
