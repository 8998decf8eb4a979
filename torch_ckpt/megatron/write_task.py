"""What one rank is to write, as something that can be sent to where it is written.

1. A :class:`WriteTask` is made where the save is planned. It can be pickled, and is then another
   task with the same values.
2. ``stage`` begins the write in the process that calls it. It returns when all values are copied.
3. ``outcome`` waits for the end, perhaps in a child that was forked since: the engine goes on in
   the parent, which has the threads, and sends the results to the child.
4. Either the writer takes the outcome, or somebody cancels the task, which then leaves no file.
   The leases on the directory are given back when the write has ended: another save may have the
   files' names afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.planner import WriteItem

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import OpenDirectory, Place
from torch_ckpt.checkpoint.lease import DirectoryLease
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.torch_write import ADVICE, Results, TorchWrite
from torch_ckpt.saving.background import Background
from torch_ckpt.saving.items import Written, results_of
from torch_ckpt.saving.rank_write import RankWrite, WriteOptions
from torch_ckpt.saving.running_saves import spawn
from torch_ckpt.saving.sources import Watched


@dataclasses.dataclass
class Stage:
    """What is staged in a ``with`` block of it.

    Attributes:
        background: how the engine's threads behave; None: as the writer says.
        writes: tasks that have begun, the last one perhaps not staged yet.
    """

    background: Background | None = None
    writes: list[WriteTask] = dataclasses.field(default_factory=list)

    def __enter__(self) -> Stage:
        self._token = _stage.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stage.reset(self._token)


_stage: ContextVar[Stage] = ContextVar("torch_ckpt_stage")


@dataclasses.dataclass(eq=False)
class WriteTask:
    """One rank's write; see the head of this file. Safe for use by several threads.

    What is staged is a sequence in Megatron's shape; this one has one element, itself.

    Attributes:
        directory: of the checkpoint.
        prefix: of the names of this rank's files.
        items: of the plan.
        values: of the items: what ``write_values`` takes, or torch's writing in Python.
        rank: of the writer.
        ranks: how many save together.
        by_engine: False: in Python, by torch's own code.
        options: how the files are written.
        background: how the engine's threads behave.
        open_file: opens files in Python.
        place: the directory that was opened when the save began; None: of a remote file system.
        opened: it itself, in the process that has planned the save, until the task is staged.
        leases: that protect the files; a writer that is dropped ends them as ever.
    """

    directory: str
    prefix: str
    items: list[WriteItem]
    values: list[Any]
    rank: int
    ranks: int
    by_engine: bool
    options: WriteOptions
    background: Background
    open_file: Callable[..., Any]
    place: Place | None
    opened: OpenDirectory | None
    leases: Sequence[weakref.ref[DirectoryLease]]

    def __post_init__(self) -> None:
        self.is_cancelled = False
        self._is_taken = False
        self._is_writing = False
        # Of a cancel before the end.
        self._held: list[DirectoryLease] = []
        self._lock = threading.Lock()
        self._write: RankWrite | TorchWrite | None = None
        self._outcome: Results | Exception | None = None
        # Only the first who asks torch's write for its outcome has values to write.
        self._once = threading.Lock()
        self._ended = threading.Event()
        self._pid = 0
        # Of the thread that writes, which lets go of them before it tells of the end.
        self._opened: OpenDirectory | None = None
        self._values: list[Any] = []
        # Where children wait that are forked before the end.
        self._children: _core.ProcessChannel | None = None

    def __getstate__(self) -> dict[str, Any]:
        values = [_sendable(value) for value in self.values]
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"values": values, "opened": None, "leases": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()
        # Here nobody knows whether somebody has the results.
        self._is_taken = True

    def __iter__(self) -> Iterator[WriteTask]:
        yield self

    def __len__(self) -> int:
        return 1

    # --- where it is written ---------------------------------------------------------------------

    def stage(self) -> WriteTask:
        """Returns when the values are not needed any more; what fails is the outcome's to tell.

        Who stages it again gets the same.
        """
        writes = _stage.get(Stage()).writes
        if self._write is None and self._outcome is None:
            try:
                self._begin(writes)
            except Exception as error:
                self._outcome = portable(error)
                if isinstance(self._write, RankWrite):
                    # No thread could be started.
                    self._write.end(self._outcome)
                    self._ended.set()
            finally:
                self.values = []
                self.opened = None
        elif self._write is not None and self not in writes:
            writes.append(self)
        # A forked child has got what was staged before.
        if isinstance(self._write, RankWrite) and self._pid == os.getpid():
            self._write.wait_staged()
        return self

    def outcome(self, transforms: _StorageWriterTransforms | None = None) -> Results | Exception:
        """Waits for the end; the results by file number, or why there are none.

        Raises nothing but what interrupts torch's own code.
        """
        write = self._write
        if isinstance(write, RankWrite):
            _core.fault_point("wait for the outcome", self.directory)
            if os.getpid() == self._pid:
                self._ended.wait()
            elif self._outcome is None:
                self._outcome = self._outcome_of_parent()
        elif write is not None:
            with self._once:
                if self._outcome is None:
                    self._run(partial(write.run, transforms or _StorageWriterTransforms()))
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        """Makes it leave no file, and its writer fail, unless that one has the results."""
        if self._write is not None:
            self._write.cancel()
        with self._lock:
            if self._is_taken or self.is_cancelled:
                return
            self.is_cancelled = True
            leases = [reference() for reference in self.leases]
            self._held = [lease for lease in leases if lease is not None and lease.is_open]
            if not self._is_writing:
                self._withdraw()

    def moved(self) -> int:
        """Grows for as long as anything moves."""
        return 0 if self._write is None else self._write.moved()

    def state(self) -> str:
        """What it is doing, for a message: files, phase, bytes."""
        assert self._write is not None
        return self._write.state(self.directory, self.prefix)

    # --- where it was planned --------------------------------------------------------------------

    def take(self, outcome: Any) -> Any:
        """The outcome, which nobody cancels any more, or why it is not to be had."""
        with self._lock:
            if self.is_cancelled:
                return _cancelled()
            self._is_taken = True
            return outcome

    # --- private ---------------------------------------------------------------------------------

    def _begin(self, writes: list[WriteTask]) -> None:
        if len(self.values) != len(self.items):
            raise CheckpointError(
                f"files {self.prefix}* in {self.directory}: the values were let go of when "
                "they were staged, by another process or by a call that was interrupted; plan "
                "the save again"
            )
        opened, values = self._open(), self.values
        watched = Watched()
        for item, value in zip(self.items, values, strict=True):
            if isinstance(value, torch.Tensor):
                watched.watch(item.index.fqn, value)
        if not self.by_engine:
            self._write = TorchWrite(
                self.items,
                values,
                watched,
                self.options,
                self.directory,
                self.prefix,
                opened,
                self.open_file,
            )
            writes.append(self)
            return
        self._pid = os.getpid()
        # A save without children needs none.
        with contextlib.suppress(OSError):
            self._children = _core.ProcessChannel()
        write = self._write = RankWrite(
            watched,
            background=_stage.get(Stage()).background or self.background,
            # The caller waits for them.
            quiet_stagers=False,
            ranks=self.ranks,
            advice=ADVICE,
            children=self._children,
        )
        self._opened, self._values = opened, values
        # Before there is a thread: whoever interrupts this cancels what has begun.
        writes.append(self)
        spawn(partial(self._run_beside, write))

    def _open(self) -> OpenDirectory | None:
        """The save's directory, in whichever process this is.

        Raises:
            OSError: there is none.
            CheckpointError: the path leads to another one by now.
        """
        if self.opened is not None or self.place is None:
            return self.opened
        opened = OpenDirectory(self.directory)
        if Place.of(opened).contradicts(self.place):
            raise CheckpointError(
                f"{self.directory}: the path leads to another directory than when the save was "
                "planned: a directory was renamed, or a link in the path was changed. Nothing was "
                "written; save again"
            )
        return opened

    def _run_beside(self, write: RankWrite) -> None:
        """In a thread of its own."""

        def run() -> Results:
            assert self._opened is not None
            names = [item.index.fqn for item in self.items]
            values, self._values = self._values, []
            title = f"save {os.path.basename(self.directory)}"
            written = write.run(
                self._opened, self.options, self.prefix, names, values, title, self.rank
            )
            return _by_file(self.items, written)

        try:
            self._run(run)
        finally:
            self._opened, self._values = None, []
            error = self._outcome if isinstance(self._outcome, Exception) else None
            try:
                self._tell_children(error)
            finally:
                write.end(error)
                self._ended.set()

    def _run(self, run: Callable[[], Results]) -> None:
        """Settles the outcome; raises what interrupts the caller's thread."""
        try:
            with self._lock:
                if self.is_cancelled:
                    raise _cancelled()
                self._is_writing = True
            self._outcome = run()
        except BaseException as error:
            # With its frames it would keep the sources.
            self._outcome = portable(error)
            if not (self.by_engine or isinstance(error, Exception)):
                raise
        finally:
            with self._lock:
                self._is_writing = False
                if self.is_cancelled:
                    self._withdraw()

    def _withdraw(self) -> None:
        held, self._held = self._held, []
        if held and isinstance(self._outcome, dict):
            # By name: the directory may be shared for long, by ranks that have yet to cancel.
            results = itertools.chain.from_iterable(self._outcome.values())
            held[0].remove({result.storage_data.relative_path for result in results})
        for lease in held:
            lease.abandon()

    def _tell_children(self, error: Exception | None) -> None:
        # They have the results from the engine. A child that is forked from now on has the outcome.
        channel, self._children = self._children, None
        if channel is None or error is None:
            return
        try:
            channel.send_object(pickle.dumps(error))
        except OSError as failure:
            LOGGER.error("a forked child cannot be told why its save has failed: %s", failure)

    def _outcome_of_parent(self) -> Results | Exception:
        files = f"files {self.prefix}* in {self.directory}"
        if self._children is None:
            return CheckpointError(
                f"{files}: process {self._pid}, which writes them, had no memory or no "
                "descriptors for a channel to the children that it forks"
            )
        try:
            # Waking up lets Ctrl-C in.
            while (found := self._children.wait_for_files(1.0)) is None:
                pass
            if isinstance(found, bytes):
                failure: Exception = pickle.loads(found)
                return failure
            assert self.place is not None
            return _by_file(self.items, Written(found, self.place))
        except CheckpointError as error:
            return CheckpointError(f"{files}: {error}")
        except Exception as error:
            return portable(error)


def portable(error: BaseException) -> Exception:
    """The same error without frames, or its text where it is none that can be sent."""
    try:
        copied = pickle.loads(pickle.dumps(error))
    except Exception:
        copied = None
    if isinstance(copied, Exception):
        return copied
    return RuntimeError(f"{type(error).__name__}: {error}")


def _cancelled() -> CheckpointError:
    # Each time another one: who keeps an error keeps the frames through which it came.
    return CheckpointError("aborted: its queue was closed with abort=True, or gave its call up")


def _by_file(items: list[WriteItem], written: Written) -> Results:
    """The results by the number of the file."""
    by_file: Results = {}
    for result in results_of(items, written):
        name = result.storage_data.relative_path
        number = int(name.removesuffix(".distcp").rpartition("_")[2])
        by_file.setdefault(number, []).append(result)
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
