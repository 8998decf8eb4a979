"""Children forked from a process that has torch imported and no threads, so that a child costs tens
of milliseconds instead of an import of torch.

1. A :class:`Server` is such a process. For each child it gets two descriptors: an end of a
   connection, and a pipe for the exit code.
2. It forks. The child reads from the connection what to do, so the server imports nothing by it.
3. The child does its work as a program of its own: in a process group of its own, with its own
   output and environment, up to the interpreter's own end.
4. When the tests end, the server's children are killed and it ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]

#: Of all children. Tests have more ranks than a machine may have GPUs. The compiler would start a
#: process that imports torch for each.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}

#: What nearly all children need. Optimizers import the compiler.
MODULES = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch_ckpt.api", "torch_ckpt.manager.async_checkpoint", "torch_ckpt.manager.manager"),
    *("torch_ckpt.conversion.convert", "torch_ckpt.inspection.diff", "torch_ckpt.inspection.show"),
    *("torch_ckpt.megatron", "pytest", "tests.support", "tests.distributed.launcher"),
)

#: Nothing here takes long. What takes longer hangs.
PATIENCE_SECONDS = 60.0


class Child:
    """A child of a server. One thread uses it.

    Attributes:
        pid: also the number of its process group.
        connection: to its work.
        output: the file with what it has written to its standard output and error, if any.
    """

    def __init__(self, connection: Connection, status: int, output: Path | None) -> None:
        self.connection = connection
        self.output = output
        self._status = os.fdopen(status, "rb", buffering=0)
        self._code: int | None = None
        self.pid: int = self.receive()

    def receive(self, timeout: float = PATIENCE_SECONDS) -> Any:
        """The next thing that it sends.

        Raises:
            TimeoutError: nothing came in so many seconds.
            EOFError: it has ended.
        """
        if not self.connection.poll(timeout):
            raise TimeoutError(f"the child hangs: nothing came for {timeout:g} s")
        try:
            return self.connection.recv()
        except ConnectionResetError:
            raise EOFError from None

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Its exit code, or the negative number of the signal that ended it.

        Raises:
            TimeoutError: it has not ended in so many seconds.
        """
        if self._code is None:
            if not wait([self], timeout):
                raise TimeoutError(f"the child has not ended for {timeout:g} s")
            code = self._status.read()
            assert code, "the server of forked children died"
            self._code = int(code)
        return self._code

    def fileno(self) -> int:
        """A descriptor that can be read when it has ended."""
        return self._status.fileno()

    @property
    def alive(self) -> bool:
        return self._code is None and not wait([self], 0)

    def signal(self, number: int) -> None:
        """Sends a signal to it alone, if it lives."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it and the processes that it has started, and forgets it. Again it does nothing."""
        if self._status.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self.connection.close()
        self._status.close()

    def said(self) -> str:
        """Its output up to now."""
        return self.output.read_text(errors="replace") if self.output is not None else ""


