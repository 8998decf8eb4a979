"""Connections from rank to rank, which one call makes and closes, and streams of bytes over them.

The process groups of the trainer are not used: the trainer may use them at the same time, and none
of their calls can be stopped.

1. A rank listens (:class:`Listener`). The other ranks receive its address, which includes a secret,
   with the messages of the call.
2. Another rank connects to the first address that answers. Both ranks prove that they have the
   secret, without sending it: each sends a random number, and the other replies with the number's
   HMAC. A connection without this proof is closed.
3. In a stream, the sender sends frames: the size, as four bytes, and as many bytes of the stream.
   An empty frame is a heartbeat. The receiver's heartbeats are single bytes. Both ranks send
   heartbeats every few seconds, also if the stream does not advance.
4. A rank that waits for another rank fails if it has received nothing for the timeout, or if the
   other rank has closed the connection or died.
"""

from __future__ import annotations

import errno
import hmac
import math
import os
import pickle
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from torch_ckpt.ranks.failures import PeerLost

_SECRET_BYTES = _NONCE_BYTES = _PROOF_BYTES = 32
_RANK = struct.Struct("!I")

_FRAME, _HEARTBEAT = struct.Struct("!I"), b"."
_FRAME_BYTES = 1 << 20
_NONE = memoryview(b"")

# Seconds between two heartbeats, and between two checks that a wait must continue.
_HEARTBEAT_SECONDS, _REST_SECONDS = 5.0, 0.2
# Seconds for which one address of another rank is tried, and in which both ranks must prove that
# they have the secret.
_CONNECT_SECONDS = 10.0


