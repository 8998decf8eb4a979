"""Scripts that run until the end of their own interpreter, which has imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from tests.forked import server

_OUTPUTS = ("stdout", "stderr")


def run_script(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script with arguments and without warnings. Fails after a minute."""
    with tempfile.TemporaryDirectory() as directory:
        child = server().start(_run, script, list(map(os.fspath, arguments)), directory)
        try:
            code = child.wait()
        finally:
            child.kill()
        stdout, stderr = (Path(directory, name).read_text() for name in _OUTPUTS)
    # Last output of triton's bindings if torch's compiler has imported them.
    stderr = stderr.partition("nanobind: leaked")[0]
    return subprocess.CompletedProcess(script, code, stdout, stderr)


def _run(_connection: Connection, script: str, arguments: list[str], directory: str) -> None:
    sys.argv[1:] = arguments
    for number, name in enumerate(_OUTPUTS, start=1):
        file = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    # The script's objects live until the interpreter ends.
    exec(script, vars(sys.modules["__main__"]))
