"""Scripts that run in an interpreter of their own to its very end, without its import of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.forked import server

#: Runs a script with arguments.
RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_script(tmp_path_factory: pytest.TempPathFactory) -> RunScript:
    """Runs a script with arguments, in an interpreter that has imported torch and torch_ckpt."""
    directory = tmp_path_factory.mktemp("scripts")
    outputs = [directory / name for name in ("stdout", "stderr")]

    def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        child = server().start(_run, script, outputs, [os.fspath(value) for value in arguments])
        try:
            code = child.wait()
        finally:
            child.kill()
        return subprocess.CompletedProcess(script, code, *(path.read_text() for path in outputs))

    return run


def _run(_connection: Connection, script: str, outputs: list[Path], arguments: list[str]) -> None:
    for number, path in enumerate(outputs, 1):
        with path.open("w") as stream:
            os.dup2(stream.fileno(), number)
    sys.argv[1:] = arguments
    # What the script makes lives to the end.
    exec(script, vars(sys.modules["__main__"]))