class Server:
    """Forks children. Threads may share it.

    Args:
        modules: that it imports before it forks.
        environment: of the server alone.
    """

    def __init__(
        self, modules: Sequence[str] = MODULES, environment: Mapping[str, str] | None = None
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.imports(modules)

    def start(
        self,
        work: Callable[..., object],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> Child:
        """Forks a child that does ``work(connection, *arguments)``, and ends as a program does.

        Args:
            work: a function that a fresh process can import.
            arguments: that can be pickled.
            environment: beside that of this process.
            output: a file for what it writes to its standard output and error, which are the
                tests' where it is None.
        """
        if output is not None:
            output.touch()
        ours, theirs = Pipe()
        reading, writing = os.pipe()
        socket.send_fds(self._socket, [b"fork"], [theirs.fileno(), writing])
        theirs.close()
        os.close(writing)
        ours.send(({**os.environ, **ENVIRONMENT, **(environment or {})}, sys.path, output))
        ours.send((work, arguments))
        return Child(ours, reading, output)

    def imports(self, modules: Sequence[str]) -> None:
        """Lets the server import modules; those that cannot be imported by their names are passed
        over."""
        ours, theirs = Pipe()
        socket.send_fds(self._socket, [b"import"], [theirs.fileno()])
        theirs.close()
        ours.send(list(modules))
        with ours:
            assert ours.poll(PATIENCE_SECONDS), "the server of forked children hangs"
            threads = ours.recv()
        assert threads == 1, "children forked from several threads may hang"

    def imports_as(self, work: Callable[..., object], *arguments: Any) -> None:
        """Lets the server import what a child has imported after it has done the work once, in a
        directory that is gone afterwards, its first argument."""
        with tempfile.TemporaryDirectory() as elsewhere:
            child = self.start(_modules_after, work, elsewhere, *arguments)
            try:
                modules = child.receive()
            finally:
                child.kill()
        self.imports(modules)

    def close(self) -> None:
        """Ends it and what is left of its children."""
        self._socket.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()


_servers: dict[tuple[str, ...], Server] = {}
_starting = threading.Lock()


def server(*modules: str) -> Server:
    """The one of this process, which all tests share.

    Args:
        modules: where children need more than the usual: a server that has imported them, too.
    """
    with _starting:
        if modules not in _servers:
            _servers[modules] = Server([*MODULES, *modules])
            atexit.register(_servers[modules].close)
        return _servers[modules]


# --- the server's side ---------------------------------------------------------------------------


def _modules_after(connection: Connection, work: Callable[..., object], *arguments: Any) -> None:
    work(*arguments)
    connection.send(sorted(sys.modules))
    connection.recv()


def _serve(requests: socket.socket) -> Connection | None:
    """Forks until the tests end; None then, and in each child its connection."""
    # By the descriptor that tells the end of a child.
    children: dict[int, tuple[int, int]] = {}
    while True:
        for ready in wait([requests, *children]):
            if ready is not requests:
                assert isinstance(ready, int)
                pid, status = children.pop(ready)
                os.close(ready)
                _, code = os.waitpid(pid, 0)
                # Of a child that was forgotten nobody wants to know.
                with suppress(OSError), open(status, "wb", buffering=0) as stream:
                    stream.write(str(os.waitstatus_to_exitcode(code)).encode())
                continue
            what, descriptors, *_ = socket.recv_fds(requests, 16, 2)
            if what == b"import":
                with Connection(descriptors[0]) as connection:
                    _import(connection.recv())
                    connection.send(len(os.listdir("/proc/self/task")))
                continue
            if what == b"fork":
                connection = Connection(descriptors[0])
                pid = os.fork()
                if pid != 0:
                    connection.close()
                    children[os.pidfd_open(pid)] = (pid, descriptors[1])
                    continue
                os.close(descriptors[1])
            else:
                connection = None
                for pid, _ in children.values():
                    os.killpg(pid, signal.SIGKILL)
            for ends in children:
                os.close(ends)
                os.close(children[ends][1])
            return connection


def _import(modules: Sequence[str]) -> None:
    for name in modules:
        # Some names in sys.modules are no modules that can be imported by it.
        with suppress(ImportError):
            importlib.import_module(name)
    # What is there stays, and collections in children need not copy it.
    gc.freeze()


def _work(connection: Connection) -> None:
    """The child's."""
    os.setpgid(0, 0)
    connection.send(os.getpid())
    environment, sys.path, output = connection.recv()
    os.environ.clear()
    os.environ.update(environment)
    if output is not None:
        with open(output, "ab") as stream:
            sys.stdout.flush()
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    work, arguments = connection.recv()
    work(connection, *arguments)


def _main(descriptor: int) -> None:
    warnings.simplefilter("ignore")
    with socket.socket(fileno=descriptor) as requests:
        connection = _serve(requests)
    if connection is None:
        # Taking torch apart takes a second.
        os._exit(0)
    _work(connection)


if __name__ == "__main__":
    # By its name and not as __main__, so that pickles of both sides mean the same functions.
    importlib.import_module("tests.forked")._main(int(sys.argv[1]))
