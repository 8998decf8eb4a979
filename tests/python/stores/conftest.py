"""Stores of all kinds."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from scripts import object_servers
from tests.object_server import BUCKET, ObjectServer
from torch_ckpt.stores import Limits, ObjectStore, Options, open_store
from torch_ckpt.stores.fsspec_store import FsspecStore
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.urls import parse_root

#: Limits for servers that do not answer.
SHORT = Limits(connect=0.5, progress=0.5, retry=1)

#: Stores in this process, and, for test-full, over real servers.
KINDS = [
    "obstore-memory",
    "fsspec-memory",
    "fsspec-file",
    "obstore-s3",
    "fsspec-s3",
    *(
        pytest.param(f"{library}-{server}", marks=pytest.mark.full)
        for server in object_servers.PROGRAMS
        for library in ("obstore", "fsspec")
    ),
]


@pytest.fixture
def server() -> Iterator[ObjectServer]:
    """A server whose answers a test chooses."""
    with ObjectServer().running() as running:
        yield running


@pytest.fixture(scope="session")
def real_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Starts each server once."""
    started: dict[str, Any] = {}
    with ExitStack() as stack:

        def start(name: str) -> Any:
            if object_servers.program(name) is None:
                pytest.skip(f"needs {object_servers.PROGRAMS[name]}")
            pytest.importorskip("boto3")
            if name not in started:
                directory = tmp_path_factory.mktemp(name)
                started[name] = stack.enter_context(object_servers.running(name, directory))
            return started[name]

        yield start


def fsspec_store(url: str, options: dict[str, Any], limits: Limits = SHORT) -> FsspecStore:
    pytest.importorskip("fsspec")
    if url.startswith("s3:"):
        pytest.importorskip("s3fs")
    settings = Options(options)
    return FsspecStore(parse_root(url), settings, limits, Redactor(settings.secrets()))


def obstore_store(url: str, options: dict[str, Any], limits: Limits = SHORT) -> ObjectStore:
    pytest.importorskip("obstore")
    return open_store(url, options, limits)


def memory_store(limits: Limits = SHORT) -> ObjectStore:
    backend = pytest.importorskip("obstore.store").MemoryStore()
    from torch_ckpt.stores.obstore_store import ObstoreStore

    return ObstoreStore(parse_root("s3://memory/run"), Options(), limits, Redactor(), backend)


@pytest.fixture
def open_kind(
    server: ObjectServer, real_servers: Callable[[str], Any], tmp_path: Any
) -> Callable[[str], ObjectStore]:
    """Opens an empty store, by its kind."""

    def open_one(kind: str) -> ObjectStore:
        library, _, place = kind.partition("-")
        directory = f"run-{uuid.uuid4().hex}"
        limits = Limits(connect=5, progress=10, retry=10)
        if kind == "obstore-memory":
            return memory_store(limits)
        if place in ("memory", "file"):
            path = f"/{directory}" if place == "memory" else str(tmp_path / directory)
            return fsspec_store(f"{place}://{path}", {}, limits)
        opener = obstore_store if library == "obstore" else fsspec_store
        if place == "s3":
            return opener(f"s3://{BUCKET}/{directory}", server.options, limits)
        started = real_servers(place)
        return opener(f"s3://{object_servers.BUCKET}/{directory}", started.options, limits)

    return open_one
