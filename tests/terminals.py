"""A pseudo-terminal as standard output and standard error of the command line."""

from __future__ import annotations

import os
import pty
import re
import threading
from collections.abc import Sequence

import pytest

from torch_ckpt import cli

_ESCAPE_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class PseudoTerminal:
    """A terminal whose other end collects the output."""

    def __init__(self) -> None:
        self._controller, device = pty.openpty()
        self.stream = open(device, "w", encoding="utf-8")  # noqa: SIM115  (closed by close())
        self._output = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._controller, 1 << 16)
            except OSError:  # EIO: the device is closed
                return
            if not chunk:
                return
            self._output += chunk

    def close(self) -> str:
        """Closes both ends and returns the output."""
        self.stream.close()
        self._reader.join()
        os.close(self._controller)
        return self._output.decode().replace("\r\n", "\n")


def run_in_terminal(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], columns: int = 100
) -> tuple[int, str]:
    """Runs a command in this process with a terminal; returns the exit code and the output."""
    terminal = PseudoTerminal()
    with monkeypatch.context() as patches:
        patches.setenv("COLUMNS", str(columns))
        if "TERM" not in os.environ or os.environ["TERM"] == "dumb":
            patches.setenv("TERM", "xterm-256color")
        patches.setattr("sys.stdout", terminal.stream)
        patches.setattr("sys.stderr", terminal.stream)
        try:
            code = cli.main(arguments)
        finally:
            output = terminal.close()
    return code, output


def visible(output: str) -> list[str]:
    """The lines of an output without escape sequences."""
    return _ESCAPE_SEQUENCES.sub("", output).splitlines()
