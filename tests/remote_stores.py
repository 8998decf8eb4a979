"""File systems for tests of remote checkpoints: an S3 server, and file systems that can fail."""

from __future__ import annotations

import errno
import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from urllib.request import urlopen

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from torch_ckpt.steps import MARKER_NAME

BUCKET = "checkpoints"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Runs an S3 server in this process on a free port of loopback. Yields the settings for
    clients.

    Skips the test if s3fs or moto is not installed.
    """
    reason = "needs s3fs and moto[server], an S3 server in Python"
    pytest.importorskip("s3fs", reason=reason)
    server_module = pytest.importorskip("moto.server", reason=reason)
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # All servers of a process share their buckets.
        urlopen(f"{url}/moto-api/reset", data=b"").close()
        settings = {"endpoint_url": url, "key": "k", "secret": "s"}
        fsspec.filesystem("s3", **settings).mkdir(BUCKET)
        yield settings
    finally:
        server.stop()


class Hooked(MemoryFileSystem):  # type: ignore[misc]
    """In-memory file system that calls ``hook`` with the kind and path before each request.

    Streams of one file have separate positions, as in all other file systems.
    """

    protocol = "hooked"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    hook: ClassVar[Callable[[str, str], None]] = staticmethod(lambda kind, path: None)
    #: Read ranges: path, number of bytes.
    reads: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix(f"{cls.protocol}://"))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        Hooked.hook("upload", rpath)
        super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        Hooked.hook("write", path)
        super().pipe_file(path, value, **kwargs)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        Hooked.hook("read", path)
        data: bytes = super().cat_file(path, start, end, **kwargs)
        self.reads.append((path, len(data)))
        return data

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        Hooked.hook("list", path)
        return super().find(path, *args, **kwargs)

    def rm(self, path: Any, *args: Any, **kwargs: Any) -> None:
        Hooked.hook("remove", str(path))
        super().rm(path, *args, **kwargs)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        stream = super()._open(path, mode, **kwargs)
        return io.BytesIO(stream.getvalue()) if mode == "rb" else stream


class Walked(Hooked):
    """``Hooked`` with fsspec's walk from directory to directory for ``find``, like sftp and
    HDFS."""

    protocol = "walked"
    find = fsspec.AbstractFileSystem.find

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        Hooked.hook("list", path)
        return super().ls(path, *args, **kwargs)


class Unanswered(Hooked):
    """``Hooked``, but the first request for each marker is carried out and then fails."""

    protocol = "unanswered"
    markers: ClassVar[set[str]] = set()

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, value, **kwargs)
        if path.endswith(f"/{MARKER_NAME}") and path not in self.markers:
            self.markers.add(path)
            raise TimeoutError(errno.ETIMEDOUT, "no answer")


for kind in (Hooked, Walked, Unanswered):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@contextmanager
def hooked(hook: Callable[[str, str], None]) -> Iterator[None]:
    """Calls ``hook`` before each request to ``hooked://`` during the block."""
    before, Hooked.hook = Hooked.hook, staticmethod(hook)
    try:
        yield
    finally:
        Hooked.hook = before


def hooked_url() -> str:
    """Makes a unique URL."""
    Hooked.reads.clear()
    return f"hooked://{uuid.uuid4().hex}/run"
