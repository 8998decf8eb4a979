"""Files beneath a URL, accessed through fsspec.

File systems that fsspec implements with coroutines (s3, gs, az, http) are used by several threads
at once. Other file systems are used by one thread at a time, because some are not thread-safe.
"""

from __future__ import annotations

import errno
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch_ckpt._base.formatting import size
from torch_ckpt._base.free_space import require_room
from torch_ckpt.stores.fsspec_store import modified

#: Maximum number of simultaneous requests.
MOST_REQUESTS = 16

# Error numbers for exceptions without one.
_NUMBERS: list[tuple[type[OSError], int]] = [
    (FileNotFoundError, errno.ENOENT),
    (FileExistsError, errno.EEXIST),
    (PermissionError, errno.EACCES),
    (TimeoutError, errno.ETIMEDOUT),
]


@dataclass(frozen=True)
class RemoteFile:
    """A file in a listing.

    Attributes:
        bytes: size of the file.
        modified: time of the last write as a Unix timestamp; None if the file system does not
            report it.
    """

    bytes: int
    modified: float | None


def resolve(url: str) -> tuple[Any, str]:
    """Returns the fsspec file system of a URL, and the path on it.

    Raises:
        ImportError: the file system needs a package that is not installed; the message names it.
        ValueError: fsspec does not support the URL's protocol.
    """
    # Import fsspec only when it is needed, because the import is slow.
    core = importlib.import_module("fsspec.core")
    try:
        file_system, path = core.url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{url}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}. To use a local path, omit the protocol.") from error
    return file_system, path


class RemoteFiles:
    """The files beneath a URL, named relative to it.

    Thread-safe. Failures raise ``OSError`` with the URL as ``filename``. Retries are left to the
    file system.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, root = resolve(url)
        self._root = root.rstrip("/")

    def below(self, name: str) -> RemoteFiles:
        """Returns the files in a subdirectory."""
        return RemoteFiles(self.url_of(name))

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def list(self) -> dict[str, RemoteFile]:
        """Lists all files, recursively. The list is empty if the directory does not exist."""
        with _errors_with_url("list", self.url):
            # Invalidate the cache, because other ranks and processes change the files, too.
            self._fs.invalidate_cache()
            try:
                found = self._find()
            except FileNotFoundError:
                return {}
        return {
            name.removeprefix(self._root).lstrip("/"): RemoteFile(info["size"], modified(info))
            for name, info in found.items()
            if info["type"] == "file" and not name.endswith("/") and info["size"] is not None
        }

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Reads a file, or only its bytes from ``begin`` to ``end`` (exclusive)."""
        with _errors_with_url("read", self.url_of(name)):
            data: bytes = self._fs.cat_file(self._path_of(name), start=begin, end=end)
        if begin is not None and end is not None and len(data) != end - begin:
            raise OSError(
                errno.EIO,
                f"read failed: requested bytes {begin} to {end}, got {len(data)} bytes",
                self.url_of(name),
            )
        return data

    def write(self, name: str, data: bytes) -> None:
        """Creates or replaces a file, atomically if the file system supports it."""
        with _errors_with_url("write", self.url_of(name)):
            self._make_directory_of(name)
            self._fs.pipe_file(self._path_of(name), data)

    def upload(self, source: str, name: str, uploaded: Callable[[int], None]) -> None:
        """Uploads a local file.

        Args:
            source: path of the local file.
            uploaded: called after each chunk is sent, with the number of bytes in the chunk.
        """
        with _errors_with_url("upload", self.url_of(name)):
            self._make_directory_of(name)
            self._fs.put_file(source, self._path_of(name), callback=_callback(uploaded))

    def download(self, name: str, target: str) -> None:
        """Downloads a file to a local path."""
        with _errors_with_url("download", self.url_of(name)):
            self._fs.get_file(self._path_of(name), target)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files. Ignores files that do not exist."""
        paths = [self._path_of(name) for name in names]
        if not paths:
            return
        with _errors_with_url("remove", self.url):
            # fs.rm() treats names with *, ? or [ as patterns, which may match other files.
            if not any(map(_has_magic, paths)):
                with suppress(FileNotFoundError):
                    self._fs.rm(paths)
                    return
            self.for_each(self._remove_one, ((path,) for path in paths))

    def remove_directory(self) -> None:
        """Removes the directory itself if it is empty and the file system has directories."""
        if not self._fs.async_impl:
            with suppress(OSError, NotImplementedError):
                self._fs.rmdir(self._root)

    def for_each(self, function: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
        """Calls a function with each tuple of arguments, in several threads if the file system
        supports that. Raises the first error."""
        workers = MOST_REQUESTS if self._fs.async_impl else 1
        with ThreadPoolExecutor(workers, thread_name_prefix="torch_ckpt remote") as pool:
            futures = [pool.submit(function, *call) for call in calls]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    # --- private ---------------------------------------------------------------------------------

    def _path_of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _remove_one(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _find(self) -> dict[str, dict[str, Any]]:
        """Finds all files, recursively, by path on the file system."""
        if not _uses_default_walk(self._fs):
            found: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
            return found
        # Do not use fsspec's own walk, which treats a directory as empty if its listing fails.
        found = {}
        directories = [self._fs._strip_protocol(self._root)]
        while directories:
            directory = directories.pop()
            # Another process may be removing the directory.
            with suppress(FileNotFoundError):
                for info in self._fs.ls(directory, detail=True):
                    name = info["name"].rstrip("/")
                    if info["type"] != "directory":
                        found[name] = info
                    elif name != directory.rstrip("/"):
                        directories.append(name)
        return found

    def _make_directory_of(self, name: str) -> None:
        # Object stores have no directories; s3fs would try to create the bucket.
        if not self._fs.async_impl:
            self._fs.makedirs(self._fs._parent(self._path_of(name)), exist_ok=True)


def _has_magic(path: str) -> bool:
    return any(character in path for character in "*?[")


def _uses_default_walk(file_system: Any) -> bool:
    """True if a file system uses fsspec's own directory walk to find files."""
    find = file_system._find if file_system.async_impl else file_system.find
    base = importlib.import_module("fsspec.asyn").AsyncFileSystem
    return getattr(find, "__func__", None) in (base._find, base.find)


