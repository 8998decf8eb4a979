"""A proxy that makes loopback as slow as a network: a delay, and a bandwidth for each connection.

``python -m benchmarks.slow_network PORT DELAY_MS MEGABYTES_PER_SECOND`` prints its own port, and
forwards connections to PORT of loopback. The delay is that of a round trip. The kernel paces the
sends of each connection (``SO_MAX_PACING_RATE``), in both directions.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from subprocess import PIPE, Popen

_SO_MAX_PACING_RATE = 47
# Bytes that are read at once, and that may be on their way.
_CHUNK_BYTES, _QUEUED_CHUNKS = 256 << 10, 8


async def _forward(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, delay: float
) -> None:
    loop = asyncio.get_running_loop()
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)

    async def deliver() -> None:
        while True:
            due, data = await on_the_way.get()
            await asyncio.sleep(max(due - loop.time(), 0.0))
            if not data:
                with suppress(OSError):
                    target.write_eof()
                return
            target.write(data)
            await target.drain()

    delivering = asyncio.create_task(deliver())
    with suppress(OSError):
        while data := await source.read(_CHUNK_BYTES):
            await on_the_way.put((loop.time() + delay, data))
    await on_the_way.put((loop.time() + delay, b""))
    with suppress(OSError):
        await delivering


def _pace(stream: asyncio.StreamWriter, rate: int) -> None:
    connection: socket.socket = stream.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _serve(port: int, round_trip: float, rate: int) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", port, limit=_CHUNK_BYTES)
        for stream in (writer, to_server[1]):
            _pace(stream, rate)
        try:
            await asyncio.gather(
                _forward(reader, to_server[1], round_trip / 2),
                _forward(to_server[0], writer, round_trip / 2),
            )
        finally:
            writer.close()
            to_server[1].close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=_CHUNK_BYTES)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def running(port: int, delay_ms: float, megabytes_per_second: float) -> Iterator[int]:
    """Runs the proxy in a process of its own. Yields its port."""
    arguments = [str(port), str(delay_ms), str(megabytes_per_second)]
    with Popen([sys.executable, "-m", __name__, *arguments], stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3, int(float(sys.argv[3]) * 1e6)))
