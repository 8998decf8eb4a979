"""Ranks: forked processes with torchrun's environment, which tests may kill; and programs run by
forked ranks or by torchrun itself."""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

from tests.forked import ENVIRONMENT, PATIENCE_SECONDS, REPOSITORY, Answering, Child, end_of, server

ADDRESS = "127.0.0.1"

#: Makes a rank print the stacks of its threads, before it is killed.
WHERE_SIGNAL = signal.SIGQUIT

_LOG_CHARACTERS = 3000

#: Seconds for the other ranks, once a rank has failed.
GRACE_SECONDS = 10.0

#: Seconds for one run of torchrun or a script.
TIMEOUT_SECONDS = 240

# torchrun sends its ranks SIGTERM, and kills them after 30 seconds.
ENDING_SECONDS = 60


def free_port() -> int:
    with socket.create_server((ADDRESS, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


class Ranks:
    """Processes that each run ``work(connection, *arguments)`` with the environment of a rank. This
    process hosts their store, as torchrun's agent does. Not thread-safe.

    Args:
        size: number of ranks.
        work: a function that a fresh process can import.
        rank_0_hosts_store: rank 0 hosts the store, as if the ranks were started by hand.
        modules: additional modules that the forking server has imported.

    Attributes:
        children: by rank.
    """

    def __init__(
        self,
        size: int,
        work: Callable[..., object],
        *arguments: Any,
        rank_0_hosts_store: bool = False,
        modules: Sequence[str] = (),
    ) -> None:
        self.size = size
        self.children: list[Child] = []
        self._logs = tempfile.TemporaryDirectory(prefix="ranks-")
        self._store: dist.TCPStore | None = None
        if rank_0_hosts_store:
            port = free_port()
        else:
            self._store = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        for rank in range(size):
            environment = environment_of(rank, size, port)
            if rank_0_hosts_store:
                del environment["TORCHELASTIC_USE_AGENT_STORE"]
            log = Path(self._logs.name, f"{rank}.log")
            child = server(*modules).start(
                _work, work, arguments, environment=environment, output=log
            )
            self.children.append(child)

    def answer(self, rank: int, timeout: float = PATIENCE_SECONDS) -> Any:
        """Waits for the next value that a rank sends. Fails after ``timeout`` seconds."""
        try:
            return self.children[rank].receive(timeout)
        except (TimeoutError, EOFError) as error:
            if isinstance(error, TimeoutError):
                self.where([rank])
            raise AssertionError(f"rank {rank}: {error}\n{self.said()}") from None

    def codes(self, timeout: float = PATIENCE_SECONDS) -> list[int]:
        """Waits for all ranks and returns their exit codes. Fails after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        try:
            return [child.wait(max(0.0, deadline - time.monotonic())) for child in self.children]
        except TimeoutError:
            self.where([rank for rank, child in enumerate(self.children) if child.alive])
            raise AssertionError(f"a rank does not end\n{self.said()}") from None

    def said(self, since: list[int] | None = None) -> str:
        """Returns the standard output and error of all ranks, without so many characters at the
        begin of each."""
        texts = [child.said() for child in self.children]
        return "\n".join(
            f"--- output of rank {rank} ---\n{text[skipped:][-_LOG_CHARACTERS:]}"
            for rank, (text, skipped) in enumerate(
                zip(texts, since or [0] * self.size, strict=True)
            )
        )

    def where(self, ranks: list[int]) -> None:
        """Makes ranks print the stacks of their threads, if they still can."""
        for rank in ranks:
            child = self.children[rank]
            before = len(child.said())
            child.signal(WHERE_SIGNAL)
            deadline = time.monotonic() + 5
            while len(child.said()) == before and time.monotonic() < deadline:
                time.sleep(0.1)

    def kill(self) -> None:
        """Kills the remaining ranks and the processes that they have started."""
        for child in self.children:
            child.kill()
        self._store = None
        self._logs.cleanup()


@contextmanager
def ranks(
    size: int, work: Callable[..., object], *arguments: Any, **options: Any
) -> Iterator[Ranks]:
    """Starts :class:`Ranks` for the duration of a block."""
    started = Ranks(size, work, *arguments, **options)
    try:
        yield started
    finally:
        started.kill()


def by_fork(
    size: int, *arguments: str | Path, modules: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Does the same as :func:`torchrun` with forked ranks. If one fails, the others are ended."""
    words = [*map(str, arguments)]
    with ranks(size, run_program, words, modules=modules) as group:
        until = time.monotonic() + TIMEOUT_SECONDS
        running = list(group.children)
        code = 0
        while running and (ended := wait(running, max(0.0, until - time.monotonic()))):
            for child in ended:
                running.remove(child)
                code = code or child.wait()
            if code != 0:
                until = min(until, time.monotonic() + GRACE_SECONDS)
                for child in running:
                    child.signal(signal.SIGTERM)
        if running and code == 0:
            group.where([group.children.index(child) for child in running])
            raise TimeoutError(f"{group.said()}\nkilled after {TIMEOUT_SECONDS} s")
        output = "".join(child.said() for child in group.children)
        return subprocess.CompletedProcess(words, code, output)


def run_program(_: Connection, words: list[str]) -> None:
    """Runs a script, or "-m" and a module, with its arguments on a rank, as Python does."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


def torchrun(ranks: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script, or "-m" and a module, with its arguments. Standard output is captured.

    Raises:
        TimeoutError: the run hung, and all its ranks have been ended. The error has the output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{_ended(process)}\nkilled after {TIMEOUT_SECONDS} s") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def _ended(agent: subprocess.Popen[str]) -> str:
    """Ends torchrun and returns its output. Ranks are in sessions of their own, so only torchrun
    can end them."""
    agent.terminate()
    try:
        return agent.communicate(timeout=ENDING_SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(agent.pid, signal.SIGKILL)
        return agent.communicate()[0]


def on_forked_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs ``work(rank)`` in a forked child for each rank. Returns by rank its result, or the
    CheckpointException that it raised.

    The process group of the ranks has a store and no collectives.
    """
    with tempfile.TemporaryDirectory() as directory:

        def of_rank(rank: int, _send: object) -> Any:
            # Clients of a TCPStore, and gloo, need seconds to connect if host names do not resolve.
            store = dist.FileStore(os.path.join(directory, "store"), size)
            dist.init_process_group("fake", store=store, rank=rank, world_size=size)
            try:
                return work(rank)
            except CheckpointException as error:
                return error

        children = [Answering(partial(of_rank, rank)) for rank in range(size)]
        answers = [child.answer() for child in children]
        assert [end_of(child.pid) for child in children] == [0] * size
    return answers


@pytest.fixture
def default_group() -> Iterator[None]:
    """Makes a process group with one rank, which hosts its store."""
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Returns torchrun's environment for a rank on a single machine, as far as torch and programs
    use it."""
    return {
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        # Rank 0 must not make the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _work(connection: Any, work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    faulthandler.enable()
    faulthandler.register(WHERE_SIGNAL)
    work(connection, *arguments)


@pytest.fixture
def one_rank_mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """The mesh of a process group of one rank."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield DeviceMesh("cpu", [0])
    dist.destroy_process_group()
