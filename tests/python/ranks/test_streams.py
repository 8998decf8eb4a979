"""Streams of bytes between ranks, which are threads of this process."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any
from unittest import mock

import pytest

from torch_ckpt.ranks import streams
from torch_ckpt.ranks.failures import PeerLost
from torch_ckpt.ranks.streams import (
    Connection,
    Listener,
    OwnStream,
    connect,
    start_heartbeats,
)

#: More than the buffers of a connection have room for.
MANY_BYTES = 64 << 20
TIMEOUT = 60.0


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener()) as opened, ExitStack() as connections:
        real = Connection.__init__

        def initialize(connection: Connection, *arguments: Any) -> None:
            real(connection, *arguments)
            connections.callback(connection.close)

        with mock.patch.object(Connection, "__init__", initialize):
            yield opened


def connected(
    listener: Listener, threads: ThreadPoolExecutor, timeout: float = TIMEOUT
) -> tuple[Connection, Connection]:
    """Returns the ends of rank 1, which sends, and of rank 0."""
    accepting = threads.submit(listener.accept, [1], 0, timeout)
    sender = connect(listener.address, 1, 0, timeout)
    return sender, accepting.result()[1]


def receive(stream: Connection | OwnStream, count: int) -> bytes:
    return b"".join(map(bytes, stream.receive(count, memoryview(bytearray(1 << 20)))))


def send_in(
    threads: ThreadPoolExecutor, connection: Connection | OwnStream, data: bytes
) -> Future[None]:
    return threads.submit(connection.send, memoryview(data))


def test_bytes_arrive_in_their_order(listener: Listener, threads: ThreadPoolExecutor) -> None:
    sender, receiver = connected(listener, threads)
    data = os.urandom(5_000_000)
    sending = [send_in(threads, sender, data)]
    assert receive(receiver, 10) == data[:10]
    assert receive(receiver, len(data) - 10) == data[10:]
    sending.append(send_in(threads, sender, b"more"))
    assert receive(receiver, 4) == b"more"
    for each in sending:
        each.result()


def test_a_rank_sends_bytes_to_itself(threads: ThreadPoolExecutor) -> None:
    stream = OwnStream()
    data = os.urandom(5_000_000)
    sending = send_in(threads, stream, data)
    assert receive(stream, 10) == data[:10]
    assert not sending.done()
    assert receive(stream, len(data) - 10) == data[10:]
    sending.result()
    sending = send_in(threads, stream, b"more")
    assert receive(stream, 4) == b"more"
    sending.result()


def test_a_rank_that_closes_the_stream_to_itself_neither_sends_nor_receives(
    threads: ThreadPoolExecutor,
) -> None:
    for call in (lambda to: to.send(memoryview(b"a")), lambda to: receive(to, 1)):
        stream = OwnStream()
        waiting = threads.submit(call, stream)
        stream.close()
        with pytest.raises(PeerLost, match="this rank has closed the connection with itself"):
            waiting.result()


def test_a_cancelled_send_of_a_rank_to_itself_ends_when_no_thread_reads_the_bytes(
    threads: ThreadPoolExecutor,
) -> None:
    stream = OwnStream()
    asked = threading.Event()

    def is_cancelled() -> bool:
        asked.set()
        return True

    sending = threads.submit(stream.send, memoryview(b"ab"), is_cancelled)
    parts = stream.receive(1, memoryview(bytearray(1)))
    part = next(parts)
    asked.wait()
    assert (bytes(part), sending.done()) == (b"a", False)
    parts.close()
    with pytest.raises(InterruptedError):
        sending.result()


# A listener that closes a connection before it has read all bytes resets the connection, which the
# test could then not shut down. So no greeting has more than the 68 bytes that a listener reads.
@pytest.mark.parametrize(
    "greeting", [b"", b"x" * 68, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(68, b"x")]
)
def test_a_connection_without_the_secret_is_closed(
    listener: Listener, threads: ThreadPoolExecutor, greeting: bytes
) -> None:
    _addresses, port, _secret = pickle.loads(listener.address)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        sender, receiver = connected(listener, threads)
        stranger.settimeout(TIMEOUT)
        with suppress(ConnectionResetError):
            assert len(streams.read_exactly(stranger, 32)) == 32  # the number to prove
            assert stranger.recv(1) == b""
    sender.send(memoryview(b"a"))
    assert receive(receiver, 1) == b"a"


def test_a_silent_connection_delays_no_other_one(
    listener: Listener, threads: ThreadPoolExecutor
) -> None:
    _addresses, port, _secret = pickle.loads(listener.address)
    with socket.create_connection(("127.0.0.1", port)):
        sender, receiver = connected(listener, threads)
        sender.send(memoryview(b"a"))
        assert receive(receiver, 1) == b"a"


def test_a_connection_that_stays_silent_is_closed(listener: Listener) -> None:
    _addresses, port, _secret = pickle.loads(listener.address)
    with (
        mock.patch.object(streams, "_CONNECT_SECONDS", 0.05),
        socket.create_connection(("127.0.0.1", port)) as stranger,
    ):
        stranger.settimeout(TIMEOUT)
        assert len(streams.read_exactly(stranger, 32)) == 32  # the number to prove
        assert stranger.recv(1) == b""


def test_bytes_that_arrive_after_the_deadline_are_refused() -> None:
    one, other = socket.socketpair()
    with one, other:
        other.sendall(b"ab")
        with pytest.raises(TimeoutError, match="the other side is too slow"):
            streams.read_exactly(one, 2, deadline=0.0)


def test_the_next_address_is_tried(listener: Listener, threads: ThreadPoolExecutor) -> None:
    _addresses, port, secret = pickle.loads(listener.address)
    found = pickle.dumps((["host.invalid", "127.0.0.1"], port, secret))
    accepting = threads.submit(listener.accept, [1], 0, TIMEOUT)
    connect(found, 1, 0, TIMEOUT).send(memoryview(b"a"))
    assert receive(accepting.result()[1], 1) == b"a"


def test_a_rank_does_not_connect_to_a_program_without_the_secret(listener: Listener) -> None:
    _addresses, _port, secret = pickle.loads(listener.address)
    with closing(Listener()) as other:
        wrong = pickle.dumps((["127.0.0.1"], pickle.loads(other.address)[1], secret))
        with pytest.raises(ConnectionError, match="rank 1 cannot connect to rank 0, port"):
            connect(wrong, 1, 0, TIMEOUT)


def test_a_rank_whose_port_is_closed_is_lost(listener: Listener) -> None:
    listener.close()
    with pytest.raises(PeerLost, match="rank 1 cannot connect to rank 0"):
        connect(pickle.dumps((["127.0.0.1"], *pickle.loads(listener.address)[1:])), 1, 0, TIMEOUT)


@pytest.mark.parametrize("waits", [True, False])
def test_a_rank_whose_peer_closes_the_connection_fails(
    listener: Listener, threads: ThreadPoolExecutor, waits: bool
) -> None:
    sender, receiver = connected(listener, threads)
    if waits:
        receiving = threads.submit(receive, receiver, 1)
        sender.close()
        error = receiving.exception()
    else:
        sending = send_in(threads, sender, bytes(MANY_BYTES))
        receive(receiver, 1)
        receiver.close()
        error = sending.exception()
    assert isinstance(error, PeerLost)
    own, other = (0, 1) if waits else (1, 0)
    assert f"rank {own}: the connection to rank {other} is lost" in str(error)


@pytest.mark.parametrize("sends", [True, False])
def test_a_rank_that_sends_no_heartbeat_is_declared_dead(
    listener: Listener, threads: ThreadPoolExecutor, sends: bool
) -> None:
    sender, receiver = connected(listener, threads, 0.3)
    call: Callable[[], object] = lambda: receive(receiver, 1)  # noqa: E731
    if sends:
        call = lambda: sender.send(memoryview(bytes(MANY_BYTES)))  # noqa: E731
    with pytest.raises(ConnectionError, match=r"no heartbeat for 0\.3 s") as caught:
        call()
    assert not isinstance(caught.value, PeerLost)


def test_a_slow_rank_that_sends_heartbeats_is_not_declared_dead(
    listener: Listener, threads: ThreadPoolExecutor
) -> None:
    sender, receiver = connected(listener, threads, 0.3)
    beats = threading.Semaphore(0)
    # Long enough for several timeouts.
    end = start_heartbeats({0: sender}, {1: receiver}, 0.3, beats.release)
    receiving = threads.submit(receive, receiver, MANY_BYTES)
    for _ in range(40):
        beats.acquire()
    assert not receiving.done()
    sending = send_in(threads, sender, bytes(MANY_BYTES))
    receiving.result()
    sending.result()
    again = send_in(threads, sender, bytes(MANY_BYTES))
    for _ in range(40):
        beats.acquire()
    assert not again.done()
    receive(receiver, MANY_BYTES)
    again.result()
    end()


def test_a_cancelled_send_ends(listener: Listener, threads: ThreadPoolExecutor) -> None:
    sender, _receiver = connected(listener, threads)
    with pytest.raises(InterruptedError, match="cancelled"):
        sender.send(memoryview(bytes(MANY_BYTES)), lambda: True)


def test_an_accept_ends_when_the_listener_is_closed(
    listener: Listener, threads: ThreadPoolExecutor
) -> None:
    accepting = threads.submit(listener.accept, [1], 0, TIMEOUT)
    listener.close()
    assert "the port was closed" in str(accepting.exception())


def test_a_rank_that_does_not_connect_is_named(listener: Listener) -> None:
    with pytest.raises(ConnectionError, match=r"rank 0: rank 3 has not connected within 0\.1 s"):
        listener.accept([3], 0, 0.1)


def test_the_address_for_other_hosts_is_that_of_the_interface_to_the_store() -> None:
    with mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1"):
        # The other rank knows the host of the store by another address.
        assert streams._addresses()[0] == ""
    with mock.patch.dict(os.environ, MASTER_ADDR="host.invalid"):
        assert streams._addresses()[-1] == "127.0.0.1"
