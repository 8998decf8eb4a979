"""Files on the disks of other hosts, which ranks of these hosts serve.

1. A rank whose host has files opens a :class:`FileServer`. The other ranks receive its address with
   the messages of the call.
2. A rank connects (ranks/streams.py) and sends requests: the step, the digest of its metadata, the
   offset and number of bytes, and the name of the file.
3. The server replies to each request with an errno, and with the bytes if the errno is 0.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from torch_ckpt._base.system import memory_for_io
from torch_ckpt.checkpoint.directory import share_or_warn
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks.streams import Listener, open_connection, read_exactly, receive_into
from torch_ckpt.steps.host_step import HostStep
from torch_ckpt.steps.local import LocalSteps
from torch_ckpt.steps.local_copy import Holder
from torch_ckpt.steps.tier_files import DirectoryFiles

# The step, the digest of the metadata, the offset, the number of bytes, and the size of the name.
_REQUEST = struct.Struct("!Q16sQQH")
_REPLY = struct.Struct("!i")

# Seconds in which a server must reply.
_REPLY_SECONDS = 30.0

# Limit for the bytes of one request.
_MOST_BYTES = 1 << 30


class FileServer:
    """Serves the files of complete steps on the disk of this host.

    Args:
        disk: the steps.
        timeout: seconds in which another rank must receive a reply.

    Attributes:
        address: address for :class:`PeerFiles` on other ranks. Contains a secret.
    """

    def __init__(self, disk: LocalSteps, timeout: float) -> None:
        self._disk = disk
        self._timeout = timeout
        self._changed = threading.Condition()
        self._opened: dict[tuple[int, bytes], tuple[HostStep, DirectoryFiles]] = {}
        self._connections: set[socket.socket] = set()  # one for each thread
        self._is_closed = False
        self._listener = Listener(self._answer)
        self.address = self._listener.address

    def close(self) -> None:
        """Closes the port, the connections and the files."""
        self._listener.close()
        with self._changed:
            self._is_closed = True
            for connected in self._connections:
                with suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
            # A file must not be closed while a thread reads it.
            has_ended = self._changed.wait_for(lambda: not self._connections, self._timeout)
            opened, self._opened = self._opened, {}
        for step, files in opened.values() if has_ended else ():
            files.close()
            step.close()

    # --- private ---------------------------------------------------------------------------------

    def _answer(self, connected: socket.socket, _rank: int) -> None:
        with self._changed:
            if self._is_closed:
                connected.close()
                return
            self._connections.add(connected)
        try:
            self._answer_requests(connected)
        except OSError:
            pass  # the other rank has received what it needs, or has died
        finally:
            connected.close()
            with self._changed:
                self._connections.discard(connected)
                self._changed.notify_all()

    def _answer_requests(self, connected: socket.socket) -> None:
        while True:
            connected.settimeout(None)
            request = read_exactly(connected, _REQUEST.size)
            step, digest, offset, count, name_bytes = _REQUEST.unpack(request)
            connected.settimeout(self._timeout)
            name = os.fsdecode(read_exactly(connected, name_bytes))
            try:
                data = self._read(step, digest, name, offset, count)
            except (OSError, ValueError, CheckpointError) as error:
                connected.sendall(_REPLY.pack(getattr(error, "errno", None) or errno.EIO))
            else:
                connected.sendall(_REPLY.pack(0))
                connected.sendall(data)

    def _read(self, step: int, digest: bytes, name: str, offset: int, count: int) -> memoryview:
        if count > _MOST_BYTES:
            raise OSError(errno.EINVAL, "too many bytes")
        with self._changed:
            if (step, digest) not in self._opened:
                found = HostStep(self._disk, step)
                if found.digest != digest:
                    found.close()
                    raise FileNotFoundError(errno.ENOENT, "another save has this step", found.path)
                share_or_warn(found.directory)
                names = [*found.named(), METADATA_NAME]
                self._opened[step, digest] = found, DirectoryFiles(found.directory, names)
            files = self._opened[step, digest][1]
        files.size(name)
        return files.read(name, offset, count)


class PeerFiles:
    """The files of one step that other ranks serve, for the engine's calls in a load.

    Args:
        step, digest: the step, and the digest of its metadata.
        holders: the rank that serves each file.
        addresses: the addresses of the servers, by rank.
        rank: this rank.
        timeout: seconds without a heartbeat after which this rank is declared dead. A server must
            reply much sooner, so that this rank can read the file elsewhere.
    """

    def __init__(
        self,
        step: int,
        digest: bytes,
        holders: Mapping[str, Holder],
        addresses: Sequence[bytes],
        rank: int,
        timeout: float,
    ) -> None:
        self._step = step
        self._digest = digest
        self._holders = holders
        self._addresses = addresses
        self._rank = rank
        self._timeout = min(timeout / 4, _REPLY_SECONDS)
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        # Connections that no thread uses, by rank.
        self._idle: dict[int, list[socket.socket]] = defaultdict(list)
        # The ranks that have not replied.
        self._lost: set[int] = set()

    def size(self, name: str) -> int:
        """Returns the size of a file.

        Raises:
            FileNotFoundError: no rank serves the file.
        """
        holder = self._holders.get(name)
        if holder is None or holder.rank in self._lost:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return holder.bytes

    def read(self, name: str, offset: int, bytes: int) -> memoryview:
        """Reads bytes of a file.

        Raises:
            OSError: the other rank cannot read the file, or does not reply.
        """
        other = self._holders[name].rank
        path = f"{name} on the host of rank {other}"
        encoded = os.fsencode(name)
        request = _REQUEST.pack(self._step, self._digest, offset, bytes, len(encoded)) + encoded
        data = memory_for_io(bytes)
        connected = None
        try:
            connected = self._connection(other)
            connected.sendall(request)
            [number] = _REPLY.unpack(read_exactly(connected, _REPLY.size))
            if number == 0:
                receive_into(connected, data)
        except OSError as error:
            self._lost.add(other)
            if connected is not None:
                connected.close()
            raise ConnectionError(f"{path}: {error.strerror or error}") from None
        with self._lock:
            self._idle[other].append(connected)
        if number:
            raise OSError(number, os.strerror(number), path)
        return data

    def _connection(self, other: int) -> socket.socket:
        with self._lock:
            if self._idle[other]:
                return self._idle[other].pop()
        connected = open_connection(self._addresses[other], self._rank, other)
        connected.settimeout(self._timeout)
        with self._lock:
            self._connections.add(connected)
        return connected

    def close(self) -> None:
        """Closes the connections. Calls that wait end with an error."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connected in connections:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
            connected.close()
