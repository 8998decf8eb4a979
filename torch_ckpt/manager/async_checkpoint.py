"""A training program's state, written in the background by one object that also numbers it."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_ckpt import _core
from torch_ckpt._base.options import given_options, names_of, options_of
from torch_ckpt.api import LOAD_OPTIONS, async_save, load
from torch_ckpt.ranks.meeting import TIMEOUT_SECONDS
from torch_ckpt.saving.async_save import AsyncSave
from torch_ckpt.saving.metrics import SaveMetrics
from torch_ckpt.saving.unchanged import SAVE_COUNTER
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.state.app_state import AppState, BeforeSave


@dataclass(frozen=True)
class WriteMetrics:
    """The last write, on this rank. Times are seconds.

    Attributes:
        blocked_s: the caller was kept waiting, reading the state included.
        write_s: from the call until the checkpoint was visible and durable; 0 before that.
        training_s: from the return of the write before until the call; 0 for the first.
        save: what else is known of it.
    """

    blocked_s: float
    write_s: float
    training_s: float
    save: SaveMetrics


class AsyncCheckpoint:
    """Writes and reads the state of a training program; training goes on while it is written.

    All ranks must call each method but ``sync`` and ``metrics``, in the same order. One thread at a
    time may use it. Leaving the interpreter waits for a write under way, for an hour at most.

    Args:
        save_options: for :func:`torch_ckpt.async_save`. With ``staging="overlapped"`` the
            optimizers in the state are guarded.
        load_options: for :func:`torch_ckpt.load`.
        state: names and values, as for :class:`torch_ckpt.AppState`.

    Values are attributes as well: ``checkpoint.step += 1`` changes what is saved, and a new name
    adds a value.

    Attributes:
        state: the values by name. Plain ones, such as a step, are saved from here: change them
            here, where a restore replaces them. ``save_counter`` is among them: how many times
            :meth:`save` has been called.

    Raises:
        ValueError: a value is named ``save_counter``.
        TypeError: ``save_options`` or ``load_options`` names an unknown option; values are given by
            keyword.
    """

    state: dict[str, Any]

    def __init__(
        self,
        save_options: Mapping[str, Any] | None = None,
        load_options: Mapping[str, Any] | None = None,
        /,
        **state: Any,
    ) -> None:
        if SAVE_COUNTER in state:
            raise ValueError(
                f"{SAVE_COUNTER} is what saves are counted with; name the value otherwise"
            )
        self.state = {**state, SAVE_COUNTER: 0}
        self._save_options = _checked(save_options or {})
        self._load_options = given_options(
            "load_options", load_options, LOAD_OPTIONS | {"no_dist", "process_group"}
        )
        self._before_save = BeforeSave()
        self._app_state = AppState(self.state, before_save=self._before_save)
        self._handle: AsyncSave | None = None
        self._save_metrics: SaveMetrics | None = None
        self._blocked_s = 0.0
        self._training_s = 0.0
        self._returned: float | None = None

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("state", {})
        if name in values:
            return values[name]
        raise AttributeError(f"AsyncCheckpoint has no value {name!r}, but {', '.join(values)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "state" or name.startswith("_"):
            super().__setattr__(name, value)
        elif hasattr(type(self), name):
            raise AttributeError(f"{name} is AsyncCheckpoint's own; name the value otherwise")
        else:
            self.state[name] = value

    @property
    def save_counter(self) -> int:
        """How many times :meth:`save` has been called, restored ones included."""
        return int(self.state[SAVE_COUNTER])

    def before_save(self, hook: Callable[[], None]) -> RemovableHandle:
        """Adds a hook that is called before state is read for a write.

        Returns:
            A handle, whose ``remove()`` takes the hook away.
        """
        return self._before_save.add(hook)

    def write(
        self,
        path: str | os.PathLike[str],
        *,
        on_commit: Callable[[str], None] | None = None,
    ) -> str:
        """Writes a checkpoint in the background. Waits for the write before.

        Args:
            path: directory of the checkpoint.
            on_commit: called with the path on the coordinator, in the write's thread, once the
                checkpoint is durable and visible.

        Returns:
            The path.

        Raises:
            CheckpointException, CheckpointError: that of an earlier write which nobody has seen; or
                a value's state cannot be read.
        """
        begun = time.perf_counter()
        path = os.fspath(path)
        before = self._handle
        try:
            handle = async_save(
                self._app_state.state_dict,
                path,
                on_commit=on_commit and functools.partial(_call_with, on_commit, path),
                **self._save_options,
            )
        except BaseException:
            # Its error, if it had one, has been told now or will be by the next call.
            if before is not None and before.done():
                self._handle = None
            raise
        self._handle = handle
        if self._save_options.get("staging") == "overlapped":
            for value in self.state.values():
                if isinstance(value, Optimizer):
                    handle.guard(value)
        self._save_metrics = handle.metrics()
        self._training_s = 0.0 if self._returned is None else begun - self._returned
        self._returned = time.perf_counter()
        self._blocked_s = self._returned - begun
        return path

    def save(
        self,
        prefix: str | os.PathLike[str],
        *,
        on_commit: Callable[[str], None] | None = None,
    ) -> str:
        """As :meth:`write`, to ``{prefix}-{number}``; numbers begin at 1.

        A number is used once, even if its write fails.
        """
        self.state[SAVE_COUNTER] += 1
        return self.write(f"{os.fspath(prefix)}-{self.save_counter}", on_commit=on_commit)

    def read(self, path: str | os.PathLike[str]) -> None:
        """Takes the state of a checkpoint, all but its ``save_counter``, which it need not have.

        Waits for a write under way, whose error is left to :meth:`sync` or the next write.

        Raises:
            CheckpointException: on every rank, as of :func:`torch_ckpt.load`.
            CheckpointError: a value does not take its state; names it. On the other ranks
                RuntimeError, which names the rank too.
            TimeoutError: ranks did not come; they are named.
        """
        state = {key: value for key, value in self.state.items() if key != SAVE_COUNTER}
        self._restore(AppState(state), path)
        self.state.update(state)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """As :meth:`read`, and takes the ``save_counter``, so that numbers go on from there."""
        self._restore(self._app_state, path)

    def _restore(self, app_state: AppState, path: str | os.PathLike[str]) -> None:
        if self._handle is not None:
            _core.fault_point("wait for the save before", self._handle.metrics().path)
            # Its error, unlike that of result(), counts as not seen.
            concurrent.futures.wait([self._handle.committed])
        options = self._load_options
        if options.get("no_dist"):
            target = app_state.target()
            load(target, path, **options)
            app_state.apply(target)
            return
        app_state.restore(
            lambda target: load(target, path, **options),
            call="AsyncCheckpoint.restore",
            process_group=options.get("process_group"),
            timeout=self._save_options.get("timeout", TIMEOUT_SECONDS),
        )

    def sync(self, timeout: float | None = None) -> None:
        """Waits until the last write is durable and visible.

        Raises:
            TimeoutError: ``timeout`` seconds have passed; the write goes on.
            CheckpointException, CheckpointError: it failed; told once.
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
        """Of the last write; None before the first."""
        save = self._save_metrics
        if save is None:
            return None
        return WriteMetrics(self._blocked_s, save.total_s, self._training_s, save)


def _checked(save_options: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(save_options, Mapping):
        raise TypeError(
            f"save_options must be a mapping, got {type(save_options).__name__}; values are given "
            "by keyword: AsyncCheckpoint(model=model)"
        )
    taken = names_of(async_save) | options_of(FileSystemWriter)
    unknown = [name for name in save_options if name not in taken]
    if unknown:
        raise TypeError(
            f"save_options has {', '.join(map(repr, unknown))}, which torch_ckpt.async_save does "
            "not take; values are given by keyword: AsyncCheckpoint(model=model)"
        )
    return dict(save_options)


def _call_with(on_commit: Callable[[str], None], path: str, _metadata: Any) -> None:
    on_commit(path)
