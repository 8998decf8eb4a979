"""Targets of saves in object stores.

1. :meth:`ObjectTarget.open`: every rank opens the store. The coordinator reads the version of
   ``.metadata``, if there is one.
2. The coordinator chooses a tag that no other save uses. The engine uploads the files of each rank
   under names with the tag.
3. :meth:`ObjectTarget.publish`: the coordinator stores ``.metadata``, on the condition that the
   object has not changed since step 1. The checkpoint is then committed. Then the coordinator
   deletes the objects that only the previous ``.metadata`` names.
4. If the save fails before the request of step 3, each rank deletes the objects that it has
   written. Then the coordinator deletes all objects with the tag.
5. If the outcome of step 3 is unknown, no object is deleted, because the request may still take
   effect.

Two saves at the same time have different names for their files, and one of them loses in step 3.
"""

from __future__ import annotations

import errno
import os
import uuid
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch_ckpt import _C, _core
from torch_ckpt._base.log import warn
from torch_ckpt._base.system import is_url
from torch_ckpt.checkpoint.directory import DirectoryIdentity
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES, decode_index
from torch_ckpt.errors import CheckpointError, DurabilityUncertain, NotCommitted
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import (
    CheckpointTarget,
    DirectoryTarget,
    Opened,
    require_one_target,
)
from torch_ckpt.saving.write import Written
from torch_ckpt.stores import Changed, ObjectStore, Version, open_store
from torch_ckpt.stores.folder import CLEANUP_SECONDS, ObjectFolder
from torch_ckpt.stores.store_errors import unknown_outcome


