"""The target of one version. csrc/directory/version.h has the protocol."""

from __future__ import annotations

import errno
import os
import time
from contextlib import closing
from pathlib import Path

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt._base.version import __version__
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.model_target import ModelTarget, NewDirectory, Safetensors, StrPath
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.write import Written
from torch_ckpt.steps import (
    LARGEST_STEP,
    MARKER_NAME,
    LocalSteps,
    StepInfo,
    encoded_marker,
    step_name,
)
from torch_ckpt.steps.retention import Retention


class VersionTarget(ModelTarget):
    """A version beneath a root, and the link ``latest``.

    Args:
        root, version, base, delta, keep: see :func:`torch_ckpt.publish`.
        format, options: see :class:`ModelTarget`.
        newest_valid: for exports: versions with larger numbers are stale. Those that are not older
            than the new version are deleted before it gets its name. None: no version is stale.
    """

    def __init__(
        self,
        root: StrPath,
        format: Safetensors,
        options: WriteOptions,
        *,
        version: int | None,
        base: int | str | None,
        delta: bool,
        keep: Retention | None,
        newest_valid: int | None = None,
    ) -> None:
        # The coordinator chooses the name once all ranks have planned.
        name = "new version" if version is None else step_name(version)
        super().__init__(os.path.join(os.fspath(root), name), format, options)
        if version is None:
            self.path = str(self._parent)
        self._version = version
        self._base = base
        self._delta = delta
        self._keep = keep
        self._newest_valid = newest_valid
        # Set on the coordinator.
        self._root: OpenDirectory | None = None
        self._base_step: int | None = None
        self._stale: list[int] = []

    def _describe(self) -> str:
        return f"{super()._describe()}, base={self._base}, delta={self._delta}"

    @property
    def number(self) -> int:
        """The number of the version, once the save has laid out its files."""
        return int(Path(self.path).name)

    @property
    def _steps(self) -> LocalSteps:
        return LocalSteps(self._parent)

    def new_directory(self) -> NewDirectory:
        assert self._directory is not None
        root = self._root = self._directory
        versions = self._steps.entries(leftovers=False)
        _refuse_checkpoint(versions)
        # An interrupted publication may not have updated the link.
        self._update_latest(root)
        newest = versions[-1].step if versions else -1
        number = newest + 1 if self._version is None else self._version
        if number > LARGEST_STEP:
            raise CheckpointError(f"{self._parent}: version {newest} has the largest number")
        later = [info for info in versions if info.step >= number]
        if later:
            self._require_stale(later, number)
        self._stale = [info.step for info in later]
        self._base_step = self._find_base([info.step for info in versions if info not in later])
        return NewDirectory(root, step_name(number), number in self._stale, self._copied)

    def _require_stale(self, later: list[StepInfo], number: int) -> None:
        """Raises if a version that is not older than the new one must not be deleted."""
        first, newest = later[0], later[-1].step
        if self._newest_valid is None or first.step <= self._newest_valid:
            raise FileExistsError(
                errno.EEXIST,
                f"version {newest} is the newest, so a new version must have a larger number than "
                f"{number}. Pass a larger number, or delete the later versions",
                first.path,
            )
        for info in later:
            if info.pinned:
                raise CheckpointError(
                    f"{info.path}: this version is stale, because training was rewound, but it is "
                    "pinned; unpin it, or export to another root"
                )

    def _delete_stale(self) -> None:
        if self._stale:
            LOGGER.warning(
                "%s: deleting the stale versions %s, because training was rewound and exports "
                "version %d",
                self._parent,
                self._stale,
                self.number,
            )
        for step in self._stale:
            if not self._steps.delete(step):
                raise CheckpointError(
                    f"{self._steps.path_of(step)}: this version is stale, because training was "
                    "rewound, but a process is reading it; export again later"
                )

    def _update_latest(self, root: OpenDirectory) -> None:
        try:
            _core.update_latest(root, self.options.sync_files)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # The file system has no symbolic links.
            warn(
                f"{self._parent}: {_core.LATEST_NAME} does not lead to the newest version: {error}"
            )

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

    def complete(
        self,
        save: NewDirectory,
        layout: _core.SafetensorsLayout,
        tables: list[dict[str, bytes]],
    ) -> None:
        base, sync = self._base_step, self.options.sync_files
        marker = encoded_marker(
            {
                "step": self.number,
                "saved_at": time.time(),
                "bytes": sum(size for _, size in layout.files()),
                "ranks": len(tables),
                "notes": {} if base is None else {"base": base},
                "torch_ckpt": __version__,
            }
        )
        with self.busy():
            save.complete(layout, self._copied | {MARKER_NAME: marker}, tables, sync)
            if base is not None:
                self._compare(save, base)
            self._delete_stale()

    def _compare(self, save: NewDirectory, base: int) -> None:
        """Shares files with the base, and writes the delta."""
        with closing(OpenDirectory(self._steps.path_of(base))) as opened:
            share_or_warn(opened)
            save.link_unchanged(opened, self.options.sync_files)
            if self._delta:
                save.write_delta(opened, step_name(base), self.options.sync_files)

    def commit(self, plan: AgreedPlan, written: list[Written]) -> bytes:
        root = self._root
        assert root is not None
        seal = super().commit(plan, written)
        try:
            with self.busy():
                self._update_latest(root)
                self._delete_others(root)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is published, but {_core.LATEST_NAME} does not lead to it: {error}"
            ) from error
        return seal

    def _delete_others(self, root: OpenDirectory) -> None:
        """Finishes interrupted deletions, and deletes the versions that are not kept. Failures are
        logged, because the version is published."""
        steps = self._steps
        if not root.is_at_path():
            LOGGER.warning("%s was moved, so no version was deleted", steps.root)
            return
        try:
            steps.sweep(deleted_only=True)
            if self._keep is None:
                return
            for step in self._keep.to_delete(steps.entries(leftovers=False)):
                if not steps.delete(step):
                    LOGGER.info("version %d is being read, and will be deleted later", step)
        except Exception as error:
            LOGGER.error("%s: versions could not be deleted: %s", steps.root, error)

    def discard(self) -> None:
        super().discard()
        self._root = None


def _refuse_checkpoint(versions: list[StepInfo]) -> None:
    """Raises CheckpointError if the newest step beneath a root is not a version."""
    if versions and os.path.lexists(os.path.join(versions[-1].path, _core.metadata_name(None))):
        raise CheckpointError(
            f"{versions[-1].path} is a checkpoint, which a run saved; publish to another root"
        )
