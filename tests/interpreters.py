"""Scripts that run in an interpreter of their own to its very end, without its import of torch.

One interpreter imports torch and forks a child for each script. The child ends as any interpreter
does, with all that is registered for its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: No script here is meant to take long, in seconds. One that does is killed.
LIMIT = 60

#: Runs a script with arguments.
RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

_SERVER = f"""
import json, os, signal, sys, torch, torch_ckpt, torch_ckpt.multihost
script = None
while script is None and (line := sys.stdin.readline()):
    child = os.fork()
    if child == 0:
        signal.alarm({LIMIT})
        script, stdout, stderr, *sys.argv[1:] = json.loads(line)
        for number, path in enumerate((os.devnull, stdout, stderr)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
if script is not None:
    exec(script, globals())
"""


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunScript]:
    """Runs a script with arguments, in an interpreter that has imported torch and torch_ckpt."""
    command = [sys.executable, "-W", "ignore", "-c", _SERVER]
    server = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    directory = tmp_path_factory.mktemp("scripts")

    def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        outputs = [directory / name for name in ("stdout", "stderr")]
        order = json.dumps([script, *map(os.fspath, outputs), *map(os.fspath, arguments)])
        print(order, file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        stdout, stderr = (path.read_text() for path in outputs)
        return subprocess.CompletedProcess(script, code, stdout, stderr)

    yield run
    server.stdin.close()
    server.wait(LIMIT)