class Connection:
    """A connection to another rank. One thread at a time sends or receives.

    Args:
        connected: the socket.
        own: this rank.
        other: the other rank.
        timeout: seconds without a heartbeat after which the other rank is declared dead.

    Attributes:
        is_waiting: True while a call waits for the other rank.
    """

    def __init__(self, connected: socket.socket, own: int, other: int, timeout: float) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._ranks = own, other
        self._timeout = timeout
        self.is_waiting = False
        self._heard = 0.0
        self._sending = threading.Lock()
        self._left = 0  # bytes left of the frame that is being received
        self._is_closed = False

    def send(self, data: memoryview, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Sends bytes of the stream, and waits until they are on their way.

        Args:
            is_cancelled: ends the wait if it returns True. The connection cannot be used any more.

        Raises:
            PeerLost: the other rank has closed the connection, or has died.
            ConnectionError: the other rank sends no heartbeat, or this connection is closed.
            InterruptedError: the call was cancelled.
        """
        with self._sending:
            self._heard = time.monotonic()
            for begin in range(0, len(data), _FRAME_BYTES):
                frame = data[begin : begin + _FRAME_BYTES]
                self._send(memoryview(_FRAME.pack(len(frame))), is_cancelled)
                self._send(frame, is_cancelled)

    def receive(self, count: int, buffer: memoryview) -> Iterator[memoryview]:
        """Receives the next ``count`` bytes of the stream, in parts.

        Args:
            buffer: memory for a part.

        Returns:
            The parts. Each of them is valid until the next one is asked for.

        Raises:
            PeerLost, ConnectionError: see :meth:`send`.
        """
        while count > 0:
            part = buffer[:count]
            self._receive_all(part)
            yield part
            count -= len(part)

    def send_heartbeat(self, is_sender: bool) -> None:
        """Sends a heartbeat, unless another thread is sending."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            with suppress(OSError):
                beat = memoryview(_FRAME.pack(0) if is_sender else _HEARTBEAT)
                self._send(beat[self._socket.send(beat) :], lambda: self._is_closed)
        finally:
            self._sending.release()

    def close(self) -> None:
        """Closes the connection. Calls that wait end."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # --- private ---------------------------------------------------------------------------------

    def _receive_all(self, into: memoryview) -> None:
        self._heard = time.monotonic()
        while len(into) > 0:
            while self._left == 0:
                size = bytearray(_FRAME.size)
                self._receive(memoryview(size))
                [self._left] = _FRAME.unpack(size)
            part = into[: self._left]
            self._receive(part)
            self._left -= len(part)
            into = into[len(part) :]

    def _send(self, data: memoryview, is_cancelled: Callable[[], bool]) -> None:
        while len(data) > 0:
            try:
                data = data[self._socket.send(data) :]
                self._heard = time.monotonic()
            except BlockingIOError:
                self._wait(select.POLLOUT)
                if is_cancelled():
                    raise InterruptedError(errno.EINTR, "the save was cancelled") from None
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from None

    def _receive(self, into: memoryview) -> None:
        while len(into) > 0:
            try:
                count = self._socket.recv_into(into)
            except BlockingIOError:
                self._wait(0)
                continue
            except OSError as error:
                raise self._lost(error.strerror or str(error)) from None
            if count == 0:
                raise self._lost("the other rank has closed it")
            into = into[count:]
            self._heard = time.monotonic()

    def _wait(self, event: int) -> None:
        """Waits for an event, or until bytes arrive."""
        poll = select.poll()
        with suppress(ValueError):  # closed meanwhile
            poll.register(self._socket, event | select.POLLIN)
        self.is_waiting = True
        ready = poll.poll(1e3 * _REST_SECONDS)
        self.is_waiting = False
        if ready and event and ready[0][1] & select.POLLIN:
            # Heartbeats, or the end of the connection.
            with suppress(BlockingIOError):
                self._receive(memoryview(bytearray(1)))
        if not ready and time.monotonic() - self._heard > self._timeout:
            own, other = self._ranks
            raise ConnectionError(
                f"rank {own}: rank {other} has sent no heartbeat for {self._timeout:g} s: "
                "check that the process is still running, or increase the timeout",
            )

    def _lost(self, why: str) -> ConnectionError:
        own, other = self._ranks
        why = "this rank has closed it" if self._is_closed else why
        return PeerLost(f"rank {own}: the connection to rank {other} is lost: {why}")


class OwnStream:
    """A stream of a rank to itself, from one thread to another. See :class:`Connection`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._data = _NONE
        self._is_read = False
        self._is_closed = False

    def send(self, data: memoryview, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Waits until the bytes were received. See :meth:`Connection.send`."""
        with self._changed:
            self._require_open()
            self._data = data
            self._changed.notify_all()
            try:
                while len(self._data) > 0:
                    self._changed.wait(_REST_SECONDS)
                    self._require_open()
                    if is_cancelled():
                        raise InterruptedError(errno.EINTR, "the save was cancelled")
            finally:
                self._data = _NONE
                # The sender may use the memory for other bytes when this call returns.
                while self._is_read:
                    self._changed.wait()

    def receive(self, count: int, buffer: memoryview) -> Iterator[memoryview]:
        """See :meth:`Connection.receive`. Returns parts of the sent bytes, not of ``buffer``."""
        while count > 0:
            with self._changed:
                while len(self._data) == 0:
                    self._require_open()
                    self._changed.wait()
                part = self._data[:count]
                self._is_read = True
            try:
                yield part
            finally:
                with self._changed:
                    count -= len(part)
                    self._data = self._data[len(part) :] if len(part) < len(self._data) else _NONE
                    part.release()
                    self._is_read = False
                    self._changed.notify_all()

    def close(self) -> None:
        """See :meth:`Connection.close`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self._is_closed:
            raise PeerLost("this rank has closed the connection with itself")


class Listener:
    """Accepts the connections of other ranks, in a thread.

    Args:
        handle: called with each connection and the rank that has connected, in a thread. The
            function closes the connection. None: :meth:`accept` returns the connections.

    Attributes:
        address: the argument of :func:`connect` on other ranks. Contains the secret.

    Raises:
        OSError: the port cannot be opened.
    """

    def __init__(self, handle: Callable[[socket.socket, int], object] | None = None) -> None:
        if socket.has_dualstack_ipv6():
            self._server = socket.create_server(
                ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        else:
            self._server = socket.create_server(("", 0), backlog=1024)
        self._server.settimeout(_REST_SECONDS)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._handle = handle or self._keep
        self._changed = threading.Condition()
        self._arrived: dict[int, socket.socket] = {}
        self._is_closed = False
        port = self._server.getsockname()[1]
        self.address = pickle.dumps((_addresses(), port, self._secret))
        threading.Thread(target=self._run, name="torch_ckpt listen", daemon=True).start()

    def accept(self, senders: Collection[int], own: int, timeout: float) -> dict[int, Connection]:
        """Waits until all senders have connected.

        Args:
            senders: their ranks.
            own: this rank.
            timeout: see :class:`Connection`.

        Raises:
            PeerLost: a sender has not connected.
            ConnectionError: :meth:`close` was called.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or set(senders) <= self._arrived.keys(), timeout
            )
            if self._is_closed:
                raise ConnectionError(f"rank {own}: the port was closed")
            missing = set(senders) - self._arrived.keys()
            if missing:
                raise PeerLost(
                    f"rank {own}: rank {min(missing)} has not connected within {timeout:g} s"
                )
            arrived, self._arrived = self._arrived, {}
        return {
            rank: Connection(connected, own, rank, timeout) for rank, connected in arrived.items()
        }

    def close(self) -> None:
        """Closes the port, and the connections that are not accepted."""
        with self._changed:
            self._is_closed = True
            arrived, self._arrived = self._arrived, {}
            self._changed.notify_all()
        with suppress(OSError):
            # Else the port stays open while the thread waits.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connected in arrived.values():
            connected.close()

    # --- private ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            try:
                connected = self._server.accept()[0]
            except TimeoutError:
                continue
            except OSError:  # closed, or too few descriptors
                time.sleep(_REST_SECONDS)
                continue
            greet = threading.Thread(
                target=self._greet, args=[connected], name="torch_ckpt greet", daemon=True
            )
            try:
                greet.start()
            except RuntimeError:  # no more threads
                connected.close()

    def _greet(self, connected: socket.socket) -> None:
        """Handles a connection if the other side has the secret, and closes it otherwise."""
        try:
            nonce = secrets.token_bytes(_NONCE_BYTES)
            connected.settimeout(_CONNECT_SECONDS)
            connected.sendall(nonce)
            deadline = time.monotonic() + _CONNECT_SECONDS
            length = _RANK.size + _NONCE_BYTES + _PROOF_BYTES
            greeting = read_exactly(connected, length, deadline)
            encoded_rank, greeting = greeting[: _RANK.size], greeting[_RANK.size :]
            other_nonce, proof = greeting[:_NONCE_BYTES], greeting[_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._secret, nonce + encoded_rank)):
                connected.close()
                return
            connected.sendall(_proof(self._secret, other_nonce))
        except OSError:
            connected.close()
            return
        self._handle(connected, _RANK.unpack(encoded_rank)[0])

    def _keep(self, connected: socket.socket, rank: int) -> None:
        with self._changed:
            if not self._is_closed and rank not in self._arrived:
                self._arrived[rank] = connected
                self._changed.notify_all()
                return
        connected.close()


def connect(address: bytes, own: int, other: int, timeout: float) -> Connection:
    """Connects to another rank, for a stream; see :func:`open_connection`.

    Args:
        timeout: see :class:`Connection`.
    """
    return Connection(open_connection(address, own, other, timeout), own, other, timeout)


def open_connection(
    address: bytes, own: int, other: int, patience: float = _CONNECT_SECONDS
) -> socket.socket:
    """Connects to another rank.

    Args:
        address: the address of the other rank's listener.
        own: this rank.
        other: the other rank.
        patience: seconds in which the other rank must answer, once it is connected.

    Raises:
        PeerLost: the other rank has closed its port.
        ConnectionError: no address of the other rank answers.
    """
    addresses, port, secret = pickle.loads(address)
    failures, kind = [], ConnectionError
    for host in addresses:
        host = host or _store_host() or "localhost"
        connected = None
        try:
            connected = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            connected.settimeout(patience)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            other_nonce = read_exactly(connected, _NONCE_BYTES)
            encoded_rank = _RANK.pack(own)
            connected.sendall(encoded_rank + nonce + _proof(secret, other_nonce + encoded_rank))
            proof = read_exactly(connected, _PROOF_BYTES)
            if hmac.compare_digest(proof, _proof(secret, nonce)):
                return connected
            failures.append(f"{host}: another program has this port")
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                # The other rank may have failed.
                kind = PeerLost
            failures.append(f"{host}: {error.strerror or error}")
        if connected is not None:
            connected.close()
    raise kind(
        f"rank {own} cannot connect to rank {other}, port {port} ({'; '.join(failures)}). Ranks "
        "send parts of files to each other: allow connections between the hosts",
    )


def start_heartbeats(
    sent: Mapping[int, Connection],
    received: Mapping[int, Connection],
    timeout: float,
    on_beat: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Sends heartbeats at intervals, in a thread.

    Args:
        sent: connections on which this rank sends, by rank. May change.
        received: connections on which this rank receives, by rank. May change.
        timeout: see :class:`Connection`.
        on_beat: called each time.

    Returns:
        A function that ends the thread.
    """
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(min(_HEARTBEAT_SECONDS, timeout / 10)):
            for connection in [*sent.values()]:
                connection.send_heartbeat(True)
            for connection in [*received.values()]:
                connection.send_heartbeat(False)
            on_beat()

    threading.Thread(target=run, name="torch_ckpt streams", daemon=True).start()
    return ended.set


def read_exactly(connected: socket.socket, count: int, deadline: float = math.inf) -> bytes:
    """Returns bytes from a socket; see :func:`receive_into`."""
    data = bytearray(count)
    receive_into(connected, memoryview(data), deadline)
    return bytes(data)


def receive_into(connected: socket.socket, into: memoryview, deadline: float = math.inf) -> None:
    """Reads as many bytes from a socket as ``into`` has.

    Args:
        deadline: time by time.monotonic().

    Raises:
        OSError: the other side does not send them, or not in time.
    """
    while len(into) > 0:
        if time.monotonic() > deadline:
            raise TimeoutError("the other side is too slow")
        count = connected.recv_into(into)
        if count == 0:
            raise ConnectionError("the other side has closed the connection")
        into = into[count:]


def _proof(secret: bytes, data: bytes) -> bytes:
    return hmac.digest(secret, data, "sha256")


def _store_host() -> str | None:
    """Returns the host of the process group's store, as this rank knows it."""
    if master := os.environ.get("MASTER_ADDR"):
        return master
    if not dist.is_initialized():
        return None
    store: Any = _get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None)  # a TCPStore's


def _addresses() -> list[str]:
    """Returns the addresses at which other ranks may reach this rank, the likeliest first. An empty
    one stands for the host of the store, as the other rank knows it."""
    found = []
    if host := _store_host():
        with suppress(OSError):
            family, kind, _protocol, _name, target = socket.getaddrinfo(
                host, 1, type=socket.SOCK_DGRAM
            )[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                own = str(probe.getsockname()[0])
            found.append("" if own.startswith("127.") or own == "::1" else own)
    with suppress(OSError):
        of_name = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(address[0]) for *_other, address in of_name]
    return list(dict.fromkeys([*found, "127.0.0.1"]))
