"""Saves and loads in forked children whose system calls fail by strace.

The child first runs its work once in another directory, which imports what is imported late. Then
strace attaches, and the child runs the work under test.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Child, server

TIMEOUT_SECONDS = 60


@dataclass
class Outcome:
    """Outcome of the child's work."""

    error: BaseException | None  # unpickled
    calls: list[Call]  # strace's log, in order

    def calls_of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]


@dataclass
class Call:
    """One system call."""

    name: str
    arguments: str
    result: str  # with strace's explanation
    nth: int  # among the calls of this name, counting from 1


def run(
    work: Callable[..., None],
    *arguments: Any,
    trace: str,
    inject: str | None = None,
    paths: list[str | Path] | None = None,
    main_thread_only: bool = False,
) -> Outcome:
    """Runs ``work(*arguments)`` in a child under strace.

    Args:
        work: a function that a fresh process can import.
        arguments: its arguments.
        trace: names of system calls to trace, separated by commas.
        inject: fault to inject, in the syntax of strace's ``-e inject=``.
        paths: trace only calls on these paths and on the files opened from them.
        main_thread_only: trace only the calling thread, which commits.
    """
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    child = server().start(_child, work, arguments)
    try:
        assert _answer(child) == "ready"
        command = [strace, "-p", str(child.pid), "-e", f"trace={trace}"]
        if not main_thread_only:
            command.append("-f")
        for path in paths or ():
            command += ["-P", str(path)]
        if inject is not None:
            command += ["-e", f"inject={inject}"]
        with _attached(command) as log:
            child.connection.send("go")
            result = _answer(child)
            child.wait()
        return Outcome(pickle.loads(result), list(_calls(log)))
    finally:
        child.kill()


def _answer(child: Child) -> Any:
    try:
        return child.receive()
    except EOFError:
        raise AssertionError(f"the child died with code {child.wait()}") from None


def _child(
    connection: Connection,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
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


_FINISHED = re.compile(r"(?:(\d+) +)?(\w+)\((.*)\) += (.*)$")
_UNFINISHED = re.compile(r"(?:(\d+) +)?(\w+)\((.*) <unfinished \.\.\.>$")
_RESUMED = re.compile(r"(?:(\d+) +)?<\.\.\. (\w+) resumed>(.*)\) += (.*)$")


def _calls(lines: list[str]) -> Iterator[Call]:
    unfinished: dict[tuple[str | None, str], str] = {}
    counts: dict[str, int] = {}
    for line in lines:
        if match := _UNFINISHED.match(line):
            unfinished[match[1], match[2]] = match[3]
            continue
        if match := _RESUMED.match(line):
            name, arguments = match[2], unfinished.pop((match[1], match[2]), "") + match[3]
        elif match := _FINISHED.match(line):
            name, arguments = match[2], match[3]
        else:
            continue
        counts[name] = counts.get(name, 0) + 1
        yield Call(name, arguments, match[4], counts[name])
