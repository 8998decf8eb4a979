"""Writes a step beneath a local root. steps/local.py describes the protocol."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any, Protocol

from torch.distributed.checkpoint.metadata import StorageMeta

from torch_ckpt import _core
from torch_ckpt._base.formatting import size
from torch_ckpt._base.free_space import require_room
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME, step_name
from torch_ckpt.errors import CheckpointError, DurabilityUncertain, NotCommitted
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.steps.lease import locked_root
from torch_ckpt.steps.marker import pin, read_marker, write_marker
from torch_ckpt.steps.step_directory import bytes_in, is_named, name_for_deletion


class _Root(Protocol):
    """The root of the steps, as :class:`LocalSteps` implements it."""

    root: str
    patience: float

    def remember_root(self, root: tuple[int, ...]) -> None: ...
    def remove(self, name: str) -> bool: ...


class StepWriter(FileSystemWriter):
    """Writes one step, and renames its directory to the final name once the step is complete."""

    reported_elsewhere = True

    def __init__(
        self,
        steps: _Root,
        step: int,
        attempt: str,
        overwrite: bool,
        marker: Callable[[], dict[str, Any]],
        expected_bytes: int,
        make_room: Callable[[], None],
        options: dict[str, Any],
    ) -> None:
        self._steps = steps
        self._step = step_name(step)
        self._final = os.path.join(steps.root, self._step)
        self._may_replace = overwrite
        self._marker = marker
        self._expected_bytes = expected_bytes
        self._make_room = make_room
        self._removes_directory = False
        self._is_working = False
        super().__init__(f"{self._final}.tmp-{attempt}", **options)

    @property
    def identity(self) -> str | None:
        return str(self.path)

    @property
    def destination(self) -> str:
        return self._final

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._final, save_id=self.save_id)

    def set_up_for_save(self, rank: int) -> None:
        try:
            if rank == 0:
                self._refuse_existing()
                _core.make_directories(self._steps.root)
                require_room(
                    self._steps.root,
                    self._expected_bytes,
                    f"the step needs at least {size(self._expected_bytes)}",
                    "keep fewer steps, or free space",
                    self._make_room,
                )
            super().set_up_for_save(rank)
            if rank == 0:
                # The marker may be left over from an earlier attempt of this run that completed the
                # step but could not rename it.
                self.directory.remove(MARKER_NAME)
        finally:
            # Do not set this earlier, because another rank may still be creating the directory.
            self._removes_directory = True

    def commit(self, data: bytes, files: set[str]) -> None:
        # The save's lock is released when the metadata is committed. Hold another lock until the
        # rename, so that no sweep removes the directory.
        with (
            closing(self.directory.reopen()) as opened,
            closing(OpenDirectory(self._steps.root)) as root,
        ):
            opened.share()
            replaced = self._complete(opened, root, data, files)
        if replaced is not None:
            # Ignore failures, because the save has succeeded. If a process is loading the replaced
            # step, the next sweep removes it.
            with suppress(OSError), self._working():
                self._steps.remove(replaced)

    def abandon(self) -> None:
        super().abandon()
        if not self._removes_directory:
            return
        # Every rank tries this, because rank 0 may have failed before it created a writer. The
        # coordinator has removed the files of a failed save. If other files are left, rmdir fails.
        with suppress(OSError), closing(OpenDirectory(self.path)) as opened:
            # Locking fails if another rank is already saving the step again.
            if opened.try_lock_exclusive():
                os.rmdir(self.path)

    def bytes_moved(self) -> int:
        return super().bytes_moved() + (time.monotonic_ns() if self._is_working else 0)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Sends heartbeats during a block that may take long but moves no bytes."""
        self._is_working = True
        try:
            yield
        finally:
            self._is_working = False

    def _complete(
        self, opened: OpenDirectory, root: OpenDirectory, data: bytes, files: set[str]
    ) -> str | None:
        """Completes the step.

        Returns:
            The new name of the replaced step; None if no step was replaced.
        """
        unfinished, deleted = os.path.basename(self.path), name_for_deletion(self._step)
        uncertain: DurabilityUncertain | None = None
        try:
            # Read the identity now: nothing may fail after the rename.
            identity = root.identity()
            with self._working():
                self._require_files(opened, files)
            super().commit(data, files)
            self._write_marker(opened)
            self._refuse_existing()
            exists = os.path.lexists(self._final)
            if os.path.lexists(os.path.join(self._final, PINNED_NAME)):
                pin(opened)
            try:
                # Lock the root, or a deletion could rename the new step instead of the old one.
                with locked_root(root) if exists else nullcontext():
                    _core.publish(
                        root,
                        unfinished,
                        self._step,
                        # Replace only the step that was checked above.
                        deleted if exists else None,
                        renamed=opened,
                        sync=self.sync_files,
                        replace=exists,
                        sync_above=False,
                    )
            except DurabilityUncertain as error:
                uncertain = error
        except BaseException as error:
            # The step is not complete, even if its metadata may be durable. Remove its files.
            reason = error.args[0] if isinstance(error, DurabilityUncertain) else error
            with suppress(OSError):
                if deleted in root.names():
                    raise NotCommitted(
                        f"{self._final}: {reason}; the step is complete in {self.path}, and the "
                        "next sweep will rename it"
                    ) from error
                self._discard(opened, root)
            if isinstance(error, FileExistsError):
                raise
            # The step does not exist, even if only the durability of the metadata is uncertain or
            # the directory was moved (CheckpointError).
            if isinstance(error, OSError | DurabilityUncertain) or type(error) is CheckpointError:
                number = getattr(error, "errno", None) or 0
                raise NotCommitted(f"{self._final}: {reason}", number) from error
            raise
        self._steps.remember_root(identity)
        if uncertain is not None:
            raise DurabilityUncertain(
                f"{self._final}: {uncertain.args[0]}", uncertain.errno
            ) from uncertain
        return deleted if exists else None

    def _discard(self, opened: OpenDirectory, root: OpenDirectory) -> None:
        """Removes the files of the save, even if the save's directory was moved."""
        if not opened.try_lock_exclusive():
            return
        # Remove the marker first, so that the next sweep removes any remaining files.
        for name in sorted(opened.names(), key=lambda name: name != MARKER_NAME):
            opened.remove(name)
        unfinished = os.path.basename(self.path)
        if is_named(opened, root, unfinished):
            os.rmdir(unfinished, dir_fd=root.fd)

    def _write_marker(self, opened: OpenDirectory) -> None:
        facts = {"step": int(self._step), "saved_at": time.time(), "bytes": bytes_in(opened.fd)}
        write_marker(opened, {**facts, **self._marker()}, self.sync_files)

    def _require_files(self, opened: OpenDirectory, files: set[str]) -> None:
        """Checks that the files of all ranks are in this rank's directory."""
        missing = files - set(opened.names())
        until = time.monotonic() + self._steps.patience
        while missing:
            # Network file systems may cache the absence of a file for some time.
            missing -= set(opened.names())
            if missing and time.monotonic() >= until:
                raise NotCommitted(
                    f"{self._final}: rank 0 does not see files that other ranks have written ("
                    f"{', '.join(sorted(missing)[:3])}): all ranks must see the same directory"
                )
            if missing:
                time.sleep(0.1)

    def _refuse_existing(self) -> None:
        if os.path.lexists(self._final) and not os.path.isdir(self._final):
            # The file belongs to the user, and saving the step would replace it.
            raise FileExistsError(
                errno.EEXIST, "a file has the name of this step. Move the file", self._final
            )
        if not self._may_replace and read_marker(self._final) is not None:
            raise FileExistsError(
                errno.EEXIST,
                "the step already exists and is complete, and this run has neither saved it nor "
                "restored an earlier step. Call restore() first, delete the step, or use another "
                "root",
                self._final,
            )
