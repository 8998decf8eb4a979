"""One rank's write as an object that can be sent to another process.

1. A :class:`WriteTask` is created in the process that plans the save. Unpickling it creates another
   task with the same values.
2. ``stage`` starts the write in a thread of the process that calls it, and returns once all values
   are copied.
3. ``outcome`` waits until the write has ended. A child that was forked after ``stage`` may call it:
   only the parent has the thread, which sends the outcome to the child.
4. Either the writer claims the outcome, or the task is cancelled and its files are deleted. The
   lease on the directory is released only when the write has ended, because after that, another
   save may reuse the file names. Beneath a URL there is no lease, and no name is used twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

# At interpreter exit, its hook waits for the engine's threads.
import torch_ckpt.saving.handle  # noqa: F401
from torch_ckpt import _C, _core
from torch_ckpt._base.cuda_events import record_events
from torch_ckpt._base.exit_threads import spawn
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.directory import (
    DirectoryIdentity,
    OpenDirectory,
    require_one_directory,
)
from torch_ckpt.checkpoint.lease import DirectoryLease
from torch_ckpt.errors import CheckpointError, NotCommitted
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.items import results_of
from torch_ckpt.saving.write import Events, Written, describe_progress, write_files
from torch_ckpt.stores import open_store
from torch_ckpt.stores.folder import ObjectFolder

#: The results of each file, by file number.
Results = dict[int, list[WriteResult]]

# Advice in the error about a source that was modified while it was being staged.
_ADVICE = "Do not change it in another thread before the save is scheduled"


@dataclasses.dataclass(eq=False)
class WriteTask:
    """One rank's write; see the docstring of this module. Thread-safe.

    Attributes:
        directory: the checkpoint directory, or the URL of the checkpoint.
        prefix: prefix of this rank's file names.
        items: items of the plan.
        values: plain tensors and bytes to write for the items; empty once the task is staged.
        rank: global rank of the writer.
        ranks: number of ranks that save together.
        options: how the files are written.
        directory_identity: identity of the directory that was opened when the save began.
        opened: the opened directory or the objects, in the process that planned the save; None once
            the task is staged.
        lease: weak reference to the lease that protects the files, which the writer owns.
        background: priorities of the engine's threads; the writer's, unless a queue sets its own.
    """

    directory: str
    prefix: str
    items: list[WriteItem]
    values: list[Any]
    rank: int
    ranks: int
    options: WriteOptions
    directory_identity: DirectoryIdentity
    opened: OpenDirectory | ObjectFolder | None
    lease: weakref.ref[DirectoryLease] | None

    def __post_init__(self) -> None:
        self.background = self.options.background
        self.is_cancelled = False
        self._is_claimed = False
        self._is_writing = False
        # The lease, which a cancelled write holds until it ends.
        self._held: DirectoryLease | None = None
        # The objects beneath a URL that this process writes.
        self._objects: ObjectFolder | None = None
        self._planned_in = os.getpid()
        self._lock = threading.Lock()
        self._save: _C.Save | None = None
        self._is_staged = threading.Event()
        self._outcome: Results | Exception | None = None
        self._ended = threading.Event()
        self._pid = 0
        # Sends the outcome to children that are forked before the write has ended.
        self._children: _core.ProcessChannel | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.options.storage_options is not None:
            raise TypeError(
                f"files {self.prefix}* in {self.directory}: a save with storage_options cannot be "
                "sent to another process, because the options may contain credentials, which are "
                "never pickled. Set the credentials in the environment of the process, or call the "
                "preload function before the process is forked"
            )
        values = [_trim_for_pickle(value) for value in self.values]
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"values": values, "opened": None, "lease": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()
        # This process does not know whether the writer has claimed the results.
        self._is_claimed = True

    # --- in the process that writes --------------------------------------------------------------

    def stage(self) -> WriteTask:
        """Starts the write. Returns once all values are copied; an error becomes the outcome.

        Does nothing if the task is already staged, possibly by the parent of this process.
        """
        if self._save is None and self._outcome is None:
            self._pid = os.getpid()
            try:
                self._start()
            except Exception as error:
                self._end(make_portable(error))
            finally:
                self.values = []
                self.opened = None
        if self._pid == os.getpid():
            self._is_staged.wait()
        return self

    def outcome(self) -> Results | Exception:
        """Waits until the write has ended. Returns the results by file number, or the error."""
        if self._save is not None:
            _core.fault_point("wait for the outcome", self.directory)
        if self._pid == os.getpid():
            self._ended.wait()
        elif self._outcome is None:
            self._outcome = self._receive_outcome()
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        """Cancels the write and deletes its files, unless the writer has claimed the outcome."""
        if self._save is not None:
            self._save.cancel()
        with self._lock:
            if self._is_claimed or self.is_cancelled:
                return
            self.is_cancelled = True
            self._held = self.lease() if self.lease is not None else None
            if not self._is_writing:
                self._delete_files()

    def moved(self) -> int:
        """Returns a number that grows as long as the write makes progress."""
        if self._save is None:
            return 0
        _planned, staged, done, *_files = self._save.progress()
        return staged + done

    def describe_progress(self) -> str:
        """Describes the progress, for a message: files, phase, bytes."""
        if self._save is None:
            return f"files {self.prefix}* in {self.directory}: not staged"
        return describe_progress(self._save, self.directory, self.prefix)

    # --- in the process that planned the save ----------------------------------------------------

    def claim(self, outcome: Any) -> Any:
        """Returns the outcome, which can no longer be cancelled; returns an error if it was
        cancelled."""
        with self._lock:
            if self.is_cancelled:
                return _make_cancellation()
            self._is_claimed = True
            return outcome

    # --- private ---------------------------------------------------------------------------------

    def _start(self) -> None:
        if len(self.values) != len(self.items):
            raise CheckpointError(
                f"files {self.prefix}* in {self.directory}: the values were released when another "
                "process or an interrupted call staged them; plan the save again"
            )
        opened = self._open()
        self._objects = opened if isinstance(opened, ObjectFolder) else None
        watched, sources = _C.SourceWatch(), _C.SaveSources()
        for item, value in zip(self.items, self.values, strict=True):
            if isinstance(value, torch.Tensor):
                watched.add(item.index.fqn, value)
            sources.add(item.index.fqn, value)
        # Without a channel, only children that are forked during the save fail.
        with contextlib.suppress(OSError):
            self._children = _core.ProcessChannel()
        save, ready = _C.Save(watched), record_events(watched.devices)
        # Only the thread refers to the function, which refers to the directory and the values.
        write: list[Callable[[], Results]] = [partial(self._write, save, opened, sources, ready)]
        self._save = save
        spawn(partial(self._run, write))

    def _open(self) -> OpenDirectory | ObjectFolder:
        """Returns the save's directory or objects; reopens them by path or URL if this is not the
        process that planned the save.

        Raises:
            OSError: the directory does not exist.
            CheckpointError: the path now refers to a different directory.
        """
        if is_url(self.directory):
            if self.opened is not None and self._planned_in == os.getpid():
                return self.opened
            # A forked child cannot use the connections of its parent.
            return ObjectFolder(open_store(self.directory, self.options.storage_options))
        if self.opened is not None:
            return self.opened
        opened = OpenDirectory(self.directory)
        try:
            require_one_directory([self.directory_identity, DirectoryIdentity.of(opened)])
        except NotCommitted:
            raise CheckpointError(
                f"{self.directory}: the path no longer refers to the directory for which the save "
                "was planned, because a directory was renamed or a link in the path was changed. "
                "Nothing was written; save again"
            ) from None
        return opened

    def _run(self, function: list[Callable[[], Results]]) -> None:
        """Runs the write; the body of the writing thread."""
        outcome: Results | Exception
        try:
            with self._lock:
                if self.is_cancelled:
                    raise _make_cancellation()
                self._is_writing = True
            outcome = function.pop()()
        except BaseException as error:
            # The error's frames would keep the sources alive.
            outcome = make_portable(error)
        self._end(outcome)

    def _write(
        self,
        save: _C.Save,
        opened: OpenDirectory | ObjectFolder,
        sources: _C.SaveSources,
        ready: Events,
    ) -> Results:
        """Writes the files; see :func:`write_files`."""
        written = write_files(
            save,
            opened,
            self.prefix,
            sources,
            self.options,
            title=f"save {os.path.basename(self.directory)}",
            rank=self.rank,
            is_snapshot=True,
            background=self.background,
            # Normal priority, because the caller waits for the copies.
            low_priority_copies=False,
            ready=ready,
            ranks=self.ranks,
            children=self._children,
            advice=_ADVICE,
            on_staged=self._is_staged.set,
        )
        return _group_by_file(self.items, written)

    def _end(self, outcome: Results | Exception) -> None:
        self._outcome = outcome
        with self._lock:
            self._is_writing = False
            if self.is_cancelled:
                self._delete_files()
        try:
            self._send_to_children()
        finally:
            if self._save is not None:
                self._save.finish()
            self._is_staged.set()
            self._ended.set()

    def _delete_files(self) -> None:
        """Deletes the files of a cancelled write and ends its lease."""
        if self._objects is not None:
            self._objects.remove_written()
        lease, self._held = self._held, None
        if lease is not None and isinstance(self._outcome, dict):
            # Delete them by name: discard() deletes nothing while other ranks hold the directory.
            results = itertools.chain.from_iterable(self._outcome.values())
            lease.remove({result.storage_data.relative_path for result in results})
        if lease is not None:
            lease.discard()

    def _send_to_children(self) -> None:
        # A child that is forked from now on inherits the outcome.
        channel, self._children = self._children, None
        if channel is None or isinstance(self._outcome, dict):
            return  # the engine has sent its results
        try:
            channel.send_object(pickle.dumps(self._outcome))
        except OSError as failure:
            LOGGER.error(
                "rank %d, files %s* in %s: the save's outcome could not be sent to a forked child: "
                "%s",
                self.rank,
                self.prefix,
                self.directory,
                failure,
            )

    def _receive_outcome(self) -> Results | Exception:
        """Waits for the outcome from the parent, in a forked child."""
        files = f"files {self.prefix}* in {self.directory}"
        if self._children is None:
            return CheckpointError(
                f"{files}: process {self._pid}, which writes them, had too little memory or too "
                "few file descriptors for a channel to its children; raise its limits and save "
                "again"
            )
        try:
            # Python handles Ctrl-C only between waits.
            while (found := self._children.wait_for_files(1.0)) is None:
                pass
            if isinstance(found, bytes):
                outcome: Results | Exception = pickle.loads(found)
                return outcome
            return _group_by_file(self.items, Written(found, self.directory_identity))
        except CheckpointError as error:
            return CheckpointError(f"{files}: {error}")
        except Exception as error:
            return make_portable(error)


def tasks_in(arguments: Iterable[Any]) -> list[WriteTask]:
    """Returns the tasks among the arguments of a save function, which has them in a list."""
    lists = [argument for argument in arguments if isinstance(argument, list)]
    return [task for task in itertools.chain(*lists) if isinstance(task, WriteTask)]


def make_portable(error: BaseException) -> Exception:
    """Returns a copy of an error without frames; if the error cannot be pickled, a RuntimeError
    with its text."""
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if isinstance(copied, Exception):
        return copied
    return RuntimeError(f"{type(error).__name__}: {error}")


def _make_cancellation() -> CheckpointError:
    # A new error each time, because raising an error adds frames to it.
    return CheckpointError(
        "aborted: the write was cancelled by close(abort=True) or a timeout; save again"
    )


def _group_by_file(items: list[WriteItem], written: Written) -> Results:
    """Returns the results by file number."""
    by_file: Results = {}
    for result in results_of(items, written):
        name = result.storage_data.relative_path
        number = int(name.removesuffix(".distcp").rpartition("_")[2])
        by_file.setdefault(number, []).append(result)
    return by_file


def _trim_for_pickle(value: Any) -> Any:
    """Returns a value whose pickle contains neither a gradient nor unused parts of a storage."""
    if isinstance(value, memoryview):
        return bytes(value)
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach()
    is_part = tensor.is_cpu and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_part else tensor
