"""The objects of one checkpoint, as the files of the engine's saves and loads.

The engine calls :class:`_Files` from its own threads (csrc/engine/store.h):

1. ``write`` receives each piece of a file. The first piece starts an upload, which asks for the
   pieces in the order of the file. The call returns when the upload no longer reads the piece, and
   the call with the last piece when the object is complete.
2. ``size`` asks for the size and version of an object, once.
3. ``read`` reads a range of that version.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch_ckpt import _core
from torch_ckpt._base.log import warn
from torch_ckpt.stores.object_store import Entry, ObjectStore, Version

# Seconds between two checks that the save still runs.
_REST_SECONDS = 0.2

#: Seconds for what remains to be done at a store after a save has failed.
CLEANUP_SECONDS = 10.0


class Failing(Protocol):
    """Files whose calls may fail."""

    @property
    def error(self) -> BaseException | None:
        """The error to report; None if no call has failed."""


class Streams(Failing, Protocol):
    """Files that other ranks write: the engine's bytes are sent to these ranks."""

    def sends(self, name: str) -> bool: ...
    def write(self, name: str, piece: _core.FilePiece) -> None: ...


class StreamFolder:
    """Files that other ranks write. Stands for an open directory in the engine's calls.

    Attributes:
        path: path of the directory in which the other ranks write the files.
        files: the argument of the engine's calls.
    """

    def __init__(self, path: str, streams: Failing) -> None:
        self.path = path
        # The engine's store keeps this object alive, so the object must not refer to the folder.
        self.files = _core.Store(path, streams)
        self._streams: Failing | None = streams

    def identity(self) -> tuple[int, int, int, int]:
        """Returns zeros: the other ranks compare the directories."""
        return 0, 0, 0, 0

    def remove_written(self) -> None:
        """Does nothing: the other ranks remove what they have written."""

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Block with calls of the engine. If the engine fails because a stream has failed, raises
        the error of the stream, which has its own class."""
        try:
            yield
        except OSError:
            error = None if self._streams is None else self._streams.error
            if error is None:
                raise
            # The frames of the failed call keep memory and open files.
            raise error.with_traceback(None) from None


class ObjectFolder(StreamFolder):
    """The objects of one checkpoint. Stands for an open directory in the engine's calls.

    Args:
        store: the objects.
        streams: files that other ranks write.

    Attributes:
        path: URL of the checkpoint.
        store: the objects.
        files: the argument of the engine's calls.
        versions: the versions of the objects that :meth:`read` has read.
    """

    def __init__(self, store: ObjectStore, streams: Streams | None = None) -> None:
        self.store = store
        self.path = store.root.url
        self._streams = streams
        # The engine's store keeps this object alive, so the object must not refer to the folder.
        self._calls = _Files(store, streams)
        self.files = _core.Store(self.path, self._calls)
        self.versions: dict[str, Version] = {}

    def identity(self) -> tuple[int, int, int, int]:
        """Returns zeros: one URL is one folder on all hosts."""
        return 0, 0, 0, 0

    def read(self, name: str, limit: int) -> bytes:
        """Reads an object of at most ``limit`` bytes."""
        data, self.versions[name] = self.store.read(name, limit)
        return data

    def remove_written(self) -> None:
        """Ends unfinished uploads, and deletes the objects that this process has written. Warns if
        that fails."""
        self.remove(self._calls.end_uploads())

    def remove(self, names: Collection[str]) -> None:
        """Deletes objects of a failed save. Warns if that fails."""
        try:
            self.store.within(CLEANUP_SECONDS).delete(names)
        except OSError as error:
            warn(f"{self.path}: objects of a failed save remain: {error}")

    def close(self) -> None:
        """Ends unfinished uploads."""
        self._calls.end_uploads()

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Block with calls of the engine. If the engine fails because a request has failed, raises
        the error of that request, which has its own class."""
        errors = self._calls.errors
        errors.clear()
        try:
            with super().own_errors():
                yield
        except OSError as error:
            raise errors.get((error.errno, error.filename), error) from None


