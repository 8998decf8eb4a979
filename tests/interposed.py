"""Saves in forked children whose calls of libc are counted, fail or are their last.

``faults/shim.c`` stands between the children and libc, ours and torch's code alike, and the
extension is the one that is released. A server process has it preloaded, torch imported and no
threads; it forks a child for each run, which costs tens of milliseconds. What a save imports late
is imported before, by the example of a child that is let go ahead.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent / "faults" / "shim.c"

TIMEOUT_SECONDS = 60

#: Of calls, in the order of the shim's ``enum kind``.
KINDS = (
    *("open", "read", "write", "fsync", "sync_file_range", "syncfs", "fallocate", "ftruncate"),
    *("rename", "link", "unlink", "rmdir", "mkdir", "close", "flock", "stat", "opendir", "dup"),
)

#: In the order of the shim's ``enum action``.
ACTIONS = ("pass", "fail", "short", "kill", "exchange", "chdir")

_LOG_LENGTH = 4096


@dataclass(frozen=True)
class Order:
    """What the shim shall do.

    Attributes:
        action: "pass" counts; "fail" lets calls fail with ``errors[kind]`` (kinds that are not
            there succeed); "short" lets reads and writes come back early; "kill" ends the process
            before the call; "exchange" lets two paths name each other's files or directories from
            just before the call, and "chdir" goes to another directory then.
        first: the number of the first call to act upon, from 1; 0: none.
        times: to how many calls.
        kinds: what is numbered.
        errors: errno by kind.
        count: bytes of calls that come back early; 0: half of those asked for.
        paths: "exchange": both; "chdir": the directory, and nothing.
    """

    action: str = "pass"
    first: int = 0
    times: int = 1
    kinds: Sequence[str] = KINDS
    errors: Mapping[str, int] | None = None
    count: int = 0
    paths: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Call:
    """One call that concerned the tree."""

    kind: str
    path: str
    number: int  # among those that are numbered, from 1; 0: of another kind
    action: str  # what was done to it
    result: int
    errno: int  # 0: it succeeded

    def __str__(self) -> str:
        said = os.strerror(self.errno) if self.errno else str(self.result)
        return f"call {self.number}: {self.kind} {self.path} = {said} ({self.action})"


@dataclass
class Run:
    """What became of a child's work."""

    error: BaseException | None  # what it raised
    killed: bool
    calls: list[Call]
    numbered: int  # calls of the kinds that the order names

    @property
    def hit(self) -> Call | None:
        """The first call that was acted upon; None where the run did not get so far."""
        return next((call for call in self.calls if call.action != "pass"), None)

    def of(self, kind: str) -> list[Call]:
        return [call for call in self.calls if call.kind == kind]


# --- the library ---------------------------------------------------------------------------------


