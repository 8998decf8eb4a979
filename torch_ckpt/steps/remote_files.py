"""Files beneath a URL, through fsspec.

File systems that fsspec drives by coroutines (s3, gs, az, http) are used by several threads at
once, others by one at a time: not all of those bear more.
"""

from __future__ import annotations

import errno
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from torch_ckpt._base.formatting import size
from torch_ckpt._base.free_space import require_room

#: Requests under way at once.
MOST_REQUESTS = 16

# What a file system may say of a file's age, in the words of s3fs, adlfs, gcsfs, local and others.
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")

# For errors without a number.
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
        bytes: its size.
        modified: when it was written, in seconds since 1970; None where that is not told.
    """

    bytes: int
    modified: float | None


def resolve(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path on it.

    Raises:
        ImportError: the file system is in a package that is not installed; says which.
        ValueError: fsspec does not know the URL's protocol.
    """
    # Not before it is needed: fsspec is a dependency of torch's, and slow to import.
    core = importlib.import_module("fsspec.core")
    try:
        file_system, place = core.url_to_fs(url)
    except ImportError as error:
        raise ImportError(f"{url}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}; local paths have no protocol") from error
    return file_system, place


class RemoteFiles:
    """Files beneath a URL, by names relative to it.

    Safe for use by several threads at once. What fails raises ``OSError`` with the URL as its
    ``filename``; retries are the file system's own.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, place = resolve(url)
        self._place = place.rstrip("/")

    def below(self, name: str) -> RemoteFiles:
        """Those of a directory."""
        return RemoteFiles(self.url_of(name))

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def list(self) -> dict[str, RemoteFile]:
        """All files, in directories too; none where there is no such directory."""
        with _told("list", self.url):
            # Other ranks and other processes write here, too.
            self._fs.invalidate_cache()
            try:
                found = self._find()
            except FileNotFoundError:
                return {}
        return {
            name.removeprefix(self._place).lstrip("/"): RemoteFile(info["size"], modified(info))
            for name, info in found.items()
            if info["type"] == "file" and not name.endswith("/") and info["size"] is not None
        }

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """The bytes of a file, or of a range of it."""
        with _told("read", self.url_of(name)):
            data: bytes = self._fs.cat_file(self._at(name), start=begin, end=end)
        if begin is not None and end is not None and len(data) != end - begin:
            raise OSError(
                errno.EIO,
                f"read failed: asked for bytes {begin} to {end}, got {len(data)}",
                self.url_of(name),
            )
        return data

    def write(self, name: str, data: bytes) -> None:
        """Makes or replaces a file; at once, where the file system can."""
        with _told("write", self.url_of(name)):
            self._make_directory_of(name)
            self._fs.pipe_file(self._at(name), data)

    def upload(self, source: str, name: str, uploaded: Callable[[int], None]) -> None:
        """Copies a local file.

        Args:
            uploaded: called with numbers of bytes, as they have gone.
        """
        with _told("upload", self.url_of(name)):
            self._make_directory_of(name)
            self._fs.put_file(source, self._at(name), callback=_callback(uploaded))

    def download(self, name: str, target: str) -> None:
        """Copies a file to a local path."""
        with _told("download", self.url_of(name)):
            self._fs.get_file(self._at(name), target)

    def remove(self, names: Iterable[str]) -> None:
        """Removes files; those that are not there are no error."""
        places = [self._at(name) for name in names]
        if not places:
            return
        with _told("remove", self.url):
            # Names with *, ? or [ would be patterns there, which other files may match.
            if not any(map(_has_magic, places)):
                with suppress(FileNotFoundError):
                    self._fs.rm(places)
                    return
            self.for_each(self._remove_one, ((place,) for place in places))

    def remove_directory(self) -> None:
        """Removes the directory itself, where file systems have them and it is empty."""
        if not self._fs.async_impl:
            with suppress(OSError, NotImplementedError):
                self._fs.rmdir(self._place)

    def for_each(self, work: Callable[..., None], calls: Iterable[tuple[Any, ...]]) -> None:
        """Makes calls that use these files, several at once; raises the first error."""
        workers = MOST_REQUESTS if self._fs.async_impl else 1
        with ThreadPoolExecutor(workers, thread_name_prefix="torch_ckpt remote") as pool:
            futures = [pool.submit(work, *call) for call in calls]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    # --- private ---------------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self._place}/{name}"

    def _remove_one(self, place: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(place)

    def _find(self) -> dict[str, dict[str, Any]]:
        """What there is at all depths, by its path on the file system."""
        if not _walks(self._fs):
            found: dict[str, dict[str, Any]] = self._fs.find(self._place, detail=True)
            return found
        # fsspec's own walk takes a directory whose listing has failed for an empty one.
        found = {}
        directories = [self._fs._strip_protocol(self._place)]
        while directories:
            directory = directories.pop()
            # Another process may be removing it.
            with suppress(FileNotFoundError):
                for info in self._fs.ls(directory, detail=True):
                    name = info["name"].rstrip("/")
                    if info["type"] != "directory":
                        found[name] = info
                    elif name != directory.rstrip("/"):
                        directories.append(name)
        return found

    def _make_directory_of(self, name: str) -> None:
        # Object stores have none; s3fs would look whether it may make the bucket.
        if not self._fs.async_impl:
            self._fs.makedirs(self._fs._parent(self._at(name)), exist_ok=True)


def _has_magic(place: str) -> bool:
    return any(character in place for character in "*?[")


def _walks(file_system: Any) -> bool:
    """Whether it finds files by fsspec's own walk from directory to directory."""
    find = file_system._find if file_system.async_impl else file_system.find
    base = importlib.import_module("fsspec.asyn").AsyncFileSystem
    return getattr(find, "__func__", None) in (base._find, base.find)


@contextmanager
def _told(what: str, url: str) -> Iterator[None]:
    """Errors as OSError with the URL: packages have classes of their own, and texts without it."""
    try:
        yield
    except OSError as error:
        known = (number for kind, number in _NUMBERS if isinstance(error, kind))
        number = error.errno or next(known, errno.EIO)
        raise OSError(number, f"{what} failed: {error}", url) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{what} failed: {type(error).__name__}: {error}", url) from error


def modified(info: dict[str, Any]) -> float | None:
    """When a file was written, by what its file system says of it; see :class:`RemoteFile`."""
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


def age(files: Iterable[RemoteFile]) -> float:
    """Seconds since the newest of them was written; 0 where that is not told of one."""
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
    """Refuses to stage more bytes of a URL in a local directory than there is room for.

    Raises:
        OSError: ``ENOSPC``, with both numbers.
    """
    need = f"{size(wanted)} of {url} are to be staged here at once"
    require_room(directory, wanted, need, "pass another staging_dir")
