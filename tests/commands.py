"""The fixture ``run``: commands of torch-ckpt in the process of the tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from torch_ckpt import cli


class Run:
    """Runs commands.

    Attributes:
        code, out, err: exit code and output of the last command.
    """

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.code: Any = None
        self.out = self.err = ""

    def __call__(self, *arguments: object, code: int | None = 0) -> str:
        """Runs a command that must return the code, if one is given.

        Returns its output, or its error for code 2.
        """
        try:
            self.code = cli.main(list(map(str, arguments)))
        except SystemExit as ended:  # by argparse
            self.code = ended.code
        self.out, self.err = self._capsys.readouterr()
        assert self.code == (self.code if code is None else code), self.err
        return self.err if self.code == 2 else self.out

    def json(self, *arguments: object, code: int | None = 0) -> Any:
        """Runs a command with --json and returns its document."""
        return json.loads(self(*arguments, "--json", code=code))

    def refused(self, *arguments: object) -> str:
        """Runs a command that must return 2 and print only one line, an error; returns the line."""
        error = self(*arguments, code=2)
        assert (self.out, error.count("\n")) == ("", 1)
        return error


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)
