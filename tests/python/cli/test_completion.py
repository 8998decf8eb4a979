"""Tab completion by argcomplete, as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_ckpt.cli.arguments import build_parser, subcommands

pytest.importorskip("argcomplete")


def completed(line: str, answer: Path) -> list[str]:
    """Returns the words that a shell would offer at the end of a line."""
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-c", "from torch_ckpt.cli import main; main()"]
    subprocess.run(command, env=os.environ | asked, check=True)
    return [word.strip() for word in answer.read_text().split("\n")]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("torch-ckpt ver", ["verify"]),
        ("torch-ckpt verify x --qu", ["--quiet"]),
        ("torch-ckpt gc x --keep-l", ["--keep-last"]),
        ("torch-ckpt gc x --mode m", ["min", "max"]),
    ],
)
def test_a_shell_completes_commands_options_and_choices(
    tmp_path: Path, line: str, offered: list[str]
) -> None:
    assert completed(line, tmp_path / "answer") == offered


def test_a_shell_completes_every_command(tmp_path: Path) -> None:
    words = completed("torch-ckpt ", tmp_path / "answer")
    assert {*subcommands(build_parser())} <= {*words}


def test_the_entry_point_is_marked_for_shells_that_complete_all_python_programs() -> None:
    import torch_ckpt.cli

    assert "PYTHON_ARGCOMPLETE_OK" in Path(torch_ckpt.cli.__file__).read_text()[:1024]
