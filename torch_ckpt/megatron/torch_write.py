"""One rank's write through torch's own code, for streams and transforms that only Python can call.

See ``engine_can_write`` in saving/writer.py.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _split_by_size_and_type,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from torch_ckpt import _C, _core
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.file_system import FilesBeneath
from torch_ckpt.errors import CheckpointError
from torch_ckpt.saving.rank_write import WriteOptions
from torch_ckpt.saving.snapshots import source_changed

#: The results of each file, by file number.
Results = dict[int, list[WriteResult]]

#: Advice in the error about a source that was modified while it was being staged.
ADVICE = "Do not change it in another thread before the save is scheduled"


class TorchWrite:
    """One rank's write of copied values, in Python threads.

    Args:
        items: items of the plan.
        values: the items' values, which the constructor copies.
        watched: detects changes to the tensors among the values.
        options: how the files are written.
        directory: the checkpoint directory.
        prefix: prefix of the file names.
        opened: the opened directory; None if it is not local.
        open_file: function that opens a file by its path.
    """

    def __init__(
        self,
        items: list[WriteItem],
        values: list[Any],
        watched: _C.SourceWatch,
        options: WriteOptions,
        directory: str,
        prefix: str,
        opened: OpenDirectory | None,
        open_file: Callable[..., Any],
    ) -> None:
        self._items = items
        self._values = [
            value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for value in values
        ]
        self._changed = watched.changed()
        self._options = options
        self._directory = directory
        self._prefix = prefix
        self._opened = opened
        self._open_file = open_file
        self._moved = 0
        self._items_written = 0
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._first_error: BaseException | None = None

    def run(self, transforms: _StorageWriterTransforms) -> Results:
        """Writes all files and blocks until they are written. Must be called only once.

        Raises:
            SourceChanged: a source was modified before it was copied.
        """
        try:
            if self._changed:
                raise source_changed(self._changed, ADVICE)
            return self._write_all(transforms)
        finally:
            self._opened = None

    def cancel(self) -> None:
        """Makes the write fail and remove its files, unless it has already ended."""
        self._is_cancelled = True

    def moved(self) -> int:
        """Returns a number that grows as long as the write makes progress."""
        return self._moved

    def state(self, where: str, prefix: str) -> str:
        """Returns a description of the progress, for use in messages."""
        return (
            f"files {prefix}* in {where}: writing in Python, "
            f"{self._items_written} of {len(self._items)} items written"
        )

    def _write_all(self, transforms: _StorageWriterTransforms) -> Results:
        files = self._assign_files()
        with ThreadPoolExecutor(max_workers=self._options.thread_count) as threads:
            futures = [
                threads.submit(self._write_file, transforms, name, indices)
                for name, indices in files
            ]
        try:
            if self._first_error is not None:
                raise self._first_error
            self._refuse_if_cancelled()
        except BaseException:
            if self._opened is not None:
                _core.remove_files(self._opened, [name for name, _ in files])
            raise
        results = {number: future.result() for number, future in enumerate(futures)}
        if self._opened is not None and self._options.sync_files:
            self._opened.sync()
        return results

    def record_bytes(self, count: int) -> None:
        """Counts bytes that a thread has written.

        Raises:
            CheckpointError: the write was cancelled.
        """
        with self._lock:
            self._moved += count
        self._refuse_if_cancelled()

    def _refuse_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise CheckpointError(
                f"files {self._prefix}* in {self._directory}: the write was cancelled; save again"
            )

    def _assign_files(self) -> list[tuple[str, list[int]]]:
        """Returns the file names, each with the indices of its items."""
        hint = self._options.separation_hint or ""
        numbers = {id(item): number for number, item in enumerate(self._items)}
        sides: list[tuple[str, list[WriteItem]]] = [("", self._items)]
        bins = self._options.thread_count
        if hint:
            separate = [item for item in self._items if item.index.fqn.startswith(hint)]
            remaining = [item for item in self._items if not item.index.fqn.startswith(hint)]
            sides, bins = [("", remaining), (hint, separate)], bins // 2
        files: list[tuple[str, list[int]]] = []
        for start, items in sides:
            if self._options.single_file_per_rank:
                buckets = _split_by_size_and_type(bins, items)
            else:
                buckets = [[item] for item in items]
            for bucket in buckets:
                # Write objects first. A single bucket is still in the plan's order.
                bucket = sorted(bucket, key=lambda item: item.type != WriteItemType.BYTE_IO)
                if bucket:
                    name = f"{start}{self._prefix}{len(files)}.distcp"
                    files.append((name, [numbers[id(item)] for item in bucket]))
        return files

    def _write_file(
        self, transforms: _StorageWriterTransforms, name: str, indices: Sequence[int]
    ) -> list[WriteResult]:
        try:
            return self._write_items(transforms, name, indices)
        except BaseException as error:
            with self._lock:
                # Later errors only report that the write was cancelled.
                self._first_error = self._first_error or error
            self._is_cancelled = True
            return []

    def _write_items(
        self, transforms: _StorageWriterTransforms, name: str, indices: Sequence[int]
    ) -> list[WriteResult]:
        self._refuse_if_cancelled()
        results = []
        with self._open_stream(name) as stream:
            counting = _CountingStream(stream, self)
            for index in indices:
                result = _write_item(
                    transforms,
                    counting,
                    self._values[index],
                    self._items[index],
                    name,
                    SerializationFormat.TORCH_SAVE,
                )
                results.append(result)
                self._values[index] = None
                with self._lock:
                    self._items_written += 1
            if self._options.sync_files:
                _sync(stream)
        return results

    def _open_stream(self, name: str) -> AbstractContextManager[Any]:
        if self._opened is not None and self._open_file is open:
            return FilesBeneath(self._opened).create_stream(name, "wb")
        # The caller's function can only open files by their paths.
        stream: AbstractContextManager[Any] = self._open_file(
            os.path.join(self._directory, name), "wb"
        )
        return stream


class _CountingStream(io.RawIOBase):
    """Stream that reports the number of written bytes to a ``TorchWrite``."""

    def __init__(self, stream: Any, write: TorchWrite) -> None:
        self._stream = stream
        self._write = write

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._write.record_bytes(count)
        self._stream.write(data)
        return count

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        position: int = self._stream.tell()
        return position

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        descriptor: int = self._stream.fileno()
        return descriptor

    def close(self) -> None:
        """Does nothing: the code that opened the stream closes it."""


def _sync(stream: io.IOBase) -> None:
    stream.flush()
    sync_store = getattr(stream, "fsync", None)  # multistorageclient's streams have it
    if sync_store is not None:
        sync_store()
    else:
        os.fsync(stream.fileno())


def dequantize(value: Any) -> Any:
    """Dequantizes a tensor whose class has its own ``dequantize``, which torch's format cannot
    store.

    Returns any other value unchanged.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) and kind.dequantize is not torch.Tensor.dequantize:
        return value.dequantize()
    return value
