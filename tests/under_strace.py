"""Saves and loads in forked children whose system calls fail by strace.

The child first runs its work once in another directory, which imports what is imported late. Then
strace attaches, and the child runs the work under test.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.forked import server

TIMEOUT_SECONDS = 60


@dataclass
class Outcome:
    """Outcome of the child's work."""

    error: BaseException | None  # unpickled
    injected: int  # system calls that strace has made fail or return early


def run(
    work: Callable[..., None], *arguments: Any, inject: str, paths: Sequence[str | Path] = ()
) -> Outcome:
    """Runs ``work(*arguments)`` in a child under strace.

    Args:
        work: a function that a fresh process can import.
        arguments: its arguments.
        inject: fault to inject, in the syntax of strace's ``-e inject=``.
        paths: only calls on these paths and on the files opened from them fail.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    child = server().start(_child, work, arguments)
    try:
        assert child.receive() == "ready"
        command = [strace, "-p", str(child.pid), "-f", "-e", f"trace={inject.partition(':')[0]}"]
        for path in paths:
            command += ["-P", str(path)]
        command += ["-e", f"inject={inject}"]
        with _attached(command) as log:
            child.connection.send("go")
            result = child.receive()
            child.wait()
        return Outcome(pickle.loads(result), sum("INJECTED" in line for line in log))
    finally:
        child.kill()


def _child(connection: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as warm_up:
        work(warm_up, *arguments[1:])
    connection.send("ready")
    assert connection.recv() == "go"
    error: BaseException | None = None
    try:
        work(*arguments)
    except BaseException as caught:
        error = caught
    connection.send(pickle.dumps(error))
    # Finalizing torch takes a second, and makes system calls.
    os._exit(0)


@contextmanager
def _attached(command: list[str]) -> Iterator[list[str]]:
    """Runs strace for the duration of a block, and fills the list with its lines after the
    block."""
    lines: list[str] = []
    with tempfile.NamedTemporaryFile("r") as log:
        tracer = subprocess.Popen([*command, "-o", log.name], stderr=subprocess.PIPE, text=True)
        try:
            assert tracer.stderr is not None
            output = tracer.stderr.readline()
            if "attached" not in output:
                if "Operation not permitted" in output:
                    pytest.skip(f"strace may not attach here: {output.strip()}")
                raise AssertionError(f"strace does not attach: {output}")
            yield lines
            tracer.communicate(timeout=TIMEOUT_SECONDS)
            lines += log.read().splitlines()
        finally:
            tracer.kill()
            tracer.communicate()