class _Entry(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("action", ctypes.c_int32),
        ("error", ctypes.c_int32),
        ("number", ctypes.c_int32),
        ("result", ctypes.c_int64),
        ("path", ctypes.c_char * 232),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        ("armed", ctypes.c_int32),
        ("mask", ctypes.c_uint32),
        ("first", ctypes.c_int64),
        ("times", ctypes.c_int64),
        ("action", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("errors", ctypes.c_int32 * len(KINDS)),
        ("root", ctypes.c_char * 4096),
        ("paths", (ctypes.c_char * 4096) * 2),
        ("numbered", ctypes.c_int64),
        ("logged", ctypes.c_int64),
        ("log", _Entry * _LOG_LENGTH),
    )


def built_shim(directory: Path) -> Path:
    """The library, compiled; skips the test where there is no compiler."""
    compiler = next(
        (found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None
    )
    if compiler is None:
        pytest.skip("no C compiler is installed: system calls cannot be made to fail one by one")
    library = directory / "shim.so"
    command = [compiler, "-std=gnu17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([*command, "-o", library, SOURCE, "-ldl"], check=True)
    return library


# --- the tests' side -----------------------------------------------------------------------------


class Server:
    """Forks children with the shim, one at a time. Not thread-safe.

    Args:
        library: the shim.
        examples: work that is done once elsewhere so that what it imports late is imported by the
            server, and each of its arguments after the directory.
    """

    def __init__(self, library: Path, examples: Sequence[tuple[Callable[..., None], Any]]) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.interposed", str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        for work, arguments in examples:
            with tempfile.TemporaryDirectory() as elsewhere:
                self._connection.send(("example", work, (elsewhere, *arguments)))
                said = self._answer()
                assert said == "imported", said

    def run(self, order: Order, root: Path, work: Callable[..., None], *arguments: Any) -> Run:
        """Runs ``work(*arguments)`` in a child, and waits for it.

        Args:
            order: what to do to its calls.
            root: the tree that they must concern.
            work: a function that the server can import.
        """
        self.start(order, root, work, *arguments)
        return self.finish()

    def start(self, order: Order, root: Path, work: Callable[..., None], *arguments: Any) -> None:
        """Begins a run; :meth:`finish` comes next."""
        self._connection.send(("run", order, os.path.realpath(root), work, arguments))
        self._child: int = self._answer()

    def finish(self) -> Run:
        """What became of the run that was started."""
        hangs = not self._connection.poll(TIMEOUT_SECONDS)
        if hangs:
            os.kill(self._child, signal.SIGKILL)
        error, killed, entries, numbered = self._answer()
        calls = [Call(*entry) for entry in entries]
        assert not hangs, "the child hangs after " + "\n".join(map(str, calls[-5:]))
        return Run(pickle.loads(error) if error else None, killed, calls, numbered)

    def close(self) -> None:
        self._connection.close()
        try:
            self._process.wait(TIMEOUT_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Any:
        assert self._connection.poll(TIMEOUT_SECONDS), "the server of forked children hangs"
        try:
            return self._connection.recv()
        except EOFError:
            raise AssertionError(
                f"the server of forked children died with code {self._process.wait()}"
            ) from None


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that is preloaded."""
    return built_shim(tmp_path_factory.mktemp("shim"))


# --- the server's side ---------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    library = ctypes.CDLL(None)
    library.shim_block.restype = ctypes.POINTER(_Block)
    block: _Block = library.shim_block().contents
    while True:
        try:
            kind, *rest = connection.recv()
        except EOFError:
            return
        if kind == "example":
            connection.send(_import_as(*rest))
        else:
            _run(connection, block, *rest)


def _import_as(work: Callable[..., None], arguments: tuple[Any, ...]) -> str:
    """Imports what a child has imported after it has done the work."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(*arguments)
            said: Any = sorted(sys.modules)
        except BaseException as error:
            said = repr(error)
        with os.fdopen(writing, "wb") as stream:
            pickle.dump(said, stream)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        names = pickle.load(stream)
    os.waitpid(child, 0)
    if isinstance(names, str):
        return names
    for name in names:
        # Some names in there are no modules that can be imported by it.
        with suppress(ImportError):
            importlib.import_module(name)
    return "imported"


def _run(
    connection: Connection,
    block: _Block,
    order: Order,
    root: str,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    block.armed = 0
    block.mask = sum(1 << KINDS.index(kind) for kind in order.kinds)
    block.first, block.times = order.first, order.times
    block.action, block.bytes = ACTIONS.index(order.action), order.count
    for place, kind in enumerate(KINDS):
        block.errors[place] = (order.errors or {}).get(kind, 0)
    block.root = os.fsencode(root)
    for place, path in enumerate(order.paths):
        block.paths[place].value = os.fsencode(path)
    block.numbered = block.logged = 0
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(block, writing, work, arguments)
    os.close(writing)
    connection.send(child)
    with os.fdopen(reading, "rb") as stream:
        error = stream.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    if not killed and status != 0:
        error = pickle.dumps(AssertionError(f"the child ended with status {status:#x}"))
    calls = [_call(entry) for entry in block.log[: min(block.logged, _LOG_LENGTH)]]
    connection.send((error, killed, calls, block.numbered))


def _work(
    block: _Block, writing: int, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """The child's; does not return."""
    # What torch and threads of it write there is told by the error, or is the loss that is counted.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    error: BaseException | None = None
    block.armed = 1
    try:
        work(*arguments)
    except BaseException as caught:
        error = caught
    block.armed = 0
    try:
        if error is not None:
            with os.fdopen(writing, "wb") as stream:
                stream.write(_pickled(error))
    finally:
        os._exit(0)


def _pickled(error: BaseException) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception as unpicklable:
        return pickle.dumps(AssertionError(f"{error!r}, which cannot be pickled: {unpicklable}"))


def _call(entry: _Entry) -> tuple[str, str, int, str, int, int]:
    kind, action = KINDS[entry.kind], ACTIONS[entry.action]
    return (kind, os.fsdecode(entry.path), entry.number, action, entry.result, entry.error)


if __name__ == "__main__":
    import torch
    import torch.distributed.checkpoint

    import torch_ckpt  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # By its name and not as __main__, so that pickles of both sides mean the same classes.
    importlib.import_module("tests.interposed")._serve(Connection(int(sys.argv[1])))
    # Taking torch apart takes seconds.
    os._exit(0)