class ObjectTarget(CheckpointTarget):
    """A checkpoint in an object store; see the module's docstring.

    Args:
        store: the objects of the checkpoint.
        options: the options of the save.
        own_rank: the rank, if it saves independently of other ranks and has its own metadata; None
            if the ranks save together.
    """

    def __init__(
        self, store: ObjectStore, options: WriteOptions, own_rank: int | None = None
    ) -> None:
        super().__init__(store.root.url, options)
        self._store = store
        self._metadata = _core.metadata_name(own_rank)
        self._rank = 0
        self._folder: ObjectFolder | None = None
        # The version of the metadata that this save replaces, and the version that it has stored.
        self._replaced: Version | None = None
        self._stored: Version | None = None
        # On the coordinator, from the first name until the commit.
        self._tag: str | None = None
        self._remove_all: weakref.finalize[Any, Any] | None = None

    @property
    def directory(self) -> ObjectFolder:
        """The objects of the checkpoint."""
        if self._folder is None:
            self._folder = ObjectFolder(self._store)
        return self._folder

    @property
    def tag(self) -> str:
        """The part of the names of this save's files that no other save uses, on the
        coordinator."""
        if self._tag is None:
            self._tag = f"{uuid.uuid4().hex[:8]}_"
            # dcp.save drops a writer whose save has failed.
            self._remove_all = weakref.finalize(
                self, _remove_tagged, self._store, self._tag, os.getpid()
            )
        return self._tag

    def open(self, rank: int, ranks: int) -> Opened:
        """Opens the store.

        Raises:
            RuntimeError: there is a checkpoint that this save must not replace.
            OSError: the store cannot be read.
        """
        self.discard()
        self._rank, self._replaced = rank, None
        if rank == 0:
            found = self._store.find(self._metadata)
            self._replaced = None if found is None else found.version
            self.require_replaceable()
        return Opened(DirectoryIdentity.of(self.directory), self.path)

    def require_replaceable(self) -> None:
        """Checks, on the coordinator, that this save may replace the contents of the URL."""
        if not self.options.overwrite and self._replaced is not None:
            raise RuntimeError(
                f"Checkpoint already exists in {self.path}; pass overwrite=True, in WriteOptions "
                "or to FileSystemWriter, to replace it"
            )

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        require_one_target(opened)
        return [self.tag.encode()] * len(opened)

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[ObjectFolder, str, _C.SaveSources]:
        sources = state.sources(items, bool(self.options.separation_hint))
        return self.directory, f"__{self._rank}_{layout.decode()}", sources

    def open_for_copy(self, layout: bytes) -> ObjectFolder:
        return self.directory

    def undo(self, written: Written) -> None:
        self.directory.remove_written()

    def publish(self, data: _core.EncodedMetadata, files: Collection[str]) -> None:
        """Stores the metadata, then deletes the objects of the checkpoint that was replaced.

        Args:
            data: the contents of ``.metadata``.
            files: names of the data files that the metadata names.

        Raises:
            NotCommitted: nothing was published, and the previous checkpoint is intact.
            DurabilityUncertain: the checkpoint might be visible already, or later. No object was
                deleted.
        """
        with self.busy():
            obsolete = self.commit_metadata(bytes(data), files)
            self.keep_all()
            try:
                self._store.delete(sorted(obsolete))
            except OSError as error:
                warn(f"{self.path}: objects of the replaced checkpoint remain: {error}")

    def commit_metadata(self, data: bytes, files: Collection[str]) -> Collection[str]:
        """Makes the checkpoint visible. Returns the names of the objects to delete afterwards."""
        replaced: set[str] = set()
        url = self._store.url_of(self._metadata)
        try:
            former = self.read_replaced()
            replaced = set() if former is None else set(decode_index(former, url).files())
        except Changed:
            pass  # The exchange below finds it, too.
        except (OSError, CheckpointError) as error:
            warn(f"{url}: the objects of the replaced checkpoint remain: {error}")
        self.store_metadata(data)
        return replaced.difference(files)

    def read_replaced(self) -> bytes | None:
        """Returns the metadata that this save replaces; None if there is none.

        Raises:
            OSError: it cannot be read, or has changed since the save began.
        """
        if self._replaced is None:
            return None
        data, version = self._store.read(self._metadata, MAX_METADATA_BYTES)
        if not version.agrees(self._replaced):
            raise Changed(errno.ESTALE, "the object was replaced", self.path)
        return data

    def store_metadata(self, data: bytes) -> None:
        """Stores the metadata on the condition that it has not changed since the save began.

        Raises: see :meth:`publish`.
        """
        try:
            self._stored = self._store.exchange(self._metadata, data, self._replaced)
        except OSError as error:
            if isinstance(error, (FileExistsError, Changed)):
                raise NotCommitted(
                    f"{self.path}: another save has stored a checkpoint here since this save "
                    "began; make sure that only one job saves to this URL"
                ) from None
            number = error.errno or errno.EIO
            if not unknown_outcome(error):
                raise NotCommitted(str(error), number) from None
            self.keep_all()
            raise DurabilityUncertain(str(error), number) from None

    def keep_all(self) -> None:
        """Makes the end of this save delete nothing. A later save gets another tag."""
        if self._remove_all is not None:
            self._remove_all.detach()
        self._tag = self._remove_all = None

    def discard(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()
        if self._remove_all is not None:
            self._remove_all()
        self.keep_all()


def checkpoint_target(
    path: str | os.PathLike[str],
    options: WriteOptions,
    own_rank: int | None = None,
    ends_earlier: bool = True,
) -> DirectoryTarget | ObjectTarget:
    """Returns the target of a checkpoint in a directory or beneath a URL.

    Args:
        own_rank, ends_earlier: see :class:`DirectoryTarget`.
    """
    if is_url(path):
        store = open_store(os.fspath(path), options.storage_options)
        return ObjectTarget(store, options, own_rank)
    return DirectoryTarget(path, options, own_rank, ends_earlier)


def _remove_tagged(store: ObjectStore, tag: str, pid: int) -> None:
    """Deletes the objects of all ranks of a save that has failed. Warns if that fails."""
    if os.getpid() != pid:  # a forked child; the parent may continue the save
        return
    brief = store.within(CLEANUP_SECONDS)
    try:
        brief.delete([entry.name for entry in brief.list() if f"_{tag}" in entry.name])
    except OSError as error:
        warn(f"{store.root.url}: objects of a failed save may remain: {error}")
