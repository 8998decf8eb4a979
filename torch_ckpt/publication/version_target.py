"""The targets of one version. csrc/directory/version.h has the protocol beneath a local root.

Beneath a URL, the steps of a publication are:

1. The coordinator chooses a number above the numbers of all versions, and deletes the stale
   versions of an export.
2. The version is stored like a model (huggingface/object_model.py). It replaces the objects of an
   interrupted publication of the same number. The marker ``write_completed`` comes last, on the
   condition that it is absent. This is the commit: the version is a complete step as soon as it has
   the marker. Before that, the coordinator checks that all objects of the version exist, because
   another process may have deleted them as leftovers.
3. The object ``latest`` has the name of the newest version. It is replaced on the condition that it
   has not changed since it was read, so of two publications the one with the larger number wins.
4. Versions that are no longer kept are deleted like steps. Before the version to which ``latest``
   leads is deleted as stale, ``latest`` is replaced or deleted.

Versions beneath a URL share no files, and have no deltas.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import closing

from torch_ckpt import _C, _core
from torch_ckpt._base.log import LOGGER, warn
from torch_ckpt._base.system import local_path
from torch_ckpt._base.version import __version__
from torch_ckpt.checkpoint.directory import OpenDirectory, share_or_warn
from torch_ckpt.errors import CheckpointError
from torch_ckpt.huggingface.model_target import (
    LocalModelTarget,
    NewDirectory,
    Safetensors,
    StrPath,
)
from torch_ckpt.huggingface.object_model import ModelObjects, ObjectModelTarget
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import Opened
from torch_ckpt.saving.write import Written
from torch_ckpt.steps import (
    LARGEST_STEP,
    MARKER_NAME,
    LocalSteps,
    StepInfo,
    StepStore,
    encoded_marker,
    open_steps,
    step_name,
)
from torch_ckpt.steps.retention import Retention
from torch_ckpt.stores import Changed, ObjectStore, Version, open_store
from torch_ckpt.stores.folder import ObjectFolder

# Maximum size of the object "latest".
_LATEST_BYTES = 1 << 10


class NewVersion:
    """The number of a version and the versions before it, on the coordinator.

    Args:
        version, base, delta, keep: see :func:`torch_ckpt.publish`.
        newest_valid: for exports: versions with larger numbers are stale. Those that are not older
            than the new version are deleted before it is complete. None: no version is stale.

    Attributes that :meth:`choose` sets:
        number: number of the version.
        base_number: number of the base; None if there is none.
        stale: numbers of the versions to delete.
    """

    def __init__(
        self,
        *,
        version: int | None,
        base: int | str | None,
        delta: bool,
        keep: Retention | None,
        newest_valid: int | None = None,
    ) -> None:
        self.version = version
        self.base = base
        self.delta = delta
        self._keep = keep
        self._newest_valid = newest_valid
        self.number = -1
        self.base_number: int | None = None
        self.stale: list[int] = []

    def describe(self) -> str:
        """Returns the options that must be equal on all ranks."""
        return f"version={self.version}, base={self.base}, delta={self.delta}"

    def choose(self, steps: StepStore) -> None:
        """Chooses the number, the base and the stale versions.

        Raises:
            FileExistsError: a version with a larger number exists.
            CheckpointError: there is no such base, a stale version is pinned, or the newest version
                has the largest number.
        """
        versions = steps.entries(leftovers=False)
        newest = versions[-1].step if versions else -1
        self.number = newest + 1 if self.version is None else self.version
        if self.number > LARGEST_STEP:
            raise CheckpointError(f"{steps.root}: version {newest} has the largest number")
        later = [info for info in versions if info.step >= self.number]
        if later:
            self._require_stale(later)
        self.stale = [info.step for info in later]
        earlier = [info.step for info in versions if info not in later]
        self.base_number = self._find_base(steps.root, earlier)

    def _require_stale(self, later: list[StepInfo]) -> None:
        """Raises if a version that is not older than the new one must not be deleted."""
        first, newest = later[0], later[-1].step
        if self._newest_valid is None or first.step <= self._newest_valid:
            raise FileExistsError(
                errno.EEXIST,
                f"version {newest} is the newest, so a new version must have a larger number than "
                f"{self.number}. Pass a larger number, or delete the later versions",
                first.path,
            )
        for info in later:
            if info.pinned:
                raise CheckpointError(
                    f"{info.path}: this version is stale, because training was rewound, but it is "
                    "pinned; unpin it, or export to another root"
                )

    def _find_base(self, root: str, versions: list[int]) -> int | None:
        if self.base is None:
            return None
        if self.base == "latest":
            return versions[-1] if versions else None
        if self.base not in versions:
            raise CheckpointError(
                f"{root}: there is no version {self.base} to use as base; the versions are "
                f"{versions or 'none'}"
            )
        return int(self.base)

    def marker(self, layout: _core.SafetensorsLayout, ranks: int) -> bytes:
        """Returns the contents of the marker."""
        base = self.base_number
        return encoded_marker(
            {
                "step": self.number,
                "saved_at": time.time(),
                "bytes": sum(size for _, size in layout.files()),
                "ranks": ranks,
                "notes": {} if base is None else {"base": base},
                "torch_ckpt": __version__,
            }
        )

    def delete_stale(self, steps: StepStore) -> None:
        if self.stale:
            LOGGER.warning(
                "%s: deleting the stale versions %s, because training was rewound and exports "
                "version %d",
                steps.root,
                self.stale,
                self.number,
            )
        for step in self.stale:
            if not steps.delete(step):
                raise CheckpointError(
                    f"{steps.path_of(step)}: this version is stale, because training was "
                    "rewound, but a process is reading it; export again later"
                )

    def delete_others(self, steps: StepStore) -> None:
        """Finishes interrupted deletions, and deletes the versions that are not kept. Failures are
        logged, because the version is published."""
        try:
            steps.sweep(deleted_only=True)
            if self._keep is None:
                return
            for step in self._keep.to_delete(steps.entries(leftovers=False)):
                # The version may have been pinned since it was listed.
                if not steps.is_pinned(step) and not steps.delete(step):
                    LOGGER.info("version %d is being read, and will be deleted later", step)
        except Exception as error:
            LOGGER.error("%s: versions could not be deleted: %s", steps.root, error)


class LocalVersionTarget(LocalModelTarget):
    """A version beneath a local root, and the link ``latest``.

    Args:
        root: see :func:`torch_ckpt.publish`.
        format, options: see :class:`ModelTarget`.
        version: the version.
    """

    def __init__(
        self, root: StrPath, format: Safetensors, options: WriteOptions, version: NewVersion
    ) -> None:
        # The coordinator chooses the name once all ranks have planned.
        name = "new version" if version.version is None else step_name(version.version)
        super().__init__(os.path.join(os.fspath(root), name), format, options)
        if version.version is None:
            self.path = str(self._parent)
        self._version = version
        # Set on the coordinator.
        self._root: OpenDirectory | None = None

    def _describe(self) -> str:
        return f"{super()._describe()}, {self._version.describe()}"

    @property
    def _steps(self) -> LocalSteps:
        return LocalSteps(self._parent)

    def new_directory(self) -> NewDirectory:
        assert self._directory is not None
        root = self._root = self._directory
        _refuse_checkpoint(self._steps.entries(leftovers=False))
        # An interrupted publication may not have updated the link.
        self._update_latest(root)
        version = self._version
        version.choose(self._steps)
        replaces = version.number in version.stale
        return NewDirectory(root, step_name(version.number), replaces, self._copied)

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

    def complete(
        self,
        save: NewDirectory,
        layout: _core.SafetensorsLayout,
        tables: list[dict[str, bytes]],
    ) -> None:
        version = self._version
        marker = version.marker(layout, len(tables))
        with self.busy():
            save.complete(
                layout, self._copied | {MARKER_NAME: marker}, tables, self.options.sync_files
            )
            if version.base_number is not None:
                self._compare(save, version.base_number)
            version.delete_stale(self._steps)

    def _compare(self, save: NewDirectory, base: int) -> None:
        """Shares files with the base, and writes the delta."""
        with closing(OpenDirectory(self._steps.path_of(base))) as opened:
            share_or_warn(opened)
            save.link_unchanged(opened, self.options.sync_files)
            if self._version.delta:
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
        steps = self._steps
        if not root.is_at_path():
            LOGGER.warning("%s was moved, so no version was deleted", steps.root)
            return
        self._version.delete_others(steps)

    def discard(self) -> None:
        super().discard()
        self._root = None


class ObjectVersionTarget(ObjectModelTarget):
    """A version beneath a URL, and the object ``latest``; see the module's docstring.

    Args:
        root: the root.
        format, options: see :class:`ModelTarget`.
        version: the version.

    Raises:
        ValueError: the version has a base.
    """

    def __init__(
        self, root: ObjectStore, format: Safetensors, options: WriteOptions, version: NewVersion
    ) -> None:
        super().__init__(root, format, options)
        if version.base is not None:
            raise ValueError(
                f"{self.path}: versions beneath a URL share no files and have no deltas. Omit base "
                "and delta, or publish to a local root"
            )
        self._root = root
        self._version = version

    def _describe(self) -> str:
        return f"{super()._describe()}, {self._version.describe()}"

    @property
    def _steps(self) -> StepStore:
        return open_steps(self._root.root.url, storage_options=self.options.storage_options)

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        version, steps = self._version, self._steps
        versions = steps.entries(leftovers=False)
        metadata = versions and f"{versions[-1].name}/{_core.metadata_name(None)}"
        if metadata and self._root.find(metadata) is not None:
            raise _is_checkpoint(versions[-1].path)
        version.choose(steps)
        # Lead away from the stale versions. An interrupted publication may not have done so.
        update_latest(self._root, steps, without=version.stale)
        version.delete_stale(steps)
        steps.sweep(deleted_only=True)
        name = step_name(version.number)
        self._enter(name)
        return [name.encode() + layout for layout in super().lay_out(plan, opened)]

    def _enter(self, name: str) -> None:
        self._store = self._root.beneath(name)
        self.path = self._store.root.url

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[ObjectFolder, str, _C.SaveSources]:
        name = len(step_name(0))
        self._enter(layout[:name].decode())
        return super().files(state, items, layout[name:])

    def begin(self, save: ModelObjects) -> None:
        save.begin(True, is_hidden=True)

    def complete(
        self, save: ModelObjects, layout: _core.SafetensorsLayout, tables: list[dict[str, bytes]]
    ) -> None:
        steps = self._steps
        save.commit(layout, tables, self._version.marker(layout, len(tables)))
        try:
            update_latest(self._root, steps)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} is published, but {_core.LATEST_NAME} does not lead to it: {error}"
            ) from error
        self._version.delete_others(steps)


def version_target(
    root: StrPath, format: Safetensors, options: WriteOptions, version: NewVersion
) -> LocalVersionTarget | ObjectVersionTarget:
    """Returns the target of a version beneath a local root or a URL."""
    directory = local_path(root)
    if directory is None:
        store = open_store(os.fspath(root), options.storage_options)
        return ObjectVersionTarget(store, format, options, version)
    return LocalVersionTarget(directory, format, options, version)


def update_latest(root: ObjectStore, steps: StepStore, without: Sequence[int] = ()) -> None:
    """Makes the object ``latest`` beneath a URL lead to the newest version.

    Args:
        without: versions that are about to be deleted.
    """
    while True:
        current, version = _read_latest(root)
        infos = steps.entries(leftovers=False)
        numbers = [info.step for info in infos if info.step not in without]
        if not numbers:
            if current is not None and without:
                root.delete([_core.LATEST_NAME])
            return
        newest = step_name(numbers[-1]).encode()
        if current == newest:
            return
        try:
            root.exchange(_core.LATEST_NAME, newest, version)
            return
        except (FileExistsError, Changed):
            continue  # another publication has replaced it


def _read_latest(root: ObjectStore) -> tuple[bytes | None, Version | None]:
    try:
        return root.read(_core.LATEST_NAME, _LATEST_BYTES)
    except FileNotFoundError:
        return None, None


def _refuse_checkpoint(versions: list[StepInfo]) -> None:
    """Raises CheckpointError if the newest step beneath a local root is not a version."""
    if versions and os.path.lexists(os.path.join(versions[-1].path, _core.metadata_name(None))):
        raise _is_checkpoint(versions[-1].path)


def _is_checkpoint(path: str) -> CheckpointError:
    return CheckpointError(f"{path} is a checkpoint, which a run saved; publish to another root")
