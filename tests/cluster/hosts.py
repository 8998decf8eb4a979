"""Hosts on this machine that share a file system through a client each.

A host is a set of processes in namespaces of its own: mounts, host name, processes, network and
/dev/shm. It has a boot id of its own, so that no code can take two hosts for one. Each host has its
own client of the file system, mounted at the same path. The hosts are connected by a bridge, on
which this process has the store of the ranks.

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
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch.distributed as dist

from scripts.object_servers import end, program
from tests.forked import ENVIRONMENT, REPOSITORY
from tests.ranks import ADDRESS, environment_of, free_port

#: Seconds in which a client must mount, and a process must end.
_MOUNT_SECONDS, _END_SECONDS = 60.0, 10.0

#: Seconds for the work of all ranks.
PATIENCE_SECONDS = 180.0

# Name of the interface in each host.
_INTERFACE = "eth0"

_MOOSEFS_MASTER = "/usr/sbin/mfsmaster"
_SFTP_SERVER = "/usr/lib/openssh/sftp-server"

# Creates the namespaces of a host, and keeps them. Arguments: path of the client's mount, path at
# which the host sees it, files with the boot id and with the names of all hosts, and the host name.
_BOOT = """
set -e
mount --make-rprivate /
mount --bind "$1" "$2"
# Otherwise the host would keep file systems that other tests have mounted there.
umount --recursive --lazy /dev/shm || true
mount -t tmpfs -o size=1G tmpfs /dev/shm
mount -t proc proc /proc
mount --bind "$3" /proc/sys/kernel/random/boot_id
mount --bind "$4" /etc/hosts
hostname "$5"
echo booted
exec sleep infinity
"""


class Host:
    """A host that sees a file system at ``path``.

    Args:
        name: the host name.
        directory: for files of this host, which is empty.
        mount: the mount of this host's client.
        path: the path of the file system on all hosts.
        network: the network namespace.
        address: the address of the host.
        client: the client of the file system; None if the file system needs none.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        mount: Path,
        path: Path,
        network: str,
        address: str,
        client: Client | None,
    ) -> None:
        self.name = name
        self.address = address
        self.path = path
        self.client = client
        self._network = network
        self._mount = mount
        self._boot_id = directory / "boot_id"
        # The process that keeps the namespaces, and the number of its child on this machine.
        self._init: subprocess.Popen[str] | None = None
        self._init_pid = ""
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Starts a process on this host. Its standard input and output are pipes."""
        if self._init is None:
            self._boot()
        enter = ["nsenter", "--target", self._init_pid, "--mount", "--uts", "--pid", "--net"]
        # Else the process would outlive nsenter.
        die = ["setpriv", "--pdeathsig", "KILL"]
        process = subprocess.Popen(
            [*enter, f"--wdns={REPOSITORY}", *die, *command],
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
        if self._init is None:
            return
        if self.client is not None:
            # A process that waits for a frozen client cannot be killed.
            self.client.signal(signal.SIGCONT)
        # Its child is the first process of the namespace, so all others die, too.
        self._init.kill()
        for process in [self._init, *self._processes]:
            process.wait()
        self._init, self._processes = None, []

    def restart(self) -> None:
        """Kills all processes of this host and its client, and starts another client."""
        self.kill()
        if self.client is not None:
            self.client.kill()
            self.client.start()

    def _boot(self) -> None:
        """Creates the namespaces."""
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        files = [self._boot_id, self.path.parent / "hosts"]
        arguments = [*map(str, [self._mount, self.path, *files]), self.name]
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        enter = ["nsenter", f"--net=/run/netns/{self._network}", *unshare]
        self._init = subprocess.Popen(
            [*enter, "bash", "-c", _BOOT, "host", *arguments], stdout=subprocess.PIPE, text=True
        )
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == "booted\n"
        # unshare has one child.
        pid = self._init.pid
        self._init_pid = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


class Client:
    """A FUSE client of one host.

    Args:
        command: the command, which stays in the foreground.
        mount: the directory to mount on.
        log: file for its output.
    """

    def __init__(self, command: list[str], mount: Path, log: Path) -> None:
        self._command = command
        self.mount = mount
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the client, and waits until it has mounted."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _MOUNT_SECONDS
        while not os.path.ismount(self.mount):
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{shlex.join(self._command)} has not mounted:\n{text}")
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the client."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kills the client. What it has not yet sent is lost."""
        self.signal(signal.SIGKILL)
        self._end()

    def stop(self) -> None:
        """Ends the client."""
        subprocess.run(
            ["umount", "--lazy", str(self.mount)], check=False, stderr=subprocess.DEVNULL
        )
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        assert self._process is not None
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.wait()
        subprocess.run(
            ["umount", "--lazy", str(self.mount)], check=False, stderr=subprocess.DEVNULL
        )


