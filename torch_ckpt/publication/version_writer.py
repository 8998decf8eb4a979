"""The writer of one version. csrc/directory/version.h has the protocol."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt._base.version import __version__
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.safetensors_writer import (
    NewDirectory,
    SafetensorsWriter,
    SavedModel,
    StrPath,
)
from torch_ckpt.retention import Retention
from torch_ckpt.steps import LARGEST_STEP, MARKER_NAME, LocalSteps, encoded_marker, step_name


class VersionWriter(SafetensorsWriter):
    """Writes a version beneath a root, and updates ``latest``.

    Args:
        root, version, base, delta, keep, options: see :func:`torch_ckpt.publish`.
        is_export: a manager reports the errors of the save. Versions whose numbers are not smaller
            are deleted, and do not make the save fail.
        on_number: called on each rank with the number of the version, before it is published.
    """

    def __init__(
        self,
        root: StrPath,
        *,
        version: int | None,
        base: int | str | None,
        delta: bool,
        keep: Retention | None,
        is_export: bool = False,
        on_number: Callable[[int], None] = lambda _: None,
        **options: Any,
    ) -> None:
        # The coordinator chooses the name once all ranks have planned.
        name = "new version" if version is None else step_name(version)
        super().__init__(os.path.join(os.fspath(root), name), overwrite=False, **options)
        self._version = version
        self._base = base
        self._delta = delta
        self._keep = keep
        self.reported_elsewhere = self._deletes_later = is_export
        self._on_number = on_number
        # Set on the coordinator during a save.
        self._root: OpenDirectory | None = None
        self._base_step: int | None = None
        self._number = 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_root": None}

    @property
    def identity(self) -> str | None:
        return f"{super().identity}, base={self._base}, delta={self._delta}"

    @property
    def destination(self) -> str:
        return os.fspath(self._parent if self._version is None else self.path)

    @property
    def _steps(self) -> LocalSteps:
        return LocalSteps(self._parent)

    def new_directory(self) -> NewDirectory:
        self._root = self.directory
        versions = [info.step for info in self._steps.entries(leftovers=False)]
        self._refuse_checkpoints(versions)
        # An interrupted publication may not have updated the link.
        _core.update_latest(self._root, self.sync_files)
        self._steps.sweep(deleted_only=True)
        if self._deletes_later and self._version is not None:
            versions = self._delete_later(self._root, versions, self._version)
        newest = versions[-1] if versions else -1
        self._number = newest + 1 if self._version is None else self._version
        if self._number <= newest:
            raise FileExistsError(
                errno.EEXIST,
                f"version {newest} is the newest, so a new version must have a larger number. Pass "
                "a larger version, or delete the later versions",
                os.fspath(self.path),
            )
        if self._number > LARGEST_STEP:
            raise CheckpointError(f"{self._parent}: version {newest} has the largest number")
        self._base_step = self._find_base(versions)
        self.path = self._parent / step_name(self._number)
        return super().new_directory()

    def _refuse_checkpoints(self, versions: list[int]) -> None:
        """Raises CheckpointError if the newest step beneath the root is not a version."""
        newest = self._steps.path_of(versions[-1]) if versions else ""
        if newest and os.path.lexists(os.path.join(newest, _core.metadata_name(None))):
            raise CheckpointError(
                f"{newest} is a checkpoint, which a run saved; publish to another root"
            )

    def _delete_later(self, root: OpenDirectory, versions: list[int], number: int) -> list[int]:
        """Deletes the versions that are not older than a new one. Returns the others."""
        older = [version for version in versions if version < number]
        later = versions[len(older) :]
        if not later:
            return versions
        LOGGER.warning(
            "%s: deleting the versions %s, because training was rewound and publishes version %d",
            self._parent,
            later,
            number,
        )
        # The link must not lead to a version that is being deleted.
        _core.update_latest(root, self.sync_files, step_name(number))
        for version in later:
            if not self._steps.delete(version):
                raise CheckpointError(
                    f"{self._steps.path_of(version)}: a process is reading this version, which "
                    f"would be newer than version {number}; try again later"
                )
        return older

    def _find_base(self, versions: list[int]) -> int | None:
        if self._base is None:
            return None
        if self._base == "latest":
            return versions[-1] if versions else None
        if self._base not in versions:
            raise CheckpointError(
                f"{self._parent}: there is no version {self._base} to use as base; the versions "
                f"are {versions or 'none'}"
            )
        return int(self._base)

    def prefix_of_files(self, tag: str) -> str:
        # All ranks know the number from the temporary name.
        self._on_number(int(tag.removeprefix(".").partition(".")[0]))
        return super().prefix_of_files(tag)

    def complete(
        self,
        save: NewDirectory,
        layout: _core.SafetensorsLayout,
        tables: list[dict[str, bytes]],
    ) -> None:
        base, sync = self._base_step, self.sync_files
        marker = encoded_marker(
            {
                "step": self._number,
                "saved_at": time.time(),
                "bytes": sum(size for _, size in layout.files()),
                "ranks": len(tables),
                "notes": {} if base is None else {"base": base},
                "torch_ckpt": __version__,
            }
        )
        with self.working():
            save.complete(layout, self._copied | {MARKER_NAME: marker}, tables, sync)
            if base is None:
                return
            with closing(OpenDirectory(self._steps.path_of(base))) as opened:
                share_or_warn(opened)
                save.link_unchanged(opened, sync)
                if self._delta:
                    save.write_delta(opened, step_name(base), sync)

    def _publish(self, tables: list[dict[str, bytes]]) -> SavedModel:
        root, path = self._root, self.path
        assert root is not None
        saved = super()._publish(tables)
        with self.working():
            try:
                _core.update_latest(root, self.sync_files)
            except OSError as error:
                text = f"{path} is published, but {_core.LATEST_NAME} does not lead to it: {error}"
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise CheckpointError(text) from error
                # The file system has no symbolic links.
                warn(text)
            if self._keep is not None:
                self._delete_others(root, self._keep)
        return saved

    def _delete_others(self, root: OpenDirectory, keep: Retention) -> None:
        steps = self._steps
        if not root.is_at_path():
            LOGGER.warning("%s was moved, so no version was deleted", steps.root)
            return
        for step in keep.to_delete(steps.entries(leftovers=False)):
            try:
                if not steps.delete(step):
                    LOGGER.info("version %d is being read, and will be deleted later", step)
            except OSError as error:
                LOGGER.warning("version %d was not deleted: %s", step, error)

    def abandon(self) -> None:
        super().abandon()
        self._root = None
