"""What one rank is to write, as something that can be sent to where it is written.

A :class:`WriteTask` is staged: its values are copied, on and by the process that stages it. What
that gives, a :class:`Staged`, is asked for the outcome, perhaps in a child that was forked since:
the engine goes on in the parent, which has the threads, and sends the results to the child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.planner import WriteItem

from torch_ckpt import _C
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import OpenDirectory, Place
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.staged_write import (
    NotBegun,
    Results,
    Staged,
    current_stage,
    files_of,
    portable,
)
from torch_ckpt.megatron.task import ADVICE, Task, watched_in
from torch_ckpt.megatron.torch_write import PythonWrite
from torch_ckpt.saving.items import Written, results_of
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.running_saves import spawn


@dataclasses.dataclass
class WriteTask(Task):
    """A task that stages itself. Can be pickled; tensors then go as the pickler sends them."""

    _staged: Staged | None = dataclasses.field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        values = [_sendable(value) for value in self.values]
        own = {"values": values, "opened": None, "_staged": None}
        return self.__dict__ | own

    def stage(self) -> Staged:
        """Returns when the values are not needed any more; what fails is the outcome's to tell.

        Who stages it again gets the same.
        """
        if self._staged is None:
            self._staged = self._begin()
        elif self._staged not in (writes := current_stage().writes):
            writes.append(self._staged)
        return self._staged

    def _begin(self) -> Staged:
        try:
            if len(self.values) != len(self.items):
                raise CheckpointError(
                    f"files {self.prefix}* in {self.directory}: the values were let go of when "
                    "they were staged, by another process or by a call that was interrupted; plan "
                    "the save again"
                )
            # A copy: what this one keeps must not keep it.
            task = dataclasses.replace(self, opened=self._open())
            return EngineWrite(task) if self.by_engine else PythonWrite(task)
        except Exception as error:
            return NotBegun(portable(error))
        finally:
            self.values = []
            self.opened = None

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


class EngineWrite(Staged):
    """One task in the engine of this process."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._pid = os.getpid()
        # Where children wait that are forked before the end.
        self._children = _channel()
        self._outcome: Results | Exception | None = None
        self._staged = threading.Event()
        self._ended = threading.Event()
        stage = current_stage()
        stage.writes.append(self)
        self._write = RankWrite(
            watched_in(task),
            background=stage.background or task.background,
            # The caller waits for them.
            quiet_stagers=False,
            ranks=task.ranks,
            advice=ADVICE,
            children=self._children,
            on_staged=self._staged.set,
        )
        spawn(self._run)
        self._staged.wait()

    def outcome(self, transforms: _StorageWriterTransforms | None = None) -> Results | Exception:
        _C.fault_point("wait for the outcome", self._task.directory)
        if os.getpid() == self._pid:
            self._ended.wait()
        elif self._outcome is None:
            self._outcome = self._outcome_of_parent()
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        self._write.cancel()
        self._task.ending.abort()

    def moved(self) -> int:
        return self._write.moved()

    def state(self) -> str:
        return self._write.state(self._task.directory, self._task.prefix)

    # --- private ---------------------------------------------------------------------------------

    def _run(self) -> None:
        task = self._task
        try:
            task.ending.begin()
            assert task.opened is not None
            names = [item.index.fqn for item in task.items]
            # A list of its own: it is emptied.
            values, task.values = task.values, []
            title = f"save {os.path.basename(task.directory)}"
            written = self._write.run(
                task.opened, task.options, task.prefix, names, values, title, task.rank
            )
            self._outcome = _by_file(task.items, written)
        except BaseException as error:
            # With its frames it would keep the sources.
            self._outcome = portable(error)
        finally:
            self._write.end()
            task.opened = None
            try:
                task.ending.end(files_of(self._outcome))
            finally:
                try:
                    self._tell_children()
                finally:
                    self._staged.set()
                    self._ended.set()

    def _tell_children(self) -> None:
        # They have the results from the engine. A child that is forked from now on has the outcome.
        channel, self._children = self._children, None
        if channel is None or not isinstance(self._outcome, Exception):
            return
        try:
            channel.send_object(pickle.dumps(self._outcome))
        except OSError as error:
            LOGGER.error("a forked child cannot be told why its save has failed: %s", error)

    def _outcome_of_parent(self) -> Results | Exception:
        files = f"files {self._task.prefix}* in {self._task.directory}"
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
            assert self._task.place is not None
            return _by_file(self._task.items, Written(*found, self._task.place))
        except CheckpointError as error:
            return CheckpointError(f"{files}: {error}")
        except Exception as error:
            return portable(error)


def _channel() -> _C.ProcessChannel | None:
    # A save without children needs none.
    with contextlib.suppress(OSError):
        return _C.ProcessChannel()
    return None


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
