"""Saves in forked children, with each libc call counted, made to fail, or followed by a kill.

``faults/shim.c`` is preloaded into a server of forked children. It intercepts calls of torch_ckpt
and of torch; the extension is the released one. Modules that a save imports late are imported by
the server first: an example child reports them. Tests and children share the memory with the orders
and the log.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import forked

SOURCE = Path(__file__).parent / "faults" / "shim.c"

TIMEOUT_SECONDS = 60

#: Kinds of calls, in the order of the shim's ``enum kind``.
KINDS = (
    *("open", "read", "write", "fsync", "sync_file_range", "syncfs", "fallocate", "ftruncate"),
    *("rename", "link", "unlink", "rmdir", "mkdir", "close", "flock", "stat", "opendir", "dup"),
)

#: In the order of the shim's ``enum action``.
ACTIONS = ("pass", "fail", "short", "kill", "exchange", "chdir")

_LOG_LENGTH = 4096


@dataclass(frozen=True)
class Order:
    """Instruction to the shim.

    Attributes:
        action: "pass" counts; "fail" fails calls with ``errors[kind]`` (kinds without an errno
            succeed); "short" makes reads and writes return early; "kill" ends the process before
            the call; "exchange" swaps the files or directories at two paths just before the call;
            "chdir" changes the working directory just before the call.
        first: number of the first affected call, from 1; 0: none.
        times: number of affected calls.
        kinds: kinds of calls that are numbered.
        errors: errno by kind.
        count: bytes that a short call transfers; 0: half of the requested bytes.
        paths: "exchange": both paths; "chdir": the directory, and an empty string.
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
    number: int  # among the numbered calls, from 1; 0: of another kind
    action: str  # the shim's action
    result: int
    errno: int  # 0: success

    def __str__(self) -> str:
        outcome = os.strerror(self.errno) if self.errno else str(self.result)
        return f"call {self.number}: {self.kind} {self.path} = {outcome} ({self.action})"


@dataclass
class Run:
    """Outcome of a child's work."""

    error: BaseException | None  # the exception of the work
    killed: bool
    calls: list[Call]
    numbered: int  # calls of the kinds in the order

    @property
    def hit(self) -> Call | None:
        """Returns the first affected call, or None if the run ended before it."""
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
    """Compiles the shim. Skips the test if there is no compiler."""
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
        examples: functions, each with its arguments after the directory. Each runs once elsewhere,
            and the server then imports the modules that it imported late.
    """

    def __init__(self, library: Path, examples: Sequence[tuple[Callable[..., None], Any]]) -> None:
        memory = os.memfd_create("shim")
        os.truncate(memory, ctypes.sizeof(_Block))
        self._block = _Block.from_buffer(mmap.mmap(memory, ctypes.sizeof(_Block)))
        block = f"/proc/{os.getpid()}/fd/{memory}"
        # Only what saves need: a larger process takes longer to fork.
        modules = ("torch", "torch.distributed.checkpoint", "torch_ckpt.api")
        environment = {"LD_PRELOAD": str(library), "SHIM_BLOCK": block}
        self._server = forked.Server(modules, environment)
        os.close(memory)
        for work, arguments in examples:
            self._server.import_like(work, *arguments)

    def run(self, order: Order, root: Path, work: Callable[..., None], *arguments: Any) -> Run:
        """Runs ``work(*arguments)`` in a child, and waits for it.

        Args:
            order: instruction to the shim.
            root: the tree whose calls are counted.
            work: a function that the server can import.
        """
        self.start(order, root, work, *arguments)
        return self.finish()

    def start(self, order: Order, root: Path, work: Callable[..., None], *arguments: Any) -> None:
        """Starts a run; :meth:`finish` returns its outcome."""
        block = self._block
        block.armed = 0
        block.mask = sum(1 << KINDS.index(kind) for kind in order.kinds)
        block.first, block.times = order.first, order.times
        block.action, block.bytes = ACTIONS.index(order.action), order.count
        for place, kind in enumerate(KINDS):
            block.errors[place] = (order.errors or {}).get(kind, 0)
        block.root = os.fsencode(os.path.realpath(root))
        for place, path in enumerate(order.paths):
            block.paths[place].value = os.fsencode(path)
        block.numbered = block.logged = 0
        self._child = self._server.start(_work, work, arguments)

    def finish(self) -> Run:
        """Waits for the run and returns its outcome."""
        error, hangs = b"", False
        try:
            error = self._child.receive(TIMEOUT_SECONDS)
            self._child.wait()
        except TimeoutError:
            hangs = True
        except EOFError:
            pass
        self._child.kill()
        block = self._block
        calls = [_call(entry) for entry in block.log[: min(block.logged, _LOG_LENGTH)]]
        assert not hangs, "the child hangs after " + "\n".join(map(str, calls[-5:]))
        code = self._child.wait()
        assert code <= 0, f"the child ended with code {code}"
        return Run(pickle.loads(error) if error else None, code < 0, calls, block.numbered)

    def close(self) -> None:
        self._server.close()


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled shim, to be preloaded."""
    return built_shim(tmp_path_factory.mktemp("shim"))


# --- the child's side ----------------------------------------------------------------------------


def _work(connection: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    library = ctypes.CDLL(None)
    library.shim_block.restype = ctypes.POINTER(_Block)
    block: _Block = library.shim_block().contents
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # torch and its threads may print there. Failures are seen in the error or in the counted
    # losses.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    error: BaseException | None = None
    block.armed = 1
    try:
        work(*arguments)
    except BaseException as caught:
        error = caught
    block.armed = 0
    try:
        connection.send(_pickled(error) if error is not None else b"")
    finally:
        # Finalizing torch takes a second.
        os._exit(0)


def _pickled(error: BaseException) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception as unpicklable:
        return pickle.dumps(AssertionError(f"{error!r}, which cannot be pickled: {unpicklable}"))


def _call(entry: _Entry) -> Call:
    kind, action = KINDS[entry.kind], ACTIONS[entry.action]
    return Call(kind, os.fsdecode(entry.path), entry.number, action, entry.result, entry.error)