class Cluster:
    """Hosts with one shared file system, and the store of their ranks.

    Args:
        hosts: the hosts.
        address: the address of this process on the network of the hosts.

    Attributes:
        path: of the shared file system, on all hosts.
    """

    def __init__(self, hosts: Sequence[Host], address: str) -> None:
        self.hosts = hosts
        self._address = address
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
                    "MASTER_ADDR": self._address,
                    "GLOO_SOCKET_IFNAME": _INTERFACE,
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

    def run_by_torchrun(
        self, work: Callable[..., object], *arguments: Any, ranks_per_host: int = 1
    ) -> None:
        """Runs ``work`` in ranks that torchrun starts on all hosts."""
        endpoint = f"{self.hosts[0].address}:{free_port()}"
        options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        ranks = ["--nnodes", str(len(self.hosts)), "--nproc-per-node", str(ranks_per_host)]
        call = [work.__module__, work.__name__, json.dumps(arguments)]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *ranks]
        agents = [
            host.start(
                [*command, "--local-addr", host.address, "-m", "tests.cluster.rank", *call],
                {"GLOO_SOCKET_IFNAME": _INTERFACE},
            )
            for host in self.hosts
        ]
        outputs_of(agents)

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
    return [json.loads(output.splitlines()[-1]) for output in outputs_of(processes, patience)]


def outputs_of(
    processes: Sequence[subprocess.Popen[str]], patience: float = PATIENCE_SECONDS
) -> list[str]:
    """Waits for processes, for at most ``patience`` seconds, and returns their standard outputs.

    Raises:
        AssertionError: a process has failed or does not end.
    """
    deadline = time.monotonic() + patience
    outputs = []
    for number, process in enumerate(processes):
        try:
            output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {number} does not end") from None
        assert process.returncode == 0, f"process {number} has exited with {process.returncode}"
        outputs.append(output)
    return outputs


