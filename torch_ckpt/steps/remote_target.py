"""Saves one step beneath a URL. Object stores have no rename, so a marker completes the step.

1. Every rank writes its files into a staging directory and uploads them. The names of a save's
   files contain a unique tag, so no existing file is overwritten, and a step that is to be replaced
   remains unchanged.
2. If any rank fails, the files of the save are removed. No other file has changed.
3. The coordinator checks that all data files exist. If the save replaces a step, the coordinator
   reads the metadata and the marker of that step, and removes the marker. It then uploads the new
   metadata and, last, the new marker. Only then is the step complete, and the save committed on all
   ranks. If a request fails, the old metadata and marker are restored.
4. The coordinator removes all other files, which belong to a replaced step or to interrupted saves.

Two saves never mix: the metadata names files of one save, and all of these files exist when the
metadata is uploaded. If the coordinator dies during 3, it leaves a directory without a marker,
which is not a step. A step that was to be replaced is then lost.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_ckpt import _C, _core
from torch_ckpt._base import exit_threads
from torch_ckpt._base.life_cycle import before_thread_pools_end
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.directory import OpenDirectory
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.marker import encoded_marker
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME
from torch_ckpt.errors import CheckpointError, NotCommitted
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import DirectoryTarget, Opened, Target, require_one_target
from torch_ckpt.saving.write import Written
from torch_ckpt.steps.busy import DELETED_NAME, busy
from torch_ckpt.steps.remote_files import RemoteFiles, require_staging_room
from torch_ckpt.steps.step_store import refuse_complete_step

# fsspec's file systems resolve host names in a thread pool, so saves must end before the pool ends.
before_thread_pools_end(exit_threads.join)


class RemoteStepTarget(DirectoryTarget):
    """One step beneath a URL, as the module docstring describes.

    Args:
        files: files of the step.
        step: step number.
        staging_dir: local directory for all files that this rank writes; None uses the system's
            temporary directory.
        may_replace: True if a complete step may be replaced.
        marker: returns the content of the marker, a dict of JSON values. Called on the coordinator
            at the commit.
        options: the options of the save.
    """

    def __init__(
        self,
        files: RemoteFiles,
        step: int,
        staging_dir: str | None,
        *,
        may_replace: bool,
        marker: Callable[[], dict[str, Any]],
        options: WriteOptions,
    ) -> None:
        # Staged files need not survive a power failure.
        Target.__init__(self, files.url, dataclasses.replace(options, sync_files=False))
        self._directory = self._own_rank = self.lease = None
        self._ends_earlier = True
        self._files = files
        self._step = step
        self._staging_dir = staging_dir
        self._may_replace = may_replace
        self._marker = marker
        self._upload: _Upload | None = None

    def open(self, rank: int, ranks: int) -> Opened:
        self.discard()
        if rank == 0:
            self._refuse_existing(self._files.list())
        staging = tempfile.mkdtemp(prefix="torch_ckpt-", dir=self._staging_dir)
        # Messages show this name.
        self.directory_path = os.path.join(staging, os.path.basename(self.path))
        try:
            opened = super().open(rank, ranks)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        self._upload = _Upload(self._files, staging, rank == 0)
        return opened._replace(save=self.path)

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        require_one_target(opened)
        assert self._upload is not None
        return [self._upload.tag.encode()] * len(opened)

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[OpenDirectory, str, _C.SaveSources]:
        directory, prefix, sources = super().files(state, items, layout)
        require_staging_room(self.directory_path, sources.nbytes, self.path)
        return directory, prefix, sources

    def written(self, written: Written) -> None:
        """Uploads the files that this rank has written."""
        files = set(written.files.names)
        self._files.for_each(self._upload_file, ((file,) for file in sorted(files)))

    def undo(self, written: Written) -> None:
        if self._upload is not None:
            self._upload.remove(set(written.files.names))

    def publish(self, data: _core.EncodedMetadata, files: Collection[str]) -> None:
        """Completes the step.

        Raises:
            NotCommitted: the save failed, and its files have been removed. A step that was to be
                replaced is unchanged.
            FileExistsError: another run has completed the step during this save.
            CheckpointError: it is unknown whether the step is complete, because a request of the
                commit failed, and so did the requests to undo the commit.
        """
        self._commit(data, set(files))

    def discard(self) -> None:
        super().discard()
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.end()

    # --- private ---------------------------------------------------------------------------------

    def _commit(self, data: _core.EncodedMetadata, files: set[str]) -> None:
        upload = self._upload
        assert upload is not None
        listing = self._files.list()
        self._refuse_existing(listing)
        missing = sorted(files - listing.keys())
        if missing:
            raise NotCommitted(
                f"{self._files.url}: {len(missing)} of the {len(files)} files that this save "
                f"uploaded no longer exist, for example {missing[0]}; check that no other job "
                "saves or sweeps beneath this root"
            )
        total = sum(listing[file].bytes for file in files) + len(data)
        facts = {"step": self._step, "saved_at": time.time(), "bytes": total, **self._marker()}
        document = encoded_marker(facts)
        former = self._read_former(listing)
        upload.committing = True
        try:
            self._files.remove({MARKER_NAME} & listing.keys())
            # Remove this file after the marker, or an interrupted deletion would become a step.
            self._files.remove({DELETED_NAME} & listing.keys())
            self._files.write(METADATA_NAME, bytes(data))
            self.bytes_moved += len(data)
            self._files.write(MARKER_NAME, document)
        except BaseException as error:
            self._undo_commit(files, former)
            if isinstance(error, OSError):
                raise NotCommitted(str(error), error.errno or 0) from error
            raise
        upload.remove(listing.keys() - files - {METADATA_NAME, MARKER_NAME, PINNED_NAME})

    def _refuse_existing(self, listing: Iterable[str]) -> None:
        if not self._may_replace and MARKER_NAME in listing and DELETED_NAME not in listing:
            refuse_complete_step(self._files.url)

    def _upload_file(self, file: str) -> None:
        def count(moved: int) -> None:
            self.bytes_moved += moved

        source = Path(self.directory_path, file)
        self._files.upload(str(source), file, count)
        # Count this as a heartbeat, because some file systems do not report progress.
        count(1)
        source.unlink()

    def _read_former(self, listing: Iterable[str]) -> dict[str, bytes]:
        """Reads the metadata and the marker, in this order, of a step that is to be replaced.
        Returns an empty dict if the step is not complete."""
        names = (METADATA_NAME, MARKER_NAME)
        if DELETED_NAME in listing or not set(names) <= set(listing):
            return {}
        return {name: self._files.read(name) for name in names}

    def _undo_commit(self, files: set[str], former: dict[str, bytes]) -> None:
        """Undoes a commit after a failed request, which may nevertheless have taken effect."""
        try:
            for name, data in former.items():
                self._files.write(name, data)
            if not former:
                self._files.remove([MARKER_NAME])
        except OSError as error:
            raise CheckpointError(
                f"{self._files.url}: a request of the commit failed, and so did undoing the commit "
                f"({error}). It is unknown whether the step is complete, and which save wrote it. "
                f"If the step has no file {MARKER_NAME}, save again."
            ) from error
        assert self._upload is not None
        self._upload.remove(files if former else {METADATA_NAME, *files})


class _Upload:
    """The staged files of a save on this rank, and the files that the save adds to the step.

    If the object is garbage-collected, the staged files are removed and the step is no longer busy.

    Attributes:
        tag: part of the names of the save's data files.
        committing: True once the commit has started; from then on, only the commit removes files.
    """

    def __init__(self, files: RemoteFiles, staging: str, is_coordinator: bool) -> None:
        self.tag = f"{uuid.uuid4().hex[:8]}_"
        self.committing = False
        self._files = files
        self._is_coordinator = is_coordinator
        busy.begin(files.url)
        self._release = weakref.finalize(self, _release, staging, files.url, os.getpid())

    def remove(self, names: Iterable[str]) -> None:
        """Removes unused files of the step. Logs failures."""
        try:
            self._files.remove(names)
        except OSError as error:
            LOGGER.warning("unused files are left in %s: %s", self._files.url, error)

    def end(self) -> None:
        """Removes the staged files, and, on the coordinator, all files of a failed save."""
        try:
            if self._is_coordinator and not self.committing:
                # This includes the files of ranks that died.
                self.remove([name for name in self._files.list() if f"_{self.tag}" in name])
        except OSError as error:
            LOGGER.warning("unused files may be left in %s: %s", self._files.url, error)
        finally:
            self._release()


def _release(staging: str, url: str, process: int) -> None:
    # In a forked child the staging directory belongs to the parent.
    if os.getpid() == process:
        shutil.rmtree(staging, ignore_errors=True)
        busy.end(url)
