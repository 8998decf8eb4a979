"""Exit codes, the text without a command, and suggestions for misspelled commands."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from tests.fault_hooks import before
from tests.support import data_files, save
from torch_ckpt import cli
from torch_ckpt.cli.arguments import build_parser
from torch_ckpt.cli.completion import subcommands
from torch_ckpt.cli.exit_codes import ExitCode

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"


def test_every_exit_code_is_documented() -> None:
    rows = re.findall(r"^\| ([0-9]+) \| (.*) \|$", DOCUMENT.read_text(), re.M)
    assert rows == [(str(code.value), code.meaning) for code in ExitCode]


def test_help_lists_the_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == ExitCode.SUCCESS
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 70 for line in lines)
    table = " ".join(" ".join(lines[lines.index("exit codes:") + 1 :]).split())
    assert table == " ".join(f"{code.value} {code.meaning}" for code in ExitCode)


def test_every_command_is_documented() -> None:
    text = DOCUMENT.read_text()
    assert [name for name in subcommands(build_parser()) if f"`{name} " not in text] == []


def test_success_is_0(tmp_path: Path) -> None:
    save({"weight": torch.zeros(3)}, tmp_path)
    for command in (["ls"], ["show"], ["verify"], ["explain"], ["diff", str(tmp_path)]):
        assert cli.main([*command, str(tmp_path)]) == ExitCode.SUCCESS


def test_a_finding_is_1(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        save({"weight": torch.full((3,), value)}, tmp_path / name)
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == ExitCode.FINDING
    data_files(tmp_path / "a")[0].unlink()
    for command in ("ls", "show", "verify"):
        assert cli.main([command, str(tmp_path / "a")]) == ExitCode.FINDING


def test_an_error_is_2_with_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "none")
    for command in (
        ["ls", path],
        ["show", path],
        ["verify", path],
        ["explain", path],
        ["diff", path, path],
        ["convert", path, str(tmp_path / "model.pt")],
        ["steps", path],
        ["gc", path, "--keep-last", "1"],
        ["delete", path, "1"],
        ["pin", path, "1"],
        ["unpin", path, "1"],
        ["doctor", path],
    ):
        assert cli.main([*command, "--json"]) == ExitCode.ERROR
        output = capsys.readouterr()
        assert output.out == ""
        assert re.fullmatch(r"torch-ckpt: .*\n", output.err)


def test_ctrl_c_is_130_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"weight": torch.zeros(3)}, tmp_path)

    with before("pread", lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert cli.main(["verify", str(tmp_path)]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "torch-ckpt: interrupted\n"


# --- wrong command lines -------------------------------------------------------------------------


def test_no_command_prints_examples_that_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == ExitCode.ERROR
    text = capsys.readouterr().err
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
def test_a_misspelled_command_is_an_error_with_a_suggestion(
    capsys: pytest.CaptureFixture[str], word: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([word, "checkpoint"])
    assert exit_.value.code == ExitCode.ERROR
    assert f"unknown command {word!r}; {hint}" in capsys.readouterr().err


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
    capsys: pytest.CaptureFixture[str], arguments: list[str], command: str, error: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == ExitCode.ERROR
    text = capsys.readouterr().err
    assert text.startswith(f"usage: torch-ckpt {command} ")
    assert text.endswith(f"unrecognized arguments: {error}\n")


def test_names_may_follow_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"weight": torch.zeros(3), "bias": torch.zeros(3)}, tmp_path)
    assert cli.main(["ls", str(tmp_path), "--files", "weight"]) == ExitCode.SUCCESS
    assert "total: 1 tensor, " in capsys.readouterr().out
