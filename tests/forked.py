"""Children forked from processes that have imported torch, in tens of milliseconds.

A :class:`Server` has no threads. For each child, it gets one end of a connection, from which the
child reads its work, and a pipe for the exit code. The work imports nothing in the server. The
child runs as a program: in its own process group, with its own output and environment, until the
interpreter ends. When the tests end, the server kills its children.

:func:`fork` and its callers fork the test process instead, for children that inspect the state of
the test process or need the test's objects.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

REPOSITORY = Path(__file__).parents[1]

#: Environment of all children. Tests have more ranks than a machine may have GPUs. torch's compiler
#: would start a process that imports torch for each child.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONPATH": str(REPOSITORY),
}

#: Modules that nearly all children need. Optimizers import the compiler.
MODULES = (
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch_ckpt.api", "torch_ckpt.training.async_checkpoint", "torch_ckpt.manager.manager"),
    *("torch_ckpt.conversion.convert", "torch_ckpt.inspection.diff", "torch_ckpt.inspection.show"),
    *("torch_ckpt.megatron", "pytest", "tests.support", "tests.distributed.launcher"),
)

#: A child that is slower than this hangs.
PATIENCE_SECONDS = 60.0


class Child:
    """Child of a server. Not thread-safe.

    Attributes:
        pid: process id, and process group id.
        connection: connection to its work.
        output: file with its standard output and error, or None.
    """

    def __init__(self, connection: Connection, status: int, output: Path | None) -> None:
        self.connection = connection
        self.output = output
        self._status = os.fdopen(status, "rb", buffering=0)
        self._code: int | None = None
        self.pid: int = self.receive()

    def receive(self, timeout: float = PATIENCE_SECONDS) -> Any:
        """Waits for the next value that the child sends.

        Raises:
            TimeoutError: nothing arrived within ``timeout`` seconds.
            EOFError: the child has ended.
        """
        if not self.connection.poll(timeout):
            raise TimeoutError(f"the child hangs: nothing came for {timeout:g} s")
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise EOFError(f"ended with code {self.wait()}") from None

    def wait(self, timeout: float = PATIENCE_SECONDS) -> int:
        """Returns the exit code, or the negative number of the signal that ended the child.

        Raises:
            TimeoutError: the child has not ended within ``timeout`` seconds.
        """
        if self._code is None:
            if not wait([self], timeout):
                raise TimeoutError(f"the child has not ended for {timeout:g} s")
            code = self._status.read()
            assert code, "the server of forked children died"
            self._code = int(code)
        return self._code

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when the child has ended."""
        return self._status.fileno()

    @property
    def alive(self) -> bool:
        return self._code is None and not wait([self], 0)

    def signal(self, number: int) -> None:
        """Sends a signal to the child, and not to its process group, if the child lives."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the child and the processes that it has started, and closes the connection.
        Idempotent."""
        if self._status.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        self.connection.close()
        self._status.close()

    def said(self) -> str:
        """Returns the output up to now."""
        return self.output.read_text(errors="replace") if self.output is not None else ""


