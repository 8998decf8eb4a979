"""The folder of a checkpoint that is read: an open directory, or the objects beneath a URL.

Both kinds have the same few calls: names, sizes and contents of files. checkpoint/locating.py
searches with these calls, and the engine reads from both kinds.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch_ckpt import _core
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.marker import (
    DELETED_NAME,
    MARKER_NAME,
    STEP_NAME,
    list_run,
    read_marker,
    read_object_marker,
)
from torch_ckpt.errors import CheckpointError, Corrupt
from torch_ckpt.stores import Entry, ObjectStore, at_once, open_store
from torch_ckpt.stores.folder import ObjectFolder

_METADATA_NAME = _core.metadata_name(None)

# Size of the ranges in which a file is read.
_READ_BYTES = 8 << 20

# Web servers do not list objects, and credentials may not permit it.
_NO_LISTING = (errno.EOPNOTSUPP, errno.EACCES)

# The names that Hugging Face's libraries give to the files of a model.
_USUAL_NAMES = ("model.safetensors.index.json", "model.safetensors")


class FileStatus(NamedTuple):
    """Size of a file, and the time of the last write as a Unix timestamp; None if the store does
    not report the time."""

    bytes: int
    modified: float | None


class LocalFolder(OpenDirectory):
    """An open directory. Names are relative to the directory."""

    def is_file(self, name: str) -> bool:
        """True if there is something of this name that is not a folder."""
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return not stat.S_ISDIR(status.st_mode)

    def status(self, name: str) -> FileStatus:
        """Describes a file. Follows no link."""
        status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return FileStatus(status.st_size, status.st_mtime)

    def read(self, name: str, limit: int) -> bytes:
        """Reads a regular file. Follows no link.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: the file has more than ``limit`` bytes.
            Corrupt: it is not a regular file.
            Unsafe: it is a link.
        """
        path = os.path.join(self.path, name)
        self.refresh(name)
        try:
            stream = open(name, "rb", opener=self.open_for_read)  # noqa: SIM115
        except ValueError:
            if self.is_file(name):
                raise Corrupt(f"{path} is not a regular file") from None
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
        try:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise _too_large(path, size, limit)
            # Read to the end, because a network file system may report the size of an earlier file.
            data = stream.read()
            if len(data) > limit:
                raise _too_large(path, len(data), limit)
            return data
        finally:
            # The contents have been read, so an error from close() does not matter.
            with suppress(OSError):
                stream.close()

    def markers(self) -> dict[str, dict[str, Any] | None]:
        """Returns the marker of each step in the folder; None if the step is not complete."""
        found = {}
        for step in filter(STEP_NAME.match, self.names()):
            self.refresh(step)
            found[step] = read_marker(os.path.join(self.path, step))
        return found

    def is_step(self) -> bool:
        """False if there is no such folder, or if it is the folder of a step that is being
        deleted."""
        return True  # A deletion begins with renaming the directory.

    # Block with calls of the engine, whose errors need no translation.
    own_errors = staticmethod(nullcontext)


class RemoteFolder(ObjectFolder):
    """The objects beneath a URL, with the calls of :class:`LocalFolder`. There are no locks.

    No request is made before the first call. The engine's reads compare the version of each object
    with the version at its first read.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None) -> None:
        super().__init__(open_store(url, storage_options))
        self._storage_options = storage_options
        # Objects that have been found, by name.
        self._known: dict[str, Entry] = {}
        self._names: list[str] | None = None

    def names(self) -> list[str]:
        if self._names is not None:
            return self._names
        try:
            self._known = list_run(self.store)
        except OSError as error:
            if error.errno not in _NO_LISTING:
                raise
            if not any([self.contains(name) for name in _USUAL_NAMES]):
                raise
        if not self._known:
            raise self._nothing_here()
        self._names = [*dict.fromkeys(name.partition("/")[0] for name in self._known)]
        return self._names

    def _nothing_here(self) -> OSError:
        """Builds the error for a URL beneath which there are no objects."""
        number = errno.ENOENT
        if self.store.root.prefix:
            parent, name = os.path.split(self.path)
            if RemoteFolder(parent, self._storage_options).contains(name):
                number = errno.ENOTDIR
        return OSError(number, "there are no objects beneath this URL", self.path)

    def contains(self, name: str) -> bool:
        """True if there is an object of this name. False also if the server does not report it, for
        lack of permission: :meth:`names` then raises the error."""
        if name in self._known:
            return True
        try:
            self._known[name] = self.store.head(name)
        except (FileNotFoundError, PermissionError):
            # Without the permission to list, S3 refuses to report that an object is missing.
            return False
        return True

    def is_file(self, name: str) -> bool:
        return self.contains(name)

    def status(self, name: str) -> FileStatus:
        entry = self._known.get(name) or self.store.head(name)
        return FileStatus(entry.bytes, entry.modified)

    def length_of(self, name: str) -> int:
        return self.status(name).bytes

    def read(self, name: str, limit: int) -> bytes:
        try:
            return super().read(name, limit)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            size = self.status(name).bytes
        raise _too_large(self.store.url_of(name), size, limit)

    def markers(self) -> dict[str, dict[str, Any] | None]:
        steps = [name for name in self.names() if STEP_NAME.match(name)]
        complete = [
            step
            for step in steps
            if f"{step}/{MARKER_NAME}" in self._known
            and f"{step}/{DELETED_NAME}" not in self._known
        ]
        found = [self._known[f"{step}/{MARKER_NAME}"] for step in complete]
        read = at_once(partial(read_object_marker, self.store), found)
        markers = dict(zip(complete, read, strict=True))
        return {step: markers.get(step) for step in steps}

    def prepare(self, names: Iterable[str]) -> None:
        """Requests the sizes and versions of objects at once. Otherwise, the engine requests them
        one by one. The engine reports missing objects, and names that are not allowed."""

        def request(name: str) -> None:
            with suppress(FileNotFoundError, ValueError):
                self._calls.size(name)

        at_once(request, names)

    def share(self) -> bool:
        return True

    def is_at_path(self) -> bool:
        return True

    def is_step(self) -> bool:
        if not self.contains(DELETED_NAME):
            with suppress(FileNotFoundError, NotADirectoryError):
                return self.contains(_METADATA_NAME) or bool(names_if_listed(self))
        return False


#: The folder of a checkpoint that is read, or the root of a run.
Folder: TypeAlias = LocalFolder | RemoteFolder


def names_if_listed(folder: Folder) -> list[str]:
    """Returns the names in a folder; none if a store does not list its objects."""
    try:
        return folder.names()
    except OSError as error:
        if error.errno not in _NO_LISTING:
            raise
        return []


class RemoteFile(io.RawIOBase):
    """An object as a file that is read. All reads are of the version that existed at the start."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store = store
        self.name = name
        self._entry = store.head(name)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._entry.bytes}
        position = starts[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, f"seek to byte {position}", self._store.url_of(self.name))
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), _READ_BYTES, self._entry.bytes - self._position))
        version = self._entry.version
        target[:count] = self._store.read_range(self.name, self._position, count, version)
        self._position += count
        return count


def open_file(path: str, storage_options: Mapping[str, Any] | None = None) -> io.RawIOBase:
    """Opens a file for reading. Follows links."""
    if is_url(path):
        folder, name = os.path.split(path)
        return RemoteFile(open_store(folder, storage_options), name)
    # Without O_NONBLOCK, opening a FIFO would block until it has a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    return open(descriptor, "rb", buffering=0)


def _too_large(path: str, size: int, limit: int) -> CheckpointError:
    return CheckpointError(f"{path} is too large: it has {size} bytes, and the limit is {limit}")
