"""One rank's write through torch's own code, for streams and transforms that only Python can call.

See ``engine_can_write`` in saving/writer.py.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.snapshots import source_changed

#: The results of each file, by file number.
Results = dict[int, list[WriteResult]]

#: Advice in the error about a source that was modified while it was being staged.
ADVICE = "Do not change it in another thread before the save is scheduled"


@dataclasses.dataclass(eq=False)
class TorchWrite:
    """One rank's write of copied values, in Python threads. Has the methods of
    ``EngineWrite`` that a :class:`WriteTask` uses.

    Attributes:
        items: items of the plan.
        values: the items' values, which are copied.
        watched: detects changes to the tensors among the values.
        options: how the files are written.
        transforms: torch's stream transforms.
        directory: the checkpoint directory.
        prefix: prefix of the file names.
        opened: the opened directory; None if it is not local.
        open_file: function that opens a file by its path.

    Raises:
        SourceChanged: a source was modified before it was copied.
    """

    items: list[WriteItem]
    values: dataclasses.InitVar[list[Any]]
    watched: dataclasses.InitVar[_C.SourceWatch]
    options: WriteOptions
    transforms: _StorageWriterTransforms
    directory: str
    prefix: str
    opened: OpenDirectory | None
    open_file: Callable[..., Any]

    def __post_init__(self, values: list[Any], watched: _C.SourceWatch) -> None:
        self._copies = {
            id(item): value.detach().to("cpu", copy=True)
            if isinstance(value, torch.Tensor)
            else value
            for item, value in zip(self.items, values, strict=True)
        }
        if changed := watched.changed():
            raise source_changed(changed, ADVICE)
        self._moved = 0
        self._items_written = 0
        self._lock = threading.Lock()
        self._is_cancelled = False

    def run(self) -> Results:
        """Writes all files and blocks until they are written. Must be called only once."""
        files = self._assign_files()
        try:
            with ThreadPoolExecutor(self.options.files) as threads:
                futures = [threads.submit(self._write_file, *file) for file in files]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                errors = [error for future in done if (error := future.exception())]
                if errors:
                    self.cancel()
                    raise errors[0]
            self._refuse_if_cancelled()
        except BaseException:
            if self.opened is not None:
                _core.remove_files(self.opened, [name for name, _ in files])
            raise
        if self.opened is not None and self.options.sync_files:
            self.opened.sync()
        return {number: future.result() for number, future in enumerate(futures)}

    def close(self) -> None:
        """Releases the directory: the write has ended."""
        self.opened = None

    def wait_staged(self) -> None:
        """Returns at once, because the constructor has copied the values."""

    def cancel(self) -> None:
        """Makes the write fail and remove its files, unless it has already ended."""
        self._is_cancelled = True

    def moved(self) -> int:
        """Returns a number that grows as long as the write makes progress."""
        return self._moved

    def describe_progress(self, where: str, prefix: str) -> str:
        """Returns a description of the progress, for use in messages."""
        return (
            f"files {prefix}* in {where}: writing in Python, "
            f"{self._items_written} of {len(self.items)} items written"
        )

    # --- private ---------------------------------------------------------------------------------

    def _refuse_if_cancelled(self) -> None:
        if self._is_cancelled:
            raise CheckpointError(
                f"files {self.prefix}* in {self.directory}: the write was cancelled; save again"
            )

    def _assign_files(self) -> list[tuple[str, list[WriteItem]]]:
        """Returns the file names, each with its items."""
        hint, bins = self.options.separation_hint, self.options.files
        groups = {"": self.items}
        if hint:
            matches = [item.index.fqn.startswith(hint) for item in self.items]
            for start in ("", hint):
                groups[start] = [
                    i for i, m in zip(self.items, matches, strict=True) if m is bool(start)
                ]
            bins //= 2
        files: list[tuple[str, list[WriteItem]]] = []
        for start, items in groups.items():
            if self.options.single_file_per_rank:
                buckets = _split_by_size_and_type(bins, items)
            else:
                buckets = [[item] for item in items]
            for bucket in filter(None, buckets):
                # Write objects first. A single bucket is still in the plan's order.
                bucket.sort(key=lambda item: item.type != WriteItemType.BYTE_IO)
                files.append((f"{start}{self.prefix}{len(files)}.distcp", bucket))
        return files

    def _write_file(self, name: str, items: list[WriteItem]) -> list[WriteResult]:
        self._refuse_if_cancelled()
        results = []
        with self._open_stream(name) as stream:
            counting: Any = _CountingStream(stream, self._count)
            for item in items:
                value = self._copies.pop(id(item))
                results.append(
                    _write_item(
                        self.transforms,
                        counting,
                        value,
                        item,
                        name,
                        SerializationFormat.TORCH_SAVE,
                    )
                )
                with self._lock:
                    self._items_written += 1
            if self.options.sync_files:
                stream.flush()
                # multistorageclient's streams have a method.
                getattr(stream, "fsync", lambda: os.fsync(stream.fileno()))()
        return results

    def _count(self, bytes_written: int) -> None:
        with self._lock:
            self._moved += bytes_written
        self._refuse_if_cancelled()

    def _open_stream(self, name: str) -> AbstractContextManager[Any]:
        if self.opened is not None and self.open_file is open:
            return FilesBeneath(self.opened).create_stream(name, "wb")
        # The caller's function can only open files by their paths.
        stream: AbstractContextManager[Any] = self.open_file(
            os.path.join(self.directory, name), "wb"
        )
        return stream


class _CountingStream:
    """Stream that reports the number of bytes before it writes them."""

    def __init__(self, stream: Any, count: Callable[[int], None]) -> None:
        self._stream = stream
        self._count = count

    def write(self, data: Any) -> int:
        length = memoryview(data).nbytes
        self._count(length)
        self._stream.write(data)
        return length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def dequantize(value: Any) -> Any:
    """Dequantizes a tensor whose class has its own ``dequantize``, which torch's format cannot
    store.

    Returns any other value unchanged.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor) and kind.dequantize is not torch.Tensor.dequantize:
        return value.dequantize()
    return value
