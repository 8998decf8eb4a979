"""The steps of a run: a directory of ten digits for each, beneath a root.

A crash at any point leaves each step either complete or not there, and a leftover that says so by
its name.

1. Step 100 is written into ``0000000100.tmp-{attempt}``, as any checkpoint (saving/session.py,
   csrc/directory/lease.h). The attempt is 8 hex digits that the ranks of a run have agreed on,
   so that nothing that is left of an earlier run, or still runs, is in the way.
2. When the files of all ranks are durable and the metadata is committed, the coordinator writes
   ``write_completed`` beside them: a JSON document of what the step is. The file is fsynced, then
   the directory.
3. It renames the directory to ``0000000100`` and fsyncs the root. Only now is the save committed,
   on every rank. A step that is replaced is renamed as in 5 just before.
4. A step is complete if its name is ten digits and the marker is in it. Who lists the root sees
   nothing else as a step.
5. A deletion needs the directory for itself (csrc/directory/lease.h), so no step goes that is
   being loaded. It is renamed to ``0000000100.deleted-{8 hex digits}``, the root fsynced, then its
   files go: a power cut brings back all of it or nothing. A deletion and a save that replaces a
   step rename under a ``flock`` of the root, so a deletion never renames the new step.
6. A directory of ten digits without the marker is of no save of a manager: somebody has put it
   there, and it stays until that step is saved.
7. At start the sweep ends what a crash has interrupted: a directory with the marker whose rename in
   3 was not reached, and whose step is not there, gets its name; other leftovers go. None does
   while somebody works in it.
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
from torch_ckpt.steps.lease import in_turn
from torch_ckpt.steps.marker import pin, read_marker, write_marker
from torch_ckpt.steps.store import StepInfo, StepStore, info_of

_LEFTOVER = re.compile(r"^(\d{10})\.(tmp|deleted)-[0-9a-f]{8}$", re.ASCII)


class LocalSteps(StepStore):
    """The steps beneath a local directory.

    Args:
        patience: seconds that files of other ranks may take to be seen.
    """

    def __init__(self, root: str | os.PathLike[str], *, patience: float = 30.0) -> None:
        super().__init__(os.path.abspath(root))
        self.patience = patience
        self._saved_in: tuple[int, ...] | None = None

    def saved_in(self, root: tuple[int, ...]) -> None:
        """From now on nothing is removed where the path leads to another root than this one.

        Args:
            root: the identity of its directory.
        """
        self._saved_in = root

    @property
    def lease_root(self) -> str:
        return self.root

    def path_of(self, step: int) -> str:
        """The directory of a complete step."""
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
        gone = []
        for name in names:
            if deleted_only and ".deleted-" not in name:
                continue
            # Between the making of a directory and the lease nobody works in it.
            if attempt and name.endswith(f".tmp-{attempt}"):
                continue
            try:
                if self._sweep(name):
                    gone.append(name)
            except OSError as error:
                # The others still may go.
                LOGGER.warning("a leftover could not be removed, and is tried again: %s", error)
        return gone

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
                # A load or a save beside us may be removing it.
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
            raise FileNotFoundError(2, "there is no complete step to pin", path)
        if pinned:
            with closing(OpenDirectory(path)) as opened:
                pin(opened)
            return
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(path, PINNED_NAME))
        _core.sync_directory(path)

    def remove(self, name: str) -> bool:
        """Removes a directory beneath the root, unless somebody works in it.

        Returns:
            Whether it has gone.

        Raises:
            OSError: it is not there, or cannot be removed; or the last save went to another root.
        """
        path = os.path.join(self.root, name)
        with closing(OpenDirectory(self.root)) as root, closing(OpenDirectory(path)) as opened:
            if self._saved_in not in (None, root.identity()):
                raise OSError(
                    errno.ESTALE,
                    "the path leads to another directory than at the last save, so nothing is "
                    "removed there",
                    self.root,
                )
            # Without locks nothing shows the readers of a step. It is deleted all the same, since
            # the run that deletes it holds the root's lease.
            if not opened.try_lock_exclusive() and opened.has_locks:
                return False
            if ".deleted-" not in name:
                aside = aside_of(name)
                with in_turn(root) as has_turn:
                    # A save may have replaced the directory since it was opened.
                    if not has_turn or not is_named(opened, root, name):
                        return False
                    root.rename(name, aside)
                if not is_named(opened, root, aside):
                    # A save that waited for its turn for too long has replaced it all the same.
                    root.rename(aside, name)
                    return False
                root.sync()
                path = os.path.join(self.root, aside)
            if os.path.islink(path):
                # To a disk of somebody's choice; what is there is not ours to remove.
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
            # Deleted meanwhile.
            return None

    def _sweep(self, name: str) -> bool:
        """Whether it was a leftover, and has gone."""
        match = _LEFTOVER.match(name)
        if match is None:
            return False
        path = os.path.join(self.root, name)
        if not os.path.isdir(path):
            return False
        # Another sweep may be at it.
        with suppress(FileNotFoundError):
            if match.group(2) == "tmp":
                final = match.group(1)
                with closing(OpenDirectory(path)) as opened:
                    if not opened.try_lock_exclusive():
                        return False
                    if MARKER_NAME in opened.names() and not self._is_there(final):
                        os.rename(path, os.path.join(self.root, final))
                        _core.sync_directory(self.root)
                        return False
            return self.remove(name)
        return False

    def _is_there(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.root, name))


class _StepWriter(FileSystemWriter):
    """Writes one step, and names it when it is complete."""

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
        self._tidies = False
        self._works = False
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
                self._refuse_if_there()
                _core.make_directories(self._steps.root)
                require_room(
                    self._steps.root,
                    self._expected_bytes,
                    f"the step takes at least {size(self._expected_bytes)}",
                    "keep fewer steps, or make room",
                    self._make_room,
                )
            super().set_up_for_save(rank)
            if rank == 0:
                # Of a save of this run that was complete and could not be named.
                self.directory.remove(MARKER_NAME)
        finally:
            # Not before, when another rank may be making the directory.
            self._tidies = True

    def commit(self, data: bytes, files: set[str]) -> None:
        # The lease ends with the metadata; no sweep may come between that and the name.
        with (
            closing(self.directory.reopen()) as opened,
            closing(OpenDirectory(self._steps.root)) as root,
        ):
            opened.share()
            replaced = self._name(opened, root, data, files)
        if replaced is not None:
            # Who loads it keeps it until the next sweep; and the save has not failed.
            with suppress(OSError), self._working():
                self._steps.remove(replaced)

    def abandon(self) -> None:
        super().abandon()
        if not self._tidies:
            return
        # Every rank tries: rank 0 may have failed before it could make a writer. The coordinator
        # has removed the files of a failed save; files of others keep the directory.
        with suppress(OSError), closing(OpenDirectory(self.path)) as opened:
            # Another rank may be saving the step again.
            if opened.try_lock_exclusive():
                os.rmdir(self.path)

    def bytes_moved(self) -> int:
        return super().bytes_moved() + (time.monotonic_ns() if self._works else 0)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """A block that may take long, in which nothing is moved; it ends by itself."""
        self._works = True
        try:
            yield
        finally:
            self._works = False

    def _name(
        self, opened: OpenDirectory, root: OpenDirectory, data: bytes, files: set[str]
    ) -> str | None:
        """Makes the step complete; the name of what it has replaced."""
        attempt, aside = os.path.basename(self.path), aside_of(self._step)
        uncertain: DurabilityUncertain | None = None
        try:
            # Nothing that can fail comes after the rename.
            identity = root.identity()
            with self._working():
                self._refuse_if_missing(opened, files)
            super().commit(data, files)
            self._mark(opened)
            self._refuse_if_there()
            is_there = os.path.lexists(self._final)
            if os.path.lexists(os.path.join(self._final, PINNED_NAME)):
                pin(opened)
            try:
                # A deletion must not rename the new step in the place of the replaced one.
                with in_turn(root) if is_there else nullcontext():
                    _core.publish(
                        root,
                        attempt,
                        self._step,
                        # Only what was looked at is put aside, and removed.
                        aside if is_there else None,
                        renamed=opened,
                        sync=self.sync_files,
                        replace=is_there,
                        sync_above=False,
                    )
            except DurabilityUncertain as error:
                uncertain = error
        except BaseException as error:
            # What may be visible is an unfinished step's part, which goes.
            said = error.args[0] if isinstance(error, DurabilityUncertain) else error
            with suppress(OSError):
                if aside in root.names():
                    raise NotCommitted(
                        f"{self._final}: {said}; the step is complete in {self.path}, and the "
                        "next sweep names it"
                    ) from error
                self._discard(opened, root)
            if isinstance(error, FileExistsError):
                raise
            # Metadata that may not last does not make a step either; nor what somebody has moved.
            if isinstance(error, OSError | DurabilityUncertain) or type(error) is CheckpointError:
                number = getattr(error, "errno", None) or 0
                raise NotCommitted(f"{self._final}: {said}", number) from error
            raise
        self._steps.saved_in(identity)
        if uncertain is not None:
            raise DurabilityUncertain(
                f"{self._final}: {uncertain.args[0]}", uncertain.errno
            ) from uncertain
        return aside if is_there else None

    def _discard(self, opened: OpenDirectory, root: OpenDirectory) -> None:
        """Removes what the save has written, wherever its directory is now."""
        if not opened.try_lock_exclusive():
            return
        # The marker first: without it the next sweep removes the rest.
        for name in sorted(opened.names(), key=lambda name: name != MARKER_NAME):
            opened.remove(name)
        attempt = os.path.basename(self.path)
        if is_named(opened, root, attempt):
            os.rmdir(attempt, dir_fd=root.fd)

    def _mark(self, opened: OpenDirectory) -> None:
        said = {"step": int(self._step), "saved_at": time.time(), "bytes": bytes_in(opened.fd)}
        write_marker(opened, {**said, **self._marker()}, self.sync_files)

    def _refuse_if_missing(self, opened: OpenDirectory, files: set[str]) -> None:
        """Other ranks' files are here, or their directory is another one."""
        missing = files - set(opened.names())
        until = time.monotonic() + self._steps.patience
        while missing:
            # Network file systems remember for some time what was not there.
            missing -= set(opened.names())
            if missing and time.monotonic() >= until:
                raise NotCommitted(
                    f"{self._final}: what other ranks have written is not here ("
                    f"{', '.join(sorted(missing)[:3])}): all ranks must see the same directory"
                )
            if missing:
                time.sleep(0.1)

    def _refuse_if_there(self) -> None:
        if os.path.lexists(self._final) and not os.path.isdir(self._final):
            # Nobody knows whose it is, and a step that takes its name would have to remove it.
            raise FileExistsError(
                errno.EEXIST, "this has a step's name and is not a directory: move it", self._final
            )
        if not self._may_replace and read_marker(self._final) is not None:
            raise FileExistsError(
                17,
                "the step is there and complete, and is not one that training has come back to: "
                "restore() first, or delete it, or use another root",
                self._final,
            )


def aside_of(name: str) -> str:
    """What a directory of a step is named that is not a step any more."""
    return f"{name[:10]}.deleted-{uuid.uuid4().hex[:8]}"


def is_named(opened: OpenDirectory, root: OpenDirectory, name: str) -> bool:
    """Whether a name beneath a root is that of an open directory."""
    try:
        return os.path.samestat(os.stat(name, dir_fd=root.fd), os.fstat(opened.fd))
    except FileNotFoundError:
        return False


def bytes_in(directory: str | int) -> int:
    """Of all files of a checkpoint's directory, by its path or its descriptor."""
    total = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total
