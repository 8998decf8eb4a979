"""The steps of a run beneath a local root, one directory of ten digits for each step.

A crash at any point leaves each step either complete or absent. Leftovers have names of their own.

1. Step 100 is written into ``0000000100.tmp-{attempt}``, like any checkpoint (saving/session.py,
   csrc/directory/lease.h). The attempt is 8 hex digits that the ranks of a run have agreed on, so
   that the files of an earlier run, or of one that is still running, are not in the way.
2. When the files of all ranks are durable and the metadata is committed, the coordinator writes
   ``write_completed`` beside them: a JSON document that describes the step. It fsyncs the file,
   then the directory.
3. It renames the directory to ``0000000100`` and fsyncs the root. Only now is the save committed,
   on all ranks. A replaced step is renamed right before, as in 5.
4. A step is complete if its name is ten digits and it contains the marker. A listing of the root
   shows nothing else as a step.
5. A deletion locks the directory exclusively (csrc/directory/lease.h), so it never deletes a step
   that is being loaded. It renames the directory to ``0000000100.deleted-{8 hex digits}``, fsyncs
   the root, then deletes the files: after a power failure either the complete step exists, or a
   leftover. A deletion and a save that replaces a step both rename under a ``flock`` of the root,
   so a deletion never renames the new step.
6. A directory of ten digits without the marker was not written by a manager. It stays until that
   step is saved.
7. At the start a sweep finishes interrupted work. A directory with the marker that was not renamed
   in 3 gets its final name, if that step does not exist. Other leftovers are deleted. Directories
   that a process is using are spared.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from torch_ckpt import _core
from torch_ckpt._base.formatting import size
from torch_ckpt._base.free_space import require_room
from torch_ckpt._base.log import LOGGER
from torch_ckpt.api import load
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME, STEP_NAME, step_name
from torch_ckpt.errors import CheckpointError, DurabilityUncertain, NotCommitted
from torch_ckpt.inspection.verify import VerifyReport, verify
from torch_ckpt.loading.reader import FileSystemReader
from torch_ckpt.loading.report import LoadReport
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.steps.lease import locked_root
from torch_ckpt.steps.marker import pin, read_marker, write_marker
from torch_ckpt.steps.store import StepInfo, StepStore, info_of

_LEFTOVER = re.compile(r"^(\d{10})\.(tmp|deleted)-[0-9a-f]{8}$", re.ASCII)


class LocalSteps(StepStore):
    """The steps beneath a local directory.

    Args:
        patience: seconds to wait until files of other ranks become visible.
    """

    def __init__(self, root: str | os.PathLike[str], *, patience: float = 30.0) -> None:
        super().__init__(os.path.abspath(root))
        self.patience = patience
        self._root_identity: tuple[int, ...] | None = None

    def remember_root(self, identity: tuple[int, ...]) -> None:
        """Records the directory that a save used as root. From now on nothing is removed if the
        path leads to another directory.

        Args:
            identity: directory identity of the root.
        """
        self._root_identity = identity

    @property
    def lease_root(self) -> str:
        return self.root

    def path_of(self, step: int) -> str:
        """Returns the directory of a complete step."""
        return os.path.join(self.root, step_name(step))

    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = [self._info(name) for name in sorted(names) if leftovers or STEP_NAME.match(name)]
        return [info for info in found if info is not None and (leftovers or info.complete)]

    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        try:
            names = sorted(os.listdir(self.root))
        except FileNotFoundError:
            return []
        removed = []
        for name in names:
            if deleted_only and ".deleted-" not in name:
                continue
            # A rank of this run may have made the directory, but not locked it yet.
            if attempt and name.endswith(f".tmp-{attempt}"):
                continue
            try:
                if self._sweep(name):
                    removed.append(name)
            except OSError as error:
                # Continue with the other leftovers.
                LOGGER.warning(
                    "a leftover could not be removed; the next sweep tries again: %s", error
                )
        return removed

    def writer(
        self,
        step: int,
        *,
        attempt: str,
        overwrite: bool = False,
        marker: Callable[[], dict[str, Any]] = dict,
        expected_bytes: int = 0,
        make_room: Callable[[], None] | None = None,
        **options: Any,
    ) -> FileSystemWriter:
        return _StepWriter(
            self,
            step,
            attempt,
            overwrite,
            marker,
            expected_bytes,
            make_room or (lambda: None),
            options,
        )

    def load(self, step: int, state_dict: dict[str, Any], **options: Any) -> LoadReport | None:
        return load(state_dict, self.path_of(step), **options)

    def metadata(self, step: int) -> Metadata:
        return FileSystemReader(self.path_of(step)).read_metadata()

    def verify(self, step: int) -> VerifyReport:
        return verify(self.path_of(step))

    def delete(self, step: int) -> bool:
        with suppress(FileNotFoundError):
            return self.remove(step_name(step))
        return True

    def contents(self, name: str) -> tuple[int, int]:
        files = total = 0
        for directory, _, names in os.walk(os.path.join(self.root, name)):
            for file in names:
                # Another process may be removing the file.
                with suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(directory, file)).st_size
                    files += 1
        return files, total

    def is_complete(self, step: int) -> bool:
        return os.path.lexists(os.path.join(self.path_of(step), MARKER_NAME))

    def is_pinned(self, step: int) -> bool:
        return os.path.lexists(os.path.join(self.path_of(step), PINNED_NAME))

    def set_pinned(self, step: int, pinned: bool) -> None:
        path = self.path_of(step)
        if not self.is_complete(step):
            raise FileNotFoundError(2, f"step {step} cannot be pinned: it is not complete", path)
        if pinned:
            with closing(OpenDirectory(path)) as opened:
                pin(opened)
            return
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, PINNED_NAME))
        _core.sync_directory(path)

    def remove(self, name: str) -> bool:
        """Removes a directory beneath the root, unless a process is using it.

        Returns:
            True if it was removed.

        Raises:
            OSError: it does not exist or cannot be removed; or the path of the root leads to
                another directory than at the last save.
        """
        path = os.path.join(self.root, name)
        with closing(OpenDirectory(self.root)) as root, closing(OpenDirectory(path)) as opened:
            if self._root_identity not in (None, root.identity()):
                raise OSError(
                    errno.ESTALE,
                    "the path leads to another directory than at the last save; refusing to "
                    "remove anything there",
                    self.root,
                )
            # Without locks the readers of a step cannot be detected. Delete the step anyway: this
            # run holds the lease on the root.
            if not opened.try_lock_exclusive() and opened.has_locks:
                return False
            if ".deleted-" not in name:
                deleted = name_for_deletion(name)
                with locked_root(root) as is_locked:
                    # A save may have replaced the directory since it was opened.
                    if not is_locked or not is_named(opened, root, name):
                        return False
                    root.rename(name, deleted)
                if not is_named(opened, root, deleted):
                    # A save has replaced the directory without the lock, after waiting too long.
                    root.rename(deleted, name)
                    return False
                root.sync()
                path = os.path.join(self.root, deleted)
            if os.path.islink(path):
                # A user has moved the step to another disk. Remove the link only.
                os.unlink(path)
            else:
                _core.fault_point("rmtree", path)
                shutil.rmtree(path)
        return True

    # --- private ---------------------------------------------------------------------------------

    def _info(self, name: str) -> StepInfo | None:
        match = STEP_NAME.match(name) or _LEFTOVER.match(name)
        path = os.path.join(self.root, name)
        if match is None or not os.path.isdir(path):
            return None
        step = int(match.group(1))
        marker = read_marker(path) if STEP_NAME.match(name) else None
        try:
            if marker is None:
                state = "deleted" if ".deleted-" in name else "unfinished"
                _core.fault_point("scandir", path)
                return StepInfo(step, path, state, bytes=bytes_in(path))
            return info_of(step, path, marker, self.is_pinned(step), lambda: bytes_in(path))
        except FileNotFoundError:
            # Another process has deleted it meanwhile.
            return None

    def _sweep(self, name: str) -> bool:
        """Removes a leftover, or renames a step that lacks only its final name.

        Returns:
            True if it was a leftover, and was removed.
        """
        match = _LEFTOVER.match(name)
        if match is None:
            return False
        path = os.path.join(self.root, name)
        if not os.path.isdir(path):
            return False
        # Another process may be sweeping it.
        with suppress(FileNotFoundError):
            if match.group(2) == "tmp":
                final = match.group(1)
                with closing(OpenDirectory(path)) as opened:
                    if not opened.try_lock_exclusive():
                        return False
                    if MARKER_NAME in opened.names() and not self._exists(final):
                        os.rename(path, os.path.join(self.root, final))
                        _core.sync_directory(self.root)
                        return False
            return self.remove(name)
        return False

    def _exists(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.root, name))


class _StepWriter(FileSystemWriter):
    """Writes one step, and renames it to its final name when it is complete."""

    reported_elsewhere = True

    def __init__(
        self,
        steps: LocalSteps,
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
                # Left by a save of this run that was complete, but could not be renamed.
                self.directory.remove(MARKER_NAME)
        finally:
            # Not earlier: another rank may be making the directory.
            self._removes_directory = True

    def commit(self, data: bytes, files: set[str]) -> None:
        # The save's lock is released when the metadata is committed. Hold another one until the
        # rename, against sweeps.
        with (
            closing(self.directory.reopen()) as opened,
            closing(OpenDirectory(self._steps.root)) as root,
        ):
            opened.share()
            replaced = self._complete(opened, root, data, files)
        if replaced is not None:
            # Ignore failures: the save has succeeded. While a process loads the replaced step, it
            # stays until the next sweep.
            with suppress(OSError), self._working():
                self._steps.remove(replaced)

    def abandon(self) -> None:
        super().abandon()
        if not self._removes_directory:
            return
        # Every rank tries: rank 0 may have failed before it made a writer. The coordinator has
        # removed the files of a failed save. If other files are left, rmdir fails.
        with suppress(OSError), closing(OpenDirectory(self.path)) as opened:
            # Fails if another rank is already saving the step again.
            if opened.try_lock_exclusive():
                os.rmdir(self.path)

    def bytes_moved(self) -> int:
        return super().bytes_moved() + (time.monotonic_ns() if self._is_working else 0)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Sends heartbeats during a block that may take long and moves no bytes."""
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
            The name that the replaced step has now; None if there was none.
        """
        unfinished, deleted = os.path.basename(self.path), name_for_deletion(self._step)
        uncertain: DurabilityUncertain | None = None
        try:
            # Read it now: after the rename nothing may fail.
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
                # A deletion must not rename the new step instead of the replaced one.
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
                        "next sweep renames it"
                    ) from error
                self._discard(opened, root)
            if isinstance(error, FileExistsError):
                raise
            # DurabilityUncertain of the metadata, or a moved directory (CheckpointError), means
            # that there is no step.
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
        """Removes the files of the save, even if its directory was moved."""
        if not opened.try_lock_exclusive():
            return
        # Remove the marker first: then the next sweep removes the remaining files.
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
            # Network file systems may cache for some time that a file does not exist.
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


def name_for_deletion(name: str) -> str:
    """Returns a new name for the directory of a step that is being deleted or was replaced."""
    return f"{name[:10]}.deleted-{uuid.uuid4().hex[:8]}"


def is_named(opened: OpenDirectory, root: OpenDirectory, name: str) -> bool:
    """True if an open directory has this name beneath a root."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=root.fd), os.fstat(opened.fd))
    except FileNotFoundError:
        return False


def bytes_in(directory: str | int) -> int:
    """Returns the total size of the files in a checkpoint's directory.

    Args:
        directory: path or descriptor of the directory.
    """
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
