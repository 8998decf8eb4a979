"""What one rank is to write, as something that can be sent to where it is written.

A :class:`WriteTask` is staged: its values are copied, on and by the process that stages it. What
that gives, a :class:`Staged`, is asked for the outcome, perhaps in a child that was forked since:
the engine goes on in the parent, which has the threads, and the child waits for a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, ClassVar

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
from torch_ckpt.background import Background, EngineOptions
from torch_ckpt.errors import CheckpointError, SourceChanged
from torch_ckpt.generations import remove_files
from torch_ckpt.host_memory import default_snapshot_bytes
from torch_ckpt.metrics import LOGGER
from torch_ckpt.results import is_alive, place_for_files
from torch_ckpt.snapshot import event_of_now, spawn
from torch_ckpt.sources import version_of
from torch_ckpt.writer import FileSystemWriter, Written, results_of

#: By file: its number, and what was written to it.
Results = dict[int, list[WriteResult]]

# How often a forked child looks for its parent's outcome.
_LOOK_SECONDS = 0.02


@dataclasses.dataclass
class Stage:
    """What is staged in a ``with`` block of it.

    Attributes:
        background: how the engine's threads behave; None: as the writer says.
        writes: that have been begun, the last one perhaps not staged yet.
    """

    background: Background | None = None
    writes: list[Staged] = dataclasses.field(default_factory=list)

    def __enter__(self) -> Stage:
        self._token = _stage.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stage.reset(self._token)


_stage: ContextVar[Stage] = ContextVar("torch_ckpt_stage")


@dataclasses.dataclass
class WriteTask:
    """What one rank is to write. Can be pickled; tensors then go as the pickler sends them.

    Attributes:
        directory: of the checkpoint.
        prefix: of the names of this rank's files.
        items: of the plan.
        values: of the items: what ``write_values`` takes, or torch's writing in Python.
        rank: of the writer.
        by_engine: False: in Python, by torch's own code.
        ranks: how many save together.
        options: of the ``FileSystemWriter`` that writes.
        open_file: opens files in Python.
    """

    directory: str
    prefix: str
    items: list[WriteItem]
    values: list[Any]
    rank: int
    ranks: int
    by_engine: bool
    options: dict[str, Any]
    open_file: Callable[..., Any] = open

    def __getstate__(self) -> dict[str, Any]:
        values = [_sendable(value) for value in self.values]
        # Bars and callbacks belong to the process of the caller.
        options = self.options | {"progress": None}
        return self.__dict__ | {"values": values, "options": options}

    def stage(self) -> Staged:
        """Returns when the values are not needed any more; what fails is the outcome's to tell."""
        try:
            return EngineWrite(self) if self.by_engine else PythonWrite(self)
        except Exception as error:
            return NotBegun(portable(error))


class Staged:
    """A write whose sources are not needed any more."""

    def outcome(self, transforms: _StorageWriterTransforms | None) -> Results | Exception:
        """Waits for the end; the results by file number, or why there are none. Never raises."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Makes it fail, unless it has ended, and leave no file."""

    def moved(self) -> int:
        """Grows for as long as anything moves."""
        return 0

    def state(self) -> str:
        """What it is doing, for a message: files, phase, bytes."""
        return "writing"


# Outcomes for children: those of the last saves.
_relays: deque[str] = deque()
_MOST_RELAYS = 16


