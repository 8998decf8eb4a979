"""Stores over fsspec, for protocols that obstore does not implement, and for Python 3.10."""

from __future__ import annotations

import builtins
import errno
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import datetime
from typing import Any, TypeVar

from torch_ckpt.stores.limits import Feed, Limits, pauses
from torch_ckpt.stores.object_store import Entry, ObjectStore, Service, Version
from torch_ckpt.stores.redaction import Redactor
from torch_ckpt.stores.storage_options import Options
from torch_ckpt.stores.store_errors import Changed, is_transient, number_of
from torch_ckpt.stores.urls import Root

T = TypeVar("T")

# Keys of the modification time, ETag and generation in the descriptions of files.
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")
_ETAG, _GENERATION = ("ETag", "etag"), ("generation", "VersionId", "version_id")
# fsspec's file system in memory is shared by all its objects, and checks and writes separately.
_memory = threading.Lock()


class FsspecStore(ObjectStore):
    """A store over fsspec. Copies each view, so a view is released when the next one is wanted.

    Repeats reads, but not the parts of an upload.
    """

    def __init__(self, root: Root, options: Options, limits: Limits, redactor: Redactor) -> None:
        super().__init__(root, limits, redactor)
        settings = options.values()
        if root.kind == "s3":
            times = {"connect_timeout": limits.connect, "read_timeout": limits.progress}
            settings["config_kwargs"] = times | dict(settings.get("config_kwargs") or {})
        protocol = root.url.partition("://")[0]
        failure: Exception | None = None
        try:
            kind = importlib.import_module("fsspec").get_filesystem_class(protocol)
            settings = kind._get_kwargs_from_urls(root.url) | settings
            # fsspec's cache of instances would keep the settings.
            self._fs = kind(skip_instance_cache=True, use_listings_cache=False, **settings)
        except ImportError as error:
            hint = "Install torch_ckpt[remote], or the package for this protocol"
            failure = ImportError(redactor(f"{root.url}: {error}. {hint}."))
        except Exception as error:
            failure = ValueError(redactor(f"{root.url}: {error}"))
        if failure is not None:
            raise failure
        self._root: str = self._fs._strip_protocol(root.url).rstrip("/")
        self._is_async: bool = self._fs.async_impl
        # Some file systems without coroutines are not thread-safe.
        is_memory = root.kind == "memory"
        self._lock: Any = (
            nullcontext() if self._is_async else _memory if is_memory else threading.Lock()
        )

    def service(self) -> Service:
        # The package of the file system, and s3fs's client.
        package = type(self._fs).__module__.partition(".")[0]
        meta = getattr(getattr(self._fs, "_s3", None), "meta", None)
        return Service(
            ", ".join(map(_with_version, dict.fromkeys(("fsspec", package)))),
            self._redactor(getattr(meta, "endpoint_url", None) or ""),
            getattr(meta, "region_name", None) or "",
        )

    def _apply_limits(self) -> None:
        pass  # A file system of fsspec keeps its limits.

    def _enter(self, name: str) -> None:
        self._root = self._path(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # --- writes -----------------------------------------------------------------------------------

    def _put(self, name: str, feed: Feed, bytes: int, part: int, in_flight: int) -> Version:
        path = self._path(name)
        self._make_directory_of(path)
        if self.root.kind == "memory" or (self._is_async and bytes <= part):
            data = bytearray()
            for view in feed:
                data += view
                del view
            with self._lock:
                self._fs.pipe_file(path, builtins.bytes(data))
            return self._head(name).version
        with self._lock:
            file = self._fs.open(path, "wb", block_size=part, autocommit=False)
        try:
            for view in feed:
                with self._lock:
                    file.write(view)
                del view
            with self._lock:
                file.close()
                getattr(file, "commit", lambda: None)()
        except BaseException:
            with self._lock, suppress(Exception):
                getattr(file, "discard", file.close)()
                # Otherwise, its destructor would try to write the remainder.
                file.closed = True
            raise
        return self._head(name).version

    def _put_conditional(self, name: str, data: bytes, expected: Version | None) -> Version:
        path = self._path(name)
        if expected is not None:
            if self.root.kind != "memory":
                raise OSError(errno.EOPNOTSUPP, "fsspec cannot compare versions")
            with self._lock:
                exists = self._fs.exists(path)
                if not exists or not _entry(name, self._fs.info(path)).version.agrees(expected):
                    raise Changed(errno.ESTALE, "the object was replaced")
                self._fs.pipe_file(path, data)
            return self._head(name).version
        self._make_directory_of(path)
        with self._lock:
            if self.root.kind in ("file", "local"):
                with self._fs.open(path, "xb") as file:
                    file.write(data)
            elif self._creates_exclusively():
                try:
                    self._fs.pipe_file(path, data, mode="create")
                except Exception as error:
                    if number_of(error) != errno.ESTALE:
                        raise
                    raise FileExistsError(errno.EEXIST, "the object exists") from None
            else:
                raise OSError(
                    errno.EOPNOTSUPP, "fsspec cannot create a file exclusively on this file system"
                )
        return self._head(name).version

    def _creates_exclusively(self) -> bool:
        """True if the file system has its own way to create a file. fsspec's default tests and
        writes, in this order."""
        name = "_pipe_file" if self._is_async else "pipe_file"
        function = getattr(type(self._fs), name)
        base = importlib.import_module("fsspec.asyn").AsyncFileSystem
        return (
            function is not getattr(base, name) and "mode" in inspect.signature(function).parameters
        )

    def _delete(self, names: list[str]) -> None:
        paths = [self._path(name) for name in names]
        # fs.rm() treats some characters as patterns, which may match other files.
        if self._is_async and not any(character in path for path in paths for character in "*?["):
            try:
                self._fs.rm(paths)
                return
            except Exception:  # A server may refuse bulk deletes, and a file may not exist.
                pass
        for path in paths:
            with suppress(FileNotFoundError):
                self._repeat(lambda path=path: self._fs.rm_file(path))  # type: ignore[misc]

    def _make_directory_of(self, path: str) -> None:
        # Object stores have no directories; s3fs would try to create the bucket.
        if not self._is_async:
            with self._lock:
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)

    # --- reads ------------------------------------------------------------------------------------

    def _head(self, name: str) -> Entry:
        info = self._repeat(lambda: self._fs.info(self._path(name)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "it is a directory")
        return _entry(name, info)

    def _read(self, name: str, limit: int) -> tuple[bytes, Version]:
        entry = self._head(name)
        if entry.bytes > limit:
            raise OSError(errno.EFBIG, f"the object has {entry.bytes} bytes, more than {limit}")
        return self._range(name, 0, entry.bytes), entry.version

    def _read_range(self, name: str, offset: int, bytes: int, version: Version) -> memoryview:
        data = memoryview(self._range(name, offset, offset + bytes))
        if version != Version() and not self._head(name).version.agrees(version):
            raise Changed(errno.ESTALE, "the object was replaced while it was read")
        return data

    def _range(self, name: str, begin: int, end: int) -> bytes:
        if begin == end:
            return b""
        path = self._path(name)
        data: bytes = self._repeat(lambda: self._fs.cat_file(path, start=begin, end=end))
        if len(data) != end - begin:
            raise OSError(errno.EIO, f"requested {end - begin} bytes, got {len(data)}")
        return data

    def _list(self, prefix: str) -> Iterator[list[Entry]]:
        beneath = self._path(prefix).rstrip("/")
        # fsspec's own walk takes a directory as empty if its listing fails.
        find = self._fs._find if self._is_async else self._fs.find
        base = importlib.import_module("fsspec.asyn").AsyncFileSystem
        if getattr(find, "__func__", None) not in (base._find, base.find):
            with suppress(FileNotFoundError):
                found = self._repeat(lambda: self._fs.find(beneath, detail=True))
                yield self._entries(found.values())
            return
        directories = [beneath]
        while directories:
            with suppress(FileNotFoundError):  # Another process may delete the directory.
                directory = directories.pop()
                infos = self._repeat(lambda path=directory: self._fs.ls(path, detail=True))  # type: ignore[misc]
                yield self._entries(infos)
                directories += [
                    info["name"]
                    for info in infos
                    if info["type"] == "directory" and info["name"].rstrip("/") != directory
                ]

    def _entries(self, infos: Any) -> list[Entry]:
        root = self._root.lstrip("/")
        return [
            _entry(info["name"].lstrip("/").removeprefix(root).lstrip("/"), info)
            for info in infos
            if info["type"] == "file" and not info["name"].endswith("/")
        ]

    def _repeat(self, function: Callable[[], T]) -> T:
        failure: Exception | None = None
        for _ in pauses(self.limits.retry):
            try:
                with self._lock:
                    return function()
            except Exception as error:
                if not is_transient(error):
                    raise
                failure = error
        assert failure is not None
        raise failure


def _with_version(package: str) -> str:
    version = getattr(importlib.import_module(package), "__version__", "")
    return f"{package} {version}".rstrip()


def _entry(name: str, info: dict[str, Any]) -> Entry:
    changed = modified(info)
    etag, generation = (
        next((str(info[key]) for key in keys if info.get(key)), None)
        for keys in (_ETAG, _GENERATION)
    )
    return Entry(name, info["size"] or 0, changed, Version(etag, generation, info["size"], changed))


def modified(info: dict[str, Any]) -> float | None:
    """Returns the time of the last write as a Unix timestamp, from a file system's description of a
    file; None if the description has no such time."""
    for key in _MODIFIED:
        value = info.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None
