"""Reads the files of a step from the disk of this host, from other hosts, and from the root."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from typing import Protocol, TypeVar

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.system import is_url, memory_for_io
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES, METADATA_NAME
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.options import DEFAULT_READ_OPTIONS, ReadOptions
from torch_ckpt.stores import Entry, ObjectStore, open_store
from torch_ckpt.stores.folder import StreamFolder

T = TypeVar("T")


class Files(Protocol):
    """Files that the engine reads in a load (csrc/engine/store.h)."""

    def size(self, name: str) -> int: ...
    def read(self, name: str, offset: int, bytes: int) -> memoryview: ...
    def close(self) -> None: ...


class TierSource(Source):
    """A step whose files are in several places.

    Args:
        path: directory or URL of the step beneath the root, for messages.
        places: functions that open the places. :meth:`open` calls them, so that an error of one
            rank ends the load of all ranks. A file is read from the first place that has it. The
            places are closed with this object.
        options: see :class:`torch_ckpt.ReadOptions`.
    """

    def __init__(
        self, path: str, places: Sequence[Callable[[], Files]], options: ReadOptions
    ) -> None:
        super().__init__(path, options)
        self._places = places

    def _open(self, names: Sequence[str]) -> tuple[bytes, str]:
        folder = _TierFolder(str(self.path), _opened(self._places))
        self.directory = folder  # type: ignore[assignment]  # has the calls that a load makes
        data = folder.read(METADATA_NAME, MAX_METADATA_BYTES)
        return data, os.path.join(folder.path, METADATA_NAME)


def _opened(places: Sequence[Callable[[], Files]]) -> list[Files]:
    """Opens the places that exist; a process may have deleted one of several.

    Raises:
        OSError: no place can be opened.
    """
    opened: list[Files] = []
    failure: OSError | None = None
    for place in places:
        try:
            opened.append(place())
        except OSError as error:
            LOGGER.warning("%s; another host or the root may have the files", error)
            failure = error
    if failure is not None and not opened:
        raise failure
    return opened


class _TierFolder(StreamFolder):
    """The folder of a :class:`TierSource`. Stands for an open directory in the engine's calls."""

    def __init__(self, path: str, places: Sequence[Files]) -> None:
        self._files = _FilesInPlaces(places)
        super().__init__(path, self._files)

    def read(self, name: str, limit: int) -> bytes:
        """Reads a file of at most ``limit`` bytes."""
        count = self._files.size(name)
        if count > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.path.join(self.path, name))
        return bytes(self._files.read(name, 0, count))

    def close(self) -> None:
        """Closes all places."""
        self._files.close()


class _FilesInPlaces:
    """Files of several places.

    Attributes:
        error: the last error of a file that no place can read.
    """

    def __init__(self, places: Sequence[Files]) -> None:
        self.error: OSError | None = None
        self._places = places
        self._lock = threading.Lock()
        # The places that are left for each file.
        self._left: dict[str, list[Files]] = {}

    def write(self, name: str, piece: _core.FilePiece) -> None:
        raise AssertionError("a load writes nothing")

    def size(self, name: str) -> int:
        return self._first(name, lambda place: place.size(name))

    def read(self, name: str, offset: int, bytes: int) -> memoryview:
        def read(place: Files) -> memoryview:
            place.size(name)
            return place.read(name, offset, bytes)

        return self._first(name, read)

    def close(self) -> None:
        for place in self._places:
            place.close()

    def _first(self, name: str, call: Callable[[Files], T]) -> T:
        """Calls a function with the first place that has the file. After an error, removes the
        place for this file, and calls the function with the next one."""
        while True:
            with self._lock:
                left = self._left.setdefault(name, list(self._places))
                place = left[0]
            try:
                return call(place)
            except OSError as error:
                with self._lock:
                    if left[0] is place:
                        if len(left) == 1:
                            self.error = error.with_traceback(None)
                            raise
                        del left[0]
                if not isinstance(error, FileNotFoundError):
                    LOGGER.warning("%s; another host or the root may have the file", error)


class DirectoryFiles:
    """The files of a directory, which the caller closes. Several threads may read at once.

    Args:
        directory: the directory.
        names: the files that can be read; None means all.
    """

    def __init__(self, directory: OpenDirectory, names: Collection[str] | None = None) -> None:
        self._directory = directory
        self._names = names
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}

    def write(self, name: str, piece: _core.FilePiece) -> None:
        raise AssertionError("nothing is written here")

    def size(self, name: str) -> int:
        if self._names is not None and name not in self._names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        with self._lock:
            if name not in self._descriptors:
                self._descriptors[name] = self._directory.open_for_read(name)
            return os.fstat(self._descriptors[name]).st_size

    def read(self, name: str, offset: int, bytes: int) -> memoryview:
        data = memory_for_io(bytes)
        if os.preadv(self._descriptors[name], [data], offset) != bytes:
            path = os.path.join(self._directory.path, name)
            raise OSError(errno.EIO, "the file has become shorter", path)
        return data

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class PathFiles(DirectoryFiles):
    """The files of the directory at a path, under the shared lock.

    Args:
        names: see :class:`DirectoryFiles`.
    """

    def __init__(self, path: str, names: Collection[str] | None = None) -> None:
        super().__init__(share_or_warn(OpenDirectory(path)), names)

    def close(self) -> None:
        super().close()
        self._directory.close()


class ObjectFiles:
    """The objects beneath a URL. All reads of an object are of the version that was found first.

    Args:
        store: the objects.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._entries: dict[str, Entry] = {}

    def size(self, name: str) -> int:
        if name not in self._entries:
            self._entries.setdefault(name, self._store.head(name))
        return self._entries[name].bytes

    def read(self, name: str, offset: int, bytes: int) -> memoryview:
        return self._store.read_range(name, offset, bytes, self._entries[name].version)

    def close(self) -> None:
        """Does nothing."""


def files_at(path: str, options: ReadOptions) -> Files:
    """Opens the files of a directory or URL."""
    if is_url(path):
        return ObjectFiles(open_store(path, options.storage_options))
    return PathFiles(path)


def first_fault(
    directory: OpenDirectory, index: _core.CheckpointIndex, names: Collection[str]
) -> str:
    """Verifies some files of a directory against their checksums.

    Args:
        index: the metadata.
        names: the files.

    Returns:
        A description of the first fault; empty if there is none.
    """
    with closing(DirectoryFiles(directory, names)) as files:
        try:
            found = _verify(_InStore(directory.path, files), index)
        except OSError as error:
            return str(error)
    fault = next(iter(found.faults), None)
    return "" if fault is None else f"{os.path.join(directory.path, fault.file)}: {fault.what}"


def faulty_files(directory: OpenDirectory, index: _core.CheckpointIndex) -> set[str]:
    """Returns the names of the files in a directory that are damaged or cannot be read.

    Args:
        index: the metadata.
    """
    return {fault.file for fault in _verify(directory, index).faults}


class _InStore:
    """Stands for an open directory in the engine's calls."""

    def __init__(self, path: str, files: DirectoryFiles) -> None:
        self.files = _core.Store(path, files)


def _verify(
    directory: OpenDirectory | _InStore, index: _core.CheckpointIndex
) -> _core.CheckpointVerification:
    verification = _core.CheckpointVerification(directory)
    verification.add(index)
    verification.run(DEFAULT_READ_OPTIONS, None)
    return verification
