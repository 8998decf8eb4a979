"""Exit codes, the text without a command, and suggestions for misspelled commands."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.commands import Run
from tests.fault_hooks import before
from tests.support import data_files, save
from torch_ckpt.cli.arguments import build_parser
from torch_ckpt.cli.completion import subcommands
from torch_ckpt.cli.exit_codes import ExitCode

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| ([0-9]+) \| (.*) \|$", DOCUMENT.read_text(), re.M)
    assert rows == [(str(code.value), code.meaning) for code in ExitCode]


def test_help_lists_the_exit_codes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    lines = run("--help").splitlines()
    assert all(len(line) <= 70 for line in lines)
    table = " ".join(" ".join(lines[lines.index("exit codes:") + 1 :]).split())
    assert table == " ".join(f"{code.value} {code.meaning}" for code in ExitCode)


def test_every_command_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in subcommands(build_parser()) if f"`{name} " not in text] == []


def test_success_is_0(tmp_path: Path, run: Run) -> None:
    save({"weight": torch.zeros(3)}, tmp_path)
    for command in (["ls"], ["show"], ["verify"], ["explain"], ["diff", tmp_path]):
        run(*command, tmp_path, code=ExitCode.SUCCESS)


def test_a_finding_is_1(tmp_path: Path, run: Run) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        save({"weight": torch.full((3,), value)}, tmp_path / name)
    run("diff", tmp_path / "a", tmp_path / "b", code=ExitCode.FINDING)
    data_files(tmp_path / "a")[0].unlink()
    for command in ("ls", "show", "verify"):
        run(command, tmp_path / "a", code=ExitCode.FINDING)


def test_an_error_is_2_with_json_too(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "none"
    for command in (
        ["ls", path],
        ["show", path],
        ["verify", path],
        ["explain", path],
        ["diff", path, path],
        ["convert", path, tmp_path / "model.pt"],
        ["steps", path],
        ["gc", path, "--keep-last", "1"],
        ["delete", path, "1"],
        ["pin", path, "1"],
        ["unpin", path, "1"],
        ["doctor", path],
    ):
        assert run.refused(*command, "--json").startswith("torch-ckpt: ")


def test_ctrl_c_is_130_and_one_line(tmp_path: Path, run: Run) -> None:
    save({"weight": torch.zeros(3)}, tmp_path)
    with before("pread", lambda: os.kill(os.getpid(), signal.SIGINT)):
        run("verify", tmp_path, code=ExitCode.INTERRUPTED)
    assert run.err == "torch-ckpt: interrupted\n"


# --- wrong command lines -------------------------------------------------------------------------


def test_no_command_prints_examples_that_are_valid(run: Run) -> None:
    text = run(code=ExitCode.ERROR)
    examples = re.findall(r"^  torch-ckpt (.*)$", text, re.M)
    assert len(examples) == 5
    for example in examples:
        build_parser().parse_args(example.split())
    assert "torch-ckpt --help" in text


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("verfy", "did you mean 'verify'?"),
        ("frobnicate", "torch-ckpt --help lists the commands"),
        ("step", "did you mean 'steps'?"),
    ],
)
def test_a_misspelled_command_is_an_error_with_a_suggestion(run: Run, word: str, hint: str) -> None:
    assert f"unknown command {word!r}; {hint}" in run(word, "checkpoint", code=ExitCode.ERROR)


@pytest.mark.parametrize(
    ("arguments", "command", "error"),
    [
        (["ls", "x", "--wrong"], "ls", "--wrong"),
        (["--wrong", "ls", "x"], "ls", "--wrong"),
        (["steps", "x", "y"], "steps", "y"),
        (["verify", "x", "--quite"], "verify", "--quite; did you mean --quiet?"),
        (["gc", "x", "--keep-lst=3"], "gc", "--keep-lst=3; did you mean --keep-last?"),
    ],
)
def test_an_unknown_argument_is_an_error_with_a_suggestion(
    run: Run, arguments: list[str], command: str, error: str
) -> None:
    text = run(*arguments, code=ExitCode.ERROR)
    assert text.startswith(f"usage: torch-ckpt {command} ")
    assert text.endswith(f"unrecognized arguments: {error}\n")


def test_names_may_follow_options(tmp_path: Path, run: Run) -> None:
    save({"weight": torch.zeros(3), "bias": torch.zeros(3)}, tmp_path)
    assert "total: 1 tensor, " in run("ls", tmp_path, "--files", "weight")