@contextmanager
def _errors_with_url(operation: str, url: str) -> Iterator[None]:
    """Converts exceptions to OSError with the URL. File system packages raise their own exception
    classes, whose messages lack the URL."""
    try:
        yield
    except OSError as error:
        known = (number for kind, number in _NUMBERS if isinstance(error, kind))
        number = error.errno or next(known, errno.EIO)
        raise OSError(number, f"{operation} failed: {error}", url) from error
    except Exception as error:
        message = f"{operation} failed: {type(error).__name__}: {error}"
        raise OSError(errno.EIO, message, url) from error


def age(files: Iterable[RemoteFile]) -> float:
    """Returns the seconds since the newest file was written; 0 if the time of any file is
    unknown."""
    newest = 0.0
    for file in files:
        if file.modified is None:
            return 0.0
        newest = max(newest, file.modified)
    return time.time() - newest


def _callback(uploaded: Callable[[int], None]) -> Any:
    callbacks = importlib.import_module("fsspec.callbacks")

    class Counting(callbacks.Callback):  # type: ignore[name-defined, misc]
        def relative_update(self, inc: int = 1) -> None:
            self.value += inc
            uploaded(inc)

        def absolute_update(self, value: int) -> None:
            self.relative_update(value - self.value)

    return Counting()


def require_staging_room(directory: str, wanted: int, url: str) -> None:
    """Checks that a local directory has enough free space to stage ``wanted`` bytes of a URL.

    Raises:
        OSError: ``ENOSPC``; the message has the needed and the available space.
    """
    need = f"staging {url} needs {size(wanted)} in this directory"
    require_room(directory, wanted, need, "pass another staging_dir")
