"""Ranks: forked processes with torchrun's environment, which tests may kill."""

from __future__ import annotations

import faulthandler
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.forked import PATIENCE_SECONDS, Child, server

ADDRESS = "127.0.0.1"

#: Makes a rank print the stacks of its threads, before it is killed.
WHERE_SIGNAL = signal.SIGQUIT

_LOG_CHARACTERS = 3000


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
        except TimeoutError:
            self.where([rank])
            raise AssertionError(f"rank {rank} hangs\n{self.said()}") from None
        except EOFError:
            raise AssertionError(f"rank {rank} {self.end_of(rank)}\n{self.said()}") from None

    def codes(self, timeout: float = PATIENCE_SECONDS) -> list[int]:
        """Waits for all ranks and returns their exit codes. Fails after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        try:
            return [child.wait(max(0.0, deadline - time.monotonic())) for child in self.children]
        except TimeoutError:
            self.where([rank for rank, child in enumerate(self.children) if child.alive])
            raise AssertionError(f"a rank does not end\n{self.said()}") from None

    def end_of(self, rank: int) -> str:
        """Describes the end of a rank whose connection has ended."""
        return f"ended with code {self.children[rank].wait()}"

    def said(self, since: list[int] | None = None) -> str:
        """Returns the standard output and error of all ranks.

        Args:
            since: by rank, the number of characters to skip.
        """
        parts = []
        for rank, child in enumerate(self.children):
            text = child.said()[since[rank] if since is not None else 0 :]
            parts.append(f"--- output of rank {rank} ---\n{text[-_LOG_CHARACTERS:]}")
        return "\n".join(parts)

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
