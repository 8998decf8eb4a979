"""Directories that several hosts use: whether all ranks see the same, and metadata that is stale.

**Saves.** A path on a local disk that every host has is the usual mistake.

1. The coordinator compares the directory identities of all ranks (directory.py). If all ranks have
   the same mounts, nothing else is needed.
2. Otherwise, the coordinator creates a probe: an empty file with an unpredictable name. The plan
   names the probe, so the ranks need no further message.
3. Before a rank writes, it looks for the probe. A network file system may cache for some time that
   a name does not exist, so the rank waits: 5 s if either file system is local, and 30 s otherwise.
4. The coordinator deletes the probe before it commits, or when the save has failed. The probe has
   the name of a temporary metadata file, so if the coordinator dies, a later save deletes the probe
   (csrc/directory/lease.h).

Saves of models need no probe: the ranks look for the directory that the coordinator has created.

**Loads.** After a save on another host, a network file system may not have a file for some time,
have the file with an earlier size, or still have the files of the former checkpoint.

1. A load makes the client look up the directory and its metadata again (csrc/os/directory.h). Data
   files have new names in each save.
2. If a file is damaged, or is missing beside the files of a checkpoint, a load reads again for up
   to 30 s. Local file systems are never stale, and a directory that is empty or absent fails at
   once.
3. Ranks that have read the metadata of different saves read again for up to 30 s (loading/load.py).
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from torch_ckpt import _core
from torch_ckpt._base.system import mount_of
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.marker import MARKER_NAME
from torch_ckpt.errors import CheckpointError, Corrupt

T = TypeVar("T")

# Suffix of data files.
_DATA = ".distcp"

# See View.takes_parallel_writes; measured by benchmarks/cluster.py.
_TAKING_PARALLEL_WRITES = ("fuse.juicefs",)

#: Seconds to wait for a name if a file system is local, and if none is.
LOCAL_SECONDS, NETWORK_SECONDS = 5.0, 30.0

#: Seconds for which metadata may be stale, and between two attempts to open something.
STALE_SECONDS, PAUSE_SECONDS = 30.0, 0.1


def create_if_absent(directory: OpenDirectory, name: str) -> bool:
    """Creates an empty file. Returns False if there is an entry of this name.

    Raises:
        OSError: the file cannot be created.
    """
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        os.close(os.open(name, flags, 0o666, dir_fd=directory.fd))
    except OSError as error:
        # sshfs reports EPERM if the file exists.
        if not isinstance(error, FileExistsError) and not directory.contains(name):
            raise
        return False
    return True


class View(NamedTuple):
    """A directory as a process sees it.

    Attributes:
        host: name of the host.
        file_system: type of the file system; "unknown" if it is unknown.
        source: the device or the server.
        is_local: True if no other host can change files in the directory.
    """

    host: str
    file_system: str
    source: str
    is_local: bool

    @classmethod
    def of(cls, directory: OpenDirectory) -> View:
        """Describes an open directory."""
        host, is_local = socket.gethostname(), directory.is_local
        try:
            mount = mount_of(f"/proc/self/fd/{directory.fd}")
        except OSError:
            return cls(host, "unknown", "", is_local)
        return cls(host, mount.file_system, mount.source, is_local)

    @property
    def takes_parallel_writes(self) -> bool:
        """True if hosts can write different ranges of one file at the same time as fast as
        different files. On other file systems, hosts take turns."""
        return self.file_system in _TAKING_PARALLEL_WRITES

    def __str__(self) -> str:
        return f"host {self.host}: {self.file_system} on {self.source}"


class Probe(NamedTuple):
    """A file that the coordinator of a save has created.

    Attributes:
        name: name of the file in the directory.
        view: the directory of the coordinator.
    """

    name: str
    view: View

    @classmethod
    def create(cls, directory: OpenDirectory) -> Probe:
        """Creates a probe, on the coordinator."""
        name = f"{_core.metadata_name(None)}.tmp-{uuid.uuid4().hex}"
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(name, flags, 0o666, dir_fd=directory.fd))
        return cls(name, View.of(directory))

    def require(self, directory: OpenDirectory, rank: int | None) -> None:
        """Checks that a rank sees the probe.

        Raises:
            CheckpointError: see :func:`wait_for`.
        """

        def look() -> None:
            # On NFS, a new descriptor has the current state.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(self.name, flags, dir_fd=directory.fd))

        wait_for(look, directory, self.view, rank)

    def encode(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, data: bytes) -> Probe:
        name, view = json.loads(data)
        return cls(name, View(*view))


def wait_for(look: Callable[[], T], directory: OpenDirectory, first: View, rank: int | None) -> T:
    """Waits for something that the coordinator has created.

    Args:
        look: raises FileNotFoundError as long as this rank does not see it.
        directory: the directory of this rank.
        first: the directory of the coordinator.

    Raises:
        CheckpointError: this rank does not see it in time, so the hosts have different directories.
    """
    begun = time.monotonic()
    while True:
        try:
            return look()
        except FileNotFoundError:
            own = View.of(directory)
            seconds = LOCAL_SECONDS if own.is_local or first.is_local else NETWORK_SECONDS
            if time.monotonic() >= begun + seconds:
                break
        time.sleep(PAUSE_SECONDS)
    raise CheckpointError(
        f"{directory.path}: rank {rank} ({own}) has not seen within {seconds:g} s what rank 0 "
        f"({first}) has created there: the hosts have different directories at this path. Save to "
        "a file system that all hosts share"
    )


def may_be_stale(directory: OpenDirectory, error: BaseException) -> bool:
    """True if a file in a directory could not be read because a network file system may have a
    former state of the directory.

    Args:
        error: the error of the read.
    """
    if not isinstance(error, (FileNotFoundError, Corrupt)) or directory.is_local:
        return False
    if isinstance(error, Corrupt):
        return True
    with suppress(OSError):
        return any(n == MARKER_NAME or n.endswith(_DATA) for n in directory.names())
    return False
