"""Saves the state of a training program in the background, to numbered checkpoints."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from torch_ckpt import _core
from torch_ckpt._base.checks import require_instance
from torch_ckpt.api import async_save
from torch_ckpt.checkpoint.metrics import SaveMetrics
from torch_ckpt.checkpoint.source import Source
from torch_ckpt.loading.load import load
from torch_ckpt.options import DEFAULT_OPTIONS, DEFAULT_READ_OPTIONS, ReadOptions, WriteOptions
from torch_ckpt.ranks.group import TIMEOUT_SECONDS
from torch_ckpt.saving.handle import AsyncSave
from torch_ckpt.saving.unchanged import SAVE_COUNTER
from torch_ckpt.state.states import BeforeSave
from torch_ckpt.training.file_operations import StrPath


@dataclass(frozen=True, kw_only=True)
class AsyncCheckpointOptions:
    """Options of the writes and restores of an :class:`AsyncCheckpoint`.

    Attributes:
        write, read: the options of the writes and of the restores.
        process_group, timeout: see :func:`torch_ckpt.async_save`.

    Raises:
        TypeError: ``write`` or ``read`` has another type.

    Example::

        options = AsyncCheckpointOptions(write=torch_ckpt.WriteOptions(thread_count=8))
        checkpoint = torch_ckpt.AsyncCheckpoint(options, model=model, optimizer=optimizer)
    """

    write: WriteOptions = DEFAULT_OPTIONS
    read: ReadOptions = DEFAULT_READ_OPTIONS
    process_group: dist.ProcessGroup | None = None
    timeout: float = TIMEOUT_SECONDS

    def __post_init__(self) -> None:
        require_instance("write", self.write, WriteOptions)
        require_instance("read", self.read, ReadOptions)


_DEFAULTS = AsyncCheckpointOptions()


@dataclass(frozen=True)
class WriteMetrics:
    """Durations of the last write on this rank, in seconds.

    Attributes:
        blocked_s: time that the call blocked training, including the time to read the state.
        training_s: time between the return of the previous call and this call; 0 for the first.
        save: all metrics of the save. ``save.total_s`` is the time until the checkpoint was visible
            and durable; 0 until then.
    """

    blocked_s: float
    training_s: float
    save: SaveMetrics


class AsyncCheckpoint:
    """Writes the state of a training program in the background, and restores it.

    All ranks must call the same methods in the same order; exceptions are ``sync`` and ``metrics``.
    Only one thread at a time may use the object. At exit, the interpreter waits up to an hour for a
    running write.

    Args:
        options: can only be passed positionally, because each keyword is a value to save.
        state: the values to save, passed as keywords; see docs/state.md. The values are also
            attributes: ``checkpoint.step += 1`` changes the value named ``step``, and assigning to
            a new name adds a value.

    Attributes:
        state: the values by name. A restore replaces plain values, such as a step number, in this
            dict. ``state["save_counter"]`` is the number of calls to :meth:`save`.

    Raises:
        ValueError, TypeError: a value is named ``save_counter``, or was passed positionally.

    Example::

        checkpoint = torch_ckpt.AsyncCheckpoint(model=model, optimizer=optimizer, step=0)
        for _ in range(1000):
            train_one_step()
            checkpoint.step += 1
            if checkpoint.step % 100 == 0:
                checkpoint.save("checkpoints/run")  # run-1, run-2, ...
        checkpoint.sync()
    """

    state: dict[str, Any]

    def __init__(self, options: AsyncCheckpointOptions = _DEFAULTS, /, **state: object) -> None:
        if not isinstance(options, AsyncCheckpointOptions):
            raise TypeError(
                f"AsyncCheckpoint() got a {type(options).__name__} instead of its options. Pass "
                "the values to save as keywords: AsyncCheckpoint(model=model)."
            )
        if SAVE_COUNTER in state:
            raise ValueError(
                f"the name {SAVE_COUNTER} is reserved for the number of saves. Rename the value."
            )
        self.state = {**state, SAVE_COUNTER: 0}
        self._options = options
        self._before_save = BeforeSave()
        self._handle: AsyncSave | None = None
        self._metrics: WriteMetrics | None = None
        self._returned: float | None = None

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("state", {})
        if name in values:
            return values[name]
        raise AttributeError(
            f"AsyncCheckpoint has no value {name!r}. Its values are {', '.join(values)}."
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" or name.startswith("_"):
            super().__setattr__(name, value)
        elif hasattr(type(self), name):
            raise AttributeError(
                f"{name} is an attribute of AsyncCheckpoint itself. Choose another name for the "
                "value."
            )
        else:
            self.state[name] = value

    @property
    def save_counter(self) -> int:
        """Number of calls to :meth:`save`. :meth:`restore` sets it to the checkpoint's number."""
        return int(self.state[SAVE_COUNTER])

    def before_save(self, hook: Callable[[], None]) -> RemovableHandle:
        """Adds a hook that is called before the state is read for a write. Call ``remove()`` on the
        returned handle to remove the hook."""
        return self._before_save.add(hook)

    def write(self, path: StrPath, *, on_commit: Callable[[str], None] | None = None) -> str:
        """Writes a checkpoint in the background. Waits for the previous write first.

        Args:
            path: directory of the checkpoint, which the method returns.
            on_commit: called with the path on the coordinator, in the write's thread, as soon as
                the checkpoint is durable and visible.

        Raises:
            CheckpointException, CheckpointError: an earlier write failed, and the error has not
                been raised yet; or the state of a value cannot be read.
        """
        started = time.perf_counter()
        path = os.fspath(path)
        previous, options = self._handle, self._options
        try:
            self._handle = async_save(
                lambda: self._before_save.read(self.state),
                path,
                options=options.write,
                process_group=options.process_group,
                timeout=options.timeout,
                on_commit=None if on_commit is None else lambda _checkpoint: on_commit(path),
            )
        except BaseException:
            # Drop the handle: this call raises the previous write's error, or the next one will.
            if previous is not None and previous.done():
                self._handle = None
            raise
        training_s = 0.0 if self._returned is None else started - self._returned
        self._returned = time.perf_counter()
        self._metrics = WriteMetrics(self._returned - started, training_s, self._handle.metrics())
        return path

    def save(self, prefix: StrPath, *, on_commit: Callable[[str], None] | None = None) -> str:
        """Writes a checkpoint to ``{prefix}-{number}`` in the background, and returns this path.

        Numbers start at 1 and increase with each call, even if the write fails. See :meth:`write`.
        """
        self.state[SAVE_COUNTER] += 1
        return self.write(f"{os.fspath(prefix)}-{self.save_counter}", on_commit=on_commit)

    def read(self, path: StrPath) -> None:
        """Loads the state of a checkpoint, but keeps the current ``save_counter``.

        The checkpoint need not contain a ``save_counter``. Waits for a running write first. If the
        running write fails, :meth:`sync` or the next write raises the error.

        Raises:
            CheckpointException: the load failed; raised on every rank. See :func:`torch_ckpt.load`.
        """
        state = {key: value for key, value in self.state.items() if key != SAVE_COUNTER}
        self._restore(state, path)
        self.state.update(state)

    def restore(self, path: StrPath) -> None:
        """Loads the state of a checkpoint, including the ``save_counter``, so that :meth:`save`
        continues the numbering of the checkpoint. Otherwise like :meth:`read`."""
        self._restore(self.state, path)

    def _restore(self, state: dict[str, Any], path: StrPath) -> None:
        if self._handle is not None:
            _core.fault_point("wait for the save before", self._handle.metrics().path)
            # Do not call result(), which would mark the write's error as reported.
            concurrent.futures.wait([self._handle.committed])
        load(
            state,
            partial(Source, path, self._options.read),
            process_group=self._options.process_group,
            timeout=self._options.timeout,
            restores_structure=True,
        )

    def sync(self, timeout: float | None = None) -> None:
        """Waits until the most recent write is durable and visible, or for ``timeout`` seconds.

        Raises:
            TimeoutError: the timeout has passed; the write continues.
            CheckpointException, CheckpointError: the write failed. Each error is raised only once.
        """
        handle = self._handle
        if handle is None:
            return
        try:
            handle.result(timeout)
        finally:
            if handle.done():
                self._handle = None

    def metrics(self) -> WriteMetrics | None:
        """Returns the durations of the most recent write; None if there was none."""
        return self._metrics