class _Files:
    """The functions that the engine calls; see the module's docstring."""

    def __init__(self, store: ObjectStore, streams: Streams | None) -> None:
        self._store = store
        self._streams = streams
        self._lock = threading.Lock()
        self._uploads: dict[str, _Upload] = {}
        self._entries: dict[str, Entry] = {}
        #: The errors of calls, by errno and URL.
        self.errors: dict[tuple[int | None, str], OSError] = {}

    def write(self, name: str, piece: _core.FilePiece) -> None:
        if self._streams is not None and self._streams.sends(name):
            return self._streams.write(name, piece)
        with self._lock:
            upload = self._uploads.get(name)
            if upload is None:
                upload = self._uploads[name] = _Upload(self._store, name, piece.file_bytes)
        with self._keeping_errors():
            upload.send(piece)
        return None

    def size(self, name: str) -> int:
        with self._lock:
            entry = self._entries.get(name)
        if entry is None:
            with self._keeping_errors():
                entry = self._store.head(name)
            with self._lock:
                entry = self._entries.setdefault(name, entry)
        return entry.bytes

    def read(self, name: str, offset: int, bytes: int) -> memoryview:
        with self._keeping_errors():
            return self._store.read_range(name, offset, bytes, self._entries[name].version)

    @contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.errors[error.errno, error.filename] = error.with_traceback(None)
            raise

    def end_uploads(self) -> list[str]:
        """Ends unfinished uploads, and returns the names of all. An object must not appear after
        its deletion, so the call waits for requests that cannot be stopped."""
        with self._lock:
            uploads, self._uploads = self._uploads, {}
        for upload in uploads.values():
            upload.stop()
        deadline = time.monotonic() + CLEANUP_SECONDS
        for upload in uploads.values():
            upload.wait(deadline - time.monotonic())
        return list(uploads)


class _Upload:
    """The upload of one object, in a thread of its own."""

    def __init__(self, store: ObjectStore, name: str, bytes: int) -> None:
        self._store = store
        self._name = name
        self._bytes = bytes
        self._changed = threading.Condition()
        # The pieces that are not yet sent, by offset.
        self._pieces: dict[int, memoryview] = {}
        self._stopped = False
        self._ended = threading.Event()
        self._error: BaseException | None = None
        thread = threading.Thread(target=self._run, name=f"upload {name}", daemon=True)
        thread.start()

    def send(self, piece: _core.FilePiece) -> None:
        """Sends a piece, and waits until the upload no longer reads the piece."""
        with self._changed:
            if not self._ended.is_set() and piece.bytes > 0:
                self._pieces[piece.offset] = piece.buffer()
                self._changed.notify_all()
        while not (piece.wait(_REST_SECONDS) or self._ended.is_set()):
            self._raise_if_cancelled(piece)
        while piece.is_last and not self._ended.wait(_REST_SECONDS):
            self._raise_if_cancelled(piece)
        if self._error is not None:
            self._pieces.clear()
            raise self._error.with_traceback(None)

    def stop(self) -> None:
        """Ends the upload, which stores nothing if it is not complete."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Waits until the upload has ended, at most for ``seconds``."""
        self._ended.wait(max(seconds, 0.0))

    def _raise_if_cancelled(self, piece: _core.FilePiece) -> None:
        # Do not wait for the store, which may not answer.
        if piece.is_cancelled or self._stopped:
            self.stop()
            raise self._cancelled()

    def _cancelled(self) -> InterruptedError:
        url = self._store.url_of(self._name)
        return InterruptedError(errno.EINTR, "upload failed: the save was cancelled", url)

    def _run(self) -> None:
        try:
            self._store.put(self._name, _Pieces(self), self._bytes)
        except BaseException as error:
            self._error = error.with_traceback(None)
        finally:
            self._ended.set()

    def take(self, offset: int) -> memoryview:
        """Waits for the piece at an offset, and returns it."""
        with self._changed:
            while offset not in self._pieces:
                if self._stopped:
                    raise self._cancelled()
                self._changed.wait()
            return self._pieces.pop(offset)


class _Pieces(Iterator[memoryview]):
    """The pieces of an upload, in order. Keeps no reference to a piece, so that the piece is free
    as soon as the store has sent it."""

    def __init__(self, upload: _Upload) -> None:
        self._upload = upload
        self._offset = 0

    def __next__(self) -> memoryview:
        if self._offset == self._upload._bytes:
            raise StopIteration
        piece = self._upload.take(self._offset)
        self._offset += piece.nbytes
        return piece