class NotBegun(Staged):
    """A write that has failed before its first byte."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def outcome(self, transforms: _StorageWriterTransforms | None) -> Results | Exception:
        return self._error


class EngineWrite(Staged):
    """One task in the engine of this process; see ``BackgroundWrite`` in writer.py."""

    # Whose outcome a forked child may want.
    _under_way: ClassVar[weakref.WeakSet[EngineWrite]] = weakref.WeakSet()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, task: WriteTask) -> None:
        self._task = task
        self._pid = os.getpid()
        self._relay = ""
        self._save: _C.Save | None = None
        self._is_cancelled = False
        self._outcome: Results | Exception | None = None
        self._staged = threading.Event()
        self._ended = threading.Event()
        stage = _stage.get(Stage())
        self._background = stage.background
        stage.writes.append(self)
        tensors = [value for value in task.values if isinstance(value, torch.Tensor)]
        self._versions = [version_of(tensor) for tensor in tensors]
        self._tensors = tensors
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._ready = [event_of_now(device) for device in devices]
        with self._lock:
            self._under_way.add(self)
        spawn(self._run)
        self._staged.wait()

    def outcome(self, transforms: _StorageWriterTransforms | None = None) -> Results | Exception:
        if os.getpid() == self._pid:
            self._ended.wait()
        elif self._outcome is None:
            self._outcome = self._outcome_of_parent()
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        self._is_cancelled = True
        # Its thread lets go of it at the end.
        save = self._save
        if save is not None:
            save.cancel()

    def moved(self) -> int:
        save = self._save
        return 0 if save is None else sum(save.progress()[1:])

    def state(self) -> str:
        save = self._save
        if save is None:
            return f"files {self._task.prefix}* in {self._task.directory}: before the first byte"
        planned, staged, written, files, done = save.progress()
        phase = "staging" if staged < planned else "writing" if written < planned else "fsync"
        unfinished = ", ".join(
            f"{name}: {doing}, {so_far} of {size} bytes"
            for name, doing, so_far, size in save.unfinished()
        )
        return (
            f"{', '.join(save.file_names)} in {self._task.directory}: {phase}, "
            f"{written} of {planned} bytes written, {done} of {files} files done"
            + (f"; {unfinished}" if unfinished else "")
        )

    # --- for FileSystemWriter.write_values -------------------------------------------------------

    def engine_options(self) -> EngineOptions:
        return EngineOptions(
            self._background or self._task.options["background"],
            snapshot=True,
            # The caller waits for them.
            quiet_stagers=False,
            max_host_bytes=default_snapshot_bytes(self._task.ranks),
            ready=[(device.index, event.cuda_event) for event, device in self._ready],
        )

    def started(self, save: _C.Save) -> None:
        self._save = save
        if self._is_cancelled:
            save.cancel()

    def sources_copied(self) -> None:
        tensors, self._tensors = self._tensors, []
        changed = [version_of(t) for t in tensors] != self._versions
        self._task.values = []
        if changed:
            raise _source_changed(self._task)
        self._staged.set()

    # --- private ---------------------------------------------------------------------------------

    def _run(self) -> None:
        task = self._task
        try:
            writer = FileSystemWriter(task.directory, **task.options)
            writer.rank = task.rank
            names = [item.index.fqn for item in task.items]
            # A list of its own: it is emptied.
            values, task.values = task.values, []
            written = writer.write_values(task.prefix, names, values, self)
            self._outcome = _by_file(task.items, written)
        except BaseException as error:
            # With its frames it would keep the sources.
            self._outcome = portable(error)
        finally:
            self._tensors = []
            self._ready = []
            self._save = None
            try:
                if self._relay:
                    self._tell_child(self._relay)
            finally:
                self._staged.set()
                self._ended.set()

    def _tell_child(self, relay: str) -> None:
        part = f"{relay}.part"
        try:
            with open(part, "wb") as file:
                pickle.dump(self._outcome, file)
        except OSError as error:
            LOGGER.error("a forked child cannot be told how its save has ended: %s", error)
            # What is empty tells that there was something.
            with contextlib.suppress(OSError):
                os.truncate(part, 0)
        with contextlib.suppress(OSError):
            os.rename(part, relay)

    def _outcome_of_parent(self) -> Results | Exception:
        what = f"the process that writes {self._task.prefix}* in {self._task.directory}"
        if not self._relay:
            return CheckpointError(
                f"{what} could not make a file for its outcome when it forked this one: look at "
                "the space in the directory for temporary files"
            )
        is_there = True
        while not os.path.exists(self._relay):
            if not is_there:
                # Looked at once more since it was seen to be gone.
                return CheckpointError(f"{what} has died, or its temporary files were removed")
            is_there = is_alive(self._pid) and os.path.isdir(os.path.dirname(self._relay))
            time.sleep(_LOOK_SECONDS)
        with open(self._relay, "rb+") as file:
            data = file.read()
            # It stays until the parent ends, and there is one for each save.
            file.truncate(0)
        if not data:
            return CheckpointError(
                f"another child of {what} has taken its outcome, or there was no space for it in "
                f"{os.path.dirname(self._relay)}"
            )
        outcome: Results | Exception = pickle.loads(data)
        return outcome

    @classmethod
    def before_fork(cls) -> None:
        """Gives each write that has not ended a place for what the child may ask for."""
        with cls._lock:
            under_way = list(cls._under_way)
        for write in under_way:
            # Who has ended has its outcome in memory, which the child gets.
            if write._outcome is None and not write._relay:
                write._relay = place_for_files()
                _relays.append(write._relay)
        # A fork that is not about a save leaves one, too.
        while len(_relays) > _MOST_RELAYS:
            with contextlib.suppress(OSError):
                os.unlink(_relays.popleft())

    @classmethod
    def after_fork(cls) -> None:
        """In the child: another thread of the parent may have held the lock."""
        cls._lock = threading.Lock()


os.register_at_fork(before=EngineWrite.before_fork, after_in_child=EngineWrite.after_fork)


class PythonWrite(Staged):
    """One task by torch's own code in Python threads, from copies."""

    def __init__(self, task: WriteTask) -> None:
        self._task = task
        tensors = [value for value in task.values if isinstance(value, torch.Tensor)]
        versions = [version_of(tensor) for tensor in tensors]
        self._values = [
            value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            for value in task.values
        ]
        self._has_changed = [version_of(tensor) for tensor in tensors] != versions
        task.values = []
        self._moved = 0
        self._items_written = 0
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._first_error: BaseException | None = None
        _stage.get(Stage()).writes.append(self)

    def outcome(self, transforms: _StorageWriterTransforms | None) -> Results | Exception:
        try:
            if self._has_changed:
                raise _source_changed(self._task)
            return self._write_all(transforms or _StorageWriterTransforms())
        except Exception as error:
            return portable(error)

    def cancel(self) -> None:
        self._is_cancelled = True

    def moved(self) -> int:
        return self._moved

    def state(self) -> str:
        task = self._task
        return (
            f"files {task.prefix}* in {task.directory}: writing in Python, "
            f"{self._items_written} of {len(task.items)} items written"
        )

    def _write_all(self, transforms: _StorageWriterTransforms) -> Results:
        task = self._task
        files = self._files()
        with ThreadPoolExecutor(max_workers=task.options["thread_count"]) as threads:
            futures = [
                threads.submit(self._write_file, transforms, name, indices)
                for name, indices in files
            ]
        try:
            if self._first_error is not None:
                raise self._first_error
            self._refuse_if_cancelled()
        except BaseException:
            if _is_local(task):
                remove_files(task.directory, [name for name, _ in files])
            raise
        results = {number: future.result() for number, future in enumerate(futures)}
        if _is_local(task) and task.options["sync_files"]:
            _C.sync_directory(task.directory)
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
        hint: str = task.options["separation_hint"] or ""
        numbers = {id(item): number for number, item in enumerate(task.items)}
        sides: list[tuple[str, list[WriteItem]]] = [("", task.items)]
        bins: int = task.options["thread_count"]
        if hint:
            mine = [item for item in task.items if item.index.fqn.startswith(hint)]
            rest = [item for item in task.items if not item.index.fqn.startswith(hint)]
            sides, bins = [("", rest), (hint, mine)], bins // 2
        files: list[tuple[str, list[int]]] = []
        for start, items in sides:
            if task.options["single_file_per_rank"]:
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
        with task.open_file(os.path.join(task.directory, name), "wb") as stream:
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
            if task.options["sync_files"]:
                _sync(stream)
        return results


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