class Server:
    """Forks children. Thread-safe.

    Args:
        modules: modules to import before forking.
        environment: additional variables for the server.
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
        """Forks a child that runs ``work(connection, *arguments)`` and ends as a program does.

        Args:
            work: a function that a fresh process can import.
            arguments: values that can be pickled.
            environment: variables in addition to those of this process.
            output: file for standard output and error; None: those of the tests.
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
        """Imports modules in the server. Names that cannot be imported are skipped."""
        ours, theirs = Pipe()
        socket.send_fds(self._socket, [b"import"], [theirs.fileno()])
        theirs.close()
        ours.send(list(modules))
        with ours:
            # The first import of torch on a busy machine takes a minute.
            assert ours.poll(4 * PATIENCE_SECONDS), "the server of forked children hangs"
            threads = ours.recv()
        assert threads == 1, "children forked from several threads may hang"

    def import_like(self, work: Callable[..., object], *arguments: Any) -> None:
        """Imports in the server all modules that a child has imported after running the work once.

        The first argument of the work is a temporary directory.
        """
        with tempfile.TemporaryDirectory() as elsewhere:
            child = self.start(_modules_after, work, elsewhere, *arguments)
            try:
                modules = child.receive()
            finally:
                child.kill()
        self.imports(modules)

    def close(self) -> None:
        """Ends the server and its remaining children."""
        self._socket.close()
        try:
            self._process.wait(PATIENCE_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()


_servers: dict[tuple[str, ...], Server] = {}
_starting = threading.Lock()


def server(*modules: str) -> Server:
    """Returns the server that all tests of this process share.

    Args:
        modules: modules that the children need in addition; a separate server imports them.
    """
    with _starting:
        if modules not in _servers:
            _servers[modules] = Server([*MODULES, *modules])
            atexit.register(_servers[modules].close)
        return _servers[modules]


# --- fresh processes and scripts ----------------------------------------------------------------


def in_fresh_process(work: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Runs a function of a module in a fresh process. Returns its result or raises its
    exception."""
    child = server().start(_answer, work, arguments, options)
    try:
        result, error = child.receive(2 * PATIENCE_SECONDS)
        assert error is not None or child.wait() == 0
    finally:
        child.kill()
    if error is not None:
        raise error
    return result


def _answer(
    connection: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    try:
        connection.send((work(*arguments, **options), None))
    except Exception as error:
        connection.send((None, error))


def run_script(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script with arguments and without warnings. Fails after a minute."""
    with tempfile.TemporaryDirectory() as directory:
        child = server().start(_run_script, script, list(map(os.fspath, arguments)), directory)
        try:
            code = child.wait()
        finally:
            child.kill()
        stdout, stderr = (Path(directory, name).read_text() for name in ("stdout", "stderr"))
    # Last output of triton's bindings if torch's compiler has imported them.
    stderr = stderr.partition("nanobind: leaked")[0]
    return subprocess.CompletedProcess(script, code, stdout, stderr)


def _run_script(_connection: Connection, script: str, arguments: list[str], directory: str) -> None:
    sys.argv[1:] = arguments
    for number, name in enumerate(("stdout", "stderr"), start=1):
        file = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    # The script's objects live until the interpreter ends.
    exec(script, vars(sys.modules["__main__"]))


# --- forks of the test process -------------------------------------------------------------------

#: Time limit of a child of :func:`fork`, in seconds. A slower child is killed.
FORK_SECONDS = 120

#: Factory of what ranks share: events, barriers, counters.
context = multiprocessing.get_context("fork")


def fork(work: Callable[[], object]) -> int:
    """Forks a child that runs ``work``. Returns its pid; the child exits with 0 unless ``work``
    raises."""
    sys.stderr.flush()
    # The parent's garbage may own threads, which the child does not have. A collection in the
    # child, even in a fork hook, must not destroy this garbage: the destructor of a gloo group,
    # for example, would wait forever for its thread to leave a condition variable. A child keeps
    # its garbage frozen when it forks, too.
    is_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    child = -1
    try:
        with warnings.catch_warnings():
            # Python 3.12 and newer warn if the process has threads. Some tests are about threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
    finally:
        if child != 0 and not is_frozen:
            gc.unfreeze()
    if child == 0:
        code = 1
        try:
            # Other threads may have made garbage until the fork.
            gc.freeze()
            # Prints the stacks and ends the child, even if it hangs in C++: a handler of Python
            # would not run then. faulthandler takes a signal that the parent has registered for
            # registered in the child, too.
            faulthandler.unregister(signal.SIGALRM)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, file=2, chain=True)
            signal.alarm(FORK_SECONDS)
            work()
            code = 0
        except BaseException:
            # Bypasses pytest's capture, which would never show it.
            os.write(2, f"in the child: {traceback.format_exc()}".encode())
        finally:
            os._exit(code)
    return child


def end_of(child: int) -> int:
    """Waits for a child. Returns its exit code, or the negative number of the signal that ended
    it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_fork(work: Callable[[], object]) -> None:
    """Runs ``work`` in a forked child, and fails if ``work`` raises."""
    assert end_of(fork(work)) == 0


def forked(test: Callable[P, None]) -> Callable[P, None]:
    """Decorates a test that needs a fresh process, or changes state of the process."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_fork(lambda: test(*args, **kwargs))

    return run


class Answering:
    """Forked child that sends what ``work`` returns.

    Args:
        work: function of the child; its argument is a function that sends a value before the end.
    """

    def __init__(self, work: Callable[[Callable[[Any], None]], Any]) -> None:
        reading, writing = os.pipe()

        def send(answer: Any) -> None:
            with os.fdopen(writing, "wb") as stream:
                pickle.dump(answer, stream)

        def run() -> None:
            os.close(reading)
            send(work(send))

        self.pid = fork(run)
        os.close(writing)
        self._reading = reading

    def answer(self, seconds: float | None = None) -> Any:
        """Waits for the value of the child; None if the child died.

        Raises:
            TimeoutError: no value arrived within ``seconds``.
        """
        with os.fdopen(self._reading, "rb") as stream:
            if not wait([stream], seconds):
                raise TimeoutError(f"the child hangs: nothing came for {seconds:g} s")
            answer = stream.read()
        return pickle.loads(answer) if answer else None

    def kill(self) -> None:
        """Kills the child and waits for its end. Idempotent."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def answer_of(work: Callable[[], Any]) -> Any:
    """Runs ``work`` in a forked child, and returns its result."""
    child = Answering(lambda _send: work())
    answer = child.answer()
    assert end_of(child.pid) == 0
    return answer


# --- the server's side ---------------------------------------------------------------------------


def _modules_after(connection: Connection, work: Callable[..., object], *arguments: Any) -> None:
    work(*arguments)
    connection.send(sorted(sys.modules))
    connection.recv()


def _serve(requests: socket.socket) -> Connection | None:
    """Forks until the tests end, then returns None. In each child, returns its connection."""
    # Keyed by the pidfd, which becomes readable when the child ends.
    children: dict[int, tuple[int, int]] = {}
    while True:
        for ready in wait([requests, *children]):
            if ready is not requests:
                assert isinstance(ready, int)
                pid, status = children.pop(ready)
                os.close(ready)
                _, code = os.waitpid(pid, 0)
                # Nothing reads the pipe of a child that was forgotten.
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
        # Some keys of sys.modules cannot be imported by their names.
        with suppress(ImportError):
            importlib.import_module(name)
    # Frozen objects are not traversed by collections in children, which would copy their pages.
    gc.freeze()


def _work(connection: Connection) -> None:
    """Runs the work of the child."""
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
        # Finalizing torch takes a second.
        os._exit(0)
    _work(connection)


if __name__ == "__main__":
    # Imports by name instead of using __main__, so that both sides pickle the same functions.
    importlib.import_module("tests.forked")._main(int(sys.argv[1]))
