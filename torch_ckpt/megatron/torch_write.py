"""A write task by torch's own code, for what the engine does not write.

Streams and transforms of others, which only Python can call: see ``engine_can_write`` in
saving/writer.py.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
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

from torch_ckpt import _C
from torch_ckpt.checkpoint.files import FilesBeneath
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.staged_write import (
    Results,
    Staged,
    current_stage,
    files_of,
    portable,
)
from torch_ckpt.megatron.task import ADVICE, Task, watched_in
from torch_ckpt.saving.sources import source_changed


class PythonWrite(Staged):
    """One task by torch's own code in Python threads, from copies."""

    def __init__(self, task: Task) -> None:
        self._task = task
        watched = watched_in(task)
        self._values = [
            value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for value in task.values
        ]
        self._changed = watched.changed()
        task.values = []
        self._moved = 0
        self._items_written = 0
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._first_error: BaseException | None = None
        self._outcome: Results | Exception | None = None
        # Only the first who asks for the outcome has values to write.
        self._once = threading.Lock()
        current_stage().writes.append(self)

    def outcome(self, transforms: _StorageWriterTransforms | None) -> Results | Exception:
        with self._once:
            if self._outcome is None:
                self._outcome = self._outcome_of_first(transforms or _StorageWriterTransforms())
            return self._outcome

    def cancel(self) -> None:
        self._is_cancelled = True
        self._task.ending.abort()

    def moved(self) -> int:
        return self._moved

    def state(self) -> str:
        task = self._task
        return (
            f"files {task.prefix}* in {task.directory}: writing in Python, "
            f"{self._items_written} of {len(task.items)} items written"
        )

    def _outcome_of_first(self, transforms: _StorageWriterTransforms) -> Results | Exception:
        task = self._task
        files: set[str] = set()
        try:
            task.ending.begin()
            if self._changed:
                raise source_changed(self._changed, ADVICE)
            results = self._write_all(transforms)
            files = files_of(results) if task.opened else files
            return results
        except Exception as error:
            return portable(error)
        finally:
            task.ending.end(files)
            task.opened = None

    def _write_all(self, transforms: _StorageWriterTransforms) -> Results:
        task = self._task
        files = self._files()
        with ThreadPoolExecutor(max_workers=task.options.thread_count) as threads:
            futures = [
                threads.submit(self._write_file, transforms, name, indices)
                for name, indices in files
            ]
        try:
            if self._first_error is not None:
                raise self._first_error
            self._refuse_if_cancelled()
        except BaseException:
            if task.opened is not None:
                _C.remove_files(task.opened, [name for name, _ in files])
            raise
        results = {number: future.result() for number, future in enumerate(futures)}
        if task.opened is not None and task.options.sync_files:
            task.opened.sync()
        return results

    def wrote(self, count: int) -> None:
        """Somebody has written bytes, on any thread.

        Raises:
            CheckpointError: it was cancelled.
        """
        with self._lock:
            self._moved += count
        self._refuse_if_cancelled()

    def _refuse_if_cancelled(self) -> None:
        if self._is_cancelled:
            task = self._task
            raise CheckpointError(f"files {task.prefix}* in {task.directory}: cancelled")

    def _files(self) -> list[tuple[str, list[int]]]:
        """Names, and what goes there: numbers of items."""
        task = self._task
        hint = task.options.separation_hint or ""
        numbers = {id(item): number for number, item in enumerate(task.items)}
        sides: list[tuple[str, list[WriteItem]]] = [("", task.items)]
        bins = task.options.thread_count
        if hint:
            mine = [item for item in task.items if item.index.fqn.startswith(hint)]
            rest = [item for item in task.items if not item.index.fqn.startswith(hint)]
            sides, bins = [("", rest), (hint, mine)], bins // 2
        files: list[tuple[str, list[int]]] = []
        for start, items in sides:
            if task.options.single_file_per_rank:
                buckets = _split_by_size_and_type(bins, items)
            else:
                buckets = [[item] for item in items]
            for bucket in buckets:
                # Objects first; a bucket alone keeps the plan's order.
                bucket = sorted(bucket, key=lambda item: item.type != WriteItemType.BYTE_IO)
                if bucket:
                    name = f"{start}{task.prefix}{len(files)}.distcp"
                    files.append((name, [numbers[id(item)] for item in bucket]))
        return files

    def _write_file(
        self, transforms: _StorageWriterTransforms, name: str, indices: Sequence[int]
    ) -> list[WriteResult]:
        try:
            return self._write_items(transforms, name, indices)
        except BaseException as error:
            with self._lock:
                # The other files' errors are then that they were cancelled.
                self._first_error = self._first_error or error
            self._is_cancelled = True
            return []

    def _write_items(
        self, transforms: _StorageWriterTransforms, name: str, indices: Sequence[int]
    ) -> list[WriteResult]:
        self._refuse_if_cancelled()
        task = self._task
        results = []
        with self._stream(name) as stream:
            counted = _Counted(stream, self)
            for index in indices:
                result = _write_item(
                    transforms,
                    counted,
                    self._values[index],
                    task.items[index],
                    name,
                    SerializationFormat.TORCH_SAVE,
                )
                results.append(result)
                self._values[index] = None
                with self._lock:
                    self._items_written += 1
            if task.options.sync_files:
                _sync(stream)
        return results

    def _stream(self, name: str) -> AbstractContextManager[Any]:
        task = self._task
        if task.opened is not None and task.open_file is open:
            return FilesBeneath(task.opened).create_stream(name, "wb")
        # A function of the caller's knows paths alone.
        stream: AbstractContextManager[Any] = task.open_file(
            os.path.join(task.directory, name), "wb"
        )
        return stream


class _Counted(io.RawIOBase):
    """A stream whose bytes are told."""

    def __init__(self, stream: Any, write: PythonWrite) -> None:
        self._stream = stream
        self._write = write

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._write.wrote(count)
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
        """Nothing: who has opened the stream closes it."""


def _sync(stream: io.IOBase) -> None:
    stream.flush()
    of_store = getattr(stream, "fsync", None)
    if of_store is not None:
        of_store()
    else:
        os.fsync(stream.fileno())
