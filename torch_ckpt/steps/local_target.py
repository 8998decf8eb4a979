"""The target of a step beneath a local root. csrc/directory/step.h describes the protocol."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, closing, suppress
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.formatting import size
from torch_ckpt._base.system import require_room
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.marker import MARKER_NAME, encoded_marker, read_marker, step_name
from torch_ckpt.errors import CheckpointError, DurabilityUncertain, NotCommitted
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.target import DirectoryTarget, Opened
from torch_ckpt.steps.step_store import refuse_complete_step


class StepTarget(DirectoryTarget):
    """One step, whose directory gets its final name once the step is complete.

    Args:
        root: the run's root.
        protocol: the protocol of the root.
        patience: seconds to wait for files that other ranks have written.
        fenced: block in which this run still holds the root; yields its lease.
        step: the step number.
        attempt: see :meth:`StepStore.target`.
        may_replace, marker, make_room: see :meth:`StepStore.target`.
        options: the options of the save.
    """

    def __init__(
        self,
        root: str,
        protocol: _core.StepRoot,
        patience: float,
        fenced: Callable[[], AbstractContextManager[bytes | None]],
        step: int,
        *,
        attempt: str,
        may_replace: bool,
        marker: Callable[[], dict[str, Any]],
        make_room: Callable[[], None],
        options: WriteOptions,
    ) -> None:
        self._root = root
        self._protocol = protocol
        self._patience = patience
        self._fenced = fenced
        self._step = step_name(step)
        super().__init__(os.path.join(root, self._step), options)
        self.directory_path = os.path.join(root, _core.unfinished_step_name(self._step, attempt))
        self._may_replace = may_replace
        self._marker = marker
        self._make_room = make_room
        self._removes_directory = False

    def open(self, rank: int, ranks: int) -> Opened:
        try:
            if rank == 0:
                self._refuse_existing()
                _core.make_directories(self._root)
                require_room(
                    self._root,
                    self.expected_bytes,
                    f"the step needs at least {size(self.expected_bytes)}",
                    "keep fewer steps, or free space",
                    self._make_room,
                )
            opened = super().open(rank, ranks)
            if rank == 0:
                # The marker may be left over from an earlier attempt of this run that completed the
                # step but could not rename it.
                self.directory.remove(MARKER_NAME)
            return opened._replace(save=self.directory_path)
        finally:
            # Do not set this earlier, because another rank may still be creating the directory.
            self._removes_directory = True

    def publish(self, data: _core.EncodedMetadata, files: Collection[str]) -> None:
        step = _core.StepSave(self._protocol, self.directory, self._step)
        try:
            with self.busy():
                missing = step.find_missing(list(files), self._patience)
            if missing:
                raise NotCommitted(
                    f"{self.path}: rank 0 does not see files that other ranks have written ("
                    f"{', '.join(missing[:3])}): all ranks must see the same directory"
                )
            super().publish(data, files)
            facts = {"step": int(self._step), "saved_at": time.time(), "bytes": step.size()}
            marker = encoded_marker({**facts, **self._marker()})
            self._refuse_existing()
            sync = self.options.sync_files
            with self._fenced() as lease:
                step.publish(marker, replace=self._may_replace, sync=sync, lease=lease)
        except BaseException as error:
            if step.is_published:
                raise
            step.discard()
            # The step does not exist, even if only the durability of the metadata is uncertain
            # or the directory was moved (CheckpointError).
            is_failed_call = isinstance(error, OSError) and not isinstance(error, FileExistsError)
            if is_failed_call or type(error) in (CheckpointError, DurabilityUncertain):
                reason = error.args[0] if isinstance(error, DurabilityUncertain) else error
                number = getattr(error, "errno", None) or 0
                raise NotCommitted(f"{self.path}: {reason}", number) from error
            raise
        if step.replaced:
            # Ignore failures, because the save has succeeded. If a process is loading the replaced
            # step, the next sweep removes it.
            with suppress(OSError), self.busy():
                self._protocol.remove(step.replaced)

    def discard(self) -> None:
        super().discard()
        if not self._removes_directory:
            return
        # Every rank tries this, because rank 0 may have failed before it created a target. The
        # coordinator has removed the files of a failed save.
        with suppress(OSError), closing(OpenDirectory(self.directory_path)) as opened:
            # Locking fails if another rank is already saving the step again. On a network file
            # system, it creates a file.
            if opened.try_lock_exclusive() and opened.names() in ([], [_core.LOCK_NAME]):
                opened.remove_lock_file()
                os.rmdir(self.directory_path)

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.path) and not os.path.isdir(self.path):
            # The file belongs to the user, and saving the step would replace it.
            raise FileExistsError(
                errno.EEXIST, "a file has the name of this step. Move the file", self.path
            )
        if not self._may_replace and read_marker(self.path) is not None:
            refuse_complete_step(self.path)
