"""Hosts on this machine that share a file system through a client each.

A host is a set of processes in namespaces of its own: mounts, host name, processes and /dev/shm. It
has a boot id of its own, so that no code can take two hosts for one. Each host has its own client
of the file system, mounted at the same path. The hosts share the network of this machine.

These need root and /dev/fuse.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scripts.object_servers import program
from tests.forked import ENVIRONMENT, REPOSITORY
from tests.ranks import ADDRESS, environment_of

#: Seconds in which a client must mount, and a process must end.
_MOUNT_SECONDS, _END_SECONDS = 60.0, 10.0

#: Seconds for the work of all ranks.
PATIENCE_SECONDS = 180.0

_SFTP_SERVER = "/usr/lib/openssh/sftp-server"

# Arguments: path of the client's mount, path at which the host sees it, file with the boot id, name
# of the host, and the command.
_ENTER = """
set -e
mount --make-rprivate /
mount --bind "$1" "$2"
# Otherwise the host would keep file systems that other tests have mounted there.
umount --recursive --lazy /dev/shm || true
mount -t tmpfs -o size=1G tmpfs /dev/shm
mount -t proc proc /proc
mount --bind "$3" /proc/sys/kernel/random/boot_id
hostname "$4"
shift 4
exec "$@"
"""


class Host:
    """A host that sees a file system at ``path``.

    Args:
        name: the host name.
        directory: for files of this host, which is empty.
        mount: the mount of this host's client.
        path: the path of the file system on all hosts.
    """

    def __init__(self, name: str, directory: Path, mount: Path, path: Path) -> None:
        self.name = name
        self.path = path
        self._mount = mount
        self._boot_id = directory / "boot_id"
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Starts a process on this host. Its standard input and output are pipes."""
        arguments = [str(self._mount), str(self.path), str(self._boot_id), self.name]
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        process = subprocess.Popen(
            [*unshare, "bash", "-c", _ENTER, "host", *arguments, *command],
            env=os.environ | ENVIRONMENT | environment,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        return process

    def kill(self) -> None:
        """Kills all processes of this host."""
        for process in self._processes:
            # Its child is the first process of the namespace, so all others die, too.
            process.kill()
            process.wait()


class Cluster:
    """Hosts with one shared file system, and the store of their ranks.

    Attributes:
        path: of the shared file system, on all hosts.
    """

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = hosts
        self.path = hosts[0].path
        self._store: dist.TCPStore | None = None

    def start(
        self, work: Callable[..., object], *arguments: Any, ranks_per_host: int = 1
    ) -> list[subprocess.Popen[str]]:
        """Starts ``work(*arguments)`` on ranks of all hosts. Arguments and results are JSON.

        Args:
            work: a function of a module that a fresh process can import.
        """
        self._store = dist.TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
        size = len(self.hosts) * ranks_per_host
        call = [work.__module__, work.__name__, json.dumps(arguments)]
        command = [sys.executable, "-m", "tests.cluster.rank", *call]
        return [
            self.hosts[rank // ranks_per_host].start(
                command,
                environment_of(rank, size, self._store.port)
                | {
                    "LOCAL_RANK": str(rank % ranks_per_host),
                    "LOCAL_WORLD_SIZE": str(ranks_per_host),
                    "GROUP_RANK": str(rank // ranks_per_host),
                    "GROUP_WORLD_SIZE": str(len(self.hosts)),
                },
            )
            for rank in range(size)
        ]

    def run(
        self,
        work: Callable[..., object],
        *arguments: Any,
        ranks_per_host: int = 1,
        patience: float = PATIENCE_SECONDS,
    ) -> Any:
        """Runs ``work`` as :meth:`start` does. Returns the result of each rank.

        Raises:
            AssertionError: a rank has failed or does not end.
        """
        started = self.start(work, *arguments, ranks_per_host=ranks_per_host)
        return results_of(started, patience)

    def wait_for(self, name: str) -> None:
        """Waits until ranks have set a key; see :func:`tests.cluster.work.store_of_test`."""
        assert self._store is not None
        self._store.wait([name])

    def signal(self, name: str) -> None:
        """Sets a key for which ranks wait."""
        assert self._store is not None
        self._store.set(name, "")

    def kill(self) -> None:
        """Kills the processes of all hosts."""
        for host in self.hosts:
            host.kill()
        self._store = None


def results_of(
    processes: Sequence[subprocess.Popen[str]], patience: float = PATIENCE_SECONDS
) -> list[Any]:
    """Waits for ranks, for at most ``patience`` seconds, and returns their results."""
    deadline = time.monotonic() + patience
    results = []
    for rank, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} does not end") from None
        assert process.returncode == 0, f"rank {rank} has exited with {process.returncode}"
        results.append(json.loads(output.splitlines()[-1]))
    return results


# --- file systems --------------------------------------------------------------------------------


@contextmanager
def _juicefs(directory: Path, mounts: Sequence[Path]) -> Iterator[None]:
    """Mounts one JuiceFS, whose metadata is in a database and whose data is in files."""
    command = program("juicefs")
    assert command is not None
    metadata = f"sqlite3://{directory / 'metadata.db'}"
    store = ["--storage", "file", "--bucket", f"{directory / 'store'}/", "--trash-days", "0"]
    with (directory / "log").open("wb") as log, ExitStack() as stack:
        subprocess.run(
            [command, "format", *store, metadata, "tests"], check=True, stdout=log, stderr=log
        )
        for number, mount in enumerate(mounts):
            cache = ["--cache-dir", str(directory / f"cache{number}"), "--cache-size", "256M"]
            quiet = ["--no-usage-report", "--no-syslog", "--metrics", f"{ADDRESS}:0"]
            words = [command, "mount", *quiet, *cache, metadata, str(mount)]
            stack.enter_context(_mounted(words, mount, log.fileno(), directory / "log"))
        yield


@contextmanager
def _sshfs(directory: Path, mounts: Sequence[Path]) -> Iterator[None]:
    """Mounts one directory by sshfs, which connects to sftp servers without ssh."""
    exported = directory / "exported"
    exported.mkdir()
    with (
        (directory / "log").open("wb") as log,
        socket.create_server((ADDRESS, 0)) as server,
        ExitStack() as stack,
    ):

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        subprocess.Popen([_SFTP_SERVER], stdin=connection, stdout=connection)

        threading.Thread(target=serve, daemon=True).start()
        for mount in mounts:
            options = f"directport={server.getsockname()[1]}"
            words = ["sshfs", "-f", "-o", options, f"{ADDRESS}:{exported}", str(mount)]
            stack.enter_context(_mounted(words, mount, log.fileno(), directory / "log"))
        yield
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def _one_disk(directory: Path, mounts: Sequence[Path]) -> Iterator[None]:
    """Gives all hosts the same directory of this machine, whose locks all of them see."""
    exported = directory / "exported"
    exported.mkdir()
    with ExitStack() as stack:
        for mount in mounts:
            subprocess.run(["mount", "--bind", str(exported), str(mount)], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", str(mount)], check=False)
        yield


@contextmanager
def _local(_directory: Path, _mounts: Sequence[Path]) -> Iterator[None]:
    """Gives each host a directory of its own."""
    yield


@contextmanager
def _mounted(command: list[str], mount: Path, output: int, log: Path) -> Iterator[None]:
    """Runs a FUSE client during a block."""
    process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + _MOUNT_SECONDS
        while not os.path.ismount(mount):
            if process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{shlex.join(command)} has not mounted:\n{text}")
            time.sleep(0.05)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(mount)], check=False, stderr=subprocess.DEVNULL)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


