"""Targets of saves in object stores.

1. :meth:`ObjectTarget.open`: every rank opens the store. The coordinator reads the version of
   ``.metadata``, if there is one, and chooses a tag.
2. The engine uploads the files of each rank under names with the tag, which no other save uses.
3. :meth:`ObjectTarget.commit`: the coordinator stores ``.metadata``, on the condition that the
   object has not changed since step 1. The checkpoint is then committed. Then it deletes the
   objects that only the previous ``.metadata`` names.
4. If the save fails before step 3, every rank deletes its own objects.

Two saves at the same time have different names for their files, and one of them loses in step 3.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import StorageMeta

from torch_ckpt import _C
from torch_ckpt._base.log import warn
from torch_ckpt.checkpoint.directory import DirectoryIdentity
from torch_ckpt.checkpoint.index import MAX_METADATA_BYTES, METADATA_NAME, decode_index
from torch_ckpt.errors import CheckpointError, DurabilityUncertain, NotCommitted
from torch_ckpt.options import WriteOptions
from torch_ckpt.saving.agreed_plan import AgreedPlan
from torch_ckpt.saving.save_state import SaveState
from torch_ckpt.saving.target import Opened, Target, require_one_target
from torch_ckpt.saving.write import Written
from torch_ckpt.stores import Changed, Version, open_store
from torch_ckpt.stores.folder import ObjectFolder


class ObjectTarget(Target):
    """A checkpoint in an object store; see the module's docstring.

    Args:
        path: URL of the checkpoint.
        options: the options of the save.
    """

    def __init__(self, path: str, options: WriteOptions) -> None:
        store = open_store(path, options.storage_options)
        super().__init__(store.root.url, options)
        self._store = store
        self._folder: ObjectFolder | None = None
        self._rank = 0
        # The version of the metadata that this save replaces.
        self._replaced: Version | None = None

    def open(self, rank: int, ranks: int) -> Opened:
        """Opens the store.

        Raises:
            RuntimeError: there is a checkpoint that this save must not replace.
            OSError: the store cannot be read.
        """
        self.discard()
        self._rank = rank
        self._folder = ObjectFolder(self._store)
        self._replaced = self._version_stored() if rank == 0 else None
        if self._replaced is not None and not self.options.overwrite:
            raise RuntimeError(
                f"Checkpoint already exists in {self.path}; pass overwrite=True, in WriteOptions "
                "or to FileSystemWriter, to replace it"
            )
        return Opened(DirectoryIdentity.of(self._folder), self.path)

    def lay_out(self, plan: AgreedPlan, opened: Sequence[Opened]) -> Sequence[bytes]:
        require_one_target(opened)
        return [uuid.uuid4().hex[:8].encode()] * len(opened)

    def files(
        self, state: SaveState, items: bytes, layout: bytes
    ) -> tuple[ObjectFolder, str, _C.SaveSources]:
        assert self._folder is not None
        sources = state.sources(items, bool(self.options.separation_hint))
        return self._folder, f"__{self._rank}_{layout.decode()}_", sources

    def undo(self, written: Written) -> None:
        if self._folder is not None:
            self._folder.remove_written()

    def commit(self, plan: AgreedPlan, written: list[Written]) -> bytes:
        meta = StorageMeta(checkpoint_id=self.path, save_id=str(uuid.uuid4()))
        data = plan.encode(written, meta)
        files = {name for of_rank in written for name in of_rank.files.names}
        try:
            with self.busy():
                replaced = self._files_of_replaced()
                self._store_metadata(bytes(data))
        except (FileExistsError, Changed):
            raise NotCommitted(
                f"{self.path}: another save has stored a checkpoint here since this save began; "
                "make sure that only one job saves to this URL"
            ) from None
        except TimeoutError as error:
            self._folder = None  # the checkpoint may be visible, so its files must stay
            raise DurabilityUncertain(str(error), errno.ETIMEDOUT) from None
        self._folder = None
        with self.busy():
            self._remove_replaced(replaced - files)
        return data.seal

    def discard(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove_written()

    def _store_metadata(self, data: bytes) -> None:
        try:
            if self._replaced is None:
                self._store.put_if_absent(METADATA_NAME, data)
            else:
                self._store.swap(METADATA_NAME, data, self._replaced)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            # The store has no conditions: another save may store its metadata between these calls.
            if self._version_stored() != self._replaced:
                raise Changed(errno.ESTALE, "the object was replaced") from None
            self._store.put(METADATA_NAME, iter([memoryview(data)]), len(data))

    def _version_stored(self) -> Version | None:
        """Returns the version of the metadata; None if there is none."""
        try:
            return self._store.head(METADATA_NAME).version
        except FileNotFoundError:
            return None

    def _files_of_replaced(self) -> set[str]:
        """Returns the names of the objects of the checkpoint that this save replaces."""
        if self._replaced is None:
            return set()
        url = self._store.url_of(METADATA_NAME)
        try:
            data, version = self._store.read(METADATA_NAME, MAX_METADATA_BYTES)
            return set(decode_index(data, url).files()) if version.agrees(self._replaced) else set()
        except (OSError, CheckpointError) as error:
            warn(f"{url}: the objects of the replaced checkpoint remain: {error}")
            return set()

    def _remove_replaced(self, names: set[str]) -> None:
        try:
            self._store.delete(sorted(names))
        except OSError as error:
            warn(f"{self.path}: objects of the replaced checkpoint remain: {error}")