def _by_file(items: list[WriteItem], written: Written) -> Results:
    """The results by the number of the file."""
    by_file: Results = {}
    for result in results_of(items, written):
        by_file.setdefault(_number_of(result.storage_data.relative_path), []).append(result)
    return by_file


def _sendable(value: Any) -> Any:
    """A value without what a pickle of it would have besides: gradients, the rest of a storage."""
    if isinstance(value, memoryview):
        return bytes(value)
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    is_part = tensor.is_cpu and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_part else tensor


def _number_of(file_name: str) -> int:
    return int(file_name.removesuffix(".distcp").rpartition("_")[2])


def portable(error: BaseException) -> Exception:
    """The same error without frames, or its text where it is none that can be sent."""
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if isinstance(copied, Exception):
        return copied
    return RuntimeError(f"{type(error).__name__}: {error}")


def _source_changed(task: WriteTask) -> SourceChanged:
    return SourceChanged(
        f"tensors were written to while they were staged for {task.directory}, so nothing is "
        "saved; no other thread may change them before the save is scheduled"
    )


def _sync(stream: io.IOBase) -> None:
    stream.flush()
    of_store = getattr(stream, "fsync", None)
    if of_store is not None:
        of_store()
    else:
        os.fsync(stream.fileno())


def _is_local(task: WriteTask) -> bool:
    return os.path.isdir(task.directory)