_KINDS = {"juicefs": _juicefs, "sshfs": _sshfs, "one disk": _one_disk, "local": _local}


def lacking(kind: str) -> str:
    """Returns what this machine lacks for hosts with a kind of file system; "" if nothing."""
    if os.geteuid() != 0:
        return "root"
    if kind in ("juicefs", "sshfs") and not os.path.exists("/dev/fuse"):
        return "/dev/fuse"
    if kind == "juicefs" and program("juicefs") is None:
        return "juicefs"
    if kind == "sshfs" and not (shutil.which("sshfs") and os.path.exists(_SFTP_SERVER)):
        return "sshfs and openssh-sftp-server"
    return ""


@contextmanager
def cluster(kind: str, directory: Path, hosts: int = 2) -> Iterator[Cluster]:
    """Starts hosts that share a file system, or have local ones, during a block.

    Args:
        kind: "juicefs", "sshfs", "one disk" or "local".
        directory: an empty directory.
    """
    path = directory / "shared"
    path.mkdir()
    found = []
    for number in range(hosts):
        name = f"host{number}"
        own = directory / name
        (own / "mount").mkdir(parents=True)
        found.append(Host(name, own, own / "mount", path))
    with _KINDS[kind](directory, [host._mount for host in found]):
        made = Cluster(found)
        try:
            yield made
        finally:
            made.kill()
