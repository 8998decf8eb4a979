"""The steps of a run beneath a local root. Each step is a directory with a name of ten digits.

A crash at any point leaves each step either complete or absent. Leftovers have distinct names.

1. Step 100 is written into ``0000000100.tmp-{attempt}``, like any checkpoint (saving/session.py,
   csrc/directory/lease.h). The attempt is 8 hex digits on which the ranks of a run have agreed. It
   keeps the files of this run separate from the files of earlier and concurrent runs.
2. Once the files of all ranks are durable and the metadata is committed, the coordinator writes
   ``write_completed`` next to them: a JSON document that describes the step. It fsyncs the file,
   then the directory.
3. The coordinator renames the directory to ``0000000100`` and fsyncs the root. Only then is the
   save committed on all ranks. If a step is replaced, it is first renamed as in 5.
4. A step is complete if its name is ten digits and it contains the marker. No other directory is
   listed as a step.
5. A deletion locks the directory exclusively (csrc/directory/lease.h), so it never deletes a step
   that is being loaded. It renames the directory to ``0000000100.deleted-{8 hex digits}``, fsyncs
   the root, then deletes the files. After a power failure, there is either the complete step or a
   leftover. Deletions, and saves that replace a step, rename under a ``flock`` on the root, so a
   deletion never renames the new step.
6. A directory whose name is ten digits but which lacks the marker was not written by a manager. It
   is kept until that step is saved.
7. When a manager is created, a sweep finishes interrupted work. A directory with the marker that
   was not renamed in 3 gets its final name if that step does not exist. Other leftovers are
   deleted. Directories that a process is using are spared.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME, STEP_NAME, step_name
from torch_ckpt.inspection.verify import VerifyReport, verify
from torch_ckpt.steps.lease import locked_root
from torch_ckpt.steps.marker import pin, read_marker
from torch_ckpt.steps.step_directory import bytes_in, is_named, name_for_deletion
from torch_ckpt.steps.store import StepInfo, StepStore, info_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from torch_ckpt.loading.report import LoadReport
    from torch_ckpt.saving.writer import FileSystemWriter

_LEFTOVER = re.compile(r"^(\d{10})\.(tmp|deleted)-[0-9a-f]{8}$", re.ASCII)


class LocalSteps(StepStore):
    """The steps beneath a local directory.

    Args:
        patience: seconds to wait until the files written by other ranks are visible.
    """

    def __init__(self, root: str | os.PathLike[str], *, patience: float = 30.0) -> None:
        super().__init__(os.path.abspath(root))
        self.patience = patience
        self._root_identity: tuple[int, ...] | None = None

    def remember_root(self, identity: tuple[int, ...]) -> None:
        """Records the directory that a save used as root. If the root's path refers to a different
        directory later, nothing is removed from there.

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
            # A rank of this run may have created the directory, but not locked it yet.
            if attempt and name.endswith(f".tmp-{attempt}"):
                continue
            try:
                if self._sweep(name):
                    removed.append(name)
            except OSError as error:
                # Continue with the other leftovers.
                LOGGER.warning(
                    "a leftover could not be removed: %s. The next sweep will try again", error
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
        from torch_ckpt.steps.local_writer import StepWriter

        return StepWriter(
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
        from torch_ckpt.api import load

        return load(state_dict, self.path_of(step), **options)

    def metadata(self, step: int) -> Metadata:
        from torch_ckpt.loading.reader import FileSystemReader

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
            action = "pinned" if pinned else "unpinned"
            raise FileNotFoundError(2, f"step {step} cannot be {action}: it is not complete", path)
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
            True if the directory was removed.

        Raises:
            OSError: the directory does not exist or cannot be removed, or the root's path refers to
                a different directory than at the last save.
        """
        path = os.path.join(self.root, name)
        with closing(OpenDirectory(self.root)) as root, closing(OpenDirectory(path)) as opened:
            if self._root_identity not in (None, root.identity()):
                raise OSError(
                    errno.ESTALE,
                    "the path refers to a different directory than at the last save; refusing to "
                    "remove anything from it",
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
                    # A save that waited too long for the lock has replaced the directory.
                    root.rename(deleted, name)
                    return False
                root.sync()
                path = os.path.join(self.root, deleted)
            if os.path.islink(path):
                # The user has moved the step and left a link. Remove only the link.
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
            # Another process has deleted the directory.
            return None

    def _sweep(self, name: str) -> bool:
        """Removes a leftover, or renames a step that lacks only its final name.

        Returns:
            True if a leftover was removed.
        """
        match = _LEFTOVER.match(name)
        if match is None:
            return False
        path = os.path.join(self.root, name)
        if not os.path.isdir(path):
            return False
        # Another process may be sweeping the same leftover.
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
