"""The save of one step beneath a URL. Object stores have no rename, so a marker makes the step.

1. Every rank writes its part to a staging directory of its own and copies it from there, file by
   file. The names of a save's files have a tag that no other save has, so nothing that is there is
   overwritten: a step that is to be replaced stays as it is.
2. Where any rank has failed, the files of the save are removed, and nothing else has happened.
3. The coordinator looks whether all data files are there, reads the metadata and the marker of a
   step that is to be replaced, removes that marker, copies the metadata, and then the marker. Only
   now is the step complete, and the save committed on any rank. Where a request has failed, the
   metadata and the marker that were there are put back.
4. What else is there, of a step that was replaced or of saves that died, is removed.

Two saves are never mixed: metadata names files of one save, all of which are there when it comes.
A coordinator that dies within 3 leaves a step without a marker, which is none; the one that was to
be replaced is then lost, too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from errno import EEXIST
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from torch_ckpt import _core
from torch_ckpt._base.log import LOGGER
from torch_ckpt.checkpoint.index import METADATA_NAME
from torch_ckpt.checkpoint.step_names import MARKER_NAME, PINNED_NAME
from torch_ckpt.errors import CheckpointError, NotCommitted
from torch_ckpt.saving.items import Written
from torch_ckpt.saving.rank_write import RankWrite
from torch_ckpt.saving.writer import FileSystemWriter
from torch_ckpt.steps.marker import encoded_marker
from torch_ckpt.steps.remote_files import RemoteFiles, require_staging_room

#: Is there while a step is deleted, so that the rest of it can go at any later time.
DELETED_NAME = "deleted"


class Busy:
    """The steps that this process saves, loads or removes, by URL; safe for use by several threads.

    Who removes a step has it alone: those that begin to save or load it wait until it has gone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._users: Counter[str] = Counter()
        self._reserved: set[str] = set()

    def __contains__(self, url: str) -> bool:
        return self._users[url] > 0

    def begin(self, url: str) -> None:
        def is_free() -> bool:
            if url in self._reserved:
                _core.fault_point("wait for the removal of a step", url)
            return url not in self._reserved

        with self._changed:
            self._changed.wait_for(is_free)
            self._users[url] += 1

    def end(self, url: str) -> None:
        with self._changed:
            self._users[url] -= 1

    @contextmanager
    def reserved(self, url: str) -> Iterator[bool]:
        """A block that has a step alone, if it is told True; somebody else has it if not."""
        with self._changed:
            is_free = url not in self and url not in self._reserved
            if is_free:
                self._reserved.add(url)
        try:
            yield is_free
        finally:
            if is_free:
                with self._changed:
                    self._reserved.discard(url)
                    self._changed.notify_all()


busy = Busy()


