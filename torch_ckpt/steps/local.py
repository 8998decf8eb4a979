"""The steps of a run beneath a local root. csrc/directory/step.h describes the protocol."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt._base.system import absolute
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.marker import (
    MARKER_NAME,
    PINNED_NAME,
    STEP_NAME,
    epoch_of,
    newest_epoch,
    read_marker,
    step_name,
)
from torch_ckpt.errors import RootInUse
from torch_ckpt.options import WriteOptions
from torch_ckpt.steps.lease_file import LeaseFile, locked
from torch_ckpt.steps.step_store import StepInfo, StepStore, info_of, refuse_checkpoint

if TYPE_CHECKING:
    from torch_ckpt.saving.target import Target


class LocalSteps(StepStore):
    """The steps beneath a local directory.

    Attributes:
        patience: seconds to wait until the files written by other ranks are visible.
    """

    patience = 30.0

    def __init__(self, root: str | os.PathLike[str]) -> None:
        path = os.fspath(absolute(root))
        # os.path.abspath would remove ``..`` after a symbolic link. The path of a root identifies
        # it, so it must not depend on the working directory.
        super().__init__(os.path.realpath(path) if "/../" in f"{path}/" else path)
        self.protocol = _core.StepRoot(self.root)

    def lease_store(self) -> LeaseFile:
        return LeaseFile(self.root)

    @contextmanager
    def fenced(self) -> Iterator[bytes | None]:
        """Block for a change beneath the root. Yields the bytes that the lease must have; see
        csrc/directory/root_lock.h.

        Raises:
            RootInUse: the change has failed because the lease is lost. Names the other run.
        """
        if self.lease is None:
            yield None
            return
        try:
            yield self.lease.expected()
        except RootInUse:
            self.lease.require()
            raise

    def path_of(self, step: int) -> str:
        return os.path.join(self.root, step_name(step))

    def require_root(self, *, read_only: bool) -> None:
        root = self.root
        try:
            # One call, because another run may remove its empty root meanwhile.
            mode = os.lstat(root).st_mode
        except OSError:
            return
        if not stat.S_ISDIR(mode) and not (stat.S_ISLNK(mode) and os.path.isdir(root)):
            raise NotADirectoryError(
                errno.ENOTDIR,
                "the root must be the directory that contains the steps, but is not a directory",
                root,
            )
        if os.path.lexists(os.path.join(root, METADATA_NAME)):
            refuse_checkpoint(root)

    def newest_epoch(self) -> int:
        found = LeaseFile(self.root).read()
        return max(0 if found is None else found.record.epoch, newest_epoch(self.root))

    def entries(self, *, leftovers: bool = True) -> list[StepInfo]:
        while True:
            try:
                root = OpenDirectory(self.root)
            except FileNotFoundError:
                return []
            with closing(root):
                names = [n for n in sorted(root.names()) if leftovers or STEP_NAME.match(n)]
                infos = {name: self._info(root, name) for name in names}
                # A run deletes a step after it has saved a later one, which may not be listed.
                has_changed = any(
                    not (info is not None and info.complete)
                    and STEP_NAME.match(name)
                    and not root.contains(name)
                    for name, info in infos.items()
                )
            if not has_changed:
                found = infos.values()
                return [info for info in found if info is not None and (leftovers or info.complete)]

    def sweep(self, *, deleted_only: bool = False, attempt: str = "") -> list[str]:
        superseded = [] if deleted_only else self._superseded()
        with self.fenced() as lease:
            removed, failures = self.protocol.sweep(deleted_only, attempt, lease, superseded)
        for failure in failures:
            LOGGER.warning(
                "a leftover could not be removed: %s. The next sweep will try again", failure
            )
        return removed

    def target(
        self,
        step: int,
        options: WriteOptions,
        *,
        attempt: str,
        may_replace: bool = False,
        marker: Callable[[], dict[str, Any]] = dict,
        make_room: Callable[[], None] = lambda: None,
    ) -> Target:
        from torch_ckpt.steps.local_target import StepTarget

        return StepTarget(
            self.root,
            self.protocol,
            self.patience,
            self.fenced,
            step,
            attempt=attempt,
            may_replace=may_replace,
            marker=marker,
            make_room=make_room,
            options=options,
        )

    def delete(self, step: int) -> bool:
        with suppress(FileNotFoundError), self.fenced() as lease:
            return self.protocol.remove(step_name(step), lease)
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
        return os.path.lexists(os.path.join(self._refreshed(step), MARKER_NAME))

    def marker_of(self, step: int) -> dict[str, Any] | None:
        return read_marker(self._refreshed(step))

    def is_pinned(self, step: int) -> bool:
        return os.path.lexists(os.path.join(self._refreshed(step), PINNED_NAME))

    def set_pinned(self, step: int, pinned: bool) -> None:
        # With the lock, so that no save replaces the directory meanwhile.
        with closing(OpenDirectory(self.root)) as root, locked(root):
            super().set_pinned(step, pinned)

    def _set_pinned(self, step: int, pinned: bool) -> None:
        with closing(OpenDirectory(self.path_of(step))) as opened:
            if pinned:
                _core.pin_step(opened)
            else:
                opened.remove(PINNED_NAME)
                opened.sync()

    def _superseded(self) -> list[str]:
        """Returns the directories with the marker of a run after which another run has completed
        steps."""
        epochs: dict[str, int] = {}
        for name in os.listdir(self.root) if os.path.isdir(self.root) else ():
            parsed = _core.parse_step_name(name)
            marker = read_marker(os.path.join(self.root, name)) if parsed else None
            if marker is not None:
                epochs[name] = epoch_of(marker) or 0
        newest = max((epochs[name] for name in epochs if STEP_NAME.match(name)), default=0)
        return [name for name, epoch in epochs.items() if epoch < newest]

    def _refreshed(self, step: int) -> str:
        """Returns the path of a step, which the client of a network file system looks up again."""
        with suppress(OSError), closing(OpenDirectory(self.root)) as root:
            root.refresh(step_name(step))
        return self.path_of(step)

    def _info(self, root: OpenDirectory, name: str) -> StepInfo | None:
        root.refresh(name)
        parsed, path = _core.parse_step_name(name), os.path.join(self.root, name)
        if parsed is None or not os.path.isdir(path):
            return None
        step, kind = int(parsed[0]), parsed[1]
        marker = read_marker(path) if kind == _core.StepKind.STEP else None
        try:
            if marker is None:
                state = "deleted" if kind == _core.StepKind.DELETED else "unfinished"
                _core.fault_point("scandir", path)
                return StepInfo(step, path, state, bytes=_bytes_in(path))
            pinned = os.path.lexists(os.path.join(path, PINNED_NAME))
            return info_of(step, path, marker, pinned, lambda: _bytes_in(path))
        except FileNotFoundError:
            # Another process has deleted the directory.
            return None


def _bytes_in(path: str) -> int:
    with closing(OpenDirectory(path)) as opened:
        return opened.bytes()