# --- networks ------------------------------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def _networks(count: int) -> Iterator[tuple[dict[str, str], str]]:
    """Connects hosts by a bridge. Yields the addresses of their namespaces, and the address of this
    process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    bridge, addresses = f"tc{worker}", f"10.213.{worker}"
    names = {f"{bridge}h{number}": f"{addresses}.{number + 2}" for number in range(count)}
    # A killed test run may have left them.
    for words in (
        ["link", "delete", bridge],
        *(["link", "delete", f"{name}v"] for name in names),
        *(["netns", "delete", name] for name in names),
    ):
        subprocess.run(["ip", *words], stderr=subprocess.DEVNULL, check=False)
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{addresses}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name, address in names.items():
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            peer = ["peer", "name", _INTERFACE, "netns", name]
            _ip("link", "add", f"{name}v", "type", "veth", *peer)
            # The kernel deletes a namespace, and what is in it, later.
            stack.callback(_ip, "link", "delete", f"{name}v")
            _ip("link", "set", f"{name}v", "master", bridge, "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _INTERFACE)
            for interface in (_INTERFACE, "lo"):
                _ip("-n", name, "link", "set", interface, "up")
        yield names, f"{addresses}.1"


# --- file systems --------------------------------------------------------------------------------


@contextmanager
def _juicefs(
    directory: Path, mounts: Sequence[Path], _address: str, keeps_removed: bool
) -> Iterator[list[Client]]:
    """Mounts one JuiceFS, whose metadata is in a database and whose data is in files."""
    command = program("juicefs")
    assert command is not None
    metadata = f"sqlite3://{directory / 'metadata.db'}"
    store = ["--storage", "file", "--bucket", f"{directory / 'store'}/"]
    store += ["--trash-days", str(int(keeps_removed))]
    with (directory / "log").open("wb") as log:
        subprocess.run(
            [command, "format", *store, metadata, "tests"], check=True, stdout=log, stderr=log
        )
    clients = []
    for number, mount in enumerate(mounts):
        cache = ["--cache-dir", str(directory / f"cache{number}"), "--cache-size", "256M"]
        quiet = ["--no-usage-report", "--no-syslog", "--metrics", f"{ADDRESS}:0"]
        words = [command, "mount", *quiet, *cache, metadata, str(mount)]
        clients.append(Client(words, mount, directory / "log"))
    with _started(clients):
        yield clients


@contextmanager
def _sshfs(
    directory: Path, mounts: Sequence[Path], _address: str, _keeps_removed: bool
) -> Iterator[list[Client]]:
    """Mounts one directory by sshfs, which connects to sftp servers without ssh."""
    exported = directory / "exported"
    exported.mkdir()
    with socket.create_server((ADDRESS, 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        subprocess.Popen([_SFTP_SERVER], stdin=connection, stdout=connection)

        threading.Thread(target=serve, daemon=True).start()
        words = ["sshfs", "-f", "-o", f"directport={server.getsockname()[1]}"]
        clients = [
            Client([*words, f"{ADDRESS}:{exported}", str(mount)], mount, directory / "log")
            for mount in mounts
        ]
        with _started(clients):
            yield clients
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def _moosefs(
    directory: Path, mounts: Sequence[Path], address: str, keeps_removed: bool
) -> Iterator[list[Client]]:
    """Mounts one MooseFS, with a master and a chunk server."""
    ports = {name: free_port() for name in ("MATOML", "MATOCS", "MATOCL", "CSSERV")}
    chunks = directory / "chunks"
    for name in ("master", "chunkserver"):
        (directory / name).mkdir()
    chunks.mkdir()
    (directory / "master" / "metadata.mfs").write_text("MFSM NEW")
    (directory / "exports.cfg").write_text("* / rw,alldirs,admin,maproot=0:0\n")
    (directory / "hdd.cfg").write_text(f"{chunks}\n")
    user = {"WORKING_USER": "root", "WORKING_GROUP": "root"}
    settings = {
        "master": {
            "EXPORTS_FILENAME": directory / "exports.cfg",
            **{f"{name}_LISTEN_HOST": address for name in ("MATOML", "MATOCS", "MATOCL")},
            **{f"{name}_LISTEN_PORT": ports[name] for name in ("MATOML", "MATOCS", "MATOCL")},
        },
        "chunkserver": {
            "HDD_CONF_FILENAME": directory / "hdd.cfg",
            "MASTER_HOST": address,
            "MASTER_PORT": ports["MATOCS"],
            "CSSERV_LISTEN_HOST": address,
            "CSSERV_LISTEN_PORT": ports["CSSERV"],
        },
    }
    with ExitStack() as stack:
        log = stack.enter_context((directory / "log").open("ab"))
        for name, own in settings.items():
            lines = own | user | {"DATA_PATH": directory / name}
            config = directory / f"{name}.cfg"
            config.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))
            server = subprocess.Popen(
                [f"/usr/sbin/mfs{name}", "-d", "-c", str(config)], stdout=log, stderr=log
            )
            stack.callback(end, server)
        master = ["-H", address, "-P", str(ports["MATOCL"])]
        _wait_for_port(address, ports["MATOCL"])
        clients = [
            Client(["mfsmount", str(mount), *master, "-f"], mount, directory / "log")
            for mount in mounts
        ]
        with _started(clients):
            seconds = str(86_400 * keeps_removed)
            subprocess.run(["mfssettrashtime", seconds, str(mounts[0])], check=True, stdout=log)
            yield clients


def _wait_for_port(address: str, port: int) -> None:
    deadline = time.monotonic() + _MOUNT_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                return
        if time.monotonic() > deadline:
            raise RuntimeError(f"no server listens at {address}:{port}")
        time.sleep(0.05)


@contextmanager
def _one_disk(
    directory: Path, mounts: Sequence[Path], _address: str, _keeps_removed: bool
) -> Iterator[list[Client]]:
    """Gives all hosts the same directory of this machine, whose locks all of them see."""
    exported = directory / "exported"
    exported.mkdir()
    with ExitStack() as stack:
        for mount in mounts:
            subprocess.run(["mount", "--bind", str(exported), str(mount)], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", str(mount)], check=False)
        yield []


@contextmanager
def _local(
    _directory: Path, _mounts: Sequence[Path], _address: str, _keeps_removed: bool
) -> Iterator[list[Client]]:
    """Gives each host a directory of its own."""
    yield []


@contextmanager
def _started(clients: Sequence[Client]) -> Iterator[None]:
    """Runs clients during a block."""
    with ExitStack() as stack:
        for client in clients:
            client.start()
            stack.callback(client.stop)
        yield


_KINDS = {
    "juicefs": _juicefs,
    "sshfs": _sshfs,
    "moosefs": _moosefs,
    "one disk": _one_disk,
    "local": _local,
}


def lacking(kind: str) -> str:
    """Returns what this machine lacks for hosts with a kind of file system; "" if nothing."""
    if os.geteuid() != 0:
        return "root"
    if shutil.which("ip") is None:
        return "iproute2"
    if kind not in ("one disk", "local") and not os.path.exists("/dev/fuse"):
        return "/dev/fuse"
    if kind == "juicefs" and program("juicefs") is None:
        return "juicefs"
    if kind == "sshfs" and not (shutil.which("sshfs") and os.path.exists(_SFTP_SERVER)):
        return "sshfs and openssh-sftp-server"
    if kind == "moosefs" and not (shutil.which("mfsmount") and os.path.exists(_MOOSEFS_MASTER)):
        return "moosefs-master, moosefs-chunkserver and moosefs-client"
    return ""


@contextmanager
def cluster(
    kind: str, directory: Path, hosts: int = 2, *, keeps_removed: bool = True
) -> Iterator[Cluster]:
    """Starts hosts that share a file system, or have local ones, during a block.

    Args:
        kind: "juicefs", "moosefs", "sshfs", "one disk" or "local".
        directory: an empty directory.
        keeps_removed: JuiceFS and MooseFS keep removed files for a day, as they do by default. A
            client whose cache has such a file can still read it.
    """
    path = directory / "shared"
    path.mkdir()
    mounts = []
    for number in range(hosts):
        mounts.append(directory / f"host{number}" / "mount")
        mounts[-1].mkdir(parents=True)
    with (
        _networks(hosts) as (networks, address),
        _KINDS[kind](directory, mounts, address, keeps_removed) as clients,
    ):
        names = [f"{each} host{number}" for number, each in enumerate(networks.values())]
        (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        each = zip_longest(mounts, networks.items(), clients)
        made = Cluster(
            [
                Host(f"host{number}", mount.parent, mount, path, *network, client)
                for number, (mount, network, client) in enumerate(each)
            ],
            address,
        )
        try:
            yield made
        finally:
            made.kill()