class RemoteWriter(FileSystemWriter):
    """Writes one step, as the head of this file says.

    Args:
        files: of the step.
        step: its number.
        staging_dir: a local directory for all that this rank writes; the system's temporary one if
            None.
        overwrite: whether a complete step may be replaced.
        marker: gives, on the coordinator at the commit, what the marker is to say: JSON.
        options: passed to :class:`FileSystemWriter`.
    """

    reported_elsewhere = True

    def __init__(
        self,
        files: RemoteFiles,
        step: int,
        staging_dir: str | None,
        overwrite: bool,
        marker: Callable[[], dict[str, Any]],
        options: dict[str, Any],
    ) -> None:
        # What is staged need not survive a power cut.
        super().__init__(files.url, **{**options, "sync_files": False})
        self._files = files
        self._step = step
        self._staging_dir = staging_dir
        self._may_replace = overwrite
        self._marker = marker
        self._upload: _Upload | None = None
        self._uploaded_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_upload": None}

    @property
    def identity(self) -> str | None:
        return self._files.url

    @property
    def destination(self) -> str:
        return self._files.url

    @property
    def tag(self) -> str:
        return self._upload.tag if self._upload is not None else ""

    def _refuse_url(self) -> None:
        """What is local here is the staging directory."""

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self._files.url, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.abandon()
        if not self.use_collectives:
            raise ValueError("a step is saved by all ranks together, with use_collectives=True")
        if self._is_coordinator:
            self._refuse_if_there(self._files.list())
        staging = tempfile.mkdtemp(prefix="torch_ckpt-", dir=self._staging_dir)
        # The name is that of titles and messages.
        self.path = Path(staging, os.path.basename(self._files.url))
        try:
            plan = super().prepare_local_plan(plan)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        self._upload = _Upload(self._files, staging, self._is_coordinator)
        return plan

    def write_values(
        self, prefix: str, names: list[str], values: list[Any], write: RankWrite | None = None
    ) -> Written:
        """As that of the base class; returns when all has been copied.

        Raises:
            OSError: a file could not be written or copied; what this call has made is removed.
        """
        assert self._upload is not None
        wanted = sum(value.nbytes for value in values)
        require_staging_room(str(self.path), wanted, self._files.url)
        written = super().write_values(prefix, names, values, write)
        files = set(written.files.names)
        try:
            self._files.for_each(self._copy, ((file,) for file in sorted(files)))
        except BaseException:
            self._upload.remove(files)
            raise
        return written

    def undo(self, written: Written) -> None:
        if self._upload is not None:
            self._upload.remove(set(written.files.names))

    def bytes_moved(self) -> int:
        return super().bytes_moved() + self._uploaded_bytes

    def commit(self, data: bytes, files: set[str]) -> None:
        """Makes the step complete.

        Raises:
            NotCommitted: the files of this save have been removed. A step that was to be replaced
                is there as before.
            FileExistsError: meanwhile somebody else has completed it.
            CheckpointError: whether it is complete is not known: the request for it has failed, and
                so have those that were to undo it.
        """
        try:
            self._commit(data, files)
        finally:
            # dcp.save says nothing to its writer after this.
            self.abandon()

    def abandon(self) -> None:
        super().abandon()
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.end()

    # --- private ---------------------------------------------------------------------------------

    def _commit(self, data: bytes, files: set[str]) -> None:
        upload = self._upload
        assert upload is not None
        listing = self._files.list()
        self._refuse_if_there(listing)
        missing = sorted(files - listing.keys())
        if missing:
            raise NotCommitted(
                f"{self._files.url}: files that this save has written are gone, as {missing[0]}; "
                "look whether another job saves or sweeps there"
            )
        total = sum(listing[file].bytes for file in files) + len(data)
        said = {"step": self._step, "saved_at": time.time(), "bytes": total, **self._marker()}
        document = encoded_marker(said)
        former = self._former(listing)
        upload.committing = True
        try:
            self._files.remove({MARKER_NAME} & listing.keys())
            # After the marker, or what is left of a deletion would be a step.
            self._files.remove({DELETED_NAME} & listing.keys())
            self._files.write(METADATA_NAME, data)
            self._uploaded_bytes += len(data)
            self._files.write(MARKER_NAME, document)
        except BaseException as error:
            self._not_committed(files, former)
            if isinstance(error, OSError):
                raise NotCommitted(str(error), error.errno or 0) from error
            raise
        upload.remove(listing.keys() - files - {METADATA_NAME, MARKER_NAME, PINNED_NAME})

    def _refuse_if_there(self, listing: Iterable[str]) -> None:
        if not self._may_replace and MARKER_NAME in listing and DELETED_NAME not in listing:
            raise FileExistsError(
                EEXIST,
                "the step is there and complete, and is not one that training has come back to: "
                "restore() first, or delete it, or use another root",
                self._files.url,
            )

    def _copy(self, file: str) -> None:
        def count(moved: int) -> None:
            self._uploaded_bytes += moved

        source = Path(self.path, file)
        self._files.upload(str(source), file, count)
        # Also a sign of life where the file system tells nothing in between.
        count(1)
        source.unlink()

    def _former(self, listing: Iterable[str]) -> dict[str, bytes]:
        """The metadata and the marker, in this order, of a complete step; nothing of another."""
        names = (METADATA_NAME, MARKER_NAME)
        if DELETED_NAME in listing or not set(names) <= set(listing):
            return {}
        return {name: self._files.read(name) for name in names}

    def _not_committed(self, files: set[str], former: dict[str, bytes]) -> None:
        """Undoes a commit whose last request may have been carried out all the same."""
        try:
            for name, data in former.items():
                self._files.write(name, data)
            if not former:
                self._files.remove([MARKER_NAME])
        except OSError as error:
            raise CheckpointError(
                f"{self._files.url}: a request of the commit has failed, and so has undoing it "
                f"({error}): whether the step is complete, and of which save, is not known; look "
                f"whether there is a {MARKER_NAME}, and save again if not"
            ) from error
        assert self._upload is not None
        self._upload.remove(files if former else {METADATA_NAME, *files})


class _Upload:
    """What one save has in the staging directory of this rank, and what it puts into the step.

    One that is dropped, as dcp.save drops its writer, leaves neither staged files nor a busy step.

    Attributes:
        tag: in the names of its data files.
        committing: from here on only the commit itself removes files.
    """

    def __init__(self, files: RemoteFiles, staging: str, is_coordinator: bool) -> None:
        self.tag = f"{uuid.uuid4().hex[:8]}_"
        self.committing = False
        self._files = files
        self._is_coordinator = is_coordinator
        busy.begin(files.url)
        self._let_go = weakref.finalize(self, _let_go, staging, files.url, os.getpid())

    def remove(self, names: Iterable[str]) -> None:
        """Removes files of the step that nothing needs; logs where that fails."""
        try:
            self._files.remove(names)
        except OSError as error:
            LOGGER.warning("unused files are left in %s: %s", self._files.url, error)

    def end(self) -> None:
        """Leaves nothing in the staging directory; of a save that has failed, nowhere."""
        try:
            if self._is_coordinator and not self.committing:
                # Those of a rank that died, too.
                self.remove([name for name in self._files.list() if f"_{self.tag}" in name])
        except OSError as error:
            LOGGER.warning("unused files may be left in %s: %s", self._files.url, error)
        finally:
            self._let_go()


def _let_go(staging: str, url: str, process: int) -> None:
    # The staging directory of a fork is its parent's.
    if os.getpid() == process:
        shutil.rmtree(staging, ignore_errors=True)
        busy.end(url)
